//! Qwen 3 Coder: `<tool_call> <function=f> <parameter=k> v </parameter>… </function> </tool_call>`, with line ends where
//! there are spaces here.
//!
//! Values have no quotes; `unquoted.rs` says what they are. The line ends next to a value's tags are none of it.

use super::format::is_name_char;
use super::hermes::{CLOSE, OPEN};
use super::marker::MarkerScan;
use super::output::Output;
use super::unquoted::{Types, escaped, quoted};
use super::{CallParser, Tool};

pub(super) const FUNCTION: &str = "<function=";
pub(super) const FUNCTION_END: &str = "</function>";
pub(super) const PARAMETER: &str = "<parameter=";
/// What ends a value, with the line end before it or without.
pub(super) const VALUE_END: &str = "\n</parameter>";
const VALUE_ENDS: [&str; 2] = [VALUE_END, "</parameter>"];

#[derive(Debug, Default)]
pub(super) struct Qwen3Coder {
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
    /// Behind the beginning of a call, with what came since.
    Opened(String),
    /// In the name, with what came before it.
    Name(String, String),
    /// Between arguments.
    Between,
    Key(String),
    /// Before the first character of a value.
    BeforeValue,
    /// In a value that is text for certain.
    TextValue,
    /// In any other value.
    Value(String),
    /// After a complete function.
    AfterCall,
    /// In a call that is broken: the rest is arguments as it is.
    Rest,
}

impl Qwen3Coder {
    fn end_call(&mut self, output: &mut Output) {
        output.argument('}');
        self.state = State::AfterCall;
    }

    fn begin_argument(&mut self, key: String, output: &mut Output) {
        if self.num_arguments > 0 {
            output.arguments(", ");
        }
        self.num_arguments += 1;
        output.arguments(&quoted(&key));
        output.arguments(": ");
        self.key = key;
        self.state = State::BeforeValue;
    }

    fn types(&self, tools: &[Tool]) -> Types {
        Types::of_argument(tools, &self.name, &self.key)
    }

    /// In a value, whose first character is none that belongs to its tag.
    fn value(&mut self, c: char, tools: &[Tool], output: &mut Output) {
        let mut released = String::new();
        let found = self.scan.push(c, &VALUE_ENDS, &mut released);
        match std::mem::take(&mut self.state) {
            State::TextValue => {
                output.arguments(&escaped(&released));
                if found.is_some() {
                    output.argument('"');
                }
                self.state = if found.is_some() { State::Between } else { State::TextValue };
            }
            State::Value(mut value) => {
                value.push_str(&released);
                if found.is_some() {
                    output.arguments(&self.types(tools).json(&value));
                }
                self.state = if found.is_some() { State::Between } else { State::Value(value) };
            }
            other => self.state = other,
        }
    }

    fn begin_value(&mut self, tools: &[Tool], output: &mut Output) {
        self.state = match self.types(tools).is_text() {
            true => {
                output.argument('"');
                State::TextValue
            }
            false => State::Value(String::new()),
        };
    }

    /// The rest of the call is arguments, beginning with this text.
    fn rest(&mut self, text: &str, tools: &[Tool], output: &mut Output) {
        let held = self.scan.take();
        self.state = State::Rest;
        text.chars().chain(held.chars()).for_each(|c| self.step(c, tools, output));
    }

    /// What looked like a call is none.
    fn no_call(&mut self, text: &str, output: &mut Output) {
        output.content(OPEN);
        output.content(text);
        self.state = State::Text;
    }
}

impl CallParser for Qwen3Coder {
    fn step(&mut self, c: char, tools: &[Tool], output: &mut Output) {
        let mut released = String::new();
        match std::mem::take(&mut self.state) {
            State::Text => {
                if self.scan.push(c, &[OPEN], &mut released).is_some() {
                    self.state = State::Opened(String::new());
                }
                output.content(&released);
            }
            State::Opened(mut before) => {
                let found = self.scan.push(c, &[FUNCTION], &mut released);
                before.push_str(&released);
                match found {
                    _ if !released.trim().is_empty() => self.no_call(&before, output),
                    Some(_) => self.state = State::Name(before + FUNCTION, String::new()),
                    None => self.state = State::Opened(before),
                }
            }
            State::Name(before, mut name) => {
                if c == '>' && !name.is_empty() {
                    output.begin_call(&name);
                    output.argument('{');
                    (self.name, self.num_arguments) = (name, 0);
                    self.state = State::Between;
                } else if is_name_char(c) {
                    name.push(c);
                    self.state = State::Name(before, name);
                } else {
                    self.no_call(&(before + &name), output);
                    self.step(c, tools, output);
                }
            }
            State::Between => match self.scan.push(c, &[PARAMETER, FUNCTION_END, CLOSE], &mut released) {
                _ if !released.trim().is_empty() => self.rest(&released, tools, output),
                Some(PARAMETER) => self.state = State::Key(String::new()),
                Some(CLOSE) => {
                    self.end_call(output);
                    self.state = State::Text;
                }
                Some(_) => self.end_call(output),
                None => self.state = State::Between,
            },
            State::Key(key) => match c {
                '>' if !key.is_empty() => self.begin_argument(key, output),
                '>' | '<' | '\n' => self.rest(&format!("{PARAMETER}{key}{c}"), tools, output),
                _ => self.state = State::Key(key + c.encode_utf8(&mut [0; 4])),
            },
            State::BeforeValue => {
                self.begin_value(tools, output);
                // The line end of the tag is none of the value.
                if c != '\n' {
                    self.value(c, tools, output);
                }
            }
            state @ (State::TextValue | State::Value(_)) => {
                self.state = state;
                self.value(c, tools, output);
            }
            State::AfterCall => {
                // The end, another beginning where the end was left out, or an answer.
                self.state = match self.scan.push(c, &[CLOSE, OPEN], &mut released) {
                    Some(OPEN) => State::Opened(String::new()),
                    None if released.trim().is_empty() => State::AfterCall,
                    _ => State::Text,
                };
                output.content(&released);
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
            // The beginning of the call's end, or of another one.
            State::AfterCall => {}
            State::Opened(before) => output.content(&format!("{OPEN}{before}{held}")),
            State::Name(before, name) => output.content(&format!("{OPEN}{before}{name}")),
            // The model ended its turn and left the end of the call out, or was cut in it.
            State::Between if [FUNCTION_END, CLOSE].iter().any(|end| end.starts_with(&held)) => {
                output.argument('}');
            }
            State::Between | State::BeforeValue | State::Rest => output.arguments(&held),
            State::Key(key) => output.arguments(&format!("{PARAMETER}{key}")),
            State::TextValue => output.arguments(&escaped(&held)),
            State::Value(value) => output.arguments(&(value + &held)),
        }
    }
}
