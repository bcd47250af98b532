//! One function per block format: bytes of a block to its values.
//!
//! The order of multiplications is that of ggml, so that the results are equal bit for bit.

use super::read_f16;

/// `d: f16, codes: [u8; 16]`; byte `i` holds value `i` in its low and value `i + 16` in its high half.
pub(super) fn q4_0(block: &[u8; 18], out: &mut [f32; 32]) {
    let d = read_f16(block, 0);
    for (i, byte) in block[2..].iter().enumerate() {
        out[i] = d * (f32::from(byte & 15) - 8.0);
        out[i + 16] = d * (f32::from(byte >> 4) - 8.0);
    }
}

/// `d: f16, min: f16, codes: [u8; 16]`.
pub(super) fn q4_1(block: &[u8; 20], out: &mut [f32; 32]) {
    let (d, min) = (read_f16(block, 0), read_f16(block, 2));
    for (i, byte) in block[4..].iter().enumerate() {
        out[i] = d * f32::from(byte & 15) + min;
        out[i + 16] = d * f32::from(byte >> 4) + min;
    }
}

/// `d: f16, fifth bits: u32, codes: [u8; 16]`; the fifth bit of value `j` is bit `j`.
pub(super) fn q5_0(block: &[u8; 22], out: &mut [f32; 32]) {
    let d = read_f16(block, 0);
    let codes = five_bit_codes(&block[2..]);
    for (out, code) in out.iter_mut().zip(codes) {
        *out = d * (f32::from(code) - 16.0);
    }
}

/// `d: f16, min: f16, fifth bits: u32, codes: [u8; 16]`.
pub(super) fn q5_1(block: &[u8; 24], out: &mut [f32; 32]) {
    let (d, min) = (read_f16(block, 0), read_f16(block, 2));
    let codes = five_bit_codes(&block[4..]);
    for (out, code) in out.iter_mut().zip(codes) {
        *out = d * f32::from(code) + min;
    }
}

/// `d: f16, codes: [i8; 32]`.
pub(super) fn q8_0(block: &[u8; 34], out: &mut [f32; 32]) {
    let d = read_f16(block, 0);
    for (out, byte) in out.iter_mut().zip(&block[2..]) {
        *out = d * f32::from(byte.cast_signed());
    }
}

/// `d: f16, dmin: f16, scales and mins: [u8; 12], codes: [u8; 128]`; sub-blocks of 32, of which two share
/// 32 bytes of codes: the even one has the low halves.
pub(super) fn q4_k(block: &[u8; 144], out: &mut [f32; 256]) {
    let (d, dmin) = (read_f16(block, 0), read_f16(block, 2));
    let scales = &block[4..16];
    let codes = &block[16..];
    for (j, out) in out.chunks_exact_mut(32).enumerate() {
        let (scale, min) = scale_and_min(scales, j);
        let (scale, min) = (d * f32::from(scale), dmin * f32::from(min));
        for (l, out) in out.iter_mut().enumerate() {
            let code = (codes[32 * (j / 2) + l] >> (4 * (j % 2))) & 15;
            *out = scale * f32::from(code) - min;
        }
    }
}

/// As Q4_K with `fifth bits: [u8; 32]` before the codes: bit `j` of byte `l` is that of value `l` in
/// sub-block `j`.
pub(super) fn q5_k(block: &[u8; 176], out: &mut [f32; 256]) {
    let (d, dmin) = (read_f16(block, 0), read_f16(block, 2));
    let scales = &block[4..16];
    let high = &block[16..48];
    let codes = &block[48..];
    for (j, out) in out.chunks_exact_mut(32).enumerate() {
        let (scale, min) = scale_and_min(scales, j);
        let (scale, min) = (d * f32::from(scale), dmin * f32::from(min));
        for (l, out) in out.iter_mut().enumerate() {
            let low = (codes[32 * (j / 2) + l] >> (4 * (j % 2))) & 15;
            let code = low | (((high[l] >> j) & 1) << 4);
            *out = scale * f32::from(code) - min;
        }
    }
}

/// `low: [u8; 128], high: [u8; 64], scales: [i8; 16], d: f16`; two halves of four groups of 32 values.
/// Groups 0 and 1 of a half are the low nibbles of its 64 low bytes, 2 and 3 the high ones; the upper two
/// bits of group `g` are bits `2g` and `2g + 1` of its 32 high bytes. A scale covers 16 values.
pub(super) fn q6_k(block: &[u8; 210], out: &mut [f32; 256]) {
    let d = read_f16(block, 208);
    for (k, out) in out.iter_mut().enumerate() {
        let (half, group, l) = (k / 128, k % 128 / 32, k % 32);
        let low = (block[64 * half + 32 * (group % 2) + l] >> (4 * (group / 2))) & 15;
        let high = (block[128 + 32 * half + l] >> (2 * group)) & 3;
        let scale = d * f32::from(block[192 + k / 16].cast_signed());
        *out = scale * (f32::from(low | (high << 4)) - 32.0);
    }
}

/// `bytes` is `fifth bits: u32, codes: [u8; 16]`.
fn five_bit_codes(bytes: &[u8]) -> [u8; 32] {
    let high = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    std::array::from_fn(|j| {
        let byte = bytes[4 + j % 16];
        let low = if j < 16 { byte & 15 } else { byte >> 4 };
        low | ((((high >> j) & 1) as u8) << 4)
    })
}

/// The 6-bit scale and minimum of sub-block `j` (0..8) from the 12 bytes that hold all sixteen.
fn scale_and_min(packed: &[u8], j: usize) -> (u8, u8) {
    if j < 4 {
        (packed[j] & 63, packed[j + 4] & 63)
    } else {
        ((packed[j + 4] & 15) | ((packed[j - 4] >> 6) << 4), (packed[j + 4] >> 4) | ((packed[j] >> 6) << 4))
    }
}
