//! Activations in half precision, rounded once for all products with several or many rows.

use bytemuck::{Pod, Zeroable, bytes_of};

use super::layout::UNIT;
use super::tensor_cores::{MAX_PARTS, MAX_SEVERAL, MAX_SHARED, MIN_SEVERAL, SLICES};
use crate::ops::gpu::backend::{Flags, GpuBackend, Work};
use crate::ops::gpu::cost::Cost;
use crate::ops::gpu::kernel::Kernel;
use crate::ops::gpu::{Binding, GpuBuffer, Placement};
use crate::weights::DType;
use crate::{Error, Result};

/// Columns that rounded rows are filled up to multiples of: two steps of the kernel.
const COLUMNS: usize = 128;

/// The most threads that round a row for products with many rows: each keeps a unit that it has read. Shorter rows have
/// multiples of `NUM_THREADS / 2`.
const NUM_THREADS: usize = 256;

/// The same for products with several: those of a threadgroup of products with few.
pub(in crate::ops::gpu) const NUM_THREADS_IN_ORDER: usize = 32 * SLICES;

/// `RoundArgs` of the kernels.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct RoundArgs {
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

/// The order of a format's columns, as its weights are decoded: which two are a word. `Pairs` of the kernels.
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

    /// How far apart the columns of a word are.
    pub(in crate::ops::gpu) fn apart(self) -> usize {
        match self {
            Self::Neighbours => 1,
            Self::FourApart => 4,
            Self::TwoApart => 2,
        }
    }

    /// As kernels call it.
    pub(in crate::ops::gpu) fn name(self) -> &'static str {
        match self {
            Self::Neighbours => "neighbours",
            Self::FourApart => "four_apart",
            Self::TwoApart => "two_apart",
        }
    }
}

/// Memory for rounded activations.
#[derive(Debug)]
pub(crate) struct Rounded {
    /// Of each row as many columns as [`stride`] says, for several rows row by row, for many in the order of `rounded.h`.
    halves: GpuBuffer,
    /// What the products of a row are multiplied with.
    factors: GpuBuffer,
    /// What threadgroups that share columns leave to be added up: `[part, row, columns]`.
    partials: GpuBuffer,
    /// Rows that there is room for in each part.
    max_shared: usize,
}

/// Activations to be rounded.
#[derive(Debug, Clone, Copy)]
pub(in crate::ops::gpu) struct Unrounded<'a> {
    pub(in crate::ops::gpu) x: Binding<'a>,
    pub(in crate::ops::gpu) x_stride: usize,
    /// Values from those of one matrix to those of the next.
    pub(in crate::ops::gpu) x_next: usize,
    /// Rows of each matrix.
    pub(in crate::ops::gpu) num_rows: usize,
    pub(in crate::ops::gpu) num_matrices: usize,
    pub(in crate::ops::gpu) num_units: usize,
    /// The weights of a norm, and its epsilon.
    pub(in crate::ops::gpu) norm: Option<(Binding<'a>, f32)>,
    /// Whether all rows have the factor that kernels know.
    pub(in crate::ops::gpu) is_fixed: bool,
}

/// Where rounded activations are.
#[derive(Debug, Clone, Copy)]
pub(in crate::ops::gpu) struct RoundedRows<'a> {
    pub(in crate::ops::gpu) halves: Binding<'a>,
    pub(in crate::ops::gpu) stride: usize,
    /// None if all rows have the one that kernels know.
    pub(in crate::ops::gpu) factors: Option<Binding<'a>>,
}

/// Columns of a rounded row.
pub(in crate::ops::gpu) fn stride(num_cols: usize) -> usize {
    num_cols.next_multiple_of(COLUMNS)
}

/// The order of columns in which a kernel is to round its results, `[row, num_cols]`, for a product with weights of the
/// format `next`; none if they stay floats, because the product wants them so or rounded rows do not fit into `out`.
///
/// It rounds them as [`Rounded::round`] would, so that no bit depends on who does it.
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

impl Rounded {
    /// Memory for `max_rows` rows of `max_cols` values; none if no product of so many rows wants it.
    pub(crate) fn new(gpu: &GpuBackend, max_rows: usize, max_cols: usize) -> Result<Option<Self>> {
        if !gpu.tuning().has_tensor_cores() || max_rows < MIN_SEVERAL || max_cols == 0 {
            return Ok(None);
        }
        let allocate = |len: usize| gpu.device().allocate(len, Placement::Private);
        let halves = allocate(2 * max_rows * stride(max_cols))?;
        let max_shared = max_rows.min(MAX_SHARED);
        let partials = allocate(4 * MAX_PARTS * max_shared * max_cols)?;
        Ok(Some(Self { halves, factors: allocate(4 * max_rows)?, partials, max_shared }))
    }

    /// Makes room for so many values in what may have less of it or none.
    pub(crate) fn reserve(
        rounded: &mut Option<Self>,
        gpu: &GpuBackend,
        max_rows: usize,
        max_cols: usize,
    ) -> Result<()> {
        match (&mut *rounded, Self::new(gpu, max_rows, max_cols)?) {
            (Some(old), Some(new)) => {
                old.max_shared = old.max_shared.max(new.max_shared);
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
            (None, new) => *rounded = new,
            (Some(_), None) => (),
        }
        Ok(())
    }

    /// How many threadgroups may share the columns of a tile of results, which have `num_cols` columns: the same for every number
    /// of rows up to [`MAX_SHARED`], so that the order of additions is.
    pub(in crate::ops::gpu) fn max_parts(&self, num_cols: usize) -> usize {
        let len = 4 * self.max_shared * num_cols;
        [MAX_PARTS, 2].into_iter().find(|num_parts| num_parts * len <= self.partials.len()).unwrap_or(1)
    }

    /// Where those leave it.
    pub(in crate::ops::gpu) fn partials(&self) -> &GpuBuffer {
        &self.partials
    }

    /// Rounds activations for a product with several rows and weights of a format.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Internal`] if there is no room for them.
    pub(in crate::ops::gpu) fn round_in_order(
        &self,
        gpu: &GpuBackend,
        rows: Unrounded<'_>,
        format: DType,
    ) -> Result<RoundedRows<'_>> {
        let Unrounded { x, x_stride, num_rows, num_units, norm, .. } = rows;
        let stride = self.stride_with_room(num_rows, num_units * UNIT)?;
        let args = OrderedArgs {
            num_units: num_units as u32,
            stride: stride as u32,
            x_stride: x_stride as u32,
            eps: norm.map_or(0.0, |(_, eps)| eps),
        };
        gpu.launch(
            Kernel::RoundInOrder(Pairs::of(format)),
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
        Ok(RoundedRows { halves: Binding::read(&self.halves), stride, factors })
    }

    /// Values from one rounded row to the next.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Internal`] if there is no room for so many rows.
    fn stride_with_room(&self, num_rows: usize, num_cols: usize) -> Result<usize> {
        let stride = stride(num_cols);
        if 2 * num_rows * stride > self.halves.len() || 4 * num_rows > self.factors.len() {
            return Err(Error::internal(format!(
                "{num_rows} rows of {num_cols} activations are to be rounded to {} bytes",
                self.halves.len()
            )));
        }
        Ok(stride)
    }

    fn buffers<'a>(&'a self, x: Binding<'a>, norm: Option<(Binding<'a>, f32)>) -> [Binding<'a>; 4] {
        let norm = norm.map_or(x, |(weights, _)| weights);
        [x, norm, Binding::write(&self.halves), Binding::write(&self.factors)]
    }

    /// Rounds activations for a product with many rows and weights of a format.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Internal`] if there is no room for them.
    pub(in crate::ops::gpu) fn round(
        &self,
        gpu: &GpuBackend,
        rows: Unrounded<'_>,
        format: DType,
    ) -> Result<RoundedRows<'_>> {
        let Unrounded { x, x_stride, x_next, num_rows, num_matrices, num_units, norm, is_fixed } = rows;
        let num_cols = num_units * UNIT;
        let stride = self.stride_with_room(num_rows * num_matrices, num_cols)?;
        let args = RoundArgs {
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
            Kernel::RoundRows(Pairs::of(format)),
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
        Ok(RoundedRows { halves: Binding::read(&self.halves), stride, factors })
    }
}
