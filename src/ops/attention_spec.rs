//! What attention of a layer is: the layer owns it, the ops are told.

use crate::ops::cpu::attention::{self, AttentionHeads};
use crate::ops::weights::Vector;

/// Attention of one layer. Layers of a model may differ in all but their heads.
#[derive(Debug)]
pub struct AttentionSpec {
    /// Its heads.
    pub heads: AttentionHeads,
    /// What scores are multiplied by.
    pub scale: f64,
    /// A token attends to itself and the `window - 1` tokens before it; to all before it if none.
    pub window: Option<usize>,
    /// Scores become `soft_cap · tanh(score / soft_cap)`.
    pub soft_cap: Option<f64>,
    /// For each query head, a score without a value that takes part in the softmax.
    pub sinks: Option<Vector>,
}

impl AttentionSpec {
    /// Attention to all tokens before a token, with nothing special.
    #[must_use]
    pub fn plain(heads: AttentionHeads, scale: f64) -> Self {
        Self { heads, scale, window: None, soft_cap: None, sinks: None }
    }

    /// For the CPU's kernels.
    pub(super) fn cpu(&self) -> attention::AttentionSpec<'_> {
        attention::AttentionSpec {
            heads: self.heads,
            scale: self.scale as f32,
            window: self.window,
            soft_cap: self.soft_cap.map(|cap| cap as f32),
            sinks: self.sinks.as_deref(),
        }
    }

    /// Whether it is the softmax of scores as they are, over all positions.
    pub(super) fn is_plain(&self) -> bool {
        self.window.is_none() && self.soft_cap.is_none() && self.sinks.is_none()
    }
}
