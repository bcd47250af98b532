//! The activation between the two halves of a gated network.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable, bytes_of};

use super::backend::GpuBackend;
use super::cost::Cost;
use super::kernel::Kernel;
use super::{Binding, buffer};
use crate::Result;
use crate::config::Activation;
use crate::ops::buffer::Buffer;
use crate::ops::gated::Gated;

/// `GatedArgs` of the kernels.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct GatedArgs {
    width: u32,
    formula: [f32; 4],
}

impl Gated for Arc<GpuBackend> {
    fn gated(
        &self,
        activation: Activation,
        num_rows: usize,
        halves: &Buffer,
        out: &mut Buffer,
    ) -> Result<()> {
        let width = out.width();
        let args = GatedArgs { width: width as u32, formula: activation.formula().to_array() };
        let buffers = [Binding::read(halves.held().on(self)?.values()?), buffer::write(self, out)?];
        let cost = Cost::bytes(3 * 4 * num_rows * width);
        let grid = [width.div_ceil(32), num_rows, 1];
        self.launch_simdgroups(Kernel::Gated, bytes_of(&args), &buffers, grid, cost)
    }
}
