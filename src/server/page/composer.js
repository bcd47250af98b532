// Where one writes: the text, the files that go with it, Enter.
const Composer = (() => {
  const { element } = Markdown;
  const byId = (id) => document.getElementById(id);
  const input = byId("input");
  /** Bytes of a file, at most. Few models read so much. */
  const MAX_FILE = 1 << 20;
  const MAX_FILES = 16;
  /** name and text of each. */
  let files = [];

  function fit() {
    input.style.height = "auto";
    input.style.height = `${input.scrollHeight}px`;
  }

  function showFiles() {
    const chips = files.map((file) => {
      const remove = element("button", "quiet", "✕");
      remove.type = "button";
      remove.setAttribute("aria-label", `Remove ${file.name}`);
      remove.addEventListener("click", () => {
        files = files.filter((each) => each !== file);
        showFiles();
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
    input.focus();
  }

  function submit() {
    const content = input.value.trim();
    if ((!content && files.length === 0) || self.isBusy()) return;
    const sent = files;
    input.value = "";
    files = [];
    fit();
    showFiles();
    self.onSend(content, sent);
  }

  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
    input.focus();
  });
  input.addEventListener("input", fit);
  input.addEventListener("keydown", (event) => {
    if (!MessageView.isSendKey(event)) return;
    event.preventDefault();
    submit();
  });
  byId("attach").addEventListener("click", () => byId("file").click());
  byId("file").addEventListener("change", async () => {
    await attach([...byId("file").files]);
    byId("file").value = "";
  });
  // What comes with a text, such as the picture of a table, is left out for the text.
  input.addEventListener("paste", (event) => {
    const { files: pasted, types } = event.clipboardData;
    if (pasted.length === 0 || types.includes("text/plain")) return;
    event.preventDefault();
    attach([...pasted]);
  });
  // Else the browser would leave the page for the file.
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
    focus: () => input.focus(),
    /** Whether an answer is being given, so that nothing can be sent. */
    isBusy: () => false,
    /** Is given the text and the files of a message. */
    onSend: () => {},
    /** Is told why a file was not taken. */
    onTrouble: () => {},
  };
  return self;
})();
