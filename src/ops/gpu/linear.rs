//! Launches of products with weights.

use std::ops::Range;

use bytemuck::{Pod, Zeroable, bytes_of};

use super::Binding;
use super::backend::{Flags, GpuBackend, Work};
use super::cost::Cost;
use super::kernel::Kernel;
use super::layout::{Planes, UNIT};
use super::matrix::{GpuMatrix, GpuStack};
use super::rounded::{self, Rounded, Unrounded};
use super::tensor_cores::{self, Form, MAX_SEVERAL, Size};
use super::tiles::Lanes;
use crate::weights::DType;
use crate::{Error, Result};

/// Rows of activations from which on tiles of simdgroup matrices are faster than reading each weight for a few
/// columns in registers.
const MIN_MATMUL_TOKENS: usize = 5;

/// Most rows of weights of a product in single precision that a GPU with tensor cores computes for few rows of activations
/// at a time: those of a router would be a tile or two, each of one core.
const MAX_ROUTER_ROWS: usize = 512;

/// A matrix of a product, where its results go within a row of the output, and its bias.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Part<'a> {
    matrix: &'a GpuMatrix,
    /// Of the matrix, or of each of those that it is a stack of.
    num_rows: usize,
    out_offset: usize,
    bias: Option<Binding<'a>>,
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
    pub(super) list: Binding<'a>,
    /// How many there may be.
    pub(super) num_groups: usize,
    /// The most rows that one has.
    pub(super) max_rows: usize,
    /// Choices of a token.
    pub(super) num_choices: usize,
    /// The row of activations at each place, if it is not the place itself.
    pub(super) rows: Option<Binding<'a>>,
}

impl Groups<'_> {
    /// Bytes of a group in the list.
    pub(super) const BYTES: usize = 12;

    /// The most rows of a group of any step: what the kernels take together.
    pub(super) fn most_rows(gpu: &GpuBackend) -> usize {
        if gpu.tuning().has_tensor_cores() { Form::MAX_TOKENS } else { Tile::MAX_TOKENS }
    }

    /// The most rows of a group, of a step of `num_rows` rows with this many choices among this many matrices: few if few
    /// rows will meet, and at most `most`.
    pub(super) fn max_rows(most: usize, num_rows: usize, num_choices: usize, num_matrices: usize) -> usize {
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
    /// With [`super::Access::ReadWrite`], results are added to what is there.
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
struct ProductArgs {
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
struct TensorArgs {
    product: ProductArgs,
    num_tiles: u32,
    num_groups: u32,
    num_first: u32,
    x_rows: u32,
}

/// Up to three products with the same activations: one launch if their formats allow it.
pub(crate) fn matmul(gpu: &GpuBackend, parts: &[Part<'_>], operands: &Operands<'_>) -> Result<()> {
    let mut rest = parts;
    while !rest.is_empty() {
        let (len, last) = launch_together(rest);
        let (now, later) = rest.split_at(len);
        launch(gpu, now, last, operands)?;
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
    gpu: &GpuBackend,
    parts: &[Part<'a>],
    last: Option<DType>,
    operands: &Operands<'a>,
) -> Result<()> {
    let weights = [0, 1, 2].map(|index| parts.get(index).unwrap_or(&parts[0]).matrix.binding());
    let format = parts[0].matrix.dtype();
    let num_units = parts[0].matrix.num_units();
    let flags = operands.flags(parts[0].bias.is_some());
    // What a kernel does not read is bound to something that is there.
    let bias = [0, 1, 2]
        .map(|index| parts.get(index).and_then(|part| part.bias).or(parts[0].bias).unwrap_or(weights[0]));
    let [w0, w1, w2] = weights;
    let [b0, b1, b2] = bias;
    let buffers = |operands: &Operands<'a>| {
        let [groups, rows] = operands.groups();
        [w0, w1, w2, b0, b1, b2, operands.x, operands.norm(), operands.out, groups, rows]
    };
    let num_results = parts.iter().map(|part| part.num_rows).sum();
    let size = operands.size(num_results, num_units, Lanes::of(format, last));
    if let Some(form) = Form::of(gpu, format, size) {
        let operands = &operands.for_form(gpu, form, format, num_units)?;
        let flags = operands.flags(parts[0].bias.is_some());
        let (matrices, num_tiles) = MatrixArgs::list(parts, form.rows());
        let threadgroup_memory = gpu.device().threadgroup_memory();
        let kernel = Kernel::TensorProduct { format, last, form };
        let mut num_threadgroups = form.num_threadgroups(size, num_tiles, gpu.device().num_cores());
        let mut args = operands.tensor_args(num_units, matrices, num_tiles);
        if let (Some(last), Form::Few { .. }) = (last, form) {
            let num_first_tiles = matrices[2].first_group as usize;
            let tiles = [(num_first_tiles, format), (num_tiles - num_first_tiles, last)];
            let shared = tensor_cores::share_out(num_threadgroups, tiles);
            num_threadgroups = shared.iter().sum();
            args.num_first = shared[0] as u32;
        }
        let cost = operands.cost(parts, form.tokens());
        let partials = operands.rounded.map(Rounded::partials).filter(|_| form.num_parts() > 1);
        let sums = partials.map_or(operands.x, Binding::write);
        let mut all_buffers = [sums; 12];
        all_buffers[..11].copy_from_slice(&buffers(operands));
        let buffers = match form {
            Form::Few { .. } => &all_buffers[..11],
            Form::Several { .. } => {
                // There are no groups of several rows.
                all_buffers[9] = sums;
                &all_buffers[..10]
            }
            Form::Many { .. } => &all_buffers[..],
        };
        let work = form.work(bytes_of(&args), buffers, size, num_threadgroups, threadgroup_memory, cost);
        gpu.launch(kernel, flags.with_last(form.is_whole(size, threadgroup_memory)), work)?;
        let Some(partials) = partials else { return Ok(()) };
        let buffers = [b0, b1, b2, operands.norm(), Binding::read(partials), operands.out];
        let num_results = matrices.iter().map(|matrix| matrix.num_rows as usize).max().unwrap_or(0);
        let values = operands.num_tokens * size.num_results;
        return gpu.launch(
            Kernel::AddParts { num_parts: form.num_parts() },
            flags,
            Work {
                args: bytes_of(&args),
                buffers: &buffers,
                threadgroup_memory: 0,
                grid: [num_results.div_ceil(tensor_cores::ADDED_RESULTS), operands.num_tokens, parts.len()],
                num_threads: tensor_cores::NUM_ADDING_THREADS,
                cost: Cost::bytes(4 * (form.num_parts() + 2) * values),
            },
        );
    }
    let is_alone = matches!(operands.stacked, Stacked::No);
    let is_narrow = gpu.tuning().has_tensor_cores() && num_results <= MAX_ROUTER_ROWS;
    if is_alone && is_narrow && (MIN_MATMUL_TOKENS..=MAX_SEVERAL).contains(&operands.num_tokens) {
        return operands
            .cut(operands.num_tokens, MIN_MATMUL_TOKENS - 1)
            .try_for_each(|piece| launch(gpu, parts, last, &piece));
    }
    if operands.num_tokens >= MIN_MATMUL_TOKENS {
        let (matrices, num_groups) = MatrixArgs::list(parts, Tile::ROWS);
        return operands.pieces(gpu, parts).try_for_each(|piece| {
            let tile = Tile::of(format, last, &piece);
            let kernel = Kernel::Matmul { format, last, tokens: tile.tokens };
            let args = piece.args(num_units, matrices);
            let cost = piece.cost(parts, tile.tokens);
            gpu.launch(kernel, flags, tile.work(bytes_of(&args), &buffers(&piece), &piece, num_groups, cost))
        });
    }
    let columns = operands.rows_each().next_power_of_two();
    let rows = rows_per_simdgroup(format, columns);
    let (matrices, num_groups) = MatrixArgs::list(parts, ROW_GROUPS * rows);
    let all_rows: usize = parts.iter().map(|part| part.num_rows).sum();
    let num_slices = num_slices(gpu, all_rows * operands.num_matrices_of_a_token(), num_units);
    let args = operands.args(num_units, matrices);
    gpu.launch(
        Kernel::Matvec { format, last, columns },
        flags,
        Work {
            args: bytes_of(&args),
            buffers: &buffers(operands),
            threadgroup_memory: matvec_memory(num_slices, rows * columns, columns),
            grid: [num_groups, operands.num_matrices(), 1],
            num_threads: num_slices * ROW_GROUPS * 32,
            cost: operands.cost(parts, columns),
        },
    )
}

/// `silu(gate · norm(x)) · (up · norm(x))` for two matrices of one format. If all that reads the results is a product with
/// weights of the format `next`, they may be rounded for it, and are if this says so.
pub(crate) fn swiglu<'a>(
    gpu: &GpuBackend,
    parts: [Part<'a>; 2],
    operands: &Operands<'a>,
    next: Option<DType>,
) -> Result<bool> {
    let [gate, up] = parts.map(|part| part.matrix);
    let (format, num_units, num_rows) = (gate.dtype(), gate.num_units(), parts[0].num_rows);
    let flags = operands.flags(false);
    let buffers = |operands: &Operands<'a>| {
        let [groups, rows] = operands.groups();
        [gate.binding(), up.binding(), operands.x, operands.norm(), operands.out, groups, rows]
    };
    let size = operands.size(2 * num_rows, num_units, Lanes::of(format, None)).with_one_part();
    if let Some(form) = Form::of(gpu, format, size) {
        let mut operands = operands.for_form(gpu, form, format, num_units)?;
        let flags = operands.flags(false);
        let (mut matrices, _) = MatrixArgs::list(&parts, form.rows());
        matrices[1].first_group = u32::MAX;
        let is_many = matches!(form, Form::Many { .. });
        let next = next.filter(|_| is_many && matches!(operands.stacked, Stacked::No));
        let next = rounded::for_next(gpu, next, operands.num_tokens, num_rows, operands.out.buffer);
        let mut num_results = num_rows;
        if next.is_some() {
            // A tile's results are a step of the next product, and there are as many as that one has.
            num_results = rounded::stride(num_rows);
            operands.out_stride = num_results;
        }
        let num_tiles = num_results.div_ceil(form.rows() / 2);
        let args = operands.tensor_args(num_units, matrices, num_tiles);
        let threadgroup_memory = gpu.device().threadgroup_memory();
        let kernel = Kernel::TensorSwiglu { format, form, next };
        let cost = operands.cost(&parts, form.tokens());
        let buffers = buffers(&operands);
        // There are no groups of several rows.
        let num_buffers = if matches!(form, Form::Several { .. }) { 5 } else { buffers.len() };
        let buffers = &buffers[..num_buffers];
        let num_threadgroups = form.num_threadgroups(size, num_tiles, gpu.device().num_cores());
        let work = form.work(bytes_of(&args), buffers, size, num_threadgroups, threadgroup_memory, cost);
        gpu.launch(kernel, flags.with_last(form.is_whole(size, threadgroup_memory)), work)?;
        return Ok(next.is_some());
    }
    if operands.num_tokens >= MIN_MATMUL_TOKENS {
        let (mut matrices, _) = MatrixArgs::list(&parts, Tile::ROWS);
        matrices[1].first_group = u32::MAX;
        let num_groups = num_rows.div_ceil(Tile::ROWS / 2);
        operands.pieces(gpu, &parts).try_for_each(|piece| {
            let tile = Tile::of(format, None, &piece);
            let kernel = Kernel::MatmulSwiglu { format, tokens: tile.tokens };
            let args = piece.args(num_units, matrices);
            let cost = piece.cost(&parts, tile.tokens);
            gpu.launch(kernel, flags, tile.work(bytes_of(&args), &buffers(&piece), &piece, num_groups, cost))
        })?;
        return Ok(false);
    }
    let columns = operands.rows_each().next_power_of_two();
    let rows = (rows_per_simdgroup(format, columns) / 2).max(1);
    let (matrices, _) = MatrixArgs::list(&parts, rows);
    let num_slices = num_slices(gpu, 2 * num_rows * operands.num_matrices_of_a_token(), num_units);
    let args = operands.args(num_units, matrices);
    gpu.launch(
        Kernel::MatvecSwiglu { format, columns },
        flags,
        Work {
            args: bytes_of(&args),
            buffers: &buffers(operands),
            threadgroup_memory: matvec_memory(num_slices, 2 * rows * columns, columns),
            grid: [num_rows.div_ceil(ROW_GROUPS * rows), operands.num_matrices(), 1],
            num_threads: num_slices * ROW_GROUPS * 32,
            cost: operands.cost(&parts, columns),
        },
    )?;
    Ok(false)
}

/// `gate = silu(gate) · up`, for `num_values` values.
pub(crate) fn silu_mul(
    gpu: &GpuBackend,
    num_values: usize,
    up: Binding<'_>,
    gate: Binding<'_>,
) -> Result<()> {
    let args = [num_values as u32];
    gpu.launch(
        Kernel::SiluMul,
        Flags::default(),
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
fn num_slices(gpu: &GpuBackend, num_rows: usize, num_units: usize) -> usize {
    let wanted = gpu.tuning().simdgroups_in_flight.div_ceil(num_rows.div_ceil(4).max(1));
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

    fn flags(&self, has_bias: bool) -> Flags {
        let is_grouped = matches!(self.stacked, Stacked::Groups(_));
        Flags::of([self.norm.is_some(), has_bias, self.adds(), is_grouped, self.is_half])
    }

    /// The list of groups and that of their rows; of a kernel that reads none, something that is there.
    fn groups(&self) -> [Binding<'a>; 2] {
        match self.stacked {
            Stacked::Groups(groups) => [groups.list, groups.rows.unwrap_or(groups.list)],
            Stacked::No | Stacked::Heads { .. } => [self.x; 2],
        }
    }

    /// Matrices that are multiplied, of each part.
    fn num_matrices(&self) -> usize {
        match self.stacked {
            Stacked::No => 1,
            Stacked::Heads { num_heads, .. } => num_heads,
            Stacked::Groups(groups) => groups.num_groups,
        }
    }

    /// The same for one row of activations, whatever the batch.
    fn num_matrices_of_a_token(&self) -> usize {
        match self.stacked {
            Stacked::No | Stacked::Heads { .. } => self.num_matrices(),
            Stacked::Groups(groups) => groups.num_choices,
        }
    }

    /// Rows of activations of each matrix.
    fn rows_each(&self) -> usize {
        match self.stacked {
            Stacked::No | Stacked::Heads { .. } => self.num_tokens,
            Stacked::Groups(groups) => groups.max_rows,
        }
    }

    /// What the form of a product on tensor cores depends on.
    fn size(&self, num_results: usize, num_units: usize, lanes: Lanes) -> Size {
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
    fn for_form(&self, gpu: &GpuBackend, form: Form, format: DType, num_units: usize) -> Result<Self> {
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
    fn cost(&self, parts: &[Part<'_>], unit: usize) -> Cost {
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
    fn pieces(&self, gpu: &GpuBackend, parts: &[Part<'_>]) -> impl Iterator<Item = Self> {
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
    fn cut(&self, num_all: usize, len: usize) -> impl Iterator<Item = Self> {
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
    fn rounded_rows(&self) -> usize {
        match self.stacked {
            Stacked::Heads { num_heads, x_stride, .. } if x_stride > 0 => self.num_tokens * num_heads,
            Stacked::Groups(Groups { rows: None, num_choices, .. }) => self.num_tokens * num_choices,
            // One row for all that it is multiplied with.
            Stacked::No | Stacked::Heads { .. } | Stacked::Groups(_) => self.num_tokens,
        }
    }

    fn tensor_args(&self, num_units: usize, matrices: [MatrixArgs; 3], num_tiles: usize) -> TensorArgs {
        TensorArgs {
            product: self.args(num_units, matrices),
            num_tiles: num_tiles as u32,
            num_groups: self.num_matrices() as u32,
            num_first: 0,
            x_rows: self.rounded_rows() as u32,
        }
    }

    fn args(&self, num_units: usize, matrices: [MatrixArgs; 3]) -> ProductArgs {
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

    fn of(format: DType, last: Option<DType>, operands: &Operands<'_>) -> Self {
        let is_wide = |format: DType| matches!(format, DType::BF16 | DType::F32);
        let weight_bytes = if is_wide(format) || last.is_some_and(is_wide) { 4 } else { 2 };
        Self { tokens: operands.rows_each().next_power_of_two().clamp(8, Self::MAX_TOKENS), weight_bytes }
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
            grid: [operands.rows_each().div_ceil(self.tokens), num_groups, operands.num_matrices()],
            num_threads: 128,
            cost,
        }
    }
}
