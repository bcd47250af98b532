// The user's settings: sampling, the system prompt, light or dark, storage; and the key.
const Settings = (() => {
  const { element } = Markdown;
  const { isText } = Kept;
  const byId = (id) => document.getElementById(id);

  const SAMPLING = [
    { name: "temperature", label: "Temperature", min: 0, max: 2, step: 0.05 },
    { name: "top_p", label: "Top-p", min: 0, max: 1, step: 0.01 },
    { name: "top_k", label: "Top-k", min: -1, step: 1 },
    { name: "min_p", label: "Min-p", min: 0, max: 1, step: 0.01 },
    { name: "max_tokens", label: "Longest answer", min: 1, step: 1, none: "no limit" },
    { name: "seed", label: "Seed", step: 1, none: "random" },
    { name: "repetition_penalty", label: "Repetition penalty", min: 0, max: 2, step: 0.05 },
    { name: "presence_penalty", label: "Presence penalty", min: -2, max: 2, step: 0.1 },
    { name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2, step: 0.1 },
  ];

  const values = Kept.storedJson("settings");
  const save = () => Kept.put("localStorage", "settings", JSON.stringify(values));

  /** The fields of a request besides its messages. */
  function sampling() {
    const wanted = SAMPLING.filter(({ name }) => typeof values[name] === "number");
    return Object.fromEntries(wanted.map(({ name }) => [name, values[name]]));
  }

  for (const field of SAMPLING) {
    if (!Number.isFinite(values[field.name])) delete values[field.name];
    const box = element("input");
    box.type = "number";
    box.id = `sampling-${field.name}`;
    box.placeholder = field.none ?? "default";
    for (const name of ["min", "max"]) if (name in field) box[name] = field[name];
    box.step = field.step === 1 ? 1 : "any";
    box.value = values[field.name] ?? "";
    const trouble = element("span", "trouble");
    trouble.id = `trouble-${field.name}`;
    trouble.setAttribute("role", "alert");
    box.setAttribute("aria-describedby", trouble.id);
    box.addEventListener("input", () => {
      const isValid = box.validity.valid;
      if (!isValid || box.value === "") delete values[field.name];
      else values[field.name] = box.valueAsNumber;
      trouble.textContent = isValid ? "" : `${limits(field)}. The default is used.`;
      box.setAttribute("aria-invalid", String(!isValid));
      save();
    });
    const label = element("label", "", field.label);
    label.htmlFor = box.id;
    byId("sampling").append(element("div", "field", label, box, trouble));
  }

  /** The valid range of a value. */
  function limits({ min, max, step }) {
    const kind = step === 1 ? "A whole number" : "A number";
    if (max !== undefined) return `${kind} from ${min} to ${max}`;
    return min === undefined ? kind : `${kind}, at least ${min}`;
  }

  /** Shows the defaults of the model and the server for values that are not set. */
  async function askDefaults() {
    try {
      const { preferred_sampling_params: defaults } = await (await Server.request("model_info")).json();
      for (const { name, none } of SAMPLING) {
        const value = defaults?.[name];
        if (!none && Number.isFinite(value)) byId(`sampling-${name}`).placeholder = String(value);
      }
      const longest = defaults?.max_new_tokens;
      if (Number.isFinite(longest)) byId("sampling-max_tokens").placeholder = String(longest);
    } catch {
      // Other servers report no defaults, so none are shown.
    }
  }
  byId("reset").addEventListener("click", () => {
    for (const { name } of SAMPLING) {
      delete values[name];
      const box = byId(`sampling-${name}`);
      box.value = "";
      box.dispatchEvent(new Event("input"));
    }
    save();
  });
  const system = byId("system");
  system.value = values.system = isText(values.system) ? values.system : "";
  system.addEventListener("input", () => {
    values.system = system.value;
    save();
    self.onSystem();
  });
  const names = byId("names");
  names.checked = values.names !== false;
  names.addEventListener("change", () => {
    values.names = names.checked;
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
      byId("key-reason").hidden = reason === "";
      field.value = "";
      const onSubmit = (event) => {
        event.preventDefault();
        const key = field.value.trim();
        // A header consists of visible ASCII, so a key does too.
        field.setCustomValidity(/^[!-~]+$/.test(key) ? "" : "A key has no spaces, no accents and no signs from other alphabets. Copy it once more.");
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

  const self = {
    askDefaults,
    askKey,
    sampling,
    save,
    values,
    /** Called when the system prompt of new conversations has changed. */
    onSystem: () => {},
  };
  return self;
})();
