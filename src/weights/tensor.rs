//! A tensor in its file's format.

use std::ops::Range;
use std::sync::Arc;

use super::mapping::{Mapping, SharedBytes};
use super::quantized::PackedTensor;
use super::{DType, FileType, blocks};
use crate::{Error, Result};

/// A borrowed view of one tensor of a checkpoint: undecoded bytes with their type and shape, or rows of a matrix in a
/// folder's own format, which a [`Quantizer`](super::Quantizer) converts to the type.
#[derive(Debug, Clone)]
pub struct RawTensor<'a> {
    /// The canonical name.
    pub name: &'a str,
    /// The element type that the tensor is kept as. That of its bytes is [`Self::stored`].
    pub dtype: DType,
    /// Row-major dimensions, `[out, in]` for a matrix.
    pub shape: &'a [usize],
    contents: Contents<'a>,
}

#[derive(Debug, Clone)]
enum Contents<'a> {
    /// Rows one after the other, each a whole number of blocks.
    Stored { file_type: FileType, mapping: &'a Arc<Mapping>, range: Range<usize> },
    /// Some rows of a matrix in another format.
    Packed { tensor: &'a PackedTensor, rows: Range<usize> },
}

impl<'a> RawTensor<'a> {
    /// `range` has to be inside the mapping and match `file_type` and `shape`.
    pub(super) fn new(
        name: &'a str,
        file_type: impl Into<FileType>,
        shape: &'a [usize],
        mapping: &'a Arc<Mapping>,
        range: Range<usize>,
    ) -> Self {
        let file_type = file_type.into();
        let contents = Contents::Stored { file_type, mapping, range };
        Self { name, dtype: file_type.kept_as(), shape, contents }
    }

    /// The element type of the bytes; the one that it is kept as, if it has to be converted first.
    #[must_use]
    pub fn stored(&self) -> FileType {
        match &self.contents {
            Contents::Stored { file_type, .. } => *file_type,
            Contents::Packed { .. } => self.dtype.into(),
        }
    }

    /// A matrix that has to be converted to be of its type.
    pub(super) fn packed(tensor: &'a PackedTensor) -> Self {
        Self {
            name: tensor.name(),
            dtype: tensor.dtype(),
            shape: tensor.shape(),
            contents: Contents::Packed { tensor, rows: 0..tensor.num_rows() },
        }
    }

    /// Rows one after the other, each a whole number of blocks.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Internal`] if the tensor has to be converted first.
    pub fn data(&self) -> Result<&'a [u8]> {
        match &self.contents {
            Contents::Stored { mapping, range, .. } => Ok(&mapping[range.clone()]),
            Contents::Packed { .. } => Err(self.unconverted()),
        }
    }

    /// Bytes in the file.
    #[must_use]
    pub fn num_bytes(&self) -> usize {
        match &self.contents {
            Contents::Stored { range, .. } => range.len(),
            Contents::Packed { tensor, rows } => tensor.bytes_of(rows),
        }
    }

    /// Whether the file stores it in a format that is converted to its type.
    #[must_use]
    pub fn is_packed(&self) -> bool {
        matches!(self.contents, Contents::Packed { .. })
    }

    /// The matrix in another format, and the range of its rows.
    pub(super) fn packed_rows(&self) -> Option<(&'a PackedTensor, Range<usize>)> {
        match &self.contents {
            Contents::Stored { .. } => None,
            Contents::Packed { tensor, rows } => Some((tensor, rows.clone())),
        }
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
        Ok(self.part(shape, index, *num))
    }

    /// Some neighbouring rows of a matrix, of the shape `[rows, cols]` that the caller has at hand.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidModel`] if the tensor is not a matrix or does not have them.
    pub fn rows(&self, first: usize, shape: &'a [usize]) -> Result<Self> {
        match (self.shape, shape) {
            (&[all, own_cols], &[rows, cols]) if own_cols == cols && first + rows <= all => {
                Ok(Self { shape, ..self.slices(first..first + rows, all) })
            }
            _ => Err(self.no_stack(first)),
        }
    }

    /// Range `index` of `num` equal ones.
    fn part(&self, shape: &'a [usize], index: usize, num: usize) -> Self {
        Self { shape, ..self.slices(index..index + 1, num) }
    }

    /// Some neighbours of `num` equal chunks, with the shape of all.
    fn slices(&self, slices: Range<usize>, num: usize) -> Self {
        let inside = |all: &Range<usize>| {
            let len = all.len() / num.max(1);
            all.start + slices.start * len..all.start + slices.end * len
        };
        let contents = match &self.contents {
            Contents::Stored { file_type, mapping, range } => {
                Contents::Stored { file_type: *file_type, mapping, range: inside(range) }
            }
            Contents::Packed { tensor, rows } => Contents::Packed { tensor, rows: inside(rows) },
        };
        Self { contents, ..self.clone() }
    }

    fn unconverted(&self) -> Error {
        Error::internal(format!("tensor {:?} is used before it was converted to {}", self.name, self.dtype))
    }

    fn no_stack(&self, index: usize) -> Error {
        Error::invalid_model(format!(
            "tensor {:?} has the shape {:?}, which has no slice {index}",
            self.name, self.shape
        ))
    }

    /// All values as f32, row after row.
    ///
    /// # Errors
    /// None for a tensor that came from a checkpoint, whose sizes were checked.
    pub fn to_f32(&self) -> Result<Vec<f32>> {
        let mut values = vec![0.0; self.num_elements()];
        match &self.contents {
            Contents::Packed { tensor, rows } => tensor.values(rows.clone(), &mut values),
            Contents::Stored { file_type, mapping, range } => {
                blocks::dequantize(*file_type, &mapping[range.clone()], &mut values)
                    .map_err(|error| error.context(format!("tensor {:?}", self.name)))?;
            }
        }
        Ok(values)
    }

    /// The transposed matrix: dense values unchanged, quantised ones as `quantized`, such as `Q8_0`, or in half
    /// precision where the rows are not whole blocks of it.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidModel`] if the tensor is not a matrix.
    pub fn transposed(&self, quantized: DType) -> Result<OwnedTensor> {
        let &[rows, cols] = self.shape else { return Err(self.no_stack(0)) };
        let shape = [cols, rows];
        if !self.dtype.is_quantized() && !self.is_packed() {
            let (len, data) = (self.dtype.block_bytes(), self.data()?);
            let values = exchanged(rows, cols).flat_map(|at| &data[at * len..][..len]);
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
    /// [`crate::ErrorKind::InvalidModel`] if the tensor is not a matrix, does not have them, or they are not whole blocks;
    /// [`crate::ErrorKind::Internal`] if it has to be converted first.
    pub fn columns(&self, first: usize, num: usize) -> Result<OwnedTensor> {
        let (block_len, block_bytes) = (self.stored().block_len(), self.stored().block_bytes());
        match self.shape {
            &[rows, cols]
                if first + num <= cols
                    && [cols, first, num].iter().all(|len| len.is_multiple_of(block_len)) =>
            {
                let [begin, end] = [first, first + num].map(|column| column / block_len * block_bytes);
                let rows_of_bytes = self.data()?.chunks_exact((cols / block_len * block_bytes).max(1));
                let bytes = rows_of_bytes.flat_map(|row| &row[begin..end]).copied().collect();
                Ok(OwnedTensor::new(self.name, self.stored(), &[rows, num], bytes))
            }
            _ => Err(self.no_stack(first)),
        }
    }

    /// Every `num`-th row of a matrix, from row `first` on.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidModel`] if the tensor is not a matrix whose rows are a multiple of `num`;
    /// [`crate::ErrorKind::Internal`] if it has to be converted first.
    pub fn every(&self, num: usize, first: usize) -> Result<OwnedTensor> {
        let &[rows, cols] = self.shape else { return Err(self.no_stack(first)) };
        if num == 0 || first >= num || !rows.is_multiple_of(num) {
            return Err(self.no_stack(first));
        }
        let row_bytes = self.stored().row_bytes(cols)?.max(1);
        let own = self.data()?.chunks_exact(row_bytes).skip(first).step_by(num);
        let bytes = own.flatten().copied().collect();
        Ok(OwnedTensor::new(self.name, self.stored(), &[rows / num, cols], bytes))
    }

    /// Marks the bytes as unlikely to be read again: their memory may be reclaimed, the file stays mapped.
    pub fn release(&self) {
        match &self.contents {
            Contents::Stored { mapping, range, .. } => mapping.release(range.clone()),
            // With most methods, a range of rows is spread over the whole tensor.
            Contents::Packed { tensor, rows } if rows.end == tensor.num_rows() => tensor.release(),
            Contents::Packed { .. } => {}
        }
    }

    /// The same of some of the bytes, counted from the tensor's first one.
    pub(super) fn release_range(&self, bytes: Range<usize>) {
        if let Contents::Stored { mapping, range, .. } = &self.contents {
            let end = range.end.min(range.start + bytes.end);
            mapping.release(range.start + bytes.start..end);
        }
    }

    /// The bytes with a share in the mapped file, for weights that outlive the checkpoint.
    ///
    /// # Errors
    /// As [`Self::data`].
    pub fn share(&self) -> Result<SharedBytes> {
        match &self.contents {
            Contents::Stored { mapping, range, .. } => Ok(SharedBytes::new(mapping, range.clone())),
            Contents::Packed { .. } => Err(self.unconverted()),
        }
    }
}

/// The indices of a matrix's values, column after column.
fn exchanged(rows: usize, cols: usize) -> impl Iterator<Item = usize> {
    (0..cols).flat_map(move |col| (0..rows).map(move |row| row * cols + col))
}

/// A tensor that was made here instead of read from a file.
#[derive(Debug, Clone)]
pub struct OwnedTensor {
    name: String,
    stored: FileType,
    shape: Vec<usize>,
    bytes: Arc<Mapping>,
}

impl OwnedTensor {
    /// `bytes` must match `stored` and `shape`.
    pub(super) fn new(name: &str, stored: impl Into<FileType>, shape: &[usize], bytes: Vec<u8>) -> Self {
        let bytes = Arc::new(Mapping::Owned(bytes));
        Self { name: name.to_owned(), stored: stored.into(), shape: shape.to_vec(), bytes }
    }

    /// The same view that a checkpoint gives of its tensors.
    #[must_use]
    pub fn as_raw(&self) -> RawTensor<'_> {
        RawTensor::new(&self.name, self.stored, &self.shape, &self.bytes, 0..self.bytes.len())
    }
}
