//! What products are launched with: matrices, activations, results, and the arguments of kernels made of them.

use std::ops::Range;

use bytemuck::{Pod, Zeroable};

use super::layout::{Planes, UNIT};
use super::matrix::{GpuMatrix, GpuStack};
use super::plan::{MIN_MATMUL_TOKENS, Tile};
use super::rounded::{self, Rounded, Unrounded};
use super::tensor_cores::{Form, Size};
use super::tiles::Lanes;
use crate::ops::gpu::Binding;
use crate::ops::gpu::backend::{Flags, GpuBackend};
use crate::ops::gpu::cost::Cost;
use crate::weights::DType;
use crate::{Error, Result};

/// A matrix of a product, where its results go within a row of the output, and its bias.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Part<'a> {
    pub(super) matrix: &'a GpuMatrix,
    /// Of the matrix, or of each of those that it is a stack of.
    pub(super) num_rows: usize,
    out_offset: usize,
    pub(super) bias: Option<Binding<'a>>,
}

impl<'a> Part<'a> {
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

/// Which matrices of stacks take part in a product, and which rows of activations belong to each.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Stacked<'a> {
    /// The matrices are no stacks.
    No,
    /// All of them: each is multiplied with a part of every row.
    Heads {
        num_heads: usize,
        /// Values from the activations of one to those of the next.
        x_stride: usize,
        out_stride: usize,
    },
    /// Those of groups of rows.
    Groups(Groups<'a>),
}

/// The groups of a step, and which rows they have.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Groups<'a> {
    /// `RowGroup` of the kernels.
    pub(in crate::ops::gpu) list: Binding<'a>,
    /// How many there may be.
    pub(in crate::ops::gpu) num_groups: usize,
    /// The most rows that one has.
    pub(in crate::ops::gpu) max_rows: usize,
    /// Choices of a token.
    pub(in crate::ops::gpu) num_choices: usize,
    /// The row of activations at each place, if it is not the place itself.
    pub(in crate::ops::gpu) rows: Option<Binding<'a>>,
}

impl Groups<'_> {
    /// Bytes of a group in the list.
    pub(in crate::ops::gpu) const BYTES: usize = 12;

    /// The most rows of a group of any step: what the kernels take together.
    pub(in crate::ops::gpu) fn most_rows(gpu: &GpuBackend) -> usize {
        if gpu.tuning().has_tensor_cores() { Form::MAX_TOKENS } else { Tile::MAX_TOKENS }
    }

    /// The most rows of a group, of a step of `num_rows` rows with this many choices among this many matrices: few if few
    /// rows will meet, and at most `most`.
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

/// The activations of a product and where the results go.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Operands<'a> {
    pub(crate) num_tokens: usize,
    pub(crate) x: Binding<'a>,
    pub(crate) x_stride: usize,
    /// The weights of a norm before the product, and its epsilon.
    pub(crate) norm: Option<(Binding<'a>, f32)>,
    /// With [`crate::ops::gpu::Access::ReadWrite`], results are added to what is there.
    pub(crate) out: Binding<'a>,
    pub(crate) out_stride: usize,
    /// Whether results are in half precision, which those of five rows and more may be.
    pub(crate) is_half: bool,
    pub(crate) stacked: Stacked<'a>,
    /// Memory for rounded activations, if kernels of the device want them.
    pub(crate) rounded: Option<&'a Rounded>,
    /// Whether the kernel that computed the activations has rounded them.
    pub(crate) is_rounded: bool,
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

    /// The matrices of a launch in which a threadgroup computes `rows_per_group` rows, and how many threadgroups
    /// there are.
    pub(super) fn list(parts: &[Part<'_>], rows_per_group: usize) -> ([Self; 3], usize) {
        let mut list = [Self::NONE; 3];
        let mut num_groups = 0;
        for (args, part) in list.iter_mut().zip(parts) {
            *args = Self {
                planes: part.matrix.planes(),
                num_rows: part.num_rows as u32,
                out_offset: part.out_offset as u32,
                first_group: num_groups as u32,
            };
            num_groups += part.num_rows.div_ceil(rows_per_group);
        }
        (list, num_groups)
    }
}

/// `MatvecArgs` and `MatmulArgs` of the kernels.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct ProductArgs {
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

/// `ProductArgs` of the kernels for tensor cores.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct TensorArgs {
    product: ProductArgs,
    num_tiles: u32,
    num_groups: u32,
    pub(super) num_first: u32,
    x_rows: u32,
}

impl<'a> Operands<'a> {
    pub(super) fn adds(&self) -> bool {
        self.out.access == crate::ops::gpu::Access::ReadWrite
    }

    /// The weights of the norm; of a kernel that reads none, something that is there.
    pub(super) fn norm(&self) -> Binding<'a> {
        self.norm.map_or(self.x, |(norm, _)| norm)
    }

    pub(super) fn flags(&self, has_bias: bool) -> Flags {
        let is_grouped = matches!(self.stacked, Stacked::Groups(_));
        Flags::of([self.norm.is_some(), has_bias, self.adds(), is_grouped, self.is_half])
    }

    /// The list of groups and that of their rows; of a kernel that reads none, something that is there.
    pub(super) fn groups(&self) -> [Binding<'a>; 2] {
        match self.stacked {
            Stacked::Groups(groups) => [groups.list, groups.rows.unwrap_or(groups.list)],
            Stacked::No | Stacked::Heads { .. } => [self.x; 2],
        }
    }

    /// Matrices that are multiplied, of each part.
    pub(super) fn num_matrices(&self) -> usize {
        match self.stacked {
            Stacked::No => 1,
            Stacked::Heads { num_heads, .. } => num_heads,
            Stacked::Groups(groups) => groups.num_groups,
        }
    }

    /// The same for one row of activations, whatever the batch.
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

    /// What the form of a product on tensor cores depends on.
    pub(super) fn size(&self, num_results: usize, num_units: usize, lanes: Lanes) -> Size {
        let (num_rows, num_matrices) = (self.rows_each(), self.num_matrices());
        Size {
            num_rows,
            num_results,
            num_matrices,
            is_grouped: matches!(self.stacked, Stacked::Groups(_)),
            num_columns: num_units * UNIT,
            lanes,
            max_parts: match (self.rounded, self.stacked) {
                (Some(rounded), Stacked::No) => rounded.max_parts(self.out_stride),
                _ => 0,
            },
        }
    }

    /// What a form of a product on tensor cores reads: for several and many rows, rounded activations with their factors in
    /// the place of the norm, and one row behind the other for all matrices.
    pub(super) fn for_form(
        &self,
        gpu: &GpuBackend,
        form: Form,
        format: DType,
        num_units: usize,
    ) -> Result<Self> {
        if self.is_rounded {
            return match form {
                Form::Many { .. } => Ok(Self { x_stride: rounded::stride(num_units * UNIT), ..*self }),
                _ => Err(Error::internal("a product of a few rows has rounded activations")),
            };
        }
        if matches!(form, Form::Few { .. }) {
            return Ok(*self);
        }
        let rounded = self.rounded.ok_or_else(|| Error::internal("a product has no memory to round to"))?;
        let (num_rows, num_matrices, x_next) = match self.stacked {
            Stacked::Heads { num_heads, x_stride, .. } if x_stride > 0 => {
                (self.num_tokens, num_heads, x_stride)
            }
            _ => (self.rounded_rows(), 1, 0),
        };
        let &Self { x, x_stride, norm, .. } = self;
        // As kernels round their results, so that no bit depends on who does it.
        let is_fixed = norm.is_none() && matches!(self.stacked, Stacked::No);
        let unrounded = Unrounded { x, x_stride, x_next, num_rows, num_matrices, num_units, norm, is_fixed };
        let rows = match form {
            Form::Several { .. } => rounded.round_in_order(gpu, unrounded, format)?,
            _ => rounded.round(gpu, unrounded, format)?,
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

    /// What these products cost a kernel that computes multiples of `unit` rows.
    pub(super) fn cost(&self, parts: &[Part<'_>], unit: usize) -> Cost {
        let (num_matrices, rows_each) = (self.num_matrices(), self.rows_each());
        let num_padded = num_matrices * rows_each.next_multiple_of(unit);
        let of_part = |part: &Part<'_>| {
            let (matrix, num_rows) = (part.matrix, part.num_rows);
            let weights = matrix.num_bytes() / (matrix.rows() / num_rows).max(1);
            let activations = 4 * rows_each * (matrix.cols() + num_rows);
            Cost {
                operations: 2 * num_padded as u64 * num_rows as u64 * matrix.cols() as u64,
                bytes: (num_matrices * (weights + activations)) as u64,
            }
        };
        parts.iter().map(of_part).sum()
    }

    /// The same for as many rows of activations at a time as a launch may compute, or as many groups of them.
    pub(super) fn pieces(&self, gpu: &GpuBackend, parts: &[Part<'_>]) -> impl Iterator<Item = Self> {
        let (num_all, of_one, unit) = match self.stacked {
            Stacked::No | Stacked::Heads { .. } => {
                (self.num_tokens, Operands { num_tokens: 1, ..*self }.cost(parts, 1), Tile::MAX_TOKENS)
            }
            Stacked::Groups(groups) => {
                let stacked = Stacked::Groups(Groups { num_groups: 1, ..groups });
                (groups.num_groups, Operands { stacked, ..*self }.cost(parts, groups.max_rows), 1)
            }
        };
        self.cut(num_all, gpu.patience().share(Cost { bytes: 0, ..of_one }, unit))
    }

    /// The same for `len` of all these rows of activations, or groups of them, at a time.
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

    /// Of all these rows of activations and results, those from `rows.start` on.
    pub(crate) fn of_rows(self, rows: Range<usize>) -> Self {
        let from = |binding: Binding<'a>, stride: usize| binding.at(binding.offset + 4 * rows.start * stride);
        let (x, out) = (from(self.x, self.x_stride), from(self.out, self.out_stride));
        Self { num_tokens: rows.len(), x, out, ..self }
    }

    /// Rows of activations that are rounded, of all matrices: as many as lie one behind the other.
    pub(super) fn rounded_rows(&self) -> usize {
        match self.stacked {
            Stacked::Heads { num_heads, x_stride, .. } if x_stride > 0 => self.num_tokens * num_heads,
            Stacked::Groups(Groups { rows: None, num_choices, .. }) => self.num_tokens * num_choices,
            // One row for all that it is multiplied with.
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
            product: self.args(num_units, matrices),
            num_tiles: num_tiles as u32,
            num_groups: self.num_matrices() as u32,
            num_first: 0,
            x_rows: self.rounded_rows() as u32,
        }
    }

    pub(super) fn args(&self, num_units: usize, matrices: [MatrixArgs; 3]) -> ProductArgs {
        let (x_next, out_next) = match self.stacked {
            Stacked::Heads { x_stride, out_stride, .. } => (x_stride, out_stride),
            Stacked::No | Stacked::Groups(_) => (0, 0),
        };
        let gathers = matches!(self.stacked, Stacked::Groups(Groups { rows: Some(_), .. }));
        ProductArgs {
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
