//! The engine's events.

use std::time::Duration;

use crate::sampling::{RankedLogprobs, TokenLogprobs};
use crate::scheduler::PrefixMiss;
use crate::{Error, ErrorKind};

/// Why a sequence ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FinishReason {
    /// An end token was generated.
    Stop,
    /// `max_tokens` or the context window is reached, or the request wants no tokens.
    Length,
    /// The caller gave up.
    Abort,
    /// The computation failed.
    Error,
}

impl FinishReason {
    /// The name in outputs.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Abort => "abort",
            Self::Error => "error",
        }
    }
}

/// Something that happened to a request.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// The logits of the next prompt tokens.
    PromptLogits {
        /// Row-major `tokens × vocab_size`, f32.
        logits: Vec<f32>,
    },
    /// The log-probabilities of the next prompt tokens; the first ones are those of the second token, since the first
    /// has no context. All of them come before the first generated token.
    PromptLogprobs {
        /// One for each token.
        logprobs: Vec<RankedLogprobs>,
    },
    /// The hidden state of the last prompt token after the model's last norm, of a request that wants it. Its end follows,
    /// with [`FinishReason::Length`].
    Hidden {
        /// `hidden_size` values, as the model computes them.
        values: Vec<f32>,
    },
    /// More of the prompt is computed; only if requested. Comes after each step that computed some of it
    /// that had not been computed before, and the last one before the first generated token.
    PromptProgress {
        /// How far it is.
        progress: PromptProgress,
    },
    /// A token was generated.
    Token {
        /// Number of the sequence in the request: below `n`.
        index: usize,
        /// The token.
        token_id: u32,
        /// If requested.
        logprobs: Option<TokenLogprobs>,
        /// This is an end token: one of the tokens, but without text.
        is_end: bool,
    },
    /// A sequence ended; no more events for this index.
    Finished {
        /// Number of the sequence in the request.
        index: usize,
        /// Why.
        reason: FinishReason,
        /// With [`FinishReason::Error`], the error.
        error: Option<String>,
        /// Whose fault that is: [`ErrorKind::InvalidRequest`] if it is the request's, which would fail again.
        error_kind: Option<ErrorKind>,
        /// Counts and times.
        stats: SequenceStats,
    },
}

impl Event {
    /// The end of a sequence that was never computed.
    pub(super) fn failed(index: usize, error: &Error) -> Self {
        Self::Finished {
            index,
            reason: FinishReason::Error,
            error: Some(error.to_string()),
            error_kind: Some(error.kind()),
            stats: SequenceStats::default(),
        }
    }
}

/// How far the computation of a prompt is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PromptProgress {
    /// Tokens of the prompt.
    pub num_prompt_tokens: usize,
    /// Of these, found in the prefix cache.
    pub num_cached_tokens: usize,
    /// Of these, computed or found.
    pub num_processed_tokens: usize,
    /// Since the first step.
    pub time: Duration,
}

/// Counts and times of a sequence.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SequenceStats {
    /// Given tokens.
    pub num_prompt_tokens: usize,
    /// Generated tokens.
    pub num_output_tokens: usize,
    /// Prompt tokens found in the prefix cache.
    pub num_cached_tokens: usize,
    /// Of these, read from the prefix store for this sequence.
    pub num_disk_tokens: usize,
    /// And copied from memory of the host for it.
    pub num_host_tokens: usize,
    /// Why they were not more; none if the sequence never ran.
    pub prefix_miss: Option<PrefixMiss>,
    /// How often the sequence had to give its blocks back.
    pub num_preemptions: usize,
    /// Accepted drafted tokens.
    pub num_accepted_draft_tokens: usize,
    /// Drafted tokens that were tried and did not.
    pub num_rejected_draft_tokens: usize,
    /// From submission to the first step.
    pub queue_time: Duration,
    /// From the first step to the first token.
    pub prefill_time: Duration,
    /// From the first token to the last.
    pub decode_time: Duration,
}

/// How many steps computed how many tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StepSizes {
    /// Steps with at most [`Self::BOUNDS`] tokens and more than the bound before; last, all larger ones.
    pub counts: [u64; Self::BOUNDS.len() + 1],
}

impl StepSizes {
    /// Numbers of tokens, ascending.
    pub const BOUNDS: [usize; 13] = [1, 8, 16, 32, 64, 128, 256, 512, 1_024, 2_048, 4_096, 8_192, 16_384];

    pub(super) fn count(&mut self, num_tokens: usize) {
        self.counts[Self::BOUNDS.partition_point(|bound| *bound < num_tokens)] += 1;
    }
}
