//! A sequence's state in its constraint, and the tokens that it may choose next.
//!
//! The set is computed as soon as the previous token is known (`masks`), so a step usually finds it ready, and a
//! sequence that is complete or stuck ends without another step. Interactions of the request's parameters and the
//! constraint:
//!
//! - The end tokens of the request join the set where the constraint lets the output end. With `ignore_eos` the model's
//!   own are not among them; the output then ends where the constraint allows no further token.
//! - Until `min_tokens` is reached, end tokens are kept out of the set, unless the constraint allows no other token. If it
//!   allows none at all, the output ends in any case.
//! - `logit_bias` and penalties change which of the allowed tokens is chosen, never which are allowed.

use std::sync::Arc;

use super::scout::{DraftLimits, Scout};
use crate::Result;
use crate::sampling::{Constraint, ConstraintState, TokenMask};
use crate::speculation::Draft;

/// The constraint's state and the set of the next token.
pub(super) struct Constrained {
    state: Box<dyn ConstraintState>,
    allowed: TokenMask,
    ends: Ends,
    scout: Option<Scout>,
}

/// The request's parameters for its end.
#[derive(Debug, Clone)]
pub(super) struct Ends {
    pub(super) token_ids: Arc<[u32]>,
    pub(super) min_tokens: usize,
}

/// The allowed tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    /// A token of the set.
    Token,
    /// None: the output is complete.
    Nothing,
}

impl Constrained {
    /// The beginning of `num_sequences` outputs.
    ///
    /// # Errors
    /// If the constraint allows no token at all.
    pub(super) fn start(
        constraint: &dyn Constraint,
        num_sequences: usize,
        ends: &Ends,
        has_drafts: bool,
    ) -> Result<Vec<Self>> {
        let start = |allowed| Self {
            state: constraint.start(),
            allowed,
            ends: ends.clone(),
            scout: has_drafts.then(|| Scout::new(constraint.start())),
        };
        let mut first = start(TokenMask::default());
        if first.update(0)? == Next::Nothing {
            return Err(crate::Error::invalid_request("the constraint allows only an empty output"));
        }
        let allowed = first.allowed.clone();
        let others = (1..num_sequences).map(|_| start(allowed.clone()));
        Ok(std::iter::once(first).chain(others).collect())
    }

    /// The tokens that may be chosen.
    pub(super) fn allowed(&self) -> &TokenMask {
        &self.allowed
    }

    /// Takes tokens, the output's last of `num_output_tokens`, which did not end it.
    ///
    /// # Errors
    /// If the sequence can neither continue nor end.
    pub(super) fn accept(&mut self, token_ids: &[u32], num_output_tokens: usize) -> Result<Next> {
        token_ids.iter().try_for_each(|token_id| self.state.accept(*token_id))?;
        self.update(num_output_tokens)
    }

    fn update(&mut self, num_tokens: usize) -> Result<Next> {
        self.ends.update(self.state.as_mut(), &mut self.allowed, num_tokens)
    }

    /// Drafts allowed tokens after those that were just accepted.
    pub(super) fn limits(&mut self, token_ids: &[u32], num_output_tokens: usize, limits: &DraftLimits) {
        let Some(scout) = &mut self.scout else { return };
        let has_failed = scout.follow(token_ids).is_err()
            || scout.draft(&self.ends, &self.allowed, num_output_tokens, limits).is_err();
        if has_failed {
            // Tokens that only a draft reached are not part of the output.
            self.scout = None;
        }
    }

    /// The allowed tokens of a draft, each after the previous ones.
    pub(super) fn draft(&self) -> &Draft {
        static NOTHING: Draft = Draft { token_ids: Vec::new(), chances: Vec::new() };
        self.scout.as_ref().map_or(&NOTHING, Scout::drafted)
    }

    /// The tokens that may be chosen after each of the draft's.
    pub(super) fn draft_allowed(&self) -> &[TokenMask] {
        self.scout.as_ref().map_or(&[], Scout::allowed)
    }

    /// Receives how much of the draft was accepted; false if the drafter must receive it, because the draft was not of
    /// forced tokens.
    pub(super) fn learn_forced(&mut self, num_tried: usize, num_right: usize) -> bool {
        self.scout.as_mut().is_some_and(|scout| scout.learn_forced(num_tried, num_right))
    }
}

impl Ends {
    /// The tokens that may follow `num_tokens` tokens of the output.
    ///
    /// # Errors
    /// If the sequence can neither continue nor end.
    pub(super) fn update(
        &self,
        state: &mut dyn ConstraintState,
        allowed: &mut TokenMask,
        num_tokens: usize,
    ) -> Result<Next> {
        let may_end = state.allowed(allowed)?;
        if allowed.is_empty() {
            return match may_end {
                true => Ok(Next::Nothing),
                false => Err(crate::Error::invalid_request(
                    "the constraint allows neither a token nor the end here",
                )),
            };
        }
        if num_tokens >= self.min_tokens {
            if may_end {
                self.token_ids.iter().for_each(|id| allowed.insert(*id));
            }
        } else if allowed.iter().any(|id| !self.token_ids.contains(&id)) {
            self.token_ids.iter().for_each(|id| allowed.remove(*id));
        }
        Ok(Next::Token)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Allows the same at every position.
    #[derive(Debug, Clone)]
    struct Always(Vec<u32>, bool);

    impl Constraint for Always {
        fn start(&self) -> Box<dyn ConstraintState> {
            Box::new(self.clone())
        }
    }

    impl ConstraintState for Always {
        fn allowed(&mut self, allowed: &mut TokenMask) -> Result<bool> {
            *allowed = self.0.iter().copied().collect();
            Ok(self.1)
        }

        fn accept(&mut self, token_id: u32) -> Result<()> {
            assert!(self.0.contains(&token_id));
            Ok(())
        }
    }

    #[test]
    fn end_tokens_join_where_the_output_may_end() {
        let check = |tokens: &[u32], may_end, min_tokens, num_tokens, wanted: Option<&[u32]>| {
            let state = Box::new(Always(tokens.to_vec(), may_end));
            let ends = Ends { token_ids: [0, 7].into(), min_tokens };
            let mut constrained = Constrained { state, allowed: TokenMask::default(), ends, scout: None };
            let next = constrained.update(num_tokens).unwrap();
            let found: Vec<u32> = constrained.allowed.iter().collect();
            assert_eq!(
                (next == Next::Token).then_some(&found[..]),
                wanted,
                "{tokens:?} {may_end} {min_tokens}"
            );
        };
        check(&[3, 4], false, 0, 0, Some(&[3, 4]));
        check(&[3, 4], true, 0, 0, Some(&[0, 3, 4, 7]));
        // A stop token that the constraint allows as text stays possible.
        check(&[3, 7], false, 0, 0, Some(&[3, 7]));
        // min_tokens keeps end tokens out while there is something else.
        check(&[3, 7], true, 5, 4, Some(&[3]));
        check(&[3, 7], true, 5, 5, Some(&[0, 3, 7]));
        check(&[7], false, 5, 4, Some(&[7]));
        // Where no token may follow, the output ends, for every `min_tokens`.
        check(&[], true, 5, 4, None);
        check(&[], true, 0, 9, None);
    }

    #[test]
    fn a_dead_end_is_an_error() {
        let ends = Ends { token_ids: [0].into(), min_tokens: 0 };
        for (constraint, words) in [
            (Always(vec![], false), "neither a token nor the end"),
            (Always(vec![], true), "an empty output"),
        ] {
            let error = Constrained::start(&constraint, 2, &ends, true).err().unwrap();
            assert!(error.message().contains(words), "{error}");
        }
        let sequences = Constrained::start(&Always(vec![1], true), 3, &ends, true).unwrap();
        assert!(sequences.len() == 3 && sequences.iter().all(|one| one.allowed == sequences[0].allowed));
    }
}
