//! Unpacks blocks of files: the codes in the order of columns, and the scales in the layout of `layout.rs`.

use crate::weights::DType;
use crate::weights::blocks::{iq4_xs_scale, mxfp4_scale, signed_six_bit_scales};

/// The codes of a block in the order of its columns, and its scales in the layout of GPU memory.
pub(in crate::ops::gpu) fn unpack_block(
    dtype: DType,
    block: &[u8],
    codes: &mut [u8],
    scales: &mut [u8],
    super_scales: &mut [u8],
) {
    match dtype {
        DType::Q4_0 | DType::Iq4Nl => {
            scales.copy_from_slice(&block[..2]);
            nibbles(&block[2..], codes);
        }
        DType::Q4_1 => {
            scales.copy_from_slice(&block[..4]);
            nibbles(&block[4..], codes);
        }
        DType::Q5_0 => {
            scales.copy_from_slice(&block[..2]);
            nibbles(&block[6..], codes);
            fifth_bits(&block[2..6], codes);
        }
        DType::Q5_1 => {
            scales.copy_from_slice(&block[..4]);
            nibbles(&block[8..], codes);
            fifth_bits(&block[4..8], codes);
        }
        DType::Q8_0 => {
            scales.copy_from_slice(&block[..2]);
            for (code, byte) in codes.iter_mut().zip(&block[2..]) {
                *code = byte ^ 0x80;
            }
        }
        DType::Q4K => {
            super_block_scales(block, scales);
            for (codes, bytes) in codes.chunks_exact_mut(64).zip(block[16..].chunks_exact(32)) {
                nibbles(bytes, codes);
            }
        }
        DType::Q5K => {
            super_block_scales(block, scales);
            for (codes, bytes) in codes.chunks_exact_mut(64).zip(block[48..].chunks_exact(32)) {
                nibbles(bytes, codes);
            }
            for (col, code) in codes.iter_mut().enumerate() {
                *code |= (block[16 + col % 32] >> (col / 32) & 1) << 4;
            }
        }
        DType::Q6K => {
            scales.copy_from_slice(&block[192..208]);
            super_scales.copy_from_slice(&block[208..]);
            for (col, code) in codes.iter_mut().enumerate() {
                let (half, quarter, index) = (col / 128, col / 32 % 4, col % 32);
                let low = block[64 * half + 32 * (quarter % 2) + index] >> (4 * (quarter / 2)) & 15;
                let high = block[128 + 32 * half + index] >> (2 * quarter) & 3;
                *code = low | high << 4;
            }
        }
        DType::Q2K => {
            scales.copy_from_slice(&block[..16]);
            super_scales.copy_from_slice(&block[80..]);
            two_bits(&block[16..80], codes);
        }
        DType::Q3K => {
            unit_scales(scales, signed_six_bit_scales(&block[96..108]));
            super_scales.copy_from_slice(&block[108..]);
            two_bits(&block[32..96], codes);
            for (col, code) in codes.iter_mut().enumerate() {
                *code |= (block[col % 32] >> (col / 32) & 1) << 2;
            }
        }
        DType::Iq4Xs => {
            unit_scales(scales, std::array::from_fn(|unit| iq4_xs_scale(block, unit / 2)));
            super_scales.copy_from_slice(&block[..2]);
            for (codes, bytes) in codes.chunks_exact_mut(32).zip(block[8..].chunks_exact(16)) {
                nibbles(bytes, codes);
            }
        }
        DType::Mxfp4 => {
            // A power of two has no other half.
            scales.copy_from_slice(&mxfp4_scale(block[0]).to_le_bytes()[2..]);
            nibbles(&block[1..], codes);
        }
        DType::Q8S => {
            super_scales.copy_from_slice(&block[..2]);
            scales.copy_from_slice(&block[2..18]);
            for (code, byte) in codes.iter_mut().zip(&block[18..]) {
                *code = byte ^ 0x80;
            }
        }
        // They have no blocks.
        DType::F32 | DType::F16 | DType::BF16 => {}
    }
}

fn unit_scales(to: &mut [u8], scales: [i8; 16]) {
    for (to, scale) in to.iter_mut().zip(scales) {
        *to = scale.cast_unsigned();
    }
}

/// Two bits each: a byte has those of four columns of 128 that are 32 apart.
fn two_bits(bytes: &[u8], codes: &mut [u8]) {
    for (col, code) in codes.iter_mut().enumerate() {
        *code = bytes[32 * (col / 128) + col % 32] >> (2 * (col % 128 / 32)) & 3;
    }
}

/// The low nibbles of all bytes, then the high ones.
fn nibbles(bytes: &[u8], codes: &mut [u8]) {
    let (low, high) = codes.split_at_mut(bytes.len());
    for ((byte, low), high) in bytes.iter().zip(low).zip(high) {
        (*low, *high) = (byte & 15, byte >> 4);
    }
}

fn fifth_bits(bytes: &[u8], codes: &mut [u8]) {
    for (col, code) in codes.iter_mut().enumerate() {
        *code |= (bytes[col / 8] >> (col % 8) & 1) << 4;
    }
}

/// The sixteen bytes of scales of a `Q4_K` or `Q5_K` block.
fn super_block_scales(block: &[u8], scales: &mut [u8]) {
    scales[..4].copy_from_slice(&block[..4]);
    let packed = &block[4..16];
    for index in 0..8 {
        let (scale, minimum) = if index < 4 {
            (packed[index] & 63, packed[index + 4] & 63)
        } else {
            (
                packed[index + 4] & 15 | packed[index - 4] >> 6 << 4,
                packed[index + 4] >> 4 | packed[index] >> 6 << 4,
            )
        };
        scales[4 + index] = scale & 15 | (minimum & 15) << 4;
        scales[12 + index / 2] |= (scale >> 4 | minimum >> 4 << 2) << (4 * (index % 2));
    }
}
