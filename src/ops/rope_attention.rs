//! Rotation and attention over the paged cache, in one kernel if the device has it.

use crate::ops::attention_spec::AttentionSpec;
use crate::ops::buffer::Buffer;
use crate::ops::context::Context;
use crate::ops::device::{Held, LayerPools, on_device};
use crate::ops::kv_cache::KvCache;
use crate::ops::paged_attention::{
    self, AttentionOperands, AttentionScratch, PagedAttention, paged_attention,
};
use crate::ops::rope_kv_write::{self, HeadNorms, RopeTable, RotatedRows, rope_kv_write};
use crate::ops::step_inputs::StepInputs;
use crate::ops::weights::Linear;
use crate::{Error, Result};

/// The operations of a device. A device without a fused kernel implements nothing.
pub(crate) trait RopeAttention: PagedAttention {
    /// Whether there is a kernel for this step.
    fn can_rotate(
        &self,
        _scratch: &Self::AttentionScratch,
        _step: &StepInputs<'_>,
        _pools: &Held<LayerPools>,
    ) -> Result<bool> {
        Ok(false)
    }

    /// [`rope_attention`], if there is such a kernel.
    fn rope_attention(
        &self,
        _scratch: &Self::AttentionScratch,
        _rows: RotatedRows<'_>,
        _operands: AttentionOperands<'_>,
        _qkv: &Buffer,
        _out: &mut Buffer,
    ) -> Result<()> {
        Err(Error::internal("rope_attention: there is no kernel for it"))
    }
}

/// [`rope_kv_write`] and [`paged_attention`], with the same results in the cache and in `out`. Whether `qkv` holds
/// rotated values afterwards depends on the device.
///
/// # Errors
/// As those two.
#[expect(clippy::too_many_arguments, reason = "an op's operands")]
pub fn rope_attention(
    context: &Context,
    scratch: &mut AttentionScratch,
    spec: &AttentionSpec,
    qkv: &mut Buffer,
    step: &StepInputs<'_>,
    norms: Option<HeadNorms<'_>>,
    table: &RopeTable,
    cache: &mut KvCache,
    layer: usize,
    reader: Option<&Linear>,
    out: &mut Buffer,
) -> Result<()> {
    let can_rotate = on_device!(context.backend(), |device| {
        device.can_rotate(scratch.held().on(device)?, step, cache.layer(layer))?
    });
    if !can_rotate {
        rope_kv_write(context, qkv, step, norms, table, cache, layer)?;
        return paged_attention(context, scratch, spec, qkv, cache, layer, step, reader, out);
    }
    let rows = rope_kv_write::check(qkv, step, norms, table, cache, layer)?;
    paged_attention::check(scratch, spec, qkv, cache, layer, step.attention, out)
        .map_err(|reason| Error::internal(format!("rope_attention: {reason}")))?;
    if out.width() != rows.num_heads * rows.head_dim {
        let (num_heads, width) = (rows.num_heads, out.width());
        return Err(Error::internal(format!("rope_attention: {num_heads} heads do not fit {width} values")));
    }
    let operands = AttentionOperands { spec, cache, layer, step, reader };
    on_device!(context.launch(), |device| {
        device.rope_attention(scratch.held().on(device)?, rows, operands, qkv, out)
    })
}
