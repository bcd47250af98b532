//! Latent attention with expanded keys and values.

use std::sync::Arc;

use super::attention::{ExpandedOperands as OwnOperands, GpuExpandedAttention};
use super::backend::GpuBackend;
use crate::Result;
use crate::ops::buffer::Buffer;
use crate::ops::cpu::attention::expanded::ExpandedShape;
use crate::ops::expanded_attention::{ExpandedAttention, ExpandedLimits, ExpandedOperands};

impl ExpandedAttention for Arc<GpuBackend> {
    fn expanded_scratch(
        &self,
        shape: ExpandedShape,
        limits: &ExpandedLimits,
    ) -> Result<GpuExpandedAttention> {
        let ExpandedLimits { scale, max_num_tokens, max_model_len, .. } = *limits;
        GpuExpandedAttention::new(self, shape, scale as f32, max_num_tokens, max_model_len)
    }

    fn expanded_attention(
        &self,
        scratch: &mut GpuExpandedAttention,
        operands: ExpandedOperands<'_>,
        out: &mut Buffer,
    ) -> Result<()> {
        let own = OwnOperands {
            queries: operands.queries.rows.held().on(self)?.values()?,
            query_width: operands.queries.rows.width(),
            absorbed: operands.absorbed.held().on(self)?.values()?,
            rows: operands.cache.layer(operands.layer).on(self)?.rows()?,
            keys: operands.keys.held().on(self)?.transposed()?,
            values: operands.values.held().on(self)?.stack(),
            out: out.held_mut().on_mut(self)?.target(),
        };
        scratch.run(self, operands.step.lists(self)?, own)
    }
}
