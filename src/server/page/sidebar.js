// The list of conversations: search, rename, delete, files.
const Sidebar = (() => {
  const { element } = Markdown;
  const byId = (id) => document.getElementById(id);
  const sidebar = byId("sidebar");
  const toggle = byId("toggle-list");
  /** Whether it covers the conversation instead of being next to it. */
  const isNarrow = window.matchMedia("(max-width: 52rem)");
  /** Size limit of a file of conversations in bytes. */
  const MAX_IMPORT = 64 << 20;

  function small(text, label, onClick) {
    const node = element("button", "quiet", text);
    node.type = "button";
    node.setAttribute("aria-label", label);
    node.addEventListener("click", onClick);
    return node;
  }

  function nameButton(conversation, isCurrent) {
    const { name } = conversation;
    const open = element("button", "quiet name", name);
    open.type = "button";
    open.dir = "auto";
    open.title = `${name}\n${new Date(conversation.updated).toLocaleString()}`;
    if (isCurrent) open.setAttribute("aria-current", "true");
    if (conversation.isGrowing) {
      open.classList.add("growing");
      open.append(element("span", "hidden", " (an answer is being given)"));
    }
    open.addEventListener("click", () => {
      self.onOpen(conversation);
      if (isNarrow.matches) show(false);
    });
    return open;
  }

  function row(conversation, isCurrent) {
    const item = element("li", "", nameButton(conversation, isCurrent));
    item.dataset.id = conversation.id;
    if (!isCurrent) return item;
    const { name } = conversation;
    const file = Files.fileName(name);
    item.append(element("div", "tools",
      small("Rename", `Rename ${name}`, () => rename(conversation, item)),
      small(".md", `Save ${name} as Markdown`, () =>
        Files.save(`${file}.md`, "text/markdown", conversation.toMarkdown())),
      small(".json", `Save ${name} as JSON`, () =>
        Files.save(`${file}.json`, "application/json", Library.exportOne(conversation))),
      small("Delete", `Delete ${name}`, () => self.onDelete(conversation)),
    ));
    return item;
  }

  /** Replaces the name by a field. Nothing else moves, so that a click elsewhere hits its target. */
  function rename(conversation, item) {
    const field = element("input");
    field.value = conversation.name;
    field.maxLength = 200;
    field.setAttribute("aria-label", "Name of the conversation");
    let isOver = false;
    const finish = (isWanted) => {
      if (isOver) return;
      isOver = true;
      const title = field.value.trim();
      if (isWanted && title !== conversation.name) {
        conversation.title = title;
        Library.replace(conversation);
      }
      field.replaceWith(nameButton(conversation, true));
    };
    field.addEventListener("keydown", (event) => {
      const isEnter = MessageView.isSendKey(event);
      if (!isEnter && event.key !== "Escape") return;
      event.preventDefault();
      event.stopPropagation();
      finish(isEnter);
      item.firstChild.focus();
      self.onRename();
    });
    field.addEventListener("blur", () => finish(true));
    item.firstChild.replaceWith(field);
    field.select();
  }

  /** The state that the list was built from. */
  let shown = [];

  /** Updates the list. It keeps the focus, and a name that is being edited. */
  function render() {
    const list = byId("conversations");
    if (list.querySelector("input")) return;
    const words = byId("search").value;
    const found = Library.list(words);
    const current = self.current();
    const state = found.flatMap((each) => [each, each.name, each.updated, each.isGrowing, each.id === current?.id]);
    byId("no-conversations").textContent =
      found.length > 0 ? "" : words.trim() ? "Nothing was found." : "Conversations are kept here, in this browser.";
    byId("export").disabled = Library.all.size === 0;
    // A button that is being clicked stays, even if another tab adds to an answer.
    if (state.length === shown.length && state.every((part, index) => part === shown[index])) return;
    shown = state;
    const focused = document.activeElement;
    const item = focused?.closest("#conversations li");
    const place = [...(item?.querySelectorAll("button") ?? [])].indexOf(focused);
    list.replaceChildren(...found.map((each) => row(each, each.id === current?.id)));
    if (item) list.querySelector(`[data-id="${item.dataset.id}"]`)?.querySelectorAll("button")[place]?.focus();
  }

  function show(isOpen) {
    sidebar.hidden = !isOpen;
    byId("shade").hidden = !isOpen || !isNarrow.matches;
    toggle.setAttribute("aria-expanded", String(isOpen));
    for (const id of ["scroller", "footer"]) byId(id).inert = isOpen && isNarrow.matches;
    if (isOpen && isNarrow.matches) byId("search").focus();
  }

  function change() {
    const isOpen = sidebar.hidden;
    show(isOpen);
    if (!isNarrow.matches) Kept.put("localStorage", "list", isOpen ? "open" : "closed");
  }
  toggle.addEventListener("click", change);
  const showAsKept = () => show(!isNarrow.matches && Kept.get("localStorage", "list") !== "closed");
  isNarrow.addEventListener("change", showAsKept);
  const close = () => {
    show(false);
    toggle.focus();
  };
  byId("shade").addEventListener("click", close);
  sidebar.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !isNarrow.matches) return;
    event.stopPropagation();
    close();
  });
  byId("search").addEventListener("input", render);
  byId("export").addEventListener("click", () => {
    const day = new Date().toISOString().slice(0, 10);
    Files.save(`conversations-${day}.json`, "application/json", Library.exportAll());
  });
  byId("import").addEventListener("click", () => byId("import-file").click());
  byId("import-file").addEventListener("change", async () => {
    let [added, trouble] = [[], ""];
    for (const file of byId("import-file").files) {
      try {
        added = added.concat(await Library.importFile(file.name, await Files.read(file, MAX_IMPORT)));
      } catch (error) {
        trouble = error.message;
      }
    }
    byId("import-file").value = "";
    render();
    const count = added.length;
    self.onImport(trouble || `${count} ${count === 1 ? "conversation is" : "conversations are"} new.`, added[0]);
    if (count > 0 && isNarrow.matches) show(false);
  });
  showAsKept();

  const self = {
    render,
    /** Focuses the search field. */
    search: () => {
      show(true);
      byId("search").select();
    },
    toggle: change,
    /** The id of the open conversation. */
    current: () => null,
    onDelete: () => {},
    /** Called with the result, and the first new conversation. */
    onImport: () => {},
    onOpen: () => {},
    onRename: () => {},
  };
  return self;
})();
