//! Types with super-blocks of 256 columns: how their tiles are taken apart.

use super::of_32::{Bytes, Iq4Codes, fifth_bits};
use super::{Codes, Quantized, Visitor};
use crate::matmul::kernels::prefetch;
use crate::matmul::layout::{
    IQ4_XS_CODES, K_CODES, Q2K_CODES, Q3K_LOWER, Q3K_UPPER, SCALES, TILE_ROWS, WORD, q5k_fifth, q5k_nibbles,
    q6k_lower, q6k_scales, q6k_upper, q8s_codes, q8s_scales,
};
use crate::simd::F32x16;

/// Eight words of nibbles that two sub-blocks share; the odd one has the high nibbles.
#[derive(Clone, Copy)]
struct SharedNibbles<const ODD: bool>(*const u8);

impl<V: F32x16, const ODD: bool> Codes<V> for SharedNibbles<ODD> {
    const OFFSET: i32 = 0;

    #[inline(always)]
    unsafe fn word(self, word: usize) -> V::Codes {
        // SAFETY: the caller guarantees eight words.
        let codes = unsafe { V::load_codes(self.0.add(WORD * word)) };
        V::and(if ODD { V::shift_right(codes, 4) } else { codes }, 15)
    }
}

/// The codes of sub-block `BLOCK` of a `Q5_K` tile.
#[derive(Clone, Copy)]
struct FiveBitsOf<const BLOCK: usize>(*const u8);

impl<V: F32x16, const BLOCK: usize> Codes<V> for FiveBitsOf<BLOCK> {
    const OFFSET: i32 = 0;

    #[inline(always)]
    unsafe fn word(self, word: usize) -> V::Codes {
        // SAFETY: the caller guarantees the tile.
        let (nibbles, fifth) = unsafe {
            (
                V::load_codes(self.0.add(q5k_nibbles(8 * (BLOCK / 2) + word))),
                V::load_codes(self.0.add(q5k_fifth(word))),
            )
        };
        let nibbles = if BLOCK % 2 == 1 { V::shift_right(nibbles, 4) } else { nibbles };
        V::or(V::and(nibbles, 15), fifth_bits::<V>(fifth, BLOCK))
    }
}

/// The codes of 32 columns of a `Q6_K` tile: quarter `QUARTER` of half `half`.
#[derive(Clone, Copy)]
struct SixBits<const QUARTER: usize> {
    tile: *const u8,
    half: usize,
}

impl<V: F32x16, const QUARTER: usize> Codes<V> for SixBits<QUARTER> {
    const OFFSET: i32 = 32;

    #[inline(always)]
    unsafe fn word(self, word: usize) -> V::Codes {
        // SAFETY: the caller guarantees the tile.
        let (lower, upper) = unsafe {
            (
                V::load_codes(self.tile.add(q6k_lower(16 * self.half + 8 * (QUARTER % 2) + word))),
                V::load_codes(self.tile.add(q6k_upper(8 * self.half + word))),
            )
        };
        let lower = if QUARTER < 2 { lower } else { V::shift_right(lower, 4) };
        let upper = match QUARTER {
            0 => V::shift_left(upper, 4),
            1 => V::shift_left(upper, 2),
            2 => upper,
            _ => V::shift_right(upper, 2),
        };
        V::or(V::and(lower, 15), V::and(upper, 0x30))
    }
}

/// Two bits of a word for each of four blocks of 32 columns: those from bit `shift` of each byte.
#[derive(Clone, Copy)]
struct TwoBits {
    words: *const u8,
    shift: u32,
}

impl<V: F32x16> Codes<V> for TwoBits {
    const OFFSET: i32 = 0;

    #[inline(always)]
    unsafe fn word(self, word: usize) -> V::Codes {
        // SAFETY: the caller guarantees eight words.
        let codes = unsafe { V::load_codes(self.words.add(WORD * word)) };
        V::and(V::shift_right(codes, self.shift), 3)
    }
}

/// The codes of block `block` of a `Q3_K` tile.
#[derive(Clone, Copy)]
struct ThreeBits {
    tile: *const u8,
    block: usize,
}

impl<V: F32x16> Codes<V> for ThreeBits {
    const OFFSET: i32 = 4;

    #[inline(always)]
    unsafe fn word(self, word: usize) -> V::Codes {
        let Self { tile, block } = self;
        // SAFETY: the caller guarantees the tile.
        let (lower, upper) = unsafe {
            (
                V::load_codes(tile.add(Q3K_LOWER + WORD * (8 * (block / 4) + word))),
                V::load_codes(tile.add(Q3K_UPPER + WORD * word)),
            )
        };
        let lower = V::and(V::shift_right(lower, 2 * (block % 4) as u32), 3);
        let upper = V::and(V::shift_right(upper, block as u32), 1);
        V::or(lower, V::shift_left(upper, 2))
    }
}

/// The 6-bit scales and minima of four sub-blocks of a `Q4_K` or `Q5_K` tile.
struct SixBitScales<V: F32x16> {
    scale: V,
    minimum: V,
    /// Byte j of a row's word is that of sub-block j.
    scales: V::Codes,
    minima: V::Codes,
}

impl<V: F32x16> SixBitScales<V> {
    /// Those of sub-blocks 0..4 or 4..8.
    #[inline(always)]
    unsafe fn load<const HALF: usize>(tile: *const u8) -> Self {
        // SAFETY: the caller guarantees a tile of `Q4_K` or `Q5_K`.
        unsafe {
            let words = tile.add(2 * SCALES);
            let (first, second) = (V::load_codes(words), V::load_codes(words.add(WORD)));
            let (scales, minima) = if HALF == 0 {
                (V::and(first, 63), V::and(second, 63))
            } else {
                let third = V::load_codes(words.add(2 * WORD));
                (
                    V::or(V::and(third, 15), V::and(V::shift_right(first, 2), 0x30)),
                    V::or(V::and(V::shift_right(third, 4), 15), V::and(V::shift_right(second, 2), 0x30)),
                )
            };
            let minimum = V::splat(0.0).sub(V::load_f16(tile.add(SCALES).cast()));
            Self { scale: V::load_f16(tile.cast()), minimum, scales, minima }
        }
    }

    /// Gives `visitor` block `HALF` · 4 + `block` of the tile, sub-block `block` of these four.
    #[inline(always)]
    unsafe fn visit<C: Codes<V>, const HALF: usize>(
        &self,
        block: usize,
        codes: C,
        visitor: &mut impl Visitor<V>,
    ) {
        let scales = V::lowest_byte(V::shift_right(self.scales, 8 * block as u32));
        let minima = V::lowest_byte(V::shift_right(self.minima, 8 * block as u32));
        let (scales, minima) = (self.scale.mul(scales), self.minimum.mul(minima));
        // SAFETY: the caller's tile.
        unsafe { visitor.with_minima(4 * HALF + block, codes, scales, minima) }
    }
}

/// Prefetches later bytes for one of the eight sub-blocks of a tile: spread over the tile, so that the machine's queue
/// of misses never overflows.
#[inline(always)]
unsafe fn prefetch_eighth<Q: Quantized>(tile: *const u8, block: usize) {
    // SAFETY: the caller's tile.
    prefetch(unsafe { tile.add(Q::BYTES / 8 * block) }, Q::BYTES / 8);
}

/// Words of several sub-blocks are read again for each of them, from the cache: kept in registers, they would spill the
/// sums. The compiler would keep them, so the address is hidden from it.
#[inline(always)]
fn afresh(words: *const u8) -> *const u8 {
    std::hint::black_box(words)
}

pub(in crate::matmul) struct Q4K;

impl Quantized for Q4K {
    const BYTES: usize = 2304;
    const NUM_BLOCKS: usize = 8;

    #[inline(always)]
    unsafe fn visit<V: F32x16>(tile: *const u8, visitor: &mut impl Visitor<V>) {
        // SAFETY: the layout of the tile.
        unsafe {
            visit_q4k_half::<V, 0>(tile, visitor);
            visit_q4k_half::<V, 1>(tile, visitor);
        }
    }
}

/// Half a tile of `Q4_K`.
#[inline(always)]
unsafe fn visit_q4k_half<V: F32x16, const HALF: usize>(tile: *const u8, visitor: &mut impl Visitor<V>) {
    // SAFETY: the layout of the tile.
    unsafe {
        let scales = SixBitScales::<V>::load::<HALF>(tile);
        for pair in 0..2 {
            let nibbles = tile.add(K_CODES + WORD * (16 * HALF + 8 * pair));
            prefetch_eighth::<Q4K>(tile, 4 * HALF + 2 * pair);
            scales.visit::<_, HALF>(2 * pair, SharedNibbles::<false>(afresh(nibbles)), visitor);
            prefetch_eighth::<Q4K>(tile, 4 * HALF + 2 * pair + 1);
            scales.visit::<_, HALF>(2 * pair + 1, SharedNibbles::<true>(afresh(nibbles)), visitor);
        }
    }
}

pub(in crate::matmul) struct Q5K;

impl Quantized for Q5K {
    const BYTES: usize = 2816;
    const NUM_BLOCKS: usize = 8;

    #[inline(always)]
    unsafe fn visit<V: F32x16>(tile: *const u8, visitor: &mut impl Visitor<V>) {
        // SAFETY: the layout of the tile.
        unsafe {
            let scales = SixBitScales::<V>::load::<0>(tile);
            visit_q5k_pair::<V, 0, 1, 0>(tile, &scales, visitor);
            visit_q5k_pair::<V, 2, 3, 0>(tile, &scales, visitor);
            let scales = SixBitScales::<V>::load::<1>(tile);
            visit_q5k_pair::<V, 4, 5, 1>(tile, &scales, visitor);
            visit_q5k_pair::<V, 6, 7, 1>(tile, &scales, visitor);
        }
    }
}

/// Two sub-blocks of a `Q5_K` tile that share their words of nibbles.
#[inline(always)]
unsafe fn visit_q5k_pair<V: F32x16, const EVEN: usize, const ODD: usize, const HALF: usize>(
    tile: *const u8,
    scales: &SixBitScales<V>,
    visitor: &mut impl Visitor<V>,
) {
    // SAFETY: the layout of the tile.
    unsafe {
        prefetch_eighth::<Q5K>(tile, EVEN);
        scales.visit::<_, HALF>(EVEN % 4, FiveBitsOf::<EVEN>(afresh(tile)), visitor);
        prefetch_eighth::<Q5K>(tile, ODD);
        scales.visit::<_, HALF>(ODD % 4, FiveBitsOf::<ODD>(afresh(tile)), visitor);
    }
}

pub(in crate::matmul) struct Q6K;

impl Quantized for Q6K {
    const BYTES: usize = 3360;
    const NUM_BLOCKS: usize = 8;

    #[inline(always)]
    unsafe fn visit<V: F32x16>(tile: *const u8, visitor: &mut impl Visitor<V>) {
        for half in 0..2 {
            // SAFETY: the layout of the tile.
            unsafe {
                visit_q6k_block::<V, 0>(tile, half, visitor);
                visit_q6k_block::<V, 1>(tile, half, visitor);
                visit_q6k_block::<V, 2>(tile, half, visitor);
                visit_q6k_block::<V, 3>(tile, half, visitor);
            }
        }
    }
}

/// 32 columns of a `Q6_K` tile, whose halves have scales of their own.
#[inline(always)]
unsafe fn visit_q6k_block<V: F32x16, const QUARTER: usize>(
    tile: *const u8,
    half: usize,
    visitor: &mut impl Visitor<V>,
) {
    // SAFETY: the caller's tile.
    unsafe {
        let block = 4 * half + QUARTER;
        prefetch_eighth::<Q6K>(tile, block);
        let codes = SixBits::<QUARTER> { tile: afresh(tile), half };
        let scale = V::load_f16(tile.cast());
        let scales = tile.add(q6k_scales(2 * block)).cast::<i8>();
        let first_scale = scale.mul(V::load_i8(scales));
        let second_scale = scale.mul(V::load_i8(scales.add(TILE_ROWS)));
        visitor.in_halves(block, codes, [first_scale, second_scale]);
    }
}

pub(in crate::matmul) struct Q8S;

impl Quantized for Q8S {
    const BYTES: usize = 4384;
    const NUM_BLOCKS: usize = 8;

    #[inline(always)]
    unsafe fn visit<V: F32x16>(tile: *const u8, visitor: &mut impl Visitor<V>) {
        for block in 0..8 {
            // SAFETY: the layout of the tile.
            unsafe {
                prefetch_eighth::<Self>(tile, block);
                // Scales are in eighths.
                let scale = V::load_f16(tile.cast()).mul(V::splat(0.125));
                let scales = [0, 1].map(|half: usize| tile.add(q8s_scales(2 * block + half)).cast::<i8>());
                let scales = [scale.mul(V::load_i8(scales[0])), scale.mul(V::load_i8(scales[1]))];
                visitor.in_halves(block, Bytes(tile.add(q8s_codes(block))), scales);
            }
        }
    }
}

pub(in crate::matmul) struct Iq4Xs;

impl Quantized for Iq4Xs {
    const BYTES: usize = 2176;
    const NUM_BLOCKS: usize = 8;

    #[inline(always)]
    unsafe fn visit<V: F32x16>(tile: *const u8, visitor: &mut impl Visitor<V>) {
        for block in 0..8 {
            // SAFETY: the layout of the tile.
            unsafe {
                prefetch_eighth::<Self>(tile, block);
                let scale = V::load_f16(tile.cast());
                let half = (block / 4) as u32;
                let upper = V::load_u16(tile.add(SCALES).cast());
                // The high nibbles of the bytes; the low bits are masked.
                let upper = V::or(V::shift_left(upper, 4), V::shift_left(upper, 16));
                let upper = V::and(V::shift_right(upper, 2 * half), 0x30);
                let lower = V::load_codes(tile.add(2 * SCALES));
                let lower = V::and(V::shift_right(lower, 4 * half), 15);
                let scale = signed_scale(scale, V::or(lower, upper), block % 4);
                visitor.scaled(block, Iq4Codes(tile.add(IQ4_XS_CODES + 4 * WORD * block)), scale);
            }
        }
    }
}

/// `scale` times byte `index` of each lane of `scales`, less 32.
#[inline(always)]
fn signed_scale<V: F32x16>(scale: V, scales: V::Codes, index: usize) -> V {
    let byte = V::lowest_byte(V::shift_right(scales, 8 * index as u32));
    scale.mul(byte.sub(V::splat(32.0)))
}

pub(in crate::matmul) struct Q3K;

impl Quantized for Q3K {
    const BYTES: usize = 1760;
    const NUM_BLOCKS: usize = 8;

    #[inline(always)]
    unsafe fn visit<V: F32x16>(tile: *const u8, visitor: &mut impl Visitor<V>) {
        for block in 0..8 {
            // SAFETY: the layout of the tile.
            unsafe {
                prefetch_eighth::<Self>(tile, block);
                let scale = V::load_f16(tile.cast());
                // Two blocks have their scales in a word of nibbles and bits of the last word.
                let lower = V::load_codes(tile.add(SCALES + WORD * (block / 2 % 2)));
                let lower = V::and(V::shift_right(lower, 4 * (block / 4) as u32), 15);
                let upper = V::load_codes(tile.add(SCALES + 2 * WORD));
                let upper = V::and(V::shift_right(upper, 2 * (block / 2) as u32), 3);
                let scales = V::or(lower, V::shift_left(upper, 4));
                let first = 2 * (block % 2);
                let factors = [signed_scale(scale, scales, first), signed_scale(scale, scales, first + 1)];
                visitor.in_halves(block, ThreeBits { tile: afresh(tile), block }, factors);
            }
        }
    }
}

pub(in crate::matmul) struct Q2K;

impl Quantized for Q2K {
    const BYTES: usize = 1344;
    const NUM_BLOCKS: usize = 8;

    #[inline(always)]
    unsafe fn visit<V: F32x16>(tile: *const u8, visitor: &mut impl Visitor<V>) {
        for block in 0..8 {
            // SAFETY: the layout of the tile.
            unsafe {
                prefetch_eighth::<Self>(tile, block);
                let scale = V::load_f16(tile.cast());
                let minimum = V::splat(0.0).sub(V::load_f16(tile.add(SCALES).cast()));
                // Two blocks have their scales and minima in a word.
                let both = V::load_codes(tile.add(2 * SCALES + WORD * (block / 2)));
                let (scales, minima) = (V::and(both, 15), V::and(V::shift_right(both, 4), 15));
                let first = 2 * (block % 2);
                let codes = tile.add(Q2K_CODES + 8 * WORD * (block / 4));
                let codes = TwoBits { words: afresh(codes), shift: 2 * (block % 4) as u32 };
                let (scales, minima) =
                    (scaled_pair(scale, scales, first), scaled_pair(minimum, minima, first));
                visitor.in_halves_with_minima(block, codes, scales, minima);
            }
        }
    }
}

/// `factor` times byte `first` of each lane, and the byte after it.
#[inline(always)]
fn scaled_pair<V: F32x16>(factor: V, bytes: V::Codes, first: usize) -> [V; 2] {
    let shift = 8 * first as u32;
    [
        factor.mul(V::lowest_byte(V::shift_right(bytes, shift))),
        factor.mul(V::lowest_byte(V::shift_right(bytes, shift + 8))),
    ]
}
