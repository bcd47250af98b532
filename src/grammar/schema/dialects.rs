//! What schemas say in words of other dialects.
//!
//! Invariant: the keywords of a schema that a reference leads to are changed too, wherever it is.

use serde_json::{Map, Value, json};

use super::super::expressions;
use super::keywords::{MAX_COUNT, kinds};
use super::merge::INTERNAL;
use super::{endless, for_each};

/// Keywords with a number of something, which may be written as 2.0.
const COUNTS: [&str; 8] = [
    "maxContains",
    "maxItems",
    "maxLength",
    "maxProperties",
    "minContains",
    "minItems",
    "minLength",
    "minProperties",
];

/// Writes what other dialects say in the words that are understood here: patterns for Python and JavaScript, OpenAPI's
/// `nullable`, and whole numbers with a fraction. Words that have a meaning only here are removed.
pub(super) fn normalize(schema: &mut Value) {
    for_each(schema, &mut rewrite);
    // References may lead to places that are no schemas by their keyword.
    for path in endless::paths(schema) {
        let Some(pointer) = path.strip_prefix('#') else { continue };
        if let Some(target) = schema.pointer_mut(pointer) {
            for_each(target, &mut rewrite);
        }
    }
}

fn rewrite(fields: &mut Map<String, Value>) {
    fields.retain(|name, _| !INTERNAL.contains(&name.as_str()));
    if fields.remove("nullable") == Some(Value::Bool(true)) {
        allow_null(fields);
    }
    if let Some(Value::String(pattern)) = fields.get_mut("pattern") {
        *pattern = expressions::rewritten(pattern);
    }
    if let Some(Value::Object(patterns)) = fields.get_mut("patternProperties") {
        let rewritten = std::mem::take(patterns).into_iter();
        *patterns = rewritten.map(|(name, schema)| (expressions::rewritten(&name), schema)).collect();
    }
    for name in COUNTS {
        let Some(value) = fields.get_mut(name).filter(|value| value.is_f64()) else { continue };
        let number = value.as_f64().unwrap_or_default();
        if number.fract() == 0.0 && number >= 0.0 {
            *value = (number as u64).min(MAX_COUNT).into();
        }
    }
}

/// Allows null in addition to what these fields allow.
fn allow_null(fields: &mut Map<String, Value>) {
    const OTHERS: [&str; 6] = ["$ref", "allOf", "anyOf", "const", "not", "oneOf"];
    let is_plain = !OTHERS.iter().any(|keyword| fields.contains_key(*keyword));
    // The keywords stay where they are, because references may lead into them.
    match kinds(fields) {
        Ok(kinds) if is_plain => {
            let kinds: Vec<Value> =
                kinds.into_iter().filter(|kind| *kind != "null").map(Value::from).collect();
            fields.insert("type".to_owned(), kinds.into_iter().chain(["null".into()]).collect());
            if let Some(Value::Array(values)) = fields.get_mut("enum")
                && !values.contains(&Value::Null)
            {
                values.push(Value::Null);
            }
        }
        _ => {
            // References lead to these by their path.
            let definitions = ["$defs", "definitions"].map(|name| (name, fields.remove(name)));
            let rest = std::mem::take(fields);
            let options = vec![Value::Object(rest), json!({"type": "null"})];
            fields.insert("anyOf".to_owned(), options.into());
            for (name, definitions) in definitions {
                fields.extend(definitions.map(|definitions| (name.to_owned(), definitions)));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::check;
    use super::*;

    #[test]
    fn a_backslash_before_a_sign_means_the_sign() {
        let tag = json!({"type": "string", "pattern": r"\A\<b\>[\<x]\Z"});
        check(&tag, &["\"<b>x\"", "\"<b><\""], &["\"b\"", "\"<b>\"", "\"a<b>x\""]);
        let ahead = json!({"type": "string", "pattern": r"^(?!a)\<?b\Z"});
        check(&ahead, &["\"<b\"", "\"b\""], &["\"ab\"", "\"b \""]);
        let names = json!({"type": "object", "patternProperties": {r"^\<": {"type": "null"}},
                           "additionalProperties": false});
        check(&names, &["{}", "{\"<a\": null}"], &["{\"a\": null}"]);
    }

    #[test]
    fn nullable_values_may_be_null() {
        let nullable = |mut schema: Value| {
            schema["nullable"] = true.into();
            schema
        };
        let text = json!({"type": "string", "maxLength": 2});
        check(&nullable(text.clone()), &["null", "\"ab\""], &["\"abc\"", "1"]);
        check(&nullable(json!({"type": "string", "enum": ["a"]})), &["null", "\"a\""], &["\"b\""]);
        let list = json!({"type": "array", "items": nullable(text.clone())});
        check(&list, &["[null, \"a\"]", "[]"], &["null", "[1]"]);
        let named = json!({"$ref": "#/$defs/text", "$defs": {"text": text}});
        check(&nullable(named.clone()), &["null", "\"ab\""], &["\"abc\""]);
        // References lead into it.
        let inner = nullable(json!({"properties": {"c": {"type": "null"}}}));
        let outer = json!({"properties": {"a": {"$ref": "#/properties/b/properties/c"}, "b": inner}});
        check(
            &outer,
            &["{\"a\": null, \"b\": null}", "{\"b\": {\"c\": null}}"],
            &["{\"a\": 1}", "{\"b\": 1}"],
        );
        let object = json!({"type": "object", "properties": {"a": nullable(json!({"allOf": [{"$ref": "#/$defs/text"}]}))},
                            "required": ["a"], "$defs": named["$defs"]});
        check(&object, &["{\"a\": null}", "{\"a\": \"x\"}"], &["{\"a\": 1}", "null"]);
        let mut not = text;
        not["nullable"] = false.into();
        check(&not, &["\"a\""], &["null"]);
    }
}
