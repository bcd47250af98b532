//! The rate of accepted drafts, by their source.

use std::sync::{Mutex, PoisonError};

/// The source of a draft.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Evidence {
    /// This many tokens in front of it are alike.
    Match(usize),
    /// It continues the previous draft, of which this many of the last tokens were right.
    Along(usize),
    /// Another model drafts them, or a block of the same one.
    Model,
}

/// Matches of up to this many tokens are counted together, and longer ones; after them are those that go along.
const MATCHES: [usize; 5] = [2, 4, 8, 16, 32];
const ALONG: [usize; 3] = [0, 3, 15];
const NUM_CLASSES: usize = MATCHES.len() + 1 + ALONG.len() + 1 + 1;

/// The probability that is expected of each class before anything was tried.
const EXPECTED: [f32; NUM_CLASSES] = [0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.5, 0.6, 0.8, 0.9, 0.7];

/// The prior weighs as much as this many tried tokens.
const EXPECTED_WEIGHT: f32 = 4.0;

/// The decay of the counts after each draft that was tried, and after each that was not: failures are retried
/// eventually.
const KEPT_WHEN_TRIED: f32 = 0.95;
const KEPT_WHEN_SEEN: f32 = 0.998;

/// Counts of tokens that were tried, the older the less.
#[derive(Debug, Clone, Copy, Default)]
struct Counts {
    num_tried: f32,
    num_right: f32,
}

impl Counts {
    fn decay(&mut self, kept: f32) {
        self.num_tried *= kept;
        self.num_right *= kept;
    }

    fn add(&mut self, num_tried: f32, num_right: f32) {
        self.num_tried += num_tried;
        self.num_right += num_right;
    }
}

fn class(evidence: Evidence) -> usize {
    let bucket = |bounds: &[usize], len: usize| bounds.iter().take_while(|most| len > **most).count();
    match evidence {
        Evidence::Match(len) => bucket(&MATCHES, len),
        Evidence::Along(len) => MATCHES.len() + 1 + bucket(&ALONG, len),
        Evidence::Model => NUM_CLASSES - 1,
    }
}

/// The engine's statistics of all of its sequences, the prior of a new one.
#[derive(Debug, Default)]
pub struct Acceptance {
    counts: Mutex<[Counts; NUM_CLASSES]>,
}

impl Acceptance {
    fn chance(&self, class: usize) -> f32 {
        let counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner)[class];
        chance(counts, EXPECTED[class])
    }

    /// Nothing was tried in a step: failures are retried eventually.
    pub(crate) fn forget(&self, evidence: Evidence) {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)[class(evidence)].decay(KEPT_WHEN_SEEN);
    }

    fn learn(&self, class: usize, num_tried: f32, num_right: f32) {
        let counts = &mut self.counts.lock().unwrap_or_else(PoisonError::into_inner)[class];
        counts.decay(KEPT_WHEN_TRIED);
        counts.add(num_tried, num_right);
    }
}

fn chance(counts: Counts, expected: f32) -> f32 {
    (counts.num_right + expected * EXPECTED_WEIGHT) / (counts.num_tried + EXPECTED_WEIGHT)
}

/// Statistics of one sequence.
#[derive(Debug, Default)]
pub struct OwnAcceptance {
    counts: [Counts; NUM_CLASSES],
}

impl OwnAcceptance {
    /// The probability that a drafted token is right.
    pub fn chance(&mut self, all: &Acceptance, evidence: Evidence) -> f32 {
        let class = class(evidence);
        self.counts[class].decay(KEPT_WHEN_SEEN);
        chance(self.counts[class], all.chance(class))
    }

    /// Receives that the first `num_right` of `num_tried` tokens were right. Tokens after the first wrong one are not
    /// counted.
    pub fn learn(&mut self, all: &Acceptance, evidence: Evidence, num_tried: usize, num_right: usize) {
        let class = class(evidence);
        let (num_tried, num_right) = (num_tried.min(num_right + 1) as f32, num_right as f32);
        self.counts[class].decay(KEPT_WHEN_TRIED);
        self.counts[class].add(num_tried, num_right);
        all.learn(class, num_tried, num_right);
    }
}

#[cfg(test)]
mod tests {
    use super::Evidence::{Along, Match};
    use super::*;

    #[test]
    fn chances_follow_what_was_seen_and_come_back() {
        let (all, mut own) = (Acceptance::default(), OwnAcceptance::default());
        let expected = own.chance(&all, Match(6));
        assert!((expected - 0.7).abs() < 1e-6);
        (0..40).for_each(|_| own.learn(&all, Match(6), 8, 0));
        let bad = own.chance(&all, Match(6));
        assert!(bad < 0.15, "{bad}");
        // Other lengths have their own.
        assert!((own.chance(&all, Match(3)) - 0.5).abs() < 1e-6);
        assert!((own.chance(&all, Along(6)) - 0.8).abs() < 1e-6);
        // A new sequence begins with the statistics of the others.
        assert!(OwnAcceptance::default().chance(&all, Match(8)) < 0.25);
        // Failures are retried eventually, and successes count then.
        for _ in 0..3_000 {
            own.chance(&all, Match(6));
        }
        assert!(own.chance(&all, Match(6)) > bad);
        (0..40).for_each(|_| own.learn(&all, Match(6), 8, 8));
        assert!(own.chance(&all, Match(6)) > 0.9);
    }

    #[test]
    fn tokens_after_the_first_wrong_one_do_not_count() {
        let (all, mut own) = (Acceptance::default(), OwnAcceptance::default());
        (0..200).for_each(|_| own.learn(&all, Match(1), 8, 3));
        let chance = own.chance(&all, Match(1));
        assert!((chance - 0.75).abs() < 0.03, "{chance}");
    }

    #[test]
    fn every_length_has_a_class() {
        let classes: Vec<usize> = [1, 2, 3, 4, 5, 16, 17, 32, 33, 9_999].map(|len| class(Match(len))).into();
        assert_eq!(classes, [0, 0, 1, 1, 2, 3, 4, 4, 5, 5]);
        assert_eq!([0, 1, 3, 4, 15, 16, 999].map(|len| class(Along(len))), [6, 7, 7, 8, 8, 9, 9]);
    }
}
