//! The engine and its prefix store: gives it what was computed, and has read what a new request begins with.
//!
//! A request whose prefix is read is held meanwhile, as one whose mask is made, so others pass it. What was read becomes
//! free blocks that the scheduler finds by itself. It is never wrong to go on without: what takes too long is computed.

use std::collections::HashMap;
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::EngineCore;
use super::following::Allowed;
use crate::prefix_store::{BlockName, Fetched, Namer, NewBlock, PrefixStore, StoreStats, Wanted};
use crate::scheduler::{SeqId, Sequence};

/// What may be read and not yet be in the cache.
const MAX_WAITING_BYTES: usize = 64 << 20;
/// What copying takes at most in front of a step while others run, or the quarter of a step.
const MIN_COPY_TIME: Duration = Duration::from_millis(2);
/// And while nobody does.
const MAX_COPY_TIME: Duration = Duration::from_millis(200);
/// A request is computed if nothing more has come for so long.
const MAX_SILENCE: Duration = Duration::from_secs(2);

/// So often, in blocks, those that were read are moved to where blocks are reused last, or they could make room for each
/// other.
const REFRESH: usize = 64;

type Listener = Arc<Mutex<Option<Arc<dyn Fn() + Send + Sync>>>>;

/// The store, and what is under way.
pub(super) struct Prefixes {
    restores: HashMap<SeqId, Restore>,
    /// Before the store, which waits for a thread that may wait for this.
    delivered: Receiver<(SeqId, Fetched)>,
    sender: SyncSender<(SeqId, Fetched)>,
    /// Came while the owner of an engine without a thread waited.
    waiting: Option<(SeqId, Fetched)>,
    /// There may be more than was taken.
    has_more: bool,
    listener: Listener,
    store: PrefixStore,
    block_bytes: usize,
}

/// A request whose prefix is read.
struct Restore {
    /// The block that comes next.
    next: usize,
    latest: Instant,
}

/// The names of a sequence's blocks in the store.
pub(super) struct Chain {
    salt: Option<String>,
    names: Vec<BlockName>,
    /// Blocks that the store was asked to keep.
    num_given: usize,
    /// Tokens that were read for it.
    pub(super) num_restored_tokens: usize,
}

impl Chain {
    /// The name of full block `index` and that of the one before it.
    fn name(
        &mut self,
        index: usize,
        sequence: &Sequence,
        size: usize,
        namer: &Namer,
    ) -> (BlockName, BlockName) {
        let root = namer.root(self.salt.as_deref());
        for next in self.names.len()..=index {
            let parent = next.checked_sub(1).map_or(root, |before| self.names[before]);
            let token_ids = &sequence.token_ids()[next * size..(next + 1) * size];
            self.names.push(namer.child(parent, token_ids, sequence.num_grouped_in(next, size)));
        }
        (self.names[index], index.checked_sub(1).map_or(root, |before| self.names[before]))
    }
}

impl Prefixes {
    pub(super) fn is_restoring(&self) -> bool {
        !self.restores.is_empty()
    }

    fn recv(&mut self) -> Result<(SeqId, Fetched), TryRecvError> {
        self.waiting.take().map_or_else(|| self.delivered.try_recv(), Ok)
    }
}

impl EngineCore {
    /// Keeps prefixes in this store and finds them there. Its blocks are those of the runner's cache.
    pub fn set_prefix_store(&mut self, store: PrefixStore) {
        let Some(block_bytes) = self.runner.kv_cache().map(|cache| cache.block_bytes()) else { return };
        let (sender, delivered) = sync_channel((MAX_WAITING_BYTES / block_bytes.max(1)).clamp(1, 1_024));
        self.prefixes = Some(Prefixes {
            restores: HashMap::new(),
            delivered,
            sender,
            waiting: None,
            has_more: false,
            listener: Listener::default(),
            store,
            block_bytes,
        });
    }

    /// What the store has done; none without one.
    #[must_use]
    pub fn prefix_store_stats(&self) -> Option<StoreStats> {
        self.prefixes.as_ref().map(|prefixes| prefixes.store.stats())
    }

    /// Names for the blocks of a sequence, if they are kept.
    pub(super) fn new_chain(&self, cache_salt: Option<&str>) -> Option<Box<Chain>> {
        self.prefixes.as_ref().filter(|_| self.config().enable_prefix_caching).map(|_| {
            let salt = cache_salt.map(str::to_owned);
            Box::new(Chain { salt, names: Vec::new(), num_given: 0, num_restored_tokens: 0 })
        })
    }

    pub(super) fn is_restoring(&self, id: SeqId) -> bool {
        self.prefixes.as_ref().is_some_and(|prefixes| prefixes.restores.contains_key(&id))
    }

    /// Has read what the store has of a new sequence's prefix and the cache has not.
    pub(super) fn start_restore(&mut self, id: SeqId) {
        let size = self.config().block_size;
        let Some(prefixes) = &mut self.prefixes else { return };
        let Some(namer) = prefixes.store.namer() else { return };
        let num_cached = self.scheduler.refresh_cached_blocks(id);
        let num_free = self.scheduler.num_free_blocks();
        let (Some(state), Some(sequence)) = (self.table.sequences.get_mut(&id), self.scheduler.sequence(id))
        else {
            return;
        };
        let Some(chain) = &mut state.chain else { return };
        let num_blocks = (sequence.token_ids().len() - 1) / size;
        if sequence.prompt_logits() || num_blocks <= num_cached {
            return;
        }
        chain.name(num_blocks - 1, sequence, size, namer);
        let missing = &chain.names[num_cached..num_blocks.min(num_cached + num_free)];
        let num_wanted = prefixes.store.num_readable(missing);
        self.stats.num_external_queries += ((num_blocks - num_cached) * size) as u64;
        if num_wanted == 0 {
            return;
        }
        let wanted = (num_cached..num_cached + num_wanted).map(|index| {
            let (name, parent) = chain.name(index, sequence, size, namer);
            let token_ids = sequence.token_ids()[index * size..(index + 1) * size].to_vec();
            let num_grouped = sequence.num_grouped_in(index, size);
            Wanted { name, parent, num_grouped, is_salted: chain.salt.is_some(), token_ids }
        });
        let (sender, listener) = (prefixes.sender.clone(), Arc::clone(&prefixes.listener));
        let deliver = move |fetched| {
            let is_taken = sender.send((id, fetched)).is_ok();
            let listener = listener.lock().unwrap_or_else(PoisonError::into_inner).clone();
            if let Some(listener) = listener {
                listener();
            }
            is_taken
        };
        if prefixes.store.fetch(wanted.collect(), deliver) {
            prefixes.restores.insert(id, Restore { next: num_cached, latest: Instant::now() });
            self.scheduler.hold(id);
        }
    }

    /// Puts what was read into the cache, no longer than others may wait for it, and goes on with those that have all.
    pub(super) fn take_restored(&mut self) {
        if self.prefixes.as_ref().is_none_or(|prefixes| prefixes.restores.is_empty()) {
            return;
        }
        let max_time = match self.scheduler.num_running() {
            0 => MAX_COPY_TIME,
            _ => MIN_COPY_TIME.max(self.step_time / 4),
        };
        let start = Instant::now();
        loop {
            let Some(prefixes) = &mut self.prefixes else { return };
            let has_time = start.elapsed() < max_time;
            prefixes.has_more = !has_time;
            if !has_time {
                break;
            }
            match prefixes.recv() {
                Ok((id, Fetched::Block(bytes))) => self.restore(id, &bytes),
                Ok((id, Fetched::End)) => self.end_restore(id),
                Err(_) => break,
            }
        }
        let is_late = |restore: &Restore| restore.latest.elapsed() > MAX_SILENCE;
        let restores = self.prefixes.iter().flat_map(|prefixes| &prefixes.restores);
        let late: Vec<SeqId> = restores.filter(|(_, restore)| is_late(restore)).map(|(id, _)| *id).collect();
        late.into_iter().for_each(|id| self.end_restore(id));
    }

    /// Puts a block into the cache, where it is free and can be found.
    fn restore(&mut self, id: SeqId, bytes: &[u8]) {
        let size = self.config().block_size;
        let Some(restore) = self.prefixes.as_mut().and_then(|prefixes| prefixes.restores.get_mut(&id)) else {
            // It was given up.
            return;
        };
        let index = restore.next;
        restore.next += 1;
        restore.latest = Instant::now();
        if index.is_multiple_of(REFRESH) {
            self.scheduler.refresh_cached_blocks(id);
        }
        let Some(block) = self.scheduler.begin_restore(id, index) else { return };
        let written = self.runner.kv_cache().is_some_and(|cache| cache.write_block(block.0, bytes).is_ok());
        self.scheduler.end_restore(id, index, block, written);
        if written {
            self.stats.num_external_hits += size as u64;
            if let Some(chain) = self.table.sequences.get_mut(&id).and_then(|state| state.chain.as_mut()) {
                chain.num_restored_tokens += size;
            }
        }
    }

    fn end_restore(&mut self, id: SeqId) {
        if self.prefixes.as_mut().is_some_and(|prefixes| prefixes.restores.remove(&id).is_some()) {
            self.release(id);
        }
    }

    /// The sequence takes part in steps again, if it waits for nothing else.
    pub(super) fn release(&mut self, id: SeqId) {
        let has_mask =
            self.table.sequences.get(&id).is_some_and(|state| !matches!(state.allowed, Allowed::NotKnown));
        if has_mask && !self.is_restoring(id) {
            self.scheduler.release(id);
        }
    }

    /// Forgets that a sequence, which is gone, waits for blocks.
    pub(super) fn forget_restore(&mut self, id: SeqId) {
        if let Some(prefixes) = &mut self.prefixes {
            prefixes.restores.remove(&id);
        }
    }

    /// Gives the store what a sequence has published since the last time.
    pub(super) fn keep_blocks(&mut self, id: SeqId) {
        let size = self.config().block_size;
        let Some(prefixes) = &self.prefixes else { return };
        let (Some(state), Some(sequence)) = (self.table.sequences.get_mut(&id), self.scheduler.sequence(id))
        else {
            return;
        };
        let Some(chain) = &mut state.chain else { return };
        let num_published = sequence.num_published_blocks();
        if chain.num_given >= num_published {
            return;
        }
        let Some(namer) = prefixes.store.namer() else { return };
        for index in chain.num_given..num_published {
            let (name, parent) = chain.name(index, sequence, size, namer);
            if prefixes.store.has(name) || !prefixes.store.has_room() {
                continue;
            }
            let mut bytes = vec![0; prefixes.block_bytes];
            let block = sequence.block_table()[index].0;
            if self.runner.kv_cache().is_none_or(|cache| cache.read_block(block, &mut bytes).is_err()) {
                continue;
            }
            let token_ids = sequence.token_ids()[index * size..(index + 1) * size].to_vec();
            let (num_grouped, is_salted) = (sequence.num_grouped_in(index, size), chain.salt.is_some());
            prefixes.store.put(NewBlock { name, parent, num_grouped, is_salted, token_ids, bytes });
        }
        chain.num_given = num_published;
    }

    /// Waits for the next block that is read, if one is to come; false if none is.
    pub(super) fn wait_for_restored(&mut self) -> bool {
        let Some(prefixes) = self.prefixes.as_mut().filter(|prefixes| prefixes.is_restoring()) else {
            return false;
        };
        if prefixes.waiting.is_none() && !prefixes.has_more {
            // What a mask or a slow disk needs is looked at in between.
            prefixes.waiting = prefixes.delivered.recv_timeout(Duration::from_millis(20)).ok();
        }
        true
    }

    /// Whether something is read that has not come, and nothing that has come is left.
    pub(super) fn waits_for_restored(&self) -> bool {
        self.prefixes.as_ref().is_some_and(|prefixes| prefixes.is_restoring() && !prefixes.has_more)
    }

    /// Whether any request waits for blocks.
    pub(super) fn has_restores(&self) -> bool {
        self.prefixes.as_ref().is_some_and(Prefixes::is_restoring)
    }

    /// Calls `listener` on another thread when something was read.
    pub(super) fn on_restored(&self, listener: Arc<dyn Fn() + Send + Sync>) {
        if let Some(prefixes) = &self.prefixes {
            *prefixes.listener.lock().unwrap_or_else(PoisonError::into_inner) = Some(listener);
        }
    }
}
