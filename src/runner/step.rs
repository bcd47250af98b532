//! The inputs and results of a runner's step.

use crate::Result;
use crate::kv_cache::BlockId;
use crate::models::Wanted;
use crate::ops::KvCache;
use crate::sampling::{RankedLogprobs, SampledToken, SamplerInput, TokenMask};
use crate::scheduler::{BlockCopy, SeqId};
use crate::speculation::Draft;

/// One step, with everything that it needs resolved.
#[derive(Debug)]
pub struct Step<'a> {
    /// Scheduled sequences; their copies are carried out in order before anything is computed.
    pub sequences: Vec<ScheduledSequence<'a>>,
    /// For each block its slot in layers with a window, if these have fewer blocks; otherwise empty. Blocks that no
    /// sequence reads there have a number that is no slot.
    pub window_slots: &'a [u32],
    /// Tokens to generate for each sequence. Above 1 only if every sequence has one token and one sample.
    pub num_steps: usize,
    /// Whether the runner may queue the token after that of each sequence before these are read (see
    /// [`SchedulerOutput::may_queue_next`](crate::scheduler::SchedulerOutput::may_queue_next)).
    pub may_queue_next: bool,
    /// Whether the model may draft after this step, so that its MTP block is computed for the tokens of the step. Then the next
    /// step is not queued.
    pub may_draft_next: bool,
}

impl<'a> Step<'a> {
    /// The sequences with their indices, in the order of the batch: those of which hidden states are wanted come last.
    pub fn in_batch_order(&self) -> impl Iterator<Item = (usize, &ScheduledSequence<'a>)> {
        let all = || self.sequences.iter().enumerate();
        let is_last = |scheduled: &ScheduledSequence<'_>| scheduled.wanted == Wanted::Hidden;
        all().filter(move |(_, own)| !is_last(own)).chain(all().filter(move |(_, own)| is_last(own)))
    }
}

/// Tokens of a sequence to compute.
#[derive(Debug)]
pub struct ScheduledSequence<'a> {
    /// Their sequence.
    pub seq: SeqId,
    /// All tokens of the sequence so far, and after them the drafted ones.
    pub token_ids: &'a [u32],
    /// Position of the first token to compute.
    pub start: usize,
    /// Tokens to compute.
    pub len: usize,
    /// The next tokens; the last ones, if any, are drafted.
    pub draft: StepDraft<'a>,
    /// The sequence's tokens before this position are computed in groups, the others one by one (see
    /// [`EngineConfig::prompt_group`](crate::config::EngineConfig::prompt_group)).
    pub num_grouped_tokens: usize,
    /// Blocks for all positions up to `start + len + num_steps - 1`, and for one more if the next step may be queued.
    pub block_table: &'a [BlockId],
    /// Copy this block first.
    pub copy: Option<BlockCopy>,
    /// Draws to make from the last token's logits; with drafted tokens one, which is made after each of the tokens (see
    /// [`Self::input`]).
    pub samples: Vec<SamplerInput<'a>>,
    /// What is wanted of the last token, if there are draws to make: the logits for them, or its hidden state instead of
    /// them.
    pub wanted: Wanted,
    /// Return the logits of all computed tokens.
    pub all_logits: bool,
    /// Return the log-probability of each token after a computed one, as far as there is one, and of this
    /// many most likely tokens instead.
    pub prompt_logprobs: Option<usize>,
}

/// The drafted tokens of a scheduled sequence.
#[derive(Debug, Clone, Copy, Default)]
pub struct StepDraft<'a> {
    /// How many.
    pub num_tokens: usize,
    /// The allowed tokens of a constraint after each of them; none without a constraint.
    pub allowed: &'a [TokenMask],
}

impl<'a> ScheduledSequence<'a> {
    /// The computed tokens whose logits the sequence needs, as indices below `len`, ascending.
    pub fn rows_with_logits(&self) -> impl Iterator<Item = usize> + '_ {
        let first_draw = self.len.saturating_sub(1 + self.draft.num_tokens);
        let first = if self.returns_logits() { 0 } else { first_draw };
        (first..self.len).filter(move |row| self.returns_logits() || self.samples_at(row - first_draw))
    }

    /// Whether the hidden state of the last token is wanted.
    #[must_use]
    pub fn wants_hidden(&self) -> bool {
        self.wanted == Wanted::Hidden && !self.samples.is_empty()
    }

    /// Rows of logits that the sequence needs.
    #[must_use]
    pub fn num_logits(&self) -> usize {
        self.rows_with_logits().count()
    }

    fn returns_logits(&self) -> bool {
        self.all_logits || self.prompt_logprobs.is_some()
    }

    /// Whether logits of the token before draw `index` decide something.
    fn samples_at(&self, index: usize) -> bool {
        match self.draft.num_tokens {
            _ if self.wanted == Wanted::Hidden => false,
            0 => (0..self.samples.len()).any(|draw| self.forced(draw).is_none()),
            _ => self.forced(index).is_none(),
        }
    }

    /// The token of draw `index` if a constraint allows no other and the logits are not needed for anything else.
    #[must_use]
    pub fn forced(&self, index: usize) -> Option<u32> {
        let input = self.input(index);
        let is_decided = input.params.logprobs.is_none() && !self.returns_logits();
        input.allowed.filter(|_| is_decided).and_then(TokenMask::only)
    }

    /// Draws from logits of the sequence: each sample, and with drafted tokens the one after each token.
    #[must_use]
    pub fn num_draws(&self) -> usize {
        if self.draft.num_tokens == 0 { self.samples.len() } else { 1 + self.draft.num_tokens }
    }

    /// The sampler's inputs for draw `index`. The `index` drafted tokens before it count as tokens of the output, as if
    /// they had been sampled.
    #[must_use]
    pub fn input(&self, index: usize) -> SamplerInput<'a> {
        if self.draft.num_tokens == 0 || index == 0 {
            return self.samples[index];
        }
        let input = self.samples[0];
        let num_prompt_tokens = input.prompt_token_ids.len();
        let end = num_prompt_tokens + input.output_token_ids.len() + index;
        SamplerInput {
            output_token_ids: &self.token_ids[num_prompt_tokens..end],
            allowed: self.draft.allowed.get(index - 1),
            ..input
        }
    }

    /// The drafted token at draw `index`, if there is one.
    #[must_use]
    pub fn drafted(&self, index: usize) -> Option<u32> {
        let first = self.start + self.len - self.draft.num_tokens;
        (index < self.draft.num_tokens).then(|| self.token_ids[first + index])
    }
}

/// The results of a scheduled sequence.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SequenceOutput {
    /// For each sample its tokens: one for each step; with a draft the drafted ones as far as they were drawn, and the first
    /// that was drawn instead of another one or after all. `None` for logits that are no numbers, which ends the list.
    /// A runner may leave out the tokens after one that ends the sequence.
    pub samples: Vec<Vec<Option<SampledToken>>>,
    /// If all logits were requested: `len × vocab_size` f32.
    pub logits: Vec<f32>,
    /// If the hidden state of the last token was wanted: `hidden_size` f32.
    pub hidden: Option<Vec<f32>>,
    /// If log-probabilities were requested: those of the tokens at `start + 1..`, at most `len`.
    pub prompt_logprobs: Vec<RankedLogprobs>,
}

/// A sequence for which its own model drafts.
#[derive(Debug, Clone, Copy)]
pub struct DraftRequest<'a> {
    /// Which.
    pub seq: SeqId,
    /// Blocks for all of its tokens but the last, or more.
    pub block_table: &'a [BlockId],
    /// The sampler's inputs for the next token.
    pub input: SamplerInput<'a>,
    /// Most tokens to draft.
    pub max_tokens: usize,
    /// How likely each of them is, if those before it are right.
    pub chance: f32,
}

/// Computes steps: the engine's view of a model on a device.
pub trait Runner: Send {
    /// Computes a step; one output for each scheduled sequence, in order.
    ///
    /// # Errors
    /// If the step failed as a whole. The engine then ends the sequences of this step and continues.
    fn execute(&mut self, step: &Step<'_>) -> Result<Vec<SequenceOutput>>;

    /// The most tokens of a step in which a token's results have the same bits as alone. Steps have drafted tokens only within
    /// this.
    fn max_exact_tokens(&self) -> usize {
        usize::MAX
    }

    /// Adds up to [`DraftRequest::max_tokens`] tokens to the empty `draft` that its model's MTP block predicts after a sequence.
    /// None without such a block, or if the last step had no [`Step::may_draft_next`] or has not sampled the sequence's last token.
    fn draft(&mut self, _row: &DraftRequest<'_>, _draft: &mut Draft) {}

    /// The time of a token of [`draft`](Self::draft); 0 if it is not known yet.
    fn seconds_per_drafted_token(&self) -> f64 {
        0.0
    }

    /// Its cache, if the contents of blocks can be read and written.
    fn kv_cache(&mut self) -> Option<&mut KvCache> {
        None
    }

    /// Whether it supports async scheduling, so that the scheduler reserves blocks for it.
    fn can_queue_next_step(&self) -> bool {
        false
    }

    /// Whether it has queued the step after the last one: the next step must have these sequences,
    /// as far as they have not ended.
    fn has_queued_step(&self) -> bool {
        false
    }

    /// Whether the last step may still be running, since none of its results was read.
    fn is_computing(&self) -> bool {
        false
    }
}
