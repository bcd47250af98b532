//! Matmuls of quantised tiles with int8 panels.
//!
//! Integer sums are of 32 columns (16 where a scale covers no more) and exact; they are scaled and enter the f32 sum in the
//! order of the columns. Where codes have an offset, the integer sum starts at minus offset · sum of
//! activations; minima enter as minimum · scale · sum of activations.
//!
//! Unpacking a tile is defined once here, for all kernels that multiply: a type passes its blocks of 32 columns to a
//! [`Visitor`]. The one in this file multiplies them with vectors; [`super::tiles`] has another. The types are in
//! `of_32` and `of_256`, by the columns of their blocks.
//!
//! Every callee of a kernel is a function with `inline(always)`, never a closure: code that is not inlined is not
//! compiled for the kernel's instruction set.

mod of_256;
mod of_32;

pub(super) use of_32::{Iq4Nl, Mxfp4, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0};
pub(super) use of_256::{Iq4Xs, Q2K, Q3K, Q4K, Q5K, Q6K, Q8S};

use super::activations::{BLOCK, BLOCK_BYTES, VECTOR_PANEL};
use super::kernels::Format;
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

/// Processes the blocks of a tile: each has its number in the tile, its codes and the factors of the sixteen rows. A
/// type uses one of the methods for all of its blocks.
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
    /// The same with minima: value = scale · code + minimum.
    ///
    /// # Safety
    /// As for `scaled`.
    unsafe fn in_halves_with_minima<C: Codes<V>>(
        &mut self,
        block: usize,
        codes: C,
        scales: [V; 2],
        minima: [V; 2],
    );
}

/// One block of a panel of P rows.
#[derive(Clone, Copy)]
pub(super) struct PanelBlock<const P: usize>(pub(super) *const u8);

impl<const P: usize> PanelBlock<P> {
    /// # Safety
    /// The panel has `blocks` blocks.
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

    /// Sums of the codes of both halves, as f32.
    #[inline(always)]
    pub(super) unsafe fn half_sums(self, row: usize) -> [f32; 2] {
        // SAFETY: as for `float`.
        unsafe { [self.sum(row, 0, 4) as f32, self.sum(row, 4, 4) as f32] }
    }
}

/// The codes of a block, word by word.
pub(super) trait Codes<V: F32x16>: Copy {
    /// The offset of the codes, as `dot` takes them, from their values.
    const OFFSET: i32;
    /// The same for the bytes of `word`.
    const WORD_OFFSET: u8 = Self::OFFSET as u8;

    /// Word `word` of all sixteen rows.
    ///
    /// # Safety
    /// The tile has the layout that the implementation is for.
    unsafe fn word(self, word: usize) -> V::Codes;

    /// Adds the dot products of a word.
    ///
    /// # Safety
    /// There are four activations.
    #[inline(always)]
    unsafe fn dot(sums: V::Sums, codes: V::Codes, activations: *const i8) -> V::Sums {
        // SAFETY: the caller guarantees it.
        unsafe { V::dot(sums, codes, activations) }
    }

    /// Adds the dot products of two words with two rows.
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

/// `half + minimum · activation`, before the scale of the activations, over both halves of a block of one row.
#[inline(always)]
pub(super) fn add_minima_of_halves<V: F32x16>(half: V, minima: [V; 2], half_sums: [f32; 2]) -> V {
    let half = minima[0].mul_add(V::splat(half_sums[0]), half);
    minima[1].mul_add(V::splat(half_sums[1]), half)
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
        unsafe { self.multiply_halves::<C, false>(block, codes, scales, scales) }
    }

    #[inline(always)]
    unsafe fn in_halves_with_minima<C: Codes<V>>(
        &mut self,
        block: usize,
        codes: C,
        scales: [V; 2],
        minima: [V; 2],
    ) {
        // SAFETY: the caller's tile and panel.
        unsafe { self.multiply_halves::<C, true>(block, codes, scales, minima) }
    }
}

impl<V: F32x16, const P: usize> Multiply<'_, V, P> {
    /// Without `MINIMA` they are unchanged.
    #[inline(always)]
    unsafe fn multiply_halves<C: Codes<V>, const MINIMA: bool>(
        &mut self,
        block: usize,
        codes: C,
        scales: [V; 2],
        minima: [V; 2],
    ) {
        // SAFETY: the caller's tile and panel.
        unsafe {
            let panel = self.panel.skip(block);
            let first = dots::<V, C, P, 4>(codes, panel, 0);
            let mut halves = [V::splat(0.0); P];
            for row in 0..P {
                halves[row] = first_half(V::from_sums(first[row]), scales[0]);
                if MINIMA {
                    halves[row] = add_minima_of_halves(halves[row], minima, panel.half_sums(row));
                }
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
