//! Rewrites constraints on the names of keys to the keywords about keys that rules support.
//!
//! Invariant: the output allows no object that the input does not.

use serde_json::{Map, Value, json};

use super::keywords::{TYPES, listed, wrong};
use super::merge::NAMES;
use super::pattern;
use super::rules::Rules;
use super::text::Text;
use crate::Result;

type Fields = Map<String, Value>;

impl Rules<'_> {
    /// Takes out a `propertyNames`: a list of the keys, or else what holds for named keys, and for each other one.
    pub(super) fn without_property_names(&mut self, fields: &mut Fields) -> Result<()> {
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
        // What is no constraint on texts is an error by name later.
        let is_known = |name: &String| {
            ["const", "enum", "type"].contains(&name.as_str())
                || TYPES.iter().any(|(_, names)| names.contains(&name.as_str()))
        };
        let known = self.as_one(&names, 0)?.filter(|names| names.keys().all(is_known));
        let Some(mut names) = known else { return Ok(()) };
        match names.remove("type") {
            None => {}
            Some(kinds) if super::merge::names(&kinds).contains(&"string") => {}
            Some(_) => names = Fields::from_iter([("enum".to_owned(), json!([]))]),
        }
        if names.is_empty() {
            fields.remove(KEYWORD);
            return Ok(());
        }
        let has_properties = fields.contains_key("properties");
        let is_open = !has_properties && !fields.contains_key("patternProperties");
        let others = fields.get("additionalProperties").cloned().unwrap_or(Value::Bool(is_open));
        let mut named = match fields.get("properties") {
            None => Fields::new(),
            Some(Value::Object(named)) => named.clone(),
            Some(_) => return Err(wrong("properties", "an object")),
        };
        let required = fields.get("required").and_then(Value::as_array).cloned().unwrap_or_default();
        let required = required.iter().filter_map(Value::as_str);
        let listed: Option<Vec<Value>> = listed(&names).map(|listed| listed.into_iter().cloned().collect());
        let keys: Vec<String> = named.keys().cloned().chain(required.map(str::to_owned)).collect();
        for key in keys {
            match allows(&names, &key)? {
                Some(true) => {}
                // It must not be there.
                Some(false) => drop(named.insert(key, Value::Bool(false))),
                None => return Ok(()),
            }
        }
        if let Some(listed) = listed {
            let patterns = fields.get("patternProperties").and_then(Value::as_object);
            for name in listed.iter().filter_map(Value::as_str) {
                let found =
                    patterns.into_iter().flatten().map(|(pattern, _)| pattern::is_found(pattern, name));
                let Some(found) = found.collect::<Option<Vec<bool>>>() else { return Ok(()) };
                if allows(&names, name)? == Some(true) {
                    let schema = if found.contains(&true) { true.into() } else { others.clone() };
                    named.entry(name).or_insert(schema);
                }
            }
            fields.insert("additionalProperties".to_owned(), false.into());
        } else if !named.is_empty() {
            fields.entry("additionalProperties").or_insert(others);
        }
        let wanted = fields.entry(NAMES).or_insert_with(|| Value::Array(Vec::new()));
        wanted.as_array_mut().into_iter().for_each(|wanted| wanted.push(names.clone().into()));
        if has_properties || !named.is_empty() {
            fields.insert("properties".to_owned(), named.into());
        }
        fields.remove(KEYWORD);
        Ok(())
    }
}

/// Whether these constraints allow a name. None if that is not known.
pub(super) fn allows(names: &Fields, name: &str) -> Result<Option<bool>> {
    if listed(names).is_some_and(|listed| !listed.iter().any(|listed| *listed == name)) {
        return Ok(Some(false));
    }
    Ok(Text::of(names)?.map_or(Some(false), |text| text.allows(name)))
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
        // Named keys are none of the others.
        let typed = of(json!({"pattern": "^[a-z]{1,3}$"}), json!({"type": "null"}));
        check(
            &typed,
            &[a, r#"{"a": 1, "b": null}"#],
            &[long, r#"{"b": 1}"#, r#"{"a": null}"#, r#"{"B": null}"#],
        );
        let mut patterns = of(json!({"enum": ["a", "b1", "c"]}), json!({"type": "null"}));
        patterns["patternProperties"] = json!({"^b": {"type": "boolean"}});
        check(&patterns, &[a, r#"{"b1": true, "c": null}"#], &[r#"{"b1": null}"#, r#"{"b2": true}"#, long]);
        let several = json!({"type": "object",
            "propertyNames": {"allOf": [{"minLength": 2}, {"pattern": "^a", "not": {"const": "ab"}}]}});
        check(&several, &[none, r#"{"abc": 1}"#, r#"{"ac": 1}"#], &[a, r#"{"ab": 1}"#, r#"{"bb": 1}"#]);
        // Also for the keys of another schema.
        let named = json!({"properties": {"a": {}, "ab": {}}});
        let together = json!({"type": "object", "allOf": [{"propertyNames": {"minLength": 2}}, named]});
        check(&together, &[none, r#"{"ab": 1}"#], &[a, r#"{"abc": 1}"#]);
        let lengths = json!({"type": "object", "propertyNames": {"minLength": 2, "maxLength": 3}});
        check(&lengths, &[none, r#"{"ab": 1}"#, r#"{"abc": 1}"#], &[a, r#"{"abcd": 1}"#]);
    }
}
