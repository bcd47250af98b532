//! Norms, rotation and the write to the cache, between the projections of latent attention and attention.

use std::sync::Arc;

use super::attention::{LatentWrite, latent_kv_write};
use super::backend::GpuBackend;
use super::linear::norm_of;
use crate::Result;
use crate::config::RopeStyle;
use crate::ops::buffer::Buffer;
use crate::ops::device::{Held, LayerPools};
use crate::ops::latent_kv_write::{LatentKvWrite, LatentRows};
use crate::ops::step_inputs::StepInputs;

impl LatentKvWrite for Arc<GpuBackend> {
    fn latent_kv_write(
        &self,
        rows: LatentRows<'_>,
        step: &StepInputs<'_>,
        pools: &mut Held<LayerPools>,
        out: &mut Buffer,
    ) -> Result<()> {
        let LatentRows { num_heads, queries, kv, norm, table } = rows;
        let (norm, eps) = norm_of(self, norm)?;
        let write = LatentWrite {
            queries: queries.rows.held().on(self)?.values()?,
            query_width: queries.rows.width(),
            query_stride: queries.stride,
            kv: kv.held().on(self)?.values()?,
            kv_width: kv.width(),
            num_tokens: step.num_tokens(),
            num_heads,
            norm,
            eps,
            table: table.held().on(self)?.buffer(),
            num_pairs: table.num_pairs(),
            is_interleaved: table.style() == RopeStyle::Interleaved,
            out: out.held_mut().on_mut(self)?.target(),
        };
        latent_kv_write(self, step.lists(self)?, write, pools.on(self)?.rows()?)
    }
}
