// Formulas: converts TeX into MathML. Output of a model only becomes text nodes; elements and attributes are fixed
// words and numbers. If a formula cannot be parsed, the caller shows its source.
const Formula = (() => {
  const NAMESPACE = "http://www.w3.org/1998/Math/MathML";
  const MAX_LENGTH = 5000;
  const MAX_NODES = 4000;
  const MAX_DEPTH = 80;
  const THIN = 0.1667;

  const TOKEN = /\\(?:[A-Za-z]+|[^])|[^]/uy;
  const NUMBER = /\d{1,3}(?:,\d{3}){1,8}(?!,?\d)(?:\.\d+)?|\d+(?:\{,\}\d+){0,8}(?:\.\d+)?|\.\d+/y;
  const ROW_GAP = /\*?(?:\[ ?-?[\d.]{1,9} ?[a-z]{2} ?\])?/y;
  const ENDS = new Set(["", "}", "&", "\\\\", "\\cr", "\\right", "\\middle", "\\end"]);
  /** After these, a sign such as − is a prefix. */
  const UNARY_AFTER = new Set(["", "bin", "rel", "op", "function", "open", "punct"]);
  /** Styles in which adjacent letters are one word. */
  const WORD_STYLES = new Set(["normal", "bold", "italic", "sans", "mono"]);

  const { ALIGNED, COMMANDS, INFIX, NO_SPACE, RULES, TEXTS } = Commands;

  class Unreadable extends Error {}

  function setAttributes(node, attributes) {
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  }

  /** Parses a complete formula. `isOpen`: more text may come, so missing arguments at its end are omitted. */
  class Reader {
    constructor(tex, isOpen) {
      this.tex = tex;
      this.isOpen = isOpen;
      this.at = 0;
      this.depth = 0;
      this.numNodes = 0;
      this.style = null;
      /** In scripts, operators have no space around them. */
      this.isScript = false;
      /** Tokens that end the row, besides ENDS. */
      this.stop = "";
    }

    fail() {
      throw new Unreadable();
    }

    // ---- Nodes

    node(name, attributes, ...children) {
      if ((this.numNodes += 1) > MAX_NODES) this.fail();
      const node = document.createElementNS(NAMESPACE, name);
      setAttributes(node, attributes);
      node.append(...children);
      return node;
    }

    group(nodes) {
      return nodes.length === 1 ? nodes[0] : this.node("mrow", {}, ...nodes);
    }

    space(width) {
      return this.node("mspace", { width: `${width}em` });
    }

    ordinary(name, attributes, ...children) {
      return { node: this.node(name, attributes, ...children), kind: "ord" };
    }

    /** A delimiter as high as its contents. */
    fence(text, form) {
      const spaces = form === "infix" ? { lspace: `${THIN}em`, rspace: `${THIN}em` } : {};
      return text === "" ? [] : [this.node("mo", { form, stretchy: "true", ...spaces }, text)];
    }

    /** The nodes of a row. In a cell of aligned equations, the first sign has an operand before it. */
    nodes(items, isAligned = false) {
      const nodes = [];
      let before = isAligned ? "ord" : "";
      let isFirst = true;
      items.forEach(({ node, kind, core = node }, index) => {
        const previous = items[index - 1]?.kind;
        const after = items[index + 1]?.kind;
        const isUnary = kind === "bin" && UNARY_AFTER.has(before);
        const isTight = this.isScript && (kind === "bin" || kind === "rel") && core.nodeName === "mo";
        if (isUnary || isTight) setAttributes(core, NO_SPACE);
        else if (kind === "bin" && isFirst) setAttributes(core, { form: "infix" });
        if (kind === "function" && ["ord", "close", "inner"].includes(previous)) nodes.push(this.space(THIN));
        nodes.push(node);
        if (kind === "function" && ["ord", "open", "inner", "op", "function"].includes(after)) {
          nodes.push(this.node("mo", {}, "\u2061"));
          if (["ord", "op", "function"].includes(after)) nodes.push(this.space(THIN));
        }
        if (kind === "space") return;
        before = isUnary ? "ord" : kind;
        isFirst = false;
      });
      return nodes;
    }

    // ---- Tokens

    /** The next token, or "" at the end. Spaces before it have no meaning. */
    peek() {
      const { tex } = this;
      while (/\s/.test(tex[this.at] ?? "")) this.at += 1;
      TOKEN.lastIndex = this.at;
      const token = TOKEN.exec(tex)?.[0] ?? "";
      // The rest of a name may still come.
      const mayGoOn = this.isOpen && this.at + token.length === tex.length && /^\\[A-Za-z]*$/.test(token);
      return mayGoOn ? "" : token;
    }

    next() {
      const token = this.peek();
      this.at += token.length;
      return token;
    }

    takes(token) {
      const isNext = this.peek() === token;
      if (isNext) this.at += token.length;
      return isNext;
    }

    /** Whether the missing text may still come. */
    isAtEnd() {
      return this.isOpen && this.peek() === "";
    }

    expect(token) {
      if (!this.takes(token) && !this.isAtEnd()) this.fail();
    }

    /** The raw text in braces, or null if there is no brace. */
    raw() {
      if (this.peek() !== "{") return null;
      const from = this.at + 1;
      let nested = 0;
      for (let at = from; at < this.tex.length; at += 1) {
        const character = this.tex[at];
        if (character === "\\") at += 1;
        else if (character === "{") nested += 1;
        else if (character === "}" && nested-- === 0) {
          this.at = at + 1;
          return this.tex.slice(from, at);
        }
      }
      if (!this.isOpen) this.fail();
      this.at = this.tex.length;
      return "";
    }

    /** Matches a sticky expression at the current position, or null. */
    match(expression) {
      expression.lastIndex = this.at;
      const found = expression.exec(this.tex)?.[0] ?? null;
      this.at += found?.length ?? 0;
      return found;
    }

    // ---- Rows

    deeper(read) {
      if ((this.depth += 1) > MAX_DEPTH) this.fail();
      const { isScript, stop, style } = this;
      const found = read();
      Object.assign(this, { isScript, stop, style });
      this.depth -= 1;
      return found;
    }

    /** The items of a row, up to its end. */
    row(stop) {
      return this.deeper(() => {
        this.stop = stop;
        const items = [];
        for (let token = this.peek(); token !== stop && !ENDS.has(token); token = this.peek()) {
          if (INFIX.has(token)) {
            this.next();
            const [above, below] = [items, this.row(stop)].map((each) => this.group(this.nodes(each)));
            return [INFIX.get(token)(this, above, below)];
          }
          const item = this.nucleus();
          if (item) items.push(item.kind === "space" ? item : this.scripts(item));
        }
        return items;
      });
    }

    /** The rows of a table, up to its end: `{ cells, isRuled }`, where a cell is a list of nodes. */
    rows(stop, isAligned) {
      const rows = [];
      for (let isLast = false; !isLast; ) {
        const row = { cells: [], isRuled: false };
        while (RULES.has(this.peek())) {
          row.isRuled = true;
          if (RULES.get(this.next())) this.raw();
        }
        do {
          row.cells.push(this.nodes(this.row(stop), isAligned && row.cells.length > 0));
        } while (this.takes("&"));
        isLast = !this.takes("\\\\") && !this.takes("\\cr");
        if (!isLast) this.match(ROW_GAP);
        const isEmpty = row.cells.length === 1 && row.cells[0].length === 0;
        if (!isLast || !isEmpty || rows.length === 0) rows.push(row);
      }
      return rows;
    }

    table(rows, attributes, columns = []) {
      const cell = (nodes, index) => this.node("mtd", columns[index] ? { class: columns[index] } : {}, ...nodes);
      const line = ({ cells, isRuled }) => this.node("mtr", isRuled ? { class: "ruled" } : {}, ...cells.map(cell));
      return this.node("mtable", attributes, ...rows.map(line));
    }

    /** An argument of a command: a group in braces, or one sign. */
    argument() {
      return this.deeper(() => {
        if (ENDS.has(this.peek()) && !this.isAtEnd()) this.fail();
        return (this.peek() === "" ? null : this.nucleus(true))?.node ?? this.node("mrow", {});
      });
    }

    script() {
      return this.deeper(() => {
        this.isScript = true;
        return this.argument();
      });
    }

    option() {
      if (!this.takes("[")) return null;
      const items = this.row("]");
      this.expect("]");
      return this.group(this.nodes(items));
    }

    // ---- Items of a row

    /** A sign, a group, or a command with its arguments; null if nothing is shown. */
    nucleus(isAlone = false) {
      const token = this.peek();
      if (token === "^" || token === "_" || token === "'" || token === "’") return this.ordinary("mrow", {});
      if (/^[\d.]/.test(token)) return this.number(isAlone) ?? this.sign(this.next());
      this.next();
      if (token === "{") {
        const items = this.row("");
        this.expect("}");
        return { node: this.group(this.nodes(items)), kind: "ord" };
      }
      if (token === "~") return { node: this.space(Symbols.SPACES.get("~")), kind: "space" };
      if (!token.startsWith("\\") || token === "\\") return this.sign(token, isAlone);
      const name = token.slice(1);
      const command = COMMANDS.get(name);
      if (command) return command(this);
      const width = Symbols.SPACES.get(name);
      if (width !== undefined) return { node: this.space(width), kind: "space" };
      const symbol = Symbols.NAMES.get(name);
      return symbol ? this.leaf(symbol) : this.unknown(token);
    }

    number(isAlone) {
      const text = this.match(isAlone ? /\d/y : NUMBER);
      return text && this.ordinary("mn", {}, this.styled(text.replaceAll("{,}", ",")));
    }

    styled(text) {
      return this.style ? [...text].map((each) => Symbols.styled(each, this.style)).join("") : text;
    }

    sign(token, isAlone) {
      const symbol = Symbols.SIGNS.get(token);
      if (symbol) return this.leaf(symbol);
      if (!/\p{L}/u.test(token)) return this.ordinary("mtext", {}, token);
      // Letters that do not occur in formulas are words of a language.
      const isOther = !/[A-Za-z\p{Script=Greek}\u2100-\u214f\u{1d400}-\u{1d7ff}]/u.test(token);
      const run = isOther ? /[\p{L}\p{M}]+/uy : WORD_STYLES.has(this.style) ? /[A-Za-z]+/y : null;
      const text = token + (run && !isAlone ? this.match(run) ?? "" : "");
      if (isOther) return this.ordinary("mtext", {}, text);
      const isUpright = this.style === "normal" && text.length === 1;
      return this.ordinary("mi", isUpright ? { mathvariant: "normal" } : {}, this.styled(text));
    }

    leaf({ text, kind }) {
      switch (kind) {
        case "letter": {
          const attributes = this.style === "normal" ? { mathvariant: "normal" } : {};
          return this.ordinary("mi", attributes, this.styled(text));
        }
        case "upright": {
          const shown = this.style === "bold-italic" ? Symbols.styled(text, "bold") : this.styled(text);
          return this.ordinary("mi", /[Α-Ω∇]/.test(shown) ? { mathvariant: "normal" } : {}, shown);
        }
        case "function": {
          const attributes = text.length === 1 ? { mathvariant: "normal" } : {};
          return { node: this.node("mi", attributes, text), kind };
        }
        case "limits": {
          const node = this.node("mo", { movablelimits: "true", ...NO_SPACE }, text);
          return { node, kind: "function", limits: true };
        }
        case "large": return { node: this.node("mo", {}, text), kind: "op", limits: true };
        case "integral": return { node: this.node("mo", {}, text), kind: "op" };
        case "sign": return this.ordinary("mo", { stretchy: "false", ...NO_SPACE }, text);
        case "open":
        case "close": {
          // These look the same on both sides.
          const form = "|‖".includes(text) ? { form: kind === "open" ? "prefix" : "postfix" } : {};
          return { node: this.node("mo", { ...form, stretchy: "false" }, text), kind };
        }
        case "punct": return { node: this.node("mo", text === ":" ? { lspace: "0" } : {}, text), kind };
        default: return { node: this.node("mo", Symbols.VERTICAL.has(text) ? { stretchy: "false" } : {}, text), kind };
      }
    }

    /** An unknown command with its groups, as it was written. */
    unknown(token) {
      const from = this.at;
      while (this.tex[this.at] === "{") this.raw();
      return this.ordinary("mtext", { class: "unknown" }, token + this.tex.slice(from, this.at));
    }

    /** Adds subscripts and superscripts, next to or above and below the item. */
    scripts(item) {
      let [below, above, numPrimes] = [null, null, 0];
      let { limits } = item;
      for (;;) {
        if (this.takes("'") || this.takes("’")) numPrimes += 1;
        else if (above === null && this.takes("^")) above = this.script();
        else if (below === null && this.takes("_")) below = this.script();
        else if (this.takes("\\limits")) limits = "always";
        else if (this.takes("\\nolimits")) limits = false;
        else if (this.peek() === "^" || this.peek() === "_") this.fail();
        else break;
      }
      const { node, kind, core = node } = item;
      if (limits === "always" && core.nodeName === "mo") core.setAttribute("movablelimits", "false");
      if (numPrimes > 0) {
        const primes = this.node("mo", {}, ["′", "″", "‴", "⁗"][numPrimes - 1] ?? "′".repeat(numPrimes));
        above = above === null ? primes : this.node("mrow", {}, primes, above);
      }
      if (below === null && above === null) return item;
      const kinds = limits ? ["munder", "mover", "munderover"] : ["msub", "msup", "msubsup"];
      const name = kinds[above === null ? 0 : below === null ? 1 : 2];
      return { node: this.node(name, {}, node, ...[below, above].filter((each) => each !== null)), kind, core };
    }

    // ---- Text in formulas

    /** The text in braces as nodes. Formulas between dollars in it are parsed. */
    text(attributes = {}) {
      if (!this.takes("{")) return [this.node("mtext", attributes, this.next())];
      const nodes = [];
      let plain = "";
      const flush = () => {
        const shown = plain.replace(/\s+/g, " ").replace(/^ | $/g, "\u00a0");
        if (shown !== "") nodes.push(this.node("mtext", attributes, shown));
        plain = "";
      };
      for (let nested = 0; this.at < this.tex.length; ) {
        TOKEN.lastIndex = this.at;
        const token = TOKEN.exec(this.tex)[0];
        this.at += token.length;
        const name = token.slice(1);
        if (token === "}" && nested-- === 0) {
          flush();
          return nodes;
        }
        if (token === "{") nested += 1;
        else if (token === "$" || token === "\\(") {
          flush();
          const end = token === "$" ? "$" : "\\)";
          nodes.push(...this.nodes(this.row(end)));
          this.expect(end);
        } else if (token === "~") plain += "\u00a0";
        else if (Symbols.SPACES.has(name)) plain += Symbols.SPACES.get(name) < 0.3 ? "\u2009" : "\u00a0";
        else if (token.length > 1 && token.startsWith("\\")) plain += this.textCommand(name, token);
        else if (token !== "}") plain += token;
      }
      if (!this.isOpen) this.fail();
      flush();
      return nodes;
    }

    textCommand(name, token) {
      if (TEXTS.has(name)) return "";
      return Symbols.NAMES.get(name)?.text ?? token;
    }

    delimiter() {
      const token = this.next();
      const text = Symbols.delimiter(token);
      if (text === undefined && !this.isAtEnd()) this.fail();
      return text ?? "";
    }
  }

  /** The element of a formula, or null if it cannot be parsed. */
  function math(tex, isDisplay, isOpen = false) {
    if (tex.length > MAX_LENGTH || !isOpen && tex.trim() === "") return null;
    const reader = new Reader(tex, isOpen);
    try {
      // Rows and columns are accepted without an environment.
      const rows = reader.rows("", true);
      if (reader.peek() !== "") return null;
      const isTable = rows.length > 1 || rows[0].cells.length > 1;
      const row = reader.node("mrow", {}, ...(isTable ? [reader.table(rows, ALIGNED)] : rows[0].cells[0]));
      const source = reader.node("annotation", { encoding: "application/x-tex" }, tex);
      return reader.node("math", isDisplay ? { display: "block" } : {}, reader.node("semantics", {}, row, source));
    } catch (error) {
      if (error instanceof Unreadable) return null;
      throw error;
    }
  }

  return { math };
})();
