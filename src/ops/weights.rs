//! Weights in the form that the device's kernels read.

use std::ops::Deref;
use std::sync::Arc;

use crate::ops::context::{Backend, Context};
use crate::ops::cpu::matmul::{MatrixFile, PackedMatrix};
use crate::ops::cpu::rope::Norm;
use crate::ops::gpu::{Binding, GpuBackend, GpuBuffer, GpuMatrix, GpuStack};
use crate::ops::reference::ReferenceMatrix;
use crate::weights::{DType, FileType, RawTensor, SharedBytes};
use crate::{Error, Result};

/// A weight matrix of any type, `[rows, cols]` = `[outputs, inputs]`, repacked for the device.
#[derive(Debug)]
pub struct Matrix(MatrixStorage);

#[derive(Debug)]
enum MatrixStorage {
    Cpu(PackedMatrix),
    Gpu(GpuMatrix),
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
            Backend::Cpu(_) => Self::from_bytes(context, tensor.stored(), tensor.data()?, rows, cols),
            Backend::Gpu(gpu) => {
                GpuMatrix::new(gpu, tensor, rows, cols).map(|matrix| Self(MatrixStorage::Gpu(matrix)))
            }
            Backend::Reference(reference) => {
                ReferenceMatrix::new(reference, tensor.stored(), tensor.share()?, rows, cols)
                    .map(|matrix| Self(MatrixStorage::Reference(matrix)))
                    .map_err(Error::from)
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
        file_type: impl Into<FileType>,
        bytes: &[u8],
        rows: usize,
        cols: usize,
    ) -> Result<Self> {
        let file_type = file_type.into();
        match context.backend() {
            Backend::Cpu(cpu) => PackedMatrix::pack(file_type, bytes, rows, cols, &cpu.pool, cpu.level)
                .map(|packed| Self(MatrixStorage::Cpu(packed))),
            Backend::Gpu(gpu) => GpuMatrix::from_bytes(gpu, file_type, bytes, rows, cols)
                .map(|matrix| Self(MatrixStorage::Gpu(matrix))),
            Backend::Reference(reference) => {
                ReferenceMatrix::new(reference, file_type, SharedBytes::owned(bytes.to_vec()), rows, cols)
                    .map(|matrix| Self(MatrixStorage::Reference(matrix)))
                    .map_err(Error::from)
            }
        }
    }

    /// The next matrix of a file of packed ones; none if the file is being made, for [`Self::add_to_file`] to add it.
    ///
    /// # Errors
    /// Those of [`MatrixFile::next`].
    pub fn next_in_file(
        file: &Arc<MatrixFile>,
        dtype: DType,
        rows: usize,
        cols: usize,
    ) -> Result<Option<Self>> {
        Ok(file.next(dtype, rows, cols)?.map(|packed| Self(MatrixStorage::Cpu(packed))))
    }

    /// Repacks a tensor of two dimensions into a file, for the CPU's kernels.
    ///
    /// # Errors
    /// As [`Self::new`] and [`MatrixFile::add`]; [`crate::ErrorKind::Internal`] on another device.
    pub fn add_to_file(context: &Context, file: &Arc<MatrixFile>, tensor: &RawTensor<'_>) -> Result<Self> {
        let (Backend::Cpu(cpu), &[rows, cols]) = (context.backend(), tensor.shape) else {
            return Err(elsewhere("a file of packed matrices"));
        };
        file.add(tensor.stored(), tensor.data()?, rows, cols, &cpu.pool)
            .map(|packed| Self(MatrixStorage::Cpu(packed)))
            .map_err(|error| error.context(format!("tensor {:?}", tensor.name)))
    }

    /// A matrix in which there is nothing, for a [dry run](Context::dry_run).
    ///
    /// # Errors
    /// [`crate::ErrorKind::Unsupported`] if the device has no kernels for its shape,
    /// [`crate::ErrorKind::Internal`] on a device that computes.
    pub(crate) fn without_weights(context: &Context, dtype: DType, rows: usize, cols: usize) -> Result<Self> {
        match context.backend() {
            Backend::Gpu(gpu) if gpu.is_dry_run() => {
                let matrix = GpuMatrix::without_weights(gpu, dtype, rows, cols)?;
                Ok(Self(MatrixStorage::Gpu(matrix)))
            }
            _ => Err(Error::internal("a matrix without weights is of use in a dry run only")),
        }
    }

    /// Outputs.
    #[must_use]
    pub fn rows(&self) -> usize {
        match &self.0 {
            MatrixStorage::Cpu(matrix) => matrix.rows(),
            MatrixStorage::Gpu(matrix) => matrix.rows(),
            MatrixStorage::Reference(matrix) => matrix.num_rows(),
        }
    }

    /// Inputs.
    #[must_use]
    pub fn cols(&self) -> usize {
        match &self.0 {
            MatrixStorage::Cpu(matrix) => matrix.cols(),
            MatrixStorage::Gpu(matrix) => matrix.cols(),
            MatrixStorage::Reference(matrix) => matrix.num_cols(),
        }
    }

    /// How the values are stored.
    #[must_use]
    pub fn dtype(&self) -> DType {
        match &self.0 {
            MatrixStorage::Cpu(matrix) => matrix.dtype(),
            MatrixStorage::Gpu(matrix) => matrix.dtype(),
            MatrixStorage::Reference(matrix) => matrix.dtype(),
        }
    }

    /// Bytes of memory, which is what one product with it reads.
    #[must_use]
    pub fn num_bytes(&self) -> usize {
        match &self.0 {
            MatrixStorage::Cpu(matrix) => matrix.num_bytes(),
            MatrixStorage::Gpu(matrix) => matrix.num_bytes(),
            MatrixStorage::Reference(matrix) => matrix.num_bytes(),
        }
    }

    pub(crate) fn cpu(&self) -> Result<&PackedMatrix> {
        match &self.0 {
            MatrixStorage::Cpu(matrix) => Ok(matrix),
            _ => Err(elsewhere("a matrix")),
        }
    }

    pub(crate) fn gpu(&self) -> Result<&GpuMatrix> {
        match &self.0 {
            MatrixStorage::Gpu(matrix) => Ok(matrix),
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

/// Matrices of one shape and type, one for each head or expert: `[num_matrices, rows, cols]`.
#[derive(Debug)]
pub struct MatrixStack {
    rows: usize,
    cols: usize,
    storage: StackStorage,
}

#[derive(Debug)]
enum StackStorage {
    Cpu {
        matrices: Vec<PackedMatrix>,
        /// The same with rows and columns exchanged, if they are multiplied from either side.
        transposed: Vec<PackedMatrix>,
    },
    Gpu {
        stack: GpuStack,
        transposed: Option<GpuStack>,
    },
    Reference(Vec<ReferenceMatrix>),
}

impl MatrixStack {
    /// These matrices, in this order.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Unsupported`] on a device that has no kernels for them, [`crate::ErrorKind::InvalidModel`]
    /// if there are none, [`crate::ErrorKind::Internal`] if they differ in shape.
    pub fn new(context: &Context, matrices: Vec<Matrix>) -> Result<Self> {
        let Some(first) = matrices.first() else {
            return Err(Error::invalid_model("there are no matrices to choose from"));
        };
        let (rows, cols) = (first.rows(), first.cols());
        if let Some(other) = matrices.iter().find(|matrix| (matrix.rows(), matrix.cols()) != (rows, cols)) {
            return Err(Error::internal(format!(
                "a matrix of {} × {} is in a stack of {rows} × {cols}",
                other.rows(),
                other.cols()
            )));
        }
        let mut storage = match context.backend() {
            Backend::Cpu(_) => {
                StackStorage::Cpu { matrices: Vec::with_capacity(matrices.len()), transposed: Vec::new() }
            }
            Backend::Reference(_) => StackStorage::Reference(Vec::with_capacity(matrices.len())),
            Backend::Gpu(gpu) => {
                let stack = gpu_stack(gpu, matrices)?;
                return Ok(Self { rows, cols, storage: StackStorage::Gpu { stack, transposed: None } });
            }
        };
        for matrix in matrices {
            match (&mut storage, matrix.0) {
                (StackStorage::Cpu { matrices: stack, .. }, MatrixStorage::Cpu(matrix)) => stack.push(matrix),
                (StackStorage::Reference(stack), MatrixStorage::Reference(matrix)) => stack.push(matrix),
                _ => return Err(elsewhere("a matrix")),
            }
        }
        Ok(Self { rows, cols, storage })
    }

    /// Adds the same matrices with rows and columns exchanged, `[num_matrices, cols, rows]`, for the ops that multiply
    /// from the other side.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Internal`] if there are others, or the device has no use for them; as [`Self::new`].
    pub fn with_transposed(mut self, context: &Context, matrices: Vec<Matrix>) -> Result<Self> {
        let (num, shape) = (self.len(), (self.cols, self.rows));
        if matrices.len() != num {
            return Err(Error::internal(format!("{} of {num} matrices are transposed", matrices.len())));
        }
        if matrices.iter().any(|matrix| (matrix.rows(), matrix.cols()) != shape) {
            return Err(Error::internal("a matrix is not the transposed one of a stack"));
        }
        match (&mut self.storage, context.backend()) {
            (StackStorage::Cpu { transposed, .. }, _) => {
                for matrix in matrices {
                    let MatrixStorage::Cpu(matrix) = matrix.0 else { return Err(elsewhere("a matrix")) };
                    transposed.push(matrix);
                }
            }
            (StackStorage::Gpu { transposed, .. }, Backend::Gpu(gpu)) => {
                *transposed = Some(gpu_stack(gpu, matrices)?);
            }
            _ => return Err(elsewhere("a stack of matrices")),
        }
        Ok(self)
    }

    /// How many matrices there are.
    #[must_use]
    pub fn len(&self) -> usize {
        match &self.storage {
            StackStorage::Cpu { matrices, .. } => matrices.len(),
            StackStorage::Gpu { stack, .. } => stack.len(),
            StackStorage::Reference(stack) => stack.len(),
        }
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

    /// Bytes of all matrices, without transposed ones.
    #[must_use]
    pub fn num_bytes(&self) -> usize {
        match &self.storage {
            StackStorage::Cpu { matrices, .. } => matrices.iter().map(PackedMatrix::num_bytes).sum(),
            StackStorage::Gpu { stack, .. } => stack.matrix().num_bytes(),
            StackStorage::Reference(stack) => stack.iter().map(ReferenceMatrix::num_bytes).sum(),
        }
    }

    pub(crate) fn cpu(&self) -> Result<&[PackedMatrix]> {
        match &self.storage {
            StackStorage::Cpu { matrices, .. } => Ok(matrices),
            _ => Err(elsewhere("a stack of matrices")),
        }
    }

    pub(crate) fn gpu(&self) -> Result<&GpuStack> {
        match &self.storage {
            StackStorage::Gpu { stack, .. } => Ok(stack),
            _ => Err(elsewhere("a stack of matrices")),
        }
    }

    /// `[num_matrices, cols, rows]`.
    pub(crate) fn cpu_transposed(&self) -> Result<&[PackedMatrix]> {
        match &self.storage {
            StackStorage::Cpu { transposed, .. } if !transposed.is_empty() => Ok(transposed),
            _ => Err(Error::internal("a stack of matrices has no transposed ones")),
        }
    }

    /// The same on a GPU.
    pub(crate) fn gpu_transposed(&self) -> Result<&GpuStack> {
        match &self.storage {
            StackStorage::Gpu { transposed: Some(transposed), .. } => Ok(transposed),
            _ => Err(Error::internal("a stack of matrices has no transposed ones")),
        }
    }

    pub(crate) fn reference(&self) -> Result<&[ReferenceMatrix]> {
        match &self.storage {
            StackStorage::Reference(stack) => Ok(stack),
            _ => Err(elsewhere("a stack of matrices")),
        }
    }
}

/// A vector of weights, on the host and, if that is elsewhere, on the device.
#[derive(Debug)]
pub struct Vector {
    values: Vec<f32>,
    gpu: Option<GpuBuffer>,
}

impl Vector {
    /// Copies the values to the device.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Capacity`] if it has no memory.
    pub fn new(context: &Context, values: Vec<f32>) -> Result<Self> {
        let gpu = match context.backend() {
            Backend::Cpu(_) | Backend::Reference(_) => None,
            Backend::Gpu(gpu) => Some(gpu.upload(&values)?),
        };
        Ok(Self { values, gpu })
    }

    pub(crate) fn gpu(&self) -> Result<Binding<'_>> {
        self.gpu.as_ref().map(Binding::read).ok_or_else(|| elsewhere("a vector"))
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

impl<'a> From<&'a RmsNorm> for Norm<'a> {
    fn from(norm: &'a RmsNorm) -> Self {
        Self { weight: &norm.weight, eps: norm.eps }
    }
}

fn gpu_stack(gpu: &GpuBackend, matrices: Vec<Matrix>) -> Result<GpuStack> {
    let own = |matrix: Matrix| match matrix.0 {
        MatrixStorage::Gpu(matrix) => Ok(matrix),
        _ => Err(elsewhere("a matrix")),
    };
    GpuStack::new(gpu, matrices.into_iter().map(own).collect::<Result<_>>()?)
}

fn elsewhere(what: &str) -> Error {
    Error::internal(format!("{what} is used on another device than it is on"))
}
