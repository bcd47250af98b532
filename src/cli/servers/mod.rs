//! This user's servers on this machine: a file for each, which `ps` and `stop` read.
//!
//! A running server holds a lock next to its file. A file without a held lock belongs to a server that was
//! killed, even if another process now has its id.

mod process;

use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use tinyvllm::llm::cache_folder;

pub(crate) use process::{memory_bytes, send_stop};

/// A server's record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    /// Its process id.
    pub(crate) pid: u32,
    /// Start time of the process in a unit of the system, where the system reports it.
    started: Option<u64>,
    /// The address that it listens on.
    pub(crate) address: SocketAddr,
    /// Names of its model; answers use the first one.
    pub(crate) models: Vec<String>,
    /// Start time of the server, in seconds since 1970.
    since: u64,
}

/// A server's own entry, removed on drop.
#[derive(Debug)]
pub(crate) struct Entry {
    path: PathBuf,
    lock_path: PathBuf,
    _lock: File,
}

impl Record {
    /// The record of this process.
    pub(crate) fn own(address: SocketAddr, models: Vec<String>) -> Self {
        let pid = std::process::id();
        let since = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
        Self { pid, started: process::started(pid), address, models, since }
    }

    /// How long it has been running.
    pub(crate) fn age(&self) -> Duration {
        let since = UNIX_EPOCH + Duration::from_secs(self.since);
        SystemTime::now().duration_since(since).unwrap_or_default()
    }

    /// The URL for programs on this machine.
    pub(crate) fn url(&self) -> String {
        format!("http://{}", reachable(self.address))
    }

    /// Whether `word` matches it: as a model, process id, port or address.
    pub(crate) fn is_meant_by(&self, word: &str) -> bool {
        let address = word.trim_start_matches("http://").trim_end_matches('/').trim_end_matches("/v1");
        self.models.iter().any(|model| model.eq_ignore_ascii_case(word))
            || word.parse() == Ok(self.pid)
            || word.parse() == Ok(self.address.port())
            || [self.address, reachable(self.address)].iter().any(|own| address.parse() == Ok(*own))
    }

    /// Whether the process with this id is the one that wrote the record.
    pub(crate) fn is_same_process(&self) -> bool {
        self.started.is_none() || process::started(self.pid) == self.started
    }
}

/// The address itself, or the loopback address for a server that listens on all.
pub(crate) fn reachable(address: SocketAddr) -> SocketAddr {
    let ip = match address.ip() {
        ip if !ip.is_unspecified() => ip,
        std::net::IpAddr::V4(_) => std::net::Ipv4Addr::LOCALHOST.into(),
        std::net::IpAddr::V6(_) => std::net::Ipv6Addr::LOCALHOST.into(),
    };
    SocketAddr::new(ip, address.port())
}

/// Adds this server to the list until the entry is dropped.
///
/// # Errors
/// If no folder is writable, or the file system has no locks.
pub(crate) fn enter(record: &Record) -> io::Result<Entry> {
    let mut failure = io::Error::new(io::ErrorKind::NotFound, "there is no home folder");
    for folder in folders() {
        match enter_in(&folder, record) {
            Ok(entry) => return Ok(entry),
            Err(error) => failure = error,
        }
    }
    Err(failure)
}

/// The running servers, oldest first. Removes files of killed servers.
pub(crate) fn running() -> Vec<Record> {
    let mut records: Vec<Record> = folders().iter().flat_map(|folder| running_in(folder)).collect();
    records.sort_by_key(|record| (record.since, record.pid));
    records.dedup();
    records
}

/// The folders for entries: that of this session, which is private and is removed when the session ends, or
/// the user's cache. Other servers may have been started with other variables, so both are read.
fn folders() -> Vec<PathBuf> {
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").filter(|folder| !folder.is_empty());
    let runtime = runtime.map(|folder| PathBuf::from(folder).join("tinyvllm"));
    runtime.into_iter().chain(cache_folder("servers")).collect()
}

fn enter_in(folder: &Path, record: &Record) -> io::Result<Entry> {
    create_private(folder)?;
    // Removes files of killed servers.
    running_in(folder);
    // A process may run servers on several ports.
    let name = format!("{}-{}", record.pid, record.address.port());
    let (path, lock_path) =
        (folder.join(&name).with_extension("json"), folder.join(&name).with_extension("lock"));
    let lock = private().truncate(true).open(&lock_path)?;
    lock.try_lock().map_err(io::Error::from)?;
    let entry = Entry { path: path.clone(), lock_path, _lock: lock };
    // So that a reader sees the complete file, with its lock held.
    let temporary = path.with_extension("tmp");
    serde_json::to_writer(private().truncate(true).open(&temporary)?, record)?;
    fs::rename(&temporary, &path)?;
    Ok(entry)
}

impl Drop for Entry {
    fn drop(&mut self) {
        // If this fails, the file is ignored because its lock is free.
        let _ = fs::remove_file(&self.path);
        let _ = fs::remove_file(&self.lock_path);
    }
}

fn running_in(folder: &Path) -> Vec<Record> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let paths = entries.filter(|path| path.extension().is_some_and(|end| end == "json"));
    let running = paths.filter_map(|path| {
        let lock_path = path.with_extension("lock");
        let is_held = match File::open(&lock_path) {
            Ok(lock) => matches!(lock.try_lock(), Err(TryLockError::WouldBlock)),
            Err(_) => false,
        };
        if !is_held {
            let _ = fs::remove_file(&path);
            let _ = fs::remove_file(&lock_path);
            return None;
        }
        let record: Record = serde_json::from_slice(&fs::read(&path).ok()?).ok()?;
        record.is_same_process().then_some(record)
    });
    running.collect()
}

fn create_private(folder: &Path) -> io::Result<()> {
    let mut builder = DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(folder)
}

/// Opens files that only this user can read.
fn private() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.create(true).write(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(port: u16) -> Record {
        let models = vec!["org/name:Q4_K_M".to_owned(), "llama3.2".to_owned()];
        Record::own(SocketAddr::from(([0, 0, 0, 0], port)), models)
    }

    #[test]
    fn an_entry_is_there_as_long_as_its_server() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("tinyvllm");
        assert_eq!(running_in(&folder), []);
        let entry = enter_in(&folder, &record(81)).unwrap();
        let other = enter_in(&folder, &record(82)).unwrap();
        assert_eq!(running_in(&folder).len(), 2);
        #[cfg(unix)]
        for (path, mode) in [(&folder, 0o700), (&entry.path, 0o600)] {
            let metadata = fs::metadata(path).unwrap();
            assert_eq!(std::os::unix::fs::PermissionsExt::mode(&metadata.permissions()) & 0o777, mode);
        }
        drop(entry);
        assert_eq!(running_in(&folder), [record(82)]);
        // A killed server leaves its files but no lock.
        let Entry { path, .. } = &other;
        fs::copy(path, folder.join("1-83.json")).unwrap();
        fs::write(folder.join("1-83.lock"), "").unwrap();
        fs::write(folder.join("2-84.json"), "{}").unwrap();
        assert_eq!(running_in(&folder).len(), 1);
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 2, "what was left is gone");
    }

    #[test]
    fn another_process_of_the_same_number_is_not_ours() {
        let mut record = record(81);
        assert!(record.is_same_process());
        if record.started.is_some() {
            record.started = record.started.map(|started| started + 1);
            assert!(!record.is_same_process());
        }
    }

    #[test]
    fn servers_are_named_in_many_ways() {
        let record = record(8000);
        let pid = record.pid.to_string();
        for word in ["LLAMA3.2", &pid, "8000", "0.0.0.0:8000", "127.0.0.1:8000", "http://127.0.0.1:8000/v1"] {
            assert!(record.is_meant_by(word), "{word}");
        }
        for word in ["", "llama3", "80", "127.0.0.1", "10.0.0.1:8000"] {
            assert!(!record.is_meant_by(word), "{word}");
        }
        assert_eq!(record.url(), "http://127.0.0.1:8000");
    }
}
