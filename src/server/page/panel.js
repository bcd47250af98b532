// Information about the server: model, device, cache, speed. It is requested only while it is shown.
(() => {
  const { element } = Markdown;
  const byId = (id) => document.getElementById(id);
  const panel = byId("panel");
  const PAUSE = 1500;

  /** Series of the metrics by name: labels and value of the first one. */
  function readMetrics(text) {
    const found = new Map();
    for (const line of text.split("\n")) {
      const match = /^([\w:]+)\{(.*)\} (\S+)$/.exec(line);
      if (match && !found.has(match[1])) found.set(match[1], { labels: match[2], value: Number(match[3]) });
    }
    return found;
  }

  /** The value of a label, which may have escaped characters. */
  function label(series, name) {
    const match = new RegExp(`(?:^|,)${name}="((?:[^"\\\\]|\\\\.)*)"`).exec(series?.labels ?? "");
    return match ? match[1].replace(/\\(.)/g, (_, character) => (character === "n" ? "\n" : character)) : "";
  }

  const whole = (count) => count.toLocaleString("en", { maximumFractionDigits: 0 });
  const share = (part, all) => (all > 0 ? `${((100 * part) / all).toFixed(0)} %` : "none yet");

  /** Rows of a name and a text. `before` are the metrics of an earlier time. */
  function rows(server, model, metrics, before) {
    const value = (name) => metrics.get(name)?.value ?? 0;
    const seconds = before ? (metrics.time - before.time) / 1e3 : 0;
    const rate = (name) => Math.max(value(name) - (before?.get(name)?.value ?? 0), 0) / seconds;
    const speed = (name) => (seconds > 0 ? `${whole(rate(name))} tokens/s` : "…");
    const state = server.internal_states?.[0] ?? {};
    return [
      ["Model", server.model_path],
      ["Architecture", model.architectures?.[0]],
      ["Device", label(metrics.get("tinyvllm_build_info"), "device")],
      ["Context", `${whole(server.context_length)} tokens`],
      ["KV cache", `${whole(state.num_used_tokens)} of ${whole(server.max_total_tokens)} tokens in use`],
      ["Prefix cache", `${share(value("vllm:prefix_cache_hits_total"), value("vllm:prefix_cache_queries_total"))} of prompt tokens found`],
      ["Requests", `${state.num_running_reqs} running, ${state.num_waiting_reqs} waiting; at most ${server.max_running_requests} at once`],
      ["Generating", speed("vllm:generation_tokens_total")],
      ["Reading prompts", speed("vllm:prompt_tokens_total")],
      ["Program", `tinyvllm ${server.version}`],
    ].filter(([, text]) => Kept.isText(text) && text !== "");
  }

  let watches = 0;
  async function watch() {
    const number = ++watches;
    let before = null;
    while (panel.open && number === watches) {
      try {
        const [server, model] = await Promise.all(["server_info", "model_info"].map(async (path) => (await Server.request(path)).json()));
        const metrics = readMetrics(await (await Server.request("metrics")).text());
        metrics.time = performance.now();
        const shown = rows(server, model, metrics, before);
        byId("facts").replaceChildren(...shown.map(([name, text]) =>
          element("div", "", element("dt", "", name), element("dd", "", text))));
        byId("panel-trouble").textContent = "";
        before = metrics;
      } catch (error) {
        byId("panel-trouble").textContent = error.message;
      }
      await Server.sleep(PAUSE);
    }
  }

  byId("open-panel").addEventListener("click", () => {
    panel.showModal();
    watch();
  });
})();
