//! Grouped-query self-attention with rotary positions over the paged cache.

use std::fmt;

use crate::Result;
use crate::config::{ModelConfig, QkNorm, Rotation};
use crate::layers::{Activations, Cut, LayerInput, Loader, Output};
use crate::ops::{
    AttentionSpec, HeadNorms, KvCache, Linear, RmsNorm, Vector, gather_rows, norm_linear, norm_part,
    rope_attention,
};

/// The attention half of a decoder layer, with the norm before and the residual after it: four dispatches, or three
/// where attention rotates, one more with a norm of its output, and two more with norms of all queries and keys.
#[derive(Debug)]
pub struct Attention {
    spec: AttentionSpec,
    rotation: Rotation,
    norm: Option<RmsNorm>,
    q: Linear,
    k: Linear,
    v: Linear,
    output: Output,
    /// Norms over each query and each key head.
    head_norms: Option<(RmsNorm, RmsNorm)>,
    /// Norms over all query heads and over all key heads.
    row_norms: Option<(RmsNorm, RmsNorm)>,
}

/// The attention half of a decoder layer, of any kind.
pub trait SelfAttention: fmt::Debug + Send + Sized {
    /// Loads the tensors `{prefix}.attn_*` of layer `layer`.
    ///
    /// # Errors
    /// If one is missing or has another shape than `config` says, or the model has another kind of attention.
    fn load(loader: &Loader<'_>, config: &ModelConfig, prefix: &str, layer: usize) -> Result<Self>;

    /// `hidden += W_o · attention(norm(hidden))`; writes keys and values to the cache.
    ///
    /// # Errors
    /// If the batch does not fit the cache or the activations.
    fn forward(&self, input: LayerInput<'_>, act: &mut Activations, cache: &mut KvCache) -> Result<()>;
}

impl SelfAttention for Attention {
    fn load(loader: &Loader<'_>, config: &ModelConfig, prefix: &str, layer: usize) -> Result<Self> {
        let hidden = config.hidden_size;
        let (q_size, kv_size) = (config.q_size(), config.kv_size());
        let parts = [("attn_q", q_size), ("attn_k", kv_size), ("attn_v", kv_size)];
        let [q, k, v] = loader.linears(prefix, "attn_qkv", parts, hidden, config.qkv_bias)?;
        let norm =
            |name: &str, len: usize| loader.norm(&format!("{prefix}.{name}"), len, config.rms_norm_eps);
        let qk_norms = |q_len: usize, k_len: usize| {
            Ok::<_, crate::Error>((norm("attn_q_norm", q_len)?, norm("attn_k_norm", k_len)?))
        };
        let (head_norms, row_norms) = match config.architecture.qk_norm {
            QkNorm::None => (None, None),
            QkNorm::Heads => (Some(qk_norms(config.head_dim, config.head_dim)?), None),
            QkNorm::All => (None, Some(qk_norms(q_size, kv_size)?)),
        };
        let output = || {
            let name = format!("{prefix}.attn_output");
            loader.linear(&name, hidden, q_size, Cut::Columns, config.output_bias)
        };
        let [post_norm, ..] = loader.norm_names(prefix);
        let own = config.layer_attention[layer];
        let sinks = || {
            let sinks = loader.vector_by_rows(&format!("{prefix}.attn_sinks.weight"), config.num_heads)?;
            Vector::new(loader.context(), sinks)
        };
        let plain = AttentionSpec::plain(config.attention_heads(), config.attention_scale);
        Ok(Self {
            spec: AttentionSpec {
                window: own.window,
                sinks: config.has_sinks.then(sinks).transpose()?,
                ..plain
            },
            rotation: own.rotation,
            norm: config.architecture.pre_norms.then(|| norm("attn_norm", hidden)).transpose()?,
            q,
            k,
            v,
            output: Output::load(loader, config, output()?, &format!("{prefix}.{post_norm}"))?,
            head_norms,
            row_norms,
        })
    }

    fn forward(&self, input: LayerInput<'_>, act: &mut Activations, cache: &mut KvCache) -> Result<()> {
        let LayerInput { context, step, ropes, layer, only_outputs } = input;
        let num_tokens = input.num_tokens();
        let scratch = &mut act.linear_scratch;
        let projections = [&self.q, &self.k, &self.v];
        norm_linear(
            context,
            scratch,
            num_tokens,
            &act.hidden,
            self.norm.as_ref(),
            projections,
            &mut act.qkv,
        )?;
        if let Some((q, k)) = &self.row_norms {
            norm_part(context, num_tokens, &mut act.qkv, 0, q)?;
            norm_part(context, num_tokens, &mut act.qkv, q.weight.len(), k)?;
        }
        let head_norms = self.head_norms.as_ref().map(|(q, k)| HeadNorms { q, k });
        // Gathered rows are not packed for a matmul.
        let next = (!only_outputs).then_some(&self.output.linear);
        rope_attention(
            context,
            &mut act.attention_scratch,
            &self.spec,
            &mut act.qkv,
            step,
            head_norms,
            ropes.of(self.rotation)?,
            cache,
            layer,
            next,
            &mut act.attention,
        )?;
        if only_outputs {
            gather_rows(context, step, &mut act.attention)?;
            gather_rows(context, step, &mut act.hidden)?;
            let (attention, branch) = (&act.attention, &mut act.branch);
            let num_outputs = input.num_outputs();
            return self.output.add(context, scratch, num_outputs, attention, branch, &mut act.hidden);
        }
        let (attention, branch) = (&act.attention, &mut act.branch);
        self.output.add(context, scratch, num_tokens, attention, branch, &mut act.hidden)
    }
}
