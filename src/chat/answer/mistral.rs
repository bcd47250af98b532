//! Mistral: `[TOOL_CALLS][{"name": "f", "arguments": {…}}, …]`, and in newer models
//! `[TOOL_CALLS]f[ARGS]{…}`, where an id may stand as `[CALL_ID]…` between the two.

use super::format::is_name_char;
use super::json_call::{JsonCall, Status, ValueScan, ValueStep};
use super::marker::MarkerScan;
use super::output::Output;
use super::{CallParser, Tool};

pub(super) const OPEN: &str = "[TOOL_CALLS]";
pub(super) const CALL_ID: &str = "[CALL_ID]";
pub(super) const ARGS: &str = "[ARGS]";

#[derive(Debug, Default)]
pub(super) struct Mistral {
    state: State,
    scan: MarkerScan,
}

#[derive(Debug, Default)]
enum State {
    #[default]
    Text,
    /// After the marker; all of it so far.
    Opened(String),
    /// Before an element of the list, with what belongs to it in front.
    Element(String),
    /// In an object, which may be in a list.
    Call(JsonCall, InList),
    /// After an element.
    AfterElement,
    /// In a name that has no object around it, and all since the marker.
    Name {
        name: String,
        raw: String,
    },
    /// Between the name, which is told only at the arguments, and these.
    CallId {
        name: String,
        raw: String,
    },
    /// Before the arguments.
    BeforeArguments,
    Arguments(ValueScan),
    /// In a call whose arguments are broken.
    Rest,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum InList {
    Yes,
    No,
}

impl Mistral {
    fn reject(&mut self, raw: &str, output: &mut Output) {
        output.content(raw);
        self.state = State::Text;
    }

    fn opened(&mut self, mut raw: String, c: char, output: &mut Output) {
        match c {
            '{' => {
                let mut call = JsonCall::new(raw);
                call.step(c, None, output);
                self.state = State::Call(call, InList::No);
                return;
            }
            '[' => {
                raw.push(c);
                self.state = State::Element(raw);
                return;
            }
            _ => raw.push(c),
        }
        if c.is_whitespace() {
            self.state = State::Opened(raw);
        } else if is_name_char(c) {
            self.state = State::Name { name: c.to_string(), raw };
        } else {
            self.reject(&raw, output);
        }
    }

    fn advance(&mut self, c: char, output: &mut Output) {
        let mut released = String::new();
        match std::mem::take(&mut self.state) {
            State::Text => {
                if self.scan.push(c, &[OPEN], &mut released).is_some() {
                    self.state = State::Opened(OPEN.to_owned());
                }
                output.content(&released);
            }
            State::Opened(raw) => self.opened(raw, c, output),
            State::Element(mut raw) => {
                if c == '{' {
                    let mut call = JsonCall::new(raw);
                    call.step(c, None, output);
                    self.state = State::Call(call, InList::Yes);
                    return;
                }
                raw.push(c);
                if c.is_whitespace() {
                    self.state = State::Element(raw);
                } else {
                    self.reject(&raw, output);
                }
            }
            State::Call(mut call, in_list) => match call.step(c, None, output) {
                Status::Open => self.state = State::Call(call, in_list),
                Status::Done if in_list == InList::Yes => self.state = State::AfterElement,
                Status::Done => self.state = State::Text,
                Status::Broken if call.has_begun() => {
                    self.state = State::Rest;
                    call.into_raw().chars().for_each(|c| self.advance(c, output));
                }
                Status::Broken => self.reject(&call.into_raw(), output),
            },
            State::AfterElement => match c {
                ',' => self.state = State::Element(",".to_owned()),
                ']' => self.state = State::Text,
                _ if c.is_whitespace() => self.state = State::AfterElement,
                _ => self.advance(c, output),
            },
            State::Name { mut name, mut raw } => {
                if c == '{' && !self.scan.is_holding() {
                    output.begin_call(&name);
                    self.state = State::BeforeArguments;
                    return self.advance(c, output);
                }
                let found = self.scan.push(c, &[ARGS, CALL_ID], &mut released);
                name.push_str(&released);
                raw.push_str(&released);
                self.state = match found {
                    Some(ARGS) => {
                        output.begin_call(&name);
                        State::BeforeArguments
                    }
                    Some(marker) => State::CallId { name, raw: raw + marker },
                    None if released.chars().all(is_name_char) => State::Name { name, raw },
                    None => {
                        let held = self.scan.take();
                        return self.reject(&(raw + &held), output);
                    }
                };
            }
            State::CallId { name, mut raw } => {
                let found = self.scan.push(c, &[ARGS], &mut released);
                raw.push_str(&released);
                self.state = match found {
                    Some(_) => {
                        output.begin_call(&name);
                        State::BeforeArguments
                    }
                    None if released.chars().all(is_name_char) => State::CallId { name, raw },
                    None => {
                        let held = self.scan.take();
                        return self.reject(&(raw + &held), output);
                    }
                };
            }
            State::BeforeArguments if c.is_whitespace() => self.state = State::BeforeArguments,
            State::BeforeArguments if c == '{' => {
                let mut scan = ValueScan::default();
                scan.step(c);
                output.argument(c);
                self.state = State::Arguments(scan);
            }
            State::BeforeArguments => {
                self.state = State::Rest;
                self.advance(c, output);
            }
            State::Arguments(mut scan) => match scan.step(c) {
                ValueStep::Broken => {
                    self.state = State::Rest;
                    self.advance(c, output);
                }
                step => {
                    output.argument(c);
                    self.state = if step == ValueStep::Last { State::Text } else { State::Arguments(scan) };
                }
            },
            State::Rest => {
                self.state = match self.scan.push(c, &[OPEN], &mut released) {
                    Some(_) => State::Opened(OPEN.to_owned()),
                    None => State::Rest,
                };
                output.arguments(&released);
            }
        }
    }
}

impl CallParser for Mistral {
    fn step(&mut self, c: char, _tools: &[Tool], output: &mut Output) {
        self.advance(c, output);
    }

    fn finish(&mut self, _tools: &[Tool], output: &mut Output) {
        let held = self.scan.take();
        match std::mem::take(&mut self.state) {
            State::Text => output.content(&held),
            State::Opened(raw) | State::Element(raw) => output.content(&raw),
            State::Name { raw, .. } | State::CallId { raw, .. } => output.content(&(raw + &held)),
            State::Call(call, _) => call.finish(output),
            State::AfterElement | State::BeforeArguments | State::Arguments(_) => {}
            State::Rest => output.arguments(&held),
        }
    }
}
