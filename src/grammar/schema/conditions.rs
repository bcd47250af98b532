//! Rewrites conditional keywords to those that rules support.
//!
//! Invariant: the output allows no value that the input does not.

use serde_json::{Map, Value, json};

use super::keywords::{self, constraints, wrong};
use super::numbers::same;
use super::place::about;
use super::rules::{Rules, too_complex};
use crate::{Error, Result};

type Fields = Map<String, Value>;

/// Most keys that demand others: each of them doubles the variants of an object.
const MAX_DEPENDENT: usize = 6;
/// Most negations inside one another.
const MAX_NOTS: usize = 6;

impl Rules<'_> {
    /// The keywords that constrain values; none if no value is valid.
    pub(super) fn plain(&mut self, fields: &Fields) -> Result<Option<Fields>> {
        let mut fields = fields.clone();
        let mut members = Vec::new();
        if !self.without_not(&mut fields, &mut members)? {
            return Ok(None);
        }
        without_if(&mut fields, &mut members);
        without_dependent(&mut fields, &mut members)?;
        without_contains(&mut fields)?;
        self.without_property_names(&mut fields)?;
        let fields = constraints(&fields)?;
        if members.is_empty() {
            return Ok(Some(fields));
        }
        // Keys keep the order in which the schema itself names them.
        members.insert(0, fields.into());
        Ok(Some(Fields::from_iter([("allOf".to_owned(), members.into())])))
    }

    /// Removes a `not` if the rest can be written in other keywords. False if it refuses all.
    fn without_not(&mut self, fields: &mut Fields, members: &mut Vec<Value>) -> Result<bool> {
        let Some(refused) = fields.get("not") else { return Ok(true) };
        let refused = self.followed(refused)?;
        if is_everything(&refused) {
            return Ok(false);
        }
        if refused == false {
            fields.remove("not");
            return Ok(true);
        }
        let only = |name: &str| refused.as_object().filter(|found| found.len() == 1)?.get(name).cloned();
        let values = match (only("enum"), only("const")) {
            (Some(Value::Array(values)), _) => values,
            (_, Some(value)) => vec![value],
            _ => return self.without(&refused, fields, members),
        };
        let is_left = |value: &Value| !values.iter().any(|refused| same(refused, value));
        let is_of_truth = fields.get("type").is_some_and(|kind| kind == "boolean");
        let single = fields.get("const").cloned();
        match (fields.get_mut("enum"), single) {
            (Some(Value::Array(listed)), None) => listed.retain(is_left),
            (None, Some(value)) if !is_left(&value) => return Ok(false),
            (None, Some(_)) => {}
            (None, None) if is_of_truth => {
                let left: Vec<Value> = [json!(true), json!(false)].into_iter().filter(is_left).collect();
                fields.insert("enum".to_owned(), left.into());
            }
            _ => return self.without(&refused, fields, members),
        }
        fields.remove("not");
        Ok(true)
    }

    /// Removes a `not` that excludes the values of this schema.
    fn without(&mut self, refused: &Value, fields: &mut Fields, members: &mut Vec<Value>) -> Result<bool> {
        let mut others = fields.clone();
        others.remove("not");
        self.num_nots += 1;
        if self.num_nots > MAX_NOTS {
            return Err(too_complex());
        }
        let left = self.complement_in(refused, &others)?;
        self.num_nots -= 1;
        if !left.is_whole() {
            return Ok(true);
        }
        fields.remove("not");
        match left.options.as_slice() {
            [] => return Ok(false),
            [one] => members.push(one.clone()),
            several => members.push(json!({"anyOf": several})),
        }
        Ok(true)
    }

    /// The target of a schema that is only a reference.
    pub(super) fn followed(&self, schema: &Value) -> Result<Value> {
        let mut schema = schema;
        for _ in 0..8 {
            let path =
                schema.as_object().filter(|fields| fields.len() == 1).and_then(|fields| fields.get("$ref"));
            let Some(path) = path.and_then(Value::as_str) else { break };
            schema = self.resolve(path)?;
        }
        Ok(schema.clone())
    }
}

fn is_schema(value: &Value) -> bool {
    value.is_object() || value.is_boolean()
}

fn is_everything(schema: &Value) -> bool {
    *schema == true || schema.as_object().is_some_and(Map::is_empty)
}

/// A condition that is constant, or without consequences.
fn without_if(fields: &mut Fields, members: &mut Vec<Value>) {
    let condition = fields.get("if").cloned();
    let depends = fields.contains_key("then") || fields.contains_key("else");
    let holds = match condition {
        // No condition, no consequence.
        None => None,
        Some(_) if !depends => None,
        Some(schema) if is_everything(&schema) => Some("then"),
        Some(Value::Bool(false)) => Some("else"),
        Some(_) => return,
    };
    fields.remove("if");
    let (then, otherwise) = (fields.remove("then"), fields.remove("else"));
    members.extend(holds.and_then(|name| if name == "then" { then } else { otherwise }));
}

/// A key that demands others: it is not there, or they are.
fn without_dependent(fields: &mut Fields, members: &mut Vec<Value>) -> Result<()> {
    let mut num_dependent = 0;
    // Where no keyword limits keys, naming one must not close the object.
    let says = ["properties", "patternProperties", "additionalProperties", "$ref", "allOf", "anyOf", "oneOf"];
    let is_free = !says.into_iter().any(|name| fields.contains_key(name));
    for keyword in ["dependentRequired", "dependentSchemas", "dependencies"] {
        let Some(dependent) = fields.remove(keyword) else { continue };
        let Value::Object(dependent) = dependent else { return Err(wrong(keyword, "an object")) };
        for (name, demand) in dependent {
            let with = match demand {
                Value::Array(names) if names.is_empty() => continue,
                demand if is_everything(&demand) => continue,
                Value::Array(mut names) if names.iter().all(Value::is_string) => {
                    // In this order where the schema does not decide.
                    names.insert(0, name.as_str().into());
                    json!({"required": names})
                }
                demand if keyword == "dependentRequired" || !is_schema(&demand) => {
                    let expected = "an object of lists of names, or of schemas in dependentSchemas";
                    return Err(wrong(keyword, expected));
                }
                mut schema => {
                    let required = schema
                        .as_object_mut()
                        .map(|fields| fields.entry("required").or_insert_with(|| json!([])));
                    if let Some(Value::Array(required)) = required {
                        required.push(name.as_str().into());
                    }
                    schema
                }
            };
            num_dependent += 1;
            if num_dependent > MAX_DEPENDENT {
                let error = Error::invalid_request(format!(
                    "{keyword} in the JSON schema has more than {MAX_DEPENDENT} keys, the most that can be enforced"
                ));
                return Err(about(keyword, error.with_hint("write the variants of the object as anyOf")));
            }
            let mut without = json!({"properties": {name: false}});
            if is_free {
                without["additionalProperties"] = true.into();
            }
            members.push(json!({"anyOf": [without, with]}));
        }
    }
    Ok(())
}

/// Items that a list must contain, where that is any item or none.
fn without_contains(fields: &mut Fields) -> Result<()> {
    let count = |fields: &Fields, name: &str| match fields.get(name) {
        None => Ok(None),
        Some(value) => keywords::count(name, value).map(Some),
    };
    let (min, max) = (count(fields, "minContains")?, count(fields, "maxContains")?);
    match fields.get("contains") {
        None => {}
        Some(_) if min == Some(0) && max.is_none() => {}
        Some(schema) if is_everything(schema) => {
            let at_least = count(fields, "minItems")?.unwrap_or(0).max(min.unwrap_or(1));
            fields.insert("minItems".to_owned(), at_least.into());
            if let Some(max) = max {
                let at_most = count(fields, "maxItems")?.unwrap_or(max).min(max);
                fields.insert("maxItems".to_owned(), at_most.into());
            }
        }
        Some(_) => return Ok(()),
    }
    for keyword in ["contains", "minContains", "maxContains"] {
        fields.remove(keyword);
    }
    Ok(())
}
