//! One function per block format: bytes of a block to its values.
//!
//! The order of multiplications is that of ggml, so that the results are equal bit for bit.

use super::code_books::{IQ4_VALUES, MXFP4_VALUES};
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

/// `scales and mins: [u8; 16], codes: [u8; 64], d: f16, dmin: f16`; sub-blocks of 16, of which each has its scale in a low
/// nibble and its minimum in the high one. Two bits of a byte belong to one of four groups of 32 values of a half.
pub(super) fn q2_k(block: &[u8; 84], out: &mut [f32; 256]) {
    let (d, dmin) = (read_f16(block, 80), read_f16(block, 82));
    for (k, out) in out.iter_mut().enumerate() {
        let scales = block[k / 16];
        let code = (block[16 + 32 * (k / 128) + k % 32] >> (2 * (k % 128 / 32))) & 3;
        *out = d * f32::from(scales & 15) * f32::from(code) - dmin * f32::from(scales >> 4);
    }
}

/// `high: [u8; 32], low: [u8; 64], scales: [u8; 12], d: f16`; a code is the two low bits, as those of Q2_K, and bit `k / 32`
/// of the high byte, less four. Sixteen scales of 6 bits.
pub(super) fn q3_k(block: &[u8; 110], out: &mut [f32; 256]) {
    let d = read_f16(block, 108);
    let scales = signed_six_bit_scales(&block[96..108]);
    for (k, out) in out.iter_mut().enumerate() {
        let low = (block[32 + 32 * (k / 128) + k % 32] >> (2 * (k % 128 / 32))) & 3;
        let high = (block[k % 32] >> (k / 32)) & 1;
        *out = d * f32::from(scales[k / 16]) * (f32::from(low | (high << 2)) - 4.0);
    }
}

/// As Q4_0, but the values of codes are those of a book.
pub(super) fn iq4_nl(block: &[u8; 18], out: &mut [f32; 32]) {
    let d = read_f16(block, 0);
    book_values(&block[2..], &IQ4_VALUES, d, out);
}

/// `d: f16, upper bits of scales: u16, lower nibbles of scales: [u8; 4], codes: [u8; 128]`; a scale of 6 bits, less 32, for
/// each of eight sub-blocks, whose codes are those of IQ4_NL.
pub(super) fn iq4_xs(block: &[u8; 136], out: &mut [f32; 256]) {
    let d = read_f16(block, 0);
    for (j, (out, codes)) in out.as_chunks_mut().0.iter_mut().zip(block[8..].chunks_exact(16)).enumerate() {
        book_values(codes, &IQ4_VALUES, d * f32::from(iq4_xs_scale(block, j)), out);
    }
}

/// `exponent: u8, codes: [u8; 16]`; the order of codes is that of Q4_0.
pub(super) fn mxfp4(block: &[u8; 17], out: &mut [f32; 32]) {
    book_values(&block[1..], &MXFP4_VALUES, mxfp4_scale(block[0]), out);
}

/// `d: f16, scales: [i8; 16], codes: [i8; 256]`; a scale covers 16 values and is in eighths.
pub(super) fn q8_s(block: &[u8; 274], out: &mut [f32; 256]) {
    let d = read_f16(block, 0) * 0.125;
    for (k, out) in out.iter_mut().enumerate() {
        let scale = d * f32::from(block[2 + k / 16].cast_signed());
        *out = scale * f32::from(block[18 + k].cast_signed());
    }
}

/// The sixteen scales of a Q3_K block from their twelve bytes: eight of nibbles, low ones first, and four with the upper two
/// bits of every fourth scale.
#[must_use]
pub fn signed_six_bit_scales(packed: &[u8]) -> [i8; 16] {
    std::array::from_fn(|j| {
        let low = (packed[j % 8] >> (4 * (j / 8))) & 15;
        let high = (packed[8 + j % 4] >> (2 * (j / 4))) & 3;
        (low | (high << 4)).cast_signed() - 32
    })
}

/// The scale of sub-block `j` (0..8) of an IQ4_XS block.
#[must_use]
pub fn iq4_xs_scale(block: &[u8], j: usize) -> i8 {
    let low = (block[4 + j / 2] >> (4 * (j % 2))) & 15;
    let high = (block[2 + j / 4] >> (2 * (j % 4))) & 3;
    (low | (high << 4)).cast_signed() - 32
}

/// Half of 2^(exponent − 127), since values are doubled: 2^-128 to 2^127.
#[must_use]
pub fn mxfp4_scale(exponent: u8) -> f32 {
    // The first two are below the normal numbers.
    let bits = if exponent < 2 { 0x0020_0000 << exponent } else { (u32::from(exponent) - 1) << 23 };
    f32::from_bits(bits)
}

/// Low nibbles are the codes of the first half of the values.
fn book_values(codes: &[u8], book: &[i8; 16], scale: f32, out: &mut [f32; 32]) {
    for (i, byte) in codes.iter().enumerate() {
        out[i] = scale * f32::from(book[usize::from(byte & 15)]);
        out[i + 16] = scale * f32::from(book[usize::from(byte >> 4)]);
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
