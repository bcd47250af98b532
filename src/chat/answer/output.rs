//! Collects the results of the parsers. Whitespace between content and calls belongs to the format, not to the answer,
//! so it is held until the next text is known.

use super::AnswerEvent;

/// The events so far.
#[derive(Debug)]
pub(super) struct Output {
    events: Vec<AnswerEvent>,
    num_calls: usize,
    /// Whitespace after content is dropped if a call follows.
    holds_spaces: bool,
    spaces: String,
    /// Whitespace before content is dropped.
    skips_spaces: bool,
}

impl Output {
    pub(super) fn new(holds_spaces: bool) -> Self {
        Self { events: Vec::new(), num_calls: 0, holds_spaces, spaces: String::new(), skips_spaces: false }
    }

    pub(super) fn reasoning(&mut self, text: &str) {
        match self.events.last_mut() {
            _ if text.is_empty() => {}
            Some(AnswerEvent::Reasoning(so_far)) => so_far.push_str(text),
            _ => self.events.push(AnswerEvent::Reasoning(text.to_owned())),
        }
    }

    pub(super) fn content(&mut self, text: &str) {
        text.chars().for_each(|c| self.content_char(c));
    }

    pub(super) fn content_char(&mut self, c: char) {
        if c.is_whitespace() {
            if !self.skips_spaces {
                self.spaces.push(c);
                if !self.holds_spaces {
                    self.release_spaces();
                }
            }
            return;
        }
        self.skips_spaces = false;
        self.release_spaces();
        self.append(c.encode_utf8(&mut [0; 4]));
    }

    pub(super) fn skip_spaces(&mut self) {
        self.skips_spaces = true;
    }

    /// Whether white space that comes next is dropped.
    pub(super) fn skips_spaces(&self) -> bool {
        self.skips_spaces
    }

    pub(super) fn begin_call(&mut self, name: &str) {
        self.spaces.clear();
        self.skip_spaces();
        self.events.push(AnswerEvent::CallBegin { index: self.num_calls, name: name.to_owned() });
        self.num_calls += 1;
    }

    /// More arguments of the call that began last.
    pub(super) fn arguments(&mut self, text: &str) {
        match self.events.last_mut() {
            _ if text.is_empty() => {}
            Some(AnswerEvent::CallArguments { text: so_far, .. }) => so_far.push_str(text),
            _ => {
                let index = self.num_calls.saturating_sub(1);
                self.events.push(AnswerEvent::CallArguments { index, text: text.to_owned() });
            }
        }
    }

    pub(super) fn argument(&mut self, c: char) {
        self.arguments(c.encode_utf8(&mut [0; 4]));
    }

    pub(super) fn has_calls(&self) -> bool {
        self.num_calls > 0
    }

    /// Drops the white space before a call that is dropped.
    pub(super) fn drop_spaces(&mut self) {
        self.spaces.clear();
    }

    pub(super) fn finish(&mut self) {
        self.release_spaces();
    }

    pub(super) fn take(&mut self) -> Vec<AnswerEvent> {
        std::mem::take(&mut self.events)
    }

    fn release_spaces(&mut self) {
        let spaces = std::mem::take(&mut self.spaces);
        self.append(&spaces);
    }

    fn append(&mut self, text: &str) {
        match self.events.last_mut() {
            _ if text.is_empty() => {}
            Some(AnswerEvent::Content(so_far)) => so_far.push_str(text),
            _ => self.events.push(AnswerEvent::Content(text.to_owned())),
        }
    }
}
