//! Networks of experts.

use super::oracle::{Rows, buffer, matrix, noise, rms_norm, unwritten};
use super::{Report, matmul};
use crate::Result;
use crate::config::{Activation, ExpertsConfig, Scoring};
use crate::ops::{
    Context, Linear, LinearScratch, LinearStack, Matrix, MatrixStack, Router, Routing, Vector, experts_gated,
    experts_residual, route,
};
use crate::weights::DType;

const EPS: f32 = 1e-5;
/// Widths of the residual stream and of an expert. Those of experts are of real models: no multiple of 256, so that
/// files have other types there than elsewhere.
const SHAPES: [(usize, usize); 2] = [(256, 1408), (256, 1536)];

/// Types whose random blocks are centred. With others a row's sum can be close to zero and its rounding error large in
/// comparison; they are checked as matmuls.
const TYPES: [DType; 7] =
    [DType::F32, DType::F16, DType::BF16, DType::Q4_0, DType::Q5_0, DType::Q8_0, DType::Q6K];

pub(super) fn run(context: &Context, report: &mut dyn Report) {
    // Gate and up of two types; enough rows for groups of every length.
    let mixed = Network { gate: DType::Q8_0, up: DType::F16, ..Network::with(config(96)) };
    for num_rows in [3, 20, 40, 90, 200] {
        Network { num_rows, ..mixed.clone() }.check(context, report);
    }
    // Gate and up of one type, and groups that are cut because many rows go to one expert; more groups than a simdgroup has
    // lanes, most of which end early.
    let joint =
        |dtype: DType, config| Network { gate: dtype, up: dtype, down: dtype, ..Network::with(config) };
    for num_rows in [90, 200] {
        Network { num_rows, ..joint(DType::Q4_0, config(96)) }.check(context, report);
    }
    let many = ExpertsConfig { num_experts: 44, ..config(112) };
    Network { num_rows: 40, hidden: 48, ..joint(DType::F16, many) }.check(context, report);
    let softmax = ExpertsConfig { num_experts: 64, num_experts_per_tok: 6, ..config(32) };
    let sigmoid = ExpertsConfig {
        scoring: Scoring::Sigmoid,
        has_selection_bias: true,
        num_experts_per_tok: 8,
        num_groups: 8,
        num_groups_per_tok: 3,
        ..softmax.clone()
    };
    let routers = [
        (softmax.clone(), 1),
        (ExpertsConfig { shared_intermediate_size: Some(64), ..softmax.clone() }, 2),
        (ExpertsConfig { shared_intermediate_size: Some(32), ..softmax.clone() }, 35),
        (ExpertsConfig { normalize: false, ..softmax.clone() }, 33),
        (sigmoid.clone(), 4),
        (ExpertsConfig { normalize: false, ..sigmoid.clone() }, 70),
        (ExpertsConfig { num_groups: 1, num_groups_per_tok: 1, ..sigmoid.clone() }, 6),
        (ExpertsConfig { has_selection_bias: false, num_groups: 64, num_groups_per_tok: 9, ..sigmoid }, 5),
        // The best of a group decides, and lanes have unequal numbers of experts.
        (
            ExpertsConfig {
                num_experts: 44,
                num_experts_per_tok: 3,
                num_groups: 11,
                num_groups_per_tok: 3,
                ..softmax.clone()
            },
            40,
        ),
        (ExpertsConfig { num_experts: 300, num_experts_per_tok: 2, ..softmax.clone() }, 2),
    ];
    for (config, num_rows) in routers {
        // More than 32 groups have no kernels on a GPU.
        if config.num_groups <= 32 || !context.is_gpu() {
            Network { num_rows, ..Network::with(config) }.check(context, report);
        }
    }
    // Biases of the router and the experts, and other activations. The clamp is narrow enough to show.
    let clamped = Activation::ClampedSwiglu { alpha: 1.702, limit: 0.5 };
    let biased =
        |has_router_bias: bool, has_biases: bool| ExpertsConfig { has_router_bias, has_biases, ..config(96) };
    for num_rows in [1, 5, 40] {
        let network = joint(DType::F16, biased(true, true));
        Network { num_rows, activation: clamped, ..network }.check(context, report);
    }
    let mxfp4 = Network { hidden: 64, num_rows: 9, ..joint(DType::Mxfp4, biased(true, true)) };
    Network { activation: clamped, ..mxfp4 }.check(context, report);
    for (config, activation) in [
        (biased(true, false), Activation::Silu),
        (biased(false, true), Activation::Silu),
        (biased(false, false), clamped),
        (biased(false, false), Activation::GeluTanh),
    ] {
        Network { num_rows: 7, activation, ..Network::with(config) }.check(context, report);
    }
    // Of equal experts the first are chosen.
    Network { is_even: true, num_rows: 3, ..Network::with(softmax) }.check(context, report);
    for (index, dtype) in TYPES.into_iter().enumerate() {
        let (hidden, inside) = SHAPES[index % 2];
        // The size of `down`'s rows that is not a multiple of a block.
        let down = if inside.is_multiple_of(dtype.block_len()) { dtype } else { DType::Q5_0 };
        for num_rows in [1, 9] {
            let network =
                Network { hidden, gate: dtype, up: dtype, down, num_rows, ..Network::with(config(inside)) };
            network.check(context, report);
        }
    }
}

/// A router that chooses three of eight experts of this width.
fn config(intermediate_size: usize) -> ExpertsConfig {
    ExpertsConfig {
        num_dense_layers: 0,
        num_experts: 8,
        num_experts_per_tok: 3,
        intermediate_size,
        shared_intermediate_size: None,
        scoring: Scoring::Softmax,
        has_selection_bias: false,
        has_router_bias: false,
        has_biases: false,
        is_interleaved: false,
        num_groups: 1,
        num_groups_per_tok: 1,
        normalize: true,
        scale: 1.5,
    }
}

#[derive(Debug, Clone)]
struct Network {
    config: ExpertsConfig,
    hidden: usize,
    gate: DType,
    up: DType,
    down: DType,
    num_rows: usize,
    activation: Activation,
    /// Whether the router finds all experts equal.
    is_even: bool,
}

impl Network {
    fn with(config: ExpertsConfig) -> Self {
        let dtype = DType::F32;
        let activation = Activation::Silu;
        Self {
            config,
            hidden: 64,
            gate: dtype,
            up: dtype,
            down: dtype,
            num_rows: 1,
            activation,
            is_even: false,
        }
    }

    fn check(&self, context: &Context, report: &mut dyn Report) {
        let Self { config, hidden, gate, up, down, num_rows, .. } = self;
        let ExpertsConfig { num_experts_per_tok: chosen, num_experts: all, scoring, .. } = config;
        let (groups, inside) = (config.num_groups, config.intermediate_size);
        let name = format!(
            "experts {gate}, {up} and {down}, {num_rows} rows of {hidden} through {inside}, {chosen} of {all} in \
             {groups} groups by {scoring:?}, {}",
            if self.is_even { "all equal" } else { "different" }
        );
        let biases = match (config.has_router_bias, config.has_biases) {
            (true, true) => ", biases",
            (true, false) => ", biases of the router",
            (false, true) => ", biases of experts",
            (false, false) => "",
        };
        let name = match self.activation {
            Activation::Silu => name + biases,
            other => format!("{name}{biases}, {other:?}"),
        };
        let limit = |dtype: &DType| matmul::limit(context, *dtype, *num_rows);
        // There are two matmuls in a row.
        let limit = 4.0 * limit(gate).max(limit(up)).max(limit(down));
        report.compare(context, name, limit, |context| self.run(context));
    }

    /// Something small `+ experts(norm(x))`: compared with `x` itself an error would be small.
    fn run(&self, context: &Context) -> Result<Rows> {
        let &Self { hidden, num_rows, .. } = self;
        let ExpertsConfig { num_experts, intermediate_size: inside, .. } = self.config;
        let num_shared = self.config.num_shared_experts();
        let stack = |dtype: DType, rows: usize, cols: usize, seed: u64| {
            let own = |index: usize| matrix(context, dtype, rows, cols, seed + 2 * index as u64);
            let num = num_experts + num_shared;
            let weight = MatrixStack::new(context, (0..num).map(own).collect::<Result<_>>()?)?;
            let bias = || Vector::new(context, noise(seed + 1, num * rows));
            Ok::<_, crate::Error>(LinearStack {
                weight,
                bias: self.config.has_biases.then(bias).transpose()?,
            })
        };
        let (gate, up) = (stack(self.gate, inside, hidden, 100)?, stack(self.up, inside, hidden, 200)?);
        let down = stack(self.down, hidden, inside, 300)?;
        let max_slots = Routing::max_slots(&self.config, num_rows);
        let mut routing = Routing::new(context, &self.config, num_rows)?;
        let weight = match self.is_even {
            true => Matrix::from_bytes(
                context,
                DType::F32,
                &vec![0; 4 * num_experts * hidden],
                num_experts,
                hidden,
            )?,
            false => matrix(context, DType::F32, num_experts, hidden, 5)?,
        };
        let bias = || Vector::new(context, noise(6, num_experts));
        let selection_bias = self.config.has_selection_bias.then(bias).transpose()?;
        let logit_bias = || Vector::new(context, noise(9, num_experts));
        let bias = self.config.has_router_bias.then(logit_bias).transpose()?;
        let linear = Linear { weight, bias };
        let router = Router { linear, selection_bias, config: self.config.clone(), num_shared };
        let mut scratch = LinearScratch::new(context, num_rows, hidden)?;
        scratch.reserve_groups(context, num_experts + num_shared, max_slots, inside.max(hidden))?;
        let x = buffer(context, &noise(1, num_rows * hidden), hidden, num_rows)?;
        let norm = rms_norm(context, 2, hidden, EPS)?;
        let mut intermediate = unwritten(context, inside, max_slots)?;
        let mut projected = unwritten(context, hidden, max_slots)?;
        let before: Vec<f32> = noise(8, num_rows * hidden).iter().map(|value| value / 16.0).collect();
        let mut sum = buffer(context, &before, hidden, num_rows)?;
        // Groups of an earlier step are gone.
        let others = buffer(context, &noise(7, num_rows * hidden), hidden, num_rows)?;
        route(context, &mut scratch, num_rows, &others, &norm, &router, &mut routing)?;
        route(context, &mut scratch, num_rows, &x, &norm, &router, &mut routing)?;
        let activation = self.activation;
        experts_gated(context, &mut scratch, &routing, &x, &norm, &gate, &up, activation, &mut intermediate)?;
        experts_residual(context, &mut scratch, &routing, &intermediate, &down, &mut projected, &mut sum)?;
        Rows::of(&sum, num_rows)
    }
}
