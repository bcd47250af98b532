//! Rows of activations in the host's memory.

use super::{AlignedFloats, CpuBackend};
use crate::Result;
use crate::ops::buffer::{Buffer, NewRows, Rows, no_memory};
use crate::ops::gpu::Placement;

impl Rows for AlignedFloats {
    fn read<R>(&self, len: usize, read: impl FnOnce(&[f32]) -> R) -> Result<R> {
        Ok(read(&self[..len]))
    }

    fn write<R>(&mut self, len: usize, write: impl FnOnce(&mut [f32]) -> R) -> Result<R> {
        Ok(write(&mut self[..len]))
    }
}

impl NewRows for CpuBackend {
    fn new_rows(&self, max_rows: usize, width: usize, _placement: Placement) -> Result<AlignedFloats> {
        AlignedFloats::try_zeroed(max_rows.saturating_mul(width)).ok_or_else(|| no_memory(max_rows, width))
    }
}

impl CpuBackend {
    /// The first `num_rows` rows.
    pub(super) fn rows<'a>(&self, buffer: &'a Buffer, num_rows: usize) -> Result<&'a [f32]> {
        let len = buffer.len_of(num_rows)?;
        Ok(&buffer.held().on(self)?[..len])
    }

    /// The same, for writing.
    pub(super) fn rows_mut<'a>(&self, buffer: &'a mut Buffer, num_rows: usize) -> Result<&'a mut [f32]> {
        let len = buffer.len_of(num_rows)?;
        Ok(&mut buffer.held_mut().on_mut(self)?[..len])
    }
}
