//! Grouped-query self-attention with rotary positions over the paged cache.

use std::fmt;

use crate::Result;
use crate::config::ModelConfig;
use crate::layers::{Activations, LayerInput, Loader};
use crate::ops::{
    HeadNorms, KvCache, Linear, RmsNorm, gather_rows, linear_residual, norm_linear, rope_attention,
};

/// The attention half of a decoder layer, with the norm before and the residual after it: four dispatches, or
/// three where attention rotates.
#[derive(Debug)]
pub struct Attention {
    norm: RmsNorm,
    q: Linear,
    k: Linear,
    v: Linear,
    output: Linear,
    /// Norms over each query and each key head.
    head_norms: Option<(RmsNorm, RmsNorm)>,
}

/// The attention half of a decoder layer, of any kind.
pub trait SelfAttention: fmt::Debug + Send + Sized {
    /// Loads the tensors `{prefix}.attn_*`.
    ///
    /// # Errors
    /// If one is missing or has another shape than `config` says, or the model has another kind of attention.
    fn load(loader: &Loader<'_>, config: &ModelConfig, prefix: &str) -> Result<Self>;

    /// `hidden += W_o · attention(norm(hidden))`; what is to be attended to later goes to the cache.
    ///
    /// # Errors
    /// If the batch does not fit the cache or the activations.
    fn forward(&self, input: LayerInput<'_>, act: &mut Activations, cache: &mut KvCache) -> Result<()>;
}

impl SelfAttention for Attention {
    fn load(loader: &Loader<'_>, config: &ModelConfig, prefix: &str) -> Result<Self> {
        let hidden = config.hidden_size;
        let has_bias = config.qkv_bias;
        let projection = |name: &str, outputs: usize| {
            loader.linear(&format!("{prefix}.{name}"), outputs, hidden, has_bias)
        };
        let norm =
            |name: &str, len: usize| loader.norm(&format!("{prefix}.{name}"), len, config.rms_norm_eps);
        let head_norms = config
            .architecture
            .qk_norm
            .then(|| {
                Ok::<_, crate::Error>((
                    norm("attn_q_norm", config.head_dim)?,
                    norm("attn_k_norm", config.head_dim)?,
                ))
            })
            .transpose()?;
        Ok(Self {
            norm: norm("attn_norm", hidden)?,
            q: projection("attn_q", config.q_size())?,
            k: projection("attn_k", config.kv_size())?,
            v: projection("attn_v", config.kv_size())?,
            output: loader.linear(
                &format!("{prefix}.attn_output"),
                hidden,
                config.q_size(),
                config.output_bias,
            )?,
            head_norms,
        })
    }

    fn forward(&self, input: LayerInput<'_>, act: &mut Activations, cache: &mut KvCache) -> Result<()> {
        let LayerInput { context, step, rope, layer, only_outputs } = input;
        let num_tokens = input.num_tokens();
        let scratch = &mut act.linear_scratch;
        let projections = [&self.q, &self.k, &self.v];
        norm_linear(context, scratch, num_tokens, &act.hidden, &self.norm, projections, &mut act.qkv)?;
        let head_norms = self.head_norms.as_ref().map(|(q, k)| HeadNorms { q, k });
        // What is gathered is not for a product yet.
        let next = (!only_outputs).then_some(&self.output);
        let (attention_scratch, attention) = (&mut act.attention_scratch, &mut act.attention);
        let attention = rope_attention(
            context,
            attention_scratch,
            &mut act.qkv,
            step,
            head_norms,
            rope,
            cache,
            layer,
            next,
            attention,
        )?;
        if only_outputs {
            gather_rows(context, step, &mut act.attention)?;
            gather_rows(context, step, &mut act.hidden)?;
            let num_outputs = input.num_outputs();
            return linear_residual(
                context,
                scratch,
                num_outputs,
                &act.attention,
                &self.output,
                &mut act.hidden,
            );
        }
        linear_residual(context, scratch, num_tokens, attention, &self.output, &mut act.hidden)
    }
}
