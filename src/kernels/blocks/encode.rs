//! Encoders of the 32-value blocks. Those without a minimum have the rounding of ggml's reference code; of those with one,
//! the scale and the minimum with the least square error are searched for.

use half::f16;

use super::store_f16;
use crate::{DType, Error, Result};

/// Step sizes that are tried in addition to the whole range of a block, as the difference between the number of steps
/// in the range and the number of codes. One fewer keeps the values of a block with half as many levels.
const STEPS: [f32; 6] = [-1.0, -1.4, -0.7, -0.35, 0.35, 0.7];

pub(super) fn q4_0(values: &[f32; 32], block: &mut [u8; 18]) -> Result<()> {
    let (scale, inverse) = signed_scale(values, 8.0);
    store_f16(scale, block)?;
    let code = |value: f32| (value * inverse + 8.5).clamp(0.0, 15.0) as u8;
    for (i, byte) in block[2..].iter_mut().enumerate() {
        *byte = code(values[i]) | (code(values[i + 16]) << 4);
    }
    Ok(())
}

pub(super) fn q4_1(values: &[f32; 32], block: &mut [u8; 20]) -> Result<()> {
    let codes = with_min(values, 15.0, block)?;
    for (i, byte) in block[4..].iter_mut().enumerate() {
        *byte = codes[i] | (codes[i + 16] << 4);
    }
    Ok(())
}

pub(super) fn q5_0(values: &[f32; 32], block: &mut [u8; 22]) -> Result<()> {
    let (scale, inverse) = signed_scale(values, 16.0);
    store_f16(scale, block)?;
    store_five_bits(&values.map(|value| (value * inverse + 16.5).clamp(0.0, 31.0) as u8), &mut block[2..]);
    Ok(())
}

pub(super) fn q5_1(values: &[f32; 32], block: &mut [u8; 24]) -> Result<()> {
    let codes = with_min(values, 31.0, block)?;
    store_five_bits(&codes, &mut block[4..]);
    Ok(())
}

pub(super) fn q8_0(values: &[f32; 32], block: &mut [u8; 34]) -> Result<()> {
    let largest = values.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
    let scale = largest / 127.0;
    let inverse = reciprocal(scale);
    store_f16(scale, block)?;
    for (byte, value) in block[2..].iter_mut().zip(values) {
        *byte = ((value * inverse).round() as i8).cast_unsigned();
    }
    Ok(())
}

/// A block of integers less their zero, with their scale: Q4_0, Q5_0 or Q8_0. The codes have to be in its range.
pub(super) fn integers(dtype: DType, scale: f32, codes: &[i8; 32], block: &mut [u8]) -> Result<()> {
    store_f16(scale, block)?;
    match dtype {
        DType::Q4_0 => {
            for (i, byte) in block[2..].iter_mut().enumerate() {
                let [low, high] = [codes[i], codes[i + 16]].map(|code| (code + 8).cast_unsigned() & 15);
                *byte = low | (high << 4);
            }
        }
        DType::Q5_0 => store_five_bits(&codes.map(|code| (code + 16).cast_unsigned() & 31), &mut block[2..]),
        DType::Q8_0 => {
            block[2..].iter_mut().zip(codes).for_each(|(byte, code)| *byte = code.cast_unsigned());
        }
        _ => return Err(Error::unsupported(format!("integers with one scale cannot be encoded as {dtype}"))),
    }
    Ok(())
}

/// `fifth bits: u32, codes: [u8; 16]`, as `decode` reads them.
fn store_five_bits(codes: &[u8; 32], out: &mut [u8]) {
    let high = codes.iter().enumerate().fold(0_u32, |high, (j, code)| high | (u32::from(code >> 4) << j));
    out[..4].copy_from_slice(&high.to_le_bytes());
    for (i, byte) in out[4..].iter_mut().enumerate() {
        *byte = (codes[i] & 15) | ((codes[i + 16] & 15) << 4);
    }
}

/// Writes the scale and the minimum of a block, in half precision, and returns its codes up to `max_code`.
///
/// For each step size, the values get the nearest codes, and a least-squares fit gives the scale and the minimum for
/// these. The pair with the least error after rounding to half precision is used.
fn with_min(values: &[f32; 32], max_code: f32, head: &mut [u8]) -> Result<[u8; 32]> {
    let low = values.iter().copied().fold(f32::INFINITY, f32::min);
    let high = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let range = high - low;
    store_f16(range / max_code, head)?;
    store_f16(low, &mut head[2..])?;
    let mut best = WithMin::rounded(range / max_code, low);
    let mut best_error = best.error(values, max_code);
    for more in STEPS {
        if best_error == 0.0 {
            break;
        }
        let first = WithMin { scale: range / (max_code + more), min: low };
        let Some(fit) = first.least_squares(values, max_code) else { continue };
        let error = fit.error(values, max_code);
        if error < best_error {
            (best, best_error) = (fit, error);
        }
    }
    store_f16(best.scale, head)?;
    store_f16(best.min, &mut head[2..])?;
    Ok(best.codes(values, max_code).map(|code| code as u8))
}

/// x ≈ scale · code + min.
#[derive(Clone, Copy)]
struct WithMin {
    scale: f32,
    min: f32,
}

impl WithMin {
    fn rounded(scale: f32, min: f32) -> Self {
        let [scale, min] = [scale, min].map(|value| f16::from_f32(value).to_f32());
        Self { scale, min }
    }

    /// The codes next to the values, as whole numbers.
    fn codes(self, values: &[f32; 32], max_code: f32) -> [f32; 32] {
        let inverse = reciprocal(self.scale);
        values.map(|value| ((value - self.min) * inverse + 0.5).clamp(0.0, max_code).floor())
    }

    fn error(self, values: &[f32; 32], max_code: f32) -> f32 {
        let codes = self.codes(values, max_code);
        values.iter().zip(codes).map(|(value, code)| (self.scale * code + self.min - value).powi(2)).sum()
    }

    /// The best pair for the codes next to the values, if it can be stored.
    fn least_squares(self, values: &[f32; 32], max_code: f32) -> Option<Self> {
        let codes = self.codes(values, max_code);
        // Of differences to the mean, so that a large minimum costs no digits.
        let mean = |values: &[f32; 32]| values.iter().sum::<f32>() / 32.0;
        let (mean_code, mean_value) = (mean(&codes), mean(values));
        let (mut variance, mut covariance) = (0.0, 0.0);
        for (value, code) in values.iter().zip(codes) {
            variance += (code - mean_code).powi(2);
            covariance += (code - mean_code) * (value - mean_value);
        }
        let scale = covariance / variance;
        let fit = Self::rounded(scale, mean_value - scale * mean_code);
        (fit.scale.is_finite() && fit.scale > 0.0 && fit.min.is_finite()).then_some(fit)
    }
}

/// The scale that maps the value of largest magnitude to `-levels`, the code with no counterpart on the
/// other side, and its reciprocal.
fn signed_scale(values: &[f32; 32], levels: f32) -> (f32, f32) {
    let extreme = values.iter().fold(0.0_f32, |a, &b| if b.abs() > a.abs() { b } else { a });
    let scale = extreme / -levels;
    (scale, reciprocal(scale))
}

/// 1/x, but 0 where that is not finite: a block of zeros (or of values too small to distinguish).
fn reciprocal(x: f32) -> f32 {
    let inverse = 1.0 / x;
    if inverse.is_finite() { inverse } else { 0.0 }
}
