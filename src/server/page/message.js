// The view of a message: its text, its files, its actions; and an answer while it grows.
const MessageView = (() => {
  const { element } = Markdown;
  const isTouched = window.matchMedia("(pointer: coarse)");

  function button(text, onClick, label = "") {
    const node = element("button", "quiet", text);
    node.type = "button";
    if (label) node.setAttribute("aria-label", label);
    node.addEventListener("click", onClick);
    return node;
  }

  /** A text that can be unfolded: reasoning, a file. */
  function fold(className, title, text) {
    const body = element("div", "", text);
    body.dir = "auto";
    return element("details", className, element("summary", "", title), body);
  }

  /** A longer message of a user is folded: its limits in lines and characters. */
  const [MANY_LINES, MANY_CHARACTERS] = [16, 1600];

  /** Why an answer ended early, if nothing else shows it. */
  const ENDS = { broken: "Broken off: the page that received this answer was closed before its end." };

  class MessageView {
    constructor(message) {
      this.message = message;
      const isUser = message.role === "user";
      this.text = element("div", isUser ? "text" : "text markdown");
      this.text.dir = "auto";
      this.tools = element("div", "tools");
      this.numbers = element("span", "numbers");
      this.foot = element("div", "foot", this.numbers, this.tools);
      this.root = element("article", `message ${message.role}`, this.text, this.foot);
      this.root.setAttribute("aria-label", isUser ? "You" : "Model");
      this.shown = this.state;
      if (isUser) this.fillUser();
      else this.painter = new Painter(this);
    }

    /** A key that changes whenever the shown message does. */
    get state() {
      const { content, reasoning = "", tools = "", numbers, failure, end, growing } = this.message;
      return JSON.stringify([content.length, reasoning.length, tools.length, numbers, failure, end, growing]);
    }

    /** Whether a complete answer has changed: it was continued in this tab or another one. */
    get isStale() {
      return Boolean(this.painter?.isFinished) && this.shown !== this.state;
    }

    fillUser() {
      const { content, files = [] } = this.message;
      this.text.textContent = content;
      this.text.hidden = content === "";
      for (const { name, text } of files) this.text.before(fold("file", name, text));
      if (content.length > MANY_CHARACTERS || content.split("\n", MANY_LINES + 1).length > MANY_LINES) this.foldText();
    }

    /** Shows the start of a long message, with a button for all of it. */
    foldText() {
      const more = button("Show all", () => {
        const isFolded = this.text.classList.toggle("folded");
        more.textContent = isFolded ? "Show all" : "Show less";
        more.setAttribute("aria-expanded", String(!isFolded));
      });
      more.classList.add("unfold");
      more.setAttribute("aria-expanded", "false");
      this.text.classList.add("folded");
      this.text.after(more);
    }

    /** The actions: pairs of a name and a function, each with a longer name for screen readers. */
    showTools(tools) {
      this.tools.replaceChildren(...tools.map(([text, label, onClick]) => button(text, onClick, label)));
    }

    /** The number of the shown version, and buttons for the others. */
    showVersions(number, count, onStep) {
      if (count < 2) return;
      const back = button("‹", () => onStep(-1), "Previous version");
      const forward = button("›", () => onStep(1), "Next version");
      back.disabled = number === 1;
      forward.disabled = number === count;
      this.tools.prepend(element("span", "versions", back, `${number} / ${count}`, forward));
    }

    /** Scrolls to the error message, if there is one. */
    showTrouble() {
      this.root.querySelector(".failure, .ended")?.scrollIntoView({ block: "nearest" });
    }

    /**
     * A field to edit the text. `actions` have names and get the new text; the last one is the default. They return
     * what is wrong with the text, or nothing if it was accepted.
     */
    edit(actions, onClose) {
      const isUser = this.message.role === "user";
      const area = element("textarea");
      // The edited text survives a reload of the page.
      const draft = `edit.${this.message.id}`;
      area.value = Kept.get("sessionStorage", draft) ?? this.message.content;
      area.addEventListener("input", () => Kept.put("sessionStorage", draft, area.value));
      area.rows = Math.min(area.value.split("\n").length + 1, 12);
      area.dir = "auto";
      area.setAttribute("aria-label", isUser ? "Edit message" : "Edit answer");
      const hidden = [this.text, this.foot, ...this.root.querySelectorAll(".unfold, .ended, .failure")];
      const close = () => {
        editor.remove();
        Kept.put("sessionStorage", draft, null);
        this.root.classList.remove("editing");
        for (const node of hidden) node.hidden = false;
        this.text.hidden = this.message.content === "";
        onClose();
      };
      const trouble = element("p", "failure");
      trouble.setAttribute("role", "alert");
      trouble.hidden = true;
      const submit = async (act) => {
        const content = isUser ? area.value.trim() : area.value;
        if ((!content.trim() && !this.message.files) || area.readOnly) return;
        area.readOnly = true;
        trouble.textContent = await act(content);
        area.readOnly = false;
        trouble.hidden = trouble.textContent === "";
        if (trouble.hidden) close();
        else trouble.scrollIntoView({ block: "nearest" });
      };
      const usual = Object.values(actions).at(-1);
      area.addEventListener("keydown", (event) => {
        if (event.key === "Escape") {
          event.stopPropagation();
          close();
        } else if (isUser ? MessageView.sends(event) : MessageView.isSendKey(event) && (event.ctrlKey || event.metaKey)) {
          event.preventDefault();
          submit(usual);
        }
      });
      const buttons = Object.entries(actions).map(([name, act]) => button(name, () => submit(act)));
      buttons.at(-1).className = "primary";
      const editor = element("div", "editor", area, trouble,
        element("div", "buttons", button("Cancel", close), ...buttons));
      for (const node of hidden) node.hidden = true;
      this.root.classList.add("editing");
      this.text.before(editor);
      area.focus();
    }

    /** On-screen keyboards have no Shift with Enter: there, Enter begins a line, and a button sends. */
    static sends(event) {
      return MessageView.isSendKey(event) && (!isTouched.matches || event.ctrlKey || event.metaKey);
    }

    /** Enter that ends a composition of an input method does not send. */
    static isSendKey(event) {
      return event.key === "Enter" && !event.shiftKey && !event.isComposing && event.keyCode !== 229;
    }
  }

  /** Shows a growing answer. It takes at most a sixth of the time for that, for any length of the answer. */
  class Painter {
    constructor(view) {
      this.view = view;
      this.markdown = new Markdown.View(view.text);
      this.isRequested = false;
      this.isFinished = false;
      this.notBefore = 0;
      this.reasoning = null;
      this.tools = null;
      view.text.classList.add("waiting");
    }

    request() {
      if (this.isRequested) return;
      this.isRequested = true;
      const paint = () => {
        this.isRequested = false;
        if (!this.isFinished) this.paint(true);
      };
      setTimeout(() => requestAnimationFrame(paint), Math.max(this.notBefore - performance.now(), 0));
    }

    paint(isOpen) {
      const start = performance.now();
      const { message, text, numbers, root } = this.view;
      const hasText = message.content !== "";
      text.classList.toggle("waiting", isOpen && !hasText);
      if (hasText || !isOpen) this.markdown.render(message.content, isOpen);
      if (message.reasoning) this.paintReasoning(hasText);
      if (message.tools) this.paintTools();
      numbers.textContent = message.numbers ?? "";
      // Reading it forces the layout now, so that its time is counted.
      root.getBoundingClientRect();
      const end = performance.now();
      this.notBefore = end + 5 * (end - start);
    }

    paintReasoning(hasText) {
      if (!this.reasoning) {
        const details = fold("reasoning", "Reasoning", "");
        details.open = !hasText;
        this.reasoning = { details, text: details.lastChild.appendChild(document.createTextNode("")), isOver: hasText };
        this.view.text.before(details);
      }
      const { details, text, isOver } = this.reasoning;
      text.appendData(this.view.message.reasoning.slice(text.length));
      if (hasText && !isOver) {
        details.open = false;
        this.reasoning.isOver = true;
      }
    }

    paintTools() {
      if (!this.tools) {
        const pre = element("pre", "", element("code"));
        pre.tabIndex = 0;
        pre.setAttribute("role", "region");
        pre.setAttribute("aria-label", "Tool calls");
        this.tools = pre.firstChild;
        const head = element("div", "code-head", element("span", "", "Tool calls"));
        this.view.text.after(element("div", "code", head, pre));
      }
      this.tools.textContent = this.view.message.tools;
    }

    finish() {
      this.isFinished = true;
      this.paint(false);
      this.view.shown = this.view.state;
      const { message, foot, numbers } = this.view;
      if (message.more) {
        const more = element("details", "more", element("summary", "", "Details"), element("span", "", message.more));
        numbers.after(more);
      }
      if (message.failure) {
        const failure = element("p", "failure", message.failure);
        failure.setAttribute("role", "alert");
        foot.before(failure);
      } else if (ENDS[message.end]) {
        foot.before(element("p", "ended", ENDS[message.end]));
      }
    }
  }

  return MessageView;
})();
