//! Reference counts and the free list. All operations are O(1).

use super::window_slots::WindowSlots;
use super::{BlockHash, BlockMiss, CacheEvent, PrefixCache};

/// The number of a block: its index in every layer's K and V storage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(pub u32);

impl BlockId {
    /// The number as an index.
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Marks the end of the free list.
const NONE: u32 = u32::MAX;

#[derive(Debug, Clone)]
struct Block {
    ref_count: u32,
    /// Neighbours in the free list; meaningful only while `ref_count` is 0.
    previous: u32,
    next: u32,
}

/// All blocks of the cache.
///
/// The contract: [`allocate`](Self::allocate) hands out a block with one reference and forgets its old
/// content; [`retain`](Self::retain) adds a reference, also to a free block, which so leaves the free
/// list with its content intact; [`release`](Self::release) takes one away, and the last one puts the
/// block into the free list: at the end (reused last) if its content is published, at the front if not.
///
/// With [window slots](Self::with_window_slots), an allocated block also has a slot and a reader there;
/// [`retain_window`](Self::retain_window) and [`release_window`](Self::release_window) count the readers. Otherwise
/// both do nothing, and every block can be read.
#[derive(Debug)]
pub struct BlockPool {
    blocks: Vec<Block>,
    /// Reused first.
    free_head: u32,
    /// Reused last.
    free_tail: u32,
    num_free: usize,
    /// Of the free list.
    num_changes: u64,
    block_size: usize,
    cache: Option<PrefixCache>,
    windows: Option<WindowSlots>,
}

impl BlockPool {
    /// `num_blocks` free blocks of `block_size` tokens, with or without a prefix cache.
    #[must_use]
    pub fn new(num_blocks: usize, block_size: usize, enable_prefix_caching: bool) -> Self {
        let num_blocks = num_blocks.min(NONE as usize - 1);
        let mut pool = Self {
            blocks: vec![Block { ref_count: 0, previous: NONE, next: NONE }; num_blocks],
            free_head: NONE,
            free_tail: NONE,
            num_free: 0,
            num_changes: 0,
            block_size,
            cache: enable_prefix_caching.then(|| PrefixCache::new(num_blocks, block_size)),
            windows: None,
        };
        for block in 0..num_blocks as u32 {
            pool.push_back(block);
        }
        pool
    }

    /// The same, where layers with a window have this many slots for blocks.
    #[must_use]
    pub fn with_window_slots(self, num_slots: usize) -> Self {
        Self { windows: Some(WindowSlots::new(num_slots, self.blocks.len())), ..self }
    }

    /// Tokens in a block.
    #[must_use]
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// All blocks.
    #[must_use]
    pub fn num_blocks(&self) -> usize {
        self.blocks.len()
    }

    /// Blocks without a reference; they may still have published content.
    #[must_use]
    pub fn num_free(&self) -> usize {
        self.num_free
    }

    /// Blocks that [`allocate`](Self::allocate) gives, if none is retained or released meanwhile.
    #[must_use]
    pub fn num_allocatable(&self) -> usize {
        self.num_free.min(self.num_free_windows())
    }

    /// Window slots without a reader.
    #[must_use]
    pub fn num_free_windows(&self) -> usize {
        self.windows.as_ref().map_or(usize::MAX, WindowSlots::num_free)
    }

    /// For each block its window slot; blocks without one have a number that is no slot. Empty if every block can be
    /// read in all layers.
    #[must_use]
    pub fn window_slots(&self) -> &[u32] {
        self.windows.as_ref().map_or(&[], WindowSlots::slots)
    }

    /// The window slot of a block.
    #[must_use]
    pub fn window_slot(&self, block: BlockId) -> Option<u32> {
        self.windows.as_ref()?.slot(block)
    }

    /// Whether layers with a window have the content of a block.
    #[must_use]
    pub fn has_window(&self, block: BlockId) -> bool {
        self.windows.as_ref().is_none_or(|windows| windows.slot(block).is_some())
    }

    /// Whether the block has a reader in layers with a window.
    #[must_use]
    pub fn is_read_in_window(&self, block: BlockId) -> bool {
        self.windows.as_ref().is_none_or(|windows| windows.is_read(block))
    }

    /// Adds a reader in layers with a window, which have the block's content.
    pub fn retain_window(&mut self, block: BlockId) {
        if let Some(windows) = &mut self.windows {
            windows.retain(block);
        }
    }

    /// Takes a reader away. Without readers the slot goes to the next block that needs one.
    pub fn release_window(&mut self, block: BlockId) {
        if let Some(windows) = &mut self.windows {
            windows.release(block);
        }
    }

    /// References to a block.
    #[must_use]
    pub fn ref_count(&self, block: BlockId) -> u32 {
        self.blocks[block.index()].ref_count
    }

    /// Takes the block that was unused for longest; its old content is forgotten.
    pub fn allocate(&mut self) -> Option<BlockId> {
        let block = BlockId((self.free_head != NONE).then_some(self.free_head)?);
        if self.windows.as_mut().is_some_and(|windows| !windows.allocate(block)) {
            return None;
        }
        self.unlink(block.0);
        self.blocks[block.index()].ref_count = 1;
        if let Some(cache) = &mut self.cache {
            cache.forget(block);
        }
        Some(block)
    }

    /// Adds a reference.
    pub fn retain(&mut self, block: BlockId) {
        if self.blocks[block.index()].ref_count == 0 {
            self.unlink(block.0);
        }
        self.blocks[block.index()].ref_count += 1;
    }

    /// Takes a reference away.
    ///
    /// # Panics
    /// If the block has none: a defect of the caller that would otherwise corrupt another sequence.
    pub fn release(&mut self, block: BlockId) {
        let entry = &mut self.blocks[block.index()];
        assert!(entry.ref_count > 0, "{block:?} released more often than retained");
        entry.ref_count -= 1;
        if entry.ref_count > 0 {
            return;
        }
        if self.cache.as_ref().is_some_and(|cache| cache.is_published(block)) {
            self.push_back(block.0);
        } else {
            self.push_front(block.0);
            if let Some(windows) = &mut self.windows {
                windows.forget(block);
            }
        }
    }

    /// Makes a computed full block findable. Does nothing without a prefix cache. A block that has the name and can no
    /// longer be read in layers with a window loses it.
    pub fn publish(&mut self, block: BlockId, hash: BlockHash, parent: BlockHash, token_ids: &[u32]) {
        if let Some(cache) = &mut self.cache {
            if let Some(windows) = &self.windows
                && windows.slot(block).is_some()
                && let Some(other) = cache.lookup(hash, parent, token_ids)
                && windows.slot(other).is_none()
            {
                cache.forget(other);
            }
            cache.publish(block, hash, parent, token_ids);
        }
    }

    /// The block that holds `token_ids` after `parent`. The caller retains it before anything else.
    #[must_use]
    pub fn lookup(&self, hash: BlockHash, parent: BlockHash, token_ids: &[u32]) -> Option<BlockId> {
        self.cache.as_ref()?.lookup(hash, parent, token_ids)
    }

    /// Of the next `num_blocks` that [`allocate`](Self::allocate) gives those that can be found, with their names, those of the
    /// blocks before them and their tokens.
    pub fn next_evicted(
        &self,
        num_blocks: usize,
    ) -> impl Iterator<Item = (BlockId, BlockHash, BlockHash, &[u32])> {
        let first = (self.free_head != NONE).then_some(self.free_head);
        let next = |block: &u32| {
            let next = self.blocks[*block as usize].next;
            (next != NONE).then_some(next)
        };
        let blocks = std::iter::successors(first, next).take(num_blocks).map(BlockId);
        blocks.filter_map(|block| {
            let (hash, parent, token_ids) = self.cache.as_ref()?.published(block)?;
            Some((block, hash, parent, token_ids))
        })
    }

    /// How often blocks have come into the free list or left it.
    #[must_use]
    pub fn num_changes(&self) -> u64 {
        self.num_changes
    }

    /// The reason why [`lookup`](Self::lookup) finds nothing; `None` without a prefix cache.
    #[must_use]
    pub fn explain(&self, hash: BlockHash, parent: BlockHash, token_ids: &[u32]) -> Option<BlockMiss> {
        Some(self.cache.as_ref()?.explain(hash, parent, token_ids))
    }

    /// Starts to record the events of named blocks ([`PrefixCache::record_events`]). Without a prefix cache there are
    /// none.
    pub fn record_events(&mut self, root: BlockHash) {
        if let Some(cache) = &mut self.cache {
            cache.record_events(root);
        }
    }

    /// Takes the events since the last call.
    pub fn take_events(&mut self) -> Vec<CacheEvent> {
        self.cache.as_mut().map(PrefixCache::take_events).unwrap_or_default()
    }

    /// Checks every invariant against the references of the caller and, if there are window slots, its readers, in
    /// O(blocks).
    ///
    /// # Errors
    /// A description of the first violation.
    pub fn check_integrity(
        &self,
        references: impl Iterator<Item = BlockId>,
        readers: impl Iterator<Item = BlockId>,
    ) -> Result<(), String> {
        if let Some(windows) = &self.windows {
            windows.check_integrity(readers)?;
        }
        let mut wanted = vec![0_u32; self.blocks.len()];
        for block in references {
            wanted[block.index()] += 1;
        }
        for (index, (block, wanted)) in self.blocks.iter().zip(&wanted).enumerate() {
            if block.ref_count != *wanted {
                return Err(format!(
                    "block {index} has {} references, but {wanted} are known",
                    block.ref_count
                ));
            }
        }
        let mut seen = 0;
        let (mut block, mut previous) = (self.free_head, NONE);
        while block != NONE {
            let entry = &self.blocks[block as usize];
            if entry.ref_count != 0 || entry.previous != previous || seen > self.blocks.len() {
                return Err(format!("the free list is broken at block {block}"));
            }
            seen += 1;
            previous = block;
            block = entry.next;
        }
        let unused = wanted.iter().filter(|count| **count == 0).count();
        if seen != self.num_free || seen != unused || self.free_tail != previous {
            return Err(format!(
                "{seen} blocks in the free list, {} counted, {unused} unused",
                self.num_free
            ));
        }
        self.cache.as_ref().map_or(Ok(()), PrefixCache::check_integrity)
    }

    fn push_back(&mut self, block: u32) {
        let tail = self.free_tail;
        self.blocks[block as usize].previous = tail;
        self.blocks[block as usize].next = NONE;
        match tail {
            NONE => self.free_head = block,
            tail => self.blocks[tail as usize].next = block,
        }
        self.free_tail = block;
        self.num_free += 1;
        self.num_changes += 1;
    }

    fn push_front(&mut self, block: u32) {
        let head = self.free_head;
        self.blocks[block as usize].previous = NONE;
        self.blocks[block as usize].next = head;
        match head {
            NONE => self.free_tail = block,
            head => self.blocks[head as usize].previous = block,
        }
        self.free_head = block;
        self.num_free += 1;
        self.num_changes += 1;
    }

    fn unlink(&mut self, block: u32) {
        let Block { previous, next, .. } = self.blocks[block as usize];
        match previous {
            NONE => self.free_head = next,
            previous => self.blocks[previous as usize].next = next,
        }
        match next {
            NONE => self.free_tail = previous,
            next => self.blocks[next as usize].previous = previous,
        }
        self.num_free -= 1;
        self.num_changes += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::super::BlockHasher;
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn published_blocks_are_reused_last_and_oldest_first() {
        let mut pool = BlockPool::new(3, 2, true);
        let hasher = BlockHasher::new(7);
        let root = hasher.root(None);
        let blocks: Vec<BlockId> = (0..3).map_while(|_| pool.allocate()).collect();
        assert_eq!(pool.allocate(), None);
        let hashes: Vec<BlockHash> = (0..2).map(|i| hasher.child(root, &[i, i], 0)).collect();
        pool.publish(blocks[0], hashes[0], root, &[0, 0]);
        pool.publish(blocks[1], hashes[1], root, &[1, 1]);
        blocks.iter().for_each(|block| pool.release(*block));
        assert_eq!(pool.lookup(hashes[0], root, &[0, 0]), Some(blocks[0]));
        assert_eq!(pool.allocate(), Some(blocks[2]), "the unpublished block goes first");
        assert_eq!(pool.allocate(), Some(blocks[0]), "then the one released first");
        assert_eq!(pool.lookup(hashes[0], root, &[0, 0]), None, "its content is forgotten");
        assert_eq!(pool.lookup(hashes[1], root, &[1, 1]), Some(blocks[1]));
    }

    #[test]
    fn a_hit_compares_tokens_and_parent() {
        let mut pool = BlockPool::new(2, 2, true);
        let hasher = BlockHasher::new(7);
        let root = hasher.root(None);
        let hash = hasher.child(root, &[1, 2], 0);
        let block = pool.allocate().unwrap();
        pool.publish(block, hash, root, &[1, 2]);
        assert_eq!(pool.lookup(hash, root, &[1, 3]), None, "same hash, other tokens");
        assert_eq!(pool.lookup(hash, hash, &[1, 2]), None, "same hash, other prefix");
        assert_ne!(hasher.root(Some("a")), root);
        assert_ne!(hasher.root(Some("a")), hasher.root(Some("b")));
        assert_ne!(BlockHasher::new(8).child(root, &[1, 2], 0), hash, "hashes are keyed");
    }

    proptest! {
        /// Random operations against a plain model of the same contract.
        #[test]
        fn references_and_free_list_stay_consistent(
            num_blocks in 1_usize..12,
            num_slots in proptest::option::of(1_usize..12),
            operations in proptest::collection::vec((0_u8..6, 0_usize..64, 0_u32..4), 1..300),
        ) {
            let mut pool = BlockPool::new(num_blocks, 2, true);
            if let Some(num_slots) = num_slots {
                pool = pool.with_window_slots(num_slots);
            }
            let num_free_windows = pool.num_free_windows();
            let hasher = BlockHasher::new(1);
            let root = hasher.root(None);
            // Each with whether it is read in layers with a window.
            let mut held: Vec<(BlockId, bool)> = Vec::new();
            let release = |pool: &mut BlockPool, (block, is_read)| {
                if is_read {
                    pool.release_window(block);
                }
                pool.release(block);
            };
            for (operation, pick, token) in operations {
                let hash = hasher.child(root, &[token, token], 0);
                match operation {
                    0 | 1 => {
                        let before = pool.num_allocatable();
                        let read: Vec<Option<u32>> =
                            held.iter().map(|(block, _)| pool.window_slot(*block)).collect();
                        let block = pool.allocate();
                        prop_assert_eq!(block.is_some(), before > 0);
                        if let Some(block) = block {
                            prop_assert!(!held.iter().any(|(other, _)| *other == block), "a block in use");
                            let own = pool.window_slot(block);
                            prop_assert_eq!(own.is_some(), num_slots.is_some());
                            for ((other, is_read), slot) in held.iter().zip(read) {
                                prop_assert!(!is_read || pool.window_slot(*other) == slot, "a slot in use");
                            }
                            held.push((block, true));
                        }
                    }
                    2 if !held.is_empty() => {
                        let index = pick % held.len();
                        release(&mut pool, held.swap_remove(index));
                    }
                    3 if !held.is_empty() => {
                        pool.publish(held[pick % held.len()].0, hash, root, &[token, token]);
                    }
                    4 => {
                        if let Some(block) = pool.lookup(hash, root, &[token, token]) {
                            pool.retain(block);
                            let is_read = pool.has_window(block);
                            if is_read {
                                pool.retain_window(block);
                            }
                            held.push((block, is_read));
                        }
                    }
                    5 if !held.is_empty() => {
                        // The sequence has gone on.
                        let index = pick % held.len();
                        if std::mem::take(&mut held[index].1) {
                            pool.release_window(held[index].0);
                        }
                    }
                    _ => {}
                }
                let readers = held.iter().filter(|(_, is_read)| *is_read).map(|(block, _)| *block);
                prop_assert_eq!(pool.check_integrity(held.iter().map(|(block, _)| *block), readers), Ok(()));
            }
            held.drain(..).for_each(|block| release(&mut pool, block));
            prop_assert_eq!((pool.num_free(), pool.num_free_windows()), (num_blocks, num_free_windows));
            prop_assert_eq!(pool.check_integrity(std::iter::empty(), std::iter::empty()), Ok(()));
        }
    }
}
