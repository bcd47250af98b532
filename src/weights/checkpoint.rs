//! A model's weights and configuration, in any format.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::gguf::{GgufFile, Metadata};
use super::quantized::QuantConfig;
use super::safetensors::{self, INDEX_FILE, SINGLE_FILE, SafetensorsFiles};
use super::{FileStamp, FileType, RawTensor, names};
use crate::{Error, ErrorKind, Result, files};

/// Most bytes of a `config.json`; real ones have a few thousand.
const MAX_CONFIG_BYTES: u64 = 16 << 20;

/// An opened model: a GGUF file, or a folder with safetensors and `config.json`.
///
/// Tensors have GGUF's names in both cases. Their contents are those of the file: a GGUF file of arch
/// `llama` has the rows of its rotary projections in another order than a folder.
#[derive(Debug)]
pub struct Checkpoint {
    /// The GGUF file or the folder; none for a model inside the program.
    path: Option<PathBuf>,
    source: Source,
}

#[derive(Debug)]
enum Source {
    Gguf(GgufFile),
    Folder {
        files: Box<SafetensorsFiles>,
        config: Value,
        generation_config: Option<Value>,
        /// Why that is not there, if the file is.
        generation_notice: Option<String>,
        quantized: QuantConfig,
    },
}

/// Properties of a tensor from its header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSummary<'a> {
    /// The canonical name, or the file's own for tensors that have none.
    pub name: &'a str,
    /// The element type; may be one that cannot be read.
    pub type_name: String,
    /// Row-major dimensions.
    pub shape: &'a [usize],
    /// Bytes in the file; 0 for a type of unknown size.
    pub num_bytes: usize,
}

/// How much of a checkpoint is stored in one type.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TypeSummary {
    /// The element type.
    pub type_name: String,
    /// Tensors of this type.
    pub num_tensors: usize,
    /// Their bytes; 0 for a type of unknown size.
    pub num_bytes: u64,
}

/// The conversion of tensors of one type on a device that keeps them as another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Repacking {
    /// The type in the file.
    pub stored: FileType,
    /// The type in memory.
    pub kept: FileType,
    /// Bytes in the file.
    pub stored_bytes: u64,
    /// Bytes in memory.
    pub kept_bytes: u64,
}

impl std::fmt::Display for Repacking {
    /// The conversion and its cost, such as `IQ2_XXS is kept as Q8_S: 2.06 -> 8.56 bits a weight, 813.0 MB more`.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { stored, kept, .. } = self;
        let (before, after) = (stored.bits_per_value(), kept.bits_per_value());
        let megabytes = (self.kept_bytes as f64 - self.stored_bytes as f64) / 1e6;
        write!(
            f,
            "{stored} is kept as {kept}: {before:.2} -> {after:.2} bits a weight, {megabytes:.1} MB more"
        )
    }
}

impl TypeSummary {
    /// From the type and the bytes of each tensor; the type with the most bytes comes first.
    pub(super) fn of(tensors: impl IntoIterator<Item = (String, usize)>) -> Vec<Self> {
        let mut types = BTreeMap::<String, (usize, u64)>::new();
        for (type_name, bytes) in tensors {
            let (num_tensors, num_bytes) = types.entry(type_name).or_default();
            *num_tensors += 1;
            *num_bytes += bytes as u64;
        }
        let summary = |(type_name, (num_tensors, num_bytes))| Self { type_name, num_tensors, num_bytes };
        let mut summaries: Vec<_> = types.into_iter().map(summary).collect();
        summaries.sort_by_key(|summary| std::cmp::Reverse(summary.num_bytes));
        summaries
    }
}

impl Checkpoint {
    /// Opens a GGUF file (any shard of a split one), a folder with `config.json` and safetensors, or a folder with one
    /// GGUF model.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] if there are no weights at `path` or a shard is missing, [`ErrorKind::Unsupported`] for
    /// formats that cannot be read, [`ErrorKind::InvalidModel`] for damaged files, [`ErrorKind::InvalidRequest`] if the
    /// folder has several models. The message has the path.
    pub fn open(path: &Path) -> Result<Self> {
        let metadata = fs::metadata(path)
            .map_err(|error| Error::io(format!("cannot open the model {}", path.display()), error))?;
        if !metadata.is_dir() {
            return Self::open_gguf(path);
        }
        if SafetensorsFiles::are_in(path) {
            return Self::open_folder(path);
        }
        match &gguf_models_in(path)?[..] {
            [] => Err(SafetensorsFiles::problem_in(path).unwrap_or_else(|| no_weights(path))),
            [file] => Self::open_gguf(file),
            several => {
                let list: Vec<_> = several.iter().map(|file| file.display().to_string()).collect();
                Err(Error::invalid_request(format!(
                    "{} has several models: {}",
                    path.display(),
                    list.join(", ")
                ))
                .with_hint("give the path of one of the files"))
            }
        }
    }

    /// A GGUF model in the program itself.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidModel`] or [`ErrorKind::Unsupported`] if the bytes are no good GGUF file.
    pub fn from_static(bytes: &'static [u8]) -> Result<Self> {
        Ok(Self { path: None, source: Source::Gguf(GgufFile::from_static(bytes)?) })
    }

    /// The GGUF file or folder that was opened; none for a model inside the program.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// The metadata, if this is a GGUF file.
    #[must_use]
    pub fn gguf_metadata(&self) -> Option<&Metadata> {
        match &self.source {
            Source::Gguf(file) => Some(file.metadata()),
            Source::Folder { .. } => None,
        }
    }

    /// `config.json`, if this is a folder.
    #[must_use]
    pub fn config_json(&self) -> Option<&Value> {
        match &self.source {
            Source::Gguf(_) => None,
            Source::Folder { config, .. } => Some(config),
        }
    }

    /// `generation_config.json`, if this is a folder that has one.
    #[must_use]
    pub fn generation_config_json(&self) -> Option<&Value> {
        match &self.source {
            Source::Gguf(_) => None,
            Source::Folder { generation_config, .. } => generation_config.as_ref(),
        }
    }

    /// The weight files, each as it was when it was opened; none for a model inside the program.
    #[must_use]
    pub fn file_stamps(&self) -> Vec<&FileStamp> {
        match &self.source {
            Source::Gguf(file) => file.stamps().collect(),
            Source::Folder { files, .. } => files.stamps().collect(),
        }
    }

    /// Checks that the weight files are as they were when they were opened. [`Self::tensor`] does so for a tensor's file
    /// before it is read, and a loader for all files after it has read them: what was read in between may be a mixture.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidModel`] naming a file that was written to. One that was replaced or deleted stays as it was.
    pub fn ensure_unchanged(&self) -> Result<()> {
        match &self.source {
            Source::Gguf(file) => file.ensure_unchanged(),
            Source::Folder { files, .. } => files.ensure_unchanged(),
        }
    }

    /// Bytes of all weight files.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        match &self.source {
            Source::Gguf(file) => file.total_bytes(),
            Source::Folder { files, .. } => files.total_bytes(),
        }
    }

    /// The conversions of a device that keeps types of files as `kept_as` returns, the most expensive type first.
    pub fn repackings(&self, kept_as: impl Fn(FileType) -> FileType) -> Vec<Repacking> {
        let mut types = BTreeMap::<FileType, Repacking>::new();
        // Tensors that cannot be read are not kept.
        for tensor in self.tensor_names().filter_map(|name| self.tensor(name).ok()) {
            let (stored, kept) = (tensor.stored(), kept_as(tensor.stored()));
            let Ok(kept_bytes) = kept.row_bytes(tensor.num_elements()) else { continue };
            if stored != kept && !tensor.is_packed() {
                let one = Repacking { stored, kept, stored_bytes: 0, kept_bytes: 0 };
                let all = types.entry(stored).or_insert(one);
                all.stored_bytes += tensor.num_bytes() as u64;
                all.kept_bytes += kept_bytes as u64;
            }
        }
        let mut repackings: Vec<_> = types.into_values().collect();
        repackings.sort_by_key(|one| std::cmp::Reverse(one.kept_bytes.saturating_sub(one.stored_bytes)));
        repackings
    }

    /// Bytes of all weight files, adjusted by the device's conversions.
    #[must_use]
    pub fn kept_bytes(&self, kept_as: impl Fn(FileType) -> FileType) -> u64 {
        let of_file = |bytes: u64, one: &Repacking| (bytes + one.kept_bytes).saturating_sub(one.stored_bytes);
        self.repackings(kept_as).iter().fold(self.total_bytes(), of_file)
    }

    /// True if there is a tensor of this canonical name.
    #[must_use]
    pub fn contains(&self, name: &str) -> bool {
        match &self.source {
            Source::Gguf(file) => file.contains(name),
            Source::Folder { files, .. } => files.contains(name),
        }
    }

    /// The row-major dimensions of the tensor of this canonical name, if there is one, of any type.
    #[must_use]
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        match &self.source {
            Source::Gguf(file) => file.shape(name),
            Source::Folder { files, .. } => files.shape(name),
        }
    }

    /// The tensor of this canonical name.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidModel`] if there is none, [`ErrorKind::Unsupported`] if its type cannot be read.
    pub fn tensor(&self, name: &str) -> Result<RawTensor<'_>> {
        match &self.source {
            Source::Gguf(file) => file.tensor(name),
            Source::Folder { files, .. } => files.tensor(name),
        }
        .map_err(|error| self.in_path(error))
    }

    /// All names, in the order of the file.
    pub fn tensor_names(&self) -> impl Iterator<Item = &str> {
        self.tensors().into_iter().map(|tensor| tensor.name)
    }

    /// All tensors, in the order of the file, including those that cannot be read.
    #[must_use]
    pub fn tensors(&self) -> Vec<TensorSummary<'_>> {
        match &self.source {
            Source::Gguf(file) => file
                .tensors()
                .map(|info| TensorSummary {
                    name: &info.name,
                    type_name: info.tensor_type.to_string(),
                    shape: &info.shape,
                    num_bytes: info.range.len(),
                })
                .collect(),
            Source::Folder { files, .. } => files
                .tensors()
                .map(|tensor| TensorSummary {
                    name: &tensor.name,
                    type_name: tensor.stored_type.to_string(),
                    shape: &tensor.shape,
                    num_bytes: tensor.range.len(),
                })
                .chain(files.packed().iter().map(|tensor| TensorSummary {
                    name: tensor.name(),
                    type_name: tensor.method().to_owned(),
                    shape: tensor.shape(),
                    num_bytes: tensor.num_bytes(),
                }))
                .collect(),
        }
    }

    /// How the weights are stored, the type with the most bytes first.
    #[must_use]
    pub fn type_summaries(&self) -> Vec<TypeSummary> {
        TypeSummary::of(self.tensors().into_iter().map(|tensor| (tensor.type_name, tensor.num_bytes)))
    }

    /// Checks that every tensor has a type that can be read.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] naming the first tensor that has not, and its type.
    pub fn ensure_supported(&self) -> Result<()> {
        match &self.source {
            Source::Gguf(file) => file.ensure_supported(),
            Source::Folder { files, quantized, .. } => {
                // Masks and similar tensors may have any type, because they are not read.
                let bad = |tensor: &&safetensors::StoredTensor| {
                    tensor.dtype().is_none() && !names::is_unread(&tensor.name)
                };
                let bad = files.tensors().find(bad);
                files.packed().ensure_supported().and_then(|()| match bad {
                    Some(tensor) => Err(quantized.explain(safetensors::unsupported(tensor))),
                    None => Ok(()),
                })
            }
        }
        .map_err(|error| self.in_path(error))
    }

    /// Whether a folder has matrices in formats of other programs, so that a [`Quantizer`](super::Quantizer) has to
    /// convert them.
    #[must_use]
    pub fn has_packed(&self) -> bool {
        match &self.source {
            Source::Gguf(_) => false,
            Source::Folder { files, .. } => !files.packed().is_empty(),
        }
    }

    /// Notices about such matrices, a line each. `is_converted`: the user has chosen a type for them.
    #[must_use]
    pub fn notices(&self, is_converted: bool) -> Vec<String> {
        match &self.source {
            Source::Gguf(_) => Vec::new(),
            Source::Folder { files, generation_notice, .. } => {
                let mut notices = files.packed().notices(is_converted);
                notices.extend(generation_notice.clone());
                notices
            }
        }
    }

    /// The tensors for which `is_used` is false, less those that hold no weights (rotary frequencies and
    /// masks of old checkpoints). A loader that finds any has misunderstood the model.
    #[must_use]
    pub fn unused_tensors(&self, is_used: impl Fn(&str) -> bool) -> Vec<&str> {
        self.tensor_names().filter(|name| !is_used(name) && !names::is_unread(name)).collect()
    }

    fn open_gguf(path: &Path) -> Result<Self> {
        Ok(Self { path: Some(path.to_owned()), source: Source::Gguf(GgufFile::open(path)?) })
    }

    fn open_folder(path: &Path) -> Result<Self> {
        let config = read_json(&path.join("config.json"))?.ok_or_else(|| {
            Error::new(ErrorKind::NotFound, format!("{} has weights but no config.json", path.display()))
                .with_hint("fetch config.json and the tokenizer files into the same folder")
        })?;
        // It is advice, which no model needs to run.
        let (generation_config, generation_notice) = match read_json(&path.join("generation_config.json")) {
            Ok(config) => (config, None),
            Err(error) => (None, Some(format!("{}; it is left out", error.message()))),
        };
        let quantized = QuantConfig::new(&config, |name| read_json(&path.join(name)))?;
        let mut files = Box::new(SafetensorsFiles::open(path, &quantized)?);
        if config.get("tie_word_embeddings") != Some(&Value::Bool(false)) {
            files.take_head_for_embedding();
        }
        let source = Source::Folder { files, config, generation_config, generation_notice, quantized };
        Ok(Self { path: Some(path.to_owned()), source })
    }

    fn in_path(&self, error: Error) -> Error {
        match &self.path {
            Some(path) => error.context(path.display()),
            None => error,
        }
    }
}

/// The GGUF models in a folder: one path each, the first shard of a split one, present or not. Vision projectors, which
/// are next to their models under the name `mmproj…`, are not models.
fn gguf_models_in(folder: &Path) -> Result<Vec<PathBuf>> {
    let models: BTreeSet<PathBuf> = file_names(folder)?
        .into_iter()
        .filter(|name| name.ends_with(".gguf") && !name.starts_with("mmproj"))
        .map(|name| GgufFile::first_shard(&folder.join(name)))
        .collect();
    Ok(models.into_iter().collect())
}

pub(super) fn file_names(folder: &Path) -> Result<Vec<String>> {
    let doing = format!("cannot list {}", folder.display());
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).map_err(|error| Error::io(&doing, error))? {
        let entry = entry.map_err(|error| Error::io(&doing, error))?;
        // Names that are not Unicode cannot be those of any file looked for.
        names.extend(entry.file_name().into_string().ok());
    }
    Ok(names)
}

/// The error for shards that a folder does not have.
pub(super) fn missing_shards(folder: &Path, names: &[String]) -> Error {
    const MAX_NAMES: usize = 8;
    let (first, more) = names.split_at(names.len().min(MAX_NAMES));
    let more = if more.is_empty() { String::new() } else { format!(" and {} more", more.len()) };
    let what = if names.len() == 1 { "a shard is".to_owned() } else { format!("{} shards are", names.len()) };
    let message = format!("{what} missing: {} has no {}{more}", folder.display(), first.join(", "));
    Error::new(ErrorKind::NotFound, message).with_hint("fetch all shards of the model into one folder")
}

fn no_weights(folder: &Path) -> Error {
    let names = match file_names(folder) {
        Ok(names) => names,
        Err(error) => return error,
    };
    let has = |endings: &[&str]| names.iter().any(|name| endings.iter().any(|ending| name.ends_with(ending)));
    if has(&[".bin", ".pth", ".pt"]) {
        Error::unsupported(format!("{} has only PyTorch weights (.bin, .pth)", folder.display())).with_hint(
            "use a revision with safetensors, or convert: load the model with transformers and call save_pretrained",
        )
    } else if has(&[".safetensors"]) {
        Error::new(
            ErrorKind::NotFound,
            format!("{} has neither {SINGLE_FILE} nor {INDEX_FILE}", folder.display()),
        )
        .with_hint("weights under other names cannot be used: they name tensors differently or are adapters")
    } else {
        Error::new(ErrorKind::NotFound, format!("{} has no weights", folder.display())).with_hint(format!(
            "a model folder has config.json and {SINGLE_FILE} (or shards), or a .gguf file"
        ))
    }
}

/// None if there is no such file.
fn read_json(path: &Path) -> Result<Option<Value>> {
    let doing = format!("cannot read {}", path.display());
    let text = match files::read(path, MAX_CONFIG_BYTES) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Error::io(doing, error)),
    };
    let value: Value = files::json(&text).map_err(|error| {
        Error::invalid_model(format!("{} is not JSON: {error}", path.display())).with_source(error)
    })?;
    if !value.is_object() {
        return Err(Error::invalid_model(format!("{} is not a JSON object", path.display())));
    }
    Ok(Some(value))
}

#[cfg(test)]
mod tests;
