//! Operands of matmuls: matrices, activations and results, and the kernels' arguments.

use std::ops::Range;

use bytemuck::{Pod, Zeroable};

use super::layout::{Planes, UNIT};
use super::matrix::{GpuMatrix, GpuStack};
use super::packed_activations::{self, PackedActivations, UnpackedActivations};
use super::plan::{MIN_MATMUL_TOKENS, Tile};
use super::tensor_cores::{MatmulVariant, Size};
use super::tiles::Lanes;
use crate::ops::gpu::Binding;
use crate::ops::gpu::backend::{Flags, GpuBackend};
use crate::ops::gpu::cost::Cost;
use crate::weights::DType;
use crate::{Error, Result};

/// A matrix of a matmul, the offset of its results in a row of the output, and its bias.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GpuProjection<'a> {
    pub(super) matrix: &'a GpuMatrix,
    /// The rows of the matrix, or of each matrix of a stack.
    pub(super) num_rows: usize,
    out_offset: usize,
    pub(super) bias: Option<Binding<'a>>,
}

impl<'a> GpuProjection<'a> {
    pub(crate) fn new(matrix: &'a GpuMatrix) -> Self {
        Self { matrix, num_rows: matrix.rows(), out_offset: 0, bias: None }
    }

    pub(crate) fn of_stack(stack: &'a GpuStack) -> Self {
        Self { num_rows: stack.rows(), ..Self::new(stack.matrix()) }
    }

    pub(crate) fn at(self, out_offset: usize) -> Self {
        Self { out_offset, ..self }
    }

    pub(crate) fn with_bias(self, bias: Option<Binding<'a>>) -> Self {
        Self { bias, ..self }
    }
}

/// The matrices of stacks to multiply, and the rows of activations for each.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Stacked<'a> {
    /// No stacks: single matrices.
    No,
    /// All of them, one for each head: each is multiplied by its range of every row.
    Heads {
        num_heads: usize,
        /// The stride of heads' activations, in values.
        x_stride: usize,
        out_stride: usize,
    },
    /// The matrices of groups of rows.
    Groups(Groups<'a>),
}

/// The groups of a step, and their rows.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Groups<'a> {
    /// `RowGroup` of the kernels.
    pub(in crate::ops::gpu) list: Binding<'a>,
    /// The maximum number of groups.
    pub(in crate::ops::gpu) num_groups: usize,
    /// The maximum rows of a group.
    pub(in crate::ops::gpu) max_rows: usize,
    /// Choices per token.
    pub(in crate::ops::gpu) num_choices: usize,
    /// The row of activations for each slot, if it is not the slot's index.
    pub(in crate::ops::gpu) rows: Option<Binding<'a>>,
}

impl Groups<'_> {
    /// Bytes of a group in the list.
    pub(in crate::ops::gpu) const BYTES: usize = 12;

    /// The maximum rows of a group in any step: what the kernels compute together.
    pub(in crate::ops::gpu) fn most_rows(gpu: &GpuBackend) -> usize {
        if gpu.tuning().has_tensor_cores() { MatmulVariant::MAX_TOKENS } else { Tile::MAX_TOKENS }
    }

    /// The maximum rows of a group in a step of `num_rows` rows with this many choices among this many matrices, at
    /// most `most`. It is small if few rows will share a matrix.
    pub(in crate::ops::gpu) fn max_rows(
        most: usize,
        num_rows: usize,
        num_choices: usize,
        num_matrices: usize,
    ) -> usize {
        if num_rows < MIN_MATMUL_TOKENS {
            return (num_rows * num_choices).div_ceil(num_matrices).next_power_of_two().min(4);
        }
        (num_rows * num_choices / num_matrices).next_power_of_two().clamp(8, most)
    }
}

/// The activations and results of a matmul.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Operands<'a> {
    pub(crate) num_tokens: usize,
    pub(crate) x: Binding<'a>,
    pub(crate) x_stride: usize,
    /// The weights of a norm before the matmul, and its epsilon.
    pub(crate) norm: Option<(Binding<'a>, f32)>,
    /// With [`crate::ops::gpu::Access::ReadWrite`], results are added to the previous values.
    pub(crate) out: Binding<'a>,
    pub(crate) out_stride: usize,
    /// Whether results are in half precision, which is possible from five rows on.
    pub(crate) is_half: bool,
    pub(crate) stacked: Stacked<'a>,
    /// Memory for packed activations, if kernels of the device use them.
    pub(crate) packed: Option<&'a PackedActivations>,
    /// Whether the kernel that computed the activations has packed them.
    pub(crate) is_packed: bool,
}

/// `MatrixArgs` of the kernels.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct MatrixArgs {
    planes: Planes,
    pub(super) num_rows: u32,
    out_offset: u32,
    pub(super) first_group: u32,
}

impl MatrixArgs {
    pub(super) const NONE: Self =
        Self { planes: Planes::NONE, num_rows: 0, out_offset: 0, first_group: u32::MAX };

    /// The matrices of a launch whose threadgroups compute `rows_per_group` rows each, and the number of threadgroups.
    pub(super) fn list(projections: &[GpuProjection<'_>], rows_per_group: usize) -> ([Self; 3], usize) {
        let mut list = [Self::NONE; 3];
        let mut num_groups = 0;
        for (args, projection) in list.iter_mut().zip(projections) {
            *args = Self {
                planes: projection.matrix.planes(),
                num_rows: projection.num_rows as u32,
                out_offset: projection.out_offset as u32,
                first_group: num_groups as u32,
            };
            num_groups += projection.num_rows.div_ceil(rows_per_group);
        }
        (list, num_groups)
    }
}

/// `MatvecArgs` and `MatmulArgs` of the Metal kernels.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct MatmulArgs {
    num_units: u32,
    num_tokens: u32,
    x_stride: u32,
    out_stride: u32,
    x_next: u32,
    out_next: u32,
    gathers: u32,
    eps: f32,
    matrices: [MatrixArgs; 3],
}

/// `MatmulArgs` of the kernels for tensor cores.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct TensorArgs {
    matmul: MatmulArgs,
    num_tiles: u32,
    num_groups: u32,
    pub(super) num_first: u32,
    x_rows: u32,
}

impl<'a> Operands<'a> {
    pub(super) fn adds(&self) -> bool {
        self.out.access == crate::ops::gpu::Access::ReadWrite
    }

    /// The weights of the norm; another buffer for a kernel that reads none.
    pub(super) fn norm(&self) -> Binding<'a> {
        self.norm.map_or(self.x, |(norm, _)| norm)
    }

    pub(super) fn flags(&self, has_bias: bool) -> Flags {
        let is_grouped = matches!(self.stacked, Stacked::Groups(_));
        Flags::of([self.norm.is_some(), has_bias, self.adds(), is_grouped, self.is_half])
    }

    /// The list of groups and that of their rows; another buffer for a kernel that reads none.
    pub(super) fn groups(&self) -> [Binding<'a>; 2] {
        match self.stacked {
            Stacked::Groups(groups) => [groups.list, groups.rows.unwrap_or(groups.list)],
            Stacked::No | Stacked::Heads { .. } => [self.x; 2],
        }
    }

    /// Matrices to multiply, of each projection.
    pub(super) fn num_matrices(&self) -> usize {
        match self.stacked {
            Stacked::No => 1,
            Stacked::Heads { num_heads, .. } => num_heads,
            Stacked::Groups(groups) => groups.num_groups,
        }
    }

    /// The same for one row of activations, in any batch.
    pub(super) fn num_matrices_of_a_token(&self) -> usize {
        match self.stacked {
            Stacked::No | Stacked::Heads { .. } => self.num_matrices(),
            Stacked::Groups(groups) => groups.num_choices,
        }
    }

    /// Rows of activations of each matrix.
    pub(super) fn rows_each(&self) -> usize {
        match self.stacked {
            Stacked::No | Stacked::Heads { .. } => self.num_tokens,
            Stacked::Groups(groups) => groups.max_rows,
        }
    }

    /// The properties that select the variant of a matmul on tensor cores.
    pub(super) fn size(&self, num_results: usize, num_units: usize, lanes: Lanes) -> Size {
        let (num_rows, num_matrices) = (self.rows_each(), self.num_matrices());
        Size {
            num_rows,
            num_results,
            num_matrices,
            is_grouped: matches!(self.stacked, Stacked::Groups(_)),
            num_columns: num_units * UNIT,
            lanes,
            max_k_splits: match (self.packed, self.stacked) {
                (Some(packed), Stacked::No) => packed.max_k_splits(self.out_stride),
                _ => 0,
            },
        }
    }

    /// The inputs of a variant of a matmul on tensor cores. For several and many rows these are packed activations with
    /// their factors instead of the norm, and adjacent rows for all matrices.
    pub(super) fn for_variant(
        &self,
        gpu: &GpuBackend,
        variant: MatmulVariant,
        format: DType,
        num_units: usize,
    ) -> Result<Self> {
        if self.is_packed {
            return match variant {
                MatmulVariant::Many { .. } => {
                    Ok(Self { x_stride: packed_activations::stride(num_units * UNIT), ..*self })
                }
                _ => Err(Error::internal("a matmul of a few rows has packed activations")),
            };
        }
        if matches!(variant, MatmulVariant::Few { .. }) {
            return Ok(*self);
        }
        let packed =
            self.packed.ok_or_else(|| Error::internal("a matmul has no memory for packed activations"))?;
        let (num_rows, num_matrices, x_next) = match self.stacked {
            Stacked::Heads { num_heads, x_stride, .. } if x_stride > 0 => {
                (self.num_tokens, num_heads, x_stride)
            }
            _ => (self.packed_rows(), 1, 0),
        };
        let &Self { x, x_stride, norm, .. } = self;
        // The kernels pack their results with the same factor, so that a row has the same bits in both cases.
        let is_fixed = norm.is_none() && matches!(self.stacked, Stacked::No);
        let unpacked =
            UnpackedActivations { x, x_stride, x_next, num_rows, num_matrices, num_units, norm, is_fixed };
        let rows = match variant {
            MatmulVariant::Several { .. } => packed.pack_in_order(gpu, unpacked, format)?,
            _ => packed.pack(gpu, unpacked, format)?,
        };
        let stacked = match self.stacked {
            Stacked::Heads { num_heads, x_stride, out_stride } => {
                Stacked::Heads { num_heads, x_stride: if x_stride == 0 { 0 } else { num_rows }, out_stride }
            }
            other => other,
        };
        let (x, x_stride, norm) = (rows.halves, rows.stride, rows.factors.map(|factors| (factors, 0.0)));
        Ok(Self { x, x_stride, norm, stacked, ..*self })
    }

    /// The cost of these matmuls for a kernel that computes multiples of `unit` rows.
    pub(super) fn cost(&self, projections: &[GpuProjection<'_>], unit: usize) -> Cost {
        let (num_matrices, rows_each) = (self.num_matrices(), self.rows_each());
        let num_padded = num_matrices * rows_each.next_multiple_of(unit);
        let of_projection = |projection: &GpuProjection<'_>| {
            let (matrix, num_rows) = (projection.matrix, projection.num_rows);
            let weights = matrix.num_bytes() / (matrix.rows() / num_rows).max(1);
            let activations = 4 * rows_each * (matrix.cols() + num_rows);
            Cost {
                operations: 2 * num_padded as u64 * num_rows as u64 * matrix.cols() as u64,
                bytes: (num_matrices * (weights + activations)) as u64,
            }
        };
        projections.iter().map(of_projection).sum()
    }

    /// Splits the matmuls into launches with the maximum rows of activations, or groups, that one may compute.
    pub(super) fn chunks(
        &self,
        gpu: &GpuBackend,
        projections: &[GpuProjection<'_>],
    ) -> impl Iterator<Item = Self> {
        let (num_all, of_one, unit) = match self.stacked {
            Stacked::No | Stacked::Heads { .. } => {
                (self.num_tokens, Operands { num_tokens: 1, ..*self }.cost(projections, 1), Tile::MAX_TOKENS)
            }
            Stacked::Groups(groups) => {
                let stacked = Stacked::Groups(Groups { num_groups: 1, ..groups });
                (groups.num_groups, Operands { stacked, ..*self }.cost(projections, groups.max_rows), 1)
            }
        };
        self.cut(num_all, gpu.dispatch_budget().num_within(Cost { bytes: 0, ..of_one }, unit))
    }

    /// Splits the matmuls into ranges of at most `len` rows of activations, or groups.
    pub(super) fn cut(&self, num_all: usize, len: usize) -> impl Iterator<Item = Self> {
        (0..num_all).step_by(len).map(move |first| {
            let len = len.min(num_all - first);
            if let Stacked::Groups(groups) = self.stacked {
                let list = groups.list.at(groups.list.offset + first * Groups::BYTES);
                return Self {
                    stacked: Stacked::Groups(Groups { list, num_groups: len, ..groups }),
                    ..*self
                };
            }
            let out_bytes = if self.is_half { 2 } else { 4 };
            Operands {
                num_tokens: len,
                x: self.x.at(self.x.offset + 4 * first * self.x_stride),
                out: self.out.at(self.out.offset + out_bytes * first * self.out_stride),
                ..*self
            }
        })
    }

    /// The range of rows of activations and results from `rows.start` on.
    pub(crate) fn of_rows(self, rows: Range<usize>) -> Self {
        let from = |binding: Binding<'a>, stride: usize| binding.at(binding.offset + 4 * rows.start * stride);
        let (x, out) = (from(self.x, self.x_stride), from(self.out, self.out_stride));
        Self { num_tokens: rows.len(), x, out, ..self }
    }

    /// Rows of activations to pack, for all matrices: those that are adjacent.
    pub(super) fn packed_rows(&self) -> usize {
        match self.stacked {
            Stacked::Heads { num_heads, x_stride, .. } if x_stride > 0 => self.num_tokens * num_heads,
            Stacked::Groups(Groups { rows: None, num_choices, .. }) => self.num_tokens * num_choices,
            // One row for all matrices.
            Stacked::No | Stacked::Heads { .. } | Stacked::Groups(_) => self.num_tokens,
        }
    }

    pub(super) fn tensor_args(
        &self,
        num_units: usize,
        matrices: [MatrixArgs; 3],
        num_tiles: usize,
    ) -> TensorArgs {
        TensorArgs {
            matmul: self.args(num_units, matrices),
            num_tiles: num_tiles as u32,
            num_groups: self.num_matrices() as u32,
            num_first: 0,
            x_rows: self.packed_rows() as u32,
        }
    }

    pub(super) fn args(&self, num_units: usize, matrices: [MatrixArgs; 3]) -> MatmulArgs {
        let (x_next, out_next) = match self.stacked {
            Stacked::Heads { x_stride, out_stride, .. } => (x_stride, out_stride),
            Stacked::No | Stacked::Groups(_) => (0, 0),
        };
        let gathers = matches!(self.stacked, Stacked::Groups(Groups { rows: Some(_), .. }));
        MatmulArgs {
            num_units: num_units as u32,
            num_tokens: self.num_tokens as u32,
            x_stride: self.x_stride as u32,
            out_stride: self.out_stride as u32,
            x_next: x_next as u32,
            out_next: out_next as u32,
            gathers: gathers.into(),
            eps: self.norm.map_or(0.0, |(_, eps)| eps),
            matrices,
        }
    }
}
