//! One call as a JSON object: `{"name": "f", "arguments": {…}}`.
//!
//! The name is usually first; then the arguments are streamed. In any other order the call is emitted as a whole when
//! the object ends. The values are not checked beyond their brackets and strings: the client gets the model's text.

use serde_json::Value;

use super::Tool;
use super::output::Output;
use super::syntax::ObjectText;

/// Follows a JSON value by its brackets and strings.
#[derive(Debug, Default)]
pub(super) struct ValueScan {
    /// The closing brackets that are due.
    stack: Vec<char>,
    in_string: bool,
    is_escaped: bool,
    /// A number, `true`, `false` or `null`, whose end is seen only after it.
    is_scalar: bool,
}

/// The role of a character in a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ValueStep {
    /// Inside it.
    Inside,
    /// Its last character.
    Last,
    /// The first one after it.
    Past,
    /// It cannot be here.
    Broken,
}

impl ValueScan {
    pub(super) fn step(&mut self, c: char) -> ValueStep {
        if self.in_string {
            match c {
                _ if self.is_escaped => self.is_escaped = false,
                '\\' => self.is_escaped = true,
                '"' => {
                    self.in_string = false;
                    return self.after_part();
                }
                _ => {}
            }
            return ValueStep::Inside;
        }
        if self.is_scalar {
            return if is_scalar(c) { ValueStep::Inside } else { ValueStep::Past };
        }
        match c {
            '{' => self.stack.push('}'),
            '[' => self.stack.push(']'),
            '"' => self.in_string = true,
            '}' | ']' if self.stack.last() == Some(&c) => {
                self.stack.pop();
                return self.after_part();
            }
            '}' | ']' => return ValueStep::Broken,
            _ if !self.stack.is_empty() => {}
            _ if is_scalar(c) => self.is_scalar = true,
            _ => return ValueStep::Broken,
        }
        ValueStep::Inside
    }

    fn after_part(&self) -> ValueStep {
        if self.stack.is_empty() { ValueStep::Last } else { ValueStep::Inside }
    }
}

fn is_scalar(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '-' | '+' | '.')
}

/// A call, as far as it has come.
#[derive(Debug, Default)]
pub(super) struct JsonCall {
    /// Text that was not emitted yet, and the call's text before it, in case it is not a call.
    raw: String,
    state: State,
    key: String,
    name: Option<String>,
    arguments: Option<String>,
    /// The call was emitted.
    has_begun: bool,
    /// The only key is the name.
    is_keyed: bool,
    /// Alternative keys for the name and for the arguments.
    keys: [String; 2],
    /// Other keys are ignored.
    has_more: bool,
    /// Inside an object that has both.
    is_nested: bool,
}

#[derive(Debug, Default)]
enum State {
    #[default]
    Start,
    /// Before a key or the end.
    Key,
    InKey,
    Colon,
    Value,
    InValue(ValueScan, String),
    /// Inside arguments that are passed on.
    InArguments(ValueScan),
    AfterValue,
}

/// The result of a character.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Status {
    Open,
    /// The object is complete, and so is the call.
    Done,
    /// This is no call, or is none any more.
    Broken,
}

impl JsonCall {
    /// `prefix` goes before the text of the object if that turns out to be no call.
    pub(super) fn new(prefix: String) -> Self {
        Self { raw: prefix, ..Self::default() }
    }

    /// The same for an object that may have other keys.
    pub(super) fn with_keys(prefix: String, object: &ObjectText) -> Self {
        let keys = object.keys().map(|key| format!("\"{key}\""));
        Self { keys, has_more: object.has_more, ..Self::new(prefix) }
    }

    /// The same for an object whose only key is the name.
    pub(super) fn keyed(prefix: String) -> Self {
        Self { is_keyed: true, ..Self::new(prefix) }
    }

    /// Whether the call was emitted.
    pub(super) fn has_begun(&self) -> bool {
        self.has_begun
    }

    /// The text that was not emitted.
    pub(super) fn raw(&self) -> &str {
        &self.raw
    }

    /// The same, taken: all of the text if the call has not begun, otherwise what follows its arguments or broke them.
    pub(super) fn into_raw(self) -> String {
        self.raw
    }

    /// The text ends in the middle of the call.
    pub(super) fn finish(self, output: &mut Output) {
        if self.has_begun {
            output.arguments(self.raw.trim());
        } else {
            output.content(&self.raw);
        }
    }

    /// Takes a character. With `tools`, only these are called.
    pub(super) fn step(&mut self, c: char, tools: Option<&[Tool]>, output: &mut Output) -> Status {
        if !matches!(self.state, State::InArguments(_)) {
            self.raw.push(c);
        }
        match &mut self.state {
            State::Start if c == '{' => self.state = State::Key,
            State::Key if c == '"' => {
                self.key = "\"".to_owned();
                self.state = State::InKey;
            }
            State::Key | State::AfterValue if c == '}' => return self.close(output),
            State::InKey => {
                self.key.push(c);
                // No key of a call has anything to escape.
                match c {
                    '\\' => return Status::Broken,
                    '"' => self.state = State::Colon,
                    _ => {}
                }
            }
            State::Colon if c == ':' => self.state = State::Value,
            State::Start | State::Key | State::Colon | State::Value | State::AfterValue
                if c.is_whitespace() => {}
            State::Value => return self.begin_value(c, tools, output),
            State::InValue(scan, text) => match scan.step(c) {
                ValueStep::Inside => text.push(c),
                ValueStep::Last => {
                    text.push(c);
                    return self.end_value(tools);
                }
                ValueStep::Past => {
                    return match self.end_value(tools) {
                        Status::Open => self.after_scalar(c, output),
                        other => other,
                    };
                }
                ValueStep::Broken => return Status::Broken,
            },
            State::InArguments(scan) => match scan.step(c) {
                ValueStep::Broken => {
                    self.raw.push(c);
                    return Status::Broken;
                }
                step => {
                    output.argument(c);
                    if step == ValueStep::Last {
                        self.state = State::AfterValue;
                    }
                }
            },
            State::AfterValue if c == ',' => self.state = State::Key,
            State::Start | State::Key | State::Colon | State::AfterValue => return Status::Broken,
        }
        Status::Open
    }

    fn after_scalar(&mut self, c: char, output: &mut Output) -> Status {
        match c {
            '}' => self.close(output),
            ',' => {
                self.state = State::Key;
                Status::Open
            }
            _ if c.is_whitespace() => Status::Open,
            _ => Status::Broken,
        }
    }

    fn begin_value(&mut self, c: char, tools: Option<&[Tool]>, output: &mut Output) -> Status {
        if self.is_keyed && self.name.is_none() {
            let Ok(name) = serde_json::from_str::<String>(&self.key) else { return Status::Broken };
            let is_known = tools.is_none_or(|tools| tools.iter().any(|tool| tool.name == name));
            if name.is_empty() || !is_known {
                return Status::Broken;
            }
            self.name = Some(name);
            "\"arguments\"".clone_into(&mut self.key);
        }
        let is_known = match self.key.as_str() {
            _ if self.has_name_key() => self.name.is_none(),
            _ if self.has_arguments_key() => self.arguments.is_none(),
            "\"function\"" if c == '{' && !self.is_nested => {
                self.is_nested = true;
                self.state = State::Key;
                return Status::Open;
            }
            // Added by some models, without further information.
            "\"type\"" | "\"id\"" | "\"index\"" | "\"tool_call_id\"" => true,
            _ => self.has_more,
        };
        let mut scan = ValueScan::default();
        if !is_known || scan.step(c) == ValueStep::Broken {
            return Status::Broken;
        }
        match &self.name {
            Some(name) if c == '{' && self.has_arguments_key() => {
                output.begin_call(name);
                output.argument(c);
                self.has_begun = true;
                self.arguments = Some(String::new());
                self.raw.clear();
                self.state = State::InArguments(scan);
            }
            _ => self.state = State::InValue(scan, c.to_string()),
        }
        Status::Open
    }

    fn end_value(&mut self, tools: Option<&[Tool]>) -> Status {
        let State::InValue(_, text) = std::mem::replace(&mut self.state, State::AfterValue) else {
            return Status::Broken;
        };
        if self.has_name_key() {
            let Ok(name) = serde_json::from_str::<String>(&text) else { return Status::Broken };
            let is_known = tools.is_none_or(|tools| tools.iter().any(|tool| tool.name == name));
            if name.is_empty() || !is_known {
                return Status::Broken;
            }
            self.name = Some(name);
        } else if self.has_arguments_key() {
            self.arguments = Some(text);
        }
        Status::Open
    }

    fn has_name_key(&self) -> bool {
        matches!(self.key.as_str(), "\"name\"" | "\"tool_name\"") || self.key == self.keys[0]
    }

    fn has_arguments_key(&self) -> bool {
        matches!(self.key.as_str(), "\"arguments\"" | "\"parameters\"") || self.key == self.keys[1]
    }

    /// The end of the object, or of the one in it.
    fn close(&mut self, output: &mut Output) -> Status {
        if std::mem::take(&mut self.is_nested) {
            self.state = State::AfterValue;
            return Status::Open;
        }
        self.end(output)
    }

    fn end(&mut self, output: &mut Output) -> Status {
        if self.has_begun {
            return Status::Done;
        }
        let Some(name) = &self.name else { return Status::Broken };
        let text = self.arguments.take().unwrap_or_default();
        let arguments = match serde_json::from_str(&text) {
            Ok(Value::Object(_)) => text,
            // Some models write the object into a string.
            Ok(Value::String(inner)) if serde_json::from_str::<serde_json::Map<_, _>>(&inner).is_ok() => {
                inner
            }
            Ok(Value::Null) => "{}".to_owned(),
            Err(_) if text.is_empty() => "{}".to_owned(),
            _ if text.starts_with('{') => text,
            _ => return Status::Broken,
        };
        output.begin_call(name);
        output.arguments(&arguments);
        self.has_begun = true;
        Status::Done
    }
}
