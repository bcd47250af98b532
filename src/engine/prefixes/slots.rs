//! Which block is in which slot of a tier, and which one is evicted first.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::tier::BlockKey;
use crate::kv_cache::BlockHash;

/// Slots, with blocks in them or free. A reference to a slot keeps it from being reused.
pub(super) struct SlotTable<P> {
    held: HashMap<BlockHash, Held<P>>,
    /// By when they were used last.
    by_use: BTreeMap<u64, BlockHash>,
    num_uses: u64,
    free: Vec<Arc<P>>,
}

/// A block that is in a slot.
pub(super) struct Held<P> {
    pub(super) slot: Arc<P>,
    pub(super) parent: BlockHash,
    pub(super) token_ids: Vec<u32>,
    /// A count of uses.
    used: u64,
}

impl<P> SlotTable<P> {
    pub(super) fn new() -> Self {
        Self { held: HashMap::new(), by_use: BTreeMap::new(), num_uses: 0, free: Vec::new() }
    }

    /// Blocks that are there.
    pub(super) fn len(&self) -> usize {
        self.held.len()
    }

    /// Capacity in blocks.
    pub(super) fn capacity(&self) -> usize {
        self.held.len() + self.free.len()
    }

    /// Free slots.
    pub(super) fn num_free(&self) -> usize {
        self.free.len()
    }

    pub(super) fn blocks(&self) -> impl Iterator<Item = (BlockHash, &Held<P>)> {
        self.held.iter().map(|(hash, held)| (*hash, held))
    }

    /// The block with this name, parent and tokens.
    pub(super) fn find(&self, block: &BlockKey) -> Option<&Held<P>> {
        let held = self.held.get(&block.hash)?;
        (held.parent == block.parent && held.token_ids == block.token_ids).then_some(held)
    }

    /// Notes that a block is used.
    pub(super) fn touch(&mut self, hash: BlockHash) {
        self.num_uses += 1;
        if let Some(held) = self.held.get_mut(&hash) {
            self.by_use.remove(&held.used);
            held.used = self.num_uses;
            self.by_use.insert(held.used, hash);
        }
    }

    /// More slots, all free.
    pub(super) fn add_free(&mut self, slots: impl IntoIterator<Item = P>) {
        self.free.extend(slots.into_iter().map(Arc::new));
    }

    /// A free slot, without its former owner.
    pub(super) fn take_free(&mut self) -> Option<Arc<P>> {
        self.free.pop()
    }

    /// Evicts the least recently used block of those whose slot is not referenced.
    pub(super) fn evict(&mut self) -> Option<(BlockHash, Held<P>)> {
        let is_idle = |hash: &&BlockHash| Arc::strong_count(&self.held[hash].slot) == 1;
        let hash = *self.by_use.values().find(is_idle)?;
        let held = self.held.remove(&hash)?;
        self.by_use.remove(&held.used);
        Some((hash, held))
    }

    /// Returns a slot that was taken.
    pub(super) fn give_back(&mut self, slot: Arc<P>) {
        self.free.push(slot);
    }

    /// Puts a block into a slot that was taken. Another one with its name, which has other tokens, stays where it is: then
    /// false, and the slot is free again.
    pub(super) fn insert(&mut self, block: BlockKey, slot: Arc<P>) -> bool {
        let BlockKey { hash, parent, token_ids, .. } = block;
        if self.held.contains_key(&hash) {
            self.give_back(slot);
            return false;
        }
        self.held.insert(hash, Held { slot, parent, token_ids, used: 0 });
        self.touch(hash);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv_cache::BlockHasher;

    fn block(number: u32) -> BlockKey {
        let hasher = BlockHasher::new(7);
        let parent = hasher.root(None);
        let token_ids = vec![number; 4];
        BlockKey { hash: hasher.child(parent, &token_ids, 0), parent, token_ids, position: None }
    }

    #[test]
    fn the_least_recently_used_free_one_goes_first() {
        let mut slots = SlotTable::new();
        slots.add_free(0..3);
        for number in 0..3 {
            let slot = slots.take_free().unwrap();
            assert!(slots.insert(block(number), slot));
        }
        assert!(slots.take_free().is_none());
        assert_eq!((slots.len(), slots.capacity()), (3, 3));
        slots.touch(block(0).hash);
        // The second one is read at the moment.
        let reading = Arc::clone(&slots.find(&block(1)).unwrap().slot);
        let (evicted, held) = slots.evict().unwrap();
        assert_eq!(evicted, block(2).hash);
        assert!(slots.insert(block(3), held.slot));
        let (evicted, held) = slots.evict().unwrap();
        assert_eq!(evicted, block(0).hash);
        slots.give_back(held.slot);
        let (evicted, _) = slots.evict().unwrap();
        assert_eq!(evicted, block(3).hash);
        assert!(slots.evict().is_none(), "the last one is held");
        drop(reading);
        assert_eq!(slots.evict().unwrap().0, block(1).hash);
    }

    #[test]
    fn a_block_is_found_by_all_that_it_is() {
        let mut slots = SlotTable::new();
        slots.add_free(0..2);
        let slot = slots.take_free().unwrap();
        assert!(slots.insert(block(1), slot));
        assert!(slots.find(&block(1)).is_some() && slots.find(&block(2)).is_none());
        let other = BlockKey { token_ids: vec![9; 4], ..block(1) };
        assert!(slots.find(&other).is_none(), "a hash is only a hint");
        assert!(slots.find(&BlockKey { parent: block(1).hash, ..block(1) }).is_none());
        let slot = slots.take_free().unwrap();
        assert!(!slots.insert(other, slot));
        assert_eq!((slots.len(), slots.capacity()), (1, 2));
    }
}
