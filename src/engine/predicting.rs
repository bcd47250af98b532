//! Drafts of the model itself: its runner has an MTP block, and the engine decides on sequences and numbers of tokens.
//!
//! The block costs time in every step, also without drafts: it is computed for the tokens of the step, and waits for
//! them, so the next step is not queued early. So it rests while no draft is worth that. A sequence that gets tokens
//! during a rest has no drafts any more; later sequences may have some.

use super::EngineCore;
use super::drafting::SequenceDrafter;
use super::resolver::Resolver;
use crate::runner::DraftRequest;
use crate::sampling::SamplingParams;
use crate::scheduler::{SchedulerOutput, SeqId};
use crate::speculation::{Acceptance, Draft, DraftCost, Evidence, LEAST_CHANCE, OwnAcceptance};

/// A sequence without a draft for this many tokens has none any more.
const MAX_WITHOUT_DRAFT: usize = 32;

/// Statistics of one sequence's drafts.
#[derive(Debug)]
pub(super) struct Predicted {
    pub(super) acceptance: OwnAcceptance,
    params: SamplingParams,
    num_without_draft: usize,
    /// The block was not computed for tokens that were generated.
    has_gap: bool,
}

impl EngineCore {
    /// Adds the model's predictions for a sequence to the empty `draft`, as many as are worth their time.
    pub(super) fn predict(&mut self, id: SeqId, all: &Acceptance, draft: &mut Draft) {
        let Some(state) = self.table.sequences.get_mut(&id) else { return };
        // Removed while the rest of the table is read.
        let mut predicted = match state.drafter.take() {
            Some(SequenceDrafter::Model(predicted)) => predicted,
            _ => {
                let Some(request) = self.table.requests.get(&state.request) else { return };
                // The log-probabilities of a draft are not read.
                let params = SamplingParams { logprobs: None, ..(*request.params).clone() };
                let acceptance = OwnAcceptance::default();
                Box::new(Predicted { acceptance, params, num_without_draft: 0, has_gap: false })
            }
        };
        let chance = predicted.acceptance.chance(all, Evidence::Model);
        let cost = DraftCost { chance, seconds_per_token: self.runner.seconds_per_drafted_token() };
        let is_adaptive = self.config().speculative.is_adaptive;
        let is_likely = !is_adaptive || chance >= LEAST_CHANCE;
        let max_tokens = match is_likely && !predicted.has_gap {
            true => self.scheduler.num_worth_drafting(id, cost),
            false => 0,
        };
        predicted.num_without_draft = if max_tokens > 0 { 0 } else { predicted.num_without_draft + 1 };
        let has_hope = is_likely && predicted.num_without_draft <= MAX_WITHOUT_DRAFT;
        self.drafts.model_may_draft |= (has_hope || !is_adaptive) && !predicted.has_gap;
        let input = Resolver { scheduler: &self.scheduler, table: &self.table }.sampler_input(id);
        if let (1.., Some(mut input), Some(sequence)) = (max_tokens, input, self.scheduler.sequence(id)) {
            input.params = &predicted.params;
            let row =
                DraftRequest { seq: id, block_table: sequence.block_table(), input, max_tokens, chance };
            self.runner.draft(&row, draft);
        }
        if let Some(state) = self.table.sequences.get_mut(&id) {
            state.drafter = Some(SequenceDrafter::Model(predicted));
        }
    }
    /// Whether the model may draft after the step of this plan. Prompts are computed by its block too, so that a sequence can
    /// begin to have drafts.
    pub(super) fn may_draft_next(&mut self, plan: &SchedulerOutput) -> bool {
        if self.scheduler.may_draft_after(plan) {
            return true;
        }
        for planned in &plan.sequences {
            let state = self.table.sequences.get_mut(&planned.seq);
            if let Some(SequenceDrafter::Model(predicted)) = state.and_then(|state| state.drafter.as_mut()) {
                predicted.has_gap = true;
            }
        }
        false
    }
}
