//! Token embeddings.

use crate::ops::buffer::Buffer;
use crate::ops::context::Context;
use crate::ops::device::{Device, on_device};
use crate::ops::step_inputs::StepInputs;
use crate::ops::weights::Matrix;
use crate::{Error, Result};

/// The operation of a device.
pub(crate) trait Embed: Device {
    /// [`embed`].
    fn embed(&self, step: &StepInputs<'_>, table: &Matrix, scale: f32, out: &mut Buffer) -> Result<()>;
}

/// `out[i] = scale · table[token_ids[i]]` for the tokens of a step, decoded if the table is quantised.
///
/// `table` is `[vocabulary, hidden]`, `out` is `[num_tokens, hidden]`.
///
/// # Errors
/// [`crate::ErrorKind::Internal`] if a token is not in the vocabulary or shapes do not match.
pub fn embed(
    context: &Context,
    step: &StepInputs<'_>,
    table: &Matrix,
    scale: f32,
    out: &mut Buffer,
) -> Result<()> {
    // Tokens that the device sampled are unknown here; an invalid one is embedded as zeros.
    let known = if step.sampled.is_some() { &[] } else { step.token_ids };
    if let Some(token) = known.iter().find(|token| **token as usize >= table.rows()) {
        return Err(Error::internal(format!(
            "token {token} is outside the vocabulary of {} tokens",
            table.rows()
        )));
    }
    if out.width() != table.cols() {
        return Err(Error::internal(format!(
            "embed: its output has {} values in a row, not {}",
            out.width(),
            table.cols()
        )));
    }
    on_device!(context.launch(), |device| device.embed(step, table, scale, out))
}
