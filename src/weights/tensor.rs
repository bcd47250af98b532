//! A tensor as it lies in a file.

use std::ops::Range;
use std::sync::Arc;

use super::mapping::{Mapping, SharedBytes};
use super::{DType, blocks};
use crate::{Error, Result};

/// A borrowed view of one tensor of a checkpoint: undecoded bytes with their type and shape.
#[derive(Debug, Clone)]
pub struct RawTensor<'a> {
    /// The canonical name.
    pub name: &'a str,
    /// The element type.
    pub dtype: DType,
    /// Row-major dimensions, `[out, in]` for a matrix.
    pub shape: &'a [usize],
    /// Rows one after the other, each a whole number of blocks.
    pub data: &'a [u8],
    mapping: &'a Arc<Mapping>,
    range: Range<usize>,
}

impl<'a> RawTensor<'a> {
    /// `range` has to lie inside the mapping and hold what `dtype` and `shape` ask for.
    pub(super) fn new(
        name: &'a str,
        dtype: DType,
        shape: &'a [usize],
        mapping: &'a Arc<Mapping>,
        range: Range<usize>,
    ) -> Self {
        Self { name, dtype, shape, data: &mapping[range.clone()], mapping, range }
    }

    /// Number of elements.
    #[must_use]
    pub fn num_elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Elements of a row: the last dimension, 1 for a scalar.
    #[must_use]
    pub fn row_len(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// The same tensor if it has the shape `expected`.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidModel`] with both shapes otherwise.
    pub fn expect_shape(self, expected: &[usize]) -> Result<Self> {
        if self.shape == expected {
            return Ok(self);
        }
        Err(Error::invalid_model(format!(
            "tensor {:?} has the shape {:?}, but the model's configuration needs {expected:?}",
            self.name, self.shape
        )))
    }

    /// The matrix at `index` of a stack of them, the tensor's first dimension.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidModel`] if the tensor has fewer than three dimensions or matrices.
    pub fn matrix(&self, index: usize) -> Result<Self> {
        let [num, shape @ ..] = self.shape else { return Err(self.no_stack(index)) };
        if index >= *num || shape.len() < 2 {
            return Err(self.no_stack(index));
        }
        Ok(self.part(shape, index * (self.data.len() / num), self.data.len() / num))
    }

    /// Some neighbouring rows of a matrix, of the shape `[rows, cols]` that the caller has at hand.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidModel`] if the tensor is no matrix or does not have them.
    pub fn rows(&self, first: usize, shape: &'a [usize]) -> Result<Self> {
        match (self.shape, shape) {
            (&[all, own_cols], &[rows, cols]) if own_cols == cols && first + rows <= all => {
                let row_bytes = self.data.len() / all.max(1);
                Ok(self.part(shape, first * row_bytes, rows * row_bytes))
            }
            _ => Err(self.no_stack(first)),
        }
    }

    fn part(&self, shape: &'a [usize], start: usize, len: usize) -> Self {
        let start = self.range.start + start;
        Self::new(self.name, self.dtype, shape, self.mapping, start..start + len)
    }

    fn no_stack(&self, index: usize) -> Error {
        Error::invalid_model(format!(
            "tensor {:?} has the shape {:?}, in which there is no part {index}",
            self.name, self.shape
        ))
    }

    /// All values as f32, row after row.
    ///
    /// # Errors
    /// None for a tensor that came from a checkpoint, whose sizes were checked.
    pub fn to_f32(&self) -> Result<Vec<f32>> {
        let mut values = vec![0.0; self.num_elements()];
        blocks::dequantize(self.dtype, self.data, &mut values)
            .map_err(|error| error.context(format!("tensor {:?}", self.name)))?;
        Ok(values)
    }

    /// A matrix with rows and columns exchanged: dense values as they are, quantised ones as `quantized`, such as `Q8_0`,
    /// or in half precision where the rows are no whole blocks of it.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidModel`] if the tensor is no matrix.
    pub fn transposed(&self, quantized: DType) -> Result<OwnedTensor> {
        let &[rows, cols] = self.shape else { return Err(self.no_stack(0)) };
        let shape = [cols, rows];
        if !self.dtype.is_quantized() {
            let len = self.dtype.block_bytes();
            let values = exchanged(rows, cols).flat_map(|at| &self.data[at * len..][..len]);
            return Ok(OwnedTensor::new(self.name, self.dtype, &shape, values.copied().collect()));
        }
        let values = self.to_f32()?;
        let values: Vec<f32> = exchanged(rows, cols).map(|at| values[at]).collect();
        let dtype = if rows.is_multiple_of(quantized.block_len()) { quantized } else { DType::F16 };
        let mut bytes = vec![0; dtype.row_bytes(values.len())?];
        blocks::quantize(dtype, &values, &mut bytes)
            .map_err(|error| error.context(format!("tensor {:?}", self.name)))?;
        Ok(OwnedTensor::new(self.name, dtype, &shape, bytes))
    }

    /// Some neighbouring columns of a matrix, whole blocks of them.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidModel`] if the tensor is no matrix, does not have them, or they are not whole blocks.
    pub fn columns(&self, first: usize, num: usize) -> Result<OwnedTensor> {
        let (block_len, block_bytes) = (self.dtype.block_len(), self.dtype.block_bytes());
        match self.shape {
            &[rows, cols]
                if first + num <= cols
                    && [cols, first, num].iter().all(|len| len.is_multiple_of(block_len)) =>
            {
                let [begin, end] = [first, first + num].map(|column| column / block_len * block_bytes);
                let rows_of_bytes = self.data.chunks_exact((cols / block_len * block_bytes).max(1));
                let bytes = rows_of_bytes.flat_map(|row| &row[begin..end]).copied().collect();
                Ok(OwnedTensor::new(self.name, self.dtype, &[rows, num], bytes))
            }
            _ => Err(self.no_stack(first)),
        }
    }

    /// Says that the bytes will hardly be read again: the memory they take may go, the file stays mapped.
    pub fn release(&self) {
        self.mapping.release(self.range.clone());
    }

    /// The same of some of the bytes, counted from the tensor's first one.
    pub(super) fn release_part(&self, bytes: Range<usize>) {
        let end = self.range.end.min(self.range.start + bytes.end);
        self.mapping.release(self.range.start + bytes.start..end);
    }

    /// The bytes with a share in the mapped file, for weights that outlive the checkpoint.
    #[must_use]
    pub fn share(&self) -> SharedBytes {
        SharedBytes::new(self.mapping, self.range.clone())
    }
}

/// The places of a matrix's values, column after column.
fn exchanged(rows: usize, cols: usize) -> impl Iterator<Item = usize> {
    (0..cols).flat_map(move |col| (0..rows).map(move |row| row * cols + col))
}

/// A tensor that was made here instead of read from a file.
#[derive(Debug, Clone)]
pub struct OwnedTensor {
    name: String,
    dtype: DType,
    shape: Vec<usize>,
    bytes: Arc<Mapping>,
}

impl OwnedTensor {
    /// `bytes` have to be what `dtype` and `shape` ask for.
    pub(super) fn new(name: &str, dtype: DType, shape: &[usize], bytes: Vec<u8>) -> Self {
        Self { name: name.to_owned(), dtype, shape: shape.to_vec(), bytes: Arc::new(Mapping::Owned(bytes)) }
    }

    /// The same view that a checkpoint gives of its tensors.
    #[must_use]
    pub fn as_raw(&self) -> RawTensor<'_> {
        RawTensor::new(&self.name, self.dtype, &self.shape, &self.bytes, 0..self.bytes.len())
    }
}
