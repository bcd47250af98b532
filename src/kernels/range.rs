//! How large the outputs of a matmul can be, before anything is multiplied.

/// Sums that are made side by side.
const LANES: usize = 16;

/// The outputs of some rows for any vector of a length that is scaled and to which biases are added.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct OutputRange {
    /// No output is larger than this; not a number if a weight is none.
    pub at_most: f32,
    /// Some output is always at least this large, because its bias is more than the rest can take away; 0 if none is.
    pub at_least: f32,
}

impl OutputRange {
    /// The range of `row · (scale ∘ x) + bias` for all rows, where `x` has the length `length` and any direction. A row
    /// has `scale.len()` values; without `biases` they are 0.
    #[must_use]
    pub fn of(rows: &[f32], scale: &[f32], biases: Option<&[f32]>, length: f32) -> Self {
        let mut range = Self::default();
        for (index, row) in rows.chunks_exact(scale.len().max(1)).enumerate() {
            let reach = length * scaled_length(row, scale);
            let bias = biases.and_then(|biases| biases.get(index)).map_or(0.0, |bias| bias.abs());
            range = range.and(Self { at_most: bias + reach, at_least: (bias - reach).max(0.0) });
        }
        range
    }

    /// The union of both. NaN stays NaN.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        let at_most =
            if self.at_most > other.at_most || self.at_most.is_nan() { self } else { other }.at_most;
        Self { at_most, at_least: self.at_least.max(other.at_least) }
    }
}

/// The length of a row whose values are scaled.
fn scaled_length(row: &[f32], scale: &[f32]) -> f32 {
    let mut sums = [0.0_f32; LANES];
    let (rows, rest) = row.as_chunks::<LANES>();
    let (scales, rest_scale) = scale.as_chunks::<LANES>();
    for (values, factors) in rows.iter().zip(scales) {
        for lane in 0..LANES {
            let value = values[lane] * factors[lane];
            sums[lane] += value * value;
        }
    }
    for (value, factor) in rest.iter().zip(rest_scale) {
        sums[0] += (value * factor) * (value * factor);
    }
    sums.iter().sum::<f32>().sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outputs_reach_as_far_as_the_length_of_rows_and_biases_let_them() {
        let rows: Vec<f32> = (0..2 * 20).map(|index| if index < 20 { 3.0 } else { 0.0 }).collect();
        let range = OutputRange::of(&rows, &[2.0; 20], None, 0.5);
        assert!((range.at_most - 0.5 * (20.0_f32 * 36.0).sqrt()).abs() < 1e-4, "{range:?}");
        assert_eq!(range.at_least, 0.0);
        let range = OutputRange::of(&rows, &[2.0; 20], Some(&[-100.0, 7.0]), 0.5);
        assert!((range.at_most + range.at_least - 200.0).abs() < 1e-3, "{range:?}");
        assert_eq!(OutputRange::of(&rows, &[2.0; 20], Some(&[0.0, 99.0]), 0.5).at_least, 99.0);
        assert!(OutputRange::of(&[f32::NAN, 1.0, 1.0, 1.0], &[1.0; 2], None, 1.0).at_most.is_nan());
        assert_eq!(OutputRange::of(&[], &[], None, 1.0), OutputRange::default());
    }
}
