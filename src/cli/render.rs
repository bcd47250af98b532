//! Prints the output of a run as text or as JSON lines, sequence by sequence in the order of the prompts.
//!
//! The engine computes all sequences at once. Only one of them can be printed at a time; the others are
//! collected until their turn.

use std::io::{self, Write};

use serde::Serialize;
use tinyvllm::engine::{FinishReason, SequenceStats};
use tinyvllm::llm::TextEvent;
use tinyvllm::sampling::TokenLogprobs;
use tinyvllm::tokenizer::Tokenizer;

use super::console::{Style, paint};
use super::timings::{Timings, Usage};

/// One generated sequence.
#[derive(Debug, Clone, Default)]
pub(crate) struct GeneratedSequence {
    pub(crate) token_ids: Vec<u32>,
    pub(crate) text: String,
    pub(crate) logprobs: Vec<TokenLogprobs>,
    pub(crate) finished: Option<Finished>,
}

/// How a sequence ended.
#[derive(Debug, Clone)]
pub(crate) struct Finished {
    pub(crate) reason: FinishReason,
    pub(crate) error: Option<String>,
    pub(crate) stats: SequenceStats,
    pub(crate) matched_stop: Option<String>,
}

/// The prompt and the index of a sequence.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SequenceContext<'a> {
    pub(crate) prompt_index: usize,
    pub(crate) index: usize,
    pub(crate) prompt_token_ids: &'a [u32],
}

/// An output format. Each sequence calls `begin`, then `delta` any number of times, then `end`.
pub(crate) trait Render {
    /// Begins a sequence.
    fn begin(&mut self, context: SequenceContext<'_>) -> io::Result<()>;
    /// Adds text and tokens to it.
    fn delta(&mut self, text: &str, token_ids: &[u32]) -> io::Result<()>;
    /// Ends it.
    fn end(
        &mut self,
        context: SequenceContext<'_>,
        sequence: &GeneratedSequence,
        finished: &Finished,
    ) -> io::Result<()>;
}

/// Prints the sequences of one prompt. Returns how each ended. `events` may end early only if the engine has
/// failed.
pub(crate) fn render_request(
    events: impl Iterator<Item = TextEvent>,
    num_sequences: usize,
    (prompt_index, prompt_token_ids): (usize, &[u32]),
    output: &mut dyn Render,
) -> anyhow::Result<Vec<Finished>> {
    let context = |index| SequenceContext { prompt_index, index, prompt_token_ids };
    let mut sequences = vec![GeneratedSequence::default(); num_sequences];
    let mut outcomes = Vec::with_capacity(num_sequences);
    output.begin(context(0))?;
    for event in events {
        match event {
            // The command line never requests prompt log-probabilities. Progress is shown elsewhere.
            TextEvent::PromptLogprobs { .. } | TextEvent::PromptProgress { .. } => {}
            TextEvent::Delta { index, text, token_id, logprobs } => {
                let Some(sequence) = sequences.get_mut(index) else { continue };
                sequence.text.push_str(&text);
                sequence.token_ids.extend(token_id);
                sequence.logprobs.extend(logprobs);
                if index == outcomes.len() {
                    output.delta(&text, token_id.as_slice())?;
                }
            }
            TextEvent::Finished { index, reason, error, stats, matched_stop, .. } => {
                if let Some(sequence) = sequences.get_mut(index) {
                    sequence.finished = Some(Finished { reason, error, stats, matched_stop });
                }
            }
        }
        while let Some(sequence) = sequences.get(outcomes.len())
            && let Some(finished) = &sequence.finished
        {
            output.end(context(outcomes.len()), sequence, finished)?;
            outcomes.push(finished.clone());
            if let Some(next) = sequences.get(outcomes.len()) {
                output.begin(context(outcomes.len()))?;
                // Its text so far was computed while the previous sequence was printed.
                output.delta(&next.text, &next.token_ids)?;
            }
        }
    }
    if outcomes.len() < num_sequences {
        return Err(tinyvllm::Error::internal("the engine stopped before the output was complete").into());
    }
    Ok(outcomes)
}

/// Text for people: streamed, with a short header for each sequence if there are several.
#[derive(Debug)]
pub(crate) struct TextRender<W> {
    writer: W,
    /// A name for each prompt; empty if there is only one sequence.
    labels: Vec<String>,
    has_text: bool,
    is_first: bool,
    last_byte: Option<u8>,
}

impl<W: Write> TextRender<W> {
    /// `labels` are the names of the prompts. Without a tokenizer (`has_text` is false), token ids are
    /// printed in the format of `--prompt-ids`.
    pub(crate) fn new(writer: W, labels: Vec<String>, has_text: bool) -> Self {
        Self { writer, labels, has_text, is_first: true, last_byte: None }
    }

    fn write(&mut self, text: &str) -> io::Result<()> {
        self.last_byte = text.as_bytes().last().copied().or(self.last_byte);
        self.writer.write_all(text.as_bytes())?;
        self.writer.flush()
    }
}

impl<W: Write> Render for TextRender<W> {
    fn begin(&mut self, context: SequenceContext<'_>) -> io::Result<()> {
        if let Some(label) = self.labels.get(context.prompt_index) {
            let separator = if self.is_first { "" } else { "\n" };
            let number = match context.index {
                0 => format!("[{}]", context.prompt_index + 1),
                index => format!("[{}.{}]", context.prompt_index + 1, index + 1),
            };
            let header = paint(&format!("{number} {label}"), Style::Bold, &io::stdout());
            self.write(&format!("{separator}{header}\n"))?;
        }
        self.is_first = false;
        self.last_byte = None;
        Ok(())
    }

    fn delta(&mut self, text: &str, token_ids: &[u32]) -> io::Result<()> {
        if self.has_text {
            return self.write(text);
        }
        for token_id in token_ids {
            let separator = if self.last_byte.is_none() { "" } else { "," };
            self.write(&format!("{separator}{token_id}"))?;
        }
        Ok(())
    }

    fn end(
        &mut self,
        _context: SequenceContext<'_>,
        _sequence: &GeneratedSequence,
        _finished: &Finished,
    ) -> io::Result<()> {
        if self.last_byte == Some(b'\n') { Ok(()) } else { self.write("\n") }
    }
}

/// One JSON object a line.
#[derive(Debug)]
pub(crate) struct JsonRender<'a, W> {
    writer: W,
    tokenizer: Option<&'a Tokenizer>,
    has_logprobs: bool,
}

/// The object. Programs parse it, so fields may be added but never renamed.
#[derive(Serialize)]
struct JsonSequence<'a> {
    prompt_index: usize,
    index: usize,
    prompt_token_ids: &'a [u32],
    output_token_ids: &'a [u32],
    text: Option<&'a str>,
    finish_reason: &'static str,
    matched_stop: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<Vec<JsonLogprobs>>,
    usage: Usage,
    timings: Timings,
}

#[derive(Serialize)]
struct JsonLogprobs {
    #[serde(flatten)]
    chosen: JsonLogprob,
    top: Vec<JsonLogprob>,
}

#[derive(Serialize)]
struct JsonLogprob {
    token_id: u32,
    token: Option<String>,
    logprob: f32,
}

impl<'a, W: Write> JsonRender<'a, W> {
    /// Without a tokenizer, `text` is null.
    pub(crate) fn new(writer: W, tokenizer: Option<&'a Tokenizer>, has_logprobs: bool) -> Self {
        Self { writer, tokenizer, has_logprobs }
    }

    fn logprobs(&self, sequence: &GeneratedSequence) -> Vec<JsonLogprobs> {
        let json = |(token_id, logprob): (u32, f32)| JsonLogprob {
            token_id,
            token: self.tokenizer.map(|tokenizer| tokenizer.token_text(token_id)),
            logprob,
        };
        let pairs = sequence.token_ids.iter().zip(&sequence.logprobs);
        pairs
            .map(|(&token_id, logprobs)| JsonLogprobs {
                chosen: json((token_id, logprobs.logprob)),
                top: logprobs.top.iter().copied().map(json).collect(),
            })
            .collect()
    }
}

impl<W: Write> Render for JsonRender<'_, W> {
    fn begin(&mut self, _context: SequenceContext<'_>) -> io::Result<()> {
        Ok(())
    }

    fn delta(&mut self, _text: &str, _token_ids: &[u32]) -> io::Result<()> {
        Ok(())
    }

    fn end(
        &mut self,
        context: SequenceContext<'_>,
        sequence: &GeneratedSequence,
        finished: &Finished,
    ) -> io::Result<()> {
        let object = JsonSequence {
            prompt_index: context.prompt_index,
            index: context.index,
            prompt_token_ids: context.prompt_token_ids,
            output_token_ids: &sequence.token_ids,
            text: self.tokenizer.map(|_| sequence.text.as_str()),
            finish_reason: finished.reason.name(),
            matched_stop: finished.matched_stop.as_deref(),
            error: finished.error.as_deref(),
            logprobs: self.has_logprobs.then(|| self.logprobs(sequence)),
            usage: Usage::from(&finished.stats),
            timings: Timings::from(&finished.stats),
        };
        let mut line = serde_json::to_vec(&object)?;
        line.push(b'\n');
        self.writer.write_all(&line)?;
        self.writer.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn delta(index: usize, text: &str, token_id: u32) -> TextEvent {
        TextEvent::Delta { index, text: text.to_owned(), token_id: Some(token_id), logprobs: None }
    }

    fn finished(index: usize) -> TextEvent {
        let stats = SequenceStats::default();
        let reason = FinishReason::Stop;
        TextEvent::Finished {
            index,
            reason,
            error: None,
            error_kind: None,
            stats,
            matched_stop: None,
            stop_token_id: None,
        }
    }

    /// Two sequences whose tokens arrive interleaved; the second ends first.
    fn events() -> Vec<TextEvent> {
        vec![
            delta(0, "a", 1),
            delta(1, "x\n", 9),
            delta(0, "b", 2),
            finished(1),
            delta(0, "c", 3),
            finished(0),
        ]
    }

    fn text(labels: &[&str], has_text: bool) -> String {
        let labels = labels.iter().map(|label| (*label).to_owned()).collect();
        let mut output = TextRender::new(Vec::new(), labels, has_text);
        let outcomes = render_request(events().into_iter(), 2, (0, &[7]), &mut output).unwrap();
        assert_eq!(outcomes.len(), 2);
        String::from_utf8(output.writer).unwrap()
    }

    #[test]
    fn text_comes_in_order_however_the_tokens_arrive() {
        assert_eq!(text(&["Hi"], true), "[1] Hi\nabc\n\n[1.2] Hi\nx\n");
        assert_eq!(text(&[], true), "abc\nx\n");
    }

    #[test]
    fn without_a_tokenizer_the_output_is_ids() {
        assert_eq!(text(&[], false), "1,2,3\n9\n");
    }

    #[test]
    fn json_comes_in_order_however_the_tokens_arrive() {
        let mut output = JsonRender::new(Vec::new(), None, false);
        render_request(events().into_iter(), 2, (4, &[7]), &mut output).unwrap();
        let lines = String::from_utf8(output.writer).unwrap();
        let objects: Vec<serde_json::Value> =
            lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(objects.len(), 2);
        for (index, (object, ids)) in objects.iter().zip([vec![1, 2, 3], vec![9]]).enumerate() {
            assert_eq!(object["prompt_index"], 4);
            assert_eq!(object["index"], index);
            assert_eq!(object["prompt_token_ids"], serde_json::json!([7]));
            assert_eq!(object["output_token_ids"], serde_json::json!(ids));
            assert!(object["text"].is_null());
            assert_eq!(object["finish_reason"], "stop");
        }
    }

    #[test]
    fn an_engine_that_stops_is_an_error() {
        let mut output = TextRender::new(Vec::new(), Vec::new(), true);
        let events = vec![delta(0, "a", 1)];
        assert!(render_request(events.into_iter(), 1, (0, &[7]), &mut output).is_err());
    }
}
