//! Downloads from the Hub into the cache.
//!
//! The HTTP requests are made here with `ureq`: hf-hub 0.5 checks neither status nor size nor checksum, and 1.0 does not
//! resume an interrupted download.

mod address;
mod agent;
mod blobs;
mod checksum;
mod client;
mod file;
mod partial;
mod refusal;
mod transfer;

pub(super) use blobs::Locking;

use super::cache::RepoCache;
use super::repository::{first_shard, read_shards, resolved};
use super::select::{self, Selection, Weights};
use super::{HubConfig, HubModel, ModelFiles, Progress, ResolvedModel};
use crate::{Error, Result};

use client::{Client, RepoInfo};
use file::Downloader;

/// Asks the Hub for the model and downloads what is missing. Where the Hub cannot be asked, the copy `cached` is used.
pub(super) fn up_to_date(
    model: &HubModel,
    cached: Result<ResolvedModel, String>,
    cache: &RepoCache,
    config: &HubConfig,
    progress: &dyn Progress,
) -> Result<ResolvedModel> {
    let client = Client::new(config, model)?;
    let info = match &cached {
        // A user with the model should not wait for a network that is down.
        Ok(_) => client.repo_info(),
        Err(_) => client.with_retries(|| client.repo_info()),
    };
    match (info, cached) {
        (Ok(info), _) => download(model, &info, &client, cache, config, progress),
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
            first_shard(cache, commit, &parts)?
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
