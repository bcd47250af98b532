//! Two schemas that have to hold together, as one.

use serde_json::{Map, Value};

use super::numbers::{compare, same};
use super::text;

/// Keywords that only document something, or identify the schema. Formats are not among them.
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

/// Patterns that all have to match. Schemas of callers have no such keyword, because unknown ones are ignored.
pub(super) const PATTERNS: &str = "x-patterns";

/// Texts that a string must not be; it is none of a caller's either.
pub(super) const EXCEPT: &str = "x-except";

/// The schemas of names of keys that a schema does not name, which all have to match; none of a caller's either.
pub(super) const NAMES: &str = "x-names";

/// All such words.
pub(super) const INTERNAL: [&str; 3] = [EXCEPT, NAMES, PATTERNS];

/// Both at once; none if that cannot be written as one schema. References are resolved before.
pub(super) fn merged(mut one: Map<String, Value>, other: &Map<String, Value>) -> Option<Value> {
    if reads_others_names(&one, other) || reads_others_names(other, &one) {
        return None;
    }
    close_to_each_other(&mut one, other);
    let mut other = other.clone();
    merge_prefix_items(&mut one, &mut other)?;
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
                a.iter().filter(|value| b.iter().any(|other| same(other, value))).cloned().collect()
            }
            ("const", a, b) if same(a, b) => continue,
            ("const", ..) => return Some(false.into()),
            ("additionalProperties", Value::Bool(false), _)
            | ("additionalProperties", _, Value::Bool(true)) => {
                continue;
            }
            ("additionalProperties", _, Value::Bool(false))
            | ("additionalProperties", Value::Bool(true), _) => value,
            ("additionalProperties", Value::Object(_), Value::Object(_)) => both_of(present, &value),
            ("items", a, b) if !a.is_array() && !b.is_array() => both_of(a, b),
            ("minLength" | "minItems" | "minProperties" | "minimum" | "exclusiveMinimum", a, b) => {
                extreme(a, b, std::cmp::Ordering::Less)?
            }
            ("maxLength" | "maxItems" | "maxProperties" | "maximum" | "exclusiveMaximum", a, b) => {
                extreme(a, b, std::cmp::Ordering::Greater)?
            }
            ("uniqueItems", ..) => true.into(),
            ("pattern", ..) => {
                let patterns = first.entry(PATTERNS).or_insert_with(|| Value::Array(Vec::new()));
                patterns.as_array_mut()?.push(value);
                continue;
            }
            ("format", ..) => {
                text::format_as_pattern(&mut first);
                let mut second = Map::from_iter([(keyword, value)]);
                text::format_as_pattern(&mut second);
                if let Some(patterns) = second.remove(PATTERNS).as_mut().and_then(Value::as_array_mut) {
                    let all = first.entry(PATTERNS).or_insert_with(|| Value::Array(Vec::new()));
                    all.as_array_mut()?.append(patterns);
                }
                continue;
            }
            ("allOf" | PATTERNS | EXCEPT | NAMES, Value::Array(a), Value::Array(b)) => {
                a.iter().chain(b).cloned().collect()
            }
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

/// Whether one's constraint on unnamed keys would no longer apply to some that the other one names.
fn reads_others_names(one: &Map<String, Value>, other: &Map<String, Value>) -> bool {
    let patterns = other.get("patternProperties");
    let has_patterns = patterns.is_some() && patterns != one.get("patternProperties");
    let has_names = other.contains_key("properties");
    match one.get("additionalProperties") {
        Some(Value::Object(_)) => has_names || has_patterns,
        Some(Value::Bool(false)) => has_patterns || has_names && one.contains_key("patternProperties"),
        _ => false,
    }
}

/// Merges both constraints on the items of a list, position by position, into the first one. None if one uses the
/// keywords of older drafts.
fn merge_prefix_items(one: &mut Map<String, Value>, other: &mut Map<String, Value>) -> Option<()> {
    const PREFIX_ITEMS: &str = "prefixItems";
    if !one.contains_key(PREFIX_ITEMS) && !other.contains_key(PREFIX_ITEMS) {
        return Some(());
    }
    let take = |fields: &mut Map<String, Value>| {
        let rest = fields.remove("items").unwrap_or(Value::Bool(true));
        let is_older = rest.is_array() || fields.contains_key("additionalItems");
        match fields.remove(PREFIX_ITEMS).unwrap_or_else(|| Value::Array(Vec::new())) {
            Value::Array(first) if !is_older => Some((first, rest)),
            _ => None,
        }
    };
    let ((a, rest_of_a), (b, rest_of_b)) = (take(one)?, take(other)?);
    let first = (0..a.len().max(b.len()))
        .map(|index| both_of(a.get(index).unwrap_or(&rest_of_a), b.get(index).unwrap_or(&rest_of_b)));
    one.insert(PREFIX_ITEMS.to_owned(), first.collect());
    one.insert("items".to_owned(), both_of(&rest_of_a, &rest_of_b));
    Some(())
}

pub(super) fn both_of(one: &Value, other: &Value) -> Value {
    match (one, other) {
        (Value::Bool(true), schema) | (schema, Value::Bool(true)) => schema.clone(),
        (one, other) if one == other => one.clone(),
        (one, other) => serde_json::json!({"allOf": [one, other]}),
    }
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
    let found = compare(one.as_number()?, other.as_number()?);
    Some(if found == order { other.clone() } else { one.clone() })
}
