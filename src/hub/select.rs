//! Decides from a list of file names which files make up a model.
//!
//! Pure: the list may come from the Hub or from a cached snapshot, and no file is read or fetched here. Names are
//! checked before any other use, because they become paths.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;

use super::source::HubModel;
use crate::{Error, ErrorKind, Result};

/// A model's files in addition to its weights, as far as the repository has them.
const COMPANIONS: &[&str] = &[
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "quantize_config.json",
    "quant_config.json",
    "hf_quant_config.json",
];

const INDEX: &str = "model.safetensors.index.json";

/// The files of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Selection {
    /// The shards of one GGUF model, in order.
    Gguf(Vec<String>),
    /// A folder with `config.json`: its small files and its weights.
    Folder { companions: Vec<String>, weights: Weights },
}

/// The weight files of a folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Weights {
    /// These files.
    Files(Vec<String>),
    /// The files that this index names.
    Index(String),
}

/// Picks the files of `model` out of `files`.
///
/// # Errors
/// [`ErrorKind::NotFound`] if no GGUF file or more than one has the requested type, with a list of the existing ones;
/// [`ErrorKind::Unsupported`] if all weights are in unsupported formats; [`ErrorKind::InvalidModel`] if shards are
/// missing.
pub(super) fn select(model: &HubModel, files: &[String]) -> Result<Selection> {
    let files: BTreeSet<&str> = files.iter().map(String::as_str).filter(|file| is_safe(file)).collect();
    let gguf = gguf_models(&files);
    if let Some(wanted) = &model.gguf {
        return pick_gguf(model, wanted, &gguf).map(Selection::Gguf);
    }
    if let Some(weights) = safetensors(model, &files)?
        && files.contains("config.json")
    {
        let companions = files
            .iter()
            .filter(|file| COMPANIONS.contains(file) || file.starts_with("chat_template."))
            .map(|&file| file.to_owned())
            .collect();
        return Ok(Selection::Folder { companions, weights });
    }
    match gguf.iter().next() {
        Some((stem, shards)) if gguf.len() == 1 => complete_shards(model, stem, shards).map(Selection::Gguf),
        Some(_) => Err(Error::new(
            ErrorKind::NotFound,
            format!("`{}` has several GGUF files and none was chosen: {}", model.repo, names(&gguf)),
        )
        .with_hint(format!("choose one by its type, such as {}:Q4_K_M", model.repo))),
        None => Err(Error::unsupported(format!(
            "`{}` has neither config.json with .safetensors weights nor a .gguf file",
            model.repo
        ))
        .with_hint("look for a version of the model in one of these formats")),
    }
}

/// The shard names in the text of a safetensors index.
///
/// # Errors
/// [`ErrorKind::InvalidModel`] if it is not an index, or names a file outside the folder.
pub(super) fn shards(model: &HubModel, index: &[u8]) -> Result<Vec<String>> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let index: Index = serde_json::from_slice(index).map_err(|source| {
        Error::invalid_model(format!("`{INDEX}` of `{}` cannot be read: {source}", model.repo))
            .with_source(source)
    })?;
    let shards: BTreeSet<String> = index.weight_map.into_values().collect();
    if let Some(shard) = shards.iter().find(|shard| !is_safe(shard)) {
        return Err(Error::invalid_model(format!("`{INDEX}` of `{}` names the file `{shard}`", model.repo)));
    }
    Ok(shards.into_iter().collect())
}

/// Whether a name from outside may become a path below a snapshot folder.
fn is_safe(file: &str) -> bool {
    file.len() <= 512
        && file.split('/').all(|shard| !shard.is_empty() && shard != "." && shard != "..")
        && !file.contains(['\\', ':'])
        && !file.chars().any(char::is_control)
}

/// The weights next to `config.json`. `original/` and other folders hold the same weights in other layouts, and so does
/// a `consolidated.safetensors`.
fn safetensors(model: &HubModel, files: &BTreeSet<&str>) -> Result<Option<Weights>> {
    if files.contains("model.safetensors") {
        return Ok(Some(Weights::Files(vec!["model.safetensors".to_owned()])));
    }
    if files.contains(INDEX) {
        return Ok(Some(Weights::Index(INDEX.to_owned())));
    }
    let mut groups: BTreeMap<&str, Vec<Shard<'_>>> = BTreeMap::new();
    for shard in files.iter().filter_map(|&file| Shard::of(file, ".safetensors")) {
        let is_other = |prefix| shard.stem.starts_with(prefix);
        if !shard.stem.contains('/') && !is_other("consolidated") && !is_other("adapter") {
            groups.entry(shard.stem).or_default().push(shard);
        }
    }
    let mut weights = Vec::new();
    for (stem, shards) in &groups {
        weights.extend(complete_shards(model, stem, shards)?);
    }
    Ok((!weights.is_empty()).then_some(Weights::Files(weights)))
}

/// A weight file as one of `total` shards of the model `stem`. A file that is not split is its only shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Shard<'a> {
    number: u32,
    total: u32,
    stem: &'a str,
    file: &'a str,
}

impl<'a> Shard<'a> {
    /// Splits `stem-00002-of-00003.gguf`.
    fn of(file: &'a str, extension: &str) -> Option<Self> {
        let cut = file.len().checked_sub(extension.len())?;
        if !file.is_char_boundary(cut) || !file[cut..].eq_ignore_ascii_case(extension) {
            return None;
        }
        let name = &file[..cut];
        let split = || {
            let (name, total) = name.rsplit_once("-of-")?;
            let (stem, number) = name.rsplit_once('-')?;
            let count = |digits: &str| {
                (digits.len() == 5 && digits.bytes().all(|b| b.is_ascii_digit()))
                    .then(|| digits.parse().ok())?
            };
            Some(Self { number: count(number)?, total: count(total)?, stem, file })
        };
        Some(split().unwrap_or(Self { number: 1, total: 1, stem: name, file }))
    }
}

/// All GGUF language models by stem. Vision projectors and importance matrices have the extension too.
fn gguf_models<'a>(files: &BTreeSet<&'a str>) -> BTreeMap<&'a str, Vec<Shard<'a>>> {
    let mut models: BTreeMap<&str, Vec<Shard<'_>>> = BTreeMap::new();
    for shard in files.iter().filter_map(|&file| Shard::of(file, ".gguf")) {
        let name = shard.stem.rsplit('/').next().unwrap_or(shard.stem).to_ascii_lowercase();
        if !name.contains("mmproj") && !name.contains("imatrix") {
            models.entry(shard.stem).or_default().push(shard);
        }
    }
    models
}

fn pick_gguf(model: &HubModel, wanted: &str, gguf: &BTreeMap<&str, Vec<Shard<'_>>>) -> Result<Vec<String>> {
    if gguf.is_empty() {
        return Err(Error::new(
            ErrorKind::NotFound,
            format!("`{}` has no GGUF files, so there is no `{wanted}`", model.repo),
        )
        .with_hint(format!("omit :{wanted}, or find a repository whose name ends with -GGUF")));
    }
    let matching: BTreeMap<&str, Vec<Shard<'_>>> = gguf
        .iter()
        .filter(|(stem, shards)| has_type(stem, wanted) || shards.iter().any(|shard| shard.file == wanted))
        .map(|(&stem, shards)| (stem, shards.clone()))
        .collect();
    match matching.iter().next() {
        Some((stem, shards)) if matching.len() == 1 => complete_shards(model, stem, shards),
        Some(_) => Err(Error::new(
            ErrorKind::NotFound,
            format!("`{}` has several files of the type `{wanted}`: {}", model.repo, names(&matching)),
        )
        .with_hint(format!("name the file, as in {}:FILE.gguf", model.repo))),
        None => Err(Error::new(
            ErrorKind::NotFound,
            format!("`{}` has no GGUF file of the type `{wanted}`; it has {}", model.repo, names(gguf)),
        )
        .with_hint("choose one of these by its type or its name")),
    }
}

/// Whether the name has the type between separators: `Q4_K` is not in `x-Q4_K_M`.
fn has_type(stem: &str, wanted: &str) -> bool {
    let (stem, wanted) = (stem.to_ascii_lowercase(), wanted.to_ascii_lowercase());
    let in_word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    stem.match_indices(&wanted).any(|(start, _)| {
        let before = stem[..start].bytes().next_back();
        let after = stem[start + wanted.len()..].bytes().next();
        // Some repositories write `name_Q4_K_M`: an underscore may come before a type, never after.
        !before.is_some_and(|byte| byte.is_ascii_alphanumeric()) && !after.is_some_and(in_word)
    })
}

/// The text after the colon for each GGUF file of a repository: its type if it is unique, or else the name of the first
/// shard.
pub(super) fn gguf_names<'a>(files: &[&'a str]) -> BTreeMap<&'a str, String> {
    let models = gguf_models(&files.iter().copied().collect());
    let mut names = BTreeMap::new();
    for (stem, shards) in &models {
        let kind = stem.rsplit(['-', '.', '/']).next().filter(|word| is_type(word));
        let kind = kind.filter(|kind| models.keys().filter(|other| has_type(other, kind)).count() == 1);
        let first = shards.iter().min().map_or(*stem, |shard| shard.file);
        let name = kind.unwrap_or(first);
        names.extend(shards.iter().map(|shard| (shard.file, name.to_owned())));
    }
    names
}

/// Whether this is a GGUF file that `wanted` names, by its type or its own name.
pub(super) fn is_gguf_of(file: &str, wanted: &str) -> bool {
    Shard::of(file, ".gguf").is_some_and(|shard| {
        let is_first = Shard::of(wanted, ".gguf").is_some_and(|other| other.stem == shard.stem);
        is_first || has_type(shard.stem, wanted)
    })
}

/// Whether a word looks like a type: letters and then a number of bits.
fn is_type(word: &str) -> bool {
    let word = word.to_ascii_lowercase();
    let kinds = ["q", "iq", "tq", "f", "bf", "mxfp"];
    kinds.iter().any(|kind| {
        word.strip_prefix(kind).is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
    })
}

/// The files of one model in the order of their numbers, none missing.
fn complete_shards(model: &HubModel, stem: &str, shards: &[Shard<'_>]) -> Result<Vec<String>> {
    let mut shards = shards.to_vec();
    shards.sort_unstable();
    let total = shards.first().map_or(0, |shard| shard.total);
    let complete =
        shards.iter().zip(1..).all(|(shard, number)| shard.number == number && shard.total == total)
            && shards.len() == total as usize;
    if !complete {
        return Err(Error::invalid_model(format!(
            "`{stem}` of `{}` should have {total} shards, but the files are {}",
            model.repo,
            shards.iter().map(|shard| shard.file).collect::<Vec<_>>().join(", ")
        )));
    }
    Ok(shards.into_iter().map(|shard| shard.file.to_owned()).collect())
}

/// The names for a message, cut where a list would fill the screen.
fn names(models: &BTreeMap<&str, Vec<Shard<'_>>>) -> String {
    const MAX_NAMES: usize = 40;
    let mut text =
        models.keys().take(MAX_NAMES).map(|stem| format!("{stem}.gguf")).collect::<Vec<_>>().join(", ");
    if models.len() > MAX_NAMES {
        text.push_str(&format!(" and {} more", models.len() - MAX_NAMES));
    }
    text
}

/// The first shard of the only GGUF model among the files of a folder on disk.
///
/// # Errors
/// [`ErrorKind::NotFound`] if there is none or more than one.
pub(super) fn only_gguf(folder: &str, files: &[String]) -> Result<String> {
    let files: BTreeSet<&str> = files.iter().map(String::as_str).collect();
    let models = gguf_models(&files);
    let first = models.values().flatten().min().map(|shard| shard.file.to_owned());
    match first {
        Some(file) if models.len() == 1 => Ok(file),
        Some(_) => Err(Error::new(
            ErrorKind::NotFound,
            format!("the folder `{folder}` has no config.json, and several GGUF files: {}", names(&models)),
        )
        .with_hint("give the file itself")),
        None => Err(Error::new(
            ErrorKind::NotFound,
            format!("the folder `{folder}` has neither config.json nor a .gguf file"),
        )
        .with_hint("give the folder that holds config.json and the .safetensors files")),
    }
}

#[cfg(test)]
#[path = "select_tests.rs"]
mod tests;
