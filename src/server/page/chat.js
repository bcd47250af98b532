// The conversation that is shown, and its actions.
(() => {
  const { element } = Markdown;
  const { isText } = Kept;
  const { values } = Settings;
  const { offer, announce } = News;
  const byId = (id) => document.getElementById(id);
  const log = byId("log");
  const model = byId("model");

  let conversation = new Conversation();
  /** The views of the messages of the shown branch. */
  let views = new Map();
  /** Tokens of the conversation, as the server last counted them. */
  const usedTokens = new Map();

  // ---- The server

  function showState(kind, text, details = "") {
    const state = byId("state");
    if (state.textContent !== text) state.textContent = text;
    state.dataset.kind = kind;
    state.title = details;
  }

  let isConnecting = false;
  async function connect() {
    if (isConnecting) return;
    isConnecting = true;
    while (isConnecting) {
      try {
        const { data } = await (await Server.request("v1/models")).json();
        showModels(data.filter((each) => isText(each?.id)));
        showState("good", "Ready");
        isConnecting = false;
        Settings.askDefaults();
      } catch (error) {
        isConnecting = error.status !== 401;
        const state = error.status ? "Not ready" : "No connection";
        showState("bad", isConnecting ? state : "Needs a key", error.message);
        if (isConnecting) await Server.sleep(2000);
      }
    }
  }

  /** The list of models, if there are several. */
  function showModels(cards) {
    const wanted = model.value;
    model.replaceChildren(...cards.map((card) => {
      const option = element("option", "", card.id);
      option.value = card.id;
      option.dataset.length = Number(card.max_model_len) || 0;
      return option;
    }));
    for (const name of [values.model, wanted]) {
      if (cards.some((card) => card.id === name)) model.value = name;
    }
    model.hidden = cards.length < 2;
    byId("only-model").hidden = !model.hidden;
    byId("only-model").textContent = byId("only-model").title = cards[0]?.id ?? "";
    showContext();
  }

  const modelName = () => (model.value && model.value !== "…" ? { model: model.value } : {});
  const room = () => Number(model.selectedOptions[0]?.dataset.length) || 0;
  const whole = (count) => count.toLocaleString("en");

  function showContext() {
    const used = usedTokens.get(conversation.id) ?? 0;
    const text = used ? `${whole(used)} of ${whole(room())} tokens` : `${whole(room())} tokens of context`;
    byId("context").textContent = room() ? text : "";
  }

  /** Why these turns cannot be answered, judging by their tokens; empty if they can. */
  async function whyNot(turns) {
    try {
      const headers = { "content-type": "application/json" };
      const body = JSON.stringify({ messages: turns, ...modelName() });
      const counted = await (await Server.request("tokenize", { method: "POST", headers, body })).json();
      const [count, most] = [Number(counted.count), Number(counted.max_model_len)];
      const longest = Settings.sampling().max_tokens ?? 1;
      if (!(count + longest > most)) return "";
      const answer = longest > 1 ? ` and the longest answer (in the settings) ${whole(longest)}` : "";
      return `This is too long for the model: with the conversation so far it has ${whole(count)} tokens${answer}, and ` +
        `${whole(most)} is the most. Shorten it, or begin a new chat.`;
    } catch (error) {
      // If the server cannot count tokens, it reports the error when the answer is requested.
      if ([404, 405, 501].includes(error.status)) return "";
      if (error.status === 0) connect();
      return Answers.words(error);
    }
  }

  // ---- Answers

  function wishes() {
    const stream = { stream: true, stream_options: { include_usage: true }, return_progress: true };
    return { ...stream, ...Settings.sampling(), ...modelName() };
  }

  function give(message, turns, more = {}) {
    const own = conversation;
    const done = Answers.give(own, message, turns, { ...wishes(), ...more });
    showPath();
    Scroll.toEnd();
    Sidebar.render();
    announce("Answering.");
    done.then(() => Naming.name(own, modelName()));
  }

  /** Requests an answer to the last message of the shown branch, and shows it as it grows. */
  function answer() {
    const turns = conversation.turns();
    give(conversation.add({ role: "assistant", content: "" }), turns);
  }

  /** Requests the rest of an answer. */
  function goOn(message) {
    if (isBusy()) return;
    conversation.leaf = message;
    Composer.focus();
    give(message, conversation.turns(), { continue_final_message: true, add_generation_prompt: false });
  }

  Answers.onGrow = (message) => views.get(message)?.painter.request();
  Answers.onReady = () => showState("good", "Ready");
  Answers.onLost = connect;
  Answers.onCounted = (own, count) => {
    usedTokens.set(own.id, count);
    showContext();
  };
  Answers.onEnd = (own, message) => {
    if (own === conversation) showPath();
    Sidebar.render();
    const view = views.get(message);
    if (!view) return;
    const ends = { stopped: "Stopped.", broken: "The answer broke off." };
    announce(message.failure ?? ends[message.end] ?? "The answer is complete.");
    view.showTrouble();
  };

  // ---- The conversation on the page

  /** Shows the branch up to the leaf. Views of unchanged messages stay. */
  function showPath() {
    const before = views;
    views = new Map();
    let last = null;
    for (const message of conversation.path()) {
      const known = before.get(message);
      const view = known && !known.isStale ? known : new MessageView(message);
      if (known && known !== view) known.root.replaceWith(view.root);
      before.delete(message);
      views.set(message, view);
      if (view.root.previousSibling !== last || view.root.parentNode !== log) {
        if (last) last.after(view.root);
        else log.prepend(view.root);
      }
      last = view.root;
      if (!view.painter || view.painter.isFinished) continue;
      if (message.growing) view.painter.request();
      else view.painter.finish();
    }
    for (const view of before.values()) view.root.remove();
    byId("welcome").hidden = views.size > 0;
    showBusy();
    showContext();
    showSystem();
  }

  const isBusy = () => conversation.isGrowing;

  function showBusy() {
    byId("send").hidden = isBusy();
    byId("stop").hidden = !isBusy();
    log.setAttribute("aria-busy", String(isBusy()));
    showTools();
  }

  function showTools() {
    for (const [message, view] of views) {
      view.showTools(isBusy() ? [] : toolsOf(message));
      if (isBusy()) continue;
      const versions = conversation.versions(message);
      const number = versions.indexOf(message) + 1;
      view.showVersions(number, versions.length, (step) => {
        conversation.show(versions[number - 1 + step]);
        Library.replace(conversation);
        showPath();
      });
    }
  }

  function toolsOf(message) {
    const isUser = message.role === "user";
    const isLeaf = message === conversation.leaf;
    const tools = [];
    if (isLeaf && message.end && message.content && !message.tools) {
      tools.push(["Continue", "Continue: answer", () => goOn(message)]);
    }
    if (!isUser || isLeaf) {
      const name = isUser || message.failure ? "Try again" : "Regenerate";
      tools.push([name, `${name}: answer`, () => regenerate(message)]);
    }
    if (message.content) {
      const copy = (event) => News.copyText(message.content, event.currentTarget);
      tools.unshift(["Copy", `Copy ${isUser ? "message" : "answer"}`, copy]);
    }
    if (isUser) {
      tools.push(["Edit", "Edit message", () => edit(message)]);
      tools.push(["Delete", "Delete message and what follows", () => removeFrom(message)]);
    } else if (message.content) {
      tools.push(["Edit", "Edit answer", () => editAnswer(message)]);
    }
    return tools;
  }

  function removeFrom(message) {
    const before = conversation.toRecord();
    conversation.remove(message);
    usedTokens.delete(conversation.id);
    if (conversation.messages.length === 0) Library.remove(conversation.id);
    else Library.replace(conversation);
    showPath();
    Sidebar.render();
    offer("Deleted.", "Undo", () => putBack(before));
    Composer.focus();
  }

  function putBack(record) {
    const restored = Conversation.read(record);
    Library.replace(restored);
    open(restored);
  }

  /** Requests another answer in place of this one, or an answer to this message. */
  function regenerate(message) {
    if (isBusy()) return;
    conversation.leaf = message.role === "assistant" ? message.parent : message;
    Composer.focus();
    answer();
  }

  /** A notice that an action is not possible during an answer. */
  const waiting = () => (isBusy() ? "An answer is being given. Wait for its end, or stop it." : "");

  /** Replaces a message by another version. What followed it stays in its own branch. */
  function edit(message) {
    const own = conversation;
    views.get(message).edit({
      Send: async (content) => {
        const changed = { role: "user", content, ...(message.files && { files: message.files }) };
        const trouble = waiting() || (await whyNot(own.turns({ ...changed, parent: message.parent })));
        if (trouble || own !== conversation) return trouble;
        own.add(changed, message.parent);
        answer();
        return "";
      },
    }, Composer.focus);
  }

  /** Replaces an answer by another version, which the model can continue. */
  function editAnswer(message) {
    const save = (content) => {
      const changed = { role: "assistant", content, ...(message.reasoning && { reasoning: message.reasoning }) };
      const added = conversation.add(changed, message.parent);
      Library.save(conversation);
      return added;
    };
    views.get(message).edit({
      "Save and continue": (content) => waiting() || (goOn(save(content)), ""),
      Save: (content) => waiting() || (save(content), showPath(), ""),
    }, Composer.focus);
  }

  /** Sends a message, if it fits into the context. Returns whether it is part of the conversation. */
  async function ask(content, files = []) {
    News.hide();
    // Stored conversations decide which one this is.
    await opened;
    const own = conversation;
    own.system ??= values.system.trim();
    const message = { role: "user", content, ...(files.length > 0 && { files }) };
    const trouble = await whyNot(own.turns({ ...message, parent: own.leaf }));
    // A user who has opened another conversation finds the text again in this one.
    if (own !== conversation || isBusy()) return false;
    Composer.complain(trouble);
    if (trouble) return false;
    own.add(message);
    Library.save(own);
    // The address leads to it, even after a reload.
    if (idInAddress() !== own.id) history.pushState(null, "", `#${own.id}`);
    Composer.rename(own.id);
    answer();
    showName();
    return true;
  }

  /** Shows the name of the conversation. */
  function showName() {
    document.title = conversation.messages.length > 0 ? `${conversation.name} · tinyvllm` : "tinyvllm";
    Sidebar.render();
  }

  function open(wanted) {
    conversation = wanted;
    log.replaceChildren();
    views = new Map();
    showPath();
    Scroll.toEnd();
    const isNew = conversation.messages.length === 0;
    if (idInAddress() !== (isNew ? "" : conversation.id)) {
      history.pushState(null, "", isNew ? location.pathname : `#${conversation.id}`);
    }
    Composer.open(isNew ? "new" : conversation.id);
    showName();
  }

  const idInAddress = () => location.hash.slice(1);
  const openAddress = () => open(Library.all.get(idInAddress()) ?? new Conversation());

  function removeConversation(wanted) {
    Answers.stop(wanted.id);
    const before = wanted.toRecord();
    Library.remove(wanted.id);
    if (wanted.id === conversation.id) open(new Conversation());
    else Sidebar.render();
    offer("Deleted.", "Undo", () => putBack(before));
    Composer.focus();
  }

  // ---- The system prompt

  function showSystem() {
    const text = conversation.system ?? values.system;
    const field = byId("own-system");
    if (field.value !== text) field.value = text;
    byId("system-line").textContent = text.trim().split("\n", 1)[0] || "none";
  }

  byId("own-system").addEventListener("input", () => {
    conversation.system = byId("own-system").value;
    showSystem();
  });
  byId("own-system").addEventListener("change", () => {
    if (Library.all.has(conversation.id)) Library.replace(conversation);
  });

  // ---- Controls

  const stop = () => {
    Answers.stop(conversation.id);
    Composer.focus();
  };
  const begin = () => {
    open(new Conversation());
    Composer.focus();
  };
  byId("stop").addEventListener("click", stop);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && isBusy() && !document.querySelector("dialog[open]")) stop();
  });
  byId("examples").addEventListener("click", (event) => {
    const example = event.target.closest("button");
    if (!example || isBusy()) return;
    Composer.focus();
    ask(example.textContent);
  });
  log.addEventListener("click", (event) => {
    const source = event.target.closest("button[data-copy]");
    if (source) News.copyText(source.closest(".code").querySelector("pre").textContent, source);
    const mark = event.target.closest("button[data-note-of]");
    const note = mark?.closest(".markdown").querySelector(`p[data-note="${mark.dataset.noteOf}"]`);
    note?.scrollIntoView({ block: "nearest" });
    note?.focus();
  });
  byId("new-chat").addEventListener("click", begin);
  model.addEventListener("change", () => {
    values.model = model.value;
    Settings.save();
    showContext();
  });
  byId("change-key").addEventListener("click", async () => {
    byId("settings").close();
    if (await Settings.askKey("")) connect();
  });
  byId("delete-all").addEventListener("click", () => {
    const before = Library.list().map((each) => each.toRecord());
    for (const id of Answers.running.keys()) Answers.stop(id);
    Library.removeAll();
    byId("settings").close();
    open(new Conversation());
    offer("All conversations are deleted.", "Undo", () => {
      for (const record of before) Library.replace(Conversation.read(record));
      Sidebar.render();
    });
  });
  window.addEventListener("popstate", openAddress);

  Composer.isBusy = isBusy;
  Composer.onSend = ask;
  Composer.onTrouble = offer;
  Library.onTrouble = offer;
  Library.onChange = (id) => {
    const isShown = conversation.messages.length > 0 && (id === null || id === conversation.id);
    if (!isShown) return Sidebar.render();
    if (!Library.all.has(conversation.id)) return open(new Conversation());
    showPath();
    showName();
  };
  Naming.onName = showName;
  Settings.onSystem = showSystem;
  Shortcuts.onNew = begin;
  Shortcuts.onEditLast = () => {
    const last = conversation.path().findLast(({ role }) => role === "user");
    if (!last || isBusy()) return false;
    edit(last);
    return true;
  };
  Sidebar.current = () => conversation;
  Sidebar.onDelete = removeConversation;
  Sidebar.onImport = (text, imported) => {
    if (imported) open(imported);
    offer(text);
  };
  Sidebar.onOpen = open;
  Sidebar.onRename = showName;
  Server.onLoading = (share, stage) => showState("wait", `Loading${share}`, stage);
  connect();
  const opened = Library.open().then(() => {
    openAddress();
    Answers.settle();
  });
})();
