//! Which parts of a text are the answer and which are reasoning and its marks, for those who leave the text as it is.
//!
//! Invariant: the passages are the text, whatever the sizes of its pieces. Text whose kind is not certain yet is held.

use super::output::Output;
use super::{PromptEnd, ReasoningFormat, Splitter};

/// Tells the parts of one answer apart.
#[derive(Debug)]
pub struct Passages {
    splitter: Splitter,
    /// What is in it is of no use here, but it knows which white space is none of the answer's.
    output: Output,
    held: String,
    found: Vec<Passage>,
}

/// A part of a text. Passages that follow each other are of different kinds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Passage {
    /// As the model wrote it.
    pub text: String,
    /// Whether it is the answer, calls included; otherwise it is reasoning, a mark, or white space between them.
    pub is_answer: bool,
}

impl Passages {
    /// Of an answer to a prompt that ends like this.
    #[must_use]
    pub fn new(format: &ReasoningFormat, end: PromptEnd) -> Self {
        Self {
            splitter: Splitter::new(Some(format), end),
            output: Output::new(false),
            held: String::new(),
            found: Vec::new(),
        }
    }

    /// Takes the next piece of text and returns what is certain with it.
    pub fn push(&mut self, text: &str) -> Vec<Passage> {
        text.chars().for_each(|c| self.step(c));
        std::mem::take(&mut self.found)
    }

    /// Ends the text and returns the rest.
    pub fn finish(&mut self) -> Vec<Passage> {
        let content = self.splitter.finish(&mut self.output);
        self.release(&content);
        std::mem::take(&mut self.found)
    }

    fn step(&mut self, c: char) {
        let was_inside = self.splitter.is_inside();
        self.held.push(c);
        let content = self.splitter.step(c, &mut self.output);
        // What is neither may still be the beginning of a mark.
        if was_inside || self.splitter.is_inside() || !content.is_empty() {
            self.release(&content);
        }
    }

    /// What is held ends with this content, and before it comes what is none.
    fn release(&mut self, content: &str) {
        let held = std::mem::take(&mut self.held);
        // A form that writes content in other words has no such end; then nothing of it is known to be reasoning.
        let start = if held.ends_with(content) { held.len() - content.len() } else { 0 };
        self.add(&held[..start], false);
        for c in held[start..].chars() {
            let is_answer = !(c.is_whitespace() && self.output.skips_spaces());
            self.output.content_char(c);
            self.add(c.encode_utf8(&mut [0; 4]), is_answer);
        }
        self.output.take();
    }

    fn add(&mut self, text: &str, is_answer: bool) {
        match self.found.last_mut() {
            _ if text.is_empty() => {}
            Some(last) if last.is_answer == is_answer => last.text.push_str(text),
            _ => self.found.push(Passage { text: text.to_owned(), is_answer }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The passages of a text, those of the answer in brackets, whatever the sizes of its pieces.
    #[track_caller]
    fn check(format: &ReasoningFormat, end: PromptEnd, text: &str, expected: &str) {
        for size in 1..=text.chars().count().max(1) {
            let mut passages = Passages::new(format, end);
            let characters: Vec<char> = text.chars().collect();
            let pieces = characters.chunks(size).map(|piece| piece.iter().collect::<String>());
            let mut all: Vec<Passage> = pieces.flat_map(|piece| passages.push(&piece)).collect();
            all.extend(passages.finish());
            let mut written = String::new();
            for passage in all {
                match passage.is_answer {
                    true => written.push_str(&format!("[{}]", passage.text)),
                    false => written.push_str(&passage.text),
                }
            }
            assert_eq!(written.replace("][", ""), expected, "{text:?} in pieces of {size}");
        }
    }

    #[test]
    fn an_answer_is_told_from_reasoning() {
        let think = ReasoningFormat::think();
        let plain = |text: &str, expected: &str| check(&think, PromptEnd::Plain, text, expected);
        plain("<think>\nA\n\nB</think>\n\nC\n\nD", "<think>\nA\n\nB</think>\n\n[C\n\nD]");
        plain("\n\nC <think>D</think>", "[\n\nC <think>D</think>]");
        plain("\n<think>A", "\n<think>A");
        plain("<thin", "[<thin]");
        plain(" \n ", "[ \n ]");
        plain("", "");
        plain("A</think>", "[A</think>]");
        check(&think, PromptEnd::InReasoning, "A</thi</think> B ", "A</thi</think> [B ]");
        check(&think, PromptEnd::AfterReasoning, "\n\nB", "[\n\nB]");
        check(&ReasoningFormat::think_from_start(), PromptEnd::Plain, "A</think>B", "A</think>[B]");
    }

    #[test]
    fn channels_are_told_apart() {
        let harmony = ReasoningFormat::named("openai_gptoss").unwrap();
        let check = |text: &str, expected: &str| check(&harmony, PromptEnd::Plain, text, expected);
        let final_channel = "<|start|>assistant<|channel|>final<|message|>";
        check(
            &format!("<|channel|>analysis<|message|>A\nB<|end|>{final_channel}C\nD"),
            &format!("<|channel|>analysis<|message|>A\nB<|end|>{final_channel}[C\nD]"),
        );
        check("<|channel|>final<|message|>C", "<|channel|>final<|message|>[C]");
        check("C", "[C]");
        // What is sent to a tool comes out in other words, so all of its header counts.
        check(
            "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}",
            "[<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}]",
        );
    }
}
