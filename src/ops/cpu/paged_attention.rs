//! Attention over the paged cache.

use super::CpuBackend;
use super::attention::{self, AttentionScratch};
use crate::Result;
use crate::ops::buffer::Buffer;
use crate::ops::paged_attention::{AttentionLimits, AttentionOperands, PagedAttention};

impl PagedAttention for CpuBackend {
    fn attention_scratch(&self, limits: &AttentionLimits) -> Result<AttentionScratch> {
        let AttentionLimits { heads, max_num_tokens, max_model_len, .. } = *limits;
        let num_threads = self.pool.num_threads();
        Ok(AttentionScratch::new(heads, max_num_tokens, limits.max_rows(), max_model_len, num_threads))
    }

    fn paged_attention(
        &self,
        scratch: &mut AttentionScratch,
        operands: AttentionOperands<'_>,
        qkv: &Buffer,
        out: &mut Buffer,
    ) -> Result<usize> {
        let AttentionOperands { spec, cache, layer, step, .. } = operands;
        let pools = cache.layer(layer).on(self)?.view();
        let (values, width, num_tokens) =
            (self.rows(qkv, step.num_tokens())?, qkv.width(), step.num_tokens());
        let out = self.rows_mut(out, num_tokens)?;
        // SAFETY: the op has checked the widths, the metadata and the blocks.
        Ok(unsafe {
            let (spec, pool) = (spec.cpu(), &self.pool);
            attention::paged_attention(
                scratch,
                spec,
                values,
                width,
                pools,
                step.attention,
                out,
                pool,
                self.level,
            )
        })
    }
}
