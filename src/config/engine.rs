//! Limits of the engine. The names are vLLM's flags.

use super::{SpeculativeConfig, SpeculativeMethod};
use crate::{Error, Result};

/// Limits of the engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineConfig {
    /// Longest sequence, prompt and output together, in tokens.
    pub max_model_len: usize,
    /// Most sequences in a step.
    pub max_num_seqs: usize,
    /// Most tokens in a step: longer prompts are computed in chunks.
    pub max_num_batched_tokens: usize,
    /// Token slots in a block of the KV cache.
    pub block_size: usize,
    /// Blocks of the KV cache.
    pub num_blocks: usize,
    /// Layers whose tokens attend to a window only have fewer blocks, if this is given.
    pub windows: Option<WindowLimits>,
    /// Share the K and V of common prefixes.
    pub enable_prefix_caching: bool,
    /// Most tokens generated between two scheduling decisions.
    pub num_scheduler_steps: usize,
    /// Most unfinished requests; further ones are refused.
    pub max_num_requests: usize,
    /// The fixed cost of a step, in generated tokens: reading the weights. If it is small, a step for one client alone
    /// wastes little.
    pub step_cost: usize,
    /// If the model computes a prompt's tokens in groups of this many, counted from its beginning, and the rest after the
    /// last whole group, like generated tokens, one by one, with other last bits: the size of a group. Then a cached block
    /// is found only by a sequence that would have computed all of its tokens in the same way.
    pub prompt_group: Option<usize>,
    /// Which tokens are tried before they are sampled, several in a step.
    pub speculative: SpeculativeConfig,
}

impl Default for EngineConfig {
    /// Fits tests and examples: 2,048 tokens of context in a cache of 4,096.
    fn default() -> Self {
        Self {
            max_model_len: 2_048,
            max_num_seqs: 16,
            max_num_batched_tokens: 512,
            block_size: 32,
            num_blocks: 128,
            windows: None,
            enable_prefix_caching: true,
            num_scheduler_steps: 1,
            max_num_requests: 1_024,
            step_cost: 8,
            prompt_group: None,
            speculative: SpeculativeConfig::off(),
        }
    }
}

/// The cache of layers whose tokens attend to a window only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WindowLimits {
    /// The longest window of these layers, in tokens.
    pub window: usize,
    /// Kernels read keys in tiles of this many positions, of which the first may begin before the window.
    pub tile: usize,
    /// Their blocks. A sequence has some for the tokens that it may still attend to.
    pub num_blocks: usize,
}

impl WindowLimits {
    /// The index of the first block that a sequence reads whose next token has this position.
    #[must_use]
    pub fn first_block(&self, position: usize, block_size: usize) -> usize {
        let tile = self.tile.max(1);
        (position + 1).saturating_sub(self.window) / tile * tile / block_size.max(1)
    }

    /// The most blocks that a sequence reads or writes in a step that computes `num_tokens` of its tokens.
    #[must_use]
    pub fn blocks_per_sequence(&self, num_tokens: usize, block_size: usize) -> usize {
        let num_positions = self.window.saturating_add(self.tile).saturating_add(num_tokens);
        num_positions.div_ceil(block_size.max(1)) + 1
    }
}

/// A limit that a user sets, with a range that no model and no machine changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EngineFlag {
    BlockSize,
    MaxModelLen,
    MaxNumBatchedTokens,
    MaxNumSeqs,
    NumSchedulerSteps,
    NumSpeculativeTokens,
}

impl EngineFlag {
    /// # Errors
    /// [`crate::ErrorKind::InvalidRequest`] naming the flag, its value and the range, if the value is outside it.
    pub(crate) fn check(self, value: usize) -> Result<()> {
        let (name, low, high) = match self {
            Self::BlockSize => ("block-size", 1, 1_024),
            Self::MaxModelLen => ("max-model-len", 2, EngineConfig::LONGEST),
            Self::MaxNumBatchedTokens => ("max-num-batched-tokens", 1, 1 << 20),
            Self::MaxNumSeqs => ("max-num-seqs", 1, EngineConfig::MOST_SEQUENCES),
            Self::NumSchedulerSteps => ("num-scheduler-steps", 1, 256),
            Self::NumSpeculativeTokens => ("num-speculative-tokens", 0, SpeculativeConfig::MAX_TOKENS),
        };
        if (low..=high).contains(&value) {
            return Ok(());
        }
        Err(Error::invalid_request(format!(
            "--{name} is {value}; it must be at least {low} and at most {high}"
        )))
    }
}

impl EngineConfig {
    /// No sequence is longer, in tokens.
    pub const LONGEST: usize = 1 << 24;
    /// The largest `--max-num-seqs`.
    pub const MOST_SEQUENCES: usize = 4_096;

    /// Most rows of logits in a step, and most tokens in it that attend by themselves: one for each sequence, and a draft of
    /// one of them.
    #[must_use]
    pub fn max_num_logits(&self) -> usize {
        self.max_num_seqs + self.speculative.num_speculative_tokens
    }

    /// Tokens that the KV cache can hold.
    #[must_use]
    pub fn kv_cache_tokens(&self) -> usize {
        self.num_blocks.saturating_mul(self.block_size)
    }

    /// The most tokens of a sequence that a plan may reserve blocks for.
    #[must_use]
    pub fn max_reserved_tokens(&self) -> usize {
        Self::reserved_tokens(self.max_num_batched_tokens, self.num_scheduler_steps)
    }

    /// The same for these limits: a chunk of a prompt, the tokens of a multi-step, or one token and that of the queued
    /// step.
    pub(crate) fn reserved_tokens(max_num_batched_tokens: usize, num_scheduler_steps: usize) -> usize {
        max_num_batched_tokens.max(num_scheduler_steps).max(2)
    }

    /// The fewest blocks of layers with a window with which the longest sequence can be computed.
    #[must_use]
    pub fn min_window_blocks(&self, windows: &WindowLimits) -> usize {
        windows
            .blocks_per_sequence(self.max_reserved_tokens(), self.block_size)
            .min(self.max_model_len.div_ceil(self.block_size.max(1)))
    }

    /// Checks the limits against each other.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidRequest`] naming the flag, its value and the limit.
    pub fn validate(&self) -> Result<()> {
        EngineFlag::BlockSize.check(self.block_size)?;
        EngineFlag::MaxNumSeqs.check(self.max_num_seqs)?;
        EngineFlag::NumSchedulerSteps.check(self.num_scheduler_steps)?;
        let num_speculative_tokens = self.speculative.num_speculative_tokens;
        EngineFlag::NumSpeculativeTokens.check(num_speculative_tokens)?;
        if self.speculative.method == SpeculativeMethod::Mtp && num_speculative_tokens > 0 {
            let num_steps = self.num_scheduler_steps;
            if num_steps > 1 {
                return Err(Error::invalid_request(format!(
                    "--num-scheduler-steps is {num_steps}, and the method mtp drafts between two steps"
                ))
                .with_hint("omit --num-scheduler-steps, or give another method"));
            }
        }
        EngineFlag::MaxModelLen.check(self.max_model_len)?;
        if self.max_num_batched_tokens < self.max_num_seqs {
            return Err(Error::invalid_request(format!(
                "--max-num-batched-tokens is {}, less than --max-num-seqs, which is {}",
                self.max_num_batched_tokens, self.max_num_seqs
            ))
            .with_hint("every running sequence needs a token in each step"));
        }
        EngineFlag::MaxNumBatchedTokens.check(self.max_num_batched_tokens)?;
        if self.max_model_len > self.kv_cache_tokens() {
            return Err(Error::new(
                crate::ErrorKind::Capacity,
                format!(
                    "--max-model-len is {}, but the KV cache holds {} tokens",
                    self.max_model_len,
                    self.kv_cache_tokens()
                ),
            )
            .with_hint("lower --max-model-len or raise --kv-cache-memory-bytes"));
        }
        if let Some(windows) = self.windows
            && windows.num_blocks < self.min_window_blocks(&windows)
        {
            let WindowLimits { window, num_blocks, .. } = windows;
            let least = self.min_window_blocks(&windows) * self.block_size;
            let message = format!(
                "the KV cache of layers with a window of {window} tokens holds {} tokens, and a step with {} of one \
                 sequence needs {least}",
                num_blocks * self.block_size,
                self.max_reserved_tokens()
            );
            return Err(Error::new(crate::ErrorKind::Capacity, message)
                .with_hint("lower --max-num-batched-tokens or raise --kv-cache-memory-bytes"));
        }
        Ok(())
    }
}
