//! Attributes of a grammar's rules, `name[key=value]: …`, that the library accepts but that have no effect here: it
//! would ignore them silently.

use crate::{Error, Result};

/// The refused attributes, with the way out.
const MEANINGLESS: [(&str, &str); 3] = [
    ("temperature", "leave it out; the temperature of the request is that of all tokens"),
    ("capture", "leave it out; the answer has the whole text"),
    ("stop_capture", "leave it out; the answer has the whole text"),
];

/// # Errors
/// If a rule of this grammar in Lark has such an attribute, by its name.
pub(super) fn check(grammar: &str) -> Result<()> {
    let mut rest = grammar;
    while let Some(c) = rest.chars().next() {
        let len = match c {
            '"' | '/' if !rest.starts_with("//") => literal_len(rest, c),
            '/' | '#' => rest.find('\n').unwrap_or(rest.len()),
            '[' => {
                let len = list_len(rest);
                if rest[len..].trim_start().starts_with(':') {
                    check_list(&rest[1..len])?;
                }
                len
            }
            c => c.len_utf8(),
        };
        rest = &rest[len..];
    }
    Ok(())
}

/// Bytes of the text or expression at the beginning, with its marks; as far as its line if it has no end.
fn literal_len(text: &str, mark: char) -> usize {
    let mut is_escaped = true;
    for (at, c) in text.char_indices() {
        if !is_escaped && c == mark {
            return at + 1;
        }
        if c == '\n' {
            return at;
        }
        is_escaped = at > 0 && c == '\\' && !is_escaped;
    }
    text.len()
}

/// Bytes of the bracketed list at the start of the text, with its brackets.
fn list_len(text: &str) -> usize {
    let mut at = 1;
    while let Some(c) = text[at..].chars().next() {
        at += match c {
            '"' | '/' => literal_len(&text[at..], c).max(1),
            ']' => return at + 1,
            c => c.len_utf8(),
        };
    }
    at
}

/// `list` is the text after the opening bracket.
fn check_list(list: &str) -> Result<()> {
    let mut rest = list;
    while !rest.is_empty() {
        rest = rest.trim_start_matches(|c: char| c.is_whitespace() || c == ',');
        let len = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
        if let Some((name, hint)) = MEANINGLESS.iter().find(|(name, _)| *name == &rest[..len]) {
            let message = format!("a rule of the grammar has the attribute {name}, which has no effect here");
            return Err(Error::invalid_request(message).with_hint(*hint));
        }
        rest = &rest[len..];
        // On to the next key: values may have commas inside marks.
        while let Some(c) = rest.chars().next().filter(|c| *c != ',') {
            let len = if matches!(c, '"' | '/') { literal_len(rest, c).max(1) } else { c.len_utf8() };
            rest = &rest[len..];
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_without_a_meaning_are_refused_by_name() {
        for (grammar, name) in [
            ("start[temperature=2.0]: \"a\"", "temperature"),
            ("start: x\nx[lazy, capture]: /a\\/[b]/ \"]\"", "capture"),
            ("x[capture=\"a, b\"] : \"a\"\nstart: x", "capture"),
            ("start: %lark {\nstart[suffix=\"],\\\"\", stop_capture=\"a\"]: /.*/\n}", "stop_capture"),
            ("?x{a, b}.1[max_tokens=3,temperature = 1]: \"a\"", "temperature"),
        ] {
            let error = check(grammar).unwrap_err();
            let words = format!("the attribute {name}, which");
            assert!(error.message().contains(&words), "{grammar}: {error}");
        }
        for grammar in [
            "start: \"a\" [temperature] x\nx[lazy, max_tokens=3, stop=/temperature/]: /b*/",
            "start: \"x[temperature=1]:\" /x[capture]:/ // x[capture]: \"a\"\n# x[capture]: \"b\"",
            "start[suffix=\"temperature\"]: \"a\"\nb: \"\\\\\"",
            "[",
            "\"",
            "x[é\"",
            "start: /é\\",
        ] {
            assert!(check(grammar).is_ok(), "{grammar}");
        }
    }
}
