//! Rows of activations in a GPU's memory.

use std::sync::Arc;

use super::{Binding, GpuBackend, GpuBuffer, Placement};
use crate::ops::buffer::{Buffer, NewRows, Rows};
use crate::{Error, Result};

/// Memory for rows, and its format.
#[derive(Debug)]
pub(crate) struct GpuRows {
    gpu: Arc<GpuBackend>,
    buffer: GpuBuffer,
    /// The format of a matmul for which the rows are packed in half precision, if they are.
    is_packed: bool,
}

impl GpuRows {
    /// The values.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Internal`] if they are packed for a matmul in another format.
    pub(crate) fn values(&self) -> Result<&GpuBuffer> {
        match self.is_packed {
            false => Ok(&self.buffer),
            true => Err(Error::internal("a buffer is packed for a matmul, and another op reads it")),
        }
    }

    /// The memory for a matmul, and whether it is packed for it.
    pub(super) fn packed(&self) -> (&GpuBuffer, bool) {
        (&self.buffer, self.is_packed)
    }

    /// The memory, for a kernel that writes it.
    pub(crate) fn target(&mut self) -> &GpuBuffer {
        self.is_packed = false;
        &self.buffer
    }

    /// Records that a kernel has packed the rows.
    pub(crate) fn set_packed(&mut self, is_packed: bool) {
        self.is_packed = is_packed;
    }
}

impl Rows for GpuRows {
    fn read<R>(&self, len: usize, read: impl FnOnce(&[f32]) -> R) -> Result<R> {
        let mut values = vec![0.0_f32; len];
        self.gpu.read(self.values()?, bytemuck::cast_slice_mut(&mut values))?;
        Ok(read(&values))
    }

    fn write<R>(&mut self, len: usize, write: impl FnOnce(&mut [f32]) -> R) -> Result<R> {
        let mut values = vec![0.0_f32; len];
        if !self.gpu.is_dry_run() {
            self.gpu.read(&self.buffer, bytemuck::cast_slice_mut(&mut values))?;
        }
        let result = write(&mut values);
        self.gpu.device().write(&self.buffer, 0, bytemuck::cast_slice(&values))?;
        self.is_packed = false;
        Ok(result)
    }
}

impl NewRows for Arc<GpuBackend> {
    fn new_rows(&self, max_rows: usize, width: usize, placement: Placement) -> Result<GpuRows> {
        let buffer = self.device().allocate((max_rows * width * 4).max(16), placement)?;
        Ok(GpuRows { gpu: Self::clone(self), buffer, is_packed: false })
    }
}

/// The values of a buffer, for reading.
pub(super) fn read<'a>(gpu: &Arc<GpuBackend>, buffer: &'a Buffer) -> Result<Binding<'a>> {
    Ok(Binding::read(buffer.held().on(gpu)?.values()?))
}

/// The memory of a buffer, for writing.
pub(super) fn write<'a>(gpu: &Arc<GpuBackend>, buffer: &'a mut Buffer) -> Result<Binding<'a>> {
    Ok(Binding::write(buffer.held_mut().on_mut(gpu)?.target()))
}
