//! The inner loops: one group of sixteen weight rows times one panel of input rows.
//!
//! Sums stay in registers over all columns, and every output is accumulated over its columns in the same
//! order whatever the width of the panel: that is what makes a row's result independent of its batch.
//! Integer sums are of 32 columns (16 for `Q6_K`), so they are exact; they enter the f32 sum in order.

use super::activations::{BLOCK, BLOCK_BYTES};
use super::layout::{K_CODES, Q6K_LOWER, Q6K_UPPER, SCALES, TILE_ROWS, WORD};
use crate::ops::cpu::simd::{F32x16, Kernel};
use crate::weights::DType;

/// The products of one panel with sixteen weight rows, one array for each input row.
pub(super) type PanelOutput = [[f32; TILE_ROWS]; super::activations::MAX_PANEL];

/// Bytes between what is read and what is fetched into the cache: a few hundred nanoseconds.
const PREFETCH_DISTANCE: usize = 2048;

/// Sixteen weight rows times a panel.
pub(super) struct TileRow<'a> {
    pub(super) dtype: DType,
    /// The first tile.
    pub(super) tiles: *const u8,
    pub(super) num_tiles: usize,
    /// Columns, of dense types.
    pub(super) panel: *const u8,
    /// Rows of the panel: 1, 2, 4 or 8.
    pub(super) width: usize,
    pub(super) out: &'a mut PanelOutput,
}

impl Kernel for TileRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: F32x16>(self) {
        // SAFETY: the driver passes tiles and panels of matching sizes.
        unsafe {
            match self.dtype {
                DType::F32 => self.with_width::<V, F32>(),
                DType::F16 => self.with_width::<V, F16>(),
                DType::BF16 => self.with_width::<V, BF16>(),
                DType::Q4_0 => self.with_width::<V, Q4_0>(),
                DType::Q4_1 => self.with_width::<V, Q4_1>(),
                DType::Q5_0 => self.with_width::<V, Q5_0>(),
                DType::Q5_1 => self.with_width::<V, Q5_1>(),
                DType::Q8_0 => self.with_width::<V, Q8_0>(),
                DType::Q4K => self.with_width::<V, Q4K>(),
                DType::Q5K => self.with_width::<V, Q5K>(),
                DType::Q6K => self.with_width::<V, Q6K>(),
            }
        }
    }
}

impl TileRow<'_> {
    #[inline(always)]
    unsafe fn with_width<V: F32x16, F: Format>(self) {
        // SAFETY: as for `run`.
        unsafe {
            match self.width {
                1 => self.multiply::<V, F, 1>(),
                2 => self.multiply::<V, F, 2>(),
                4 => self.multiply::<V, F, 4>(),
                _ => self.multiply::<V, F, 8>(),
            }
        }
    }

    #[inline(always)]
    unsafe fn multiply<V: F32x16, F: Format, const P: usize>(self) {
        let mut sums = [V::splat(0.0); P];
        for index in 0..self.num_tiles {
            // SAFETY: there are `num_tiles` tiles and as many steps of the panel; the output has at
            // least P rows.
            unsafe {
                let tile = self.tiles.add(index * F::BYTES);
                prefetch::<F>(tile);
                F::step::<V, P>(tile, self.panel.add(index * F::PANEL_BYTES * P), &mut sums);
            }
        }
        for (sum, out) in sums.into_iter().zip(self.out.iter_mut()) {
            // SAFETY: the row has sixteen values.
            unsafe { sum.store(out.as_mut_ptr()) };
        }
    }
}

#[inline(always)]
fn prefetch<F: Format>(tile: *const u8) {
    #[cfg(target_arch = "x86_64")]
    for line in 0..F::BYTES.div_ceil(64) {
        let address = tile.wrapping_add(PREFETCH_DISTANCE + 64 * line);
        // SAFETY: a prefetch of any address is allowed.
        unsafe { std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(address.cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = tile;
}

/// How one tile is multiplied with its columns of a panel.
trait Format {
    /// Bytes of a tile.
    const BYTES: usize;
    /// Bytes of one panel row that belong to the columns of a tile.
    const PANEL_BYTES: usize;

    /// Adds the products of a tile to `sums`.
    ///
    /// # Safety
    /// `tile` has `BYTES` bytes, `panel` has `P × PANEL_BYTES`.
    unsafe fn step<V: F32x16, const P: usize>(tile: *const u8, panel: *const u8, sums: &mut [V; P]);
}

struct F32;
struct F16;
struct BF16;
struct Q4_0;
struct Q4_1;
struct Q5_0;
struct Q5_1;
struct Q8_0;
struct Q4K;
struct Q5K;
struct Q6K;

/// `sums += weights · value` for each row of one column of a dense panel.
#[inline(always)]
unsafe fn add_column<V: F32x16, const P: usize>(weights: V, column: *const f32, sums: &mut [V; P]) {
    for (row, sum) in sums.iter_mut().enumerate() {
        // SAFETY: a column has P values.
        let value = unsafe { column.add(row).read() };
        *sum = weights.mul_add(V::splat(value), *sum);
    }
}

impl Format for F32 {
    const BYTES: usize = 64;
    const PANEL_BYTES: usize = 4;

    #[inline(always)]
    unsafe fn step<V: F32x16, const P: usize>(tile: *const u8, panel: *const u8, sums: &mut [V; P]) {
        // SAFETY: a tile is sixteen f32.
        unsafe { add_column(V::load(tile.cast()), panel.cast(), sums) }
    }
}

impl Format for F16 {
    const BYTES: usize = 32;
    const PANEL_BYTES: usize = 4;

    #[inline(always)]
    unsafe fn step<V: F32x16, const P: usize>(tile: *const u8, panel: *const u8, sums: &mut [V; P]) {
        // SAFETY: a tile is sixteen f16.
        unsafe { add_column(V::load_f16(tile.cast()), panel.cast(), sums) }
    }
}

impl Format for BF16 {
    const BYTES: usize = 64;
    const PANEL_BYTES: usize = 8;

    #[inline(always)]
    unsafe fn step<V: F32x16, const P: usize>(tile: *const u8, panel: *const u8, sums: &mut [V; P]) {
        // SAFETY: a tile is sixteen pairs of bf16, a panel step two columns of P values.
        unsafe {
            let (even, odd) = V::load_bf16_pairs(tile);
            add_column(even, panel.cast(), sums);
            add_column(odd, panel.cast::<f32>().add(P), sums);
        }
    }
}

/// One block of a panel of P rows.
#[derive(Clone, Copy)]
struct PanelBlock<const P: usize>(*const u8);

impl<const P: usize> PanelBlock<P> {
    /// # Safety
    /// The panel goes on for `blocks` blocks.
    #[inline(always)]
    unsafe fn skip(self, blocks: usize) -> Self {
        // SAFETY: the caller guarantees it.
        Self(unsafe { self.0.add(blocks * P * BLOCK_BYTES) })
    }

    #[inline(always)]
    unsafe fn codes(self, row: usize, col: usize) -> *const i8 {
        // SAFETY: rows below P and columns below 32 are in the block.
        unsafe { self.0.add(BLOCK * row + col).cast() }
    }

    /// Value `row` of array `array` of the four arrays that follow the codes.
    #[inline(always)]
    unsafe fn float(self, array: usize, row: usize) -> f32 {
        // SAFETY: rows below P are in the block.
        unsafe { self.0.add(BLOCK * P).cast::<f32>().add(array * P + row).read() }
    }

    #[inline(always)]
    unsafe fn scale(self, row: usize) -> f32 {
        // SAFETY: as for `float`.
        unsafe { self.float(0, row) }
    }

    /// Scale × sum of the codes.
    #[inline(always)]
    unsafe fn scaled_sum(self, row: usize) -> f32 {
        // SAFETY: as for `float`.
        unsafe { self.float(1, row) }
    }

    /// Sum of the codes.
    #[inline(always)]
    unsafe fn sum(self, row: usize) -> i32 {
        // SAFETY: as for `float`; the array holds i32.
        unsafe { self.float(2, row) }.to_bits() as i32
    }

    /// Sum of the first sixteen codes.
    #[inline(always)]
    unsafe fn first_sum(self, row: usize) -> i32 {
        // SAFETY: as for `float`; the array holds i32.
        unsafe { self.float(3, row) }.to_bits() as i32
    }
}

/// Σ code · activation over 4 × `WORDS` columns from `first_col`, starting from `start(row)`.
#[inline(always)]
unsafe fn dot_words<V: F32x16, const P: usize, const WORDS: usize>(
    panel: PanelBlock<P>,
    first_col: usize,
    start: impl Fn(usize) -> i32,
    codes: impl Fn(usize) -> V::Codes,
) -> [V::Sums; P] {
    let mut sums = [V::splat_sum(0); P];
    for (row, sum) in sums.iter_mut().enumerate() {
        *sum = V::splat_sum(start(row));
    }
    for word in 0..WORDS {
        let codes = codes(word);
        for (row, sum) in sums.iter_mut().enumerate() {
            // SAFETY: the columns are in the block.
            *sum = unsafe { V::dot(*sum, codes, panel.codes(row, first_col + 4 * word)) };
        }
    }
    sums
}

/// `sums += dots · scales · activation scale`.
#[inline(always)]
unsafe fn add_scaled<V: F32x16, const P: usize>(
    panel: PanelBlock<P>,
    dots: [V::Sums; P],
    scales: V,
    sums: &mut [V; P],
) {
    for row in 0..P {
        // SAFETY: the row is below P.
        let factor = scales.mul(V::splat(unsafe { panel.scale(row) }));
        sums[row] = V::from_sums(dots[row]).mul_add(factor, sums[row]);
    }
}

/// `sums += minima · activation scale · sum of activations`.
#[inline(always)]
unsafe fn add_minima<V: F32x16, const P: usize>(panel: PanelBlock<P>, minima: V, sums: &mut [V; P]) {
    for (row, sum) in sums.iter_mut().enumerate() {
        // SAFETY: the row is below P.
        *sum = minima.mul_add(V::splat(unsafe { panel.scaled_sum(row) }), *sum);
    }
}

/// The four-bit codes of word 0..8 of a 32-column block: the low nibbles of four words, then the high ones.
#[inline(always)]
unsafe fn nibbles<V: F32x16>(words: *const u8, word: usize) -> V::Codes {
    // SAFETY: the caller guarantees four words.
    let codes = unsafe { V::load_codes(words.add(WORD * (word % 4))) };
    V::and(if word < 4 { codes } else { V::shift_right(codes, 4) }, 15)
}

/// The five-bit codes of a word of `Q5_0` or `Q5_1`.
#[inline(always)]
unsafe fn five_bits<V: F32x16>(fifth: *const u8, words: *const u8, word: usize) -> V::Codes {
    // SAFETY: the caller guarantees one word of fifth bits and four words of nibbles.
    unsafe { V::or(nibbles::<V>(words, word), fifth_bits::<V>(V::load_codes(fifth), word)) }
}

/// Bit `bit` of each byte, moved to bit 4.
#[inline(always)]
fn fifth_bits<V: F32x16>(bits: V::Codes, bit: usize) -> V::Codes {
    let moved =
        if bit < 4 { V::shift_left(bits, 4 - bit as u32) } else { V::shift_right(bits, bit as u32 - 4) };
    V::and(moved, 16)
}

impl Format for Q4_0 {
    const BYTES: usize = 288;
    const PANEL_BYTES: usize = BLOCK_BYTES;

    #[inline(always)]
    unsafe fn step<V: F32x16, const P: usize>(tile: *const u8, panel: *const u8, sums: &mut [V; P]) {
        let panel = PanelBlock::<P>(panel);
        // SAFETY: the layout of the tile.
        unsafe {
            let dots = dot_words::<V, P, 8>(
                panel,
                0,
                |row| -8 * panel.sum(row),
                |word| nibbles::<V>(tile.add(SCALES), word),
            );
            add_scaled(panel, dots, V::load_f16(tile.cast()), sums);
        }
    }
}

impl Format for Q4_1 {
    const BYTES: usize = 320;
    const PANEL_BYTES: usize = BLOCK_BYTES;

    #[inline(always)]
    unsafe fn step<V: F32x16, const P: usize>(tile: *const u8, panel: *const u8, sums: &mut [V; P]) {
        let panel = PanelBlock::<P>(panel);
        // SAFETY: the layout of the tile.
        unsafe {
            let dots = dot_words::<V, P, 8>(panel, 0, |_| 0, |word| nibbles::<V>(tile.add(2 * SCALES), word));
            add_scaled(panel, dots, V::load_f16(tile.cast()), sums);
            add_minima(panel, V::load_f16(tile.add(SCALES).cast()), sums);
        }
    }
}

impl Format for Q5_0 {
    const BYTES: usize = 352;
    const PANEL_BYTES: usize = BLOCK_BYTES;

    #[inline(always)]
    unsafe fn step<V: F32x16, const P: usize>(tile: *const u8, panel: *const u8, sums: &mut [V; P]) {
        let panel = PanelBlock::<P>(panel);
        // SAFETY: the layout of the tile.
        unsafe {
            let (fifth, words) = (tile.add(SCALES), tile.add(SCALES + WORD));
            let dots = dot_words::<V, P, 8>(
                panel,
                0,
                |row| -16 * panel.sum(row),
                |word| five_bits::<V>(fifth, words, word),
            );
            add_scaled(panel, dots, V::load_f16(tile.cast()), sums);
        }
    }
}

impl Format for Q5_1 {
    const BYTES: usize = 384;
    const PANEL_BYTES: usize = BLOCK_BYTES;

    #[inline(always)]
    unsafe fn step<V: F32x16, const P: usize>(tile: *const u8, panel: *const u8, sums: &mut [V; P]) {
        let panel = PanelBlock::<P>(panel);
        // SAFETY: the layout of the tile.
        unsafe {
            let (fifth, words) = (tile.add(2 * SCALES), tile.add(2 * SCALES + WORD));
            let dots = dot_words::<V, P, 8>(panel, 0, |_| 0, |word| five_bits::<V>(fifth, words, word));
            add_scaled(panel, dots, V::load_f16(tile.cast()), sums);
            add_minima(panel, V::load_f16(tile.add(SCALES).cast()), sums);
        }
    }
}

impl Format for Q8_0 {
    const BYTES: usize = 544;
    const PANEL_BYTES: usize = BLOCK_BYTES;

    #[inline(always)]
    unsafe fn step<V: F32x16, const P: usize>(tile: *const u8, panel: *const u8, sums: &mut [V; P]) {
        let panel = PanelBlock::<P>(panel);
        // SAFETY: the layout of the tile.
        unsafe {
            let mut dots = [V::splat_sum(0); P];
            for (row, dot) in dots.iter_mut().enumerate() {
                *dot = V::splat_sum(-V::SIGNED_BIAS * panel.sum(row));
            }
            for word in 0..8 {
                let codes = V::load_codes(tile.add(SCALES + WORD * word));
                for (row, dot) in dots.iter_mut().enumerate() {
                    *dot = V::dot_signed(*dot, codes, panel.codes(row, 4 * word));
                }
            }
            add_scaled(panel, dots, V::load_f16(tile.cast()), sums);
        }
    }
}

/// The 6-bit scales and minima of a `Q4_K` or `Q5_K` tile, one for each sub-block and row.
struct SixBitScales<V: F32x16> {
    scale: V,
    minimum: V,
    /// Sub-blocks 0..4 in the bytes of the first, 4..8 in those of the second.
    scales: [V::Codes; 2],
    minima: [V::Codes; 2],
}

impl<V: F32x16> SixBitScales<V> {
    #[inline(always)]
    unsafe fn load(tile: *const u8) -> Self {
        // SAFETY: the caller guarantees a tile of `Q4_K` or `Q5_K`.
        unsafe {
            let [first, second, third] =
                [0, 1, 2].map(|word| V::load_codes(tile.add(2 * SCALES + WORD * word)));
            let upper = |word| V::and(V::shift_right(word, 2), 0x30);
            Self {
                scale: V::load_f16(tile.cast()),
                minimum: V::splat(0.0).sub(V::load_f16(tile.add(SCALES).cast())),
                scales: [V::and(first, 63), V::or(V::and(third, 15), upper(first))],
                minima: [V::and(second, 63), V::or(V::and(V::shift_right(third, 4), 15), upper(second))],
            }
        }
    }

    /// Scales and negated minima of sub-block `block`.
    #[inline(always)]
    fn get(&self, block: usize) -> (V, V) {
        let byte =
            |words: [V::Codes; 2]| V::lowest_byte(V::shift_right(words[block / 4], 8 * (block % 4) as u32));
        (self.scale.mul(byte(self.scales)), self.minimum.mul(byte(self.minima)))
    }
}

impl Format for Q4K {
    const BYTES: usize = 2304;
    const PANEL_BYTES: usize = 8 * BLOCK_BYTES;

    #[inline(always)]
    unsafe fn step<V: F32x16, const P: usize>(tile: *const u8, panel: *const u8, sums: &mut [V; P]) {
        // SAFETY: the layout of the tile.
        unsafe {
            let scales = SixBitScales::<V>::load(tile);
            for block in 0..8 {
                let panel = PanelBlock::<P>(panel).skip(block);
                let words = tile.add(K_CODES + 8 * WORD * (block / 2));
                let dots = dot_words::<V, P, 8>(
                    panel,
                    0,
                    |_| 0,
                    |word| {
                        let codes = V::load_codes(words.add(WORD * word));
                        V::and(V::shift_right(codes, 4 * (block % 2) as u32), 15)
                    },
                );
                let (scale, minimum) = scales.get(block);
                add_scaled(panel, dots, scale, sums);
                add_minima(panel, minimum, sums);
            }
        }
    }
}

impl Format for Q5K {
    const BYTES: usize = 2816;
    const PANEL_BYTES: usize = 8 * BLOCK_BYTES;

    #[inline(always)]
    unsafe fn step<V: F32x16, const P: usize>(tile: *const u8, panel: *const u8, sums: &mut [V; P]) {
        // SAFETY: the layout of the tile.
        unsafe {
            let scales = SixBitScales::<V>::load(tile);
            let fifth = tile.add(K_CODES);
            for block in 0..8 {
                let panel = PanelBlock::<P>(panel).skip(block);
                let words = tile.add(K_CODES + 8 * WORD + 8 * WORD * (block / 2));
                let dots = dot_words::<V, P, 8>(
                    panel,
                    0,
                    |_| 0,
                    |word| {
                        let codes = V::load_codes(words.add(WORD * word));
                        let codes = V::and(V::shift_right(codes, 4 * (block % 2) as u32), 15);
                        V::or(codes, fifth_bits::<V>(V::load_codes(fifth.add(WORD * word)), block))
                    },
                );
                let (scale, minimum) = scales.get(block);
                add_scaled(panel, dots, scale, sums);
                add_minima(panel, minimum, sums);
            }
        }
    }
}

impl Format for Q6K {
    const BYTES: usize = 3360;
    const PANEL_BYTES: usize = 8 * BLOCK_BYTES;

    #[inline(always)]
    unsafe fn step<V: F32x16, const P: usize>(tile: *const u8, panel: *const u8, sums: &mut [V; P]) {
        // SAFETY: the layout of the tile.
        unsafe {
            let scale = V::load_f16(tile.cast());
            for block in 0..8 {
                let panel = PanelBlock::<P>(panel).skip(block);
                let (half, quarter) = (block / 4, block % 4);
                let lower = tile.add(Q6K_LOWER + WORD * (16 * half + 8 * (quarter % 2)));
                let upper = tile.add(Q6K_UPPER + WORD * 8 * half);
                let codes = |word: usize| {
                    let codes = V::load_codes(lower.add(WORD * word));
                    let codes = V::and(V::shift_right(codes, 4 * (quarter / 2) as u32), 15);
                    let bits = V::load_codes(upper.add(WORD * word));
                    let bits = match quarter {
                        0 => V::shift_left(bits, 4),
                        1 => V::shift_left(bits, 2),
                        2 => bits,
                        _ => V::shift_right(bits, 2),
                    };
                    V::or(codes, V::and(bits, 0x30))
                };
                let scales: [V; 2] = [0, 1].map(|part| {
                    scale.mul(V::load_i8(tile.add(SCALES + TILE_ROWS * (2 * block + part)).cast()))
                });
                let first = dot_words::<V, P, 4>(panel, 0, |row| -32 * panel.first_sum(row), codes);
                let second = dot_words::<V, P, 4>(
                    panel,
                    16,
                    |row| -32 * (panel.sum(row) - panel.first_sum(row)),
                    |word| codes(word + 4),
                );
                for row in 0..P {
                    let second = V::from_sums(second[row]).mul(scales[1]);
                    let both = V::from_sums(first[row]).mul_add(scales[0], second);
                    sums[row] = both.mul_add(V::splat(panel.scale(row)), sums[row]);
                }
            }
        }
    }
}
