// Syntax colours for programs: comments, strings, numbers and the keywords of most languages.
const Code = (() => {
  const MAX_COLOURED = 20000;

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

  /** Appends a text in a language as nodes. */
  function colour(parent, text, language) {
    if (PLAIN.includes(language) || text.length > MAX_COLOURED) {
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
      parent.append(text.slice(from, match.index), Inline.element("span", name, match[0]));
      from = match.index + match[0].length;
    }
    parent.append(text.slice(from));
  }

  return { colour };
})();
