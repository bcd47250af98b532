//! Norms, rotation and the write to the cache, between the projections of latent attention and attention.

use super::CpuBackend;
use super::latent_row;
use super::rows::RowsMut;
use crate::Result;
use crate::ops::buffer::Buffer;
use crate::ops::device::{Held, LayerPools};
use crate::ops::latent_kv_write::{LatentKvWrite, LatentRows};
use crate::ops::step_inputs::StepInputs;

impl LatentKvWrite for CpuBackend {
    fn latent_kv_write(
        &self,
        rows: LatentRows<'_>,
        step: &StepInputs<'_>,
        pools: &mut Held<LayerPools>,
        out: &mut Buffer,
    ) -> Result<()> {
        let LatentRows { num_heads, queries, kv, norm, table } = rows;
        let (num_tokens, out_width) = (step.num_tokens(), out.width());
        let operands = latent_row::LatentKvWrite {
            num_heads,
            positions: step.positions,
            slots: &step.attention.slot_mapping,
            norm: norm.into(),
            table: table.rows(),
            query_width: queries.rows.width(),
            query_stride: queries.stride,
            kv_width: kv.width(),
        };
        let pools = pools.on_mut(self)?.view_mut();
        let (queries, kv) = (self.rows(queries.rows, num_tokens)?, self.rows(kv, num_tokens)?);
        let out = RowsMut::new(self.rows_mut(out, num_tokens)?, out_width);
        // SAFETY: the op has checked that the widths are those of the layout, and that all slots exist.
        unsafe {
            latent_row::latent_kv_write(operands, queries, kv, &out, pools, &self.pool, self.level);
        }
        Ok(())
    }
}
