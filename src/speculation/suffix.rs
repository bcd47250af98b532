//! Drafts from a sequence's earlier tokens.

use std::sync::Arc;

use super::acceptance::{Evidence, OwnAcceptance};
use super::suffix_automaton::{Match, SuffixAutomaton};
use super::{Acceptance, Draft, DraftSource, DraftedSequence, Drafter};

/// No token: no match continues across it.
const SEPARATOR: u32 = u32::MAX;

/// At the beginning of an output, the prediction is trusted as if this many tokens before had been right.
const TRUST_IN_PREDICTION: usize = 16;

/// Starts drafters that look their tokens up in the sequence itself.
#[derive(Debug)]
pub struct LookupSource {
    min_match: usize,
    max_match: usize,
    acceptance: Arc<Acceptance>,
}

impl LookupSource {
    /// Fewest tokens of a suffix that is worth a try.
    const MIN_SUFFIX: usize = 2;

    /// The longest suffix that was there before.
    #[must_use]
    pub fn suffix() -> Self {
        Self::ngram(Self::MIN_SUFFIX, usize::MAX)
    }

    /// A suffix of at least `min` tokens, of which no more than `max` count.
    #[must_use]
    pub fn ngram(min: usize, max: usize) -> Self {
        Self { min_match: min.max(1), max_match: max, acceptance: Arc::default() }
    }
}

impl DraftSource for LookupSource {
    fn start(&self, sequence: &DraftedSequence<'_>) -> Box<dyn Drafter> {
        let DraftedSequence { num_predicted, num_prompt_tokens, .. } = *sequence;
        Box::new(LookupDrafter {
            min_match: self.min_match,
            max_match: self.max_match,
            automaton: SuffixAutomaton::default(),
            num_predicted,
            first_output: num_predicted + usize::from(num_predicted > 0) + num_prompt_tokens,
            along: None,
            all: Arc::clone(&self.acceptance),
            own: OwnAcceptance::default(),
            evidence: Evidence::Match(0),
        })
    }
}

/// Drafts the continuation of the longest suffix of the sequence that occurred before.
#[derive(Debug)]
struct LookupDrafter {
    min_match: usize,
    max_match: usize,
    /// The prediction and a separator, if there is a prediction, and the sequence.
    automaton: SuffixAutomaton,
    num_predicted: usize,
    /// Where the output begins among these.
    first_output: usize,
    /// The position in earlier tokens that the sequence currently follows.
    along: Option<Along>,
    all: Arc<Acceptance>,
    own: OwnAcceptance,
    /// The source of the last draft.
    evidence: Evidence,
}

/// A position among earlier tokens that advances with each new one, right or not: text that is edited changes here and
/// there and continues as before.
#[derive(Debug, Clone, Copy)]
struct Along {
    position: usize,
    /// This many of the last tokens matched those at the position.
    num_right: usize,
}

impl LookupDrafter {
    /// The start of the continuation, and its evidence: the longer one of a match and of the followed tokens.
    fn find(&mut self) -> Option<(Evidence, usize)> {
        let found = self.automaton.longest_match().filter(|found| found.len >= self.min_match);
        let is_longer = |len: usize| self.along.is_none_or(|along| len > along.num_right);
        if let Some(Match { len, end }) = found.filter(|found| is_longer(found.len)) {
            let len = len.min(self.max_match);
            self.along = Some(Along { position: end, num_right: len });
            return Some((Evidence::Match(len), end));
        }
        self.along.map(|Along { position, num_right }| (Evidence::Along(num_right), position))
    }

    fn go_along(&mut self, token_id: u32) {
        let Some(Along { position, num_right }) = &mut self.along else { return };
        let is_right = self.automaton.token_ids().get(*position) == Some(&token_id);
        *num_right = if is_right { *num_right + 1 } else { 0 };
        *position += 1;
        if *position == self.num_predicted {
            self.along = None;
        }
    }
}

impl Drafter for LookupDrafter {
    fn extend(&mut self, token_ids: &[u32]) {
        for &token_id in token_ids {
            let position = self.automaton.token_ids().len();
            if position == self.num_predicted && position > 0 {
                self.automaton.push(SEPARATOR);
            }
            if position >= self.first_output {
                self.go_along(token_id);
            }
            self.automaton.push(token_id);
            if self.num_predicted > 0 && self.automaton.token_ids().len() == self.first_output {
                self.along = Some(Along { position: 0, num_right: TRUST_IN_PREDICTION });
            }
        }
    }

    fn draft(&mut self, max_tokens: usize, draft: &mut Draft) {
        let Some((evidence, start)) = self.find() else { return };
        self.evidence = evidence;
        let chance = self.own.chance(&self.all, evidence);
        let token_ids = self.automaton.token_ids();
        for position in start..start + max_tokens {
            // Repeated text continues: after the last token come those of the draft.
            let token_id =
                token_ids.get(position).or_else(|| draft.token_ids.get(position - token_ids.len()));
            match token_id.copied() {
                Some(token_id) if token_id != SEPARATOR => draft.push(token_id, chance),
                _ => break,
            }
        }
    }

    fn learn(&mut self, num_tried: usize, num_right: usize) {
        self.own.learn(&self.all, self.evidence, num_tried, num_right);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampling::SamplingParams;

    fn start(source: &LookupSource, num_predicted: usize, num_prompt_tokens: usize) -> Box<dyn Drafter> {
        let params = &SamplingParams::default();
        source.start(&DraftedSequence {
            num_predicted,
            num_prompt_tokens,
            params,
            seed: 0,
            stream: 0,
            end_token_ids: &[],
        })
    }

    fn draft(source: &LookupSource, token_ids: &[u32], max_tokens: usize) -> Vec<u32> {
        let mut drafter = start(source, 0, token_ids.len());
        drafter.extend(token_ids);
        let mut draft = Draft::default();
        drafter.draft(max_tokens, &mut draft);
        assert_eq!(draft.token_ids.len(), draft.chances.len());
        draft.token_ids
    }

    #[test]
    fn what_followed_before_may_follow_again() {
        let suffix = LookupSource::suffix();
        assert_eq!(draft(&suffix, &[1, 2, 3, 4, 5, 9, 1, 2, 3], 4), [4, 5, 9, 1]);
        assert_eq!(draft(&suffix, &[1, 2, 3, 4, 5, 9, 1, 2, 3], 2), [4, 5]);
        // The longest match counts, not the last one of fewer tokens.
        assert_eq!(draft(&suffix, &[1, 2, 3, 7, 2, 3, 8, 1, 2, 3], 1), [7]);
        // Of matches of one length the last one.
        assert_eq!(draft(&suffix, &[2, 3, 7, 9, 2, 3, 8, 1, 2, 3], 1), [8]);
        // A loop continues.
        assert_eq!(draft(&suffix, &[5, 6, 5, 6, 5], 5), [6, 5, 6, 5, 6]);
        for nothing in [&[][..], &[1], &[1, 2, 3], &[1, 2, 3, 1]] {
            assert!(draft(&suffix, nothing, 4).is_empty(), "{nothing:?}");
        }
    }

    #[test]
    fn a_prediction_is_followed_and_found_again() {
        let check = |output: &[u32], wanted: &[u32]| {
            let mut drafter = start(&LookupSource::suffix(), 5, 2);
            drafter.extend(&[5, 6, 7]);
            drafter.extend(&[8, 9, 1, 2]);
            drafter.extend(output);
            let mut draft = Draft::default();
            drafter.draft(3, &mut draft);
            assert_eq!(draft.token_ids, wanted, "{output:?}");
        };
        check(&[], &[5, 6, 7]);
        check(&[5], &[6, 7, 8]);
        check(&[5, 6, 7, 8], &[9]);
        check(&[5, 6, 7, 8, 9], &[]);
        // One token differs; then it continues.
        check(&[5, 3], &[7, 8, 9]);
        check(&[5, 3, 7], &[8, 9]);
        // It diverged and came back: the match is longer than the followed tokens.
        check(&[5, 3, 4, 6, 7], &[8, 9]);
        check(&[3, 3, 3, 3, 3, 5, 6, 7], &[8, 9]);
    }

    #[test]
    fn an_ngram_has_a_least_length() {
        let tokens = [1, 2, 3, 4, 1, 2, 3];
        assert_eq!(draft(&LookupSource::ngram(3, 5), &tokens, 2), [4, 1]);
        assert!(draft(&LookupSource::ngram(4, 5), &tokens, 2).is_empty());
        assert_eq!(draft(&LookupSource::ngram(1, 1), &[1, 2, 1], 2), [2, 1]);
    }
}
