//! Weights in the form that the device's kernels read.

use std::ops::Deref;

use crate::ops::context::{Backend, Context};
use crate::ops::cpu::matmul::PackedMatrix;
use crate::ops::metal::{Binding, GpuBuffer, MetalMatrix};
use crate::ops::reference::ReferenceMatrix;
use crate::weights::{DType, RawTensor, SharedBytes};
use crate::{Error, Result};

/// A weight matrix of any type, `[rows, cols]` = `[outputs, inputs]`, repacked for the device.
#[derive(Debug)]
pub struct Matrix(MatrixStorage);

#[derive(Debug)]
enum MatrixStorage {
    Cpu(PackedMatrix),
    Metal(MetalMatrix),
    Reference(ReferenceMatrix),
}

impl Matrix {
    /// Repacks a tensor of two dimensions.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidModel`] if the tensor is no matrix, [`crate::ErrorKind::Capacity`] if there is
    /// no memory, [`crate::ErrorKind::Unsupported`] if the device has no kernels for its shape.
    pub fn new(context: &Context, tensor: &RawTensor<'_>) -> Result<Self> {
        let &[rows, cols] = tensor.shape else {
            return Err(Error::invalid_model(format!(
                "tensor {:?} has the shape {:?}, but has to be a matrix",
                tensor.name, tensor.shape
            )));
        };
        match context.backend() {
            Backend::Cpu(_) => Self::from_bytes(context, tensor.dtype, tensor.data, rows, cols),
            Backend::Metal(metal) => {
                MetalMatrix::new(metal, tensor, rows, cols).map(|matrix| Self(MatrixStorage::Metal(matrix)))
            }
            Backend::Reference(reference) => {
                ReferenceMatrix::new(reference, tensor.dtype, tensor.share(), rows, cols)
                    .map(|matrix| Self(MatrixStorage::Reference(matrix)))
            }
        }
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
        match context.backend() {
            Backend::Cpu(cpu) => PackedMatrix::pack(dtype, bytes, rows, cols, &cpu.pool, cpu.level)
                .map(|packed| Self(MatrixStorage::Cpu(packed))),
            Backend::Metal(metal) => MetalMatrix::from_bytes(metal, dtype, bytes, rows, cols)
                .map(|matrix| Self(MatrixStorage::Metal(matrix))),
            Backend::Reference(reference) => {
                ReferenceMatrix::new(reference, dtype, SharedBytes::owned(bytes.to_vec()), rows, cols)
                    .map(|matrix| Self(MatrixStorage::Reference(matrix)))
            }
        }
    }

    /// Outputs.
    #[must_use]
    pub fn rows(&self) -> usize {
        match &self.0 {
            MatrixStorage::Cpu(matrix) => matrix.rows(),
            MatrixStorage::Metal(matrix) => matrix.rows(),
            MatrixStorage::Reference(matrix) => matrix.num_rows(),
        }
    }

    /// Inputs.
    #[must_use]
    pub fn cols(&self) -> usize {
        match &self.0 {
            MatrixStorage::Cpu(matrix) => matrix.cols(),
            MatrixStorage::Metal(matrix) => matrix.cols(),
            MatrixStorage::Reference(matrix) => matrix.num_cols(),
        }
    }

    /// How the values are stored.
    #[must_use]
    pub fn dtype(&self) -> DType {
        match &self.0 {
            MatrixStorage::Cpu(matrix) => matrix.dtype(),
            MatrixStorage::Metal(matrix) => matrix.dtype(),
            MatrixStorage::Reference(matrix) => matrix.dtype(),
        }
    }

    /// Bytes of memory, which is what one product with it reads.
    #[must_use]
    pub fn num_bytes(&self) -> usize {
        match &self.0 {
            MatrixStorage::Cpu(matrix) => matrix.num_bytes(),
            MatrixStorage::Metal(matrix) => matrix.num_bytes(),
            MatrixStorage::Reference(matrix) => matrix.num_bytes(),
        }
    }

    pub(crate) fn cpu(&self) -> Result<&PackedMatrix> {
        match &self.0 {
            MatrixStorage::Cpu(matrix) => Ok(matrix),
            _ => Err(elsewhere("a matrix")),
        }
    }

    pub(crate) fn metal(&self) -> Result<&MetalMatrix> {
        match &self.0 {
            MatrixStorage::Metal(matrix) => Ok(matrix),
            _ => Err(elsewhere("a matrix")),
        }
    }

    pub(crate) fn reference(&self) -> Result<&ReferenceMatrix> {
        match &self.0 {
            MatrixStorage::Reference(matrix) => Ok(matrix),
            _ => Err(elsewhere("a matrix")),
        }
    }
}

/// A vector of weights, on the host and, if that is elsewhere, on the device.
#[derive(Debug)]
pub struct Vector {
    values: Vec<f32>,
    metal: Option<GpuBuffer>,
}

impl Vector {
    /// Copies the values to the device.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Capacity`] if it has no memory.
    pub fn new(context: &Context, values: Vec<f32>) -> Result<Self> {
        let metal = match context.backend() {
            Backend::Cpu(_) | Backend::Reference(_) => None,
            Backend::Metal(metal) => Some(metal.upload(&values)?),
        };
        Ok(Self { values, metal })
    }

    pub(crate) fn metal(&self) -> Result<Binding<'_>> {
        self.metal.as_ref().map(Binding::read).ok_or_else(|| elsewhere("a vector"))
    }
}

impl Deref for Vector {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.values
    }
}

/// `y = W·x + b`, dense or quantised.
#[derive(Debug)]
pub struct Linear {
    /// `[outputs, inputs]`.
    pub weight: Matrix,
    /// A value for each output.
    pub bias: Option<Vector>,
}

/// `y = w · x / √(mean(x²) + eps)`.
#[derive(Debug)]
pub struct RmsNorm {
    /// A factor for each value of a row.
    pub weight: Vector,
    /// Added to the mean square.
    pub eps: f32,
}

fn elsewhere(what: &str) -> Error {
    Error::internal(format!("{what} is used on another device than it is on"))
}
