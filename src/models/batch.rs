//! The input of a forward pass.

use crate::ops::AttentionMetadata;

/// The tokens of one step, as a model sees them: no sequences, no requests.
#[derive(Debug, Clone, Default)]
pub struct InputBatch {
    /// Token ids of all rows, one after the other. Length `num_tokens`.
    pub token_ids: Vec<u32>,
    /// Position of each token in its sequence. Length `num_tokens`.
    pub positions: Vec<u32>,
    /// Rows, block tables and slots.
    pub attention: AttentionMetadata,
    /// Tokens whose logits are wanted, ascending.
    pub logits_indices: Vec<usize>,
}

impl InputBatch {
    /// Empties the batch and keeps its memory.
    pub fn clear(&mut self) {
        self.token_ids.clear();
        self.positions.clear();
        self.attention.clear();
        self.logits_indices.clear();
    }
}
