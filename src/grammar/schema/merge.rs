//! Two schemas that have to hold together, as one.

use serde_json::{Map, Value};

/// Keywords that only tell people something, or programs where they are. Formats are none of these.
pub(super) const ANNOTATIONS: [&str; 20] = [
    "$anchor",
    "$comment",
    "$defs",
    "$id",
    "$schema",
    "contentEncoding",
    "contentMediaType",
    "contentSchema",
    "default",
    "definitions",
    "deprecated",
    "description",
    "discriminator",
    "example",
    "examples",
    "id",
    "nullable",
    "readOnly",
    "title",
    "writeOnly",
];

/// Patterns that all have to match. Schemas of callers have no such keyword, because unknown ones are left out.
pub(super) const PATTERNS: &str = "x-patterns";

/// Both at once; none if that cannot be written as one schema. References are resolved before.
pub(super) fn merged(mut one: Map<String, Value>, other: &Map<String, Value>) -> Option<Value> {
    if is_map_beside_names(&one, other) || is_map_beside_names(other, &one) {
        return None;
    }
    close_to_each_other(&mut one, other);
    let mut other = other.clone();
    let mut first = std::mem::take(&mut one);
    close_to_each_other(&mut other, &first);
    for (keyword, value) in other {
        let Some(present) = first.get(&keyword) else {
            first.insert(keyword, value);
            continue;
        };
        if *present == value {
            continue;
        }
        let both = match (keyword.as_str(), present, &value) {
            ("type", a, b) => match types(a, b) {
                kinds if kinds.is_empty() => return Some(false.into()),
                kinds => kinds.into(),
            },
            ("properties", Value::Object(a), Value::Object(b)) => properties(a, b),
            ("required", Value::Array(a), Value::Array(b)) => {
                let more = b.iter().filter(|name| !a.contains(name));
                a.iter().chain(more).cloned().collect()
            }
            ("enum", Value::Array(a), Value::Array(b)) => {
                a.iter().filter(|value| b.contains(value)).cloned().collect()
            }
            ("const", ..) => return Some(false.into()),
            ("additionalProperties", Value::Bool(false), _)
            | ("additionalProperties", _, Value::Bool(true)) => {
                continue;
            }
            ("additionalProperties", _, Value::Bool(false))
            | ("additionalProperties", Value::Bool(true), _) => value,
            ("additionalProperties" | "items", Value::Object(_), Value::Object(_)) => {
                both_of(present, &value)
            }
            ("minLength" | "minItems" | "minProperties" | "minimum" | "exclusiveMinimum", a, b) => {
                extreme(a, b, std::cmp::Ordering::Less)?
            }
            ("maxLength" | "maxItems" | "maxProperties" | "maximum" | "exclusiveMaximum", a, b) => {
                extreme(a, b, std::cmp::Ordering::Greater)?
            }
            ("pattern", ..) => {
                let patterns = first.entry(PATTERNS).or_insert_with(|| Value::Array(Vec::new()));
                patterns.as_array_mut()?.push(value);
                continue;
            }
            ("allOf" | PATTERNS, Value::Array(a), Value::Array(b)) => a.iter().chain(b).cloned().collect(),
            (name, ..) if ANNOTATIONS.contains(&name) => continue,
            _ => return None,
        };
        first.insert(keyword, both);
    }
    Some(first.into())
}

/// A closed object has no keys that the other one alone names.
fn close_to_each_other(open: &mut Map<String, Value>, closed: &Map<String, Value>) {
    if closed.get("additionalProperties") != Some(&Value::Bool(false))
        || closed.contains_key("patternProperties")
    {
        return;
    }
    let known = closed.get("properties").and_then(Value::as_object);
    if let Some(Value::Object(properties)) = open.get_mut("properties") {
        for (name, schema) in properties {
            if known.is_none_or(|known| !known.contains_key(name)) {
                *schema = false.into();
            }
        }
    }
}

/// Whether one has a schema for all values that it does not name, and the other one names some.
fn is_map_beside_names(map: &Map<String, Value>, names: &Map<String, Value>) -> bool {
    map.get("additionalProperties").is_some_and(Value::is_object) && names.contains_key("properties")
}

fn both_of(one: &Value, other: &Value) -> Value {
    serde_json::json!({"allOf": [one, other]})
}

fn properties(one: &Map<String, Value>, other: &Map<String, Value>) -> Value {
    let mut all = one.clone();
    for (name, schema) in other {
        let both = match all.get(name) {
            Some(present) if present != schema => both_of(present, schema),
            _ => schema.clone(),
        };
        all.insert(name.clone(), both);
    }
    all.into()
}

/// The names of types in a keyword `type`.
pub(super) fn names(kinds: &Value) -> Vec<&str> {
    match kinds {
        Value::String(kind) => vec![kind],
        Value::Array(kinds) => kinds.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    }
}

fn types(one: &Value, other: &Value) -> Vec<String> {
    let (one, other) = (names(one), names(other));
    let has =
        |kinds: &[&str], kind: &str| kinds.contains(&kind) || kind == "integer" && kinds.contains(&"number");
    let mut both: Vec<String> = Vec::new();
    for kind in one.iter().chain(&other) {
        if has(&one, kind) && has(&other, kind) && !both.iter().any(|found| found == kind) {
            both.push((*kind).to_owned());
        }
    }
    both
}

/// The number that demands more.
fn extreme(one: &Value, other: &Value, order: std::cmp::Ordering) -> Option<Value> {
    let found = match (one.as_i64(), other.as_i64()) {
        (Some(one), Some(other)) => one.cmp(&other),
        _ => one.as_f64()?.partial_cmp(&other.as_f64()?)?,
    };
    Some(if found == order { other.clone() } else { one.clone() })
}
