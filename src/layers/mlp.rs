//! The gated feed-forward network.

use crate::Result;
use crate::config::ModelConfig;
use crate::layers::{Activations, LayerInput, Loader};
use crate::ops::{Linear, Matrix, RmsNorm, linear_residual, norm_swiglu_for};

/// The feed-forward half of a decoder layer, with the norm before and the residual after it: two dispatches.
#[derive(Debug)]
pub struct Mlp {
    norm: RmsNorm,
    gate: Matrix,
    up: Matrix,
    down: Linear,
}

impl Mlp {
    /// Loads the tensors `{prefix}.ffn_*`.
    ///
    /// # Errors
    /// If one is missing or has another shape than `config` says.
    pub fn load(loader: &Loader<'_>, config: &ModelConfig, prefix: &str) -> Result<Self> {
        let (hidden, intermediate) = (config.hidden_size, config.intermediate_size);
        Ok(Self {
            norm: loader.norm(&format!("{prefix}.ffn_norm"), hidden, config.rms_norm_eps)?,
            gate: loader.matrix(&format!("{prefix}.ffn_gate.weight"), intermediate, hidden)?,
            up: loader.matrix(&format!("{prefix}.ffn_up.weight"), intermediate, hidden)?,
            down: loader.linear(&format!("{prefix}.ffn_down"), hidden, intermediate, false)?,
        })
    }

    /// `hidden += W_down · (silu(W_gate · norm(hidden)) · (W_up · norm(hidden)))`.
    ///
    /// # Errors
    /// If the batch does not fit the activations.
    pub fn forward(&self, input: LayerInput<'_>, act: &mut Activations) -> Result<()> {
        let (context, num_rows) = (input.context, input.num_outputs());
        let scratch = &mut act.linear_scratch;
        let inside = norm_swiglu_for(
            context,
            scratch,
            num_rows,
            &act.hidden,
            &self.norm,
            &self.gate,
            &self.up,
            Some(&self.down),
            &mut act.intermediate,
        )?;
        linear_residual(context, scratch, num_rows, inside, &self.down, &mut act.hidden)
    }
}
