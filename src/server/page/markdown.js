// Converts a growing Markdown text into DOM nodes, block by block. `Inline` converts the text of blocks. The same
// rules apply here: only text nodes, and each step looks at a character at most a fixed number of times.
const Markdown = (() => {
  const MAX_DEPTH = 8;
  const MAX_FORMULA = 5000;
  const MAX_BLANK_IN_FORMULA = 4;
  const { element, inline, region, safeAddress } = Inline;

  // ---- Blocks

  const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^\s`]{0,40})[^`]*$/;
  const HEADING = /^ {0,3}(#{1,6})(?=\s|$)/;
  const QUOTE = /^ {0,3}> ?/;
  const ITEM = /^( {0,12})([-*+]|\d{1,9}[.)])(?: {1,4}|$)/;
  /** The definition of a footnote. Other names would be confused with sets of letters. */
  const NOTE = /^ {0,3}\[\^(\d{1,3})\]:(?= |$)/;
  const isRule = (line) => line.length < 200 && /^ {0,3}([-*_])(?: *\1){2,} *$/.test(line);
  const isBlank = (line) => line.trim() === "";
  const beginsBlock = (line) =>
    FENCE.test(line) || HEADING.test(line) || QUOTE.test(line) || ITEM.test(line) || NOTE.test(line) || isRule(line) ||
    formulaBegin(line);

  const FORMULA = new RegExp(`^\\s*(\\$\\$(?!\\$)|\\\\\\[|\\\\begin\\{${Inline.ENVIRONMENT}\\})`);

  /**
   * A displayed formula that begins on this line: its delimiters, the text after the opening one, and the offset of
   * the closing one in it, or -1. Null if there is none, or if text follows it on the line: then it is part of a
   * paragraph.
   */
  function formulaBegin(line) {
    const match = FORMULA.exec(line);
    if (!match) return null;
    const [{ length: from }, opening] = match;
    const closing = Inline.closing(opening);
    const head = line.slice(from);
    const close = head.indexOf(closing);
    return close < 0 || isEnd(head.slice(close + closing.length)) ? { opening, closing, head, close } : null;
  }

  /** Whether this text may follow a formula. */
  const isEnd = (text) => /^\s*[.,;:]?\s*$/.test(text);

  /**
   * A displayed formula that is still open at the end of a line: its delimiters and the text after the opening one;
   * or null.
   */
  function leftOpen(line) {
    if (!/\$\$|\\\[|\\begin/.test(line)) return null;
    const last = Inline.findFormulas(line, true).at(-1);
    if (!last || last.isClosed || !FORMULA.test(last.mark)) return null;
    const head = line.slice(last.start + last.mark.length);
    return { opening: last.mark, closing: Inline.closing(last.mark), head };
  }

  /**
   * Where an open formula is closed: the line and the offset in it. The line is the number of lines if it may still
   * be closed. Null if it is not a formula.
   */
  function formulaEnd(lines, first, { opening, closing, head }, isOpen) {
    const isPrice = (text) => opening === "$$" && Inline.isProse(text);
    let begin = head;
    let length = head.length;
    let numBlank = 0;
    for (let end = first + 1; end < lines.length; end += 1) {
      // The previous line is complete.
      if (isPrice(begin)) return null;
      const line = lines[end];
      const close = line.indexOf(closing);
      if (isBlank(begin)) begin = close < 0 ? line : line.slice(0, close);
      const again = opening === closing ? -1 : line.indexOf(opening);
      // A decision about an incomplete line must also hold for the complete line.
      const isComplete = !isOpen || end < lines.length - 1;
      length += close < 0 ? line.length : close;
      numBlank += isComplete && isBlank(line) ? 1 : 0;
      const isOther = close < 0 && isComplete && FENCE.test(line) || again >= 0 && !(close >= 0 && close < again);
      if (length > MAX_FORMULA || numBlank > MAX_BLANK_IN_FORMULA || isOther) return null;
      if (close >= 0) return isPrice(begin) ? null : { end, close };
    }
    return isOpen ? { end: lines.length, close: -1 } : null;
  }

  function cells(line) {
    const found = [""];
    const inner = line.trim().replace(/^\|/, "").replace(/(^|[^\\])\|$/, "$1");
    const formulas = Inline.findFormulas(inner, false);
    for (let at = 0, next = 0; at < inner.length; at += 1) {
      while (formulas[next]?.end <= at) next += 1;
      const isInFormula = formulas[next]?.start <= at;
      if (inner[at] === "\\" && inner[at + 1] === "|") found[found.length - 1] += inner[(at += 1)];
      else if (inner[at] === "|" && !isInFormula) found.push("");
      else found[found.length - 1] += inner[at];
    }
    return found.map((cell) => cell.trim());
  }

  /** Whether a table begins at the line `at`. At the end of an open text, one line with a bar is enough. */
  function isTable(lines, at, isOpen) {
    const head = lines[at];
    if (!head.includes("|")) return false;
    const rule = lines[at + 1];
    const isLast = isOpen && at + 2 >= lines.length;
    if (isLast && (rule === undefined || rule === "")) return /^ {0,3}\|/.test(head);
    if (rule === undefined || rule.length > 5000 || !/^[\s|:-]+$/.test(rule)) return false;
    const isRow = rule.includes("-") && rule.includes("|");
    return isLast || (isRow && cells(rule).length === cells(head).length);
  }

  /** Splits lines into blocks. Each has its first line and the line after its last. */
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
    const formula = formulaAt(lines, first, isOpen);
    if (formula) return formula;
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
      let end = Math.min(first + 2, lines.length);
      while (end < lines.length && lines[end].includes("|")) end += 1;
      return { kind: "table", rows: lines.slice(first, end), first, end };
    }
    const block = paragraph(lines, first, false, isOpen);
    const note = NOTE.exec(line);
    return note ? { ...block, kind: "note", number: note[1], text: block.text.slice(block.text.indexOf(":") + 1).trim() } : block;
  }

  function paragraph(lines, first, isDeep, isOpen) {
    let end = first;
    for (let rest = lines[first]; rest !== undefined; ) {
      const mark = leftOpen(rest);
      const found = mark && formulaEnd(lines, end, mark, isOpen);
      if (found) {
        // Lines of a formula may look like anything.
        end = found.end;
        rest = lines[end]?.slice(found.close + mark.closing.length);
        continue;
      }
      end += 1;
      rest = lines[end];
      if (rest === undefined || isBlank(rest)) break;
      if (!isDeep && (beginsBlock(rest) || isTable(lines, end, isOpen))) break;
    }
    return { kind: "paragraph", text: lines.slice(first, end).map((line) => line.trim()).join("\n"), first, end };
  }

  /** The formula that begins on a line of its own, or null. */
  function formulaAt(lines, first, isOpen) {
    const begin = formulaBegin(lines[first]);
    if (!begin) return null;
    const { opening, closing, head } = begin;
    const isEnvironment = opening.startsWith("\\begin");
    const isPrice = opening === "$$" && begin.close >= 0 && Inline.isProse(head.slice(0, begin.close));
    const inLine = isPrice ? null : { end: first, close: begin.close };
    const found = begin.close < 0 ? formulaEnd(lines, first, begin, isOpen) : inLine;
    if (!found) return null;
    const { end, close } = found;
    const source = lines.slice(first, end + 1).join("\n");
    const inner = [head, ...lines.slice(first + 1, end + 1)];
    if (close >= 0) {
      const tail = inner.at(-1).slice(close + closing.length);
      if (!isEnd(tail)) return null;
      inner.push(inner.pop().slice(0, close) + (isEnvironment ? closing : "") + tail.trim());
    }
    if (isEnvironment) inner[0] = opening + inner[0];
    return { kind: "formula", inner, source, isClosed: close >= 0, first, end: close < 0 ? end : end + 1 };
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
    const block = { inner, isClosed, first, end: isClosed ? end + 1 : end };
    if (fence[2].toLowerCase() !== "math") return { kind: "code", language: fence[2], ...block };
    return { kind: "formula", source: inner.join("\n"), ...block };
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
      // A blank line that is indented further belongs to a nested list.
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
      case "formula": return buildFormula(block, isOpen);
      case "note": return buildNote(block, isOpen);
      default: return inline(element("p"), block.text, isOpen);
    }
  }

  function fillBlocks(parent, lines, isOpen, depth) {
    const blocks = parse(lines, isOpen, depth);
    blocks.forEach((block, index) => parent.append(build(block, isOpen && index === blocks.length - 1)));
    return parent;
  }

  function buildNote({ number, text }, isOpen) {
    const node = inline(element("p", "note"), text, isOpen);
    node.prepend(element("sup", "", number), " ");
    node.dataset.note = number;
    node.tabIndex = -1;
    return node;
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

  function codeText({ inner, isClosed }, isOpen) {
    const isPartOfFence = isOpen && !isClosed && /^ {0,3}[`~]{1,}$/.test(inner.at(-1) ?? "");
    return (isPartOfFence ? inner.slice(0, -1) : inner).join("\n");
  }

  function buildFormula(block, isOpen) {
    const isGrowing = isOpen && !block.isClosed;
    const tex = codeText(block, isOpen);
    // A dollar at the end of a growing text is half of a closing delimiter.
    const math = Formula.math(isGrowing ? tex.replace(/\$$/, "") : tex, true, isGrowing);
    if (!math) return element("div", "code", region(element("pre", "", element("code", "", block.source)), "Formula"));
    return region(element("div", "formula display", math), "Formula");
  }

  function buildCode(block, isOpen) {
    const copy = element("button", "quiet", "Copy");
    copy.type = "button";
    copy.dataset.copy = "code";
    const node = element("code");
    const text = codeText(block, isOpen);
    if (isOpen) node.append(document.createTextNode(text));
    else Code.colour(node, text, block.language.toLowerCase());
    const name = block.language || "text";
    const head = element("div", "code-head", element("span", "", name), copy);
    return element("div", "code", head, region(element("pre", "", node), `Code, ${name}`));
  }

  /** A growing text. Blocks that can no longer change are built once; only the last ones are rebuilt. */
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
      const block = blocks.at(-1);
      // The last line is incomplete, so a block with only this line may still join the previous block. So may a
      // table, which is recognised only by its second line.
      const isSure = blocks.length < 2 || block.first < lines.length - (block.kind === "table" ? 2 : 1);
      const numFixed = isOpen ? Math.max(blocks.length - (isSure ? 1 : 2), 0) : blocks.length;
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
