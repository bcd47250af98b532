//! Weights in the format of the device's kernels.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use crate::ops::context::Context;
use crate::ops::cpu::CpuBackend;
use crate::ops::cpu::matmul::MatrixFile;
use crate::ops::cpu::rope::Norm;
use crate::ops::device::{Device, Held, Matrices, Ops, Stacks, Vectors, on_device, with_held};
use crate::weights::{DType, FileType, RawTensor};
use crate::{Error, Result};

/// A weight matrix on a device.
pub(crate) trait DeviceMatrix: fmt::Debug + Send + Sync {
    /// Outputs.
    fn rows(&self) -> usize;

    /// Inputs.
    fn cols(&self) -> usize;

    /// The type of the values.
    fn dtype(&self) -> DType;

    /// Bytes of memory.
    fn num_bytes(&self) -> usize;
}

/// A stack of matrices on a device.
pub(crate) trait DeviceStack: fmt::Debug + Send + Sync {
    /// The number of matrices.
    fn len(&self) -> usize;

    /// Bytes of all matrices, without transposed ones.
    fn num_bytes(&self) -> usize;
}

/// The operations of a device for weights.
pub(crate) trait WeightOps: Device {
    /// Repacks a tensor of `rows` × `cols`.
    fn matrix(&self, tensor: &RawTensor<'_>, rows: usize, cols: usize) -> Result<Self::Matrix>;

    /// Repacks `rows` rows of `cols` values, stored as in a file.
    fn matrix_from_bytes(
        &self,
        file_type: FileType,
        bytes: &[u8],
        rows: usize,
        cols: usize,
    ) -> Result<Self::Matrix>;

    /// A matrix without contents.
    fn matrix_without_weights(&self, dtype: DType, rows: usize, cols: usize) -> Result<Self::Matrix>;

    /// Matrices of one shape, at least one.
    fn stack(&self, matrices: Vec<Self::Matrix>) -> Result<Self::Stack>;

    /// Adds the transposed matrices of a stack.
    fn transpose(&self, stack: &mut Self::Stack, matrices: Vec<Self::Matrix>) -> Result<()>;

    /// A copy of these values.
    fn vector(&self, values: &[f32]) -> Result<Self::Vector>;
}

/// A weight matrix of any type, `[rows, cols]` = `[outputs, inputs]`, repacked for the device.
#[derive(Debug)]
pub struct Matrix(Held<Matrices>);

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
        on_device!(context.backend(), |device| {
            device.matrix(tensor, rows, cols).map(|own| Self(Held::new(device, own)))
        })
        .map_err(|error| error.context(format!("tensor {:?}", tensor.name)))
    }

    /// Repacks `rows` rows of `cols` values, stored as in a file.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn from_bytes(
        context: &Context,
        file_type: impl Into<FileType>,
        bytes: &[u8],
        rows: usize,
        cols: usize,
    ) -> Result<Self> {
        let file_type = file_type.into();
        on_device!(context.backend(), |device| {
            let own = device.matrix_from_bytes(file_type, bytes, rows, cols)?;
            Ok(Self(Held::new(device, own)))
        })
    }

    /// The next matrix of a file of packed ones; none if the file is being written, for [`Self::add_to_file`] to add
    /// it.
    ///
    /// # Errors
    /// Those of [`MatrixFile::next`].
    pub fn next_in_file(
        file: &Arc<MatrixFile>,
        dtype: DType,
        rows: usize,
        cols: usize,
    ) -> Result<Option<Self>> {
        Ok(file.next(dtype, rows, cols)?.map(|packed| Self(CpuBackend::hold(packed))))
    }

    /// Repacks a tensor of two dimensions into a file, for the CPU's kernels.
    ///
    /// # Errors
    /// As [`Self::new`] and [`MatrixFile::add`]; [`crate::ErrorKind::Internal`] on another device.
    pub fn add_to_file(context: &Context, file: &Arc<MatrixFile>, tensor: &RawTensor<'_>) -> Result<Self> {
        let (Some(cpu), &[rows, cols]) = (context.cpu_backend(), tensor.shape) else {
            return Err(Error::internal("a file of packed matrices is for the kernels of the CPU"));
        };
        file.add(tensor.stored(), tensor.data()?, rows, cols, &cpu.pool)
            .map(|packed| Self(CpuBackend::hold(packed)))
            .map_err(|error| error.context(format!("tensor {:?}", tensor.name)))
    }

    /// A matrix without contents, for a [dry run](Context::dry_run).
    ///
    /// # Errors
    /// [`crate::ErrorKind::Unsupported`] if the device has no kernels for its shape,
    /// [`crate::ErrorKind::Internal`] on a device that computes.
    pub(crate) fn without_weights(context: &Context, dtype: DType, rows: usize, cols: usize) -> Result<Self> {
        if !context.is_dry_run() {
            return Err(Error::internal("a matrix without weights is of use in a dry run only"));
        }
        on_device!(context.backend(), |device| {
            Ok(Self(Held::new(device, device.matrix_without_weights(dtype, rows, cols)?)))
        })
    }

    /// Outputs.
    #[must_use]
    pub fn rows(&self) -> usize {
        with_held!(&self.0, |matrix| DeviceMatrix::rows(matrix))
    }

    /// Inputs.
    #[must_use]
    pub fn cols(&self) -> usize {
        with_held!(&self.0, |matrix| DeviceMatrix::cols(matrix))
    }

    /// The type of the values.
    #[must_use]
    pub fn dtype(&self) -> DType {
        with_held!(&self.0, |matrix| DeviceMatrix::dtype(matrix))
    }

    /// Bytes of memory, all of which a matmul reads.
    #[must_use]
    pub fn num_bytes(&self) -> usize {
        with_held!(&self.0, |matrix| DeviceMatrix::num_bytes(matrix))
    }

    pub(crate) fn held(&self) -> &Held<Matrices> {
        &self.0
    }
}

/// Matrices of one shape and type, one for each head or expert: `[num_matrices, rows, cols]`.
#[derive(Debug)]
pub struct MatrixStack {
    rows: usize,
    cols: usize,
    dtype: DType,
    held: Held<Stacks>,
}

impl MatrixStack {
    /// A stack of these matrices, in this order.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Unsupported`] on a device that has no kernels for them, [`crate::ErrorKind::InvalidModel`]
    /// if there are none, [`crate::ErrorKind::Internal`] if they differ in shape.
    pub fn new(context: &Context, matrices: Vec<Matrix>) -> Result<Self> {
        let Some(first) = matrices.first() else {
            return Err(Error::invalid_model("there are no matrices to choose from"));
        };
        let (rows, cols, dtype) = (first.rows(), first.cols(), first.dtype());
        if let Some(other) = matrices.iter().find(|matrix| (matrix.rows(), matrix.cols()) != (rows, cols)) {
            return Err(Error::internal(format!(
                "a matrix of {} × {} is in a stack of {rows} × {cols}",
                other.rows(),
                other.cols()
            )));
        }
        let held = on_device!(context.backend(), |device| {
            Held::new(device, device.stack(on(device, matrices)?)?)
        });
        Ok(Self { rows, cols, dtype, held })
    }

    /// Adds the transposed matrices, `[num_matrices, cols, rows]`, for the ops that multiply from the other side.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Internal`] if there are others, or if the device does not need them; as [`Self::new`].
    pub fn with_transposed(mut self, context: &Context, matrices: Vec<Matrix>) -> Result<Self> {
        let (num, shape) = (self.len(), (self.cols, self.rows));
        if matrices.len() != num {
            return Err(Error::internal(format!("{} of {num} matrices are transposed", matrices.len())));
        }
        if matrices.iter().any(|matrix| (matrix.rows(), matrix.cols()) != shape) {
            return Err(Error::internal("a matrix is not the transposed one of a stack"));
        }
        on_device!(context.backend(), |device| {
            device.transpose(self.held.on_mut(device)?, on(device, matrices)?)?;
        });
        Ok(self)
    }

    /// The number of matrices.
    #[must_use]
    pub fn len(&self) -> usize {
        with_held!(&self.held, |stack| DeviceStack::len(stack))
    }

    /// False: there is at least one matrix.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Outputs of each matrix.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Inputs of each matrix.
    #[must_use]
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The type of the first matrix's values.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Bytes of all matrices, without transposed ones.
    #[must_use]
    pub fn num_bytes(&self) -> usize {
        with_held!(&self.held, |stack| DeviceStack::num_bytes(stack))
    }

    pub(crate) fn held(&self) -> &Held<Stacks> {
        &self.held
    }
}

/// The matrices in the device's format.
fn on<D: Ops>(device: &D, matrices: Vec<Matrix>) -> Result<Vec<D::Matrix>> {
    matrices.into_iter().map(|matrix| matrix.0.take(device)).collect()
}

/// A vector of weights, on the host and, if it is separate, on the device.
#[derive(Debug)]
pub struct Vector {
    values: Vec<f32>,
    held: Held<Vectors>,
}

impl Vector {
    /// Copies the values to the device.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Capacity`] if it has no memory.
    pub fn new(context: &Context, values: Vec<f32>) -> Result<Self> {
        let held = on_device!(context.backend(), |device| Held::new(device, device.vector(&values)?));
        Ok(Self { values, held })
    }

    pub(crate) fn held(&self) -> &Held<Vectors> {
        &self.held
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

/// `y = W·x + b` for each matrix of a stack.
#[derive(Debug)]
pub struct LinearStack {
    /// `[num_matrices, outputs, inputs]`.
    pub weight: MatrixStack,
    /// A value for each output of each matrix, `[num_matrices, outputs]`.
    pub bias: Option<Vector>,
}

impl LinearStack {
    /// Without biases.
    #[must_use]
    pub fn unbiased(weight: MatrixStack) -> Self {
        Self { weight, bias: None }
    }

    /// The biases of a matrix.
    pub(super) fn bias_of(&self, index: usize) -> Option<&[f32]> {
        let outputs = self.weight.rows();
        Some(&self.bias.as_deref()?[index * outputs..][..outputs])
    }

    /// The expected number of biases.
    pub(super) fn num_outputs(&self) -> usize {
        self.weight.len() * self.weight.rows()
    }
}

/// `y = w · x / √(mean(x²) + eps)`.
#[derive(Debug)]
pub struct RmsNorm {
    /// A factor for each value of a row.
    pub weight: Vector,
    /// Added to the mean square.
    pub eps: f32,
}

impl<'a> From<&'a RmsNorm> for Norm<'a> {
    fn from(norm: &'a RmsNorm) -> Self {
        Self { weight: &norm.weight, eps: norm.eps }
    }
}
