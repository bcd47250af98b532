//! A model without tensors that notices every mistake of the scheduler and the cache.
//!
//! It keeps a token in each cache slot, as a real model keeps K and V. The next token's logits are a
//! function of all tokens that it *reads back through the block table*, so a block that is shared
//! wrongly, overwritten, or used before it is computed changes the output. A token that was computed in
//! another way than it should be, in a group of a prompt or by itself, ends the test.

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use tinyvllm::config::EngineConfig;
use tinyvllm::runner::{DraftRequest, Runner, ScheduledSequence, SequenceOutput, Step};
use tinyvllm::sampling::{SampledToken, Sampler, SamplerInput, SamplingParams};
use tinyvllm::scheduler::SeqId;
use tinyvllm::speculation::Draft;
use tinyvllm::{Error, Result};

pub(crate) const VOCAB_SIZE: usize = 24;
pub(crate) const EOS: u32 = 0;

/// The logits that follow these tokens.
pub(crate) fn logits(context: &[u32]) -> Vec<f32> {
    (0..VOCAB_SIZE as u32)
        .map(|token| {
            let mut hasher = DefaultHasher::new();
            (context, token).hash(&mut hasher);
            (hasher.finish() % 10_000) as f32 / 2_000.0
        })
        .collect()
}

/// The expected result of a request, computed without an engine.
pub(crate) fn reference(
    prompt: &[u32],
    params: &SamplingParams,
    seed: u64,
    stream: u32,
    max_len: usize,
) -> Vec<u32> {
    let mut tokens = prompt.to_vec();
    let mut end_token_ids = params.stop_token_ids.clone();
    if !params.ignore_eos {
        end_token_ids.push(EOS);
    }
    let max_len = max_len.min(prompt.len() + params.max_tokens.unwrap_or(usize::MAX / 2));
    while tokens.len() < max_len {
        let input = SamplerInput {
            params,
            seed,
            stream,
            prompt_token_ids: prompt,
            output_token_ids: &tokens[prompt.len()..],
            end_token_ids: &end_token_ids,
            allowed: None,
        };
        let token = Sampler::default().sample(&logits(&tokens), &input).unwrap().token_id;
        tokens.push(token);
        if end_token_ids.contains(&token) {
            break;
        }
    }
    tokens.split_off(prompt.len())
}

pub(crate) struct FakeRunner {
    config: EngineConfig,
    /// Of each slot the token, its position, and whether it was computed in a group.
    slots: Vec<Option<(u32, usize, bool)>>,
    /// The same in layers with a window, if these have blocks of their own.
    windows: Vec<Option<(u32, usize, bool)>>,
    sampler: Sampler,
    /// Fail the step with this number, if any.
    pub(crate) fail_at: Option<u64>,
    num_steps: u64,
    /// Queues the next step where a step allows it.
    pub(crate) may_queue_next: bool,
    /// Drafts for itself, and is right in this many of a hundred positions.
    pub(crate) percent_right: Option<Arc<AtomicU64>>,
    /// The rows of which it did in the last step.
    queued: Vec<(SeqId, usize)>,
    /// How many steps it queued.
    pub(crate) num_queued: Arc<AtomicUsize>,
    /// Sequences with tokens in steps after which it was not to draft.
    with_gaps: HashSet<SeqId>,
}

impl FakeRunner {
    pub(crate) fn new(config: &EngineConfig) -> Self {
        Self {
            slots: vec![None; config.kv_cache_tokens()],
            windows: vec![None; config.windows.map_or(0, |own| own.num_blocks * config.block_size)],
            config: config.clone(),
            sampler: Sampler::default(),
            fail_at: None,
            num_steps: 0,
            may_queue_next: true,
            percent_right: None,
            queued: Vec::new(),
            num_queued: Arc::default(),
            with_gaps: HashSet::new(),
        }
    }
}

impl FakeRunner {
    fn slot(&self, scheduled: &ScheduledSequence<'_>, position: usize) -> usize {
        let block_size = self.config.block_size;
        scheduled.block_table[position / block_size].index() * block_size + position % block_size
    }

    /// The slot in layers with a window, if these have blocks of their own.
    fn window_slot(
        &self,
        step: &Step<'_>,
        scheduled: &ScheduledSequence<'_>,
        position: usize,
    ) -> Option<usize> {
        self.config.windows?;
        let block_size = self.config.block_size;
        let block = scheduled.block_table[position / block_size];
        Some(step.window_slots[block.index()] as usize * block_size + position % block_size)
    }

    fn write(
        &mut self,
        step: &Step<'_>,
        scheduled: &ScheduledSequence<'_>,
        position: usize,
        content: (u32, bool),
    ) {
        let content = Some((content.0, position, content.1));
        let slot = self.slot(scheduled, position);
        self.slots[slot] = content;
        if let Some(slot) = self.window_slot(step, scheduled, position) {
            self.windows[slot] = content;
        }
    }

    /// The first `len` tokens of the sequence, as the cache has them.
    fn read(&self, step: &Step<'_>, scheduled: &ScheduledSequence<'_>, len: usize) -> Vec<u32> {
        if let Some(windows) = self.config.windows {
            for position in len.saturating_sub(windows.window)..len {
                let slot = self.window_slot(step, scheduled, position).unwrap_or_default();
                assert_eq!(
                    self.windows[slot],
                    self.slots[self.slot(scheduled, position)],
                    "{position} of {len} in a window of {}",
                    windows.window
                );
            }
        }
        let read = |position| {
            let content = self.slots[self.slot(scheduled, position)].expect("an empty slot was read");
            let (token, at, is_grouped) = content;
            assert_eq!(at, position, "a slot holds another position");
            assert_eq!(
                is_grouped,
                position < scheduled.num_grouped_tokens,
                "{position} was computed otherwise"
            );
            token
        };
        (0..len).map(read).collect()
    }
}

impl Runner for FakeRunner {
    fn execute(&mut self, step: &Step<'_>) -> Result<Vec<SequenceOutput>> {
        self.num_steps += 1;
        let queued = std::mem::take(&mut self.queued);
        let is_continued = |scheduled: &ScheduledSequence<'_>| {
            scheduled.len == 1 && queued.contains(&(scheduled.seq, scheduled.start))
        };
        assert!(!(step.may_queue_next && step.may_draft_next), "a draft waits for the tokens of a step");
        if !step.may_draft_next {
            self.with_gaps.extend(step.sequences.iter().map(|scheduled| scheduled.seq));
        }
        let num_continued = step.sequences.iter().filter(|scheduled| is_continued(scheduled)).count();
        assert!([0, step.sequences.len()].contains(&num_continued), "a step of continued rows and others");
        assert!(num_continued == 0 || !step.may_draft_next, "the block of a queued step");
        if self.fail_at == Some(self.num_steps) {
            return Err(Error::internal("planned failure"));
        }
        let block_size = self.config.block_size;
        let num_tokens: usize = step.sequences.iter().map(|scheduled| scheduled.len).sum();
        assert!(num_tokens <= self.config.max_num_batched_tokens, "{num_tokens} tokens are over the budget");
        let num_samples: usize = step.sequences.iter().map(|scheduled| scheduled.samples.len()).sum();
        assert!(num_samples.max(step.sequences.len()) <= self.config.max_num_seqs, "too many sequences");
        let num_logits: usize = step.sequences.iter().map(|scheduled| scheduled.num_logits().max(1)).sum();
        assert!(num_logits <= self.config.max_num_logits(), "too many rows of logits");
        for copy in step.sequences.iter().filter_map(|scheduled| scheduled.copy) {
            for offset in 0..block_size {
                let content = self.slots[copy.source.index() * block_size + offset];
                self.slots[copy.target.index() * block_size + offset] = content;
                if let Some((source, target)) = copy.window_slots {
                    let content = self.windows[source as usize * block_size + offset];
                    self.windows[target as usize * block_size + offset] = content;
                }
            }
            assert_eq!(copy.window_slots.is_some(), self.config.windows.is_some());
        }
        let slot = |scheduled: &ScheduledSequence<'_>, position: usize| {
            scheduled.block_table[position / block_size].index() * block_size + position % block_size
        };
        let (mut written, mut written_in_windows) = (HashSet::new(), HashSet::new());
        let mut outputs = Vec::new();
        // All rows write before any row reads, as in a real layer.
        for scheduled in &step.sequences {
            assert!(scheduled.len > 0 && scheduled.start + scheduled.len <= scheduled.token_ids.len());
            for position in scheduled.start..scheduled.start + scheduled.len {
                assert!(written.insert(slot(scheduled, position)), "two rows write one slot");
                if let Some(slot) = self.window_slot(step, scheduled, position) {
                    assert!(written_in_windows.insert(slot), "two rows write one slot of a window");
                }
                let is_grouped = position < scheduled.num_grouped_tokens;
                self.write(step, scheduled, position, (scheduled.token_ids[position], is_grouped));
            }
            for input in &scheduled.samples {
                let num_prompt_tokens = input.prompt_token_ids.len();
                let num_grouped =
                    self.config.prompt_group.map_or(0, |group| num_prompt_tokens / group * group);
                assert_eq!(scheduled.num_grouped_tokens, num_grouped, "of a prompt of {num_prompt_tokens}");
            }
        }
        for scheduled in &step.sequences {
            let mut tokens = scheduled.token_ids[..scheduled.start + scheduled.len].to_vec();
            let mut samples = vec![Vec::new(); scheduled.samples.len()];
            let mut all_logits = Vec::new();
            if scheduled.all_logits {
                (scheduled.start..scheduled.start + scheduled.len)
                    .for_each(|end| all_logits.extend(logits(&tokens[..=end])));
            }
            if scheduled.draft.num_tokens > 0 {
                assert_eq!((step.num_steps, scheduled.samples.len()), (1, 1), "a draft of something else");
                assert!(
                    !scheduled.all_logits
                        && scheduled.prompt_logprobs.is_none()
                        && scheduled.len == 1 + scheduled.draft.num_tokens
                );
                assert_eq!(scheduled.token_ids.len(), scheduled.start + scheduled.len);
            }
            // With a draft, further draws read the drafted tokens, up to the first wrong one.
            for index in 1..=scheduled.draft.num_tokens {
                let read = self.read(step, scheduled, scheduled.start + index);
                let token = self.sampler.sample(&logits(&read), &scheduled.input(index - 1));
                let is_right = token.as_ref().map(|token| token.token_id) == scheduled.drafted(index - 1);
                samples[0].push(token);
                if !is_right {
                    break;
                }
            }
            let is_right = samples.first().is_none_or(|samples| {
                let last = samples.last().map(|token| token.as_ref().map(|token| token.token_id));
                last.is_none_or(|last| last == scheduled.drafted(samples.len() - 1))
            });
            for index in 0..step.num_steps {
                if !is_right {
                    break;
                }
                if index > 0 {
                    assert_eq!(
                        (scheduled.len, scheduled.samples.len()),
                        (1, 1),
                        "a multi-step of something else"
                    );
                    let position = tokens.len() - 1;
                    self.write(step, scheduled, position, (tokens[position], false));
                }
                let read = self.read(step, scheduled, tokens.len());
                let mut last = 0;
                for (index, samples) in samples.iter_mut().enumerate() {
                    // After a draft that was right all along there is one more draw.
                    let input = scheduled.input(index + scheduled.draft.num_tokens);
                    let mut output = input.output_token_ids.to_vec();
                    output.extend(&tokens[scheduled.start + scheduled.len..]);
                    let input = SamplerInput { output_token_ids: &output, ..input };
                    let token: Option<SampledToken> = self.sampler.sample(&logits(&read), &input);
                    last = token.as_ref().map_or(0, |token| token.token_id);
                    samples.push(token);
                }
                tokens.push(last);
            }
            let mut prompt_logprobs = Vec::new();
            if let Some(num_top) = scheduled.prompt_logprobs {
                for position in
                    scheduled.start..(scheduled.start + scheduled.len).min(scheduled.token_ids.len() - 1)
                {
                    let logits = logits(&scheduled.token_ids[..=position]);
                    prompt_logprobs.push(self.sampler.rank(
                        &logits,
                        scheduled.token_ids[position + 1],
                        num_top,
                    ));
                }
            }
            outputs.push(SequenceOutput { samples, logits: all_logits, hidden: None, prompt_logprobs });
        }
        // As a real one, it does not always do so.
        if step.may_queue_next && self.may_queue_next && !self.num_steps.is_multiple_of(5) {
            for (scheduled, output) in step.sequences.iter().zip(&outputs) {
                let token = output.samples[0][0].as_ref().map_or(0, |token| token.token_id);
                self.write(step, scheduled, scheduled.start + 1, (token, false));
                self.queued.push((scheduled.seq, scheduled.start + 1));
            }
            self.num_queued.fetch_add(1, Ordering::Relaxed);
        }
        Ok(outputs)
    }

    fn can_queue_next_step(&self) -> bool {
        self.may_queue_next
    }

    /// Its own draw, or another token.
    fn draft(&mut self, request: &DraftRequest<'_>, draft: &mut Draft) {
        let Some(percent_right) = self.percent_right.as_ref().map(|percent| percent.load(Ordering::Relaxed))
        else {
            return;
        };
        assert!(!self.with_gaps.contains(&request.seq), "a draft after tokens without the block");
        assert!(draft.is_empty() && request.max_tokens > 0 && request.chance > 0.0);
        let mut tokens = [request.input.prompt_token_ids, request.input.output_token_ids].concat();
        assert!(!request.input.output_token_ids.is_empty(), "a draft after a prompt that is not computed");
        // All but the last one are in the cache.
        for (position, token) in tokens.iter().enumerate().rev().skip(1) {
            let block_size = self.config.block_size;
            let slot =
                request.block_table[position / block_size].index() * block_size + position % block_size;
            let content = self.slots[slot].map(|(token, at, _)| (token, at));
            assert_eq!(content, Some((*token, position)), "a block of another sequence");
        }
        let num_prompt_tokens = request.input.prompt_token_ids.len();
        for _ in 0..request.max_tokens {
            let input = SamplerInput { output_token_ids: &tokens[num_prompt_tokens..], ..request.input };
            let Some(token) = self.sampler.sample(&logits(&tokens), &input) else { return };
            let mut hasher = DefaultHasher::new();
            tokens.hash(&mut hasher);
            let is_right = hasher.finish() % 100 < percent_right;
            let token = if is_right { token.token_id } else { (token.token_id + 1) % VOCAB_SIZE as u32 };
            tokens.push(token);
            draft.push(token, request.chance);
        }
    }

    fn has_queued_step(&self) -> bool {
        !self.queued.is_empty()
    }
}
