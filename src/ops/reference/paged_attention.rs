//! `softmax(q·Kᵀ · scale)·V` over the tokens of each row's sequence.

use candle_core::{D, Device, Tensor};

use super::Result;
use super::{ReferenceBackend, ReferenceBuffer, ReferencePools};
use crate::ops::AttentionMetadata;
use crate::ops::cpu::attention::AttentionShape;

/// Scores that are in memory at once.
pub(super) const MAX_SCORES: usize = 1 << 24;

/// `qkv` has the queries in front, `out` is `[num_tokens, num_heads · value_dim]`.
pub(crate) fn paged_attention(
    backend: &ReferenceBackend,
    shape: AttentionShape,
    qkv: &ReferenceBuffer,
    pools: &ReferencePools,
    metadata: &AttentionMetadata,
    out: &mut ReferenceBuffer,
) -> Result<()> {
    let queries = qkv.rows(metadata.num_tokens())?.narrow(1, 0, shape.num_heads * shape.head_dim)?;
    let mut results = Vec::new();
    for row in 0..metadata.num_rows() {
        let (start, end) = (metadata.query_start_loc[row], metadata.query_start_loc[row + 1]);
        let seq_len = metadata.seq_lens[row];
        let slots = backend.indices((0..seq_len).map(|position| metadata.slot(row, position)))?;
        let [keys, values] = pools.read(backend, &slots, shape.num_kv_heads * shape.value_dim)?;
        let step = (MAX_SCORES / (shape.num_heads * seq_len)).max(1);
        for first in (start..end).step_by(step) {
            let len = step.min(end - first);
            let queries = queries.narrow(0, first, len)?;
            let first_position = seq_len - (end - first);
            results.push(attention(backend, shape, &queries, &keys, &values, first_position)?);
        }
    }
    out.set_rows(&Tensor::cat(&results, 0)?)
}

/// Attention of neighbouring tokens, `[len, num_heads · head_dim]`, the first of them at `first_position`, over keys
/// `[seq_len, num_kv_heads · head_dim]` and values `[seq_len, num_kv_heads · value_dim]`.
pub(super) fn attention(
    backend: &ReferenceBackend,
    shape: AttentionShape,
    queries: &Tensor,
    keys: &Tensor,
    values: &Tensor,
    first_position: usize,
) -> Result<Tensor> {
    let AttentionShape { num_heads, num_kv_heads, head_dim, value_dim, .. } = shape;
    let (len, seq_len) = (queries.dim(0)?, keys.dim(0)?);
    let heads_of = |rows: &Tensor, num_heads: usize| {
        let heads = rows.reshape((rows.dim(0)?, num_heads, rows.dim(1)? / num_heads))?;
        heads.transpose(0, 1)?.contiguous()
    };
    // The query heads of a key head lie side by side, so that they are rows of one product.
    let (shared, group) = (num_heads / num_kv_heads * len, num_heads / num_kv_heads);
    let queries = heads_of(queries, num_heads)?.reshape((num_kv_heads, shared, head_dim))?;
    let scores = queries.matmul(&heads_of(keys, num_kv_heads)?.transpose(1, 2)?)?;
    let scores = (scores * shape.scale)?;
    let scores = scores.reshape((num_kv_heads, group, len, seq_len))?;
    let mask = backend.bring(&mask(len, seq_len, first_position, shape.sliding_window)?)?;
    let weights = softmax(&scores.broadcast_add(&mask)?)?;
    let results =
        weights.reshape((num_kv_heads, shared, seq_len))?.matmul(&heads_of(values, num_kv_heads)?)?;
    let results = results.reshape((num_heads, len, value_dim))?.transpose(0, 1)?;
    Ok(results.reshape((len, num_heads * value_dim))?)
}

/// `eˣ / Σ eˣ` over the last dimension.
fn softmax(x: &Tensor) -> Result<Tensor> {
    let weights = x.broadcast_sub(&x.max_keepdim(D::Minus1)?)?.exp()?;
    Ok(weights.broadcast_div(&weights.sum_keepdim(D::Minus1)?)?)
}

/// `[len, seq_len]`: 0 where a token attends to a position, else -∞.
fn mask(len: usize, seq_len: usize, first_position: usize, window: Option<usize>) -> Result<Tensor> {
    let values = (first_position..first_position + len).flat_map(|query| {
        let oldest = window.map_or(0, |window| (query + 1).saturating_sub(window));
        (0..seq_len).map(move |key| if (oldest..=query).contains(&key) { 0.0 } else { f32::NEG_INFINITY })
    });
    Ok(Tensor::from_iter(values, &Device::Cpu)?.reshape((len, seq_len))?)
}
