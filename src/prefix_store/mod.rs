//! Blocks of the KV cache that outlive the process: packs of them in a directory.
//!
//! A block is written asynchronously and read before a request is admitted. The engine sends messages; it never waits
//! for a file. A block that is read back equals the computed one bit for bit, or it is a miss: names, tokens and bytes
//! are verified under the directory's secret. No file can cause a failure.
//!
//! This module does not depend on tensors, requests or the scheduler. A block is its tokens, its name and bytes.

mod directory;
mod fingerprint;
mod inspect;
mod name;
mod pack;
mod reader;
mod shelf;
#[cfg(test)]
mod tests;
mod writer;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub use fingerprint::{FingerprintBuilder, LoadedFile};
pub use inspect::{DirectoryReport, PackContents, PackReport, clear_directory, inspect_directory};
pub use name::{BlockName, Fingerprint, Namer};
pub use reader::{Fetched, Wanted};

use self::directory::Directory;
use self::fingerprint::Hashing;
use self::pack::BlockRecord;
use self::reader::FetchJob;
use self::shelf::{Change, Shelf};
use self::writer::{Put, Writer};
use crate::{Error, Result};

/// Bytes that may wait to be written: memory of the host that the store takes.
pub const MAX_QUEUED_BYTES: u64 = 256 << 20;
/// Blocks that may wait to be written, and prefixes to be read.
const QUEUE: usize = 4_096;
/// Bytes of a pack where the limit is large.
const PACK_BYTES: u64 = 128 << 20;
/// The maximum size of a pack as a fraction of the limit, so that there are several to evict.
const PACKS_AT_LEAST: u64 = 8;

/// Receives notices, a line each, once.
pub type OnNotice = Arc<dyn Fn(&str) + Send + Sync>;

/// Where prefixes are kept, and how much of them.
#[derive(Clone)]
pub struct StoreOptions {
    /// The folder. It is made if it is not there.
    pub directory: PathBuf,
    /// The most bytes of all its files together.
    pub max_bytes: u64,
    /// Whether prefixes are read also where computing them seems to be faster.
    pub reads_always: bool,
    /// Receives damaged files and failures.
    pub on_notice: OnNotice,
}

impl fmt::Debug for StoreOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { directory, max_bytes, reads_always, .. } = self;
        f.debug_struct("StoreOptions")
            .field("directory", directory)
            .field("max_bytes", max_bytes)
            .field("reads_always", reads_always)
            .finish_non_exhaustive()
    }
}

/// Running totals of a store.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StoreStats {
    /// Blocks that were written to packs which others can find.
    pub num_written_blocks: u64,
    /// Bytes of these.
    pub num_written_bytes: u64,
    /// Blocks that were not written, because too many waited or writing failed.
    pub num_dropped_blocks: u64,
    /// Blocks that were read and verified.
    pub num_read_blocks: u64,
    /// Bytes of these.
    pub num_read_bytes: u64,
    /// Blocks that could not be read or verified.
    pub num_failed_reads: u64,
    /// Packs with blocks of this model now.
    pub num_packs: u64,
    /// Bytes of all files of the directory, at the last scan.
    pub num_directory_bytes: u64,
}

#[derive(Debug, Default)]
struct Counters {
    written_blocks: AtomicU64,
    written_bytes: AtomicU64,
    dropped_blocks: AtomicU64,
    read_blocks: AtomicU64,
    read_bytes: AtomicU64,
    failed_reads: AtomicU64,
    directory_bytes: AtomicU64,
    queued_bytes: AtomicU64,
}

/// State shared by the threads and the engine.
struct Shared {
    directory: Directory,
    /// Bytes of a block.
    block_bytes: u64,
    block_size: u32,
    shelf: Shelf,
    hashing: Hashing,
    counters: Counters,
    on_notice: OnNotice,
    /// The request is dropped.
    is_closed: AtomicBool,
    /// Is called when the record of changes has something in it.
    on_change: Mutex<Option<OnChange>>,
}

/// Receives, on another thread, changes of readable blocks.
pub type OnChange = Box<dyn Fn() + Send>;

/// A block can be read, or no longer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StoreChange {
    /// It can, and this is its request.
    Added(Wanted),
    /// It cannot.
    Removed(BlockName),
}

impl Shared {
    fn count(&self, counter: impl Fn(&Counters) -> &AtomicU64, number: u64) {
        counter(&self.counters).fetch_add(number, Ordering::Relaxed);
    }

    fn notice(&self, line: &str) {
        (self.on_notice)(line);
    }

    /// Notifies the subscriber of the record, if there is something in it.
    fn report_changes(&self) {
        if self.shelf.has_changes()
            && let Some(on_change) = &*self.on_change.lock().unwrap_or_else(PoisonError::into_inner)
        {
            on_change();
        }
    }

    fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Relaxed)
    }
}

/// The blocks of a model in a directory. Dropping it writes the queued ones.
pub struct PrefixStore {
    shared: Arc<Shared>,
    puts: Option<SyncSender<Put>>,
    jobs: Option<SyncSender<FetchJob>>,
    threads: Vec<JoinHandle<()>>,
    reads_always: bool,
}

impl fmt::Debug for PrefixStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PrefixStore").field("directory", &self.shared.directory).finish_non_exhaustive()
    }
}

impl PrefixStore {
    /// Opens the directory and starts two threads. `fingerprint` runs on one of them, as it may take long; until it
    /// returns, the store finds and takes no blocks. Blocks have `block_size` tokens and `block_bytes` bytes.
    ///
    /// # Errors
    /// If the directory cannot be made or read, or is something else, or the system refuses a thread.
    pub fn open(
        options: &StoreOptions,
        block_size: usize,
        block_bytes: usize,
        fingerprint: impl FnOnce(&FingerprintBuilder) -> Option<Fingerprint> + Send + 'static,
    ) -> Result<Self> {
        let too_large = |_| Error::internal(format!("a block of {block_size} tokens"));
        let directory = Directory::open(&options.directory, options.max_bytes)?;
        let shared = Arc::new(Shared {
            directory,
            block_bytes: block_bytes as u64,
            block_size: u32::try_from(block_size).map_err(too_large)?,
            shelf: Shelf::default(),
            hashing: Hashing::default(),
            counters: Counters::default(),
            on_notice: Arc::clone(&options.on_notice),
            is_closed: AtomicBool::new(false),
            on_change: Mutex::default(),
        });
        let (puts, queue) = sync_channel(QUEUE);
        let (jobs, job_queue) = sync_channel(QUEUE);
        let mut store = Self {
            shared: Arc::clone(&shared),
            puts: Some(puts),
            jobs: Some(jobs),
            threads: Vec::new(),
            reads_always: options.reads_always,
        };
        let own = Arc::clone(&shared);
        store.start("write", move || {
            let fingerprint = fingerprint(&FingerprintBuilder::new(&own));
            let secret = own.directory.secret;
            own.shelf.open(fingerprint.map(|fingerprint| Namer { secret, fingerprint }));
            if fingerprint.is_some() {
                Writer::new(own).run(&queue);
            }
        })?;
        store.start("read", move || reader::run(&shared, &job_queue))?;
        Ok(store)
    }

    fn start(&mut self, name: &str, work: impl FnOnce() + Send + 'static) -> Result<()> {
        let thread = std::thread::Builder::new().name(format!("tinyvllm-prefix-{name}"));
        let thread = thread.spawn(work);
        self.threads.push(thread.map_err(|source| Error::io("start a thread for cached prefixes", source))?);
        Ok(())
    }

    /// The namer of blocks; none until the fingerprint is known.
    #[must_use]
    pub fn namer(&self) -> Option<&Namer> {
        self.shared.shelf.namer()
    }

    /// Whether there is a block, or soon will be.
    #[must_use]
    pub fn has(&self, name: BlockName) -> bool {
        self.shared.shelf.has(name)
    }

    /// How many of these names can be read, counted from the first one up to one that cannot.
    #[must_use]
    pub fn num_readable(&self, names: &[BlockName]) -> usize {
        self.shared.shelf.num_readable(names)
    }

    /// Whether the fingerprint is not known yet, so that blocks have no names now but may get them later.
    #[must_use]
    pub fn is_pending(&self) -> bool {
        self.shared.shelf.is_pending()
    }

    /// The rest of the time of hashing the weights, at the speed so far; none if unknown.
    #[must_use]
    pub fn hashing_time_left(&self) -> Option<Duration> {
        self.shared.hashing.time_left()
    }

    /// How many blocks may be given now.
    #[must_use]
    pub fn num_free(&self) -> usize {
        let queued = self.shared.counters.queued_bytes.load(Ordering::Relaxed);
        let block_bytes = self.shared.block_bytes.max(1);
        let free = MAX_QUEUED_BYTES.max(block_bytes).saturating_sub(queued) / block_bytes;
        usize::try_from(free).unwrap_or(usize::MAX)
    }

    /// Counts blocks that were not given, because too many waited.
    pub fn count_dropped(&self, num_blocks: usize) {
        self.shared.count(|counters| &counters.dropped_blocks, num_blocks as u64);
    }

    /// The time of verifying the bytes of a block.
    #[must_use]
    pub fn checking_time(&self, bytes: &[u8]) -> Duration {
        let start = Instant::now();
        std::hint::black_box(self.shared.directory.secret.hash("bytes", &[&[0; 32], bytes]));
        start.elapsed()
    }

    /// Whether prefixes are read also where computing them seems to be faster.
    #[must_use]
    pub fn reads_always(&self) -> bool {
        self.reads_always
    }

    /// Sends a line to the receiver of failures.
    pub fn notice(&self, line: &str) {
        self.shared.notice(line);
    }

    /// Queues a block for writing, with the bytes of a block. Does not wait.
    pub fn put(&self, block: NewBlock) {
        let NewBlock { name, parent, num_grouped, is_salted, token_ids, bytes } = block;
        let Some(puts) = &self.puts else { return };
        let record = BlockRecord { name, parent, num_grouped: num_grouped as u32, is_salted, token_ids };
        if !self.shared.shelf.expect(name) {
            return;
        }
        let num_bytes = bytes.len() as u64;
        self.shared.count(|counters| &counters.queued_bytes, num_bytes);
        if let Err(TrySendError::Full(put) | TrySendError::Disconnected(put)) =
            puts.try_send(Put { record, bytes })
        {
            self.shared.shelf.forget_expected(&[put.record.name]);
            self.shared.counters.queued_bytes.fetch_sub(num_bytes, Ordering::Relaxed);
            self.shared.count(|counters| &counters.dropped_blocks, 1);
        }
    }

    /// Has blocks read, one after another. `deliver` is called on another thread for each, and last with the end; it returns
    /// whether more is needed, and may wait. False if too many wait already.
    pub fn fetch(&self, wanted: Vec<Wanted>, deliver: impl FnMut(Fetched) -> bool + Send + 'static) -> bool {
        let job = FetchJob { wanted, deliver: Box::new(deliver) };
        self.jobs.as_ref().is_some_and(|jobs| jobs.try_send(job).is_ok())
    }

    /// Keeps a record from now on of the blocks that can be read, which begins with those that there are. `on_change`
    /// receives when there is something new in it.
    pub fn record_changes(&self, on_change: OnChange) {
        *self.shared.on_change.lock().unwrap_or_else(PoisonError::into_inner) = Some(on_change);
        self.shared.shelf.record_changes();
    }

    /// Takes the changes since the last call. Blocks of a pack are in the order in which they were written.
    #[must_use]
    pub fn take_changes(&self) -> Vec<StoreChange> {
        let reported = |change| match change {
            Change::Added(location) => StoreChange::Added(location.wanted()),
            Change::Removed(name) => StoreChange::Removed(name),
        };
        self.shared.shelf.take_changes().into_iter().map(reported).collect()
    }

    /// Running totals.
    #[must_use]
    pub fn stats(&self) -> StoreStats {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counters = &self.shared.counters;
        StoreStats {
            num_written_blocks: load(&counters.written_blocks),
            num_written_bytes: load(&counters.written_bytes),
            num_dropped_blocks: load(&counters.dropped_blocks),
            num_read_blocks: load(&counters.read_blocks),
            num_read_bytes: load(&counters.read_bytes),
            num_failed_reads: load(&counters.failed_reads),
            num_packs: self.shared.shelf.num_packs() as u64,
            num_directory_bytes: load(&counters.directory_bytes),
        }
    }
}

impl Drop for PrefixStore {
    fn drop(&mut self) {
        self.shared.is_closed.store(true, Ordering::Relaxed);
        // The threads end when all senders are gone.
        (self.puts, self.jobs) = (None, None);
        for thread in self.threads.drain(..) {
            // A panic there has already had its effects, and is no reason for another one.
            drop(thread.join());
        }
    }
}

/// A block to be written.
#[derive(Debug, Clone)]
pub struct NewBlock {
    /// Its name.
    pub name: BlockName,
    /// The name of the block before it, or of the empty prefix.
    pub parent: BlockName,
    /// Of its tokens those that were computed in groups of a prompt.
    pub num_grouped: usize,
    /// Whether the prefix has a salt.
    pub is_salted: bool,
    /// The tokens of a block.
    pub token_ids: Vec<u32>,
    /// The bytes of a block.
    pub bytes: Vec<u8>,
}

/// Bytes of a pack in a directory with this limit.
fn pack_bytes(limit: u64) -> u64 {
    (limit / PACKS_AT_LEAST).clamp(1, PACK_BYTES)
}

/// The name of a file in a message.
fn file_name(path: &Path) -> std::borrow::Cow<'_, str> {
    path.file_name().unwrap_or_default().to_string_lossy()
}
