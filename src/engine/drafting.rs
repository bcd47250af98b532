//! The engine and its drafts: continuations of each sequence are proposed before a step and compared with its results.

use std::sync::Arc;

use super::EngineCore;
use super::core::SequenceState;
use super::following::Allowed;
use super::predicting::Predicted;
use crate::config::{EngineConfig, SpeculativeConfig, SpeculativeMethod};
use crate::scheduler::{PlannedSequence, SeqId};
use crate::speculation::{Acceptance, Draft, DraftSource, DraftedSequence, Drafter, Evidence, LookupSource};

/// Tokens that drafters take at most before a step, so that a long prompt holds up no step. An automaton takes 0.2 µs for each
/// (AMD EPYC, 100,000 tokens), and now and then 4 ms for a larger table.
const MAX_NEW_TOKENS: usize = 4_096;

/// Tokens that drafters may have for each that the cache holds.
const KEPT_FOR_CACHED: usize = 2;

/// Drafts of an engine.
pub(super) struct Drafts {
    source: Option<Box<dyn DraftSource>>,
    /// Present if the model drafts itself: how often it is right.
    pub(super) by_model: Option<Arc<Acceptance>>,
    /// A sequence may have drafts of the model after the next step.
    pub(super) model_may_draft: bool,
    of_predictions: LookupSource,
    pub(super) max_tokens: usize,
    /// Tokens that all drafters may have: each takes memory for every one, and predictions are in no block of the cache.
    max_kept_tokens: usize,
    num_kept_tokens: usize,
    /// Kept for its memory.
    draft: Draft,
}

/// The drafter of a sequence.
pub(super) enum SequenceDrafter {
    /// Something that sees its tokens alone.
    Tokens(TokenDrafter),
    /// The model itself.
    Model(Box<Predicted>),
}

/// The drafter of a sequence, and how many of its tokens it has taken.
pub(super) struct TokenDrafter {
    drafter: Box<dyn Drafter>,
    num_tokens: usize,
}

/// Drafted, tried and accepted tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpeculationStats {
    /// Drafts that were tried.
    pub num_drafts: u64,
    /// Tokens of them.
    pub num_draft_tokens: u64,
    /// Accepted drafted tokens.
    pub num_accepted_tokens: u64,
    /// The same by their position in the draft.
    pub num_accepted_at: [u64; SpeculativeConfig::MAX_TOKENS],
}

impl Default for SpeculationStats {
    fn default() -> Self {
        Self {
            num_drafts: 0,
            num_draft_tokens: 0,
            num_accepted_tokens: 0,
            num_accepted_at: [0; SpeculativeConfig::MAX_TOKENS],
        }
    }
}

impl SpeculationStats {
    fn count(&mut self, num_tried: usize, num_right: usize) {
        self.num_drafts += 1;
        self.num_draft_tokens += num_tried as u64;
        self.num_accepted_tokens += num_right as u64;
        self.num_accepted_at.iter_mut().take(num_right).for_each(|count| *count += 1);
    }
}

impl Drafts {
    pub(super) fn new(config: &EngineConfig) -> Self {
        let max_kept_tokens = config.kv_cache_tokens().saturating_mul(KEPT_FOR_CACHED);
        let config = config.speculative;
        let source: Option<Box<dyn DraftSource>> = match config.method {
            _ if config.num_speculative_tokens == 0 => None,
            SpeculativeMethod::Forced | SpeculativeMethod::Mtp => None,
            SpeculativeMethod::Suffix => Some(Box::new(LookupSource::suffix())),
            SpeculativeMethod::Ngram { min, max } => Some(Box::new(LookupSource::ngram(min, max))),
        };
        let drafts_itself = config.method == SpeculativeMethod::Mtp && config.num_speculative_tokens > 0;
        let of_predictions = LookupSource::suffix();
        Self {
            source,
            by_model: drafts_itself.then(Arc::default),
            model_may_draft: false,
            of_predictions,
            max_tokens: config.num_speculative_tokens,
            max_kept_tokens,
            num_kept_tokens: 0,
            draft: Draft::default(),
        }
    }

    /// Whether drafters have tokens of sequences.
    pub(super) fn has_tokens(&self) -> bool {
        self.num_kept_tokens > 0
    }

    /// The drafter if there is no other one, for requests with a prediction.
    fn of_predictions(&self, prediction: &[u32]) -> Option<&dyn DraftSource> {
        (!prediction.is_empty()).then_some(&self.of_predictions)
    }
}

impl EngineCore {
    /// Drafts come from here from now on, up to [`SpeculativeConfig::num_speculative_tokens`] of a sequence in a step.
    pub fn set_draft_source(&mut self, source: Box<dyn DraftSource>) {
        self.drafts.source = Some(source);
    }

    /// Passes the drafts of decoding sequences to the scheduler.
    pub(super) fn propose_drafts(&mut self) {
        let mut draft = std::mem::take(&mut self.drafts.draft);
        let mut max_new_tokens = MAX_NEW_TOKENS;
        for id in self.scheduler.generating() {
            draft.clear();
            match self.table.sequences.get(&id).map(|state| &state.allowed) {
                // Cut to the tokens that were allowed when the mask was made.
                Some(Allowed::Tokens(constrained)) => draft.clone_from(constrained.draft()),
                Some(Allowed::All) => self.look_up(id, &mut max_new_tokens, &mut draft),
                Some(Allowed::NotKnown) | None => continue,
            }
            self.scheduler.propose(id, &draft);
        }
        self.drafts.draft = draft;
        if let Some(all) = &self.drafts.by_model {
            let may_draft = std::mem::take(&mut self.drafts.model_may_draft);
            if !may_draft {
                all.forget(Evidence::Model);
            }
            self.scheduler.set_model_may_draft(may_draft);
        }
    }

    /// The drafter's proposal for a sequence with a constraint that has just got a token.
    pub(super) fn hint(&mut self, id: SeqId) -> Draft {
        let mut draft = Draft::default();
        if self.drafts.max_tokens > 0 {
            self.look_up(id, &mut { MAX_NEW_TOKENS }, &mut draft);
        }
        draft
    }

    fn look_up(&mut self, id: SeqId, max_new_tokens: &mut usize, draft: &mut Draft) {
        if let Some(all) = self.drafts.by_model.clone() {
            return self.predict(id, &all, draft);
        }
        let (Some(state), Some(sequence)) = (self.table.sequences.get_mut(&id), self.scheduler.sequence(id))
        else {
            return;
        };
        let prediction =
            self.table.requests.get(&state.request).map_or(&[][..], |request| &request.prediction);
        let Some(source) = self.drafts.source.as_deref().or(self.drafts.of_predictions(prediction)) else {
            return;
        };
        let (index, request) = (state.index, self.table.requests.get(&state.request));
        let start = || {
            let request = request?;
            let drafter = source.start(&DraftedSequence {
                num_predicted: prediction.len(),
                num_prompt_tokens: sequence.prompt_token_ids().len(),
                params: &request.params,
                seed: request.seed,
                stream: index as u32,
                end_token_ids: &request.end_token_ids,
            });
            Some(SequenceDrafter::Tokens(TokenDrafter { drafter, num_tokens: 0 }))
        };
        if state.drafter.is_none() {
            state.drafter = start();
        }
        let Some(SequenceDrafter::Tokens(drafter)) = &mut state.drafter else { return };
        let num_before = drafter.num_tokens;
        let mut most =
            self.drafts.max_kept_tokens.saturating_sub(self.drafts.num_kept_tokens).min(*max_new_tokens);
        let is_complete = drafter.catch_up(prediction, sequence.token_ids(), &mut most);
        let num_new = drafter.num_tokens - num_before;
        *max_new_tokens -= num_new;
        self.drafts.num_kept_tokens += num_new;
        let max_tokens = match drafter.drafter.cost().filter(|_| is_complete) {
            Some(cost) => self.scheduler.num_worth_drafting(id, cost),
            None => self.drafts.max_tokens,
        };
        if is_complete && max_tokens > 0 {
            drafter.drafter.draft(max_tokens, draft);
        }
    }

    /// Releases the drafter's resources of a sequence that has ended.
    pub(super) fn drop_drafter(&mut self, drafter: Option<SequenceDrafter>) {
        if let Some(SequenceDrafter::Tokens(drafter)) = drafter {
            self.drafts.num_kept_tokens -= drafter.num_tokens;
        }
    }

    /// Receives how many tokens of a sequence's draft were accepted.
    pub(super) fn learn_draft(&mut self, planned: &PlannedSequence, num_tokens: usize) {
        if planned.num_draft_tokens == 0 {
            return;
        }
        let num_right = num_tokens.saturating_sub(1);
        self.stats.speculation.count(planned.num_draft_tokens, num_right);
        let Some(state) = self.table.sequences.get_mut(&planned.seq) else { return };
        state.num_accepted_draft_tokens += num_right;
        state.num_rejected_draft_tokens += planned.num_draft_tokens - num_right;
        state.learn_draft(planned.num_draft_tokens, num_right, self.drafts.by_model.as_deref());
    }
}

impl SequenceState {
    fn learn_draft(&mut self, num_tried: usize, num_right: usize, by_model: Option<&Acceptance>) {
        let was_forced = match &mut self.allowed {
            Allowed::Tokens(constrained) => constrained.learn_forced(num_tried, num_right),
            Allowed::All | Allowed::NotKnown => false,
        };
        match (self.drafter.as_mut().filter(|_| !was_forced), by_model) {
            (Some(SequenceDrafter::Tokens(drafter)), _) => drafter.drafter.learn(num_tried, num_right),
            (Some(SequenceDrafter::Model(predicted)), Some(all)) => {
                predicted.acceptance.learn(all, Evidence::Model, num_tried, num_right);
            }
            (Some(SequenceDrafter::Model(_)), None) | (None, _) => {}
        }
    }
}

impl TokenDrafter {
    /// Takes tokens that it has not seen, up to this many; whether it has all of them now.
    fn catch_up(&mut self, prediction: &[u32], token_ids: &[u32], max_new_tokens: &mut usize) -> bool {
        let num_all = prediction.len() + token_ids.len();
        for (start, part) in [(0, prediction), (prediction.len(), token_ids)] {
            let first = self.num_tokens.saturating_sub(start).min(part.len());
            let new = &part[first..];
            let new = &new[..new.len().min(*max_new_tokens)];
            self.drafter.extend(new);
            self.num_tokens += new.len();
            *max_new_tokens -= new.len();
        }
        self.num_tokens == num_all
    }
}
