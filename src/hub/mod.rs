//! Turns a `--model` argument into files on disk, downloading them if need be.
//!
//! [`ModelSource::parse`] decides what the argument means, [`resolve`] gets the files. Downloads go
//! into the cache that the Hugging Face libraries share, so a model fetched by one program is there for
//! all, and a model that is there needs no network.
//!
//! The HTTP requests are made here with `ureq` and not by the `hf-hub` crate: its version 1.0 writes
//! whatever a server answers without a look at the status, does not continue an interrupted download, and
//! brings 130 crates.
//!
//! This module knows nothing of what is inside the files.

pub mod alias;

mod address;
mod agent;
mod cache;
mod checksum;
mod client;
mod config;
mod download;
pub mod inventory;
mod partial;
mod progress;
mod refusal;
mod select;
mod source;
mod transfer;

use std::path::{Path, PathBuf};

pub use config::{HubConfig, Token};
pub use progress::{NoProgress, Progress};
pub use source::{HubModel, ModelSource, RepoId};

use cache::RepoCache;
use client::{Client, RepoInfo};
use download::Downloader;
use select::{Selection, Weights};

use crate::{Error, ErrorKind, Result};

/// A model whose files are on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResolvedModel {
    /// What to call the model: `org/name`, `org/name:Q4_K_M`, the name of a file or folder, or `demo`.
    pub display_name: String,
    /// Where its files are.
    pub files: ModelFiles,
    /// The commit, for a model from the Hub.
    pub revision: Option<String>,
    /// What the user should be told although it worked: that the Hub could not be asked and an older
    /// copy is used.
    pub notice: Option<String>,
}

/// Where the files of a model are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelFiles {
    /// In the binary itself.
    Demo,
    /// A GGUF file; of a split one, the first part, with the others beside it.
    Gguf(PathBuf),
    /// A folder with `config.json` and the weights as safetensors.
    Folder(PathBuf),
}

/// Gets the files of a model.
///
/// A model from the Hub is looked up there first, so that a branch is up to date. If the Hub cannot be
/// asked, or `config` says offline, the copy in the cache is used. Only missing files are downloaded,
/// and only those that the engine reads.
///
/// # Errors
/// - [`ErrorKind::NotFound`]: no such model, revision, GGUF type, file or folder;
/// - [`ErrorKind::Unauthorized`]: a gated or private model, no token or a wrong one;
/// - [`ErrorKind::RateLimited`]: the Hub refuses more requests for now;
/// - [`ErrorKind::Unavailable`]: the network or the Hub fails, or it must not be asked, and the cache
///   does not have the model;
/// - [`ErrorKind::Unsupported`] and [`ErrorKind::InvalidModel`]: the repository holds nothing that can be
///   loaded, or not all of it;
/// - [`ErrorKind::Io`]: the disk is full or cannot be written.
///
/// What was downloaded before an error is kept, and the next call continues there.
pub fn resolve(source: &ModelSource, config: &HubConfig, progress: &dyn Progress) -> Result<ResolvedModel> {
    let (display_name, files) = match source {
        ModelSource::Hub(model) => return resolve_hub(model, config, progress),
        ModelSource::Demo => (alias::DEMO.to_owned(), ModelFiles::Demo),
        ModelSource::GgufFile(path) => (name_of(path, Path::file_stem), ModelFiles::Gguf(path.clone())),
        ModelSource::Folder(path) => (name_of(path, Path::file_name), resolve_folder(path)?),
    };
    Ok(ResolvedModel { display_name, files, revision: None, notice: None })
}

fn name_of(path: &Path, part: fn(&Path) -> Option<&std::ffi::OsStr>) -> String {
    // `.` and `..` have no name of their own.
    let full = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    part(path).or_else(|| part(&full)).unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
}

fn resolve_folder(folder: &Path) -> Result<ModelFiles> {
    if folder.join("config.json").is_file() {
        return Ok(ModelFiles::Folder(folder.to_owned()));
    }
    let mut files = Vec::new();
    cache::list_files(folder, "", 0, &mut files);
    select::only_gguf(&folder.display().to_string(), &files).map(|file| ModelFiles::Gguf(folder.join(file)))
}

fn resolve_hub(model: &HubModel, config: &HubConfig, progress: &dyn Progress) -> Result<ResolvedModel> {
    source::check_revision(&model.revision)?;
    let cache = RepoCache::new(&config.cache_dir, &model.repo);
    let cached = find_cached(model, &cache);
    if config.offline {
        return cached.map_err(|why| {
            Error::new(ErrorKind::Unavailable, format!("{why}, and HF_HUB_OFFLINE forbids to download it"))
                .with_hint(format!(
                    "unset HF_HUB_OFFLINE, or copy the model into `{}`",
                    config.cache_dir.display()
                ))
        });
    }
    let client = Client::new(config, model)?;
    let info = match &cached {
        // Whoever has the model already should not wait for a network that is down.
        Ok(_) => client.repo_info(),
        Err(_) => client.with_retries(|| client.repo_info()),
    };
    match (info, cached) {
        (Ok(info), _) => download(model, &info, &client, &cache, config, progress),
        (Err(error), Ok(found)) => {
            let notice = format!("using the copy of `{}` in the cache, because {error}", found.display_name);
            Ok(ResolvedModel { notice: Some(notice), ..found })
        }
        (Err(error), Err(_)) => Err(error),
    }
}

fn download(
    model: &HubModel,
    info: &RepoInfo,
    client: &Client<'_>,
    cache: &RepoCache,
    config: &HubConfig,
    progress: &dyn Progress,
) -> Result<ResolvedModel> {
    let commit = &info.commit;
    let downloader = Downloader { client, cache, config, progress, commit };
    let fetch_all = |files: &[String]| files.iter().try_for_each(|file| downloader.fetch(file));
    let files = match select::select(model, &info.files)? {
        Selection::Gguf(parts) => {
            fetch_all(&parts)?;
            first_part(cache, commit, &parts)?
        }
        Selection::Folder { companions, weights } => {
            fetch_all(&companions)?;
            match weights {
                Weights::Files(files) => fetch_all(&files)?,
                Weights::Index(index) => {
                    downloader.fetch(&index)?;
                    let shards = read_shards(model, cache, commit, &index)?;
                    if let Some(missing) = shards.iter().find(|shard| !info.files.contains(shard)) {
                        return Err(Error::invalid_model(format!(
                            "`{index}` of `{}` names `{missing}`, which the repository does not have",
                            model.repo
                        )));
                    }
                    fetch_all(&shards)?;
                }
            }
            ModelFiles::Folder(cache.snapshot(commit))
        }
    };
    // Only now, so that a branch in the cache never points to a commit that is not all there.
    cache.set_commit(&model.revision, commit)?;
    Ok(resolved(model, files, commit))
}

/// The model as the cache has it, or a clause that says what is missing.
fn find_cached(model: &HubModel, cache: &RepoCache) -> Result<ResolvedModel, String> {
    let HubModel { repo, revision, .. } = model;
    let Some(commit) = cache.commit(revision) else {
        return Err(match revision.as_str() {
            "main" => format!("the model `{repo}` is not in the cache"),
            _ => format!("the revision `{revision}` of `{repo}` is not in the cache"),
        });
    };
    let incomplete =
        |what: &dyn std::fmt::Display| format!("the copy of `{repo}` in the cache is not complete ({what})");
    let present = cache.files(&commit);
    let files = match select::select(model, &present).map_err(|error| incomplete(&error))? {
        Selection::Gguf(parts) => first_part(cache, &commit, &parts),
        Selection::Folder { weights, .. } => {
            if let Weights::Index(index) = weights {
                let shards =
                    read_shards(model, cache, &commit, &index).map_err(|error| incomplete(&error))?;
                if let Some(missing) = shards.iter().find(|shard| !present.contains(shard)) {
                    return Err(incomplete(&format_args!("`{missing}` is missing")));
                }
            }
            Ok(ModelFiles::Folder(cache.snapshot(&commit)))
        }
    };
    files.map(|files| resolved(model, files, &commit)).map_err(|error| incomplete(&error))
}

fn read_shards(model: &HubModel, cache: &RepoCache, commit: &str, index: &str) -> Result<Vec<String>> {
    let path = cache.snapshot_file(commit, index);
    let text = std::fs::read(&path)
        .map_err(|source| Error::io(format_args!("cannot read `{}`", path.display()), source))?;
    select::shards(model, &text)
}

fn first_part(cache: &RepoCache, commit: &str, parts: &[String]) -> Result<ModelFiles> {
    let first = parts.first().ok_or_else(|| Error::internal("a GGUF model without files was selected"))?;
    Ok(ModelFiles::Gguf(cache.snapshot_file(commit, first)))
}

fn resolved(model: &HubModel, files: ModelFiles, commit: &str) -> ResolvedModel {
    let display_name = match &model.gguf {
        Some(gguf) => format!("{}:{gguf}", model.repo),
        None => model.repo.to_string(),
    };
    ResolvedModel { display_name, files, revision: Some(commit.to_owned()), notice: None }
}
