//! Encoders of the 32-value blocks, with the rounding of ggml's reference code.

use super::store_f16;
use crate::Result;

pub(super) fn q4_0(values: &[f32; 32], block: &mut [u8; 18]) -> Result<()> {
    let (scale, inverse) = signed_scale(values, 8.0);
    store_f16(scale, block)?;
    let code = |value: f32| (value * inverse + 8.5).clamp(0.0, 15.0) as u8;
    for (i, byte) in block[2..].iter_mut().enumerate() {
        *byte = code(values[i]) | (code(values[i + 16]) << 4);
    }
    Ok(())
}

pub(super) fn q5_0(values: &[f32; 32], block: &mut [u8; 22]) -> Result<()> {
    let (scale, inverse) = signed_scale(values, 16.0);
    store_f16(scale, block)?;
    let codes = values.map(|value| (value * inverse + 16.5).clamp(0.0, 31.0) as u8);
    let mut high = 0_u32;
    for (j, code) in codes.iter().enumerate() {
        high |= u32::from(code >> 4) << j;
    }
    block[2..6].copy_from_slice(&high.to_le_bytes());
    for (i, byte) in block[6..].iter_mut().enumerate() {
        *byte = (codes[i] & 15) | (codes[i + 16] << 4);
    }
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
