//! Drafts under a constraint.
//!
//! A second state of the constraint, the scout, follows the sequence, advances through a draft, and rolls those tokens
//! back. So the findings, costs and errors of drafting do not affect the sequence's own state.
//!
//! Where only one token or text is allowed, that is the draft; otherwise it is the drafter's, as far as the constraint
//! allows it.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::constrained::{Ends, Next};
use crate::Result;
use crate::sampling::{ConstraintState, TokenMask};
use crate::speculation::Draft;

/// How likely a token of a forced text is expected to come: the text must, but not cut into these tokens. The last one may be
/// the beginning of a longer token.
const EXPECTED: Chances = Chances { inside: 0.9, last: 0.4 };

/// The decay of statistics with each further draft.
const KEPT: f32 = 0.9;

/// The fraction of the time for drafting that remains after failures.
const LEAST_TIME: f32 = 0.1;

/// How likely tokens of a forced text are to come.
#[derive(Debug, Clone, Copy)]
struct Chances {
    inside: f32,
    last: f32,
}

/// How far to go.
#[derive(Debug, Clone)]
pub(super) struct DraftLimits {
    pub(super) max_tokens: usize,
    /// The mask of the next token is there and waits for this.
    pub(super) max_time: Duration,
    /// The drafter's proposal.
    pub(super) hint: Draft,
}

/// The second state, and its findings.
pub(super) struct Scout {
    state: Box<dyn ConstraintState>,
    draft: Draft,
    /// The allowed tokens after each token of the draft.
    allowed: Vec<TokenMask>,
    /// Tokens at the beginning of the draft that are forced.
    num_forced: usize,
    /// The last of them is the last one of a forced text.
    is_whole: bool,
    chances: Chances,
    /// The excess time of drafting, which has to be repaid token by token before the next draft.
    debt: Duration,
}

impl Scout {
    pub(super) fn new(state: Box<dyn ConstraintState>) -> Self {
        Self {
            state,
            draft: Draft::default(),
            allowed: Vec::new(),
            num_forced: 0,
            is_whole: false,
            chances: EXPECTED,
            debt: Duration::ZERO,
        }
    }

    pub(super) fn drafted(&self) -> &Draft {
        &self.draft
    }

    pub(super) fn allowed(&self) -> &[TokenMask] {
        &self.allowed
    }

    /// Takes tokens of the sequence.
    pub(super) fn follow(&mut self, token_ids: &[u32]) -> Result<()> {
        token_ids.iter().try_for_each(|token_id| self.state.accept(*token_id))
    }

    /// Drafts after `num_output_tokens` tokens, where `next` may follow.
    pub(super) fn draft(
        &mut self,
        ends: &Ends,
        next: &TokenMask,
        num_output_tokens: usize,
        limits: &DraftLimits,
    ) -> Result<()> {
        self.draft.clear();
        self.allowed.clear();
        (self.num_forced, self.is_whole) = (0, false);
        // Rarely successful drafts get less time.
        let hinted = limits.hint.chances.first().copied().unwrap_or_default();
        let max_time = limits.max_time.mul_f32(self.chances.inside.max(hinted).clamp(LEAST_TIME, 1.0));
        if !self.debt.is_zero() {
            self.debt = self.debt.saturating_sub(max_time);
            return Ok(());
        }
        let start = Instant::now();
        let num_accepted = self.go_on(ends, next, num_output_tokens, limits, start + max_time)?;
        let taken_back = if num_accepted > 0 { self.state.roll_back(num_accepted) } else { Ok(()) };
        self.debt = start.elapsed().saturating_sub(max_time);
        taken_back
    }

    /// Advances through a draft, and returns how many tokens the state has accepted for it.
    fn go_on(
        &mut self,
        ends: &Ends,
        next: &TokenMask,
        num_output_tokens: usize,
        limits: &DraftLimits,
        deadline: Instant,
    ) -> Result<usize> {
        let mut forced = VecDeque::new();
        let mut num_accepted = 0;
        while self.draft.len() < limits.max_tokens && Instant::now() < deadline {
            let next = self.allowed.last().unwrap_or(next);
            let only = next.only();
            let is_forced_so_far = self.num_forced == self.draft.len();
            if only.is_none() && forced.is_empty() && is_forced_so_far {
                forced.extend(self.state.forced());
            }
            let (token_id, chance) = match (only, forced.front(), self.hinted(&limits.hint)) {
                (Some(token_id), ..) => (token_id, 1.0),
                (None, Some(token_id), _) if forced.len() == 1 => (*token_id, self.chances.last),
                (None, Some(token_id), _) => (*token_id, self.chances.inside),
                (None, None, Some((token_id, chance))) => (token_id, chance),
                (None, None, None) => break,
            };
            let is_forced = only.is_some() || !forced.is_empty();
            if forced.pop_front().is_some_and(|forced| forced != token_id) {
                forced.clear();
            }
            // An end is drawn, not drafted: nothing is computed after it.
            if !next.contains(token_id) || ends.token_ids.contains(&token_id) {
                break;
            }
            self.state.accept(token_id)?;
            num_accepted += 1;
            let mut allowed = TokenMask::default();
            if ends.update(self.state.as_mut(), &mut allowed, num_output_tokens + num_accepted)?
                == Next::Nothing
            {
                break;
            }
            if is_forced && is_forced_so_far {
                self.num_forced += 1;
                self.is_whole = only.is_none() && forced.is_empty();
            }
            self.draft.push(token_id, chance);
            self.allowed.push(allowed);
        }
        Ok(num_accepted)
    }

    /// The drafter's next token, if all previous ones were as it proposed.
    fn hinted(&self, hint: &Draft) -> Option<(u32, f32)> {
        let (position, so_far) = (self.draft.len(), &self.draft.token_ids);
        let is_alike = hint.token_ids.starts_with(so_far);
        is_alike.then(|| Some((*hint.token_ids.get(position)?, hint.chances[position]))).flatten()
    }

    /// Receives how much of the draft was accepted; false if it was not of forced tokens.
    pub(super) fn learn_forced(&mut self, num_tried: usize, num_right: usize) -> bool {
        if self.num_forced == 0 {
            return false;
        }
        let learn = |chance: &mut f32, is_right| {
            *chance = KEPT * *chance + (1.0 - KEPT) * f32::from(u8::from(is_right));
        };
        // Tokens after the first wrong one are not counted.
        for index in 0..num_tried.min(num_right + 1).min(self.num_forced) {
            match self.is_whole && index + 1 == self.num_forced {
                true => learn(&mut self.chances.last, index < num_right),
                false => learn(&mut self.chances.inside, index < num_right),
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// Allows two tokens everywhere, of which the first is forced, and is slow.
    struct Slow {
        time: Duration,
        num_asked: Arc<AtomicUsize>,
    }

    impl ConstraintState for Slow {
        fn allowed(&mut self, allowed: &mut TokenMask) -> Result<bool> {
            *allowed = [3, 4].into_iter().collect();
            Ok(false)
        }

        fn accept(&mut self, _: u32) -> Result<()> {
            Ok(())
        }

        fn forced(&mut self) -> Vec<u32> {
            self.num_asked.fetch_add(1, Ordering::Relaxed);
            std::thread::sleep(self.time);
            vec![3]
        }

        fn roll_back(&mut self, _: usize) -> Result<()> {
            Ok(())
        }
    }

    #[test]
    fn drafting_takes_no_longer_than_its_time_for_each_token() {
        let asked = |time| {
            let num_asked = Arc::<AtomicUsize>::default();
            let state = Slow { time, num_asked: Arc::clone(&num_asked) };
            let mut scout = Scout::new(Box::new(state));
            let ends = Ends { token_ids: [0].into(), min_tokens: 0 };
            let next: TokenMask = [3, 4].into_iter().collect();
            let limits =
                DraftLimits { max_tokens: 1, max_time: Duration::from_millis(2), hint: Draft::default() };
            (0..30).for_each(|num_tokens| scout.draft(&ends, &next, num_tokens, &limits).unwrap());
            num_asked.load(Ordering::Relaxed)
        };
        assert_eq!(asked(Duration::ZERO), 30);
        // Twenty milliseconds are the time of ten tokens.
        assert!((1..=3).contains(&asked(Duration::from_millis(20))));
    }
}
