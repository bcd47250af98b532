//! Schemas whose values could never end, because each of them needs another one inside.

use std::collections::HashSet;

use serde_json::{Map, Value};

use super::keywords::kinds;

/// Most schemas that are looked at. Beyond that none counts as endless.
const MAX_STEPS: usize = 1 << 20;

/// The references in a schema whose values cannot end.
pub(super) fn references<'s>(root: &Value, resolve: impl Fn(&str) -> Option<&'s Value>) -> HashSet<String> {
    let mut endless = paths(root);
    // A text is no reference if it leads nowhere; that is another error.
    endless.retain(|path| resolve(path).is_some());
    let mut num_left = MAX_STEPS;
    loop {
        let ending: Vec<String> = endless
            .iter()
            .filter(|path| resolve(path).is_some_and(|target| ends(target, &endless, &mut num_left)))
            .cloned()
            .collect();
        if num_left == 0 {
            return HashSet::new();
        }
        if ending.is_empty() {
            return endless;
        }
        ending.iter().for_each(|path| _ = endless.remove(path));
    }
}

/// All references in a schema.
pub(super) fn paths(root: &Value) -> HashSet<String> {
    let mut paths = HashSet::new();
    collect(root, &mut paths);
    paths
}

fn collect(value: &Value, paths: &mut HashSet<String>) {
    match value {
        Value::Array(items) => items.iter().for_each(|item| collect(item, paths)),
        Value::Object(fields) => {
            paths.extend(fields.get("$ref").and_then(Value::as_str).map(str::to_owned));
            fields.values().for_each(|value| collect(value, paths));
        }
        _ => {}
    }
}

/// Whether a schema has a value that ends, where these references have none.
fn ends(schema: &Value, endless: &HashSet<String>, num_left: &mut usize) -> bool {
    let Value::Object(fields) = schema else { return true };
    *num_left = num_left.saturating_sub(1);
    if *num_left == 0 || fields.contains_key("const") || fields.contains_key("enum") {
        return true;
    }
    if fields.get("$ref").and_then(Value::as_str).is_some_and(|path| endless.contains(path)) {
        return false;
    }
    for (keyword, wants_all) in [("allOf", true), ("anyOf", false), ("oneOf", false)] {
        let Some(Value::Array(members)) = fields.get(keyword) else { continue };
        let mut each = members.iter().map(|member| ends(member, endless, num_left));
        if !(if wants_all { each.all(|ends| ends) } else { each.any(|ends| ends) }) {
            return false;
        }
    }
    match kinds(fields).as_deref() {
        Ok(["object"]) => object_ends(fields, endless, num_left),
        Ok(["array"]) => list_ends(fields, endless, num_left),
        _ => true,
    }
}

fn object_ends(fields: &Map<String, Value>, endless: &HashSet<String>, num_left: &mut usize) -> bool {
    let required = fields.get("required").and_then(Value::as_array);
    required.into_iter().flatten().filter_map(Value::as_str).all(|name| {
        let named = fields.get("properties").and_then(|properties| properties.get(name));
        let schema = named.or_else(|| fields.get("additionalProperties"));
        schema.is_none_or(|schema| ends(schema, endless, num_left))
    })
}

fn list_ends(fields: &Map<String, Value>, endless: &HashSet<String>, num_left: &mut usize) -> bool {
    let min = fields.get("minItems").and_then(Value::as_u64).unwrap_or(0);
    let first = ["prefixItems", "items"].iter().find_map(|name| fields.get(*name)?.as_array());
    let num_first = first.map_or(0, Vec::len) as u64;
    let first = first.into_iter().flatten().take(usize::try_from(min).unwrap_or(usize::MAX));
    let others = fields.get("items").filter(|items| min > num_first && items.is_object());
    first.chain(others).all(|schema| ends(schema, endless, num_left))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::super::GrammarSpec;
    use super::super::tests::check;
    use super::*;

    #[test]
    fn what_could_never_end_is_refused_or_left_out() {
        let refused = |schema: Value| {
            let error = GrammarSpec::lark_json(&schema).unwrap_err();
            assert!(error.message().contains("could ever end"), "{schema}: {error}");
        };
        let node = |required: Value, next: Value| json!({"type": "object", "properties": {"next": next}, "required": required});
        refused(json!({"$ref": "#"}));
        refused(json!({"anyOf": [{"$ref": "#"}]}));
        refused(node(json!(["next"]), json!({"$ref": "#"})));
        refused(json!({"type": "array", "items": {"$ref": "#"}, "minItems": 1}));
        let two = json!({"a": node(json!(["next"]), json!({"$ref": "#/$defs/b"})),
                         "b": {"type": "array", "prefixItems": [{"$ref": "#/$defs/a"}], "minItems": 1}});
        refused(json!({"$ref": "#/$defs/a", "$defs": two}));
        // It can be left out, or be something else.
        let mut optional = node(json!([]), json!({"$ref": "#/$defs/a"}));
        optional["$defs"] = two;
        check(&optional, &["{}"], &["{\"next\": {\"next\": []}}"]);
        check(&node(json!([]), json!({"$ref": "#"})), &["{}", "{\"next\": {}}"], &["{\"next\": 1}"]);
        let maybe = node(json!(["next"]), json!({"anyOf": [{"$ref": "#"}, {"type": "null"}]}));
        check(&maybe, &["{\"next\": null}", "{\"next\": {\"next\": null}}"], &["{}"]);
        let tree = json!({"type": "array", "items": {"$ref": "#"}});
        check(&tree, &["[]", "[[], [[]]]"], &["[1]"]);
    }
}
