// Access to the server: requests with the key, waiting while the model is loaded, server-sent events.
const Server = (() => {
  let apiKey = Kept.get("sessionStorage", "key") ?? "";

  class Failure extends Error {
    constructor(message, status = 0, retryAfter = null) {
      super(message);
      this.status = status;
      this.retryAfter = retryAfter;
    }
  }

  const sleep = (milliseconds, signal) => new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, milliseconds);
    signal?.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(signal.reason);
    });
  });

  async function send(path, options) {
    const headers = { ...options.headers, ...(apiKey && { authorization: `Bearer ${apiKey}` }) };
    try {
      return await fetch(path, { ...options, headers, credentials: "omit", cache: "no-store" });
    } catch (error) {
      if (options.signal?.aborted) throw error;
      throw new Failure("The server does not answer. It may have been stopped.");
    }
  }

  /** Sends until there is an answer: asks for a key if needed, and waits while the model is loaded. */
  async function request(path, options = {}) {
    for (let waits = 0; ; ) {
      const usedKey = apiKey;
      const response = await send(path, options);
      if (response.ok) return response;
      const body = await response.json().catch(() => null);
      const message = Kept.isText(body?.error?.message) ? body.error.message : `The server answered ${response.status}.`;
      options.signal?.throwIfAborted();
      if (response.status === 401) {
        // Another request may have asked meanwhile.
        const reason = usedKey ? `The server did not take this key: ${message}.` : "";
        if (apiKey === usedKey && !(await self.onKeyNeeded(reason))) throw new Failure(message, 401);
      } else if (response.status !== 503 || ++waits > 3 || !(await loads(options.signal))) {
        const seconds = Number.parseInt(response.headers.get("retry-after"), 10);
        throw new Failure(message, response.status, Number.isFinite(seconds) ? seconds : null);
      }
    }
  }

  /** Waits while the model is loaded. False if the server has another reason for not answering. */
  async function loads(signal) {
    for (;;) {
      const response = await send("health", { signal });
      const health = await response.json().catch(() => ({}));
      if (response.ok) return true;
      if (health.status !== "loading") return false;
      const share = typeof health.progress === "number" ? ` ${Math.round(health.progress * 100)} %` : "";
      self.onLoading(share, Kept.isText(health.stage) ? health.stage : "");
      await sleep(400, signal);
    }
  }

  /** The data of server-sent events. */
  async function* events(response) {
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    // An incomplete line may be long, so its chunks are joined once.
    let pieces = [];
    try {
      for (;;) {
        const { value, done } = await reader.read();
        if (done) return;
        const lines = value.split("\n");
        pieces.push(lines[0]);
        if (lines.length === 1) continue;
        lines[0] = pieces.join("");
        pieces = [lines.pop()];
        for (const line of lines) {
          if (line.startsWith("data:")) yield line.slice(5).trim();
        }
      }
    } finally {
      // Cancels the request if the reader stops, so that the server notices.
      reader.cancel().catch(() => {});
    }
  }

  /** The key, for this tab only. */
  function useKey(key) {
    apiKey = key;
    Kept.put("sessionStorage", "key", key);
  }

  const self = {
    Failure,
    events,
    request,
    sleep,
    useKey,
    /** Asks for a key, with a reason. Returns whether one was given. */
    onKeyNeeded: async () => false,
    /** Called with the progress of loading. */
    onLoading: () => {},
  };
  return self;
})();
