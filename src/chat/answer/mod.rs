//! What a model's answer consists of: reasoning, content, and calls of tools.
//!
//! Models write all three as one text, each family in its own way. An [`AnswerParser`] takes that text apart
//! while it comes. Invariants: it goes character by character, so pieces of any size give the same result;
//! nothing that the model wrote is lost but markers, because what is not a well-formed call is content, and a call
//! that breaks off after its name was told keeps the rest as its arguments; no text makes it fail. It knows no
//! tokens and no HTTP.

mod format;
mod glm;
mod grammar;
mod hermes;
mod json_call;
mod llama3;
mod marker;
mod mistral;
mod output;
mod qwen3_coder;
mod reasoning;
mod unquoted;

use std::sync::Arc;

use serde_json::Value;

pub use self::format::{AnswerFormat, FormatChoice, ReasoningFormat, ToolCallFormat};
use self::output::Output;
use self::reasoning::ReasoningSplitter;

/// A function that the model may call.
#[derive(Debug, Clone, PartialEq)]
pub struct Tool {
    /// Its name.
    pub name: String,
    /// The JSON schema of its arguments, an object; none if it takes none.
    pub parameters: Option<Value>,
}

/// A piece of an answer. Pieces of one kind that follow each other belong together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AnswerEvent {
    /// What the model thinks before it answers.
    Reasoning(String),
    /// What it says.
    Content(String),
    /// It begins to call a tool.
    CallBegin {
        /// Number of the call in the answer.
        index: usize,
        /// The tool.
        name: String,
    },
    /// More of the arguments, which are JSON if the model writes what it should.
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
    pub fn of(prompt: &str) -> Self {
        let prompt = prompt.trim_end();
        if prompt.ends_with(reasoning::OPEN) {
            Self::InReasoning
        } else if prompt.ends_with(reasoning::CLOSE) {
            Self::AfterReasoning
        } else {
            Self::Plain
        }
    }
}

/// Takes the text of one answer apart.
#[derive(Debug)]
pub struct AnswerParser {
    reasoning: Option<ReasoningSplitter>,
    calls: Option<Box<dyn CallParser>>,
    tools: Arc<[Tool]>,
    output: Output,
}

/// Finds calls in content, in the form of one family of models.
trait CallParser: std::fmt::Debug + Send {
    fn step(&mut self, c: char, tools: &[Tool], output: &mut Output);
    /// The text is over.
    fn finish(&mut self, tools: &[Tool], output: &mut Output);
}

impl AnswerParser {
    /// A parser for one answer to a prompt that ends like this, with these tools.
    #[must_use]
    pub fn new(format: AnswerFormat, end: PromptEnd, tools: Arc<[Tool]>) -> Self {
        let calls: Option<Box<dyn CallParser>> = format.tool_calls.map(|format| match format {
            ToolCallFormat::Hermes => Box::<hermes::Hermes>::default() as Box<dyn CallParser>,
            ToolCallFormat::Llama3 => Box::<llama3::Llama3>::default(),
            ToolCallFormat::Mistral => Box::<mistral::Mistral>::default(),
            ToolCallFormat::Glm => Box::<glm::Glm>::default(),
            ToolCallFormat::Qwen3Coder => Box::<qwen3_coder::Qwen3Coder>::default(),
        });
        Self {
            reasoning: format.reasoning.and_then(|format| ReasoningSplitter::new(format, end)),
            output: Output::new(calls.is_some()),
            calls,
            tools,
        }
    }

    /// Takes the next piece of text and returns what is certain with it.
    pub fn push(&mut self, text: &str) -> Vec<AnswerEvent> {
        for c in text.chars() {
            self.step(c);
        }
        self.output.take()
    }

    /// Ends the answer and returns the rest.
    pub fn finish(&mut self) -> Vec<AnswerEvent> {
        if let Some(splitter) = &mut self.reasoning {
            let content = splitter.finish(&mut self.output);
            content.chars().for_each(|c| self.content(c));
        }
        if let Some(calls) = &mut self.calls {
            calls.finish(&self.tools, &mut self.output);
        }
        self.output.finish();
        self.output.take()
    }

    /// Whether what comes next belongs to the reasoning, as far as is known.
    #[must_use]
    pub fn is_reasoning(&self) -> bool {
        self.reasoning.as_ref().is_some_and(ReasoningSplitter::is_inside)
    }

    fn step(&mut self, c: char) {
        let Some(splitter) = &mut self.reasoning else { return self.content(c) };
        let content = splitter.step(c, &mut self.output);
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
mod tests;
