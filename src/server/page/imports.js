// Conversations in files: ours, the messages of a request, and the exports of ChatGPT and Open WebUI.
const Imports = (() => {
  const { isText } = Kept;

  /** A tree of messages with links to their parents: `mapping` in ChatGPT's exports, `messages` in Open WebUI's. */
  function fromTree(nodes, { id, title, seconds, current, read }) {
    const parentOf = (node) => {
      const parent = node?.parent ?? node?.parentId;
      return isText(parent) && Object.hasOwn(nodes, parent) ? parent : null;
    };
    const children = new Map();
    for (const [name, node] of Object.entries(nodes)) {
      const parent = parentOf(node);
      if (!children.has(parent)) children.set(parent, []);
      children.get(parent).push(name);
    }
    const shown = new Set();
    for (let name = isText(current) && Object.hasOwn(nodes, current) ? current : null; name && !shown.has(name); ) {
      shown.add(name);
      name = parentOf(nodes[name]);
    }
    // Parents first. Entries that are not messages are replaced by their children.
    let [system, leaf] = [null, null];
    const messages = [];
    const waiting = [[null, null]];
    while (waiting.length > 0) {
      const [name, above] = waiting.pop();
      const message = name === null ? null : read(nodes[name]);
      const isTurn = ["user", "assistant"].includes(message?.role);
      if (message?.role === "system") system ??= message.content;
      if (isTurn) messages.push({ ...message, id: name, parent: above });
      if (isTurn && shown.has(name)) leaf = name;
      for (const child of (children.get(name) ?? []).toReversed()) waiting.push([child, isTurn ? name : above]);
    }
    // The same file gives the same ids again.
    const hex = isText(id) ? id.replaceAll("-", "").slice(0, 24) : "";
    return { id: hex, title, system, updated: seconds * 1e3, messages, leaf };
  }

  /** A conversation of ChatGPT's `conversations.json`. */
  function fromChatGpt(value) {
    const read = (node) => {
      const message = node?.message;
      const parts = message?.content?.parts;
      const text = Array.isArray(parts) ? parts.filter(isText).join("\n\n") : message?.content?.text;
      if (!isText(text) || text === "" || message.metadata?.is_visually_hidden_from_conversation) return null;
      // Messages for tools are not for the reader.
      if (isText(message.recipient) && message.recipient !== "all") return null;
      return { role: message.author?.role, content: text };
    };
    const { conversation_id: id = value.id, title, update_time: seconds, current_node: current } = value;
    return fromTree(value.mapping, { id, title, seconds, current, read });
  }

  /** A chat of Open WebUI. */
  function fromOpenWebUi(value) {
    const { chat, id, updated_at: seconds } = value;
    const read = (node) => (isText(node?.content) ? { role: node.role, content: node.content } : null);
    const options = { id, title: value.title ?? chat.title, seconds, current: chat.history.currentId, read };
    const found = fromTree(chat.history.messages, options);
    return { ...found, system: chat.system || found.system };
  }

  const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

  function fromAny(value) {
    if (isObject(value?.mapping)) return fromChatGpt(value);
    if (isObject(value?.chat?.history?.messages)) return fromOpenWebUi(value);
    return value;
  }

  /** The conversations in a file. Throws an error that describes what is wrong with it. */
  function parse(name, text) {
    if (/^\s*[[{]/.test(text)) {
      let value;
      try {
        value = JSON.parse(text);
      } catch (error) {
        throw new Error(`${name} is not valid JSON: ${error.message}`);
      }
      const isList = Array.isArray(value);
      const values = isList && value.some((each) => "role" in Object(each)) ? [{ messages: value }]
        : isList ? value : Array.isArray(value.conversations) ? value.conversations : [value];
      const found = values.map((each) => Conversation.read(fromAny(each))).filter((each) => each !== null);
      if (found.length > 0) return found;
      throw new Error(`${name} has no messages with a role and a text.`);
    }
    const conversation = Conversation.fromMarkdown(text);
    if (conversation) return [conversation];
    throw new Error(`${name} is no conversation: no line of it is “## You” or “## Model”.`);
  }

  return { parse };
})();
