//! Rows of weights times the values of a KV split, for values of the types of floating-point numbers.

use super::kernel::{Run, SCORE_STRIDE, convert};
use crate::paged_cache::{KvElement, LANES};
use crate::simd::F32x16;

/// Some rows' weighted values.
pub(super) struct ValueTile<'a, E> {
    /// First row's weight of the split's first position; rows are `SCORE_STRIDE` apart.
    pub(super) weights: *const f32,
    pub(super) v_pool: *const E,
    pub(super) runs: &'a [Run],
    /// Values between two rows of V and of the result; a multiple of sixteen.
    pub(super) width: usize,
    pub(super) values: *mut f32,
    /// Whether the result is added to the previous values.
    pub(super) adds: bool,
}

impl<E: KvElement> ValueTile<'_, E> {
    /// Computes `num_rows` rows.
    ///
    /// # Safety
    /// There are `num_rows` rows, and all pointers hold what their descriptions say.
    #[inline(always)]
    pub(super) unsafe fn compute_all<V: F32x16>(&self, num_rows: usize, wide: bool) {
        let mut row = 0;
        while row < num_rows {
            // SAFETY: the caller's guarantees; the computed rows exist.
            unsafe {
                let tile = ValueTile {
                    weights: self.weights.add(row * SCORE_STRIDE),
                    values: self.values.add(row * self.width),
                    ..*self
                };
                row += match (num_rows - row, wide) {
                    (8.., true) => tile.compute::<V, 8, 2>(),
                    (4.., true) => tile.compute::<V, 4, 4>(),
                    (4.., false) => tile.compute::<V, 4, 1>(),
                    (2.., _) => tile.compute::<V, 2, 2>(),
                    _ => tile.compute::<V, 1, 4>(),
                };
            }
        }
    }

    /// The same with values that are converted once for all rows, to `staged`.
    ///
    /// # Safety
    /// As of [`Self::compute_all`]; a row of V has space in `staged`.
    #[inline(always)]
    pub(super) unsafe fn compute_staged<V: F32x16>(&self, num_rows: usize, wide: bool, staged: &mut [f32]) {
        let max_tokens = staged.len() / self.width;
        let mut runs = self.runs.iter().copied();
        let mut rest = runs.next();
        // Positions follow each other from run to run.
        let mut offset = rest.map_or(0, |run| run.offset);
        let mut adds = self.adds;
        loop {
            let mut len = 0;
            while let Some(run) = &mut rest
                && len < max_tokens
            {
                let num_own = run.len.min(max_tokens - len);
                let target = &mut staged[len * self.width..][..num_own * self.width];
                // SAFETY: a run is `len` rows of `width` values of the pool, a multiple of sixteen.
                unsafe { convert::<V, E>(self.v_pool.add(run.start), target) };
                len += num_own;
                run.start += num_own * self.width;
                run.len -= num_own;
                if run.len == 0 {
                    rest = runs.next();
                }
            }
            let tile = ValueTile::<f32> {
                weights: self.weights,
                v_pool: staged.as_ptr(),
                runs: &[Run { start: 0, offset, len }],
                width: self.width,
                values: self.values,
                adds,
            };
            // SAFETY: the caller's guarantees, and the positions' rows are in `staged`.
            unsafe { tile.compute_all::<V>(num_rows, wide) };
            if rest.is_none() {
                return;
            }
            offset += len as isize;
            adds = true;
        }
    }

    /// Computes `ROWS` rows, `VECTORS` vectors of values at a time, and returns `ROWS`.
    ///
    /// # Safety
    /// There are `ROWS` rows, and all pointers hold what their descriptions say.
    #[inline(always)]
    unsafe fn compute<V: F32x16, const ROWS: usize, const VECTORS: usize>(&self) -> usize {
        let mut column = 0;
        while column < self.width {
            // SAFETY: the caller's guarantees; `column` leaves space for the computed vectors.
            unsafe {
                if self.width - column >= VECTORS * LANES {
                    self.compute_columns::<V, ROWS, VECTORS>(column);
                    column += VECTORS * LANES;
                } else {
                    self.compute_columns::<V, ROWS, 1>(column);
                    column += LANES;
                }
            }
        }
        ROWS
    }

    #[inline(always)]
    unsafe fn compute_columns<V: F32x16, const ROWS: usize, const VECTORS: usize>(&self, column: usize) {
        let mut sums = [[V::splat(0.0); VECTORS]; ROWS];
        // SAFETY: runs are `len` rows of `width` values, with weights at their offsets; the result has rows of `width`.
        unsafe {
            for (row, sums) in sums.iter_mut().enumerate().filter(|_| self.adds) {
                for (vector, sum) in sums.iter_mut().enumerate() {
                    *sum = V::load(self.values.add(row * self.width + column + vector * LANES));
                }
            }
            for run in self.runs {
                let weights = self.weights.offset(run.offset);
                for token in 0..run.len {
                    let value = self.v_pool.add(run.start + token * self.width + column);
                    let mut values = [V::splat(0.0); VECTORS];
                    for (vector, slot) in values.iter_mut().enumerate() {
                        *slot = E::load(value.add(vector * LANES));
                    }
                    for (row, sums) in sums.iter_mut().enumerate() {
                        let weight = V::splat(*weights.add(row * SCORE_STRIDE + token));
                        for (sum, value) in sums.iter_mut().zip(&values) {
                            *sum = weight.mul_add(*value, *sum);
                        }
                    }
                }
            }
            for (row, sums) in sums.iter().enumerate() {
                for (vector, sum) in sums.iter().enumerate() {
                    sum.store(self.values.add(row * self.width + column + vector * LANES));
                }
            }
        }
    }
}
