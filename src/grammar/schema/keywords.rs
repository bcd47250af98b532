//! The keywords of schemas and their parsing.

use std::cmp::Ordering;

use serde_json::{Map, Number, Value};

use super::merge::{ANNOTATIONS, EXCEPT, INTERNAL, NAMES, PATTERNS, names};
use super::numbers::{Bound, compare, same};
use super::place::about;
use crate::{Error, Result, quoted};

type Fields = Map<String, Value>;

/// Keywords that are understood, in addition to annotations.
const ENFORCED: [&str; 31] = [
    "$ref",
    "additionalItems",
    "additionalProperties",
    "allOf",
    "anyOf",
    "const",
    "contains",
    "enum",
    "exclusiveMaximum",
    "exclusiveMinimum",
    "format",
    "items",
    "maxContains",
    "maxItems",
    "maxLength",
    "maxProperties",
    "maximum",
    "minContains",
    "minItems",
    "minLength",
    "minProperties",
    "minimum",
    "multipleOf",
    "oneOf",
    "pattern",
    "patternProperties",
    "prefixItems",
    "properties",
    "required",
    "type",
    "uniqueItems",
];
/// Keywords of JSON schemas that cannot be enforced. Words in no list are not keywords of JSON schemas.
pub(super) const REFUSED: [&str; 12] = [
    "$dynamicRef",
    "$recursiveRef",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "else",
    "if",
    "not",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
];
/// Types, and the keywords that only they have.
pub(super) const TYPES: [(&str, &[&str]); 6] = [
    (
        "object",
        &[
            "additionalProperties",
            "maxProperties",
            "minProperties",
            "patternProperties",
            "properties",
            "required",
            NAMES,
        ],
    ),
    (
        "array",
        &[
            "additionalItems",
            "contains",
            "items",
            "maxContains",
            "maxItems",
            "minContains",
            "minItems",
            "prefixItems",
            "uniqueItems",
        ],
    ),
    ("string", &["format", "maxLength", "minLength", "pattern", EXCEPT, PATTERNS]),
    ("number", &["exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf"]),
    ("boolean", &[]),
    ("null", &[]),
];
/// Keywords with a bound of numbers.
pub(super) const BOUNDS: [&str; 4] = ["exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum"];
/// The value of `multipleOf`.
pub(super) fn divisor(value: &Value) -> Result<&Number> {
    let number = value.as_number().filter(|number| number.as_f64().is_some_and(|value| value > 0.0));
    number.ok_or_else(|| wrong("multipleOf", "a number above 0"))
}

/// A number of items or characters that no answer reaches. Generators of schemas write 2³¹ - 1 for none; more than that
/// the library does not count.
pub(super) const MAX_COUNT: u64 = 1_000_000_000;

/// A number of items or characters, and of larger ones [`MAX_COUNT`], which is the same for any answer.
pub(super) fn count(keyword: &str, value: &Value) -> Result<u64> {
    // 2.0 is an integer in a schema.
    let whole = |value: &f64| value.fract() == 0.0 && *value >= 0.0;
    match value.as_u64().or_else(|| value.as_f64().filter(whole).map(|value| value as u64)) {
        Some(count) => Ok(count.min(MAX_COUNT)),
        None => Err(wrong(keyword, "an integer of at least 0")),
    }
}

pub(super) fn wrong(keyword: &str, expected: &str) -> Error {
    about(keyword, Error::invalid_request(format!("{keyword} in the JSON schema is not {expected}")))
}

/// The keywords that constrain values.
pub(super) fn constraints(fields: &Fields) -> Result<Fields> {
    let mut kept = Fields::new();
    let says = ["$ref", "allOf", "anyOf", "oneOf", "additionalProperties"];
    let is_combined = says.iter().any(|name| fields.contains_key(*name));
    for (name, value) in fields {
        let name = name.as_str();
        let is_harmless = match name {
            "uniqueItems" if !value.is_boolean() => return Err(wrong(name, "true or false")),
            "uniqueItems" => *value == false,
            "unevaluatedProperties" => *value == true || fields.contains_key("properties"),
            "unevaluatedItems" => *value == true,
            _ => false,
        };
        if is_harmless {
            if name == "unevaluatedProperties" && *value == false && !is_combined {
                kept.entry("additionalProperties").or_insert(false.into());
            }
            continue;
        }
        if REFUSED.contains(&name) {
            let message = format!("the JSON schema has the keyword {name}, which cannot be enforced");
            return Err(about(name, Error::invalid_request(message).with_hint("leave it out")));
        }
        if INTERNAL.contains(&name) || ENFORCED.contains(&name) && !ANNOTATIONS.contains(&name) {
            kept.insert(name.to_owned(), value.clone());
        }
    }
    Ok(kept)
}

/// The allowed types of a value. A keyword of one type implies that type if there is no other information.
pub(super) fn kinds(fields: &Fields) -> Result<Vec<&str>> {
    let mut kinds = match fields.get("type") {
        Some(kinds @ (Value::String(_) | Value::Array(_))) => names(kinds),
        Some(_) => return Err(wrong("type", "a string or a list of strings")),
        None => {
            let has_keyword = |(_, keywords): &&(&str, &[&str])| {
                keywords.iter().any(|keyword| fields.contains_key(*keyword))
            };
            let kinds: Vec<&str> = TYPES.iter().filter(has_keyword).map(|(kind, _)| *kind).collect();
            match kinds.is_empty() {
                true => TYPES.iter().map(|(kind, _)| *kind).collect(),
                false => kinds,
            }
        }
    };
    let is_known = |kind: &&str| *kind == "integer" || TYPES.iter().any(|(known, _)| known == kind);
    if let Some(kind) = kinds.iter().find(|kind| !is_known(kind)) {
        let error = Error::invalid_request(format!("the JSON schema has the unknown type {}", quoted(kind)));
        let hint = "use null, boolean, integer, number, string, array or object";
        return Err(about("type", error.with_hint(hint)));
    }
    if kinds.contains(&"number") {
        kinds.retain(|kind| *kind != "integer");
    }
    Ok(kinds)
}

/// The values that `enum` and `const` allow.
pub(super) fn listed(fields: &Fields) -> Option<Vec<&Value>> {
    let values = fields.get("enum").and_then(Value::as_array);
    match (values, fields.get("const")) {
        (None, None) => None,
        (Some(values), None) => Some(values.iter().collect()),
        (None, Some(value)) => Some(vec![value]),
        (Some(values), Some(value)) => Some(values.iter().filter(|found| same(found, value)).collect()),
    }
}

pub(super) fn type_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(number) if number.as_f64().is_some_and(|number| number.fract() == 0.0) => "integer",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

/// One end of the range of numbers: of the two keywords the one that demands more.
pub(super) fn bound(
    fields: &Fields,
    name: &str,
    exclusive: &str,
    demands_more: fn(Ordering) -> bool,
) -> Result<Option<Bound>> {
    let number = |name: &str| match fields.get(name) {
        None | Some(Value::Bool(_)) => Ok(None),
        Some(Value::Number(number)) => Ok(Some(number.clone())),
        Some(_) => Err(wrong(name, "a number")),
    };
    // Draft 4 has a truth value.
    let is_exclusive = fields.get(exclusive) == Some(&Value::Bool(true));
    Ok(match (number(name)?, number(exclusive)?) {
        (Some(value), Some(other)) if demands_more(compare(&other, &value)) => {
            Some(Bound { value: other, is_exclusive: true })
        }
        (Some(value), _) => Some(Bound { value, is_exclusive }),
        (None, Some(value)) => Some(Bound { value, is_exclusive: true }),
        (None, None) => None,
    })
}

/// A pointer in a fragment may be written with percent signs.
pub(super) fn percent_decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        rest = after;
        if *first == b'%' {
            let digits = std::str::from_utf8(rest.get(..2)?).ok()?;
            bytes.push(u8::from_str_radix(digits, 16).ok()?);
            rest = &rest[2..];
        } else {
            bytes.push(*first);
        }
    }
    String::from_utf8(bytes).ok()
}
