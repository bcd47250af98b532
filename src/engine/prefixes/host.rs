//! Memory of the host as a tier, for devices that have their own: blocks that the cache is about to give away are copied
//! there, and back when a prompt begins with them.
//!
//! Copies take effect in the order of the device's work. So a block is read before its next owner writes into it, and a place
//! is overwritten only behind the copies that read it; nobody waits for either.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::places::{Held, Places};
use super::tier::{BlockKey, Contents, Deliver, Fetch, Tier};
use crate::engine::{EngineStats, HostTierStats};
use crate::kv_cache::{BlockHash, BlockHasher, BlockId, CacheEvent, Medium};
use crate::runner::{HostBlocks, KvCache};
use crate::{Error, Result};

/// Memory is taken in pieces of about so many bytes, when it is needed: pinning gigabytes takes seconds.
const PIECE_BYTES: usize = 256 << 20;
/// Copies that are timed at the start.
const NUM_TIMED: u32 = 8;

/// A place for a block. Whoever holds one that was delivered keeps it from being overwritten.
pub(super) struct HostPlace {
    memory: Arc<HostBlocks>,
    index: usize,
}

impl HostPlace {
    pub(super) fn copy_to(&self, cache: &mut KvCache, block: BlockId) -> Result<()> {
        cache.copy_in(block.0, &self.memory, self.index)
    }
}

/// What copying a block takes.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct CopyTimes {
    /// Until it is with the device.
    pub(super) queued: Duration,
    /// Until the device has done it.
    pub(super) done: Duration,
}

/// Blocks in memory of the host.
pub(super) struct HostTier {
    on_notice: Box<dyn Fn(&str) + Send>,
    places: Places<HostPlace>,
    /// Places that there may be beside those that there are.
    num_untaken: usize,
    blocks_per_piece: usize,
    block_bytes: usize,
    /// Of a copy back, what the device takes after it has been queued.
    rest: Duration,
    stats: HostTierStats,
    /// Present if somebody wants to know.
    log: Option<Vec<Change>>,
}

/// A block came, or it went.
struct Change {
    is_new: bool,
    hash: BlockHash,
    parent: BlockHash,
    token_ids: Vec<u32>,
}

impl HostTier {
    /// Room for blocks of so many bytes together, and what copying one back and forth takes. `on_notice` hears what has to be
    /// said once.
    ///
    /// # Errors
    /// If the cache is in memory of the host itself, there is no room for a block, or the system does not give the memory.
    pub(super) fn new(
        max_bytes: u64,
        cache: &mut KvCache,
        on_notice: Box<dyn Fn(&str) + Send>,
    ) -> Result<(Self, CopyTimes, CopyTimes)> {
        let block_bytes = cache.block_bytes().max(1);
        let max_blocks = usize::try_from(max_bytes).unwrap_or(usize::MAX) / block_bytes;
        if max_blocks == 0 {
            let message =
                format!("{max_bytes} bytes of the host have no room for a block of {block_bytes} bytes");
            return Err(Error::invalid_request(message).with_hint("raise --kv-offload-gb"));
        }
        let mut tier = Self {
            on_notice,
            places: Places::new(),
            num_untaken: max_blocks,
            blocks_per_piece: (PIECE_BYTES / block_bytes).max(1),
            block_bytes,
            rest: Duration::ZERO,
            stats: HostTierStats { max_bytes, ..HostTierStats::default() },
            log: None,
        };
        tier.take_piece(cache)?;
        let place = tier.places.take_free().ok_or_else(|| Error::internal("a piece without places"))?;
        // The first block's bytes stay what they are.
        let out = timed(cache, |cache| cache.copy_out(0, &place.memory, place.index))?;
        let back = timed(cache, |cache| cache.copy_in(0, &place.memory, place.index))?;
        tier.places.give_back(place);
        tier.rest = back.done.saturating_sub(back.queued);
        Ok((tier, out, back))
    }

    /// Takes more memory, if there may be more.
    fn take_piece(&mut self, cache: &KvCache) -> Result<()> {
        let num_blocks = self.num_untaken.min(self.blocks_per_piece);
        if num_blocks == 0 {
            return Ok(());
        }
        let memory = Arc::new(cache.host_blocks(num_blocks)?);
        let place = |index| HostPlace { memory: Arc::clone(&memory), index };
        self.places.add_free((0..num_blocks).map(place));
        self.num_untaken -= num_blocks;
        Ok(())
    }

    /// A place for another block: a free one, or that of the block that was used least recently and that nobody copies.
    fn new_place(&mut self, cache: &KvCache) -> Option<Arc<HostPlace>> {
        if let Some(place) = self.places.take_free() {
            return Some(place);
        }
        if let Err(error) = self.take_piece(cache) {
            // What there is has to do.
            self.num_untaken = 0;
            (self.on_notice)(&format!("no more memory of the host for prefixes: {error}"));
        }
        if let Some(place) = self.places.take_free() {
            return Some(place);
        }
        let (hash, Held { place, parent, token_ids, .. }) = self.places.evict()?;
        self.note(false, hash, parent, token_ids);
        Some(place)
    }

    fn note(&mut self, is_new: bool, hash: BlockHash, parent: BlockHash, token_ids: Vec<u32>) {
        if let Some(log) = self.log.as_mut().filter(|_| !hash.is_private()) {
            log.push(Change { is_new, hash, parent, token_ids });
        }
    }
}

/// What a copy takes, of several in a row.
fn timed(cache: &mut KvCache, copy: impl Fn(&mut KvCache) -> Result<()>) -> Result<CopyTimes> {
    cache.wait()?;
    let start = Instant::now();
    (0..NUM_TIMED).try_for_each(|_| copy(cache))?;
    let queued = start.elapsed() / NUM_TIMED;
    cache.wait()?;
    Ok(CopyTimes { queued, done: start.elapsed() / NUM_TIMED })
}

impl Tier for HostTier {
    fn medium(&self) -> Medium {
        Medium::Host
    }

    fn is_ready(&self) -> bool {
        true
    }

    fn is_pending(&self) -> bool {
        false
    }

    fn time_left(&self) -> Option<Duration> {
        Some(Duration::ZERO)
    }

    fn num_readable(&self, blocks: &[BlockKey], start: usize) -> usize {
        blocks.iter().skip(start).take_while(|block| self.places.find(block).is_some()).count()
    }

    fn fetch(&mut self, blocks: Vec<BlockKey>, _deliver: Deliver) -> Fetch {
        let place = |block| Some(Arc::clone(&self.places.find(block)?.place));
        let found: Vec<_> = blocks.iter().map_while(place).collect();
        // The beginning of a prefix is used last, so that it stays longest.
        blocks[..found.len()].iter().rev().for_each(|block| self.places.touch(block.hash));
        self.stats.num_read_blocks += found.len() as u64;
        Fetch::Here(found.into_iter().map(Contents::Host).collect(), self.rest)
    }

    fn has(&self, block: &BlockKey) -> Option<bool> {
        Some(self.places.find(block).is_some())
    }

    fn num_free(&self) -> usize {
        usize::MAX
    }

    fn takes_evicted(&self) -> bool {
        true
    }

    fn capacity(&self) -> usize {
        self.places.capacity() + self.num_untaken
    }

    fn put(&mut self, blocks: Vec<(BlockId, BlockKey)>, cache: &mut KvCache) -> Result<()> {
        for (id, block) in blocks {
            let place = self.new_place(cache);
            let place = place.ok_or_else(|| Error::internal("no place in memory of the host is free"))?;
            if let Err(error) = cache.copy_out(id.0, &place.memory, place.index) {
                self.places.give_back(place);
                return Err(error);
            }
            let (hash, parent, token_ids) = (block.hash, block.parent, block.token_ids.clone());
            if !self.places.insert(block, place) {
                return Err(Error::internal("two blocks have one name"));
            }
            self.note(true, hash, parent, token_ids);
            self.stats.num_stored_blocks += 1;
        }
        Ok(())
    }

    fn count_dropped(&mut self, num_blocks: usize) {
        self.stats.num_dropped_blocks += num_blocks as u64;
    }

    fn record_events(&mut self, _on_change: Box<dyn Fn() + Send>) {
        let there = self.places.blocks().filter(|(hash, _)| !hash.is_private());
        let there = there.map(|(hash, held)| Change {
            is_new: true,
            hash,
            parent: held.parent,
            token_ids: held.token_ids.clone(),
        });
        self.log = Some(there.collect());
    }

    fn take_events(&mut self, hasher: &BlockHasher) -> Vec<CacheEvent> {
        let root = hasher.root(None);
        let log = self.log.as_mut().map(std::mem::take).unwrap_or_default();
        let event = |Change { is_new, hash, parent, token_ids }| {
            let parent = Some(parent).filter(|parent| *parent != root);
            match is_new {
                true => CacheEvent::stored(hash, parent, token_ids, Medium::Host),
                false => CacheEvent::removed(hash, Medium::Host),
            }
        };
        log.into_iter().map(event).collect()
    }

    fn notice(&self, line: &str) {
        (self.on_notice)(line);
    }

    fn report(&self, stats: &mut EngineStats) {
        let num_blocks = self.places.len() as u64;
        stats.host_tier =
            Some(HostTierStats { num_blocks, num_bytes: num_blocks * self.block_bytes as u64, ..self.stats });
    }
}
