//! The engine and its constraints: hands sequences over when their tokens are known, and takes them back with their
//! masks.
//!
//! A sequence without its mask is held: steps skip it. The mask's outcome then ends it exactly as it would have in
//! time: complete before full, and full before stuck.

use std::sync::Arc;
use std::time::Duration;

use super::EngineCore;
use super::constrained::{Constrained, Ends, Next};
use super::masks::{Done, Outcome, Owner};
use super::output::{Event, FinishReason};
use super::request::RequestId;
use super::scout::DraftLimits;
use crate::Result;
use crate::sampling::{Constraint, TokenMask};
use crate::scheduler::{SeqId, SequenceStatus};

/// The minimum time that a step waits for masks.
const MIN_WAIT: Duration = Duration::from_millis(2);

/// The minimum time for drafting after a mask that is ready.
const MIN_DRAFT_TIME: Duration = Duration::from_micros(500);

/// The allowed next tokens of a sequence.
pub(super) enum Allowed {
    /// Everything: there is no constraint.
    All,
    /// The set.
    Tokens(Box<Constrained>),
    /// Its mask is being made.
    NotKnown,
}

impl Allowed {
    /// None for all.
    pub(super) fn tokens(&self) -> Option<&TokenMask> {
        match self {
            Self::Tokens(constrained) => Some(constrained.allowed()),
            Self::All | Self::NotKnown => None,
        }
    }

    /// The allowed tokens after each drafted token; none if all are.
    pub(super) fn drafted(&self) -> &[TokenMask] {
        match self {
            Self::Tokens(constrained) => constrained.draft_allowed(),
            Self::All | Self::NotKnown => &[],
        }
    }

    /// Takes what has a constraint.
    fn hand_over(&mut self) -> Option<Box<Constrained>> {
        match std::mem::replace(self, Self::NotKnown) {
            Self::Tokens(constrained) => Some(constrained),
            other => {
                *self = other;
                None
            }
        }
    }
}

impl EngineCore {
    /// Begins a request's sequences, which are held until the first mask is there: it is the same for all.
    pub(super) fn start_constraint(
        &mut self,
        constraint: Arc<dyn Constraint>,
        sequences: &[SeqId],
        owner: Owner,
        ends: Ends,
    ) {
        let Some(&leader) = sequences.first() else { return };
        let sequences = sequences.to_vec();
        let has_drafts = self.drafts.max_tokens > 0;
        self.masks.make(leader, owner, move || {
            let beginnings = Constrained::start(constraint.as_ref(), sequences.len(), &ends, has_drafts)?;
            Ok(Outcome::Started(sequences.into_iter().zip(beginnings.into_iter().map(Box::new)).collect()))
        });
        self.scheduler.hold(leader);
    }

    /// Hands a sequence over to the threads that make masks, if it has a constraint and these tokens have not ended it.
    pub(super) fn follow_constraint(&mut self, id: SeqId, accepted: &[u32], has_ended: bool) {
        let has_constraint =
            self.table.sequences.get(&id).is_some_and(|state| matches!(state.allowed, Allowed::Tokens(_)));
        if accepted.is_empty() || has_ended || !has_constraint {
            return;
        }
        let hint = self.hint(id);
        let (Some(state), Some(sequence)) = (self.table.sequences.get_mut(&id), self.scheduler.sequence(id))
        else {
            return;
        };
        let Some(mut constrained) = state.allowed.hand_over() else { return };
        let (token_ids, num_tokens) = (accepted.to_vec(), sequence.output_token_ids().len());
        let limits = DraftLimits {
            max_tokens: self.drafts.max_tokens,
            max_time: MIN_DRAFT_TIME.max(self.step_time / 8),
            hint,
        };
        self.masks.make(id, state.owner, move || {
            let next = constrained.accept(&token_ids, num_tokens)?;
            if next == Next::Token {
                constrained.limits(&token_ids, num_tokens, &limits);
            }
            Ok(Outcome::Followed(constrained, next))
        });
        self.scheduler.hold(id);
    }

    /// Takes the masks that are there. Those of the last step are waited for as long as half of it took, and at least for
    /// a short time.
    pub(super) fn take_masks(&mut self) -> Vec<(RequestId, Event)> {
        let mut events = Vec::new();
        let taken = self.masks.take(MIN_WAIT.max(self.step_time / 2));
        for (id, seconds) in taken.waits {
            self.scheduler.learn_constraint(id, seconds);
        }
        for Done { id, owner, outcome, .. } in taken.done {
            match outcome {
                Ok(Outcome::Started(beginnings)) => {
                    beginnings.into_iter().for_each(|(id, beginning)| self.take_back(id, owner, beginning));
                    self.release(id);
                }
                Ok(Outcome::Followed(constrained, next)) => {
                    self.take_back(id, owner, constrained);
                    self.go_on(id, Ok(next), &mut events);
                }
                Err(error) => self.go_on(id, Err(error), &mut events),
            }
        }
        events
    }

    /// The sequence has its mask, if it is still there.
    fn take_back(&mut self, id: SeqId, owner: Owner, constrained: Box<Constrained>) {
        match self.table.sequences.get_mut(&id) {
            Some(state) => state.allowed = Allowed::Tokens(constrained),
            None => self.masks.discard(owner, constrained),
        }
    }

    /// Continues a sequence, or ends it. If its start failed, all sequences of its request end.
    fn go_on(&mut self, id: SeqId, next: Result<Next>, events: &mut Vec<(RequestId, Event)>) {
        let Some(sequence) = self.scheduler.sequence(id) else { return };
        let is_full = sequence.token_ids().len() >= sequence.max_len();
        let has_begun = !sequence.output_token_ids().is_empty();
        match next {
            Ok(Next::Nothing) => self.finish(id, FinishReason::Stop, None, false, events),
            _ if is_full => self.finish(id, FinishReason::Length, None, false, events),
            Ok(Next::Token) => self.release(id),
            Err(error) if has_begun => self.finish(id, FinishReason::Error, Some(&error), false, events),
            Err(error) => self.fail_request(id, &error, events),
        }
    }

    /// Forgets a sequence; its blocks are free then.
    pub(super) fn remove(&mut self, id: SeqId) {
        self.scheduler.remove(id);
        self.forget_restore(id);
        let Some(state) = self.table.sequences.remove(&id) else { return };
        self.drop_drafter(state.drafter);
        match state.allowed {
            Allowed::All => {}
            Allowed::Tokens(constrained) => self.masks.discard(state.owner, constrained),
            Allowed::NotKnown => self.masks.forget(id),
        }
    }

    /// Makes the thread that made no step sleep until a mask is ready; false if one is.
    pub(super) fn sleep(&self) -> bool {
        let waits_elsewhere = self.waits_for_restored();
        self.is_stalled() && (waits_elsewhere || !self.has_restores()) && self.masks.sleep(waits_elsewhere)
    }

    /// Calls `listener` on another thread when there is a mask, after [`Self::sleep`], or something was read.
    pub(super) fn on_mask(&self, listener: impl Fn() + Send + Sync + 'static) {
        let listener: Arc<dyn Fn() + Send + Sync> = Arc::new(listener);
        self.on_restored(Arc::clone(&listener));
        self.masks.on_done(move || listener());
    }

    /// Checks that those are held whose masks are not there.
    pub(super) fn check_held(&self) -> Result<(), String> {
        for (id, state) in &self.table.sequences {
            let Some(sequence) = self.scheduler.sequence(*id) else { continue };
            let is_wanted = (matches!(state.allowed, Allowed::NotKnown) || self.is_restoring(*id))
                && sequence.status() != SequenceStatus::Forking;
            if is_wanted != sequence.is_held() {
                return Err(format!("{id:?} is held, or runs without a mask"));
            }
        }
        Ok(())
    }
}
