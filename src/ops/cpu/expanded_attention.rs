//! Latent attention with expanded keys and values.

use super::CpuBackend;
use super::attention::expanded::{self, ExpandedScratch, ExpandedShape};
use super::rows::RowsMut;
use crate::Result;
use crate::ops::buffer::Buffer;
use crate::ops::expanded_attention::{ExpandedAttention, ExpandedLimits, ExpandedOperands};

impl ExpandedAttention for CpuBackend {
    fn expanded_scratch(
        &self,
        shape: ExpandedShape,
        limits: &ExpandedLimits,
    ) -> Result<Box<ExpandedScratch>> {
        let ExpandedLimits { max_num_tokens, max_model_len, .. } = *limits;
        let num_threads = self.pool.num_threads();
        Ok(Box::new(ExpandedScratch::new(shape, max_num_tokens, max_model_len, num_threads, self.level)))
    }

    fn expanded_attention(
        &self,
        scratch: &mut Box<ExpandedScratch>,
        operands: ExpandedOperands<'_>,
        out: &mut Buffer,
    ) -> Result<()> {
        let ExpandedOperands { queries, step, .. } = operands;
        let (metadata, num_tokens, width) = (step.attention, step.num_tokens(), out.width());
        let own = expanded::ExpandedOperands {
            queries: self.rows(queries.rows, num_tokens)?,
            query_width: queries.rows.width(),
            query_stride: queries.stride,
            absorbed: self.rows(operands.absorbed, num_tokens)?,
            scale: operands.scale as f32,
            keys: operands.keys.held().on(self)?.transposed()?,
            values: operands.values.held().on(self)?.matrices(),
        };
        let pools = operands.cache.layer(operands.layer).on(self)?.view();
        let out = RowsMut::new(self.rows_mut(out, num_tokens)?, width);
        // SAFETY: the op has checked the widths and the metadata.
        unsafe {
            expanded::expanded_attention(scratch, own, pools, metadata, &out, &self.pool, self.level);
        }
        Ok(())
    }
}
