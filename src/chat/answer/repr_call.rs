//! One call as an object that is written as Python writes one: `{'name': 'f', 'arguments': {…}}`. It is emitted as a whole.

use serde_json::Value;

use super::Tool;
use super::json_call::Status;
use super::literal;
use super::output::Output;
use super::value_text::ValueText;

/// A call, as far as it has come.
#[derive(Debug)]
pub(super) struct ReprCall {
    /// Its text before this state.
    prefix: String,
    text: ValueText,
    /// The keys of the name and of the arguments.
    keys: [String; 2],
}

impl ReprCall {
    /// The call that begins in this way, if it does: a bracket and a quote that is not JSON's. `raw` has the call's
    /// text before it.
    pub(super) fn begun(raw: &str, keys: [&str; 2]) -> Option<Self> {
        let at = raw.rfind('{')?;
        let (prefix, object) = raw.split_at(at);
        if object[1..].trim() != "'" {
            return None;
        }
        let mut text = ValueText::new("");
        object.chars().for_each(|c| text.push(c));
        Some(Self { prefix: prefix.to_owned(), text, keys: keys.map(str::to_owned) })
    }

    /// Takes a character. With `tools`, only these are called.
    pub(super) fn step(&mut self, c: char, tools: Option<&[Tool]>, output: &mut Output) -> Status {
        // A quote that may be the last one is, if this may follow.
        self.text.is_between(c);
        self.text.push(c);
        if c != '}' || !self.text.is_between(' ') {
            return Status::Open;
        }
        let Some(Value::Object(fields)) = literal::parse(self.text.as_str(), "") else {
            return Status::Broken;
        };
        let [name, arguments] = &self.keys;
        let get = |keys: [&str; 3]| keys.into_iter().find_map(|key| fields.get(key));
        let Some(name) = get([name, "name", "tool_name"]).and_then(Value::as_str) else {
            return Status::Broken;
        };
        if name.is_empty() || tools.is_some_and(|tools| tools.iter().all(|tool| tool.name != name)) {
            return Status::Broken;
        }
        let text = match get([arguments, "arguments", "parameters"]) {
            Some(Value::Object(arguments)) => Value::Object(arguments.clone()).to_string(),
            Some(Value::Null) | None => "{}".to_owned(),
            Some(_) => return Status::Broken,
        };
        output.begin_call(name);
        output.arguments(&text);
        Status::Done
    }

    /// Whether it is after this text.
    pub(super) fn is_after(&self, start: &str) -> bool {
        self.prefix.trim_start().starts_with(start)
    }

    /// All of it, if it is no call.
    pub(super) fn into_raw(self) -> String {
        self.prefix + self.text.as_str()
    }
}
