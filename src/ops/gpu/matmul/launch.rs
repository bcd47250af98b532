//! Launches of products with weights.

use bytemuck::bytes_of;

use super::operands::{MatrixArgs, Operands, Part, Stacked};
use super::plan::{MIN_MATMUL_TOKENS, ROW_GROUPS, Tile, matvec_memory, num_slices, rows_per_simdgroup};
use super::rounded::{self, Rounded};
use super::tensor_cores::{self, Form, MAX_SEVERAL};
use super::tiles::Lanes;
use crate::Result;
use crate::ops::gpu::Binding;
use crate::ops::gpu::backend::{Flags, GpuBackend, Work};
use crate::ops::gpu::cost::Cost;
use crate::ops::gpu::kernel::Kernel;
use crate::weights::DType;

/// Most rows of weights of a product in single precision that a GPU with tensor cores computes for few rows of activations
/// at a time: those of a router would be a tile or two, each of one core.
const MAX_ROUTER_ROWS: usize = 512;

/// The most rows of activations that products with a matrix give the same bits as one alone.
pub(super) fn max_exact_rows(gpu: &GpuBackend, format: DType) -> usize {
    let is_alike = gpu.tuning().has_tensor_cores() && format != DType::F32;
    if is_alike { MAX_SEVERAL } else { MIN_MATMUL_TOKENS - 1 }
}

/// The same of a router with so many rows, which is multiplied alone.
pub(super) fn max_exact_rows_of_router(gpu: &GpuBackend, format: DType, num_rows: usize) -> usize {
    let is_alike = gpu.tuning().has_tensor_cores() && num_rows <= MAX_ROUTER_ROWS;
    if is_alike { MAX_SEVERAL } else { max_exact_rows(gpu, format) }
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
            let tile = Tile::of(format, last, piece.rows_each());
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
            let tile = Tile::of(format, None, piece.rows_each());
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

impl Tile {
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
