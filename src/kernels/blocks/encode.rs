//! Encoders of the 32-value blocks, with the rounding of ggml's reference code.

use super::store_f16;
use crate::{DType, Error, Result};

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
    let (scale, min) = scale_and_min(values, 15.0);
    store_f16(scale, block)?;
    store_f16(min, &mut block[2..])?;
    let inverse = reciprocal(scale);
    let code = |value: f32| ((value - min) * inverse + 0.5).clamp(0.0, 15.0) as u8;
    for (i, byte) in block[4..].iter_mut().enumerate() {
        *byte = code(values[i]) | (code(values[i + 16]) << 4);
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
    let (scale, min) = scale_and_min(values, 31.0);
    store_f16(scale, block)?;
    store_f16(min, &mut block[2..])?;
    let inverse = reciprocal(scale);
    let codes = values.map(|value| ((value - min) * inverse + 0.5).clamp(0.0, 31.0) as u8);
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
        _ => return Err(Error::unsupported(format!("integers with one scale are no blocks of {dtype}"))),
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

/// The least value, and the step from it to the largest one in so many steps.
fn scale_and_min(values: &[f32; 32], steps: f32) -> (f32, f32) {
    let min = values.iter().copied().fold(f32::INFINITY, f32::min);
    let max = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    ((max - min) / steps, min)
}

/// The scale that maps the value of largest magnitude to `-levels`, the code with no counterpart on the
/// other side, and its reciprocal.
fn signed_scale(values: &[f32; 32], levels: f32) -> (f32, f32) {
    let extreme = values.iter().fold(0.0_f32, |a, &b| if b.abs() > a.abs() { b } else { a });
    let scale = extreme / -levels;
    (scale, reciprocal(scale))
}

/// 1/x, but 0 where that is not finite: a block of zeros (or of values too small to tell apart).
fn reciprocal(x: f32) -> f32 {
    let inverse = 1.0 / x;
    if inverse.is_finite() { inverse } else { 0.0 }
}
