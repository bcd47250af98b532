//! Reasoning between two marks before the answer, such as `<think>…</think>`.
//!
//! Only a block at the very beginning counts: later ones are content, because an answer may speak of such
//! marks. Whitespace around the block and inside its ends is dropped.

use super::marker::MarkerScan;
use super::output::Output;
use super::{PromptEnd, ReasoningFormat};

/// Passes reasoning to the output and returns the rest.
#[derive(Debug)]
pub(super) struct ReasoningSplitter {
    open: String,
    close: String,
    state: State,
    scan: MarkerScan,
    /// Whitespace that is dropped if the block ends after it, or that may come before the block.
    spaces: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Only whitespace so far.
    Before,
    /// In the block, before its first word.
    Opened,
    Inside,
    After,
}

impl ReasoningSplitter {
    pub(super) fn new(format: &ReasoningFormat, end: PromptEnd) -> Self {
        let state = match (end, format.is_from_start) {
            (PromptEnd::AfterReasoning, _) | (PromptEnd::Plain, false) => State::Before,
            (PromptEnd::InReasoning, _) | (PromptEnd::Plain, true) => State::Opened,
        };
        let (open, close) = format.markers();
        Self {
            // Where it is over, it does not begin again.
            open: if end == PromptEnd::AfterReasoning { String::new() } else { open.to_owned() },
            close: close.to_owned(),
            state,
            scan: MarkerScan::default(),
            spaces: String::new(),
        }
    }

    pub(super) fn is_inside(&self) -> bool {
        matches!(self.state, State::Opened | State::Inside)
    }

    /// Takes a character and returns the content that is certain with it.
    pub(super) fn step(&mut self, c: char, output: &mut Output) -> String {
        let mut released = String::new();
        match self.state {
            State::After => return c.to_string(),
            State::Before if c.is_whitespace() && !self.scan.is_holding() && self.spaces.len() < 64 => {
                self.spaces.push(c);
            }
            // Some models end reasoning that they did not begin, or that the prompt has ended.
            State::Before => match self.scan.push(c, &[&self.open, &self.close], &mut released) {
                Some(found) => {
                    self.spaces.clear();
                    self.state = if found == 0 { State::Opened } else { State::After };
                    if found == 1 {
                        output.skip_spaces();
                    }
                }
                None if !released.is_empty() => {
                    self.state = State::After;
                    return std::mem::take(&mut self.spaces) + &released + &self.scan.take();
                }
                None => {}
            },
            State::Opened | State::Inside => {
                // Some models repeat the beginning that the prompt already has; it is dropped. The same marks are looked
                // for while text is held: the first word is released before the state changes.
                let open = if self.state == State::Opened { self.open.as_str() } else { "" };
                let found = self.scan.push(c, &[open, &self.close], &mut released);
                self.reasoning(&released, output);
                if found == Some(1) {
                    self.spaces.clear();
                    self.state = State::After;
                    output.skip_spaces();
                }
            }
        }
        String::new()
    }

    /// Ends the text and returns the content that was held.
    pub(super) fn finish(&mut self, is_cut_off: bool, output: &mut Output) -> String {
        if is_cut_off && self.scan.drop_beginning() {
            self.spaces.clear();
        }
        let held = self.scan.take();
        match self.state {
            State::Before => std::mem::take(&mut self.spaces) + &held,
            State::Opened | State::Inside => {
                self.reasoning(&held, output);
                output.reasoning(&std::mem::take(&mut self.spaces));
                String::new()
            }
            State::After => held,
        }
    }

    fn reasoning(&mut self, text: &str, output: &mut Output) {
        for c in text.chars() {
            if !c.is_whitespace() {
                self.state = State::Inside;
                output.reasoning(&std::mem::take(&mut self.spaces));
                output.reasoning(c.encode_utf8(&mut [0; 4]));
            } else if self.state == State::Inside {
                self.spaces.push(c);
            }
        }
    }
}
