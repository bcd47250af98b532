//! The runner that computes: a model, its KV cache and a sampler. Here are the batches of a step's passes; what is done
//! with their logits is in `host_sampling` and `device_sampling`.

use super::device_sampling::{QueuedStep, can_sample_on_device};
use super::mtp::Predictions;
use super::{DraftRequest, Runner, ScheduledSequence, SequenceOutput, Step};
use crate::Result;
use crate::models::{CausalLm, InputBatch, Wanted};
use crate::ops::{AttentionMetadata, DeviceSampler, KvCache, RowMode};
use crate::sampling::{SampledToken, Sampler};
use crate::speculation::Draft;

/// Runs a model over the paged cache.
pub struct ModelRunner {
    pub(super) model: Box<dyn CausalLm>,
    pub(super) kv_cache: KvCache,
    pub(super) sampler: Sampler,
    /// The sampler of the device, if that is not the CPU.
    pub(super) device_sampler: Option<DeviceSampler>,
    /// Rows whose next token the device computes already.
    pub(super) queued: Option<QueuedStep>,
    /// Whether no result of the last step was read.
    is_computing: bool,
    /// Kept between steps for its memory.
    pub(super) batch: InputBatch,
    pub(super) predictions: Predictions,
}

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
    pub(super) fn prepare(&mut self, step: &Step<'_>) {
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
    pub(super) fn prepare_next(&mut self, step: &Step<'_>, offset: usize) {
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

/// Outputs without tokens.
pub(super) fn empty_outputs(step: &Step<'_>) -> Vec<SequenceOutput> {
    let len = |scheduled: &ScheduledSequence<'_>| step.num_steps + scheduled.draft.num_tokens;
    let empty_output = |scheduled: &ScheduledSequence<'_>| SequenceOutput {
        samples: scheduled.samples.iter().map(|_| Vec::with_capacity(len(scheduled))).collect(),
        ..SequenceOutput::default()
    };
    step.sequences.iter().map(empty_output).collect()
}

/// Whether the token of this draw is the drafted one.
pub(super) fn is_right(
    scheduled: &ScheduledSequence<'_>,
    index: usize,
    token: Option<&Option<SampledToken>>,
) -> bool {
    let token_id = token.and_then(|token| token.as_ref()).map(|token| token.token_id);
    token_id.is_some() && token_id == scheduled.drafted(index)
}
