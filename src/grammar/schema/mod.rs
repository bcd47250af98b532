//! JSON schemas as grammars in the Lark language.
//!
//! The grammar library compiles JSON schemas itself, but with numbers as doubles, with objects that are open by
//! default, and with references that it cannot combine. So objects, lists, numbers and their combinations are written
//! as rules here (`rules.rs`), and strings with patterns and rarer keywords are left to the library, in `%json`.
//! Invariants: every text of a grammar is valid under the schema; a keyword that cannot be enforced is an error that
//! names it, unless it is an annotation.
//!
//! An object is closed if its schema names `properties` and does not mention others: authors mean that, and it keeps a
//! small model from adding keys forever. An object that names none is free.

mod alternatives;
mod complement;
mod conditions;
mod counted;
mod dialects;
mod endless;
mod keywords;
mod library;
mod lists;
mod merge;
mod numbers;
mod objects;
mod pattern;
mod place;
mod property_names;
mod rules;
mod text;

use serde_json::{Map, Value};

pub use self::place::SchemaPlace;
pub(super) use self::rules::to_lark;
use crate::{Error, Result};

/// Keywords whose value is a schema.
const ONE: [&str; 9] = [
    "additionalItems",
    "additionalProperties",
    "contains",
    "else",
    "if",
    "items",
    "not",
    "propertyNames",
    "then",
];
/// Keywords whose value is a list of schemas.
const LISTS: [&str; 4] = ["allOf", "anyOf", "oneOf", "prefixItems"];
/// Keywords whose value has a schema for each name.
const NAMED: [&str; 5] = ["$defs", "definitions", "dependentSchemas", "patternProperties", "properties"];

/// Calls `change` with this schema and every one inside it.
fn for_each(schema: &mut Value, change: &mut dyn FnMut(&mut Map<String, Value>)) {
    let Value::Object(fields) = schema else { return };
    change(fields);
    for (keyword, value) in fields.iter_mut() {
        match value {
            value @ Value::Object(_) if ONE.contains(&keyword.as_str()) => for_each(value, change),
            Value::Array(items) if LISTS.contains(&keyword.as_str()) || keyword == "items" => {
                items.iter_mut().for_each(|item| for_each(item, change));
            }
            Value::Object(schemas) if NAMED.contains(&keyword.as_str()) => {
                schemas.values_mut().for_each(|schema| for_each(schema, change));
            }
            _ => {}
        }
    }
}

/// The same schema with every object closed, for `strict`: only the keys of its `properties`. A map, which has a schema
/// for all of its values and names no keys, stays one.
pub(super) fn closed(mut schema: Value) -> Value {
    for_each(&mut schema, &mut |fields| {
        let is_object = fields.get("type").is_some_and(|kind| match kind {
            Value::Array(kinds) => kinds.iter().any(|kind| kind == "object"),
            kind => kind == "object",
        });
        if !is_object && !fields.contains_key("properties") {
            return;
        }
        let is_map = fields.get("additionalProperties").is_some_and(|values| {
            values.as_object().is_some_and(|values| !values.is_empty()) && !fields.contains_key("properties")
        });
        if !is_map {
            fields.insert("additionalProperties".to_owned(), false.into());
        }
    });
    schema
}

/// A terminal's expression for the raw strings of a schema, without quotes, of characters of this class.
pub(super) fn bare_text(schema: &Value, class: &str) -> Result<String> {
    let mut schema = schema.clone();
    dialects::normalize(&mut schema);
    let schema = &schema;
    let fields = rules::Rules::new(schema, "").text_fields(schema)?;
    let text = text::Text::of(&fields)?
        .ok_or_else(|| Error::invalid_request("minLength is greater than maxLength in the JSON schema"))?;
    let except: Vec<String> = text.except.iter().map(|word| rules::literal(word)).collect();
    let expression = text.expression(class, "")?;
    Ok(match except.is_empty() {
        true => expression,
        false => format!("{expression} & ~({})", except.join(" | ")),
    })
}

/// Whether a schema of strings allows any string.
pub(super) fn is_free_text(schema: &Value) -> bool {
    let fields = schema.as_object();
    fields.is_some_and(|fields| {
        !fields.contains_key("enum")
            && !fields.contains_key("const")
            && !fields.contains_key("allOf")
            && !fields.contains_key("not")
            && text::Text::of(fields).is_ok_and(|text| text.is_some_and(|text| text.is_free()))
    })
}

#[cfg(test)]
pub(crate) mod random;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod told_apart_tests;
