//! Attention over the paged cache.

use std::sync::Arc;

use super::attention::{AttentionSizes, GpuAttention};
use super::attention::{GpuLatentAttention, LatentSizes};
use super::backend::GpuBackend;
use crate::ops::buffer::Buffer;
use crate::ops::paged_attention::{AttentionLimits, AttentionOperands, PagedAttention};
use crate::{Error, Result};

/// Memory of either kind of attention.
#[derive(Debug)]
pub(crate) enum AttentionScratch {
    /// Over keys and values.
    Grouped(GpuAttention),
    /// Over latent rows.
    Latent(GpuLatentAttention),
}

impl PagedAttention for Arc<GpuBackend> {
    fn attention_scratch(&self, limits: &AttentionLimits) -> Result<AttentionScratch> {
        let AttentionLimits { heads, max_window, max_model_len, max_num_rows, .. } = *limits;
        if !heads.is_latent() {
            let sizes = AttentionSizes { heads, max_window, max_model_len, max_num_rows };
            return GpuAttention::new(self, sizes).map(AttentionScratch::Grouped);
        }
        if max_window.is_some() {
            return Err(Error::unsupported(
                "latent attention with a sliding window has no kernel on this device",
            )
            .with_hint("use --device cpu"));
        }
        let sizes = LatentSizes {
            num_heads: heads.num_heads,
            row_dim: heads.head_dim,
            value_dim: heads.value_dim,
            max_model_len,
            max_num_rows,
        };
        GpuLatentAttention::new(self, sizes).map(AttentionScratch::Latent)
    }

    fn paged_attention(
        &self,
        scratch: &mut AttentionScratch,
        operands: AttentionOperands<'_>,
        qkv: &Buffer,
        out: &mut Buffer,
    ) -> Result<usize> {
        let AttentionOperands { spec, cache, layer, step, reader } = operands;
        let (lists, pools) = (step.lists(self)?, cache.layer(layer).on(self)?);
        let (q, width, out) = (qkv.held().on(self)?.values()?, qkv.width(), out.held_mut().on_mut(self)?);
        match scratch {
            AttentionScratch::Grouped(attention) => {
                let (spec, reader) =
                    (attention.spec(self, spec)?, reader.map(|reader| reader.weight.dtype()));
                let is_packed =
                    attention.run(self, lists, spec, q, width, pools.pools()?, out.target(), reader)?;
                out.set_packed(is_packed);
            }
            AttentionScratch::Latent(attention) => {
                if !spec.is_plain() {
                    return Err(Error::internal(format!(
                        "paged_attention: {spec:?} has no kernel for latent rows"
                    )));
                }
                attention.run(self, lists, spec.scale as f32, q, width, pools.rows()?, out.target())?;
            }
        }
        Ok(1)
    }
}
