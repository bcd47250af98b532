//! Weights in the layout of the kernels.

use super::CpuBackend;
use super::matmul::PackedMatrix;
use crate::ops::weights::{DeviceMatrix, DeviceStack, WeightOps};
use crate::weights::{DType, FileType, RawTensor};
use crate::{Error, Result};

/// Matrices of one shape.
#[derive(Debug)]
pub(crate) struct CpuStack {
    matrices: Vec<PackedMatrix>,
    /// The transposed matrices, if they are multiplied from either side.
    transposed: Vec<PackedMatrix>,
}

impl CpuStack {
    /// `[num_matrices, cols, rows]`.
    pub(crate) fn transposed(&self) -> Result<&[PackedMatrix]> {
        match self.transposed.is_empty() {
            false => Ok(&self.transposed),
            true => Err(Error::internal("a stack of matrices has no transposed ones")),
        }
    }

    /// `[num_matrices, rows, cols]`.
    pub(crate) fn matrices(&self) -> &[PackedMatrix] {
        &self.matrices
    }
}

impl DeviceMatrix for PackedMatrix {
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

impl DeviceStack for CpuStack {
    fn len(&self) -> usize {
        self.matrices.len()
    }

    fn num_bytes(&self) -> usize {
        self.matrices.iter().map(PackedMatrix::num_bytes).sum()
    }
}

impl WeightOps for CpuBackend {
    fn matrix(&self, tensor: &RawTensor<'_>, rows: usize, cols: usize) -> Result<PackedMatrix> {
        self.matrix_from_bytes(tensor.stored(), tensor.data()?, rows, cols)
    }

    fn matrix_from_bytes(
        &self,
        file_type: FileType,
        bytes: &[u8],
        rows: usize,
        cols: usize,
    ) -> Result<PackedMatrix> {
        PackedMatrix::pack(file_type, bytes, rows, cols, &self.pool, self.level)
    }

    fn matrix_without_weights(&self, _dtype: DType, _rows: usize, _cols: usize) -> Result<PackedMatrix> {
        Err(Error::internal("the CPU has no kernels to compile"))
    }

    fn stack(&self, matrices: Vec<PackedMatrix>) -> Result<CpuStack> {
        Ok(CpuStack { matrices, transposed: Vec::new() })
    }

    fn transpose(&self, stack: &mut CpuStack, matrices: Vec<PackedMatrix>) -> Result<()> {
        stack.transposed = matrices;
        Ok(())
    }

    fn vector(&self, _values: &[f32]) -> Result<()> {
        Ok(())
    }
}
