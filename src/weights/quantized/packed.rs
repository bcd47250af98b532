//! A quantised matrix as the rest of the program sees it: its name, its shape, the type that it is kept in, and rows.

use std::fmt::Debug;
use std::ops::Range;

use super::module::{ComponentTensor, Module};
use crate::weights::{DType, blocks};
use crate::{Error, Result};

/// The accuracy of the type that a matrix is kept in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::weights) enum Fidelity {
    /// The same values.
    Exact,
    /// The same codes, with scales that are rounded to half precision.
    RoundedScales,
    /// Other codes, for this reason.
    Encoded(&'static str),
}

/// The default type of a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PackedType {
    pub(super) dtype: DType,
    pub(super) fidelity: Fidelity,
}

impl PackedType {
    /// With other codes, for this reason: of eight bits, or in half precision where rows are no whole blocks.
    pub(super) fn encoded(why: &'static str, cols: usize) -> Self {
        let fits = cols.is_multiple_of(DType::Q8_0.block_len());
        Self { dtype: if fits { DType::Q8_0 } else { DType::F16 }, fidelity: Fidelity::Encoded(why) }
    }
}

/// Reads the rows of a matrix. Its tensors were checked before.
pub(super) trait Codec: Debug + Send + Sync {
    /// The method, in words.
    fn method(&self) -> String;

    /// Dimensions, the last of which is that of a row.
    fn shape(&self) -> Vec<usize>;

    /// The type to keep it in.
    fn packed_type(&self) -> PackedType;

    /// The number of rows that are interleaved and should be read in sequence.
    fn rows_at_once(&self) -> usize {
        1
    }

    /// The values of a row, counted over all matrices of the tensor.
    fn values(&self, row: usize, out: &mut [f32]);

    /// The row as blocks of the type of [`Self::packed_type`].
    ///
    /// # Errors
    /// If that type cannot represent a value.
    fn blocks(&self, row: usize, values: &mut [f32], out: &mut [u8]) -> Result<()> {
        self.values(row, values);
        blocks::quantize(self.packed_type().dtype, values, out)
    }
}

/// A matrix, or a stack of them, in a file's own format.
#[derive(Debug)]
pub(in crate::weights) struct PackedTensor {
    name: String,
    method: String,
    shape: Vec<usize>,
    packed_type: PackedType,
    num_bytes: usize,
    parts: Vec<ComponentTensor>,
    codec: Box<dyn Codec>,
}

impl PackedTensor {
    pub(super) fn new(name: &str, module: &Module<'_>, codec: Box<dyn Codec>) -> Self {
        Self {
            name: name.to_owned(),
            method: codec.method(),
            shape: codec.shape(),
            packed_type: codec.packed_type(),
            num_bytes: module.parts().map(|part| part.bytes().len()).sum(),
            parts: module.parts().cloned().collect(),
            codec,
        }
    }

    /// The canonical name.
    pub(in crate::weights) fn name(&self) -> &str {
        &self.name
    }

    /// The method that made it, in words.
    pub(in crate::weights) fn method(&self) -> &str {
        &self.method
    }

    /// Dimensions.
    pub(in crate::weights) fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Its default type.
    pub(in crate::weights) fn dtype(&self) -> DType {
        self.packed_type.dtype
    }

    pub(in crate::weights) fn fidelity(&self) -> Fidelity {
        self.packed_type.fidelity
    }

    /// Bytes of all its tensors.
    pub(in crate::weights) fn num_bytes(&self) -> usize {
        self.num_bytes
    }

    /// Rows of all its matrices.
    pub(in crate::weights) fn num_rows(&self) -> usize {
        self.shape[..self.shape.len() - 1].iter().product()
    }

    /// Bytes in the file of some of the rows: those of chunks add up to those of the whole.
    pub(in crate::weights) fn bytes_of(&self, rows: &Range<usize>) -> usize {
        let before =
            |row: usize| (self.num_bytes as u128 * row as u128 / self.num_rows().max(1) as u128) as usize;
        before(rows.end) - before(rows.start)
    }

    /// How many rows are best converted together, if possible.
    pub(in crate::weights) fn rows_at_once(&self) -> usize {
        self.codec.rows_at_once()
    }

    /// The values of some rows.
    pub(in crate::weights) fn values(&self, rows: Range<usize>, out: &mut [f32]) {
        for (row, out) in rows.zip(out.chunks_exact_mut(self.row_len())) {
            self.codec.values(row, out);
        }
    }

    /// Some rows as `dtype`. `values` is memory for a row.
    ///
    /// # Errors
    /// If that type cannot represent a value.
    pub(in crate::weights) fn convert(
        &self,
        rows: Range<usize>,
        dtype: DType,
        values: &mut Vec<f32>,
        out: &mut [u8],
    ) -> Result<()> {
        values.resize(self.row_len(), 0.0);
        let row_bytes = dtype.row_bytes(self.row_len())?;
        for (row, out) in rows.zip(out.chunks_exact_mut(row_bytes)) {
            let converted = if dtype == self.packed_type.dtype {
                self.codec.blocks(row, values, out)
            } else {
                self.codec.values(row, values);
                blocks::quantize(dtype, values, out)
            };
            converted.map_err(|error: Error| error.context(format!("row {row}")))?;
        }
        Ok(())
    }

    /// Releases the memory of its tensors.
    pub(in crate::weights) fn release(&self) {
        self.parts.iter().for_each(ComponentTensor::release);
    }

    fn row_len(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }
}
