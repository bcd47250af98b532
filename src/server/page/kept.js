// What is kept in the browser: texts under names. Whatever is read may have been written by others.
const Kept = (() => {
  const isText = (value) => typeof value === "string";

  /** Storage may be full or forbidden; then nothing is kept, and this is false. */
  function put(storage, name, value) {
    try {
      if (value === null) window[storage].removeItem(`tinyvllm.${name}`);
      else window[storage].setItem(`tinyvllm.${name}`, value);
      return true;
    } catch {
      return false;
    }
  }

  function get(storage, name) {
    try {
      return window[storage].getItem(`tinyvllm.${name}`);
    } catch {
      return null;
    }
  }

  function storedJson(name, storage = "localStorage") {
    try {
      const value = JSON.parse(get(storage, name));
      return typeof value === "object" && value !== null ? value : {};
    } catch {
      return {};
    }
  }

  return { get, isText, put, storedJson };
})();
