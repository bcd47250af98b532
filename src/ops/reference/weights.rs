//! Weights in their file's format.

use super::{ReferenceBackend, ReferenceMatrix};
use crate::ops::weights::{DeviceMatrix, DeviceStack, WeightOps};
use crate::weights::{DType, FileType, RawTensor, SharedBytes};
use crate::{Error, Result};

impl DeviceMatrix for ReferenceMatrix {
    fn rows(&self) -> usize {
        self.num_rows()
    }

    fn cols(&self) -> usize {
        self.num_cols()
    }

    fn dtype(&self) -> DType {
        self.dtype()
    }

    fn num_bytes(&self) -> usize {
        self.num_bytes()
    }
}

impl DeviceStack for Vec<ReferenceMatrix> {
    fn len(&self) -> usize {
        self.len()
    }

    fn num_bytes(&self) -> usize {
        self.iter().map(ReferenceMatrix::num_bytes).sum()
    }
}

impl WeightOps for ReferenceBackend {
    fn matrix(&self, tensor: &RawTensor<'_>, rows: usize, cols: usize) -> Result<ReferenceMatrix> {
        Ok(ReferenceMatrix::new(self, tensor.stored(), tensor.share()?, rows, cols)?)
    }

    fn matrix_from_bytes(
        &self,
        file_type: FileType,
        bytes: &[u8],
        rows: usize,
        cols: usize,
    ) -> Result<ReferenceMatrix> {
        Ok(ReferenceMatrix::new(self, file_type, SharedBytes::owned(bytes.to_vec()), rows, cols)?)
    }

    fn matrix_without_weights(&self, _dtype: DType, _rows: usize, _cols: usize) -> Result<ReferenceMatrix> {
        Err(Error::internal("candle has no kernels to compile"))
    }

    fn stack(&self, matrices: Vec<ReferenceMatrix>) -> Result<Vec<ReferenceMatrix>> {
        Ok(matrices)
    }

    fn transpose(&self, _stack: &mut Vec<ReferenceMatrix>, _matrices: Vec<ReferenceMatrix>) -> Result<()> {
        Err(Error::internal("candle multiplies from either side without transposed matrices"))
    }

    fn vector(&self, _values: &[f32]) -> Result<()> {
        Ok(())
    }
}
