//! Blocks in layers whose tokens attend to a window only: a sequence reads its last ones.
//!
//! The rest of scheduling sees one block table. A block that no sequence reads there any more may lose its memory in
//! these layers, and is still in use in the others.

use super::{Scheduler, SeqId, Sequence};
use crate::kv_cache::BlockId;

impl Scheduler {
    /// For each block its slot in layers with a window (see [`BlockPool::window_slots`](crate::kv_cache::BlockPool)).
    #[must_use]
    pub fn window_slots(&self) -> &[u32] {
        self.pool.window_slots()
    }

    /// The index of the first block that is read there before the next token, which has this position.
    pub(super) fn first_window_block(&self, position: usize) -> usize {
        self.config.windows.map_or(0, |windows| windows.first_block(position, self.config.block_size))
    }

    /// Leaves the blocks before the sequence's window.
    pub(super) fn leave_window(&mut self, id: SeqId) {
        let Some(windows) = self.config.windows else { return };
        let Some(sequence) = self.sequences.get_mut(&id) else { return };
        let first = windows.first_block(sequence.num_computed_tokens, self.config.block_size);
        let first = first.min(sequence.block_table.len());
        for index in sequence.first_window_block..first {
            self.pool.release_window(sequence.block_table[index]);
        }
        sequence.first_window_block = first.max(sequence.first_window_block);
    }

    /// How many of these blocks of a prefix can be used: after them, all that is in the window has to be there.
    pub(super) fn readable_prefix(&self, blocks: &[BlockId]) -> usize {
        if self.config.windows.is_none() {
            return blocks.len();
        }
        let mut len = blocks.len();
        loop {
            let first = self.first_window_block(len * self.config.block_size);
            match (first..len).rev().find(|index| !self.pool.has_window(blocks[*index])) {
                // A prefix up to that block needs those before it only.
                Some(missing) => len = missing,
                None => return len,
            }
        }
    }

    /// The most blocks that a sequence will read at once in layers with a window, if its prompt has `num_blocks` and
    /// begins with `num_cached` cached ones.
    pub(super) fn num_window_blocks(&self, num_blocks: usize, num_cached: usize) -> usize {
        let Some(windows) = self.config.windows else { return 0 };
        let block_size = self.config.block_size;
        let first = windows.first_block(num_cached * block_size, block_size);
        windows.blocks_per_sequence(self.config.max_reserved_tokens(), block_size).min(num_blocks - first)
    }

    /// How many of these blocks of a prefix it will read there that others read already.
    pub(super) fn num_shared_in_window(&self, cached: &[BlockId]) -> usize {
        let first = self.first_window_block(cached.len() * self.config.block_size);
        cached[first..].iter().filter(|block| self.pool.is_read_in_window(**block)).count()
    }

    /// All blocks of these layers; 0 if they have those of the others.
    pub(super) fn num_all_window_blocks(&self) -> usize {
        self.config.windows.map_or(0, |windows| windows.num_blocks)
    }

    /// Blocks that a running sequence reads there.
    pub(super) fn num_held_in_windows(&self, sequence: &Sequence) -> usize {
        self.config.windows.map_or(0, |_| sequence.window_blocks().len())
    }
}
