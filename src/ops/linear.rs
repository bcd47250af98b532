//! Matmuls with weights, fused with the ops around them.
//!
//! All of them use the first `num_rows` rows of the buffers.

use crate::ops::buffer::Buffer;
use crate::ops::context::Context;
use crate::ops::device::{Device, Held, LinearScratches, on_device};
use crate::ops::weights::{Linear, Matrix, RmsNorm};
use crate::{Error, Result};

/// The operations of a device. The functions of this file document and check the shapes.
pub(crate) trait LinearOps: Device {
    /// Memory for inputs of `max_rows` rows of `max_cols` values.
    fn linear_scratch(&self, max_rows: usize, max_cols: usize) -> Result<Self::LinearScratch>;

    /// Space for `max_groups` groups with `max_rows` rows of `max_cols` values in all.
    fn reserve_groups(
        &self,
        scratch: &mut Self::LinearScratch,
        max_groups: usize,
        max_rows: usize,
        max_cols: usize,
    ) -> Result<()>;

    /// [`norm_linear`].
    fn norm_linear<const N: usize>(
        &self,
        scratch: &mut LinearScratch,
        num_rows: usize,
        x: &Buffer,
        norm: Option<&RmsNorm>,
        linears: [&Linear; N],
        out: &mut Buffer,
    ) -> Result<()>;

    /// [`linear`].
    fn linear(
        &self,
        scratch: &mut LinearScratch,
        num_rows: usize,
        h: &Buffer,
        linear: &Linear,
        out: &mut Buffer,
    ) -> Result<()>;

    /// [`linear_residual`].
    fn linear_residual(
        &self,
        scratch: &mut LinearScratch,
        num_rows: usize,
        h: &Buffer,
        linear: &Linear,
        x: &mut Buffer,
    ) -> Result<()>;

    /// [`norm_swiglu`].
    #[expect(clippy::too_many_arguments, reason = "an op's operands")]
    fn norm_swiglu(
        &self,
        scratch: &mut LinearScratch,
        num_rows: usize,
        x: &Buffer,
        norm: &RmsNorm,
        gate: &Matrix,
        up: &Matrix,
        reader: Option<&Linear>,
        out: &mut Buffer,
    ) -> Result<()>;

    /// [`norm_swiglu_biased`].
    #[expect(clippy::too_many_arguments, reason = "an op's operands")]
    fn norm_swiglu_biased(
        &self,
        scratch: &mut LinearScratch,
        num_rows: usize,
        x: &Buffer,
        norm: &RmsNorm,
        gate: &Linear,
        up: &Linear,
        out: &mut Buffer,
    ) -> Result<()>;

    /// [`norm_logits`].
    fn norm_logits(
        &self,
        scratch: &mut LinearScratch,
        num_rows: usize,
        x: &Buffer,
        norm: &RmsNorm,
        head: &Matrix,
        logits: &mut Buffer,
    ) -> Result<()>;
}

/// Memory for the inputs of matmuls in the kernels' format, allocated once.
#[derive(Debug)]
pub struct LinearScratch {
    held: Held<LinearScratches>,
}

impl LinearScratch {
    /// Memory for `max_rows` rows of `max_cols` values.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Capacity`] if the device has no memory.
    pub fn new(context: &Context, max_rows: usize, max_cols: usize) -> Result<Self> {
        let held = on_device!(context.backend(), |device| {
            Held::new(device, device.linear_scratch(max_rows, max_cols)?)
        });
        Ok(Self { held })
    }

    /// Reserves space for `max_groups` groups with `max_rows` rows of `max_cols` values in all.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Capacity`] if the device has no memory.
    pub(crate) fn reserve_groups(
        &mut self,
        context: &Context,
        max_groups: usize,
        max_rows: usize,
        max_cols: usize,
    ) -> Result<()> {
        on_device!(context.backend(), |device| {
            device.reserve_groups(self.held.on_mut(device)?, max_groups, max_rows, max_cols)
        })
    }

    pub(crate) fn held(&self) -> &Held<LinearScratches> {
        &self.held
    }

    pub(crate) fn held_mut(&mut self) -> &mut Held<LinearScratches> {
        &mut self.held
    }
}

/// `out = [W₀·norm(x) + b₀, W₁·norm(x) + b₁, …]`, concatenated in each row; with `x` itself if there is no norm.
///
/// `x` is `[num_rows, hidden or more]`, of which the first values of each row are used; `out` is `[num_rows, Σ
/// outputs]`.
///
/// # Errors
/// [`crate::ErrorKind::Internal`] if shapes do not match.
pub fn norm_linear<const N: usize>(
    context: &Context,
    scratch: &mut LinearScratch,
    num_rows: usize,
    x: &Buffer,
    norm: Option<&RmsNorm>,
    linears: [&Linear; N],
    out: &mut Buffer,
) -> Result<()> {
    let width = linears.iter().map(|linear| linear.weight.rows()).sum();
    let hidden = linears.first().map_or(0, |linear| linear.weight.cols());
    if let Some(norm) = norm {
        check_width("norm_linear", "its norm", norm.weight.len(), hidden)?;
    }
    for linear in linears {
        check_linear("norm_linear", linear, hidden, None)?;
    }
    if x.width() < hidden {
        check_width("norm_linear", "its input", x.width(), hidden)?;
    }
    check_width("norm_linear", "its output", out.width(), width)?;
    on_device!(context.launch(), |device| device.norm_linear(scratch, num_rows, x, norm, linears, out))
}

/// `out = W·h + b`.
///
/// `h` is `[num_rows, inputs]`, `out` is `[num_rows, outputs]`.
///
/// # Errors
/// [`crate::ErrorKind::Internal`] if shapes do not match.
pub fn linear(
    context: &Context,
    scratch: &mut LinearScratch,
    num_rows: usize,
    h: &Buffer,
    linear: &Linear,
    out: &mut Buffer,
) -> Result<()> {
    check_linear("linear", linear, h.width(), Some(out.width()))?;
    on_device!(context.launch(), |device| device.linear(scratch, num_rows, h, linear, out))
}

/// `x += W·h + b`.
///
/// `h` is `[num_rows, inputs]`, `x` is `[num_rows, hidden]`.
///
/// # Errors
/// [`crate::ErrorKind::Internal`] if shapes do not match.
pub fn linear_residual(
    context: &Context,
    scratch: &mut LinearScratch,
    num_rows: usize,
    h: &Buffer,
    linear: &Linear,
    x: &mut Buffer,
) -> Result<()> {
    check_linear("linear_residual", linear, h.width(), Some(x.width()))?;
    on_device!(context.launch(), |device| device.linear_residual(scratch, num_rows, h, linear, x))
}

/// `out = silu(W_gate·norm(x)) · (W_up·norm(x))`.
///
/// `x` is `[num_rows, hidden]`, `out` is `[num_rows, intermediate]`. If `reader` is given, only a matmul with it reads
/// the results, so a device may pack them for this matmul.
///
/// # Errors
/// [`crate::ErrorKind::Internal`] if shapes do not match.
#[expect(clippy::too_many_arguments, reason = "an op's operands")]
pub fn norm_swiglu(
    context: &Context,
    scratch: &mut LinearScratch,
    num_rows: usize,
    x: &Buffer,
    norm: &RmsNorm,
    gate: &Matrix,
    up: &Matrix,
    reader: Option<&Linear>,
    out: &mut Buffer,
) -> Result<()> {
    for matrix in [gate, up] {
        check_width("norm_swiglu", "its input", matrix.cols(), x.width())?;
        check_width("norm_swiglu", "its output", matrix.rows(), out.width())?;
    }
    check_width("norm_swiglu", "its norm", norm.weight.len(), x.width())?;
    on_device!(context.launch(), |device| {
        device.norm_swiglu(scratch, num_rows, x, norm, gate, up, reader, out)
    })
}

/// `out = silu(W_gate·norm(x) + b_gate) · (W_up·norm(x) + b_up)`, for the few models with biases there.
///
/// `x` is `[num_rows, hidden]`, `out` is `[num_rows, intermediate]`.
///
/// # Errors
/// [`crate::ErrorKind::Internal`] if shapes do not match.
#[expect(clippy::too_many_arguments, reason = "an op's operands")]
pub fn norm_swiglu_biased(
    context: &Context,
    scratch: &mut LinearScratch,
    num_rows: usize,
    x: &Buffer,
    norm: &RmsNorm,
    gate: &Linear,
    up: &Linear,
    out: &mut Buffer,
) -> Result<()> {
    for linear in [gate, up] {
        check_linear("norm_swiglu_biased", linear, x.width(), Some(out.width()))?;
    }
    check_width("norm_swiglu_biased", "its norm", norm.weight.len(), x.width())?;
    on_device!(context.launch(), |device| {
        device.norm_swiglu_biased(scratch, num_rows, x, norm, gate, up, out)
    })
}

/// `logits = W·norm(x)`.
///
/// `x` is `[num_rows, hidden]`, `logits` is `[num_rows, vocabulary]`.
///
/// # Errors
/// [`crate::ErrorKind::Internal`] if shapes do not match.
pub fn norm_logits(
    context: &Context,
    scratch: &mut LinearScratch,
    num_rows: usize,
    x: &Buffer,
    norm: &RmsNorm,
    head: &Matrix,
    logits: &mut Buffer,
) -> Result<()> {
    let hidden = x.width();
    check_width("norm_logits", "its input", head.cols(), hidden)?;
    check_width("norm_logits", "its norm", norm.weight.len(), hidden)?;
    check_width("norm_logits", "its output", logits.width(), head.rows())?;
    on_device!(context.launch(), |device| device.norm_logits(scratch, num_rows, x, norm, head, logits))
}

/// Maps each matrix and the offset of its outputs in a row of concatenated outputs with `projection`.
pub(super) fn side_by_side<'a, T, const N: usize>(
    linears: [&'a Linear; N],
    projection: impl Fn(&'a Linear, usize) -> Result<T>,
) -> Result<[T; N]> {
    let (mut offset, mut first_error) = (0, None);
    let projections = linears.map(|linear| {
        let projection =
            projection(linear, offset).map_err(|error| first_error.get_or_insert(error).kind()).ok();
        offset += linear.weight.rows();
        projection
    });
    match first_error {
        Some(error) => Err(error),
        None => Ok(projections.map(|projection| projection.expect("an error would have been the first one"))),
    }
}

fn check_linear(op: &str, linear: &Linear, inputs: usize, outputs: Option<usize>) -> Result<()> {
    check_width(op, "its input", linear.weight.cols(), inputs)?;
    check_width(op, "its output", linear.weight.rows(), outputs.unwrap_or(linear.weight.rows()))?;
    let bias = linear.bias.as_ref().map_or(linear.weight.rows(), |bias| bias.len());
    check_width(op, "its bias", bias, linear.weight.rows())
}

pub(super) fn check_width(op: &str, what: &str, width: usize, wanted: usize) -> Result<()> {
    if width == wanted {
        return Ok(());
    }
    Err(Error::internal(format!("{op}: {what} has {width} values in a row, not {wanted}")))
}
