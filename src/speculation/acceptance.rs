//! How often drafts are right, by what they come from.

use std::sync::{Mutex, PoisonError};

/// What a draft comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Evidence {
    /// So many tokens in front of it are alike.
    Match(usize),
    /// It goes on beside what was drafted before, of which the last so many tokens were right.
    Along(usize),
    /// Another model says so, or a block of the same one.
    Model,
}

/// Matches of up to so many tokens are counted together, and longer ones; behind them are those that go along.
const MATCHES: [usize; 5] = [2, 4, 8, 16, 32];
const ALONG: [usize; 3] = [0, 3, 15];
const NUM_CLASSES: usize = MATCHES.len() + 1 + ALONG.len() + 1 + 1;

/// The probability that is expected of each class before anything was tried.
const EXPECTED: [f32; NUM_CLASSES] = [0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.5, 0.6, 0.8, 0.9, 0.7];

/// What is expected weighs as much as so many tokens that were tried.
const EXPECTED_WEIGHT: f32 = 4.0;

/// What of the counts is left after each draft that was tried, and after each that was not: what once failed is tried again.
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
    let place = |bounds: &[usize], len: usize| bounds.iter().take_while(|most| len > **most).count();
    match evidence {
        Evidence::Match(len) => place(&MATCHES, len),
        Evidence::Along(len) => MATCHES.len() + 1 + place(&ALONG, len),
        Evidence::Model => NUM_CLASSES - 1,
    }
}

/// What an engine has learned of all of its sequences. It is what is expected of a new one.
#[derive(Debug, Default)]
pub struct Acceptance {
    counts: Mutex<[Counts; NUM_CLASSES]>,
}

impl Acceptance {
    fn chance(&self, class: usize) -> f32 {
        let counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner)[class];
        chance(counts, EXPECTED[class])
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

/// What was learned of one sequence.
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

    /// Hears that the first `num_right` of `num_tried` tokens were. What is behind the first wrong one says nothing.
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
        // A new sequence begins with what the others have seen.
        assert!(OwnAcceptance::default().chance(&all, Match(8)) < 0.25);
        // What failed is tried again some day, and then believed.
        for _ in 0..3_000 {
            own.chance(&all, Match(6));
        }
        assert!(own.chance(&all, Match(6)) > bad);
        (0..40).for_each(|_| own.learn(&all, Match(6), 8, 8));
        assert!(own.chance(&all, Match(6)) > 0.9);
    }

    #[test]
    fn what_is_behind_the_first_wrong_token_says_nothing() {
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
