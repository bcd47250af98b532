//! Llama 3: the answer is `{"name": "f", "parameters": {…}}`, with or without `<|python_tag|>` before it;
//! several are separated by semicolons.
//!
//! Nothing but its form tells such a call from an answer in JSON, so it must name a tool of the request.

use super::json_call::{JsonCall, Status};
use super::marker::MarkerScan;
use super::output::Output;
use super::{CallParser, Tool};

pub(super) const TAG: &str = "<|python_tag|>";

#[derive(Debug, Default)]
pub(super) struct Llama3 {
    state: State,
    scan: MarkerScan,
}

#[derive(Debug, Default)]
enum State {
    /// Where a call may begin without the tag: at the beginning, and after a call. The text is the
    /// separator.
    #[default]
    Start,
    /// After a call, with the separator so far.
    Between(String),
    /// After the tag, with it and the whitespace after it.
    Tag(String),
    Text,
    Call(JsonCall),
    /// In a call whose arguments are broken.
    Rest,
}

impl Llama3 {
    fn begin(&mut self, prefix: String, c: char, tools: &[Tool], output: &mut Output) {
        self.state = State::Call(JsonCall::new(prefix));
        self.step(c, tools, output);
    }

    fn text(&mut self, c: char, output: &mut Output) {
        self.state = State::Text;
        let mut released = String::new();
        if self.scan.push(c, &[TAG], &mut released).is_some() {
            self.state = State::Tag(TAG.to_owned());
        }
        output.content(&released);
    }
}

impl CallParser for Llama3 {
    fn step(&mut self, c: char, tools: &[Tool], output: &mut Output) {
        match &mut self.state {
            State::Start if c == '{' => self.begin(String::new(), c, tools, output),
            State::Start if c.is_whitespace() => output.content_char(c),
            State::Between(separator) if c == '{' => {
                let separator = std::mem::take(separator);
                self.begin(separator, c, tools, output);
            }
            State::Between(separator) if c.is_whitespace() || matches!(c, ';' | ',') => separator.push(c),
            State::Between(separator) => {
                output.content(&std::mem::take(separator));
                self.text(c, output);
            }
            State::Tag(prefix) if c == '{' => {
                let prefix = std::mem::take(prefix);
                self.begin(prefix, c, tools, output);
            }
            State::Tag(prefix) if c.is_whitespace() => prefix.push(c),
            // Code, for instance.
            State::Tag(prefix) => {
                output.content(&std::mem::take(prefix));
                self.text(c, output);
            }
            State::Start | State::Text => self.text(c, output),
            State::Call(call) => match call.step(c, Some(tools), output) {
                Status::Open => {}
                Status::Done => self.state = State::Between(String::new()),
                Status::Broken => {
                    let has_begun = call.has_begun();
                    let raw = std::mem::take(call).into_raw();
                    if has_begun {
                        output.arguments(&raw);
                        self.state = State::Rest;
                    } else {
                        output.content(&raw);
                        self.state = State::Text;
                    }
                }
            },
            State::Rest => output.argument(c),
        }
    }

    fn finish(&mut self, _tools: &[Tool], output: &mut Output) {
        let held = self.scan.take();
        match std::mem::take(&mut self.state) {
            State::Start | State::Between(_) | State::Rest => {}
            State::Tag(text) => output.content(&text),
            State::Text => output.content(&held),
            State::Call(call) => call.finish(output),
        }
    }
}
