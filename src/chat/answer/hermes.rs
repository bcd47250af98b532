//! Hermes and Qwen: `<tool_call>{"name": "f", "arguments": {…}}</tool_call>`.

use super::json_call::{JsonCall, Status};
use super::marker::MarkerScan;
use super::output::Output;
use super::{CallParser, Tool};

pub(super) const OPEN: &str = "<tool_call>";
pub(super) const CLOSE: &str = "</tool_call>";

#[derive(Debug, Default)]
pub(super) struct Hermes {
    state: State,
    scan: MarkerScan,
}

#[derive(Debug, Default)]
enum State {
    #[default]
    Text,
    Call(JsonCall),
    /// After a complete object.
    AfterCall,
    /// In a call whose arguments are broken: all of it is arguments.
    Rest,
}

impl CallParser for Hermes {
    fn step(&mut self, c: char, _tools: &[Tool], output: &mut Output) {
        let mut released = String::new();
        match &mut self.state {
            State::Text => {
                if self.scan.push(c, &[OPEN], &mut released).is_some() {
                    self.state = State::Call(JsonCall::new(OPEN.to_owned()));
                }
                output.content(&released);
            }
            State::Call(call) => match call.step(c, None, output) {
                Status::Open => {}
                Status::Done => self.state = State::AfterCall,
                Status::Broken => {
                    let has_begun = call.has_begun();
                    let raw = std::mem::take(call).into_raw();
                    if has_begun {
                        self.state = State::Rest;
                        raw.chars().for_each(|c| self.step(c, &[], output));
                    } else {
                        self.state = State::Text;
                        output.content(&raw);
                    }
                }
            },
            State::AfterCall => {
                // The end, another beginning where the end was left out, or an answer.
                match self.scan.push(c, &[CLOSE, OPEN], &mut released) {
                    Some(CLOSE) => self.state = State::Text,
                    Some(_) => self.state = State::Call(JsonCall::new(OPEN.to_owned())),
                    None if released.trim().is_empty() => {}
                    None => self.state = State::Text,
                }
                output.content(&released);
            }
            State::Rest => {
                if self.scan.push(c, &[CLOSE], &mut released).is_some() {
                    self.state = State::Text;
                }
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
            State::Call(call) => call.finish(output),
            State::Rest => output.arguments(&held),
        }
    }
}
