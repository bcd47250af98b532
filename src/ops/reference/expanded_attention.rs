//! Latent attention with keys and values of each head, for rows with many new tokens.

use candle_core::Tensor;

use super::Result;
use super::paged_attention::{MAX_SCORES, attention};
use super::{ReferenceBackend, ReferenceBuffer, ReferenceMatrix, ReferencePools};
use crate::ops::AttentionMetadata;
use crate::ops::cpu::attention::AttentionShape;
use crate::ops::cpu::attention::expanded::ExpandedShape;

/// The operands, checked by the op.
#[derive(Clone, Copy)]
pub(crate) struct ExpandedAttention<'a> {
    pub(crate) shape: ExpandedShape,
    pub(crate) scale: f64,
    pub(crate) queries: &'a ReferenceBuffer,
    pub(crate) query_stride: usize,
    pub(crate) absorbed: &'a ReferenceBuffer,
    pub(crate) keys: &'a [ReferenceMatrix],
    pub(crate) values: &'a [ReferenceMatrix],
}

/// `out` is `[num_tokens, num_heads · value_dim]`, of which rows that are not expanded stay as they are.
pub(crate) fn expanded_attention(
    backend: &ReferenceBackend,
    operands: ExpandedAttention<'_>,
    pools: &ReferencePools,
    metadata: &AttentionMetadata,
    out: &mut ReferenceBuffer,
) -> Result<()> {
    let ExpandedAttention { shape, scale, queries, query_stride, absorbed, keys, values } = operands;
    let ExpandedShape { num_heads, rank, nope, rotated, value_dim } = shape;
    let head_dim = nope + rotated;
    let of_head =
        AttentionShape { num_heads: 1, num_kv_heads: 1, head_dim, value_dim, scale, sliding_window: None };
    let (queries, absorbed) = (queries.rows(metadata.num_tokens())?, absorbed.rows(metadata.num_tokens())?);
    let old = out.rows(metadata.num_tokens())?;
    let mut results = Vec::new();
    for row in 0..metadata.num_rows() {
        let start = metadata.query_start_loc[row];
        let num_new = metadata.num_new_tokens(row);
        if !metadata.is_expanded(row) {
            results.push(old.narrow(0, start, num_new)?);
            continue;
        }
        let seq_len = metadata.seq_lens[row];
        let slots = backend.indices((0..seq_len).map(|position| metadata.slot(row, position)))?;
        let [rows, latent] = pools.read(backend, &slots, rank)?;
        let rotated_keys = rows.narrow(1, rank, rotated)?;
        let mut heads = Vec::new();
        for head in 0..num_heads {
            // Of `[rank, nope]`, which products take the other way round.
            let own_keys = latent.matmul(&keys[head].rows(backend, 0..rank)?)?;
            let own_keys = Tensor::cat(&[&own_keys, &rotated_keys], 1)?;
            let own_values = values[head].product(backend, &latent)?;
            let own_queries = Tensor::cat(
                &[
                    queries.narrow(0, start, num_new)?.narrow(1, head * query_stride, nope)?,
                    absorbed.narrow(0, start, num_new)?.narrow(1, head * (rank + rotated) + rank, rotated)?,
                ],
                1,
            )?;
            let step = (MAX_SCORES / seq_len).max(1);
            let pieces = (0..num_new).step_by(step).map(|first| {
                let queries = own_queries.narrow(0, first, step.min(num_new - first))?;
                let first_position = seq_len - num_new + first;
                attention(backend, of_head, &queries, &own_keys, &own_values, first_position)
            });
            heads.push(Tensor::cat(&pieces.collect::<Result<Vec<_>>>()?, 0)?);
        }
        results.push(Tensor::cat(&heads, 1)?);
    }
    out.set_rows(&Tensor::cat(&results, 0)?)
}
