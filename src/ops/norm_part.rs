//! Norms of a part of each row, where they are.

use crate::ops::buffer::Buffer;
use crate::ops::context::Context;
use crate::ops::device::{Device, on_device};
use crate::ops::weights::RmsNorm;
use crate::{Error, Result};

/// What a device implements of it.
pub(crate) trait NormPart: Device {
    /// [`norm_part`].
    fn norm_part(&self, num_rows: usize, x: &mut Buffer, first: usize, norm: &RmsNorm) -> Result<()>;
}

/// `x[first..first + len] = norm(x[first..first + len])` in each row, of as many values as the norm has.
///
/// `x` is `[num_rows, first + len or more]`.
///
/// # Errors
/// [`crate::ErrorKind::Internal`] if shapes do not fit together.
pub fn norm_part(
    context: &Context,
    num_rows: usize,
    x: &mut Buffer,
    first: usize,
    norm: &RmsNorm,
) -> Result<()> {
    let (width, len) = (x.width(), norm.weight.len());
    if first + len > width {
        return Err(Error::internal(format!(
            "norm_part: a norm of {len} values from value {first} on does not fit rows of {width}"
        )));
    }
    on_device!(context.launch(), |device| device.norm_part(num_rows, x, first, norm))
}
