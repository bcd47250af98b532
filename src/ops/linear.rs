//! Products with weights, fused with what comes before and after them.
//!
//! In all of them the first `num_rows` rows of the buffers take part.

use crate::ops::buffer::Buffer;
use crate::ops::context::{Backend, Context, CpuBackend};
use crate::ops::cpu::matmul::{Activations, Forms, Mode, Part, matmul, matmul_swiglu};
use crate::ops::weights::{Linear, Matrix, RmsNorm};
use crate::{Error, Result};

/// Memory for the inputs of products in the form that kernels read, allocated once.
#[derive(Debug, Default)]
pub struct LinearScratch {
    activations: Activations,
}

impl LinearScratch {
    /// Memory for `max_rows` rows of `max_cols` values.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Unsupported`] for a device without kernels.
    pub fn new(context: &Context, max_rows: usize, max_cols: usize) -> Result<Self> {
        let mut scratch = Self::default();
        let Backend::Cpu(cpu) = context.backend("allocate")?;
        let forms = Forms { dense: true, int8: true, bf16: cpu.level.has_bf16_dot() };
        scratch.activations.reserve(max_rows, max_cols, forms);
        Ok(scratch)
    }

    fn prepare(
        &mut self,
        cpu: &CpuBackend,
        x: &[f32],
        num_rows: usize,
        width: usize,
        norm: Option<&RmsNorm>,
        matrices: &[&Matrix],
    ) {
        let norm = norm.map(|norm| (&norm.weight[..], norm.eps));
        let forms = Forms::of(matrices.iter().map(|matrix| matrix.dtype()), cpu.level);
        self.activations.prepare(x, width, num_rows, width, norm, forms, &cpu.pool, cpu.level);
    }
}

/// `out = [W₀·norm(x) + b₀, W₁·norm(x) + b₁, …]`, side by side in each row.
///
/// `x` is `[num_rows, hidden]`, `out` is `[num_rows, Σ outputs]`.
///
/// # Errors
/// [`crate::ErrorKind::Internal`] if shapes do not fit together.
pub fn norm_linear<const N: usize>(
    context: &Context,
    scratch: &mut LinearScratch,
    num_rows: usize,
    x: &Buffer,
    norm: &RmsNorm,
    linears: [&Linear; N],
    out: &mut Buffer,
) -> Result<()> {
    let mut width = 0;
    let parts = linears.map(|linear| {
        let part = Part { matrix: linear.weight.cpu(), out_offset: width, bias: linear.bias.as_deref() };
        width += linear.weight.rows();
        part
    });
    for linear in linears {
        check_linear("norm_linear", linear, x.width(), None)?;
    }
    check_width("norm_linear", "its norm", norm.weight.len(), x.width())?;
    check_width("norm_linear", "its output", out.width(), width)?;
    let matrices = linears.map(|linear| &linear.weight);
    let Backend::Cpu(cpu) = context.launch("norm_linear")?;
    x.read(num_rows, |x| scratch.prepare(cpu, x, num_rows, norm.weight.len(), Some(norm), &matrices))?;
    out.write(num_rows, |out| {
        matmul(&scratch.activations, &parts, out, width, Mode::Store, &cpu.pool, cpu.level);
    })
}

/// `x += W·h + b`.
///
/// `h` is `[num_rows, inputs]`, `x` is `[num_rows, hidden]`.
///
/// # Errors
/// [`crate::ErrorKind::Internal`] if shapes do not fit together.
pub fn linear_residual(
    context: &Context,
    scratch: &mut LinearScratch,
    num_rows: usize,
    h: &Buffer,
    linear: &Linear,
    x: &mut Buffer,
) -> Result<()> {
    check_linear("linear_residual", linear, h.width(), Some(x.width()))?;
    let Backend::Cpu(cpu) = context.launch("linear_residual")?;
    h.read(num_rows, |h| scratch.prepare(cpu, h, num_rows, linear.weight.cols(), None, &[&linear.weight]))?;
    let part = Part { matrix: linear.weight.cpu(), out_offset: 0, bias: linear.bias.as_deref() };
    let width = x.width();
    x.write(num_rows, |x| {
        matmul(&scratch.activations, &[part], x, width, Mode::Add, &cpu.pool, cpu.level);
    })
}

/// `out = silu(W_gate·norm(x)) · (W_up·norm(x))`.
///
/// `x` is `[num_rows, hidden]`, `out` is `[num_rows, intermediate]`.
///
/// # Errors
/// [`crate::ErrorKind::Internal`] if shapes do not fit together.
#[expect(clippy::too_many_arguments, reason = "an op's operands")]
pub fn norm_swiglu(
    context: &Context,
    scratch: &mut LinearScratch,
    num_rows: usize,
    x: &Buffer,
    norm: &RmsNorm,
    gate: &Matrix,
    up: &Matrix,
    out: &mut Buffer,
) -> Result<()> {
    for matrix in [gate, up] {
        check_width("norm_swiglu", "its input", matrix.cols(), x.width())?;
        check_width("norm_swiglu", "its output", matrix.rows(), out.width())?;
    }
    check_width("norm_swiglu", "its norm", norm.weight.len(), x.width())?;
    let Backend::Cpu(cpu) = context.launch("norm_swiglu")?;
    x.read(num_rows, |x| scratch.prepare(cpu, x, num_rows, norm.weight.len(), Some(norm), &[gate, up]))?;
    let width = out.width();
    out.write(num_rows, |out| {
        matmul_swiglu(&scratch.activations, gate.cpu(), up.cpu(), out, width, &cpu.pool, cpu.level);
    })
}

/// `logits = W·norm(x)`.
///
/// `x` is `[num_rows, hidden]`, `logits` is `[num_rows, vocabulary]`.
///
/// # Errors
/// [`crate::ErrorKind::Internal`] if shapes do not fit together.
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
    let Backend::Cpu(cpu) = context.launch("norm_logits")?;
    x.read(num_rows, |x| scratch.prepare(cpu, x, num_rows, hidden, Some(norm), &[head]))?;
    let width = logits.width();
    logits.write(num_rows, |logits| {
        let part = Part { matrix: head.cpu(), out_offset: 0, bias: None };
        matmul(&scratch.activations, &[part], logits, width, Mode::Store, &cpu.pool, cpu.level);
    })
}

fn check_linear(op: &str, linear: &Linear, inputs: usize, outputs: Option<usize>) -> Result<()> {
    check_width(op, "its input", linear.weight.cols(), inputs)?;
    check_width(op, "its output", linear.weight.rows(), outputs.unwrap_or(linear.weight.rows()))?;
    let bias = linear.bias.as_ref().map_or(linear.weight.rows(), Vec::len);
    check_width(op, "its bias", bias, linear.weight.rows())
}

fn check_width(op: &str, what: &str, width: usize, wanted: usize) -> Result<()> {
    if width == wanted {
        return Ok(());
    }
    Err(Error::internal(format!("{op}: {what} has {width} values in a row, not {wanted}")))
}
