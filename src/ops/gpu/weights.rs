//! Weights in the layout of the kernels.

use std::sync::Arc;

use super::GpuBuffer;
use super::backend::GpuBackend;
use super::matmul::{GpuMatrix, GpuStack};
use crate::ops::weights::{DeviceMatrix, DeviceStack, WeightOps};
use crate::weights::{DType, FileType, RawTensor};
use crate::{Error, Result};

/// Matrices of one shape.
#[derive(Debug)]
pub(crate) struct GpuStacks {
    stack: GpuStack,
    /// The transposed matrices, if they are multiplied from either side.
    transposed: Option<GpuStack>,
}

impl GpuStacks {
    /// `[num_matrices, rows, cols]`.
    pub(crate) fn stack(&self) -> &GpuStack {
        &self.stack
    }

    /// `[num_matrices, cols, rows]`.
    pub(crate) fn transposed(&self) -> Result<&GpuStack> {
        self.transposed.as_ref().ok_or_else(|| Error::internal("a stack of matrices has no transposed ones"))
    }
}

impl DeviceMatrix for GpuMatrix {
    fn rows(&self) -> usize {
        self.rows()
    }

    fn cols(&self) -> usize {
        self.cols()
    }

    fn dtype(&self) -> DType {
        self.dtype()
    }

    fn num_bytes(&self) -> usize {
        self.num_bytes()
    }
}

impl DeviceStack for GpuStacks {
    fn len(&self) -> usize {
        self.stack.len()
    }

    fn num_bytes(&self) -> usize {
        self.stack.matrix().num_bytes()
    }
}

impl WeightOps for Arc<GpuBackend> {
    fn matrix(&self, tensor: &RawTensor<'_>, rows: usize, cols: usize) -> Result<GpuMatrix> {
        GpuMatrix::new(self, tensor, rows, cols)
    }

    fn matrix_from_bytes(
        &self,
        file_type: FileType,
        bytes: &[u8],
        rows: usize,
        cols: usize,
    ) -> Result<GpuMatrix> {
        GpuMatrix::from_bytes(self, file_type, bytes, rows, cols)
    }

    fn matrix_without_weights(&self, dtype: DType, rows: usize, cols: usize) -> Result<GpuMatrix> {
        GpuMatrix::without_weights(self, dtype, rows, cols)
    }

    fn stack(&self, matrices: Vec<GpuMatrix>) -> Result<GpuStacks> {
        Ok(GpuStacks { stack: GpuStack::new(self, matrices)?, transposed: None })
    }

    fn transpose(&self, stack: &mut GpuStacks, matrices: Vec<GpuMatrix>) -> Result<()> {
        stack.transposed = Some(GpuStack::new(self, matrices)?);
        Ok(())
    }

    fn vector(&self, values: &[f32]) -> Result<GpuBuffer> {
        self.upload(values)
    }
}
