//! Drafts by the model itself: its runner has a block for that, and the engine says for whom and how many.

use super::EngineCore;
use super::drafting::SequenceDrafter;
use super::resolver::Resolver;
use crate::runner::DraftRow;
use crate::sampling::SamplingParams;
use crate::scheduler::SeqId;
use crate::speculation::{Acceptance, Draft, DraftCost, Evidence, OwnAcceptance};

/// What is known of one sequence's drafts.
#[derive(Debug)]
pub(super) struct Predicted {
    pub(super) acceptance: OwnAcceptance,
    params: SamplingParams,
}

impl EngineCore {
    /// Adds to the empty `draft` what the model predicts behind a sequence, as far as that is worth its time.
    pub(super) fn predict(&mut self, id: SeqId, all: &Acceptance, draft: &mut Draft) {
        let Some(state) = self.table.sequences.get_mut(&id) else { return };
        // Taken out while the rest of the table is looked at.
        let mut predicted = match state.drafter.take() {
            Some(SequenceDrafter::Model(predicted)) => predicted,
            _ => {
                let Some(request) = self.table.requests.get(&state.request) else { return };
                // Nobody reads the log-probabilities of a draft.
                let params = SamplingParams { logprobs: None, ..(*request.params).clone() };
                Box::new(Predicted { acceptance: OwnAcceptance::default(), params })
            }
        };
        let chance = predicted.acceptance.chance(all, Evidence::Model);
        let cost = DraftCost { chance, seconds_per_token: self.runner.seconds_per_drafted_token() };
        let max_tokens = self.scheduler.num_worth_drafting(id, cost);
        let input = Resolver { scheduler: &self.scheduler, table: &self.table }.sampler_input(id);
        if let (1.., Some(mut input), Some(sequence)) = (max_tokens, input, self.scheduler.sequence(id)) {
            input.params = &predicted.params;
            let row = DraftRow { seq: id, block_table: sequence.block_table(), input, max_tokens, chance };
            self.runner.draft(&row, draft);
        }
        if let Some(state) = self.table.sequences.get_mut(&id) {
            state.drafter = Some(SequenceDrafter::Model(predicted));
        }
    }
}
