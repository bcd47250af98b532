//! Means, medians and percentiles, as NumPy defines them.

/// Numbers in ascending order. All statistics of no numbers are 0.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Distribution {
    sorted: Vec<f64>,
}

impl Distribution {
    pub(super) fn of(numbers: impl IntoIterator<Item = f64>) -> Self {
        let mut sorted: Vec<f64> = numbers.into_iter().collect();
        sorted.sort_by(f64::total_cmp);
        Self { sorted }
    }

    pub(super) fn mean(&self) -> f64 {
        total(self.sorted.iter().copied()) / self.sorted.len().max(1) as f64
    }

    /// The standard deviation of these numbers, not an estimate for a larger population.
    pub(super) fn standard_deviation(&self) -> f64 {
        let mean = self.mean();
        let squares = total(self.sorted.iter().map(|number| (number - mean).powi(2)));
        (squares / self.sorted.len().max(1) as f64).sqrt()
    }

    pub(super) fn median(&self) -> f64 {
        self.percentile(50.0)
    }

    /// The percentile for `percent` from 0 to 100, interpolated between numbers.
    pub(super) fn percentile(&self, percent: f64) -> f64 {
        let Some(last) = self.sorted.len().checked_sub(1) else { return 0.0 };
        let position = last as f64 * (percent / 100.0).clamp(0.0, 1.0);
        let below = position.floor() as usize;
        let above = (below + 1).min(last);
        let share = position - position.floor();
        self.sorted[below] + (self.sorted[above] - self.sorted[below]) * share
    }
}

/// The sum. For no numbers it is 0, and not the −0 of `Iterator::sum`.
fn total(numbers: impl Iterator<Item = f64>) -> f64 {
    numbers.fold(0.0, |sum, number| sum + number)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn known_values() {
        // numpy.percentile([15, 20, 35, 40, 50], …)
        let numbers = Distribution::of([35.0, 15.0, 50.0, 20.0, 40.0]);
        for (percent, wanted) in
            [(0.0, 15.0), (5.0, 16.0), (30.0, 23.0), (40.0, 29.0), (50.0, 35.0), (99.0, 49.6), (100.0, 50.0)]
        {
            let found = numbers.percentile(percent);
            assert!((found - wanted).abs() < 1e-9, "{percent}: {found}");
        }
        assert_eq!((numbers.mean(), numbers.median()), (32.0, 35.0));
        assert!((numbers.standard_deviation() - 12.884_098_726_725_126).abs() < 1e-12);
        assert_eq!(Distribution::of([4.0, 1.0]).median(), 2.5);
        let none = Distribution::default();
        for zero in [none.mean(), none.standard_deviation(), none.percentile(99.0)] {
            assert!(zero == 0.0 && zero.is_sign_positive());
        }
    }

    proptest! {
        /// By definition: how many numbers are at most the percentile, and how many at least.
        #[test]
        fn the_percentile_is_the_fraction_below(
            numbers in prop::collection::vec(-1e6_f64..1e6, 1..60),
            percent in 0.0_f64..=100.0,
        ) {
            let found = Distribution::of(numbers.clone()).percentile(percent);
            let position = (numbers.len() - 1) as f64 * percent / 100.0;
            // Interpolation rounds.
            let at_most = numbers.iter().filter(|number| **number <= found + 1e-6).count();
            let at_least = numbers.iter().filter(|number| **number >= found - 1e-6).count();
            prop_assert!(at_most as f64 > position - 1e-6);
            prop_assert!(at_least as f64 >= numbers.len() as f64 - position - 1.0 - 1e-6);
        }
    }
}
