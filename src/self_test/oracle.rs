//! Definitions in double precision, and inputs to try them on.

use half::f16;

use crate::Result;
use crate::ops::{Buffer, Context, Matrix};
use crate::weights::{DType, dequantize};

/// Deterministic values in -1..1.
pub(super) fn noise(seed: u64, len: usize) -> Vec<f32> {
    bits(seed).map(|bits| bits as f32 / (1 << 23) as f32 - 1.0).take(len).collect()
}

/// Deterministic numbers of 24 bits.
fn bits(seed: u64) -> impl Iterator<Item = u32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    std::iter::repeat_with(move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as u32
    })
}

/// The sum of the squares of the differences over the sum of the squares of what is right.
pub(super) fn error(actual: &[f32], expected: &[f64]) -> f64 {
    if actual.len() != expected.len() {
        return f64::INFINITY;
    }
    let error: f64 = actual.iter().zip(expected).map(|(a, b)| (f64::from(*a) - b).powi(2)).sum();
    let scale: f64 = expected.iter().map(|b| b * b).sum();
    let error = error / scale.max(f64::MIN_POSITIVE);
    // A NaN is as wrong as can be.
    if error.is_nan() { f64::INFINITY } else { error }
}

/// Rows on the device, with room for `max_rows`.
pub(super) fn buffer(context: &Context, values: &[f32], width: usize, max_rows: usize) -> Result<Buffer> {
    let mut buffer = Buffer::new(context, max_rows, width)?;
    buffer.write(values.len() / width, |out| out.copy_from_slice(values))?;
    Ok(buffer)
}

/// The first rows of a buffer.
pub(super) fn rows_of(buffer: &Buffer, num_rows: usize) -> Result<Vec<f32>> {
    buffer.read(num_rows, <[f32]>::to_vec)
}

/// A matrix of random blocks: on the device, and its values.
pub(super) struct TestMatrix {
    pub(super) matrix: Matrix,
    pub(super) values: Vec<f32>,
}

impl TestMatrix {
    pub(super) fn new(context: &Context, dtype: DType, rows: usize, cols: usize, seed: u64) -> Result<Self> {
        let bytes = random_blocks(dtype, rows * cols, seed);
        let mut values = vec![0.0; rows * cols];
        dequantize(dtype, &bytes, &mut values)?;
        let matrix = Matrix::from_bytes(context, dtype, &bytes, rows, cols)?;
        Ok(Self { matrix, values })
    }

    /// `W·x` for a row of activations.
    pub(super) fn product(&self, x: &[f64]) -> Vec<f64> {
        let dot = |row: &[f32]| row.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum();
        self.values.chunks_exact(x.len()).map(dot).collect()
    }
}

/// A matrix of a few random blocks again and again, to measure with.
pub(super) fn random_matrix(context: &Context, dtype: DType, rows: usize, cols: usize) -> Result<Matrix> {
    let row = random_blocks(dtype, cols, 1);
    Matrix::from_bytes(context, dtype, &row.repeat(rows), rows, cols)
}

/// Any bit pattern is a block, but scales have to be finite and alike for the sums to say anything.
fn random_blocks(dtype: DType, num_values: usize, seed: u64) -> Vec<u8> {
    let values = noise(seed, num_values);
    match dtype {
        DType::F32 => return values.iter().flat_map(|value| value.to_le_bytes()).collect(),
        DType::F16 => return values.iter().flat_map(|value| f16::from_f32(*value).to_le_bytes()).collect(),
        DType::BF16 => {
            return values.iter().flat_map(|value| half::bf16::from_f32(*value).to_le_bytes()).collect();
        }
        _ => {}
    }
    let len = num_values / dtype.block_len() * dtype.block_bytes();
    let mut bytes: Vec<u8> = bits(seed).map(|bits| (bits >> 9) as u8).take(len).collect();
    let mut scales = noise(seed + 1, num_values).into_iter().map(|value| f16::from_f32(0.02 + 0.01 * value));
    for block in bytes.chunks_exact_mut(dtype.block_bytes()) {
        let num_halves = match dtype {
            DType::Q4_1 | DType::Q5_1 | DType::Q4K | DType::Q5K => 2,
            _ => 1,
        };
        let at = if dtype == DType::Q6K { block.len() - 2 } else { 0 };
        for (target, scale) in
            block[at..at + 2 * num_halves].as_chunks_mut::<2>().0.iter_mut().zip(&mut scales)
        {
            *target = scale.to_le_bytes();
        }
    }
    bytes
}

/// A row divided by its root mean square and multiplied with the norm's weights.
pub(super) fn norm(x: &[f32], weight: &[f32], eps: f32) -> Vec<f64> {
    let mean = x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / x.len() as f64;
    let factor = 1.0 / (mean + f64::from(eps)).sqrt();
    x.iter().zip(weight).map(|(x, w)| f64::from(*x) * factor * f64::from(*w)).collect()
}

pub(super) fn widen(x: &[f32]) -> Vec<f64> {
    x.iter().map(|x| f64::from(*x)).collect()
}
