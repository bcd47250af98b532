//! Launches of matmuls with weights.

use bytemuck::bytes_of;

use super::operands::{GpuProjection, MatrixArgs, Operands, Stacked};
use super::packed_activations::{self, PackedActivations};
use super::plan::{MIN_MATMUL_TOKENS, ROW_GROUPS, Tile, matvec_memory, num_slices, rows_per_simdgroup};
use super::tensor_cores::{self, MAX_SEVERAL, MatmulVariant};
use super::tiles::Lanes;
use crate::Result;
use crate::ops::gpu::Binding;
use crate::ops::gpu::backend::{Flags, GpuBackend, Work};
use crate::ops::gpu::cost::Cost;
use crate::ops::gpu::kernel::Kernel;
use crate::weights::DType;

/// Maximum rows of weights of a matmul that a GPU with tensor cores computes in single precision for few rows of
/// activations at a time: a router's would be a tile or two, each on one core.
const MAX_ROUTER_ROWS: usize = 512;

/// The maximum rows of activations for which a matmul gives a row the same bits as alone.
pub(super) fn max_exact_rows(gpu: &GpuBackend, format: DType) -> usize {
    let is_alike = gpu.tuning().has_tensor_cores() && format != DType::F32;
    if is_alike { MAX_SEVERAL } else { MIN_MATMUL_TOKENS - 1 }
}

/// The same for a router with this many rows, which has a launch of its own.
pub(super) fn max_exact_rows_of_router(gpu: &GpuBackend, format: DType, num_rows: usize) -> usize {
    let is_alike = gpu.tuning().has_tensor_cores() && num_rows <= MAX_ROUTER_ROWS;
    if is_alike { MAX_SEVERAL } else { max_exact_rows(gpu, format) }
}

/// Up to three matmuls with the same activations: one launch if their formats allow it.
pub(crate) fn matmul(
    gpu: &GpuBackend,
    projections: &[GpuProjection<'_>],
    operands: &Operands<'_>,
) -> Result<()> {
    let mut rest = projections;
    while !rest.is_empty() {
        let (len, last) = launch_together(rest);
        let (now, later) = rest.split_at(len);
        launch(gpu, now, last, operands)?;
        rest = later;
    }
    Ok(())
}

/// The number of leading projections that one kernel can compute, and the format of the last one if it differs.
fn launch_together(projections: &[GpuProjection<'_>]) -> (usize, Option<DType>) {
    let first = &projections[0];
    let is_like_first = |projection: &&GpuProjection<'_>| {
        projection.matrix.dtype() == first.matrix.dtype() && projection.bias.is_some() == first.bias.is_some()
    };
    let len = projections.iter().take_while(is_like_first).take(3).count();
    match projections {
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
    projections: &[GpuProjection<'a>],
    last: Option<DType>,
    operands: &Operands<'a>,
) -> Result<()> {
    let weights = [0, 1, 2].map(|index| projections.get(index).unwrap_or(&projections[0]).matrix.binding());
    let format = projections[0].matrix.dtype();
    let num_units = projections[0].matrix.num_units();
    let flags = operands.flags(projections[0].bias.is_some());
    // Buffers that the kernel variant does not read are bound to another one.
    let bias = [0, 1, 2].map(|index| {
        projections
            .get(index)
            .and_then(|projection| projection.bias)
            .or(projections[0].bias)
            .unwrap_or(weights[0])
    });
    let [w0, w1, w2] = weights;
    let [b0, b1, b2] = bias;
    let buffers = |operands: &Operands<'a>| {
        let [groups, rows] = operands.groups();
        [w0, w1, w2, b0, b1, b2, operands.x, operands.norm(), operands.out, groups, rows]
    };
    let num_results = projections.iter().map(|projection| projection.num_rows).sum();
    let size = operands.size(num_results, num_units, Lanes::of(format, last));
    if let Some(variant) = MatmulVariant::of(gpu, format, size) {
        let operands = &operands.for_variant(gpu, variant, format, num_units)?;
        let flags = operands.flags(projections[0].bias.is_some());
        let (matrices, num_tiles) = MatrixArgs::list(projections, variant.rows());
        let threadgroup_memory = gpu.device().threadgroup_memory();
        let kernel = Kernel::TensorMatmul { format, last, variant };
        let mut num_threadgroups = variant.num_threadgroups(size, num_tiles, gpu.device().num_cores());
        let mut args = operands.tensor_args(num_units, matrices, num_tiles);
        if let (Some(last), MatmulVariant::Few { .. }) = (last, variant) {
            let num_first_tiles = matrices[2].first_group as usize;
            let tiles = [(num_first_tiles, format), (num_tiles - num_first_tiles, last)];
            let shared = tensor_cores::divide_between_formats(num_threadgroups, tiles);
            num_threadgroups = shared.iter().sum();
            args.num_first = shared[0] as u32;
        }
        let cost = operands.cost(projections, variant.tokens());
        let partials =
            operands.packed.map(PackedActivations::partials).filter(|_| variant.num_k_splits() > 1);
        let sums = partials.map_or(operands.x, Binding::write);
        let mut all_buffers = [sums; 12];
        all_buffers[..11].copy_from_slice(&buffers(operands));
        let buffers = match variant {
            MatmulVariant::Few { .. } => &all_buffers[..11],
            MatmulVariant::Several { .. } => {
                // There are no groups of several rows.
                all_buffers[9] = sums;
                &all_buffers[..10]
            }
            MatmulVariant::Many { .. } => &all_buffers[..],
        };
        let work = variant.work(bytes_of(&args), buffers, size, num_threadgroups, threadgroup_memory, cost);
        gpu.launch(kernel, flags.with_last(variant.is_whole(size, threadgroup_memory)), work)?;
        let Some(partials) = partials else { return Ok(()) };
        let buffers = [b0, b1, b2, operands.norm(), Binding::read(partials), operands.out];
        let num_results = matrices.iter().map(|matrix| matrix.num_rows as usize).max().unwrap_or(0);
        let values = operands.num_tokens * size.num_results;
        return gpu.launch(
            Kernel::ReduceSplits { num_k_splits: variant.num_k_splits() },
            flags,
            Work {
                args: bytes_of(&args),
                buffers: &buffers,
                threadgroup_memory: 0,
                grid: [
                    num_results.div_ceil(tensor_cores::REDUCED_RESULTS),
                    operands.num_tokens,
                    projections.len(),
                ],
                num_threads: tensor_cores::NUM_REDUCE_THREADS,
                cost: Cost::bytes(4 * (variant.num_k_splits() + 2) * values),
            },
        );
    }
    let is_alone = matches!(operands.stacked, Stacked::No);
    let is_narrow = gpu.tuning().has_tensor_cores() && num_results <= MAX_ROUTER_ROWS;
    if is_alone && is_narrow && (MIN_MATMUL_TOKENS..=MAX_SEVERAL).contains(&operands.num_tokens) {
        return operands
            .cut(operands.num_tokens, MIN_MATMUL_TOKENS - 1)
            .try_for_each(|chunk| launch(gpu, projections, last, &chunk));
    }
    if operands.num_tokens >= MIN_MATMUL_TOKENS {
        let (matrices, num_groups) = MatrixArgs::list(projections, Tile::ROWS);
        return operands.chunks(gpu, projections).try_for_each(|chunk| {
            let tile = Tile::of(format, last, chunk.rows_each());
            let kernel = Kernel::Matmul { format, last, tokens: tile.tokens };
            let args = chunk.args(num_units, matrices);
            let cost = chunk.cost(projections, tile.tokens);
            gpu.launch(kernel, flags, tile.work(bytes_of(&args), &buffers(&chunk), &chunk, num_groups, cost))
        });
    }
    let columns = operands.rows_each().next_power_of_two();
    let rows = rows_per_simdgroup(format, columns);
    let (matrices, num_groups) = MatrixArgs::list(projections, ROW_GROUPS * rows);
    let all_rows: usize = projections.iter().map(|projection| projection.num_rows).sum();
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
            cost: operands.cost(projections, columns),
        },
    )
}

/// `silu(gate · norm(x)) · (up · norm(x))` for two matrices of one format. If the only reader of the results is a
/// matmul with weights of the format `next`, the kernel may pack them for it. Returns whether it did.
pub(crate) fn swiglu<'a>(
    gpu: &GpuBackend,
    projections: [GpuProjection<'a>; 2],
    operands: &Operands<'a>,
    next: Option<DType>,
) -> Result<bool> {
    let [gate, up] = projections.map(|projection| projection.matrix);
    let (format, num_units, num_rows) = (gate.dtype(), gate.num_units(), projections[0].num_rows);
    let flags = operands.flags(false);
    let buffers = |operands: &Operands<'a>| {
        let [groups, rows] = operands.groups();
        [gate.binding(), up.binding(), operands.x, operands.norm(), operands.out, groups, rows]
    };
    let size = operands.size(2 * num_rows, num_units, Lanes::of(format, None)).without_k_splits();
    if let Some(variant) = MatmulVariant::of(gpu, format, size) {
        let mut operands = operands.for_variant(gpu, variant, format, num_units)?;
        let flags = operands.flags(false);
        let (mut matrices, _) = MatrixArgs::list(&projections, variant.rows());
        matrices[1].first_group = u32::MAX;
        let is_many = matches!(variant, MatmulVariant::Many { .. });
        let next = next.filter(|_| is_many && matches!(operands.stacked, Stacked::No));
        let next =
            packed_activations::for_next(gpu, next, operands.num_tokens, num_rows, operands.out.buffer);
        let mut num_results = num_rows;
        if next.is_some() {
            // A tile's results are one step of the next matmul, and their numbers match.
            num_results = packed_activations::stride(num_rows);
            operands.out_stride = num_results;
        }
        let num_tiles = num_results.div_ceil(variant.rows() / 2);
        let args = operands.tensor_args(num_units, matrices, num_tiles);
        let threadgroup_memory = gpu.device().threadgroup_memory();
        let kernel = Kernel::TensorSwiglu { format, variant, next };
        let cost = operands.cost(&projections, variant.tokens());
        let buffers = buffers(&operands);
        // There are no groups of several rows.
        let num_buffers = if matches!(variant, MatmulVariant::Several { .. }) { 5 } else { buffers.len() };
        let buffers = &buffers[..num_buffers];
        let num_threadgroups = variant.num_threadgroups(size, num_tiles, gpu.device().num_cores());
        let work = variant.work(bytes_of(&args), buffers, size, num_threadgroups, threadgroup_memory, cost);
        gpu.launch(kernel, flags.with_last(variant.is_whole(size, threadgroup_memory)), work)?;
        return Ok(next.is_some());
    }
    if operands.num_tokens >= MIN_MATMUL_TOKENS {
        let (mut matrices, _) = MatrixArgs::list(&projections, Tile::ROWS);
        matrices[1].first_group = u32::MAX;
        let num_groups = num_rows.div_ceil(Tile::ROWS / 2);
        operands.chunks(gpu, &projections).try_for_each(|chunk| {
            let tile = Tile::of(format, None, chunk.rows_each());
            let kernel = Kernel::MatmulSwiglu { format, tokens: tile.tokens };
            let args = chunk.args(num_units, matrices);
            let cost = chunk.cost(&projections, tile.tokens);
            gpu.launch(kernel, flags, tile.work(bytes_of(&args), &buffers(&chunk), &chunk, num_groups, cost))
        })?;
        return Ok(false);
    }
    let columns = operands.rows_each().next_power_of_two();
    let rows = (rows_per_simdgroup(format, columns) / 2).max(1);
    let (matrices, _) = MatrixArgs::list(&projections, rows);
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
            cost: operands.cost(&projections, columns),
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
