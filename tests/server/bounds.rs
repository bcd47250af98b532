//! Every type and every bound that `openapi.json` names is the server's: what breaks one of them, in a request that is right
//! otherwise, is refused. A fuzzer meets a few of them by chance; these are all.

use serde_json::{Map, Value, json};

use super::client::Server;

/// Schemas with the document that their references lead into.
struct Schemas(Value);

impl Schemas {
    fn resolve<'a>(&'a self, schema: &'a Value) -> &'a Value {
        match schema.get("$ref").and_then(Value::as_str) {
            Some(reference) => self.resolve(self.0.pointer(reference.trim_start_matches('#')).unwrap()),
            None => schema,
        }
    }

    /// A small value that is right.
    fn right(&self, schema: &Value) -> Value {
        let schema = self.resolve(schema);
        if let Some(value) = schema.get("const") {
            return value.clone();
        }
        for list in ["enum", "anyOf"] {
            if let Some(first) = schema[list].as_array().and_then(|list| list.first()) {
                return if list == "enum" { first.clone() } else { self.right(first) };
            }
        }
        match kinds(schema).first().copied() {
            Some("string") => "a".repeat(length(schema, "minLength").unwrap_or(1).max(1)).into(),
            Some("integer" | "number") => [0.0, 1.0, limit(schema, "minimum").unwrap_or(0.0)]
                .into_iter()
                .find(|number| self.fits(schema, &number_of(*number)))
                .map(number_of)
                .unwrap(),
            Some("boolean") => false.into(),
            Some("array") => {
                vec![self.right(&schema["items"]); length(schema, "minItems").unwrap_or(0)].into()
            }
            Some("object") | None => {
                let required = schema["required"].as_array().into_iter().flatten().map(|name| {
                    let name = name.as_str().unwrap();
                    (name.to_owned(), self.right(&schema["properties"][name]))
                });
                Value::Object(required.collect())
            }
            _ => Value::Null,
        }
    }

    /// Values that break one bound each, with the way to it.
    fn wrong(&self, schema: &Value, at: &str) -> Vec<(String, Value)> {
        let whole = self.resolve(schema);
        let mut found = Vec::new();
        for alternative in whole["anyOf"].as_array().into_iter().flatten() {
            found.extend(self.wrong(alternative, at));
        }
        let mut add = |bound: &str, value: Value| found.push((format!("{at} {bound}"), value));
        // What is of another type: also what could pass for nothing.
        for other in [
            json!(""),
            json!("a"),
            json!(0),
            json!(1.5),
            json!(true),
            json!(false),
            json!([]),
            json!([1.5]),
            json!({}),
            json!({"a": 1.5}),
        ] {
            add(&format!("as {other}"), other);
        }
        for name in whole["required"].as_array().into_iter().flatten() {
            let mut all = self.right(whole);
            all.as_object_mut().unwrap().remove(name.as_str().unwrap());
            add(&format!("without {name}"), all);
        }
        if let Some(most) = length(whole, "maxLength") {
            add("maxLength", "a".repeat(most + 1).into());
        }
        if length(whole, "minLength").is_some_and(|least| least > 0) {
            add("minLength", "".into());
        }
        if whole.get("pattern").is_some() {
            add("pattern", "\u{7}".into());
        }
        if let Some(least) = limit(whole, "minimum") {
            add("minimum", number_of(least - least.abs().max(1.0)));
        }
        if let Some(most) = limit(whole, "maximum") {
            add("maximum", number_of(most + most.abs().max(1.0)));
        }
        if let Some(most) = length(whole, "maxItems") {
            add("maxItems", vec![self.right(&whole["items"]); most + 1].into());
        }
        if length(whole, "minItems").is_some_and(|least| least > 0) {
            add("minItems", json!([]));
        }
        if let Some(most) = length(whole, "maxProperties") {
            let value = self.right(whole.get("additionalProperties").unwrap_or(&Value::Null));
            let entries: Map<String, Value> =
                (0..=most).map(|index| (index.to_string(), value.clone())).collect();
            add("maxProperties", entries.into());
        }
        if let Some(names) = whole.get("propertyNames") {
            let value = self.right(whole.get("additionalProperties").unwrap_or(&Value::Null));
            for (bound, name) in self.wrong(names, "propertyNames") {
                add(
                    &bound,
                    Value::Object([(name.as_str().unwrap().to_owned(), value.clone())].into_iter().collect()),
                );
            }
        }
        if let Some(items) = whole.get("items") {
            let inside = self.wrong(items, &format!("{at}[]"));
            found.extend(inside.into_iter().map(|(at, value)| (at, json!([value]))));
        }
        if let Some(values @ Value::Object(_)) = whole.get("additionalProperties") {
            let inside = self.wrong(values, &format!("{at}.0"));
            found.extend(inside.into_iter().map(|(at, value)| (at, json!({"0": value}))));
        }
        for (name, property) in whole["properties"].as_object().into_iter().flatten() {
            for (at, value) in self.wrong(property, &format!("{at}.{name}")) {
                let mut all = self.right(whole);
                all[name] = value;
                found.push((at, all));
            }
        }
        // What another alternative allows breaks nothing.
        found.retain(|(_, value)| !self.fits(whole, value));
        found
    }

    /// Whether a value is right, as far as the words of this document go.
    fn fits(&self, schema: &Value, value: &Value) -> bool {
        let schema = self.resolve(schema);
        let kinds = kinds(schema);
        let has_kind = kinds.is_empty()
            || kinds.iter().any(|kind| match *kind {
                "string" => value.is_string(),
                "integer" => value.as_f64().is_some_and(|number| number.fract() == 0.0),
                "number" => value.is_number(),
                "boolean" => value.is_boolean(),
                "array" => value.is_array(),
                "object" => value.is_object(),
                _ => value.is_null(),
            });
        let is_listed = schema.get("const").is_none_or(|only| only == value)
            && schema["enum"].as_array().is_none_or(|values| values.contains(value))
            && schema["anyOf"].as_array().is_none_or(|all| all.iter().any(|one| self.fits(one, value)));
        let within = |size: usize, least: &str, most: &str| {
            length(schema, least).is_none_or(|least| size >= least)
                && length(schema, most).is_none_or(|most| size <= most)
        };
        let is_bounded = match value {
            Value::String(text) => {
                within(text.chars().count(), "minLength", "maxLength")
                    && schema.get("pattern").and_then(Value::as_str).is_none_or(|pattern| {
                        fancy_regex::Regex::new(pattern).unwrap().is_match(text).unwrap()
                    })
            }
            Value::Number(number) => {
                let number = number.as_f64().unwrap();
                limit(schema, "minimum").is_none_or(|least| number >= least)
                    && limit(schema, "maximum").is_none_or(|most| number <= most)
            }
            Value::Array(items) => {
                let all = |of: &Value| items.iter().all(|item| self.fits(of, item));
                within(items.len(), "minItems", "maxItems") && schema.get("items").is_none_or(all)
            }
            Value::Object(fields) => {
                let properties = &schema["properties"];
                let is_complete = schema["required"]
                    .as_array()
                    .is_none_or(|names| names.iter().all(|name| fields.contains_key(name.as_str().unwrap())));
                let all_fit = fields.iter().all(|(name, value)| match properties.get(name) {
                    Some(property) => self.fits(property, value),
                    None => match schema.get("additionalProperties") {
                        Some(other @ Value::Object(_)) => self.fits(other, value),
                        _ => true,
                    },
                });
                let named = schema.get("propertyNames");
                within(fields.len(), "minProperties", "maxProperties")
                    && is_complete
                    && all_fit
                    && named
                        .is_none_or(|names| fields.keys().all(|name| self.fits(names, &name.as_str().into())))
            }
            _ => true,
        };
        has_kind && is_listed && is_bounded
    }
}

/// The types that a schema names, null last.
fn kinds(schema: &Value) -> Vec<&str> {
    match &schema["type"] {
        Value::String(kind) => vec![kind],
        Value::Array(kinds) => kinds.iter().map(|kind| kind.as_str().unwrap()).collect(),
        _ => Vec::new(),
    }
}

fn limit(schema: &Value, name: &str) -> Option<f64> {
    schema.get(name)?.as_f64()
}

fn length(schema: &Value, name: &str) -> Option<usize> {
    Some(schema.get(name)?.as_u64()? as usize)
}

/// A whole number if it is one: 1e20 is a number that no integer of the server holds.
fn number_of(number: f64) -> Value {
    let is_whole = number.fract() == 0.0 && number.abs() < 9e15;
    if is_whole { json!(number as i64) } else { json!(number) }
}

#[test]
fn every_bound_that_is_described_is_the_servers() {
    let schemas = Schemas(serde_json::from_str(include_str!("../../src/server/openapi.json")).unwrap());
    let server =
        Server::start("--max-model-len 64 --max-num-seqs 4 --disable-access-log --responses-memory 10");
    let (mut num_tried, mut taken) = (0, Vec::new());
    for (path, methods) in schemas.0["paths"].as_object().unwrap() {
        let Some(schema) = methods.pointer("/post/requestBody/content/application~1json/schema") else {
            continue;
        };
        for (bound, body) in schemas.wrong(schema, "") {
            num_tried += 1;
            let answer = server.post(path, &body);
            if !(400..500).contains(&answer.status) {
                let text = answer.text();
                let text: String = text.chars().take(200).collect();
                taken.push(format!("{path} {bound}: {} {text}", answer.status));
            }
        }
    }
    assert!(num_tried > 5_000, "{num_tried}");
    assert!(taken.is_empty(), "{num_tried} tried\n{}", taken.join("\n"));
}
