//! The store of a model's prefixes: the conditions under which a block is valid.

use super::LlmOptions;
use super::load::OpenedModel;
use crate::config::EngineConfig;
use crate::demo;
use crate::prefix_store::{LoadedFile, PrefixStore, StoreOptions};
use crate::runner::{ModelRunner, Probe, Runner};
use crate::{ErrorKind, Result};

pub(super) use crate::prefix_store::MAX_QUEUED_BYTES;

/// Opens the directory and computes the probe, and gives the seconds that a step took in it. The weights are hashed in the
/// background. None, with a notice, if the
/// system does not let this process use the directory.
///
/// # Errors
/// Those of [`ModelRunner::probe`], or if the directory is something else.
pub(super) fn open(
    store: &StoreOptions,
    opened: &OpenedModel,
    options: &LlmOptions,
    engine: &EngineConfig,
    runner: &mut ModelRunner,
) -> Result<Option<(PrefixStore, f64)>> {
    let Probe { bytes: probe, step_seconds } =
        runner.probe(engine.prompt_group, engine.max_num_batched_tokens)?;
    let cache = runner.kv_cache();
    let (cache, block_bytes) =
        cache.map(|cache| (format!("{:?}", cache.dtype()), cache.block_bytes())).unwrap_or_default();
    // Rotation and other differences in computation with the same weights. The probe is short: differences that only
    // long contexts show change the version instead.
    let version = env!("CARGO_PKG_VERSION");
    let text = format!(
        "{:?}",
        (version, &opened.config, cache, engine.prompt_group, options.quantization, options.dtype)
    );
    let files: Vec<LoadedFile> = opened
        .checkpoint
        .file_stamps()
        .into_iter()
        .map(|stamp| (stamp.path.clone(), stamp.len, stamp.modified))
        .collect();
    let (block_size, built_in) = (engine.block_size, if files.is_empty() { demo::MODEL } else { &[] });
    let opened = PrefixStore::open(store, block_size, block_bytes, move |parts| {
        let block_size = (block_size as u64).to_le_bytes();
        parts.fingerprint(&files, &[text.as_bytes(), &probe, &block_size, built_in])
    });
    match opened {
        Err(error) if matches!(error.kind(), ErrorKind::Io | ErrorKind::NotFound) => {
            (store.on_notice)(&format!("prefixes are not stored: {error}"));
            Ok(None)
        }
        opened => opened.map(|store| Some((store, step_seconds))),
    }
}
