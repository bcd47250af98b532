//! The engine and the tiers that keep prefixes outside the cache: passes computed blocks to them, and has the prefixes
//! of new requests read.
//!
//! A request is held while its prefix is read, as during a mask, so others pass it. Read blocks become free blocks,
//! which the scheduler finds by itself. It is always correct to continue without them: blocks whose read takes too
//! long, or is slower than their computation (`price.rs`), are computed. Blocks are copied to tiers after steps, a few
//! at a time (`keeping.rs`).

mod disk;
mod host;
mod keeping;
mod price;
mod restoring;
mod slots;
#[cfg(test)]
mod tests;
mod tier;

use std::collections::{HashMap, VecDeque};
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use self::disk::DiskTier;
use self::host::HostTier;
use self::keeping::Complete;
use self::price::ReadPrice;
use self::restoring::Restore;
use self::tier::{BlockKey, Delivery, Line, Tier};
use super::{EngineCore, EngineStats};
use crate::Result;
use crate::kv_cache::CacheEvent;
use crate::prefix_store::PrefixStore;
use crate::runner::KvCache;
use crate::scheduler::SeqId;

/// A delivery that may have been read but is not in the cache yet.
const MAX_WAITING_BYTES: usize = 64 << 20;

type Listener = Arc<Mutex<Option<Arc<dyn Fn() + Send + Sync>>>>;

/// The tiers, and the operations in progress.
pub(super) struct Prefixes {
    restores: HashMap<SeqId, Restore>,
    /// Before the tiers, which wait for threads that may wait for this.
    delivered: Receiver<(SeqId, Delivery)>,
    sender: SyncSender<(SeqId, Delivery)>,
    /// Deliveries that are already here: those that a tier had at hand, or that arrived while an engine without a
    /// thread waited.
    waiting: VecDeque<(SeqId, Delivery)>,
    /// There may be more than was taken.
    has_more: bool,
    listener: Listener,
    tiers: Vec<Kept>,
    /// Those whose blocks were taken, in this order.
    preempted: VecDeque<SeqId>,
}

/// A tier, and its measurements.
struct Kept {
    tier: Box<dyn Tier>,
    price: ReadPrice,
    /// Seconds per copied block: of the host, and of the device, which does not compute meanwhile.
    copy_seconds: f64,
    device_seconds: f64,
    /// Blocks that can be found in the cache and that the tier was not given yet, the oldest first.
    unkept: VecDeque<BlockKey>,
    complete: Complete,
}

/// The chain of a sequence's blocks.
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

/// Calls the listener.
fn wake(listener: &Listener) {
    let listener = listener.lock().unwrap_or_else(PoisonError::into_inner).clone();
    if let Some(listener) = listener {
        listener();
    }
}

/// The time of reading a block without the disk, and of copying one from the device, measured with the first block,
/// whose bytes are restored.
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

    /// Copies blocks that the cache evicts to host memory of at most this many bytes, and finds them there. Must be
    /// called before [`set_prefix_store`](Self::set_prefix_store): host memory is looked at first. Calls `on_notice`
    /// with messages, once each.
    ///
    /// # Errors
    /// If the cache is in host memory itself, no block fits, or the system does not provide the memory.
    pub fn set_host_tier(&mut self, max_bytes: u64, on_notice: impl Fn(&str) + Send + 'static) -> Result<()> {
        let Some(cache) = self.runner.kv_cache() else { return Ok(()) };
        let (tier, out, back) = HostTier::new(max_bytes, cache, Box::new(on_notice))?;
        let copying = [out.queued, out.done].map(|time| time.as_secs_f64());
        self.add_tier(Box::new(tier), back.done.as_secs_f64(), copying);
        Ok(())
    }

    /// Sets the time of a step with one token, as measured before the first request, so that its prefix, too, is read
    /// only if that is cheaper than computing it.
    pub fn expect_steps(&mut self, seconds: f64) {
        self.scheduler.expect_steps(seconds);
    }

    /// Looks for prefixes in this tier, too, after the existing ones. Reading a block there takes about so long, and
    /// `copying` one the host and the device.
    fn add_tier(&mut self, tier: Box<dyn Tier>, read_seconds: f64, copying: [f64; 2]) {
        let Some(cache) = self.runner.kv_cache() else { return };
        let prefixes = self.prefixes.get_or_insert_with(|| Prefixes::new(cache));
        let price = ReadPrice::expected(read_seconds);
        let ([copy_seconds, device_seconds], unkept) = (copying, VecDeque::new());
        prefixes.tiers.push(Kept {
            tier,
            price,
            copy_seconds,
            device_seconds,
            unkept,
            complete: Complete::default(),
        });
    }

    /// Adds the tiers' counters.
    pub(super) fn report_tiers(&self, stats: &mut EngineStats) {
        self.prefixes.iter().flat_map(|prefixes| &prefixes.tiers).for_each(|kept| kept.tier.report(stats));
    }

    /// Starts to record changes of the tiers' contents.
    pub(super) fn record_tier_events(&mut self) {
        let Some(prefixes) = &mut self.prefixes else { return };
        for kept in &mut prefixes.tiers {
            let listener = Arc::clone(&prefixes.listener);
            kept.tier.record_events(Box::new(move || wake(&listener)));
        }
    }

    /// Takes the tiers' recorded changes since the last call.
    pub(super) fn take_tier_events(&mut self) -> Vec<CacheEvent> {
        let hasher = self.scheduler.hasher();
        let tiers = self.prefixes.iter_mut().flat_map(|prefixes| &mut prefixes.tiers);
        tiers.flat_map(|kept| kept.tier.take_events(hasher)).collect()
    }

    /// The chain of a sequence, if prefixes are kept.
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
