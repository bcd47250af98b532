//! Latent attention with expanded keys and values of each head, for sequences with many new tokens.

use candle_core::Tensor;

use super::paged_attention::{MAX_SCORES, attention};
use super::{Failure, ReferenceBackend};
use crate::Result;
use crate::ops::buffer::Buffer;
use crate::ops::cpu::attention::expanded::ExpandedShape;
use crate::ops::expanded_attention::{ExpandedAttention, ExpandedLimits, ExpandedOperands};
use crate::ops::{AttentionHeads, AttentionSpec};

impl ExpandedAttention for ReferenceBackend {
    fn expanded_scratch(&self, _shape: ExpandedShape, _limits: &ExpandedLimits) -> Result<()> {
        Ok(())
    }

    /// Rows of `out` that are not expanded are unchanged.
    fn expanded_attention(
        &self,
        _scratch: &mut (),
        operands: ExpandedOperands<'_>,
        out: &mut Buffer,
    ) -> Result<()> {
        let ExpandedOperands { shape, scale, queries, step, .. } = operands;
        let ExpandedShape { num_heads, rank, nope, rotated, value_dim } = shape;
        let (metadata, num_tokens, head_dim) = (step.attention, step.num_tokens(), nope + rotated);
        let (all_queries, absorbed) = (queries.rows.held().on(self)?, operands.absorbed.held().on(self)?);
        let (keys, values) = (operands.keys.held().on(self)?, operands.values.held().on(self)?);
        let (pools, out) = (operands.cache.layer(operands.layer).on(self)?, out.held_mut().on_mut(self)?);
        self.run(num_tokens, || {
            let of_head = AttentionHeads { num_heads: 1, num_kv_heads: 1, head_dim, value_dim };
            let of_head = AttentionSpec::plain(of_head, scale);
            let (all_queries, absorbed) = (all_queries.rows(num_tokens)?, absorbed.rows(num_tokens)?);
            let old = out.rows(num_tokens)?;
            let mut results = Vec::new();
            for row in 0..metadata.num_rows() {
                let start = metadata.query_start_loc[row];
                let num_new = metadata.num_new_tokens(row);
                if !metadata.is_expanded(row) {
                    results.push(old.narrow(0, start, num_new)?);
                    continue;
                }
                let seq_len = metadata.seq_lens[row];
                let slots = self.indices((0..seq_len).map(|position| metadata.slot(row, position)))?;
                let [rows, latent] = pools.read(self, &slots, rank)?;
                let rotated_keys = rows.narrow(1, rank, rotated)?;
                let mut heads = Vec::new();
                for head in 0..num_heads {
                    // Of `[rank, nope]`, which is the transposed operand of the matmul.
                    let own_keys = latent.matmul(&keys[head].rows(self, 0..rank)?)?;
                    let own_keys = Tensor::cat(&[&own_keys, &rotated_keys], 1)?;
                    let own_values = values[head].matmul(self, &latent)?;
                    let own_queries = Tensor::cat(
                        &[
                            all_queries.narrow(0, start, num_new)?.narrow(1, head * queries.stride, nope)?,
                            absorbed.narrow(0, start, num_new)?.narrow(
                                1,
                                head * (rank + rotated) + rank,
                                rotated,
                            )?,
                        ],
                        1,
                    )?;
                    let step = (MAX_SCORES / seq_len).max(1);
                    let chunks = (0..num_new).step_by(step).map(|first| {
                        let queries = own_queries.narrow(0, first, step.min(num_new - first))?;
                        let first_position = seq_len - num_new + first;
                        attention(self, &of_head, &queries, &own_keys, &own_values, first_position)
                    });
                    heads.push(Tensor::cat(&chunks.collect::<Result<Vec<_>, Failure>>()?, 0)?);
                }
                results.push(Tensor::cat(&heads, 1)?);
            }
            out.set_rows(&Tensor::cat(&results, 0)?)
        })
    }
}
