//! The rows of a step that need logits.

use crate::ops::buffer::Buffer;
use crate::ops::context::Context;
use crate::ops::device::{Device, on_device};
use crate::ops::step_inputs::StepInputs;
use crate::{Error, Result};

/// The operation of a device.
pub(crate) trait GatherRows: Device {
    /// [`gather_rows`].
    fn gather_rows(&self, step: &StepInputs<'_>, x: &mut Buffer) -> Result<()>;
}

/// `x[i] = x[outputs[i]]` for the outputs of a step, in place; the rows after them are undefined.
///
/// `x` is `[.., width]`.
///
/// # Errors
/// [`crate::ErrorKind::Internal`] if the rows do not ascend or one does not exist.
pub fn gather_rows(context: &Context, step: &StepInputs<'_>, x: &mut Buffer) -> Result<()> {
    let (rows, max_rows) = (step.outputs, x.max_rows());
    if !rows.is_sorted_by(|a, b| a < b) || rows.last().is_some_and(|&last| last >= max_rows) {
        return Err(Error::internal(format!("gather_rows: {rows:?} are no ascending rows of {max_rows}")));
    }
    on_device!(context.launch(), |device| device.gather_rows(step, x))
}
