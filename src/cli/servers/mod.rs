//! The servers of this user on this machine: a file for each, which `ps` and `stop` read.
//!
//! A server holds a lock next to its file as long as it lives. So a file without such a lock was left by a server that was
//! killed, whatever process has its number now.

mod process;

use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use tinyvllm::llm::cache_folder;

pub(crate) use process::{memory_bytes, send_stop};

/// A server that runs, as it says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    /// Number of its process.
    pub(crate) pid: u32,
    /// When that process began, in the system's own unit, where the system reports it.
    started: Option<u64>,
    /// Where it listens.
    pub(crate) address: SocketAddr,
    /// Names of its model; the first one is in answers.
    pub(crate) models: Vec<String>,
    /// When it began, in seconds since 1970.
    since: u64,
}

/// A server's own entry, which goes with it.
#[derive(Debug)]
pub(crate) struct Entry {
    path: PathBuf,
    lock_path: PathBuf,
    _lock: File,
}

impl Record {
    /// This process.
    pub(crate) fn own(address: SocketAddr, models: Vec<String>) -> Self {
        let pid = std::process::id();
        let since = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
        Self { pid, started: process::started(pid), address, models, since }
    }

    /// For how long it has been running.
    pub(crate) fn age(&self) -> Duration {
        let since = UNIX_EPOCH + Duration::from_secs(self.since);
        SystemTime::now().duration_since(since).unwrap_or_default()
    }

    /// Where programs of this machine reach it.
    pub(crate) fn url(&self) -> String {
        format!("http://{}", reachable(self.address))
    }

    /// Whether `word` names it: a model, its process, its port or its address.
    pub(crate) fn is_meant_by(&self, word: &str) -> bool {
        let address = word.trim_start_matches("http://").trim_end_matches('/').trim_end_matches("/v1");
        self.models.iter().any(|model| model.eq_ignore_ascii_case(word))
            || word.parse() == Ok(self.pid)
            || word.parse() == Ok(self.address.port())
            || [self.address, reachable(self.address)].iter().any(|own| address.parse() == Ok(*own))
    }

    /// Whether the process of that number is the one that wrote this.
    pub(crate) fn is_same_process(&self) -> bool {
        self.started.is_none() || process::started(self.pid) == self.started
    }
}

/// The address itself, or this machine's for a server that listens everywhere.
pub(crate) fn reachable(address: SocketAddr) -> SocketAddr {
    let ip = match address.ip() {
        ip if !ip.is_unspecified() => ip,
        std::net::IpAddr::V4(_) => std::net::Ipv4Addr::LOCALHOST.into(),
        std::net::IpAddr::V6(_) => std::net::Ipv6Addr::LOCALHOST.into(),
    };
    SocketAddr::new(ip, address.port())
}

/// Writes this server down until the entry is dropped.
///
/// # Errors
/// If no folder can be written, or its file system has no locks.
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

/// The servers that run, the oldest first. Files of those that were killed are removed.
pub(crate) fn running() -> Vec<Record> {
    let mut records: Vec<Record> = folders().iter().flat_map(|folder| running_in(folder)).collect();
    records.sort_by_key(|record| (record.since, record.pid));
    records.dedup();
    records
}

/// Where entries may be: in the folder of this session, which is private and is removed when the session ends, or in the
/// user's cache. A server may have been started with other variables, so both are read.
fn folders() -> Vec<PathBuf> {
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").filter(|folder| !folder.is_empty());
    let runtime = runtime.map(|folder| PathBuf::from(folder).join("tinyvllm"));
    runtime.into_iter().chain(cache_folder("servers")).collect()
}

fn enter_in(folder: &Path, record: &Record) -> io::Result<Entry> {
    create_private(folder)?;
    // Those that were killed leave nothing for long.
    running_in(folder);
    // A process may serve on several ports.
    let name = format!("{}-{}", record.pid, record.address.port());
    let (path, lock_path) =
        (folder.join(&name).with_extension("json"), folder.join(&name).with_extension("lock"));
    let lock = private().truncate(true).open(&lock_path)?;
    lock.try_lock().map_err(io::Error::from)?;
    let entry = Entry { path: path.clone(), lock_path, _lock: lock };
    // A reader finds the lock and all of it.
    let temporary = path.with_extension("tmp");
    serde_json::to_writer(private().truncate(true).open(&temporary)?, record)?;
    fs::rename(&temporary, &path)?;
    Ok(entry)
}

impl Drop for Entry {
    fn drop(&mut self) {
        // Without its lock, what cannot be removed says nothing.
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

/// Files that only this user reads.
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
        // A server that was killed leaves its files and no lock.
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
