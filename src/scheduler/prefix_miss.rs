//! Why the prefix cache did not give more.

use crate::kv_cache::BlockMiss;

/// Why a sequence's cached prefix ended where it did, when the sequence was first admitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PrefixMiss {
    /// There is no prefix cache.
    Disabled,
    /// Every prompt token has a report, so every one is computed.
    PromptLogits,
    /// There is no full block before the last token. That token is always computed, since its logits are
    /// needed.
    ShortPrompt,
    /// Every full block before the last token was found.
    None,
    /// The block that begins at this position was not found.
    Block {
        /// Position of the block's first token; a multiple of the block size.
        start: usize,
        /// The cache's knowledge of it.
        reason: BlockMiss,
    },
}

impl PrefixMiss {
    /// The position of the first token that is not as in the cache, the token that the prompt has there, and the
    /// one that the cache has there.
    #[must_use]
    pub fn first_difference(&self) -> Option<(usize, u32, u32)> {
        match *self {
            Self::Block { start, reason: BlockMiss::Differs { num_equal, token_id, cached_token_id } } => {
                Some((start + num_equal, token_id, cached_token_id))
            }
            _ => None,
        }
    }
}
