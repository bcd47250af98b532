//! Multi-head latent attention: the cache has one row for each token, for any number of heads.
//!
//! Keys and values are projections of that row, `K[h] = W_k[h]·c` and `V[h] = W_v[h]·c`. For generated tokens they are
//! not computed: `q·(W_k·c) = (W_kᵀ·q)·c`, so queries go through the projection of keys, attention is over the rows
//! themselves, and its results go through the projection of values (*absorbed*). Where many tokens attend to
//! them, those of a prompt's whole groups, keys and values are made once for all (*expanded*).

use crate::config::{LatentAttentionConfig, ModelConfig};
use crate::layers::{Activations, Cut, LayerInput, Loader, Output, SelfAttention};
use crate::ops::{
    AttentionLimits, AttentionSpec, Buffer, Context, ExpandedLimits, ExpandedScratch, Heads, KvCache, Linear,
    LinearScratch, MatrixStack, RmsNorm, expanded_attention, gather_rows, heads_linear, latent_kv_write,
    norm_linear, paged_attention,
};
use crate::{Error, Result};

/// The attention half of a decoder layer, with the norm before and the residual after it: six dispatches if all rows are
/// absorbed, four if all are expanded, seven if there are both, and one more with queries of low rank.
#[derive(Debug)]
pub struct LatentAttention {
    spec: AttentionSpec,
    norm: RmsNorm,
    queries: Queries,
    /// `[rank + rotated, hidden]`: the latent row and the key that is rotated.
    latent: Linear,
    latent_norm: RmsNorm,
    /// Of queries into the latent row, `[heads, rank, qk_nope_head_dim]`.
    keys: MatrixStack,
    /// Of the latent row into values, `[heads, v_head_dim, rank]`.
    values: MatrixStack,
    output: Output,
    /// Values of a query head, and of a row of the cache.
    query_dim: usize,
    row_dim: usize,
    value_dim: usize,
}

#[derive(Debug)]
enum Queries {
    Direct(Linear),
    LowRank { down: Linear, norm: RmsNorm, up: Linear },
}

/// Buffers that pass between the ops of latent attention, allocated once.
#[derive(Debug)]
pub struct LatentActivations {
    /// The results of the first projections: the queries, or their low rank, followed by the latent row.
    first: Buffer,
    /// The queries if they come out of a low rank, `[tokens, heads · query_dim]`.
    queries: Option<Buffer>,
    /// Queries in attention's layout, `[tokens, heads · (rank + rotated)]`.
    absorbed: Buffer,
    /// Results before their projection, `[tokens, heads · rank]`.
    results: Buffer,
    expanded: ExpandedScratch,
}

impl LatentActivations {
    /// Memory for steps within these limits.
    ///
    /// # Errors
    /// If the device has no memory.
    pub fn new(
        context: &Context,
        config: &ModelConfig,
        latent: &LatentAttentionConfig,
        limits: &AttentionLimits,
        scratch: &mut LinearScratch,
    ) -> Result<Self> {
        let (num_heads, rank) = (config.num_heads, latent.kv_lora_rank);
        let (row_dim, max_rows) = (rank + config.rope.dim, limits.max_num_tokens);
        let buffer = |width: usize| Buffer::new(context, max_rows, width);
        // Each head is a group of all tokens.
        let widest = rank.max(latent.qk_nope_head_dim);
        scratch.reserve_groups(context, num_heads, num_heads * max_rows, widest)?;
        Ok(Self {
            first: buffer(latent.q_lora_rank.unwrap_or(config.q_size()) + row_dim)?,
            queries: latent.q_lora_rank.map(|_| buffer(config.q_size())).transpose()?,
            absorbed: buffer(num_heads * row_dim)?,
            results: buffer(num_heads * rank)?,
            expanded: ExpandedScratch::new(
                context,
                ExpandedLimits {
                    num_heads,
                    rank,
                    nope: latent.qk_nope_head_dim,
                    rotated: config.rope.dim,
                    value_dim: latent.v_head_dim,
                    scale: f64::from(latent.softmax_scale),
                    max_model_len: limits.max_model_len,
                    max_num_tokens: max_rows,
                    max_num_rows: limits.max_rows(),
                },
            )?,
        })
    }
}

impl SelfAttention for LatentAttention {
    fn load(loader: &Loader<'_>, config: &ModelConfig, prefix: &str, layer: usize) -> Result<Self> {
        let latent = config.latent_attention.as_ref();
        let latent = latent.ok_or_else(|| Error::internal("the model has no latent attention"))?;
        let LatentAttentionConfig { kv_lora_rank: rank, qk_nope_head_dim, v_head_dim, .. } = *latent;
        let (hidden, num_heads) = (config.hidden_size, config.num_heads);
        let row_dim = rank + config.rope.dim;
        let linear = |name: &str, outputs: usize, inputs: usize, cut: Cut| {
            loader.linear(&format!("{prefix}.{name}"), outputs, inputs, cut, false)
        };
        let norm = |name: &str, len: usize, eps: f32| loader.norm(&format!("{prefix}.{name}"), len, eps);
        let queries = match latent.q_lora_rank {
            None => Queries::Direct(linear("attn_q", config.q_size(), hidden, Cut::Rows)?),
            Some(q_rank) => Queries::LowRank {
                down: linear("attn_q_a", q_rank, hidden, Cut::Whole)?,
                norm: norm("attn_q_a_norm", q_rank, latent.lora_norm_eps)?,
                up: linear("attn_q_b", config.q_size(), q_rank, Cut::Rows)?,
            },
        };
        let (keys, values) =
            loader.latent_projections(prefix, num_heads, rank, qk_nope_head_dim, v_head_dim)?;
        let output = linear("attn_output", hidden, num_heads * v_head_dim, Cut::Columns)?;
        let [post_norm, ..] = loader.norm_names(prefix);
        let scale = f64::from(latent.softmax_scale);
        let window = config.layer_attention[layer].window;
        Ok(Self {
            spec: AttentionSpec { window, ..AttentionSpec::plain(config.attention_heads(), scale) },
            norm: norm("attn_norm", hidden, config.rms_norm_eps)?,
            queries,
            latent: linear("attn_kv_a_mqa", row_dim, hidden, Cut::Whole)?,
            latent_norm: norm("attn_kv_a_norm", rank, latent.lora_norm_eps)?,
            keys,
            values,
            output: Output::load(loader, config, output, &format!("{prefix}.{post_norm}"))?,
            query_dim: config.head_dim,
            row_dim,
            value_dim: v_head_dim,
        })
    }

    fn forward(&self, input: LayerInput<'_>, act: &mut Activations, cache: &mut KvCache) -> Result<()> {
        let LayerInput { context, step, ropes, layer, only_outputs } = input;
        let num_tokens = input.num_tokens();
        let scratch = &mut act.linear_scratch;
        let own = act.latent.as_mut().ok_or_else(|| Error::internal("no memory for latent attention"))?;
        let LatentActivations { first, queries, absorbed, results, expanded } = own;
        let first_queries = match &self.queries {
            Queries::Direct(linear) => linear,
            Queries::LowRank { down, .. } => down,
        };
        let linears = [first_queries, &self.latent];
        norm_linear(context, scratch, num_tokens, &act.hidden, Some(&self.norm), linears, first)?;
        let queries = match (&self.queries, queries) {
            (Queries::LowRank { norm, up, .. }, Some(queries)) => {
                norm_linear(context, scratch, num_tokens, first, Some(norm), [up], queries)?;
                &*queries
            }
            _ => &*first,
        };
        let queries = Heads { rows: queries, stride: self.query_dim };
        latent_kv_write(
            context,
            queries,
            first,
            step,
            &self.latent_norm,
            &ropes.usual,
            cache,
            layer,
            absorbed,
        )?;
        let (keys, values, out) = (&self.keys, &self.values, &mut act.attention);
        // A long chunk of a prompt needs none of these matmuls.
        let tokens = step.attention.absorbed_tokens();
        if !tokens.is_empty() {
            heads_linear(context, scratch, tokens.clone(), queries, keys, absorbed, self.row_dim)?;
            let own_scratch = &mut act.attention_scratch;
            paged_attention(context, own_scratch, &self.spec, absorbed, cache, layer, step, None, results)?;
            let results = Heads { rows: results, stride: values.cols() };
            heads_linear(context, scratch, tokens, results, values, out, self.value_dim)?;
        }
        if step.attention.expanded_rows().next().is_some() {
            expanded_attention(context, expanded, queries, absorbed, cache, layer, step, keys, values, out)?;
        }
        if only_outputs {
            gather_rows(context, step, out)?;
            gather_rows(context, step, &mut act.hidden)?;
        }
        let (attention, branch) = (&act.attention, &mut act.branch);
        self.output.add(context, scratch, input.num_outputs(), attention, branch, &mut act.hidden)
    }
}
