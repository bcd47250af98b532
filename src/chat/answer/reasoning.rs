//! `<think>…</think>` before the answer.
//!
//! Only a block at the very beginning counts: later ones are content, because an answer may speak of such
//! tags. Whitespace around the block and inside its ends is dropped.

use super::marker::MarkerScan;
use super::output::Output;
use super::{PromptEnd, ReasoningFormat};

/// Begins a block.
pub(super) const OPEN: &str = "<think>";
/// Ends it.
pub(super) const CLOSE: &str = "</think>";

/// Passes reasoning to the output and returns the rest.
#[derive(Debug)]
pub(super) struct ReasoningSplitter {
    state: State,
    scan: MarkerScan,
    /// Whitespace that is dropped if the block ends after it, or that may come before the block.
    spaces: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Nothing but whitespace so far.
    Before,
    /// In the block, before its first word.
    Opened,
    Inside,
    After,
}

impl ReasoningSplitter {
    /// None if the answer has no reasoning.
    pub(super) fn new(format: ReasoningFormat, end: PromptEnd) -> Option<Self> {
        let state = match (end, format) {
            (PromptEnd::AfterReasoning, _) => return None,
            (PromptEnd::Plain, ReasoningFormat::Think) => State::Before,
            (PromptEnd::InReasoning, _) | (PromptEnd::Plain, ReasoningFormat::ThinkFromStart) => {
                State::Opened
            }
        };
        Some(Self { state, scan: MarkerScan::default(), spaces: String::new() })
    }

    pub(super) fn is_inside(&self) -> bool {
        matches!(self.state, State::Opened | State::Inside)
    }

    /// Takes a character and returns the content that is certain with it.
    pub(super) fn step(&mut self, c: char, output: &mut Output) -> String {
        let mut released = String::new();
        match self.state {
            State::After => return c.to_string(),
            State::Before if c.is_whitespace() && self.spaces.len() < 64 => {
                // A marker that has begun has no whitespace.
                let held = self.scan.take();
                if held.is_empty() {
                    self.spaces.push(c);
                    return released;
                }
                self.state = State::After;
                return std::mem::take(&mut self.spaces) + &held + c.encode_utf8(&mut [0; 4]);
            }
            State::Before => {
                if self.scan.push(c, &[OPEN], &mut released).is_some() {
                    self.spaces.clear();
                    self.state = State::Opened;
                } else if !released.is_empty() {
                    self.state = State::After;
                    return std::mem::take(&mut self.spaces) + &released + &self.scan.take();
                }
            }
            State::Opened | State::Inside => {
                let is_end = self.scan.push(c, self.markers(), &mut released);
                self.reasoning(&released, output);
                // Some models repeat the beginning that the prompt already has; it is dropped.
                if is_end == Some(CLOSE) {
                    self.spaces.clear();
                    self.state = State::After;
                    output.skip_spaces();
                }
            }
        }
        String::new()
    }

    /// Ends the text and returns the content that was held.
    pub(super) fn finish(&mut self, output: &mut Output) -> String {
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

    fn markers(&self) -> &'static [&'static str] {
        // The same while text is held: the first word is released before the state changes.
        if self.state == State::Opened { &[OPEN, CLOSE] } else { &[CLOSE] }
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
