//! Which block is in which place of a tier, and which one goes first.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::tier::BlockKey;
use crate::kv_cache::BlockHash;

/// Places, with blocks in them or free. Whoever holds a place keeps it from being given to another block.
pub(super) struct Places<P> {
    held: HashMap<BlockHash, Held<P>>,
    /// By when they were used last.
    by_use: BTreeMap<u64, BlockHash>,
    num_uses: u64,
    free: Vec<Arc<P>>,
}

/// A block that is in a place.
pub(super) struct Held<P> {
    pub(super) place: Arc<P>,
    pub(super) parent: BlockHash,
    pub(super) token_ids: Vec<u32>,
    /// A count of uses.
    used: u64,
}

impl<P> Places<P> {
    pub(super) fn new() -> Self {
        Self { held: HashMap::new(), by_use: BTreeMap::new(), num_uses: 0, free: Vec::new() }
    }

    /// Blocks that are there.
    pub(super) fn len(&self) -> usize {
        self.held.len()
    }

    /// Blocks that there is room for.
    pub(super) fn capacity(&self) -> usize {
        self.held.len() + self.free.len()
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

    /// More places, which nobody holds.
    pub(super) fn add_free(&mut self, places: impl IntoIterator<Item = P>) {
        self.free.extend(places.into_iter().map(Arc::new));
    }

    /// A place that nobody uses, without whom it was given to before.
    pub(super) fn take_free(&mut self) -> Option<Arc<P>> {
        self.free.pop()
    }

    /// Gives up the block that was used least recently of those whose place nobody holds.
    pub(super) fn evict(&mut self) -> Option<(BlockHash, Held<P>)> {
        let is_idle = |hash: &&BlockHash| Arc::strong_count(&self.held[hash].place) == 1;
        let hash = *self.by_use.values().find(is_idle)?;
        let held = self.held.remove(&hash)?;
        self.by_use.remove(&held.used);
        Some((hash, held))
    }

    /// Gives back a place that was taken.
    pub(super) fn give_back(&mut self, place: Arc<P>) {
        self.free.push(place);
    }

    /// Puts a block into a place that was taken. Another one with its name, which has other tokens, stays where it is: then
    /// false, and the place is free again.
    pub(super) fn insert(&mut self, block: BlockKey, place: Arc<P>) -> bool {
        let BlockKey { hash, parent, token_ids, .. } = block;
        if self.held.contains_key(&hash) {
            self.give_back(place);
            return false;
        }
        self.held.insert(hash, Held { place, parent, token_ids, used: 0 });
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
        BlockKey { hash: hasher.child(parent, &token_ids, 0), parent, token_ids, place: None }
    }

    #[test]
    fn the_least_recently_used_that_nobody_holds_goes_first() {
        let mut places = Places::new();
        places.add_free(0..3);
        for number in 0..3 {
            let place = places.take_free().unwrap();
            assert!(places.insert(block(number), place));
        }
        assert!(places.take_free().is_none());
        assert_eq!((places.len(), places.capacity()), (3, 3));
        places.touch(block(0).hash);
        // The second one is read at the moment.
        let reading = Arc::clone(&places.find(&block(1)).unwrap().place);
        let (evicted, held) = places.evict().unwrap();
        assert_eq!(evicted, block(2).hash);
        assert!(places.insert(block(3), held.place));
        let (evicted, held) = places.evict().unwrap();
        assert_eq!(evicted, block(0).hash);
        places.give_back(held.place);
        let (evicted, _) = places.evict().unwrap();
        assert_eq!(evicted, block(3).hash);
        assert!(places.evict().is_none(), "the last one is held");
        drop(reading);
        assert_eq!(places.evict().unwrap().0, block(1).hash);
    }

    #[test]
    fn a_block_is_found_by_all_that_it_is() {
        let mut places = Places::new();
        places.add_free(0..2);
        let place = places.take_free().unwrap();
        assert!(places.insert(block(1), place));
        assert!(places.find(&block(1)).is_some() && places.find(&block(2)).is_none());
        let other = BlockKey { token_ids: vec![9; 4], ..block(1) };
        assert!(places.find(&other).is_none(), "a hash is only a hint");
        assert!(places.find(&BlockKey { parent: block(1).hash, ..block(1) }).is_none());
        let place = places.take_free().unwrap();
        assert!(!places.insert(other, place));
        assert_eq!((places.len(), places.capacity()), (1, 2));
    }
}
