//! The plan of a step.

use super::SeqId;
use crate::kv_cache::BlockId;

/// Copy the contents of one block to another before the step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockCopy {
    /// Read.
    pub source: BlockId,
    /// Written; belongs to this sequence alone.
    pub target: BlockId,
    /// The same in layers with a window, by their slots, if these are others.
    pub window_slots: Option<(u32, u32)>,
}

/// Planned tokens of a sequence: `start..start + len`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedSequence {
    /// Their sequence.
    pub seq: SeqId,
    /// Position of the first token.
    pub start: usize,
    /// Tokens, at least 1.
    pub len: usize,
    /// The last of these are drafted: their acceptance is not known yet. The first one is then the last known token of
    /// the sequence, and a token is sampled after each, for the sequence alone, up to the first mismatch.
    pub num_draft_tokens: usize,
    /// The sequences to sample a token for from the last token's logits: none while the prompt is
    /// incomplete, else the sequence itself, and at the end of the prompt also its forks.
    pub samples: Vec<SeqId>,
    /// The sequence writes into a block that others still read: copy it first.
    pub copy: Option<BlockCopy>,
}

/// The plan of a step.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SchedulerOutput {
    /// Sequences in the order of scheduling. Copies are carried out in this order before anything else.
    pub sequences: Vec<PlannedSequence>,
    /// Tokens to generate for each sequence before the next plan. Above 1 only if every sequence has a single token
    /// that is sampled for its own sequence; blocks for all of them are reserved.
    pub num_steps: usize,
    /// Whether the next step may be queued before the tokens of this one are read: each sequence has a single token
    /// that is sampled for itself, may have one token more, and has a block for it. If the runner queues it, the next
    /// plan has these sequences (see [`Scheduler::record_queued_step`](super::Scheduler::record_queued_step)).
    pub may_queue_next: bool,
    /// Whether this is the step that the runner has queued.
    pub is_queued: bool,
    /// Preempted sequences.
    pub preempted: Vec<SeqId>,
}

impl SchedulerOutput {
    /// Tokens in the step.
    #[must_use]
    pub fn num_scheduled_tokens(&self) -> usize {
        self.sequences.iter().map(|planned| planned.len).sum()
    }
}
