//! Token embeddings.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable, bytes_of};

use super::backend::GpuBackend;
use super::buffer;
use super::cost::Cost;
use super::kernel::Kernel;
use super::matmul::{Planes, tile_columns};
use crate::Result;
use crate::ops::buffer::Buffer;
use crate::ops::embed::Embed;
use crate::ops::step_inputs::StepInputs;
use crate::ops::weights::Matrix;

/// `EmbedArgs` of the kernels.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct EmbedArgs {
    planes: Planes,
    num_units: u32,
    num_rows: u32,
    scale: f32,
}

impl Embed for Arc<GpuBackend> {
    fn embed(&self, step: &StepInputs<'_>, table: &Matrix, scale: f32, out: &mut Buffer) -> Result<()> {
        let table = table.held().on(self)?;
        let token_ids = match step.sampled {
            Some(sampled) => sampled.binding(),
            None => step.lists(self)?.token_ids(),
        };
        let args = EmbedArgs {
            planes: table.planes(),
            num_units: table.num_units() as u32,
            num_rows: table.rows() as u32,
            scale,
        };
        let buffers = [table.binding(), token_ids, buffer::write(self, out)?];
        // A threadgroup has 32 units in row order, or eight fragments in tiles of 64 or 128 columns.
        let (kernel, num_groups) = if table.is_tiled() {
            let num_tiles = table.cols().div_ceil(tile_columns(table.dtype()));
            (Kernel::EmbedTiled(table.dtype()), num_tiles.div_ceil(8))
        } else {
            (Kernel::Embed(table.dtype()), table.num_units().div_ceil(32))
        };
        let grid = [num_groups, step.num_tokens(), 1];
        // A row of the table and one of the result, which is larger.
        let cost = Cost::bytes(2 * 4 * step.num_tokens() * table.cols());
        self.launch_simdgroups(kernel, bytes_of(&args), &buffers, grid, cost)
    }
}
