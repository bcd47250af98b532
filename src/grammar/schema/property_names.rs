//! Rewrites constraints on the names of keys to the keywords about keys that rules support.
//!
//! Invariant: the output allows no object that the input does not.

use serde_json::{Map, Value, json};

use super::keywords::{constraints, listed, wrong};
use super::rules::Rules;
use super::text::Text;
use crate::Result;

type Fields = Map<String, Value>;

/// The constraints on a name that are known for a given one.
const KNOWN: [&str; 6] = ["const", "enum", "format", "maxLength", "minLength", "pattern"];

impl Rules<'_> {
    /// Takes out a `propertyNames` that lists the keys, or that holds for the keys of a closed object, or gives other
    /// keys a pattern.
    pub(super) fn without_property_names(&self, fields: &mut Fields) -> Result<()> {
        const KEYWORD: &str = "propertyNames";
        let Some(names) = fields.get(KEYWORD) else { return Ok(()) };
        let names = match self.followed(names)? {
            Value::Bool(true) => {
                fields.remove(KEYWORD);
                return Ok(());
            }
            // There is no such key, so there is none.
            Value::Bool(false) => json!({"enum": []}),
            names => names,
        };
        let Some(names) = names.as_object() else { return Ok(()) };
        let mut names = constraints(names)?;
        if names.get("type").is_some_and(|kind| kind == "string") {
            names.remove("type");
        }
        if names.is_empty() {
            fields.remove(KEYWORD);
            return Ok(());
        }
        let has_properties = fields.contains_key("properties");
        if fields.contains_key("patternProperties") {
            return Ok(());
        }
        let others = fields.get("additionalProperties").cloned().unwrap_or(Value::Bool(!has_properties));
        let mut named = match fields.get("properties") {
            None => Fields::new(),
            Some(Value::Object(named)) => named.clone(),
            Some(_) => return Err(wrong("properties", "an object")),
        };
        let required = fields.get("required").and_then(Value::as_array).cloned().unwrap_or_default();
        let required = required.iter().filter_map(Value::as_str);
        if let Some(listed) = list(&names) {
            named.retain(|name, _| listed.iter().any(|listed| listed == name));
            for name in listed.iter().filter_map(Value::as_str) {
                named.entry(name).or_insert_with(|| others.clone());
            }
            // A key that must be there and must not be.
            for name in required {
                named.entry(name).or_insert(Value::Bool(false));
            }
            fields.insert("additionalProperties".to_owned(), false.into());
        } else {
            let keys: Vec<String> = named.keys().cloned().chain(required.map(str::to_owned)).collect();
            for key in keys {
                match allows(&names, &key)? {
                    Some(true) => {}
                    Some(false) => drop(named.insert(key, Value::Bool(false))),
                    None => return Ok(()),
                }
            }
            if others != false {
                // The schema of other keys is not one of those that are named.
                let is_any = others == true || others.as_object().is_some_and(Map::is_empty);
                let Some(pattern) = as_pattern(&names)?.filter(|_| is_any || named.is_empty()) else {
                    return Ok(());
                };
                fields.insert("patternProperties".to_owned(), json!({pattern: others}));
                fields.insert("additionalProperties".to_owned(), false.into());
            }
        }
        if has_properties || !named.is_empty() {
            fields.insert("properties".to_owned(), named.into());
        }
        fields.remove(KEYWORD);
        Ok(())
    }
}

/// The names, if they are only listed.
fn list(names: &Fields) -> Option<Vec<Value>> {
    let is_list = names.keys().all(|keyword| ["const", "enum"].contains(&keyword.as_str()));
    listed(names).filter(|_| is_list).map(|listed| listed.into_iter().cloned().collect())
}

/// Whether these constraints allow a name. None if that is not known.
fn allows(names: &Fields, name: &str) -> Result<Option<bool>> {
    if !names.keys().all(|keyword| KNOWN.contains(&keyword.as_str())) {
        return Ok(None);
    }
    if listed(names).is_some_and(|listed| !listed.iter().any(|listed| *listed == name)) {
        return Ok(Some(false));
    }
    Ok(Text::of(names)?.map_or(Some(false), |text| text.allows(name)))
}

/// A pattern for the allowed names, if one says all.
fn as_pattern(names: &Fields) -> Result<Option<String>> {
    let has_only = |known: &[&str]| names.keys().all(|keyword| known.contains(&keyword.as_str()));
    if has_only(&["pattern"]) {
        let pattern = names.get("pattern").and_then(Value::as_str);
        return pattern.map(|pattern| Some(pattern.to_owned())).ok_or_else(|| wrong("pattern", "a string"));
    }
    if !has_only(&["maxLength", "minLength"]) {
        return Ok(None);
    }
    Ok(Text::of(names)?.map(|text| format!("^[\\s\\S]{}$", text.repetition())))
}

#[cfg(test)]
mod tests {
    use super::super::tests::check;
    use super::*;

    #[test]
    fn names_are_constrained_next_to_properties() {
        let (none, a, long) = ("{}", r#"{"a": 1}"#, r#"{"long": 1}"#);
        let of = |names: Value, others: Value| {
            json!({"type": "object", "properties": {"a": {"type": "integer"}, "long": {"type": "integer"}},
                   "propertyNames": names, "additionalProperties": others})
        };
        let both = r#"{"a": 1, "long": 1}"#;
        // Where all keys are right, it has no effect.
        for names in
            [json!({"pattern": "^[a-z]+$"}), json!({"maxLength": 9}), json!({"minLength": 1, "pattern": "."})]
        {
            check(&of(names, json!(false)), &[none, a, long, both], &[r#"{"b": 1}"#]);
        }
        // A key that is not right cannot be there.
        for names in
            [json!({"pattern": "^.$"}), json!({"maxLength": 3}), json!({"maxLength": 3, "minLength": 1})]
        {
            check(&of(names, json!(false)), &[none, a], &[long, both]);
        }
        let mut needs = of(json!({"maxLength": 3}), json!(false));
        needs["properties"]["b"] = true.into();
        needs["required"] = json!(["b"]);
        check(&needs, &[r#"{"a": 1, "b": null}"#], &[none, r#"{"b": null, "long": 1}"#]);
        // Other keys are those of the pattern.
        let open = of(json!({"pattern": "^[a-z]$"}), json!(true));
        check(&open, &[none, a, r#"{"a": 1, "b": "x"}"#], &[long, r#"{"a": "x"}"#, r#"{"A": 1}"#]);
        let lengths = json!({"type": "object", "propertyNames": {"minLength": 2, "maxLength": 3}});
        check(&lengths, &[none, r#"{"ab": 1}"#, r#"{"abc": 1}"#], &[a, r#"{"abcd": 1}"#]);
    }
}
