//! Writes the cache: data under its name, links to it, what branches stand for, and locks.

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::hub::cache::RepoCache;
use crate::{Error, ErrorKind, Result};

/// Tries to lock a file for this process alone.
pub(in crate::hub) type Locking = fn(&File) -> Result<(), TryLockError>;

impl RepoCache {
    /// Records what `revision` means. Does nothing if that is known, so a read-only cache will do.
    pub(in crate::hub) fn set_commit(&self, revision: &str, commit: &str) -> Result<()> {
        if revision == commit || self.commit(revision).as_deref() == Some(commit) {
            return Ok(());
        }
        let path = self.folder().join("refs").join(revision);
        let temporary = path.with_file_name(format!(".{}.tmp", std::process::id()));
        create_parent(&path)?;
        fs::write(&temporary, commit)
            .and_then(|()| fs::rename(&temporary, &path))
            .map_err(|source| Error::io(format_args!("cannot write `{}`", path.display()), source))
    }

    /// Where the data of a file is, or will be.
    pub(in crate::hub) fn blob(&self, etag: &str) -> PathBuf {
        self.folder().join("blobs").join(etag)
    }

    /// Where earlier versions, and those of the Python client that take the lock, gather the data of a file.
    pub(super) fn shared_incomplete(&self, etag: &str) -> PathBuf {
        self.folder().join("blobs").join(format!("{etag}.incomplete"))
    }

    /// Makes `file` of a commit stand for a blob that is complete.
    pub(in crate::hub) fn link(&self, commit: &str, file: &str, etag: &str) -> Result<()> {
        let path = self.snapshot_file(commit, file);
        if path.exists() {
            return Ok(());
        }
        create_parent(&path)?;
        // From the folder of the file up to the folder of the repository.
        let up = "../".repeat(2 + file.matches('/').count());
        let target = PathBuf::from(format!("{up}blobs/{etag}"));
        // A link whose blob was deleted is in the way.
        let linked = match fs::symlink_metadata(&path) {
            Ok(_) => fs::remove_file(&path),
            Err(_) => Ok(()),
        }
        .and_then(|()| link_blob(&self.blob(etag), &target, &path));
        match linked {
            Err(_) if path.exists() => Ok(()),
            linked => linked.map_err(|source| {
                Error::io(format_args!("cannot put a file at `{}`", path.display()), source)
            }),
        }
    }

    /// Waits until no other process is downloading the blob. `waiting` is called once if it has to wait,
    /// `size` returns its size in bytes. `None` where files cannot be locked.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`] if another process holds the lock and has written nothing for
    /// `timeout`.
    pub(super) fn lock(
        &self,
        etag: &str,
        timeout: Duration,
        size: impl Fn() -> u64,
        waiting: impl FnOnce(),
    ) -> Result<Option<BlobLock>> {
        const POLL: Duration = Duration::from_millis(100);
        let path = self.locks().join(format!("{etag}.lock"));
        let locking = |source| Error::io(format_args!("cannot lock `{}`", path.display()), source);
        create_parent(&path)?;
        let file = File::options().create(true).write(true).truncate(false).open(&path).map_err(locking)?;
        let mut waiting = Some(waiting);
        let mut seen = (size(), Instant::now());
        loop {
            match (self.locking)(&file) {
                Ok(()) => return Ok(Some(BlobLock { _file: file })),
                Err(TryLockError::WouldBlock) => {}
                // Network file systems often have no locks. Each process writes to a file of its own, so
                // all that is lost is that two of them may fetch the same.
                Err(TryLockError::Error(_)) => return Ok(None),
            }
            if let Some(waiting) = waiting.take() {
                waiting();
            }
            let now = size();
            if now != seen.0 {
                seen = (now, Instant::now());
            }
            if seen.1.elapsed() > timeout {
                return Err(Error::new(
                    ErrorKind::Unavailable,
                    format!(
                        "another process has held `{}` for {} s without any progress",
                        path.display(),
                        timeout.as_secs()
                    ),
                )
                .with_hint("end that process and try again"));
            }
            std::thread::sleep(POLL);
        }
    }
}

/// The right to write one blob; given back when dropped, also when the process dies.
#[derive(Debug)]
pub(super) struct BlobLock {
    _file: File,
}

pub(super) fn create_parent(path: &Path) -> Result<()> {
    let parent = path.parent().unwrap_or(path);
    fs::create_dir_all(parent).map_err(|source| {
        Error::io(format_args!("cannot create the folder `{}`", parent.display()), source)
            .with_hint("set HF_HOME or HF_HUB_CACHE to a folder that can be written")
    })
}

/// Puts the blob at `path`: a link where the file system has them, else a second name for the same
/// data, else a copy, which appears only when it is whole.
fn link_blob(blob: &Path, relative: &Path, path: &Path) -> io::Result<()> {
    if symlink(relative, path).is_ok() || fs::hard_link(blob, path).is_ok() {
        return Ok(());
    }
    copy_whole(blob, path)
}

fn copy_whole(blob: &Path, path: &Path) -> io::Result<()> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.incomplete", std::process::id()));
    let temporary = path.with_file_name(name);
    fs::copy(blob, &temporary).and_then(|_| fs::rename(&temporary, path)).inspect_err(|_| {
        // The copy is of no use; that it cannot be removed either adds nothing to the first error.
        let _ = fs::remove_file(&temporary);
    })
}

#[cfg(unix)]
fn symlink(target: &Path, path: &Path) -> io::Result<()> {
    std::os::unix::fs::symlink(target, path)
}

#[cfg(windows)]
fn symlink(target: &Path, path: &Path) -> io::Result<()> {
    std::os::windows::fs::symlink_file(target, path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hub::source::RepoId;

    fn cache(folder: &Path) -> RepoCache {
        RepoCache::new(folder, &RepoId::parse("org/name").unwrap())
    }

    #[test]
    fn a_revision_is_a_ref_or_a_commit() {
        let folder = tempfile::tempdir().unwrap();
        let cache = cache(folder.path());
        assert_eq!(cache.commit("main"), None);
        cache.set_commit("main", "abc123").unwrap();
        cache.set_commit("refs/pr/1", "def456").unwrap();
        let at = |path: &str| folder.path().join("models--org--name").join(path);
        assert_eq!(fs::read_to_string(at("refs/main")).unwrap(), "abc123");
        assert_eq!(cache.commit("main").as_deref(), Some("abc123"));
        assert_eq!(cache.commit("refs/pr/1").as_deref(), Some("def456"));

        assert_eq!(cache.commit("abc123"), None);
        fs::create_dir_all(at("snapshots/abc123")).unwrap();
        assert_eq!(cache.commit("abc123").as_deref(), Some("abc123"));

        fs::write(at("refs/evil"), "../../../etc").unwrap();
        assert_eq!(cache.commit("evil"), None);
        assert_eq!(fs::read_dir(at("refs")).unwrap().count(), 3, "no temporary file is left");
    }

    #[test]
    fn a_link_is_relative_and_replaces_a_broken_one() {
        let folder = tempfile::tempdir().unwrap();
        let cache = cache(folder.path());
        create_parent(&cache.blob("e1")).unwrap();
        fs::write(cache.blob("e1"), "one").unwrap();
        for file in ["config.json", "deep/er/model.gguf"] {
            cache.link("c0ffee", file, "e1").unwrap();
            cache.link("c0ffee", file, "e1").unwrap();
            assert_eq!(fs::read_to_string(cache.snapshot_file("c0ffee", file)).unwrap(), "one");
        }
        let mut files = cache.files("c0ffee");
        files.sort();
        assert_eq!(files, ["config.json", "deep/er/model.gguf"]);

        fs::remove_file(cache.blob("e1")).unwrap();
        assert!(cache.files("c0ffee").is_empty(), "a link to nothing is no file");
        fs::write(cache.blob("e2"), "two").unwrap();
        cache.link("c0ffee", "config.json", "e2").unwrap();
        assert_eq!(fs::read_to_string(cache.snapshot_file("c0ffee", "config.json")).unwrap(), "two");
    }

    #[test]
    fn a_copy_appears_whole_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::write(at("blob"), "data").unwrap();
        copy_whole(&at("blob"), &at("file")).unwrap();
        assert_eq!(fs::read_to_string(at("file")).unwrap(), "data");
        assert!(copy_whole(&at("absent"), &at("other")).is_err());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
    }

    #[test]
    fn a_lock_excludes_and_a_stuck_holder_is_reported() {
        let folder = tempfile::tempdir().unwrap();
        let cache = cache(folder.path());
        let lock = |cache: &RepoCache, etag: &str, timeout: u64, waiting: &mut dyn FnMut()| {
            cache.lock(etag, Duration::from_millis(timeout), || 0, waiting)
        };
        let held = lock(&cache, "e1", 5000, &mut || panic!("no other process is there")).unwrap();
        let mut waited = false;
        let error = lock(&cache, "e1", 150, &mut || waited = true).unwrap_err();
        assert!(waited && held.is_some());
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert!(error.message().contains("e1.lock"), "{error:?}");
        lock(&cache, "e2", 0, &mut || panic!("another file")).unwrap();
        let mut without = cache.clone();
        without.locking = |_| Err(TryLockError::Error(io::ErrorKind::Unsupported.into()));
        assert!(lock(&without, "e1", 0, &mut || panic!("unknown without locks")).unwrap().is_none());
        drop(held);
        lock(&cache, "e1", 0, &mut || panic!("it was given back")).unwrap();
    }
}
