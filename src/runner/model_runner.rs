//! The runner that computes: a model, its KV cache and a sampler.

use std::sync::Arc;

use super::mtp::Predictions;
use super::{DraftRow, RowOutput, Runner, Step, StepRow};
use crate::models::{CausalLm, InputBatch};
use crate::ops::{DeviceSampler, KvCache, RowForm, SampleParams};
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
    continued: Option<Continued>,
    /// Whether nothing of the last step was read.
    is_computing: bool,
    /// Kept between steps for its memory.
    pub(super) batch: InputBatch,
    pub(super) predictions: Predictions,
}

/// Passes of the device's sampler that were begun before the tokens in front of them were known.
#[derive(Debug)]
struct Continued {
    /// The sequence of each row and the position of the token that the last pass computes.
    rows: Vec<(SeqId, usize)>,
    /// The number of that pass.
    pass: usize,
}

impl Continued {
    /// Which of the rows are those of this step; none if the step has others.
    fn places(&self, step: &Step<'_>) -> Option<Vec<usize>> {
        let mut rows = self.rows.iter();
        let mut place = 0;
        let place_of = |row: &StepRow<'_>| {
            place += rows.position(|own| *own == (row.seq, row.start))?;
            place += 1;
            (row.len == 1).then_some(place - 1)
        };
        step.rows.iter().map(place_of).collect()
    }
}

/// Passes from one upload of what sampling depends on to the next. What it takes a pass grows with those before where there
/// are penalties.
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
        let device_sampler = DeviceSampler::new(model.context())?;
        Ok(Self {
            model,
            kv_cache,
            sampler: Sampler::default(),
            device_sampler,
            continued: None,
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

    /// The first forward pass: all rows as they are.
    fn prepare(&mut self, step: &Step<'_>) {
        self.batch.clear();
        self.batch.attention.block_size = self.kv_cache.block_size();
        for row in &step.rows {
            let first = self.batch.token_ids.len();
            let end = row.start + row.len;
            let form = RowForm::of(row.len - row.draft.num_tokens);
            self.push_row(row, row.start, &row.token_ids[row.start..end], form);
            let end = first + row.len;
            self.batch.logits_indices.extend(end - row.num_logits()..end);
        }
    }

    /// A further pass: one new token for each row, whose id is not known or not given here.
    fn prepare_next(&mut self, step: &Step<'_>, offset: usize) {
        self.batch.clear();
        self.batch.attention.block_size = self.kv_cache.block_size();
        for row in &step.rows {
            self.batch.logits_indices.push(self.batch.token_ids.len());
            self.push_row(row, row.start + offset, &[0], RowForm::Decode);
        }
    }

    fn push_row(&mut self, row: &StepRow<'_>, start: usize, token_ids: &[u32], form: RowForm) {
        let block_size = self.kv_cache.block_size();
        let end = start + token_ids.len();
        let batch = &mut self.batch;
        batch.token_ids.extend_from_slice(token_ids);
        for position in start..end {
            batch.positions.push(position as u32);
            let block = row.block_table[position / block_size].index();
            batch.attention.slot_mapping.push(block * block_size + position % block_size);
        }
        batch.attention.push(start..end, row.num_grouped_tokens, form, |index| row.block_table[index].0);
    }
}

impl Runner for ModelRunner {
    fn execute(&mut self, step: &Step<'_>) -> Result<Vec<RowOutput>> {
        for copy in step.rows.iter().filter_map(|row| row.copy) {
            self.kv_cache.copy_block(copy.source.0, copy.target.0)?;
        }
        let is_on_device = self.device_sampler.is_some() && step.rows.iter().all(can_sample_on_device);
        let outputs = if is_on_device { self.execute_on_device(step) } else { self.execute_on_host(step) }?;
        self.is_computing = is_on_device && step.rows.iter().all(|row| row.num_draws() == 0);
        self.follow(step, &outputs);
        Ok(outputs)
    }

    fn max_exact_tokens(&self) -> usize {
        self.model.context().max_exact_rows()
    }

    fn draft(&mut self, row: &DraftRow<'_>, draft: &mut Draft) {
        // What could not be computed is not drafted.
        let _ = self.try_draft(row, draft);
    }

    fn seconds_per_drafted_token(&self) -> f64 {
        self.predictions.seconds_per_token.get()
    }

    fn kv_cache(&mut self) -> Option<&mut KvCache> {
        Some(&mut self.kv_cache)
    }

    fn can_look_ahead(&self) -> bool {
        // The MTP block waits for the tokens of a step.
        self.device_sampler.is_some() && self.model.config().mtp_layer().is_none()
    }

    fn has_continued(&self) -> bool {
        self.continued.is_some()
    }

    fn is_computing(&self) -> bool {
        self.is_computing
    }
}

impl ModelRunner {
    /// A step whose tokens are sampled on the host.
    fn execute_on_host(&mut self, step: &Step<'_>) -> Result<Vec<RowOutput>> {
        self.continued = None;
        self.prepare(step);
        let vocab_size = self.model.config().vocab_size;
        let sampler = &mut self.sampler;
        let num_logits = self.batch.logits_indices.len();
        let logits = self.model.forward(&self.batch, &mut self.kv_cache)?;
        let mut outputs = logits.read(num_logits, |logits| {
            let mut rest = logits;
            let mut outputs = Vec::with_capacity(step.rows.len());
            for row in &step.rows {
                let (own, others) = rest.split_at(row.num_logits() * vocab_size);
                rest = others;
                let samples = draw(sampler, row, own, vocab_size, step.num_steps);
                let prompt_logprobs = match row.prompt_logprobs {
                    Some(num_top) => {
                        let next = row.token_ids[row.start + 1..].iter();
                        let rows = own.chunks_exact(vocab_size).zip(next);
                        rows.map(|(logits, token_id)| sampler.rank(logits, *token_id, num_top)).collect()
                    }
                    None => Vec::new(),
                };
                let logits = if row.all_logits { own.to_vec() } else { Vec::new() };
                outputs.push(RowOutput { samples, logits, prompt_logprobs });
            }
            outputs
        })?;
        if step.num_steps > 1 {
            self.continue_multi_step(step, &mut outputs)?;
        }
        Ok(outputs)
    }
}

/// The tokens of a row's samples. With a draft, what is behind the first drafted token that is not drawn is not looked at.
fn draw(
    sampler: &mut Sampler,
    row: &StepRow<'_>,
    logits: &[f32],
    vocab_size: usize,
    num_steps: usize,
) -> Vec<Vec<Option<SampledToken>>> {
    if row.draft.num_tokens == 0 {
        let last = logits.len().saturating_sub(vocab_size);
        let draw = |input| {
            let mut tokens = Vec::with_capacity(num_steps);
            tokens.push(sampler.sample(&logits[last..], input));
            tokens
        };
        return row.samples.iter().map(draw).collect();
    }
    let mut tokens = Vec::with_capacity(row.num_draws());
    for (index, logits) in logits.chunks_exact(vocab_size).enumerate() {
        tokens.push(sampler.sample(logits, &row.input(index)));
        if !is_right(row, index, tokens.last()) {
            break;
        }
    }
    vec![tokens]
}

/// Whether the token of this draw is the drafted one.
fn is_right(row: &StepRow<'_>, index: usize, token: Option<&Option<SampledToken>>) -> bool {
    let token_id = token.and_then(|token| token.as_ref()).map(|token| token.token_id);
    token_id.is_some() && token_id == row.drafted(index)
}

/// Whether the host needs nothing of a row but its tokens.
fn can_sample_on_device(row: &StepRow<'_>) -> bool {
    match &row.samples[..] {
        [] => row.num_logits() == 0,
        [input] => {
            // Of a constraint, the sets behind drafted tokens are the host's too.
            let wants_tokens_only = input.params.logprobs.is_none() && input.allowed.is_none();
            !row.all_logits && row.prompt_logprobs.is_none() && wants_tokens_only
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
    /// next pass already runs. A step that looks ahead leaves such a pass behind, for the next step to take it up.
    fn execute_on_device(&mut self, step: &Step<'_>) -> Result<Vec<RowOutput>> {
        let Some(mut sampler) = self.device_sampler.take() else {
            return Err(Error::internal("there is no sampler on the device"));
        };
        let continued = self.continued.take();
        let continued = continued.and_then(|continued| Some((continued.places(step)?, continued)));
        let outputs = match continued {
            Some((places, continued)) => self.take_up(step, &places, continued, &mut sampler),
            None => {
                self.prepare(step);
                self.sample_passes(step, &mut sampler)
            }
        };
        self.device_sampler = Some(sampler);
        outputs
    }

    /// A step whose rows are at these places of a pass that was begun before.
    fn take_up(
        &mut self,
        step: &Step<'_>,
        places: &[usize],
        continued: Continued,
        sampler: &mut DeviceSampler,
    ) -> Result<Vec<RowOutput>> {
        let Continued { rows, pass } = continued;
        // Of a pass that has lost rows, the others cannot be continued: the next step begins anew.
        if step.looks_ahead && places.len() == rows.len() {
            self.look_ahead(step, pass, sampler)?;
        }
        let mut tokens = Vec::with_capacity(rows.len());
        sampler.tokens(self.model.context(), pass, &mut tokens)?;
        let tokens: Vec<u32> = places.iter().map(|place| tokens[*place]).collect();
        let mut outputs = Self::room_for_tokens(step);
        add_tokens(step, &tokens, &mut outputs);
        Ok(outputs)
    }

    /// Begins with the pass behind this one, in which all rows of the step are, if the sampler has room for it.
    fn look_ahead(&mut self, step: &Step<'_>, pass: usize, sampler: &mut DeviceSampler) -> Result<()> {
        if pass + 1 >= MAX_PASSES {
            return Ok(());
        }
        let context = Arc::clone(self.model.context());
        self.prepare_next(step, 1);
        self.batch.sampled = Some(sampler.on_device(&context, pass)?);
        let logits = self.model.forward(&self.batch, &mut self.kv_cache)?;
        sampler.launch(&context, logits)?;
        let rows = step.rows.iter().map(|row| (row.seq, row.start + 1)).collect();
        self.continued = Some(Continued { rows, pass: pass + 1 });
        Ok(())
    }

    fn room_for_tokens(step: &Step<'_>) -> Vec<RowOutput> {
        let room_for = |row: &StepRow<'_>| RowOutput {
            samples: row.samples.iter().map(|_| Vec::with_capacity(step.num_steps)).collect(),
            ..RowOutput::default()
        };
        step.rows.iter().map(room_for).collect()
    }

    fn sample_passes(&mut self, step: &Step<'_>, sampler: &mut DeviceSampler) -> Result<Vec<RowOutput>> {
        let context = Arc::clone(self.model.context());
        let rows = step.rows.iter();
        let inputs: Vec<SamplerInput<'_>> =
            rows.flat_map(|row| (0..row.num_draws()).map(|index| row.input(index))).collect();
        let params = || inputs.iter().map(sample_params);
        if step.num_steps > 1 && params().count() != step.rows.len() {
            return Err(Error::internal("a multi-step has a row that does not just generate"));
        }
        sampler.begin(&context, params(), if step.looks_ahead { MAX_PASSES } else { step.num_steps })?;
        let mut outputs = Self::room_for_tokens(step);
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
        if step.looks_ahead {
            self.look_ahead(step, 0, sampler)?;
        }
        sampler.tokens(&context, step.num_steps - 1, &mut tokens)?;
        add_tokens(step, &tokens, &mut outputs);
        Ok(outputs)
    }

    /// Feeds the sampled tokens back until each row has its tokens or has ended. From one token to the next
    /// nothing is allocated.
    fn continue_multi_step(&mut self, step: &Step<'_>, outputs: &mut [RowOutput]) -> Result<()> {
        let vocab_size = self.model.config().vocab_size;
        let mut rows = step
            .rows
            .iter()
            .map(|row| match &row.samples[..] {
                [input] if row.len == 1 && input.allowed.is_none() => {
                    let mut tokens = Vec::with_capacity(input.output_token_ids.len() + step.num_steps);
                    tokens.extend_from_slice(input.output_token_ids);
                    Ok((input, tokens))
                }
                _ => Err(Error::internal("a multi-step has a row that does not just generate")),
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

/// Adds a token to each row that samples, or those that it has with a draft, and tells whether all rows have ended.
fn add_tokens(step: &Step<'_>, tokens: &[u32], outputs: &mut [RowOutput]) -> bool {
    let mut all_ended = true;
    let mut rest = tokens;
    for (row, output) in step.rows.iter().zip(outputs) {
        let (Some(input), Some(samples)) = (row.samples.first(), output.samples.first_mut()) else {
            continue;
        };
        let (own, others) = rest.split_at(row.num_draws().min(rest.len()));
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
            if !is_right(row, index, samples.last()) {
                break;
            }
        }
    }
    all_ended
}
