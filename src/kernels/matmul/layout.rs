//! The layout of packed weight matrices in memory.
//!
//! Sixteen rows make a tile row, one row for each vector lane; a tile row is a sequence of tiles, one for each block of
//! columns. A tile takes the bytes of its sixteen blocks in the file. Codes are words of four bytes, and word w of the
//! sixteen rows is contiguous: 64 bytes that a kernel loads at once. The assignment of nibbles and bits to columns is
//! the file's, except for the fifth bits of `Q5_0` and `Q5_1` and the scales of `IQ4_XS`. Rows that pad the last tile
//! row are zero.
//!
//! | type | columns | tile |
//! |---|---|---|
//! | F32, F16 | 1 | 16 values |
//! | BF16 | 2 | 16 pairs of values (an odd last column has a zero next to it) |
//! | `Q4_0` | 32 | 16 scales, 4 words of codes |
//! | `Q4_1` | 32 | 16 scales, 16 minima, 4 words of codes |
//! | `Q5_0` | 32 | 16 scales, 1 word of fifth bits, 4 words of codes |
//! | `Q5_1` | 32 | 16 scales, 16 minima, 1 word of fifth bits, 4 words of codes |
//! | `Q8_0` | 32 | 16 scales, 8 words of codes |
//! | `Q4_K` | 256 | 16 scales, 16 scales of minima, 3 words of 6-bit scales, 32 words of codes |
//! | `Q5_K` | 256 | 16 scales, 16 scales of minima, 3 words of 6-bit scales, 8 words of fifth bits alternating with 8 words of codes, 24 words of codes |
//! | `Q6_K` | 256 | 16 scales; twice: 8 × 16 8-bit scales, 8 words of upper bits alternating with 8 words of lower bits, 8 words of lower bits |
//! | `Q2_K` | 256 | 16 scales, 16 scales of minima, 4 words of 4-bit scales and minima, 16 words of codes |
//! | `Q3_K` | 256 | 16 scales, 3 words of 6-bit scales, 8 words of upper bits, 16 words of lower bits |
//! | `IQ4_NL` | 32 | as `Q4_0` |
//! | `IQ4_XS` | 256 | 16 scales, 16 × upper bits of the 6-bit scales, 1 word of their lower bits, 32 words of codes |
//! | `MXFP4` | 32 | 16 exponents less 128, 4 words of codes |
//! | `Q8_S` | 256 | 16 scales; eight times: 2 × 16 8-bit scales, 8 words of codes |
//!
//! The order within a tile is the order in which a kernel first reads it: memory likes one ascending stream.

use half::{bf16, f16};

use crate::DType;
use crate::blocks::code_books::{IQ4_VALUES, MXFP4_VALUES};
use crate::blocks::decode::{mxfp4_scale, signed_six_bit_scales};

/// Rows of a tile: the lanes of a vector.
pub(super) const TILE_ROWS: usize = 16;
/// Bytes of the sixteen f16 scales that quantised tiles start with.
pub(super) const SCALES: usize = 2 * TILE_ROWS;
/// Bytes of one word of codes of all rows.
pub(super) const WORD: usize = 4 * TILE_ROWS;

/// Columns of a tile.
pub(super) fn tile_cols(dtype: DType) -> usize {
    match dtype {
        DType::BF16 => 2,
        _ => dtype.block_len(),
    }
}

/// Bytes of a tile.
pub(super) fn tile_bytes(dtype: DType) -> usize {
    tile_cols(dtype) / dtype.block_len() * dtype.block_bytes() * TILE_ROWS
}

/// Writes one row of the file, `row`, into lane `lane` of a tile row.
pub(super) fn pack_row(dtype: DType, row: &[u8], tiles: &mut [u8], lane: usize) {
    match dtype {
        DType::F32 => pack_blocks::<4, 64>(row, tiles, |block, tile| put(tile, 4 * lane, block)),
        DType::F16 => pack_blocks::<2, 32>(row, tiles, |block, tile| put(tile, 2 * lane, block)),
        DType::BF16 => {
            pack_blocks::<4, 64>(row, tiles, |block, tile| put(tile, 4 * lane, block));
            if let ([last], Some(tile)) = (row.as_chunks::<4>().1.as_chunks::<2>().0, last_tile::<64>(tiles))
            {
                put(tile, 4 * lane, last);
            }
        }
        DType::Q4_0 | DType::Iq4Nl => pack_blocks::<18, 288>(row, tiles, |block, tile| {
            put(tile, 2 * lane, &block[..2]);
            put_words(tile, SCALES, lane, &block[2..]);
        }),
        DType::Q4_1 => pack_blocks::<20, 320>(row, tiles, |block, tile| {
            put(tile, 2 * lane, &block[..2]);
            put(tile, SCALES + 2 * lane, &block[2..4]);
            put_words(tile, 2 * SCALES, lane, &block[4..]);
        }),
        DType::Q5_0 => pack_blocks::<22, 352>(row, tiles, |block, tile| {
            put(tile, 2 * lane, &block[..2]);
            let bits = u32::from_le_bytes([block[2], block[3], block[4], block[5]]);
            put_words(tile, SCALES, lane, &transpose_bits(bits).to_le_bytes());
            put_words(tile, SCALES + WORD, lane, &block[6..]);
        }),
        DType::Q5_1 => pack_blocks::<24, 384>(row, tiles, |block, tile| {
            put(tile, 2 * lane, &block[..2]);
            put(tile, SCALES + 2 * lane, &block[2..4]);
            let bits = u32::from_le_bytes([block[4], block[5], block[6], block[7]]);
            put_words(tile, 2 * SCALES, lane, &transpose_bits(bits).to_le_bytes());
            put_words(tile, 2 * SCALES + WORD, lane, &block[8..]);
        }),
        DType::Q8_0 => pack_blocks::<34, 544>(row, tiles, |block, tile| {
            put(tile, 2 * lane, &block[..2]);
            put_words(tile, SCALES, lane, &block[2..]);
        }),
        DType::Q4K => pack_blocks::<144, 2304>(row, tiles, |block, tile| {
            put(tile, 2 * lane, &block[..2]);
            put(tile, SCALES + 2 * lane, &block[2..4]);
            put_words(tile, 2 * SCALES, lane, &block[4..]);
        }),
        DType::Q5K => pack_blocks::<176, 2816>(row, tiles, |block, tile| {
            put(tile, 2 * lane, &block[..2]);
            put(tile, SCALES + 2 * lane, &block[2..4]);
            put_words(tile, 2 * SCALES, lane, &block[4..16]);
            for (word, bytes) in block[16..48].chunks_exact(4).enumerate() {
                put(tile, q5k_fifth(word) + 4 * lane, bytes);
            }
            for (word, bytes) in block[48..].chunks_exact(4).enumerate() {
                put(tile, q5k_nibbles(word) + 4 * lane, bytes);
            }
        }),
        DType::Q6K => pack_blocks::<210, 3360>(row, tiles, |block, tile| {
            put(tile, 2 * lane, &block[208..]);
            for (index, &scale) in block[192..208].iter().enumerate() {
                tile[q6k_scales(index) + lane] = scale;
            }
            for (word, bytes) in block[128..192].chunks_exact(4).enumerate() {
                put(tile, q6k_upper(word) + 4 * lane, bytes);
            }
            for (word, bytes) in block[..128].chunks_exact(4).enumerate() {
                put(tile, q6k_lower(word) + 4 * lane, bytes);
            }
        }),
        DType::Q2K => pack_blocks::<84, 1344>(row, tiles, |block, tile| {
            put(tile, 2 * lane, &block[80..82]);
            put(tile, SCALES + 2 * lane, &block[82..]);
            put_words(tile, 2 * SCALES, lane, &block[..80]);
        }),
        DType::Q3K => pack_blocks::<110, 1760>(row, tiles, |block, tile| {
            put(tile, 2 * lane, &block[108..]);
            put_words(tile, SCALES, lane, &block[96..108]);
            put_words(tile, Q3K_UPPER, lane, &block[..96]);
        }),
        DType::Iq4Xs => pack_blocks::<136, 2176>(row, tiles, |block, tile| {
            put(tile, 2 * lane, &block[..2]);
            let (upper, lower) = iq4_xs_scale_bits(block);
            put(tile, SCALES + 2 * lane, &upper.to_le_bytes());
            put(tile, 2 * SCALES + 4 * lane, &lower.to_le_bytes());
            put_words(tile, IQ4_XS_CODES, lane, &block[8..]);
        }),
        DType::Mxfp4 => pack_blocks::<17, 272>(row, tiles, |block, tile| {
            tile[lane] = block[0] ^ 0x80;
            put_words(tile, TILE_ROWS, lane, &block[1..]);
        }),
        DType::Q8S => pack_blocks::<274, 4384>(row, tiles, |block, tile| {
            put(tile, 2 * lane, &block[..2]);
            for (index, &scale) in block[2..18].iter().enumerate() {
                tile[q8s_scales(index) + lane] = scale;
            }
            for (block, codes) in block[18..].chunks_exact(32).enumerate() {
                put_words(tile, q8s_codes(block), lane, codes);
            }
        }),
    }
}

/// Where the codes of a `Q2_K` tile start.
pub(super) const Q2K_CODES: usize = 2 * SCALES + 4 * WORD;
/// Where the upper bits of the codes of a `Q3_K` tile start.
pub(super) const Q3K_UPPER: usize = SCALES + 3 * WORD;
/// Where their lower bits start.
pub(super) const Q3K_LOWER: usize = Q3K_UPPER + 8 * WORD;
/// Where the codes of an `IQ4_XS` tile start.
pub(super) const IQ4_XS_CODES: usize = 2 * SCALES + WORD;

/// The range of the scales of sub-block 0..16 of a `Q8_S` tile.
#[inline(always)]
pub(super) fn q8s_scales(block: usize) -> usize {
    SCALES + (2 * TILE_ROWS + 8 * WORD) * (block / 2) + TILE_ROWS * (block % 2)
}

/// Where the codes of block 0..8 of a `Q8_S` tile start.
#[inline(always)]
pub(super) fn q8s_codes(block: usize) -> usize {
    q8s_scales(2 * block) + 2 * TILE_ROWS
}

/// The scales of an `IQ4_XS` block for kernels, lower and upper bits. Byte j of the lower ones has those of sub-block j
/// in its low nibble and those of j + 4 in the high one. The upper ones are nibbles for j = 0, 2, 1 and 3, also with j
/// + 4 above j: shifted to the left by 4 and by 16, they are the high nibbles of four bytes.
fn iq4_xs_scale_bits(block: &[u8; 136]) -> (u16, u32) {
    let upper = u16::from_le_bytes([block[2], block[3]]);
    let (mut upper_bits, mut lower_bits) = (0, 0);
    for j in 0..8 {
        let nibble = [0, 2, 1, 3][j % 4];
        upper_bits |= (upper >> (2 * j) & 3) << (4 * nibble + 2 * (j / 4));
        let lower = block[4 + j / 2] >> (4 * (j % 2)) & 15;
        lower_bits |= u32::from(lower) << (8 * (j % 4) + 4 * (j / 4));
    }
    (upper_bits, lower_bits)
}

/// Where the codes of a `Q4_K` or `Q5_K` tile start.
pub(super) const K_CODES: usize = 2 * SCALES + 3 * WORD;

/// The range of word 0..8 of the fifth bits of a `Q5_K` tile.
#[inline(always)]
pub(super) fn q5k_fifth(word: usize) -> usize {
    K_CODES + 2 * WORD * word
}

/// The range of word 0..32 of the nibbles of a `Q5_K` tile.
#[inline(always)]
pub(super) fn q5k_nibbles(word: usize) -> usize {
    K_CODES + if word < 8 { WORD + 2 * WORD * word } else { WORD * (8 + word) }
}

/// The range of the scales of sub-block 0..16 of a `Q6_K` tile.
#[inline(always)]
pub(super) fn q6k_scales(block: usize) -> usize {
    SCALES + Q6K_HALF * (block / 8) + TILE_ROWS * (block % 8)
}

/// The range of word 0..16 of the upper bits of a `Q6_K` tile.
#[inline(always)]
pub(super) fn q6k_upper(word: usize) -> usize {
    q6k_scales(8 * (word / 8)) + 8 * TILE_ROWS + 2 * WORD * (word % 8)
}

/// The range of word 0..32 of the lower bits of a `Q6_K` tile.
#[inline(always)]
pub(super) fn q6k_lower(word: usize) -> usize {
    let words = q6k_upper(8 * (word / 16));
    words + if word % 16 < 8 { WORD + 2 * WORD * (word % 16) } else { WORD * (8 + word % 16) }
}

/// Bytes of 128 columns of a `Q6_K` tile.
const Q6K_HALF: usize = 8 * TILE_ROWS + 24 * WORD;

/// The values of the columns of one tile in lane `lane`, the same f32 as those of the file's block.
pub(super) fn unpack_tile(dtype: DType, tile: &[u8], lane: usize, out: &mut [f32]) {
    let half_at = |at: usize| f16::from_le_bytes([tile[at + 2 * lane], tile[at + 2 * lane + 1]]).to_f32();
    // Byte `index` of this lane's words from `at`.
    let byte_at = |at: usize, index: usize| tile[at + index / 4 * WORD + 4 * lane + index % 4];
    let nibble_at = |at: usize, col: usize| byte_at(at, col % 16) >> (4 * (col / 16)) & 15;
    let fifth_at = |at: usize, col: usize| (byte_at(at, col % 4) >> (col / 4) & 1) << 4;
    match dtype {
        DType::F32 => {
            let bits = std::array::from_fn(|index| tile[4 * lane + index]);
            out[0] = f32::from_le_bytes(bits);
        }
        DType::F16 => out[0] = half_at(0),
        DType::BF16 => {
            for (index, value) in out.iter_mut().enumerate() {
                let at = 4 * lane + 2 * index;
                *value = bf16::from_le_bytes([tile[at], tile[at + 1]]).to_f32();
            }
        }
        DType::Q4_0 => {
            let scale = half_at(0);
            fill(out, |col| scale * (f32::from(nibble_at(SCALES, col)) - 8.0));
        }
        DType::Q4_1 => {
            let (scale, minimum) = (half_at(0), half_at(SCALES));
            fill(out, |col| scale * f32::from(nibble_at(2 * SCALES, col)) + minimum);
        }
        DType::Q5_0 => {
            let scale = half_at(0);
            fill(out, |col| {
                let code = nibble_at(SCALES + WORD, col) | fifth_at(SCALES, col);
                scale * (f32::from(code) - 16.0)
            });
        }
        DType::Q5_1 => {
            let (scale, minimum) = (half_at(0), half_at(SCALES));
            fill(out, |col| {
                let code = nibble_at(2 * SCALES + WORD, col) | fifth_at(2 * SCALES, col);
                scale * f32::from(code) + minimum
            });
        }
        DType::Q8_0 => {
            let scale = half_at(0);
            fill(out, |col| scale * f32::from(byte_at(SCALES, col) as i8));
        }
        DType::Iq4Nl => {
            let scale = half_at(0);
            fill(out, |col| scale * f32::from(IQ4_VALUES[usize::from(nibble_at(SCALES, col))]));
        }
        DType::Mxfp4 => {
            let scale = mxfp4_scale(tile[lane] ^ 0x80);
            fill(out, |col| scale * f32::from(MXFP4_VALUES[usize::from(nibble_at(TILE_ROWS, col))]));
        }
        DType::Q4K | DType::Q5K => {
            let scales: [u8; 12] = std::array::from_fn(|index| byte_at(2 * SCALES, index));
            let (scale, minimum) = (half_at(0), half_at(SCALES));
            fill(out, |col| {
                let (block, index) = (col / 32, col % 32);
                let (block_scale, block_minimum) = six_bit_scales(&scales, block);
                let word = 8 * (block / 2) + index / 4;
                let at = if dtype == DType::Q4K { K_CODES + WORD * word } else { q5k_nibbles(word) };
                let mut code = byte_at(at, index % 4) >> (4 * (block % 2)) & 15;
                if dtype == DType::Q5K {
                    code |= (byte_at(q5k_fifth(index / 4), index % 4) >> block & 1) << 4;
                }
                scale * f32::from(block_scale) * f32::from(code) - minimum * f32::from(block_minimum)
            });
        }
        DType::Q6K => {
            let scale = half_at(0);
            fill(out, |col| {
                let (half, quarter, index) = (col / 128, col / 32 % 4, col % 32);
                let word = 16 * half + 8 * (quarter % 2) + index / 4;
                let lower = byte_at(q6k_lower(word), index % 4) >> (4 * (quarter / 2)) & 15;
                let upper = byte_at(q6k_upper(8 * half + index / 4), index % 4) >> (2 * quarter) & 3;
                let block_scale = tile[q6k_scales(col / 16) + lane] as i8;
                scale * f32::from(block_scale) * (f32::from(lower | upper << 4) - 32.0)
            });
        }
        DType::Q2K => {
            let (scale, minimum) = (half_at(0), half_at(SCALES));
            fill(out, |col| {
                let (half, quarter, index) = (col / 128, col / 32 % 4, col % 32);
                let both = byte_at(2 * SCALES, col / 16);
                let code = byte_at(Q2K_CODES, 32 * half + index) >> (2 * quarter) & 3;
                scale * f32::from(both & 15) * f32::from(code) - minimum * f32::from(both >> 4)
            });
        }
        DType::Q3K => {
            let scales: [u8; 12] = std::array::from_fn(|index| byte_at(SCALES, index));
            let (scale, scales) = (half_at(0), signed_six_bit_scales(&scales));
            fill(out, |col| {
                let (half, quarter, index) = (col / 128, col / 32 % 4, col % 32);
                let upper = byte_at(Q3K_UPPER, index) >> (col / 32) & 1;
                let lower = byte_at(Q3K_LOWER, 32 * half + index) >> (2 * quarter) & 3;
                scale * f32::from(scales[col / 16]) * (f32::from(lower | upper << 2) - 4.0)
            });
        }
        DType::Iq4Xs => {
            let upper = u16::from_le_bytes([tile[SCALES + 2 * lane], tile[SCALES + 2 * lane + 1]]);
            let scale = half_at(0);
            fill(out, |col| {
                let block = col / 32;
                let lower = byte_at(2 * SCALES, block % 4) >> (4 * (block / 4)) & 15;
                let upper = upper >> (4 * [0, 2, 1, 3][block % 4] + 2 * (block / 4)) & 3;
                let block_scale = f32::from(lower | (upper << 4) as u8) - 32.0;
                let code = nibble_at(IQ4_XS_CODES + 4 * WORD * block, col % 32);
                scale * block_scale * f32::from(IQ4_VALUES[usize::from(code)])
            });
        }
        DType::Q8S => {
            let scale = half_at(0) * 0.125;
            fill(out, |col| {
                let block_scale = tile[q8s_scales(col / 16) + lane] as i8;
                let code = byte_at(q8s_codes(col / 32), col % 32) as i8;
                scale * f32::from(block_scale) * f32::from(code)
            });
        }
    }
}

/// The 6-bit scale and minimum of sub-block `block` of a `Q4_K` or `Q5_K` block.
fn six_bit_scales(packed: &[u8; 12], block: usize) -> (u8, u8) {
    if block < 4 {
        (packed[block] & 63, packed[block + 4] & 63)
    } else {
        (
            packed[block + 4] & 15 | (packed[block - 4] >> 6) << 4,
            packed[block + 4] >> 4 | (packed[block] >> 6) << 4,
        )
    }
}

/// Bit 4·g + j becomes bit g of byte j: then one shift moves the bits of word g to their bytes.
fn transpose_bits(bits: u32) -> u32 {
    (0..32).fold(0, |sum, col| sum | (bits >> col & 1) << (8 * (col % 4) + col / 4))
}

fn pack_blocks<const BLOCK: usize, const TILE: usize>(
    row: &[u8],
    tiles: &mut [u8],
    pack: impl Fn(&[u8; BLOCK], &mut [u8; TILE]),
) {
    for (block, tile) in row.as_chunks::<BLOCK>().0.iter().zip(tiles.as_chunks_mut::<TILE>().0) {
        pack(block, tile);
    }
}

fn last_tile<const TILE: usize>(tiles: &mut [u8]) -> Option<&mut [u8; TILE]> {
    tiles.as_chunks_mut::<TILE>().0.last_mut()
}

#[inline(always)]
fn put<const TILE: usize>(tile: &mut [u8; TILE], at: usize, bytes: &[u8]) {
    tile[at..at + bytes.len()].copy_from_slice(bytes);
}

#[inline(always)]
fn put_words<const TILE: usize>(tile: &mut [u8; TILE], at: usize, lane: usize, bytes: &[u8]) {
    for (index, word) in bytes.as_chunks::<4>().0.iter().enumerate() {
        put(tile, at + WORD * index + 4 * lane, word);
    }
}

fn fill(out: &mut [f32], value: impl Fn(usize) -> f32) {
    for (col, out) in out.iter_mut().enumerate() {
        *out = value(col);
    }
}
