// How a message looks on the page: its text, its files, what can be done with it; and an answer while it grows.
const MessageView = (() => {
  const { element } = Markdown;

  function button(text, onClick, label = "") {
    const node = element("button", "quiet", text);
    node.type = "button";
    if (label) node.setAttribute("aria-label", label);
    node.addEventListener("click", onClick);
    return node;
  }

  /** A text that can be opened: reasoning, a file. */
  function fold(className, title, text) {
    const body = element("div", "", text);
    body.dir = "auto";
    return element("details", className, element("summary", "", title), body);
  }

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
      if (isUser) this.fillUser();
      else this.painter = new Painter(this);
    }

    fillUser() {
      const { content, files = [] } = this.message;
      this.text.textContent = content;
      this.text.hidden = content === "";
      for (const { name, text } of files) this.text.before(fold("file", name, text));
    }

    /** What can be done: pairs of a name and what it does, each with a longer name for those who do not see. */
    showTools(tools) {
      this.tools.replaceChildren(...tools.map(([text, label, onClick]) => button(text, onClick, label)));
    }

    /** Which of several versions this is, and the way to the others. */
    showVersions(number, count, onStep) {
      if (count < 2) return;
      const back = button("‹", () => onStep(-1), "Previous version");
      const forward = button("›", () => onStep(1), "Next version");
      back.disabled = number === 1;
      forward.disabled = number === count;
      this.tools.prepend(element("span", "versions", back, `${number} / ${count}`, forward));
    }

    /** A field to change the text in; `onSend` gets the new text. */
    edit(onSend, onClose) {
      const area = element("textarea");
      area.value = this.message.content;
      area.rows = Math.min(area.value.split("\n").length + 1, 12);
      area.dir = "auto";
      area.setAttribute("aria-label", "Edit message");
      const close = () => {
        editor.remove();
        this.root.classList.remove("editing");
        this.text.hidden = this.message.content === "";
        this.foot.hidden = false;
        onClose();
      };
      const submit = () => {
        const content = area.value.trim();
        if (!content && !this.message.files) return;
        close();
        onSend(content);
      };
      area.addEventListener("keydown", (event) => {
        if (event.key === "Escape") {
          event.stopPropagation();
          close();
        } else if (MessageView.isSendKey(event)) {
          event.preventDefault();
          submit();
        }
      });
      const send = element("button", "primary", "Send");
      send.type = "button";
      send.addEventListener("click", submit);
      const editor = element("div", "editor", area, element("div", "buttons", button("Cancel", close), send));
      this.text.hidden = this.foot.hidden = true;
      this.root.classList.add("editing");
      this.text.before(editor);
      area.focus();
    }

    /** Enter that ends a composition of an input method is no wish to send. */
    static isSendKey(event) {
      return event.key === "Enter" && !event.shiftKey && !event.isComposing && event.keyCode !== 229;
    }
  }

  /** Shows an answer as it grows, and takes at most a sixth of the time for it, however long the answer is. */
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
      // Asking makes the browser lay the page out now, so that it is counted.
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
      const { message, foot } = this.view;
      if (!message.failure) return;
      const failure = element("p", "failure", message.failure);
      failure.setAttribute("role", "alert");
      foot.before(failure);
    }
  }

  return MessageView;
})();
