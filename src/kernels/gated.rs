//! What is between the two halves of a gated network.

use crate::paged_cache::LANES;
use crate::pool::ThreadPool;
use crate::rows::RowsMut;
use crate::simd::{CpuLevel, F32x16, Kernel};

/// What becomes of the gate before it is multiplied with the other half.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// `g / (1 + e^-g)`.
    Silu,
    /// `g / 2 · (1 + tanh(√(2/π) · (g + 0.044715 · g³)))`.
    GeluTanh,
}

impl Activation {
    /// `[slope, cubic]`: all of them are `g / (1 + e^(-slope · (g + cubic · g³)))`.
    #[must_use]
    pub fn coefficients(self) -> [f32; 2] {
        match self {
            Self::Silu => [1.0, 0.0],
            // (1 + tanh(x)) / 2 is 1 / (1 + e^-2x); the root of 2/π twice.
            Self::GeluTanh => [1.595_769, 0.044_715],
        }
    }
}

/// `out = activation(gate) · up` for rows of both halves, one behind the other.
///
/// # Panics
/// If `out` has another number of rows, or rows that are not half as wide.
pub fn gated(
    activation: Activation,
    halves: &[f32],
    out: &mut [f32],
    width: usize,
    pool: &ThreadPool,
    level: CpuLevel,
) {
    /// Values of a task.
    const TASK: usize = 1024;
    assert_eq!(halves.len(), 2 * out.len(), "two halves for each row");
    let tasks_of_row = width.div_ceil(TASK);
    let num_rows = out.len().checked_div(width).unwrap_or(0);
    let rows = RowsMut::new(out, width);
    pool.run(num_rows * tasks_of_row, |task| {
        let (row, first) = (task / tasks_of_row, task % tasks_of_row * TASK);
        let len = TASK.min(width - first);
        let (gate, up) = halves[2 * row * width..][..2 * width].split_at(width);
        // SAFETY: each task has columns of its own.
        let out = unsafe { rows.part(row, first, len) };
        level.run(Gated { activation, gate: &gate[first..][..len], up: &up[first..][..len], out });
    });
}

struct Gated<'a> {
    activation: Activation,
    gate: &'a [f32],
    up: &'a [f32],
    out: &'a mut [f32],
}

impl Kernel for Gated<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: F32x16>(self) {
        let [slope, cubic] = self.activation.coefficients();
        let whole = |values: &[f32]| {
            let mut vector = [0.0; LANES];
            vector[..values.len()].copy_from_slice(values);
            vector
        };
        let inputs = self.gate.chunks(LANES).zip(self.up.chunks(LANES));
        for (out, (gate, up)) in self.out.chunks_mut(LANES).zip(inputs) {
            let (gate, up) = (whole(gate), whole(up));
            let mut result = [0.0; LANES];
            // SAFETY: the arrays have sixteen values.
            unsafe {
                let (gate, up) = (V::load(gate.as_ptr()), V::load(up.as_ptr()));
                let factor = gate.mul(gate).mul_add(V::splat(-slope * cubic), V::splat(-slope));
                let activated = gate.div(V::splat(1.0).add(gate.mul(factor).exp()));
                activated.mul(up).store(result.as_mut_ptr());
            }
            out.copy_from_slice(&result[..out.len()]);
        }
    }
}
