//! Steps whose tokens are sampled where the logits are. Passes are queued one after the other, so the device never waits
//! for the host.

use std::sync::Arc;

use super::model_runner::{ModelRunner, empty_outputs, is_right};
use super::{ScheduledSequence, SequenceOutput, Step};
use crate::ops::{DeviceSampler, SampleParams};
use crate::sampling::{SampledToken, SamplerInput};
use crate::scheduler::SeqId;
use crate::{Error, Result};

/// Passes of the device's sampler that were queued before the previous tokens were known.
#[derive(Debug)]
pub(super) struct QueuedStep {
    /// The sequence of each row and the position of the token that the last pass computes.
    rows: Vec<(SeqId, usize)>,
    /// The number of that pass.
    pass: usize,
}

impl QueuedStep {
    /// Which of the rows are those of this step; none if the step has others.
    fn indices(&self, step: &Step<'_>) -> Option<Vec<usize>> {
        let mut rows = self.rows.iter();
        let mut index = 0;
        let index_of = |scheduled: &ScheduledSequence<'_>| {
            index += rows.position(|own| *own == (scheduled.seq, scheduled.start))?;
            index += 1;
            (scheduled.len == 1).then_some(index - 1)
        };
        step.sequences.iter().map(index_of).collect()
    }
}

/// Passes between two uploads of the sampler's inputs. With penalties, the time of a pass grows with the number of
/// passes since the upload.
const MAX_PASSES: usize = 64;

/// Whether the host needs only the tokens of a row.
pub(super) fn can_sample_on_device(scheduled: &ScheduledSequence<'_>) -> bool {
    match &scheduled.samples[..] {
        _ if scheduled.wants_hidden() => false,
        [] => scheduled.num_logits() == 0,
        [input] => {
            // Of a constraint, the sets after drafted tokens are the host's too.
            let wants_tokens_only = input.params.logprobs.is_none() && input.allowed.is_none();
            !scheduled.all_logits && scheduled.prompt_logprobs.is_none() && wants_tokens_only
        }
        _ => false,
    }
}

fn sample_params<'a>(input: &SamplerInput<'a>) -> SampleParams<'a> {
    let params = input.params;
    SampleParams {
        inverse_temperature: if params.is_greedy() { 0.0 } else { 1.0 / params.temperature },
        top_k: params.top_k,
        top_p: params.top_p,
        min_p: params.min_p,
        repetition_penalty: params.repetition_penalty,
        presence_penalty: params.presence_penalty,
        frequency_penalty: params.frequency_penalty,
        logit_bias: &params.logit_bias,
        banned: input.end_token_ids,
        min_tokens: params.min_tokens,
        seed: input.seed,
        stream: input.stream,
        prompt_token_ids: input.prompt_token_ids,
        output_token_ids: input.output_token_ids,
    }
}

impl ModelRunner {
    /// A step whose tokens are sampled where the logits are. The passes of a multi-step are queued one after the
    /// other, each reading the tokens of the one before in the device's memory; the host looks at tokens while the
    /// next pass already runs. A step with async scheduling leaves such a queued pass for the next step.
    pub(super) fn execute_on_device(&mut self, step: &Step<'_>) -> Result<Vec<SequenceOutput>> {
        let Some(mut sampler) = self.device_sampler.take() else {
            return Err(Error::internal("there is no sampler on the device"));
        };
        let queued = self.queued.take();
        let queued = queued.and_then(|queued| Some((queued.indices(step)?, queued)));
        let outputs = match queued {
            Some((indices, queued)) => self.take_up(step, &indices, queued, &mut sampler),
            None => {
                self.prepare(step);
                self.sample_passes(step, &mut sampler)
            }
        };
        self.device_sampler = Some(sampler);
        outputs
    }

    /// A step whose sequences have these indices in a queued pass.
    fn take_up(
        &mut self,
        step: &Step<'_>,
        indices: &[usize],
        queued: QueuedStep,
        sampler: &mut DeviceSampler,
    ) -> Result<Vec<SequenceOutput>> {
        let QueuedStep { rows, pass } = queued;
        // A queued pass that has lost rows cannot be used: the next step is planned anew.
        if step.may_queue_next && indices.len() == rows.len() {
            self.queue_next_step(step, pass, sampler)?;
        }
        let mut tokens = Vec::with_capacity(rows.len());
        sampler.tokens(self.model.context(), pass, &mut tokens)?;
        let tokens: Vec<u32> = indices.iter().map(|index| tokens[*index]).collect();
        let mut outputs = empty_outputs(step);
        add_tokens(step, &tokens, &mut outputs);
        Ok(outputs)
    }

    /// Queues the pass after this one, with all sequences of the step, if the sampler has space for it.
    fn queue_next_step(&mut self, step: &Step<'_>, pass: usize, sampler: &mut DeviceSampler) -> Result<()> {
        if pass + 1 >= MAX_PASSES {
            return Ok(());
        }
        let context = Arc::clone(self.model.context());
        self.prepare_next(step, 1);
        self.batch.sampled = Some(sampler.on_device(&context, pass)?);
        let logits = self.model.forward(&self.batch, &mut self.kv_cache)?;
        sampler.launch(&context, logits)?;
        let rows = step.sequences.iter().map(|scheduled| (scheduled.seq, scheduled.start + 1)).collect();
        self.queued = Some(QueuedStep { rows, pass: pass + 1 });
        Ok(())
    }

    fn sample_passes(&mut self, step: &Step<'_>, sampler: &mut DeviceSampler) -> Result<Vec<SequenceOutput>> {
        let context = Arc::clone(self.model.context());
        let rows = step.sequences.iter();
        let inputs: Vec<SamplerInput<'_>> = rows
            .flat_map(|scheduled| (0..scheduled.num_draws()).map(|index| scheduled.input(index)))
            .collect();
        let params = || inputs.iter().map(sample_params);
        if step.num_steps > 1 && params().count() != step.sequences.len() {
            return Err(Error::internal("a multi-step has a sequence that does not just decode"));
        }
        sampler.begin(&context, params(), if step.may_queue_next { MAX_PASSES } else { step.num_steps })?;
        let mut outputs = empty_outputs(step);
        let mut tokens = vec![0; inputs.len()];
        for pass in 0..step.num_steps {
            if pass > 0 {
                self.prepare_next(step, pass);
                self.batch.sampled = Some(sampler.on_device(&context, pass - 1)?);
            }
            let logits = self.model.forward(&self.batch, &mut self.kv_cache)?;
            if params().next().is_none() {
                return Ok(outputs);
            }
            sampler.launch(&context, logits)?;
            if pass > 0 {
                sampler.tokens(&context, pass - 1, &mut tokens)?;
                if add_tokens(step, &tokens, &mut outputs) {
                    return Ok(outputs);
                }
            }
        }
        if step.may_queue_next {
            self.queue_next_step(step, 0, sampler)?;
        }
        sampler.tokens(&context, step.num_steps - 1, &mut tokens)?;
        add_tokens(step, &tokens, &mut outputs);
        Ok(outputs)
    }
}

/// Adds a token to each sequence that samples, or those of its draft, and returns whether all sequences have ended.
fn add_tokens(step: &Step<'_>, tokens: &[u32], outputs: &mut [SequenceOutput]) -> bool {
    let mut all_ended = true;
    let mut rest = tokens;
    for (scheduled, output) in step.sequences.iter().zip(outputs) {
        let (Some(input), Some(samples)) = (scheduled.samples.first(), output.samples.first_mut()) else {
            continue;
        };
        let (own, others) = rest.split_at(scheduled.num_draws().min(rest.len()));
        rest = others;
        if samples.last().is_some_and(Option::is_none) {
            continue;
        }
        for (index, &token_id) in own.iter().enumerate() {
            if token_id == u32::MAX {
                samples.push(None);
                break;
            }
            let can_end = input.output_token_ids.len() + samples.len() >= input.params.min_tokens;
            all_ended &= can_end && input.end_token_ids.contains(&token_id);
            samples.push(Some(SampledToken { token_id, logprobs: None }));
            if !is_right(scheduled, index, samples.last()) {
                break;
            }
        }
    }
    all_ended
}
