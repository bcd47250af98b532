//! Weights in the form that the device's kernels read.

use crate::ops::context::{Backend, Context};
use crate::ops::cpu::matmul::PackedMatrix;
use crate::weights::{DType, RawTensor};
use crate::{Error, Result};

/// A weight matrix of any type, `[rows, cols]` = `[outputs, inputs]`, repacked for the device.
#[derive(Debug)]
pub struct Matrix(MatrixStorage);

#[derive(Debug)]
enum MatrixStorage {
    Cpu(PackedMatrix),
}

impl Matrix {
    /// Repacks a tensor of two dimensions.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidModel`] if the tensor is no matrix, [`crate::ErrorKind::Capacity`] if there is
    /// no memory, [`crate::ErrorKind::Unsupported`] for a device without kernels.
    pub fn new(context: &Context, tensor: &RawTensor<'_>) -> Result<Self> {
        let &[rows, cols] = tensor.shape else {
            return Err(Error::invalid_model(format!(
                "tensor {:?} has the shape {:?}, but has to be a matrix",
                tensor.name, tensor.shape
            )));
        };
        Self::from_bytes(context, tensor.dtype, tensor.data, rows, cols)
            .map_err(|error| error.context(format!("tensor {:?}", tensor.name)))
    }

    /// Repacks `rows` rows of `cols` values, stored as in a file.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn from_bytes(
        context: &Context,
        dtype: DType,
        bytes: &[u8],
        rows: usize,
        cols: usize,
    ) -> Result<Self> {
        let Backend::Cpu(cpu) = context.backend("pack")?;
        PackedMatrix::pack(dtype, bytes, rows, cols, &cpu.pool, cpu.level)
            .map(|packed| Self(MatrixStorage::Cpu(packed)))
    }

    /// Outputs.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.cpu().rows()
    }

    /// Inputs.
    #[must_use]
    pub fn cols(&self) -> usize {
        self.cpu().cols()
    }

    /// How the values are stored.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.cpu().dtype()
    }

    /// Bytes of memory, which is what one product with it reads.
    #[must_use]
    pub fn num_bytes(&self) -> usize {
        self.cpu().num_bytes()
    }

    pub(crate) fn cpu(&self) -> &PackedMatrix {
        let MatrixStorage::Cpu(packed) = &self.0;
        packed
    }
}

/// `y = W·x + b`, dense or quantised.
#[derive(Debug)]
pub struct Linear {
    /// `[outputs, inputs]`.
    pub weight: Matrix,
    /// A value for each output.
    pub bias: Option<Vec<f32>>,
}

/// `y = w · x / √(mean(x²) + eps)`.
#[derive(Debug, Clone, PartialEq)]
pub struct RmsNorm {
    /// A factor for each value of a row.
    pub weight: Vec<f32>,
    /// Added to the mean square.
    pub eps: f32,
}
