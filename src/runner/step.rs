//! What the engine asks of a runner in a step, and what it gets back.

use crate::Result;
use crate::kv_cache::BlockId;
use crate::ops::KvCache;
use crate::sampling::{RankedLogprobs, SampledToken, SamplerInput, TokenMask};
use crate::scheduler::{BlockCopy, SeqId};
use crate::speculation::Draft;

/// One step, with everything that it needs resolved.
#[derive(Debug)]
pub struct Step<'a> {
    /// Rows; their copies are carried out in order before anything is computed.
    pub rows: Vec<StepRow<'a>>,
    /// Tokens to generate for each row. Above 1 only if every row has one token and one sample.
    pub num_steps: usize,
    /// Whether the runner may begin with the token behind that of each row before anybody has looked at these (see
    /// [`SchedulerOutput::looks_ahead`](crate::scheduler::SchedulerOutput::looks_ahead)).
    pub looks_ahead: bool,
}

/// Part of a sequence to compute.
#[derive(Debug)]
pub struct StepRow<'a> {
    /// Whose part.
    pub seq: SeqId,
    /// All tokens of the sequence so far, and behind them the row's drafted ones.
    pub token_ids: &'a [u32],
    /// Position of the first token to compute.
    pub start: usize,
    /// Tokens to compute.
    pub len: usize,
    /// What may follow: the last tokens of the row, if there are any, are drafted.
    pub draft: StepDraft<'a>,
    /// The sequence's tokens before this position are computed as parts of groups, the others by themselves (see
    /// [`EngineConfig::prompt_group`](crate::config::EngineConfig::prompt_group)).
    pub num_grouped_tokens: usize,
    /// Blocks for all positions up to `start + len + num_steps - 1`, and for one more if the step looks ahead.
    pub block_table: &'a [BlockId],
    /// Copy this block first.
    pub copy: Option<BlockCopy>,
    /// Draws to make from the last token's logits; with drafted tokens one, which is made behind each of the tokens (see
    /// [`Self::input`]).
    pub samples: Vec<SamplerInput<'a>>,
    /// Return the logits of all the row's tokens.
    pub all_logits: bool,
    /// Return the log-probability of each token after one of the row's, as far as there is one, and of this
    /// many most likely tokens in its place.
    pub prompt_logprobs: Option<usize>,
}

/// The drafted tokens of a row.
#[derive(Debug, Clone, Copy, Default)]
pub struct StepDraft<'a> {
    /// How many.
    pub num_tokens: usize,
    /// What a constraint allows behind each of them; none without a constraint.
    pub allowed: &'a [TokenMask],
}

impl<'a> StepRow<'a> {
    /// Rows of logits that the row takes up.
    #[must_use]
    pub fn num_logits(&self) -> usize {
        match (self.all_logits || self.prompt_logprobs.is_some(), self.samples.is_empty()) {
            (true, _) => self.len,
            (false, true) => 0,
            (false, false) => 1 + self.draft.num_tokens,
        }
    }

    /// Draws from logits of the row: each sample, and with drafted tokens the one behind each token.
    #[must_use]
    pub fn num_draws(&self) -> usize {
        if self.draft.num_tokens == 0 { self.samples.len() } else { 1 + self.draft.num_tokens }
    }

    /// What the sampler has to know for draw `index`. Behind `index` drafted tokens these are tokens of the output, as if they
    /// had been sampled.
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

    /// The token that was drafted in the place of draw `index`, if there is one.
    #[must_use]
    pub fn drafted(&self, index: usize) -> Option<u32> {
        let first = self.start + self.len - self.draft.num_tokens;
        (index < self.draft.num_tokens).then(|| self.token_ids[first + index])
    }
}

/// What a row gave.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RowOutput {
    /// For each sample its tokens: one for each step; with a draft the drafted ones as far as they were drawn, and the first
    /// that was drawn in place of another one or behind all. `None` for logits that are no numbers, which ends the list.
    /// A runner may leave out the tokens after one that ends the sequence.
    pub samples: Vec<Vec<Option<SampledToken>>>,
    /// If all logits were wanted: `len × vocab_size` f32.
    pub logits: Vec<f32>,
    /// If log-probabilities were wanted: those of the tokens at `start + 1..`, at most `len`.
    pub prompt_logprobs: Vec<RankedLogprobs>,
}

/// A sequence that its own model is to draft for.
#[derive(Debug, Clone, Copy)]
pub struct DraftRow<'a> {
    /// Which.
    pub seq: SeqId,
    /// Blocks for all of its tokens but the last, or more.
    pub block_table: &'a [BlockId],
    /// What the sampler has to know for the next token.
    pub input: SamplerInput<'a>,
    /// Most tokens to draft.
    pub max_tokens: usize,
    /// How likely each of them is, if those before it are right.
    pub chance: f32,
}

/// Computes steps: the engine's view of a model on a device.
pub trait Runner: Send {
    /// Computes a step; one output for each row, in order.
    ///
    /// # Errors
    /// If the step failed as a whole. The engine then ends the sequences of this step and goes on.
    fn execute(&mut self, step: &Step<'_>) -> Result<Vec<RowOutput>>;

    /// The most tokens of a step in which a token's results have the same bits as alone. Steps have drafted tokens only within
    /// this.
    fn max_exact_tokens(&self) -> usize {
        usize::MAX
    }

    /// Adds up to [`DraftRow::max_tokens`] tokens to the empty `draft` that its model's MTP block predicts behind a sequence.
    /// None without such a block, or if the last step has not sampled the sequence's last token.
    fn draft(&mut self, _row: &DraftRow<'_>, _draft: &mut Draft) {}

    /// What a token of [`draft`](Self::draft) takes; 0 if that is not known yet.
    fn seconds_per_drafted_token(&self) -> f64 {
        0.0
    }

    /// Its cache, if the contents of blocks can be read and written.
    fn kv_cache(&mut self) -> Option<&mut KvCache> {
        None
    }

    /// Whether it can look ahead at all, so that room is to be kept for it.
    fn can_look_ahead(&self) -> bool {
        false
    }

    /// Whether it has continued the rows of the last step, which looked ahead: the next step has to be one of these rows,
    /// as far as there still is a use for them.
    fn has_continued(&self) -> bool {
        false
    }

    /// Whether the last step may still be computed, since nothing of it was read.
    fn is_computing(&self) -> bool {
        false
    }
}
