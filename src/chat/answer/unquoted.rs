//! Values of arguments that a model writes without quotes: the schema of the tool gives their types. They are strings
//! for a string parameter, otherwise JSON if they parse as JSON, or Python's notation.

use serde_json::{Number, Value};

use super::{Tool, literal};

/// The schema of an argument or of its element, in the document that its references resolve in.
#[derive(Debug, Clone, Copy)]
pub(super) struct Schema<'s> {
    part: &'s Value,
    root: &'s Value,
}

impl<'s> Schema<'s> {
    /// That of a property of an object.
    pub(super) fn property(self, key: &str) -> Option<Self> {
        let found = alternatives(self.part, self.root)
            .into_iter()
            .find_map(|object| object.get("properties").and_then(|properties| properties.get(key)));
        found.map(|part| Self { part, ..self })
    }

    /// That of the items of a list.
    pub(super) fn item(self) -> Option<Self> {
        let found = alternatives(self.part, self.root).into_iter().find_map(|list| list.get("items"));
        found.map(|part| Self { part, ..self })
    }
}

/// The schema of an argument, if the tool has one.
pub(super) fn argument_schema<'s>(tools: &'s [Tool], name: &str, key: &str) -> Option<Schema<'s>> {
    let root = tools.iter().find(|tool| tool.name == name)?.parameters.as_ref()?;
    Schema { part: root, root }.property(key)
}

/// The schema that a reference leads to; a chain of them is followed for some steps.
pub(super) fn resolved<'s>(mut schema: &'s Value, root: &'s Value) -> &'s Value {
    const MAX_STEPS: usize = 8;
    for _ in 0..MAX_STEPS {
        let path = schema.get("$ref").and_then(Value::as_str).and_then(|path| path.strip_prefix('#'));
        match path.and_then(|path| root.pointer(path)) {
            Some(next) => schema = next,
            None => break,
        }
    }
    schema
}

/// The alternatives of a schema, each resolved: those of `anyOf` and `oneOf`, or the schema itself.
pub(super) fn alternatives<'s>(schema: &'s Value, root: &'s Value) -> Vec<&'s Value> {
    fn add<'s>(schema: &'s Value, root: &'s Value, depth: usize, found: &mut Vec<&'s Value>) {
        const MAX_DEPTH: usize = 8;
        let schema = resolved(schema, root);
        let lists = ["anyOf", "oneOf"].iter().filter_map(|name| schema.get(*name)?.as_array());
        let branches: Vec<&Value> = lists.flatten().collect();
        if branches.is_empty() || depth == MAX_DEPTH {
            found.push(schema);
        } else {
            branches.into_iter().for_each(|branch| add(branch, root, depth + 1, found));
        }
    }
    let mut found = Vec::new();
    add(schema, root, 0, &mut found);
    found
}

/// The types that a schema allows; all of them by default.
#[derive(Debug, Default)]
pub(super) struct Types(Vec<String>);

impl Types {
    /// Those of an argument of a tool.
    pub(super) fn of_argument(tools: &[Tool], name: &str, key: &str) -> Self {
        let tool = tools.iter().find(|tool| tool.name == name);
        let Some(root) = tool.and_then(|tool| tool.parameters.as_ref()) else { return Self::default() };
        let mut types = Self::default();
        let objects = [root].into_iter().chain(alternatives(root, root)).chain([resolved(root, root)]);
        for object in objects {
            let named = object.get("properties").and_then(|properties| properties.get(key));
            let schema =
                named.or_else(|| object.get("additionalProperties").filter(|schema| schema.is_object()));
            if let Some(schema) = schema {
                types.add(schema, root);
            }
        }
        types
    }

    /// The types of an element of an argument.
    pub(super) fn of(schema: Schema<'_>) -> Self {
        let mut types = Self::default();
        types.add(schema.part, schema.root);
        types
    }

    fn add(&mut self, schema: &Value, root: &Value) {
        for schema in alternatives(schema, root) {
            match schema.get("type") {
                Some(Value::String(name)) => self.0.push(name.clone()),
                Some(Value::Array(names)) => {
                    self.0.extend(names.iter().filter_map(Value::as_str).map(str::to_owned));
                }
                _ => {}
            }
            let values = schema.get("enum").and_then(Value::as_array).into_iter().flatten();
            for value in values.chain(schema.get("const")) {
                self.0.push(type_name(value).to_owned());
            }
        }
    }

    /// Whether it is text for certain.
    pub(super) fn is_text(&self) -> bool {
        !self.0.is_empty() && self.0.iter().all(|name| name == "string")
    }

    /// A value as JSON.
    pub(super) fn json(&self, text: &str) -> String {
        let trimmed = text.trim();
        if let Ok(value) = serde_json::from_str::<Value>(trimmed)
            && self.allows(&value)
        {
            let fitted = self.fitted(value.clone());
            // The model's text is kept, down to its digits.
            return if fitted == value { trimmed.to_owned() } else { fitted.to_string() };
        }
        match literal::parse(trimmed, "") {
            // Quotes around a text may belong to it.
            Some(value) if !value.is_string() && self.allows(&value) => self.fitted(value).to_string(),
            _ => self.word(trimmed).unwrap_or_else(|| quoted(text)),
        }
    }

    /// A value of a type that is allowed, if it means one.
    pub(super) fn fitted(&self, value: Value) -> Value {
        let has = |name: &str| self.0.iter().any(|found| found == name);
        match &value {
            Value::Number(number) if has("integer") && !has("number") => match number.as_f64() {
                #[expect(clippy::cast_possible_truncation, reason = "it is whole, and within the limits")]
                Some(float)
                    if !number.is_i64() && !number.is_u64() && float.fract() == 0.0 && float.abs() < 9e15 =>
                {
                    Value::Number(Number::from(float as i64))
                }
                _ => value,
            },
            Value::Number(number) if has("boolean") && !has("integer") && !has("number") => {
                match number.as_u64() {
                    Some(bit @ (0 | 1)) => Value::Bool(bit == 1),
                    _ => value,
                }
            }
            _ => value,
        }
    }

    /// The meaning of a word in other capitalisation, where strings are not allowed.
    fn word(&self, text: &str) -> Option<String> {
        let has = |name: &str| self.0.iter().any(|found| found == name);
        let word = text.to_ascii_lowercase();
        match word.as_str() {
            _ if has("string") => None,
            "true" | "false" if has("boolean") => Some(word),
            "none" | "null" | "nil" if has("null") => Some("null".to_owned()),
            _ => None,
        }
    }

    fn allows(&self, value: &Value) -> bool {
        let name = type_name(value);
        let is_whole = value.as_f64().is_some_and(|number| number.fract() == 0.0);
        let is_named = |wanted: &str| {
            self.0.iter().any(|found| found == wanted || found == "integer" && wanted == "number" && is_whole)
        };
        // Where strings are not allowed, JSON of a wrong type is closer to the intention.
        is_named(name) || !is_named("string")
    }
}

pub(super) fn type_name(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

/// The text as a string in JSON.
pub(super) fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

/// The same without its quotes.
pub(super) fn escaped(text: &str) -> String {
    let quoted = quoted(text);
    quoted[1..quoted.len() - 1].to_owned()
}
