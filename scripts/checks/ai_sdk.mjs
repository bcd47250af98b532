// Talks to a running server with Vercel's AI SDK: npm install ai @ai-sdk/openai @ai-sdk/anthropic zod
//
//     node scripts/checks/ai_sdk.mjs FOLDER http://127.0.0.1:8000 API_KEY MODEL
//
// FOLDER is where it was installed. The model's template must know tools, and the server keep responses
// (--responses-memory 100): what the client's provider for OpenAI sends by default refers to earlier items.

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [folder, url, key, model] = process.argv.slice(2);
const require = createRequire(`${folder}/`);
const load = (name) => import(pathToFileURL(require.resolve(name)).href);
const { generateText, streamText, tool, isStepCount, stepCountIs, Output } = await load("ai");
const { createOpenAI } = await load("@ai-sdk/openai");
const { createAnthropic } = await load("@ai-sdk/anthropic");
const { z } = await load("zod");

const settings = { temperature: 0, maxOutputTokens: 120, maxRetries: 0 };
const paint = z.object({ colour: z.enum(["red", "green", "blue"]), coats: z.number().int().min(1).max(3) }).strict();
const place = z.object({ city: z.enum(["Rome", "Oslo"]) }).strict();

async function check(name, language) {
  const hello = { model: language, prompt: "Hello!", ...settings };
  const whole = await generateText(hello);
  assert.ok(whole.text && whole.usage.outputTokens > 0, name);
  const stream = streamText(hello);
  let text = "";
  for await (const part of stream.textStream) text += part;
  assert.equal(text, whole.text, name);
  assert.equal(await stream.finishReason, whole.finishReason, name);

  const painted = await generateText({
    ...hello,
    prompt: "Paint it",
    output: Output.object({ schema: paint }),
  });
  paint.parse(painted.output);

  // The client calls the tool and goes on by itself.
  const asked = [];
  const weather = tool({
    description: "Tells the weather",
    inputSchema: place,
    execute: async (input) => asked.push(input) && "sunny",
  });
  const steps = await generateText({
    model: language,
    prompt: "The weather in Rome?",
    tools: { weather },
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? { type: "tool", toolName: "weather" } : "none" }),
    stopWhen: (isStepCount ?? stepCountIs)(2),
    ...settings,
  });
  assert.equal(steps.steps.length, 2, name);
  assert.ok(asked.length >= 1, name);
  asked.forEach((input) => place.parse(input));
  console.log(`ok: ${name}`);
}

const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: key });
const anthropic = createAnthropic({ baseURL: `${url}/v1`, apiKey: key });
await check("responses", openai(model));
await check("chat", openai.chat(model));
await check("messages", anthropic(model));
