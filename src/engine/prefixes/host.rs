//! Memory of the host as a tier, for devices that have their own: blocks that the cache is about to give away are copied
//! there, and back when a prompt begins with them.
//!
//! Copies take effect in the order of the device's work. So a block is read before its next owner writes into it, and a slot
//! is overwritten only after the copies that read it; no thread waits for either.

use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, TryRecvError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::slots::{Held, SlotTable};
use super::tier::{BlockKey, Contents, Deliver, Fetch, Tier};
use crate::engine::{EngineStats, HostTierStats};
use crate::kv_cache::{BlockHash, BlockHasher, BlockId, CacheEvent, Medium};
use crate::runner::{HostBlocks, KvCache};
use crate::{Error, Result};

/// Memory is allocated in segments of about this many bytes; all but the first are allocated on another thread while
/// the engine works: a gigabyte takes half a second. The device is blocked for milliseconds while a segment is
/// registered.
const SEGMENT_BYTES: usize = 32 << 20;
/// Copies that are timed at the start.
const NUM_TIMED: u32 = 8;

/// A slot for a block. A reference to a delivered one keeps it from being overwritten.
pub(super) struct HostSlot {
    memory: Arc<HostBlocks>,
    index: usize,
}

impl HostSlot {
    pub(super) fn copy_to(&self, cache: &mut KvCache, block: BlockId) -> Result<()> {
        cache.copy_in(block.0, &self.memory, self.index)
    }
}

/// The time of copying a block.
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
    slots: SlotTable<HostSlot>,
    /// Slots that may still be added.
    num_untaken: usize,
    segments: Option<Segments<HostBlocks>>,
    block_bytes: usize,
    /// For a copy back: the device's time after queueing.
    rest: Duration,
    stats: HostTierStats,
    /// Present if there is a subscriber.
    log: Option<Vec<Change>>,
}

/// Memory that comes from another thread.
struct Segments<M> {
    receiver: Receiver<Result<M>>,
    thread: JoinHandle<()>,
}

impl<M: Send + 'static> Segments<M> {
    /// Memory for this many blocks, no more than `per_segment` at a time.
    fn begin(
        num_blocks: usize,
        per_segment: usize,
        allocate: impl Fn(usize) -> Result<M> + Send + 'static,
    ) -> Result<Self> {
        let (sender, receiver) = mpsc::channel();
        let take = move || {
            let mut rest = num_blocks;
            while rest > 0 {
                let segment = allocate(rest.min(per_segment));
                let is_last = segment.is_err();
                if sender.send(segment).is_err() || is_last {
                    break;
                }
                rest -= rest.min(per_segment);
            }
        };
        let thread = thread::Builder::new().name("host-memory".to_owned()).spawn(take).map_err(|error| {
            Error::internal("no thread could be started to take memory of the host").with_source(error)
        })?;
        Ok(Self { receiver, thread })
    }

    /// Comes back when the thread has ended.
    fn end(self) {
        drop(self.receiver);
        // It does not panic, and if it did, there would be no more memory than there is.
        let _ = self.thread.join();
    }
}

/// A block came, or it went.
struct Change {
    is_new: bool,
    hash: BlockHash,
    parent: BlockHash,
    token_ids: Vec<u32>,
}

impl HostTier {
    /// A tier of at most this many bytes, and the time of copying a block out and back. Calls `on_notice` with
    /// messages, once each.
    ///
    /// # Errors
    /// If the cache is in host memory itself, no block fits, or the system does not provide the memory.
    pub(super) fn new(
        max_bytes: u64,
        cache: &mut KvCache,
        on_notice: Box<dyn Fn(&str) + Send>,
    ) -> Result<(Self, CopyTimes, CopyTimes)> {
        let block_bytes = cache.block_bytes().max(1);
        let max_blocks = usize::try_from(max_bytes).unwrap_or(usize::MAX) / block_bytes;
        if max_blocks == 0 {
            let message =
                format!("{max_bytes} bytes of host memory are less than a block of {block_bytes} bytes");
            return Err(Error::invalid_request(message).with_hint("raise --kv-offload-gb"));
        }
        let mut tier = Self {
            on_notice,
            slots: SlotTable::new(),
            num_untaken: max_blocks,
            segments: None,
            block_bytes,
            rest: Duration::ZERO,
            stats: HostTierStats { max_bytes, ..HostTierStats::default() },
            log: None,
        };
        let allocate = cache.host_allocator()?;
        let per_segment = (SEGMENT_BYTES / block_bytes).max(1);
        tier.add_segment(allocate(max_blocks.min(per_segment))?);
        if tier.num_untaken > 0 {
            tier.segments = Some(Segments::begin(tier.num_untaken, per_segment, allocate)?);
        }
        let slot = tier.slots.take_free().ok_or_else(|| Error::internal("a segment without slots"))?;
        // The first block's bytes are restored.
        let out = timed(cache, |cache| cache.copy_out(0, &slot.memory, slot.index))?;
        let back = timed(cache, |cache| cache.copy_in(0, &slot.memory, slot.index))?;
        tier.slots.give_back(slot);
        tier.rest = back.done.saturating_sub(back.queued);
        Ok((tier, out, back))
    }

    /// Adds slots in more memory.
    fn add_segment(&mut self, memory: HostBlocks) {
        let memory = Arc::new(memory);
        let slot = |index| HostSlot { memory: Arc::clone(&memory), index };
        self.slots.add_free((0..memory.num_blocks()).map(slot));
        self.num_untaken = self.num_untaken.saturating_sub(memory.num_blocks());
    }

    /// A slot for another block: a free one, or that of the least recently used block without a pending copy.
    fn new_slot(&mut self) -> Option<Arc<HostSlot>> {
        if let Some(slot) = self.slots.take_free() {
            return Some(slot);
        }
        let (hash, Held { slot, parent, token_ids, .. }) = self.slots.evict()?;
        self.note(false, hash, parent, token_ids);
        Some(slot)
    }

    fn note(&mut self, is_new: bool, hash: BlockHash, parent: BlockHash, token_ids: Vec<u32>) {
        if let Some(log) = self.log.as_mut().filter(|_| !hash.is_private()) {
            log.push(Change { is_new, hash, parent, token_ids });
        }
    }
}

impl Drop for HostTier {
    /// The device may not go while memory is taken for it.
    fn drop(&mut self) {
        self.segments.take().into_iter().for_each(Segments::end);
    }
}

/// The time of a copy, as one of several in sequence.
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
        blocks.iter().skip(start).take_while(|block| self.slots.find(block).is_some()).count()
    }

    fn fetch(&mut self, blocks: Vec<BlockKey>, _deliver: Deliver) -> Fetch {
        let slot = |block| Some(Arc::clone(&self.slots.find(block)?.slot));
        let found: Vec<_> = blocks.iter().map_while(slot).collect();
        // The beginning of a prefix is used last, so that it stays longest.
        blocks[..found.len()].iter().rev().for_each(|block| self.slots.touch(block.hash));
        self.stats.num_read_blocks += found.len() as u64;
        Fetch::Here(found.into_iter().map(Contents::Host).collect(), self.rest)
    }

    fn has(&self, block: &BlockKey) -> Option<bool> {
        Some(self.slots.find(block).is_some())
    }

    fn refresh(&mut self) {
        while let Some(segments) = &self.segments {
            match segments.receiver.try_recv() {
                Ok(Ok(memory)) => {
                    self.add_segment(memory);
                    continue;
                }
                Err(TryRecvError::Empty) => return,
                // Only existing memory is used.
                Ok(Err(error)) => {
                    (self.on_notice)(&format!("no more memory of the host for prefixes: {error}"));
                }
                Err(TryRecvError::Disconnected) => {}
            }
            self.num_untaken = 0;
            self.segments.take().into_iter().for_each(Segments::end);
        }
    }

    /// While more memory is being allocated, no block is evicted.
    fn num_free(&self) -> usize {
        if self.is_growing() { self.slots.num_free() } else { usize::MAX }
    }

    fn num_unused(&self) -> usize {
        self.slots.num_free()
    }

    fn is_growing(&self) -> bool {
        self.segments.is_some()
    }

    fn takes_evicted(&self) -> bool {
        true
    }

    fn capacity(&self) -> usize {
        self.slots.capacity() + self.num_untaken
    }

    fn put(&mut self, blocks: Vec<(BlockId, BlockKey)>, cache: &mut KvCache) -> Result<()> {
        for (id, block) in blocks {
            let slot = self.new_slot();
            let slot = slot.ok_or_else(|| Error::internal("no slot in memory of the host is free"))?;
            if let Err(error) = cache.copy_out(id.0, &slot.memory, slot.index) {
                self.slots.give_back(slot);
                return Err(error);
            }
            let (hash, parent, token_ids) = (block.hash, block.parent, block.token_ids.clone());
            if !self.slots.insert(block, slot) {
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
        let there = self.slots.blocks().filter(|(hash, _)| !hash.is_private());
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
        let num_blocks = self.slots.len() as u64;
        stats.host_tier =
            Some(HostTierStats { num_blocks, num_bytes: num_blocks * self.block_bytes as u64, ..self.stats });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_comes_in_segments_until_all_is_there_or_no_more_is_given() {
        let come = |limit: usize| {
            let allocate = move |num_blocks| match num_blocks {
                _ if num_blocks < limit => Ok(num_blocks),
                _ => Err(Error::internal("no more")),
            };
            let segments = Segments::begin(10, 4, allocate).unwrap();
            let came: Vec<_> = segments.receiver.iter().map(Result::ok).collect();
            segments.end();
            came
        };
        assert_eq!(come(5), [Some(4), Some(4), Some(2)]);
        assert_eq!(come(4), [None]);
    }

    #[test]
    fn a_dropped_tier_waits_for_one_segment_at_most() {
        let segments = Segments::begin(usize::MAX, 1, |_| Ok(vec![0_u8; 1 << 16])).unwrap();
        segments.receiver.recv().unwrap().unwrap();
        segments.end();
    }
}
