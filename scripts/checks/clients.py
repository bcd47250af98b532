#!/usr/bin/env python3
"""Talks to a running server with clients that others wrote, each if it is installed.

    pip install anthropic    # or langchain-openai, langchain-anthropic, litellm, instructor,
                             # "pydantic-ai-slim[openai,anthropic]", ollama; best in an environment each
    python scripts/checks/clients.py http://127.0.0.1:8000 API_KEY [CLIENT...]

The model's template must know tools; for the built-in model, start the server with --chat-template
tests/fixtures/tok/chat/tools.jinja, and --responses-memory 100. Says of each client "ok", or "skipped" if it is not installed. OpenAI's own client
has a script of its own, openai_client.py.
"""

import asyncio
import importlib
import os
import sys
from typing import Literal

import pydantic
from harness import expect, request


class Weather(pydantic.BaseModel):
    """Tells the weather of a city."""

    model_config = pydantic.ConfigDict(extra="forbid")
    city: Literal["Rome", "Oslo"]
    days: Literal[1, 2, 3]


class Paint(pydantic.BaseModel):
    """What a structured answer is read into."""

    model_config = pydantic.ConfigDict(extra="forbid")
    colour: Literal["red", "green", "blue"]
    coats: Literal[1, 2, 3]


QUESTION = "The weather in Rome?"


def check_anthropic(anthropic, url, key, model):
    client = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)
    messages = [{"role": "user", "content": "Hello!"}]
    # Newer clients have no parameters for sampling.
    greedy = dict(extra_body={"temperature": 0})
    asked = dict(model=model, max_tokens=16, messages=messages, system="You are brief.", **greedy)
    whole = client.messages.create(**asked)
    (text,) = whole.content
    assert whole.role == "assistant" and text.type == "text" and text.text, whole
    usage = whole.usage
    count = client.messages.count_tokens(model=model, messages=messages, system="You are brief.").input_tokens
    assert count == usage.input_tokens + usage.cache_read_input_tokens, (count, usage)
    with client.messages.stream(**asked) as stream:
        parts = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(parts) == text.text == final.content[0].text, (parts, whole)
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, usage.output_tokens), final
    events = [event.type for event in client.messages.create(stream=True, **asked)]
    assert events[0] == "message_start" and events[-1] == "message_stop", events
    assert client.messages.create(**{**asked, "max_tokens": 1}).stop_reason == "max_tokens"
    stopped = client.messages.create(stop_sequences=[text.text[2:5]], **asked)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", text.text[2:5]), stopped

    # The answer goes on with a last turn of the assistant.
    begun = [*messages, {"role": "assistant", "content": text.text[:2]}]
    rest = client.messages.create(**{**asked, "messages": begun})
    with client.messages.stream(**{**asked, "messages": begun}) as stream:
        parts = list(stream.text_stream)
    assert rest.content[0].text == "".join(parts) and rest.content[0].text != text.text, (parts, rest)

    # A tool is called, whole and streamed, and its result goes back with what came.
    tool = {"name": "weather", "description": "Tells it", "input_schema": Weather.model_json_schema()}
    asked = dict(model=model, max_tokens=120, tools=[tool], **greedy)
    messages = [{"role": "user", "content": QUESTION}]
    named = {"type": "tool", "name": "weather"}
    called = client.messages.create(messages=messages, tool_choice=named, **asked)
    (call,) = called.content
    assert called.stop_reason == "tool_use" and call.name == "weather", called
    Weather.model_validate(call.input)
    with client.messages.stream(messages=messages, tool_choice={"type": "any"}, **asked) as stream:
        (streamed,) = [block for block in stream.get_final_message().content if block.type == "tool_use"][:1]
    Weather.model_validate(streamed.input)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    messages += [{"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(messages=messages, **asked).stop_reason in ("end_turn", "max_tokens", "tool_use")
    parsed = client.messages.parse(model=model, max_tokens=200, messages=messages[:1], output_format=Paint)
    assert isinstance(parsed.parsed_output, Paint), parsed

    # Thinking is accepted whether or not the template knows it.
    thinking = {"type": "enabled", "budget_tokens": 1024}
    last = dict(model=model, max_tokens=64, messages=messages[:1], **greedy)
    assert client.messages.create(**last, thinking=thinking).content

    one = dict(model=model, max_tokens=1)
    image = {"type": "image", "source": {"type": "url", "url": "http://169.254.169.254/"}}
    shown = [{"role": "user", "content": [image]}]
    bad = expect(anthropic.BadRequestError, lambda: client.messages.create(messages=shown, **one))
    assert bad.body["error"]["type"] == "invalid_request_error" and bad.request_id, bad
    expect(anthropic.NotFoundError, lambda: client.messages.create(**{**one, "model": "claude", "messages": messages[:1]}))
    wrong = client.with_options(api_key="wrong")
    expect(anthropic.AuthenticationError, lambda: wrong.messages.create(messages=messages[:1], **one))
    bearer = anthropic.Anthropic(base_url=url, auth_token=key, max_retries=0)
    # A drawn answer may be empty.
    assert bearer.messages.create(**last).content


def check_chat_model(llm):
    """What LangChain asks of every chat model: answers, streams, tools and structured answers."""
    from langchain_core.messages import HumanMessage, ToolMessage

    assert llm.invoke("Hello!").text
    assert "".join(chunk.text for chunk in llm.stream("Hello!"))
    asked = [HumanMessage(QUESTION)]
    called = llm.bind_tools([Weather], tool_choice="Weather").invoke(asked)
    (call,) = called.tool_calls
    Weather.model_validate(call["args"])
    joined = None
    for chunk in llm.bind_tools([Weather], tool_choice="Weather").stream(asked):
        joined = chunk if joined is None else joined + chunk
    Weather.model_validate(joined.tool_calls[0]["args"])
    result = ToolMessage("sunny", tool_call_id=call["id"])
    assert llm.bind_tools([Weather]).invoke([*asked, called, result]).usage_metadata["output_tokens"] > 0
    assert isinstance(llm.with_structured_output(Paint, method="json_schema").invoke("Paint it"), Paint)


def check_langchain_openai(langchain_openai, url, key, model):
    for uses_responses in (False, True):
        check_chat_model(
            langchain_openai.ChatOpenAI(
                base_url=url + "/v1",
                api_key=key,
                model=model,
                max_tokens=120,
                temperature=0,
                max_retries=0,
                use_responses_api=uses_responses,
            )
        )


def check_langchain_anthropic(langchain_anthropic, url, key, model):
    check_chat_model(
        langchain_anthropic.ChatAnthropic(
            base_url=url, api_key=key, model=model, max_tokens=120, temperature=0, max_retries=0
        )
    )


def check_litellm(litellm, url, key, model):
    tool = {
        "type": "function",
        "function": {"name": "Weather", "description": "Tells it", "parameters": Weather.model_json_schema()},
    }
    named = {"type": "function", "function": {"name": "Weather"}}
    places = {
        f"hosted_vllm/{model}": url + "/v1",
        f"openai/{model}": url + "/v1",
        f"anthropic/{model}": url,
    }
    for name, base in places.items():
        asked = dict(model=name, api_base=base, api_key=key, max_tokens=120, temperature=0, num_retries=0)
        hello = [{"role": "user", "content": "Hello!"}]
        whole = litellm.completion(messages=hello, **asked)
        chunks = litellm.completion(messages=hello, stream=True, **asked)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == whole.choices[0].message.content, (name, text, whole)
        question = [{"role": "user", "content": QUESTION}]
        called = litellm.completion(messages=question, tools=[tool], tool_choice=named, **asked)
        (call,) = called.choices[0].message.tool_calls
        Weather.model_validate_json(call.function.arguments)
        result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        assert litellm.completion(messages=[*question, called.choices[0].message, result], tools=[tool], **asked).choices
    response = litellm.responses(
        model=f"openai/{model}", input="Hello!", api_base=url + "/v1", api_key=key, max_output_tokens=16
    )
    assert response.output[0].content[0].text, response


def check_instructor(instructor, url, key, model):
    import openai

    client = openai.OpenAI(base_url=url + "/v1", api_key=key, max_retries=0)
    modes = [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.RESPONSES_TOOLS]
    for mode in modes:
        asking = instructor.from_openai(client, mode=mode)
        messages = [{"role": "user", "content": "Paint it"}]
        if mode == instructor.Mode.RESPONSES_TOOLS:
            found = asking.responses.create(model=model, input=messages, response_model=Paint, max_retries=0)
        else:
            found = asking.chat.completions.create(
                model=model, messages=messages, response_model=Paint, max_tokens=120, max_retries=0
            )
        assert isinstance(found, Paint), (mode, found)


def check_pydantic_ai(pydantic_ai, url, key, model):
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    openai = OpenAIProvider(base_url=url + "/v1", api_key=key)
    models = [
        OpenAIChatModel(model, provider=openai),
        OpenAIResponsesModel(model, provider=openai),
        AnthropicModel(model, provider=AnthropicProvider(base_url=url, api_key=key)),
    ]
    for found in models:
        settings = {"max_tokens": 120, "temperature": 0}
        agent = pydantic_ai.Agent(found, model_settings=settings, retries=0)
        assert agent.run_sync("Hello!").output, found
        painting = pydantic_ai.Agent(found, output_type=Paint, model_settings=settings, retries=0)
        assert isinstance(painting.run_sync("Paint it").output, Paint), found

        async def stream(agent=agent):
            async with agent.run_stream("Hello!") as result:
                return [text async for text in result.stream_text()]

        assert asyncio.run(stream()), found


def check_ollama(ollama, url, key, model):
    client = ollama.Client(host=url, headers={"Authorization": f"Bearer {key}"})
    (listed, *_) = client.list().models
    assert listed.model == model and listed.size > 0 and len(listed.digest) == 64, listed
    shown = client.show(model)
    assert "tools" in shown.capabilities and shown.modelinfo["general.parameter_count"] > 0, shown
    assert client.ps().models[0].name == model
    messages = [{"role": "user", "content": "Hello!"}]
    greedy = {"temperature": 0, "num_predict": 16}
    whole = client.chat(model=model, messages=messages, options=greedy, keep_alive="5m")
    assert whole.message.content and whole.done and whole.eval_count > 0 and whole.eval_duration > 0, whole
    parts = list(client.chat(model=model, messages=messages, options=greedy, stream=True))
    assert "".join(part.message.content for part in parts) == whole.message.content, parts
    assert parts[-1].done_reason == whole.done_reason, parts[-1]
    options = {**greedy, "num_predict": 200}
    paint = client.chat(model=model, messages=messages, options=options, format=Paint.model_json_schema())
    Paint.model_validate_json(paint.message.content)
    generated = client.generate(model=model + ":latest", prompt="Once upon a time", raw=True, options=greedy)
    parts = list(client.generate(model=model, prompt="Once upon a time", raw=True, options=greedy, stream=True))
    assert "".join(part.response for part in parts) == generated.response != "", parts

    def get_weather(city: str, days: int) -> str:
        """Tells the weather.

        Args:
            city: Which city
            days: For how many days
        """
        return f"{city}, {days}: sunny"

    # What a tool answered goes back.
    call = {"function": {"name": "get_weather", "arguments": {"city": "Rome", "days": 1}}}
    called = [*messages, {"role": "assistant", "content": "", "tool_calls": [call]}]
    called.append({"role": "tool", "content": "sunny", "tool_name": "get_weather"})
    answer = client.chat(model=model, messages=called, tools=[get_weather], options=greedy)
    assert answer.done, answer
    assert expect(ollama.ResponseError, lambda: client.chat(model="other", messages=messages)).status_code == 404
    image = [{"role": "user", "content": "What is it?", "images": [b"\x89PNG"]}]
    assert "text only" in str(expect(ollama.ResponseError, lambda: client.chat(model=model, messages=image)))
    assert "generate text" in str(expect(ollama.ResponseError, lambda: client.embed(model=model, input="a")))

    async def together():
        client = ollama.AsyncClient(host=url, headers={"Authorization": f"Bearer {key}"})
        stream = await client.chat(model=model, messages=messages, options=greedy, stream=True)
        return "".join([part.message.content async for part in stream])

    assert asyncio.run(together()) == whole.message.content


CLIENTS = {
    "anthropic": check_anthropic,
    "langchain_openai": check_langchain_openai,
    "langchain_anthropic": check_langchain_anthropic,
    "litellm": check_litellm,
    "instructor": check_instructor,
    "pydantic_ai": check_pydantic_ai,
    "ollama": check_ollama,
}


def main(url, key, *names):
    # Nothing is to be sent to anybody else.
    os.environ.update(LITELLM_LOCAL_MODEL_COST_MAP="True", LANGSMITH_TRACING="false", DO_NOT_TRACK="1")
    model = request(url + "/v1/models", key=key)["data"][0]["id"]
    for name in names or CLIENTS:
        try:
            package = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
            print(f"skipped: {name} is not installed")
            continue
        CLIENTS[name](package, url, key, model)
        print(f"ok: {name} {getattr(package, '__version__', '')} and {model}")


if __name__ == "__main__":
    main(*sys.argv[1:])
