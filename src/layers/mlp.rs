//! The gated feed-forward network.

use crate::Result;
use crate::config::ModelConfig;
use crate::layers::{Activations, LayerInput, Loader};
use crate::ops::{Linear, RmsNorm, linear_residual, norm_swiglu_biased, norm_swiglu_for};

/// The feed-forward half of a decoder layer, with the norm before and the residual after it: two dispatches.
#[derive(Debug)]
pub struct Mlp {
    norm: RmsNorm,
    gate: Linear,
    up: Linear,
    down: Linear,
}

impl Mlp {
    /// Loads the tensors `{prefix}.ffn_*`.
    ///
    /// # Errors
    /// If one is missing or has another shape than `config` says.
    pub fn load(loader: &Loader<'_>, config: &ModelConfig, prefix: &str) -> Result<Self> {
        let (hidden, intermediate, has_bias) =
            (config.hidden_size, config.intermediate_size, config.mlp_bias);
        Ok(Self {
            norm: loader.norm(&format!("{prefix}.ffn_norm"), hidden, config.rms_norm_eps)?,
            gate: loader.linear(&format!("{prefix}.ffn_gate"), intermediate, hidden, has_bias)?,
            up: loader.linear(&format!("{prefix}.ffn_up"), intermediate, hidden, has_bias)?,
            down: loader.linear(&format!("{prefix}.ffn_down"), hidden, intermediate, has_bias)?,
        })
    }

    /// `hidden += W_down · (silu(W_gate · norm(hidden)) · (W_up · norm(hidden)))`, each product with its bias if it has
    /// one.
    ///
    /// # Errors
    /// If the batch does not fit the activations.
    pub fn forward(&self, input: LayerInput<'_>, act: &mut Activations) -> Result<()> {
        let (context, num_rows) = (input.context, input.num_outputs());
        let scratch = &mut act.linear_scratch;
        if self.gate.bias.is_some() || self.up.bias.is_some() {
            let inside = &mut act.intermediate;
            let (norm, gate, up) = (&self.norm, &self.gate, &self.up);
            norm_swiglu_biased(context, scratch, num_rows, &act.hidden, norm, gate, up, inside)?;
            return linear_residual(context, scratch, num_rows, &*inside, &self.down, &mut act.hidden);
        }
        let inside = norm_swiglu_for(
            context,
            scratch,
            num_rows,
            &act.hidden,
            &self.norm,
            &self.gate.weight,
            &self.up.weight,
            Some(&self.down),
            &mut act.intermediate,
        )?;
        linear_residual(context, scratch, num_rows, inside, &self.down, &mut act.hidden)
    }
}
