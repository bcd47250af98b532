//! Types with blocks of 32 columns: how their tiles are taken apart.

use super::{Codes, Quantized, Visitor};
use crate::blocks::code_books::{IQ4_VALUES, MXFP4_VALUES};
use crate::matmul::kernels::prefetch;
use crate::matmul::layout::{SCALES, TILE_ROWS, WORD};
use crate::simd::F32x16;

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
pub(super) fn fifth_bits<V: F32x16>(bits: V::Codes, bit: usize) -> V::Codes {
    let moved =
        if bit < 4 { V::shift_left(bits, 4 - bit as u32) } else { V::shift_right(bits, bit as u32 - 4) };
    V::and(moved, 16)
}

/// Eight words of i8.
#[derive(Clone, Copy)]
pub(super) struct Bytes(pub(super) *const u8);

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

/// Four words of nibbles, which index the values of `IQ4_NL`.
#[derive(Clone, Copy)]
pub(super) struct Iq4Codes(pub(super) *const u8);

impl Iq4Codes {
    const BIASED: [u8; 16] = raised(&IQ4_VALUES, 128);
    const SIGNED: [u8; 16] = raised(&IQ4_VALUES, 0);
}

impl<V: F32x16> Codes<V> for Iq4Codes {
    // The book has codes as the machine multiplies them.
    const OFFSET: i32 = V::SIGNED_BIAS;

    #[inline(always)]
    unsafe fn word(self, word: usize) -> V::Codes {
        // SAFETY: the caller guarantees four words.
        let nibbles = unsafe { <Nibbles<0> as Codes<V>>::word(Nibbles(self.0), word) };
        V::lookup(nibbles, if V::SIGNED_BIAS == 0 { &Self::SIGNED } else { &Self::BIASED })
    }

    #[inline(always)]
    unsafe fn dot(sums: V::Sums, codes: V::Codes, activations: *const i8) -> V::Sums {
        // SAFETY: the caller guarantees four activations.
        unsafe {
            if V::SIGNED_BIAS == 0 {
                V::dot_signed(sums, codes, activations)
            } else {
                V::dot(sums, codes, activations)
            }
        }
    }

    #[inline(always)]
    unsafe fn dot_pair(
        sums: V::PairSums,
        codes: [V::Codes; 2],
        first: *const i8,
        second: *const i8,
    ) -> V::PairSums {
        // SAFETY: the caller guarantees eight activations at both pointers.
        unsafe {
            if V::SIGNED_BIAS == 0 {
                V::dot_pair_signed(sums, codes, first, second)
            } else {
                V::dot_pair(sums, codes, first, second)
            }
        }
    }
}

/// Four words of nibbles, which index the values of `MXFP4`.
#[derive(Clone, Copy)]
struct Mxfp4Codes(*const u8);

impl Mxfp4Codes {
    const BOOK: [u8; 16] = raised(&MXFP4_VALUES, 12);
}

impl<V: F32x16> Codes<V> for Mxfp4Codes {
    const OFFSET: i32 = 12;

    #[inline(always)]
    unsafe fn word(self, word: usize) -> V::Codes {
        // SAFETY: the caller guarantees four words.
        let nibbles = unsafe { <Nibbles<0> as Codes<V>>::word(Nibbles(self.0), word) };
        V::lookup(nibbles, &Self::BOOK)
    }
}

/// The values of a book plus `offset`, as bytes.
const fn raised(book: &[i8; 16], offset: u8) -> [u8; 16] {
    let mut raised = [0; 16];
    let mut code = 0;
    while code < 16 {
        raised[code] = book[code].cast_unsigned().wrapping_add(offset);
        code += 1;
    }
    raised
}

/// Types of 32 columns: f16 scales, perhaps f16 minima, then the codes.
macro_rules! block_format {
    ($name:ident, $bytes:literal, $codes:ident $(< $offset:literal >)?, minima: $minima:literal) => {
        pub(in crate::matmul) struct $name;

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
block_format!(Iq4Nl, 288, Iq4Codes, minima: false);

pub(in crate::matmul) struct Mxfp4;

impl Quantized for Mxfp4 {
    const BYTES: usize = 272;
    const NUM_BLOCKS: usize = 1;

    #[inline(always)]
    unsafe fn visit<V: F32x16>(tile: *const u8, visitor: &mut impl Visitor<V>) {
        prefetch(tile, Self::BYTES);
        // SAFETY: the layout of the tile.
        unsafe {
            let scales = V::load_i8(tile.cast()).power_of_two();
            visitor.scaled(0, Mxfp4Codes(tile.add(TILE_ROWS)), scales);
        }
    }
}
