//! Products with weights, fused with what comes before and after them.
//!
//! In all of them the first `num_rows` rows of the buffers take part.

use crate::ops::buffer::Buffer;
use crate::ops::context::{Backend, Context, CpuBackend};
use crate::ops::cpu::matmul::{
    Activations, Forms, Mode, Part, RowGroup, matmul, matmul_swiglu, matmul_swiglu_biased,
};
use crate::ops::gpu::{self, Access, Binding, Operands, Rounded, Stacked};
use crate::ops::reference;
use crate::ops::weights::{Linear, Matrix, RmsNorm, Vector};
use crate::weights::DType;
use crate::{Error, Result};

/// Memory for the inputs of products in the form that kernels read, allocated once.
#[derive(Debug)]
pub struct LinearScratch {
    device: DeviceScratch,
}

#[derive(Debug)]
enum DeviceScratch {
    Cpu(CpuScratch),
    Gpu(GpuScratch),
    Reference,
}

/// What products on a GPU need.
#[derive(Debug)]
struct GpuScratch {
    /// One half of a gated product whose matrices have two formats, if there is one.
    up: Option<Buffer>,
    /// The activations of products with many rows, if the device has kernels that take them so.
    rounded: Option<Rounded>,
}

/// What products on the CPU need.
#[derive(Debug, Default)]
pub(crate) struct CpuScratch {
    pub(crate) activations: Activations,
    pub(crate) groups: Vec<RowGroup>,
}

impl LinearScratch {
    /// Memory for `max_rows` rows of `max_cols` values.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Capacity`] if the device has no memory.
    pub fn new(context: &Context, max_rows: usize, max_cols: usize) -> Result<Self> {
        let device = match context.backend() {
            Backend::Cpu(cpu) => {
                let mut scratch = CpuScratch::default();
                scratch.activations.reserve(max_rows, max_cols, Forms::all(cpu.level));
                DeviceScratch::Cpu(scratch)
            }
            Backend::Gpu(gpu) => {
                DeviceScratch::Gpu(GpuScratch { up: None, rounded: Rounded::new(gpu, max_rows, max_cols)? })
            }
            Backend::Reference(_) => DeviceScratch::Reference,
        };
        Ok(Self { device })
    }

    /// Makes room for `max_groups` groups with `max_rows` rows of `max_cols` values in all.
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
        match (context.backend(), &mut self.device) {
            (Backend::Cpu(cpu), DeviceScratch::Cpu(scratch)) => {
                let max_rows = max_rows + max_groups * RowGroup::ALIGNMENT;
                scratch.activations.reserve(max_rows, max_cols, Forms::all(cpu.level));
                scratch.groups.reserve(max_groups);
            }
            (Backend::Gpu(gpu), DeviceScratch::Gpu(scratch)) => {
                Rounded::reserve(&mut scratch.rounded, gpu, max_rows, max_cols)?;
            }
            _ => (),
        }
        Ok(())
    }

    pub(crate) fn cpu(&mut self) -> Result<&mut CpuScratch> {
        match &mut self.device {
            DeviceScratch::Cpu(scratch) => Ok(scratch),
            _ => Err(Error::internal("the memory of products is on another device")),
        }
    }

    /// Makes room for one half of a gated product: as much as `out` has for the other one.
    pub(crate) fn reserve_up(&mut self, context: &Context, out: &Buffer) -> Result<()> {
        let DeviceScratch::Gpu(scratch) = &mut self.device else {
            return Err(Error::internal("the memory of products is on another device"));
        };
        let num_values = out.max_rows() * out.width();
        if scratch.up.as_ref().is_none_or(|up| up.max_rows() < num_values) {
            scratch.up = Some(Buffer::new(context, num_values, 1)?);
        }
        Ok(())
    }

    /// What [`Self::reserve_up`] made room for.
    pub(crate) fn up(&self) -> Result<&Buffer> {
        match &self.device {
            DeviceScratch::Gpu(GpuScratch { up: Some(up), .. }) => Ok(up),
            _ => Err(Error::internal("one half of a product has no memory")),
        }
    }

    /// Memory for the rounded activations of a GPU's products.
    pub(crate) fn rounded(&self) -> Option<&Rounded> {
        match &self.device {
            DeviceScratch::Gpu(scratch) => scratch.rounded.as_ref(),
            _ => None,
        }
    }

    fn prepare(
        &mut self,
        cpu: &CpuBackend,
        x: &[f32],
        num_rows: usize,
        width: usize,
        norm: Option<&RmsNorm>,
        matrices: &[&Matrix],
    ) -> Result<&Activations> {
        let cols = matrices.first().map_or(width, |matrix| matrix.cols());
        let activations = &mut self.cpu()?.activations;
        let norm = norm.map(|norm| (&norm.weight[..], norm.eps));
        let forms = Forms::of(matrices.iter().map(|matrix| matrix.dtype()), cpu.level);
        activations.prepare(x, width, num_rows, cols, norm, forms, &cpu.pool, cpu.level);
        Ok(activations)
    }
}

/// Activations that a product reads.
#[derive(Debug, Clone, Copy)]
pub struct ProductInput<'a> {
    values: &'a Buffer,
    /// Whether the op that computed them has left them as a GPU's product reads them, and nothing else can.
    is_rounded: bool,
}

impl<'a> ProductInput<'a> {
    pub(super) fn new(values: &'a Buffer, is_rounded: bool) -> Self {
        Self { values, is_rounded }
    }

    /// Whether they are in a form that only the product can read for which they were computed.
    #[must_use]
    pub fn is_rounded(self) -> bool {
        self.is_rounded
    }
}

impl<'a> From<&'a Buffer> for ProductInput<'a> {
    fn from(values: &'a Buffer) -> Self {
        Self::new(values, false)
    }
}

/// `out = [W₀·norm(x) + b₀, W₁·norm(x) + b₁, …]`, side by side in each row.
///
/// `x` is `[num_rows, hidden or more]`, of which the first values of each row take part; `out` is
/// `[num_rows, Σ outputs]`.
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
    let placed = linears.map(|linear| {
        let out_offset = width;
        width += linear.weight.rows();
        (linear, out_offset)
    });
    let hidden = linears.first().map_or(0, |linear| linear.weight.cols());
    check_width("norm_linear", "its norm", norm.weight.len(), hidden)?;
    for linear in linears {
        check_linear("norm_linear", linear, hidden, None)?;
    }
    if x.width() < hidden {
        check_width("norm_linear", "its input", x.width(), hidden)?;
    }
    check_width("norm_linear", "its output", out.width(), width)?;
    let matrices = linears.map(|linear| &linear.weight);
    let cpu = match context.launch() {
        Backend::Cpu(cpu) => cpu,
        Backend::Gpu(gpu) => {
            let parts = all(placed.map(|(linear, out_offset)| gpu_part(linear, out_offset)))?;
            return gpu::matmul(gpu, &parts, &gpu_operands(scratch, num_rows, x, Some(norm), out)?);
        }
        Backend::Reference(backend) => {
            let (x, out) = (x.reference()?, out.reference_mut()?);
            return backend
                .run(num_rows, || reference::norm_linear(backend, num_rows, x, norm, &linears, out));
        }
    };
    let parts = all(placed.map(|(linear, out_offset)| {
        linear.weight.cpu().map(|matrix| Part { matrix, out_offset, bias: linear.bias.as_deref() })
    }))?;
    let x =
        x.read(num_rows, |values| scratch.prepare(cpu, values, num_rows, x.width(), Some(norm), &matrices))??;
    out.write(num_rows, |out| {
        matmul(x, &parts, out, width, Mode::Store, &cpu.pool, cpu.level);
    })
}

/// `x += W·h + b`.
///
/// `h` is `[num_rows, inputs]`, `x` is `[num_rows, hidden]`.
///
/// # Errors
/// [`crate::ErrorKind::Internal`] if shapes do not fit together.
pub fn linear_residual<'a>(
    context: &Context,
    scratch: &mut LinearScratch,
    num_rows: usize,
    h: impl Into<ProductInput<'a>>,
    linear: &Linear,
    x: &mut Buffer,
) -> Result<()> {
    let ProductInput { values: h, is_rounded } = h.into();
    check_linear("linear_residual", linear, h.width(), Some(x.width()))?;
    let cpu = match context.launch() {
        Backend::Cpu(cpu) => cpu,
        Backend::Gpu(gpu) => {
            let mut operands = gpu_operands(scratch, num_rows, h, None, x)?;
            operands.out.access = Access::ReadWrite;
            operands.is_rounded = is_rounded;
            return gpu::matmul(gpu, &[gpu_part(linear, 0)?], &operands);
        }
        Backend::Reference(backend) => {
            let (h, x) = (h.reference()?, x.reference_mut()?);
            return backend.run(num_rows, || reference::linear_residual(backend, num_rows, h, linear, x));
        }
    };
    let cols = linear.weight.cols();
    let h = h.read(num_rows, |h| scratch.prepare(cpu, h, num_rows, cols, None, &[&linear.weight]))??;
    let part = Part { matrix: linear.weight.cpu()?, out_offset: 0, bias: linear.bias.as_deref() };
    let width = x.width();
    x.write(num_rows, |x| {
        matmul(h, &[part], x, width, Mode::Add, &cpu.pool, cpu.level);
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
    norm_swiglu_for(context, scratch, num_rows, x, norm, gate, up, None, out).map(drop)
}

/// The same for a product with `next`, if there is one: nothing else can read the results.
///
/// # Errors
/// As [`norm_swiglu`].
#[expect(clippy::too_many_arguments, reason = "an op's operands")]
pub fn norm_swiglu_for<'a>(
    context: &Context,
    scratch: &mut LinearScratch,
    num_rows: usize,
    x: &Buffer,
    norm: &RmsNorm,
    gate: &Matrix,
    up: &Matrix,
    next: Option<&Linear>,
    out: &'a mut Buffer,
) -> Result<ProductInput<'a>> {
    for matrix in [gate, up] {
        check_width("norm_swiglu", "its input", matrix.cols(), x.width())?;
        check_width("norm_swiglu", "its output", matrix.rows(), out.width())?;
    }
    check_width("norm_swiglu", "its norm", norm.weight.len(), x.width())?;
    let cpu = match context.launch() {
        Backend::Cpu(cpu) => cpu,
        Backend::Gpu(gpu) => {
            if gate.dtype() != up.dtype() {
                scratch.reserve_up(context, out)?;
            }
            let operands = gpu_operands(scratch, num_rows, x, Some(norm), out)?;
            if gate.dtype() == up.dtype() {
                let parts = [gpu::Part::new(gate.gpu()?), gpu::Part::new(up.gpu()?)];
                let is_rounded = gpu::swiglu(gpu, parts, &operands, next_format(next)?)?;
                return Ok(ProductInput::new(out, is_rounded));
            }
            let up_out = scratch.up()?;
            gpu::matmul(gpu, &[gpu::Part::new(gate.gpu()?)], &operands)?;
            let up_operands = Operands { out: Binding::write(up_out.gpu()?), ..operands };
            gpu::matmul(gpu, &[gpu::Part::new(up.gpu()?)], &up_operands)?;
            let (up, gate) = (Binding::read(up_out.gpu()?), Binding::read_write(out.gpu()?));
            gpu::silu_mul(gpu, num_rows * out.width(), up, gate)?;
            return Ok((&*out).into());
        }
        Backend::Reference(backend) => {
            let (x, values) = (x.reference()?, out.reference_mut()?);
            backend.run(num_rows, || reference::norm_swiglu(backend, num_rows, x, norm, gate, up, values))?;
            return Ok((&*out).into());
        }
    };
    let (gate_packed, up_packed) = (gate.cpu()?, up.cpu()?);
    let hidden = norm.weight.len();
    let x = x.read(num_rows, |x| scratch.prepare(cpu, x, num_rows, hidden, Some(norm), &[gate, up]))??;
    let width = out.width();
    out.write(num_rows, |out| {
        matmul_swiglu(x, gate_packed, up_packed, out, width, &cpu.pool, cpu.level);
    })?;
    Ok((&*out).into())
}

/// `out = silu(W_gate·norm(x) + b_gate) · (W_up·norm(x) + b_up)`, for the few models with biases there.
///
/// `x` is `[num_rows, hidden]`, `out` is `[num_rows, intermediate]`.
///
/// # Errors
/// [`crate::ErrorKind::Internal`] if shapes do not fit together.
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
    let cpu = match context.launch() {
        Backend::Cpu(cpu) => cpu,
        Backend::Gpu(gpu) => {
            scratch.reserve_up(context, out)?;
            let operands = gpu_operands(scratch, num_rows, x, Some(norm), out)?;
            let up_out = scratch.up()?;
            gpu::matmul(gpu, &[gpu_part(gate, 0)?], &operands)?;
            let up_operands = Operands { out: Binding::write(up_out.gpu()?), ..operands };
            gpu::matmul(gpu, &[gpu_part(up, 0)?], &up_operands)?;
            let (up, gate) = (Binding::read(up_out.gpu()?), Binding::read_write(out.gpu()?));
            return gpu::silu_mul(gpu, num_rows * out.width(), up, gate);
        }
        Backend::Reference(backend) => {
            let (x, out) = (x.reference()?, out.reference_mut()?);
            return backend.run(num_rows, || {
                reference::norm_swiglu_biased(backend, num_rows, x, norm, [gate, up], out)
            });
        }
    };
    let matrices = [gate.weight.cpu()?, up.weight.cpu()?];
    let biases = [gate, up].map(|linear| linear.bias.as_deref());
    let (hidden, width) = (x.width(), out.width());
    let prepared = [&gate.weight, &up.weight];
    let x = x.read(num_rows, |x| scratch.prepare(cpu, x, num_rows, hidden, Some(norm), &prepared))??;
    out.write(num_rows, |out| {
        matmul_swiglu_biased(x, matrices, biases, out, width, &cpu.pool, cpu.level);
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
    let cpu = match context.launch() {
        Backend::Cpu(cpu) => cpu,
        Backend::Gpu(gpu) => {
            let part = gpu::Part::new(head.gpu()?);
            return gpu::matmul(gpu, &[part], &gpu_operands(scratch, num_rows, x, Some(norm), logits)?);
        }
        Backend::Reference(backend) => {
            let (x, logits) = (x.reference()?, logits.reference_mut()?);
            return backend
                .run(num_rows, || reference::norm_logits(backend, num_rows, x, norm, head, logits));
        }
    };
    let part = Part { matrix: head.cpu()?, out_offset: 0, bias: None };
    let x = x.read(num_rows, |x| scratch.prepare(cpu, x, num_rows, hidden, Some(norm), &[head]))??;
    let width = logits.width();
    logits.write(num_rows, |logits| {
        matmul(x, &[part], logits, width, Mode::Store, &cpu.pool, cpu.level);
    })
}

/// The first error, or what all have.
fn all<T, const N: usize>(results: [Result<T>; N]) -> Result<[T; N]> {
    let mut first_error = None;
    let values = results.map(|result| result.map_err(|error| first_error.get_or_insert(error).kind()).ok());
    match first_error {
        Some(error) => Err(error),
        None => Ok(values.map(|value| value.expect("an error would have been the first one"))),
    }
}

/// The format of the weights that read an op's results on a GPU.
pub(super) fn next_format(next: Option<&Linear>) -> Result<Option<DType>> {
    next.map(|next| Ok(next.weight.gpu()?.dtype())).transpose()
}

fn gpu_part(linear: &Linear, out_offset: usize) -> Result<gpu::Part<'_>> {
    let bias = linear.bias.as_ref().map(Vector::gpu).transpose()?;
    Ok(gpu::Part::new(linear.weight.gpu()?).at(out_offset).with_bias(bias))
}

/// Operands of a product that writes its output.
pub(crate) fn gpu_operands<'a>(
    scratch: &'a LinearScratch,
    num_tokens: usize,
    x: &'a Buffer,
    norm: Option<&'a RmsNorm>,
    out: &'a Buffer,
) -> Result<Operands<'a>> {
    if num_tokens > x.max_rows().min(out.max_rows()) {
        return Err(Error::internal(format!(
            "{num_tokens} rows do not fit into buffers of {} and {}",
            x.max_rows(),
            out.max_rows()
        )));
    }
    Ok(Operands {
        num_tokens,
        x: Binding::read(x.gpu()?),
        x_stride: x.width(),
        norm: norm.map(|norm| Ok::<_, Error>((norm.weight.gpu()?, norm.eps))).transpose()?,
        out: Binding::write(out.gpu()?),
        out_stride: out.width(),
        is_half: false,
        stacked: Stacked::No,
        rounded: scratch.rounded(),
        is_rounded: false,
    })
}

fn check_linear(op: &str, linear: &Linear, inputs: usize, outputs: Option<usize>) -> Result<()> {
    check_width(op, "its input", linear.weight.cols(), inputs)?;
    check_width(op, "its output", linear.weight.rows(), outputs.unwrap_or(linear.weight.rows()))?;
    let bias = linear.bias.as_ref().map_or(linear.weight.rows(), |bias| bias.len());
    check_width(op, "its bias", bias, linear.weight.rows())
}

fn check_width(op: &str, what: &str, width: usize, wanted: usize) -> Result<()> {
    if width == wanted {
        return Ok(());
    }
    Err(Error::internal(format!("{op}: {what} has {width} values in a row, not {wanted}")))
}
