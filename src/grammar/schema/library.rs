//! Values that the grammar library compiles from their schema: texts with patterns, multiples, and what cannot be written
//! as one schema.
//!
//! The library computes with doubles, and reads fewer keywords. What it would enforce otherwise is refused here.

use serde_json::{Value, json};

use super::keywords::{BOUNDS, REFUSED};
use super::merge::{EXCEPT, NAMES, PATTERNS};
use super::place::about;
use super::rules::Rules;
use super::{for_each, pattern, text};
use crate::{Error, Result};

/// Keywords that the library does not support, with their names for callers.
const NOT_IN_LIBRARY: [(&str, &str); 6] = [
    ("contains", "contains"),
    ("maxContains", "maxContains"),
    ("minContains", "minContains"),
    ("uniqueItems", "uniqueItems"),
    (EXCEPT, "not"),
    (NAMES, "propertyNames"),
];
/// The most of an integer that has to be a multiple of something: a double is exact up to here.
pub(super) const MAX_MULTIPLE: i64 = (1 << 53) - 1;
/// The most of another number that has to be one.
pub(super) const MAX_FRACTION: i64 = 1_000_000_000;
/// The most of one in units of the last digit of its divisor: the library computes with 64 bits.
pub(super) const MAX_UNITS: i64 = 100_000_000_000_000_000;

impl Rules<'_> {
    /// A value that the library compiles.
    pub(super) fn library(&mut self, schema: &Value) -> Result<Option<String>> {
        let mut schema = schema.clone();
        check(&mut schema)?;
        for_each(&mut schema, &mut |fields| {
            text::format_as_pattern(fields);
            if let Some(Value::Array(patterns)) = fields.remove(PATTERNS) {
                let all = fields.entry("allOf").or_insert_with(|| Value::Array(Vec::new()));
                let patterns = patterns.into_iter().map(|pattern| json!({"pattern": pattern}));
                all.as_array_mut().into_iter().for_each(|all| all.extend(patterns.clone()));
            }
        });
        let text = schema.to_string();
        // The library computes multiples with 64 bits, and ends the process for numbers at their limits.
        if text.contains("\"multipleOf\"") && largest(&schema) > MAX_MULTIPLE as f64 {
            let error = Error::invalid_request(format!(
                "the JSON schema has multipleOf together with a number beyond {MAX_MULTIPLE}, which cannot be enforced"
            ));
            return Err(about("multipleOf", error.with_hint("omit multipleOf")));
        }
        if let Value::Object(fields) = &mut schema {
            for (at, _) in text.match_indices("\"$ref\":\"") {
                let path = &text[at + "\"$ref\":\"".len()..];
                if !["#/$defs/", "#/definitions/"].iter().any(|prefix| path.starts_with(prefix)) {
                    let error = Error::invalid_request(
                        "the JSON schema combines keywords with a reference that leads to no definition",
                    );
                    return Err(about("$ref", error.with_hint("put the referenced schema into $defs")));
                }
            }
            if text.contains("\"$ref\"") {
                for name in ["$defs", "definitions"] {
                    if let Some(definitions) = self.root.get(name) {
                        fields.insert(name.to_owned(), definitions.clone());
                    }
                }
            }
            let options = json!({"whitespace_pattern": self.space, "json_allowed_escapes": "nrbtf\\\""});
            fields.insert("x-guidance".to_owned(), options);
        }
        self.rule("json", &format!("%json {schema}")).map(Some)
    }
}

/// Refuses what the library would not enforce.
fn check(schema: &mut Value) -> Result<()> {
    let mut found = Ok(());
    for_each(schema, &mut |fields| {
        let has = |name: &str| fields.contains_key(name);
        let known = NOT_IN_LIBRARY.iter().find(|(name, _)| has(name)).map(|(_, name)| *name);
        let keyword = known.or_else(|| REFUSED.into_iter().find(|name| has(name)));
        let patterns = fields.get("pattern").and_then(Value::as_str);
        let looks_ahead = patterns.is_some_and(pattern::looks_ahead);
        let is_inexact = |name: &&&str| {
            fields.get(**name).and_then(Value::as_number).is_some_and(|number| {
                let number = number.as_i128();
                number.is_some_and(|number| number.unsigned_abs() > MAX_MULTIPLE.unsigned_abs().into())
            })
        };
        let inexact = BOUNDS.iter().find(is_inexact);
        let fault = match (keyword, inexact) {
            (Some(keyword), _) => (keyword, format!("{keyword} in the JSON schema cannot be enforced")),
            (None, Some(bound)) => (
                *bound,
                format!("{bound} in the JSON schema is beyond {MAX_MULTIPLE} and cannot be enforced"),
            ),
            (None, None) if looks_ahead => {
                ("pattern", "look-ahead in a pattern of the JSON schema cannot be enforced".to_owned())
            }
            (None, None) => return,
        };
        let error = Error::invalid_request(format!("{} together with the other keywords there", fault.1));
        let error = error.with_hint("leave it out, or combine the conditions in one schema");
        found = std::mem::replace(&mut found, Ok(())).and(Err(about(fault.0, error)));
    });
    found
}

/// The largest magnitude of the numbers in a schema.
fn largest(value: &Value) -> f64 {
    let of_all = |values: &mut dyn Iterator<Item = &Value>| values.map(largest).fold(0.0, f64::max);
    match value {
        Value::Number(number) => number.as_f64().map_or(f64::INFINITY, f64::abs),
        Value::Array(values) => of_all(&mut values.iter()),
        Value::Object(fields) => of_all(&mut fields.values()),
        _ => 0.0,
    }
}
