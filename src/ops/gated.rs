//! The activation between gate and up, where no matmul fuses it.

use crate::config::Activation;
use crate::ops::buffer::Buffer;
use crate::ops::context::Context;
use crate::ops::device::{Device, on_device};
use crate::{Error, Result};

/// The operation of a device.
pub(crate) trait Gated: Device {
    /// [`gated`].
    fn gated(&self, activation: Activation, num_rows: usize, halves: &Buffer, out: &mut Buffer)
    -> Result<()>;
}

/// `out = activation(gate, up)`.
///
/// `halves` is `[num_rows, 2 · width]`: the gate, then the other half. `out` is `[num_rows, width]`.
///
/// # Errors
/// [`crate::ErrorKind::Internal`] if shapes do not match.
pub fn gated(
    context: &Context,
    activation: Activation,
    num_rows: usize,
    halves: &Buffer,
    out: &mut Buffer,
) -> Result<()> {
    let width = out.width();
    if halves.width() != 2 * width {
        let halves = halves.width();
        return Err(Error::internal(format!("gated: {halves} values are not two halves of {width}")));
    }
    on_device!(context.launch(), |device| device.gated(activation, num_rows, halves, out))
}
