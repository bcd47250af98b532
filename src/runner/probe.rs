//! A device's results for a short prompt, as bytes.
//!
//! A change of a kernel, the instruction set or the device changes them, so caches that outlive the process need no
//! version that is kept by hand.

use std::time::Instant;

use super::{ModelRunner, Runner, ScheduledSequence, Step, StepDraft, Wanted};
use crate::Result;
use crate::kv_cache::BlockId;
use crate::scheduler::SeqId;

/// Tokens that are computed together, a whole group of a prompt and some more.
const TOGETHER: usize = 36;
/// Tokens that are computed one by one after these.
const ALONE: usize = 3;

/// The result of computing a short prompt.
#[derive(Debug, Clone, Default)]
pub struct Probe {
    /// The bytes of its blocks.
    pub bytes: Vec<u8>,
    /// Seconds of the fastest step with one token.
    pub step_seconds: f64,
}

impl ModelRunner {
    /// Computes tokens of a fixed prompt, some together and some alone, and returns the bytes of their blocks, the
    /// first ones of the cache, which has to be empty. `prompt_group` is that of the engine's limits, and a step has at
    /// most `max_tokens`.
    ///
    /// # Errors
    /// If a step fails or a block cannot be read.
    pub fn probe(&mut self, prompt_group: Option<usize>, max_tokens: usize) -> Result<Probe> {
        let (block_size, vocab_size) = (self.block_size(), self.vocab_size());
        let num_tokens = (TOGETHER + ALONE).min(max_tokens + ALONE).min(self.num_slots());
        let num_together = num_tokens.saturating_sub(ALONE).max(1);
        let token_ids: Vec<u32> = (0..num_tokens).map(|i| ((i * 7_919 + 1) % vocab_size) as u32).collect();
        let blocks: Vec<BlockId> = (0..num_tokens.div_ceil(block_size) as u32).map(BlockId).collect();
        let num_grouped_tokens = prompt_group.map_or(0, |group| num_together / group.max(1) * group);
        let (mut start, mut step_seconds) = (0, f64::INFINITY);
        while start < num_tokens {
            let len = if start == 0 { num_together } else { 1 };
            let scheduled = ScheduledSequence {
                seq: SeqId(u64::MAX),
                token_ids: &token_ids[..start + len],
                start,
                len,
                draft: StepDraft::default(),
                num_grouped_tokens,
                block_table: &blocks,
                copy: None,
                samples: Vec::new(),
                wanted: Wanted::Logits,
                all_logits: false,
                prompt_logprobs: None,
            };
            let begun = Instant::now();
            self.execute(&Step {
                sequences: vec![scheduled],
                window_slots: &[],
                num_steps: 1,
                may_queue_next: false,
                may_draft_next: false,
            })?;
            // No sampler ran, so no call has waited for it.
            self.kv_cache().map_or(Ok(()), |cache| cache.wait())?;
            if len == 1 {
                step_seconds = begun.elapsed().as_secs_f64().min(step_seconds);
            }
            start += len;
        }
        let Some(cache) = self.kv_cache() else { return Ok(Probe::default()) };
        let block_bytes = cache.block_bytes();
        let mut bytes = vec![0; block_bytes * blocks.len()];
        for (block, bytes) in blocks.iter().zip(bytes.chunks_exact_mut(block_bytes.max(1))) {
            cache.read_block(block.0, bytes)?;
        }
        Ok(Probe { bytes, step_seconds })
    }
}
