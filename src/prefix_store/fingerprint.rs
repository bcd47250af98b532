//! The inputs that decide a block's bytes, in addition to its tokens.
//!
//! The weights are hashed by content, so a copy of a model finds its prefixes. That reads all of their files. The
//! directory keeps the hashes under the system's metadata of a file, so that the next start need not read the files
//! again.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::Shared;
use super::name::{Fingerprint, HASH_BYTES};

/// A file is hashed in chunks of this many bytes, and then the hashes are.
const CHUNK: u64 = 4 << 20;
const MAX_THREADS: usize = 4;
pub(super) const KEPT: &str = "weights";

/// How far the hashing of the weights is.
#[derive(Debug, Default)]
pub(super) struct Hashing {
    all_bytes: AtomicU64,
    done_bytes: AtomicU64,
    begun: OnceLock<Instant>,
}

impl Hashing {
    fn begin(&self, num_bytes: u64) {
        self.all_bytes.store(num_bytes, Ordering::Relaxed);
        let _ = self.begun.set(Instant::now());
    }

    fn advance(&self, num_bytes: u64) {
        self.done_bytes.fetch_add(num_bytes, Ordering::Relaxed);
    }

    /// The rest of the time, at the speed so far; none if unknown.
    pub(super) fn time_left(&self) -> Option<Duration> {
        let done = self.done_bytes.load(Ordering::Relaxed);
        let left = self.all_bytes.load(Ordering::Relaxed).saturating_sub(done);
        let seconds = self.begun.get()?.elapsed().as_secs_f64() * left as f64 / done as f64;
        Duration::try_from_secs_f64(seconds).ok()
    }
}

/// Computes the fingerprint of a model, using the directory's remembered hashes.
pub struct FingerprintBuilder {
    shared: Arc<Shared>,
}

impl std::fmt::Debug for FingerprintBuilder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("FingerprintBuilder")
    }
}

/// A file of weights as it was when it was loaded: path, bytes, and modification time, if known.
pub type LoadedFile = (PathBuf, u64, Option<SystemTime>);

impl FingerprintBuilder {
    pub(super) fn new(shared: &Arc<Shared>) -> Self {
        Self { shared: Arc::clone(shared) }
    }

    /// The fingerprint of these files' contents and these further inputs, in order. None if a file cannot be read or
    /// has changed since it was loaded, which is reported, or if the store is closed meanwhile.
    #[must_use]
    pub fn fingerprint(&self, files: &[LoadedFile], parts: &[&[u8]]) -> Option<Fingerprint> {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&(files.len() as u64).to_le_bytes());
        self.shared.hashing.begin(files.iter().map(|(_, len, _)| len).sum());
        for file in files {
            match self.file_hash(file) {
                Ok(hash) => hasher.update(&hash),
                Err(_) if self.shared.is_closed() => return None,
                Err(error) => {
                    let path = file.0.display();
                    self.shared
                        .notice(&format!("prefixes are not kept, because {path} cannot be hashed: {error}"));
                    return None;
                }
            };
        }
        for part in parts {
            hasher.update(&(part.len() as u64).to_le_bytes()).update(part);
        }
        Some(Fingerprint(hasher.finalize().into()))
    }

    fn file_hash(&self, (path, len, modified): &LoadedFile) -> io::Result<[u8; HASH_BYTES]> {
        let is_same = |metadata: &fs::Metadata| {
            metadata.len() == *len && (modified.is_none() || metadata.modified().ok() == *modified)
        };
        let before = fs::metadata(path)?;
        let secret = &self.shared.directory.secret;
        let key = secret.hash("file", &[stamp(path, &before).as_bytes()]);
        let kept_path = self.shared.directory.kept_path(&blake3::Hash::from(key).to_hex());
        if is_same(&before)
            && let Some(kept) = read_kept(&kept_path)
            && kept[HASH_BYTES..] == secret.hash("weights", &[&key, &kept[..HASH_BYTES]])
        {
            let mut hash = [0; HASH_BYTES];
            hash.copy_from_slice(&kept[..HASH_BYTES]);
            self.shared.hashing.advance(*len);
            return Ok(hash);
        }
        let hash = hash_file(path, before.len(), |num_bytes| {
            self.shared.hashing.advance(num_bytes);
            !self.shared.is_closed()
        })?;
        let after = fs::metadata(path)?;
        if !is_same(&after) || stamp(path, &after) != stamp(path, &before) {
            return Err(io::Error::other("it has changed since it was loaded"));
        }
        // Where it cannot be kept, the next start reads the file again.
        drop(self.keep(&kept_path, &[hash, secret.hash("weights", &[&key, &hash])].concat()));
        Ok(hash)
    }

    fn keep(&self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        let unfinished = self.shared.directory.unfinished_path();
        let mut options = fs::OpenOptions::new();
        options.write(true).create_new(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        let mut file = options.open(&unfinished)?;
        let written = file.write_all(bytes).and_then(|()| file.sync_all());
        written
            .and_then(|()| fs::rename(&unfinished, path))
            .inspect_err(|_| drop(fs::remove_file(&unfinished)))
    }
}

/// Distinguishes the states of a file without reading it.
fn stamp(path: &Path, metadata: &fs::Metadata) -> String {
    let modified = metadata.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    #[cfg(unix)]
    let more = {
        use std::os::unix::fs::MetadataExt;
        (metadata.dev(), metadata.ino(), metadata.ctime(), metadata.ctime_nsec())
    };
    #[cfg(not(unix))]
    let more = ();
    format!("{path:?} {} {modified:?} {more:?}", metadata.len())
}

fn read_kept(path: &Path) -> Option<[u8; 2 * HASH_BYTES]> {
    let mut bytes = Vec::new();
    File::open(path).ok()?.take(2 * HASH_BYTES as u64 + 1).read_to_end(&mut bytes).ok()?;
    bytes.try_into().ok()
}

/// The hash of the hashes of a file's chunks, by several threads. `go_on` receives the bytes of each finished chunk.
fn hash_file(path: &Path, len: u64, go_on: impl Fn(u64) -> bool + Sync) -> io::Result<[u8; HASH_BYTES]> {
    let num_chunks = usize::try_from(len.div_ceil(CHUNK)).map_err(io::Error::other)?;
    let (next, hashes) = (AtomicUsize::new(0), Mutex::new(vec![[0; HASH_BYTES]; num_chunks]));
    let work = || -> io::Result<()> {
        let (mut file, mut bytes) = (File::open(path)?, Vec::new());
        loop {
            let chunk = next.fetch_add(1, Ordering::Relaxed);
            if chunk >= num_chunks {
                return Ok(());
            }
            let start = chunk as u64 * CHUNK;
            bytes.resize((len - start).min(CHUNK) as usize, 0);
            file.seek(SeekFrom::Start(start))?;
            file.read_exact(&mut bytes)?;
            hashes.lock().unwrap_or_else(PoisonError::into_inner)[chunk] = blake3::hash(&bytes).into();
            if !go_on(bytes.len() as u64) {
                return Err(io::Error::other("the store is closed"));
            }
        }
    };
    let num_threads = std::thread::available_parallelism().map_or(1, NonZero::get).min(MAX_THREADS);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..num_threads).map(|_| scope.spawn(work)).collect();
        threads.into_iter().try_for_each(|thread| {
            thread.join().unwrap_or_else(|_| Err(io::Error::other("a thread that hashes failed")))
        })
    })?;
    let mut hasher = blake3::Hasher::new();
    hasher.update(&len.to_le_bytes());
    let hashes = hashes.into_inner().unwrap_or_else(PoisonError::into_inner);
    for hash in &hashes {
        hasher.update(hash);
    }
    Ok(hasher.finalize().into())
}
