//! Networks of experts.

use super::oracle::{Rows, buffer, compare, matrix, noise, rms_norm, unwritten};
use super::{Check, check};
use crate::Result;
use crate::config::{ExpertsConfig, Scoring};
use crate::ops::{
    Context, LinearScratch, MatrixStack, Router, Routing, experts_residual, experts_swiglu, route,
};
use crate::weights::DType;

const EPS: f32 = 1e-5;
const NUM_EXPERTS: usize = 8;

/// Widths of the residual stream and of an expert. Those of experts are of real models: no multiple of 256, so that
/// files have other types there than elsewhere.
const SHAPES: [(usize, usize); 2] = [(256, 1408), (256, 1536)];

/// Types whose random blocks are centred. With others a row of sums can be next to nothing, and its rounding next to
/// that is not; they are checked as products.
const TYPES: [DType; 7] =
    [DType::F32, DType::F16, DType::BF16, DType::Q4_0, DType::Q5_0, DType::Q8_0, DType::Q6K];

pub(super) fn run(context: &Context, report: &mut dyn FnMut(Check)) {
    if context.is_metal() {
        return;
    }
    for (index, dtype) in TYPES.into_iter().enumerate() {
        let (hidden, inside) = SHAPES[index % 2];
        // What the rows of `down` are no whole blocks of.
        let down = if inside.is_multiple_of(dtype.block_len()) { dtype } else { DType::Q5_0 };
        for num_rows in [1, 9] {
            let case = |context: &Context| network(context, hidden, inside, [dtype, down], num_rows);
            let name = format!("experts {dtype} and {down}, {num_rows} rows of {hidden} through {inside}");
            report(check(name, limit(context, dtype), compare(context, case)));
        }
    }
}

/// As of products, of which there are two in a row: the CPU rounds activations to 8 bits for quantised weights and to bf16 for BF16 weights where it has
/// products of them.
fn limit(context: &Context, dtype: DType) -> f64 {
    match context.cpu_level() {
        Some(_) if dtype.block_len() > 1 => 1e-2,
        Some(level) if dtype == DType::BF16 && level.has_bf16_dot() => 1e-4,
        _ => 1e-11,
    }
}

/// `x + experts(norm(x))`, without the `x` that was there, beside which an error would be small.
fn network(
    context: &Context,
    hidden: usize,
    inside: usize,
    [dtype, down_dtype]: [DType; 2],
    num_rows: usize,
) -> Result<Rows> {
    let config = ExpertsConfig {
        num_dense_layers: 0,
        num_experts: NUM_EXPERTS,
        num_experts_per_tok: 3,
        intermediate_size: inside,
        shared_intermediate_size: None,
        scoring: Scoring::Softmax,
        has_selection_bias: false,
        num_groups: 1,
        num_groups_per_tok: 1,
        normalize: true,
        scale: 1.5,
    };
    let stack = |dtype: DType, rows: usize, cols: usize, seed: u64| {
        let own = |index: usize| matrix(context, dtype, rows, cols, seed + 2 * index as u64);
        MatrixStack::new(context, (0..NUM_EXPERTS).map(own).collect::<Result<_>>()?)
    };
    let (gate, up) = (stack(dtype, inside, hidden, 100)?, stack(dtype, inside, hidden, 200)?);
    let down = stack(down_dtype, hidden, inside, 300)?;
    let max_places = Routing::max_places(&config, num_rows);
    let mut routing = Routing::new(&config, num_rows);
    let router =
        Router { weight: matrix(context, DType::F32, NUM_EXPERTS, hidden, 5)?, selection_bias: None, config };
    let mut scratch = LinearScratch::new(context, num_rows, hidden)?;
    scratch.reserve_groups(context, NUM_EXPERTS, max_places, inside);
    let x = buffer(context, &noise(1, num_rows * hidden), hidden, num_rows)?;
    let norm = rms_norm(context, 2, hidden, EPS)?;
    let mut intermediate = unwritten(context, inside, max_places)?;
    let mut products = unwritten(context, hidden, max_places)?;
    let mut sum = buffer(context, &vec![0.0; num_rows * hidden], hidden, num_rows)?;
    route(context, &mut scratch, num_rows, &x, &norm, &router, &mut routing)?;
    experts_swiglu(context, &mut scratch, &routing, &x, &norm, &gate, &up, &mut intermediate)?;
    experts_residual(context, &mut scratch, &routing, &intermediate, &down, &mut products, &mut sum)?;
    Rows::of(&sum, num_rows)
}
