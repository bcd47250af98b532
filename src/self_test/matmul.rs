//! Matmuls with weights of every format, for every number of rows that has its own kernel.

use super::oracle::{Rows, buffer, matrix, noise, rms_norm, unwritten};
use super::{Effort, Report};
use crate::Result;
use crate::ops::{
    Context, Linear, LinearScratch, Vector, linear_residual, norm_linear, norm_logits, norm_swiglu,
    norm_swiglu_biased,
};
use crate::weights::DType;

/// So large that it shows in every result.
const EPS: f32 = 1e-2;

/// Numbers of rows: the ends of the ranges of all kernels.
const ROWS: [usize; 8] = [1, 2, 3, 4, 5, 9, 16, 37];

const ONE_FOR_EACH_KERNEL: [usize; 6] = [1, 2, 4, 5, 16, 37];

/// File types of few bits, and the types that others of them are kept as.
fn is_of_few_bits(dtype: DType) -> bool {
    use DType::{Iq4Nl, Iq4Xs, Mxfp4, Q2K, Q3K, Q8S};
    matches!(dtype, Q2K | Q3K | Iq4Nl | Iq4Xs | Mxfp4 | Q8S)
}

/// Rows of activations and columns of the matrices.
#[derive(Clone, Copy)]
struct Shape {
    num_rows: usize,
    cols: usize,
}

pub(super) fn run(context: &Context, effort: Effort, report: &mut dyn Report) {
    for dtype in context.own_types() {
        // One step of all lanes and a bit, or whole blocks, which is more for the largest blocks.
        let cols = if dtype.block_len() == 1 { 48 } else { dtype.block_len().max(32) * 3 };
        // For these, GPUs only have their own readers of codes and scales: one number of rows for each kernel is
        // enough.
        let is_like_others = effort == Effort::Small && context.is_gpu() && is_of_few_bits(dtype);
        if is_like_others {
            for num_rows in ONE_FOR_EACH_KERNEL {
                run_fused(context, Shape { num_rows, cols }, dtype, report);
            }
        } else {
            for num_rows in ROWS {
                run_one(context, Shape { num_rows, cols }, dtype, report);
            }
        }
        if context.has_tensor_cores() && is_like_others {
            let short = dtype.block_len().max(96);
            for (num_rows, cols) in [(70, cols), (20, 4352), (200, short), (400, short)] {
                run_fused(context, Shape { num_rows, cols }, dtype, report);
            }
        } else if context.has_tensor_cores() && dtype != DType::F32 {
            // More activations than a threadgroup has space for, with a last chunk of columns that is not whole; and more than
            // are few, in tiles of each size.
            for shape in [Shape { num_rows: 9, cols: 9984 }, Shape { num_rows: 70, cols }] {
                run_one(context, shape, dtype, report);
            }
            // Enough weights that several rows share them.
            run_fused(context, Shape { num_rows: 20, cols: 4352 }, dtype, report);
            for num_rows in [200, 400] {
                let cols = if dtype.block_len() == 1 { 48 } else { dtype.block_len().max(96) };
                run_fused(context, Shape { num_rows, cols }, dtype, report);
            }
            let shape = Shape { num_rows: 70, cols };
            run_op(context, shape, dtype, "a network", &|context| network(context, shape, dtype), report);
        }
        if effort == Effort::Full {
            for num_rows in [1, 2, 4, 8, 16, 100] {
                run_one(context, Shape { num_rows, cols: 2048 }, dtype, report);
            }
        }
    }
    // Columns that come by in several turns, the last of them not whole, or in less than one: for each way in which
    // codes and scales are read.
    let turns = [
        (DType::Q4_0, 1600),
        (DType::Q8_0, 1056),
        (DType::F16, 1072),
        (DType::F32, 1072),
        (DType::Q4K, 1280),
        (DType::Q4K, 8192),
        (DType::Q5K, 256),
        (DType::Q6K, 1280),
        (DType::Q6K, 256),
    ];
    for (dtype, cols) in turns {
        for num_rows in [1, 2, 4, 9] {
            run_one(context, Shape { num_rows, cols }, dtype, report);
        }
    }
    for (dtype, num_rows) in [(DType::F16, 1), (DType::Q4_0, 1), (DType::Q4_0, 9), (DType::F16, 70)] {
        let shape = Shape { num_rows, cols: 96 };
        let plain = |context: &Context| qkv(context, shape, [dtype; 3], false, false);
        run_op(context, shape, dtype, "norm_linear without a norm", &plain, report);
        let case = |context: &Context| swiglu_biased(context, shape, dtype);
        run_op(context, shape, dtype, "norm_swiglu with bias", &case, report);
    }
    if context.has_tensor_cores() {
        for dtype in [DType::Q4_0, DType::F16] {
            // Enough columns that threadgroups share those of a tile, of many rows too.
            let shape = Shape { num_rows: 70, cols: 2048 };
            run_one(context, shape, dtype, report);
            // Several tiles of rows that are rounded where they are computed.
            let shape = Shape { num_rows: 300, cols: 96 };
            run_op(context, shape, dtype, "a network", &|context| network(context, shape, dtype), report);
        }
        // More columns than threads that pack them at a time; values after these would be infinite as halves.
        let (shape, dtype) = (Shape { num_rows: 70, cols: 9984 }, DType::F16);
        let outlier = |context: &Context| logits(context, shape, dtype, 1e6);
        run_op(context, shape, dtype, "norm_logits with an outlier", &outlier, report);
    }
    for first in [DType::Q4K, DType::Q5K, DType::Q8_0] {
        for num_rows in [1, 2, 4, 5, 9, 20, 37, 70, 200, 400] {
            let shape = Shape { num_rows, cols: if num_rows == 20 { 4096 } else { 512 } };
            if (num_rows == 20 || num_rows > 70) && !context.has_tensor_cores() {
                continue;
            }
            let limit = limit(context, DType::Q6K, num_rows);
            let name = |op: &str| format!("{op} {first} with Q6_K, {num_rows} rows");
            let formats = [first, first, DType::Q6K];
            for (op, has_bias) in [("norm_linear", false), ("norm_linear with bias", true)] {
                let case = |context: &Context| qkv(context, shape, formats, has_bias, true);
                report.compare(context, name(op), limit, case);
            }
            let case = |context: &Context| swiglu(context, shape, first, DType::Q6K);
            let limit = gated_limit(context, DType::Q6K, num_rows);
            report.compare(context, name("norm_swiglu"), limit, case);
        }
    }
}

fn run_one(context: &Context, shape: Shape, dtype: DType, report: &mut dyn Report) {
    run_fused(context, shape, dtype, report);
    let mut run = |op, case: Case<'_>| run_op(context, shape, dtype, op, case, report);
    run("norm_linear with bias", &|context| qkv(context, shape, [dtype; 3], true, true));
    run("linear_residual", &|context| residual(context, shape, dtype));
    run("norm_logits", &|context| logits(context, shape, dtype, 1.0));
}

/// The two kernels that the others are variants of.
fn run_fused(context: &Context, shape: Shape, dtype: DType, report: &mut dyn Report) {
    let mut run = |op, case: Case<'_>| run_op(context, shape, dtype, op, case, report);
    run("norm_linear", &|context| qkv(context, shape, [dtype; 3], false, true));
    run("norm_swiglu", &|context| swiglu(context, shape, dtype, dtype));
}

/// The result of an op on a device.
type Case<'a> = &'a dyn Fn(&Context) -> Result<Rows>;

fn run_op(
    context: &Context,
    Shape { num_rows, cols }: Shape,
    dtype: DType,
    op: &str,
    case: Case<'_>,
    report: &mut dyn Report,
) {
    let name = format!("{op} {dtype}, {num_rows} rows of {cols}");
    let limit = match op {
        "norm_swiglu" | "norm_swiglu with bias" | "a network" => gated_limit(context, dtype, num_rows),
        _ => limit(context, dtype, num_rows),
    };
    report.compare(context, name, limit, case);
}

/// A few times the error of the kernels' worst row. The CPU's round activations to 8 bits for quantised weights, and to
/// bf16 for BF16 weights if it has matmuls of them; a GPU's round decoded weights to half precision for several rows,
/// and tensor cores always round weights and activations.
pub(super) fn limit(context: &Context, dtype: DType, num_rows: usize) -> f64 {
    const IN_F32: f64 = 2e-12;
    const IN_HALF: f64 = 3e-6;
    match context.cpu_level() {
        Some(_) if dtype.block_len() > 1 => 4e-3,
        Some(level) if dtype == DType::BF16 && level.has_bf16_dot() => 1e-4,
        // Dot products of thousands of terms, summed in sequence.
        None if context.is_reference() => 5.0 * IN_F32,
        None if context.has_tensor_cores() && dtype != DType::F32 => IN_HALF,
        None if dtype.block_len() > 1 && num_rows >= 5 => IN_HALF,
        _ => IN_F32,
    }
}

/// The same for a gated matmul of two, whose errors add up. Where decoded weights were rounded to half precision, the error of each counts
/// with the size of the other: in the worst of many rows, whose own results are small, it is several times as large. On
/// an H200 it came to 1.4e-5 in 100 rows of Q5_1.
fn gated_limit(context: &Context, dtype: DType, num_rows: usize) -> f64 {
    let limit = limit(context, dtype, num_rows);
    let is_rounded = context.cpu_level().is_none() && !context.is_reference();
    if is_rounded && dtype.block_len() > 1 && num_rows >= 5 { 10.0 * limit } else { 2.0 * limit }
}

fn qkv(context: &Context, shape: Shape, formats: [DType; 3], has_bias: bool, has_norm: bool) -> Result<Rows> {
    let Shape { num_rows, cols } = shape;
    // Rows of results that begin at even indices, in the largest tiles, and others.
    let outputs = [70, 8, if num_rows == 400 { 18 } else { 17 }];
    let linear = |index: usize| {
        let (outputs, seed) = (outputs[index], index as u64);
        let bias = || Vector::new(context, noise(30 + seed, outputs));
        let weight = matrix(context, formats[index], outputs, cols, 10 + 2 * seed)?;
        Ok::<_, crate::Error>(Linear { weight, bias: has_bias.then(bias).transpose()? })
    };
    let linears = [linear(0)?, linear(1)?, linear(2)?];
    let mut scratch = LinearScratch::new(context, num_rows, cols)?;
    let x = buffer(context, &noise(1, num_rows * cols), cols, num_rows)?;
    let mut out = unwritten(context, outputs.iter().sum(), num_rows)?;
    let norm = has_norm.then(|| rms_norm(context, 2, cols, EPS)).transpose()?;
    norm_linear(context, &mut scratch, num_rows, &x, norm.as_ref(), linears.each_ref(), &mut out)?;
    Rows::of(&out, num_rows)
}

fn residual(context: &Context, shape: Shape, dtype: DType) -> Result<Rows> {
    let Shape { num_rows, cols } = shape;
    // As above.
    let outputs = if dtype.block_len() == 1 { 76 } else { 75 };
    let linear = Linear { weight: matrix(context, dtype, outputs, cols, 3)?, bias: None };
    let mut scratch = LinearScratch::new(context, num_rows, cols)?;
    let mut x = buffer(context, &noise(1, num_rows * outputs), outputs, num_rows)?;
    let h = buffer(context, &noise(4, num_rows * cols), cols, num_rows)?;
    linear_residual(context, &mut scratch, num_rows, &h, &linear, &mut x)?;
    Rows::of(&x, num_rows)
}

/// A feed-forward network, whose inside may be rounded where it is computed.
fn network(context: &Context, shape: Shape, dtype: DType) -> Result<Rows> {
    let Shape { num_rows, cols } = shape;
    // Where the format allows it of no whole steps, and of fewer than the next matmul is filled up to.
    let inside = if dtype.block_len() == 1 { 144 } else { cols };
    let [gate, up] = [matrix(context, dtype, inside, cols, 5)?, matrix(context, dtype, inside, cols, 7)?];
    let down = Linear { weight: matrix(context, dtype, cols, inside, 9)?, bias: None };
    let mut scratch = LinearScratch::new(context, num_rows, cols.max(inside))?;
    let mut x = buffer(context, &noise(1, num_rows * cols), cols, num_rows)?;
    let mut out = unwritten(context, inside, num_rows)?;
    let norm = rms_norm(context, 2, cols, EPS)?;
    let reader = Some(&down);
    norm_swiglu(context, &mut scratch, num_rows, &x, &norm, &gate, &up, reader, &mut out)?;
    linear_residual(context, &mut scratch, num_rows, &out, &down, &mut x)?;
    Rows::of(&x, num_rows)
}

fn swiglu(context: &Context, shape: Shape, gate: DType, up: DType) -> Result<Rows> {
    const OUTPUTS: usize = 58;
    let Shape { num_rows, cols } = shape;
    let gate = matrix(context, gate, OUTPUTS, cols, 5)?;
    let up = matrix(context, up, OUTPUTS, cols, 7)?;
    let mut scratch = LinearScratch::new(context, num_rows, cols)?;
    let x = buffer(context, &noise(1, num_rows * cols), cols, num_rows)?;
    let mut out = unwritten(context, OUTPUTS, num_rows)?;
    let norm = rms_norm(context, 2, cols, EPS)?;
    norm_swiglu(context, &mut scratch, num_rows, &x, &norm, &gate, &up, None, &mut out)?;
    Rows::of(&out, num_rows)
}

fn swiglu_biased(context: &Context, shape: Shape, dtype: DType) -> Result<Rows> {
    const OUTPUTS: usize = 58;
    let Shape { num_rows, cols } = shape;
    let linear = |seed: u64| -> Result<Linear> {
        let weight = matrix(context, dtype, OUTPUTS, cols, seed)?;
        Ok(Linear { weight, bias: Some(Vector::new(context, noise(seed + 1, OUTPUTS))?) })
    };
    let (gate, up) = (linear(5)?, linear(7)?);
    let mut scratch = LinearScratch::new(context, num_rows, cols)?;
    let x = buffer(context, &noise(1, num_rows * cols), cols, num_rows)?;
    let mut out = unwritten(context, OUTPUTS, num_rows)?;
    let norm = rms_norm(context, 2, cols, EPS)?;
    norm_swiglu_biased(context, &mut scratch, num_rows, &x, &norm, &gate, &up, &mut out)?;
    Rows::of(&out, num_rows)
}

/// The last value of each row is this many times as large as the others.
fn logits(context: &Context, shape: Shape, dtype: DType, outlier: f32) -> Result<Rows> {
    const VOCABULARY: usize = 133;
    let Shape { num_rows, cols } = shape;
    let head = matrix(context, dtype, VOCABULARY, cols, 9)?;
    let mut scratch = LinearScratch::new(context, num_rows, cols)?;
    let mut values = noise(1, num_rows * cols);
    values.chunks_exact_mut(cols).for_each(|row| row[cols - 1] *= outlier);
    let x = buffer(context, &values, cols, num_rows)?;
    let mut out = unwritten(context, VOCABULARY, num_rows)?;
    let norm = rms_norm(context, 2, cols, EPS)?;
    norm_logits(context, &mut scratch, num_rows, &x, &norm, &head, &mut out)?;
    Rows::of(&out, num_rows)
}
