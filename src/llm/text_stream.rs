//! From the engine's tokens to text: detokenising and stop strings, for each sequence of a request.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::Result;
use crate::engine::{AbortHandle, Event, FinishReason, RequestStream, SequenceStats};
use crate::sampling::TokenLogprobs;
use crate::tokenizer::{Detokenizer, StopMatcher, Tokenizer};

/// Something that happened to a request, in text.
#[derive(Debug, Clone, PartialEq)]
pub enum TextEvent {
    /// More text, or a token whose text is not known yet.
    Delta {
        /// Number of the sequence in the request.
        index: usize,
        /// May be empty: a character is not complete, or the text could be part of a stop string.
        text: String,
        /// The token; none for text that was held back until the end.
        token_id: Option<u32>,
        /// If asked for.
        logprobs: Option<TokenLogprobs>,
    },
    /// A sequence ended; nothing more comes for this index.
    Finished {
        /// Number of the sequence in the request.
        index: usize,
        /// Why. A stop string counts as [`FinishReason::Stop`].
        reason: FinishReason,
        /// With [`FinishReason::Error`], what failed.
        error: Option<String>,
        /// Counts and times.
        stats: SequenceStats,
        /// The stop string that was found; the text ends before it.
        matched_stop: Option<String>,
    },
}

/// The text of a request as it is generated; an iterator that ends when all sequences have ended.
#[derive(Debug)]
pub struct TextStream {
    events: RequestStream,
    sequences: Vec<SequenceText>,
    ready: VecDeque<TextEvent>,
    stop: Vec<String>,
}

/// The text side of one sequence. Without a tokenizer there is no text, only tokens.
#[derive(Debug)]
struct SequenceText {
    decoder: Option<(Detokenizer, StopMatcher)>,
    num_output_tokens: usize,
    matched_stop: Option<usize>,
}

impl TextStream {
    pub(super) fn new(
        events: RequestStream,
        tokenizer: Option<&Arc<Tokenizer>>,
        num_sequences: usize,
        stop: &[String],
    ) -> Result<Self> {
        let sequences = (0..num_sequences).map(|_| {
            let decoder = match tokenizer {
                Some(tokenizer) => Some((
                    Detokenizer::continuing(Arc::clone(tokenizer), true),
                    StopMatcher::new(stop, false)?,
                )),
                None => None,
            };
            Ok(SequenceText { decoder, num_output_tokens: 0, matched_stop: None })
        });
        let sequences = sequences.collect::<Result<_>>()?;
        Ok(Self { events, sequences, ready: VecDeque::new(), stop: stop.to_vec() })
    }

    /// Gives up the request, or one of its sequences. The last event is still
    /// [`TextEvent::Finished`].
    pub fn abort(&self, index: Option<usize>) {
        self.events.abort(index);
    }

    /// A way to give up the request while another thread waits for its events.
    #[must_use]
    pub fn abort_handle(&self) -> AbortHandle {
        self.events.abort_handle()
    }

    /// The next event if there already is one.
    pub fn try_next(&mut self) -> Option<TextEvent> {
        while self.ready.is_empty() {
            let event = self.events.try_next()?;
            self.translate(event);
        }
        self.ready.pop_front()
    }

    fn translate(&mut self, event: Event) {
        match event {
            Event::PromptLogits { .. } => {}
            Event::Token { index, token_id, logprobs, is_end } => {
                let sequence = &mut self.sequences[index];
                if sequence.matched_stop.is_some() {
                    return;
                }
                sequence.num_output_tokens += 1;
                let mut text = String::new();
                if let (Some((detokenizer, matcher)), false) = (&mut sequence.decoder, is_end) {
                    let outcome = matcher.push(&detokenizer.push(token_id));
                    text = outcome.text;
                    sequence.matched_stop = outcome.matched;
                }
                let is_matched = sequence.matched_stop.is_some();
                self.ready.push_back(TextEvent::Delta { index, text, token_id: Some(token_id), logprobs });
                if is_matched {
                    self.events.abort(Some(index));
                }
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
                        self.ready.push_back(TextEvent::Delta {
                            index,
                            text,
                            token_id: None,
                            logprobs: None,
                        });
                    }
                }
                stats.num_output_tokens = sequence.num_output_tokens;
                let matched_stop = sequence.matched_stop.and_then(|stop| self.stop.get(stop).cloned());
                if matched_stop.is_some() {
                    reason = FinishReason::Stop;
                }
                self.ready.push_back(TextEvent::Finished { index, reason, error, stats, matched_stop });
            }
        }
    }
}

impl Iterator for TextStream {
    type Item = TextEvent;

    fn next(&mut self) -> Option<TextEvent> {
        while self.ready.is_empty() {
            let event = self.events.next()?;
            self.translate(event);
        }
        self.ready.pop_front()
    }
}
