//! A weight matrix in a GPU's memory.

use super::launch::{max_exact_rows, max_exact_rows_of_router};
use super::layout::{Layout, Planes, UNIT};
use crate::ops::gpu::backend::GpuBackend;
use crate::ops::gpu::{Binding, GpuBuffer, Placement};
use crate::weights::{DType, FileType, RawTensor};
use crate::{Error, Result};

/// A matrix of `rows` outputs and `cols` inputs, with the bytes of its type in files.
#[derive(Debug)]
pub(crate) struct GpuMatrix {
    /// The type in memory, which may differ from the file's.
    dtype: DType,
    rows: usize,
    cols: usize,
    planes: Planes,
    is_tiled: bool,
    num_bytes: usize,
    buffer: GpuBuffer,
    /// The offset of the matrix in the buffer.
    offset: usize,
}

impl GpuMatrix {
    /// The matrix of a checkpoint. A dense one stays in the mapped file if the device can read it there.
    pub(crate) fn new(gpu: &GpuBackend, tensor: &RawTensor<'_>, rows: usize, cols: usize) -> Result<Self> {
        gpu.note_exact_rows(max_exact_rows(gpu, tensor.dtype));
        let layout = Layout::new(gpu.tuning().order(), tensor.dtype, rows, cols);
        let data = tensor.data()?;
        let is_kept = tensor.stored() == FileType::Kept(tensor.dtype);
        if is_kept && layout.is_as_in_file() && (data.as_ptr() as usize).is_multiple_of(UNIT) {
            check(tensor.stored(), data, rows, cols)?;
            if let Some((buffer, offset)) = gpu.device().wrap(&tensor.share()?)? {
                let num_bytes = data.len();
                let (planes, is_tiled) = (layout.planes(), layout.is_tiled());
                return Ok(Self {
                    dtype: tensor.dtype,
                    rows,
                    cols,
                    planes,
                    is_tiled,
                    num_bytes,
                    buffer,
                    offset,
                });
            }
        }
        Self::repacked(gpu, tensor.stored(), data, rows, cols)
    }

    /// Repacks the row-major `bytes` of a router's matrix, or of another one with a launch of its own.
    pub(crate) fn from_bytes(
        gpu: &GpuBackend,
        file_type: FileType,
        bytes: &[u8],
        rows: usize,
        cols: usize,
    ) -> Result<Self> {
        gpu.note_exact_rows(max_exact_rows_of_router(gpu, file_type.kept_as(), rows));
        Self::repacked(gpu, file_type, bytes, rows, cols)
    }

    fn repacked(
        gpu: &GpuBackend,
        file_type: FileType,
        bytes: &[u8],
        rows: usize,
        cols: usize,
    ) -> Result<Self> {
        check(file_type, bytes, rows, cols)?;
        let layout = Layout::new(gpu.tuning().order(), file_type.kept_as(), rows, cols);
        let num_bytes = layout.num_bytes();
        let mut packed = Ok(());
        let buffer =
            gpu.filled(num_bytes, |target| packed = layout.pack(file_type, bytes, target, gpu.pool()))?;
        packed?;
        Ok(Self::of_buffer(layout, rows, cols, buffer))
    }

    /// A matrix of this shape without contents, for a dry run.
    pub(crate) fn without_weights(gpu: &GpuBackend, dtype: DType, rows: usize, cols: usize) -> Result<Self> {
        Self::unfilled(gpu, Layout::new(gpu.tuning().order(), dtype, rows, cols), rows, cols)
    }

    fn of_buffer(layout: Layout, rows: usize, cols: usize, buffer: GpuBuffer) -> Self {
        let dtype = layout.stored();
        let (planes, is_tiled, num_bytes) = (layout.planes(), layout.is_tiled(), layout.num_bytes());
        Self { dtype, rows, cols, planes, is_tiled, num_bytes, buffer, offset: 0 }
    }

    fn unfilled(gpu: &GpuBackend, layout: Layout, rows: usize, cols: usize) -> Result<Self> {
        check_shape(rows, cols)?;
        let num_bytes = layout.num_bytes();
        let buffer = gpu.device().allocate(num_bytes.max(16), Placement::Shared)?;
        Ok(Self::of_buffer(layout, rows, cols, buffer))
    }

    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    pub(crate) fn cols(&self) -> usize {
        self.cols
    }

    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    pub(crate) fn num_bytes(&self) -> usize {
        self.num_bytes
    }

    pub(in crate::ops::gpu) fn planes(&self) -> Planes {
        self.planes
    }

    /// Whether it is in tiles for tensor cores.
    pub(in crate::ops::gpu) fn is_tiled(&self) -> bool {
        self.is_tiled
    }

    pub(in crate::ops::gpu) fn num_units(&self) -> usize {
        self.cols / UNIT
    }

    pub(in crate::ops::gpu) fn binding(&self) -> Binding<'_> {
        Binding::read(&self.buffer).at(self.offset)
    }
}

/// A stack of matrices of one shape and type, in sequence: the rows of one matrix.
#[derive(Debug)]
pub(crate) struct GpuStack {
    all: GpuMatrix,
    num_matrices: usize,
}

impl GpuStack {
    /// Stacks matrices, at least one, all of `rows` × `cols`.
    pub(crate) fn new(gpu: &GpuBackend, matrices: Vec<GpuMatrix>) -> Result<Self> {
        let num_matrices = matrices.len();
        let Some(&GpuMatrix { dtype, rows, cols, .. }) = matrices.first() else {
            return Err(Error::internal("a stack of no matrices"));
        };
        if let Some(other) = matrices.iter().find(|matrix| matrix.dtype != dtype) {
            return Err(Error::unsupported(format!(
                "matrices that a router chooses from are of {dtype} and of {}, for which there are no kernels on this \
                 device",
                other.dtype
            ))
            .with_hint("use --device cpu"));
        }
        let all_rows = rows * num_matrices;
        let order = gpu.tuning().order();
        let layout = Layout::of_stack(order, dtype, rows, cols, num_matrices);
        let of_one = Layout::new(order, dtype, rows, cols);
        let all = GpuMatrix::unfilled(gpu, layout, all_rows, cols)?;
        // Each is freed as soon as it is copied.
        for (index, matrix) in matrices.into_iter().enumerate() {
            for (from, to, len) in layout.ranges(index, &of_one) {
                gpu.device().copy((&matrix.buffer, matrix.offset + from), (&all.buffer, to), len)?;
            }
        }
        Ok(Self { all, num_matrices })
    }

    pub(crate) fn len(&self) -> usize {
        self.num_matrices
    }

    /// Rows of each matrix.
    pub(in crate::ops::gpu) fn rows(&self) -> usize {
        self.all.rows / self.num_matrices
    }

    /// The rows of the whole stack.
    pub(crate) fn matrix(&self) -> &GpuMatrix {
        &self.all
    }
}

fn check(file_type: FileType, bytes: &[u8], rows: usize, cols: usize) -> Result<()> {
    if file_type.row_bytes(cols)?.checked_mul(rows) != Some(bytes.len()) {
        return Err(Error::invalid_model(format!(
            "a {rows} × {cols} matrix of {file_type} does not have {} bytes",
            bytes.len()
        )));
    }
    check_shape(rows, cols)
}

fn check_shape(rows: usize, cols: usize) -> Result<()> {
    // Kernels count in 32 bits the smallest thing that they read, quarters of units.
    if rows * (cols / UNIT) > u32::MAX as usize / 4 {
        return Err(Error::unsupported(format!(
            "a {rows} × {cols} matrix is too large for the kernels of this device"
        ))
        .with_hint("use --device cpu"));
    }
    if !cols.is_multiple_of(UNIT) {
        return Err(Error::unsupported(format!(
            "a {rows} × {cols} matrix has no kernels on this device: its rows must be a multiple of {UNIT} long"
        ))
        .with_hint("use --device cpu"));
    }
    Ok(())
}
