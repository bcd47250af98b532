//! Values of arguments that a model writes without quotes: the schema of the tool says what they are. They are text for
//! a parameter that is a string, otherwise JSON if they are JSON.

use serde_json::Value;

use super::Tool;

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

/// The types that a schema allows; all of them if it does not say.
#[derive(Debug, Default)]
pub(super) struct Types(Vec<String>);

impl Types {
    /// Those of an argument of a tool.
    pub(super) fn of_argument(tools: &[Tool], name: &str, key: &str) -> Self {
        let tool = tools.iter().find(|tool| tool.name == name);
        let schema = tool.and_then(|tool| tool.parameters.as_ref());
        Self::of(schema.and_then(|schema| Some(resolved(schema.get("properties")?.get(key)?, schema))))
    }

    pub(super) fn of(schema: Option<&Value>) -> Self {
        let mut types = Self::default();
        if let Some(schema) = schema {
            types.add(schema);
        }
        types
    }

    fn add(&mut self, schema: &Value) {
        match schema.get("type") {
            Some(Value::String(name)) => self.0.push(name.clone()),
            Some(Value::Array(names)) => {
                self.0.extend(names.iter().filter_map(Value::as_str).map(str::to_owned));
            }
            _ => {}
        }
        for name in ["anyOf", "oneOf"] {
            for branch in schema.get(name).and_then(Value::as_array).into_iter().flatten() {
                self.add(branch);
            }
        }
        let values = schema.get("enum").and_then(Value::as_array).into_iter().flatten();
        for value in values.chain(schema.get("const")) {
            self.0.push(type_name(value).to_owned());
        }
    }

    /// Whether it is text for certain.
    pub(super) fn is_text(&self) -> bool {
        !self.0.is_empty() && self.0.iter().all(|name| name == "string")
    }

    /// Whether a text without quotes can be meant.
    pub(super) fn may_be_text(&self) -> bool {
        self.0.is_empty() || self.0.iter().any(|name| name == "string")
    }

    /// A value as JSON.
    pub(super) fn json(&self, text: &str) -> String {
        let trimmed = text.trim();
        match serde_json::from_str::<Value>(trimmed) {
            Ok(value) if self.allows(&value) => trimmed.to_owned(),
            _ => quoted(text),
        }
    }

    fn allows(&self, value: &Value) -> bool {
        let name = type_name(value);
        let is_named = |wanted: &str| {
            self.0.iter().any(|found| found == wanted || (found == "integer" && wanted == "number"))
        };
        // Where text is not allowed, JSON of a wrong type is nearer to what was meant.
        is_named(name) || !is_named("string")
    }
}

fn type_name(value: &Value) -> &'static str {
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
