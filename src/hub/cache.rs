//! The folder layout that the Hugging Face libraries share, so that a model fetched by one of them is
//! found by all:
//!
//! ```text
//! models--org--name/refs/main               the commit that the branch points to
//! models--org--name/blobs/<etag>            the data of a file, under a name made from its content
//! models--org--name/blobs/<etag>….incomplete what has arrived of it so far, one for each process
//! models--org--name/snapshots/<commit>/…    the files of a commit, links to blobs
//! .locks/models--org--name/<etag>.lock      held by the process that is downloading the blob
//! ```
//!
//! The lock only spares work, where the file system has locks: newer versions of the Python client take
//! none. Invariant: a name under `blobs` (without `.incomplete`), `snapshots` or `refs` appears only when
//! its content is complete. This file knows nothing of the network.

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::source::RepoId;
use crate::{Error, ErrorKind, Result};

/// The part of the cache that belongs to one repository.
#[derive(Debug, Clone)]
pub(super) struct RepoCache {
    folder: PathBuf,
    locks: PathBuf,
    /// How a file is locked.
    pub(super) locking: Locking,
}

/// Tries to lock a file for this process alone.
pub(super) type Locking = fn(&File) -> Result<(), TryLockError>;

impl RepoCache {
    pub(super) fn new(cache_dir: &Path, repo: &RepoId) -> Self {
        let name = format!("models--{}", repo.as_str().replace('/', "--"));
        let locks = cache_dir.join(".locks").join(&name);
        Self { folder: cache_dir.join(name), locks, locking: File::try_lock }
    }

    /// The commit that `revision` meant when it was last looked up; a commit means itself.
    pub(super) fn commit(&self, revision: &str) -> Option<String> {
        let from_ref = fs::read_to_string(self.folder.join("refs").join(revision)).ok();
        match from_ref.map(|commit| commit.trim().to_owned()) {
            Some(commit) if is_path_word(&commit) => Some(commit),
            _ => (is_path_word(revision) && self.snapshot(revision).is_dir()).then(|| revision.to_owned()),
        }
    }

    /// Records what `revision` means. Does nothing if that is known, so a read-only cache will do.
    pub(super) fn set_commit(&self, revision: &str, commit: &str) -> Result<()> {
        if revision == commit || self.commit(revision).as_deref() == Some(commit) {
            return Ok(());
        }
        let path = self.folder.join("refs").join(revision);
        let temporary = path.with_file_name(format!(".{}.tmp", std::process::id()));
        create_parent(&path)?;
        fs::write(&temporary, commit)
            .and_then(|()| fs::rename(&temporary, &path))
            .map_err(|source| Error::io(format_args!("cannot write `{}`", path.display()), source))
    }

    /// All of it but the locks.
    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Where locks are.
    pub(super) fn locks(&self) -> &Path {
        &self.locks
    }

    /// Where data is.
    pub(super) fn blobs(&self) -> PathBuf {
        // Links lead to the true path.
        let blobs = self.folder.join("blobs");
        fs::canonicalize(&blobs).unwrap_or(blobs)
    }

    /// The commits of which there are files.
    pub(super) fn commits(&self) -> Vec<String> {
        let entries = fs::read_dir(self.folder.join("snapshots")).into_iter().flatten().flatten();
        entries
            .filter_map(|entry| entry.file_name().into_string().ok())
            .filter(|name| is_path_word(name))
            .collect()
    }

    /// The files that say of a branch or tag that it is this commit.
    pub(super) fn refs_to(&self, commit: &str) -> Vec<PathBuf> {
        let refs = self.folder.join("refs");
        let mut names = Vec::new();
        list_files(&refs, "", 4, &mut names);
        let paths = names.iter().map(|name| name.split('/').fold(refs.clone(), |path, part| path.join(part)));
        paths.filter(|path| fs::read_to_string(path).is_ok_and(|text| text.trim() == commit)).collect()
    }

    /// What has arrived of downloads that are not complete.
    pub(super) fn incomplete(&self) -> impl Iterator<Item = PathBuf> {
        let entries = fs::read_dir(self.folder.join("blobs")).into_iter().flatten().flatten();
        entries
            .map(|entry| entry.path())
            .filter(|path| path.extension().is_some_and(|end| end == "incomplete"))
    }

    /// The folder that holds the files of a commit.
    pub(super) fn snapshot(&self, commit: &str) -> PathBuf {
        self.folder.join("snapshots").join(commit)
    }

    /// Where `file` of a commit is, or will be.
    pub(super) fn snapshot_file(&self, commit: &str, file: &str) -> PathBuf {
        file.split('/').fold(self.snapshot(commit), |path, part| path.join(part))
    }

    /// The files of a commit whose data is there, as `/`-separated names.
    pub(super) fn files(&self, commit: &str) -> Vec<String> {
        let mut files = Vec::new();
        list_files(&self.snapshot(commit), "", 4, &mut files);
        files
    }

    /// Where the data of a file is, or will be.
    pub(super) fn blob(&self, etag: &str) -> PathBuf {
        self.folder.join("blobs").join(etag)
    }

    /// Where earlier versions, and those of the Python client that take the lock, gather the data of a file.
    pub(super) fn shared_incomplete(&self, etag: &str) -> PathBuf {
        self.folder.join("blobs").join(format!("{etag}.incomplete"))
    }

    /// Makes `file` of a commit stand for a blob that is complete.
    pub(super) fn link(&self, commit: &str, file: &str, etag: &str) -> Result<()> {
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
        .and_then(|()| place(&self.blob(etag), &target, &path));
        match linked {
            Err(_) if path.exists() => Ok(()),
            linked => linked.map_err(|source| {
                Error::io(format_args!("cannot put a file at `{}`", path.display()), source)
            }),
        }
    }

    /// Waits until no other process is downloading the blob. `waiting` is called once if it has to wait,
    /// `size` tells how many bytes of it there are. `None` where files cannot be locked.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`] if another process holds the lock and has written nothing for
    /// `patience`.
    pub(super) fn lock(
        &self,
        etag: &str,
        patience: Duration,
        size: impl Fn() -> u64,
        waiting: impl FnOnce(),
    ) -> Result<Option<BlobLock>> {
        const POLL: Duration = Duration::from_millis(100);
        let path = self.locks.join(format!("{etag}.lock"));
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
            if seen.1.elapsed() > patience {
                return Err(Error::new(
                    ErrorKind::Unavailable,
                    format!(
                        "another process has held `{}` for {} s without any progress",
                        path.display(),
                        patience.as_secs()
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

/// Whether a word from outside (a commit, an etag) is one harmless path component.
pub(super) fn is_path_word(word: &str) -> bool {
    !word.is_empty()
        && word.len() <= 128
        && !word.starts_with('.')
        && word.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
}

pub(super) fn create_parent(path: &Path) -> Result<()> {
    let parent = path.parent().unwrap_or(path);
    fs::create_dir_all(parent).map_err(|source| {
        Error::io(format_args!("cannot create the folder `{}`", parent.display()), source)
            .with_hint("set HF_HOME or HF_HUB_CACHE to a folder that can be written")
    })
}

/// The names of the files below `folder`; links count if what they point to exists.
pub(super) fn list_files(folder: &Path, prefix: &str, depth: u32, files: &mut Vec<String>) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let Ok(name) = entry.file_name().into_string() else { continue };
        let path = entry.path();
        if path.is_file() {
            files.push(format!("{prefix}{name}"));
        } else if depth > 0 && path.is_dir() {
            list_files(&path, &format!("{prefix}{name}/"), depth - 1, files);
        }
    }
}

/// Puts the blob at `path`: a link where the file system has them, else a second name for the same
/// data, else a copy, which appears only when it is whole.
fn place(blob: &Path, relative: &Path, path: &Path) -> io::Result<()> {
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
        let lock = |cache: &RepoCache, etag: &str, patience: u64, waiting: &mut dyn FnMut()| {
            cache.lock(etag, Duration::from_millis(patience), || 0, waiting)
        };
        let held = lock(&cache, "e1", 5000, &mut || panic!("nobody else is there")).unwrap();
        let mut waited = false;
        let error = lock(&cache, "e1", 150, &mut || waited = true).unwrap_err();
        assert!(waited && held.is_some());
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert!(error.message().contains("e1.lock"), "{error:?}");
        lock(&cache, "e2", 0, &mut || panic!("another file")).unwrap();
        let without = RepoCache {
            locking: |_| Err(TryLockError::Error(io::ErrorKind::Unsupported.into())),
            ..cache.clone()
        };
        assert!(lock(&without, "e1", 0, &mut || panic!("nobody can tell")).unwrap().is_none());
        drop(held);
        lock(&cache, "e1", 0, &mut || panic!("it was given back")).unwrap();
    }

    #[test]
    fn words_from_outside_are_checked() {
        for good in ["abc", "0f3a", "a-b_c.d", "5f5c1b-gzip"] {
            assert!(is_path_word(good), "{good}");
        }
        for bad in ["", ".", "..", ".x", "a/b", "a\\b", "a b", "é", "a\n"] {
            assert!(!is_path_word(bad), "{bad}");
        }
    }
}
