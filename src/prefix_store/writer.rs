//! The thread that writes packs and scans the directory.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use super::pack::{BlockRecord, PackFault, PackIndex, PackShape, PackWriter};
use super::{Shared, file_name, pack_bytes};

/// An incomplete pack is published when no block has arrived for this long.
const QUIET: Duration = Duration::from_secs(2);
/// And when it was begun so long ago.
const MAX_AGE: Duration = Duration::from_secs(30);
/// The interval of scans for packs of other processes.
const LOOK: Duration = Duration::from_secs(2);
/// The pause of writing after a failure.
const PAUSE: Duration = Duration::from_secs(60);

/// A queued block.
#[derive(Debug)]
pub(super) struct Put {
    pub(super) record: BlockRecord,
    pub(super) bytes: Vec<u8>,
}

pub(super) struct Writer {
    shared: Arc<Shared>,
    shape: PackShape,
    pack: Option<OpenPack>,
    looked: Option<Instant>,
    paused_until: Option<Instant>,
    /// Reported already; reset by the next write.
    has_failed: bool,
}

struct OpenPack {
    writer: PackWriter,
    begun: Instant,
    changed: Instant,
}

impl Writer {
    /// Writes for the model whose fingerprint is known by now.
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        let fingerprint = shared.shelf.namer().map_or(super::Fingerprint([0; 32]), |namer| namer.fingerprint);
        let shape = PackShape { fingerprint, block_size: shared.block_size, block_bytes: shared.block_bytes };
        Self { shared, shape, pack: None, looked: None, paused_until: None, has_failed: false }
    }

    /// Serves until all senders are gone.
    pub(super) fn run(mut self, queue: &Receiver<Put>) {
        if let Err(error) = self.shared.directory.evict_packs(0) {
            self.log_failure(&error);
        }
        loop {
            self.look();
            match queue.recv_timeout(Duration::from_millis(500)) {
                Ok(put) => {
                    self.shared.counters.queued_bytes.fetch_sub(put.bytes.len() as u64, Ordering::Relaxed);
                    self.write(&put);
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            if self.pack.as_ref().is_some_and(|pack| {
                pack.changed.elapsed() >= QUIET
                    || pack.begun.elapsed() >= MAX_AGE
                    || pack.writer.num_bytes() >= pack_bytes(self.shared.directory.limit())
            }) {
                self.publish();
            }
        }
        self.publish();
    }

    fn write(&mut self, put: &Put) {
        if self.paused_until.is_some_and(|end| Instant::now() < end) {
            self.give_up(&[put.record.name]);
            return;
        }
        self.paused_until = None;
        let now = Instant::now();
        let written = self.open_pack().and_then(|pack| {
            pack.changed = now;
            pack.writer.append(&put.record, &put.bytes)
        });
        if let Err(error) = written {
            self.give_up(&[put.record.name]);
            self.fail(&error);
        }
    }

    fn open_pack(&mut self) -> io::Result<&mut OpenPack> {
        let pack = match self.pack.take() {
            Some(pack) => pack,
            None => {
                let directory = &self.shared.directory;
                let wanted = pack_bytes(directory.limit()).max(self.shape.block_bytes);
                let left = directory.evict_packs(wanted)?;
                self.shared.counters.directory_bytes.store(left, Ordering::Relaxed);
                let path = directory.unfinished_path();
                let writer = PackWriter::create(path, self.shape, directory.secret)?;
                let now = Instant::now();
                OpenPack { writer, begun: now, changed: now }
            }
        };
        Ok(self.pack.insert(pack))
    }

    /// Finishes the pack and gives it its name.
    fn publish(&mut self) {
        let Some(mut pack) = self.pack.take() else { return };
        let published = pack.writer.finish().and_then(|()| {
            let path = self.shared.directory.publish(pack.writer.path())?;
            Ok((load(&path, &self.shared).map_err(|fault| io::Error::other(fault.to_string()))?, path))
        });
        match published {
            Ok((index, path)) => {
                let num_blocks = index.records.len() as u64;
                self.shared.count(|counters| &counters.written_blocks, num_blocks);
                self.shared.count(|counters| &counters.written_bytes, num_blocks * self.shape.block_bytes);
                self.shared.shelf.add(&path, Some(index));
                self.has_failed = false;
                self.looked = None;
                self.shared.report_changes();
            }
            Err(error) => {
                self.pack = Some(pack);
                self.fail(&error);
            }
        }
    }

    /// Drops the pack that is being written, and pauses writing.
    fn fail(&mut self, error: &io::Error) {
        self.log_failure(error);
        self.paused_until = Some(Instant::now() + PAUSE);
        if let Some(pack) = self.pack.take() {
            self.give_up(pack.writer.names());
            // If it cannot be removed now, it is when this process is gone.
            drop(fs::remove_file(pack.writer.path()));
        }
    }

    fn give_up(&self, names: &[super::BlockName]) {
        self.shared.shelf.forget_expected(names);
        self.shared.count(|counters| &counters.dropped_blocks, names.len() as u64);
    }

    fn log_failure(&mut self, error: &io::Error) {
        if !std::mem::replace(&mut self.has_failed, true) {
            self.shared.notice(&format!("cached prefixes are not written: {error}"));
        }
    }

    /// Takes up packs of other processes, and forgets those that are gone.
    fn look(&mut self) {
        if self.looked.is_some_and(|last| last.elapsed() < LOOK) {
            return;
        }
        self.looked = Some(Instant::now());
        let entries = match self.shared.directory.entries() {
            Ok(entries) => entries,
            Err(error) => return self.log_failure(&error),
        };
        let num_bytes = entries.iter().map(|entry| entry.len).sum();
        self.shared.counters.directory_bytes.store(num_bytes, Ordering::Relaxed);
        let packs: HashSet<PathBuf> =
            entries.into_iter().filter(super::directory::Entry::is_pack).map(|entry| entry.path).collect();
        self.shared.shelf.retain(|path| packs.contains(path));
        for path in packs.iter().filter(|path| !self.shared.shelf.knows(path)) {
            if self.shared.is_closed() {
                return;
            }
            let index = match load(path, &self.shared) {
                // Of another model, or another build of the program.
                Ok(index) if index.shape != self.shape => None,
                Ok(index) => Some(index),
                Err(PackFault::Io(error)) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(fault) => {
                    self.shared.notice(&format!("{} is ignored: {fault}", file_name(path)));
                    None
                }
            };
            self.shared.shelf.add(path, index);
        }
        self.shared.report_changes();
    }
}

fn load(path: &Path, shared: &Shared) -> Result<PackIndex, PackFault> {
    PackIndex::read(&mut File::open(path)?, &shared.directory.secret)
}
