//! A feed-forward network of experts: the router's choice for each token, and the matmuls of the experts.

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

/// The operations of a device. The functions of this file document and check the shapes.
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

    /// [`fetch_experts`]; does nothing for weights in memory.
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
        projected: &mut Buffer,
        x: &mut Buffer,
    ) -> Result<()>;
}

/// The router.
#[derive(Debug)]
pub struct Router {
    /// `[num_experts, hidden]`, with biases of logits if there are any.
    pub linear: Linear,
    /// Added to probabilities for the choice, but not to the weights. Length `num_experts`.
    pub selection_bias: Option<Vector>,
    /// The rule of the choice.
    pub config: ExpertsConfig,
    /// Shared experts, which follow the others and which every token goes through, with weight one.
    pub num_shared: usize,
}

/// The routing of a step: the experts of each token, and the *slot* of each choice, a row of the buffers between the
/// matmuls. Allocated once.
#[derive(Debug)]
pub struct Routing {
    num_rows: usize,
    held: Held<Routings>,
}

impl Routing {
    /// Memory for `max_rows` tokens.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Unsupported`] if the device has no kernels for this many experts,
    /// [`crate::ErrorKind::Capacity`] if it has no memory.
    pub fn new(context: &Context, config: &ExpertsConfig, max_rows: usize) -> Result<Self> {
        let held =
            on_device!(context.backend(), |device| Held::new(device, device.routing(config, max_rows)?));
        Ok(Self { num_rows: 0, held })
    }

    /// Slots for `max_rows` tokens: one for each of their experts, plus the padding of groups.
    #[must_use]
    pub fn max_slots(config: &ExpertsConfig, max_rows: usize) -> usize {
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
/// [`crate::ErrorKind::Internal`] if shapes do not match.
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

/// Starts to read the weights of a step's experts that are in a file and not in memory: the first batch of
/// [`experts_gated`] and [`experts_residual`], which read the next ones while they compute. Otherwise page faults would
/// read them one by one. No dispatch.
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

/// `out[slot] = activation(W_gate·norm(x) + b_gate, W_up·norm(x) + b_up)`, with the slot's expert and its row of `x`.
///
/// `x` is `[num_rows, hidden]`, `out` is `[Routing::max_slots, intermediate]`.
///
/// # Errors
/// [`crate::ErrorKind::Internal`] if shapes do not match.
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

/// `x += Σ weight · (W_down·h[slot] + b_down)` over the experts of each row, in their order. Two dispatches.
///
/// `h` is `[Routing::max_slots, intermediate]`, `x` is `[num_rows, hidden]`, and `projected` has space for
/// `[Routing::max_slots, hidden]`.
///
/// # Errors
/// [`crate::ErrorKind::Internal`] if shapes do not match.
pub fn experts_residual(
    context: &Context,
    scratch: &mut LinearScratch,
    routing: &Routing,
    h: &Buffer,
    down: &LinearStack,
    projected: &mut Buffer,
    x: &mut Buffer,
) -> Result<()> {
    let hidden = x.width();
    check_width("experts_residual", "its input", down.weight.cols(), h.width())?;
    check_width("experts_residual", "its output", down.weight.rows(), hidden)?;
    check_biases("experts_residual", down)?;
    check_width("experts_residual", "its buffer for projected rows", projected.width(), hidden)?;
    // The sum is a separate dispatch.
    context.launch();
    on_device!(context.launch(), |device| device.experts_residual(scratch, routing, h, down, projected, x))
}

/// A bias for each output of each matrix, if any.
fn check_biases(op: &str, stack: &LinearStack) -> Result<()> {
    match &stack.bias {
        Some(bias) => check_width(op, "its biases", bias.len(), stack.num_outputs()),
        None => Ok(()),
    }
}
