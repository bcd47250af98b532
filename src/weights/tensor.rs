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

    /// Says that the bytes will hardly be read again: the memory they take may go, the file stays mapped.
    pub fn release(&self) {
        self.mapping.release(self.range.clone());
    }

    /// The bytes with a share in the mapped file, for weights that outlive the checkpoint.
    #[must_use]
    pub fn share(&self) -> SharedBytes {
        SharedBytes::new(self.mapping, self.range.clone())
    }
}
