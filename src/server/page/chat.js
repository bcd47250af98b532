// The conversation, the server, and what the controls do.
(() => {
  const { element } = Markdown;
  const byId = (id) => document.getElementById(id);
  const log = byId("log");
  const scroller = byId("scroller");
  const input = byId("input");
  const model = byId("model");

  const SAMPLING = [
    { name: "temperature", label: "Temperature", min: 0, max: 2, step: 0.05 },
    { name: "top_p", label: "Top-p", min: 0, max: 1, step: 0.01 },
    { name: "top_k", label: "Top-k", min: -1, step: 1 },
    { name: "min_p", label: "Min-p", min: 0, max: 1, step: 0.01 },
    { name: "max_tokens", label: "Longest answer", min: 1, step: 1 },
    { name: "seed", label: "Seed", step: 1 },
    { name: "repetition_penalty", label: "Repetition penalty", min: 0, max: 2, step: 0.05 },
    { name: "presence_penalty", label: "Presence penalty", min: -2, max: 2, step: 0.1 },
    { name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2, step: 0.1 },
  ];

  // ---- What is kept

  const { isText, storedJson } = Kept;

  /** Only what has the form that we write, wherever it comes from. */
  function readMessages(value) {
    const good = (each) => ["user", "assistant"].includes(each?.role) && isText(each.content);
    return (Array.isArray(value) ? value : []).filter(good).map((each) => {
      const message = { role: each.role, content: each.content };
      for (const name of ["reasoning", "tools", "numbers"]) if (isText(each[name])) message[name] = each[name];
      return message;
    });
  }

  const settings = storedJson("settings");
  /** role, content; of answers also reasoning, tools, numbers, failure: texts. `parts` are its nodes. */
  let messages = readMessages(storedJson("conversation").messages);
  let running = null;
  let contextLength = 0;
  let usedTokens = 0;

  function save() {
    Kept.put("localStorage", "settings", JSON.stringify(settings));
    const kept = messages.map(({ role, content, reasoning, tools, numbers }) => ({ role, content, reasoning, tools, numbers }));
    const isKept = settings.keep !== false && kept.length > 0;
    Kept.put("localStorage", "conversation", isKept ? JSON.stringify({ messages: kept }) : null);
  }

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
    for (const name of [settings.model, wanted]) {
      if (cards.some((card) => card.id === name)) model.value = name;
    }
    model.disabled = cards.length < 2;
    showContext();
  }

  function showContext() {
    contextLength = Number(model.selectedOptions[0]?.dataset.length) || 0;
    const [used, all] = [usedTokens, contextLength].map((count) => count.toLocaleString("en"));
    const text = usedTokens ? `${used} of ${all} tokens` : `${all} tokens of context`;
    byId("context").textContent = contextLength ? text : "";
  }

  // ---- Answers

  function requestBody() {
    const turns = [];
    for (const { role, content } of messages) {
      // Templates want turns to alternate. After an answer that failed there are two questions in a row.
      if (turns.at(-1)?.role === role) turns.at(-1).content += `\n\n${content}`;
      else if (content !== "") turns.push({ role, content });
    }
    const system = settings.system?.trim();
    const body = {
      messages: turns,
      stream: true,
      stream_options: { include_usage: true },
    };
    if (system) body.messages.unshift({ role: "system", content: system });
    if (model.value && model.value !== "…") body.model = model.value;
    for (const { name } of SAMPLING) {
      if (typeof settings[name] === "number") body[name] = settings[name];
    }
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

  /** Asks for an answer to the conversation and shows it as it comes. */
  async function answer() {
    const message = { role: "assistant", content: "" };
    const body = requestBody();
    messages.push(message);
    showMessage(message);
    const controller = new AbortController();
    running = controller;
    showBusy(true);
    toEnd();
    const figures = { start: performance.now(), first: 0, chunks: 0 };
    try {
      await receive(message, body, controller.signal, figures);
    } catch (error) {
      if (controller.signal.aborted) {
        message.numbers = ["stopped", ...speed(figures)].join(" · ");
      } else {
        const wait = error.retryAfter === null || error.retryAfter === undefined ? "" : ` Try again in ${error.retryAfter} s.`;
        message.failure = error instanceof Server.Failure ? error.message + wait : "The answer broke off: the connection was lost.";
        if (error.status === 0 || !(error instanceof Server.Failure)) connect();
      }
    }
    running = null;
    message.parts.painter.finish();
    showBusy(false);
    tell(message.failure ?? (message.numbers?.startsWith("stopped") ? "Stopped." : "The answer is complete."));
    save();
  }

  async function receive(message, body, signal, figures) {
    const headers = { "content-type": "application/json" };
    const response = await Server.request("v1/chat/completions", { method: "POST", headers, body, signal });
    showState("good", "Ready");
    const calls = [];
    let [reason, usage, timings] = [null, null, null];
    for await (const data of Server.events(response)) {
      if (data === "[DONE]") {
        message.numbers = summary(figures, reason, usage, timings);
        usedTokens = usage?.total_tokens ?? usedTokens;
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
        message.parts.painter.request();
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

  function button(text, onClick, label = "") {
    const node = element("button", "quiet", text);
    node.type = "button";
    if (label) node.setAttribute("aria-label", label);
    node.addEventListener("click", onClick);
    return node;
  }

  /** Nodes of a message. An answer's are filled by its painter. */
  function showMessage(message) {
    const isUser = message.role === "user";
    const text = element("div", isUser ? "text" : "text markdown");
    text.dir = "auto";
    const tools = element("div", "tools");
    const numbers = element("span", "numbers");
    const foot = element("div", "foot", numbers, tools);
    const root = element("article", `message ${message.role}`, text, foot);
    root.setAttribute("aria-label", isUser ? "You" : "Model");
    message.parts = { root, text, foot, tools, numbers };
    if (isUser) text.textContent = message.content;
    else message.parts.painter = new Painter(message);
    log.append(root);
    byId("welcome").hidden = true;
  }

  /** Shows an answer as it grows, and takes at most a sixth of the time for it, however long the answer is. */
  class Painter {
    constructor(message) {
      this.message = message;
      this.view = new Markdown.View(message.parts.text);
      this.isRequested = false;
      this.notBefore = 0;
      this.reasoning = null;
      this.tools = null;
      message.parts.text.classList.add("waiting");
    }

    request() {
      if (this.isRequested) return;
      this.isRequested = true;
      const paint = () => {
        this.isRequested = false;
        if (running && messages.at(-1) === this.message) this.paint(true);
      };
      setTimeout(() => requestAnimationFrame(paint), Math.max(this.notBefore - performance.now(), 0));
    }

    paint(isOpen) {
      const start = performance.now();
      const { message, view } = this;
      const { parts } = message;
      const follows = isAtEnd();
      const hasText = message.content !== "";
      parts.text.classList.toggle("waiting", isOpen && !hasText);
      if (hasText || !isOpen) view.render(message.content, isOpen);
      if (message.reasoning) this.paintReasoning(hasText);
      if (message.tools) this.paintTools();
      parts.numbers.textContent = message.numbers ?? "";
      if (follows) toEnd();
      // Asking makes the browser lay the page out now, so that it is counted.
      byId("to-end").hidden = isAtEnd();
      const end = performance.now();
      this.notBefore = end + 5 * (end - start);
    }

    paintReasoning(hasText) {
      if (!this.reasoning) {
        const text = element("div");
        text.dir = "auto";
        const details = element("details", "reasoning", element("summary", "", "Reasoning"), text);
        details.open = !hasText;
        this.reasoning = { details, text: text.appendChild(document.createTextNode("")), isOver: hasText };
        this.message.parts.text.before(details);
      }
      const { details, text, isOver } = this.reasoning;
      text.appendData(this.message.reasoning.slice(text.length));
      if (hasText && !isOver) {
        details.open = false;
        this.reasoning.isOver = true;
      }
    }

    paintTools() {
      if (!this.tools) {
        const pre = element("pre", "", element("code"));
        pre.tabIndex = 0;
        pre.setAttribute("role", "region");
        pre.setAttribute("aria-label", "Tool calls");
        this.tools = pre.firstChild;
        const head = element("div", "code-head", element("span", "", "Tool calls"));
        this.message.parts.text.after(element("div", "code", head, pre));
      }
      this.tools.textContent = this.message.tools;
    }

    finish() {
      this.paint(false);
      const { message } = this;
      if (!message.failure) return;
      const failure = element("p", "failure", message.failure);
      failure.setAttribute("role", "alert");
      message.parts.foot.before(failure);
    }
  }

  function showAll() {
    log.replaceChildren();
    byId("welcome").hidden = messages.length > 0;
    for (const message of messages) {
      showMessage(message);
      message.parts.painter?.finish();
    }
    showTools();
    toEnd();
  }

  /** The last exchange can be changed; everything can be copied. */
  function showTools() {
    const lastUser = messages.findLastIndex((each) => each.role === "user");
    messages.forEach((message, index) => {
      const { tools } = message.parts;
      tools.replaceChildren();
      if (running) return;
      const isUser = message.role === "user";
      const whose = isUser ? "message" : "answer";
      if (message.content) {
        const copy = button("Copy", () => copyText(message.content, copy), `Copy ${whose}`);
        tools.append(copy);
      }
      if (index === messages.length - 1) {
        const name = isUser || message.failure ? "Try again" : "Regenerate";
        tools.append(button(name, regenerate, `${name}: answer`));
      }
      if (index === lastUser) {
        tools.append(button("Edit", () => edit(message), "Edit message"));
        tools.append(button("Delete", () => removeFrom(index), "Delete message and its answer"));
      }
    });
  }

  function removeFrom(index) {
    for (const message of messages.splice(index)) message.parts.root.remove();
    byId("welcome").hidden = messages.length > 0;
    usedTokens = 0;
    showContext();
    showTools();
    save();
    input.focus();
  }

  function regenerate() {
    if (running) return;
    if (messages.at(-1)?.role === "assistant") messages.pop().parts.root.remove();
    input.focus();
    answer();
  }

  function edit(message) {
    const { root, text, foot } = message.parts;
    const area = element("textarea");
    area.value = message.content;
    area.rows = Math.min(message.content.split("\n").length + 1, 12);
    area.dir = "auto";
    area.setAttribute("aria-label", "Edit message");
    const close = () => {
      editor.remove();
      root.classList.remove("editing");
      text.hidden = foot.hidden = false;
      input.focus();
    };
    const submit = () => {
      const content = area.value.trim();
      if (!content || running) return;
      close();
      for (const each of messages.splice(messages.indexOf(message))) each.parts.root.remove();
      ask(content);
    };
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") close();
      else if (isSendKey(event)) {
        event.preventDefault();
        submit();
      }
    });
    const sendButton = element("button", "primary", "Send");
    sendButton.type = "button";
    sendButton.addEventListener("click", submit);
    const editor = element("div", "editor", area, element("div", "buttons", button("Cancel", close), sendButton));
    text.hidden = foot.hidden = true;
    root.classList.add("editing");
    root.prepend(editor);
    area.focus();
  }

  function ask(content) {
    const message = { role: "user", content };
    messages.push(message);
    showMessage(message);
    save();
    answer();
  }

  const isAtEnd = () => scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 60;

  function toEnd() {
    scroller.scrollTop = scroller.scrollHeight;
  }

  function showBusy(isBusy) {
    byId("send").hidden = isBusy;
    byId("stop").hidden = !isBusy;
    log.setAttribute("aria-busy", String(isBusy));
    for (const id of ["new-chat", "change-key"]) byId(id).disabled = isBusy;
    showTools();
    if (isBusy) tell("Answering.");
  }

  function tell(text) {
    byId("news").textContent = text;
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

  /** Enter that ends a composition of an input method is no wish to send. */
  const isSendKey = (event) =>
    event.key === "Enter" && !event.shiftKey && !event.isComposing && event.keyCode !== 229;

  function fitInput() {
    input.style.height = "auto";
    input.style.height = `${input.scrollHeight}px`;
  }

  function submit() {
    const content = input.value.trim();
    if (!content || running) return;
    input.value = "";
    fitInput();
    ask(content);
  }

  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
    input.focus();
  });
  input.addEventListener("input", fitInput);
  input.addEventListener("keydown", (event) => {
    if (!isSendKey(event)) return;
    event.preventDefault();
    submit();
  });
  const stop = () => {
    running?.abort();
    input.focus();
  };
  byId("stop").addEventListener("click", stop);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && running && !document.querySelector("dialog[open]")) stop();
  });
  byId("examples").addEventListener("click", (event) => {
    const example = event.target.closest("button");
    if (!example || running) return;
    input.focus();
    ask(example.textContent);
  });
  log.addEventListener("click", (event) => {
    const source = event.target.closest("button[data-copy]");
    if (source) copyText(source.closest(".code").querySelector("pre").textContent, source);
  });
  byId("new-chat").addEventListener("click", () => {
    messages = [];
    usedTokens = 0;
    showContext();
    showAll();
    save();
    input.focus();
  });
  scroller.addEventListener("scroll", () => (byId("to-end").hidden = isAtEnd()), { passive: true });
  byId("to-end").addEventListener("click", () => {
    toEnd();
    input.focus();
  });
  model.addEventListener("change", () => {
    settings.model = model.value;
    showContext();
    save();
  });

  // ---- Light and dark

  const isDarkSystem = window.matchMedia("(prefers-color-scheme: dark)");
  function showTheme(theme) {
    const isKnown = theme === "dark" || theme === "light";
    if (isKnown) document.documentElement.dataset.theme = theme;
    return isKnown ? theme : isDarkSystem.matches ? "dark" : "light";
  }
  showTheme(Kept.get("localStorage", "theme"));
  byId("theme").addEventListener("click", () => {
    const theme = showTheme(document.documentElement.dataset.theme) === "dark" ? "light" : "dark";
    showTheme(theme);
    Kept.put("localStorage", "theme", theme);
  });

  // ---- Dialogs

  for (const close of document.querySelectorAll("[data-close]")) {
    close.addEventListener("click", () => close.closest("dialog").close());
  }

  for (const field of SAMPLING) {
    if (!Number.isFinite(settings[field.name])) delete settings[field.name];
    const box = element("input");
    box.type = "number";
    box.id = `sampling-${field.name}`;
    box.placeholder = "default";
    for (const name of ["min", "max"]) if (name in field) box[name] = field[name];
    box.step = field.step === 1 ? 1 : "any";
    box.value = settings[field.name] ?? "";
    box.addEventListener("input", () => {
      if (box.value === "" || !box.validity.valid) delete settings[field.name];
      else settings[field.name] = box.valueAsNumber;
      save();
    });
    byId("sampling").append(element("label", "", field.label, box));
  }
  byId("reset").addEventListener("click", () => {
    for (const { name } of SAMPLING) {
      delete settings[name];
      byId(`sampling-${name}`).value = "";
    }
    save();
  });
  const system = byId("system");
  system.value = settings.system = isText(settings.system) ? settings.system : "";
  system.addEventListener("input", () => {
    settings.system = system.value;
    save();
  });
  byId("keep").checked = settings.keep !== false;
  byId("keep").addEventListener("change", () => {
    settings.keep = byId("keep").checked;
    save();
  });
  byId("open-settings").addEventListener("click", () => byId("settings").showModal());
  byId("settings").addEventListener("submit", (event) => event.preventDefault());
  byId("change-key").addEventListener("click", async () => {
    byId("settings").close();
    if (await askKey("The key of this server, if it needs one.")) connect();
  });

  let asking = null;
  /** Asks for the API key. False if the user gives none. */
  function askKey(reason) {
    asking ??= new Promise((resolve) => {
      const dialog = byId("key-dialog");
      const field = byId("key");
      let isGiven = false;
      byId("key-reason").textContent = reason;
      field.value = "";
      const onSubmit = (event) => {
        event.preventDefault();
        const key = field.value.trim();
        // A header is made of visible ASCII; nothing else can be a key.
        field.setCustomValidity(/^[!-~]+$/.test(key) ? "" : "A key is made of visible ASCII characters.");
        if (!field.reportValidity()) return;
        Server.useKey(key);
        isGiven = true;
        dialog.close();
      };
      const clear = () => field.setCustomValidity("");
      field.addEventListener("input", clear);
      dialog.addEventListener("submit", onSubmit);
      dialog.addEventListener("close", () => {
        dialog.removeEventListener("submit", onSubmit);
        field.removeEventListener("input", clear);
        field.value = "";
        asking = null;
        input.focus();
        resolve(isGiven);
      }, { once: true });
      dialog.showModal();
      field.focus();
    });
    return asking;
  }

  Server.onKeyNeeded = askKey;
  Server.onLoading = (share, stage) => showState("wait", `Loading${share}`, stage);
  showAll();
  fitInput();
  connect();
})();
