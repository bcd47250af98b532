//! A feed-forward network of experts: which of them a token goes through, and their products.

mod choose;

use crate::config::ExpertsConfig;
use crate::ops::buffer::Buffer;
use crate::ops::context::{Backend, Context};
use crate::ops::cpu::matmul::{Forms, Mode, Part, RowGroup, matmul, matmul_groups, matmul_swiglu_groups};
use crate::ops::cpu::rows::RowsMut;
use crate::ops::linear::{CpuScratch, LinearScratch};
use crate::ops::reference;
use crate::ops::weights::{Matrix, MatrixStack, RmsNorm};
use crate::{Error, Result};

/// What chooses experts.
#[derive(Debug)]
pub struct Router {
    /// `[num_experts, hidden]`.
    pub weight: Matrix,
    /// Added to probabilities to choose by, but not to weigh with. Length `num_experts`.
    pub selection_bias: Option<Vec<f32>>,
    /// How the choice is made.
    pub config: ExpertsConfig,
}

/// The experts of the tokens of a step, and where each token's share of the work of each of them is: a *place* is a row
/// of the buffers between the products. Allocated once.
#[derive(Debug)]
pub struct Routing {
    num_rows: usize,
    num_experts_per_tok: usize,
    /// `[num_rows][num_experts_per_tok]`, the best first.
    experts: Vec<u32>,
    weights: Vec<f32>,
    /// The place of each of these.
    places: Vec<u32>,
    /// The row that is at a place; of places between groups, nothing.
    row_at: Vec<u32>,
    /// The places of each expert that has any.
    groups: Vec<RowGroup>,
    /// The next place of each expert.
    next_places: Vec<u32>,
    logits: Vec<f32>,
}

impl Routing {
    /// Memory for `max_rows` tokens.
    #[must_use]
    pub fn new(config: &ExpertsConfig, max_rows: usize) -> Self {
        let pairs = max_rows * config.num_experts_per_tok;
        Self {
            num_rows: 0,
            num_experts_per_tok: config.num_experts_per_tok,
            experts: vec![0; pairs],
            weights: vec![0.0; pairs],
            places: vec![0; pairs],
            row_at: vec![0; Self::max_places(config, max_rows)],
            groups: Vec::with_capacity(config.num_experts),
            next_places: vec![0; config.num_experts],
            logits: vec![0.0; max_rows * config.num_experts],
        }
    }

    /// Places for `max_rows` tokens: one for each of their experts, and what groups are rounded up by.
    #[must_use]
    pub fn max_places(config: &ExpertsConfig, max_rows: usize) -> usize {
        let pairs = max_rows * config.num_experts_per_tok;
        pairs + config.num_experts.min(pairs) * (RowGroup::ALIGNMENT - 1)
    }

    /// Experts of the tokens, `[num_rows][num_experts_per_tok]`, and their weights.
    #[must_use]
    pub fn choices(&self) -> (&[u32], &[f32]) {
        let len = self.num_rows * self.num_experts_per_tok;
        (&self.experts[..len], &self.weights[..len])
    }

    fn num_places(&self) -> usize {
        self.groups.last().map_or(0, RowGroup::end_row)
    }

    /// Gives every token and expert a place, those of an expert side by side and in the order of the tokens.
    fn find_places(&mut self, num_experts: usize) {
        let len = self.num_rows * self.num_experts_per_tok;
        let experts = &self.experts[..len];
        self.groups.clear();
        self.groups.extend((0..num_experts).map(|matrix| RowGroup { first_row: 0, num_rows: 0, matrix }));
        for expert in experts {
            self.groups[*expert as usize].num_rows += 1;
        }
        let mut next = 0;
        for (group, next_place) in self.groups.iter_mut().zip(&mut self.next_places) {
            group.first_row = next;
            *next_place = next as u32;
            next = (next + group.num_rows).next_multiple_of(RowGroup::ALIGNMENT);
        }
        for (pair, expert) in experts.iter().enumerate() {
            let next = &mut self.next_places[*expert as usize];
            self.places[pair] = *next;
            self.row_at[*next as usize] = (pair / self.num_experts_per_tok) as u32;
            *next += 1;
        }
        self.groups.retain(|group| group.num_rows > 0);
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
    let (num_experts, per_tok) = (router.config.num_experts, router.config.num_experts_per_tok);
    let hidden = x.width();
    check("route", "its input", router.weight.cols(), hidden)?;
    check("route", "its norm", norm.weight.len(), hidden)?;
    check("route", "its output", router.weight.rows(), num_experts)?;
    check("route", "its experts", routing.num_experts_per_tok, per_tok)?;
    if num_rows * per_tok > routing.experts.len() {
        return Err(Error::internal(format!("route: {num_rows} rows are more than there is room for")));
    }
    let logits = &mut routing.logits[..num_rows * num_experts];
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
        Backend::Metal(_) => return Err(Error::internal("route: there are no kernels")),
    }
    let bias = router.selection_bias.as_deref();
    let choices = routing.experts.chunks_exact_mut(per_tok).zip(routing.weights.chunks_exact_mut(per_tok));
    for (logits, (experts, weights)) in logits.chunks_exact_mut(num_experts).zip(choices) {
        choose::choose(&router.config, bias, logits, experts, weights);
    }
    routing.num_rows = num_rows;
    routing.find_places(num_experts);
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
    let num_places = routing.num_places();
    let cpu = match context.launch() {
        Backend::Cpu(cpu) => cpu,
        Backend::Reference(backend) => {
            let (gate, up) = (gate.reference()?, up.reference()?);
            let (x, out) = (x.reference()?, out.reference_mut()?);
            let (groups, row_at) = (&routing.groups, &routing.row_at);
            return backend.run(num_places, || {
                reference::experts_swiglu(backend, groups, row_at, x, norm, [gate, up], out)
            });
        }
        Backend::Metal(_) => return Err(Error::internal("experts_swiglu: there are no kernels")),
    };
    let (gate, up) = (gate.cpu()?, up.cpu()?);
    let CpuScratch { activations, .. } = scratch.cpu()?;
    let forms = Forms::of(gate.iter().chain(up).map(|matrix| matrix.dtype()), cpu.level);
    let norm = Some((&norm.weight[..], norm.eps));
    let start_of = |place: usize| routing.row_at[place] as usize * hidden;
    x.read(routing.num_rows, |x| {
        activations.prepare_groups(x, start_of, &routing.groups, hidden, norm, forms, &cpu.pool, cpu.level);
    })?;
    let width = out.width();
    out.write(num_places, |out| {
        let out = RowsMut::new(out, width);
        let write = |place: usize, first: usize, products: &[f32]| {
            // SAFETY: every place has outputs of its own, each of which is written once.
            unsafe { out.part(place, first, products.len()) }.copy_from_slice(products);
        };
        let (gate_of, up_of) = (|expert: usize| &gate[expert], |expert: usize| &up[expert]);
        matmul_swiglu_groups(activations, &routing.groups, gate_of, up_of, write, &cpu.pool, cpu.level);
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
    let (num_places, per_tok) = (routing.num_places(), routing.num_experts_per_tok);
    let cpu = match context.launch() {
        Backend::Cpu(cpu) => cpu,
        Backend::Reference(backend) => {
            let (down, h, x) = (down.reference()?, h.reference()?, x.reference_mut()?);
            let weights = routing.choices().1;
            let places = &routing.places[..weights.len()];
            return backend.run(num_places, || {
                let num_rows = routing.num_rows;
                reference::experts_residual(backend, num_rows, &routing.groups, places, weights, h, down, x)
            });
        }
        Backend::Metal(_) => return Err(Error::internal("experts_residual: there are no kernels")),
    };
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
        matmul_groups(activations, &routing.groups, |expert| &down[expert], write, &cpu.pool, cpu.level);
    })?;
    context.launch();
    let num_rows = routing.num_rows;
    x.write(num_rows, |x| {
        let x = RowsMut::new(x, hidden);
        products.read(num_places, |products| {
            let rows_per_task = VALUES_PER_TASK.div_ceil(hidden * per_tok).max(1);
            cpu.pool.run(num_rows.div_ceil(rows_per_task), |task| {
                for row in task * rows_per_task..num_rows.min((task + 1) * rows_per_task) {
                    // SAFETY: every row belongs to one task.
                    let x = unsafe { x.get(row) };
                    let pairs = row * per_tok..(row + 1) * per_tok;
                    for (place, weight) in routing.places[pairs.clone()].iter().zip(&routing.weights[pairs]) {
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
