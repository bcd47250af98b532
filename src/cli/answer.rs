//! The answer of a model in a chat: its reasoning, dimmed, and then its text.

use std::io::{self, IsTerminal, Write};
use std::sync::Arc;

use tinyvllm::chat::{AnswerEvent, AnswerFormat, AnswerParser, PromptEnd};
use tinyvllm::engine::FinishReason;

use super::console::{Style, has_styles, styled};
use super::render::{Finished, GeneratedSequence, Render, SequenceContext};
use super::wrap::Wrap;

/// Marks reasoning where there are no styles. Models write the same marks.
const OPEN: &str = "<think>\n";
const CLOSE: &str = "\n</think>\n\n";

/// Streamed text for people. It is not parsed for tool calls, because a chat on the terminal has no tools.
#[derive(Debug)]
pub(crate) struct AnswerRender<W> {
    writer: W,
    parser: AnswerParser,
    has_styles: bool,
    /// Wraps lines at the edge of a terminal.
    wrap: Option<Wrap>,
    is_reasoning: bool,
    last_byte: Option<u8>,
    content: String,
    reasoning: String,
}

impl AnswerRender<io::Sink> {
    /// Prints nothing and collects the text.
    pub(crate) fn hidden(format: AnswerFormat, prompt_end: PromptEnd) -> Self {
        Self::with_styles(io::sink(), format, prompt_end, false)
    }
}

impl<W: Write + IsTerminal> AnswerRender<W> {
    /// For one answer to a prompt with this end. Reasoning is dimmed if `writer` is a terminal with styles,
    /// otherwise it is put between marks.
    pub(crate) fn new(writer: W, format: AnswerFormat, prompt_end: PromptEnd) -> Self {
        let has_styles = has_styles(&writer);
        let width = writer.is_terminal().then(terminal_size::terminal_size).flatten();
        let wrap = width.map(|(terminal_size::Width(width), _)| Wrap::new(width.into()));
        Self { wrap, ..Self::with_styles(writer, format, prompt_end, has_styles) }
    }
}

impl<W: Write> AnswerRender<W> {
    fn with_styles(writer: W, format: AnswerFormat, prompt_end: PromptEnd, has_styles: bool) -> Self {
        let format = AnswerFormat { tool_calls: None, ..format };
        let parser = AnswerParser::new(&format, prompt_end, Arc::default());
        Self {
            writer,
            parser,
            has_styles,
            wrap: None,
            is_reasoning: false,
            last_byte: None,
            content: String::new(),
            reasoning: String::new(),
        }
    }

    /// The model's text, without its reasoning.
    pub(crate) fn into_content(self) -> String {
        self.content
    }

    pub(crate) fn content(&self) -> &str {
        &self.content
    }

    pub(crate) fn reasoning(&self) -> &str {
        &self.reasoning
    }

    fn write_events(&mut self, events: Vec<AnswerEvent>) -> io::Result<()> {
        for event in events {
            match event {
                AnswerEvent::Reasoning(text) => self.write_reasoning(&text)?,
                AnswerEvent::Content(text) => self.write_content(&text)?,
                // The parser has no tool-call format.
                AnswerEvent::CallBegin { .. } | AnswerEvent::CallArguments { .. } => {}
            }
        }
        self.writer.flush()
    }

    fn write_reasoning(&mut self, text: &str) -> io::Result<()> {
        if !self.is_reasoning && !self.has_styles {
            self.write(OPEN)?;
        }
        self.is_reasoning = true;
        self.reasoning.push_str(text);
        // Each chunk ends its style, so that no style remains after an interrupted chat.
        if self.has_styles { self.write(&styled(text, Style::Dim)) } else { self.write(text) }
    }

    fn write_content(&mut self, text: &str) -> io::Result<()> {
        if self.is_reasoning {
            self.is_reasoning = false;
            self.write(if self.has_styles { "\n\n" } else { CLOSE })?;
        }
        self.content.push_str(text);
        self.write(text)
    }

    fn write(&mut self, text: &str) -> io::Result<()> {
        self.last_byte = text.as_bytes().last().copied().or(self.last_byte);
        match &mut self.wrap {
            Some(wrap) => self.writer.write_all(wrap.push(text).as_bytes()),
            None => self.writer.write_all(text.as_bytes()),
        }
    }
}

impl<W: Write> Render for AnswerRender<W> {
    fn begin(&mut self, _context: SequenceContext<'_>) -> io::Result<()> {
        Ok(())
    }

    fn delta(&mut self, text: &str, _token_ids: &[u32]) -> io::Result<()> {
        let events = self.parser.push(text);
        self.write_events(events)
    }

    fn end(
        &mut self,
        _context: SequenceContext<'_>,
        _sequence: &GeneratedSequence,
        finished: &Finished,
    ) -> io::Result<()> {
        let events = match finished.reason == FinishReason::Stop && finished.matched_stop.is_none() {
            true => self.parser.finish(),
            false => self.parser.cut_off(),
        };
        self.write_events(events)?;
        if self.last_byte != Some(b'\n') {
            self.write("\n")?;
        }
        if let Some(wrap) = &mut self.wrap {
            self.writer.write_all(wrap.flush().as_bytes())?;
        }
        self.writer.flush()
    }
}

#[cfg(test)]
mod tests {
    use tinyvllm::chat::ReasoningFormat;
    use tinyvllm::engine::SequenceStats;

    use super::*;

    /// The output and the collected content of an answer in these chunks.
    fn shown(chunks: &[&str], prompt_end: PromptEnd, has_styles: bool) -> (String, String) {
        let format = AnswerFormat { tool_calls: None, reasoning: Some(ReasoningFormat::think()) };
        let mut render = AnswerRender::with_styles(Vec::new(), format, prompt_end, has_styles);
        let context = SequenceContext { prompt_index: 0, index: 0, prompt_token_ids: &[] };
        let stats = SequenceStats::default();
        let finished = Finished { reason: FinishReason::Stop, error: None, stats, matched_stop: None };
        render.begin(context).unwrap();
        for chunk in chunks {
            render.delta(chunk, &[]).unwrap();
        }
        render.end(context, &GeneratedSequence::default(), &finished).unwrap();
        let text = String::from_utf8(render.writer.clone()).unwrap();
        (text, render.into_content())
    }

    #[test]
    fn reasoning_is_dimmed_on_a_terminal_and_between_markers_elsewhere() {
        let chunks = ["<thi", "nk>\nWell", ", yes.\n</think>\n\nYes", "!"];
        let (dimmed, content) = shown(&chunks, PromptEnd::Plain, true);
        assert_eq!(dimmed, "\x1b[2mWell\x1b[0m\x1b[2m, yes.\x1b[0m\n\nYes!\n");
        assert_eq!(content, "Yes!");
        let (plain, content) = shown(&chunks, PromptEnd::Plain, false);
        assert_eq!(plain, "<think>\nWell, yes.\n</think>\n\nYes!\n");
        assert_eq!(content, "Yes!");
    }

    #[test]
    fn reasoning_that_the_prompt_began_is_reasoning() {
        let (plain, content) = shown(&["Hm.", "</think>Yes"], PromptEnd::InReasoning, false);
        assert_eq!((&plain[..], &content[..]), ("<think>\nHm.\n</think>\n\nYes\n", "Yes"));
        // Interrupted before the answer began.
        let (plain, content) = shown(&["Hm."], PromptEnd::InReasoning, false);
        assert_eq!((&plain[..], &content[..]), ("<think>\nHm.\n", ""));
    }

    #[test]
    fn an_answer_without_reasoning_is_as_it_is() {
        for has_styles in [true, false] {
            for prompt_end in [PromptEnd::Plain, PromptEnd::AfterReasoning] {
                let (text, content) = shown(&["Yes", ", <b>!\n"], prompt_end, has_styles);
                assert_eq!((&text[..], &content[..]), ("Yes, <b>!\n", "Yes, <b>!\n"));
            }
        }
    }
}
