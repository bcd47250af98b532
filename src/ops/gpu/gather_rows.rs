//! Gathers the rows of a step that the following ops need.

use std::sync::Arc;

use bytemuck::bytes_of;

use super::Binding;
use super::backend::GpuBackend;
use super::cost::Cost;
use super::kernel::Kernel;
use crate::Result;
use crate::ops::buffer::Buffer;
use crate::ops::gather_rows::GatherRows;
use crate::ops::step_inputs::StepInputs;

impl GatherRows for Arc<GpuBackend> {
    fn gather_rows(&self, step: &StepInputs<'_>, x: &mut Buffer) -> Result<()> {
        let (width, num_rows) = (x.width(), step.outputs.len());
        let x = x.held().on(self)?.values()?;
        let args = [num_rows as u32, width as u32];
        let buffers = [step.lists(self)?.outputs(), Binding::read_write(x)];
        let cost = Cost::bytes(2 * 4 * num_rows * width);
        let grid = [width.div_ceil(32), 1, 1];
        self.launch_simdgroups(Kernel::GatherRows, bytes_of(&args), &buffers, grid, cost)
    }
}
