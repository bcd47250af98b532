//! Rows of activations as a tensor.

use candle_core::{DType, Device, Tensor};

use super::{ReferenceBackend, Result};
use crate::ops::buffer::{NewRows, Rows};
use crate::ops::gpu::Placement;

/// Rows of activations, `[max_rows, width]`.
#[derive(Debug)]
pub(crate) struct ReferenceBuffer(Tensor);

impl ReferenceBuffer {
    fn new(backend: &ReferenceBackend, max_rows: usize, width: usize) -> Result<Self> {
        Ok(Self(Tensor::zeros((max_rows, width), backend.dtype(), backend.device())?))
    }

    /// The first rows. The tensor shares the buffer's memory.
    pub(super) fn rows(&self, num_rows: usize) -> Result<Tensor> {
        Ok(self.0.narrow(0, 0, num_rows)?)
    }

    /// Replaces the first rows.
    pub(super) fn set_rows(&mut self, rows: &Tensor) -> Result<()> {
        Ok(self.0.slice_set(&rows.contiguous()?, 0, 0)?)
    }

    /// The first rows on the host, exactly.
    fn exact(&self, num_rows: usize) -> Result<Vec<f64>> {
        let rows = self.rows(num_rows)?.flatten_all()?.to_device(&Device::Cpu)?;
        Ok(rows.to_dtype(DType::F64)?.to_vec1()?)
    }

    /// Whether rows have this many values.
    fn num_rows(&self, len: usize) -> Result<usize> {
        Ok(len / self.0.dim(1)?.max(1))
    }

    /// Replaces the first rows with values of the host.
    fn replace(&mut self, values: &[f32]) -> Result<()> {
        let width = self.0.dim(1)?;
        let rows = Tensor::from_slice(values, (values.len() / width.max(1), width), &Device::Cpu)?;
        self.set_rows(&rows.to_dtype(self.0.dtype())?.to_device(self.0.device())?)
    }
}

impl Rows for ReferenceBuffer {
    fn read<R>(&self, len: usize, read: impl FnOnce(&[f32]) -> R) -> crate::Result<R> {
        let values: Vec<f32> = self.read_exact(len)?.into_iter().map(|value| value as f32).collect();
        Ok(read(&values))
    }

    fn write<R>(&mut self, len: usize, write: impl FnOnce(&mut [f32]) -> R) -> crate::Result<R> {
        let mut values: Vec<f32> = self.read_exact(len)?.into_iter().map(|value| value as f32).collect();
        let result = write(&mut values);
        self.replace(&values)?;
        Ok(result)
    }

    fn read_exact(&self, len: usize) -> crate::Result<Vec<f64>> {
        Ok(self.exact(self.num_rows(len)?)?)
    }
}

impl NewRows for ReferenceBackend {
    fn new_rows(
        &self,
        max_rows: usize,
        width: usize,
        _placement: Placement,
    ) -> crate::Result<ReferenceBuffer> {
        Ok(ReferenceBuffer::new(self, max_rows, width)?)
    }
}
