//! The layout of weights in the memory of a GPU with tensor cores: writes what `cuda/kernels/fragments.h` reads.
//!
//! A tile is eight rows by 64 columns of dense types, 128 of others, padded with zeros. Lane 4 · g + t of 32 has a
//! fragment of row g: for dense types sixteen neighbours from column 16 · t on, for others eight of each of four blocks
//! of 32, from column 8 · t on. The tiles of eight rows are in sequence in each plane:
//!
//! | plane | bytes | of each |
//! |---|---|---|
//! | codes | 16, twice for dense types and 8-bit codes | lane, after all lanes' first 16 bytes their second ones: nibbles in order, a word for each block, or bytes with 128 added, or weights as halves |
//! | codes of two and three bits | 8 | lane: two bits each, in the order of high bits |
//! | high bits | 4 for codes of three and five bits, 8 for 6-bit codes | lane: those of a block's first four codes in the lower half of a word, of the other four in the upper half |
//! | scales | 8 or 16 | row of a tile: f16 scales of four blocks, or f16 scale and f16 minimum of each |
//! | scales of `Q3_K`, `Q6_K`, `Q8_S` | 8 | half of the lanes of a row: f16 scales of its columns of four blocks |
//! | scales of `Q2_K` | 8 | half of the lanes of a row: for each of four blocks a byte, the scale below the minimum; f16 scale and f16 minimum of these, the latter negative |
//!
//! Scales of super-blocks are multiplied by those of their blocks, and rounded to f16, as the kernels would do. This
//! takes half a bit more per weight, and saves the kernels a third of their instructions. For `Q2_K` it would double
//! the size, so its scales stay. A power of two of `MXFP4` above 2^12 or below 2^-24 as a scale becomes the nearest one
//! that a half represents.

use half::f16;

use super::layout::low_bits;
use super::unpack::unpack_block;
use crate::weights::DType;

/// Rows of a tile.
pub(in crate::ops::gpu) const TILE_ROWS: usize = 8;

const LANES: usize = 32;

/// The bytes of a lane for a type.
#[derive(Debug, Clone, Copy)]
struct FragmentLayout {
    /// Columns of a tile.
    columns: usize,
    /// Bytes of codes that a lane has.
    codes: usize,
    /// Bytes of a lane's high bits.
    high: usize,
    /// Bytes of a lane's scales, and the number of lanes of a row that share them.
    scales: (usize, usize),
}

impl FragmentLayout {
    fn of(dtype: DType) -> Self {
        let fragment = |codes, high, scales| Self { columns: 128, codes, high, scales: (scales, 4) };
        let of_halves = |codes, high| Self { scales: (8, 2), ..fragment(codes, high, 0) };
        match dtype {
            // In single precision there are no tiles.
            DType::F32 | DType::F16 | DType::BF16 => Self { columns: 64, ..fragment(32, 0, 0) },
            DType::Q4_0 | DType::Iq4Nl | DType::Iq4Xs | DType::Mxfp4 => fragment(16, 0, 8),
            DType::Q4_1 | DType::Q4K => fragment(16, 0, 16),
            DType::Q5_0 => fragment(16, 4, 8),
            DType::Q5_1 | DType::Q5K => fragment(16, 4, 16),
            DType::Q8_0 => fragment(32, 0, 8),
            DType::Q2K => of_halves(8, 0),
            DType::Q3K => of_halves(8, 4),
            DType::Q6K => of_halves(16, 8),
            DType::Q8S => of_halves(32, 0),
        }
    }
}

/// Columns of a tile.
pub(in crate::ops::gpu) fn tile_columns(dtype: DType) -> usize {
    FragmentLayout::of(dtype).columns
}

/// The loads of a kernel's lanes.
#[derive(Debug, Clone, Copy)]
pub(in crate::ops::gpu) struct Lanes {
    /// Columns of a tile.
    pub(in crate::ops::gpu) columns: usize,
    /// Bytes of a row of a tile that a lane loads: codes, high bits and scales.
    pub(in crate::ops::gpu) bytes: usize,
}

impl Lanes {
    /// For matrices of `format`, and of `last` if the kernel has a second format: the maximum of both.
    pub(in crate::ops::gpu) fn of(format: DType, last: Option<DType>) -> Self {
        let one = |dtype: DType| {
            let FragmentLayout { columns, codes, high, scales: (scales, _) } = FragmentLayout::of(dtype);
            Self { columns, bytes: codes + high + scales }
        };
        let (first, last) = (one(format), one(last.unwrap_or(format)));
        Self { bytes: first.bytes.max(last.bytes), ..first }
    }
}

/// Bytes of eight rows in each plane. There are no super-scales.
pub(in crate::ops::gpu) fn row_of_tiles_bytes(dtype: DType, cols: usize) -> [usize; 4] {
    let FragmentLayout { columns, codes, high, scales: (scales, sharing) } = FragmentLayout::of(dtype);
    let num_tiles = cols.div_ceil(columns);
    [num_tiles * LANES * codes, num_tiles * LANES * high, num_tiles * LANES / sharing * scales, 0]
}

/// Packs whole rows of a file, from the first one of a tile on, to their ranges of the planes.
pub(in crate::ops::gpu) fn pack(dtype: DType, cols: usize, source: &[u8], planes: &mut [&mut [u8]; 4]) {
    let row_bytes = cols / dtype.block_len() * dtype.block_bytes();
    let are_whole =
        cols.is_multiple_of(tile_columns(dtype)) && source.len().is_multiple_of(TILE_ROWS * row_bytes);
    for (index, plane) in planes.iter_mut().enumerate() {
        // Sets bits one by one.
        if !are_whole || index == 1 || low_bits(dtype) == 2 {
            plane.fill(0);
        }
    }
    let of_tiles = row_of_tiles_bytes(dtype, cols);
    for (index, row) in source.chunks_exact(row_bytes).enumerate() {
        let of_row = planes
            .iter_mut()
            .zip(of_tiles)
            .map(|(plane, bytes)| &mut plane[index / TILE_ROWS * bytes..][..bytes]);
        let mut of_row = of_row.collect::<Vec<_>>();
        let g = index % TILE_ROWS;
        if dtype.block_len() == 1 {
            pack_dense(dtype, row, g, of_row[0]);
        } else {
            pack_row(dtype, row, g, &mut of_row);
        }
    }
}

/// Row `g` of tiles of a type of two bytes, in halves.
fn pack_dense(dtype: DType, row: &[u8], g: usize, codes: &mut [u8]) {
    for (index, part) in row.chunks(16).enumerate() {
        // Eight weights: a lane's fragment of a tile has two such groups, which are adjacent in the file.
        let (tile, t, word) = (index / 8, index / 2 % 4, index % 2);
        let begin = ((2 * tile + word) * LANES + 4 * g + t) * 16;
        let target = &mut codes[begin..][..part.len()];
        if dtype == DType::BF16 {
            for (target, bits) in target.as_chunks_mut::<2>().0.iter_mut().zip(part.as_chunks::<2>().0) {
                *target = half_of(u16::from_le_bytes(*bits)).to_le_bytes();
            }
        } else {
            target.copy_from_slice(part);
        }
    }
}

/// The half nearest to a bfloat, clamped to the largest one, with the rounding of the kernels. Values below 6.1e-5 lose
/// bits.
fn half_of(bits: u16) -> u16 {
    const LARGEST: f32 = 65504.0;
    const SMALLEST_NORMAL: f32 = 1.0 / 16384.0;
    let magnitude = f32::from_bits(u32::from(bits & 0x7fff) << 16);
    let is_nan = magnitude.is_nan();
    let magnitude = magnitude.min(LARGEST);
    // The mantissa's eight bits are kept exactly; below, the last bit of the sum is the smallest half.
    let normal = (magnitude.to_bits() >> 13).wrapping_sub((127 - 15) << 10);
    let subnormal = (magnitude + 0.5).to_bits() - 0.5_f32.to_bits();
    let half = if magnitude < SMALLEST_NORMAL { subnormal } else { normal };
    (bits & 0x8000) | if is_nan { 0x7e00 } else { half as u16 }
}

/// Row `g` of tiles, block by block of the file.
fn pack_row(dtype: DType, row: &[u8], g: usize, planes: &mut [&mut [u8]]) {
    let fragment = FragmentLayout::of(dtype);
    let block_len = dtype.block_len();
    let mut values = [0_u8; 256];
    // Of the file: several blocks of 32 weights, or one of 256.
    let mut file_scales = [0_u8; 16];
    let mut super_scales = [0_u8; 4];
    let (scale_bytes, super_scale_bytes) = match dtype {
        DType::Q4_0 | DType::Q5_0 | DType::Q8_0 | DType::Iq4Nl | DType::Mxfp4 => (2, 0),
        DType::Q4_1 | DType::Q5_1 => (4, 0),
        DType::Q3K | DType::Q6K | DType::Iq4Xs | DType::Q8S => (16, 2),
        DType::Q2K => (16, 4),
        _ => (16, 0),
    };
    // Of the tiles of a block.
    let mut scales = [0_u8; 32];
    let bytes = fragment.scales.0 * 4 / fragment.scales.1;
    for (index, block) in row.chunks_exact(dtype.block_bytes()).enumerate() {
        file_scales.fill(0);
        unpack_block(
            dtype,
            block,
            &mut values[..block_len],
            &mut file_scales[..scale_bytes],
            &mut super_scales[..super_scale_bytes],
        );
        match dtype {
            DType::Q4K | DType::Q5K => scales = combined_scales_with_minima(&file_scales),
            DType::Q3K | DType::Q6K => scales = combined_scales(&file_scales, super_scales, 1.0),
            DType::Q8S => scales = combined_scales(&file_scales, super_scales, 0.125),
            DType::Iq4Xs => scales = combined_block_scales(&file_scales, super_scales),
            DType::Q2K => scales = bytes_and_super_scales(&file_scales, super_scales),
            DType::Mxfp4 => scales[..2].copy_from_slice(&half_scale([file_scales[0], file_scales[1]])),
            _ => scales[..scale_bytes].copy_from_slice(&file_scales[..scale_bytes]),
        }
        if block_len == 32 {
            let begin = (index / 4 * TILE_ROWS + g) * bytes + index % 4 * scale_bytes;
            planes[2][begin..][..scale_bytes].copy_from_slice(&scales[..scale_bytes]);
        } else {
            for (part, scales) in scales[..2 * bytes].chunks_exact(bytes).enumerate() {
                let begin = ((2 * index + part) * TILE_ROWS + g) * bytes;
                planes[2][begin..][..bytes].copy_from_slice(scales);
            }
        }
        for (eight, codes) in values[..block_len].chunks_exact(8).enumerate() {
            let column = index * block_len + 8 * eight;
            let (tile, of_tile) = (column / 128, column / 32 % 4);
            let lane = tile * LANES + 4 * g + eight % 4;
            if low_bits(dtype) == 8 {
                let begin = ((2 * tile + of_tile / 2) * LANES + 4 * g + eight % 4) * 16 + of_tile % 2 * 8;
                planes[0][begin..][..8].copy_from_slice(codes);
                continue;
            }
            let own_codes = &mut planes[0][lane * fragment.codes..][..fragment.codes];
            if low_bits(dtype) == 2 {
                pack_bits(codes, 0, of_tile, own_codes);
            } else {
                let nibbles = codes.iter().rev().fold(0_u32, |word, code| word << 4 | u32::from(code & 15));
                own_codes[of_tile * 4..][..4].copy_from_slice(&nibbles.to_le_bytes());
            }
            if fragment.high > 0 {
                let own_high = &mut planes[1][lane * fragment.high..][..fragment.high];
                pack_bits(codes, low_bits(dtype), of_tile, own_high);
            }
        }
    }
}

/// Scale and minimum of each 32 weights of a super-block, from the layout of [`super::layout`], which subtracts minima.
fn combined_scales_with_minima(scales: &[u8; 16]) -> [u8; 32] {
    let half = |index: usize| f16::from_le_bytes([scales[index], scales[index + 1]]).to_f32();
    let (of_scales, of_minima) = (half(0), half(2));
    let mut combined = [0; 32];
    for (index, pair) in combined.as_chunks_mut::<4>().0.iter_mut().enumerate() {
        let (low, high) = (scales[4 + index], scales[12 + index / 2] >> (4 * (index % 2)));
        let (scale, minimum) = (low & 15 | (high & 3) << 4, low >> 4 | (high >> 2 & 3) << 4);
        let [a, b] = f16::from_f32(f32::from(scale) * of_scales).to_le_bytes();
        let [c, d] = f16::from_f32(-f32::from(minimum) * of_minima).to_le_bytes();
        *pair = [a, b, c, d];
    }
    combined
}

/// The scales of 16 weights each of a super-block: of each tile first those of the first 16 of each block.
fn combined_scales(scales: &[u8; 16], super_scales: [u8; 4], factor: f32) -> [u8; 32] {
    let mut combined = [0; 32];
    for (index, scale) in scales.iter().enumerate() {
        let combined_scale = combined_scale(*scale, super_scales, factor);
        combined[2 * index_of_scale(index)..][..2].copy_from_slice(&combined_scale);
    }
    combined
}

/// The same for blocks with one scale.
fn combined_block_scales(scales: &[u8; 16], super_scales: [u8; 4]) -> [u8; 32] {
    let mut combined = [0; 32];
    for (to, pair) in combined.as_chunks_mut::<2>().0.iter_mut().zip(scales.as_chunks::<2>().0) {
        *to = combined_scale(pair[0], super_scales, 1.0);
    }
    combined
}

fn combined_scale(scale: u8, super_scales: [u8; 4], factor: f32) -> [u8; 2] {
    let super_scale = f16::from_le_bytes([super_scales[0], super_scales[1]]).to_f32();
    f16::from_f32(f32::from(scale.cast_signed()) * super_scale * factor).to_le_bytes()
}

/// The index of the scale of sixteen columns in those of the two tiles of a super-block: each tile has first those of
/// the first sixteen columns of its four blocks.
fn index_of_scale(index: usize) -> usize {
    index / 8 * 8 + index % 2 * 4 + index / 2 % 4
}

/// Of both halves of both tiles, a byte for each block, then the factors of scales and minima.
fn bytes_and_super_scales(scales: &[u8; 16], super_scales: [u8; 4]) -> [u8; 32] {
    let mut bytes = [0; 32];
    for (index, scale) in scales.iter().enumerate() {
        let to = index_of_scale(index);
        bytes[to / 4 * 8 + to % 4] = *scale;
    }
    let [a, b, c, d] = super_scales;
    for tile in bytes.as_chunks_mut::<8>().0 {
        tile[4..].copy_from_slice(&[a, b, c, d ^ 0x80]);
    }
    bytes
}

/// A power of two from the upper half of a single: as a nonzero half with which every value is finite.
fn half_scale(upper: [u8; 2]) -> [u8; 2] {
    let scale = f32::from_bits(u32::from(u16::from_le_bytes(upper)) << 16);
    f16::from_f32(scale.clamp(1.0 / 16_777_216.0, 4096.0)).to_le_bytes()
}

/// Moves bits of eight codes of block `of_tile` from bit `first` on to those of their lane: one bit each in four bytes,
/// two in eight.
fn pack_bits(codes: &[u8], first: usize, of_tile: usize, lane: &mut [u8]) {
    let bits = lane.len() / 4;
    let blocks_of_a_word = 4 / bits;
    let word = &mut lane[of_tile / blocks_of_a_word * 4..][..4];
    let mut packed = u32::from_le_bytes([word[0], word[1], word[2], word[3]]);
    for (index, code) in codes.iter().enumerate() {
        let to = of_tile % blocks_of_a_word * 4 + index % 4;
        packed |= (u32::from(code >> first) & ((1 << bits) - 1)) << (to * bits + index / 4 * 16);
    }
    word.copy_from_slice(&packed.to_le_bytes());
}

#[cfg(test)]
mod tests {
    use super::super::layout::{Layout, Order};
    use super::*;
    use crate::ops::cpu::pool::ThreadPool;

    #[test]
    fn whole_tiles_have_the_files_bytes_and_space_for_combined_scales() {
        for dtype in DType::ALL {
            let layout = Layout::new(Order::Tiles, dtype, 8, 256);
            let in_file = 8 * 256 / dtype.block_len() * dtype.block_bytes();
            let extra = match dtype {
                DType::Q4K | DType::Q5K => 32 - 16,
                DType::Q6K | DType::Q8S => 32 - 18,
                DType::Q2K => 32 - 20,
                DType::Q3K => 32 - 14,
                DType::Iq4Xs | DType::Mxfp4 => 16 - 8,
                _ => 0,
            };
            let extra = 8 * extra;
            assert_eq!(layout.num_bytes(), in_file + extra, "{dtype}");
            let stack = Layout::of_stack(Order::Tiles, dtype, 3, 32, 5);
            let one = Layout::new(Order::Tiles, dtype, 3, 32);
            assert_eq!(stack.num_bytes(), 5 * one.num_bytes(), "{dtype}");
        }
    }

    #[test]
    fn bfloats_become_the_halves_that_are_next_to_them() {
        for bits in 0..=u16::MAX {
            let value = f32::from_bits(u32::from(bits) << 16);
            let half = f16::from_bits(half_of(bits));
            if value.is_nan() {
                assert!(half.is_nan());
                continue;
            }
            let expected = f16::from_f32(value.clamp(-65504.0, 65504.0));
            assert_eq!(half.to_bits(), expected.to_bits(), "{value:e}");
        }
    }

    /// A block of `Q8_0` among others in a row and tile: the indices of its first code, its last code and its scale.
    #[test]
    fn each_lane_has_eight_columns_of_each_block() {
        let (rows, cols) = (10, 160);
        let layout = Layout::new(Order::Tiles, DType::Q8_0, rows, cols);
        let mut source = vec![0x80_u8; rows * cols / 32 * 34];
        // Row 9, columns 128 to 159, which are the first block of the second tile.
        let block = &mut source[(9 * 5 + 4) * 34..][..34];
        block[..2].copy_from_slice(&[1, 2]);
        (block[2], block[33]) = (7 ^ 0x80, 9 ^ 0x80);
        let mut target = vec![0xEE; layout.num_bytes()];
        layout.pack(DType::Q8_0.into(), &source, &mut target, &ThreadPool::new(2)).unwrap();
        let nonzero: Vec<(usize, u8)> =
            target.iter().copied().enumerate().filter(|(_, byte)| ![0, 0x80].contains(byte)).collect();
        // The second row of tiles has two; in the second of them lanes 4 to 7 are row 9's.
        let tile = 3 * 2 * LANES * 16;
        let scales = 16 * layout.planes().scales() + (3 * TILE_ROWS + 1) * 8;
        assert_eq!(nonzero, [(tile + 4 * 16, 7), (tile + 7 * 16 + 7, 9), (scales, 1), (scales + 1, 2)]);
    }

    #[test]
    fn high_bits_are_where_pairs_of_codes_are_looked_for() {
        let mut lane = [0; 4];
        // Codes 0 and 4 of block 2 are a pair: bit 8 of each half.
        pack_bits(&[16, 0, 0, 0, 16, 0, 0, 0], 4, 2, &mut lane);
        assert_eq!(u32::from_le_bytes(lane), 1 << 8 | 1 << 24);
        let mut lane = [0; 8];
        // Codes 3 and 7 of block 3, two bits each: the last of the second word.
        pack_bits(&[0, 0, 0, 48, 0, 0, 0, 16], 4, 3, &mut lane);
        assert_eq!(lane[..4], [0; 4]);
        assert_eq!(u32::from_le_bytes(*lane.last_chunk().unwrap()), 3 << 14 | 1 << 30);
    }
}
