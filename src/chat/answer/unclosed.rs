//! Calls in reasoning that does not end. Some models forget its end where they call a tool, and the templates of some
//! leave it out. What a model only thinks about is no call, so a call counts only if nothing follows it.

use std::sync::Arc;

use super::calls::Calls;
use super::form::{Form, bare};
use super::marker::MarkerScan;
use super::output::Output;
use super::{AnswerEvent, Tool};

/// Holds back what may be calls in the place of reasoning.
#[derive(Debug)]
pub(super) struct Unclosed {
    form: Arc<Form>,
    start: String,
    scan: MarkerScan,
    found: Option<Found>,
}

/// What may be calls, so far.
#[derive(Debug)]
struct Found {
    text: String,
    calls: Calls,
    output: Output,
    has_calls: bool,
}

impl Unclosed {
    /// None if nothing but its place tells a call from other text.
    pub(super) fn new(form: &Arc<Form>) -> Option<Self> {
        let [begin, _] = form.group_marks();
        let start = [begin, bare(&form.open)].into_iter().find(|mark| !mark.is_empty())?;
        let is_clear = !form.is_bare && start.len() > 3;
        is_clear.then(|| Self { form: Arc::clone(form), start, scan: MarkerScan::default(), found: None })
    }

    /// Takes a character of reasoning and returns what certainly is some.
    pub(super) fn step(&mut self, c: char, tools: &[Tool]) -> String {
        let mut certain = String::new();
        if self.found.is_none() {
            if self.scan.push(c, &[&self.start], &mut certain).is_some() {
                let mut found = Found {
                    text: String::new(),
                    calls: Calls::new(Arc::clone(&self.form)),
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

    /// The text is over: reasoning, and then calls.
    pub(super) fn finish(&mut self) -> (String, String) {
        let held = self.scan.take();
        let Some(mut found) = self.found.take() else { return (held, String::new()) };
        let text = std::mem::take(&mut found.text);
        found.calls.finish(&mut found.output);
        match found.is_right() && found.has_calls {
            true => (String::new(), text),
            false => (text, String::new()),
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
