//! Values as programs write them: JSON, and the deviations of Python and others: `True`, `None`, strings in other
//! quotes, keys without quotes, and trailing commas.

use serde_json::{Map, Number, Value};

/// Maximum nesting.
const MAX_DEPTH: usize = 64;

/// Reads a value, if the text is one. Texts may be in quotes of this kind, too, unless it is empty.
pub(super) fn parse(text: &str, quote: &str) -> Option<Value> {
    let mut reader = Reader { text, quote };
    let value = reader.value(0)?;
    reader.skip_space();
    reader.text.is_empty().then_some(value)
}

/// The possible text after a string's closing quote; other quotes belong to the string.
pub(super) fn may_follow_text(c: char) -> bool {
    matches!(c, ',' | ')' | ']' | '}' | ':')
}

struct Reader<'t> {
    text: &'t str,
    quote: &'t str,
}

impl Reader<'_> {
    fn skip_space(&mut self) {
        self.text = self.text.trim_start();
    }

    fn take(&mut self, expected: &str) -> bool {
        self.skip_space();
        match self.text.strip_prefix(expected) {
            Some(rest) => {
                self.text = rest;
                true
            }
            None => false,
        }
    }

    fn value(&mut self, depth: usize) -> Option<Value> {
        self.skip_space();
        if depth > MAX_DEPTH {
            return None;
        }
        if let Some(text) = self.quoted() {
            return text.map(Value::String);
        }
        if self.take("[") {
            return self.items("]", depth);
        }
        if self.take("(") {
            return self.items(")", depth);
        }
        if self.take("{") {
            return self.fields(depth);
        }
        let end =
            self.text.find(|c: char| c.is_whitespace() || may_follow_text(c)).unwrap_or(self.text.len());
        let (word, rest) = self.text.split_at(end);
        self.text = rest;
        word_value(word)
    }

    fn items(&mut self, end: &str, depth: usize) -> Option<Value> {
        let mut items = Vec::new();
        while !self.take(end) {
            items.push(self.value(depth + 1)?);
            if !self.take(",") {
                return self.take(end).then_some(Value::Array(items));
            }
        }
        Some(Value::Array(items))
    }

    fn fields(&mut self, depth: usize) -> Option<Value> {
        let mut fields = Map::new();
        while !self.take("}") {
            self.skip_space();
            let key = match self.quoted() {
                Some(key) => key?,
                None => {
                    let (key, _) = self.text.split_once(':')?;
                    self.text = &self.text[key.len()..];
                    key.trim().to_owned()
                }
            };
            if !self.take(":") {
                return None;
            }
            fields.insert(key, self.value(depth + 1)?);
            if !self.take(",") {
                return self.take("}").then_some(Value::Object(fields));
            }
        }
        Some(Value::Object(fields))
    }

    /// A quoted string; none if there is none here, and an inner none if it is broken.
    fn quoted(&mut self) -> Option<Option<String>> {
        if !self.quote.is_empty()
            && let Some(rest) = self.text.strip_prefix(self.quote)
        {
            let Some((text, rest)) = rest.split_once(self.quote) else { return Some(None) };
            self.text = rest;
            return Some(Some(text.to_owned()));
        }
        let quote = self.text.chars().next().filter(|c| matches!(c, '"' | '\''))?;
        let body = &self.text[1..];
        let mut is_escaped = false;
        for (at, c) in body.char_indices() {
            match c {
                _ if is_escaped => is_escaped = false,
                '\\' => is_escaped = true,
                _ if c == quote => {
                    let rest = &body[at + 1..];
                    // Some templates do not escape quotes within a string.
                    if rest.trim_start().chars().next().is_none_or(may_follow_text) {
                        self.text = rest;
                        return Some(Some(unescaped(&body[..at])));
                    }
                }
                _ => {}
            }
        }
        Some(None)
    }
}

fn word_value(word: &str) -> Option<Value> {
    match word {
        "True" | "true" => Some(Value::Bool(true)),
        "False" | "false" => Some(Value::Bool(false)),
        "None" | "null" => Some(Value::Null),
        _ => serde_json::from_str::<Number>(word).ok().map(Value::Number),
    }
}

/// A string without its escapes. Unknown ones are kept, as in Python.
fn unescaped(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('\\') {
        plain.push_str(before);
        let mut chars = after.chars();
        let c = chars.next();
        rest = chars.as_str();
        match c {
            Some('n') => plain.push('\n'),
            Some('t') => plain.push('\t'),
            Some('r') => plain.push('\r'),
            Some('b') => plain.push('\u{8}'),
            Some('f') => plain.push('\u{c}'),
            Some(c @ ('\\' | '\'' | '"' | '/')) => plain.push(c),
            Some('u') => {
                // JSON defines the meaning of a pair of surrogates.
                let len = if rest.get(4..6) == Some("\\u") { 10 } else { 4 };
                let read = |len: usize| {
                    let code = rest.get(..len)?;
                    serde_json::from_str::<String>(&format!("\"\\u{code}\"")).ok().map(|text| (text, len))
                };
                match read(len).or_else(|| read(4)) {
                    Some((text, len)) => {
                        plain.push_str(&text);
                        rest = &rest[len..];
                    }
                    None => plain.push_str("\\u"),
                }
            }
            Some(c) => plain.extend(['\\', c]),
            None => plain.push('\\'),
        }
    }
    plain + rest
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn values_of_python_are_read() {
        let check = |text: &str, expected: Value| assert_eq!(parse(text, ""), Some(expected), "{text}");
        check("{'a': True, 'b': None,}", json!({"a": true, "b": null}));
        check("[1, 2.5, -3e2,]", json!([1, 2.5, -3e2]));
        check("('x', \"y\")", json!(["x", "y"]));
        check("'it\\'s'", json!("it's"));
        check("'a 'b' \"c\" \\d\\n'", json!("a 'b' \"c\" \\d\n"));
        check("\"\\u00e9\\ud83e\\udd99\\u00zz\"", json!("é🦙\\u00zz"));
        check("{a: [], b: {}}", json!({"a": [], "b": {}}));
        assert_eq!(parse("{a:<|\"|>x \"y\"<|\"|>}", "<|\"|>"), Some(json!({"a": "x \"y\""})));
        for text in ["", "x", "[1", "{'a'}", "'a", "[1] 2", &"[".repeat(1_000)] {
            assert_eq!(parse(text, ""), None, "{text}");
        }
    }
}
