//! A file while it arrives: `blobs/<etag>.tinyvllm-<host>-<boot>-<process>.incomplete`.
//!
//! Invariants: the data on disk is the beginning of the file without gaps, so its length suffices to resume; and no
//! process writes to a file that another one may be writing to. To that end, each process has its own name, locks its
//! file while it is open, and takes over an earlier process's file by renaming it, if that process is certainly dead:
//! its lock is free, on the same machine. Without locks (network file systems), a file counts as left when it was not
//! written to for longer than a live download can be silent.

use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, SystemTime};

use xxhash_rust::xxh3::xxh3_64;

use super::blobs::create_parent;
use super::checksum::Checksum;
use super::client::FileMetadata;
use crate::hub::cache::RepoCache;
use crate::{Error, ErrorKind, Result};

/// A partial file that no process resumed for this long is removed when another file of the repository arrives.
const FORGOTTEN: Duration = Duration::from_secs(14 * 24 * 3600);

const SUFFIX: &str = ".incomplete";
const OURS: &str = ".tinyvllm-";

/// A file while it arrives.
pub(super) struct Partial<'a> {
    /// Its name in the repository.
    pub(super) name: &'a str,
    /// Size in bytes once it is complete.
    pub(super) size: Option<u64>,
    /// Bytes on disk, all of them instead.
    pub(super) written: u64,
    path: PathBuf,
    file: File,
    metadata: &'a FileMetadata,
    /// The checksum of the data on disk.
    checksum: Checksum,
}

impl<'a> Partial<'a> {
    /// Opens the longest file of earlier attempts, or an empty one. `is_locked`: whether this process has the lock of
    /// the blob. `timeout`: longer than a live download is ever silent.
    pub(super) fn open(
        cache: &RepoCache,
        name: &'a str,
        metadata: &'a FileMetadata,
        is_locked: bool,
        timeout: Duration,
    ) -> Result<Self> {
        let path = cache.blob(&format!("{}{OURS}{}{SUFFIX}", metadata.etag, own_name()));
        create_parent(&path)?;
        take_over(cache, &metadata.etag, &path, is_locked, timeout);
        let mut options = File::options();
        // Not opened for appending, because a restart goes back to the first byte.
        let opened = options.create(true).read(true).write(true).truncate(false).open(&path);
        let size = metadata.size;
        let file = opened.map_err(|source| disk_error(source, name, size, 0, &path))?;
        // Where there are no locks, the name alone has to do.
        let _ = (cache.locking)(&file);
        let checksum = Checksum::new(&metadata.etag, size);
        let mut partial = Self { name, size, written: 0, path, file, metadata, checksum };
        partial.read_what_is_there().map_err(|source| partial.disk_error(source))?;
        if size.is_some_and(|size| partial.written > size) {
            partial.restart()?;
        }
        Ok(partial)
    }

    fn read_what_is_there(&mut self) -> io::Result<()> {
        let length = self.file.seek(SeekFrom::End(0))?;
        self.file.rewind()?;
        let mut buffer = vec![0; 1 << 20];
        let mut rest = (&self.file).take(length);
        loop {
            match rest.read(&mut buffer) {
                Ok(0) => return Ok(()),
                Ok(num_bytes) => {
                    self.checksum.update(&buffer[..num_bytes]);
                    self.written += num_bytes as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Discards the data.
    pub(super) fn restart(&mut self) -> Result<()> {
        let emptied = self.file.set_len(0).and_then(|()| self.file.rewind());
        self.written = 0;
        self.checksum = Checksum::new(&self.metadata.etag, self.size);
        emptied.map_err(|source| self.disk_error(source))
    }

    /// Adds `bytes` at the end.
    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let mut rest = bytes;
        // Not `write_all`: after an error it would be unknown how many bytes are on disk.
        while !rest.is_empty() {
            match self.file.write(rest) {
                Ok(0) => return Err(self.disk_error(io::ErrorKind::StorageFull.into())),
                Ok(num_bytes) => {
                    let (written, left) = rest.split_at(num_bytes);
                    self.checksum.update(written);
                    self.written += num_bytes as u64;
                    rest = left;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.disk_error(error)),
            }
        }
        Ok(())
    }

    /// Whether the data has the Hub's checksum; true if it has none.
    pub(super) fn is_as_named(&self) -> bool {
        self.checksum.matches()
    }

    /// The checksum, if there is one that can be compared.
    pub(super) fn checksum_name(&self) -> Option<&'static str> {
        self.checksum.is_known().then(|| self.checksum.name())
    }

    /// Gives the file its final name once its bytes are on disk, and removes files that others left.
    pub(super) fn complete(self, cache: &RepoCache) -> Result<()> {
        let blob = cache.blob(&self.metadata.etag);
        let placed = self.file.sync_all().and_then(|()| fs::rename(&self.path, &blob));
        match placed {
            // Another process was first, and has removed this file.
            Err(_) if blob.exists() => {}
            placed => placed.map_err(|source| self.disk_error(source))?,
        }
        for path in leftovers(cache, |etag| etag == self.metadata.etag) {
            // If it is there tomorrow it does no harm: the blob is complete.
            let _ = fs::remove_file(path);
        }
        Ok(())
    }

    /// Removes the data, because it is wrong.
    pub(super) fn discard(self) {
        // If it stays, its checksum is wrong next time as well.
        let _ = fs::remove_file(&self.path);
    }

    fn disk_error(&self, source: io::Error) -> Error {
        disk_error(source, self.name, self.size, self.written, &self.path)
    }

    /// The download has failed, because of `why`.
    pub(super) fn broken_off(&self, why: impl fmt::Display) -> Error {
        let size = self.size.map_or_else(|| "an unknown number of".to_owned(), |size| size.to_string());
        Error::new(
            ErrorKind::Unavailable,
            format!("the download of `{}` stopped after {} of {size} bytes: {why}", self.name, self.written),
        )
        .with_hint("run the command again: it resumes there")
    }
}

/// Removes partial files of the repository that dead processes left and no process resumed for long.
pub(super) fn remove_forgotten(cache: &RepoCache) {
    for path in leftovers(cache, |_| true) {
        if is_silent(&path, FORGOTTEN) && is_left(cache, &path, FORGOTTEN) {
            // Another attempt tomorrow does as well.
            let _ = fs::remove_file(path);
        }
    }
}

/// Bytes of the blob in all processes, to see whether it grows.
pub(super) fn total_size(cache: &RepoCache, etag: &str) -> u64 {
    let paths = leftovers(cache, |other| other == etag).into_iter().chain([cache.shared_incomplete(etag)]);
    paths.filter_map(|path| fs::metadata(path).ok()).map(|metadata| metadata.len()).sum()
}

/// Renames the longest file that a dead process left of this blob to `path`, and removes the others.
fn take_over(cache: &RepoCache, etag: &str, path: &Path, is_locked: bool, timeout: Duration) {
    let mut left = leftovers(cache, |other| other == etag);
    left.retain(|path| is_left(cache, path, timeout));
    // Earlier versions, and those of the Python client that lock the blob, use this name for all.
    let shared = cache.shared_incomplete(etag);
    if fs::symlink_metadata(&shared).is_ok() && (is_locked || is_silent(&shared, timeout)) {
        left.push(shared);
    }
    left.sort_by_key(|path| std::cmp::Reverse(fs::metadata(path).map_or(0, |metadata| metadata.len())));
    let mut left = left.into_iter();
    // The first rename wins; for the other process the file is missing.
    if left.any(|longest| fs::rename(longest, path).is_ok()) {
        for path in left {
            let _ = fs::remove_file(path);
        }
    }
}

/// Whether the process that made this file is dead.
fn is_left(cache: &RepoCache, path: &Path, timeout: Duration) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let Some((_, owner)) = name.rsplit_once(OURS) else { return false };
    let is_here = owner.split('-').zip(own_name().split('-')).take(2).any(|(theirs, own)| theirs == own);
    let Ok(file) = File::options().read(true).write(true).open(path) else { return false };
    match (cache.locking)(&file) {
        Ok(()) => is_here || is_silent(path, timeout),
        Err(fs::TryLockError::WouldBlock) => false,
        Err(fs::TryLockError::Error(_)) => is_silent(path, timeout),
    }
}

fn is_silent(path: &Path, timeout: Duration) -> bool {
    let modified = fs::metadata(path).and_then(|metadata| metadata.modified());
    // A time in the future is from another clock and proves nothing.
    modified.is_ok_and(|at| SystemTime::now().duration_since(at).is_ok_and(|age| age > timeout))
}

/// The files of this program that are not complete, of the blobs that `is_wanted` picks.
fn leftovers(cache: &RepoCache, is_wanted: impl Fn(&str) -> bool) -> Vec<PathBuf> {
    let folder = cache.blob("");
    let entries = fs::read_dir(&folder).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    names
        .filter(|name| {
            name.strip_suffix(SUFFIX)
                .and_then(|name| name.rsplit_once(OURS))
                .is_some_and(|(etag, _)| is_wanted(etag))
        })
        .map(|name| folder.join(name))
        .collect()
}

/// A name that no other file has: the machine, its start, and the process with a number.
///
/// After a start of the machine its name is the same, in containers of one machine the start is: either
/// shows that locks are local to one system.
fn own_name() -> String {
    static MACHINE: LazyLock<String> = LazyLock::new(|| {
        let short = |text: &[u8]| xxh3_64(text) as u32;
        let boot = fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let name = host_name();
        format!("{:08x}-{:08x}", short(&name), short(if boot.is_empty() { &name } else { &boot }))
    });
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    // In two containers, processes may have the same number.
    let now = SystemTime::UNIX_EPOCH.elapsed().map_or(0, |time| time.subsec_nanos());
    format!("{}-{}x{now:x}x{}", *MACHINE, std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed))
}

#[cfg(unix)]
fn host_name() -> Vec<u8> {
    use std::os::unix::ffi::OsStringExt;
    nix::unistd::gethostname().map(OsStringExt::into_vec).unwrap_or_default()
}

#[cfg(not(unix))]
fn host_name() -> Vec<u8> {
    std::env::var("COMPUTERNAME").map(String::into_bytes).unwrap_or_default()
}

fn disk_error(source: io::Error, name: &str, size: Option<u64>, written: u64, path: &Path) -> Error {
    use io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
    if !matches!(source.kind(), StorageFull | QuotaExceeded | FileTooLarge) {
        return Error::io(format_args!("cannot write `{name}` to `{}`", path.display()), source);
    }
    let folder = path.parent().unwrap_or(path).display();
    let message = match size {
        Some(size) => format!(
            "`{folder}` has no space for `{name}`: it needs {}, of which {} are written",
            ByteSize(size),
            ByteSize(written)
        ),
        None => format!("`{folder}` has no space for `{name}` after {}", ByteSize(written)),
    };
    let hint = match size {
        Some(size) => format!(
            "free {}, or set HF_HUB_CACHE to a folder on another disk; the written bytes are kept, and the next run \
             resumes",
            ByteSize(size.saturating_sub(written))
        ),
        None => "free some space, or set HF_HUB_CACHE to a folder on another disk".to_owned(),
    };
    Error::new(ErrorKind::Io, message).with_hint(hint).with_source(source)
}

/// A number of bytes as a person reads it.
struct ByteSize(u64);

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [(1_u64 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
        match units.iter().find(|(unit, _)| self.0 >= *unit) {
            Some((unit, name)) => write!(f, "{:.1} {name}", self.0 as f64 / *unit as f64),
            None => write!(f, "{} bytes", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hub::source::RepoId;

    const TIMEOUT: Duration = Duration::from_secs(60);

    fn cache(folder: &Path) -> RepoCache {
        RepoCache::new(folder, &RepoId::parse("org/name").unwrap())
    }

    fn metadata() -> FileMetadata {
        FileMetadata { etag: "abc".to_owned(), size: Some(9) }
    }

    fn no_locks(_: &File) -> Result<(), fs::TryLockError> {
        Err(fs::TryLockError::Error(io::ErrorKind::Unsupported.into()))
    }

    fn names(cache: &RepoCache) -> Vec<String> {
        let entries = fs::read_dir(cache.blob("")).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    #[test]
    fn no_process_writes_to_another_ones_file() {
        for locking in [File::try_lock, no_locks] {
            let folder = tempfile::tempdir().unwrap();
            let mut cache = cache(folder.path());
            cache.locking = locking;
            let metadata = metadata();
            let open = |timeout| Partial::open(&cache, "m.gguf", &metadata, false, timeout).unwrap();
            let mut one = open(TIMEOUT);
            one.write(b"one").unwrap();
            let mut two = open(TIMEOUT);
            assert_eq!((two.written, names(&cache).len()), (0, 2), "the first one is alive");
            two.write(b"two-two-2").unwrap();
            assert_eq!(fs::read(&one.path).unwrap(), b"one");
            two.complete(&cache).unwrap();
            assert_eq!(names(&cache), ["abc"], "the blob is complete, so nothing else is of use");
            // The slower process's data is useless, which is not an error.
            one.write(b"-one-1").unwrap();
            one.complete(&cache).unwrap();
            assert_eq!(fs::read(cache.blob("abc")).unwrap(), b"two-two-2");
        }
    }

    #[test]
    fn what_a_dead_process_left_is_taken_over_at_once_with_locks_and_later_without() {
        let folder = tempfile::tempdir().unwrap();
        let with_locks = cache(folder.path());
        let mut without = with_locks.clone();
        without.locking = no_locks;
        let metadata = metadata();
        let open =
            |cache: &RepoCache, timeout| Partial::open(cache, "m.gguf", &metadata, false, timeout).unwrap();
        open(&with_locks, TIMEOUT).write(b"four").unwrap();
        let taken = open(&with_locks, TIMEOUT);
        assert_eq!((taken.written, names(&with_locks).len()), (4, 1));
        drop(taken);
        let young = open(&without, TIMEOUT);
        assert_eq!((young.written, names(&without).len()), (0, 2), "it may be alive");
        std::thread::sleep(Duration::from_millis(20));
        let old = open(&without, Duration::from_millis(10));
        assert_eq!((old.written, names(&without).len()), (4, 1), "the longest one, and no other stays");
    }

    #[test]
    fn sizes_are_readable() {
        for (bytes, expected) in [
            (0, "0 bytes"),
            (1023, "1023 bytes"),
            (1536, "1.5 KiB"),
            (5 << 20, "5.0 MiB"),
            (15 << 30, "15.0 GiB"),
        ] {
            assert_eq!(ByteSize(bytes).to_string(), expected);
        }
    }

    #[test]
    fn only_a_full_disk_is_reported_as_one() {
        let check = |kind: io::ErrorKind, expected: ErrorKind, word: &str| {
            let error =
                disk_error(kind.into(), "m.gguf", Some(3 << 20), 1 << 20, Path::new("/c/blobs/e.incomplete"));
            assert_eq!(error.kind(), expected);
            assert!(format!("{error:?}").contains(word), "{error:?}");
        };
        check(io::ErrorKind::StorageFull, ErrorKind::Io, "needs 3.0 MiB, of which 1.0 MiB are written");
        check(io::ErrorKind::QuotaExceeded, ErrorKind::Io, "free 2.0 MiB");
        check(io::ErrorKind::PermissionDenied, ErrorKind::Io, "cannot write `m.gguf`");
    }
}
