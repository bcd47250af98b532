//! Copies published blocks, and blocks that the cache is about to evict, from the device to tiers: after steps, a few
//! at a time.
//!
//! Waiting blocks stay findable in the cache. A block that is evicted before its turn is not kept.

use std::time::{Duration, Instant};

use super::super::EngineCore;
use super::Kept;
use super::tier::BlockKey;
use crate::kv_cache::BlockId;
use crate::runner::KvCache;
use crate::scheduler::{Scheduler, SeqId};

/// The maximum time of copying after a step, or a sixteenth of the step. One batch is copied in any case.
const MIN_KEEP_TIME: Duration = Duration::from_micros(500);
/// The maximum time of one batch while no request runs: a new request waits for it.
const IDLE_KEEP_TIME: Duration = Duration::from_millis(2);
/// The maximum time at the end, including the rest of hashing the weights.
const LAST_KEEP_TIME: Duration = Duration::from_secs(2);
/// Bytes that are copied at once.
const BATCH_BYTES: usize = 16 << 20;
/// The weight of the latest batch in the average time of copying.
const NEWS: f64 = 0.25;

/// The blocks that the cache evicts next and that a tier has.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Complete {
    /// The number of changes of the free list; any change invalidates the above.
    num_changes: u64,
    /// The tier has all of the next ones, up to this number.
    num_blocks: usize,
}

impl EngineCore {
    /// Records the blocks that a sequence has published since the last call.
    pub(in crate::engine) fn note_published(&mut self, id: SeqId) {
        let (size, max_unkept) = (self.config().block_size, self.config().num_blocks);
        let Some(prefixes) = &mut self.prefixes else { return };
        let (Some(state), Some(sequence)) = (self.table.sequences.get_mut(&id), self.scheduler.sequence(id))
        else {
            return;
        };
        let Some(chain) = &mut state.chain else { return };
        let num_published = sequence.num_published_blocks();
        for index in chain.num_noted..num_published {
            let Some(block) = chain.block(index, sequence, size) else { break };
            for kept in prefixes.tiers.iter_mut().filter(|kept| kept.takes_published()) {
                kept.unkept.push_back(block.clone());
                // More than the cache has blocks cannot be found any more.
                if kept.unkept.len() > max_unkept {
                    kept.unkept.pop_front();
                    kept.tier.count_dropped(1);
                }
            }
        }
        chain.num_noted = chain.num_noted.max(num_published);
    }

    /// Copies some waiting blocks after a step.
    pub(in crate::engine) fn keep_some(&mut self) {
        self.keep_for(MIN_KEEP_TIME.max(self.step_time / 16), self.scheduler.max_blocks_per_step());
    }

    /// Copies some waiting blocks while no request runs. Returns whether more can be copied at once.
    pub(in crate::engine) fn keep_while_idle(&mut self) -> bool {
        self.keep_for(IDLE_KEEP_TIME, usize::MAX);
        // A new request waits for queued copies, so there are no more.
        if let Some(cache) = self.runner.kv_cache() {
            let _ = cache.wait();
        }
        let mut tiers = self.prefixes.iter().flat_map(|prefixes| &prefixes.tiers);
        tiers.any(|kept| kept.can_keep(&self.scheduler))
    }

    /// Whether there may be something to copy before the next command comes.
    pub(in crate::engine) fn waits_for_tiers(&self) -> bool {
        self.has_unkept()
            || self.prefixes.iter().flat_map(|prefixes| &prefixes.tiers).any(|kept| kept.tier.is_growing())
    }

    /// Whether blocks wait to be kept.
    pub(in crate::engine) fn has_unkept(&self) -> bool {
        self.prefixes.iter().flat_map(|prefixes| &prefixes.tiers).any(|kept| !kept.unkept.is_empty())
    }

    /// Copies waiting blocks before the engine ends, and reports if the time is too short.
    pub(in crate::engine) fn keep_rest(&mut self) {
        let end = Instant::now() + LAST_KEEP_TIME;
        let is_soon = |left: Duration| Instant::now() + left < end;
        while Instant::now() < end && self.has_unkept() {
            if self.keep_while_idle() {
                continue;
            }
            let mut tiers = self.prefixes.iter().flat_map(|prefixes| &prefixes.tiers);
            let is_hopeless = |kept: &Kept| {
                kept.unkept.is_empty()
                    || kept.tier.is_pending() && !kept.tier.time_left().is_some_and(is_soon)
            };
            if tiers.all(is_hopeless) {
                break;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        let tiers = self.prefixes.iter_mut().flat_map(|prefixes| &mut prefixes.tiers);
        for kept in tiers.filter(|kept| !kept.unkept.is_empty()) {
            let num_blocks = kept.unkept.len();
            let why = match kept.tier.is_pending() {
                true => "the weights were still being hashed, which is done once",
                false => "writing is too slow",
            };
            kept.unkept.clear();
            kept.tier.count_dropped(num_blocks);
            kept.tier.notice(&format!("{num_blocks} blocks of prefixes are not kept: {why}"));
        }
    }

    /// Copies for this long, of the next evicted blocks no more than this many.
    fn keep_for(&mut self, max_time: Duration, num_next: usize) {
        let Some(prefixes) = &mut self.prefixes else { return };
        let Some(cache) = self.runner.kv_cache() else { return };
        for kept in &mut prefixes.tiers {
            kept.tier.refresh();
            kept.keep_for(max_time, num_next, &self.scheduler, cache);
        }
    }
}

impl Kept {
    /// Whether the tier can still take the blocks that were just published.
    fn takes_published(&self) -> bool {
        !self.tier.takes_evicted() && self.may_keep()
    }

    /// Whether the tier will ever take anything.
    fn may_keep(&self) -> bool {
        self.tier.is_ready() || self.tier.is_pending()
    }

    /// Whether something waits that can be copied now.
    fn can_keep(&self, scheduler: &Scheduler) -> bool {
        let has_work = match self.tier.takes_evicted() {
            true => self.num_complete(scheduler) < usize::MAX,
            false => !self.unkept.is_empty(),
        };
        has_work && self.tier.is_ready() && self.tier.num_free() > 0
    }

    /// Of the blocks that the cache gives away next, how many the tier has in any case.
    fn num_complete(&self, scheduler: &Scheduler) -> usize {
        let is_current = self.complete.num_changes == scheduler.num_free_list_changes();
        if is_current { self.complete.num_blocks } else { 0 }
    }

    fn set_complete(&mut self, num_blocks: usize, scheduler: &Scheduler) {
        self.complete = Complete { num_changes: scheduler.num_free_list_changes(), num_blocks };
    }

    fn keep_for(&mut self, max_time: Duration, num_next: usize, scheduler: &Scheduler, cache: &mut KvCache) {
        let start = Instant::now();
        // Of the device, which takes its time later, and of the host.
        let mut device_seconds = 0.0;
        let spent = || start.elapsed().as_secs_f64();
        loop {
            let left = max_time.as_secs_f64() - spent().max(device_seconds);
            let affordable = (left / self.copy_seconds.max(self.device_seconds).max(1e-9)) as usize;
            let fitting = (BATCH_BYTES / cache.block_bytes().max(1)).max(1);
            let max_blocks = affordable.clamp(1, fitting).min(self.tier.num_free());
            let batch = match self.tier.takes_evicted() {
                true => self.next_evicted(max_blocks, num_next, scheduler),
                false => self.next_published(max_blocks, scheduler),
            };
            if batch.is_empty() {
                return;
            }
            let (begun, num_blocks) = (Instant::now(), batch.len());
            if self.tier.put(batch, cache).is_err() {
                self.tier.count_dropped(num_blocks);
                // The same would come again.
                self.set_complete(usize::MAX, scheduler);
            }
            let seconds = begun.elapsed().as_secs_f64() / num_blocks as f64;
            self.copy_seconds += NEWS * (seconds - self.copy_seconds);
            device_seconds += self.device_seconds * num_blocks as f64;
            if spent().max(device_seconds) >= max_time.as_secs_f64() {
                return;
            }
        }
    }

    /// Of the `num_next` blocks that the cache gives away next, some that the tier has not.
    fn next_evicted(
        &mut self,
        max_blocks: usize,
        num_next: usize,
        scheduler: &Scheduler,
    ) -> Vec<(BlockId, BlockKey)> {
        let num_soon = num_next.min(scheduler.max_blocks_per_step());
        let batch = self.missing(max_blocks, num_soon, scheduler);
        if !batch.is_empty() || num_next == num_soon {
            return batch;
        }
        // A block that stays in the cache for longer evicts no other copy.
        match self.tier.num_unused().min(max_blocks) {
            0 if self.tier.is_growing() => Vec::new(),
            0 => {
                self.set_complete(num_next, scheduler);
                Vec::new()
            }
            max_blocks => self.missing(max_blocks, num_next, scheduler),
        }
    }

    fn missing(
        &mut self,
        max_blocks: usize,
        num_next: usize,
        scheduler: &Scheduler,
    ) -> Vec<(BlockId, BlockKey)> {
        if max_blocks == 0 || self.num_complete(scheduler) >= num_next {
            return Vec::new();
        }
        let key = |(id, hash, parent, token_ids): (_, _, _, &[u32])| {
            (id, BlockKey { hash, parent, token_ids: token_ids.to_vec(), position: None })
        };
        // More than fit would evict each other.
        let missing = scheduler.next_evicted(num_next).take(self.tier.capacity()).map(key);
        let missing = missing.filter(|(_, block)| self.tier.has(block) == Some(false));
        let batch: Vec<_> = missing.take(max_blocks).collect();
        if batch.is_empty() {
            self.set_complete(num_next, scheduler);
        }
        batch
    }

    /// The next published blocks that the tier has not, and where they are.
    fn next_published(&mut self, max_blocks: usize, scheduler: &Scheduler) -> Vec<(BlockId, BlockKey)> {
        let mut batch = Vec::new();
        if !self.may_keep() {
            self.unkept.clear();
        }
        if !self.tier.is_ready() {
            return batch;
        }
        let mut num_gone = 0;
        while batch.len() < max_blocks
            && let Some(block) = self.unkept.pop_front()
        {
            let found = scheduler.find_block(block.hash, block.parent, &block.token_ids);
            match (self.tier.has(&block), found) {
                (Some(true), _) => {}
                (Some(false), Some(found)) => batch.push((found, block)),
                (Some(false), None) | (None, _) => num_gone += 1,
            }
        }
        self.tier.count_dropped(num_gone);
        batch
    }
}
