// The model names conversations: requested once, after the first answer, when no other request waits.
const Naming = (() => {
  const WISH = "Give our conversation a name of at most five words. Answer with the name only.";
  const MOST = 60;

  /** The name in an answer; empty if it has none. */
  function read(answer) {
    const choice = answer?.choices?.[0];
    const text = choice?.message?.content;
    if (choice?.finish_reason !== "stop" || !Kept.isText(text)) return "";
    const name = text.trim().replace(/^["“«*#\s]+|["”»*.\s]+$/g, "");
    return name.length <= MOST && !name.includes("\n") ? name : "";
  }

  /** Names a conversation after its first answer, unless it has a name or naming is off. */
  async function name(conversation, model) {
    const [question, answer] = conversation.messages;
    const isFirst = conversation.messages.length === 2 && question.content && answer.content && !answer.end && !answer.failure;
    if (Settings.values.names === false || conversation.title || !isFirst || !Library.all.has(conversation.id)) return;
    const turns = [...conversation.turns(), { role: "user", content: WISH }];
    const body = JSON.stringify({ messages: turns, max_tokens: 24, temperature: 0, priority: 1, reasoning_effort: "none", ...model });
    try {
      const headers = { "content-type": "application/json" };
      const response = await Server.request("v1/chat/completions", { method: "POST", headers, body });
      const found = read(await response.json());
      // It may have been named or deleted meanwhile.
      if (!found || conversation.title || !Library.all.has(conversation.id)) return;
      conversation.title = found;
      Library.save(conversation);
      self.onName();
    } catch {
      // Its first words are used as its name.
    }
  }

  const self = {
    name,
    /** Called when a conversation got a name. */
    onName: () => {},
  };
  return self;
})();
