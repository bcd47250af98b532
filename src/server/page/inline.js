// Converts the text of a paragraph into DOM nodes. Output of a model only becomes text nodes, or the address of a
// link whose scheme is in SCHEMES. It can never become another attribute, a style or markup. For any text, each step
// looks at a character at most a fixed number of times.
const Inline = (() => {
  const SCHEMES = ["http:", "https:", "mailto:"];
  const MAX_DEPTH = 8;
  const MAX_LABEL = 1000;
  const MAX_ADDRESS = 1000;
  const MAX_CLOSERS = 32;
  const MAX_BRACKETS = 8;
  /** A longer formula in a line may be wider than a narrow page. */
  const MAX_NARROW = 24;
  /** The longest text after a dollar that may still become a formula. */
  const MAX_UNSURE = 200;

  function element(name, className, ...children) {
    const node = document.createElement(name);
    if (className) node.className = className;
    node.append(...children);
    return node;
  }

  /** An address that links may have, or null. */
  function safeAddress(text) {
    let address;
    try {
      address = new URL(text);
    } catch {
      return null;
    }
    const hidesItsHost = address.username !== "" || address.password !== "";
    return SCHEMES.includes(address.protocol) && !hidesItsHost ? address.href : null;
  }

  function link(address, fill) {
    const node = element("a");
    node.href = address;
    node.title = address;
    node.target = "_blank";
    node.rel = "noopener noreferrer nofollow";
    fill(node);
    return node;
  }

  /** An element that can be wider than the page gets the keyboard's focus, so that it can be scrolled. */
  function region(node, name) {
    node.tabIndex = 0;
    node.setAttribute("role", "region");
    node.setAttribute("aria-label", name);
    return node;
  }

  const isSpace = (character) => character === undefined || /\s/.test(character);
  const isWord = (character) => character !== undefined && /[\p{L}\p{N}_]/u.test(character);

  function runLength(text, at) {
    let end = at + 1;
    while (text[end] === text[at]) end += 1;
    return end - at;
  }

  // ---- Formulas

  /** Environments that are formulas of their own. */
  const ENVIRONMENT = "(?:equation|align|alignat|flalign|gather|multline|eqnarray)\\*?";
  const MARKS = new RegExp(`\\\\(?:begin|end)\\{${ENVIRONMENT}\\}|\\\\[^]|\\$+|\``, "g");
  const CLOSING = { $: "$", $$: "$$", "\\(": "\\)", "\\[": "\\]" };

  /** The closing delimiter for an opening one, or undefined. */
  const closing = (mark) => (mark.startsWith("\\begin") ? mark.replace("begin", "end") : CLOSING[mark]);

  /** Whether a dollar may begin a formula. Dollars are also prices and shell variables. */
  function canOpen(text, at) {
    const next = text[at + 1];
    return next !== undefined && (!/[A-Za-z0-9]/.test(text[at - 1] ?? "") || "\\^_".includes(next));
  }

  /** Whether the text between two dollars is a formula. */
  function isBetweenDollars(inner, rest) {
    if (/^(?:\d|[A-Z][A-Z_])/.test(rest)) return false;
    if (!isSpace(inner[0]) && !isSpace(inner.at(-1))) {
      return inner.includes("\\") || !/[A-Za-z]{2} [A-Za-z]{2}|^\d[^]*\s[A-Za-z]{2}/.test(inner);
    }
    // With spaces, it has to look like one and contain no words.
    const bare = inner.replace(/\\[A-Za-z]+(?:\{[^{}]*\})?/g, " ");
    if (bare !== inner) return !/(?:^|\s)(?!d[a-z]\b)[a-z]{2,}(?![A-Za-z_^])/.test(bare);
    return /[\^_]|^\D[^]*=/.test(inner) && !/[A-Za-z]{2}/.test(inner);
  }

  /** Whether words come after two dollars. Then they are prices. */
  function isProse(inner) {
    const [line] = inner.trimStart().split("\n", 1);
    return /[a-z]{2}|[A-Za-z]{2} /.test(line) && !/[\\^_=+*/<>]/.test(line);
  }

  /** Whether the text between two delimiters is a formula. */
  function isFormula(text, from, to, mark) {
    const inner = text.slice(from, to);
    if (inner.trim() === "") return false;
    // Brackets with a backslash may be just brackets.
    if (mark === "\\[") return /[\\^_=<>+]/.test(inner);
    if (mark === "$$") return !isProse(inner);
    return mark !== "$" || isBetweenDollars(inner, text.slice(to + 1, to + 3));
  }

  /** Whether the text after a delimiter so far is the beginning of a formula. */
  function isLikely(rest, mark) {
    if (mark === "\\[") return /^\s*$|[\\^_=<>+]/.test(rest);
    if (mark === "$$") return !isProse(rest);
    return mark !== "$" || /[\\^_{=]/.test(rest) && rest.length < MAX_UNSURE;
  }

  /**
   * Finds the formulas of a text in turn. At the end of an open text, an unclosed formula counts if it looks like
   * one. A backtick ends the search, because programs are full of dollars.
   */
  function findFormulas(text, isOpen) {
    const found = [];
    /** Delimiters without a closing one. */
    const missing = new Set();
    const marks = new RegExp(MARKS);
    let open = null;
    const add = (end, to, isClosed) => {
      const { start, from, mark } = open;
      const tex = mark.startsWith("\\begin") ? text.slice(start, end) : text.slice(from, to);
      found.push({ start, end, tex, mark, isClosed });
    };
    for (;;) {
      const match = marks.exec(text);
      if (!match) {
        if (!open || open.mark === "$" || isOpen) break;
        missing.add(open.mark);
        marks.lastIndex = open.from;
        open = null;
        continue;
      }
      const [mark] = match;
      const at = match.index;
      const isEnd = open && mark === closing(open.mark);
      if (isEnd && isFormula(text, open.from, at, open.mark)) {
        add(at + mark.length, at, true);
        open = null;
        continue;
      }
      if (isEnd || mark === "`" || open?.mark === "$" && /^(?:\$|\\[([])/.test(mark)) open = null;
      const begins = closing(mark) && !missing.has(mark) && (mark !== "$" || canOpen(text, at));
      if (begins && (!open || mark === open.mark)) open = { start: at, from: at + mark.length, mark };
    }
    if (open && isOpen && isLikely(text.slice(open.from), open.mark)) add(text.length, text.length, false);
    return found;
  }

  /** A formula in a text, or its source if it cannot be parsed. */
  function formula({ start, end, tex, mark, isClosed }, text) {
    const source = text.slice(start, end);
    // Prices and other dollars look like the beginning of a formula at first.
    if (!isClosed && mark === "$") return source;
    const isDisplay = mark !== "$" && mark !== "\\(";
    const math = Formula.math(isClosed ? tex : tex.replace(/\$$/, ""), isDisplay, !isClosed);
    if (!math) return isClosed ? element("code", "", source) : source;
    const isNarrow = !isDisplay && math.firstChild.firstChild.textContent.length <= MAX_NARROW;
    return isNarrow ? math : region(element("span", isDisplay ? "formula display" : "formula", math), "Formula");
  }

  // ---- Everything

  /**
   * Parses the text of one paragraph. `isOpen`: more text may come, so open constructs at its end are shown as if
   * they were closed.
   */
  class Paragraph {
    constructor(text, isOpen, depth) {
      this.text = text;
      this.isOpen = isOpen;
      this.depth = depth;
      /** Delimiters that do not occur in the rest of the text. */
      this.missing = new Set();
      this.codeRuns = null;
      this.formulas = findFormulas(text, isOpen);
      this.nextBracket = -1;
    }

    fill(parent) {
      const { text } = this;
      const special = /[\\`*_~[!<&$\n]|https?:\/\//g;
      let from = 0;
      for (let match; (match = special.exec(text)); ) {
        const at = match.index;
        const found = this.construct(at);
        if (!found) {
          special.lastIndex = at + ("`*_~".includes(text[at]) ? runLength(text, at) : 1);
          continue;
        }
        if (at > from) parent.append(text.slice(from, at));
        if (found.node) parent.append(found.node);
        special.lastIndex = from = found.end;
      }
      if (from < text.length) parent.append(text.slice(from));
    }

    construct(at) {
      const { text } = this;
      switch (text[at]) {
        case "\n": return { node: element("br"), end: at + 1 };
        case "$": return this.formula(at);
        case "\\": return this.formula(at) ?? this.escape(at);
        case "&": return this.entity(at);
        case "`": return this.code(at);
        case "[": return this.note(at) ?? this.link(at, "");
        case "!": return text[at + 1] === "[" ? this.link(at + 1, "Image: ") : null;
        case "<": return this.angle(at);
        case "h": return this.bare(at);
        default: return this.emphasis(at);
      }
    }

    escape(at) {
      const next = this.text[at + 1] ?? "";
      return /[!-/:-@[-`{-~]/.test(next) ? { node: next, end: at + 2 } : null;
    }

    /** The formula at a position, or undefined. */
    formulaAround(at) {
      let [low, high] = [0, this.formulas.length];
      while (low < high) {
        const middle = (low + high) >> 1;
        if (this.formulas[middle].end <= at) low = middle + 1;
        else high = middle;
      }
      const found = this.formulas[low];
      return found?.start <= at ? found : undefined;
    }

    formula(at) {
      const found = this.formulaAround(at);
      return found?.start === at ? { node: formula(found, this.text), end: found.end } : null;
    }

    entity(at) {
      const match = /^&(amp|lt|gt|quot|#39|nbsp);/.exec(this.text.slice(at, at + 7));
      const characters = { amp: "&", lt: "<", gt: ">", quot: '"', "#39": "'", nbsp: "\u00a0" };
      return match && { node: characters[match[1]], end: at + match[0].length };
    }

    code(at) {
      const { text } = this;
      if (!this.codeRuns) {
        this.codeRuns = new Map();
        for (const match of text.matchAll(/`+/g)) {
          const starts = this.codeRuns.get(match[0].length) ?? [];
          starts.push(match.index);
          this.codeRuns.set(match[0].length, starts);
        }
        for (const starts of this.codeRuns.values()) starts.reverse();
      }
      const size = runLength(text, at);
      const starts = this.codeRuns.get(size) ?? [];
      while (starts.length > 0 && starts.at(-1) <= at) starts.pop();
      const close = starts.at(-1) ?? (this.isOpen ? text.length : -1);
      if (close < 0) return null;
      const inner = text.slice(at + size, close).replaceAll("\n", " ");
      const isPadded = inner.startsWith(" ") && inner.endsWith(" ") && inner.trim() !== "";
      const node = inner === "" ? "" : element("code", "", isPadded ? inner.slice(1, -1) : inner);
      return { node, end: Math.min(close + size, text.length) };
    }

    emphasis(at) {
      const { text, depth } = this;
      const mark = text[at];
      const run = runLength(text, at);
      if (this.isOpen && at + run === text.length) return { node: "", end: text.length };
      const size = run >= 2 ? 2 : 1;
      const isWrong = run > 3 || (mark === "~" && run !== 2) || (mark === "_" && isWord(text[at - 1]));
      if (isWrong || isSpace(text[at + run]) || depth >= MAX_DEPTH) return null;
      const close = this.closer(mark, size, at + size);
      const isUnfinished = close < 0 && this.isOpen && mark !== "_";
      if (close < 0 && !isUnfinished) return null;
      const inner = text.slice(at + size, isUnfinished ? text.length : close);
      const node = element(mark === "~" ? "del" : size === 2 ? "strong" : "em");
      new Paragraph(inner, isUnfinished, depth + 1).fill(node);
      return { node, end: isUnfinished ? text.length : close + size };
    }

    /** The end of the emphasis that is open at `from`, or -1. */
    closer(mark, size, from) {
      const { text } = this;
      const delimiter = mark.repeat(size);
      if (this.missing.has(delimiter)) return -1;
      for (let tries = 0, at = from; tries < MAX_CLOSERS; tries += 1) {
        at = text.indexOf(delimiter, at);
        if (at < 0) {
          this.missing.add(delimiter);
          return -1;
        }
        const formula = this.formulaAround(at);
        if (formula) {
          at = formula.end;
          continue;
        }
        const run = runLength(text, at);
        const end = at + run;
        const fits = size === 2 ? run >= 2 : run === 1 || run === 3;
        const isClosing = fits && at > from && !isSpace(text[at - 1]) && text[at - 1] !== "\\";
        if (isClosing && !(mark === "_" && isWord(text[end]))) return end - size;
        at = end;
      }
      return -1;
    }

    /** The closing bracket for one before `from`, at most `limit` characters on, or -1. */
    bracketEnd(from, limit, opening, closing) {
      const { text } = this;
      for (let at = from, nested = 0; at < text.length && at - from <= limit; at += 1) {
        const character = text[at];
        if (character === "\\") at += 1;
        else if (character === opening && (nested += 1) > MAX_BRACKETS) return -1;
        else if (character === closing && nested-- === 0) return at;
      }
      return -1;
    }

    /** The number of a footnote, which links to it. */
    note(at) {
      const match = /^\[\^(\d{1,3})\](?![(:])/.exec(this.text.slice(at, at + 7));
      if (!match) return null;
      const button = element("button", "quiet", match[1]);
      button.type = "button";
      button.dataset.noteOf = match[1];
      button.setAttribute("aria-label", `Footnote ${match[1]}`);
      return { node: element("sup", "", button), end: at + match[0].length };
    }

    link(at, prefix) {
      const { text } = this;
      if (this.nextBracket < at) {
        const found = text.indexOf("]", at);
        this.nextBracket = found < 0 ? Infinity : found;
      }
      if (this.nextBracket - at > MAX_LABEL) return null;
      const close = this.bracketEnd(at + 1, MAX_LABEL, "[", "]");
      if (close < 0 || text[close + 1] !== "(") return null;
      const label = text.slice(at + 1, close);
      const from = close + 2;
      const target = text.slice(from, from + MAX_ADDRESS);
      const space = target.search(/\s/);
      const paren = this.bracketEnd(from, MAX_ADDRESS, "(", ")");
      const end = space >= 0 && (paren < 0 || from + space < paren) ? from + space : paren;
      const fill = (node) => new Paragraph(prefix + label, false, MAX_DEPTH).fillText(node);
      if (end < 0) {
        const mayGoOn = this.isOpen && text.length - from < MAX_ADDRESS;
        return mayGoOn ? { node: prefix + label, end: text.length } : null;
      }
      const raw = text.slice(from, end);
      const tail = /^(?:\s{1,9}"[^"\n]{0,300}"\s{0,9})?\)/.exec(text.slice(end, end + 330));
      const address = tail && safeAddress(raw.startsWith("<") && raw.endsWith(">") ? raw.slice(1, -1) : raw);
      return address ? { node: link(address, fill), end: end + tail[0].length } : null;
    }

    /** The text of a link: it may have emphasis and code, but no links. */
    fillText(parent) {
      const plain = this.text.replace(/[*_~`]{1,3}/g, "");
      parent.append(plain.trim() === "" ? this.text : plain);
    }

    angle(at) {
      const close = this.text.slice(at + 1, at + MAX_ADDRESS).search(/[\s<>]/);
      if (close < 0 || this.text[at + 1 + close] !== ">") return null;
      const raw = this.text.slice(at + 1, at + 1 + close);
      const address = /^(?:https?:\/\/|mailto:)/i.test(raw) ? safeAddress(raw) : null;
      return address && { node: link(address, (node) => node.append(raw)), end: at + close + 2 };
    }

    bare(at) {
      if (isWord(this.text[at - 1])) return null;
      let raw = /^[^\s<>"'`|\\]*/.exec(this.text.slice(at, at + MAX_ADDRESS))[0];
      raw = raw.replace(/[.,:;!?*_~]+$/, "");
      while (raw.endsWith(")") && raw.split(")").length > raw.split("(").length) raw = raw.slice(0, -1);
      const address = safeAddress(raw);
      return address && { node: link(address, (node) => node.append(raw)), end: at + raw.length };
    }
  }

  function inline(parent, text, isOpen = false) {
    new Paragraph(text, isOpen, 0).fill(parent);
    return parent;
  }

  return { ENVIRONMENT, closing, element, findFormulas, inline, isProse, region, safeAddress };
})();
