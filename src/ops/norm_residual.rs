//! Norms of the output of attention or of the feed-forward network, before the residual.

use crate::ops::buffer::Buffer;
use crate::ops::context::Context;
use crate::ops::device::{Device, on_device};
use crate::ops::weights::RmsNorm;
use crate::{Error, Result};

/// The operation of a device.
pub(crate) trait NormResidual: Device {
    /// [`norm_residual`].
    fn norm_residual(&self, num_rows: usize, y: &Buffer, norm: &RmsNorm, x: &mut Buffer) -> Result<()>;
}

/// `x += norm(y)`.
///
/// Both are `[num_rows, hidden]`.
///
/// # Errors
/// [`crate::ErrorKind::Internal`] if shapes do not match.
pub fn norm_residual(
    context: &Context,
    num_rows: usize,
    y: &Buffer,
    norm: &RmsNorm,
    x: &mut Buffer,
) -> Result<()> {
    let width = norm.weight.len();
    if (y.width(), x.width()) != (width, width) {
        let (y, x) = (y.width(), x.width());
        return Err(Error::internal(format!(
            "norm_residual: {y} and {x} values do not fit a norm of {width}"
        )));
    }
    on_device!(context.launch(), |device| device.norm_residual(num_rows, y, norm, x))
}
