//! Blocks of a waiting sequence whose contents a tier has: they become free blocks that can be found.

use super::{Scheduler, SeqId};
use crate::kv_cache::{BlockHash, BlockHasher, BlockId};

impl Scheduler {
    /// Full blocks before the sequence's last token that the prefix cache has, counted from the first one. They are reused
    /// last from now on.
    pub fn refresh_cached_blocks(&mut self, id: SeqId) -> usize {
        let found = self.find_cached_blocks(id);
        for block in found.iter().rev() {
            self.pool.retain(*block);
            self.pool.release(*block);
        }
        found.len()
    }

    /// Of the `num_blocks` blocks that steps give to others next, those that can be found, the next one first, with their names,
    /// those of the blocks before them and their tokens.
    pub fn next_evicted(
        &self,
        num_blocks: usize,
    ) -> impl Iterator<Item = (BlockId, BlockHash, BlockHash, &[u32])> {
        self.pool.next_evicted(num_blocks)
    }

    /// Blocks that a step takes at most.
    #[must_use]
    pub fn max_blocks_per_step(&self) -> usize {
        self.config.max_num_batched_tokens / self.config.block_size + self.config.max_num_seqs
    }

    /// How often [`next_evicted`](Self::next_evicted) may have changed.
    #[must_use]
    pub fn num_free_list_changes(&self) -> u64 {
        self.pool.num_changes()
    }

    /// The namer of blocks.
    #[must_use]
    pub fn hasher(&self) -> &BlockHasher {
        &self.hasher
    }

    /// Sees to it that all full blocks of the sequence have names.
    pub fn name_blocks(&mut self, id: SeqId) {
        let block_size = self.config.block_size;
        let Some(sequence) = self.sequences.get_mut(&id) else { return };
        for index in sequence.block_hashes.len()..sequence.token_ids().len() / block_size {
            sequence.name_block(index, block_size, &self.hasher);
        }
    }

    /// The block that has these names and tokens, as long as no other sequence gets it.
    #[must_use]
    pub fn find_block(&self, hash: BlockHash, parent: BlockHash, token_ids: &[u32]) -> Option<BlockId> {
        self.pool.lookup(hash, parent, token_ids)
    }

    /// Seconds that computing this many tokens of a prompt adds to a step; none before steps were seen.
    #[must_use]
    pub fn prompt_seconds(&self, num_tokens: usize) -> Option<f64> {
        let pace = self.pace.as_ref().filter(|pace| pace.knows_seconds())?;
        let time = pace.step_time();
        let num_steps = num_tokens / self.config.max_num_batched_tokens.max(1);
        Some(time.own * num_steps as f64 + time.prompt_token * num_tokens as f64)
    }

    /// Blocks without a user.
    #[must_use]
    pub fn num_free_blocks(&self) -> usize {
        self.pool.num_free()
    }

    /// A block to put the contents of the sequence's full block `index` into; none if they are there already, or no block is
    /// free. [`end_restore`](Self::end_restore) has to follow before anything else.
    pub fn begin_restore(&mut self, id: SeqId, index: usize) -> Option<BlockId> {
        let block_size = self.config.block_size;
        let sequence = self.sequences.get_mut(&id)?;
        if (index + 1) * block_size > sequence.token_ids().len() {
            return None;
        }
        for before in sequence.block_hashes.len()..index {
            sequence.name_block(before, block_size, &self.hasher);
        }
        let parent = sequence.name_block(index, block_size, &self.hasher);
        let token_ids = &sequence.token_ids()[index * block_size..(index + 1) * block_size];
        match self.pool.lookup(sequence.block_hashes[index], parent, token_ids) {
            Some(_) => None,
            None => self.pool.allocate(),
        }
    }

    /// The block is free again, and if it was written, it can be found.
    pub fn end_restore(&mut self, id: SeqId, index: usize, block: BlockId, is_written: bool) {
        if let Some(sequence) = self.sequences.get_mut(&id).filter(|_| is_written) {
            let block_size = self.config.block_size;
            let parent = sequence.name_block(index, block_size, &self.hasher);
            let token_ids = &sequence.token_ids()[index * block_size..(index + 1) * block_size];
            self.pool.publish(block, sequence.block_hashes[index], parent, token_ids);
        }
        self.pool.release(block);
    }
}

#[cfg(test)]
mod tests {
    use crate::config::EngineConfig;
    use crate::scheduler::{PlannedSequence, Scheduler, SchedulerOutput, SeqId};

    #[test]
    fn what_a_prompt_takes_is_known_from_one_step_or_not_at_all() {
        let config = EngineConfig { step_cost: 8, max_num_batched_tokens: 512, ..EngineConfig::default() };
        let seconds = |expected: Option<f64>| {
            let mut scheduler = Scheduler::new(config.clone(), 1);
            expected.into_iter().for_each(|seconds| scheduler.expect_steps(seconds));
            scheduler.keep_pace();
            scheduler.prompt_seconds(1_000)
        };
        assert_eq!(seconds(None), None);
        assert_eq!(seconds(Some(f64::INFINITY)), None);
        // The fixed time of a step is eight rows, that of a decoding row one, and that of a prompt token half a row. A
        // full step is one more.
        let found = seconds(Some(9e-3)).unwrap();
        assert!((found - (500e-3 + 8e-3)).abs() < 1e-3, "{found}");
    }

    /// A device returns at once from chunks of a prompt, and the last one is waited for.
    #[test]
    fn steps_that_were_queued_count_in_the_next_that_is_waited_for() {
        let plan = |len: usize| {
            let (seq, samples) = (SeqId(1), Vec::new());
            let planned = PlannedSequence { seq, start: 0, len, num_draft_tokens: 0, samples, copy: None };
            SchedulerOutput { sequences: vec![planned], num_steps: 1, ..SchedulerOutput::default() }
        };
        let mut scheduler = Scheduler::new(EngineConfig::default(), 1);
        scheduler.keep_pace();
        for _ in 0..5 {
            (0..3).for_each(|_| scheduler.note_queued(&plan(2_000)));
            scheduler.learn(&plan(2_000), 4.0 * 5e-3 + 8_000.0 * 30e-6);
            (0..10).for_each(|_| scheduler.learn(&plan(1), 5e-3));
        }
        // Forgotten blocks do not count.
        scheduler.note_queued(&plan(100_000));
        scheduler.forget_queued();
        scheduler.learn(&plan(1), 5e-3);
        let num_steps = 1_000 / EngineConfig::default().max_num_batched_tokens;
        let found = scheduler.prompt_seconds(1_000).unwrap() - num_steps as f64 * 5e-3;
        assert!((28e-3..32e-3).contains(&found), "{found}");
    }
}
