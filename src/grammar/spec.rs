//! What a caller can ask for, and its translation to the grammar library's language.

use llguidance::api::TopLevelGrammar;
use serde_json::{Value, json};

use crate::{Error, Result};

/// Most bytes of a JSON schema, written without spaces, and of a grammar.
const MAX_BYTES: usize = 256 << 10;
/// Most bytes of a regular expression.
const MAX_REGEX_BYTES: usize = 16 << 10;
/// Most choices.
const MAX_CHOICES: usize = 4_096;
/// Most brackets inside one another in a regular expression or grammar. Those of JSON are bounded by its reader.
const MAX_DEPTH: usize = 128;
/// Space between the parts of JSON: none, one, or a line break with an indentation. Without a bound a model could
/// go on with spaces for ever.
const JSON_SPACE: &str = r"( |\r?\n[ \t]{0,32})?";

/// What the whole text of an answer must look like.
#[derive(Debug, Clone, PartialEq)]
pub enum GrammarSpec {
    /// Any JSON object.
    JsonObject,
    /// JSON that is valid under this schema. A keyword that cannot be enforced is an error.
    JsonSchema(Value),
    /// A text that this regular expression (Rust's syntax, no look-around) matches from beginning to end.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// A context-free grammar in the Lark syntax of llguidance: rules from `start`, terminals, `%json {…}`, and
    /// special tokens by their name, as in `<|tool_call|>`.
    Lark(String),
}

impl GrammarSpec {
    /// Refuses what is too large before any work is put into it.
    pub(super) fn check_size(&self) -> Result<()> {
        let (what, num_bytes, limit) = match self {
            Self::JsonObject => return Ok(()),
            Self::JsonSchema(schema) => ("the JSON schema", json_len(schema, MAX_BYTES), MAX_BYTES),
            Self::Regex(regex) => ("the regular expression", regex.len(), MAX_REGEX_BYTES),
            Self::Lark(grammar) => ("the grammar", grammar.len(), MAX_BYTES),
            Self::Choice(choices) => {
                if choices.is_empty() || choices.len() > MAX_CHOICES {
                    return Err(Error::invalid_request(format!(
                        "there are {} choices; there must be 1 to {MAX_CHOICES}",
                        choices.len()
                    )));
                }
                ("the list of choices", choices.iter().map(String::len).sum(), MAX_BYTES)
            }
        };
        if num_bytes > limit {
            return Err(Error::invalid_request(format!(
                "{what} has more than {limit} bytes, the most allowed"
            )));
        }
        if let Self::Regex(text) | Self::Lark(text) = self
            && depth(text) > MAX_DEPTH
        {
            return Err(Error::invalid_request(format!(
                "{what} has more than {MAX_DEPTH} brackets inside one another"
            )));
        }
        Ok(())
    }

    /// The same in the grammar library's terms.
    ///
    /// # Errors
    /// If it is of another kind than it is said to be.
    pub(super) fn to_grammar(&self) -> Result<TopLevelGrammar> {
        Ok(match self {
            Self::JsonObject => TopLevelGrammar::from_json_schema(with_options(json!({"type": "object"}))?),
            Self::JsonSchema(schema) => TopLevelGrammar::from_json_schema(with_options(schema.clone())?),
            Self::Regex(regex) => TopLevelGrammar::from_regex(without_anchors(regex)),
            Self::Choice(choices) => {
                let literals: Vec<String> = choices.iter().map(|choice| json!(choice).to_string()).collect();
                TopLevelGrammar::from_lark(format!("start: {}", literals.join(" | ")))
            }
            Self::Lark(grammar) if grammar.contains("::=") && !grammar.contains("start:") => {
                return Err(Error::invalid_request("the grammar seems to be in GBNF or EBNF (`::=`)")
                    .with_hint("write it in Lark: `start: …` with rules `name: …`"));
            }
            Self::Lark(grammar) => TopLevelGrammar::from_lark(grammar.clone()),
        })
    }
}

/// A schema with the options of our JSON.
fn with_options(schema: Value) -> Result<Value> {
    let mut fields = match schema {
        Value::Object(fields) => fields,
        Value::Bool(true) => serde_json::Map::new(),
        other => {
            let message = format!("the JSON schema is {}, expected an object", kind(&other));
            return Err(Error::invalid_request(message));
        }
    };
    if fields.contains_key("x-guidance") {
        return Err(Error::invalid_request("the JSON schema has the unknown keyword x-guidance"));
    }
    fields.insert("x-guidance".to_owned(), json!({"whitespace_pattern": JSON_SPACE}));
    Ok(Value::Object(fields))
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a truth value",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// The expression must match the whole text anyway, and the library knows no anchors.
fn without_anchors(regex: &str) -> &str {
    let regex = regex.strip_prefix('^').unwrap_or(regex);
    match regex.strip_suffix('$') {
        Some(rest) if rest.bytes().rev().take_while(|byte| *byte == b'\\').count() % 2 == 0 => rest,
        _ => regex,
    }
}

/// How deep brackets are inside one another, not looking at what they mean.
fn depth(text: &str) -> usize {
    let (mut open, mut deepest) = (0_usize, 0);
    for byte in text.bytes() {
        match byte {
            b'(' | b'[' | b'{' => open += 1,
            b')' | b']' | b'}' => open = open.saturating_sub(1),
            _ => {}
        }
        deepest = deepest.max(open);
    }
    deepest
}

/// The length of a value as JSON, or something above `limit`.
fn json_len(value: &Value, limit: usize) -> usize {
    struct Counter {
        num_bytes: usize,
        limit: usize,
    }
    impl std::io::Write for Counter {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.num_bytes = self.num_bytes.saturating_add(bytes.len());
            match self.num_bytes > self.limit {
                true => Err(std::io::ErrorKind::FileTooLarge.into()),
                false => Ok(bytes.len()),
            }
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let mut counter = Counter { num_bytes: 0, limit };
    match serde_json::to_writer(&mut counter, value) {
        Ok(()) => counter.num_bytes,
        Err(_) => limit.saturating_add(1),
    }
}
