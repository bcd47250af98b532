//! Rotation and attention over the paged cache, in one kernel where there is one.

use crate::ops::buffer::Buffer;
use crate::ops::context::Context;
use crate::ops::kv_cache::KvCache;
use crate::ops::linear::{ProductInput, next_format};
use crate::ops::paged_attention::{self, AttentionScratch, paged_attention_for};
use crate::ops::rope_kv_write::{self, HeadNorms, RopeTable, rope_kv_write};
use crate::ops::step_inputs::StepInputs;
use crate::ops::weights::Linear;
use crate::{Error, Result};

/// [`rope_kv_write`] and [`paged_attention_for`], with the same results in the cache and in `out`. Whether those of `qkv` are
/// rotated then depends on the device.
///
/// # Errors
/// As those.
#[expect(clippy::too_many_arguments, reason = "an op's operands")]
pub fn rope_attention<'a>(
    context: &Context,
    scratch: &mut AttentionScratch,
    qkv: &mut Buffer,
    step: &StepInputs<'_>,
    norms: Option<HeadNorms<'_>>,
    table: &RopeTable,
    cache: &mut KvCache,
    layer: usize,
    next: Option<&Linear>,
    out: &'a mut Buffer,
) -> Result<ProductInput<'a>> {
    if let Some((gpu, attention)) = paged_attention::rotating(context, scratch, cache, layer, step)? {
        let num_heads = rope_kv_write::check(qkv, step, norms, table, cache, layer)?;
        paged_attention::check(scratch, qkv, cache, layer, step.attention, out)
            .map_err(|reason| Error::internal(format!("rope_attention: {reason}")))?;
        if out.width() != num_heads * cache.layout().head_dim {
            let width = out.width();
            return Err(Error::internal(format!(
                "rope_attention: {num_heads} heads do not fit {width} values"
            )));
        }
        let rope = rope_kv_write::gpu_rope(qkv, num_heads, step.num_tokens(), norms, table)?;
        let (pools, next) = (cache.gpu(layer)?, next_format(next)?);
        let is_rounded = attention.run_rotating(gpu, step.gpu()?, rope, pools, out.gpu()?, next)?;
        return Ok(ProductInput::new(out, is_rounded));
    }
    rope_kv_write(context, qkv, step, norms, table, cache, layer)?;
    paged_attention_for(context, scratch, qkv, cache, layer, step, next, out)
}
