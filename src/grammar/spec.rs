//! A caller's constraint, and its translation to the grammar library's language.

use llguidance::api::TopLevelGrammar;
use serde_json::{Value, json};

use super::attributes;
use super::expressions::{self, escape, rewritten};
use super::gbnf::{is_gbnf, to_lark};
use super::schema::{self, SchemaPlace};
use crate::{Error, Result, quoted};

/// Most bytes of a JSON schema, written without spaces, and of a list of choices.
const MAX_BYTES: usize = 128 << 10;
/// Most bytes of a grammar in Lark, which schemas of many tools become too.
const MAX_GRAMMAR_BYTES: usize = 1 << 20;
/// Most bytes of a regular expression.
const MAX_REGEX_BYTES: usize = 4 << 10;
/// Most choices.
const MAX_CHOICES: usize = 4_096;
/// Most brackets inside one another in a regular expression or grammar. Those of JSON are bounded by its reader.
const MAX_DEPTH: usize = 128;
/// Bounds the schemas that are combined by `allOf`: the sum over all such lists of the square of the number of
/// schemas in them, references followed. The time to combine them grows faster than the square.
const MAX_COMBINED: usize = 2_048;
/// The largest `multipleOf`, in units of its last digit: it becomes a table of that size.
const MAX_MULTIPLE_OF: u64 = 10_000;
/// Space between the tokens of JSON: none, one, or a line break with an indentation. Without a bound a model could emit
/// spaces forever.
const JSON_SPACE: &str = r"( |\r?\n[ \t]{0,32})?";
/// The same in calls of tools, which models write in one line.
const CALL_SPACE: &str = " ?";

/// The format of an answer's whole text.
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
    /// special tokens by their name, as in `<|tool_call|>`. Or one in GBNF: rules `name ::= …` from `root`.
    Lark(String),
}

impl GrammarSpec {
    /// A schema within a [`Self::Lark`] grammar, with the same spaces as in [`Self::JsonSchema`].
    ///
    /// # Errors
    /// If the schema is invalid, allows no value, or cannot be enforced.
    pub fn lark_json(schema: &Value) -> Result<String> {
        embedded(schema, JSON_SPACE)
    }

    /// The same with at most one space between tokens, for the arguments of a call.
    ///
    /// # Errors
    /// If the schema is invalid, allows no value, or cannot be enforced.
    pub fn lark_arguments(schema: &Value) -> Result<String> {
        embedded(schema, CALL_SPACE)
    }

    /// A terminal's expression for the strings of a schema, written without quotes and with characters of this class
    /// of a regular expression only.
    ///
    /// # Errors
    /// If a length or a pattern cannot be enforced.
    pub fn lark_text(schema: &Value, class: &str) -> Result<String> {
        schema::bare_text(schema, class)
    }

    /// Whether a schema of strings allows every string.
    #[must_use]
    pub fn is_free_text(schema: &Value) -> bool {
        schema::is_free_text(schema)
    }

    /// A text in this format, or one that a grammar in Lark allows.
    ///
    /// # Errors
    /// If this is a schema that cannot be enforced, or a grammar that cannot be read.
    pub fn or_lark(&self, other: &str) -> Result<Self> {
        let own = match self {
            Self::JsonObject => Self::lark_json(&json!({"type": "object"}))?,
            Self::JsonSchema(schema) => Self::lark_json(schema)?,
            Self::Regex(regex) => format!("/{}/", between_slashes(&whole_text(regex)?)),
            Self::Choice(choices) => {
                let literals: Vec<String> = choices.iter().map(|choice| escape(choice)).collect();
                format!("/{}/", between_slashes(&literals.join("|")))
            }
            Self::Lark(grammar) if is_gbnf(grammar) => format!("%lark {{\n{}\n}}", to_lark(grammar)?),
            Self::Lark(grammar) => format!("%lark {{\n{grammar}\n}}"),
        };
        Ok(Self::Lark(format!("start: own | other\nown: {own}\nother: %lark {{\n{other}\n}}\n")))
    }

    /// A schema with every object closed to keys that it does not name, as `strict` demands. A map, which has a
    /// schema for all of its values and names no keys, stays one.
    #[must_use]
    pub fn closed(schema: Value) -> Value {
        schema::closed(schema)
    }

    /// Refuses specifications that are too large, before all other work.
    pub(super) fn check_size(&self) -> Result<()> {
        match self {
            Self::JsonObject => Ok(()),
            Self::JsonSchema(schema) => check_schema(schema),
            Self::Regex(regex) => check_regex("the regular expression", regex),
            Self::Choice(choices) if choices.is_empty() || choices.len() > MAX_CHOICES => {
                Err(Error::invalid_request(format!(
                    "there are {} choices; there must be 1 to {MAX_CHOICES}",
                    choices.len()
                )))
            }
            Self::Choice(choices) => {
                at_most("the list of choices", choices.iter().map(String::len).sum(), MAX_BYTES)
            }
            Self::Lark(grammar) => {
                at_most("the grammar", grammar.len(), MAX_GRAMMAR_BYTES)?;
                check_depth("the grammar", grammar)?;
                if !is_gbnf(grammar) {
                    attributes::check(grammar)?;
                }
                check_embedded(grammar)
            }
        }
    }

    /// The same in the grammar library's terms.
    ///
    /// # Errors
    /// If it is of another kind than declared.
    pub(super) fn to_grammar(&self) -> Result<TopLevelGrammar> {
        Ok(match self {
            Self::JsonObject => {
                TopLevelGrammar::from_lark(json_lark(&json!({"type": "object"}), JSON_SPACE)?)
            }
            Self::JsonSchema(schema) => TopLevelGrammar::from_lark(json_lark(schema, JSON_SPACE)?),
            Self::Regex(regex) => TopLevelGrammar::from_regex(&whole_text(regex)?),
            Self::Choice(choices) => {
                let literals: Vec<String> = choices.iter().map(|choice| escape(choice)).collect();
                TopLevelGrammar::from_regex(&literals.join("|"))
            }
            Self::Lark(grammar) if is_gbnf(grammar) => TopLevelGrammar::from_lark(to_lark(grammar)?),
            Self::Lark(grammar) => TopLevelGrammar::from_lark(grammar.clone()),
        })
    }
}

/// A grammar for the values of a schema that comes from a caller.
fn json_lark(schema: &Value, space: &'static str) -> Result<String> {
    match schema {
        Value::Object(fields) if fields.contains_key("x-guidance") => {
            let error = Error::invalid_request("the JSON schema has the unknown keyword x-guidance");
            Err(SchemaPlace::within(&error.with_hint("leave it out"), "x-guidance"))
        }
        Value::Object(_) | Value::Bool(true) => schema::to_lark(schema, space),
        other => {
            let message = format!("the JSON schema is {}, expected an object", kind(other));
            Err(SchemaPlace::whole(&Error::invalid_request(message)))
        }
    }
}

/// The same within another grammar.
fn embedded(schema: &Value, space: &'static str) -> Result<String> {
    check_schema(schema)?;
    Ok(format!("%lark {{\n{}}}", json_lark(schema, space)?))
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

/// A caller's expression for a whole text, as the library reads it.
fn whole_text(regex: &str) -> Result<String> {
    let rewritten = rewritten(regex);
    let text = without_anchors(&rewritten);
    expressions::check("the regular expression", regex, text, false)?;
    Ok(text.to_owned())
}

/// The expression must match the whole text anyway, and the library does not support anchors.
fn without_anchors(regex: &str) -> &str {
    let regex = regex.strip_prefix('^').unwrap_or(regex);
    match regex.strip_suffix('$') {
        Some(rest) if rest.bytes().rev().take_while(|byte| *byte == b'\\').count() % 2 == 0 => rest,
        _ => regex,
    }
}

/// A regular expression as written in a grammar.
fn between_slashes(regex: &str) -> String {
    let mut text = String::with_capacity(regex.len());
    let mut is_escaped = false;
    for c in regex.chars() {
        match c {
            '/' if !is_escaped => text.push_str("\\/"),
            '\n' if !is_escaped => text.push_str("\\n"),
            c => text.push(c),
        }
        is_escaped = c == '\\' && !is_escaped;
    }
    text
}

fn at_most(what: &str, num_bytes: usize, limit: usize) -> Result<()> {
    match num_bytes > limit {
        true => Err(Error::invalid_request(format!("{what} has more than {limit} bytes, the most allowed"))),
        false => Ok(()),
    }
}

fn check_schema(schema: &Value) -> Result<()> {
    at_most("the JSON schema", json_len(schema, MAX_BYTES), MAX_BYTES)?;
    check_keywords(schema, schema, &mut Budget(MAX_COMBINED))
}

/// The same error about the value of this keyword.
fn about(keyword: &str) -> impl Fn(Error) -> Error {
    move |error| SchemaPlace::within(&error, keyword)
}

fn check_regex(what: &str, regex: &str) -> Result<()> {
    at_most(what, regex.len(), MAX_REGEX_BYTES)?;
    check_depth(what, regex)
}

/// Counts nested brackets, without interpreting them.
fn check_depth(what: &str, text: &str) -> Result<()> {
    let mut open = 0_usize;
    for byte in text.bytes() {
        match byte {
            b'(' | b'[' | b'{' => open += 1,
            b')' | b']' | b'}' => open = open.saturating_sub(1),
            _ => {}
        }
        if open > MAX_DEPTH {
            let message = format!("{what} has more than {MAX_DEPTH} brackets inside one another");
            return Err(Error::invalid_request(message));
        }
    }
    Ok(())
}

/// Checks the elements of a schema with disproportionate cost. The parser bounds their depth.
fn check_keywords(schema: &Value, root: &Value, left: &mut Budget) -> Result<()> {
    let fields = match schema {
        Value::Array(items) => {
            return items.iter().enumerate().try_for_each(|(index, item)| {
                let checked = check_keywords(item, root, left);
                checked.map_err(|error| SchemaPlace::within(&error, &format!("[{index}]")))
            });
        }
        Value::Object(fields) => fields,
        _ => return Ok(()),
    };
    if let Some(pattern) = fields.get("pattern").and_then(Value::as_str) {
        check_regex("a pattern", pattern).map_err(about("pattern"))?;
    }
    if let Some(patterns) = fields.get("patternProperties").and_then(Value::as_object) {
        let mut patterns = patterns.keys().map(|pattern| check_regex("a pattern", pattern));
        patterns.try_for_each(|checked| checked.map_err(about("patternProperties")))?;
    }
    if fields.contains_key("allOf") {
        let mut members = Budget(left.0);
        members.combine(schema, root, &mut Vec::new()).map_err(about("allOf"))?;
        let num_members = left.0 - members.0;
        left.spend(num_members.saturating_mul(num_members)).map_err(about("allOf"))?;
    }
    if let Some(Value::Number(number)) = fields.get("multipleOf") {
        check_multiple_of(number).map_err(about("multipleOf"))?;
    }
    fields.iter().try_for_each(|(name, child)| {
        check_keywords(child, root, left).map_err(|error| SchemaPlace::within(&error, name))
    })
}

fn check_multiple_of(number: &serde_json::Number) -> Result<()> {
    if number.as_f64().is_some_and(|number| number <= 0.0) {
        let message = format!("multipleOf is {number} in the JSON schema; it must be above 0");
        return Err(Error::invalid_request(message));
    }
    if digits(number) > MAX_MULTIPLE_OF {
        let message = format!(
            "multipleOf is {number}; it must be at most {MAX_MULTIPLE_OF} in units of its last digit"
        );
        return Err(Error::invalid_request(message));
    }
    check_fraction(number)
}

/// The library multiplies by ten until the number is whole, and puts it and the power of ten into 32 bits.
fn check_fraction(multiple_of: &serde_json::Number) -> Result<()> {
    /// Once more than that it multiplies.
    const MAX_POWER: f64 = (u32::MAX / 10) as f64;
    let Some(mut number) = multiple_of.as_f64() else { return Ok(()) };
    let mut power = 1.0;
    while number.fract() != 0.0 && number * power <= f64::from(u32::MAX) {
        number *= 10.0;
        power *= 10.0;
    }
    if power > 1.0 && (number * power > f64::from(u32::MAX) || power > MAX_POWER) {
        return Err(Error::invalid_request(format!(
            "multipleOf is {multiple_of}, which has too many digits as a binary number to be enforced"
        ))
        .with_hint("use another one, such as 0.05 or 0.01"));
    }
    Ok(())
}

/// The rest of [`MAX_COMBINED`].
struct Budget(usize);

impl Budget {
    fn spend(&mut self, cost: usize) -> Result<()> {
        self.0 = self
            .0
            .checked_sub(cost)
            .ok_or_else(|| Error::invalid_request("too many schemas are combined by allOf"))?;
        Ok(())
    }

    /// Counts the schemas that have to hold together with this one.
    /// `path` are the references that lead here.
    fn combine<'s>(&mut self, schema: &'s Value, root: &'s Value, path: &mut Vec<&'s str>) -> Result<()> {
        self.spend(1)?;
        if let Some(members) = schema.get("allOf").and_then(Value::as_array) {
            members.iter().try_for_each(|member| self.combine(member, root, path))?;
        }
        let Some(reference) = schema.get("$ref").and_then(Value::as_str) else { return Ok(()) };
        let Some(target) = resolve(root, reference) else { return Ok(()) };
        if path.contains(&reference) {
            return Err(Error::invalid_request(format!(
                "the reference {} in the JSON schema leads to itself",
                quoted(reference)
            ))
            .with_hint("put properties or items between them"));
        }
        path.push(reference);
        self.combine(target, root, path)?;
        path.pop();
        Ok(())
    }
}

/// The target of a reference inside the schema, as the library resolves it.
fn resolve<'a>(root: &'a Value, path: &str) -> Option<&'a Value> {
    if path == "#" || path == "#/" {
        return Some(root);
    }
    path.strip_prefix("#/")?.split('/').try_fold(root, |value, name| match value {
        Value::Array(items) => items.get(name.parse::<usize>().ok()?),
        value => value.get(name),
    })
}

/// Checks the schemas in a grammar. Invalid JSON will fail to compile.
fn check_embedded(grammar: &str) -> Result<()> {
    let mut left = Budget(MAX_COMBINED);
    for (at, name) in grammar.match_indices("%json") {
        let mut values = serde_json::Deserializer::from_str(&grammar[at + name.len()..]).into_iter();
        if let Some(Ok(schema)) = values.next() {
            check_keywords(&schema, &schema, &mut left)?;
        }
    }
    Ok(())
}

/// The digits of a number without its point, as a number.
fn digits(number: &serde_json::Number) -> u64 {
    let number = number.as_f64().unwrap_or(f64::MAX);
    let digits: String = number.to_string().chars().filter(char::is_ascii_digit).collect();
    digits.parse().unwrap_or(u64::MAX)
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
