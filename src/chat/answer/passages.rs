//! Classifies passages of a text as answer or as reasoning and its marks, for callers that keep the text unchanged.
//!
//! Invariant: the passages are the text, for any sizes of its chunks. Text whose kind is not certain yet is held.

use super::output::Output;
use super::{PromptEnd, ReasoningFormat, Splitter};

/// Separates the passages of one answer.
#[derive(Debug)]
pub struct Passages {
    splitter: Splitter,
    /// Its deltas are not used, but it knows which white space does not belong to the answer.
    output: Output,
    held: String,
    found: Vec<Passage>,
}

/// A passage of a text. Consecutive passages are of different kinds.
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

    /// Takes the next text chunk and returns the passages that are certain with it.
    pub fn push(&mut self, text: &str) -> Vec<Passage> {
        text.chars().for_each(|c| self.step(c));
        std::mem::take(&mut self.found)
    }

    /// Ends the text and returns the rest.
    pub fn finish(&mut self) -> Vec<Passage> {
        let content = self.splitter.finish(false, &mut self.output);
        self.release(&content);
        std::mem::take(&mut self.found)
    }

    fn step(&mut self, c: char) {
        let was_inside = self.splitter.is_inside();
        self.held.push(c);
        let content = self.splitter.step(c, &mut self.output);
        // Text that is neither may still begin a mark.
        if was_inside || self.splitter.is_inside() || !content.is_empty() {
            self.release(&content);
        }
    }

    /// The held text ends with this content; the text before it is not content.
    fn release(&mut self, content: &str) {
        let held = std::mem::take(&mut self.held);
        // A format that writes content differently has no such end; then no text is known to be reasoning.
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

    /// The passages of a text, those of the answer in brackets, for any sizes of its chunks.
    #[track_caller]
    fn check(format: &ReasoningFormat, end: PromptEnd, text: &str, expected: &str) {
        for size in 1..=text.chars().count().max(1) {
            let mut passages = Passages::new(format, end);
            let characters: Vec<char> = text.chars().collect();
            let chunks = characters.chunks(size).map(|chunk| chunk.iter().collect::<String>());
            let mut all: Vec<Passage> = chunks.flat_map(|chunk| passages.push(&chunk)).collect();
            all.extend(passages.finish());
            let mut written = String::new();
            for passage in all {
                match passage.is_answer {
                    true => written.push_str(&format!("[{}]", passage.text)),
                    false => written.push_str(&passage.text),
                }
            }
            assert_eq!(written.replace("][", ""), expected, "{text:?} in chunks of {size}");
        }
    }

    #[test]
    fn an_answer_is_separated_from_reasoning() {
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
    fn channels_are_separated() {
        let harmony = ReasoningFormat::named("openai_gptoss").unwrap();
        let check = |text: &str, expected: &str| check(&harmony, PromptEnd::Plain, text, expected);
        let final_channel = "<|start|>assistant<|channel|>final<|message|>";
        check(
            &format!("<|channel|>analysis<|message|>A\nB<|end|>{final_channel}C\nD"),
            &format!("<|channel|>analysis<|message|>A\nB<|end|>{final_channel}[C\nD]"),
        );
        check("<|channel|>final<|message|>C", "<|channel|>final<|message|>[C]");
        check("C", "[C]");
        // A call is emitted in another form than its text, so all of its header counts.
        check(
            "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}",
            "[<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}]",
        );
    }
}
