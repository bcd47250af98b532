//! Norms of a range of each row, in place.

use crate::ops::buffer::Buffer;
use crate::ops::context::Context;
use crate::ops::device::{Device, on_device};
use crate::ops::weights::RmsNorm;
use crate::{Error, Result};

/// The operation of a device.
pub(crate) trait NormPart: Device {
    /// [`norm_part`].
    fn norm_part(&self, num_rows: usize, x: &mut Buffer, first: usize, norm: &RmsNorm) -> Result<()>;
}

/// `x[first..first + len] = norm(x[first..first + len])` in each row; `len` is the norm's.
///
/// `x` is `[num_rows, first + len or more]`.
///
/// # Errors
/// [`crate::ErrorKind::Internal`] if shapes do not match.
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
