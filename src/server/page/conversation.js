// A conversation: a tree of messages, one branch of which is shown. This file uses no DOM nodes.
const { Conversation, newId } = (() => {
  const { isText } = Kept;
  /** Optional texts of a message besides its content. */
  const DETAILS = ["reasoning", "tools", "numbers", "more", "failure", "end", "growing"];
  const TITLE_LENGTH = 60;
  const HEADINGS = { system: "System prompt", user: "You", assistant: "Model", reasoning: "Reasoning", tools: "Tool calls" };
  const HEADING = /^## (System prompt|You|Model|Reasoning|Tool calls)$/;
  const MARKED = /^\\+## (System prompt|You|Model|Reasoning|Tool calls)$/;

  /** Works without TLS, where `crypto.randomUUID` does not exist. */
  function newId() {
    const bytes = crypto.getRandomValues(new Uint8Array(12));
    return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
  }

  /** The content for the model: each file between fences that do not occur in it, then the text. */
  function withFiles({ content, files = [] }) {
    const blocks = files.map(({ name, text }) => {
      const longest = Math.max(2, ...Array.from(text.matchAll(/`+/g), (run) => run[0].length));
      const fence = "`".repeat(longest + 1);
      return `File ${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
    });
    return [...blocks, content].filter((part) => part !== "").join("\n\n");
  }

  /** The text of a message. Other programs write it as a list of parts. */
  function textOf(content) {
    if (!Array.isArray(content)) return content;
    return content.map((part) => part?.text).filter(isText).join("\n\n");
  }

  /** Accepts only our own format, from any source; null otherwise. */
  function readMessage(value) {
    const content = textOf(value?.content);
    if (!["user", "assistant"].includes(value?.role) || !isText(content)) return null;
    const message = { id: isText(value.id) ? value.id : newId(), role: value.role, content };
    for (const name of DETAILS) if (isText(value[name])) message[name] = value[name];
    const isFile = (file) => isText(file?.name) && isText(file.text);
    const files = (Array.isArray(value.files) ? value.files : []).filter(isFile);
    if (files.length > 0) message.files = files.map(({ name, text }) => ({ name, text }));
    return message;
  }

  class Conversation {
    constructor() {
      this.id = newId();
      /** The name that the user gave it. */
      this.title = "";
      /** The system prompt; null until the first message is sent. */
      this.system = null;
      this.updated = Date.now();
      /** In the order of creation, so that a parent comes before its children. */
      this.messages = [];
      /** The last message of the shown branch. */
      this.leaf = null;
    }

    /** Its name: the user's, or its first words. */
    get name() {
      const first = this.messages[0];
      const words = first?.content || first?.files?.[0].name || "";
      const line = words.trim().split("\n", 1)[0];
      const short = line.length > TITLE_LENGTH ? `${line.slice(0, TITLE_LENGTH).trimEnd()}…` : line;
      return this.title || short || "New chat";
    }

    /** The messages from the first one to the leaf, or to another one. */
    path(leaf = this.leaf) {
      const found = [];
      for (let message = leaf; message; message = message.parent) found.push(message);
      return found.reverse();
    }

    /** Adds a message after another one, and shows it. */
    add(message, parent = this.leaf) {
      const added = { id: newId(), ...message, parent };
      this.messages.push(added);
      this.leaf = added;
      this.updated = Date.now();
      return added;
    }

    /** The versions of a message: those in other branches, and this one. */
    versions(message) {
      return this.messages.filter((each) => each.parent === message.parent);
    }

    /** Shows the branch with this message, up to where it was last continued. */
    show(message) {
      const latest = new Map(this.messages.map((each) => [each.parent, each]));
      this.leaf = message;
      while (latest.has(this.leaf)) this.leaf = latest.get(this.leaf);
    }

    /** Removes a message and everything after it in all branches. Shows the nearest remaining one. */
    remove(message) {
      const gone = new Set([message]);
      for (const each of this.messages) if (gone.has(each.parent)) gone.add(each);
      const other = this.versions(message).findLast((each) => each !== message);
      this.messages = this.messages.filter((each) => !gone.has(each));
      if (other) this.show(other);
      else this.leaf = message.parent;
      this.updated = Date.now();
    }

    /** Whether an answer is in progress, in this tab or another one. */
    get isGrowing() {
      return this.messages.some((message) => message.growing);
    }

    /** The turns of a request for an answer to this message, or for the rest of it. */
    turns(leaf = this.leaf) {
      const turns = this.system ? [{ role: "system", content: this.system }] : [];
      for (const message of this.path(leaf)) {
        const [role, content] = [message.role, withFiles(message)];
        // Templates need alternating turns. After a failed answer there are two questions in a row.
        if (turns.at(-1)?.role === role) turns.at(-1).content += `\n\n${content}`;
        else if (content !== "") turns.push({ role, content });
      }
      return turns;
    }

    /** Whether it contains all of these words, which are in lower case. */
    matches(words) {
      const texts = this.messages.flatMap(({ content, files = [] }) => [content, ...files.map((file) => file.name)]);
      const all = [this.name, ...texts].join("\n").toLowerCase();
      return words.every((word) => all.includes(word));
    }

    // ---- As JSON

    toRecord() {
      const messages = this.messages.map(({ parent, ...message }) => ({ ...message, parent: parent?.id ?? null }));
      const system = this.system === null ? {} : { system: this.system };
      return { id: this.id, title: this.title, ...system, updated: this.updated, messages, leaf: this.leaf?.id ?? null };
    }

    /** Reads the JSON of `toRecord`, or the messages of a request to a model; null if there is no message. */
    static read(value) {
      const conversation = new this();
      if (isText(value?.id) && /^[0-9a-f]{24}$/.test(value.id)) conversation.id = value.id;
      if (isText(value?.title)) conversation.title = value.title;
      if (isText(value?.system)) conversation.system = value.system;
      if (Number.isFinite(value?.updated)) conversation.updated = value.updated;
      const byId = new Map();
      for (const each of Array.isArray(value?.messages) ? value.messages : []) {
        const message = readMessage(each);
        // In other programs' lists, the system prompt is the first message.
        if (each?.role === "system" && isText(textOf(each.content))) conversation.system ??= textOf(each.content);
        if (!message || byId.has(message.id)) continue;
        // Without a parent it follows the previous one, as in other programs' lists.
        message.parent = each.parent === undefined ? conversation.messages.at(-1) ?? null : byId.get(each.parent) ?? null;
        byId.set(message.id, message);
        conversation.messages.push(message);
      }
      conversation.leaf = byId.get(value?.leaf) ?? null;
      if (!conversation.leaf && conversation.messages.length > 0) conversation.show(conversation.messages[0]);
      return conversation.messages.length > 0 ? conversation : null;
    }

    /** Adds the messages of another state of this conversation that this one lacks. */
    merge(other) {
      const byId = new Map(this.messages.map((message) => [message.id, message]));
      for (const message of other.messages) {
        if (byId.has(message.id)) continue;
        message.parent = message.parent && (byId.get(message.parent.id) ?? null);
        byId.set(message.id, message);
        this.messages.push(message);
      }
    }

    /** Takes over the state of another tab. Common messages stay the same objects, because the page shows them. */
    become(other) {
      const known = new Map(this.messages.map((message) => [message.id, message]));
      const ours = (theirs) => theirs && known.get(theirs.id);
      for (const theirs of other.messages) {
        const message = ours(theirs) ?? {};
        for (const name of DETAILS) delete message[name];
        known.set(theirs.id, Object.assign(message, theirs, { parent: ours(theirs.parent) }));
      }
      this.messages = other.messages.map(ours);
      this.leaf = ours(other.leaf);
      [this.title, this.system, this.updated] = [other.title, other.system, other.updated];
    }

    // ---- As Markdown: the shown branch

    toMarkdown() {
      const sections = [`# ${this.name}`];
      const add = (kind, text) => {
        // Text that looks like one of our headings is marked, so that it is read as text.
        const lines = text.split("\n").map((line) => (HEADING.test(line) || MARKED.test(line) ? `\\${line}` : line));
        sections.push(`## ${HEADINGS[kind]}`, lines.join("\n"));
      };
      if (this.system) add("system", this.system);
      for (const message of this.path()) {
        if (message.reasoning) add("reasoning", message.reasoning);
        const content = withFiles(message);
        if (content) add(message.role, content);
        if (message.tools) add("tools", message.tools);
      }
      return `${sections.join("\n\n")}\n`;
    }

    /** Reads the Markdown of `toMarkdown`; null if there is no message. */
    static fromMarkdown(text) {
      const conversation = new this();
      const sections = [{ heading: null, lines: [] }];
      for (const line of text.replaceAll("\r\n", "\n").split("\n")) {
        const heading = HEADING.exec(line);
        if (heading) sections.push({ heading: heading[1], lines: [] });
        else sections.at(-1).lines.push(MARKED.test(line) ? line.slice(1) : line);
      }
      const title = /^# (.+)$/.exec(sections[0].lines.find((line) => line !== "") ?? "");
      for (const { heading, lines } of sections.slice(1)) {
        // There is an empty line after a heading, and one before the next heading or the end.
        const text = lines.slice(lines[0] === "" ? 1 : 0, lines.at(-1) === "" ? -1 : undefined).join("\n");
        conversation.addSection(heading, text);
      }
      if (title && conversation.messages.length > 0 && title[1] !== conversation.name) conversation.title = title[1];
      return conversation.messages.length > 0 ? conversation : null;
    }

    /**
     * Adds the section of a heading. It belongs to the last answer if that lacks such a section, otherwise to a new
     * one.
     */
    addSection(heading, text) {
      const { leaf } = this;
      const answer = () => (leaf?.role === "assistant" ? leaf : this.add({ role: "assistant", content: "" }));
      if (heading === HEADINGS.system) this.system = text;
      else if (heading === HEADINGS.user) this.add({ role: "user", content: text });
      else if (heading === HEADINGS.reasoning) this.add({ role: "assistant", content: "", reasoning: text });
      else if (heading === HEADINGS.tools) answer().tools = text;
      else if (leaf?.reasoning && leaf.content === "" && !leaf.tools) leaf.content = text;
      else this.add({ role: "assistant", content: text });
    }
  }

  return { Conversation, newId };
})();
