//! The elements of a model's answer: reasoning, content, and calls of tools.
//!
//! Models write all three as one text, each family in its own way. An [`AnswerParser`] separates that text while it is
//! streamed. Invariants: it works character by character, so chunks of any size give the same result; only markers are
//! removed from the model's text, because a malformed call is content; a call that is cut off after its name was emitted
//! keeps the rest as its arguments, and one that is cut off before is dropped; no text makes it fail. It does not depend on
//! tokens or HTTP.

mod calls;
mod channels;
mod detect;
mod format;
mod grammar;
mod json_call;
mod learn;
mod literal;
mod literal_call;
mod marker;
mod nested;
mod output;
mod pairs;
mod passages;
mod reasoning;
mod repr_call;
mod syntax;
mod syntaxes;
mod thoughts;
mod unclosed;
mod unquoted;
mod value_text;

use std::sync::Arc;

use serde_json::Value;

use self::calls::Calls;
use self::channels::Channels;
pub(super) use self::detect::Detected;
pub use self::format::{AnswerFormat, FormatChoice, ReasoningFormat, ToolCallFormat};
use self::output::Output;
pub use self::passages::{Passage, Passages};
use self::reasoning::ReasoningSplitter;
use self::unclosed::Unclosed;

/// A function that the model may call.
#[derive(Debug, Clone, PartialEq)]
pub struct Tool {
    /// Its name.
    pub name: String,
    /// The JSON schema of its arguments, an object; none if it takes none.
    pub parameters: Option<Value>,
}

/// A delta of an answer. Consecutive deltas of one kind are concatenated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AnswerEvent {
    /// The model's reasoning before its answer.
    Reasoning(String),
    /// The answer's content.
    Content(String),
    /// It begins to call a tool.
    CallBegin {
        /// Number of the call in the answer.
        index: usize,
        /// The tool.
        name: String,
    },
    /// More of the arguments, which are JSON if the model follows its format.
    CallArguments {
        /// Number of the call in the answer.
        index: usize,
        /// Text to append.
        text: String,
    },
}

/// Where the prompt leaves off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PromptEnd {
    /// Outside any block of reasoning, so that the model may begin one.
    #[default]
    Plain,
    /// Inside: the answer begins with reasoning.
    InReasoning,
    /// The block is closed: the answer has none.
    AfterReasoning,
}

impl PromptEnd {
    /// Finds out from the end of a prompt.
    #[must_use]
    pub fn of(prompt: &str, format: Option<&ReasoningFormat>) -> Self {
        let Some((open, close)) = format.map(ReasoningFormat::markers) else { return Self::Plain };
        let prompt = prompt.trim_end();
        if prompt.ends_with(open.trim_end()) {
            Self::InReasoning
        } else if prompt.ends_with(close.trim_end()) {
            Self::AfterReasoning
        } else {
            Self::Plain
        }
    }
}

/// Takes the text of one answer apart.
#[derive(Debug)]
pub struct AnswerParser {
    splitter: Splitter,
    calls: Option<Calls>,
    /// Looks for calls in reasoning that does not end.
    unclosed: Option<Unclosed>,
    tools: Arc<[Tool]>,
    output: Output,
}

/// Separates reasoning from the rest.
#[derive(Debug)]
enum Splitter {
    None,
    Tags(ReasoningSplitter),
    Channels(Channels),
}

impl Splitter {
    fn new(format: Option<&ReasoningFormat>, end: PromptEnd) -> Self {
        let Some(format) = format else { return Self::None };
        match &format.thoughts.channels {
            Some(marks) => Self::Channels(Channels::new(marks.clone(), end == PromptEnd::InReasoning)),
            None => Self::Tags(ReasoningSplitter::new(format, end)),
        }
    }

    fn is_inside(&self) -> bool {
        match self {
            Self::None => false,
            Self::Tags(splitter) => splitter.is_inside(),
            Self::Channels(channels) => channels.is_inside(),
        }
    }

    /// Takes a character and returns the content that is certain with it.
    fn step(&mut self, c: char, output: &mut Output) -> String {
        match self {
            Self::None => c.to_string(),
            Self::Tags(splitter) => splitter.step(c, output),
            Self::Channels(channels) => channels.step(c, output),
        }
    }

    fn finish(&mut self, is_cut_off: bool, output: &mut Output) -> String {
        match self {
            Self::None => String::new(),
            Self::Tags(splitter) => splitter.finish(is_cut_off, output),
            Self::Channels(channels) => channels.finish(is_cut_off, output),
        }
    }
}

impl AnswerParser {
    /// A parser for one answer to a prompt that ends like this, with these tools.
    #[must_use]
    pub fn new(format: &AnswerFormat, end: PromptEnd, tools: Arc<[Tool]>) -> Self {
        let syntax = format.tool_calls.as_ref().map(|format| Arc::clone(&format.0));
        Self {
            splitter: Splitter::new(format.reasoning.as_ref(), end),
            output: Output::new(syntax.is_some()),
            unclosed: syntax.as_ref().and_then(Unclosed::new),
            calls: syntax.map(Calls::new),
            tools,
        }
    }

    /// Takes the next text chunk and returns the deltas that are certain with it.
    pub fn push(&mut self, text: &str) -> Vec<AnswerEvent> {
        for c in text.chars() {
            self.step(c);
        }
        self.output.take()
    }

    /// Ends the answer where the model ended it and returns the rest.
    pub fn finish(&mut self) -> Vec<AnswerEvent> {
        self.end(false)
    }

    /// The same for an answer that something else ended: a limit, a stop string or an abort. The model would have
    /// continued, so the beginning of a call or of a mark is not content.
    pub fn cut_off(&mut self) -> Vec<AnswerEvent> {
        self.end(true)
    }

    fn end(&mut self, is_cut_off: bool) -> Vec<AnswerEvent> {
        // Calls that the model wrote without ending its reasoning, or text that looked like calls.
        let unclosed = self.unclosed.as_mut().map(|unclosed| unclosed.finish(is_cut_off));
        let (reasoning, calls) = unclosed.unwrap_or_default();
        reasoning.chars().for_each(|c| self.split(c));
        let content = self.splitter.finish(is_cut_off, &mut self.output);
        content.chars().chain(calls.chars()).for_each(|c| self.content(c));
        if let Some(calls) = &mut self.calls {
            calls.finish(is_cut_off, &mut self.output);
        }
        self.output.finish();
        self.output.take()
    }

    /// Whether the next text belongs to the reasoning, as far as is known.
    #[must_use]
    pub fn is_reasoning(&self) -> bool {
        self.splitter.is_inside()
    }

    fn step(&mut self, c: char) {
        match &mut self.unclosed {
            Some(unclosed) if self.splitter.is_inside() => {
                let certain = unclosed.step(c, &self.tools);
                certain.chars().for_each(|c| self.split(c));
            }
            _ => self.split(c),
        }
    }

    fn split(&mut self, c: char) {
        let content = self.splitter.step(c, &mut self.output);
        content.chars().for_each(|c| self.content(c));
    }

    fn content(&mut self, c: char) {
        match &mut self.calls {
            Some(calls) => calls.step(c, &self.tools, &mut self.output),
            None => self.output.content_char(c),
        }
    }
}

#[cfg(test)]
mod grammar_tests;
#[cfg(test)]
mod round_trip;
#[cfg(test)]
mod syntax_tests;
#[cfg(test)]
mod tests;
