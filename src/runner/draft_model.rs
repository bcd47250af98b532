//! Drafts by a second, smaller model of the same vocabulary.
//!
//! It draws with the random numbers of the model that decides, so that the two agree as often as their distributions let them.
//! It computes one sequence at a time: many sequences at once are not worth a draft.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::{ModelRunner, Runner, ScheduledSequence, Step, StepDraft, Wanted};
use crate::Result;
use crate::kv_cache::BlockId;
use crate::models::CausalLm;
use crate::ops::{EXPANDED_GROUP, KvCache};
use crate::sampling::{SamplerInput, SamplingParams};
use crate::scheduler::SeqId;
use crate::speculation::{
    Acceptance, Draft, DraftCost, DraftSource, DraftedSequence, Drafter, Evidence, LEAST_CHANCE,
    OwnAcceptance, SecondsPerToken,
};

/// Tokens of a prompt that it computes at once: a step waits for them.
const MAX_CHUNK: usize = 128;

/// A draft model with its own cache.
pub struct DraftModel {
    state: Arc<Mutex<State>>,
    acceptance: Arc<Acceptance>,
}

struct State {
    runner: ModelRunner,
    free_blocks: Vec<BlockId>,
    /// Most tokens of a step.
    max_chunk: usize,
    /// Whether the tokens of a prompt are computed in groups.
    has_groups: bool,
    seconds_per_token: SecondsPerToken,
}

impl std::fmt::Debug for DraftModel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DraftModel").finish_non_exhaustive()
    }
}

impl DraftModel {
    /// A model with this cache, which computes up to `max_chunk` tokens at once, and no more than it may hold a step up for.
    ///
    /// # Errors
    /// As [`ModelRunner::new`].
    pub fn new(model: Box<dyn CausalLm>, cache: KvCache, max_chunk: usize) -> Result<Self> {
        let state = State {
            free_blocks: (0..cache.num_blocks() as u32).map(BlockId).collect(),
            has_groups: model.config().latent_attention.is_some(),
            runner: ModelRunner::new(model, cache)?,
            max_chunk: max_chunk.clamp(1, MAX_CHUNK),
            seconds_per_token: SecondsPerToken::default(),
        };
        Ok(Self { state: Arc::new(Mutex::new(state)), acceptance: Arc::default() })
    }
}

impl DraftSource for DraftModel {
    fn start(&self, sequence: &DraftedSequence<'_>) -> Box<dyn Drafter> {
        Box::new(ModelDrafter {
            state: Arc::clone(&self.state),
            all: Arc::clone(&self.acceptance),
            own: OwnAcceptance::default(),
            // The log-probabilities of a draft are not read.
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
    /// Tokens of a prediction, which do not belong to the sequence.
    num_to_skip: usize,
    num_prompt_tokens: usize,
    tokens: Vec<u32>,
    /// The tokens whose keys and values are in the cache, drafted ones among them.
    computed: Vec<u32>,
    blocks: Vec<BlockId>,
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
        // A failed draft model drafts nothing; the main one continues.
        let _ = self.try_draft(max_tokens, draft);
    }

    fn learn(&mut self, num_tried: usize, num_right: usize) {
        self.own.learn(&self.all, Evidence::Model, num_tried, num_right);
    }
}

impl ModelDrafter {
    fn try_draft(&mut self, max_tokens: usize, draft: &mut Draft) -> Result<()> {
        let chance = self.own.chance(&self.all, Evidence::Model);
        let Some(last) = self.tokens.len().checked_sub(1) else { return Ok(()) };
        let max_tokens = num_likely(chance, max_tokens);
        let state = Arc::clone(&self.state);
        let mut state = lock(&state);
        let is_alike = |(computed, token): &(&u32, &u32)| computed == token;
        let num_alike = self.computed.iter().zip(&self.tokens).take_while(is_alike).count();
        self.computed.truncate(num_alike.min(last));
        let start = Instant::now();
        let num_left = last - self.computed.len();
        if num_left >= state.max_chunk {
            // A long prompt takes several steps.
            let chunk = state.max_chunk;
            self.compute(&mut state, chunk)?;
            return Ok(());
        }
        self.draw(&mut state, max_tokens, chance, draft)?;
        // The time of drafts that begin with a chunk of the prompt is not typical.
        if num_left <= max_tokens {
            state.seconds_per_token.learn(start.elapsed(), draft.len());
        }
        Ok(())
    }

    /// Reserves blocks for `num_tokens` tokens; false if too few are free.
    fn reserve(&mut self, state: &mut State, num_tokens: usize) -> bool {
        let block_size = state.runner.block_size();
        let wanted = num_tokens.div_ceil(block_size).saturating_sub(self.blocks.len());
        let Some(first) = state.free_blocks.len().checked_sub(wanted) else { return false };
        self.blocks.extend(state.free_blocks.drain(first..));
        true
    }

    /// A step with `len` tokens after those that are computed.
    fn step<'a>(
        &'a self,
        state: &State,
        len: usize,
        samples: Vec<SamplerInput<'a>>,
        num_steps: usize,
    ) -> Step<'a> {
        let num_grouped_tokens = match state.has_groups {
            true => self.num_prompt_tokens / EXPANDED_GROUP * EXPANDED_GROUP,
            false => 0,
        };
        let scheduled = ScheduledSequence {
            seq: SeqId(0),
            token_ids: &self.tokens,
            start: self.computed.len(),
            len,
            draft: StepDraft::default(),
            num_grouped_tokens,
            block_table: &self.blocks,
            copy: None,
            samples,
            wanted: Wanted::Logits,
            all_logits: false,
            prompt_logprobs: None,
        };
        Step {
            sequences: vec![scheduled],
            window_slots: &[],
            num_steps,
            may_queue_next: false,
            may_draft_next: false,
        }
    }

    /// Computes the next tokens, if the cache has space for them.
    fn compute(&mut self, state: &mut State, num_tokens: usize) -> Result<()> {
        let (start, end) = (self.computed.len(), self.computed.len() + num_tokens);
        if self.reserve(state, end) {
            let step = self.step(state, num_tokens, Vec::new(), 1);
            state.runner.execute(&step)?;
            self.computed.extend_from_slice(&self.tokens[start..end]);
        }
        Ok(())
    }

    /// Adds the tokens after the last one to the draft. One step computes the tokens that are not in the cache and draws
    /// all of the draft, so a device that draws itself is waited for once.
    fn draw(&mut self, state: &mut State, max_tokens: usize, chance: f32, draft: &mut Draft) -> Result<()> {
        if max_tokens == 0 || !self.reserve(state, self.tokens.len() + max_tokens - 1) {
            return Ok(());
        }
        let input = SamplerInput {
            params: &self.params,
            seed: self.seed,
            stream: self.stream,
            prompt_token_ids: &self.tokens[..self.num_prompt_tokens],
            output_token_ids: &self.tokens[self.num_prompt_tokens..],
            end_token_ids: &self.end_token_ids,
            allowed: None,
        };
        let step = self.step(state, self.tokens.len() - self.computed.len(), vec![input], max_tokens);
        let mut outputs = state.runner.execute(&step)?;
        let tokens = outputs.pop().and_then(|mut output| output.samples.pop()).unwrap_or_default();
        self.computed.extend_from_slice(&self.tokens[self.computed.len()..]);
        for token in tokens.into_iter().map_while(|token| token) {
            if self.end_token_ids.contains(&token.token_id) {
                break;
            }
            draft.push(token.token_id, chance);
            self.computed.push(token.token_id);
        }
        // The last one was sampled and not computed, or tokens after it are unknown.
        self.computed.pop();
        Ok(())
    }
}

/// How many tokens are worth drafting, of this many at most, if each is right with this chance when those before it are.
fn num_likely(chance: f32, max_tokens: usize) -> usize {
    let mut chance_of_all = 1.0;
    let is_likely = |_: &usize| {
        let is_likely = chance_of_all >= LEAST_CHANCE;
        chance_of_all *= chance;
        is_likely
    };
    (0..max_tokens).take_while(is_likely).count()
}

impl Drop for ModelDrafter {
    fn drop(&mut self) {
        lock(&self.state).free_blocks.append(&mut self.blocks);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_draft_ends_where_it_has_hardly_a_chance() {
        assert_eq!(num_likely(1.0, 8), 8);
        assert_eq!(num_likely(0.9, 4), 4);
        // 0.6, 0.36, 0.22: the third one is still tried, the fourth is not.
        assert_eq!(num_likely(0.6, 8), 3);
        assert_eq!(num_likely(0.0, 8), 1);
        assert_eq!(num_likely(0.9, 0), 0);
    }
}
