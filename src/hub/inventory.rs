//! The contents of the cache: models, their sizes and last uses; and their removal.
//!
//! The cache belongs to all programs that use the Hub. Several files of several revisions may link to one blob, so its bytes
//! count once, and it goes with the last of these files.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, Metadata};
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::cache::RepoCache;
use super::select;
use super::source::{HubModel, RepoId};
use crate::{Error, ErrorKind, Result};

/// A model in the cache, with the name that `--model` takes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CachedModel {
    /// `org/name`, or `org/name:TYPE` for a GGUF file.
    pub name: String,
    /// Bytes of its files, each once.
    pub num_bytes: u64,
    /// When one of them was last read or written, as far as the file system reports it.
    pub last_used: Option<SystemTime>,
    /// Whether this is the rest of a download that was broken off.
    pub is_partial: bool,
}

/// A planned removal; nothing is removed yet.
#[derive(Debug)]
pub struct Removal {
    /// The model, as `--model` names it.
    pub name: String,
    /// Bytes that are free afterwards.
    pub num_bytes: u64,
    cache: RepoCache,
    what: What,
}

#[derive(Debug)]
enum What {
    Everything,
    /// Names in snapshots, data without other names, and commits that become empty.
    Files {
        names: Vec<PathBuf>,
        blobs: BTreeSet<PathBuf>,
        commits: Vec<String>,
    },
}

/// A file of a snapshot.
#[derive(Debug, Clone)]
struct CachedFile {
    commit: String,
    /// Within the repository.
    name: String,
    path: PathBuf,
    /// Where its data is: a blob, or the file itself.
    data: PathBuf,
    num_bytes: u64,
    last_used: Option<SystemTime>,
}

/// The models in the cache, by name.
///
/// # Errors
/// [`ErrorKind::Io`] if the folder is there and cannot be read.
pub fn list(cache_dir: &Path) -> Result<Vec<CachedModel>> {
    let entries = match fs::read_dir(cache_dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => {
            return Err(Error::io(format_args!("cannot read the folder `{}`", cache_dir.display()), error));
        }
    };
    let repo = |entry: fs::DirEntry| {
        let name = entry.file_name().into_string().ok()?;
        RepoId::parse(&name.strip_prefix("models--")?.replacen("--", "/", 1)).ok()
    };
    let mut models: Vec<CachedModel> =
        entries.flatten().filter_map(repo).flat_map(|repo| models(cache_dir, &repo)).collect();
    models.sort_by(|left, right| left.name.cmp(&right.name));
    Ok(models)
}

/// Plans the removal of a model: of all its revisions, or of one.
///
/// # Errors
/// [`ErrorKind::NotFound`] if it is not in the cache, with the repository's cached models; [`ErrorKind::Unsupported`]
/// if its folder is a link to another folder.
pub fn plan_removal(cache_dir: &Path, model: &HubModel, revision: Option<&str>) -> Result<Removal> {
    let cache = RepoCache::new(cache_dir, &model.repo);
    let name = match &model.gguf {
        Some(gguf) => format!("{}:{gguf}", model.repo),
        None => model.repo.to_string(),
    };
    let not_found = |what: String| {
        let there: Vec<String> = models(cache_dir, &model.repo).into_iter().map(|model| model.name).collect();
        let hint = match there.is_empty() {
            true => "`tinyvllm list` shows the downloaded models".to_owned(),
            false => format!("there is {}", there.join(", ")),
        };
        Error::new(ErrorKind::NotFound, what).with_hint(hint)
    };
    let folder = cache.folder();
    match fs::symlink_metadata(folder) {
        Err(_) => return Err(not_found(format!("the model `{name}` is not in the cache"))),
        Ok(metadata) if !metadata.is_dir() => {
            let message = format!("`{}` is a link to another folder, which is kept", folder.display());
            return Err(Error::unsupported(message).with_hint("remove its target, and the link"));
        }
        Ok(_) => {}
    }
    let files = files(&cache);
    let commit = match revision {
        None => None,
        Some(revision) => Some(cache.commit(revision).ok_or_else(|| {
            not_found(format!("the revision `{revision}` of `{}` is not in the cache", model.repo))
        })?),
    };
    let is_meant = |file: &CachedFile| {
        commit.as_ref().is_none_or(|commit| file.commit == *commit)
            && model.gguf.as_ref().is_none_or(|wanted| select::is_gguf_of(&file.name, wanted))
    };
    let (gone, kept): (Vec<_>, Vec<_>) = files.into_iter().partition(is_meant);
    if model.gguf.is_some() && gone.is_empty() {
        return Err(not_found(format!("the model `{name}` is not in the cache")));
    }
    if kept.is_empty() {
        return Ok(Removal { name, num_bytes: everything(&cache), cache, what: What::Everything });
    }
    let used: BTreeSet<&Path> = kept.iter().map(|file| file.data.as_path()).collect();
    let unused = gone.iter().filter(|file| !used.contains(file.data.as_path()));
    let blobs: BTreeMap<PathBuf, u64> = unused.map(|file| (file.data.clone(), file.num_bytes)).collect();
    let left: BTreeSet<&str> = kept.iter().map(|file| file.commit.as_str()).collect();
    let commits: BTreeSet<&String> = gone.iter().map(|file| &file.commit).collect();
    let commits = commits.into_iter().filter(|commit| !left.contains(commit.as_str())).cloned().collect();
    let num_bytes = blobs.values().sum();
    let blobs = blobs.into_keys().filter(|blob| blob.starts_with(cache.blobs())).collect();
    let names = gone.into_iter().map(|file| file.path).collect();
    Ok(Removal { name, num_bytes, cache, what: What::Files { names, blobs, commits } })
}

impl Removal {
    /// Removes it.
    ///
    /// # Errors
    /// [`ErrorKind::Io`] if a file cannot be removed; earlier removals persist.
    pub fn run(self) -> Result<()> {
        let removing = |path: &Path, result: io::Result<()>| match result {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(Error::io(format_args!("cannot remove `{}`", path.display()), error))
            }
            _ => Ok(()),
        };
        match &self.what {
            What::Everything => {
                let folder = self.cache.folder();
                removing(folder, fs::remove_dir_all(folder))?;
                removing(self.cache.locks(), fs::remove_dir_all(self.cache.locks()))
            }
            What::Files { names, blobs, commits } => {
                // Names first: a name whose data is gone would be taken for a broken download.
                for path in names.iter().chain(blobs) {
                    removing(path, fs::remove_file(path))?;
                }
                for commit in commits {
                    let folder = self.cache.snapshot(commit);
                    removing(&folder, fs::remove_dir_all(&folder))?;
                    for path in self.cache.refs_to(commit) {
                        removing(&path, fs::remove_file(&path))?;
                    }
                }
                Ok(())
            }
        }
    }
}

/// The runnable models of a repository, and the incomplete ones.
fn models(cache_dir: &Path, repo: &RepoId) -> Vec<CachedModel> {
    let cache = RepoCache::new(cache_dir, repo);
    let files = files(&cache);
    let names: Vec<&str> = files.iter().map(|file| file.name.as_str()).collect();
    let types = select::gguf_names(&names);
    let mut groups: BTreeMap<String, Vec<&CachedFile>> = BTreeMap::new();
    for file in &files {
        let name = match types.get(file.name.as_str()) {
            Some(gguf) => format!("{repo}:{gguf}"),
            None => repo.to_string(),
        };
        groups.entry(name).or_default().push(file);
    }
    // Texts next to GGUF files are no model.
    if !types.is_empty() && !names.iter().any(|name| name.ends_with(".safetensors")) {
        groups.remove(repo.as_str());
    }
    let model = |(name, files): (String, Vec<&CachedFile>)| {
        let data: BTreeMap<&Path, u64> =
            files.iter().map(|file| (file.data.as_path(), file.num_bytes)).collect();
        CachedModel {
            name,
            num_bytes: data.values().sum(),
            last_used: files.iter().filter_map(|file| file.last_used).max(),
            is_partial: false,
        }
    };
    let mut models: Vec<CachedModel> = groups.into_iter().map(model).collect();
    let partial: Vec<Metadata> = cache.incomplete().filter_map(|path| fs::metadata(path).ok()).collect();
    if !partial.is_empty() {
        models.push(CachedModel {
            name: repo.to_string(),
            num_bytes: partial.iter().map(Metadata::len).sum(),
            last_used: partial.iter().filter_map(last_used).max(),
            is_partial: true,
        });
    }
    models
}

/// The files of all revisions whose data is there.
fn files(cache: &RepoCache) -> Vec<CachedFile> {
    let mut files = Vec::new();
    for commit in cache.commits() {
        for name in cache.files(&commit) {
            let path = cache.snapshot_file(&commit, &name);
            let Ok(metadata) = fs::metadata(&path) else { continue };
            let data = fs::canonicalize(&path).unwrap_or_else(|_| path.clone());
            files.push(CachedFile {
                commit: commit.clone(),
                name,
                path,
                data,
                num_bytes: metadata.len(),
                last_used: last_used(&metadata),
            });
        }
    }
    files
}

fn last_used(metadata: &Metadata) -> Option<SystemTime> {
    metadata.accessed().ok().max(metadata.modified().ok())
}

/// Bytes of all files in the folder of a repository, without the targets of links.
fn everything(cache: &RepoCache) -> u64 {
    fn sum(folder: &Path) -> u64 {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        let bytes = |entry: fs::DirEntry| match fs::symlink_metadata(entry.path()) {
            Ok(metadata) if metadata.is_dir() => sum(&entry.path()),
            Ok(metadata) if metadata.is_file() => metadata.len(),
            _ => 0,
        };
        entries.map(bytes).sum()
    }
    sum(cache.folder())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A repository with files: commit, name, blob.
    fn repo(folder: &Path, name: &str, files: &[(&str, &str, &str)]) -> RepoCache {
        let cache = RepoCache::new(folder, &RepoId::parse(name).unwrap());
        for (commit, file, etag) in files {
            fs::create_dir_all(cache.blobs()).unwrap();
            fs::write(cache.blob(etag), "x".repeat(etag.len())).unwrap();
            cache.link(commit, file, etag).unwrap();
        }
        cache
    }

    fn model(name: &str) -> HubModel {
        match super::super::ModelSource::parse(name, None).unwrap() {
            super::super::ModelSource::Hub(model) => model,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn blobs_count_once_and_gguf_files_are_models_of_their_own() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(list(&folder.path().join("none")).unwrap(), []);
        repo(
            folder.path(),
            "org/folder",
            &[
                ("c1", "config.json", "four"),
                ("c1", "model.safetensors", "eightbit"),
                ("c2", "config.json", "five5"),
                ("c2", "model.safetensors", "eightbit"),
            ],
        );
        let gguf = repo(
            folder.path(),
            "org/name-GGUF",
            &[
                ("c1", "README.md", "readme"),
                ("c1", "name-Q4_K_M.gguf", "three"),
                ("c1", "name.q8_0-00001-of-00002.gguf", "part1"),
                ("c1", "name.q8_0-00002-of-00002.gguf", "part-two"),
                ("c1", "odd.gguf", "odd"),
            ],
        );
        fs::write(gguf.blob("more.1.incomplete"), "xy").unwrap();
        fs::create_dir(folder.path().join("datasets--org--data")).unwrap();
        let found: Vec<_> = list(folder.path())
            .unwrap()
            .into_iter()
            .map(|model| {
                assert!(model.last_used.is_some());
                (model.name, model.num_bytes, model.is_partial)
            })
            .collect();
        let row = |name: &str, num_bytes, is_partial| (name.to_owned(), num_bytes, is_partial);
        assert_eq!(
            found,
            [
                row("org/folder", 4 + 8 + 5, false),
                row("org/name-GGUF", 2, true),
                row("org/name-GGUF:Q4_K_M", 5, false),
                row("org/name-GGUF:odd.gguf", 3, false),
                row("org/name-GGUF:q8_0", 5 + 8, false),
            ]
        );
    }

    #[test]
    fn what_another_revision_needs_stays() {
        let folder = tempfile::tempdir().unwrap();
        let outside = folder.path().join("outside");
        fs::write(&outside, "not ours").unwrap();
        let cache = repo(
            folder.path(),
            "org/name",
            &[("c1", "a.safetensors", "shared"), ("c1", "b.json", "old"), ("c2", "a.safetensors", "shared")],
        );
        cache.set_commit("main", "c2").unwrap();
        cache.set_commit("v1", "c1").unwrap();
        #[cfg(unix)]
        std::os::unix::fs::symlink(&outside, cache.snapshot_file("c1", "elsewhere")).unwrap();
        let plan = |name: &str, revision| plan_removal(folder.path(), &model(name), revision);
        for (name, revision, words) in [
            ("org/none", None, "not in the cache"),
            ("org/name:Q8_0", None, "not in the cache"),
            ("org/name", Some("v9"), "v9"),
        ] {
            let error = plan(name, revision).unwrap_err();
            assert!(error.kind() == ErrorKind::NotFound && error.message().contains(words), "{error:?}");
        }
        let removal = plan("org/name", Some("v1")).unwrap();
        assert!(removal.num_bytes >= 3);
        removal.run().unwrap();
        assert!(!cache.snapshot("c1").exists() && !cache.blob("old").exists());
        assert_eq!((cache.commit("v1"), cache.commit("main").as_deref()), (None, Some("c2")));
        assert_eq!(fs::read_to_string(cache.snapshot_file("c2", "a.safetensors")).unwrap(), "xxxxxx");
        assert_eq!(fs::read_to_string(&outside).unwrap(), "not ours", "links lead nowhere");
        let removal = plan("org/name", None).unwrap();
        assert_eq!(removal.num_bytes, 6 + 2);
        removal.run().unwrap();
        assert!(!cache.folder().exists());
    }

    #[test]
    fn one_of_several_gguf_files_goes_alone() {
        let folder = tempfile::tempdir().unwrap();
        let cache = repo(
            folder.path(),
            "org/name",
            &[("c1", "n-Q4_0.gguf", "four"), ("c1", "n-Q8_0.gguf", "eight"), ("c2", "n-Q8_0.gguf", "eight")],
        );
        plan_removal(folder.path(), &model("org/name:q8_0"), None).unwrap().run().unwrap();
        assert!(!cache.blob("eight").exists() && !cache.snapshot("c2").exists());
        assert_eq!(cache.files("c1"), ["n-Q4_0.gguf"]);
        plan_removal(folder.path(), &model("org/name:q4_0"), None).unwrap().run().unwrap();
        assert!(!cache.folder().exists());
    }

    #[cfg(unix)]
    #[test]
    fn a_folder_that_is_a_link_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let cache = repo(folder.path(), "org/name", &[("c1", "a.gguf", "a")]);
        let elsewhere = folder.path().join("elsewhere");
        fs::rename(cache.folder(), &elsewhere).unwrap();
        std::os::unix::fs::symlink(&elsewhere, cache.folder()).unwrap();
        let error = plan_removal(folder.path(), &model("org/name"), None).unwrap_err();
        assert!(error.message().contains("link to another folder"), "{error:?}");
        assert!(elsewhere.join("blobs/a").exists());
    }
}
