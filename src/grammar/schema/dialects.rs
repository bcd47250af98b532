//! What schemas say in words of other dialects.

use serde_json::{Map, Value, json};

use super::super::expressions;
use super::for_each;

/// Writes what other dialects say in the words that are understood here: patterns for Python and JavaScript, and OpenAPI's
/// `nullable`.
pub(super) fn normalize(schema: &mut Value) {
    for_each(schema, &mut |fields| {
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
    });
}

/// Allows null in addition to what these fields allow.
fn allow_null(fields: &mut Map<String, Value>) {
    const OTHERS: [&str; 6] = ["$ref", "allOf", "anyOf", "const", "not", "oneOf"];
    let is_plain = !OTHERS.iter().any(|keyword| fields.contains_key(*keyword));
    match fields.get_mut("type") {
        Some(Value::String(kind)) if is_plain => {
            let kinds = Value::from(vec![std::mem::take(kind), "null".to_owned()]);
            fields.insert("type".to_owned(), kinds);
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
        let object = json!({"type": "object", "properties": {"a": nullable(json!({"allOf": [{"$ref": "#/$defs/text"}]}))},
                            "required": ["a"], "$defs": named["$defs"]});
        check(&object, &["{\"a\": null}", "{\"a\": \"x\"}"], &["{\"a\": 1}", "null"]);
        let mut not = text;
        not["nullable"] = false.into();
        check(&not, &["\"a\""], &["null"]);
    }
}
