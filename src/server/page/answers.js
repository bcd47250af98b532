// Answers in progress: requests them, receives them, measures them, and stores them while they grow.
const Answers = (() => {
  const { isText } = Kept;
  /** Milliseconds between two times that a growing answer is stored. */
  const PAUSE = 1000;
  /** Milliseconds for other tabs to reply that they generate an answer. A tab without a reply is gone. */
  const REPLY_TIMEOUT_MS = 500;
  /** The id of this tab. A message that grows has it as its `growing`. */
  const tab = newId();
  /** Conversation's id → the answer in progress: its controller, conversation and message. */
  const running = new Map();

  // ---- One answer

  /**
   * Receives an answer, or the rest of one, into a message of the conversation. `body` is the request without its
   * messages.
   */
  async function give(conversation, message, turns, body) {
    const controller = new AbortController();
    const entry = { controller, conversation, message, keptAt: performance.now(), isKeeping: false };
    running.set(conversation.id, entry);
    for (const name of ["failure", "end", "numbers", "more"]) delete message[name];
    message.growing = tab;
    keep(entry);
    const timer = setInterval(() => keepIfDue(entry), PAUSE);
    const figures = { start: performance.now(), first: 0, chunks: 0 };
    try {
      await receive(entry, JSON.stringify({ messages: turns, ...body }), figures);
    } catch (error) {
      if (controller.signal.aborted) {
        message.end = "stopped";
        message.numbers = ["stopped", ...speed(figures)].join(" · ");
      } else {
        message.failure = words(error);
        if (message.content) message.end = "broken";
        if (error.status === 0 || !(error instanceof Server.Failure)) self.onLost();
      }
    }
    clearInterval(timer);
    delete message.growing;
    running.delete(conversation.id);
    self.onEnd(conversation, message);
    await keep(entry);
  }

  /** The text of an error for the user. */
  function words(error) {
    if (!(error instanceof Server.Failure)) return "The answer broke off: the connection was lost.";
    const wait = error.retryAfter ?? null;
    return wait === null ? error.message : `${error.message} Try again in ${wait} s.`;
  }

  async function receive(entry, body, figures) {
    const { conversation, message, controller } = entry;
    const headers = { "content-type": "application/json" };
    const options = { method: "POST", headers, body, signal: controller.signal };
    const response = await Server.request("v1/chat/completions", options);
    self.onReady();
    const calls = [];
    let [reason, usage, timings] = [null, null, null];
    for await (const data of Server.events(response)) {
      if (data === "[DONE]") {
        Object.assign(message, summary(figures, reason, usage, timings));
        if (reason === "length") message.end = "length";
        if (Number.isFinite(usage?.total_tokens)) self.onCounted(conversation, usage.total_tokens);
        return;
      }
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Server.Failure(String(chunk.error.message ?? chunk.error), -1);
      usage = chunk.usage ?? usage;
      timings = chunk.timings ?? timings;
      const reading = progress(chunk.prompt_progress);
      const choice = chunk.choices?.[0];
      reason = choice?.finish_reason ?? reason;
      const { content, reasoning_content, reasoning, tool_calls } = choice?.delta ?? {};
      const thought = reasoning_content ?? reasoning;
      if (isText(content)) message.content += content;
      if (isText(thought)) message.reasoning = (message.reasoning ?? "") + thought;
      if (Array.isArray(tool_calls)) message.tools = addToolCalls(calls, tool_calls);
      if (content || thought || tool_calls) {
        figures.first ||= performance.now();
        figures.chunks += 1;
        message.numbers = speed(figures).join(" · ");
        keepIfDue(entry);
      } else if (reading && !figures.first) {
        message.numbers = reading;
      } else {
        continue;
      }
      self.onGrow(message);
    }
    throw new Server.Failure("The answer broke off before its end.", -1);
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

  // ---- Figures

  const whole = (count) => count.toLocaleString("en");

  /** The progress of the prompt; empty if it was computed at once. */
  function progress(report) {
    const [read, all] = [Number(report?.processed), Number(report?.total)];
    return read < all ? `Reading the prompt ${whole(read)} / ${whole(all)}` : "";
  }

  /** The figures during an answer. A chunk is about a token. */
  function speed({ start, first, chunks }) {
    if (!first) return [];
    const seconds = (performance.now() - first) / 1e3;
    const rate = chunks > 4 && seconds > 0.2 ? [`${((chunks - 1) / seconds).toFixed(1)} tokens/s`] : [];
    return [...rate, `first token after ${duration(first - start)}`];
  }

  function duration(milliseconds) {
    return milliseconds < 1000 ? `${Math.round(milliseconds)} ms` : `${(milliseconds / 1e3).toFixed(1)} s`;
  }

  /** The line of figures for a complete answer, and its details. */
  function summary({ start, first }, reason, usage, timings) {
    const [numbers, more] = [[], []];
    if (Number.isFinite(usage?.completion_tokens)) numbers.push(`${usage.completion_tokens} tokens`);
    const rate = timings?.output_tokens_per_second;
    if (Number.isFinite(rate)) numbers.push(`${rate.toFixed(1)} tokens/s`);
    if (reason === "length") numbers.push("cut off at the longest length");
    if (first) more.push(`first token after ${duration(first - start)}`);
    const cached = usage?.prompt_tokens_details?.cached_tokens ?? timings?.cached_tokens;
    if (Number.isFinite(cached)) more.push(`${cached} of ${usage?.prompt_tokens ?? "?"} prompt tokens cached`);
    const [drafted, accepted] = [timings?.draft_tokens, timings?.accepted_draft_tokens];
    if (drafted > 0) more.push(`${accepted} of ${drafted} drafted tokens accepted`);
    return { numbers: numbers.join(" · "), more: more.join(" · ") };
  }

  // ---- Stored while it grows

  /** Stores the conversation, unless it was deleted meanwhile. */
  async function keep(entry) {
    entry.keptAt = performance.now();
    if (!Library.all.has(entry.conversation.id)) return;
    entry.isKeeping = true;
    await Library.save(entry.conversation);
    entry.isKeeping = false;
  }

  /** Both the next chunk and a timer trigger it, because timers of hidden tabs are slow. */
  function keepIfDue(entry) {
    if (!entry.isKeeping && performance.now() - entry.keptAt >= PAUSE) keep(entry);
  }

  // ---- Answers of other tabs, and abandoned ones

  /** Tabs that said they are generating an answer, since they were last asked. */
  let alive = new Set();
  let isAsking = false;

  /** Marks answers that grew in a tab that is gone. */
  async function settle() {
    const strangers = () => [...Library.all.values()].flatMap((conversation) =>
      conversation.messages.filter(({ growing }) => growing && growing !== tab).map((message) => [conversation, message]));
    const asked = strangers().map(([, { id, growing }]) => `${id} ${growing}`);
    if (isAsking || asked.length === 0) return;
    isAsking = true;
    alive = new Set();
    Library.notify({ whoGives: true });
    await Server.sleep(REPLY_TIMEOUT_MS);
    isAsking = false;
    for (const [conversation, message] of strangers()) {
      // Tabs that began meanwhile were not asked.
      if (alive.has(message.growing) || !asked.includes(`${message.id} ${message.growing}`)) continue;
      delete message.growing;
      message.end = "broken";
      delete message.numbers;
      self.onEnd(conversation, message);
      Library.save(conversation);
    }
  }

  Library.isOurs = (id) => running.has(id);
  Library.onMessage = (said) => {
    if (said?.whoGives && running.size > 0) Library.notify({ gives: tab });
    if (isText(said?.gives)) alive.add(said.gives);
    if (isText(said?.stop)) running.get(said.stop)?.controller.abort();
  };
  setInterval(settle, 3 * PAUSE);

  /** Stops the answer of a conversation, in this tab or another one. */
  function stop(id) {
    const entry = running.get(id);
    if (entry) entry.controller.abort();
    else Library.notify({ stop: id });
  }

  // A partial answer is stored if the tab is closed before its end.
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) running.forEach(keep);
  });

  const self = {
    give,
    running,
    settle,
    stop,
    words,
    /** Called with the number of tokens of a conversation. */
    onCounted: () => {},
    /** Called at the end of a message. */
    onEnd: () => {},
    onGrow: () => {},
    /** Called when the server does not answer. */
    onLost: () => {},
    /** Called when the server answers again. */
    onReady: () => {},
  };
  return self;
})();
