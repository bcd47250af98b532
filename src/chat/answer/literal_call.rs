//! Arguments as a program writes them, `key=value, …`, one after the other.

use super::Tool;
use super::literal;
use super::output::Output;
use super::unquoted::{Types, quoted};
use super::value_text::ValueText;

/// The arguments of one call.
#[derive(Debug)]
pub(super) struct LiteralCall {
    name: String,
    /// Between a key and its value.
    equals: char,
    /// After the last argument.
    end: char,
    /// Around texts, in addition to the usual quotes.
    quote: &'static str,
    /// None before the end of the key.
    key: Option<String>,
    text: ValueText,
    num_arguments: usize,
}

/// The result of a character.
#[derive(Debug)]
pub(super) enum LiteralStep {
    Open,
    Done,
    /// This is no argument.
    Broken(String),
}

impl LiteralCall {
    /// Begins the arguments of a call.
    pub(super) fn new(
        name: &str,
        [equals, end]: [char; 2],
        quote: &'static str,
        output: &mut Output,
    ) -> Self {
        output.argument('{');
        Self {
            name: name.to_owned(),
            equals,
            end,
            quote,
            key: None,
            text: ValueText::new(quote),
            num_arguments: 0,
        }
    }

    pub(super) fn step(&mut self, c: char, tools: &[Tool], output: &mut Output) -> LiteralStep {
        let Some(key) = &self.key else { return self.key(c, output) };
        if self.text.is_between(c) && (c == ',' || c == self.end) {
            let types = Types::of_argument(tools, &self.name, key);
            let json = match literal::parse(self.text.as_str(), self.quote) {
                Some(value) => types.fitted(value).to_string(),
                None => types.json(self.text.as_str()),
            };
            output.arguments(&json);
            (self.key, self.text) = (None, ValueText::new(self.quote));
            if c == self.end {
                output.argument('}');
                return LiteralStep::Done;
            }
            return LiteralStep::Open;
        }
        self.text.push(c);
        LiteralStep::Open
    }

    /// The text is over.
    pub(super) fn finish(self, output: &mut Output) {
        match self.key {
            None if self.text.as_str().trim().is_empty() => output.argument('}'),
            _ => output.arguments(self.text.as_str()),
        }
    }

    fn key(&mut self, c: char, output: &mut Output) -> LiteralStep {
        let key = self.text.as_str().trim();
        if c == self.equals && !key.is_empty() {
            let key = key.trim_matches(['"', '\'']).to_owned();
            if self.num_arguments > 0 {
                output.arguments(", ");
            }
            self.num_arguments += 1;
            output.arguments(&quoted(&key));
            output.arguments(": ");
            (self.key, self.text) = (Some(key), ValueText::new(self.quote));
            return LiteralStep::Open;
        }
        if key.is_empty() && c == self.end {
            output.argument('}');
            return LiteralStep::Done;
        }
        if matches!(c, ',' | '(' | ')' | '[' | ']' | '{' | '}' | '<' | '=') {
            return LiteralStep::Broken(format!("{}{c}", self.text.as_str()));
        }
        self.text.push(c);
        LiteralStep::Open
    }
}
