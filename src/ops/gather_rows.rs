//! The rows of a step that go on.

use crate::ops::buffer::Buffer;
use crate::ops::context::{Backend, Context};
use crate::ops::gpu;
use crate::ops::reference;
use crate::ops::step_inputs::StepInputs;
use crate::{Error, Result};

/// `x[i] = x[outputs[i]]` for the outputs of a step, in place; the rows behind them are left as they come.
///
/// `x` is `[.., width]`.
///
/// # Errors
/// [`crate::ErrorKind::Internal`] if the rows do not ascend or one does not exist.
pub fn gather_rows(context: &Context, step: &StepInputs<'_>, x: &mut Buffer) -> Result<()> {
    let rows = step.outputs;
    let (width, max_rows) = (x.width(), x.max_rows());
    if !rows.is_sorted_by(|a, b| a < b) || rows.last().is_some_and(|&last| last >= max_rows) {
        return Err(Error::internal(format!("gather_rows: {rows:?} are no ascending rows of {max_rows}")));
    }
    match context.launch() {
        Backend::Cpu(_) => {}
        Backend::Gpu(gpu) => {
            return gpu::gather_rows(gpu, rows.len(), step.gpu()?.outputs(), x.gpu()?, width);
        }
        Backend::Reference(backend) => {
            let x = x.reference_mut()?;
            return backend.run(rows.len(), || reference::gather_rows(backend, rows, max_rows, x));
        }
    }
    // Ascending rows never lie before their target, so that nothing is overwritten that is still needed.
    x.write(max_rows, |x| {
        for (target, &row) in rows.iter().enumerate() {
            x.copy_within(row * width..(row + 1) * width, target * width);
        }
    })
}
