//! Drafts by a second, smaller model of the same vocabulary.
//!
//! It draws with the random numbers of the model that decides, so that the two agree as often as their distributions let them.
//! It computes one sequence at a time: many sequences at once are not worth a draft.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::Result;
use crate::models::{CausalLm, InputBatch};
use crate::ops::{EXPANDED_GROUP, KvCache, RowForm};
use crate::sampling::{Sampler, SamplerInput, SamplingParams};
use crate::speculation::{
    Acceptance, Draft, DraftCost, DraftSource, DraftedSequence, Drafter, Evidence, LEAST_CHANCE,
    OwnAcceptance, SecondsPerToken,
};

/// Tokens of a prompt that it computes at once: a step waits for them.
const MAX_CHUNK: usize = 128;

/// A model that drafts, with a cache of its own.
pub struct DraftModel {
    state: Arc<Mutex<State>>,
    acceptance: Arc<Acceptance>,
}

struct State {
    model: Box<dyn CausalLm>,
    cache: KvCache,
    free_blocks: Vec<u32>,
    /// Most tokens of a step.
    max_chunk: usize,
    sampler: Sampler,
    /// Of the token that was computed last.
    logits: Vec<f32>,
    /// Kept for its memory.
    batch: InputBatch,
    seconds_per_token: SecondsPerToken,
}

impl std::fmt::Debug for DraftModel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DraftModel").finish_non_exhaustive()
    }
}

impl DraftModel {
    /// A model with this cache, which computes up to `max_chunk` tokens at once, and no more than it may hold a step up for.
    #[must_use]
    pub fn new(model: Box<dyn CausalLm>, cache: KvCache, max_chunk: usize) -> Self {
        let state = State {
            free_blocks: (0..cache.num_blocks() as u32).collect(),
            model,
            cache,
            max_chunk: max_chunk.clamp(1, MAX_CHUNK),
            sampler: Sampler::default(),
            logits: Vec::new(),
            batch: InputBatch::default(),
            seconds_per_token: SecondsPerToken::default(),
        };
        Self { state: Arc::new(Mutex::new(state)), acceptance: Arc::default() }
    }
}

impl DraftSource for DraftModel {
    fn start(&self, sequence: &DraftedSequence<'_>) -> Box<dyn Drafter> {
        Box::new(ModelDrafter {
            state: Arc::clone(&self.state),
            all: Arc::clone(&self.acceptance),
            own: OwnAcceptance::default(),
            // Nobody reads the log-probabilities of a draft.
            params: SamplingParams { logprobs: None, ..sequence.params.clone() },
            seed: sequence.seed,
            stream: sequence.stream,
            end_token_ids: sequence.end_token_ids.to_vec(),
            num_to_skip: sequence.num_predicted,
            num_prompt_tokens: sequence.num_prompt_tokens,
            tokens: Vec::new(),
            computed: Vec::new(),
            blocks: Vec::new(),
        })
    }
}

/// The drafter of a sequence.
struct ModelDrafter {
    state: Arc<Mutex<State>>,
    all: Arc<Acceptance>,
    own: OwnAcceptance,
    params: SamplingParams,
    seed: u64,
    stream: u32,
    end_token_ids: Vec<u32>,
    /// Tokens of a prediction, which are no part of the sequence.
    num_to_skip: usize,
    num_prompt_tokens: usize,
    tokens: Vec<u32>,
    /// The tokens whose keys and values are in the cache, drafted ones among them.
    computed: Vec<u32>,
    blocks: Vec<u32>,
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drafter for ModelDrafter {
    fn extend(&mut self, token_ids: &[u32]) {
        let num_skipped = self.num_to_skip.min(token_ids.len());
        self.num_to_skip -= num_skipped;
        self.tokens.extend_from_slice(&token_ids[num_skipped..]);
    }

    fn cost(&mut self) -> Option<DraftCost> {
        let chance = self.own.chance(&self.all, Evidence::Model);
        Some(DraftCost { chance, seconds_per_token: lock(&self.state).seconds_per_token.get() })
    }

    fn draft(&mut self, max_tokens: usize, draft: &mut Draft) {
        let num_known = self.tokens.len();
        // A model that fails drafts nothing; the other one goes on.
        let _ = self.try_draft(max_tokens, draft);
        self.tokens.truncate(num_known);
    }

    fn learn(&mut self, num_tried: usize, num_right: usize) {
        self.own.learn(&self.all, Evidence::Model, num_tried, num_right);
    }
}

impl ModelDrafter {
    fn try_draft(&mut self, max_tokens: usize, draft: &mut Draft) -> Result<()> {
        let state = Arc::clone(&self.state);
        let mut state = lock(&state);
        let is_alike = |(computed, token): &(&u32, &u32)| computed == token;
        let num_alike = self.computed.iter().zip(&self.tokens).take_while(is_alike).count();
        // The logits of the last token are wanted.
        self.computed.truncate(num_alike.min(self.tokens.len().saturating_sub(1)));
        let num_left = self.tokens.len() - self.computed.len();
        let chunk = num_left.min(state.max_chunk);
        if num_left == 0 || !self.compute(&mut state, chunk)? {
            return Ok(());
        }
        if self.computed.len() < self.tokens.len() {
            // A long prompt takes several steps.
            return Ok(());
        }
        let chance = self.own.chance(&self.all, Evidence::Model);
        let mut chance_of_all = chance;
        let start = Instant::now();
        for index in 0..max_tokens {
            let Some(token_id) = self.sample(&mut state) else { break };
            if self.end_token_ids.contains(&token_id) {
                break;
            }
            draft.push(token_id, chance);
            self.tokens.push(token_id);
            chance_of_all *= chance;
            let is_last = index + 1 == max_tokens || chance_of_all < LEAST_CHANCE;
            if is_last || !self.compute(&mut state, 1)? {
                break;
            }
        }
        state.seconds_per_token.learn(start.elapsed(), draft.len());
        Ok(())
    }

    fn sample(&self, state: &mut State) -> Option<u32> {
        let input = SamplerInput {
            params: &self.params,
            seed: self.seed,
            stream: self.stream,
            prompt_token_ids: &self.tokens[..self.num_prompt_tokens],
            output_token_ids: &self.tokens[self.num_prompt_tokens..],
            end_token_ids: &self.end_token_ids,
            allowed: None,
        };
        let State { sampler, logits, .. } = state;
        sampler.sample(logits, &input).map(|token| token.token_id)
    }

    /// Computes the next `num_tokens` tokens and keeps the logits of the last one; false if there is no room for them.
    fn compute(&mut self, state: &mut State, num_tokens: usize) -> Result<bool> {
        let block_size = state.cache.block_size();
        let (start, end) = (self.computed.len(), self.computed.len() + num_tokens);
        let wanted = end.div_ceil(block_size).saturating_sub(self.blocks.len());
        if wanted > state.free_blocks.len() {
            return Ok(false);
        }
        let first = state.free_blocks.len() - wanted;
        self.blocks.extend(state.free_blocks.drain(first..));
        let State { model, cache, batch, logits, .. } = state;
        batch.clear();
        batch.attention.block_size = block_size;
        for position in start..end {
            batch.token_ids.push(self.tokens[position]);
            batch.positions.push(position as u32);
            let block = self.blocks[position / block_size] as usize;
            batch.attention.slot_mapping.push(block * block_size + position % block_size);
        }
        batch.logits_indices.push(num_tokens - 1);
        let has_groups = model.config().latent_attention.is_some();
        let num_grouped =
            if has_groups { self.num_prompt_tokens / EXPANDED_GROUP * EXPANDED_GROUP } else { 0 };
        batch.attention.push(start..end, num_grouped, RowForm::of(num_tokens), |index| self.blocks[index]);
        let row = model.forward(batch, cache)?;
        row.read(1, |values| {
            logits.clear();
            logits.extend_from_slice(values);
        })?;
        self.computed.extend_from_slice(&self.tokens[start..end]);
        Ok(true)
    }
}

impl Drop for ModelDrafter {
    fn drop(&mut self) {
        lock(&self.state).free_blocks.append(&mut self.blocks);
    }
}
