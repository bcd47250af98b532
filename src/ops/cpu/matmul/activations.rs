//! Input rows in the form that the kernels read.
//!
//! Rows are grouped into panels of eight, and the rest into panels of four, two and one: the widths that
//! kernels exist for. An int8 panel interleaves its rows, so that a kernel reaches all of them at fixed
//! offsets from one pointer; f32 rows simply follow each other. What is stored for a row is computed from that row alone.

use super::buffer::{AlignedBuffer, SharedPointer};
use crate::ops::cpu::pool::ThreadPool;
use crate::ops::cpu::simd::{CpuLevel, F32x16, Kernel};

/// Rows of the widest panel.
pub(super) const MAX_PANEL: usize = 8;
/// Columns that share a scale in the int8 form.
pub(super) const BLOCK: usize = 32;
/// Bytes of one row in one block of a panel: 32 codes, f32 scale, f32 scale · sum, i32 sum, i32 sum of the
/// first sixteen codes. In a panel of P rows, each of these five is an array of P.
pub(super) const BLOCK_BYTES: usize = BLOCK + 16;

/// Rows of f32, and if wanted also quantised to 8 bits in blocks of 32 with an f32 scale.
///
/// Memory is kept from one use to the next.
pub struct Activations {
    rows: usize,
    cols: usize,
    has_int8: bool,
    /// [rows][cols, padded to even] of f32.
    dense: AlignedBuffer,
    /// [panels][blocks][panel rows × `BLOCK_BYTES`].
    int8: AlignedBuffer,
}

impl std::fmt::Debug for Activations {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Activations({} × {}, int8: {})", self.rows, self.cols, self.has_int8)
    }
}

impl Default for Activations {
    fn default() -> Self {
        Self::new()
    }
}

impl Activations {
    /// No rows.
    #[must_use]
    pub fn new() -> Self {
        Self {
            rows: 0,
            cols: 0,
            has_int8: false,
            dense: AlignedBuffer::empty(),
            int8: AlignedBuffer::empty(),
        }
    }

    /// Rows that were loaded.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns that were loaded.
    #[must_use]
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Loads `rows` × `cols` values from `x`, whose rows start `stride` values apart.
    ///
    /// With `norm` = (weights, epsilon) each row x becomes weights · x / sqrt(mean(x²) + epsilon). With
    /// `int8` the rows are also quantised, which products with quantised matrices need; `cols` not a
    /// multiple of 32 has no such matrix and is left dense.
    ///
    /// # Panics
    /// If `x` or the weights of the norm are too short, or there is no memory.
    #[expect(clippy::too_many_arguments, reason = "one call describes one fused operation")]
    pub fn prepare(
        &mut self,
        x: &[f32],
        stride: usize,
        rows: usize,
        cols: usize,
        norm: Option<(&[f32], f32)>,
        int8: bool,
        pool: &ThreadPool,
        level: CpuLevel,
    ) {
        assert!(
            rows == 0 || x.len() >= (rows - 1) * stride + cols,
            "{rows} rows of {cols} do not fit the input"
        );
        assert!(
            norm.is_none_or(|(weights, _)| weights.len() == cols),
            "the norm does not have {cols} weights"
        );
        self.rows = rows;
        self.cols = cols;
        self.has_int8 = int8 && cols.is_multiple_of(BLOCK);
        reserve(&mut self.dense, rows * padded(cols) * size_of::<f32>());
        if self.has_int8 {
            reserve(&mut self.int8, rows * cols / BLOCK * BLOCK_BYTES);
        }
        let dense = SharedPointer::new(self.dense.as_mut_ptr().cast::<f32>());
        let int8 = self.has_int8.then(|| SharedPointer::new(self.int8.as_mut_ptr()));
        let prepare_panel = |first_row: usize, width: usize| {
            for index in 0..width {
                let row = &x[(first_row + index) * stride..][..cols];
                // SAFETY: the buffers have room for `rows` rows; a panel starts where the rows before
                // it end, and each task writes its own panels.
                let (dense, int8) = unsafe {
                    (
                        dense.get().add((first_row + index) * padded(cols)),
                        int8.map(|int8| int8.get().add(first_row * cols / BLOCK * BLOCK_BYTES)),
                    )
                };
                level.run(PrepareRow { row, norm, dense, int8, width, index });
            }
        };
        let num_tasks = rows.div_ceil(MAX_PANEL);
        let run_task = |task: usize| {
            let end = rows.min((task + 1) * MAX_PANEL);
            panels(task * MAX_PANEL, end).for_each(|(first_row, width)| prepare_panel(first_row, width));
        };
        // Waking the other threads costs more than a few rows.
        if rows * cols <= SERIAL_VALUES {
            (0..num_tasks).for_each(run_task);
        } else {
            pool.run(num_tasks, run_task);
        }
    }

    /// True if the rows can be multiplied with quantised matrices.
    pub(super) fn has_int8(&self) -> bool {
        self.has_int8
    }

    /// The f32 rows from `first_row`.
    pub(super) fn dense_panel(&self, first_row: usize) -> *const f32 {
        self.dense.as_ptr().cast::<f32>().wrapping_add(first_row * padded(self.cols))
    }

    /// Bytes between f32 rows.
    pub(super) fn dense_stride(&self) -> usize {
        padded(self.cols) * size_of::<f32>()
    }

    /// The int8 panel that starts at `first_row`.
    pub(super) fn int8_panel(&self, first_row: usize) -> *const u8 {
        self.int8.as_ptr().wrapping_add(first_row * self.cols / BLOCK * BLOCK_BYTES)
    }
}

/// The panels of rows `start..end` as (first row, rows); `start` is a multiple of eight.
pub(super) fn panels(start: usize, end: usize) -> impl Iterator<Item = (usize, usize)> {
    let mut next = start;
    std::iter::from_fn(move || {
        let width = match end - next {
            0 => return None,
            1 => 1,
            2..4 => 2,
            4..8 => 4,
            _ => MAX_PANEL,
        };
        next += width;
        Some((next - width, width))
    })
}

/// BF16 weights come in pairs of columns.
fn padded(cols: usize) -> usize {
    cols.next_multiple_of(2)
}

fn reserve(buffer: &mut AlignedBuffer, len: usize) {
    if buffer.len() < len {
        // The old memory goes first; its content is not needed.
        *buffer = AlignedBuffer::empty();
        // Running out of memory here is the same as in `Vec`.
        *buffer =
            AlignedBuffer::zeroed(len).unwrap_or_else(|| panic!("no memory for {len} bytes of activations"));
    }
}

/// Writes one row into its panel.
struct PrepareRow<'a> {
    row: &'a [f32],
    norm: Option<(&'a [f32], f32)>,
    dense: *mut f32,
    int8: Option<*mut u8>,
    width: usize,
    index: usize,
}

impl Kernel for PrepareRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: F32x16>(self) {
        let Self { row, norm, dense, int8, width, index } = self;
        let factor = match norm {
            Some((_, epsilon)) => {
                let mean = sum_of_squares::<V>(row) / row.len() as f32;
                1.0 / (mean + epsilon).sqrt()
            }
            None => 1.0,
        };
        let mut values = [0.0_f32; BLOCK];
        for (block, chunk) in row.chunks(BLOCK).enumerate() {
            values[..chunk.len()].copy_from_slice(chunk);
            values[chunk.len()..].fill(0.0);
            if let Some((weights, _)) = norm {
                for (value, weight) in values.iter_mut().zip(&weights[block * BLOCK..]) {
                    *value = *value * factor * weight;
                }
            }
            let stored = padded(chunk.len());
            // SAFETY: there is room for the row's padded length, and for `width` rows of its blocks.
            unsafe {
                dense.add(block * BLOCK).copy_from_nonoverlapping(values.as_ptr(), stored);
                if let Some(int8) = int8 {
                    quantize_block::<V>(&values, int8.add(block * BLOCK_BYTES * width), width, index);
                }
            }
        }
    }
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

/// Quantises 32 values to codes in −127..=127: code = round(value / scale), scale = largest magnitude / 127.
///
/// A NaN or an infinity makes the scale NaN, so that it reaches the result instead of being lost.
///
/// # Safety
/// `block` has room for `width` rows.
#[inline(always)]
unsafe fn quantize_block<V: F32x16>(values: &[f32; BLOCK], block: *mut u8, width: usize, index: usize) {
    // SAFETY: `values` has 32 values; the offsets are those of row `index` in a block of `width` rows.
    unsafe {
        let low = V::load(values.as_ptr());
        let high = V::load(values.as_ptr().add(16));
        let zero = V::splat(0.0);
        let largest = low.max(zero.sub(low)).max(high.max(zero.sub(high))).max_lane();
        // x · 0 is 0 for a finite x and NaN otherwise.
        let poison = low.mul(zero).add(high.mul(zero)).sum();
        let (scale, inverse) =
            if largest < SMALLEST { (0.0, 0.0) } else { (largest / 127.0, 127.0 / largest) };
        let scale = scale + poison;
        let inverse = V::splat(inverse);
        let limit = V::splat(127.0);
        let clamp = |codes: V| codes.round().min(limit).max(zero.sub(limit));
        let low = clamp(low.mul(inverse));
        let high = clamp(high.mul(inverse));
        low.store_i8(block.add(BLOCK * index).cast());
        high.store_i8(block.add(BLOCK * index + 16).cast());
        // Sums of integers this small are exact in f32.
        let (low_sum, high_sum) = (low.sum(), high.sum());
        let sum = low_sum + high_sum;
        let floats = block.add(BLOCK * width).cast::<f32>();
        floats.add(index).write_unaligned(scale);
        floats.add(width + index).write_unaligned(scale * sum);
        floats.add(2 * width + index).cast::<i32>().write_unaligned(sum as i32);
        floats.add(3 * width + index).cast::<i32>().write_unaligned(low_sum as i32);
    }
}

/// Inputs up to this many values are prepared by the calling thread alone: some ten microseconds.
const SERIAL_VALUES: usize = 1 << 14;

/// Blocks below this are zero: the reciprocal of their scale would overflow.
const SMALLEST: f32 = 1e-35;
