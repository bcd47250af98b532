//! Launches of products with weights.

use bytemuck::{Pod, Zeroable, bytes_of};

use super::Binding;
use super::backend::{MetalBackend, Work};
use super::cost::Cost;
use super::kernel::Kernel;
use super::layout::{Planes, UNIT};
use super::matrix::MetalMatrix;
use crate::Result;
use crate::weights::DType;

/// Rows of activations from which on tiles of simdgroup matrices are faster than reading each weight for a few
/// columns in registers.
const MIN_MATMUL_TOKENS: usize = 5;

/// A matrix of a product, where its results go within a row of the output, and its bias.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Part<'a> {
    pub(crate) matrix: &'a MetalMatrix,
    pub(crate) out_offset: usize,
    pub(crate) bias: Option<Binding<'a>>,
}

/// The activations of a product and where the results go.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Operands<'a> {
    pub(crate) num_tokens: usize,
    pub(crate) x: Binding<'a>,
    pub(crate) x_stride: usize,
    /// The weights of a norm before the product, and its epsilon.
    pub(crate) norm: Option<(Binding<'a>, f32)>,
    /// With [`super::Access::ReadWrite`], results are added to what is there.
    pub(crate) out: Binding<'a>,
    pub(crate) out_stride: usize,
}

/// `MatrixArgs` of the kernels.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct MatrixArgs {
    planes: Planes,
    num_rows: u32,
    out_offset: u32,
    first_group: u32,
}

impl MatrixArgs {
    const NONE: Self = Self { planes: Planes::NONE, num_rows: 0, out_offset: 0, first_group: u32::MAX };

    /// The matrices of a launch in which a threadgroup computes `rows_per_group` rows, and how many threadgroups
    /// there are.
    fn list(parts: &[Part<'_>], rows_per_group: usize) -> ([Self; 3], usize) {
        let mut list = [Self::NONE; 3];
        let mut num_groups = 0;
        for (args, part) in list.iter_mut().zip(parts) {
            *args = Self {
                planes: part.matrix.planes(),
                num_rows: part.matrix.rows() as u32,
                out_offset: part.out_offset as u32,
                first_group: num_groups as u32,
            };
            num_groups += part.matrix.rows().div_ceil(rows_per_group);
        }
        (list, num_groups)
    }
}

/// `MatvecArgs` of the kernels.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct MatvecArgs {
    num_units: u32,
    num_columns: u32,
    x_stride: u32,
    out_stride: u32,
    eps: f32,
    matrices: [MatrixArgs; 3],
}

/// `MatmulArgs` of the kernels.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct MatmulArgs {
    num_units: u32,
    num_tokens: u32,
    x_stride: u32,
    out_stride: u32,
    eps: f32,
    matrices: [MatrixArgs; 3],
}

/// Up to three products with the same activations: one launch if their formats allow it.
pub(crate) fn matmul(metal: &MetalBackend, parts: &[Part<'_>], operands: &Operands<'_>) -> Result<()> {
    let mut rest = parts;
    while !rest.is_empty() {
        let (len, last) = launch_together(rest);
        let (now, later) = rest.split_at(len);
        launch(metal, now, last, operands)?;
        rest = later;
    }
    Ok(())
}

/// How many parts from the first on a kernel can do, and the format of the last one if it differs.
fn launch_together(parts: &[Part<'_>]) -> (usize, Option<DType>) {
    let first = &parts[0];
    let is_like_first = |part: &&Part<'_>| {
        part.matrix.dtype() == first.matrix.dtype() && part.bias.is_some() == first.bias.is_some()
    };
    let len = parts.iter().take_while(is_like_first).take(3).count();
    match parts {
        [_, _, third, ..] if len == 2 && third.bias.is_some() == first.bias.is_some() => {
            match (first.matrix.dtype(), third.matrix.dtype()) {
                (DType::Q4K | DType::Q5K, DType::Q6K) => (3, Some(DType::Q6K)),
                _ => (len, None),
            }
        }
        _ => (len, None),
    }
}

fn launch<'a>(
    metal: &MetalBackend,
    parts: &[Part<'a>],
    last: Option<DType>,
    operands: &Operands<'a>,
) -> Result<()> {
    let weights = [0, 1, 2].map(|index| parts.get(index).unwrap_or(&parts[0]).matrix.binding());
    let format = parts[0].matrix.dtype();
    let num_units = parts[0].matrix.num_units();
    let flags = [operands.norm.is_some(), parts[0].bias.is_some(), operands.adds()];
    // What a kernel does not read is bound to something that is there.
    let bias = [0, 1, 2]
        .map(|index| parts.get(index).and_then(|part| part.bias).or(parts[0].bias).unwrap_or(weights[0]));
    let [w0, w1, w2] = weights;
    let [b0, b1, b2] = bias;
    let buffers =
        |operands: &Operands<'a>| [w0, w1, w2, b0, b1, b2, operands.x, operands.norm(), operands.out];
    if operands.num_tokens >= MIN_MATMUL_TOKENS {
        let (matrices, num_groups) = MatrixArgs::list(parts, Tile::ROWS);
        return operands.pieces(metal, parts).try_for_each(|piece| {
            let tile = Tile::of(format, last, piece.num_tokens);
            let kernel = Kernel::Matmul { format, last, tokens: tile.tokens };
            let args = piece.matmul_args(num_units, matrices);
            let cost = piece.cost(parts, tile.tokens);
            metal.launch(
                kernel,
                flags,
                tile.work(bytes_of(&args), &buffers(&piece), &piece, num_groups, cost),
            )
        });
    }
    let columns = operands.num_tokens.next_power_of_two();
    let rows = rows_per_simdgroup(format, columns);
    let (matrices, num_groups) = MatrixArgs::list(parts, ROW_GROUPS * rows);
    let all_rows = parts.iter().map(|part| part.matrix.rows()).sum();
    let num_slices = num_slices(metal, all_rows, num_units);
    let args = operands.matvec_args(num_units, matrices);
    metal.launch(
        Kernel::Matvec { format, last, columns },
        flags,
        Work {
            args: bytes_of(&args),
            buffers: &buffers(operands),
            threadgroup_memory: matvec_memory(num_slices, rows * columns, columns),
            grid: [num_groups, 1, 1],
            num_threads: num_slices * ROW_GROUPS * 32,
            cost: operands.cost(parts, columns),
        },
    )
}

/// `silu(gate · norm(x)) · (up · norm(x))` for two matrices of one format.
pub(crate) fn swiglu<'a>(
    metal: &MetalBackend,
    gate: &'a MetalMatrix,
    up: &'a MetalMatrix,
    operands: &Operands<'a>,
) -> Result<()> {
    let (format, num_units) = (gate.dtype(), gate.num_units());
    let flags = [operands.norm.is_some(), false, false];
    let buffers =
        |operands: &Operands<'a>| [gate.binding(), up.binding(), operands.x, operands.norm(), operands.out];
    let parts = [gate, up].map(|matrix| Part { matrix, out_offset: 0, bias: None });
    if operands.num_tokens >= MIN_MATMUL_TOKENS {
        let (mut matrices, _) = MatrixArgs::list(&parts, Tile::ROWS);
        matrices[1].first_group = u32::MAX;
        let num_groups = gate.rows().div_ceil(Tile::ROWS / 2);
        return operands.pieces(metal, &parts).try_for_each(|piece| {
            let tile = Tile::of(format, None, piece.num_tokens);
            let kernel = Kernel::MatmulSwiglu { format, tokens: tile.tokens };
            let args = piece.matmul_args(num_units, matrices);
            let cost = piece.cost(&parts, tile.tokens);
            metal.launch(
                kernel,
                flags,
                tile.work(bytes_of(&args), &buffers(&piece), &piece, num_groups, cost),
            )
        });
    }
    let columns = operands.num_tokens.next_power_of_two();
    let rows = (rows_per_simdgroup(format, columns) / 2).max(1);
    let (matrices, _) = MatrixArgs::list(&parts, rows);
    let num_slices = num_slices(metal, 2 * gate.rows(), num_units);
    let args = operands.matvec_args(num_units, matrices);
    metal.launch(
        Kernel::MatvecSwiglu { format, columns },
        flags,
        Work {
            args: bytes_of(&args),
            buffers: &buffers(operands),
            threadgroup_memory: matvec_memory(num_slices, 2 * rows * columns, columns),
            grid: [gate.rows().div_ceil(ROW_GROUPS * rows), 1, 1],
            num_threads: num_slices * ROW_GROUPS * 32,
            cost: operands.cost(&parts, columns),
        },
    )
}

/// `gate = silu(gate) · up`, for `num_values` values.
pub(crate) fn silu_mul(
    metal: &MetalBackend,
    num_values: usize,
    up: Binding<'_>,
    gate: Binding<'_>,
) -> Result<()> {
    let args = [num_values as u32];
    metal.launch(
        Kernel::SiluMul,
        [false; 3],
        Work {
            args: bytes_of(&args),
            buffers: &[up, gate],
            threadgroup_memory: 0,
            grid: [num_values.div_ceil(32), 1, 1],
            num_threads: 32,
            cost: Cost::bytes(3 * 4 * num_values),
        },
    )
}

/// Rows of a matrix that a simdgroup of the matrix-vector kernels computes: more where weights are small beside
/// the activations that are read with them, fewer where activations fill the registers. As the kernels are
/// instantiated.
fn rows_per_simdgroup(format: DType, columns: usize) -> usize {
    if format.block_len() > 1 && columns < 4 { 4 } else { 2 }
}

/// Simdgroups of a threadgroup that share activations and have rows of their own, as in the kernels.
const ROW_GROUPS: usize = 4;

/// Slices of simdgroups that share the columns of a row: as many as there are chunks of columns and as it takes to have
/// enough simdgroups in flight. The same for every number of columns of the result, because it is part of the order of
/// additions.
fn num_slices(metal: &MetalBackend, num_rows: usize, num_units: usize) -> usize {
    let wanted = metal.tuning().simdgroups_in_flight.div_ceil(num_rows.div_ceil(4).max(1));
    wanted.min(num_units.div_ceil(CHUNK_UNITS)).min(MAX_SLICES)
}

/// With four there would be no room for the activations of four columns.
const MAX_SLICES: usize = 3;

/// Units of a chunk of activations, as in the kernels.
const CHUNK_UNITS: usize = 32;

/// Bytes of threadgroup memory of the matrix-vector kernels, for `values` sums of a simdgroup.
fn matvec_memory(num_slices: usize, values: usize, columns: usize) -> usize {
    // A value for each column of a chunk and a sum for each unit; two chunks, if the result has one column.
    let activations = num_slices * columns.max(2) * CHUNK_UNITS * (UNIT + 1);
    let sums = num_slices * ROW_GROUPS * (values + columns);
    4 * activations.max(sums)
}

impl<'a> Operands<'a> {
    fn adds(&self) -> bool {
        self.out.access == super::Access::ReadWrite
    }

    /// The weights of the norm; of a kernel that reads none, something that is there.
    fn norm(&self) -> Binding<'a> {
        self.norm.map_or(self.x, |(norm, _)| norm)
    }

    /// What these products cost a kernel that computes multiples of `unit` rows.
    fn cost(&self, parts: &[Part<'_>], unit: usize) -> Cost {
        let num_padded = self.num_tokens.next_multiple_of(unit);
        let of_matrix = |part: &Part<'_>| {
            let matrix = part.matrix;
            let activations = 4 * self.num_tokens * (matrix.cols() + matrix.rows());
            Cost {
                operations: 2 * num_padded as u64 * matrix.rows() as u64 * matrix.cols() as u64,
                bytes: (matrix.num_bytes() + activations) as u64,
            }
        };
        parts.iter().map(of_matrix).sum()
    }

    /// The same for as many rows of activations at a time as a launch may compute.
    fn pieces(&self, metal: &MetalBackend, parts: &[Part<'_>]) -> impl Iterator<Item = Self> {
        let of_one = Operands { num_tokens: 1, ..*self }.cost(parts, 1);
        let len = metal.patience().share(Cost { bytes: 0, ..of_one }, Tile::MAX_TOKENS);
        (0..self.num_tokens).step_by(len).map(move |first| Operands {
            num_tokens: len.min(self.num_tokens - first),
            x: self.x.at(self.x.offset + 4 * first * self.x_stride),
            out: self.out.at(self.out.offset + 4 * first * self.out_stride),
            ..*self
        })
    }

    fn eps(&self) -> f32 {
        self.norm.map_or(0.0, |(_, eps)| eps)
    }

    fn matvec_args(&self, num_units: usize, matrices: [MatrixArgs; 3]) -> MatvecArgs {
        MatvecArgs {
            num_units: num_units as u32,
            num_columns: self.num_tokens as u32,
            x_stride: self.x_stride as u32,
            out_stride: self.out_stride as u32,
            eps: self.eps(),
            matrices,
        }
    }

    fn matmul_args(&self, num_units: usize, matrices: [MatrixArgs; 3]) -> MatmulArgs {
        MatmulArgs {
            num_units: num_units as u32,
            num_tokens: self.num_tokens as u32,
            x_stride: self.x_stride as u32,
            out_stride: self.out_stride as u32,
            eps: self.eps(),
            matrices,
        }
    }
}

/// A tile of `metal_kernels/matmul.metal`.
#[derive(Debug, Clone, Copy)]
struct Tile {
    tokens: usize,
    /// Bytes of a decoded weight.
    weight_bytes: usize,
}

impl Tile {
    /// Rows of matrices.
    const ROWS: usize = 64;
    /// Rows of activations of the largest tile.
    const MAX_TOKENS: usize = 32;
    /// Values from one row in threadgroup memory to the next.
    const STRIDE: usize = 2 * UNIT + 8;

    fn of(format: DType, last: Option<DType>, num_tokens: usize) -> Self {
        let is_wide = |format: DType| matches!(format, DType::BF16 | DType::F32);
        let weight_bytes = if is_wide(format) || last.is_some_and(is_wide) { 4 } else { 2 };
        Self { tokens: num_tokens.next_power_of_two().clamp(8, Self::MAX_TOKENS), weight_bytes }
    }

    fn work<'a>(
        self,
        args: &'a [u8],
        buffers: &'a [Binding<'a>],
        operands: &Operands<'_>,
        num_groups: usize,
        cost: Cost,
    ) -> Work<'a> {
        Work {
            args,
            buffers,
            threadgroup_memory: (Self::ROWS * self.weight_bytes + self.tokens * 4) * Self::STRIDE,
            grid: [operands.num_tokens.div_ceil(self.tokens), num_groups, 1],
            num_threads: 128,
            cost,
        }
    }
}
