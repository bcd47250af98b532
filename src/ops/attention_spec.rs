//! The attention of a layer: the layer owns the spec and passes it to the ops.

use crate::ops::cpu::attention::{self, AttentionHeads};
use crate::ops::weights::Vector;

/// Attention of one layer. Layers of a model may differ in all but their heads.
#[derive(Debug)]
pub struct AttentionSpec {
    /// Its heads.
    pub heads: AttentionHeads,
    /// The factor of scores.
    pub scale: f64,
    /// A token attends to itself and the `window - 1` tokens before it; without a window, to all before it.
    pub window: Option<usize>,
    /// Scores become `soft_cap · tanh(score / soft_cap)`.
    pub soft_cap: Option<f64>,
    /// For each query head, a score without a value that is included in the softmax.
    pub sinks: Option<Vector>,
}

impl AttentionSpec {
    /// Causal attention over all earlier tokens, without window, soft cap or sinks.
    #[must_use]
    pub fn plain(heads: AttentionHeads, scale: f64) -> Self {
        Self { heads, scale, window: None, soft_cap: None, sinks: None }
    }

    /// The spec for the CPU kernels.
    pub(super) fn cpu(&self) -> attention::AttentionSpec<'_> {
        attention::AttentionSpec {
            heads: self.heads,
            scale: self.scale as f32,
            window: self.window,
            soft_cap: self.soft_cap.map(|cap| cap as f32),
            sinks: self.sinks.as_deref(),
        }
    }

    /// Whether it is plain softmax attention: no window, soft cap or sinks.
    pub(super) fn is_plain(&self) -> bool {
        self.window.is_none() && self.soft_cap.is_none() && self.sinks.is_none()
    }
}
