//! The plan of a step.

use super::SeqId;
use crate::kv_cache::BlockId;

/// Copy the contents of one block to another before the step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockCopy {
    /// Read.
    pub source: BlockId,
    /// Written; belongs to the row's sequence alone.
    pub target: BlockId,
}

/// Part of a sequence to compute: its tokens `start..start + len`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScheduledRow {
    /// Whose tokens.
    pub seq: SeqId,
    /// Position of the first token.
    pub start: usize,
    /// Tokens, at least 1.
    pub len: usize,
    /// Of these the last ones are drafted: whether they follow is not known yet. Then the first one is the last known token
    /// of the sequence, and a token is sampled behind each, for the sequence alone, up to the first that is not the drafted
    /// one.
    pub num_draft_tokens: usize,
    /// The sequences to sample a token for from the last token's logits: none while the prompt is
    /// incomplete, else the sequence itself, and at the end of the prompt also its forks.
    pub samples: Vec<SeqId>,
    /// The row writes into a block that others still read: copy it first.
    pub copy: Option<BlockCopy>,
}

/// What to do in a step.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SchedulerOutput {
    /// Rows in the order of scheduling. Copies are carried out in this order before anything else.
    pub rows: Vec<ScheduledRow>,
    /// How many tokens to generate for each row before coming back. Above 1 only if every row is a
    /// single token that is sampled for its own sequence; blocks for all of them are reserved.
    pub num_steps: usize,
    /// Whether each row may be continued before its token is known: it is a single token that is sampled for its own
    /// sequence, and there are a token more that it may have and a block for it. If the runner does so, the next plan
    /// continues these rows (see [`Scheduler::continue_rows`](super::Scheduler::continue_rows)).
    pub looks_ahead: bool,
    /// Sequences whose blocks were taken.
    pub preempted: Vec<SeqId>,
}

impl SchedulerOutput {
    /// Tokens in the step.
    #[must_use]
    pub fn num_scheduled_tokens(&self) -> usize {
        self.rows.iter().map(|row| row.len).sum()
    }
}
