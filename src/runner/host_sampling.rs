//! Steps whose tokens are sampled on the host: those that need more of logits than a token, and all on the CPU.

use super::model_runner::{ModelRunner, empty_outputs, is_right};
use super::{ScheduledSequence, SequenceOutput, Step};
use crate::sampling::{SampledToken, Sampler};
use crate::{Error, Result};

impl ModelRunner {
    /// Passes until each sequence has its tokens or has ended. Nothing is allocated from one to the next.
    pub(super) fn execute_on_host(&mut self, step: &Step<'_>) -> Result<Vec<SequenceOutput>> {
        self.queued = None;
        let mut outputs = empty_outputs(step);
        let mut extended = if step.num_steps > 1 { extended_outputs(step)? } else { Vec::new() };
        let vocab_size = self.model.config().vocab_size;
        self.prepare(step);
        for pass in 0..step.num_steps {
            if pass > 0 && !self.feed_back(step, pass, &outputs, &mut extended) {
                break;
            }
            let num_logits = self.batch.num_logits();
            let sampler = &mut self.sampler;
            let logits = self.model.forward(&self.batch, &mut self.kv_cache)?;
            logits.read(num_logits, |logits| {
                let mut rest = logits;
                for (row, (scheduled, output)) in step.sequences.iter().zip(&mut outputs).enumerate() {
                    let (own, others) = rest.split_at(scheduled.num_logits() * vocab_size);
                    rest = others;
                    let extended = extended.get(row).map(|tokens| &tokens[..]);
                    draw(sampler, scheduled, extended, own, vocab_size, &mut output.samples);
                    return_logits(sampler, scheduled, own, vocab_size, output);
                }
            })?;
            if num_logits < self.batch.outputs.len() {
                self.return_hidden_states(step, &mut outputs)?;
            }
        }
        Ok(outputs)
    }

    /// Prepares the pass after one, with the tokens that it drew, unless every sequence has ended.
    fn feed_back(
        &mut self,
        step: &Step<'_>,
        pass: usize,
        outputs: &[SequenceOutput],
        extended: &mut [Vec<u32>],
    ) -> bool {
        // The token of a sequence that has failed is none. It is carried along, since rows are independent.
        let drawn = || outputs.iter().map(|output| Some(output.samples[0].last()?.as_ref()?.token_id));
        let has_ended = |((scheduled, tokens), drawn): ((&ScheduledSequence<'_>, &Vec<u32>), Option<u32>)| {
            let input = &scheduled.samples[0];
            let ends = |token_id| input.end_token_ids.contains(&token_id);
            drawn.is_none_or(|token_id| tokens.len() >= input.params.min_tokens && ends(token_id))
        };
        if step.sequences.iter().zip(&*extended).zip(drawn()).all(has_ended) {
            return false;
        }
        self.prepare_next(step, pass);
        for ((token_id, tokens), drawn) in self.batch.token_ids.iter_mut().zip(extended).zip(drawn()) {
            *token_id = drawn.unwrap_or(0);
            tokens.push(*token_id);
        }
        true
    }

    fn return_hidden_states(&mut self, step: &Step<'_>, outputs: &mut [SequenceOutput]) -> Result<()> {
        let states = self.model.hidden_states(&self.batch)?;
        let wanting = step.sequences.iter().zip(outputs).filter(|(own, _)| own.wants_hidden());
        let width = self.model.config().hidden_size;
        for ((_, output), state) in wanting.zip(states.chunks_exact(width)) {
            output.hidden = Some(state.to_vec());
        }
        Ok(())
    }
}

/// The output tokens of each sequence of a multi-step, with room for those of its passes.
///
/// # Errors
/// [`crate::ErrorKind::Internal`] for a sequence that does not just decode.
fn extended_outputs(step: &Step<'_>) -> Result<Vec<Vec<u32>>> {
    let extended = |scheduled: &ScheduledSequence<'_>| match &scheduled.samples[..] {
        [input] if scheduled.draft.num_tokens == 0 && input.allowed.is_none() => {
            let mut tokens = Vec::with_capacity(input.output_token_ids.len() + step.num_steps);
            tokens.extend_from_slice(input.output_token_ids);
            Ok(tokens)
        }
        _ => Err(Error::internal("a multi-step has a sequence that does not just decode")),
    };
    step.sequences.iter().map(extended).collect()
}

/// Adds a token to each of a sequence's samples, or its drafted tokens up to the first wrong one; none if another thing
/// is wanted. `extended` are its output tokens if passes have added some.
fn draw(
    sampler: &mut Sampler,
    scheduled: &ScheduledSequence<'_>,
    extended: Option<&[u32]>,
    logits: &[f32],
    vocab_size: usize,
    samples: &mut Vec<Vec<Option<SampledToken>>>,
) {
    if scheduled.wants_hidden() {
        samples.clear();
        return;
    }
    let is_draft = scheduled.draft.num_tokens > 0;
    let mut rows = logits.chunks_exact(vocab_size);
    let last = logits.len().saturating_sub(vocab_size);
    for index in 0..scheduled.num_draws() {
        let own = &mut samples[if is_draft { 0 } else { index }];
        if own.last().is_some_and(Option::is_none) {
            break;
        }
        let mut input = scheduled.input(index);
        input.output_token_ids = extended.unwrap_or(input.output_token_ids);
        let token = match scheduled.forced(index) {
            Some(token_id) => Some(SampledToken { token_id, logprobs: None }),
            None if is_draft => rows.next().and_then(|logits| sampler.sample(logits, &input)),
            None => sampler.sample(&logits[last..], &input),
        };
        own.push(token);
        if is_draft && !is_right(scheduled, index, own.last()) {
            break;
        }
    }
}

/// Copies the logits that the sequence wants itself, and ranks the tokens of its prompt.
fn return_logits(
    sampler: &mut Sampler,
    scheduled: &ScheduledSequence<'_>,
    logits: &[f32],
    vocab_size: usize,
    output: &mut SequenceOutput,
) {
    if let Some(num_top) = scheduled.prompt_logprobs {
        let next = scheduled.token_ids[scheduled.start + 1..].iter();
        let rows = logits.chunks_exact(vocab_size).zip(next);
        let rank = |(logits, token_id): (_, &u32)| sampler.rank(logits, *token_id, num_top);
        output.prompt_logprobs.extend(rows.map(rank));
    }
    if scheduled.all_logits {
        output.logits.extend_from_slice(logits);
    }
}
