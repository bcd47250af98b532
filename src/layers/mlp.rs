//! The gated feed-forward network.

use crate::Result;
use crate::config::{Activation, ModelConfig};
use crate::layers::{Activations, Cut, LayerInput, Loader, Output};
use crate::ops::{Linear, RmsNorm, gated, norm_linear, norm_swiglu, norm_swiglu_biased};

/// The feed-forward half of a decoder layer, with the norm before and the residual after it: two dispatches, one more
/// if no GEMM fuses the activation, and one more with a norm of its output.
#[derive(Debug)]
pub struct Mlp {
    activation: Activation,
    norm: Option<RmsNorm>,
    gate: Linear,
    up: Linear,
    down: Output,
}

impl Mlp {
    /// Loads the tensors `{prefix}.ffn_*`.
    ///
    /// # Errors
    /// If one is missing or has another shape than `config` says.
    pub fn load(loader: &Loader<'_>, config: &ModelConfig, prefix: &str) -> Result<Self> {
        let (hidden, intermediate, has_bias) =
            (config.hidden_size, config.intermediate_size, config.mlp_bias);
        let [_, norm, post_norm] = loader.norm_names(prefix);
        let parts = [("ffn_gate", intermediate), ("ffn_up", intermediate)];
        // Where they are together, the name is that of the second one.
        let [gate, up] = loader.linears(prefix, "ffn_up", parts, hidden, has_bias)?;
        let down =
            || loader.linear(&format!("{prefix}.ffn_down"), hidden, intermediate, Cut::Columns, has_bias);
        let norm_before = || loader.norm(&format!("{prefix}.{norm}"), hidden, config.rms_norm_eps);
        Ok(Self {
            activation: config.activation,
            norm: config.architecture.pre_norms.then(norm_before).transpose()?,
            gate,
            up,
            down: Output::load(loader, config, down()?, &format!("{prefix}.{post_norm}"))?,
        })
    }

    /// `hidden += W_down · (activation(W_gate · norm(hidden)) · (W_up · norm(hidden)))`, each projection with its bias if it
    /// has one, and the norm of that if the model has norms there.
    ///
    /// # Errors
    /// If the batch does not fit the activations.
    pub fn forward(&self, input: LayerInput<'_>, act: &mut Activations) -> Result<()> {
        let (context, num_rows) = (input.context, input.num_outputs());
        let Self { activation, norm, gate, up, down } = self;
        let Activations { hidden, intermediate, halves, branch, linear_scratch: scratch, .. } = act;
        let fused = norm.as_ref().filter(|_| *activation == Activation::Silu);
        let Some(norm) = fused else {
            norm_linear(context, scratch, num_rows, hidden, norm.as_ref(), [gate, up], halves)?;
            gated(context, *activation, num_rows, halves, intermediate)?;
            return down.add(context, scratch, num_rows, intermediate, branch, hidden);
        };
        if gate.bias.is_some() || up.bias.is_some() {
            norm_swiglu_biased(context, scratch, num_rows, hidden, norm, gate, up, intermediate)?;
            return down.add(context, scratch, num_rows, intermediate, branch, hidden);
        }
        let (gate, up, reader) = (&gate.weight, &up.weight, Some(&down.linear));
        norm_swiglu(context, scratch, num_rows, hidden, norm, gate, up, reader, intermediate)?;
        down.add(context, scratch, num_rows, intermediate, branch, hidden)
    }
}
