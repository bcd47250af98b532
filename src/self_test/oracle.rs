//! Expected results: the same op by its definition in double precision. And inputs for checks of ops.

use crate::Result;
pub(super) use crate::ops::cpu::noise::noise;
use crate::ops::cpu::noise::random_blocks;
use crate::ops::reference::ReferenceBackend;
use crate::ops::{Buffer, Context, Matrix, RmsNorm, Vector};
use crate::weights::DType;

/// The results of a case, row by row.
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

/// The expected result of a check: the case in candle's tensors, in double precision. It is the same for every device.
#[derive(Debug)]
pub struct Expected(Rows);

impl Expected {
    /// For callers that look at no results.
    pub(super) fn nothing() -> Self {
        Self(Rows::default())
    }

    pub(super) fn of(case: impl Fn(&Context) -> Result<Rows>) -> Result<Self> {
        case(&Context::reference(ReferenceBackend::oracle())).map(Self)
    }
}

/// The error of the worst row of a case's results on a device: the sum of the squared differences over the sum of the
/// squared expected values.
pub(super) fn compare(actual: &Rows, Expected(expected): &Expected) -> f64 {
    if actual.values.len() != expected.values.len() {
        return f64::INFINITY;
    }
    let rows = actual.values.chunks(expected.width).zip(expected.values.chunks(expected.width));
    rows.map(|(actual, expected)| error(actual, expected)).fold(0.0, f64::max)
}

/// The sum of the squared differences over the sum of the squared expected values.
pub(super) fn error(actual: &[f64], expected: &[f64]) -> f64 {
    let error: f64 = actual.iter().zip(expected).map(|(a, b)| (a - b).powi(2)).sum();
    let scale: f64 = expected.iter().map(|b| b * b).sum();
    let error = error / scale.max(f64::MIN_POSITIVE);
    // A NaN is as wrong as can be.
    if error.is_nan() || actual.len() != expected.len() { f64::INFINITY } else { error }
}

/// Rows on the device, with space for `max_rows`.
pub(super) fn buffer(context: &Context, values: &[f32], width: usize, max_rows: usize) -> Result<Buffer> {
    let mut buffer = Buffer::new(context, max_rows, width)?;
    buffer.write(values.len() / width, |out| out.copy_from_slice(values))?;
    Ok(buffer)
}

/// Rows for a result: as long as it has not come, they are no numbers.
pub(super) fn unwritten(context: &Context, width: usize, max_rows: usize) -> Result<Buffer> {
    buffer(context, &vec![f32::NAN; width * max_rows], width, max_rows)
}

/// A norm with its own weights.
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
