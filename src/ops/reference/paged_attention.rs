//! `softmax(q·Kᵀ · scale)·V` over the tokens of each row's sequence, with all deviations that a layer may have.

use candle_core::{D, Device, Tensor};
use candle_nn::ops::softmax_last_dim;

use super::{ReferenceBackend, Result};
use crate::ops::buffer::Buffer;
use crate::ops::paged_attention::{AttentionLimits, AttentionOperands, PagedAttention};
use crate::ops::{AttentionHeads, AttentionSpec};

/// Scores that are in memory at once.
pub(super) const MAX_SCORES: usize = 1 << 24;

impl PagedAttention for ReferenceBackend {
    fn attention_scratch(&self, _limits: &AttentionLimits) -> crate::Result<()> {
        Ok(())
    }

    fn paged_attention(
        &self,
        _scratch: &mut (),
        operands: AttentionOperands<'_>,
        qkv: &Buffer,
        out: &mut Buffer,
    ) -> crate::Result<usize> {
        let AttentionOperands { spec, cache, layer, step, .. } = operands;
        let (metadata, num_tokens) = (step.attention, step.num_tokens());
        let AttentionHeads { num_heads, num_kv_heads, head_dim, value_dim } = spec.heads;
        let (qkv, pools) = (qkv.held().on(self)?, cache.layer(layer).on(self)?);
        let out = out.held_mut().on_mut(self)?;
        self.run(num_tokens, || {
            let queries = qkv.rows(num_tokens)?.narrow(1, 0, num_heads * head_dim)?;
            let mut results = Vec::new();
            for row in 0..metadata.num_rows() {
                let (start, end) = (metadata.query_start_loc[row], metadata.query_start_loc[row + 1]);
                let seq_len = metadata.seq_lens[row];
                let slots = self.indices((0..seq_len).map(|position| metadata.slot(row, position)))?;
                let [keys, values] = pools.read(self, &slots, num_kv_heads * value_dim)?;
                let step = (MAX_SCORES / (num_heads * seq_len)).max(1);
                for first in (start..end).step_by(step) {
                    let len = step.min(end - first);
                    let queries = queries.narrow(0, first, len)?;
                    let first_position = seq_len - (end - first);
                    results.push(attention(self, spec, &queries, &keys, &values, first_position)?);
                }
            }
            out.set_rows(&Tensor::cat(&results, 0)?)
        })?;
        Ok(1)
    }
}

/// Attention of neighbouring tokens, `[len, num_heads · head_dim]`, the first of them at `first_position`, over keys
/// `[seq_len, num_kv_heads · head_dim]` and values `[seq_len, num_kv_heads · value_dim]`.
pub(super) fn attention(
    backend: &ReferenceBackend,
    spec: &AttentionSpec,
    queries: &Tensor,
    keys: &Tensor,
    values: &Tensor,
    first_position: usize,
) -> Result<Tensor> {
    let AttentionHeads { num_heads, num_kv_heads, head_dim, value_dim } = spec.heads;
    let (len, seq_len) = (queries.dim(0)?, keys.dim(0)?);
    let heads_of = |rows: &Tensor, num_heads: usize| {
        let heads = rows.reshape((rows.dim(0)?, num_heads, rows.dim(1)? / num_heads))?;
        heads.transpose(0, 1)?.contiguous()
    };
    // The query heads of a key head are adjacent, so they are rows of one matmul.
    let (shared, group) = (num_heads / num_kv_heads * len, num_heads / num_kv_heads);
    let queries = heads_of(queries, num_heads)?.reshape((num_kv_heads, shared, head_dim))?;
    let scores = queries.matmul(&heads_of(keys, num_kv_heads)?.transpose(1, 2)?)?;
    let scores = (scores * spec.scale)?;
    let scores = match spec.soft_cap {
        Some(cap) => ((scores / cap)?.tanh()? * cap)?,
        None => scores,
    };
    let scores = scores.reshape((num_kv_heads, group, len, seq_len))?;
    let mask = backend.bring(&mask(len, seq_len, first_position, spec.window)?)?;
    let scores = scores.broadcast_add(&mask)?;
    let weights = match &spec.sinks {
        Some(sinks) => {
            // One more position, without a value.
            let sinks = backend.tensor(sinks, (num_kv_heads, group, 1, 1))?;
            let sinks = sinks.broadcast_as((num_kv_heads, group, len, 1))?;
            softmax_last_dim(&Tensor::cat(&[&scores, &sinks], D::Minus1)?.contiguous()?)?.narrow(
                D::Minus1,
                0,
                seq_len,
            )?
        }
        None => softmax_last_dim(&scores.contiguous()?)?,
    };
    let weights = weights.contiguous()?;
    let results =
        weights.reshape((num_kv_heads, shared, seq_len))?.matmul(&heads_of(values, num_kv_heads)?)?;
    let results = results.reshape((num_heads, len, value_dim))?.transpose(0, 1)?;
    Ok(results.reshape((len, num_heads * value_dim))?)
}

/// `[len, seq_len]`: 0 where a token attends to a position, else -∞.
fn mask(len: usize, seq_len: usize, first_position: usize, window: Option<usize>) -> Result<Tensor> {
    let values = (first_position..first_position + len).flat_map(|query| {
        let oldest = window.map_or(0, |window| (query + 1).saturating_sub(window));
        (0..seq_len).map(move |key| if (oldest..=query).contains(&key) { 0.0 } else { f32::NEG_INFINITY })
    });
    Ok(Tensor::from_iter(values, &Device::Cpu)?.reshape((len, seq_len))?)
}
