//! From the engine's events to text: detokenising and stop strings, for each sequence of a request.

use std::collections::VecDeque;
use std::sync::Arc;

use super::TextEvent;
use crate::Result;
use crate::engine::{Event, FinishReason};
use crate::tokenizer::{Detokenizer, StopMatcher, Tokenizer};

/// How tokens become text.
#[derive(Debug, Clone)]
pub struct TextOptions {
    /// The text ends before any of these.
    pub stop: Vec<String>,
    /// Make the stop string part of the text.
    pub include_stop: bool,
    /// Leave control tokens out of the text.
    pub skip_special: bool,
    /// Of these, the ones that stay in the text because something takes it apart by them; ascending.
    pub visible_special: Arc<[u32]>,
}

impl Default for TextOptions {
    fn default() -> Self {
        Self { stop: Vec::new(), include_stop: false, skip_special: true, visible_special: Arc::default() }
    }
}

/// The text side of a request. It does not wait and does not know where events come from.
#[derive(Debug)]
pub struct TextDecoder {
    sequences: Vec<SequenceText>,
    stop: Vec<String>,
}

/// The text side of one sequence. Without a tokenizer there is no text, only tokens.
#[derive(Debug)]
struct SequenceText {
    decoder: Option<(Detokenizer, StopMatcher)>,
    num_output_tokens: usize,
    matched_stop: Option<usize>,
}

impl TextDecoder {
    pub(super) fn new(
        tokenizer: Option<&Arc<Tokenizer>>,
        num_sequences: usize,
        options: &TextOptions,
    ) -> Result<Self> {
        let sequences = (0..num_sequences).map(|_| {
            let decoder = match tokenizer {
                Some(tokenizer) => Some((
                    Detokenizer::continuing(Arc::clone(tokenizer), options.skip_special)
                        .with_visible(Arc::clone(&options.visible_special)),
                    StopMatcher::new(&options.stop, options.include_stop)?,
                )),
                None => None,
            };
            Ok(SequenceText { decoder, num_output_tokens: 0, matched_stop: None })
        });
        Ok(Self { sequences: sequences.collect::<Result<_>>()?, stop: options.stop.clone() })
    }

    /// Translates an event and appends what it means to `ready`. Returns the sequence that is to be given
    /// up because its stop string is there; again with every further token, until it has ended.
    #[must_use]
    pub fn push(&mut self, event: Event, ready: &mut VecDeque<TextEvent>) -> Option<usize> {
        match event {
            Event::PromptLogits { .. } => None,
            Event::PromptLogprobs { logprobs } => {
                ready.push_back(TextEvent::PromptLogprobs { logprobs });
                None
            }
            Event::Token { index, token_id, logprobs, is_end } => {
                let sequence = &mut self.sequences[index];
                if sequence.matched_stop.is_some() {
                    return Some(index);
                }
                sequence.num_output_tokens += 1;
                let mut text = String::new();
                if let (Some((detokenizer, matcher)), false) = (&mut sequence.decoder, is_end) {
                    let outcome = matcher.push(&detokenizer.push(token_id));
                    text = outcome.text;
                    sequence.matched_stop = outcome.matched;
                }
                let is_matched = sequence.matched_stop.is_some();
                ready.push_back(TextEvent::Delta { index, text, token_id: Some(token_id), logprobs });
                is_matched.then_some(index)
            }
            Event::Finished { index, mut reason, error, mut stats } => {
                let sequence = &mut self.sequences[index];
                if sequence.matched_stop.is_none()
                    && let Some((detokenizer, matcher)) = &mut sequence.decoder
                {
                    let outcome = matcher.push(&detokenizer.finish());
                    sequence.matched_stop = outcome.matched;
                    let text = outcome.text + &matcher.finish();
                    if !text.is_empty() {
                        ready.push_back(TextEvent::Delta { index, text, token_id: None, logprobs: None });
                    }
                }
                stats.num_output_tokens = sequence.num_output_tokens;
                let matched_stop = sequence.matched_stop.and_then(|stop| self.stop.get(stop).cloned());
                if matched_stop.is_some() {
                    reason = FinishReason::Stop;
                }
                ready.push_back(TextEvent::Finished { index, reason, error, stats, matched_stop });
                None
            }
        }
    }
}
