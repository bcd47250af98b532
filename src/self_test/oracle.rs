//! What is right: the same op by its definition in double precision. And inputs to try ops on.

use half::f16;

use crate::Result;
use crate::ops::reference::ReferenceBackend;
use crate::ops::{Buffer, Context, Matrix, RmsNorm, Vector};
use crate::weights::DType;

/// What a case computed, row by row.
#[derive(Debug, Default)]
pub(super) struct Rows {
    pub(super) values: Vec<f64>,
    pub(super) width: usize,
}

impl Rows {
    /// The first rows of a buffer.
    pub(super) fn of(buffer: &Buffer, num_rows: usize) -> Result<Self> {
        Ok(Self { values: buffer.read_exact(num_rows)?, width: buffer.width() })
    }
}

/// The error of the worst row of a case on a device: the sum of the squares of the differences over the sum of the
/// squares of what is right. What is right is the same case in candle's tensors.
pub(super) fn compare(context: &Context, case: impl Fn(&Context) -> Result<Rows>) -> Result<f64> {
    let expected = case(&Context::reference(ReferenceBackend::oracle()))?;
    let actual = case(context)?;
    if actual.values.len() != expected.values.len() {
        return Ok(f64::INFINITY);
    }
    let rows = actual.values.chunks(expected.width).zip(expected.values.chunks(expected.width));
    Ok(rows.map(|(actual, expected)| error(actual, expected)).fold(0.0, f64::max))
}

/// The sum of the squares of the differences over the sum of the squares of what is right.
pub(super) fn error(actual: &[f64], expected: &[f64]) -> f64 {
    let error: f64 = actual.iter().zip(expected).map(|(a, b)| (a - b).powi(2)).sum();
    let scale: f64 = expected.iter().map(|b| b * b).sum();
    let error = error / scale.max(f64::MIN_POSITIVE);
    // A NaN is as wrong as can be.
    if error.is_nan() || actual.len() != expected.len() { f64::INFINITY } else { error }
}

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

/// Rows on the device, with room for `max_rows`.
pub(super) fn buffer(context: &Context, values: &[f32], width: usize, max_rows: usize) -> Result<Buffer> {
    let mut buffer = Buffer::new(context, max_rows, width)?;
    buffer.write(values.len() / width, |out| out.copy_from_slice(values))?;
    Ok(buffer)
}

/// Rows for a result: as long as it has not come, they are no numbers.
pub(super) fn unwritten(context: &Context, width: usize, max_rows: usize) -> Result<Buffer> {
    buffer(context, &vec![f32::NAN; width * max_rows], width, max_rows)
}

/// A norm with weights of its own.
pub(super) fn rms_norm(context: &Context, seed: u64, len: usize, eps: f32) -> Result<RmsNorm> {
    Ok(RmsNorm { weight: Vector::new(context, noise(seed, len))?, eps })
}

/// A matrix of random blocks.
pub(super) fn matrix(context: &Context, dtype: DType, rows: usize, cols: usize, seed: u64) -> Result<Matrix> {
    Matrix::from_bytes(context, dtype, &random_blocks(dtype, rows * cols, seed), rows, cols)
}

/// A matrix of a few random blocks again and again, to measure with.
pub(super) fn random_matrix(context: &Context, dtype: DType, rows: usize, cols: usize) -> Result<Matrix> {
    let row = random_blocks(dtype, cols, 1);
    Matrix::from_bytes(context, dtype, &row.repeat(rows), rows, cols)
}

/// Any bit pattern is a block, but scales have to be finite and alike for the sums to say anything. Weights come out
/// below 1, so that sums stay where an error of a gate is none of a power of e.
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
    // Of blocks with scales in two steps, the lower one goes up to 63 or 127.
    let size = match dtype {
        DType::Q4K | DType::Q5K | DType::Q6K => 0.02 / 64.0,
        _ => 0.02,
    };
    let mut scales =
        noise(seed + 1, num_values).into_iter().map(|value| f16::from_f32(size * (1.0 + 0.5 * value)));
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
