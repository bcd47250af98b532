//! GLM: `<tool_call>f<arg_key>k</arg_key><arg_value>v</arg_value>…</tool_call>`.
//!
//! Values have no quotes, so the schema of the tool says what they are: text for a parameter that is a
//! string, otherwise JSON if it is JSON.

use serde_json::Value;

use super::format::is_name_char;
use super::marker::MarkerScan;
use super::output::Output;
use super::{CallParser, Tool};

pub(super) const OPEN: &str = "<tool_call>";
pub(super) const CLOSE: &str = "</tool_call>";
pub(super) const KEY: &str = "<arg_key>";
pub(super) const KEY_END: &str = "</arg_key>";
pub(super) const VALUE: &str = "<arg_value>";
pub(super) const VALUE_END: &str = "</arg_value>";

#[derive(Debug, Default)]
pub(super) struct Glm {
    state: State,
    scan: MarkerScan,
    name: String,
    key: String,
    num_arguments: usize,
}

#[derive(Debug, Default)]
enum State {
    #[default]
    Text,
    /// In the name; whitespace around it does not count.
    Name(String),
    /// Between arguments.
    Between,
    Key(String),
    AfterKey,
    /// In a value that is text for certain.
    TextValue,
    /// In any other value.
    Value(String),
    /// In a call that is broken: the rest is arguments as it is.
    Rest,
}

impl Glm {
    fn begin_call(&mut self, name: &str, output: &mut Output) {
        self.name = name.trim().to_owned();
        self.num_arguments = 0;
        output.begin_call(&self.name);
        output.argument('{');
    }

    fn end_call(&mut self, output: &mut Output) {
        output.argument('}');
        self.state = State::Text;
    }

    fn begin_argument(&mut self, output: &mut Output) {
        if self.num_arguments > 0 {
            output.arguments(", ");
        }
        self.num_arguments += 1;
        output.arguments(&quoted(&self.key));
        output.arguments(": ");
    }

    fn types(&self, tools: &[Tool]) -> Types {
        let tool = tools.iter().find(|tool| tool.name == self.name);
        let schema = tool.and_then(|tool| tool.parameters.as_ref());
        let property =
            schema.and_then(|schema| Some(resolved(schema.get("properties")?.get(&self.key)?, schema)));
        Types::of(property)
    }

    fn name(&mut self, mut name: String, found: Option<&'static str>, output: &mut Output) {
        let trimmed = name.trim();
        let is_name = trimmed.chars().all(is_name_char);
        match found {
            None if is_name => self.state = State::Name(name),
            Some(marker) if is_name && !trimmed.is_empty() => {
                self.begin_call(&name, output);
                match marker {
                    KEY => self.state = State::Key(String::new()),
                    _ => self.end_call(output),
                }
            }
            _ => {
                name.push_str(found.unwrap_or_default());
                name.push_str(&self.scan.take());
                output.content(OPEN);
                output.content(&name);
                self.state = State::Text;
            }
        }
    }

    fn rest(&mut self, text: &str, output: &mut Output) {
        output.arguments(text);
        self.state = State::Rest;
    }
}

impl CallParser for Glm {
    fn step(&mut self, c: char, tools: &[Tool], output: &mut Output) {
        let mut released = String::new();
        match std::mem::take(&mut self.state) {
            State::Text => {
                if self.scan.push(c, &[OPEN], &mut released).is_some() {
                    self.state = State::Name(String::new());
                }
                output.content(&released);
            }
            State::Name(mut name) => {
                let found = self.scan.push(c, &[KEY, CLOSE], &mut released);
                name.push_str(&released);
                self.name(name, found, output);
            }
            State::Between => match self.scan.push(c, &[KEY, CLOSE], &mut released) {
                Some(KEY) => self.state = State::Key(String::new()),
                Some(_) => self.end_call(output),
                None if released.trim().is_empty() => self.state = State::Between,
                None => {
                    let held = self.scan.take();
                    self.state = State::Rest;
                    (released + &held).chars().for_each(|c| self.step(c, tools, output));
                }
            },
            State::Key(mut key) => {
                let found = self.scan.push(c, &[KEY_END], &mut released);
                key.push_str(&released);
                self.state = match found {
                    Some(_) => {
                        key.trim().clone_into(&mut self.key);
                        self.begin_argument(output);
                        State::AfterKey
                    }
                    None => State::Key(key),
                };
            }
            State::AfterKey => match self.scan.push(c, &[VALUE], &mut released) {
                Some(_) if self.types(tools).is_text() => {
                    output.argument('"');
                    self.state = State::TextValue;
                }
                Some(_) => self.state = State::Value(String::new()),
                None if released.trim().is_empty() => self.state = State::AfterKey,
                None => {
                    let held = self.scan.take();
                    self.state = State::Rest;
                    (released + &held).chars().for_each(|c| self.step(c, tools, output));
                }
            },
            State::TextValue => {
                let found = self.scan.push(c, &[VALUE_END], &mut released);
                output.arguments(&escaped(&released));
                self.state = match found {
                    Some(_) => {
                        output.argument('"');
                        State::Between
                    }
                    None => State::TextValue,
                };
            }
            State::Value(mut value) => {
                let found = self.scan.push(c, &[VALUE_END], &mut released);
                value.push_str(&released);
                self.state = match found {
                    Some(_) => {
                        output.arguments(&self.types(tools).json(&value));
                        State::Between
                    }
                    None => State::Value(value),
                };
            }
            State::Rest => {
                self.state = match self.scan.push(c, &[CLOSE], &mut released) {
                    Some(_) => State::Text,
                    None => State::Rest,
                };
                output.arguments(&released);
            }
        }
    }

    fn finish(&mut self, _tools: &[Tool], output: &mut Output) {
        let held = self.scan.take();
        match std::mem::take(&mut self.state) {
            State::Text => output.content(&held),
            State::Name(name) => output.content(&format!("{OPEN}{name}{held}")),
            // The model ended its turn and left the end of the call out.
            State::Between if held.is_empty() => output.argument('}'),
            State::Between | State::AfterKey => self.rest(&held, output),
            State::Key(key) => self.rest(&format!("{KEY}{key}{held}"), output),
            State::TextValue => output.arguments(&escaped(&held)),
            State::Value(value) => self.rest(&(value + &held), output),
            State::Rest => output.arguments(&held),
        }
    }
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

/// The types that a schema allows; all of them if it does not say.
#[derive(Debug, Default)]
pub(super) struct Types(Vec<String>);

impl Types {
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

    fn is_text(&self) -> bool {
        !self.0.is_empty() && self.0.iter().all(|name| name == "string")
    }

    /// Whether a text without quotes can be meant.
    pub(super) fn may_be_text(&self) -> bool {
        self.0.is_empty() || self.0.iter().any(|name| name == "string")
    }

    /// A value as JSON.
    fn json(&self, text: &str) -> String {
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

fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

fn escaped(text: &str) -> String {
    let quoted = quoted(text);
    quoted[1..quoted.len() - 1].to_owned()
}
