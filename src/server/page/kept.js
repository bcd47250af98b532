// Stores texts under names in the browser. They may have been written by others, so readers must check them.
const Kept = (() => {
  const isText = (value) => typeof value === "string";

  /** False if storage is full or forbidden. Then nothing is stored. */
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
