//! The directory: its secret, its limit, and packs by age.
//!
//! Several processes may use it at a time, without locks. Packs appear by renaming and are never changed. A pack that
//! another process has removed is a miss. The next process removes unfinished files of a dead one.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use super::fingerprint::KEPT;
use super::name::{HASH_BYTES, Secret};
use crate::{Error, ErrorKind, Result};

const SECRET: &str = "secret";
const PACK: &str = "pack";
const UNFINISHED: &str = "unfinished";
/// A file that was not written to for this long has no owner, even if a process has its number now.
const MAX_UNFINISHED_AGE: Duration = Duration::from_secs(3_600);
/// And one whose process is not visible from here when it was not written to for this long. A process in another
/// container writes more often than that, or gives the file its name.
const MAX_UNSEEN_AGE: Duration = Duration::from_secs(6);

/// A folder with packs.
#[derive(Debug, Clone)]
pub(super) struct Directory {
    path: PathBuf,
    pub(super) secret: Secret,
    /// Bytes of all files together.
    limit: u64,
}

/// A file of the directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) path: PathBuf,
    pub(super) len: u64,
    pub(super) used: SystemTime,
}

impl Entry {
    pub(super) fn is_pack(&self) -> bool {
        self.path.extension().is_some_and(|extension| extension == PACK)
    }

    fn is_ours(&self) -> bool {
        let is_kept = self.path.extension().is_some_and(|extension| extension == KEPT);
        self.is_pack() || self.is_unfinished() || is_kept
    }

    fn is_unfinished(&self) -> bool {
        self.path.extension().is_some_and(|extension| extension == UNFINISHED)
    }
}

impl Directory {
    /// Opens a directory, which is made if it is not there.
    ///
    /// # Errors
    /// If it cannot be made or read, or if it has other things in it and no secret: then it is something else.
    pub(super) fn open(path: &Path, limit: u64) -> Result<Self> {
        let doing = || format!("cannot use {} for cached prefixes", path.display());
        let failed = |error| Error::io(doing(), error);
        let mut builder = DirBuilder::new();
        builder.recursive(true);
        #[cfg(unix)]
        std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
        builder.create(path).map_err(failed)?;
        let secret_path = path.join(SECRET);
        let has_secret = secret_path.exists();
        // Another process may be about to make the secret.
        let mut entries = fs::read_dir(path).map_err(failed)?.filter_map(std::result::Result::ok);
        let has_others = entries.any(|entry| entry.path().extension().is_none_or(|end| end != UNFINISHED));
        if has_others && !secret_path.exists() {
            let message = format!("{}: it has files, and none is the secret of a cache", doing());
            return Err(
                Error::new(ErrorKind::InvalidRequest, message).with_hint("name a new or an empty folder")
            );
        }
        // Where it belongs to another user, that user has decided.
        #[cfg(unix)]
        drop(fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o700)));
        let secret = match read_secret(&secret_path) {
            Ok(Some(secret)) => secret,
            Ok(None) => make_secret(path, has_secret).map_err(failed)?,
            Err(error) => return Err(failed(error)),
        };
        Ok(Self { path: path.to_owned(), secret, limit })
    }

    /// The same for an existing directory, which is not modified.
    ///
    /// # Errors
    /// If there is none.
    pub(super) fn look_at(path: &Path) -> Result<Self> {
        match read_secret(&path.join(SECRET)) {
            Ok(Some(secret)) => Ok(Self { path: path.to_owned(), secret, limit: u64::MAX }),
            Ok(None) | Err(_) => {
                let message = format!("{} is no directory of cached prefixes", path.display());
                Err(Error::new(ErrorKind::NotFound, message)
                    .with_hint("name the folder that --prefix-cache-dir has"))
            }
        }
    }

    pub(super) fn limit(&self) -> u64 {
        self.limit
    }

    /// All its files, the one that was used least recently first.
    pub(super) fn entries(&self) -> io::Result<Vec<Entry>> {
        let mut entries = Vec::new();
        for entry in fs::read_dir(&self.path)? {
            let Ok(entry) = entry else { continue };
            // Another process may just have removed it.
            let Ok(metadata) = entry.metadata() else { continue };
            if metadata.is_file() {
                let used = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
                entries.push(Entry { path: entry.path(), len: metadata.len(), used });
            }
        }
        entries.sort_by(|one, other| (one.used, &one.path).cmp(&(other.used, &other.path)));
        Ok(entries)
    }

    /// Removes packs until this many bytes more stay within the limit; returns the remaining bytes. Unfinished files of
    /// dead processes go first.
    pub(super) fn evict_packs(&self, num_bytes: u64) -> io::Result<u64> {
        let entries = self.entries()?;
        let mut total: u64 = entries.iter().map(|entry| entry.len).sum();
        for entry in entries.iter().filter(|entry| is_abandoned(entry)) {
            if fs::remove_file(&entry.path).is_ok() {
                total -= entry.len;
            }
        }
        for entry in entries.iter().filter(|entry| entry.is_pack()) {
            if total.saturating_add(num_bytes) <= self.limit {
                break;
            }
            // Another process may have been faster.
            match fs::remove_file(&entry.path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => total -= entry.len,
            }
        }
        match total.saturating_add(num_bytes) <= self.limit {
            true => Ok(total),
            false => Err(io::Error::new(
                io::ErrorKind::StorageFull,
                format!("{total} bytes are in use and {num_bytes} more do not fit into {}", self.limit),
            )),
        }
    }

    /// The name of a file that is to be written.
    pub(super) fn unfinished_path(&self) -> PathBuf {
        unfinished_path(&self.path)
    }

    /// Where the hash of a file of weights is kept.
    pub(super) fn kept_path(&self, name: &str) -> PathBuf {
        self.path.join(format!("{name}.{KEPT}"))
    }

    /// Gives a durable file its name as a pack, and returns when that is durable too.
    pub(super) fn publish(&self, unfinished: &Path) -> io::Result<PathBuf> {
        let target = unfinished.with_extension(PACK);
        fs::rename(unfinished, &target)?;
        // Not every system can do that; then the name is durable a little later.
        #[cfg(unix)]
        drop(File::open(&self.path).and_then(|folder| folder.sync_all()));
        Ok(target)
    }

    /// Removes all that was written here but the secret; returns the number of files and their bytes.
    pub(super) fn clear(&self) -> io::Result<(usize, u64)> {
        let (mut num_files, mut num_bytes) = (0, 0);
        for entry in self.entries()?.iter().filter(|entry| entry.is_ours()) {
            fs::remove_file(&entry.path)?;
            num_files += 1;
            num_bytes += entry.len;
        }
        Ok((num_files, num_bytes))
    }
}

/// Marks the pack as just used. If that is not permitted, it counts as older than it is.
pub(super) fn touch(file: &File) {
    drop(file.set_modified(SystemTime::now()));
}

fn unfinished_path(folder: &Path) -> PathBuf {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    folder.join(format!("{}-{:016x}-{number}.{UNFINISHED}", std::process::id(), process_number()))
}

/// Distinguishes this process from an earlier one with the same id.
fn process_number() -> u64 {
    static NUMBER: OnceLock<u64> = OnceLock::new();
    *NUMBER.get_or_init(|| {
        use std::hash::BuildHasher;
        std::hash::RandomState::new().hash_one(SystemTime::now())
    })
}

fn is_abandoned(entry: &Entry) -> bool {
    if !entry.is_unfinished() {
        return false;
    }
    let name = entry.path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let mut parts = name.split('-');
    let (process, number) = (parts.next().and_then(|part| part.parse().ok()), parts.next());
    let is_alive = match process {
        Some(process) if process == std::process::id() => {
            number == Some(&format!("{:016x}", process_number()))
        }
        Some(process) => may_be_alive(process),
        None => false,
    };
    let max_age = if is_alive { MAX_UNFINISHED_AGE } else { MAX_UNSEEN_AGE };
    entry.used.elapsed().is_ok_and(|age| age > max_age)
}

#[cfg(unix)]
fn may_be_alive(process: u32) -> bool {
    use nix::errno::Errno;
    use nix::sys::signal::kill;
    use nix::unistd::Pid;
    i32::try_from(process)
        .is_ok_and(|process| process > 0 && !matches!(kill(Pid::from_raw(process), None), Err(Errno::ESRCH)))
}

#[cfg(not(unix))]
fn may_be_alive(_process: u32) -> bool {
    true
}

/// None if it is not there or is damaged.
fn read_secret(path: &Path) -> io::Result<Option<Secret>> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let mut bytes = Vec::new();
    file.take(HASH_BYTES as u64 + 1).read_to_end(&mut bytes)?;
    Ok(<[u8; HASH_BYTES]>::try_from(bytes).ok().map(Secret::new))
}

/// Draws a secret. If another process does so at the same time, one of them is taken by both.
fn make_secret(folder: &Path, replace: bool) -> io::Result<Secret> {
    let mut bytes = [0; HASH_BYTES];
    getrandom::fill(&mut bytes).map_err(io::Error::other)?;
    let (target, path) = (folder.join(SECRET), unfinished_path(folder));
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let mut file = options.open(&path)?;
    file.write_all(&bytes)?;
    file.sync_all()?;
    if replace {
        fs::rename(&path, &target)?;
    } else {
        let linked = fs::hard_link(&path, &target);
        fs::remove_file(&path)?;
        match linked {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
    }
    read_secret(&target)?.ok_or_else(|| io::Error::other("the secret changed during the start"))
}
