//! Reads the prefix of a new request, and copies it to the cache.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::super::EngineCore;
use super::super::following::Allowed;
use super::price::{Decision, TRIAL_BLOCKS};
use super::tier::{BlockKey, ChainPosition, Contents, Delivery, Fetch};
use super::{Chain, Kept, Prefixes, wake};
use crate::kv_cache::Medium;
use crate::scheduler::{SeqId, Sequence, SequenceStatus};

/// The maximum time of copying before a step while others run, or a quarter of a step.
const MIN_COPY_TIME: Duration = Duration::from_millis(2);
/// The same while no other request runs.
const MAX_COPY_TIME: Duration = Duration::from_millis(200);
/// A request is computed if no block has arrived for this long.
const MAX_SILENCE: Duration = Duration::from_secs(2);

/// After each number of blocks, those that were read are moved to the end of the free list, where blocks are reused
/// last. Otherwise they could evict each other.
const REFRESH: usize = 64;

/// A request whose prefix is read.
pub(super) struct Restore {
    /// Its full blocks from the first one on.
    blocks: Vec<BlockKey>,
    /// Where it is read from.
    tier: usize,
    /// The first one, the one that comes next, and the one after the last one.
    start: usize,
    next: usize,
    end: usize,
    latest: Instant,
}

impl EngineCore {
    pub(in crate::engine) fn is_restoring(&self, id: SeqId) -> bool {
        self.prefixes.as_ref().is_some_and(|prefixes| prefixes.restores.contains_key(&id))
    }

    /// Starts to read a new sequence's prefix from a tier, if the cache lacks it and reading is cheaper than computing.
    pub(in crate::engine) fn start_restore(&mut self, id: SeqId) {
        let size = self.config().block_size;
        let is_ready = |prefixes: &Prefixes| prefixes.tiers.iter().any(|kept| kept.tier.is_ready());
        if !self.prefixes.as_ref().is_some_and(is_ready) {
            return;
        }
        let num_cached = self.scheduler.refresh_cached_blocks(id);
        self.scheduler.name_blocks(id);
        let (Some(state), Some(sequence)) = (self.table.sequences.get_mut(&id), self.scheduler.sequence(id))
        else {
            return;
        };
        let Some(chain) = &mut state.chain else { return };
        let num_blocks = (sequence.token_ids().len() - 1) / size;
        if sequence.prompt_logits() || num_blocks <= num_cached {
            return;
        }
        let blocks = (0..num_blocks).map_while(|index| chain.block(index, sequence, size)).collect();
        self.stats.num_external_queries += ((num_blocks - num_cached) * size) as u64;
        self.read_from(id, blocks, num_cached);
    }

    /// Starts to read these blocks from `start` on; false if no tier has any or computing is cheaper.
    fn read_from(&mut self, id: SeqId, mut blocks: Vec<BlockKey>, start: usize) -> bool {
        let size = self.config().block_size;
        let num_free = self.scheduler.num_free_blocks();
        let Some(prefixes) = &mut self.prefixes else { return false };
        blocks.truncate(start + num_free);
        let num_ahead =
            prefixes.restores.values().map(|restore| restore.end.saturating_sub(restore.next)).sum();
        let mut found = None;
        for (index, kept) in prefixes.tiers.iter_mut().enumerate() {
            let num_readable = kept.tier.num_readable(&blocks, start);
            if num_readable == 0 {
                continue;
            }
            let compute = self.scheduler.prompt_seconds(num_readable * size);
            let end = match kept.decide(num_readable, num_ahead, compute) {
                Decision::Read => start + num_readable,
                Decision::Try => start + num_readable.min(TRIAL_BLOCKS),
                Decision::Compute => continue,
            };
            let (sender, listener) = (prefixes.sender.clone(), Arc::clone(&prefixes.listener));
            let deliver = move |delivery| {
                let is_taken = sender.send((id, delivery)).is_ok();
                wake(&listener);
                is_taken
            };
            match kept.tier.fetch(blocks[start..end].to_vec(), Box::new(deliver)) {
                Fetch::Refused => continue,
                Fetch::Comes => {}
                Fetch::Here(contents, time) => {
                    let blocks = contents.into_iter().map(|contents| Delivery::Block(contents, time));
                    prefixes.waiting.extend(blocks.chain([Delivery::End]).map(|delivery| (id, delivery)));
                }
            }
            found = Some((index, end));
            break;
        }
        let Some((tier, end)) = found else { return false };
        let latest = Instant::now();
        prefixes.restores.insert(id, Restore { blocks, tier, start, next: start, end, latest });
        self.scheduler.hold(id);
        true
    }

    /// Remembers whose blocks were taken.
    pub(in crate::engine) fn note_preempted(&mut self, ids: &[SeqId]) {
        if let Some(prefixes) = &mut self.prefixes {
            prefixes.preempted.extend(ids);
        }
    }

    /// Starts to read the blocks of a preempted sequence from a tier, as soon as all of it fits again.
    pub(in crate::engine) fn restore_preempted(&mut self) {
        let size = self.config().block_size;
        while let Some(&id) = self.prefixes.as_ref().and_then(|prefixes| prefixes.preempted.front()) {
            let waits =
                |sequence: &&Sequence| sequence.status() == SequenceStatus::Preempted && !sequence.is_held();
            let sequence = self.scheduler.sequence(id).filter(waits);
            let num_wanted = sequence.map(|sequence| sequence.token_ids().len() / size + 1);
            if num_wanted.is_some_and(|num_wanted| num_wanted > self.scheduler.num_free_blocks()) {
                return;
            }
            if let Some(prefixes) = &mut self.prefixes {
                prefixes.preempted.pop_front();
            }
            if num_wanted.is_some() {
                self.start_restore(id);
            }
        }
    }

    /// Copies read blocks to the cache, within the time that others may wait, and continues sequences that have all.
    pub(in crate::engine) fn take_restored(&mut self) {
        if self.prefixes.as_ref().is_none_or(|prefixes| prefixes.restores.is_empty()) {
            return;
        }
        let max_time = match self.scheduler.num_running() {
            0 => MAX_COPY_TIME,
            _ => MIN_COPY_TIME.max(self.step_time / 4),
        };
        let start = Instant::now();
        // The device's time for copies after queueing.
        let mut queued = Duration::ZERO;
        loop {
            let Some(prefixes) = &mut self.prefixes else { return };
            let has_time = start.elapsed() + queued < max_time;
            prefixes.has_more = !has_time;
            if !has_time {
                break;
            }
            match prefixes.recv() {
                Ok((id, Delivery::Block(contents, time))) => {
                    if let Contents::Host(_) = contents {
                        queued += time;
                    }
                    self.restore(id, &contents, time);
                }
                Ok((id, Delivery::End)) => self.go_on_restoring(id),
                Err(_) => break,
            }
        }
        let is_late = |restore: &Restore| restore.latest.elapsed() > MAX_SILENCE;
        let restores = self.prefixes.iter().flat_map(|prefixes| &prefixes.restores);
        let late: Vec<SeqId> = restores.filter(|(_, restore)| is_late(restore)).map(|(id, _)| *id).collect();
        late.into_iter().for_each(|id| self.end_restore(id));
    }

    /// Puts a block that took so long to be had into the cache, where it is free and can be found.
    fn restore(&mut self, id: SeqId, contents: &Contents, read_time: Duration) {
        let size = self.config().block_size;
        let Some(restore) = self.prefixes.as_mut().and_then(|prefixes| prefixes.restores.get_mut(&id)) else {
            // It was aborted.
            return;
        };
        let (index, tier) = (restore.next, restore.tier);
        restore.next += 1;
        restore.latest = Instant::now();
        if index.is_multiple_of(REFRESH) {
            self.scheduler.refresh_cached_blocks(id);
        }
        let Some(block) = self.scheduler.begin_restore(id, index) else { return };
        let start = Instant::now();
        let written = self.runner.kv_cache().is_some_and(|cache| contents.write(cache, block).is_ok());
        let Some(kept) = self.prefixes.as_mut().and_then(|prefixes| prefixes.tiers.get_mut(tier)) else {
            return;
        };
        kept.price.learn((read_time + start.elapsed()).as_secs_f64());
        let medium = kept.tier.medium();
        self.scheduler.end_restore(id, index, block, written);
        if written {
            self.stats.num_external_hits += size as u64;
            // Restored blocks of a preempted sequence do not count as found for its request.
            let has_run =
                self.scheduler.sequence(id).is_some_and(|sequence| sequence.prefix_miss().is_some());
            if let Some(chain) =
                self.table.sequences.get_mut(&id).and_then(|state| state.chain.as_mut()).filter(|_| !has_run)
            {
                match medium {
                    Medium::Host => chain.num_host_tokens += size,
                    Medium::Disk | Medium::Cache => chain.num_disk_tokens += size,
                }
            }
        }
    }

    /// A tier has delivered everything it had. If that was everything the request has there, another tier may have the
    /// next blocks.
    fn go_on_restoring(&mut self, id: SeqId) {
        let restore = self.prefixes.as_mut().and_then(|prefixes| prefixes.restores.remove(&id));
        let Some(Restore { blocks, start, next, end, .. }) = restore else { return };
        let is_complete = start < next && next == end;
        if !is_complete || end == blocks.len() || !self.read_from(id, blocks, end) {
            self.release(id);
        }
    }

    fn end_restore(&mut self, id: SeqId) {
        if self.prefixes.as_mut().is_some_and(|prefixes| prefixes.restores.remove(&id).is_some()) {
            self.release(id);
        }
    }

    /// The sequence is scheduled again, if it waits for nothing else.
    pub(in crate::engine) fn release(&mut self, id: SeqId) {
        let has_mask =
            self.table.sequences.get(&id).is_some_and(|state| !matches!(state.allowed, Allowed::NotKnown));
        if has_mask && !self.is_restoring(id) {
            self.scheduler.release(id);
        }
    }

    /// Forgets that a sequence, which is gone, waits for blocks.
    pub(in crate::engine) fn forget_restore(&mut self, id: SeqId) {
        if let Some(prefixes) = &mut self.prefixes {
            prefixes.restores.remove(&id);
        }
    }

    /// Waits for the next block that is read, if one is to come; false if none is.
    pub(in crate::engine) fn wait_for_restored(&mut self) -> bool {
        let Some(prefixes) = self.prefixes.as_mut().filter(|prefixes| prefixes.is_restoring()) else {
            return false;
        };
        if prefixes.waiting.is_empty() && !prefixes.has_more {
            // Masks and slow disks are checked in between.
            prefixes.waiting.extend(prefixes.delivered.recv_timeout(Duration::from_millis(20)));
        }
        true
    }

    /// Whether some read is still pending, and no delivery is waiting.
    pub(in crate::engine) fn waits_for_restored(&self) -> bool {
        let is_waiting = |prefixes: &Prefixes| prefixes.waiting.is_empty() && !prefixes.has_more;
        self.prefixes.as_ref().is_some_and(|prefixes| prefixes.is_restoring() && is_waiting(prefixes))
    }

    /// Whether any request waits for blocks.
    pub(in crate::engine) fn has_restores(&self) -> bool {
        self.prefixes.as_ref().is_some_and(Prefixes::is_restoring)
    }
}

impl Kept {
    /// The decision on this many blocks that can be read after others, and whose computation takes `compute` seconds.
    /// Reports the first time of each outcome.
    fn decide(&mut self, num_blocks: usize, num_ahead: usize, compute: Option<f64>) -> Decision {
        let compute = compute.filter(|_| !self.tier.is_read_always());
        let decision = self.price.decide(num_blocks, num_ahead, compute, Instant::now());
        let line = compute.and_then(|seconds| self.price.line(decision, seconds / num_blocks as f64));
        if let Some(line) = line {
            self.tier.notice(&line);
        }
        decision
    }
}

impl Chain {
    /// Full block `index` of the sequence, once it has a name in the cache.
    pub(super) fn block(&self, index: usize, sequence: &Sequence, size: usize) -> Option<BlockKey> {
        let (hash, parent) = sequence.block_names(index)?;
        let token_ids = sequence.token_ids()[index * size..(index + 1) * size].to_vec();
        let num_grouped = sequence.num_grouped_in(index, size);
        let position = Some(ChainPosition { line: Arc::clone(&self.line), index, num_grouped });
        Some(BlockKey { hash, parent, token_ids, position })
    }
}
