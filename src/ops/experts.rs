//! A feed-forward network of experts: which of them a token goes through, and their products.

mod batches;
mod choose;
mod host;

use crate::config::{ExpertsConfig, Scoring};
use crate::ops::buffer::Buffer;
use crate::ops::context::{Backend, Context};
use crate::ops::cpu::matmul::{Forms, Mode, Part, RowGroup, matmul, matmul_groups, matmul_swiglu_groups};
use crate::ops::cpu::rows::RowsMut;
use crate::ops::gpu::{self, Binding, GpuRouting, RouterForm, RoutingSizes, Stacked};
use crate::ops::linear::{CpuScratch, LinearScratch};
use crate::ops::reference;
use crate::ops::weights::{Matrix, MatrixStack, RmsNorm, Vector};
use crate::{Error, Result};

use batches::Batches;
use host::HostRouting;

/// What chooses experts.
#[derive(Debug)]
pub struct Router {
    /// `[num_experts, hidden]`.
    pub weight: Matrix,
    /// Added to probabilities to choose by, but not to weigh with. Length `num_experts`.
    pub selection_bias: Option<Vector>,
    /// How the choice is made.
    pub config: ExpertsConfig,
    /// Experts behind those that are chosen from, which every token goes through, with weight one.
    pub num_shared: usize,
}

/// The experts of the tokens of a step, and where each token's share of the work of each of them is: a *place* is a row
/// of the buffers between the products. Allocated once.
#[derive(Debug)]
pub struct Routing {
    num_rows: usize,
    device: DeviceRouting,
}

#[derive(Debug)]
enum DeviceRouting {
    Host(HostRouting),
    Gpu(GpuRouting),
}

impl Routing {
    /// Memory for `max_rows` tokens.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Unsupported`] if the device has no kernels for so many experts,
    /// [`crate::ErrorKind::Capacity`] if it has no memory.
    pub fn new(context: &Context, config: &ExpertsConfig, max_rows: usize) -> Result<Self> {
        let device = match context.backend() {
            Backend::Cpu(_) | Backend::Reference(_) => {
                DeviceRouting::Host(HostRouting::new(config, max_rows))
            }
            Backend::Gpu(gpu) => {
                let sizes = RoutingSizes {
                    num_experts: config.num_experts + config.num_shared_experts(),
                    per_token: config.num_experts_per_tok + config.num_shared_experts(),
                    num_groups: config.num_groups,
                    max_rows,
                };
                DeviceRouting::Gpu(GpuRouting::new(gpu, sizes)?)
            }
        };
        Ok(Self { num_rows: 0, device })
    }

    /// Places for `max_rows` tokens: one for each of their experts, and what groups are rounded up by.
    #[must_use]
    pub fn max_places(config: &ExpertsConfig, max_rows: usize) -> usize {
        let num_shared = config.num_shared_experts();
        let pairs = max_rows * (config.num_experts_per_tok + num_shared);
        pairs + (config.num_experts + num_shared).min(pairs) * (RowGroup::ALIGNMENT - 1)
    }

    fn host(&self) -> Result<&HostRouting> {
        match &self.device {
            DeviceRouting::Host(routing) => Ok(routing),
            DeviceRouting::Gpu(_) => Err(elsewhere()),
        }
    }

    fn gpu(&self) -> Result<&GpuRouting> {
        match &self.device {
            DeviceRouting::Gpu(routing) => Ok(routing),
            DeviceRouting::Host(_) => Err(elsewhere()),
        }
    }
}

fn elsewhere() -> Error {
    Error::internal("the experts of a step are on another device")
}

/// Chooses the experts of `norm(x)` for each row.
///
/// `x` is `[num_rows, hidden]`. Logits and probabilities are computed in single precision; of equal experts the first
/// is chosen.
///
/// # Errors
/// [`crate::ErrorKind::Internal`] if shapes do not fit together.
pub fn route(
    context: &Context,
    scratch: &mut LinearScratch,
    num_rows: usize,
    x: &Buffer,
    norm: &RmsNorm,
    router: &Router,
    routing: &mut Routing,
) -> Result<()> {
    let num_experts = router.config.num_experts;
    let hidden = x.width();
    check("route", "its input", router.weight.cols(), hidden)?;
    check("route", "its norm", norm.weight.len(), hidden)?;
    check("route", "its output", router.weight.rows(), num_experts)?;
    routing.num_rows = num_rows;
    let routing = match &mut routing.device {
        DeviceRouting::Host(routing) => routing,
        DeviceRouting::Gpu(routing) => {
            return route_on_gpu(context, scratch, num_rows, x, norm, router, routing);
        }
    };
    let logits = routing.logits(num_rows, num_experts)?;
    match context.launch() {
        Backend::Cpu(cpu) => {
            let CpuScratch { activations, .. } = scratch.cpu()?;
            let norm = Some((&norm.weight[..], norm.eps));
            let forms = Forms::of([router.weight.dtype()], cpu.level);
            x.read(num_rows, |x| {
                activations.prepare(x, hidden, num_rows, hidden, norm, forms, &cpu.pool, cpu.level);
            })?;
            let part = Part::new(router.weight.cpu()?, 0);
            matmul(activations, &[part], logits, num_experts, Mode::Store, &cpu.pool, cpu.level);
        }
        Backend::Reference(backend) => {
            let (x, weight) = (x.reference()?, router.weight.reference()?);
            backend.run(num_rows, || {
                logits.copy_from_slice(&reference::router_logits(backend, num_rows, x, norm, weight)?);
                Ok(())
            })?;
        }
        Backend::Gpu(_) => return Err(elsewhere()),
    }
    routing.choose(router, num_rows)
}

fn route_on_gpu(
    context: &Context,
    scratch: &LinearScratch,
    num_rows: usize,
    x: &Buffer,
    norm: &RmsNorm,
    router: &Router,
    routing: &mut GpuRouting,
) -> Result<()> {
    let Backend::Gpu(gpu) = context.launch() else { return Err(elsewhere()) };
    let config = &router.config;
    routing.check_room(num_rows)?;
    let logits = gpu::Operands {
        num_tokens: num_rows,
        x: Binding::read(x.gpu()?),
        x_stride: x.width(),
        norm: Some((norm.weight.gpu()?, norm.eps)),
        out: routing.logits(),
        out_stride: config.num_experts,
        is_half: false,
        stacked: Stacked::No,
        rounded: scratch.rounded(),
        is_rounded: false,
    };
    gpu::matmul(gpu, &[gpu::Part::new(router.weight.gpu()?)], &logits)?;
    let form = RouterForm {
        is_sigmoid: config.scoring == Scoring::Sigmoid,
        normalizes: config.normalize,
        bias: router.selection_bias.as_ref().map(Vector::gpu).transpose()?,
        num_experts: config.num_experts,
        num_chosen: config.num_experts_per_tok,
        num_shared: router.num_shared,
        num_groups: config.num_groups,
        num_open_groups: config.num_groups_per_tok,
        scale: config.scale,
    };
    routing.choose(gpu, num_rows, form)
}

/// Has the system begin to read the weights of a step's experts that are in a file and not in memory: those that
/// [`experts_swiglu`] and [`experts_residual`] take first, which have the next ones read while they compute. A page
/// that is read only when it is needed is waited for by itself. No dispatch.
///
/// # Errors
/// [`crate::ErrorKind::Internal`] if a stack is on another device.
pub fn fetch_experts(
    context: &Context,
    routing: &Routing,
    gate: &MatrixStack,
    up: &MatrixStack,
    down: &MatrixStack,
) -> Result<()> {
    let Backend::Cpu(cpu) = context.backend() else { return Ok(()) };
    let groups = &routing.host()?.groups;
    Batches::new(groups, [gate.cpu()?, up.cpu()?]).fetch(0, &cpu.pool);
    Batches::new(groups, [down.cpu()?]).fetch(0, &cpu.pool);
    Ok(())
}

/// `out[place] = silu(W_gate·norm(x)) · (W_up·norm(x))` with the matrices of the expert whose place it is and the row
/// that is there.
///
/// `x` is `[num_rows, hidden]`, `out` is `[Routing::max_places, intermediate]`.
///
/// # Errors
/// [`crate::ErrorKind::Internal`] if shapes do not fit together.
#[expect(clippy::too_many_arguments, reason = "an op's operands")]
pub fn experts_swiglu(
    context: &Context,
    scratch: &mut LinearScratch,
    routing: &Routing,
    x: &Buffer,
    norm: &RmsNorm,
    gate: &MatrixStack,
    up: &MatrixStack,
    out: &mut Buffer,
) -> Result<()> {
    let hidden = x.width();
    for stack in [gate, up] {
        check("experts_swiglu", "its input", stack.cols(), hidden)?;
        check("experts_swiglu", "its output", stack.rows(), out.width())?;
    }
    check("experts_swiglu", "its norm", norm.weight.len(), hidden)?;
    let cpu = match context.launch() {
        Backend::Cpu(cpu) => cpu,
        Backend::Gpu(gpu) => {
            let (routing, num_rows) = (routing.gpu()?, routing.num_rows);
            let has_one_format = gate.gpu()?.matrix().dtype() == up.gpu()?.matrix().dtype();
            if !has_one_format {
                scratch.reserve_up(context, out)?;
            }
            let operands = gpu::Operands {
                num_tokens: num_rows,
                x: Binding::read(x.gpu()?),
                x_stride: hidden,
                norm: Some((norm.weight.gpu()?, norm.eps)),
                out: Binding::write(out.gpu()?),
                out_stride: out.width(),
                is_half: false,
                stacked: Stacked::Groups(routing.groups(true)),
                rounded: scratch.rounded(),
                is_rounded: false,
            };
            let parts = [gpu::Part::of_stack(gate.gpu()?), gpu::Part::of_stack(up.gpu()?)];
            if has_one_format {
                return gpu::swiglu(gpu, parts, &operands, None).map(drop);
            }
            let num_places = num_rows * routing.per_token();
            let up_out = scratch.up()?;
            gpu::matmul(gpu, &parts[..1], &operands)?;
            let up_operands = gpu::Operands { out: Binding::write(up_out.gpu()?), ..operands };
            gpu::matmul(gpu, &parts[1..], &up_operands)?;
            let (up, gate) = (Binding::read(up_out.gpu()?), Binding::read_write(out.gpu()?));
            return gpu::silu_mul(gpu, num_places * out.width(), up, gate);
        }
        Backend::Reference(backend) => {
            let (gate, up) = (gate.reference()?, up.reference()?);
            let (x, out) = (x.reference()?, out.reference_mut()?);
            let HostRouting { groups, row_at, .. } = routing.host()?;
            let num_places = routing.host()?.num_places();
            return backend.run(num_places, || {
                reference::experts_swiglu(backend, groups, row_at, x, norm, [gate, up], out)
            });
        }
    };
    let num_rows = routing.num_rows;
    let routing = routing.host()?;
    let (gate, up) = (gate.cpu()?, up.cpu()?);
    let CpuScratch { activations, .. } = scratch.cpu()?;
    let forms = Forms::of(gate.iter().chain(up).map(|matrix| matrix.dtype()), cpu.level);
    let norm = Some((&norm.weight[..], norm.eps));
    let start_of = |place: usize| routing.row_at[place] as usize * hidden;
    x.read(num_rows, |x| {
        activations.prepare_groups(x, start_of, &routing.groups, hidden, norm, forms, &cpu.pool, cpu.level);
    })?;
    let width = out.width();
    out.write(routing.num_places(), |out| {
        let out = RowsMut::new(out, width);
        let write = |place: usize, first: usize, products: &[f32]| {
            // SAFETY: every place has outputs of its own, each of which is written once.
            unsafe { out.part(place, first, products.len()) }.copy_from_slice(products);
        };
        let (gate_of, up_of) = (|expert: usize| &gate[expert], |expert: usize| &up[expert]);
        Batches::new(&routing.groups, [gate, up]).run(&cpu.pool, |groups| {
            matmul_swiglu_groups(activations, groups, gate_of, up_of, write, &cpu.pool, cpu.level);
        });
    })
}

/// `x += Σ weight · W_down·h[place]` over the experts of each row, in their order. Two dispatches.
///
/// `h` is `[Routing::max_places, intermediate]`, `x` is `[num_rows, hidden]`, and `products` is room for
/// `[Routing::max_places, hidden]`.
///
/// # Errors
/// [`crate::ErrorKind::Internal`] if shapes do not fit together.
pub fn experts_residual(
    context: &Context,
    scratch: &mut LinearScratch,
    routing: &Routing,
    h: &Buffer,
    down: &MatrixStack,
    products: &mut Buffer,
    x: &mut Buffer,
) -> Result<()> {
    /// Values that a thread adds up at least.
    const VALUES_PER_TASK: usize = 1 << 14;
    let (cols, hidden) = (h.width(), x.width());
    check("experts_residual", "its input", down.cols(), cols)?;
    check("experts_residual", "its output", down.rows(), hidden)?;
    check("experts_residual", "its room for products", products.width(), hidden)?;
    let num_rows = routing.num_rows;
    let cpu = match context.launch() {
        Backend::Cpu(cpu) => cpu,
        Backend::Gpu(gpu) => {
            let routing = routing.gpu()?;
            let operands = gpu::Operands {
                num_tokens: num_rows,
                x: Binding::read(h.gpu()?),
                x_stride: cols,
                norm: None,
                out: Binding::write(products.gpu()?),
                out_stride: hidden,
                is_half: false,
                stacked: Stacked::Groups(routing.groups(false)),
                rounded: scratch.rounded(),
                is_rounded: false,
            };
            gpu::matmul(gpu, &[gpu::Part::of_stack(down.gpu()?)], &operands)?;
            return routing.combine(gpu, num_rows, hidden, products.gpu()?, x.gpu()?);
        }
        Backend::Reference(backend) => {
            let (down, h, x) = (down.reference()?, h.reference()?, x.reference_mut()?);
            let routing = routing.host()?;
            let (places, weights) = routing.choices(num_rows);
            return backend.run(routing.num_places(), || {
                reference::experts_residual(backend, num_rows, &routing.groups, places, weights, h, down, x)
            });
        }
    };
    let routing = routing.host()?;
    let (num_places, per_tok) = (routing.num_places(), routing.per_tok);
    let (places, weights) = routing.choices(num_rows);
    let down = down.cpu()?;
    let CpuScratch { activations, .. } = scratch.cpu()?;
    let forms = Forms::of(down.iter().map(|matrix| matrix.dtype()), cpu.level);
    let start_of = |place: usize| place * cols;
    h.read(num_places, |h| {
        activations.prepare_groups(h, start_of, &routing.groups, cols, None, forms, &cpu.pool, cpu.level);
    })?;
    products.write(num_places, |products| {
        let products = RowsMut::new(products, hidden);
        let write = |place: usize, first: usize, values: &[f32]| {
            // SAFETY: every place has outputs of its own, each of which is written once.
            unsafe { products.part(place, first, values.len()) }.copy_from_slice(values);
        };
        Batches::new(&routing.groups, [down]).run(&cpu.pool, |groups| {
            matmul_groups(activations, groups, |expert| &down[expert], write, &cpu.pool, cpu.level);
        });
    })?;
    context.launch();
    x.write(num_rows, |x| {
        let x = RowsMut::new(x, hidden);
        products.read(num_places, |products| {
            let rows_per_task = VALUES_PER_TASK.div_ceil(hidden * per_tok).max(1);
            cpu.pool.run(num_rows.div_ceil(rows_per_task), |task| {
                for row in task * rows_per_task..num_rows.min((task + 1) * rows_per_task) {
                    // SAFETY: every row belongs to one task.
                    let x = unsafe { x.get(row) };
                    let pairs = row * per_tok..(row + 1) * per_tok;
                    for (place, weight) in places[pairs.clone()].iter().zip(&weights[pairs]) {
                        let products = &products[*place as usize * hidden..][..hidden];
                        for (x, product) in x.iter_mut().zip(products) {
                            *x += weight * product;
                        }
                    }
                }
            });
        })
    })?
}

fn check(op: &str, what: &str, width: usize, wanted: usize) -> Result<()> {
    if width == wanted {
        return Ok(());
    }
    Err(Error::internal(format!("{op}: {what} has {width} values in a row, not {wanted}")))
}
