//! Models on the Hub: the copy in the cache, or what the Hub has now.

use super::cache::RepoCache;
use super::select::{self, Selection, Weights};
use super::{HubConfig, HubModel, ModelFiles, Progress, ResolvedModel, download, source};
use crate::{Error, ErrorKind, Result};

/// Bytes of a list of shards.
const MAX_INDEX_BYTES: u64 = 64 << 20;

pub(super) fn resolve_hub(
    model: &HubModel,
    config: &HubConfig,
    progress: &dyn Progress,
) -> Result<ResolvedModel> {
    source::check_revision(&model.revision)?;
    let cache = RepoCache::new(&config.cache_dir, &model.repo);
    let cached = find_cached(model, &cache);
    if config.offline {
        return cached.map_err(|why| {
            Error::new(ErrorKind::Unavailable, format!("{why}, and HF_HUB_OFFLINE forbids the download"))
                .with_hint(format!(
                    "unset HF_HUB_OFFLINE, or copy the model into `{}`",
                    config.cache_dir.display()
                ))
        });
    }
    download::up_to_date(model, cached, &cache, config, progress)
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
        Selection::Gguf(parts) => first_shard(cache, &commit, &parts),
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

pub(super) fn read_shards(
    model: &HubModel,
    cache: &RepoCache,
    commit: &str,
    index: &str,
) -> Result<Vec<String>> {
    let path = cache.snapshot_file(commit, index);
    let text = crate::files::read(&path, MAX_INDEX_BYTES)
        .map_err(|source| Error::io(format_args!("cannot read `{}`", path.display()), source))?;
    select::shards(model, &text)
}

pub(super) fn first_shard(cache: &RepoCache, commit: &str, parts: &[String]) -> Result<ModelFiles> {
    let first = parts.first().ok_or_else(|| Error::internal("a GGUF model without files was selected"))?;
    Ok(ModelFiles::Gguf(cache.snapshot_file(commit, first)))
}

pub(super) fn resolved(model: &HubModel, files: ModelFiles, commit: &str) -> ResolvedModel {
    let display_name = match &model.gguf {
        Some(gguf) => format!("{}:{gguf}", model.repo),
        None => model.repo.to_string(),
    };
    ResolvedModel { display_name, files, revision: Some(commit.to_owned()), notice: None }
}
