// Keyboard shortcuts, and the list of them.
const Shortcuts = (() => {
  const { element } = Markdown;
  const dialog = document.getElementById("shortcuts");
  const isMac = navigator.platform.startsWith("Mac");
  const command = isMac ? "⌘" : "Ctrl";

  const show = () => dialog.showModal();
  /** Shortcuts as shown to users, their actions, and how they are recognised. */
  const KEYS = [
    [`${command} + Shift + O`, "New chat", ({ shift, key }) => shift && key === "o", () => self.onNew()],
    [`${command} + K`, "Search conversations", ({ shift, key }) => !shift && key === "k", () => Sidebar.search()],
    [`${command} + Shift + S`, "Show or hide the list", ({ shift, key }) => shift && key === "s", () => Sidebar.toggle()],
    [`${command} + /`, "Show these keys", ({ key }) => key === "/", show],
  ];
  const OTHERS = [
    ["?", "Show these keys, outside of a text"],
    ["↑", "Edit the last message, where nothing is written"],
    ["Enter", "Send"],
    ["Shift + Enter", "Begin a line"],
    ["Esc", "Stop the answer"],
  ];

  const isText = (node) => node?.matches("textarea, select, input:not([type=checkbox])");

  document.addEventListener("keydown", (event) => {
    if (event.isComposing || document.querySelector("dialog[open]")) return;
    const { altKey, target } = event;
    if (isMac ? event.metaKey : event.ctrlKey) {
      const pressed = { shift: event.shiftKey, key: event.key.toLowerCase() };
      const found = altKey ? null : KEYS.find(([, , isPressed]) => isPressed(pressed));
      if (!found) return;
      event.preventDefault();
      found[3]();
    } else if (event.key === "?" && !isText(target)) {
      event.preventDefault();
      show();
    } else if (event.key === "ArrowUp" && target.id === "input" && Composer.isEmpty() && self.onEditLast()) {
      event.preventDefault();
    }
  });

  const rows = [...KEYS, ...OTHERS].map(([keys, what]) =>
    element("div", "", element("dt", "", element("kbd", "", keys)), element("dd", "", what)));
  document.getElementById("keys-list").append(...rows);
  document.getElementById("open-shortcuts").addEventListener("click", show);

  const self = {
    /** Edits the last message. Returns whether there was one. */
    onEditLast: () => false,
    onNew: () => {},
  };
  return self;
})();
