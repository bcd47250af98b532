//! Characters that a specification demands and the model cannot write, because its vocabulary has no token for them.
//!
//! Without this check a sequence could reach a state without allowed tokens, in the middle of its answer. Literal
//! characters of a text, a pattern or a grammar are required; one of several in a class is not. A character that a
//! class excludes, or that has a special meaning, needs no token.

use serde_json::Value;

use super::schema::SchemaPlace;
use super::spec::GrammarSpec;
use crate::{Error, Result};

/// # Errors
/// [`crate::ErrorKind::InvalidRequest`] with the first character that `can_write` rejects.
pub(super) fn check(spec: &GrammarSpec, can_write: &dyn Fn(char) -> bool) -> Result<()> {
    let found = match spec {
        GrammarSpec::JsonObject => None,
        GrammarSpec::JsonSchema(schema) => {
            return match in_schema(schema, can_write) {
                None => Ok(()),
                Some((c, path)) => {
                    let steps = path.iter().rev();
                    Err(steps.fold(no_token(c), |error, step| SchemaPlace::within(&error, step)))
                }
            };
        }
        GrammarSpec::Regex(regex) => in_pattern(regex, can_write),
        GrammarSpec::Choice(choices) => choices.iter().flat_map(|text| text.chars()).find(|c| !can_write(*c)),
        GrammarSpec::Lark(grammar) => grammar.lines().find_map(|line| in_pattern(code(line), can_write)),
    };
    found.map_or(Ok(()), |c| Err(no_token(c)))
}

fn no_token(c: char) -> Error {
    let name = match c.is_ascii() {
        true => format!("the byte 0x{:02X}", u32::from(c)),
        false => format!("the character {c:?}"),
    };
    Error::invalid_request(format!(
        "the grammar cannot be followed: it demands {name}, for which the vocabulary of the model has no token"
    ))
}

/// A line of a grammar without a comment that is all of it.
fn code(line: &str) -> &str {
    match line.trim_start() {
        comment if comment.starts_with("//") || comment.starts_with('#') => "",
        _ => line,
    }
}

/// With the way there. Control characters are escaped in JSON, so they need no token.
fn in_schema(schema: &Value, can_write: &dyn Fn(char) -> bool) -> Option<(char, Vec<String>)> {
    let in_text = |text: &str| text.chars().find(|c| !c.is_control() && !can_write(*c));
    let further = |step: &str, found: Option<(char, Vec<String>)>| {
        found.map(|(c, path)| (c, std::iter::once(step.to_owned()).chain(path).collect()))
    };
    let here = |found: Option<char>| found.map(|c| (c, Vec::new()));
    match schema {
        Value::Array(items) => items
            .iter()
            .enumerate()
            .find_map(|(index, item)| further(&format!("[{index}]"), in_schema(item, can_write))),
        Value::Object(fields) => fields.iter().find_map(|(name, value)| {
            let inside = match (name.as_str(), value) {
                ("const" | "enum", value) => here(in_value(value, &in_text)),
                ("pattern", Value::String(pattern)) => {
                    here(in_pattern(pattern, &|c| c.is_control() || can_write(c)))
                }
                ("properties", Value::Object(properties)) => properties.iter().find_map(|(name, schema)| {
                    let inside = here(in_text(name)).or_else(|| in_schema(schema, can_write));
                    further(name, inside)
                }),
                (_, value) => in_schema(value, can_write),
            };
            further(name, inside)
        }),
        _ => None,
    }
}

fn in_value(value: &Value, in_text: &dyn Fn(&str) -> Option<char>) -> Option<char> {
    match value {
        Value::String(text) => in_text(text),
        Value::Array(items) => items.iter().find_map(|item| in_value(item, in_text)),
        Value::Object(fields) => {
            fields.iter().find_map(|(name, value)| in_text(name).or_else(|| in_value(value, in_text)))
        }
        _ => None,
    }
}

/// In a regular expression, or in a line of a grammar, whose texts are written alike.
fn in_pattern(pattern: &str, can_write: &dyn Fn(char) -> bool) -> Option<char> {
    let mut rest = pattern;
    while let Some(next) = rest.chars().next() {
        if next == '[' {
            let (class, after) = class(rest);
            // One writable character suffices, and every class that is not a list of characters has one.
            if let Some(listed) = class
                && let Some(first) = listed.first()
                && !listed.iter().any(|c| can_write(*c))
            {
                return Some(*first);
            }
            rest = after;
            continue;
        }
        let (c, after) = character(rest);
        if let Some(c) = c.filter(|c| !can_write(*c)) {
            return Some(c);
        }
        rest = after;
    }
    None
}

/// The characters of a class that only lists characters, and the text after it.
fn class(text: &str) -> (Option<Vec<char>>, &str) {
    let mut rest = &text[1..];
    let is_negated = rest.starts_with('^');
    rest = rest.strip_prefix('^').unwrap_or(rest);
    let mut listed = Some(Vec::new());
    let mut is_first = true;
    while let Some(next) = rest.chars().next() {
        if next == ']' && !is_first {
            rest = &rest[1..];
            break;
        }
        is_first = false;
        let (c, after) = character(rest);
        match c {
            // Ranges and classes within classes are more than a list.
            Some(c) if next == '\\' || !matches!(c, '[' | '-' | '&' | '~') => {
                listed.iter_mut().for_each(|listed| listed.push(c));
            }
            _ => listed = None,
        }
        rest = after;
    }
    (listed.filter(|_| !is_negated), rest)
}

/// The character at the start of the text, escaped or not, and the text after it. None for an escape with a special
/// meaning.
fn character(text: &str) -> (Option<char>, &str) {
    let mut rest = text.chars();
    let first = rest.next();
    if first != Some('\\') {
        return (first, rest.as_str());
    }
    let Some(kind) = rest.next() else { return (None, "") };
    let after = rest.as_str();
    let plain = |c: char| (Some(c), after);
    let digits = |num: usize| {
        let digits = after.get(..num).filter(|digits| digits.bytes().all(|byte| byte.is_ascii_hexdigit()));
        let code = digits.and_then(|digits| u32::from_str_radix(digits, 16).ok()).and_then(char::from_u32);
        code.map_or((None, after), |c| (Some(c), &after[num..]))
    };
    match kind {
        'x' | 'u' | 'U' if after.starts_with('{') => {
            let end = after.find('}').unwrap_or(after.len());
            let code = u32::from_str_radix(&after[1..end], 16).ok().and_then(char::from_u32);
            (code, after.get(end + 1..).unwrap_or(""))
        }
        'x' => digits(2),
        'u' => digits(4),
        'U' => digits(8),
        'a' => plain('\u{7}'),
        'f' => plain('\u{c}'),
        'v' => plain('\u{b}'),
        't' => plain('\t'),
        'n' => plain('\n'),
        'r' => plain('\r'),
        kind if kind.is_ascii_alphanumeric() => (None, after),
        kind => plain(kind),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn check_spec(spec: &GrammarSpec, expected: Option<&str>) {
        let can_write = |c: char| !matches!(c, '\u{7}' | '\u{b}' | '字');
        let message = check(spec, &can_write).err().map(|error| error.message().to_owned());
        assert_eq!(message.is_some(), expected.is_some(), "{spec:?}: {message:?}");
        assert!(message.unwrap_or_default().contains(expected.unwrap_or_default()), "{spec:?}");
    }

    #[test]
    fn what_is_demanded_must_have_a_token() {
        let regex = |text: &str, expected| check_spec(&GrammarSpec::Regex(text.to_owned()), expected);
        for text in [
            "a\u{7}",
            r"a\x07",
            r"a\a",
            r"\u0007",
            r"\u{7}",
            r"\x{07}",
            r"(ab|b\x07c)",
            r"[\x07]",
            r"[\x07\v]",
        ] {
            regex(text, Some("the byte 0x0"));
        }
        regex("a字", Some("'字'"));
        for text in [
            "ab",
            r"[a\x07]",
            r"[^\x07]",
            r"[\x00-\x1f]",
            r"\d\w\\x07",
            r"\[\]]",
            "[]a]",
            "[",
            r"a\",
            r"[\w\x07]",
            "é",
        ] {
            regex(text, None);
        }
        let choice = |text: &str, expected| {
            check_spec(&GrammarSpec::Choice(vec!["yes".to_owned(), text.to_owned()]), expected);
        };
        choice("no\u{7}", Some("0x07"));
        choice(r"no\x07", None);
        let lark = |text: &str, expected| check_spec(&GrammarSpec::Lark(text.to_owned()), expected);
        lark("start: \"a\\x07\"", Some("0x07"));
        lark("start: /a[^字]/\n// 字", None);
        lark("root ::= [\\x07] \"a\"", Some("0x07"));
        let schema = |schema: Value, expected| check_spec(&GrammarSpec::JsonSchema(schema), expected);
        schema(json!({"const": "\u{7}", "description": "字"}), None);
        schema(json!({"enum": ["a", "字"]}), Some("'字'"));
        schema(json!({"type": "object", "properties": {"字": {}}}), Some("'字'"));
        schema(
            json!({"type": "object", "properties": {"a": {"type": "string", "pattern": "字"}}}),
            Some("'字'"),
        );
        check_spec(&GrammarSpec::JsonObject, None);
    }
}
