// What is kept in the browser: texts under names. Whatever is read may have been written by others.
const Kept = (() => {
  const isText = (value) => typeof value === "string";

  /** Storage may be full or forbidden; then nothing is kept. */
  function put(storage, name, value) {
    try {
      if (value === null) window[storage].removeItem(`tinyvllm.${name}`);
      else window[storage].setItem(`tinyvllm.${name}`, value);
    } catch {}
  }

  function get(storage, name) {
    try {
      return window[storage].getItem(`tinyvllm.${name}`);
    } catch {
      return null;
    }
  }

  function storedJson(name) {
    try {
      const value = JSON.parse(get("localStorage", name));
      return typeof value === "object" && value !== null ? value : {};
    } catch {
      return {};
    }
  }

  return { get, isText, put, storedJson };
})();
