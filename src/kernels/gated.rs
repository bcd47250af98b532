//! The activations of gated feed-forward networks.

use crate::paged_cache::LANES;
use crate::pool::ThreadPool;
use crate::rows::RowsMut;
use crate::simd::{CpuLevel, F32x16, Kernel};

/// The activation of the two halves, `g` and `u`, of a gated network.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Activation {
    /// `g / (1 + e^-g) · u`.
    Silu,
    /// `g / 2 · (1 + tanh(√(2/π) · (g + 0.044715 · g³))) · u`.
    GeluTanh,
    /// `g / (1 + e^(-alpha · g)) · (u + 1)`, with `g` at most `limit` and `u` from `-limit` to `limit`.
    ClampedSwiglu {
        /// The slope of the sigmoid.
        alpha: f32,
        /// The bound of both halves; positive.
        limit: f32,
    },
}

/// The common form: `g / (1 + e^(-slope · (g + cubic · g³))) · (u + shift)`, with `g` at most `limit` and `u` from
/// `-limit` to `limit`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GatedFormula {
    /// The slope of the sigmoid at 0.
    pub slope: f32,
    /// The coefficient of the cubic term.
    pub cubic: f32,
    /// The bound of both halves; `f32::MAX` is none.
    pub limit: f32,
    /// The term added to the other half.
    pub shift: f32,
}

impl Activation {
    /// Its coefficients.
    #[must_use]
    pub fn formula(self) -> GatedFormula {
        let plain = GatedFormula { slope: 1.0, cubic: 0.0, limit: f32::MAX, shift: 0.0 };
        match self {
            Self::Silu => plain,
            // (1 + tanh(x)) / 2 is 1 / (1 + e^-2x); the root of 2/π twice.
            Self::GeluTanh => GatedFormula { slope: 1.595_769, cubic: 0.044_715, ..plain },
            Self::ClampedSwiglu { alpha, limit } => GatedFormula { slope: alpha, limit, shift: 1.0, ..plain },
        }
    }
}

impl GatedFormula {
    /// As GPUs have it.
    #[must_use]
    pub fn to_array(self) -> [f32; 4] {
        [self.slope, self.cubic, self.limit, self.shift]
    }

    /// Of sixteen values of both halves.
    #[inline(always)]
    pub(crate) fn of<V: F32x16>(self, gate: V, up: V) -> V {
        let Self { slope, cubic, limit, shift } = self;
        let (mut gate, mut up) = (gate, up);
        if limit < f32::MAX {
            // The order of operands keeps NaN.
            let limits = V::splat(limit);
            gate = limits.min(gate);
            up = V::splat(-limit).max(limits.min(up));
        }
        if shift != 0.0 {
            up = up.add(V::splat(shift));
        }
        let mut factor = V::splat(-slope);
        if cubic != 0.0 {
            factor = gate.mul(gate).mul_add(V::splat(-slope * cubic), factor);
        }
        gate.div(V::splat(1.0).add(gate.mul(factor).exp())).mul(up)
    }
}

/// `out = activation(gate, up)` for rows of both halves, one after the other.
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
        let out = unsafe { rows.range(row, first, len) };
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
        let formula = self.activation.formula();
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
                formula.of(gate, up).store(result.as_mut_ptr());
            }
            out.copy_from_slice(&result[..out.len()]);
        }
    }
}
