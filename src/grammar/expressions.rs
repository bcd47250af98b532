//! Regular expressions of callers, in the syntax of the grammar library's.
//!
//! Callers write them for Python or JavaScript, where a backslash before a sign means the sign, and where the ends of a
//! text have more than one name. What the library does not have is named in the caller's words.

use llguidance::derivre::{RegexAst, RegexBuilder};

use crate::{Error, Result, quoted, shortened};

/// The hint for what the library does not have, and nothing stands for.
const WITHOUT: &str = "write it without, or omit it";

/// A regular expression that matches exactly this text.
pub(super) fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        // `\<` and `\>` are the ends of words.
        if c.is_ascii_punctuation() && !matches!(c, '<' | '>') {
            escaped.push('\\');
        }
        escaped.push(c);
    }
    escaped
}

/// The same expression for the library, where `\<` and `\>` are no signs, and `\Z` and `\0` are unknown.
pub(super) fn rewritten(regex: &str) -> String {
    let mut text = String::with_capacity(regex.len());
    let mut pieces = pieces(regex).peekable();
    while let Some(piece) = pieces.next() {
        let next = pieces.peek().map_or("", |next| next.text);
        match (piece.text, piece.is_in_class) {
            ("\\<", _) => text.push('<'),
            ("\\>", _) => text.push('>'),
            ("\\A", false) => text.push('^'),
            ("\\Z" | "\\z", false) if matches!(next, "" | ")" | "|") => text.push('$'),
            ("\\0", _) if !next.starts_with(|c: char| c.is_ascii_digit()) => text.push_str("\\x00"),
            (piece, _) => text.push_str(piece),
        }
    }
    text
}

/// Whether the library can read an expression: one that is found somewhere in a text, or one that is all of it.
/// `what` names it, with its article, and `part` is what of it is read.
///
/// # Errors
/// If it cannot be read, with the reason.
pub(super) fn check(what: &str, whole: &str, part: &str, is_search: bool) -> Result<()> {
    let mut builder = RegexBuilder::new();
    let read = if is_search { builder.mk_regex_for_serach(part) } else { builder.mk_regex(part) };
    read.map(drop).map_err(|error| refusal(what, whole, is_search, &error.to_string()))
}

/// Whether an expression is found in a text. None if it cannot be read, or if that takes too long.
pub(super) fn is_found(part: &str, text: &str) -> Option<bool> {
    const MAX_WORK: u64 = 100_000;
    let mut builder = RegexBuilder::new();
    let expression = builder.mk_regex_for_serach(part).ok()?;
    Some(builder.into_regex_limited(expression, MAX_WORK).ok()?.is_match(text))
}

/// Whether certainly no text matches `whole`, has all of `found` in it, and is none of `except`.
pub(super) fn excludes_all(whole: &str, found: &[String], except: &[&str]) -> bool {
    const MAX_WORK: u64 = 20_000;
    let found = found.iter().map(|part| RegexAst::SearchRegex(part.clone()));
    let except = except.iter().map(|text| RegexAst::Not(Box::new(RegexAst::Literal((*text).to_owned()))));
    let all = std::iter::once(RegexAst::Regex(whole.to_owned())).chain(found).chain(except).collect();
    let mut builder = RegexBuilder::new();
    let Ok(expression) = builder.mk(&RegexAst::And(all)) else { return false };
    builder.into_regex_limited(expression, MAX_WORK).is_ok_and(|mut regex| regex.always_empty())
}

/// The error about an expression: what of it the library does not have, or else the library's reason, one of several
/// lines.
pub(super) fn refusal(what: &str, whole: &str, may_look_ahead: bool, words: &str) -> Error {
    if let Some((reason, hint)) = unsupported(whole, may_look_ahead) {
        return Error::invalid_request(format!("{what} {} cannot be enforced: {reason}", quoted(whole)))
            .with_hint(hint);
    }
    let reason = words.lines().rev().find_map(|line| line.trim().strip_prefix("error: "));
    let reason = reason.or_else(|| words.lines().next()).unwrap_or_default();
    Error::invalid_request(format!("{what} {} is not valid: {}", quoted(whole), shortened(reason)))
        .with_hint("write it as Rust's regular expressions are, without look-around and back-references")
}

/// The first element that no expression of the library has, and the way out.
fn unsupported(regex: &str, may_look_ahead: bool) -> Option<(String, &'static str)> {
    let pieces: Vec<Piece<'_>> = pieces(regex).collect();
    let at = |index: usize| pieces.get(index).map_or("", |piece| piece.text);
    for (index, piece) in pieces.iter().enumerate() {
        if piece.is_in_class {
            continue;
        }
        let text = piece.text;
        let found = match text {
            "\\b" | "\\B" => Some((format!("the word boundary {text}"), WITHOUT)),
            "\\<" | "\\>" => Some((
                format!("{text}, which is the end of a word there"),
                "write the sign without a backslash",
            )),
            "\\G" | "\\K" | "\\X" | "\\R" => Some((text.to_owned(), WITHOUT)),
            "\\k" => Some(("a back-reference by name".to_owned(), WITHOUT)),
            "(" if at(index + 1) == "?" => {
                let rest = regex.get(piece.start..).unwrap_or_default();
                let groups = [
                    ("(?<=", "look-behind"),
                    ("(?<!", "look-behind"),
                    ("(?=", "look-ahead"),
                    ("(?!", "look-ahead"),
                    ("(?P=", "a back-reference by name"),
                    ("(?>", "an atomic group"),
                    ("(?(", "a condition"),
                    ("(?R", "recursion"),
                    ("(?#", "a comment"),
                ];
                let found = groups.iter().find(|(sign, name)| {
                    rest.starts_with(sign) && !(may_look_ahead && *name == "look-ahead")
                });
                found.map(|(sign, name)| (format!("{name}, {sign}…)"), WITHOUT))
            }
            "[^]" | "[]" => {
                Some((format!("{text}, which only JavaScript has"), "write [\\s\\S] for any character"))
            }
            _ if text.starts_with('\\') && text[1..].starts_with(|c: char| matches!(c, '1'..='9')) => {
                Some((format!("the back-reference {text}"), WITHOUT))
            }
            "^" | "\\A" if !matches!(at(index.wrapping_sub(1)), "" | "(" | "|" | "^" | ":") => {
                Some((format!("{text} after something else"), "use it at the beginning only"))
            }
            "$" | "\\Z" | "\\z" if !matches!(at(index + 1), "" | ")" | "|" | "$") => {
                Some((format!("{text} before something else"), "use it at the end only"))
            }
            _ => None,
        };
        if let Some((name, hint)) = found {
            return Some((format!("it has {name}"), hint));
        }
    }
    None
}

/// A character outside of classes, an escape, or an empty class of JavaScript.
struct Piece<'r> {
    start: usize,
    text: &'r str,
    is_in_class: bool,
}

/// An expression cut into its characters and escapes.
fn pieces(regex: &str) -> impl Iterator<Item = Piece<'_>> {
    let mut start = 0;
    let mut depth = 0_usize;
    let mut is_first = false;
    std::iter::from_fn(move || {
        let rest = &regex[start..];
        let mut chars = rest.chars();
        let first = chars.next()?;
        let is_in_class = depth > 0;
        let mut len = first.len_utf8();
        match first {
            '\\' => len += chars.next().map_or(0, char::len_utf8),
            '[' if !is_in_class && is_empty_class(rest) => len = rest.find(']').map_or(len, |end| end + 1),
            '[' => depth += 1,
            // The first one is a sign itself.
            ']' if is_in_class && !is_first => depth -= 1,
            _ => {}
        }
        is_first = first == '[' && len == 1 || first == '^' && is_first;
        let piece = Piece { start, text: &rest[..len], is_in_class };
        start += len;
        Some(piece)
    })
}

/// Whether there is `[]` or `[^]` here, and no other bracket closes it.
fn is_empty_class(text: &str) -> bool {
    let after = text.strip_prefix("[^]").or_else(|| text.strip_prefix("[]"));
    after.is_some_and(|after| !after.contains(']'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signs_and_ends_are_written_as_the_library_reads_them() {
        for (from, to) in [
            (r"\<b\>", "<b>"),
            (r"[\<\>]\\<", r"[<>]\\<"),
            (r"\Aa\Z", "^a$"),
            (r"a\z|[\]A\Z]", r"a$|[\]A\Z]"),
            (r"(a\Z)\Zb", r"(a$)\Zb"),
            (r"\0[\0]\01", r"\x00[\x00]\01"),
            (r"é\.[^]\<]", r"é\.[^]<]"),
            (r"a\", r"a\"),
        ] {
            assert_eq!(rewritten(from), to);
        }
        assert_eq!(escape("a -> <b>."), r"a \-> <b>\.");
    }

    #[test]
    fn what_the_library_does_not_have_is_named() {
        let check = |regex: &str, words: &str| {
            let error = super::check("the pattern", regex, &rewritten(regex), true).unwrap_err();
            assert!(error.message().contains(words), "{regex}: {error}");
            assert!(!error.message().contains("supported yet"), "{regex}: {error}");
        };
        check(r"\bfoo\b", r"the word boundary \b");
        check("a$b", "$ before something else");
        check("a^b", "^ after something else");
        check(r"a\Zb", r"\Z before something else");
        check("[^]", "[^], which only JavaScript has");
        check("[]", "[], which only JavaScript has");
        check("(?<=a)b", "look-behind, (?<=");
        check("(a)\\1", r"the back-reference \1");
        check("(?P<x>a)(?P=x)", "a back-reference by name");
        check("(?>a)", "an atomic group");
        check("a(", "unclosed group");
        for regex in [r"^a$|^b$", r"(^a|b$)", r"[$^\\b]", r"\$\^", r"\\b", "[]a]", "[^]a]"] {
            super::check("the pattern", regex, &rewritten(regex), true).unwrap();
        }
    }
}
