//! The input of a forward pass.

use crate::ops::{AttentionMetadata, SampledTokens};
use crate::{Error, Result};

/// The tokens of one step, as a model sees them: no sequences, no requests.
#[derive(Debug, Clone, Default)]
pub struct InputBatch {
    /// Token ids of all rows, one after the other. Length `num_tokens`.
    pub token_ids: Vec<u32>,
    /// Position of each token in its sequence. Length `num_tokens`.
    pub positions: Vec<u32>,
    /// Rows, block tables and slots.
    pub attention: AttentionMetadata,
    /// The same in layers with a window, if these have other blocks.
    pub windowed: Option<AttentionMetadata>,
    /// Tokens whose logits are requested, ascending.
    pub logits_indices: Vec<usize>,
    /// The tokens, if a device has sampled them; `token_ids` then has the right length and anything in it.
    pub sampled: Option<SampledTokens>,
}

impl InputBatch {
    /// Empties the batch and keeps its memory.
    pub fn clear(&mut self) {
        self.token_ids.clear();
        self.positions.clear();
        self.attention.clear();
        if let Some(windowed) = &mut self.windowed {
            windowed.clear();
        }
        self.logits_indices.clear();
        self.sampled = None;
    }

    /// Checks that the lists have one length and that logits are requested of tokens that exist, in their order.
    /// Whether
    /// blocks, positions and token ids exist is checked by the ops that use them.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Internal`] otherwise: a batch is made by the engine, not by a user.
    pub fn validate(&self) -> Result<()> {
        let num_tokens = self.token_ids.len();
        let is_other = |attention: &AttentionMetadata| attention.num_tokens() != num_tokens;
        if self.positions.len() != num_tokens
            || is_other(&self.attention)
            || self.windowed.as_ref().is_some_and(is_other)
        {
            return Err(Error::internal(format!(
                "a step of {num_tokens} tokens has {} positions and {} slots",
                self.positions.len(),
                self.attention.num_tokens()
            )));
        }
        let indices = &self.logits_indices;
        if let Some(index) = indices.iter().find(|index| **index >= num_tokens) {
            return Err(Error::internal(format!("logits of token {index} of {num_tokens} are requested")));
        }
        if !indices.is_sorted_by(|a, b| a < b) {
            return Err(Error::internal(format!(
                "logits are requested of the tokens {indices:?}, not in order"
            )));
        }
        Ok(())
    }
}
