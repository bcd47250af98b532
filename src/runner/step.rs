//! What the engine asks of a runner in a step, and what it gets back.

use crate::Result;
use crate::kv_cache::BlockId;
use crate::sampling::{RankedLogprobs, SampledToken, SamplerInput};
use crate::scheduler::{BlockCopy, SeqId};

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
    /// All tokens of the sequence so far.
    pub token_ids: &'a [u32],
    /// Position of the first token to compute.
    pub start: usize,
    /// Tokens to compute.
    pub len: usize,
    /// The sequence's tokens before this position are computed as parts of groups, the others by themselves (see
    /// [`EngineConfig::prompt_group`](crate::config::EngineConfig::prompt_group)).
    pub num_grouped_tokens: usize,
    /// Blocks for all positions up to `start + len + num_steps - 1`, and for one more if the step looks ahead.
    pub block_table: &'a [BlockId],
    /// Copy this block first.
    pub copy: Option<BlockCopy>,
    /// Draws to make from the last token's logits.
    pub samples: Vec<SamplerInput<'a>>,
    /// Return the logits of all the row's tokens.
    pub all_logits: bool,
    /// Return the log-probability of each token after one of the row's, as far as there is one, and of this
    /// many most likely tokens in its place.
    pub prompt_logprobs: Option<usize>,
}

impl StepRow<'_> {
    /// Rows of logits that the row takes up.
    #[must_use]
    pub fn num_logits(&self) -> usize {
        match (self.all_logits || self.prompt_logprobs.is_some(), self.samples.is_empty()) {
            (true, _) => self.len,
            (false, true) => 0,
            (false, false) => 1,
        }
    }
}

/// What a row gave.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RowOutput {
    /// For each draw its tokens, one for each step; `None` for logits that are no numbers, which ends
    /// the list. A runner may leave out the tokens after one that ends the sequence.
    pub samples: Vec<Vec<Option<SampledToken>>>,
    /// If all logits were wanted: `len × vocab_size` f32.
    pub logits: Vec<f32>,
    /// If log-probabilities were wanted: those of the tokens at `start + 1..`, at most `len`.
    pub prompt_logprobs: Vec<RankedLogprobs>,
}

/// Computes steps: the engine's view of a model on a device.
pub trait Runner: Send {
    /// Computes a step; one output for each row, in order.
    ///
    /// # Errors
    /// If the step failed as a whole. The engine then ends the sequences of this step and goes on.
    fn execute(&mut self, step: &Step<'_>) -> Result<Vec<RowOutput>>;

    /// Whether it can look ahead at all, so that room is to be kept for it.
    fn can_look_ahead(&self) -> bool {
        false
    }

    /// Whether it has continued the rows of the last step, which looked ahead: the next step has to be one of these rows,
    /// as far as there still is a use for them.
    fn has_continued(&self) -> bool {
        false
    }
}
