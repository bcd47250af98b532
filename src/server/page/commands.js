// TeX commands in formulas that are more than a symbol. Each one reads its own arguments.
const Commands = (() => {
  const NO_SPACE = { lspace: "0", rspace: "0" };
  /** An optional argument in brackets. */
  const OPTION = /\[[^\]{}]{0,40}\]/y;
  const LENGTH = /\s?-?[\d.]{1,9}\s?[a-z]{2}/y;

  /** From a name to a function that reads one item and returns its node, or null if nothing is shown. */
  const COMMANDS = new Map();
  const define = (names, command) => {
    for (const name of names.split(" ")) COMMANDS.set(name, command);
  };
  const ordinary = (node) => ({ node, kind: "ord" });

  // ---- Fractions and roots

  const inStyle = (reader, displaystyle, node) =>
    ordinary(reader.node("mstyle", { displaystyle, scriptlevel: "0" }, node));
  const fraction = (reader, attributes, above = reader.argument(), below = reader.argument()) =>
    reader.node("mfrac", attributes, above, below);
  const between = (reader, opening, closing, ...nodes) =>
    reader.node("mrow", {}, ...reader.fence(opening, "prefix"), ...nodes, ...reader.fence(closing, "postfix"));
  const stacked = (reader, ...parts) => fraction(reader, { linethickness: "0" }, ...parts);
  const binomial = (reader, ...parts) => between(reader, "(", ")", stacked(reader, ...parts));

  define("frac nicefrac sfrac", (reader) => ordinary(fraction(reader, {})));
  define("dfrac cfrac", (reader) => inStyle(reader, "true", fraction(reader, {})));
  define("tfrac", (reader) => inStyle(reader, "false", fraction(reader, {})));
  define("binom", (reader) => ordinary(binomial(reader)));
  define("dbinom", (reader) => inStyle(reader, "true", binomial(reader)));
  define("tbinom", (reader) => inStyle(reader, "false", binomial(reader)));
  /** Commands between the two parts of a fraction: what comes before goes above, what comes after goes below. */
  const INFIX = new Map([
    ["\\over", (reader, ...parts) => ordinary(fraction(reader, {}, ...parts))],
    ["\\atop", (reader, ...parts) => ordinary(stacked(reader, ...parts))],
    ["\\choose", (reader, ...parts) => ordinary(binomial(reader, ...parts))],
  ]);
  define("sqrt", (reader) => {
    const index = reader.option();
    const inner = reader.argument();
    return ordinary(index ? reader.node("mroot", {}, inner, index) : reader.node("msqrt", {}, inner));
  });

  // ---- Delimiters

  define("left", (reader) => {
    const row = () => reader.nodes(reader.row(""));
    const nodes = [...reader.fence(reader.delimiter(), "prefix"), ...row()];
    while (reader.takes("\\middle")) nodes.push(...reader.fence(reader.delimiter(), "infix"), ...row());
    reader.expect("\\right");
    nodes.push(...reader.fence(reader.delimiter(), "postfix"));
    return { node: reader.node("mrow", {}, ...nodes), kind: "inner" };
  });
  const SIDES = [["l", "prefix", "open"], ["r", "postfix", "close"], ["m", "infix", "rel"]];
  for (const [name, height] of [["big", "1.2em"], ["Big", "1.8em"], ["bigg", "2.4em"], ["Bigg", "3em"]]) {
    const sign = (reader, form, text) => {
      const size = { stretchy: "true", symmetric: "true", minsize: height, maxsize: height };
      return reader.node("mo", { form, ...size, ...(form === "infix" ? {} : NO_SPACE) }, text);
    };
    for (const [end, form, kind] of SIDES) {
      define(name + end, (reader) => ({ node: sign(reader, form, reader.delimiter()), kind }));
    }
    define(name, (reader) => {
      const text = reader.delimiter();
      const isOpening = /[([{⟨⌊⌈]/.test(text);
      return { node: sign(reader, isOpening ? "prefix" : "postfix", text), kind: isOpening ? "open" : "ord" };
    });
  }
  for (const [name, opening, closing] of [
    ["bra", "⟨", "|"], ["ket", "|", "⟩"], ["braket", "⟨", "⟩"], ["abs", "|", "|"], ["norm", "‖", "‖"],
    ["ceil", "⌈", "⌉"], ["floor", "⌊", "⌋"],
  ]) {
    define(name, (reader) => ordinary(between(reader, opening, closing, reader.argument())));
  }

  // ---- Above and below

  const withSign = (name, attributes, stretchy, sign) => (reader) =>
    ordinary(reader.node(name, attributes, reader.argument(), reader.node("mo", { stretchy }, sign)));
  /** Scripts of a brace are placed above or below the brace. */
  const withBrace = (command) => (reader) => ({ ...command(reader), limits: true });
  for (const [name, sign] of Symbols.ACCENTS) define(name, withSign("mover", { accent: "true" }, "false", sign));
  for (const [name, sign] of Symbols.WIDE_ABOVE) define(name, withSign("mover", { accent: "true" }, "true", sign));
  for (const [name, sign] of Symbols.WIDE_BELOW) {
    define(name, withSign("munder", { accentunder: "true" }, "true", sign));
  }
  for (const name of ["overbrace", "overbracket", "overparen", "underbrace", "underbracket", "underparen"]) {
    define(name, withBrace(COMMANDS.get(name)));
  }
  // Few fonts have lines of every length, so they are drawn.
  define("overline", withSign("mover", { class: "overlined" }, "false", "‾"));
  define("underline underbar", withSign("munder", { class: "underlined" }, "false", "_"));
  for (const [name, sign] of Symbols.LONG_ARROWS) {
    define(name, (reader) => {
      const wide = (node) => reader.node("mrow", {}, reader.space(0.4), node, reader.space(0.4));
      const below = reader.option();
      const above = wide(reader.script());
      const arrow = reader.node("mo", { stretchy: "true" }, sign);
      const parts = below ? ["munderover", {}, arrow, wide(below), above] : ["mover", {}, arrow, above];
      return { node: reader.node(...parts), kind: "rel" };
    });
  }
  const attached = (name) => (reader) => {
    const script = reader.script();
    const base = reader.argument();
    return { node: reader.node(name, {}, base, script), kind: base.nodeName === "mo" ? "rel" : "ord" };
  };
  define("overset stackrel", attached("mover"));
  define("underset", attached("munder"));
  define("substack", (reader) => {
    reader.expect("{");
    const rows = reader.rows("", false);
    reader.expect("}");
    return ordinary(reader.table(rows, { class: "stack" }));
  });

  // ---- Letters, words and kinds

  for (const [names, style] of [
    ["mathrm mathup", "normal"], ["mathbf mathbfup", "bold"], ["mathit", "italic"], ["mathsf", "sans"],
    ["mathtt", "mono"], ["mathbb Bbb mathds", "double"], ["mathcal mathscr scr", "script"],
    ["mathfrak frak", "fraktur"], ["boldsymbol bm pmb mathbfit", "bold-italic"], ["mathnormal", null],
  ]) {
    define(names, (reader) => reader.deeper(() => {
      reader.style = style;
      return ordinary(reader.argument());
    }));
  }
  // These apply to everything that follows.
  for (const [name, style] of [
    ["rm", "normal"], ["bf", "bold"], ["it", "italic"], ["sf", "sans"], ["tt", "mono"], ["cal", "script"],
  ]) {
    define(name, (reader) => reader.deeper(() => {
      reader.style = style;
      return ordinary(reader.group(reader.nodes(reader.row(reader.stop))));
    }));
  }
  /** Commands for text in formulas, and its appearance. */
  const TEXTS = new Map();
  for (const [names, attributes] of [
    ["text textrm textnormal textup textsc mbox hbox", {}], ["textbf", { class: "bold" }],
    ["textit textsl emph", { class: "italic" }], ["textsf", { class: "sans" }], ["texttt", { class: "mono" }],
  ]) {
    for (const name of names.split(" ")) TEXTS.set(name, attributes);
    define(names, (reader) => ordinary(reader.group(reader.text(attributes))));
  }
  const words = (reader) => reader.text().map((node) => node.textContent).join("");
  define("operatorname operatornamewithlimits", (reader) => {
    const kind = reader.takes("*") ? "limits" : "function";
    return reader.leaf({ text: words(reader), kind });
  });
  define("mathop", (reader) => ({ node: reader.argument(), kind: "function", limits: true }));
  define("mathbin mathrel", (reader) => {
    const node = reader.node("mrow", {}, reader.space(0.2222), reader.argument(), reader.space(0.2222));
    return { node, kind: "rel" };
  });
  define("mathord mathinner mathopen mathclose mathpunct ensuremath", (reader) => ordinary(reader.argument()));
  define("bmod", (reader) => ({ node: reader.node("mo", {}, "mod"), kind: "bin" }));
  const modulo = (reader) => [reader.node("mi", {}, "mod"), reader.space(0.3333), reader.argument()];
  define("pmod", (reader) => {
    const [opening, closing] = ["(", ")"].map((text) => reader.node("mo", { stretchy: "false" }, text));
    return ordinary(reader.node("mrow", {}, reader.space(0.5), opening, ...modulo(reader), closing));
  });
  define("mod", (reader) => ordinary(reader.node("mrow", {}, reader.space(1), ...modulo(reader))));
  define("not", (reader) => {
    const token = reader.peek();
    const symbol = token.startsWith("\\") ? Symbols.NAMES.get(token.slice(1)) : Symbols.SIGNS.get(token);
    if (!symbol) return reader.unknown("\\not");
    reader.next();
    return reader.leaf({ text: `${symbol.text}\u0338`.normalize("NFC"), kind: "rel" });
  });

  // ---- Appearance

  for (const [name, displaystyle, scriptlevel] of [
    ["displaystyle", "true", "0"], ["textstyle", "false", "0"], ["scriptstyle", "false", "1"],
    ["scriptscriptstyle", "false", "2"],
  ]) {
    define(name, (reader) =>
      ordinary(reader.node("mstyle", { displaystyle, scriptlevel }, ...reader.nodes(reader.row(reader.stop)))));
  }
  const as = (name, attributes) => (reader) => ordinary(reader.node(name, attributes, reader.argument()));
  const hidden = as("mphantom", {});
  define("boxed fbox framebox", as("mrow", { class: "boxed" }));
  define("cancel bcancel xcancel sout", as("mrow", { class: "cancelled" }));
  define("phantom", hidden);
  define("hphantom", (reader) => ordinary(reader.node("mpadded", { height: "0", depth: "0" }, hidden(reader).node)));
  define("vphantom", (reader) => ordinary(reader.node("mpadded", { width: "0" }, hidden(reader).node)));
  define("smash", as("mpadded", { height: "0", depth: "0" }));
  define("color", (reader) => {
    reader.match(OPTION);
    reader.raw();
    return null;
  });
  define("textcolor colorbox", (reader) => {
    reader.match(OPTION);
    reader.raw();
    return ordinary(reader.argument());
  });
  define("hspace hskip kern mkern mskip", (reader) => {
    reader.match(/\*/y);
    const length = reader.raw() ?? reader.match(LENGTH) ?? "";
    const unit = { em: 1, ex: 0.5, mu: 1 / 18, pt: 0.1, cm: 2.8, mm: 0.28, in: 7.2 }[length.trim().slice(-2)];
    const width = Math.min(parseFloat(length) * (unit ?? 0), 10);
    return width > 0 ? { node: reader.space(Math.round(width * 100) / 100), kind: "space" } : null;
  });
  define("tag", (reader) => {
    const isBare = reader.takes("*");
    const name = words(reader);
    return ordinary(reader.node("mrow", {}, reader.space(2), reader.node("mtext", {}, isBare ? name : `(${name})`)));
  });
  define("ref eqref", (reader) => ordinary(reader.node("mtext", {}, `(${reader.raw() ?? ""})`)));
  define("label vspace", (reader) => {
    reader.raw();
    return null;
  });
  define("nonumber notag ! negthinspace hfill allowbreak nobreak relax strut mathstrut null noindent", () => null);
  define("limits nolimits displaylimits", () => null);

  // ---- Tables

  /** Lines between rows, and whether they take an argument in braces. */
  const RULES = new Map([
    ["\\hline", false], ["\\hdashline", false], ["\\toprule", false], ["\\midrule", false], ["\\bottomrule", false],
    ["\\cline", true],
  ]);
  const ALIGNED = { class: "aligned", displaystyle: "true" };
  const GATHERED = { class: "gathered", displaystyle: "true" };
  /** Environments: the attributes of their table, their delimiters, and the arguments after their name. */
  const ENVIRONMENTS = new Map();
  for (const [names, attributes, opening = "", closing = "", parameter = ""] of [
    ["matrix", {}], ["pmatrix", {}, "(", ")"], ["bmatrix", {}, "[", "]"], ["Bmatrix", {}, "{", "}"],
    ["vmatrix", {}, "|", "|"], ["Vmatrix", {}, "‖", "‖"], ["smallmatrix subarray", { class: "stack" }],
    ["array tabular", {}, "", "", "columns"],
    ["cases", { class: "cases" }, "{"], ["dcases", { class: "cases", displaystyle: "true" }, "{"],
    ["rcases drcases", { class: "cases" }, "", "}"],
    ["aligned align split eqnarray flalign equation displaymath math", ALIGNED],
    ["alignat alignedat xalignat", ALIGNED, "", "", "number"], ["gather gathered multline", GATHERED],
  ]) {
    for (const name of names.split(" ")) ENVIRONMENTS.set(name, { attributes, opening, closing, parameter });
  }

  /** The classes of an array's columns, from its TeX specification: `l`, `c`, `r`, lines. */
  function columnClasses(text) {
    const classes = [];
    let line = "";
    for (const [sign] of text.replace(/[@!>p]\{[^}]*\}/g, "").matchAll(/[lcr|]/g)) {
      if (sign === "|") {
        line = "lined";
      } else {
        classes.push([line, { l: "left", r: "right", c: "" }[sign]].filter(Boolean).join(" "));
        line = "";
      }
    }
    return classes;
  }

  define("begin", (reader) => {
    const name = reader.raw()?.replace("*", "");
    const environment = ENVIRONMENTS.get(name);
    if (!environment) {
      if (reader.isAtEnd()) return null;
      reader.fail();
    }
    const { attributes, opening, closing, parameter } = environment;
    reader.match(OPTION);
    const columns = parameter && reader.raw();
    const rows = reader.deeper(() => reader.rows("", attributes === ALIGNED));
    reader.expect("\\end");
    if (reader.raw()?.replace("*", "") !== name && !reader.isAtEnd()) reader.fail();
    const table = reader.table(rows, attributes, columns && parameter === "columns" ? columnClasses(columns) : []);
    return { node: opening || closing ? between(reader, opening, closing, table) : table, kind: "inner" };
  });

  return { ALIGNED, COMMANDS, INFIX, NO_SPACE, RULES, TEXTS };
})();
