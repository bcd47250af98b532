//! The times of requests: an open loop, whose times are fixed before the first request.
//!
//! The times do not depend on how fast the server answers, so requests keep coming while it is slow. Pure:
//! the same seed gives the same times.

use std::time::Duration;

use super::random::Random;

/// The distribution of arrivals.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Arrivals {
    /// Requests per second; infinite sends all at once.
    pub(super) rate: f64,
    /// Shape of the gamma distribution of the intervals: 1 is a Poisson process, smaller values are burstier,
    /// larger ones are more even, and infinite is a fixed interval.
    pub(super) burstiness: f64,
}

impl Arrivals {
    /// Times from the start, ascending.
    ///
    /// The last time is `num_requests / rate` for every seed. The drawn intervals are scaled by the one or
    /// two per cent that their sum differs, so that runs with different seeds have the same load.
    pub(super) fn times(self, num_requests: usize, random: &mut Random) -> Vec<Duration> {
        if self.rate.is_infinite() {
            return vec![Duration::ZERO; num_requests];
        }
        let mut total = 0.0;
        let mut times = Vec::with_capacity(num_requests);
        for _ in 0..num_requests {
            total += if self.burstiness.is_infinite() { 1.0 } else { random.gamma(self.burstiness) };
            times.push(total);
        }
        let wanted = num_requests as f64 / self.rate;
        // With a tiny shape, all draws can be 0.
        let scale = if total > 0.0 { wanted / total } else { 0.0 };
        let time = |drawn: &f64| Duration::try_from_secs_f64(drawn * scale).unwrap_or(Duration::MAX);
        times.iter().map(time).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn intervals(rate: f64, burstiness: f64, seed: u64) -> Vec<f64> {
        let times = Arrivals { rate, burstiness }.times(20_000, &mut Random::new(seed));
        let starts = std::iter::once(Duration::ZERO).chain(times.iter().copied());
        starts.zip(&times).map(|(before, after)| (*after - before).as_secs_f64()).collect()
    }

    #[test]
    fn intervals_have_the_mean_and_the_spread_of_their_distribution() {
        for (rate, burstiness) in [(10.0, 1.0), (250.0, 0.4), (3.0, 5.0)] {
            let intervals = intervals(rate, burstiness, 11);
            let mean = intervals.iter().sum::<f64>() / intervals.len() as f64;
            assert!((mean * rate - 1.0).abs() < 1e-6, "{mean}");
            // The coefficient of variation of a gamma distribution is 1/√shape.
            let variance = intervals.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / intervals.len() as f64;
            let variation = variance.sqrt() / mean;
            assert!((variation * burstiness.sqrt() - 1.0).abs() < 0.05, "{burstiness}: {variation}");
        }
    }

    #[test]
    fn a_poisson_process_has_exponential_intervals() {
        let intervals = intervals(1.0, 1.0, 3);
        for share in [0.1_f64, 0.5, 0.9] {
            let limit = -(1.0 - share).ln();
            let found = intervals.iter().filter(|x| **x <= limit).count() as f64 / intervals.len() as f64;
            assert!((found - share).abs() < 0.02, "{limit}: {found}");
        }
    }

    #[test]
    fn the_seed_decides() {
        assert_eq!(intervals(5.0, 1.0, 1), intervals(5.0, 1.0, 1));
        assert_ne!(intervals(5.0, 1.0, 1), intervals(5.0, 1.0, 2));
    }

    #[test]
    fn fixed_intervals_and_all_at_once() {
        let fixed = Arrivals { rate: 4.0, burstiness: f64::INFINITY }.times(3, &mut Random::new(0));
        assert_eq!(fixed, [250, 500, 750].map(Duration::from_millis));
        let at_once = Arrivals { rate: f64::INFINITY, burstiness: 1.0 }.times(2, &mut Random::new(0));
        assert_eq!(at_once, [Duration::ZERO; 2]);
    }
}
