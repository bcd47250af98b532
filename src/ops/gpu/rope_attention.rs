//! Rotation and attention over the paged cache in one kernel, for single tokens.

use std::sync::Arc;

use super::attention::GpuAttention;
use super::backend::GpuBackend;
use super::paged_attention::AttentionScratch;
use super::rope_kv_write::rope;
use crate::ops::buffer::Buffer;
use crate::ops::device::{Held, LayerPools};
use crate::ops::paged_attention::AttentionOperands;
use crate::ops::rope_attention::RopeAttention;
use crate::ops::rope_kv_write::RotatedRows;
use crate::ops::step_inputs::StepInputs;
use crate::{Error, Result};

impl RopeAttention for Arc<GpuBackend> {
    fn can_rotate(
        &self,
        scratch: &AttentionScratch,
        step: &StepInputs<'_>,
        pools: &Held<LayerPools>,
    ) -> Result<bool> {
        match scratch {
            AttentionScratch::Grouped(_) => {
                Ok(GpuAttention::can_rotate(self, step.lists(self)?, pools.on(self)?.pools()?))
            }
            AttentionScratch::Latent(_) => Ok(false),
        }
    }

    fn rope_attention(
        &self,
        scratch: &AttentionScratch,
        rows: RotatedRows<'_>,
        operands: AttentionOperands<'_>,
        qkv: &Buffer,
        out: &mut Buffer,
    ) -> Result<()> {
        let AttentionScratch::Grouped(attention) = scratch else {
            return Err(Error::internal("rope_attention: latent rows are rotated apart"));
        };
        let AttentionOperands { spec, cache, layer, step, reader } = operands;
        let (spec, rope) = (attention.spec(self, spec)?, rope(self, rows, qkv, step.num_tokens())?);
        let (pools, reader) =
            (cache.layer(layer).on(self)?.pools()?, reader.map(|reader| reader.weight.dtype()));
        let out = out.held_mut().on_mut(self)?;
        let is_packed =
            attention.run_rotating(self, step.lists(self)?, spec, rope, pools, out.target(), reader)?;
        out.set_packed(is_packed);
        Ok(())
    }
}
