//! The engine and the places where prefixes are kept beside the cache: gives them what was computed, and has read what a new
//! request begins with.
//!
//! A request whose prefix is read is held meanwhile, as one whose mask is made, so others pass it. What was read becomes
//! free blocks that the scheduler finds by itself. It is never wrong to go on without: what takes too long is computed, and
//! so is what is computed faster than it is read (`price.rs`). What is to be kept is copied behind steps, a little at a time
//! (`keeping.rs`). A place is a [`Tier`].

mod disk;
mod host;
mod keeping;
mod places;
mod price;
mod restoring;
#[cfg(test)]
mod tests;
mod tier;

use std::collections::{HashMap, VecDeque};
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use self::disk::DiskTier;
use self::host::HostTier;
use self::price::ReadPrice;
use self::restoring::Restore;
use self::tier::{BlockKey, Delivery, Line, Tier};
use super::{EngineCore, EngineStats};
use crate::Result;
use crate::kv_cache::CacheEvent;
use crate::prefix_store::PrefixStore;
use crate::runner::KvCache;
use crate::scheduler::SeqId;

/// What may be read and not yet be in the cache.
const MAX_WAITING_BYTES: usize = 64 << 20;

type Listener = Arc<Mutex<Option<Arc<dyn Fn() + Send + Sync>>>>;

/// Where prefixes are kept, and what is under way.
pub(super) struct Prefixes {
    restores: HashMap<SeqId, Restore>,
    /// Before the tiers, which wait for threads that may wait for this.
    delivered: Receiver<(SeqId, Delivery)>,
    sender: SyncSender<(SeqId, Delivery)>,
    /// Is here already: what a tier had at hand, or what came while the owner of an engine without a thread waited.
    waiting: VecDeque<(SeqId, Delivery)>,
    /// There may be more than was taken.
    has_more: bool,
    listener: Listener,
    tiers: Vec<Kept>,
    /// Those whose blocks were taken, in this order.
    preempted: VecDeque<SeqId>,
}

/// A tier, and what is known of it.
struct Kept {
    tier: Box<dyn Tier>,
    price: ReadPrice,
    /// Seconds that copying a block for it takes the host, and what the device computes nothing else for it.
    copy_seconds: f64,
    device_seconds: f64,
    /// Blocks that can be found in the cache and that the tier was not given yet, the oldest first.
    unkept: VecDeque<BlockKey>,
    /// Changes of what is free when the tier had all that is given away next.
    complete_at: Option<u64>,
}

/// What is kept of a sequence.
pub(super) struct Chain {
    line: Arc<Mutex<Line>>,
    /// Blocks that were noted to be kept.
    num_noted: usize,
    /// Tokens that were read from files for it, and those that were copied from memory of the host.
    pub(super) num_disk_tokens: usize,
    pub(super) num_host_tokens: usize,
}

impl Prefixes {
    fn new(cache: &KvCache) -> Self {
        let max_waiting = (MAX_WAITING_BYTES / cache.block_bytes().max(1)).clamp(1, 1_024);
        let (sender, delivered) = sync_channel(max_waiting);
        Self {
            restores: HashMap::new(),
            delivered,
            sender,
            waiting: VecDeque::new(),
            has_more: false,
            listener: Listener::default(),
            tiers: Vec::new(),
            preempted: VecDeque::new(),
        }
    }

    pub(super) fn is_restoring(&self) -> bool {
        !self.restores.is_empty()
    }

    fn recv(&mut self) -> std::result::Result<(SeqId, Delivery), TryRecvError> {
        self.waiting.pop_front().map_or_else(|| self.delivered.try_recv(), Ok)
    }
}

/// Calls who listens.
fn wake(listener: &Listener) {
    let listener = listener.lock().unwrap_or_else(PoisonError::into_inner).clone();
    if let Some(listener) = listener {
        listener();
    }
}

/// What reading a block takes without the disk, and what copying one from the device takes, measured with the first block,
/// whose bytes stay what they are.
fn expected_seconds(store: &PrefixStore, cache: &mut KvCache) -> (f64, f64) {
    let mut bytes = vec![0; cache.block_bytes()];
    let start = Instant::now();
    if cache.read_block(0, &mut bytes).is_err() {
        return (0.0, 0.0);
    }
    let copied = start.elapsed();
    let start = Instant::now();
    let written = cache.write_block(0, &bytes).map(|()| start.elapsed()).unwrap_or_default();
    ((written + store.checking_time(&bytes)).as_secs_f64(), copied.as_secs_f64())
}

impl EngineCore {
    /// Keeps prefixes in this store and finds them there. Its blocks are those of the runner's cache.
    pub fn set_prefix_store(&mut self, store: PrefixStore) {
        let Some(cache) = self.runner.kv_cache() else { return };
        let (read_seconds, copy_seconds) = expected_seconds(&store, cache);
        // The host waits for its copies.
        self.add_tier(Box::new(DiskTier::new(store)), read_seconds, [copy_seconds, 0.0]);
    }

    /// Copies blocks that the cache gives away to memory of the host, of which it takes so many bytes at most, and finds them
    /// there. To be called before [`set_prefix_store`](Self::set_prefix_store): memory is looked at first. `on_notice` hears
    /// what has to be said once.
    ///
    /// # Errors
    /// If the cache is in memory of the host itself, there is no room for a block, or the system does not give the memory.
    pub fn set_host_tier(&mut self, max_bytes: u64, on_notice: impl Fn(&str) + Send + 'static) -> Result<()> {
        let Some(cache) = self.runner.kv_cache() else { return Ok(()) };
        let (tier, out, back) = HostTier::new(max_bytes, cache, Box::new(on_notice))?;
        let copying = [out.queued, out.done].map(|time| time.as_secs_f64());
        self.add_tier(Box::new(tier), back.done.as_secs_f64(), copying);
        Ok(())
    }

    /// Hears what a step with one token took before anybody was here, so that the first request, too, is read only if that is
    /// cheaper than computing it.
    pub fn expect_steps(&mut self, seconds: f64) {
        self.scheduler.expect_steps(seconds);
    }

    /// Looks for prefixes in this tier, too, behind those that there are. Reading a block there takes about so long, and
    /// `copying` one the host and the device.
    fn add_tier(&mut self, tier: Box<dyn Tier>, read_seconds: f64, copying: [f64; 2]) {
        let Some(cache) = self.runner.kv_cache() else { return };
        let prefixes = self.prefixes.get_or_insert_with(|| Prefixes::new(cache));
        let price = ReadPrice::expected(read_seconds);
        let ([copy_seconds, device_seconds], unkept) = (copying, VecDeque::new());
        prefixes.tiers.push(Kept { tier, price, copy_seconds, device_seconds, unkept, complete_at: None });
    }

    /// Adds what the tiers have done.
    pub(super) fn report_tiers(&self, stats: &mut EngineStats) {
        self.prefixes.iter().flat_map(|prefixes| &prefixes.tiers).for_each(|kept| kept.tier.report(stats));
    }

    /// Keeps a record from now on of what the tiers have.
    pub(super) fn record_tier_events(&mut self) {
        let Some(prefixes) = &mut self.prefixes else { return };
        for kept in &mut prefixes.tiers {
            let listener = Arc::clone(&prefixes.listener);
            kept.tier.record_events(Box::new(move || wake(&listener)));
        }
    }

    /// What was recorded of the tiers since the last time.
    pub(super) fn take_tier_events(&mut self) -> Vec<CacheEvent> {
        let hasher = self.scheduler.hasher();
        let tiers = self.prefixes.iter_mut().flat_map(|prefixes| &mut prefixes.tiers);
        tiers.flat_map(|kept| kept.tier.take_events(hasher)).collect()
    }

    /// What is to be known of a sequence, if prefixes are kept.
    pub(super) fn new_chain(&self, cache_salt: Option<&str>) -> Option<Box<Chain>> {
        let is_kept = self.prefixes.is_some() && self.config().enable_prefix_caching;
        let line = || Arc::new(Mutex::new(Line::new(cache_salt)));
        let chain = || Chain { line: line(), num_noted: 0, num_disk_tokens: 0, num_host_tokens: 0 };
        is_kept.then(|| Box::new(chain()))
    }

    /// Calls `listener` on another thread when something was read, or there is a new event of a tier.
    pub(super) fn on_restored(&self, listener: Arc<dyn Fn() + Send + Sync>) {
        if let Some(prefixes) = &self.prefixes {
            *prefixes.listener.lock().unwrap_or_else(PoisonError::into_inner) = Some(listener);
        }
    }
}
