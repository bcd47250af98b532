//! Blocks of a waiting sequence that somebody else has the contents of: they become free blocks that can be found.

use super::{Scheduler, SeqId};
use crate::kv_cache::BlockId;

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

    /// Blocks that nobody uses.
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
