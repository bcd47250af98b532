//! A model without tensors that notices every mistake of the scheduler and the cache.
//!
//! It keeps a token in each cache slot, as a real model keeps K and V. The next token's logits are a
//! function of all tokens that it *reads back through the block table*, so a block that is shared
//! wrongly, overwritten, or used before it is computed changes the output. A token that was computed in
//! another way than it should be, in a group of a prompt or by itself, ends the test.

use std::hash::{DefaultHasher, Hash, Hasher};

use tinyvllm::config::EngineConfig;
use tinyvllm::runner::{DraftRow, RowOutput, Runner, Step, StepRow};
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

/// What a request must give, computed without any engine.
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
    sampler: Sampler,
    /// Fail the step with this number, if any.
    pub(crate) fail_at: Option<u64>,
    num_steps: u64,
    /// Looks ahead where a step allows it.
    pub(crate) looks_ahead: bool,
    /// Drafts for itself, and is right in so many of a hundred places. Then it does not look ahead.
    pub(crate) percent_right: Option<u64>,
    /// The rows of which it did in the last step.
    continued: Vec<(SeqId, usize)>,
}

impl FakeRunner {
    pub(crate) fn new(config: &EngineConfig) -> Self {
        Self {
            slots: vec![None; config.kv_cache_tokens()],
            config: config.clone(),
            sampler: Sampler::default(),
            fail_at: None,
            num_steps: 0,
            looks_ahead: true,
            percent_right: None,
            continued: Vec::new(),
        }
    }
}

impl FakeRunner {
    fn slot(&self, row: &StepRow<'_>, position: usize) -> usize {
        let block_size = self.config.block_size;
        row.block_table[position / block_size].index() * block_size + position % block_size
    }

    /// The first `len` tokens of the sequence, as the cache has them.
    fn read(&self, row: &StepRow<'_>, len: usize) -> Vec<u32> {
        let read = |position| {
            let content = self.slots[self.slot(row, position)].expect("an empty slot was read");
            let (token, at, is_grouped) = content;
            assert_eq!(at, position, "a slot holds another position");
            assert_eq!(is_grouped, position < row.num_grouped_tokens, "{position} was computed otherwise");
            token
        };
        (0..len).map(read).collect()
    }
}

impl Runner for FakeRunner {
    fn execute(&mut self, step: &Step<'_>) -> Result<Vec<RowOutput>> {
        self.num_steps += 1;
        let continued = std::mem::take(&mut self.continued);
        let is_continued = |row: &StepRow<'_>| row.len == 1 && continued.contains(&(row.seq, row.start));
        let num_continued = step.rows.iter().filter(|row| is_continued(row)).count();
        assert!([0, step.rows.len()].contains(&num_continued), "a step of continued rows and others");
        if self.fail_at == Some(self.num_steps) {
            return Err(Error::internal("planned failure"));
        }
        let block_size = self.config.block_size;
        let num_tokens: usize = step.rows.iter().map(|row| row.len).sum();
        assert!(num_tokens <= self.config.max_num_batched_tokens, "{num_tokens} tokens are over the budget");
        let num_samples: usize = step.rows.iter().map(|row| row.samples.len()).sum();
        assert!(num_samples.max(step.rows.len()) <= self.config.max_num_seqs, "too many sequences");
        let num_logits: usize = step.rows.iter().map(|row| row.num_logits().max(1)).sum();
        assert!(num_logits <= self.config.max_num_logits(), "too many rows of logits");
        for copy in step.rows.iter().filter_map(|row| row.copy) {
            for offset in 0..block_size {
                let content = self.slots[copy.source.index() * block_size + offset];
                self.slots[copy.target.index() * block_size + offset] = content;
            }
        }
        let slot = |row: &StepRow<'_>, position: usize| {
            row.block_table[position / block_size].index() * block_size + position % block_size
        };
        let mut written = std::collections::HashSet::new();
        let mut outputs = Vec::new();
        // All rows write before any row reads, as in a real layer.
        for row in &step.rows {
            assert!(row.len > 0 && row.start + row.len <= row.token_ids.len());
            for position in row.start..row.start + row.len {
                assert!(written.insert(slot(row, position)), "two rows write one slot");
                let is_grouped = position < row.num_grouped_tokens;
                self.slots[slot(row, position)] = Some((row.token_ids[position], position, is_grouped));
            }
            for input in &row.samples {
                let num_prompt_tokens = input.prompt_token_ids.len();
                let num_grouped =
                    self.config.prompt_group.map_or(0, |group| num_prompt_tokens / group * group);
                assert_eq!(row.num_grouped_tokens, num_grouped, "of a prompt of {num_prompt_tokens}");
            }
        }
        for row in &step.rows {
            let mut tokens = row.token_ids[..row.start + row.len].to_vec();
            let mut samples = vec![Vec::new(); row.samples.len()];
            let mut all_logits = Vec::new();
            if row.all_logits {
                (row.start..row.start + row.len).for_each(|end| all_logits.extend(logits(&tokens[..=end])));
            }
            if row.draft.num_tokens > 0 {
                assert_eq!((step.num_steps, row.samples.len()), (1, 1), "a draft of something else");
                assert!(
                    !row.all_logits && row.prompt_logprobs.is_none() && row.len == 1 + row.draft.num_tokens
                );
                assert_eq!(row.token_ids.len(), row.start + row.len);
            }
            // With a draft, further draws read what was drafted, up to the first that is wrong.
            for index in 1..=row.draft.num_tokens {
                let read = self.read(row, row.start + index);
                let token = self.sampler.sample(&logits(&read), &row.input(index - 1));
                let is_right = token.as_ref().map(|token| token.token_id) == row.drafted(index - 1);
                samples[0].push(token);
                if !is_right {
                    break;
                }
            }
            let is_right = samples.first().is_none_or(|samples| {
                let last = samples.last().map(|token| token.as_ref().map(|token| token.token_id));
                last.is_none_or(|last| last == row.drafted(samples.len() - 1))
            });
            for index in 0..step.num_steps {
                if !is_right {
                    break;
                }
                if index > 0 {
                    assert_eq!((row.len, row.samples.len()), (1, 1), "a multi-step of something else");
                    let position = tokens.len() - 1;
                    self.slots[slot(row, position)] = Some((tokens[position], position, false));
                }
                let read = self.read(row, tokens.len());
                let mut last = 0;
                for (place, samples) in samples.iter_mut().enumerate() {
                    // Behind a draft that was right all along there is one more draw.
                    let input = row.input(place + row.draft.num_tokens);
                    let mut output = input.output_token_ids.to_vec();
                    output.extend(&tokens[row.start + row.len..]);
                    let input = SamplerInput { output_token_ids: &output, ..input };
                    let token: Option<SampledToken> = self.sampler.sample(&logits(&read), &input);
                    last = token.as_ref().map_or(0, |token| token.token_id);
                    samples.push(token);
                }
                tokens.push(last);
            }
            let mut prompt_logprobs = Vec::new();
            if let Some(num_top) = row.prompt_logprobs {
                for position in row.start..(row.start + row.len).min(row.token_ids.len() - 1) {
                    let logits = logits(&row.token_ids[..=position]);
                    prompt_logprobs.push(self.sampler.rank(&logits, row.token_ids[position + 1], num_top));
                }
            }
            outputs.push(RowOutput { samples, logits: all_logits, prompt_logprobs });
        }
        // As a real one, it does not always do so.
        if step.looks_ahead && self.looks_ahead && !self.num_steps.is_multiple_of(5) {
            for (row, output) in step.rows.iter().zip(&outputs) {
                let token = output.samples[0][0].as_ref().map_or(0, |token| token.token_id);
                self.slots[slot(row, row.start + 1)] = Some((token, row.start + 1, false));
                self.continued.push((row.seq, row.start + 1));
            }
        }
        Ok(outputs)
    }

    fn can_look_ahead(&self) -> bool {
        self.looks_ahead && self.percent_right.is_none()
    }

    /// What it draws itself, or something else.
    fn draft(&mut self, row: &DraftRow<'_>, draft: &mut Draft) {
        let Some(percent_right) = self.percent_right else { return };
        assert!(draft.is_empty() && row.max_tokens > 0 && row.chance > 0.0);
        let mut tokens = [row.input.prompt_token_ids, row.input.output_token_ids].concat();
        assert!(!row.input.output_token_ids.is_empty(), "a draft behind a prompt that is not computed");
        // All but the last one are in the cache.
        for (position, token) in tokens.iter().enumerate().rev().skip(1) {
            let block_size = self.config.block_size;
            let slot = row.block_table[position / block_size].index() * block_size + position % block_size;
            let content = self.slots[slot].map(|(token, at, _)| (token, at));
            assert_eq!(content, Some((*token, position)), "a block of somebody else");
        }
        let num_prompt_tokens = row.input.prompt_token_ids.len();
        for _ in 0..row.max_tokens {
            let input = SamplerInput { output_token_ids: &tokens[num_prompt_tokens..], ..row.input };
            let Some(token) = self.sampler.sample(&logits(&tokens), &input) else { return };
            let mut hasher = DefaultHasher::new();
            tokens.hash(&mut hasher);
            let is_right = hasher.finish() % 100 < percent_right;
            let token = if is_right { token.token_id } else { (token.token_id + 1) % VOCAB_SIZE as u32 };
            tokens.push(token);
            draft.push(token, row.chance);
        }
    }

    fn has_continued(&self) -> bool {
        !self.continued.is_empty()
    }
}
