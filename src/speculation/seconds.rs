//! The time of a drafted token.

use std::time::Duration;

/// The decay of measurements with each further one.
const KEPT: f64 = 0.9;

/// A running mean of the time of a drafted token; 0 if none was drafted yet.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct SecondsPerToken(f64);

impl SecondsPerToken {
    /// The mean.
    #[must_use]
    pub fn get(self) -> f64 {
        self.0
    }

    /// Receives the time of a draft of this many tokens.
    pub fn learn(&mut self, time: Duration, num_tokens: usize) {
        let seconds = time.as_secs_f64() / num_tokens.max(1) as f64;
        self.0 = match self.0 {
            0.0 => seconds,
            before => KEPT * before + (1.0 - KEPT) * seconds,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mean_begins_with_the_first_and_follows_the_others() {
        let mut seconds = SecondsPerToken::default();
        assert_eq!(seconds.get(), 0.0);
        seconds.learn(Duration::from_millis(8), 4);
        assert!((seconds.get() - 0.002).abs() < 1e-9);
        // A rejected draft took its time too.
        seconds.learn(Duration::from_millis(12), 0);
        assert!((seconds.get() - 0.003).abs() < 1e-9);
    }
}
