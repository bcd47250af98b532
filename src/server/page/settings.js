// What the user prefers: sampling, the system prompt, light or dark, what is kept; and the key.
const Settings = (() => {
  const { element } = Markdown;
  const { isText } = Kept;
  const byId = (id) => document.getElementById(id);

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

  const values = Kept.storedJson("settings");
  const save = () => Kept.put("localStorage", "settings", JSON.stringify(values));

  /** What a request says besides its messages. */
  function sampling() {
    const wanted = SAMPLING.filter(({ name }) => typeof values[name] === "number");
    return Object.fromEntries(wanted.map(({ name }) => [name, values[name]]));
  }

  for (const field of SAMPLING) {
    if (!Number.isFinite(values[field.name])) delete values[field.name];
    const box = element("input");
    box.type = "number";
    box.id = `sampling-${field.name}`;
    box.placeholder = "default";
    for (const name of ["min", "max"]) if (name in field) box[name] = field[name];
    box.step = field.step === 1 ? 1 : "any";
    box.value = values[field.name] ?? "";
    box.addEventListener("input", () => {
      if (box.value === "" || !box.validity.valid) delete values[field.name];
      else values[field.name] = box.valueAsNumber;
      save();
    });
    byId("sampling").append(element("label", "", field.label, box));
  }
  byId("reset").addEventListener("click", () => {
    for (const { name } of SAMPLING) {
      delete values[name];
      byId(`sampling-${name}`).value = "";
    }
    save();
  });
  const system = byId("system");
  system.value = values.system = isText(values.system) ? values.system : "";
  system.addEventListener("input", () => {
    values.system = system.value;
    save();
  });
  const keep = byId("keep");
  keep.checked = values.keep !== false;
  Library.keep(keep.checked);
  keep.addEventListener("change", () => {
    values.keep = keep.checked;
    Library.keep(keep.checked);
    save();
  });
  byId("open-settings").addEventListener("click", () => byId("settings").showModal());
  byId("settings").addEventListener("submit", (event) => event.preventDefault());
  for (const close of document.querySelectorAll("[data-close]")) {
    close.addEventListener("click", () => close.closest("dialog").close());
  }

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

  // ---- The key

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
        Composer.focus();
        resolve(isGiven);
      }, { once: true });
      dialog.showModal();
      field.focus();
    });
    return asking;
  }
  Server.onKeyNeeded = askKey;

  return { askKey, sampling, save, values };
})();
