//! Gathers the rows of a step that the following ops need.

use super::CpuBackend;
use crate::Result;
use crate::ops::buffer::Buffer;
use crate::ops::gather_rows::GatherRows;
use crate::ops::step_inputs::StepInputs;

impl GatherRows for CpuBackend {
    fn gather_rows(&self, step: &StepInputs<'_>, x: &mut Buffer) -> Result<()> {
        let (width, max_rows) = (x.width(), x.max_rows());
        let x = self.rows_mut(x, max_rows)?;
        // Ascending rows never precede their target, so no row is overwritten before it is read.
        for (target, &row) in step.outputs.iter().enumerate() {
            x.copy_within(row * width..(row + 1) * width, target * width);
        }
        Ok(())
    }
}
