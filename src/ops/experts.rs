//! A feed-forward network of experts: which of them a token goes through, and their products.

mod choose;
mod host;

use crate::Result;
use crate::config::{Activation, ExpertsConfig};
use crate::ops::buffer::Buffer;
use crate::ops::context::Context;
use crate::ops::cpu::matmul::RowGroup;
use crate::ops::device::{Device, Held, Routings, on_device};
use crate::ops::linear::{LinearScratch, check_width};
use crate::ops::weights::{Linear, LinearStack, RmsNorm, Vector};

pub(crate) use host::HostRouting;

/// What a device implements of them. Shapes are those of the functions of this file, which have checked them.
pub(crate) trait ExpertOps: Device {
    /// Memory for the choices of `max_rows` tokens.
    fn routing(&self, config: &ExpertsConfig, max_rows: usize) -> Result<Self::Routing>;

    /// [`route`].
    fn route(
        &self,
        scratch: &mut LinearScratch,
        num_rows: usize,
        x: &Buffer,
        norm: &RmsNorm,
        router: &Router,
        routing: &mut Self::Routing,
    ) -> Result<()>;

    /// [`fetch_experts`]; nothing where weights are in memory.
    fn fetch_experts(
        &self,
        _routing: &Self::Routing,
        _gate: &LinearStack,
        _up: &LinearStack,
        _down: &LinearStack,
    ) -> Result<()> {
        Ok(())
    }

    /// [`experts_gated`].
    #[expect(clippy::too_many_arguments, reason = "an op's operands")]
    fn experts_gated(
        &self,
        scratch: &mut LinearScratch,
        routing: &Routing,
        x: &Buffer,
        norm: &RmsNorm,
        gate: &LinearStack,
        up: &LinearStack,
        activation: Activation,
        out: &mut Buffer,
    ) -> Result<()>;

    /// [`experts_residual`].
    fn experts_residual(
        &self,
        scratch: &mut LinearScratch,
        routing: &Routing,
        h: &Buffer,
        down: &LinearStack,
        products: &mut Buffer,
        x: &mut Buffer,
    ) -> Result<()>;
}

/// What chooses experts.
#[derive(Debug)]
pub struct Router {
    /// `[num_experts, hidden]`, with biases of logits if there are any.
    pub linear: Linear,
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
    held: Held<Routings>,
}

impl Routing {
    /// Memory for `max_rows` tokens.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Unsupported`] if the device has no kernels for so many experts,
    /// [`crate::ErrorKind::Capacity`] if it has no memory.
    pub fn new(context: &Context, config: &ExpertsConfig, max_rows: usize) -> Result<Self> {
        let held =
            on_device!(context.backend(), |device| Held::new(device, device.routing(config, max_rows)?));
        Ok(Self { num_rows: 0, held })
    }

    /// Places for `max_rows` tokens: one for each of their experts, and what groups are rounded up by.
    #[must_use]
    pub fn max_places(config: &ExpertsConfig, max_rows: usize) -> usize {
        let num_shared = config.num_shared_experts();
        let pairs = max_rows * (config.num_experts_per_tok + num_shared);
        pairs + (config.num_experts + num_shared).min(pairs) * (RowGroup::ALIGNMENT - 1)
    }

    /// Tokens of the step.
    pub(super) fn num_rows(&self) -> usize {
        self.num_rows
    }

    pub(super) fn held(&self) -> &Held<Routings> {
        &self.held
    }
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
    let hidden = x.width();
    let num_experts = router.config.num_experts;
    check_width("route", "its input", router.linear.weight.cols(), hidden)?;
    check_width("route", "its norm", norm.weight.len(), hidden)?;
    check_width("route", "its output", router.linear.weight.rows(), num_experts)?;
    if let Some(bias) = &router.linear.bias {
        check_width("route", "its bias", bias.len(), num_experts)?;
    }
    routing.num_rows = num_rows;
    on_device!(context.launch(), |device| {
        device.route(scratch, num_rows, x, norm, router, routing.held.on_mut(device)?)
    })
}

/// Has the system begin to read the weights of a step's experts that are in a file and not in memory: those that
/// [`experts_gated`] and [`experts_residual`] take first, which have the next ones read while they compute. A page
/// that is read only when it is needed is waited for by itself. No dispatch.
///
/// # Errors
/// [`crate::ErrorKind::Internal`] if a stack is on another device.
pub fn fetch_experts(
    context: &Context,
    routing: &Routing,
    gate: &LinearStack,
    up: &LinearStack,
    down: &LinearStack,
) -> Result<()> {
    on_device!(context.backend(), |device| device.fetch_experts(routing.held.on(device)?, gate, up, down))
}

/// `out[place] = activation(W_gate·norm(x) + b_gate, W_up·norm(x) + b_up)` with the matrices of the expert whose place it
/// is and the row that is there.
///
/// `x` is `[num_rows, hidden]`, `out` is `[Routing::max_places, intermediate]`.
///
/// # Errors
/// [`crate::ErrorKind::Internal`] if shapes do not fit together.
#[expect(clippy::too_many_arguments, reason = "an op's operands")]
pub fn experts_gated(
    context: &Context,
    scratch: &mut LinearScratch,
    routing: &Routing,
    x: &Buffer,
    norm: &RmsNorm,
    gate: &LinearStack,
    up: &LinearStack,
    activation: Activation,
    out: &mut Buffer,
) -> Result<()> {
    let hidden = x.width();
    for stack in [gate, up] {
        check_width("experts_gated", "its input", stack.weight.cols(), hidden)?;
        check_width("experts_gated", "its output", stack.weight.rows(), out.width())?;
        check_biases("experts_gated", stack)?;
    }
    check_width("experts_gated", "its norm", norm.weight.len(), hidden)?;
    on_device!(context.launch(), |device| {
        device.experts_gated(scratch, routing, x, norm, gate, up, activation, out)
    })
}

/// `x += Σ weight · (W_down·h[place] + b_down)` over the experts of each row, in their order. Two dispatches.
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
    down: &LinearStack,
    products: &mut Buffer,
    x: &mut Buffer,
) -> Result<()> {
    let hidden = x.width();
    check_width("experts_residual", "its input", down.weight.cols(), h.width())?;
    check_width("experts_residual", "its output", down.weight.rows(), hidden)?;
    check_biases("experts_residual", down)?;
    check_width("experts_residual", "its room for products", products.width(), hidden)?;
    // The sum is a dispatch of its own.
    context.launch();
    on_device!(context.launch(), |device| device.experts_residual(scratch, routing, h, down, products, x))
}

/// A bias for each output of each matrix, where there are any.
fn check_biases(op: &str, stack: &LinearStack) -> Result<()> {
    match &stack.bias {
        Some(bias) => check_width(op, "its biases", bias.len(), stack.num_outputs()),
        None => Ok(()),
    }
}
