//! GLM: `<tool_call>f<arg_key>k</arg_key><arg_value>v</arg_value>…</tool_call>`.
//!
//! Values have no quotes; `unquoted.rs` says what they are.

use super::format::is_name_char;
use super::marker::MarkerScan;
use super::output::Output;
use super::unquoted::{Types, escaped, quoted};
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
        Types::of_argument(tools, &self.name, &self.key)
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
            // The model ended its turn and left the end of the call out, or was cut in it.
            State::Between if CLOSE.starts_with(&held) => output.argument('}'),
            State::Between | State::AfterKey => self.rest(&held, output),
            State::Key(key) => self.rest(&format!("{KEY}{key}{held}"), output),
            State::TextValue => output.arguments(&escaped(&held)),
            State::Value(value) => self.rest(&(value + &held), output),
            State::Rest => output.arguments(&held),
        }
    }
}
