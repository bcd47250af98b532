//! The runner that computes: a model, its KV cache and a sampler.

use std::sync::Arc;

use super::mtp::Predictions;
use super::{DraftRequest, Runner, ScheduledSequence, SequenceOutput, Step};
use crate::models::{CausalLm, InputBatch, Wanted};
use crate::ops::{AttentionMetadata, DeviceSampler, KvCache, RowMode, SampleParams};
use crate::sampling::{SampledToken, Sampler, SamplerInput};
use crate::scheduler::SeqId;
use crate::speculation::Draft;
use crate::{Error, Result};

/// Runs a model over the paged cache.
pub struct ModelRunner {
    pub(super) model: Box<dyn CausalLm>,
    pub(super) kv_cache: KvCache,
    pub(super) sampler: Sampler,
    /// The sampler of the device, if that is not the CPU.
    device_sampler: Option<DeviceSampler>,
    /// Rows whose next token the device computes already.
    queued: Option<QueuedStep>,
    /// Whether no result of the last step was read.
    is_computing: bool,
    /// Kept between steps for its memory.
    pub(super) batch: InputBatch,
    pub(super) predictions: Predictions,
}

/// Passes of the device's sampler that were queued before the previous tokens were known.
#[derive(Debug)]
struct QueuedStep {
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

impl std::fmt::Debug for ModelRunner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ModelRunner").field("kv_cache", &self.kv_cache).finish_non_exhaustive()
    }
}

impl ModelRunner {
    /// A runner for this model, with this cache.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Capacity`] if the device has no memory for sampling.
    pub fn new(model: Box<dyn CausalLm>, kv_cache: KvCache) -> Result<Self> {
        let mut batch = InputBatch::default();
        // Block tables grow while sequences generate; their memory is here before.
        batch.attention.block_tables.reserve(kv_cache.num_blocks());
        batch.windowed = kv_cache.has_window_blocks().then(|| batch.attention.clone());
        let device_sampler = DeviceSampler::new(model.context())?;
        Ok(Self {
            model,
            kv_cache,
            sampler: Sampler::default(),
            device_sampler,
            queued: None,
            is_computing: false,
            batch,
            predictions: Predictions::default(),
        })
    }

    pub(super) fn block_size(&self) -> usize {
        self.kv_cache.block_size()
    }

    pub(super) fn num_slots(&self) -> usize {
        self.kv_cache.num_blocks() * self.kv_cache.block_size()
    }

    pub(super) fn vocab_size(&self) -> usize {
        self.model.config().vocab_size.max(1)
    }

    /// The first forward pass, with all rows.
    fn prepare(&mut self, step: &Step<'_>) {
        self.clear_batch();
        for (_, scheduled) in step.in_batch_order() {
            let first = self.batch.token_ids.len();
            let end = scheduled.start + scheduled.len;
            let mode = RowMode::of(scheduled.len - scheduled.draft.num_tokens);
            let token_ids = &scheduled.token_ids[scheduled.start..end];
            self.push_row(step, scheduled, scheduled.start, token_ids, mode);
            scheduled.rows_with_logits().for_each(|row| self.batch.want(first + row, Wanted::Logits));
            if scheduled.wants_hidden() {
                self.batch.want(first + scheduled.len - 1, Wanted::Hidden);
            }
        }
    }

    /// A further pass: one new token for each row, whose id may be unknown to the host.
    fn prepare_next(&mut self, step: &Step<'_>, offset: usize) {
        self.clear_batch();
        for scheduled in &step.sequences {
            self.batch.want(self.batch.token_ids.len(), Wanted::Logits);
            let position = scheduled.start + scheduled.len - 1 + offset;
            self.push_row(step, scheduled, position, &[0], RowMode::Decode);
        }
    }

    fn clear_batch(&mut self) {
        self.batch.clear();
        let block_size = self.kv_cache.block_size();
        self.batch.attention.block_size = block_size;
        if let Some(windowed) = &mut self.batch.windowed {
            windowed.block_size = block_size;
        }
    }

    fn push_row(
        &mut self,
        step: &Step<'_>,
        scheduled: &ScheduledSequence<'_>,
        start: usize,
        token_ids: &[u32],
        mode: RowMode,
    ) {
        let block_size = self.kv_cache.block_size();
        let num_window_blocks = self.kv_cache.num_window_blocks() as u32;
        let end = start + token_ids.len();
        let batch = &mut self.batch;
        batch.token_ids.extend_from_slice(token_ids);
        batch.positions.extend((start..end).map(|position| position as u32));
        let num_grouped_tokens = scheduled.num_grouped_tokens;
        let push = |attention: &mut AttentionMetadata, block: &dyn Fn(usize) -> u32| {
            let slot = |position| block(position / block_size) as usize * block_size + position % block_size;
            attention.slot_mapping.extend((start..end).map(slot));
            attention.push(start..end, num_grouped_tokens, mode, block);
        };
        push(&mut batch.attention, &|index| scheduled.block_table[index].0);
        if let Some(windowed) = &mut batch.windowed {
            let slot_of = |index: usize| {
                let slot = step.window_slots.get(scheduled.block_table[index].index()).copied();
                let slot = slot.filter(|slot| *slot < num_window_blocks);
                // Before the window there are blocks without a slot, which are not read.
                slot.unwrap_or(if index < start / block_size { 0 } else { u32::MAX })
            };
            push(windowed, &slot_of);
        }
    }
}

impl Runner for ModelRunner {
    fn execute(&mut self, step: &Step<'_>) -> Result<Vec<SequenceOutput>> {
        for copy in step.sequences.iter().filter_map(|scheduled| scheduled.copy) {
            self.kv_cache.copy_block(copy.source.0, copy.target.0)?;
            if let Some((source, target)) = copy.window_slots {
                self.kv_cache.copy_window_block(source, target)?;
            }
        }
        let is_on_device = self.device_sampler.is_some() && step.sequences.iter().all(can_sample_on_device);
        let outputs = if is_on_device { self.execute_on_device(step) } else { self.execute_on_host(step) }?;
        self.is_computing = self.device_sampler.is_some()
            && step.sequences.iter().all(|scheduled| scheduled.num_logits() == 0);
        self.follow(step, &outputs);
        Ok(outputs)
    }

    fn max_exact_tokens(&self) -> usize {
        self.model.context().max_exact_rows()
    }

    fn draft(&mut self, request: &DraftRequest<'_>, draft: &mut Draft) {
        // A failed computation drafts nothing.
        let _ = self.try_draft(request, draft);
    }

    fn seconds_per_drafted_token(&self) -> f64 {
        self.predictions.seconds_per_token.get()
    }

    fn kv_cache(&mut self) -> Option<&mut KvCache> {
        Some(&mut self.kv_cache)
    }

    fn can_queue_next_step(&self) -> bool {
        self.device_sampler.is_some()
    }

    fn has_queued_step(&self) -> bool {
        self.queued.is_some()
    }

    fn is_computing(&self) -> bool {
        self.is_computing
    }
}

impl ModelRunner {
    /// A step whose tokens are sampled on the host.
    fn execute_on_host(&mut self, step: &Step<'_>) -> Result<Vec<SequenceOutput>> {
        self.queued = None;
        self.prepare(step);
        let vocab_size = self.model.config().vocab_size;
        let sampler = &mut self.sampler;
        let num_logits = self.batch.num_logits();
        let logits = self.model.forward(&self.batch, &mut self.kv_cache)?;
        let mut outputs = logits.read(num_logits, |logits| {
            let mut rest = logits;
            let mut outputs = Vec::with_capacity(step.sequences.len());
            for scheduled in &step.sequences {
                let (own, others) = rest.split_at(scheduled.num_logits() * vocab_size);
                rest = others;
                let samples = draw(sampler, scheduled, own, vocab_size, step.num_steps);
                let prompt_logprobs = match scheduled.prompt_logprobs {
                    Some(num_top) => {
                        let next = scheduled.token_ids[scheduled.start + 1..].iter();
                        let rows = own.chunks_exact(vocab_size).zip(next);
                        rows.map(|(logits, token_id)| sampler.rank(logits, *token_id, num_top)).collect()
                    }
                    None => Vec::new(),
                };
                let logits = if scheduled.all_logits { own.to_vec() } else { Vec::new() };
                outputs.push(SequenceOutput { samples, logits, hidden: None, prompt_logprobs });
            }
            outputs
        })?;
        if num_logits < self.batch.outputs.len() {
            let states = self.model.hidden_states(&self.batch)?;
            let wanting = step.sequences.iter().zip(&mut outputs).filter(|(own, _)| own.wants_hidden());
            let width = self.model.config().hidden_size;
            for ((_, output), state) in wanting.zip(states.chunks_exact(width)) {
                output.hidden = Some(state.to_vec());
            }
        }
        if step.num_steps > 1 {
            self.continue_multi_step(step, &mut outputs)?;
        }
        Ok(outputs)
    }
}

/// The tokens of a sequence's samples; none if another thing is wanted. With a draft, tokens after the first rejected one are not read.
fn draw(
    sampler: &mut Sampler,
    scheduled: &ScheduledSequence<'_>,
    logits: &[f32],
    vocab_size: usize,
    num_steps: usize,
) -> Vec<Vec<Option<SampledToken>>> {
    if scheduled.wants_hidden() {
        return Vec::new();
    }
    if scheduled.draft.num_tokens == 0 {
        let last = logits.len().saturating_sub(vocab_size);
        let draw = |(index, input)| {
            let mut tokens = Vec::with_capacity(num_steps);
            tokens.push(match scheduled.forced(index) {
                Some(token_id) => Some(SampledToken { token_id, logprobs: None }),
                None => sampler.sample(&logits[last..], input),
            });
            tokens
        };
        return scheduled.samples.iter().enumerate().map(draw).collect();
    }
    let mut logits = logits.chunks_exact(vocab_size);
    let mut tokens = Vec::with_capacity(scheduled.num_draws());
    for index in 0..scheduled.num_draws() {
        tokens.push(match scheduled.forced(index) {
            Some(token_id) => Some(SampledToken { token_id, logprobs: None }),
            None => logits.next().and_then(|logits| sampler.sample(logits, &scheduled.input(index))),
        });
        if !is_right(scheduled, index, tokens.last()) {
            break;
        }
    }
    vec![tokens]
}

/// Whether the token of this draw is the drafted one.
fn is_right(scheduled: &ScheduledSequence<'_>, index: usize, token: Option<&Option<SampledToken>>) -> bool {
    let token_id = token.and_then(|token| token.as_ref()).map(|token| token.token_id);
    token_id.is_some() && token_id == scheduled.drafted(index)
}

/// Whether the host needs only the tokens of a row.
fn can_sample_on_device(scheduled: &ScheduledSequence<'_>) -> bool {
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
    fn execute_on_device(&mut self, step: &Step<'_>) -> Result<Vec<SequenceOutput>> {
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
        let mut outputs = Self::empty_outputs(step);
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

    fn empty_outputs(step: &Step<'_>) -> Vec<SequenceOutput> {
        let empty_output = |scheduled: &ScheduledSequence<'_>| SequenceOutput {
            samples: scheduled.samples.iter().map(|_| Vec::with_capacity(step.num_steps)).collect(),
            ..SequenceOutput::default()
        };
        step.sequences.iter().map(empty_output).collect()
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
        let mut outputs = Self::empty_outputs(step);
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

    /// Feeds the sampled tokens back until each row has its tokens or has ended. Does not allocate between tokens.
    fn continue_multi_step(&mut self, step: &Step<'_>, outputs: &mut [SequenceOutput]) -> Result<()> {
        let vocab_size = self.model.config().vocab_size;
        let mut rows = step
            .sequences
            .iter()
            .map(|scheduled| match &scheduled.samples[..] {
                [input] if scheduled.draft.num_tokens == 0 && input.allowed.is_none() => {
                    let mut tokens = Vec::with_capacity(input.output_token_ids.len() + step.num_steps);
                    tokens.extend_from_slice(input.output_token_ids);
                    Ok((input, tokens))
                }
                _ => Err(Error::internal("a multi-step has a sequence that does not just decode")),
            })
            .collect::<Result<Vec<(&SamplerInput<'_>, Vec<u32>)>>>()?;
        let mut token_ids = Vec::with_capacity(rows.len());
        for offset in 1..step.num_steps {
            token_ids.clear();
            let mut all_ended = true;
            for ((input, tokens), output) in rows.iter_mut().zip(&*outputs) {
                match output.samples[0].last() {
                    Some(Some(SampledToken { token_id, .. })) => {
                        let can_end = tokens.len() >= input.params.min_tokens;
                        all_ended &= can_end && input.end_token_ids.contains(token_id);
                        tokens.push(*token_id);
                    }
                    // The sequence has failed; it is carried along, since rows are independent.
                    _ => tokens.push(0),
                }
                token_ids.extend(tokens.last());
            }
            if all_ended {
                return Ok(());
            }
            self.prepare_next(step, offset);
            self.batch.token_ids.clone_from(&token_ids);
            let sampler = &mut self.sampler;
            let logits = self.model.forward(&self.batch, &mut self.kv_cache)?;
            logits.read(rows.len(), |logits| {
                let logits = logits.chunks_exact(vocab_size);
                for (((input, tokens), output), logits) in rows.iter().zip(&mut *outputs).zip(logits) {
                    let input = SamplerInput { output_token_ids: tokens, ..**input };
                    if output.samples[0].last().is_some_and(Option::is_some) {
                        output.samples[0].push(sampler.sample(logits, &input));
                    }
                }
            })?;
        }
        Ok(())
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
