//! From a plan, which names sequences, to a step, which has what they are.

use super::core::Table;
use crate::runner::{Step, StepDraft, StepRow};
use crate::sampling::SamplerInput;
use crate::scheduler::{ScheduledRow, Scheduler, SchedulerOutput, SeqId};

/// Looks up what a plan refers to by number.
pub(super) struct Resolver<'a> {
    pub(super) scheduler: &'a Scheduler,
    pub(super) table: &'a Table,
}

impl<'a> Resolver<'a> {
    /// The step of a plan.
    pub(super) fn step(&self, plan: &SchedulerOutput) -> Step<'a> {
        let rows = plan.rows.iter().filter_map(|row| {
            let sequence = self.scheduler.sequence(row.seq)?;
            let request = self.table.requests.get(&self.table.sequences.get(&row.seq)?.request)?;
            // Only the sequence that first computes the prompt tells of it.
            let is_prompt = sequence.prompt_logits() && row.start < sequence.prompt_token_ids().len();
            Some(StepRow {
                seq: row.seq,
                token_ids: sequence.drafted_token_ids(row.num_draft_tokens),
                start: row.start,
                len: row.len,
                draft: self.draft(row),
                num_grouped_tokens: sequence.num_grouped_tokens(),
                block_table: sequence.block_table(),
                copy: row.copy,
                samples: row.samples.iter().filter_map(|id| self.sampler_input(*id)).collect(),
                all_logits: request.prompt_logits && is_prompt,
                prompt_logprobs: request.prompt_logprobs.filter(|_| is_prompt),
            })
        });
        Step { rows: rows.collect(), num_steps: plan.num_steps, looks_ahead: plan.looks_ahead }
    }

    fn draft(&self, row: &ScheduledRow) -> StepDraft<'a> {
        let allowed = self.table.sequences.get(&row.seq).map_or(&[][..], |state| state.allowed.drafted());
        StepDraft { num_tokens: row.num_draft_tokens, allowed }
    }

    /// What the sampler has to know for the next token of a sequence.
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
