//! Activations in half precision, packed once for all matmuls with several or many rows.

use bytemuck::{Pod, Zeroable, bytes_of};

use super::layout::UNIT;
use super::tensor_cores::{MAX_K_SPLITS, MAX_SEVERAL, MAX_SPLIT_ROWS, MIN_SEVERAL, SLICES};
use crate::ops::gpu::backend::{Flags, GpuBackend, Work};
use crate::ops::gpu::cost::Cost;
use crate::ops::gpu::kernel::Kernel;
use crate::ops::gpu::{Binding, GpuBuffer, Placement};
use crate::weights::DType;
use crate::{Error, Result};

/// Packed rows are padded to multiples of this many columns, two steps of the kernel.
const COLUMNS: usize = 128;

/// Maximum threads that pack a row for GEMMs of many rows: each keeps a unit that it has read. Shorter rows have
/// multiples of `NUM_THREADS / 2`.
const NUM_THREADS: usize = 256;

/// The same for GEMMs of several rows: the thread block of GEMMs of few.
pub(in crate::ops::gpu) const NUM_THREADS_IN_ORDER: usize = 32 * SLICES;

/// `PackArgs` of the kernels.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct PackArgs {
    num_units: u32,
    stride: u32,
    x_stride: u32,
    x_next: u32,
    num_rows: u32,
    num_matrices: u32,
    eps: f32,
    is_fixed: u32,
}

/// `OrderedArgs` of the kernels.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct OrderedArgs {
    num_units: u32,
    stride: u32,
    x_stride: u32,
    eps: f32,
}

/// The order of a format's columns, as decoding pairs them in words. `Pairs` of the kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(in crate::ops::gpu) enum Pairs {
    Neighbours,
    FourApart,
    TwoApart,
}

impl Pairs {
    pub(in crate::ops::gpu) fn of(format: DType) -> Self {
        match format {
            DType::F32 | DType::F16 | DType::BF16 => Self::Neighbours,
            DType::Q8_0 | DType::Q8S | DType::Iq4Nl => Self::TwoApart,
            _ => Self::FourApart,
        }
    }

    /// The distance of the two columns in a word.
    pub(in crate::ops::gpu) fn apart(self) -> usize {
        match self {
            Self::Neighbours => 1,
            Self::FourApart => 4,
            Self::TwoApart => 2,
        }
    }

    /// Its name in kernels.
    pub(in crate::ops::gpu) fn name(self) -> &'static str {
        match self {
            Self::Neighbours => "neighbours",
            Self::FourApart => "four_apart",
            Self::TwoApart => "two_apart",
        }
    }
}

/// Memory for packed activations.
#[derive(Debug)]
pub(crate) struct PackedActivations {
    /// Rows of [`stride`] columns: row by row for several rows, in the order of `packed.h` for many.
    halves: GpuBuffer,
    /// The factors of the rows' dot products.
    factors: GpuBuffer,
    /// The partial sums of thread blocks that share columns (split-K): `[split, row, columns]`.
    partials: GpuBuffer,
    /// The capacity of each split, in rows.
    max_split_rows: usize,
}

/// Activations to pack.
#[derive(Debug, Clone, Copy)]
pub(in crate::ops::gpu) struct UnpackedActivations<'a> {
    pub(in crate::ops::gpu) x: Binding<'a>,
    pub(in crate::ops::gpu) x_stride: usize,
    /// The stride of matrices' activations, in values.
    pub(in crate::ops::gpu) x_next: usize,
    /// Rows of each matrix.
    pub(in crate::ops::gpu) num_rows: usize,
    pub(in crate::ops::gpu) num_matrices: usize,
    pub(in crate::ops::gpu) num_units: usize,
    /// The weights of a norm, and its epsilon.
    pub(in crate::ops::gpu) norm: Option<(Binding<'a>, f32)>,
    /// Whether all rows have the factor that is a constant of the kernels.
    pub(in crate::ops::gpu) is_fixed: bool,
}

/// The packed activations.
#[derive(Debug, Clone, Copy)]
pub(in crate::ops::gpu) struct PackedRows<'a> {
    pub(in crate::ops::gpu) halves: Binding<'a>,
    pub(in crate::ops::gpu) stride: usize,
    /// None if all rows have the kernels' constant factor.
    pub(in crate::ops::gpu) factors: Option<Binding<'a>>,
}

/// Columns of a packed row.
pub(in crate::ops::gpu) fn stride(num_cols: usize) -> usize {
    num_cols.next_multiple_of(COLUMNS)
}

/// The order of columns in which a kernel packs its results, `[row, num_cols]`, for a matmul with weights of the format
/// `next`; none if they stay floats, because the matmul reads floats or packed rows do not fit into `out`.
///
/// Results are packed exactly as by [`PackedActivations::pack`], so that a row has the same bits in both cases.
pub(in crate::ops::gpu) fn for_next(
    gpu: &GpuBackend,
    next: Option<DType>,
    num_rows: usize,
    num_cols: usize,
    out: &GpuBuffer,
) -> Option<Pairs> {
    let is_read_so = gpu.tuning().has_tensor_cores() && num_rows > MAX_SEVERAL;
    let fits = 2 * num_rows * stride(num_cols) <= out.len();
    next.filter(|format| is_read_so && fits && *format != DType::F32).map(Pairs::of)
}

impl PackedActivations {
    /// Memory for `max_rows` rows of `max_cols` values; none if no matmul of this many rows needs it.
    pub(crate) fn new(gpu: &GpuBackend, max_rows: usize, max_cols: usize) -> Result<Option<Self>> {
        if !gpu.tuning().has_tensor_cores() || max_rows < MIN_SEVERAL || max_cols == 0 {
            return Ok(None);
        }
        let allocate = |len: usize| gpu.device().allocate(len, Placement::Private);
        let halves = allocate(2 * max_rows * stride(max_cols))?;
        let max_split_rows = max_rows.min(MAX_SPLIT_ROWS);
        let partials = allocate(4 * MAX_K_SPLITS * max_split_rows * max_cols)?;
        Ok(Some(Self { halves, factors: allocate(4 * max_rows)?, partials, max_split_rows }))
    }

    /// Grows the memory to this many values, or allocates it.
    pub(crate) fn reserve(
        packed: &mut Option<Self>,
        gpu: &GpuBackend,
        max_rows: usize,
        max_cols: usize,
    ) -> Result<()> {
        match (&mut *packed, Self::new(gpu, max_rows, max_cols)?) {
            (Some(old), Some(new)) => {
                old.max_split_rows = old.max_split_rows.max(new.max_split_rows);
                let buffers = [
                    (&mut old.halves, new.halves),
                    (&mut old.factors, new.factors),
                    (&mut old.partials, new.partials),
                ];
                for (old, new) in buffers {
                    if old.len() < new.len() {
                        *old = new;
                    }
                }
            }
            (None, new) => *packed = new,
            (Some(_), None) => (),
        }
        Ok(())
    }

    /// The maximum number of thread blocks that share the columns of a tile of results, which have `num_cols` columns.
    /// It is the same for every number of rows up to [`MAX_SPLIT_ROWS`], and so is the order of additions.
    pub(in crate::ops::gpu) fn max_k_splits(&self, num_cols: usize) -> usize {
        let len = 4 * self.max_split_rows * num_cols;
        [MAX_K_SPLITS, 2]
            .into_iter()
            .find(|num_k_splits| num_k_splits * len <= self.partials.len())
            .unwrap_or(1)
    }

    /// The memory of partial sums.
    pub(in crate::ops::gpu) fn partials(&self) -> &GpuBuffer {
        &self.partials
    }

    /// Packs activations for a matmul with several rows and weights of a format.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Internal`] if there is no space for them.
    pub(in crate::ops::gpu) fn pack_in_order(
        &self,
        gpu: &GpuBackend,
        rows: UnpackedActivations<'_>,
        format: DType,
    ) -> Result<PackedRows<'_>> {
        let UnpackedActivations { x, x_stride, num_rows, num_units, norm, .. } = rows;
        let stride = self.checked_stride(num_rows, num_units * UNIT)?;
        let args = OrderedArgs {
            num_units: num_units as u32,
            stride: stride as u32,
            x_stride: x_stride as u32,
            eps: norm.map_or(0.0, |(_, eps)| eps),
        };
        gpu.launch(
            Kernel::PackInOrder(Pairs::of(format)),
            Flags::of([norm.is_some()]),
            Work {
                args: bytes_of(&args),
                buffers: &self.buffers(x, norm),
                threadgroup_memory: 0,
                grid: [num_rows, 1, 1],
                num_threads: NUM_THREADS_IN_ORDER,
                cost: Cost::bytes(num_rows * (4 * num_units * UNIT + 2 * stride)),
            },
        )?;
        let factors = norm.is_some().then(|| Binding::read(&self.factors));
        Ok(PackedRows { halves: Binding::read(&self.halves), stride, factors })
    }

    /// The stride of packed rows, in values.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Internal`] if there is no space for this many rows.
    fn checked_stride(&self, num_rows: usize, num_cols: usize) -> Result<usize> {
        let stride = stride(num_cols);
        if 2 * num_rows * stride > self.halves.len() || 4 * num_rows > self.factors.len() {
            return Err(Error::internal(format!(
                "{num_rows} rows of {num_cols} activations are to be packed to {} bytes",
                self.halves.len()
            )));
        }
        Ok(stride)
    }

    fn buffers<'a>(&'a self, x: Binding<'a>, norm: Option<(Binding<'a>, f32)>) -> [Binding<'a>; 4] {
        let norm = norm.map_or(x, |(weights, _)| weights);
        [x, norm, Binding::write(&self.halves), Binding::write(&self.factors)]
    }

    /// Packs activations for a matmul with many rows and weights of a format.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Internal`] if there is no space for them.
    pub(in crate::ops::gpu) fn pack(
        &self,
        gpu: &GpuBackend,
        rows: UnpackedActivations<'_>,
        format: DType,
    ) -> Result<PackedRows<'_>> {
        let UnpackedActivations { x, x_stride, x_next, num_rows, num_matrices, num_units, norm, is_fixed } =
            rows;
        let num_cols = num_units * UNIT;
        let stride = self.checked_stride(num_rows * num_matrices, num_cols)?;
        let args = PackArgs {
            num_units: num_units as u32,
            stride: stride as u32,
            x_stride: x_stride as u32,
            x_next: x_next as u32,
            num_rows: num_rows as u32,
            num_matrices: num_matrices as u32,
            eps: norm.map_or(0.0, |(_, eps)| eps),
            is_fixed: is_fixed.into(),
        };
        gpu.launch(
            Kernel::PackRows(Pairs::of(format)),
            Flags::of([norm.is_some()]),
            Work {
                args: bytes_of(&args),
                buffers: &self.buffers(x, norm),
                threadgroup_memory: 0,
                grid: [num_rows, num_matrices, 1],
                num_threads: num_units.next_multiple_of(NUM_THREADS / 2).min(NUM_THREADS),
                cost: Cost::bytes(num_matrices * num_rows * (8 * num_cols + 2 * stride)),
            },
        )?;
        let factors = (!is_fixed).then(|| Binding::read(&self.factors));
        Ok(PackedRows { halves: Binding::read(&self.halves), stride, factors })
    }
}
