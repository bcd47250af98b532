//! Products of quantised tiles with int8 panels.
//!
//! Integer sums are of 32 columns (16 for `Q6_K`) and exact; they are scaled and enter the f32 sum in the
//! order of the columns. Where codes have an offset, the integer sum starts at minus offset · sum of
//! activations; minima enter as minimum · scale · sum of activations.
//!
//! How a tile is taken apart stands here once, for everybody who multiplies: a type gives its blocks of 32
//! columns to a [`Visitor`]. The one in this file multiplies them with vectors; [`super::tiles`] has another.
//!
//! Whatever a kernel calls is a function with `inline(always)`, never a closure: code that is not inlined
//! is not compiled for the kernel's instruction set.

use super::activations::{BLOCK, BLOCK_BYTES, VECTOR_PANEL};
use super::kernels::{Format, prefetch};
use super::layout::{
    K_CODES, SCALES, TILE_ROWS, WORD, q5k_fifth, q5k_nibbles, q6k_lower, q6k_scales, q6k_upper,
};
use crate::simd::F32x16;

/// A quantised type.
pub(super) trait Quantized {
    /// Bytes of a tile.
    const BYTES: usize;
    /// Blocks of 32 columns in a tile.
    const NUM_BLOCKS: usize;

    /// Gives `visitor` the blocks of a tile in the order of the columns, and fetches the bytes that come later.
    ///
    /// # Safety
    /// `tile` has `BYTES` bytes, and the visitor takes `NUM_BLOCKS` blocks.
    unsafe fn visit<V: F32x16>(tile: *const u8, visitor: &mut impl Visitor<V>);
}

/// What happens to the blocks of a tile: each comes with its number in the tile, its codes and the factors of the
/// sixteen rows. A type uses one of the methods for all of its blocks.
pub(super) trait Visitor<V: F32x16> {
    /// value = scale · code.
    ///
    /// # Safety
    /// The codes are those of a tile, and the block is one of those that the visitor takes.
    unsafe fn scaled<C: Codes<V>>(&mut self, block: usize, codes: C, scales: V);
    /// value = scale · code + minimum.
    ///
    /// # Safety
    /// As for `scaled`.
    unsafe fn with_minima<C: Codes<V>>(&mut self, block: usize, codes: C, scales: V, minima: V);
    /// value = scale · code, with a scale for the first sixteen columns and one for the others.
    ///
    /// # Safety
    /// As for `scaled`.
    unsafe fn in_halves<C: Codes<V>>(&mut self, block: usize, codes: C, scales: [V; 2]);
}

/// One block of a panel of P rows.
#[derive(Clone, Copy)]
pub(super) struct PanelBlock<const P: usize>(pub(super) *const u8);

impl<const P: usize> PanelBlock<P> {
    /// # Safety
    /// The panel goes on for `blocks` blocks.
    #[inline(always)]
    pub(super) unsafe fn skip(self, blocks: usize) -> Self {
        // SAFETY: the caller guarantees it.
        Self(unsafe { self.0.add(blocks * P * BLOCK_BYTES) })
    }

    /// The four codes of word `word`.
    #[inline(always)]
    pub(super) unsafe fn codes(self, row: usize, word: usize) -> *const i8 {
        // SAFETY: rows below P and words below 8 are in the block.
        unsafe { self.0.add(BLOCK * row + 4 * word).cast() }
    }

    /// Value `row` of array `array` of the four arrays that follow the codes.
    #[inline(always)]
    unsafe fn float(self, array: usize, row: usize) -> f32 {
        // SAFETY: rows below P are in the block.
        unsafe { self.0.add(BLOCK * P).cast::<f32>().add(array * P + row).read() }
    }

    #[inline(always)]
    pub(super) unsafe fn scale(self, row: usize) -> f32 {
        // SAFETY: as for `float`.
        unsafe { self.float(0, row) }
    }

    /// Scale × sum of the codes.
    #[inline(always)]
    pub(super) unsafe fn scaled_sum(self, row: usize) -> f32 {
        // SAFETY: as for `float`.
        unsafe { self.float(1, row) }
    }

    /// Sum of the codes of all eight words, or of the four from `first_word`.
    #[inline(always)]
    unsafe fn sum(self, row: usize, first_word: usize, num_words: usize) -> i32 {
        // SAFETY: as for `float`; the arrays hold i32.
        let (all, first) = unsafe { (self.float(2, row).to_bits(), self.float(3, row).to_bits()) };
        match (num_words, first_word) {
            (8, _) => all as i32,
            (_, 0) => first as i32,
            _ => all as i32 - first as i32,
        }
    }
}

/// The codes of a block, word by word.
pub(super) trait Codes<V: F32x16>: Copy {
    /// What the codes, as `dot` takes them, are above the values that they stand for.
    const OFFSET: i32;
    /// The same for the bytes of `word`.
    const WORD_OFFSET: u8 = Self::OFFSET as u8;

    /// Word `word` of all sixteen rows.
    ///
    /// # Safety
    /// The tile has the layout that the implementation is for.
    unsafe fn word(self, word: usize) -> V::Codes;

    /// Adds the products of a word.
    ///
    /// # Safety
    /// There are four activations.
    #[inline(always)]
    unsafe fn dot(sums: V::Sums, codes: V::Codes, activations: *const i8) -> V::Sums {
        // SAFETY: the caller guarantees it.
        unsafe { V::dot(sums, codes, activations) }
    }

    /// Adds the products of two words with two rows.
    ///
    /// # Safety
    /// There are eight activations at both pointers.
    #[inline(always)]
    unsafe fn dot_pair(
        sums: V::PairSums,
        codes: [V::Codes; 2],
        first: *const i8,
        second: *const i8,
    ) -> V::PairSums {
        // SAFETY: the caller guarantees it.
        unsafe { V::dot_pair(sums, codes, first, second) }
    }
}

/// Σ value · activation over `WORDS` words from `first_word`, before any scale.
#[inline(always)]
unsafe fn dots<V: F32x16, C: Codes<V>, const P: usize, const WORDS: usize>(
    codes: C,
    panel: PanelBlock<P>,
    first_word: usize,
) -> [V::Sums; P] {
    let mut sums = [V::splat_sum(0); P];
    let mut starts = [0; P];
    if C::OFFSET != 0 {
        for (row, start) in starts.iter_mut().enumerate() {
            // SAFETY: the row is in the panel.
            *start = -C::OFFSET * unsafe { panel.sum(row, first_word, WORDS) };
        }
    }
    if P == 1 {
        sums[0] = V::splat_sum(starts[0]);
        for word in first_word..first_word + WORDS {
            // SAFETY: a block has eight words, and a panel a first row.
            sums[0] = unsafe { C::dot(sums[0], codes.word(word), panel.codes(0, word)) };
        }
        return sums;
    }
    let mut pairs = [V::splat_pair(0, 0); VECTOR_PANEL / 2];
    for (starts, pair) in starts.as_chunks::<2>().0.iter().zip(&mut pairs) {
        *pair = V::splat_pair(starts[0], starts[1]);
    }
    for word in (first_word..first_word + WORDS).step_by(2) {
        // SAFETY: a block has eight words.
        let codes = unsafe { [codes.word(word), codes.word(word + 1)] };
        for (index, pair) in pairs[..P / 2].iter_mut().enumerate() {
            // SAFETY: the rows and the words are in the panel's block.
            unsafe {
                let (first, second) = (panel.codes(2 * index, word), panel.codes(2 * index + 1, word));
                *pair = C::dot_pair(*pair, codes, first, second);
            }
        }
    }
    for (sums, pair) in sums.as_chunks_mut::<2>().0.iter_mut().zip(pairs) {
        (sums[0], sums[1]) = V::split_pair(pair);
    }
    sums
}

/// `sum += value · activation` over a block of one row, whose integer sums are `dots`.
#[inline(always)]
pub(super) fn add_scaled<V: F32x16>(dots: V, scales: V, activation_scale: f32, sum: V) -> V {
    dots.mul_add(scales.mul(V::splat(activation_scale)), sum)
}

/// `sum += minimum · activation` over a block of one row.
#[inline(always)]
pub(super) fn add_minima<V: F32x16>(minima: V, scaled_sum: f32, sum: V) -> V {
    minima.mul_add(V::splat(scaled_sum), sum)
}

/// The first of the two halves that [`add_halves`] adds.
#[inline(always)]
pub(super) fn first_half<V: F32x16>(dots: V, scales: V) -> V {
    dots.mul(scales)
}

/// `sum += value · activation` over a block of one row, of whose halves the second has the integer sums `dots`.
#[inline(always)]
pub(super) fn add_halves<V: F32x16>(first_half: V, dots: V, scales: V, activation_scale: f32, sum: V) -> V {
    dots.mul_add(scales, first_half).mul_add(V::splat(activation_scale), sum)
}

/// Multiplies the blocks of a tile with a panel of P rows.
struct Multiply<'a, V, const P: usize> {
    /// The first block.
    panel: PanelBlock<P>,
    sums: &'a mut [V; P],
}

impl<V: F32x16, const P: usize> Visitor<V> for Multiply<'_, V, P> {
    #[inline(always)]
    unsafe fn scaled<C: Codes<V>>(&mut self, block: usize, codes: C, scales: V) {
        // SAFETY: the caller's tile and panel.
        unsafe {
            let panel = self.panel.skip(block);
            let dots = dots::<V, C, P, 8>(codes, panel, 0);
            for (row, dots) in dots.into_iter().enumerate() {
                let dots = V::from_sums(dots);
                self.sums[row] = add_scaled(dots, scales, panel.scale(row), self.sums[row]);
            }
        }
    }

    #[inline(always)]
    unsafe fn with_minima<C: Codes<V>>(&mut self, block: usize, codes: C, scales: V, minima: V) {
        // SAFETY: the caller's tile and panel.
        unsafe {
            self.scaled(block, codes, scales);
            let panel = self.panel.skip(block);
            for row in 0..P {
                self.sums[row] = add_minima(minima, panel.scaled_sum(row), self.sums[row]);
            }
        }
    }

    #[inline(always)]
    unsafe fn in_halves<C: Codes<V>>(&mut self, block: usize, codes: C, scales: [V; 2]) {
        // SAFETY: the caller's tile and panel.
        unsafe {
            let panel = self.panel.skip(block);
            let first = dots::<V, C, P, 4>(codes, panel, 0);
            let mut halves = [V::splat(0.0); P];
            for row in 0..P {
                halves[row] = first_half(V::from_sums(first[row]), scales[0]);
            }
            let second = dots::<V, C, P, 4>(codes, panel, 4);
            for row in 0..P {
                let (second, scale) = (V::from_sums(second[row]), panel.scale(row));
                self.sums[row] = add_halves(halves[row], second, scales[1], scale, self.sums[row]);
            }
        }
    }
}

impl<Q: Quantized> Format for Q {
    const BYTES: usize = Q::BYTES;
    const PANEL_BYTES: usize = Q::NUM_BLOCKS * BLOCK_BYTES;

    #[inline(always)]
    unsafe fn step<V: F32x16, const P: usize>(
        tile: *const u8,
        panel: *const u8,
        _: usize,
        sums: &mut [V; P],
    ) {
        // SAFETY: the caller's tile and panel.
        unsafe { Q::visit(tile, &mut Multiply { panel: PanelBlock(panel), sums }) }
    }
}

/// Four words of nibbles: the low ones are words 0..4 of the block, the high ones words 4..8.
#[derive(Clone, Copy)]
struct Nibbles<const OFFSET: i32>(*const u8);

impl<V: F32x16, const OFFSET: i32> Codes<V> for Nibbles<OFFSET> {
    const OFFSET: i32 = OFFSET;

    #[inline(always)]
    unsafe fn word(self, word: usize) -> V::Codes {
        // SAFETY: the caller guarantees four words.
        let codes = unsafe { V::load_codes(self.0.add(WORD * (word % 4))) };
        V::and(if word < 4 { codes } else { V::shift_right(codes, 4) }, 15)
    }
}

/// A word of fifth bits, transposed, and then nibbles.
#[derive(Clone, Copy)]
struct FiveBits<const OFFSET: i32>(*const u8);

impl<V: F32x16, const OFFSET: i32> Codes<V> for FiveBits<OFFSET> {
    const OFFSET: i32 = OFFSET;

    #[inline(always)]
    unsafe fn word(self, word: usize) -> V::Codes {
        // SAFETY: the caller guarantees five words.
        unsafe {
            let nibbles = <Nibbles<OFFSET> as Codes<V>>::word(Nibbles(self.0.add(WORD)), word);
            V::or(nibbles, fifth_bits::<V>(V::load_codes(self.0), word))
        }
    }
}

/// Bit `bit` of each byte, moved to bit 4.
#[inline(always)]
fn fifth_bits<V: F32x16>(bits: V::Codes, bit: usize) -> V::Codes {
    let moved =
        if bit < 4 { V::shift_left(bits, 4 - bit as u32) } else { V::shift_right(bits, bit as u32 - 4) };
    V::and(moved, 16)
}

/// Eight words of i8.
#[derive(Clone, Copy)]
struct Bytes(*const u8);

impl<V: F32x16> Codes<V> for Bytes {
    const OFFSET: i32 = V::SIGNED_BIAS;
    const WORD_OFFSET: u8 = 0;

    #[inline(always)]
    unsafe fn word(self, word: usize) -> V::Codes {
        // SAFETY: the caller guarantees eight words.
        unsafe { V::load_codes(self.0.add(WORD * word)) }
    }

    #[inline(always)]
    unsafe fn dot(sums: V::Sums, codes: V::Codes, activations: *const i8) -> V::Sums {
        // SAFETY: the caller guarantees four activations.
        unsafe { V::dot_signed(sums, codes, activations) }
    }

    #[inline(always)]
    unsafe fn dot_pair(
        sums: V::PairSums,
        codes: [V::Codes; 2],
        first: *const i8,
        second: *const i8,
    ) -> V::PairSums {
        // SAFETY: the caller guarantees eight activations at both pointers.
        unsafe { V::dot_pair_signed(sums, codes, first, second) }
    }
}

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

/// Types of 32 columns: f16 scales, perhaps f16 minima, then the codes.
macro_rules! block_format {
    ($name:ident, $bytes:literal, $codes:ident $(< $offset:literal >)?, minima: $minima:literal) => {
        pub(super) struct $name;

        impl Quantized for $name {
            const BYTES: usize = $bytes;
            const NUM_BLOCKS: usize = 1;

            #[inline(always)]
            unsafe fn visit<V: F32x16>(tile: *const u8, visitor: &mut impl Visitor<V>) {
                prefetch(tile, $bytes);
                // SAFETY: the layout of the tile.
                unsafe {
                    let codes = $codes $(::<$offset>)? (tile.add(if $minima { 2 * SCALES } else { SCALES }));
                    let scales = V::load_f16(tile.cast());
                    if $minima {
                        visitor.with_minima(0, codes, scales, V::load_f16(tile.add(SCALES).cast()));
                    } else {
                        visitor.scaled(0, codes, scales);
                    }
                }
            }
        }
    };
}

block_format!(Q4_0, 288, Nibbles<8>, minima: false);
block_format!(Q4_1, 320, Nibbles<0>, minima: true);
block_format!(Q5_0, 352, FiveBits<16>, minima: false);
block_format!(Q5_1, 384, FiveBits<0>, minima: true);
block_format!(Q8_0, 544, Bytes, minima: false);

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

/// Fetches what comes later for one of the eight sub-blocks of a tile: spread over the tile, so that the
/// machine's queue of misses never overflows.
#[inline(always)]
unsafe fn prefetch_eighth<Q: Quantized>(tile: *const u8, block: usize) {
    // SAFETY: the caller's tile.
    prefetch(unsafe { tile.add(Q::BYTES / 8 * block) }, Q::BYTES / 8);
}

/// Words that several sub-blocks share are read for each of them again, from the cache: kept in registers,
/// they would push the sums out. The compiler does not know that, so it must not know that the words are
/// the same.
#[inline(always)]
fn afresh(words: *const u8) -> *const u8 {
    std::hint::black_box(words)
}

pub(super) struct Q4K;

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

pub(super) struct Q5K;

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

pub(super) struct Q6K;

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
