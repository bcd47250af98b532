//! Norms of a residual's addend, and of a range of a row.

use crate::pool::ThreadPool;
use crate::rope::{Norm, norm_factor};
use crate::rows::RowsMut;
use crate::simd::{CpuLevel, F32x16, Kernel};

/// `out += w · x / √(mean(x²) + eps)` for rows as wide as the norm.
///
/// # Panics
/// If `x` and `out` have other numbers of values.
pub fn norm_residual(norm: Norm<'_>, x: &[f32], out: &mut [f32], pool: &ThreadPool, level: CpuLevel) {
    assert_eq!(x.len(), out.len(), "as many rows");
    let width = norm.weight.len();
    let num_rows = x.len().checked_div(width).unwrap_or(0);
    let rows = RowsMut::new(out, width);
    pool.run(num_rows, |row| {
        // SAFETY: each task has a row of its own.
        let out = unsafe { rows.get(row) };
        level.run(NormResidual { norm, x: &x[row * width..][..width], out });
    });
}

struct NormResidual<'a> {
    norm: Norm<'a>,
    x: &'a [f32],
    out: &'a mut [f32],
}

impl Kernel for NormResidual<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: F32x16>(self) {
        let factor = norm_factor::<V>(self.x, self.norm.eps);
        for ((out, x), weight) in self.out.iter_mut().zip(self.x).zip(self.norm.weight) {
            *out += x * factor * weight;
        }
    }
}

/// `x = w · x / √(mean(x²) + eps)` for `weight.len()` values of each row of `width`, from `first` on.
///
/// # Panics
/// If the rows are not so wide.
pub fn norm_part(
    norm: Norm<'_>,
    x: &mut [f32],
    width: usize,
    first: usize,
    pool: &ThreadPool,
    level: CpuLevel,
) {
    let len = norm.weight.len();
    assert!(first + len <= width, "{len} values from {first} on do not fit rows of {width}");
    let num_rows = x.len().checked_div(width).unwrap_or(0);
    let rows = RowsMut::new(x, width);
    pool.run(num_rows, |row| {
        // SAFETY: each task has a row of its own.
        let x = unsafe { rows.range(row, first, len) };
        level.run(NormPart { norm, x });
    });
}

struct NormPart<'a> {
    norm: Norm<'a>,
    x: &'a mut [f32],
}

impl Kernel for NormPart<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: F32x16>(self) {
        let factor = norm_factor::<V>(self.x, self.norm.eps);
        for (x, weight) in self.x.iter_mut().zip(self.norm.weight) {
            *x *= factor * weight;
        }
    }
}
