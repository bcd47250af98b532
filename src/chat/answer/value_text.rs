//! The text of a value as programs write it, followed character by character: where its quotes and brackets end.

use super::literal::may_follow_text;

/// A value so far.
#[derive(Debug)]
pub(super) struct ValueText {
    text: String,
    /// Open brackets.
    depth: usize,
    in_text: InText,
    /// Around texts, in addition to the usual quotes.
    quote: &'static str,
}

/// Where in a text between quotes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum InText {
    No,
    /// In one with this quote.
    Usual(char),
    Escaped(char),
    /// After a quote that may be the last one.
    Closed(char),
    /// In one with the other quotes.
    Other,
}

impl ValueText {
    pub(super) fn new(quote: &'static str) -> Self {
        Self { text: String::new(), depth: 0, in_text: InText::No, quote }
    }

    pub(super) fn as_str(&self) -> &str {
        &self.text
    }

    /// Whether the next character is in no text and in no brackets.
    pub(super) fn is_between(&mut self, next: char) -> bool {
        if let InText::Closed(_) = self.in_text
            && may_follow_text(next)
        {
            self.in_text = InText::No;
        }
        self.in_text == InText::No && self.depth == 0
    }

    pub(super) fn push(&mut self, c: char) {
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
