//! Launches of what moves rows.

use bytemuck::{Pod, Zeroable, bytes_of};

use super::backend::{Flags, GpuBackend, Work};
use super::cost::Cost;
use super::kernel::Kernel;
use super::layout::Planes;
use super::matrix::GpuMatrix;
use super::tiles::tile_columns;
use super::{Binding, GpuBuffer};
use crate::Result;

/// `EmbedArgs` of the kernels.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct EmbedArgs {
    planes: Planes,
    num_units: u32,
    num_rows: u32,
}

/// `out[i] = table[token_ids[i]]`.
pub(crate) fn embed(
    gpu: &GpuBackend,
    table: &GpuMatrix,
    num_tokens: usize,
    token_ids: Binding<'_>,
    out: &GpuBuffer,
) -> Result<()> {
    let args = EmbedArgs {
        planes: table.planes(),
        num_units: table.num_units() as u32,
        num_rows: table.rows() as u32,
    };
    let buffers = [table.binding(), token_ids, Binding::write(out)];
    // A threadgroup has 32 units in the order of rows, and in tiles of 64 or 128 columns eight pieces.
    let (kernel, num_groups) = if table.is_tiled() {
        let num_tiles = table.cols().div_ceil(tile_columns(table.dtype()));
        (Kernel::EmbedTiled(table.dtype()), num_tiles.div_ceil(8))
    } else {
        (Kernel::Embed(table.dtype()), table.num_units().div_ceil(32))
    };
    let grid = [num_groups, num_tokens, 1];
    // A row of the table and one of the result, which is larger.
    let cost = Cost::bytes(2 * 4 * num_tokens * table.cols());
    launch(gpu, kernel, bytes_of(&args), &buffers, grid, cost)
}

/// `x[i] = x[rows[i]]` for `num_rows` ascending rows of `width` values.
pub(crate) fn gather_rows(
    gpu: &GpuBackend,
    num_rows: usize,
    rows: Binding<'_>,
    x: &GpuBuffer,
    width: usize,
) -> Result<()> {
    let args = [num_rows as u32, width as u32];
    let buffers = [rows, Binding::read_write(x)];
    let cost = Cost::bytes(2 * 4 * num_rows * width);
    launch(gpu, Kernel::GatherRows, bytes_of(&args), &buffers, [width.div_ceil(32), 1, 1], cost)
}

/// Copies block `source` to `target` in a pool of blocks of `block_bytes`, a multiple of 16.
pub(crate) fn copy_block(
    gpu: &GpuBackend,
    pool: &GpuBuffer,
    block_bytes: usize,
    source: u32,
    target: u32,
) -> Result<()> {
    let num_words = block_bytes / 16;
    let args = [source, target, num_words as u32];
    let buffers = [Binding::read_write(pool)];
    let cost = Cost::bytes(2 * block_bytes);
    launch(gpu, Kernel::CopyBlock, bytes_of(&args), &buffers, [num_words.div_ceil(32), 1, 1], cost)
}

fn launch(
    gpu: &GpuBackend,
    kernel: Kernel,
    args: &[u8],
    buffers: &[Binding<'_>],
    grid: [usize; 3],
    cost: Cost,
) -> Result<()> {
    let work = Work { args, buffers, threadgroup_memory: 0, grid, num_threads: 32, cost };
    gpu.launch(kernel, Flags::default(), work)
}
