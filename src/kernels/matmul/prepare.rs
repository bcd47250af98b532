//! One row on its way into a panel: normalised, then rounded to the form that kernels read.
//!
//! What is stored depends on the row alone, and every sum has a fixed order.

use super::activations::{BLOCK, BLOCK_BYTES, padded};
use crate::simd::{F32x16, Kernel};

/// Writes one row into its panel, in one form.
pub(super) struct PrepareRow<'a, T> {
    pub(super) row: &'a [f32],
    pub(super) norm: Option<(&'a [f32], f32)>,
    pub(super) target: T,
}

impl<T: Target> Kernel for PrepareRow<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<V: F32x16>(self) {
        let Self { row, norm, target } = self;
        // The other threads have read what is overwritten now, and nobody has read the weights lately: getting
        // both takes as long as the first pass over the row.
        target.prefetch(row.len());
        let factor = match norm {
            Some((weights, epsilon)) => {
                prefetch::<false>(weights.as_ptr().cast(), size_of_val(weights));
                let mean = sum_of_squares::<V>(row) / row.len() as f32;
                1.0 / (mean + epsilon).sqrt()
            }
            None => 1.0,
        };
        let (blocks, rest) = row.as_chunks::<BLOCK>();
        let weights = norm.map(|(weights, _)| weights.as_chunks::<BLOCK>());
        for (index, block) in blocks.iter().enumerate() {
            let weights = weights.map(|(blocks, _)| &blocks[index]);
            // SAFETY: the target has room for the row.
            unsafe { target.store_block::<V>(index, Halves::<V>::load(block, weights, factor), BLOCK) };
        }
        if !rest.is_empty() {
            let weights = weights.map(|(_, rest)| filled_up(rest));
            let halves = Halves::<V>::load(&filled_up(rest), weights.as_ref(), factor);
            // SAFETY: the target has room for the row, padded to an even number.
            unsafe { target.store_block::<V>(blocks.len(), halves, padded(rest.len())) };
        }
    }
}

/// `values` and zeros behind them.
#[inline(always)]
fn filled_up(values: &[f32]) -> [f32; BLOCK] {
    let mut filled = [0.0; BLOCK];
    filled[..values.len()].copy_from_slice(values);
    filled
}

/// Fetches what will be needed soon, to be written or to be read, where the target has an instruction for it.
#[inline(always)]
pub(super) fn prefetch<const WRITE: bool>(start: *const u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    for offset in (0..len).step_by(64) {
        use std::arch::x86_64::{_MM_HINT_ET0, _MM_HINT_T0, _mm_prefetch};
        let address = start.wrapping_add(offset).cast();
        // SAFETY: a prefetch of any address is allowed.
        unsafe {
            if WRITE { _mm_prefetch::<_MM_HINT_ET0>(address) } else { _mm_prefetch::<_MM_HINT_T0>(address) }
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (start, len);
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

/// Where a row goes in one form.
pub(super) trait Target {
    /// Fetches the memory of a row of `cols` values.
    fn prefetch(&self, cols: usize);

    /// Stores block `block` of the row, of which the first `len` values, an even number, exist.
    ///
    /// # Safety
    /// There is room for the row.
    unsafe fn store_block<V: F32x16>(&self, block: usize, values: Halves<V>, len: usize);
}

/// A row of f32.
pub(super) struct DenseRow(pub(super) *mut f32);

impl Target for DenseRow {
    #[inline(always)]
    fn prefetch(&self, cols: usize) {
        prefetch::<true>(self.0.cast(), cols * size_of::<f32>());
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
    fn prefetch(&self, cols: usize) {
        prefetch::<true>(self.panel.cast(), padded(cols) * size_of::<u16>() * self.width);
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

/// Row `index` of a panel of `width` rows of bf16 for a matrix unit: 32 columns of each row, then the next 32. What is
/// behind the last column is zero.
pub(super) struct TileRow {
    pub(super) panel: *mut u32,
    pub(super) width: usize,
    pub(super) index: usize,
}

impl Target for TileRow {
    #[inline(always)]
    fn prefetch(&self, cols: usize) {
        prefetch::<true>(self.panel.cast(), cols.next_multiple_of(BLOCK) * size_of::<u16>() * self.width);
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
    fn prefetch(&self, cols: usize) {
        prefetch::<true>(self.panel, cols / BLOCK * BLOCK_BYTES * self.width);
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
