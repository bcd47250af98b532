//! Drafts by the model's own MTP block, which predicts the token after the next.
//!
//! After each step it computes the tokens of the step, as soon as their successors are known, so that its row of the
//! cache is as complete as those of the layers: prefix hits, preemption and forks need no extra code. Its result for
//! the last token of a sequence is kept until the next step, and a draft begins there. Keys and values of drafted
//! tokens follow all known ones, where the next step overwrites them, or are in spare blocks.

use std::collections::HashMap;
use std::time::Instant;

use super::{DraftRequest, ModelRunner, SequenceOutput, Step};
use crate::Result;
use crate::models::{InputBatch, Wanted};
use crate::ops::RowMode;
use crate::sampling::SamplerInput;
use crate::scheduler::SeqId;
use crate::speculation::{Draft, LEAST_CHANCE, SecondsPerToken};

/// The block's results of the last step.
#[derive(Debug, Default)]
pub(super) struct Predictions {
    states: HashMap<SeqId, State>,
    /// The first block of the cache that no sequence has; none if there are none.
    first_spare_block: Option<usize>,
    pub(super) seconds_per_token: SecondsPerToken,
    /// Kept for their memory.
    batch: InputBatch,
    logits: Vec<f32>,
}

/// The block's hidden state for a sequence without its last token.
#[derive(Debug)]
struct State {
    num_tokens: usize,
    values: Vec<f32>,
}

impl ModelRunner {
    /// The blocks of the cache from this one on are no sequence's, so that drafts may be longer than the blocks of their
    /// sequence.
    #[must_use]
    pub fn with_spare_blocks(mut self, first: usize) -> Self {
        self.predictions.first_spare_block = Some(first);
        self
    }

    /// Computes the MTP block for the tokens of a step that has just been computed, if the model may draft after it.
    pub(super) fn follow(&mut self, step: &Step<'_>, outputs: &[SequenceOutput]) {
        self.predictions.states.clear();
        if step.may_draft_next && self.try_follow(step, outputs).is_err() {
            self.predictions.states.clear();
        }
    }

    fn try_follow(&mut self, step: &Step<'_>, outputs: &[SequenceOutput]) -> Result<()> {
        let Self { model, kv_cache, batch, predictions, .. } = self;
        let Some(mtp) = model.mtp() else { return Ok(()) };
        batch.token_ids.clear();
        batch.clear_outputs();
        batch.sampled = None;
        let mut sequences = Vec::new();
        for (index, scheduled) in step.in_batch_order() {
            let first = batch.token_ids.len();
            let next = scheduled.start + 1..scheduled.start + scheduled.len + 1;
            // After the last token of all, a sampled one; where none was sampled, it does not matter.
            batch
                .token_ids
                .extend(next.map(|position| scheduled.token_ids.get(position).copied().unwrap_or(0)));
            let tokens = outputs[index].samples.first().map_or(&[][..], |tokens| &tokens[..]);
            let Some(Some(last)) = tokens.last() else { continue };
            // The drafted tokens before it have come.
            let position = scheduled.len - scheduled.draft.num_tokens + tokens.len() - 2;
            batch.token_ids[first + position] = last.token_id;
            batch.want(first + position, Wanted::Logits);
            sequences.push((scheduled.seq, scheduled.start + position + 2));
        }
        let states = mtp.follow(batch, kv_cache)?;
        if sequences.is_empty() {
            return Ok(());
        }
        let width = states.width();
        states.read(sequences.len(), |values| {
            let states = sequences.into_iter().zip(values.chunks_exact(width));
            let states = states
                .map(|((seq, num_tokens), values)| (seq, State { num_tokens, values: values.to_vec() }));
            predictions.states.extend(states);
        })
    }

    /// See [`Runner::draft`](super::Runner::draft).
    pub(super) fn try_draft(&mut self, request: &DraftRequest<'_>, draft: &mut Draft) -> Result<()> {
        let Self { model, kv_cache, sampler, predictions, .. } = self;
        let Predictions { states, first_spare_block, seconds_per_token, batch, logits } = predictions;
        let num_known = request.input.prompt_token_ids.len() + request.input.output_token_ids.len();
        let state = states.get(&request.seq).filter(|state| state.num_tokens == num_known);
        let (Some(mtp), Some(state)) = (model.mtp(), state) else { return Ok(()) };
        let (block_size, num_blocks) = (kv_cache.block_size(), kv_cache.num_blocks());
        let block = |index: usize| match request.block_table.get(index) {
            Some(block) => Some(block.0),
            None => {
                let spare = (*first_spare_block)? + (index - request.block_table.len());
                (spare < num_blocks).then_some(spare as u32)
            }
        };
        let start = Instant::now();
        let mut output_token_ids = request.input.output_token_ids.to_vec();
        let mut chance = 1.0;
        mtp.predict(&state.values)?.read(1, |values| {
            logits.clear();
            logits.extend_from_slice(values);
        })?;
        for index in 0..request.max_tokens {
            let input = SamplerInput { output_token_ids: &output_token_ids, allowed: None, ..request.input };
            let Some(token) = sampler.sample(logits, &input) else { break };
            if request.input.end_token_ids.contains(&token.token_id) {
                break;
            }
            draft.push(token.token_id, request.chance);
            output_token_ids.push(token.token_id);
            chance *= request.chance;
            // The first one is predicted from the last token but one.
            let position = num_known - 1 + index;
            let is_last = index + 1 == request.max_tokens || chance < LEAST_CHANCE;
            let Some(own) = block(position / block_size).filter(|_| !is_last) else { break };
            batch.clear();
            batch.attention.block_size = block_size;
            batch.token_ids.push(token.token_id);
            batch.positions.push(position as u32);
            batch.attention.slot_mapping.push(own as usize * block_size + position % block_size);
            batch.want(0, Wanted::Logits);
            let positions = position..position + 1;
            batch.attention.push(positions, 0, RowMode::Decode, |index| block(index).unwrap_or(own));
            mtp.predict_after(batch, kv_cache)?.read(1, |values| {
                logits.clear();
                logits.extend_from_slice(values);
            })?;
        }
        seconds_per_token.learn(start.elapsed(), draft.len());
        Ok(())
    }
}
