// The conversation that is shown, and the answers that are being given.
(() => {
  const { element } = Markdown;
  const { isText } = Kept;
  const { values } = Settings;
  const byId = (id) => document.getElementById(id);
  const log = byId("log");
  const scroller = byId("scroller");
  const model = byId("model");

  let conversation = new Conversation();
  /** How the messages of the branch that is shown look. */
  let views = new Map();
  /** Answers that are being given: conversation's id → its controller and its message. */
  const running = new Map();
  /** Tokens of the conversation, as the server counted them last. */
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
      } catch (error) {
        isConnecting = error.status !== 401;
        const state = error.status ? "Not ready" : "No connection";
        showState("bad", isConnecting ? state : "Needs a key", error.message);
        if (isConnecting) await Server.sleep(2000);
      }
    }
  }

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
    model.disabled = cards.length < 2;
    showContext();
  }

  function showContext() {
    const length = Number(model.selectedOptions[0]?.dataset.length) || 0;
    const used = usedTokens.get(conversation.id) ?? 0;
    const [part, all] = [used, length].map((count) => count.toLocaleString("en"));
    const text = used ? `${part} of ${all} tokens` : `${all} tokens of context`;
    byId("context").textContent = length ? text : "";
  }

  // ---- Answers

  function requestBody(turns) {
    const system = values.system?.trim();
    if (system) turns.unshift({ role: "system", content: system });
    const body = { messages: turns, stream: true, stream_options: { include_usage: true }, ...Settings.sampling() };
    if (model.value && model.value !== "…") body.model = model.value;
    return JSON.stringify(body);
  }

  function addToolCalls(calls, deltas) {
    for (const delta of deltas) {
      const call = (calls[delta.index ?? 0] ??= { name: "", arguments: "" });
      call.name += delta.function?.name ?? "";
      call.arguments += delta.function?.arguments ?? "";
    }
    const readable = (text) => {
      try {
        return JSON.parse(text);
      } catch {
        return text;
      }
    };
    const list = calls.filter(Boolean).map((call) => ({ ...call, arguments: readable(call.arguments) }));
    return JSON.stringify(list, null, 2);
  }

  /** Asks for an answer behind the leaf of the conversation that is shown, and shows it as it comes. */
  async function answer() {
    const own = conversation;
    const body = requestBody(own.turns());
    const message = own.add({ role: "assistant", content: "" });
    const controller = new AbortController();
    running.set(own.id, { controller, message });
    showPath();
    toEnd();
    tell("Answering.");
    const figures = { start: performance.now(), first: 0, chunks: 0 };
    try {
      await receive(own, message, body, controller.signal, figures);
    } catch (error) {
      if (controller.signal.aborted) {
        message.numbers = ["stopped", ...speed(figures)].join(" · ");
      } else {
        const wait = error.retryAfter === null || error.retryAfter === undefined ? "" : ` Try again in ${error.retryAfter} s.`;
        message.failure = error instanceof Server.Failure ? error.message + wait : "The answer broke off: the connection was lost.";
        if (error.status === 0 || !(error instanceof Server.Failure)) connect();
      }
    }
    running.delete(own.id);
    views.get(message)?.painter.finish();
    showBusy();
    tell(message.failure ?? (message.numbers?.startsWith("stopped") ? "Stopped." : "The answer is complete."));
    // It may have been deleted meanwhile.
    if (Library.all.has(own.id)) await Library.save(own);
    Sidebar.render();
  }

  async function receive(own, message, body, signal, figures) {
    const headers = { "content-type": "application/json" };
    const response = await Server.request("v1/chat/completions", { method: "POST", headers, body, signal });
    showState("good", "Ready");
    const calls = [];
    let [reason, usage, timings] = [null, null, null];
    for await (const data of Server.events(response)) {
      if (data === "[DONE]") {
        message.numbers = summary(figures, reason, usage, timings);
        if (Number.isFinite(usage?.total_tokens)) usedTokens.set(own.id, usage.total_tokens);
        showContext();
        return;
      }
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Server.Failure(String(chunk.error.message ?? chunk.error), -1);
      usage = chunk.usage ?? usage;
      timings = chunk.timings ?? timings;
      const choice = chunk.choices?.[0];
      if (!choice) continue;
      reason = choice.finish_reason ?? reason;
      const { content, reasoning_content, reasoning, tool_calls } = choice.delta ?? {};
      const thought = reasoning_content ?? reasoning;
      if (isText(content)) message.content += content;
      if (isText(thought)) message.reasoning = (message.reasoning ?? "") + thought;
      if (Array.isArray(tool_calls)) message.tools = addToolCalls(calls, tool_calls);
      if (content || thought || tool_calls) {
        figures.first ||= performance.now();
        figures.chunks += 1;
        message.numbers = speed(figures).join(" · ");
        views.get(message)?.painter.request();
      }
    }
    throw new Server.Failure("The answer broke off before its end.", -1);
  }

  /** What can be said while the answer comes: a chunk is about a token. */
  function speed({ start, first, chunks }) {
    if (!first) return [];
    const seconds = (performance.now() - first) / 1e3;
    const rate = chunks > 4 && seconds > 0.2 ? [`${((chunks - 1) / seconds).toFixed(1)} tokens/s`] : [];
    return [...rate, `first token after ${duration(first - start)}`];
  }

  function duration(milliseconds) {
    return milliseconds < 1000 ? `${Math.round(milliseconds)} ms` : `${(milliseconds / 1e3).toFixed(1)} s`;
  }

  function summary({ start, first }, reason, usage, timings) {
    const found = [];
    if (Number.isFinite(usage?.completion_tokens)) found.push(`${usage.completion_tokens} tokens`);
    const rate = timings?.output_tokens_per_second;
    if (Number.isFinite(rate)) found.push(`${rate.toFixed(1)} tokens/s`);
    if (first) found.push(`first token after ${duration(first - start)}`);
    const cached = usage?.prompt_tokens_details?.cached_tokens ?? timings?.cached_tokens;
    if (Number.isFinite(cached)) found.push(`${cached} of ${usage?.prompt_tokens ?? "?"} prompt tokens cached`);
    if (reason === "length") found.push("cut off at the longest length");
    return found.join(" · ");
  }

  // ---- The conversation on the page

  /** Shows the branch with the leaf. Messages that are there already stay as they are. */
  function showPath() {
    const before = views;
    views = new Map();
    for (const message of conversation.path()) {
      const view = before.get(message) ?? new MessageView(message);
      before.delete(message);
      views.set(message, view);
      // Its place is behind what has been placed.
      if (view.root.parentNode !== log) log.append(view.root);
      if (!view.painter || view.painter.isFinished) continue;
      if (running.get(conversation.id)?.message === message) view.painter.request();
      else view.painter.finish();
    }
    for (const view of before.values()) view.root.remove();
    byId("welcome").hidden = views.size > 0;
    showBusy();
    showContext();
  }

  const isBusy = () => running.has(conversation.id);

  function showBusy() {
    byId("send").hidden = isBusy();
    byId("stop").hidden = !isBusy();
    log.setAttribute("aria-busy", String(isBusy()));
    showTools();
  }

  function showTools() {
    const leaf = conversation.leaf;
    for (const [message, view] of views) {
      if (isBusy()) {
        view.showTools([]);
        continue;
      }
      const isUser = message.role === "user";
      const tools = [];
      if (message.content) {
        const copy = (event) => copyText(message.content, event.currentTarget);
        tools.push(["Copy", `Copy ${isUser ? "message" : "answer"}`, copy]);
      }
      if (!isUser || message === leaf) {
        const name = isUser || message.failure ? "Try again" : "Regenerate";
        tools.push([name, `${name}: answer`, () => regenerate(message)]);
      }
      if (isUser) {
        tools.push(["Edit", "Edit message", () => edit(message)]);
        tools.push(["Delete", "Delete message and what follows", () => removeFrom(message)]);
      }
      view.showTools(tools);
      const versions = conversation.versions(message);
      const number = versions.indexOf(message) + 1;
      view.showVersions(number, versions.length, (step) => {
        conversation.show(versions[number - 1 + step]);
        Library.replace(conversation);
        showPath();
      });
    }
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

  /** Another answer in the place of this one, or an answer to this message. */
  function regenerate(message) {
    if (isBusy()) return;
    conversation.leaf = message.role === "assistant" ? message.parent : message;
    Composer.focus();
    answer();
  }

  /** Another message in the place of this one; what followed it stays, in its own branch. */
  function edit(message) {
    views.get(message).edit((content) => {
      if (isBusy()) return;
      conversation.add({ role: "user", content, ...(message.files && { files: message.files }) }, message.parent);
      answer();
    }, Composer.focus);
  }

  function ask(content, files = []) {
    hide();
    conversation.add({ role: "user", content, ...(files.length > 0 && { files }) });
    Library.save(conversation);
    // It is found again under its address, also after the page was loaded anew.
    if (idInAddress() !== conversation.id) history.pushState(null, "", `#${conversation.id}`);
    answer();
    showName();
  }

  /** What the conversation is called, where that can be seen. */
  function showName() {
    document.title = conversation.messages.length > 0 ? `${conversation.name} · tinyvllm` : "tinyvllm";
    Sidebar.render();
  }

  function open(wanted) {
    conversation = wanted;
    log.replaceChildren();
    views = new Map();
    showPath();
    toEnd();
    const isNew = conversation.messages.length === 0;
    if (idInAddress() !== (isNew ? "" : conversation.id)) {
      history.pushState(null, "", isNew ? location.pathname : `#${conversation.id}`);
    }
    showName();
  }

  const idInAddress = () => location.hash.slice(1);
  const openAddress = () => open(Library.all.get(idInAddress()) ?? new Conversation());

  function removeConversation(wanted) {
    running.get(wanted.id)?.controller.abort();
    const before = wanted.toRecord();
    Library.remove(wanted.id);
    if (wanted.id === conversation.id) open(new Conversation());
    else Sidebar.render();
    offer("Deleted.", "Undo", () => putBack(before));
    Composer.focus();
  }

  // ---- Scrolling: whoever is at the end stays there, whatever grows

  let isFollowing = true;
  let lastTop = 0;
  const gap = () => scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight;
  const isAtEnd = () => gap() < 40;

  function follow(isWanted) {
    isFollowing = isWanted;
    // What the browser does to keep other texts in their place would look like scrolling.
    scroller.style.overflowAnchor = isWanted ? "none" : "auto";
  }

  function toEnd() {
    follow(true);
    scroller.scrollTop = scroller.scrollHeight;
    lastTop = scroller.scrollTop;
  }

  scroller.addEventListener("scroll", () => {
    // The event comes later than the scrolling, and what has grown meanwhile is no wish to leave the end.
    const isUp = scroller.scrollTop < lastTop;
    lastTop = scroller.scrollTop;
    if (isUp) follow(gap() < 2);
    else if (isAtEnd()) follow(true);
    byId("to-end").hidden = isAtEnd();
  }, { passive: true });
  const growth = new ResizeObserver(() => {
    if (isFollowing) toEnd();
    byId("to-end").hidden = isAtEnd();
  });
  growth.observe(log);
  growth.observe(scroller);
  byId("to-end").addEventListener("click", () => {
    toEnd();
    Composer.focus();
  });

  // ---- News

  /** For those who hear the page. */
  function tell(text) {
    byId("news").textContent = text;
  }

  let offerEnd = 0;
  const hide = () => (byId("toast").hidden = true);

  /** A line with one thing to do about it, for a while. */
  function offer(text, name = "", onClick = () => {}) {
    const action = element("button", "quiet", name);
    action.type = "button";
    action.addEventListener("click", () => {
      hide();
      onClick();
    });
    byId("toast").replaceChildren(element("span", "", text), ...(name ? [action] : []));
    byId("toast").hidden = false;
    clearTimeout(offerEnd);
    offerEnd = setTimeout(hide, 10_000);
  }

  async function copyText(text, source) {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      // Over plain HTTP from another machine there is no clipboard API.
      const area = element("textarea", "hidden");
      area.value = text;
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
      source.focus();
    }
    const before = source.textContent;
    source.textContent = "Copied";
    tell("Copied.");
    setTimeout(() => (source.textContent = before), 1200);
  }

  // ---- Controls

  const stop = () => {
    running.get(conversation.id)?.controller.abort();
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
    if (source) copyText(source.closest(".code").querySelector("pre").textContent, source);
  });
  byId("new-chat").addEventListener("click", () => {
    open(new Conversation());
    Composer.focus();
  });
  model.addEventListener("change", () => {
    values.model = model.value;
    Settings.save();
    showContext();
  });
  byId("change-key").addEventListener("click", async () => {
    byId("settings").close();
    if (await Settings.askKey("The key of this server, if it needs one.")) connect();
  });
  byId("delete-all").addEventListener("click", () => {
    const before = Library.list().map((each) => each.toRecord());
    for (const { controller } of running.values()) controller.abort();
    Library.removeAll();
    byId("settings").close();
    open(new Conversation());
    offer("All conversations are deleted.", "Undo", () => {
      for (const record of before) Library.replace(Conversation.read(record));
      Sidebar.render();
    });
  });
  window.addEventListener("popstate", openAddress);
  // What has come of an answer is kept if the tab is closed before its end.
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) return;
    for (const id of running.keys()) if (Library.all.has(id)) Library.save(Library.all.get(id));
  });

  Composer.isBusy = isBusy;
  Composer.onSend = ask;
  Composer.onTrouble = offer;
  Library.onTrouble = offer;
  Library.onChange = (id) => {
    if (running.has(id ?? conversation.id)) return;
    const changed = id === null || id === conversation.id;
    if (changed && conversation.messages.length > 0) open(Library.all.get(conversation.id) ?? new Conversation());
    else Sidebar.render();
  };
  Sidebar.current = () => conversation;
  Sidebar.onDelete = removeConversation;
  Sidebar.onImport = offer;
  Sidebar.onOpen = open;
  Sidebar.onRename = showName;
  Server.onLoading = (share, stage) => showState("wait", `Loading${share}`, stage);
  connect();
  Library.open().then(() => {
    // Who was faster than the store has begun already.
    if (conversation.messages.length === 0) openAddress();
    else Sidebar.render();
  });
})();
