//! Norms, rotation and the write to the cache, between the query, key and value projections and attention.

use std::sync::Arc;

use super::attention::{Rope, rope_kv_write};
use super::backend::GpuBackend;
use super::linear::norm_of;
use super::{GpuBuffer, Placement};
use crate::config::RopeStyle;
use crate::ops::buffer::Buffer;
use crate::ops::device::{Held, LayerPools};
use crate::ops::rope_kv_write::{DeviceTable, RopeKvWrite, RotatedRows};
use crate::ops::step_inputs::StepInputs;
use crate::{Error, Result};

/// Cosines and sines.
#[derive(Debug)]
pub(crate) struct GpuTable {
    gpu: Arc<GpuBackend>,
    buffer: GpuBuffer,
}

impl GpuTable {
    pub(super) fn buffer(&self) -> &GpuBuffer {
        &self.buffer
    }
}

impl DeviceTable for GpuTable {
    fn extend(&mut self, start: usize, values: &[f32]) -> Result<()> {
        self.gpu.device().write(&self.buffer, 4 * start, bytemuck::cast_slice(values))
    }
}

/// The rotation's inputs, as kernels take them.
pub(super) fn rope<'a>(
    gpu: &Arc<GpuBackend>,
    rows: RotatedRows<'a>,
    qkv: &'a Buffer,
    num_tokens: usize,
) -> Result<Rope<'a>> {
    let norms = rows.norms.map(|norms| {
        let ((q, eps), (k, _)) = (norm_of(gpu, norms.q)?, norm_of(gpu, norms.k)?);
        Ok::<_, Error>((q, k, eps))
    });
    Ok(Rope {
        qkv: qkv.held().on(gpu)?.values()?,
        num_tokens,
        num_heads: rows.num_heads,
        num_pairs: rows.table.num_pairs(),
        is_interleaved: rows.table.style() == RopeStyle::Interleaved,
        table: rows.table.held().on(gpu)?.buffer(),
        norms: norms.transpose()?,
    })
}

impl RopeKvWrite for Arc<GpuBackend> {
    fn rope_table(&self, len: usize) -> Result<GpuTable> {
        let buffer = self.device().allocate((len * 4).max(16), Placement::Shared)?;
        Ok(GpuTable { gpu: Self::clone(self), buffer })
    }

    fn rope_kv_write(
        &self,
        rows: RotatedRows<'_>,
        qkv: &mut Buffer,
        step: &StepInputs<'_>,
        pools: &mut Held<LayerPools>,
    ) -> Result<()> {
        let rope = rope(self, rows, qkv, step.num_tokens())?;
        rope_kv_write(self, step.lists(self)?, rope, pools.on(self)?.pools()?)
    }
}
