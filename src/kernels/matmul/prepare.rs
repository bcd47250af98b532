//! Writes rows to a panel: normalises them, then converts them to the kernels' format.
//!
//! The stored values depend on the row alone, and every sum has a fixed order.

use std::ops::Range;

use super::activations::{BLOCK, BLOCK_BYTES, MAX_PANEL, padded};
use crate::memory::prefetch;
use crate::simd::{F32x16, Kernel};

/// Blocks of a row that are written before the same blocks of the next one: their targets are interleaved, and stay in
/// the first-level cache for all rows of a panel.
const CHUNK_BLOCKS: usize = 8;

/// Writes up to [`MAX_PANEL`] rows of one length to their targets, rows of one panel, in one format.
pub(super) struct PrepareRows<'a, T> {
    pub(super) rows: &'a [&'a [f32]],
    pub(super) norm: Option<(&'a [f32], f32)>,
    pub(super) targets: &'a [T],
}

impl<T: Target> Kernel for PrepareRows<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<V: F32x16>(self) {
        let Self { rows, norm, targets } = self;
        let Some(cols) = rows.first().map(|row| row.len()) else { return };
        let num_blocks = cols.div_ceil(BLOCK);
        let chunk = |start: usize| start..num_blocks.min(start + CHUNK_BLOCKS);
        // Other threads have read the memory that is overwritten now, and the weights have not been read lately: cache
        // misses cost as much as the first pass over the rows.
        T::prefetch(targets, chunk(0));
        let mut factors = [1.0; MAX_PANEL];
        if let Some((weights, epsilon)) = norm {
            prefetch::<false>(weights.as_ptr().cast(), size_of_val(weights));
            for (factor, row) in factors.iter_mut().zip(rows) {
                let mean = sum_of_squares::<V>(row) / cols as f32;
                *factor = 1.0 / (mean + epsilon).sqrt();
            }
        }
        for start in (0..num_blocks).step_by(CHUNK_BLOCKS) {
            T::prefetch(targets, chunk(start + CHUNK_BLOCKS));
            for ((row, target), &factor) in rows.iter().zip(targets).zip(&factors) {
                for index in chunk(start) {
                    let columns = index * BLOCK..cols.min((index + 1) * BLOCK);
                    let len = columns.len();
                    let values = &row[columns.clone()];
                    let weights = norm.map(|(weights, _)| &weights[columns]);
                    // SAFETY: the target has space for the row, padded to an even number.
                    unsafe {
                        if let Some(values) = values.as_array() {
                            let halves =
                                Halves::<V>::load(values, weights.and_then(<[f32]>::as_array), factor);
                            target.store_block::<V>(index, halves, BLOCK);
                        } else {
                            let weights = weights.map(filled_up);
                            let halves = Halves::<V>::load(&filled_up(values), weights.as_ref(), factor);
                            target.store_block::<V>(index, halves, padded(len));
                        }
                    }
                }
            }
        }
    }
}

/// `values` and zeros after them.
#[inline(always)]
fn filled_up(values: &[f32]) -> [f32; BLOCK] {
    let mut filled = [0.0; BLOCK];
    filled[..values.len()].copy_from_slice(values);
    filled
}

/// Fetches blocks of `bytes` bytes, to be written.
#[inline(always)]
fn prefetch_blocks(start: *const u8, blocks: Range<usize>, bytes: usize) {
    prefetch::<true>(start.wrapping_add(blocks.start * bytes), blocks.len() * bytes);
}

/// The 32 values of a block.
#[derive(Clone, Copy)]
pub(super) struct Halves<V>(V, V);

impl<V: F32x16> Halves<V> {
    /// `values · factor · weights`.
    #[inline(always)]
    fn load(values: &[f32; BLOCK], weights: Option<&[f32; BLOCK]>, factor: f32) -> Self {
        // SAFETY: both have 32 values.
        unsafe {
            let (low, high) = (V::load(values.as_ptr()), V::load(values.as_ptr().add(16)));
            let Some(weights) = weights else { return Self(low, high) };
            let factor = V::splat(factor);
            Self(
                low.mul(factor).mul(V::load(weights.as_ptr())),
                high.mul(factor).mul(V::load(weights.as_ptr().add(16))),
            )
        }
    }

    #[inline(always)]
    fn to_array(self) -> [f32; BLOCK] {
        let mut values = [0.0; BLOCK];
        // SAFETY: the array has 32 values.
        unsafe {
            self.0.store(values.as_mut_ptr());
            self.1.store(values.as_mut_ptr().add(16));
        }
        values
    }
}

/// Where a row goes in one format.
pub(super) trait Target: Sized {
    /// Fetches the memory of some blocks of rows of a panel; blocks after the last column may be among them.
    fn prefetch(rows: &[Self], blocks: Range<usize>);

    /// Stores block `block` of the row, of which the first `len` values, an even number, exist.
    ///
    /// # Safety
    /// There is space for the row.
    unsafe fn store_block<V: F32x16>(&self, block: usize, values: Halves<V>, len: usize);
}

/// A row of f32.
pub(super) struct DenseRow(pub(super) *mut f32);

impl Target for DenseRow {
    #[inline(always)]
    fn prefetch(rows: &[Self], blocks: Range<usize>) {
        for row in rows {
            let start = row.0.wrapping_add(blocks.start * BLOCK).cast();
            prefetch::<true>(start, blocks.len() * BLOCK * size_of::<f32>());
        }
    }

    #[inline(always)]
    unsafe fn store_block<V: F32x16>(&self, block: usize, values: Halves<V>, len: usize) {
        // SAFETY: the caller's guarantee.
        unsafe {
            let row = self.0.add(block * BLOCK);
            if len == BLOCK {
                values.0.store(row);
                values.1.store(row.add(16));
            } else {
                row.copy_from_nonoverlapping(values.to_array().as_ptr(), len);
            }
        }
    }
}

/// Row `index` of a panel of `width` rows, interleaved.
pub(super) struct PanelRow<T> {
    pub(super) panel: *mut T,
    pub(super) width: usize,
    pub(super) index: usize,
}

/// Pairs of bf16.
impl Target for PanelRow<u32> {
    #[inline(always)]
    fn prefetch(rows: &[Self], blocks: Range<usize>) {
        if let Some(Self { panel, width, .. }) = rows.first() {
            prefetch_blocks(panel.cast(), blocks, BLOCK * size_of::<u16>() * width);
        }
    }

    #[inline(always)]
    unsafe fn store_block<V: F32x16>(&self, block: usize, values: Halves<V>, len: usize) {
        let rounded = values.to_array().map(round_to_bf16);
        for (pair, [first, second]) in rounded.as_chunks::<2>().0[..len / 2].iter().enumerate() {
            // SAFETY: the caller's guarantee.
            unsafe {
                let pairs = self.panel.add((block * BLOCK / 2 + pair) * self.width + self.index);
                pairs.write(first | second << 16);
            }
        }
    }
}

/// Row `index` of a panel of `width` rows of bf16 for a matrix unit: 32 columns of each row, then the next 32. Padding
/// after the last column is zero.
pub(super) struct TileRow {
    pub(super) panel: *mut u32,
    pub(super) width: usize,
    pub(super) index: usize,
}

impl Target for TileRow {
    #[inline(always)]
    fn prefetch(rows: &[Self], blocks: Range<usize>) {
        if let Some(Self { panel, width, .. }) = rows.first() {
            prefetch_blocks(panel.cast(), blocks, BLOCK * size_of::<u16>() * width);
        }
    }

    #[inline(always)]
    unsafe fn store_block<V: F32x16>(&self, block: usize, values: Halves<V>, _: usize) {
        let rounded = values.to_array().map(round_to_bf16);
        for (pair, [first, second]) in rounded.as_chunks::<2>().0.iter().enumerate() {
            // SAFETY: the caller's guarantee.
            unsafe {
                let pairs = self.panel.add((block * self.width + self.index) * (BLOCK / 2) + pair);
                pairs.write(first | second << 16);
            }
        }
    }
}

/// Codes of 8 bits: code = round(value / scale) in −127..=127, scale = largest magnitude / 127.
///
/// A NaN or an infinity makes the scale NaN, so that it reaches the result instead of being lost.
impl Target for PanelRow<u8> {
    #[inline(always)]
    fn prefetch(rows: &[Self], blocks: Range<usize>) {
        if let Some(Self { panel, width, .. }) = rows.first() {
            prefetch_blocks(panel.cast(), blocks, BLOCK_BYTES * width);
        }
    }

    #[inline(always)]
    unsafe fn store_block<V: F32x16>(&self, block: usize, values: Halves<V>, _: usize) {
        let Halves(low, high) = values;
        let largest = low.largest_magnitude(high);
        let (scale, inverse) = match largest {
            _ if largest < SMALLEST => (0.0, 0.0),
            _ if largest.is_finite() => (largest / 127.0, 127.0 / largest),
            _ => (f32::NAN, 0.0),
        };
        let (inverse, limit) = (V::splat(inverse), V::splat(127.0));
        let lowest = V::splat(-127.0);
        // This order makes NaN a code like any other.
        let low = low.mul(inverse).round().min(limit).max(lowest);
        let high = high.mul(inverse).round().min(limit).max(lowest);
        let (width, index) = (self.width, self.index);
        // SAFETY: the caller's guarantee; the offsets are those of row `index` in a block of `width` rows.
        unsafe {
            let block = self.panel.add(block * BLOCK_BYTES * width);
            let low_sum = low.store_i8(block.add(BLOCK * index).cast());
            let sum = low_sum + high.store_i8(block.add(BLOCK * index + 16).cast());
            let floats = block.add(BLOCK * width).cast::<f32>();
            floats.add(index).write_unaligned(scale);
            floats.add(width + index).write_unaligned(scale * sum as f32);
            floats.add(2 * width + index).cast::<i32>().write_unaligned(sum);
            floats.add(3 * width + index).cast::<i32>().write_unaligned(low_sum);
        }
    }
}

/// The bits of the nearest bf16, ties to even; NaN stays NaN. Without branches, so that it is vectorised.
#[inline(always)]
fn round_to_bf16(value: f32) -> u32 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    if value.is_nan() { bits >> 16 | 0x40 } else { rounded }
}

/// Σ x² in a fixed order: 32 partial sums over the columns, then a tree.
#[inline(always)]
fn sum_of_squares<V: F32x16>(row: &[f32]) -> f32 {
    let mut sums = [V::splat(0.0); 2];
    let mut add = |values: &[f32; BLOCK]| {
        for (half, sum) in sums.iter_mut().enumerate() {
            // SAFETY: each half has sixteen values.
            let values = unsafe { V::load(values.as_ptr().add(16 * half)) };
            *sum = values.mul_add(values, *sum);
        }
    };
    let (blocks, rest) = row.as_chunks::<BLOCK>();
    blocks.iter().for_each(&mut add);
    if !rest.is_empty() {
        let mut last = [0.0; BLOCK];
        last[..rest.len()].copy_from_slice(rest);
        add(&last);
    }
    sums[0].add(sums[1]).sum()
}

/// Blocks below this are zero: the reciprocal of their scale would overflow.
const SMALLEST: f32 = 1e-35;
