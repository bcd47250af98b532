//! Hugging Face checkpoints: `model.safetensors`, or several shards with an index.
//!
//! `header.rs` reads a file, this module the folder.

mod header;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ops::Range;
use std::path::{Component, Path};
use std::sync::Arc;

use ::safetensors::Dtype;
use serde::Deserialize;

use self::header::parse_header;
use super::checkpoint::missing_shards;
use super::mapping::{FileStamp, Mapping};
use super::quantized::{ComponentTensor, PackedTensors, QuantConfig};
use super::{DType, RawTensor, SharedBytes, names};
use crate::{Error, Result, files};

/// The file of an unsharded checkpoint.
pub(super) const SINGLE_FILE: &str = "model.safetensors";
/// The list of shards of any other.
pub(super) const INDEX_FILE: &str = "model.safetensors.index.json";
/// The suffix of lists of shards, for any name of the model.
const INDEX_ENDING: &str = ".safetensors.index.json";
/// Beginnings of the names of files that are no model by themselves, or the same one with other names of tensors.
const NO_MODELS: [&str; 2] = ["adapter", "consolidated"];

/// Most bytes of an index: a few hundred for each of a hundred thousand tensors.
const MAX_INDEX_BYTES: u64 = 64 << 20;

/// All files of a checkpoint in safetensors format, mapped.
#[derive(Debug)]
pub(super) struct SafetensorsFiles {
    parts: Vec<Arc<Mapping>>,
    tensors: Vec<StoredTensor>,
    /// Canonical name → position in `tensors`.
    index: HashMap<String, usize>,
    packed: PackedTensors,
}

/// A tensor as a header describes it.
#[derive(Debug)]
pub(super) struct StoredTensor {
    /// The canonical name, or the file's own if it has none.
    pub(super) name: String,
    /// The file's own.
    file_name: String,
    pub(super) stored_type: Dtype,
    pub(super) shape: Vec<usize>,
    pub(super) range: Range<usize>,
    part: usize,
}

impl StoredTensor {
    /// The type as one that can be read, if it is.
    pub(super) fn dtype(&self) -> Option<DType> {
        match self.stored_type {
            Dtype::F32 => Some(DType::F32),
            Dtype::F16 => Some(DType::F16),
            Dtype::BF16 => Some(DType::BF16),
            _ => None,
        }
    }
}

#[derive(Deserialize)]
struct Index {
    /// Tensor → file name.
    weight_map: BTreeMap<String, String>,
}

impl SafetensorsFiles {
    /// True if `folder` has a checkpoint of this format.
    pub(super) fn are_in(folder: &Path) -> bool {
        let is_usual = [SINGLE_FILE, INDEX_FILE].iter().any(|name| folder.join(name).exists());
        // Alongside other models there may be such files too.
        is_usual
            || folder.join("config.json").exists()
                && Found::in_folder(folder).is_ok_and(|found| found.is_some())
    }

    /// What keeps the files in `folder` from being a checkpoint of this format, if it is one in part.
    pub(super) fn problem_in(folder: &Path) -> Option<Error> {
        Found::in_folder(folder).err()
    }

    /// Opens the checkpoint in `folder`, the single file if there is one. `config` has details of quantisation that
    /// tensors leave open.
    pub(super) fn open(folder: &Path, config: &QuantConfig) -> Result<Self> {
        let mut files = Self::open_files(folder)?;
        let part = |tensor: &StoredTensor| {
            let bytes = SharedBytes::new(&files.parts[tensor.part], tensor.range.clone());
            ComponentTensor::new(&tensor.file_name, tensor.stored_type, &tensor.shape, bytes)
        };
        let parts: Vec<_> = files.tensors.iter().map(part).collect();
        files.packed = PackedTensors::find(&parts, config);
        for (index, tensor) in files.tensors.iter().enumerate() {
            if files.packed.is_part(index) {
                files.index.remove(&tensor.name);
            }
        }
        Ok(files)
    }

    fn open_files(folder: &Path) -> Result<Self> {
        let mut files = Self {
            parts: Vec::new(),
            tensors: Vec::new(),
            index: HashMap::new(),
            packed: PackedTensors::default(),
        };
        let path = match Found::in_folder(folder)? {
            Some(Found::Files(names)) => {
                names.iter().try_for_each(|name| files.add(&folder.join(name)))?;
                return Ok(files);
            }
            Some(Found::Index(name)) => folder.join(name),
            None => folder.join(INDEX_FILE),
        };
        let index = read_index(&path)?;
        let shards: BTreeSet<&String> = index.weight_map.values().collect();
        let is_name = |shard: &str| {
            matches!(Path::new(shard).components().collect::<Vec<_>>()[..], [Component::Normal(_)])
        };
        if let Some(shard) = shards.iter().find(|shard| !is_name(shard)) {
            return Err(Error::invalid_model(format!(
                "{}: {shard:?} is not the name of a file in this folder",
                path.display()
            )));
        }
        let missing = shards.iter().filter(|shard| !folder.join(shard).exists());
        let missing: Vec<String> = missing.map(|shard| (*shard).clone()).collect();
        if !missing.is_empty() {
            return Err(missing_shards(folder, &missing)
                .with_hint(format!("fetch all files that {} names into one folder", path.display())));
        }
        for shard in shards {
            let start = files.tensors.len();
            files.add(&folder.join(shard))?;
            let present: BTreeSet<&str> =
                files.tensors[start..].iter().map(|tensor| tensor.name.as_str()).collect();
            let listed = index.weight_map.iter().filter(|(_, file)| *file == shard);
            for name in listed.map(|(name, _)| name) {
                let canonical = names::canonical(name);
                if !present.contains(canonical.as_deref().unwrap_or(name)) {
                    return Err(Error::invalid_model(format!(
                        "{} lists tensor {name:?} in {shard}, which does not hold it",
                        path.display()
                    )));
                }
            }
        }
        Ok(files)
    }

    /// Those that do not belong to [`Self::packed`].
    pub(super) fn tensors(&self) -> impl Iterator<Item = &StoredTensor> {
        self.tensors
            .iter()
            .enumerate()
            .filter(|(index, _)| !self.packed.is_part(*index))
            .map(|(_, tensor)| tensor)
    }

    /// Matrices that other programs have quantised.
    pub(super) fn packed(&self) -> &PackedTensors {
        &self.packed
    }

    /// Fails if one of the files was written to.
    pub(super) fn ensure_unchanged(&self) -> Result<()> {
        self.parts.iter().try_for_each(|part| part.ensure_unchanged())
    }

    /// The files that are mapped.
    pub(super) fn stamps(&self) -> impl Iterator<Item = &FileStamp> {
        self.parts.iter().filter_map(|part| part.stamp())
    }

    pub(super) fn total_bytes(&self) -> u64 {
        self.parts.iter().map(|part| part.len() as u64).sum()
    }

    pub(super) fn contains(&self, name: &str) -> bool {
        self.index.contains_key(name) || self.packed.contains(name)
    }

    pub(super) fn shape(&self, name: &str) -> Option<&[usize]> {
        let stored = self.index.get(name).map(|index| &self.tensors[*index].shape[..]);
        stored.or_else(|| Some(self.packed.get(name)?.ok()?.shape()))
    }

    pub(super) fn tensor(&self, name: &str) -> Result<RawTensor<'_>> {
        if let Some(packed) = self.packed.get(name) {
            return packed.map(RawTensor::packed);
        }
        let Some(&index) = self.index.get(name) else {
            let theirs = names::hugging_face(name).map(|name| format!(" ({name})")).unwrap_or_default();
            return Err(Error::invalid_model(format!("the checkpoint has no tensor {name:?}{theirs}")));
        };
        let stored = &self.tensors[index];
        self.parts[stored.part].ensure_unchanged()?;
        let dtype = stored.dtype().ok_or_else(|| unsupported(stored))?;
        Ok(RawTensor::new(&stored.name, dtype, &stored.shape, &self.parts[stored.part], stored.range.clone()))
    }

    /// Where the head is there and the embedding is not, it is the embedding of a model that has one matrix for both:
    /// some writers keep that name of the two.
    pub(super) fn take_head_for_embedding(&mut self) {
        const EMBEDDING: &str = "token_embd.weight";
        if self.contains(EMBEDDING) {
            return;
        }
        if let Some(index) = self.index.remove("output.weight") {
            EMBEDDING.clone_into(&mut self.tensors[index].name);
            self.index.insert(EMBEDDING.to_owned(), index);
        }
    }

    fn add(&mut self, path: &Path) -> Result<()> {
        let mapping = Mapping::open(path)?;
        let part = self.parts.len();
        let in_file = |error: Error| error.context(path.display());
        for mut tensor in parse_header(&mapping).map_err(in_file)? {
            tensor.part = part;
            // What is not read may occur in any number.
            if self.index.contains_key(&tensor.name) && names::is_unread(&tensor.name) {
                continue;
            }
            if self.index.insert(tensor.name.clone(), self.tensors.len()).is_some() {
                return Err(in_file(Error::invalid_model(format!("tensor {:?} occurs twice", tensor.name))));
            }
            self.tensors.push(tensor);
        }
        self.parts.push(Arc::new(mapping));
        Ok(())
    }
}

/// The weight files of a folder.
enum Found {
    /// These, all of them.
    Files(Vec<String>),
    /// Those that this file lists.
    Index(String),
}

impl Found {
    /// Files of programs other than transformers, with any name and one list of shards or none, are found as well.
    fn in_folder(folder: &Path) -> Result<Option<Self>> {
        let names = super::checkpoint::file_names(folder)?;
        let has = |name: &str| names.iter().any(|other| other == name);
        if has(SINGLE_FILE) {
            return Ok(Some(Self::Files(vec![SINGLE_FILE.to_owned()])));
        }
        let mut lists: Vec<_> = names.iter().filter(|name| name.ends_with(INDEX_ENDING)).collect();
        lists.retain(|name| *name == INDEX_FILE || !has(INDEX_FILE) && !is_no_model(name));
        if let [list] = lists[..] {
            return Ok(Some(Self::Index(list.clone())));
        }
        let mut files: Vec<_> =
            names.into_iter().filter(|name| name.ends_with(".safetensors") && !is_no_model(name)).collect();
        files.sort_unstable();
        check_parts(folder, &files)?;
        Ok((!files.is_empty()).then_some(Self::Files(files)))
    }
}

fn is_no_model(name: &str) -> bool {
    NO_MODELS.iter().any(|beginning| name.starts_with(beginning))
}

/// Whether all shards of `name-00001-of-00003.safetensors` and so on are there.
fn check_parts(folder: &Path, files: &[String]) -> Result<()> {
    for file in files {
        let parts = || {
            let (rest, total) = file.strip_suffix(".safetensors")?.rsplit_once("-of-")?;
            let (stem, _) = rest.rsplit_once('-')?;
            Some((stem, total, total.parse::<usize>().ok().filter(|_| total.len() == 5)?))
        };
        let Some((stem, total, num_parts)) = parts() else { continue };
        let name = |number: usize| format!("{stem}-{number:05}-of-{total}.safetensors");
        let present: HashSet<&String> = files.iter().collect();
        let missing: Vec<String> = (1..=num_parts).map(name).filter(|name| !present.contains(name)).collect();
        if !missing.is_empty() {
            return Err(missing_shards(folder, &missing));
        }
    }
    Ok(())
}

/// The error for a tensor whose type cannot be read.
pub(super) fn unsupported(tensor: &StoredTensor) -> Error {
    Error::unsupported(format!(
        "tensor {:?} has the type {}, which this version cannot read from safetensors",
        tensor.name, tensor.stored_type
    ))
    .with_hint("use a checkpoint in F32, F16 or BF16, or a GGUF file")
}

fn read_index(path: &Path) -> Result<Index> {
    let doing = format!("cannot read {}", path.display());
    let text = files::read(path, MAX_INDEX_BYTES).map_err(|error| Error::io(&doing, error))?;
    let index: Index = files::json(&text).map_err(|error| {
        Error::invalid_model(format!("{} is wrong: {error}", path.display())).with_source(error)
    })?;
    if index.weight_map.is_empty() {
        return Err(Error::invalid_model(format!("{} lists no tensors", path.display())));
    }
    Ok(index)
}

#[cfg(test)]
mod tests;
