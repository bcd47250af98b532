//! An answer in channels: the model's thoughts, its content, and its calls of tools, each after a header.
//!
//! Headers and marks are not in the text, except those of a call: the parser of calls reads them. A text without
//! headers is content.

use super::marker::MarkerScan;
use super::output::Output;
use super::thoughts::{ChannelMarks, Opens};

/// Characters of a header.
const MAX_HEADER: usize = 256;
/// Before the name of a recipient.
const RECIPIENT: &str = "to=";
/// The header text that marks the channel as the model's own.
const OWN: [&str; 2] = ["<|channel|>analysis", "to=self"];

/// Passes reasoning to the output and returns the rest.
#[derive(Debug)]
pub(super) struct Channels {
    marks: ChannelMarks,
    state: State,
    scan: MarkerScan,
}

#[derive(Debug)]
enum State {
    /// In a header, or before one.
    Header(String),
    Reasoning,
    Content,
}

impl Channels {
    pub(super) fn new(marks: ChannelMarks, is_inside: bool) -> Self {
        let state = if is_inside { State::Reasoning } else { State::Header(String::new()) };
        Self { marks, state, scan: MarkerScan::default() }
    }

    pub(super) fn is_inside(&self) -> bool {
        matches!(self.state, State::Reasoning)
    }

    /// Takes a character and returns the content that is certain with it.
    pub(super) fn step(&mut self, c: char, output: &mut Output) -> String {
        let mut released = String::new();
        let state = std::mem::replace(&mut self.state, State::Content);
        if let State::Header(mut header) = state {
            let mut marks: Vec<&str> = self.marks.opens.iter().map(|(mark, _)| *mark).collect();
            let num_opens = marks.len();
            marks.extend([self.marks.start].iter().chain(self.marks.ends).chain(self.marks.kept_ends));
            let found = self.scan.push(c, &marks, &mut released);
            header.push_str(&released);
            return match found {
                Some(found) if found < num_opens => self.opened(&header, found),
                Some(_) => {
                    self.state = State::Header(String::new());
                    String::new()
                }
                None if self.is_header(&header) => {
                    self.state = State::Header(header);
                    String::new()
                }
                None => header + &self.scan.take(),
            };
        }
        let mut marks: Vec<&str> = [self.marks.start].iter().chain(self.marks.ends).copied().collect();
        let num_dropped = marks.len();
        marks.extend(self.marks.kept_ends);
        let found = self.scan.push(c, &marks, &mut released);
        if let Some(found) = found {
            self.state = State::Header(String::new());
            if found >= num_dropped {
                released.push_str(marks[found]);
            }
        } else {
            self.state = match state {
                State::Reasoning => State::Reasoning,
                _ => State::Content,
            };
        }
        if matches!(state, State::Reasoning) {
            output.reasoning(&released);
            return String::new();
        }
        released
    }

    /// Ends the text and returns the content that was held.
    pub(super) fn finish(&mut self, is_cut_off: bool, output: &mut Output) -> String {
        if is_cut_off {
            self.scan.drop_beginning();
        }
        let held = self.scan.take();
        match std::mem::replace(&mut self.state, State::Content) {
            State::Header(header) if self.marks.heads.iter().any(|head| header.trim().starts_with(head)) => {
                String::new()
            }
            State::Header(header) => header + &held,
            State::Content => held,
            State::Reasoning => {
                output.reasoning(&held);
                String::new()
            }
        }
    }

    /// Whether a text may be the beginning of a header.
    fn is_header(&self, text: &str) -> bool {
        let text = text.trim_start();
        let is_head = |head: &&str| text.starts_with(*head) || head.starts_with(text);
        text.len() <= MAX_HEADER && (text.is_empty() || self.marks.heads.iter().any(is_head))
    }

    /// A header is complete. Returns the text in it that belongs to a call.
    fn opened(&mut self, header: &str, open: usize) -> String {
        let (mark, opens) = self.marks.opens[open];
        let is_own = OWN.iter().any(|own| header.contains(own));
        let recipient = header.split_once(RECIPIENT).map(|(_, after)| {
            let end = after.find(|c: char| c.is_whitespace() || c == '<').unwrap_or(after.len());
            &after[..end]
        });
        self.state = match opens {
            Opens::Reasoning => State::Reasoning,
            Opens::ByHeader if is_own => State::Reasoning,
            Opens::ByHeader | Opens::Content | Opens::Calls => State::Content,
        };
        match (opens, recipient) {
            (Opens::Calls, _) => mark.to_owned(),
            (Opens::ByHeader, Some(recipient)) if self.marks.keeps_recipients && !is_own => {
                format!(" {RECIPIENT}{recipient}{mark}")
            }
            _ => String::new(),
        }
    }
}
