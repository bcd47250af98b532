//! Which blocks have memory in the layers that attend to a window only.
//!
//! Such a layer has fewer slots than there are blocks, because a sequence reads only its last blocks there. A block
//! gets a slot when it is allocated. It keeps it while some sequence may read it, and after that until another block
//! needs the slot: until then a prefix that ends after it can be found.

use std::collections::BTreeMap;

use super::BlockId;

/// No slot.
const NONE: u32 = u32::MAX;

/// The slots, and for each block the number of sequences that may still read it.
///
/// Invariant: a slot belongs to one block, or to none and is in `empty`. A block with a slot and without readers is
/// in `idle`.
#[derive(Debug)]
pub(super) struct WindowSlots {
    slots: Vec<u32>,
    num_readers: Vec<u32>,
    /// When the last reader of each block left: its key in `idle`.
    left_at: Vec<u64>,
    idle: BTreeMap<u64, BlockId>,
    empty: Vec<u32>,
    num_left: u64,
}

impl WindowSlots {
    /// `num_slots` slots for `num_blocks` blocks.
    pub(super) fn new(num_slots: usize, num_blocks: usize) -> Self {
        Self {
            slots: vec![NONE; num_blocks],
            num_readers: vec![0; num_blocks],
            left_at: vec![0; num_blocks],
            idle: BTreeMap::new(),
            empty: (0..num_slots.min(NONE as usize) as u32).rev().collect(),
            num_left: 0,
        }
    }

    /// For each block its slot; those without one have a number that is no slot.
    pub(super) fn slots(&self) -> &[u32] {
        &self.slots
    }

    /// The slot of a block.
    pub(super) fn slot(&self, block: BlockId) -> Option<u32> {
        Some(self.slots[block.index()]).filter(|slot| *slot != NONE)
    }

    /// Slots that blocks can get.
    pub(super) fn num_free(&self) -> usize {
        self.empty.len() + self.idle.len()
    }

    /// Gives a block without readers a slot and a reader: its own slot, one that is empty, or that of the block whose
    /// last reader left first. False if there is none.
    pub(super) fn allocate(&mut self, block: BlockId) -> bool {
        self.forget(block);
        let slot = self.empty.pop().or_else(|| {
            let (_, other) = self.idle.pop_first()?;
            Some(std::mem::replace(&mut self.slots[other.index()], NONE))
        });
        let Some(slot) = slot else { return false };
        self.slots[block.index()] = slot;
        self.num_readers[block.index()] = 1;
        true
    }

    /// Whether a block has readers.
    pub(super) fn is_read(&self, block: BlockId) -> bool {
        self.num_readers[block.index()] > 0
    }

    /// Adds a reader to a block with a slot.
    pub(super) fn retain(&mut self, block: BlockId) {
        debug_assert!(self.slot(block).is_some(), "{block:?} has no slot");
        if self.num_readers[block.index()] == 0 {
            self.idle.remove(&self.left_at[block.index()]);
        }
        self.num_readers[block.index()] += 1;
    }

    /// Takes a reader away.
    ///
    /// # Panics
    /// If the block has none: a defect of the caller that would otherwise corrupt another sequence.
    pub(super) fn release(&mut self, block: BlockId) {
        let num_readers = &mut self.num_readers[block.index()];
        assert!(*num_readers > 0, "{block:?} released more often than retained");
        *num_readers -= 1;
        if *num_readers == 0 {
            self.num_left += 1;
            self.left_at[block.index()] = self.num_left;
            self.idle.insert(self.num_left, block);
        }
    }

    /// Empties the slot of a block without readers: nobody will find the block.
    pub(super) fn forget(&mut self, block: BlockId) {
        if self.num_readers[block.index()] == 0
            && let Some(slot) = self.slot(block)
        {
            self.idle.remove(&self.left_at[block.index()]);
            self.slots[block.index()] = NONE;
            self.empty.push(slot);
        }
    }

    /// Checks the invariants against the readers that the caller knows of.
    pub(super) fn check_integrity(&self, readers: impl Iterator<Item = BlockId>) -> Result<(), String> {
        let mut wanted = vec![0_u32; self.slots.len()];
        readers.for_each(|block| wanted[block.index()] += 1);
        if let Some(index) = (0..wanted.len()).find(|index| wanted[*index] != self.num_readers[*index]) {
            return Err(format!(
                "block {index} has {} readers in its window, but {} are known",
                self.num_readers[index], wanted[index]
            ));
        }
        let mut used: Vec<u32> = self.slots.iter().copied().filter(|slot| *slot != NONE).collect();
        let num_attached = used.len();
        used.extend(&self.empty);
        used.sort_unstable();
        used.dedup();
        let with_readers = self.num_readers.iter().filter(|readers| **readers > 0).count();
        let is_idle = |(left_at, block): (&u64, &BlockId)| {
            self.num_readers[block.index()] == 0
                && self.slot(*block).is_some()
                && self.left_at[block.index()] == *left_at
        };
        if used.len() != num_attached + self.empty.len()
            || num_attached != with_readers + self.idle.len()
            || !self.idle.iter().all(is_idle)
        {
            return Err(format!(
                "{num_attached} blocks have slots, {with_readers} are read, {} are idle, {} slots are empty",
                self.idle.len(),
                self.empty.len()
            ));
        }
        Ok(())
    }
}
