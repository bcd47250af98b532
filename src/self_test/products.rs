//! Products with weights of every format, for every number of rows that has a kernel of its own.

use super::oracle::{TestMatrix, buffer, error, noise, norm, rows_of, widen};
use super::{Check, Effort, check};
use crate::Result;
use crate::ops::{
    Buffer, Context, Linear, LinearScratch, RmsNorm, Vector, linear_residual, norm_linear, norm_logits,
    norm_swiglu,
};
use crate::weights::DType;

const EPS: f32 = 1e-5;

/// Numbers of rows: the ends of the ranges of all kernels.
const ROWS: [usize; 8] = [1, 2, 3, 4, 5, 9, 16, 37];

/// The shape of a check: rows of activations and columns of the matrices.
#[derive(Clone, Copy)]
struct Shape<'a> {
    context: &'a Context,
    num_rows: usize,
    cols: usize,
}

pub(super) fn run(context: &Context, effort: Effort, report: &mut dyn FnMut(Check)) {
    for dtype in DType::ALL {
        // One step of all lanes and a bit, or whole blocks, which is more for the largest blocks.
        let cols = if dtype.block_len() == 1 { 48 } else { dtype.block_len().max(32) * 3 };
        for num_rows in ROWS {
            run_one(Shape { context, num_rows, cols }, dtype, report);
        }
        if effort == Effort::Full {
            for num_rows in [1, 2, 4, 8, 16, 100] {
                run_one(Shape { context, num_rows, cols: 2048 }, dtype, report);
            }
        }
    }
    // Columns that come by in several turns, the last of them not whole.
    for num_rows in [1, 2, 4, 9] {
        run_one(Shape { context, num_rows, cols: 1600 }, DType::Q4_0, report);
    }
    for first in [DType::Q4K, DType::Q5K, DType::Q8_0] {
        for num_rows in [1, 2, 4, 5, 9, 37] {
            let shape = Shape { context, num_rows, cols: 512 };
            let formats = [first, first, DType::Q6K];
            let name = format!("norm_linear {first} with Q6_K, {num_rows} rows");
            report(check(name, limit(context, DType::Q6K, num_rows), qkv(shape, formats, false)));
            let name = format!("norm_swiglu {first} with Q6_K, {num_rows} rows");
            let error = swiglu(shape, first, DType::Q6K);
            report(check(name, limit(context, DType::Q6K, num_rows), error));
        }
    }
}

fn run_one(shape: Shape<'_>, dtype: DType, report: &mut dyn FnMut(Check)) {
    let Shape { context, num_rows, cols } = shape;
    let limit = limit(context, dtype, num_rows);
    let name = |op: &str| format!("{op} {dtype}, {num_rows} rows of {cols}");
    report(check(name("norm_linear"), limit, qkv(shape, [dtype; 3], false)));
    report(check(name("norm_linear with bias"), limit, qkv(shape, [dtype; 3], true)));
    report(check(name("linear_residual"), limit, residual(shape, dtype)));
    report(check(name("norm_swiglu"), limit, swiglu(shape, dtype, dtype)));
    report(check(name("norm_logits"), limit, logits(shape, dtype)));
}

/// The CPU rounds activations to 8 bits for quantised weights and to bf16 for BF16 weights where it has products
/// of them; a GPU rounds decoded weights to half precision for several rows.
fn limit(context: &Context, dtype: DType, num_rows: usize) -> f64 {
    let is_exact = dtype == DType::F32 || (dtype != DType::BF16 && dtype.block_len() == 1);
    match context.cpu_level() {
        Some(_) if is_exact => 1e-11,
        Some(_) => 1e-3,
        None if num_rows < 5 || matches!(dtype, DType::F32 | DType::BF16 | DType::F16) => 1e-11,
        None => 1e-6,
    }
}

fn rms_norm(context: &Context, cols: usize) -> Result<RmsNorm> {
    Ok(RmsNorm { weight: Vector::new(context, noise(2, cols))?, eps: EPS })
}

fn qkv(shape: Shape<'_>, formats: [DType; 3], has_bias: bool) -> Result<f64> {
    const OUTPUTS: [usize; 3] = [70, 8, 17];
    let Shape { context, num_rows, cols } = shape;
    let mut matrices = Vec::new();
    let mut linears = Vec::new();
    for (index, (dtype, outputs)) in formats.into_iter().zip(OUTPUTS).enumerate() {
        let TestMatrix { matrix, values } =
            TestMatrix::new(context, dtype, outputs, cols, 10 + 2 * index as u64)?;
        let bias = noise(30 + index as u64, outputs);
        let on_device = has_bias.then(|| Vector::new(context, bias.clone())).transpose()?;
        linears.push(Linear { weight: matrix, bias: on_device });
        matrices.push((values, bias));
    }
    let width: usize = OUTPUTS.iter().sum();
    let mut scratch = LinearScratch::new(context, num_rows, cols)?;
    let x = noise(1, num_rows * cols);
    let input = buffer(context, &x, cols, num_rows)?;
    let mut out = Buffer::new(context, num_rows, width)?;
    let norm_weights = rms_norm(context, cols)?;
    norm_linear(
        context,
        &mut scratch,
        num_rows,
        &input,
        &norm_weights,
        [&linears[0], &linears[1], &linears[2]],
        &mut out,
    )?;
    let mut expected = Vec::new();
    for x in x.chunks_exact(cols) {
        let x = norm(x, &norm_weights.weight, EPS);
        for (values, bias) in &matrices {
            for (row, bias) in values.chunks_exact(cols).zip(bias) {
                let sum: f64 = row.iter().zip(&x).map(|(w, x)| f64::from(*w) * x).sum();
                expected.push(if has_bias { sum + f64::from(*bias) } else { sum });
            }
        }
    }
    Ok(error(&rows_of(&out, num_rows)?, &expected))
}

fn residual(shape: Shape<'_>, dtype: DType) -> Result<f64> {
    const OUTPUTS: usize = 75;
    let Shape { context, num_rows, cols } = shape;
    let TestMatrix { matrix, values } = TestMatrix::new(context, dtype, OUTPUTS, cols, 3)?;
    let linear = Linear { weight: matrix, bias: None };
    let (x, h) = (noise(1, num_rows * OUTPUTS), noise(4, num_rows * cols));
    let mut scratch = LinearScratch::new(context, num_rows, cols)?;
    let mut out = buffer(context, &x, OUTPUTS, num_rows)?;
    let input = buffer(context, &h, cols, num_rows)?;
    linear_residual(context, &mut scratch, num_rows, &input, &linear, &mut out)?;
    let products = h.chunks_exact(cols).flat_map(|h| product(&values, &widen(h)));
    let expected: Vec<f64> = products.zip(&x).map(|(y, x)| y + f64::from(*x)).collect();
    Ok(error(&rows_of(&out, num_rows)?, &expected))
}

fn swiglu(shape: Shape<'_>, gate: DType, up: DType) -> Result<f64> {
    const OUTPUTS: usize = 70;
    let Shape { context, num_rows, cols } = shape;
    let gate = TestMatrix::new(context, gate, OUTPUTS, cols, 5)?;
    let up = TestMatrix::new(context, up, OUTPUTS, cols, 7)?;
    let x = noise(1, num_rows * cols);
    let mut scratch = LinearScratch::new(context, num_rows, cols)?;
    let input = buffer(context, &x, cols, num_rows)?;
    let mut out = Buffer::new(context, num_rows, OUTPUTS)?;
    let norm_weights = rms_norm(context, cols)?;
    norm_swiglu(context, &mut scratch, num_rows, &input, &norm_weights, &gate.matrix, &up.matrix, &mut out)?;
    let mut expected = Vec::new();
    for x in x.chunks_exact(cols) {
        let x = norm(x, &norm_weights.weight, EPS);
        let silu = |v: f64| v / (1.0 + (-v).exp());
        expected.extend(gate.product(&x).iter().zip(up.product(&x)).map(|(gate, up)| silu(*gate) * up));
    }
    Ok(error(&rows_of(&out, num_rows)?, &expected))
}

fn logits(shape: Shape<'_>, dtype: DType) -> Result<f64> {
    const VOCABULARY: usize = 133;
    let Shape { context, num_rows, cols } = shape;
    let head = TestMatrix::new(context, dtype, VOCABULARY, cols, 9)?;
    let x = noise(1, num_rows * cols);
    let mut scratch = LinearScratch::new(context, num_rows, cols)?;
    let input = buffer(context, &x, cols, num_rows)?;
    let mut out = Buffer::new(context, num_rows, VOCABULARY)?;
    let norm_weights = rms_norm(context, cols)?;
    norm_logits(context, &mut scratch, num_rows, &input, &norm_weights, &head.matrix, &mut out)?;
    let expected: Vec<f64> =
        x.chunks_exact(cols).flat_map(|x| head.product(&norm(x, &norm_weights.weight, EPS))).collect();
    Ok(error(&rows_of(&out, num_rows)?, &expected))
}

fn product(values: &[f32], x: &[f64]) -> Vec<f64> {
    let dot = |row: &[f32]| row.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum();
    values.chunks_exact(x.len()).map(dot).collect()
}
