//! Converts a plan, which names sequences, to a step with their data.

use super::core::Table;
use crate::runner::{ScheduledSequence, Step, StepDraft};
use crate::sampling::SamplerInput;
use crate::scheduler::{PlannedSequence, Scheduler, SchedulerOutput, SeqId};

/// Looks up the sequences of a plan by number.
pub(super) struct Resolver<'a> {
    pub(super) scheduler: &'a Scheduler,
    pub(super) table: &'a Table,
}

impl<'a> Resolver<'a> {
    /// The step of a plan, after which the model may draft.
    pub(super) fn step(&self, plan: &SchedulerOutput, may_draft_next: bool) -> Step<'a> {
        let rows = plan.sequences.iter().filter_map(|planned| {
            let sequence = self.scheduler.sequence(planned.seq)?;
            let request = self.table.requests.get(&self.table.sequences.get(&planned.seq)?.request)?;
            // Only the sequence that first computes the prompt reports it.
            let is_prompt = sequence.prompt_logits() && planned.start < sequence.prompt_token_ids().len();
            Some(ScheduledSequence {
                seq: planned.seq,
                token_ids: sequence.drafted_token_ids(planned.num_draft_tokens),
                start: planned.start,
                len: planned.len,
                draft: self.draft(planned),
                num_grouped_tokens: sequence.num_grouped_tokens(),
                block_table: sequence.block_table(),
                copy: planned.copy,
                samples: planned.samples.iter().filter_map(|id| self.sampler_input(*id)).collect(),
                wanted: request.wanted,
                all_logits: request.prompt_logits && is_prompt,
                prompt_logprobs: request.prompt_logprobs.filter(|_| is_prompt),
            })
        });
        Step {
            sequences: rows.collect(),
            window_slots: self.scheduler.window_slots(),
            num_steps: plan.num_steps,
            may_queue_next: plan.may_queue_next,
            may_draft_next,
        }
    }

    fn draft(&self, planned: &PlannedSequence) -> StepDraft<'a> {
        let allowed = self.table.sequences.get(&planned.seq).map_or(&[][..], |state| state.allowed.drafted());
        StepDraft { num_tokens: planned.num_draft_tokens, allowed }
    }

    /// The sampler's inputs for the next token of a sequence.
    pub(super) fn sampler_input(&self, id: SeqId) -> Option<SamplerInput<'a>> {
        let state = self.table.sequences.get(&id)?;
        let request = self.table.requests.get(&state.request)?;
        let sequence = self.scheduler.sequence(id)?;
        Some(SamplerInput {
            params: &request.params,
            seed: request.seed,
            stream: state.index as u32,
            prompt_token_ids: sequence.prompt_token_ids(),
            output_token_ids: sequence.output_token_ids(),
            end_token_ids: &request.end_token_ids,
            allowed: state.allowed.tokens(),
        })
    }
}
