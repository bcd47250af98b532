//! What is reported of a prompt besides its answer.

use std::time::Duration;

use super::core::{EngineCore, Events};
use super::output::{Event, FinishReason, PromptProgress};
use crate::runner::SequenceOutput;
use crate::scheduler::PlannedSequence;
use crate::{Error, ErrorKind};

impl EngineCore {
    /// Reports the requested values of prompt tokens once, also when a preempted prompt is computed again.
    pub(super) fn report_prompt(
        &mut self,
        planned: &PlannedSequence,
        output: &mut SequenceOutput,
        events: &mut Events,
    ) {
        let Some(state) = self.table.sequences.get(&planned.seq) else { return };
        let Some(request) = self.table.requests.get_mut(&state.request) else { return };
        let Some(sequence) = self.scheduler.sequence(planned.seq) else { return };
        let num_prompt_tokens = sequence.prompt_token_ids().len();
        let end = (planned.start + planned.len).min(num_prompt_tokens);
        let first = request.num_reported_tokens.max(planned.start);
        if first >= end {
            return;
        }
        request.num_reported_tokens = end;
        if request.prompt_progress {
            let time = state.first_scheduled.map_or(Duration::ZERO, |start| start.elapsed());
            let progress = PromptProgress {
                num_prompt_tokens,
                num_cached_tokens: sequence.num_cached_tokens(),
                num_processed_tokens: end,
                time,
            };
            events.push((state.request, Event::PromptProgress { progress }));
        }
        if !output.logits.is_empty() {
            let vocab_size = output.logits.len() / planned.len;
            let wanted = (first - planned.start) * vocab_size..(end - planned.start) * vocab_size;
            events.push((state.request, Event::PromptLogits { logits: output.logits[wanted].to_vec() }));
        }
        // The logits of the last prompt token are about the first generated one.
        let end = end.min(num_prompt_tokens - 1);
        if first < end && !output.prompt_logprobs.is_empty() {
            let logprobs = std::mem::take(&mut output.prompt_logprobs).into_iter();
            let logprobs = logprobs.take(end - planned.start).skip(first - planned.start).collect();
            events.push((state.request, Event::PromptLogprobs { logprobs }));
        }
    }

    /// Reports the hidden state of the last prompt token, with which its request ends.
    pub(super) fn report_hidden(&mut self, planned: &PlannedSequence, values: Vec<f32>, events: &mut Events) {
        self.scheduler.advance(planned, &[]);
        self.note_published(planned.seq);
        let Some(state) = self.table.sequences.get(&planned.seq) else { return };
        if values.iter().all(|value| value.is_finite()) {
            events.push((state.request, Event::Hidden { values }));
            return self.finish(planned.seq, FinishReason::Length, None, false, events);
        }
        let error = Error::new(ErrorKind::Internal, "the model produced a hidden state with NaN or infinity");
        self.finish(planned.seq, FinishReason::Error, Some(&error), false, events);
    }
}
