//! A tier outside the cache, as the engine sees it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::host::HostSlot;
use crate::Result;
use crate::engine::EngineStats;
use crate::kv_cache::{BlockHash, BlockHasher, BlockId, CacheEvent, Medium};
use crate::prefix_store::{BlockName, Namer};
use crate::runner::KvCache;

/// A full block by the names that it has in the cache, and by its position in a line.
#[derive(Clone)]
pub(super) struct BlockKey {
    pub(super) hash: BlockHash,
    pub(super) parent: BlockHash,
    pub(super) token_ids: Vec<u32>,
    /// The owner, if known: blocks that the cache evicts have none.
    pub(super) position: Option<ChainPosition>,
}

/// Which block of which line it is, and how many of its tokens are computed in groups of a prompt.
#[derive(Clone)]
pub(super) struct ChainPosition {
    pub(super) line: Arc<Mutex<Line>>,
    pub(super) index: usize,
    pub(super) num_grouped: usize,
}

/// Consecutive blocks, with their persistent names, as far as they are known.
pub(super) struct Line {
    salt: Option<String>,
    names: Vec<BlockName>,
}

impl Line {
    pub(super) fn new(cache_salt: Option<&str>) -> Self {
        Self { salt: cache_salt.map(str::to_owned), names: Vec::new() }
    }

    pub(super) fn is_salted(&self) -> bool {
        self.salt.is_some()
    }

    /// The name of full block `index` with these tokens, of which this many are computed in groups, and that of the block
    /// before it. None if that has none.
    fn name(
        &mut self,
        index: usize,
        token_ids: &[u32],
        num_grouped: usize,
        namer: &Namer,
    ) -> Option<(BlockName, BlockName)> {
        let parent = match index.checked_sub(1) {
            None => namer.root(self.salt.as_deref()),
            Some(before) => *self.names.get(before)?,
        };
        if self.names.len() == index {
            self.names.push(namer.child(parent, token_ids, num_grouped));
        }
        Some((self.names[index], parent))
    }
}

impl ChainPosition {
    /// The line, which is only ever used on the engine's thread.
    pub(super) fn line(&self) -> MutexGuard<'_, Line> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl BlockKey {
    /// The lasting names of the block and of the one before it; none if that has none.
    pub(super) fn names(&self, namer: &Namer) -> Option<(BlockName, BlockName)> {
        let position = self.position.as_ref()?;
        position.line().name(position.index, &self.token_ids, position.num_grouped, namer)
    }
}

/// A result of a fetch.
pub(super) enum Delivery {
    /// The next block, and the time of reading it.
    Block(Contents, Duration),
    /// The end: all blocks were delivered, or one could not be read.
    End,
}

/// The contents of a block.
pub(super) enum Contents {
    /// Its bytes, as [`KvCache::read_block`] gives them.
    Bytes(Vec<u8>),
    /// They are in memory of the host.
    Host(Arc<HostSlot>),
}

impl Contents {
    pub(super) fn write(&self, cache: &mut KvCache, block: BlockId) -> Result<()> {
        match self {
            Self::Bytes(bytes) => cache.write_block(block.0, bytes),
            Self::Host(slot) => slot.copy_to(cache, block),
        }
    }
}

/// Is called on another thread for each block, and last with the end. Returns whether more is needed, and may wait.
pub(super) type Deliver = Box<dyn FnMut(Delivery) -> bool + Send>;

/// How blocks come.
pub(super) enum Fetch {
    /// They do not: too many wait already.
    Refused,
    /// They are delivered.
    Comes,
    /// Here they are, and the device's time for each copy after its launch.
    Here(Vec<Contents>, Duration),
}

/// Blocks outside the cache, in host memory or in files. No call blocks.
pub(super) trait Tier: Send {
    /// Its name.
    fn medium(&self) -> Medium;

    /// Whether it may have or take anything now.
    fn is_ready(&self) -> bool;

    /// Whether it is not ready, and may be later.
    fn is_pending(&self) -> bool;

    /// The estimated time until it is ready, if known.
    fn time_left(&self) -> Option<Duration>;

    /// Whether it is read also where computing seems to be cheaper.
    fn is_read_always(&self) -> bool {
        false
    }

    /// How many of these blocks of a line, which are all from its first one on, it has from `start` on.
    fn num_readable(&self, blocks: &[BlockKey], start: usize) -> usize;

    /// Has blocks delivered, if they are not at hand.
    fn fetch(&mut self, blocks: Vec<BlockKey>, deliver: Deliver) -> Fetch;

    /// Whether it has a block, or soon will; none if it cannot take it.
    fn has(&self, block: &BlockKey) -> Option<bool>;

    /// Collects the results of its other threads.
    fn refresh(&mut self) {}

    /// How many blocks it takes now.
    fn num_free(&self) -> usize;

    /// How many it takes without giving up others.
    fn num_unused(&self) -> usize {
        0
    }

    /// Whether it will take more by itself.
    fn is_growing(&self) -> bool {
        false
    }

    /// Whether it takes blocks when the cache is about to evict them, and not as soon as they are computed.
    fn takes_evicted(&self) -> bool {
        false
    }

    /// Its capacity in blocks.
    fn capacity(&self) -> usize {
        usize::MAX
    }

    /// Takes blocks, which are there in the cache.
    ///
    /// # Errors
    /// If one of them cannot be copied from the device, or there is no free slot for it now. Those before it are taken.
    fn put(&mut self, blocks: Vec<(BlockId, BlockKey)>, cache: &mut KvCache) -> Result<()>;

    /// Counts blocks that it was not given.
    fn count_dropped(&mut self, num_blocks: usize);

    /// Starts to record changes of its contents, for [`take_events`](Self::take_events). Calls `on_change` on another
    /// thread when there are new ones.
    fn record_events(&mut self, on_change: Box<dyn Fn() + Send>);

    /// Takes the changes since the last call, without those of blocks with a salt.
    fn take_events(&mut self, hasher: &BlockHasher) -> Vec<CacheEvent>;

    /// Prints a line.
    fn notice(&self, line: &str);

    /// Adds its counters.
    fn report(&self, stats: &mut EngineStats);
}
