// The input: the text, its attached files, Enter.
const Composer = (() => {
  const { element } = Markdown;
  const byId = (id) => document.getElementById(id);
  const input = byId("input");
  /** Size limit of a file in bytes. Few models read that much. */
  const MAX_FILE = 1 << 20;
  const MAX_FILES = 16;
  /** A longer pasted text becomes a file. */
  const LONG_PASTE = 4000;
  /** The name and text of each. */
  let files = [];
  /** The name under which this tab stores the draft. */
  let draft = location.hash.slice(1) || "new";
  let isSending = false;

  function fit() {
    input.style.height = "auto";
    input.style.height = `${input.scrollHeight}px`;
  }

  /** Stores the draft, so that it survives a reload. */
  function keep() {
    const text = input.value;
    const isEmpty = text === "" && files.length === 0;
    const isKept = Kept.put("sessionStorage", `draft.${draft}`, isEmpty ? null : JSON.stringify({ text, files }));
    // If there is too little space, the text is stored without its files.
    if (!isKept) Kept.put("sessionStorage", `draft.${draft}`, JSON.stringify({ text }));
  }

  /** Shows the draft with this name. */
  function open(name) {
    draft = name;
    const kept = Kept.storedJson(`draft.${name}`, "sessionStorage");
    input.value = Kept.isText(kept.text) ? kept.text : "";
    files = (Array.isArray(kept.files) ? kept.files : []).filter((file) => Kept.isText(file?.name) && Kept.isText(file.text));
    complain("");
    fit();
    showFiles();
  }

  /** Stores the draft under another name from now on. */
  function rename(name) {
    Kept.put("sessionStorage", `draft.${draft}`, null);
    draft = name;
    keep();
  }

  /** Shows why a message was not sent. */
  function complain(text) {
    byId("trouble").textContent = text;
    byId("trouble").hidden = text === "";
  }

  function showFiles() {
    const chips = files.map((file) => {
      const remove = element("button", "quiet", "✕");
      remove.type = "button";
      remove.setAttribute("aria-label", `Remove ${file.name}`);
      remove.addEventListener("click", () => {
        files = files.filter((each) => each !== file);
        showFiles();
        keep();
        input.focus();
      });
      return element("li", "", element("span", "", file.name), remove);
    });
    byId("files").replaceChildren(...chips);
    byId("files").hidden = chips.length === 0;
  }

  async function attach(chosen) {
    for (const file of chosen) {
      try {
        if (files.length >= MAX_FILES) throw new Error(`At most ${MAX_FILES} files go with a message.`);
        files.push({ name: file.name, text: await Files.read(file, MAX_FILE) });
      } catch (error) {
        self.onTrouble(error.message);
      }
    }
    showFiles();
    keep();
    input.focus();
  }

  /** Attaches a pasted text as a file. A button inserts it into the message instead. */
  function attachText(text) {
    const numbers = files.map((file) => Number(/^Pasted text (\d+)$/.exec(file.name)?.[1] ?? 0));
    const file = { name: `Pasted text ${Math.max(0, ...numbers) + 1}`, text };
    files.push(file);
    showFiles();
    keep();
    const place = input.selectionStart;
    self.onTrouble("The long text is attached to the message.", "Write it into the message", () => {
      files = files.filter((each) => each !== file);
      input.setRangeText(text, place, place, "end");
      fit();
      showFiles();
      keep();
      input.focus();
    });
  }

  /** Sends the message. The draft stays until it is sent. */
  async function submit() {
    const content = input.value.trim();
    if ((!content && files.length === 0) || isSending || self.isBusy()) return;
    isSending = input.readOnly = true;
    try {
      if (!(await self.onSend(content, files))) return;
      input.value = "";
      files = [];
      fit();
      showFiles();
      keep();
    } finally {
      isSending = input.readOnly = false;
    }
  }

  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
    input.focus();
  });
  input.addEventListener("input", () => {
    fit();
    complain("");
    keep();
  });
  input.addEventListener("keydown", (event) => {
    if (!MessageView.sends(event)) return;
    event.preventDefault();
    submit();
  });
  byId("attach").addEventListener("click", () => byId("file").click());
  byId("file").addEventListener("change", async () => {
    await attach([...byId("file").files]);
    byId("file").value = "";
  });
  // If the clipboard has text, other data such as a picture of it is ignored.
  input.addEventListener("paste", (event) => {
    const { files: pasted, types } = event.clipboardData;
    const text = event.clipboardData.getData("text/plain");
    if (text.length > LONG_PASTE && files.length < MAX_FILES) {
      event.preventDefault();
      attachText(text.replaceAll("\r\n", "\n"));
    }
    if (pasted.length === 0 || types.includes("text/plain")) return;
    event.preventDefault();
    attach([...pasted]);
  });
  // Otherwise the browser would leave the page and open the file.
  const hasFiles = (event) => event.dataTransfer.types.includes("Files");
  document.addEventListener("dragover", (event) => hasFiles(event) && event.preventDefault());
  document.addEventListener("drop", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    attach([...event.dataTransfer.files]);
  });
  fit();

  const self = {
    attach,
    complain,
    focus: () => input.focus(),
    isEmpty: () => input.value === "" && files.length === 0,
    open,
    rename,
    /** Whether an answer is in progress, so that nothing can be sent. */
    isBusy: () => false,
    /** Called with the text and the files of a message. Returns whether it was accepted. */
    onSend: async () => false,
    /** Called with the reason and the way out when a file was refused or a text was cut. */
    onTrouble: () => {},
  };
  return self;
})();
