//! Gives tiers what sequences have published, or what the cache is about to give away: copies blocks from the device behind
//! steps, a little at a time.
//!
//! Blocks wait in the cache, where they can be found. What is evicted before its turn is not kept.

use std::time::{Duration, Instant};

use super::super::EngineCore;
use super::Kept;
use super::tier::BlockKey;
use crate::kv_cache::BlockId;
use crate::runner::KvCache;
use crate::scheduler::{Scheduler, SeqId};

/// What copying takes at most behind a step, or the sixteenth of one. One batch is copied in any case.
const MIN_KEEP_TIME: Duration = Duration::from_micros(500);
/// And at a time while nothing runs: whoever comes waits for that.
const IDLE_KEEP_TIME: Duration = Duration::from_millis(2);
/// And at the end, with what hashing the weights may still take.
const LAST_KEEP_TIME: Duration = Duration::from_secs(2);
/// Bytes that are copied at once.
const BATCH_BYTES: usize = 16 << 20;
/// How much the latest batch says of what copying takes.
const NEWS: f64 = 0.25;

impl EngineCore {
    /// Notes what a sequence has published since the last time.
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

    /// Copies some of what waits behind a step.
    pub(in crate::engine) fn keep_some(&mut self) {
        self.keep_for(MIN_KEEP_TIME.max(self.step_time / 16));
    }

    /// Copies some of what waits while nothing runs; whether there is more to do at once.
    pub(in crate::engine) fn keep_while_idle(&mut self) -> bool {
        self.keep_for(IDLE_KEEP_TIME);
        // Whoever comes waits for what is queued, so that is no more.
        if let Some(cache) = self.runner.kv_cache() {
            let _ = cache.wait();
        }
        let mut tiers = self.prefixes.iter().flat_map(|prefixes| &prefixes.tiers);
        tiers.any(|kept| kept.can_keep(&self.scheduler))
    }

    /// Whether blocks wait to be kept.
    pub(in crate::engine) fn has_unkept(&self) -> bool {
        self.prefixes.iter().flat_map(|prefixes| &prefixes.tiers).any(|kept| !kept.unkept.is_empty())
    }

    /// Copies what waits before the engine ends, and says if that is not possible in a short time.
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

    fn keep_for(&mut self, max_time: Duration) {
        let Some(prefixes) = &mut self.prefixes else { return };
        let Some(cache) = self.runner.kv_cache() else { return };
        prefixes.tiers.iter_mut().for_each(|kept| kept.keep_for(max_time, &self.scheduler, cache));
    }
}

impl Kept {
    /// Whether the tier will ever take what was just published.
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
            true => !self.is_complete(scheduler),
            false => !self.unkept.is_empty(),
        };
        has_work && self.tier.is_ready() && self.tier.num_free() > 0
    }

    /// Whether the tier has all that the cache gives away next.
    fn is_complete(&self, scheduler: &Scheduler) -> bool {
        self.complete_at == Some(scheduler.num_free_list_changes())
    }

    fn keep_for(&mut self, max_time: Duration, scheduler: &Scheduler, cache: &mut KvCache) {
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
                true => self.next_evicted(max_blocks, scheduler),
                false => self.next_published(max_blocks, scheduler),
            };
            if batch.is_empty() {
                return;
            }
            let (begun, num_blocks) = (Instant::now(), batch.len());
            if self.tier.put(batch, cache).is_err() {
                self.tier.count_dropped(num_blocks);
                // The same would come again.
                self.complete_at = Some(scheduler.num_free_list_changes());
            }
            let seconds = begun.elapsed().as_secs_f64() / num_blocks as f64;
            self.copy_seconds += NEWS * (seconds - self.copy_seconds);
            device_seconds += self.device_seconds * num_blocks as f64;
            if spent().max(device_seconds) >= max_time.as_secs_f64() {
                return;
            }
        }
    }

    /// Blocks that the cache gives away next and that the tier has not.
    fn next_evicted(&mut self, max_blocks: usize, scheduler: &Scheduler) -> Vec<(BlockId, BlockKey)> {
        if self.is_complete(scheduler) {
            return Vec::new();
        }
        let key = |(id, hash, parent, token_ids): (_, _, _, &[u32])| {
            (id, BlockKey { hash, parent, token_ids: token_ids.to_vec(), place: None })
        };
        // More than fit would take each other's places.
        let missing = scheduler.next_evicted().take(self.tier.capacity()).map(key);
        let missing = missing.filter(|(_, block)| self.tier.has(block) == Some(false));
        let batch: Vec<_> = missing.take(max_blocks).collect();
        if batch.is_empty() {
            self.complete_at = Some(scheduler.num_free_list_changes());
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
