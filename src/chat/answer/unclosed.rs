//! Calls in reasoning that does not end. Some models omit its end before a call, and so do some models' templates. A
//! call within reasoning is only a thought, so a call counts only if no text follows it.

use std::sync::Arc;

use super::calls::Calls;
use super::marker::MarkerScan;
use super::output::Output;
use super::syntax::{CallSyntax, bare};
use super::{AnswerEvent, Tool};

/// Holds text that may be calls instead of reasoning.
#[derive(Debug)]
pub(super) struct Unclosed {
    syntax: Arc<CallSyntax>,
    start: String,
    scan: MarkerScan,
    found: Option<Found>,
}

/// The candidate calls so far.
#[derive(Debug)]
struct Found {
    text: String,
    calls: Calls,
    output: Output,
    has_calls: bool,
}

impl Unclosed {
    /// None if only its position distinguishes a call from other text.
    pub(super) fn new(syntax: &Arc<CallSyntax>) -> Option<Self> {
        let [begin, _] = syntax.group_marks();
        let start = [begin, bare(&syntax.open)].into_iter().find(|mark| !mark.is_empty())?;
        let is_clear = !syntax.is_bare && start.len() > 3;
        is_clear.then(|| Self { syntax: Arc::clone(syntax), start, scan: MarkerScan::default(), found: None })
    }

    /// Takes a character of reasoning and returns the text that certainly is reasoning.
    pub(super) fn step(&mut self, c: char, tools: &[Tool]) -> String {
        let mut certain = String::new();
        if self.found.is_none() {
            if self.scan.push(c, &[&self.start], &mut certain).is_some() {
                let mut found = Found {
                    text: String::new(),
                    calls: Calls::new(Arc::clone(&self.syntax)),
                    output: Output::new(true),
                    has_calls: false,
                };
                for c in self.start.clone().chars() {
                    found.step(c, tools);
                }
                self.found = Some(found);
            }
            return certain;
        }
        if let Some(found) = &mut self.found
            && !found.step(c, tools)
        {
            certain = std::mem::take(&mut found.text);
            self.found = None;
        }
        certain
    }

    /// The text is over: reasoning, and then calls. The beginning of a call at the end of a text that was cut off is
    /// neither.
    pub(super) fn finish(&mut self, is_cut_off: bool) -> (String, String) {
        let held = self.scan.take();
        let Some(mut found) = self.found.take() else { return (held, String::new()) };
        let text = std::mem::take(&mut found.text);
        found.calls.finish(is_cut_off, &mut found.output);
        match (found.is_right(), found.has_calls) {
            (true, true) => (String::new(), text),
            (true, false) if is_cut_off => (String::new(), String::new()),
            _ => (text, String::new()),
        }
    }
}

impl Found {
    /// Whether all of it may still be calls.
    fn step(&mut self, c: char, tools: &[Tool]) -> bool {
        self.text.push(c);
        self.calls.step(c, tools, &mut self.output);
        self.is_right()
    }

    fn is_right(&mut self) -> bool {
        let events = self.output.take();
        self.has_calls |= events.iter().any(|event| matches!(event, AnswerEvent::CallBegin { .. }));
        !events.iter().any(|event| matches!(event, AnswerEvent::Content(text) if !text.trim().is_empty()))
    }
}
