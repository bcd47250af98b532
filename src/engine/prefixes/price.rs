//! Decides whether a prefix is read or computed, by the measured times of both.
//!
//! Computing is measured with every prompt. Reading is tried now and then even if it seemed slower, a few blocks at a
//! time, so that a wrong estimate corrects itself.

use std::time::{Duration, Instant};

/// The fixed cost of a fetch, in seconds: a thread is woken, and a file is opened.
const FETCH_SECONDS: f64 = 0.5e-3;
/// Blocks that the mean is over.
const MEMORY: u32 = 64;
/// How many blocks an estimate counts that is old or comes from the start.
const DOUBTED: u32 = 1;
/// How often reading is tried where it seems to be dearer, and with how many blocks.
const TRIAL_INTERVAL: Duration = Duration::from_secs(30);
pub(super) const TRIAL_BLOCKS: usize = 4;

/// The decision on a prefix that could be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Decision {
    Read,
    /// Its first blocks are read, to measure the time.
    Try,
    Compute,
}

/// The time of reading blocks, in seconds.
#[derive(Debug)]
pub(super) struct ReadPrice {
    block: f64,
    /// Blocks that this is the mean of, as far as it remembers.
    num_blocks: u32,
    /// When anything was read last.
    last_read: Option<Instant>,
    was_said: [bool; 2],
}

impl ReadPrice {
    /// Starts with the expected time of a block.
    pub(super) fn expected(block: f64) -> Self {
        Self { block, num_blocks: DOUBTED, last_read: None, was_said: [false; 2] }
    }

    /// A block took so long.
    pub(super) fn learn(&mut self, seconds: f64) {
        self.num_blocks = (self.num_blocks + 1).min(MEMORY);
        self.block += (seconds - self.block) / f64::from(self.num_blocks);
    }

    /// Decides on `num_blocks` that can be read after `num_ahead` others, and whose computation takes `compute`
    /// seconds, if that is known.
    pub(super) fn decide(
        &mut self,
        num_blocks: usize,
        num_ahead: usize,
        compute: Option<f64>,
        now: Instant,
    ) -> Decision {
        let read = FETCH_SECONDS + (num_ahead + num_blocks) as f64 * self.block;
        let decision = match compute {
            Some(compute) if read >= compute => {
                match self.last_read.is_some_and(|last| now.saturating_duration_since(last) < TRIAL_INTERVAL)
                {
                    true => Decision::Compute,
                    false => Decision::Try,
                }
            }
            _ => Decision::Read,
        };
        if decision == Decision::Try {
            self.num_blocks = self.num_blocks.min(DOUBTED);
        }
        if decision != Decision::Compute {
            self.last_read = Some(now);
        }
        decision
    }

    /// The message for the first time that prefixes are read, and for the first time that they are not. `block` is the
    /// time of computing one.
    pub(super) fn line(&mut self, decision: Decision, block: f64) -> Option<String> {
        let is_read = decision == Decision::Read;
        if std::mem::replace(&mut self.was_said[usize::from(is_read)], true) {
            return None;
        }
        let what = if is_read { "are read" } else { "are computed and not read" };
        let milliseconds = |seconds: f64| seconds * 1e3;
        Some(format!(
            "cached prefixes {what}: a block takes {:.2} ms to read and {:.2} ms to compute",
            milliseconds(self.block),
            milliseconds(block)
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const READ: f64 = 1e-3;

    /// The decision on `num_blocks` if computing one takes `compute` seconds.
    fn decided(price: &mut ReadPrice, num_blocks: usize, compute: f64, now: Instant) -> Decision {
        price.decide(num_blocks, 0, Some(compute * num_blocks as f64), now)
    }

    #[test]
    fn what_is_cheaper_is_done() {
        let now = Instant::now();
        let mut price = ReadPrice { last_read: Some(now), ..ReadPrice::expected(READ) };
        assert_eq!(decided(&mut price, 100, 2e-3, now), Decision::Read);
        assert_eq!(decided(&mut price, 100, 0.9e-3, now), Decision::Compute);
        // One block is not worth a fetch that a hundred are.
        assert_eq!(decided(&mut price, 1, 1.2e-3, now), Decision::Compute);
        assert_eq!(decided(&mut price, 100, 1.2e-3, now), Decision::Read);
        // Others are read first.
        assert_eq!(price.decide(100, 200, Some(0.2), now), Decision::Compute);
        assert_eq!(price.decide(100, 200, None, now), Decision::Read, "nothing is known of computing");
    }

    #[test]
    fn a_wrong_estimate_mends_itself_by_rare_trials() {
        let (start, mut price, mut trials) = (Instant::now(), ReadPrice::expected(1.0), Vec::new());
        for second in 0..600 {
            match decided(&mut price, 50, 10e-3, start + Duration::from_secs(second)) {
                Decision::Compute => {}
                Decision::Try => {
                    trials.push(second);
                    (0..TRIAL_BLOCKS).for_each(|_| price.learn(1e-3));
                }
                Decision::Read => break,
            }
        }
        assert!((2..=10).contains(&trials.len()), "{trials:?}");
        assert!(trials.windows(2).all(|pair| pair[1] - pair[0] >= 30), "{trials:?}");
        // The reverse: prefixes that are read too slowly are no longer read.
        let now = start + Duration::from_secs(600);
        assert_eq!(decided(&mut price, 50, 10e-3, now), Decision::Read);
        (0..50).for_each(|_| price.learn(50e-3));
        assert_eq!(decided(&mut price, 50, 10e-3, now), Decision::Compute);
    }

    #[test]
    fn each_decision_is_logged_once_with_both_figures() {
        let mut price = ReadPrice::expected(READ);
        let line = price.line(Decision::Compute, 0.25e-3).unwrap();
        assert!(line.contains("computed") && line.contains("1.00 ms") && line.contains("0.25 ms"), "{line}");
        assert_eq!(price.line(Decision::Try, 0.25e-3), None);
        assert!(price.line(Decision::Read, 5e-3).unwrap().contains("are read"));
        assert_eq!(price.line(Decision::Read, 5e-3), None);
    }
}
