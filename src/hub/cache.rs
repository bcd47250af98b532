//! The folder layout that the Hugging Face libraries share, so that a model fetched by one of them is
//! found by all. `hf-hub` names most of it:
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
//! its content is complete. This file reads; `download/blobs.rs` writes.

use std::fs;
use std::path::{Path, PathBuf};

use hf_hub::{Cache, Repo};

use super::list_files;
use super::source::RepoId;

/// The part of the cache that belongs to one repository.
#[derive(Debug, Clone)]
pub(super) struct RepoCache {
    folder: PathBuf,
    locks: PathBuf,
    cache: Cache,
    repo: Repo,
    /// How a file is locked.
    pub(super) locking: super::download::Locking,
}

impl RepoCache {
    pub(super) fn new(cache_dir: &Path, repo: &RepoId) -> Self {
        let (cache, repo) = (Cache::new(cache_dir.to_owned()), Repo::model(repo.as_str().to_owned()));
        let name = repo.folder_name();
        let locks = cache_dir.join(".locks").join(&name);
        Self { folder: cache_dir.join(name), locks, cache, repo, locking: fs::File::try_lock }
    }

    /// The commit that `revision` meant when it was last looked up; a commit means itself.
    pub(super) fn commit(&self, revision: &str) -> Option<String> {
        let from_ref = fs::read_to_string(self.folder.join("refs").join(revision)).ok();
        match from_ref.map(|commit| commit.trim().to_owned()) {
            Some(commit) if is_path_word(&commit) => Some(commit),
            _ => (is_path_word(revision) && self.snapshot(revision).is_dir()).then(|| revision.to_owned()),
        }
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
        self.cache.repo(self.repo.clone()).pointer_path(commit)
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
}

/// Whether a word from outside (a commit, an etag) is one harmless path component.
pub(super) fn is_path_word(word: &str) -> bool {
    !word.is_empty()
        && word.len() <= 128
        && !word.starts_with('.')
        && word.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
}

#[cfg(test)]
mod tests {
    use super::*;

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
