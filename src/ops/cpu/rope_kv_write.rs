//! Norms, rotation and the write to the cache, between the query, key and value projections and attention.

use super::CpuBackend;
use super::rope::{self, HeadNorms};
use super::rows::RowsMut;
use crate::Result;
use crate::ops::buffer::Buffer;
use crate::ops::device::{Held, LayerPools};
use crate::ops::rope_kv_write::{RopeKvWrite, RotatedRows};
use crate::ops::step_inputs::StepInputs;

impl RopeKvWrite for CpuBackend {
    fn rope_table(&self, _len: usize) -> Result<()> {
        Ok(())
    }

    fn rope_kv_write(
        &self,
        rows: RotatedRows<'_>,
        qkv: &mut Buffer,
        step: &StepInputs<'_>,
        pools: &mut Held<LayerPools>,
    ) -> Result<()> {
        let RotatedRows { num_heads, num_kv_heads, head_dim, norms, table } = rows;
        let (positions, slot_mapping) = (step.positions, &step.attention.slot_mapping[..]);
        let norms = norms.map(|norms| HeadNorms { q: norms.q.into(), k: norms.k.into() });
        let table = table.rows();
        let operands =
            rope::RopeKvWrite { num_heads, num_kv_heads, head_dim, positions, slot_mapping, norms, table };
        let (width, pools) = (qkv.width(), pools.on_mut(self)?.view_mut());
        let qkv = RowsMut::new(self.rows_mut(qkv, positions.len())?, width);
        // SAFETY: the op has checked that the heads are those of the layout, and that all slots exist.
        unsafe { rope::rope_kv_write(operands, &qkv, pools, &self.pool, self.level) };
        Ok(())
    }
}
