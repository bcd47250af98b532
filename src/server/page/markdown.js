// Markdown as DOM nodes. What a model writes only ever becomes the text of a node, or the address of a link whose
// scheme is one of SCHEMES: there is no way from here to an attribute, a style or markup. No step looks at the same
// character more than a fixed number of times, whatever the text is.
const Markdown = (() => {
  const SCHEMES = ["http:", "https:", "mailto:"];
  const MAX_DEPTH = 8;
  const MAX_LABEL = 1000;
  const MAX_ADDRESS = 1000;
  const MAX_CLOSERS = 32;
  const MAX_BRACKETS = 8;
  const MAX_COLOURED = 20000;

  function element(name, className, ...children) {
    const node = document.createElement(name);
    if (className) node.className = className;
    node.append(...children);
    return node;
  }

  // ---- Inside a paragraph

  /** An address that may be followed, or null. */
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

  const isSpace = (character) => character === undefined || /\s/.test(character);
  const isWord = (character) => character !== undefined && /[\p{L}\p{N}_]/u.test(character);

  function runLength(text, at) {
    let end = at + 1;
    while (text[end] === text[at]) end += 1;
    return end - at;
  }

  /** One text's constructs. `isOpen`: more text may come, so what is begun at the end is shown as if it were closed. */
  class Inline {
    constructor(text, isOpen, depth) {
      this.text = text;
      this.isOpen = isOpen;
      this.depth = depth;
      /** Kinds of delimiters of which none is left. */
      this.missing = new Set();
      this.codeRuns = null;
      this.nextBracket = -1;
    }

    fill(parent) {
      const { text } = this;
      const special = /[\\`*_~[!<&\n]|https?:\/\//g;
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
        case "\\": return /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "") ? { node: text[at + 1], end: at + 2 } : null;
        case "&": return this.entity(at);
        case "`": return this.code(at);
        case "[": return this.link(at, "");
        case "!": return text[at + 1] === "[" ? this.link(at + 1, "Image: ") : null;
        case "<": return this.angle(at);
        case "h": return this.bare(at);
        default: return this.emphasis(at);
      }
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
      new Inline(inner, isUnfinished, depth + 1).fill(node);
      return { node, end: isUnfinished ? text.length : close + size };
    }

    /** Where emphasis that is open at `from` ends, or -1. */
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
        const run = runLength(text, at);
        const end = at + run;
        const fits = size === 2 ? run >= 2 : run === 1 || run === 3;
        const isClosing = fits && at > from && !isSpace(text[at - 1]) && text[at - 1] !== "\\";
        if (isClosing && !(mark === "_" && isWord(text[end]))) return end - size;
        at = end;
      }
      return -1;
    }

    /** Where a bracket that is open before `from` closes: at most `limit` characters on, or -1. */
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
      const fill = (node) => new Inline(prefix + label, false, MAX_DEPTH).fillText(node);
      if (end < 0) {
        const mayGoOn = this.isOpen && text.length - from < MAX_ADDRESS;
        return mayGoOn ? { node: prefix + label, end: text.length } : null;
      }
      const raw = text.slice(from, end);
      const tail = /^(?:\s{1,9}"[^"\n]{0,300}"\s{0,9})?\)/.exec(text.slice(end, end + 330));
      const address = tail && safeAddress(raw.startsWith("<") && raw.endsWith(">") ? raw.slice(1, -1) : raw);
      return address ? { node: link(address, fill), end: end + tail[0].length } : null;
    }

    /** The text of a link: emphasis and code, but no further links. */
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
    new Inline(text, isOpen, 0).fill(parent);
    return parent;
  }

  // ---- Blocks

  const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^\s`]{0,40})[^`]*$/;
  const HEADING = /^ {0,3}(#{1,6})(?=\s|$)/;
  const QUOTE = /^ {0,3}> ?/;
  const ITEM = /^( {0,12})([-*+]|\d{1,9}[.)])(?: {1,4}|$)/;
  const isRule = (line) => line.length < 200 && /^ {0,3}([-*_])(?: *\1){2,} *$/.test(line);
  const isBlank = (line) => line.trim() === "";
  const beginsBlock = (line) =>
    FENCE.test(line) || HEADING.test(line) || QUOTE.test(line) || ITEM.test(line) || isRule(line);

  function cells(line) {
    const found = [""];
    const inner = line.trim().replace(/^\|/, "").replace(/(^|[^\\])\|$/, "$1");
    for (let at = 0; at < inner.length; at += 1) {
      if (inner[at] === "\\" && inner[at + 1] === "|") found[found.length - 1] += inner[(at += 1)];
      else if (inner[at] === "|") found.push("");
      else found[found.length - 1] += inner[at];
    }
    return found.map((cell) => cell.trim());
  }

  /** Whether the lines at `at` begin a table. At the end of an open text, a first line with a bar may. */
  function isTable(lines, at, isOpen) {
    const head = lines[at];
    if (!head.includes("|")) return false;
    const rule = lines[at + 1];
    const isLast = isOpen && at + 2 >= lines.length;
    if (isLast && (rule === undefined || rule === "")) return /^ {0,3}\|/.test(head);
    if (rule === undefined || rule.length > 5000 || !/^[\s|:-]+$/.test(rule)) return false;
    return isLast || (rule.includes("-") && cells(rule).length === cells(head).length);
  }

  /** Divides lines into blocks; each knows its first line and the one behind its last. */
  function parse(lines, isOpen, depth = 0) {
    const blocks = [];
    for (let at = 0; at < lines.length; ) {
      if (isBlank(lines[at])) {
        at += 1;
        continue;
      }
      const block = depth > MAX_DEPTH ? paragraph(lines, at, true) : blockAt(lines, at, isOpen, depth);
      blocks.push(block);
      at = block.end;
    }
    return blocks;
  }

  function blockAt(lines, first, isOpen, depth) {
    const line = lines[first];
    const fence = FENCE.exec(line);
    if (fence) return code(lines, first, fence);
    const heading = HEADING.exec(line);
    if (heading) {
      const text = line.slice(heading[0].length).trim().replace(/ #+$/, "");
      return { kind: "heading", level: heading[1].length, text, first, end: first + 1 };
    }
    if (isRule(line)) return { kind: "rule", first, end: first + 1 };
    if (QUOTE.test(line)) {
      let end = first;
      while (end < lines.length && QUOTE.test(lines[end])) end += 1;
      const inner = lines.slice(first, end).map((each) => each.replace(QUOTE, ""));
      return { kind: "quote", inner, depth, first, end };
    }
    if (ITEM.test(line)) return list(lines, first, depth);
    if (isTable(lines, first, isOpen)) {
      let end = first + 1;
      while (end < lines.length && lines[end].includes("|")) end += 1;
      return { kind: "table", rows: lines.slice(first, end), first, end };
    }
    return paragraph(lines, first, false, isOpen);
  }

  function paragraph(lines, first, isDeep, isOpen) {
    let end = first + 1;
    while (end < lines.length && !isBlank(lines[end])) {
      if (!isDeep && (beginsBlock(lines[end]) || isTable(lines, end, isOpen))) break;
      end += 1;
    }
    return { kind: "paragraph", text: lines.slice(first, end).map((line) => line.trim()).join("\n"), first, end };
  }

  function code(lines, first, fence) {
    const indent = lines[first].search(/\S/);
    const [mark, size] = [fence[1][0], fence[1].length];
    const isClosing = (line) => {
      const text = line.trim();
      return text.length >= size && line.search(/\S/) < 4 && text === mark.repeat(text.length);
    };
    let end = first + 1;
    while (end < lines.length && !isClosing(lines[end])) end += 1;
    const strip = (line) => line.slice(Math.min(indent, Math.max(line.search(/\S/), 0)));
    const inner = lines.slice(first + 1, end).map(strip);
    const isClosed = end < lines.length;
    return { kind: "code", language: fence[2], inner, isClosed, first, end: isClosed ? end + 1 : end };
  }

  function list(lines, first, depth) {
    const [, indent, marker] = ITEM.exec(lines[first]);
    const isOrdered = /\d/.test(marker);
    const items = [];
    let isLoose = false;
    let wasBlank = false;
    let content = 0;
    let end = first;
    for (; end < lines.length; end += 1) {
      const line = lines[end];
      if (isBlank(line)) {
        wasBlank = true;
        items.at(-1).push("");
        continue;
      }
      const item = isRule(line) ? null : ITEM.exec(line);
      const column = line.search(/\S/);
      if (item && column < Math.max(indent.length + 2, content) && column <= indent.length + 1) {
        if (isOrdered !== /\d/.test(item[2])) break;
        content = item[0].length;
        items.push([line.slice(content)]);
      } else if (column >= Math.min(content, indent.length + 2)) {
        items.at(-1).push(line.slice(Math.min(column, content)));
      } else if (!wasBlank && !beginsBlock(line)) {
        items.at(-1).push(line.trim());
      } else {
        break;
      }
      // A blank line deeper inside is the matter of a list in this one.
      isLoose ||= wasBlank && column <= content;
      wasBlank = false;
    }
    return { kind: "list", items, isOrdered, isLoose, start: parseInt(marker, 10), depth, first, end };
  }

  // ---- Nodes

  function build(block, isOpen) {
    switch (block.kind) {
      case "heading": return inline(element(`h${Math.min(block.level + 2, 6)}`), block.text, isOpen);
      case "rule": return element("hr");
      case "quote": return fillBlocks(element("blockquote"), block.inner, isOpen, block.depth + 1);
      case "list": return buildList(block, isOpen);
      case "table": return buildTable(block.rows, isOpen);
      case "code": return buildCode(block, isOpen);
      default: return inline(element("p"), block.text, isOpen);
    }
  }

  function fillBlocks(parent, lines, isOpen, depth) {
    const blocks = parse(lines, isOpen, depth);
    blocks.forEach((block, index) => parent.append(build(block, isOpen && index === blocks.length - 1)));
    return parent;
  }

  function buildList({ items, isOrdered, isLoose, start, depth }, isOpen) {
    const node = element(isOrdered ? "ol" : "ul");
    if (isOrdered && start !== 1) node.start = start;
    items.forEach((lines, index) => {
      const task = /^\[([ xX])\] /.exec(lines[0]);
      const rest = task ? [lines[0].slice(4), ...lines.slice(1)] : lines;
      const item = fillBlocks(element("li"), rest, isOpen && index === items.length - 1, depth + 1);
      const firstNode = item.firstChild;
      if (!isLoose && firstNode?.nodeName === "P") firstNode.replaceWith(...firstNode.childNodes);
      if (task) item.prepend(task[1] === " " ? "☐ " : "☑ ");
      node.append(item);
    });
    return node;
  }

  function buildTable(rows, isOpen) {
    const head = cells(rows[0]);
    const sides = rows.length > 1 ? cells(rows[1]) : [];
    const row = (name, texts, isLast) => {
      const line = element("tr");
      head.forEach((_, column) => {
        const cell = inline(element(name), texts[column] ?? "", isLast && column >= texts.length - 1);
        const side = sides[column] ?? "";
        if (side.endsWith(":")) cell.style.textAlign = side.startsWith(":") ? "center" : "end";
        line.append(cell);
      });
      return line;
    };
    const body = element("tbody");
    rows.slice(2).forEach((line, index) => {
      body.append(row("td", cells(line), isOpen && index === rows.length - 3));
    });
    const table = element("table", "", element("thead", "", row("th", head, isOpen && rows.length === 1)), body);
    return region(element("div", "table", table), "Table");
  }

  /** What can be wider than the page is reached by keyboard, to be scrolled. */
  function region(node, name) {
    node.tabIndex = 0;
    node.setAttribute("role", "region");
    node.setAttribute("aria-label", name);
    return node;
  }

  function codeText({ inner, isClosed }, isOpen) {
    const isPartOfFence = isOpen && !isClosed && /^ {0,3}[`~]{1,}$/.test(inner.at(-1) ?? "");
    return (isPartOfFence ? inner.slice(0, -1) : inner).join("\n");
  }

  function buildCode(block, isOpen) {
    const copy = element("button", "quiet", "Copy");
    copy.type = "button";
    copy.dataset.copy = "code";
    const node = element("code");
    const text = codeText(block, isOpen);
    if (isOpen || text.length > MAX_COLOURED) node.append(document.createTextNode(text));
    else colour(node, text, block.language.toLowerCase());
    const name = block.language || "text";
    const head = element("div", "code-head", element("span", "", name), copy);
    return element("div", "code", head, region(element("pre", "", node), `Code, ${name}`));
  }

  const HASH = ["python", "py", "sh", "bash", "shell", "zsh", "yaml", "yml", "toml", "ruby", "rb", "r", "dockerfile", "make"];
  const DASH = ["sql", "lua", "haskell", "hs"];
  const PLAIN = ["", "text", "txt", "plain", "plaintext", "markdown", "md", "diff", "html", "xml", "svg", "console"];
  const KEYWORDS = new Set((
    "abstract alias and as async await break case catch class const continue crate def default defer del do done elif " +
    "else elsif end enum except export extends extern false False fi final finally fn for from func function global go " +
    "if impl implements import in interface is lambda let loop match mod module move mut namespace new nil None nonlocal " +
    "not null None or package pass private protected pub public raise ref return self Self static struct super switch " +
    "then this throw trait true True try type typeof union unsafe until use using var void where while with yield " +
    "select insert update delete create table into values set join on group by order limit " +
    "SELECT INSERT UPDATE DELETE CREATE TABLE FROM WHERE INTO VALUES SET JOIN ON GROUP BY ORDER LIMIT AND OR NOT NULL AS"
  ).split(" "));

  function colour(parent, text, language) {
    if (PLAIN.includes(language)) {
      parent.append(text);
      return;
    }
    const comment = HASH.includes(language) ? "#[^\\n]*"
      : DASH.includes(language) ? "--[^\\n]*" : "\\/\\/[^\\n]*|\\/\\*[^]*?(?:\\*\\/|$)";
    const single = language === "rust" || language === "rs" ? "'(?:[^'\\\\\\n]|\\\\.)'" : "'(?:[^'\\\\\\n]|\\\\.)*'?";
    const pieces = new RegExp(
      `(${comment})|("(?:[^"\\\\\\n]|\\\\.)*"?|${single}|\`(?:[^\`\\\\]|\\\\.)*\`?)|(\\b\\d[\\w.]*)|([A-Za-z_]\\w*)`, "g");
    const names = ["tok-comment", "tok-string", "tok-number"];
    let from = 0;
    for (const match of text.matchAll(pieces)) {
      const kind = match.slice(1, 4).findIndex((group) => group !== undefined);
      const name = kind >= 0 ? names[kind] : KEYWORDS.has(match[4]) ? "tok-keyword" : null;
      if (!name) continue;
      parent.append(text.slice(from, match.index), element("span", name, match[0]));
      from = match.index + match[0].length;
    }
    parent.append(text.slice(from));
  }

  /** A text that grows. Blocks that can no longer change are built once; only the last one is built again. */
  class View {
    constructor(root) {
      this.root = root;
      this.text = "";
      this.start = 0;
      /** The nodes of blocks that can still change. */
      this.live = [];
      this.openCode = null;
    }

    render(text, isOpen) {
      this.text = text;
      const lines = text.slice(this.start).split("\n");
      const blocks = parse(lines, isOpen);
      // The last line is not complete, so a block that has only this one may turn out to belong to the one before.
      const isSure = blocks.length < 2 || blocks.at(-1).first < lines.length - 1;
      const numFixed = isOpen ? Math.max(blocks.length - (isSure ? 1 : 2), 0) : blocks.length;
      const block = blocks.at(-1);
      if (this.openCode && isOpen && blocks.length === 1 && block.kind === "code" && !block.isClosed) {
        const data = codeText(block, isOpen);
        const node = this.openCode;
        if (data.startsWith(node.data)) node.appendData(data.slice(node.data.length));
        else node.data = data;
        return;
      }
      for (const node of this.live) node.remove();
      const nodes = blocks.map((each, index) => build(each, isOpen && index === blocks.length - 1));
      this.root.append(...nodes);
      this.live = nodes.slice(numFixed);
      // The language is known when its line is complete.
      const isOpenCode = isOpen && block?.kind === "code" && !block.isClosed && block.first < lines.length - 1;
      this.openCode = isOpenCode ? this.live.at(-1).querySelector("code").firstChild : null;
      if (numFixed > 0 && isOpen) {
        const fixed = lines.slice(0, blocks[numFixed].first);
        this.start += fixed.reduce((sum, line) => sum + line.length + 1, 0);
      }
    }
  }

  return { View, element, safeAddress };
})();
