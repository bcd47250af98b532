//! Arguments as a program writes them, `key=value, …`, one after the other.

use super::Tool;
use super::literal::{self, may_follow_text};
use super::output::Output;
use super::unquoted::{Types, quoted};

/// The arguments of one call.
#[derive(Debug)]
pub(super) struct LiteralCall {
    name: String,
    /// Between a key and its value.
    equals: char,
    /// Behind the last argument.
    end: char,
    /// Around texts, beside the usual quotes.
    quote: &'static str,
    /// None before the end of the key.
    key: Option<String>,
    text: String,
    /// Open brackets of the value.
    depth: usize,
    in_text: InText,
    num_arguments: usize,
}

/// Where in a text between quotes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum InText {
    No,
    /// In one with this quote.
    Usual(char),
    Escaped(char),
    /// Behind a quote that may be the last one.
    Closed(char),
    /// In one with the other quotes.
    Other,
}

/// How it goes on.
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
            text: String::new(),
            depth: 0,
            in_text: InText::No,
            num_arguments: 0,
        }
    }

    pub(super) fn step(&mut self, c: char, tools: &[Tool], output: &mut Output) -> LiteralStep {
        let Some(key) = &self.key else { return self.key(c, output) };
        if let InText::Closed(_) = self.in_text
            && may_follow_text(c)
        {
            self.in_text = InText::No;
        }
        if self.in_text == InText::No && self.depth == 0 && (c == ',' || c == self.end) {
            let types = Types::of_argument(tools, &self.name, key);
            let json = match literal::parse(&self.text, self.quote) {
                Some(value) => types.fitted(value).to_string(),
                None => types.json(&self.text),
            };
            output.arguments(&json);
            (self.key, self.text) = (None, String::new());
            if c == self.end {
                output.argument('}');
                return LiteralStep::Done;
            }
            return LiteralStep::Open;
        }
        self.text.push(c);
        self.in_text = match self.in_text {
            InText::No => self.outside(c),
            InText::Usual(quote) | InText::Closed(quote) if c == quote => InText::Closed(quote),
            InText::Usual(quote) | InText::Closed(quote) if c == '\\' => InText::Escaped(quote),
            InText::Closed(quote) if c.is_whitespace() => InText::Closed(quote),
            InText::Escaped(quote) | InText::Usual(quote) | InText::Closed(quote) => InText::Usual(quote),
            InText::Other if self.text.ends_with(self.quote) => InText::No,
            InText::Other => InText::Other,
        };
        LiteralStep::Open
    }

    /// The text is over.
    pub(super) fn finish(self, output: &mut Output) {
        match self.key {
            None if self.text.trim().is_empty() => output.argument('}'),
            _ => output.arguments(&self.text),
        }
    }

    fn key(&mut self, c: char, output: &mut Output) -> LiteralStep {
        let key = self.text.trim();
        if c == self.equals && !key.is_empty() {
            let key = key.trim_matches(['"', '\'']).to_owned();
            if self.num_arguments > 0 {
                output.arguments(", ");
            }
            self.num_arguments += 1;
            output.arguments(&quoted(&key));
            output.arguments(": ");
            (self.key, self.text) = (Some(key), String::new());
            return LiteralStep::Open;
        }
        if key.is_empty() && c == self.end {
            output.argument('}');
            return LiteralStep::Done;
        }
        if matches!(c, ',' | '(' | ')' | '[' | ']' | '{' | '}' | '<' | '=') {
            return LiteralStep::Broken(format!("{}{c}", std::mem::take(&mut self.text)));
        }
        self.text.push(c);
        LiteralStep::Open
    }

    fn outside(&mut self, c: char) -> InText {
        if !self.quote.is_empty() && self.text.ends_with(self.quote) {
            return InText::Other;
        }
        match c {
            '[' | '{' | '(' => self.depth += 1,
            ']' | '}' | ')' => self.depth = self.depth.saturating_sub(1),
            '"' | '\'' => {
                let before = self.text[..self.text.len() - 1].trim_end();
                // Within a word it is none, and neither in the other quotes.
                if before.is_empty() || before.ends_with(['[', '{', '(', ',', ':', '=']) {
                    return InText::Usual(c);
                }
            }
            _ => {}
        }
        InText::No
    }
}
