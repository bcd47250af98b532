//! From the engine's events to text: detokenising and stop strings, for each sequence of a request.

use std::collections::VecDeque;
use std::sync::Arc;

use super::TextEvent;
use crate::Result;
use crate::chat::{Passage, Passages, PromptEnd, ReasoningFormat};
use crate::engine::{Event, FinishReason};
use crate::sampling::SamplingParams;
use crate::tokenizer::{Detokenizer, StopMatcher, StopOutcome, Tokenizer};

/// How tokens become text.
#[derive(Debug, Clone)]
pub struct TextOptions {
    /// The text ends before any of these.
    pub stop: Vec<String>,
    /// Include the stop string in the text.
    pub include_stop: bool,
    /// Leave control tokens out of the text.
    pub skip_special: bool,
    /// Of these, the ones that stay in the text because something takes it apart by them; ascending.
    pub visible_special: Arc<[u32]>,
    /// How answers reason and where their prompt leaves off, if stop strings are not to be looked for in reasoning.
    pub reasoning: Option<(ReasoningFormat, PromptEnd)>,
}

impl Default for TextOptions {
    fn default() -> Self {
        Self {
            stop: Vec::new(),
            include_stop: false,
            skip_special: true,
            visible_special: Arc::default(),
            reasoning: None,
        }
    }
}

/// The text side of a request. It does not wait and does not depend on the source of events.
#[derive(Debug)]
pub struct TextDecoder {
    sequences: Vec<SequenceText>,
    stop: Vec<String>,
    stop_token_ids: Vec<u32>,
    min_tokens: usize,
}

/// The text side of one sequence. Without a tokenizer there is no text, only tokens.
#[derive(Debug)]
struct SequenceText {
    decoder: Option<(Detokenizer, Stops)>,
    num_output_tokens: usize,
    matched_stop: Option<usize>,
    /// The token that ended it, if it is one of those that the request names.
    stop_token_id: Option<u32>,
}

/// Looks for stop strings where they count.
#[derive(Debug)]
struct Stops {
    matcher: StopMatcher,
    /// Separates the answer from reasoning, if stop strings apply to the answer alone.
    passages: Option<Passages>,
}

impl Stops {
    fn new(options: &TextOptions) -> Result<Self> {
        // Without stop strings there is nothing to separate.
        let reasoning = options.reasoning.as_ref().filter(|_| !options.stop.is_empty());
        Ok(Self {
            matcher: StopMatcher::new(&options.stop, options.include_stop)?,
            passages: reasoning.map(|(format, end)| Passages::new(format, *end)),
        })
    }

    /// Takes the next text, in which an answer may end or not.
    fn push(&mut self, text: &str, may_stop: bool) -> StopOutcome {
        let Some(passages) = &mut self.passages else { return self.look_in(text, may_stop) };
        let passages = passages.push(text);
        self.look(&passages, may_stop)
    }

    /// Ends the text, with this rest.
    fn finish(&mut self, rest: &str, may_stop: bool) -> StopOutcome {
        let mut outcome = self.push(rest, may_stop);
        let last = self.passages.as_mut().map(Passages::finish).unwrap_or_default();
        if outcome.matched.is_none() {
            let last = self.look(&last, may_stop);
            outcome.text += &last.text;
            outcome.matched = last.matched;
        }
        outcome.text += &self.matcher.finish();
        outcome
    }

    fn look(&mut self, passages: &[Passage], may_stop: bool) -> StopOutcome {
        let mut all = StopOutcome::default();
        for passage in passages {
            let outcome = match passage.is_answer {
                true => self.look_in(&passage.text, may_stop),
                false => StopOutcome { text: self.matcher.skip(&passage.text), matched: None },
            };
            all.text += &outcome.text;
            all.matched = all.matched.or(outcome.matched);
        }
        all
    }

    /// In a text of the answer.
    fn look_in(&mut self, text: &str, may_stop: bool) -> StopOutcome {
        match may_stop {
            true => self.matcher.push(text),
            false => StopOutcome { text: self.matcher.pass(text), matched: None },
        }
    }
}

impl TextDecoder {
    pub(super) fn new(
        tokenizer: Option<&Arc<Tokenizer>>,
        params: &SamplingParams,
        options: &TextOptions,
    ) -> Result<Self> {
        let sequences = (0..params.n).map(|_| {
            let decoder = match tokenizer {
                Some(tokenizer) => Some((
                    Detokenizer::continuing(Arc::clone(tokenizer), options.skip_special)
                        .with_visible(Arc::clone(&options.visible_special)),
                    Stops::new(options)?,
                )),
                None => None,
            };
            Ok(SequenceText { decoder, num_output_tokens: 0, matched_stop: None, stop_token_id: None })
        });
        Ok(Self {
            sequences: sequences.collect::<Result<_>>()?,
            stop: options.stop.clone(),
            stop_token_ids: params.stop_token_ids.clone(),
            min_tokens: params.min_tokens,
        })
    }

    /// Decodes an event and appends the results to `ready`. Returns the sequence to abort because its stop string was
    /// found; again with every further token, until it has ended.
    #[must_use]
    pub fn push(&mut self, event: Event, ready: &mut VecDeque<TextEvent>) -> Option<usize> {
        match event {
            Event::PromptLogits { .. } | Event::Hidden { .. } => None,
            Event::PromptLogprobs { logprobs } => {
                ready.push_back(TextEvent::PromptLogprobs { logprobs });
                None
            }
            Event::PromptProgress { progress } => {
                ready.push_back(TextEvent::PromptProgress { progress });
                None
            }
            Event::Token { index, token_id, logprobs, is_end } => {
                let sequence = &mut self.sequences[index];
                if sequence.matched_stop.is_some() {
                    return Some(index);
                }
                sequence.num_output_tokens += 1;
                sequence.stop_token_id =
                    Some(token_id).filter(|id| is_end && self.stop_token_ids.contains(id));
                let may_stop = sequence.num_output_tokens > self.min_tokens;
                let mut text = String::new();
                if let (Some((detokenizer, stops)), false) = (&mut sequence.decoder, is_end) {
                    let outcome = stops.push(&detokenizer.push(token_id), may_stop);
                    (text, sequence.matched_stop) = (outcome.text, outcome.matched);
                }
                let is_matched = sequence.matched_stop.is_some();
                ready.push_back(TextEvent::Delta { index, text, token_id: Some(token_id), logprobs });
                is_matched.then_some(index)
            }
            Event::Finished { index, mut reason, error, error_kind, mut stats } => {
                let sequence = &mut self.sequences[index];
                if sequence.matched_stop.is_none()
                    && let Some((detokenizer, stops)) = &mut sequence.decoder
                {
                    let may_stop = sequence.num_output_tokens > self.min_tokens;
                    let StopOutcome { text, matched } = stops.finish(&detokenizer.finish(), may_stop);
                    sequence.matched_stop = matched;
                    if !text.is_empty() {
                        ready.push_back(TextEvent::Delta { index, text, token_id: None, logprobs: None });
                    }
                }
                stats.num_output_tokens = sequence.num_output_tokens;
                let matched_stop = sequence.matched_stop.and_then(|stop| self.stop.get(stop).cloned());
                if matched_stop.is_some() {
                    reason = FinishReason::Stop;
                }
                let stop_token_id = sequence.stop_token_id;
                ready.push_back(TextEvent::Finished {
                    index,
                    reason,
                    error,
                    error_kind,
                    stats,
                    matched_stop,
                    stop_token_id,
                });
                None
            }
        }
    }
}
