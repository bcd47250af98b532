//! Matmuls of heads, each with a matrix of its own.

use std::ops::Range;

use crate::ops::buffer::Buffer;
use crate::ops::context::Context;
use crate::ops::device::{Device, on_device};
use crate::ops::linear::LinearScratch;
use crate::ops::weights::MatrixStack;
use crate::{Error, Result};

/// The operation of a device.
pub(crate) trait HeadsLinear: Device {
    /// [`heads_linear`].
    fn heads_linear(
        &self,
        scratch: &mut LinearScratch,
        rows: Range<usize>,
        x: Heads<'_>,
        heads: &MatrixStack,
        out: &mut Buffer,
        out_stride: usize,
    ) -> Result<()>;
}

/// The layout of a row's heads: head `h` begins at `h · stride`.
#[derive(Debug, Clone, Copy)]
pub struct Heads<'a> {
    /// `[num_rows, num_heads · stride or more]`.
    pub rows: &'a Buffer,
    /// The stride of heads, in values.
    pub stride: usize,
}

/// `out[h] = W[h] · x[h]` for the heads of each of these rows. Multiplies the first values of each head of `x` and
/// writes the first ones of each head of `out`, whose heads are `out_stride` values apart.
///
/// # Errors
/// [`crate::ErrorKind::Internal`] if shapes do not match.
pub fn heads_linear(
    context: &Context,
    scratch: &mut LinearScratch,
    rows: Range<usize>,
    x: Heads<'_>,
    heads: &MatrixStack,
    out: &mut Buffer,
    out_stride: usize,
) -> Result<()> {
    let num_heads = heads.len();
    let fits = |width: usize, stride: usize, len: usize| len <= stride && num_heads * stride <= width;
    if !fits(x.rows.width(), x.stride, heads.cols()) || !fits(out.width(), out_stride, heads.rows()) {
        return Err(Error::internal(format!(
            "heads_linear: {num_heads} heads of {} values, {} apart in rows of {}, do not become {} values, \
             {out_stride} apart in rows of {}",
            heads.cols(),
            x.stride,
            x.rows.width(),
            heads.rows(),
            out.width()
        )));
    }
    on_device!(context.launch(), |device| device.heads_linear(scratch, rows, x, heads, out, out_stride))
}
