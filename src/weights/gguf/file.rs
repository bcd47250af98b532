//! A GGUF model: one mapped file, or all shards of a split one.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::header::{Header, TensorInfo, parse_header};
use super::{Metadata, TensorType};
use crate::weights::checkpoint::missing_shards;
use crate::weights::mapping::{FileStamp, Mapping};
use crate::weights::{FileType, RawTensor};
use crate::{Error, Result};

/// An opened GGUF model. Headers are read and checked, tensor data stays on disk until it is touched.
#[derive(Debug)]
pub struct GgufFile {
    metadata: Metadata,
    parts: Vec<Arc<Mapping>>,
    tensors: Vec<TensorInfo>,
    /// The shard of the tensor of the same index.
    range_of_tensor: Vec<usize>,
    index: HashMap<String, usize>,
}

impl GgufFile {
    /// Opens and maps the file at `path`. If it is a shard of a split model (`name-00001-of-00003.gguf`), opens the
    /// other shards as well.
    ///
    /// # Errors
    /// [`crate::ErrorKind::NotFound`] if the file or a shard is missing, otherwise those of [`parse_header`], with the
    /// path in the message.
    pub fn open(path: &Path) -> Result<Self> {
        let paths = match ShardName::of(path) {
            Some(name) => (1..=name.count).map(|number| name.path_of(number)).collect(),
            None => vec![path.to_owned()],
        };
        let missing = paths.iter().filter(|part| paths.len() > 1 && !part.exists());
        let name = |part: &PathBuf| part.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let missing: Vec<String> = missing.map(name).collect();
        if !missing.is_empty() {
            return Err(missing_shards(path.parent().unwrap_or(Path::new("")), &missing));
        }
        let mut parts = Vec::new();
        for (number, part) in paths.iter().enumerate() {
            let mapping = Mapping::open(part)?;
            let header = parse_header(&mapping)
                .and_then(|header| check_split(&header, number, paths.len()).map(|()| header))
                .map_err(|error| error.context(part.display()))?;
            parts.push((Arc::new(mapping), header));
        }
        Self::from_parts(parts).map_err(|error| error.context(path.display()))
    }

    /// The path of the first shard if `path` is named like a shard of a split model, otherwise `path`.
    #[must_use]
    pub fn first_shard(path: &Path) -> PathBuf {
        ShardName::of(path).map_or_else(|| path.to_owned(), |name| name.path_of(1))
    }

    /// A model in the program itself.
    ///
    /// # Errors
    /// As [`parse_header`].
    pub fn from_static(bytes: &'static [u8]) -> Result<Self> {
        let header = parse_header(bytes)?;
        check_split(&header, 0, 1)?;
        Self::from_parts(vec![(Arc::new(Mapping::Static(bytes)), header)])
    }

    /// The metadata of the first shard.
    #[must_use]
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// All tensors in file order, including those that cannot be read.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = &TensorInfo> {
        self.tensors.iter()
    }

    /// Fails if one of the files was written to.
    pub(in crate::weights) fn ensure_unchanged(&self) -> Result<()> {
        self.parts.iter().try_for_each(|part| part.ensure_unchanged())
    }

    /// The mapped files, one for each shard.
    pub(in crate::weights) fn stamps(&self) -> impl Iterator<Item = &FileStamp> {
        self.parts.iter().filter_map(|part| part.stamp())
    }

    /// Bytes of all shards.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        self.parts.iter().map(|part| part.len() as u64).sum()
    }

    /// True if there is a tensor of this name, of any type.
    #[must_use]
    pub fn contains(&self, name: &str) -> bool {
        self.index.contains_key(name)
    }

    /// The row-major dimensions of the tensor `name`, if there is one, of any type.
    #[must_use]
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.index.get(name).map(|index| &self.tensors[*index].shape[..])
    }

    /// The tensor `name`.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidModel`] if there is none, [`crate::ErrorKind::Unsupported`] if its type cannot be read.
    pub fn tensor(&self, name: &str) -> Result<RawTensor<'_>> {
        let index = *self
            .index
            .get(name)
            .ok_or_else(|| Error::invalid_model(format!("the file has no tensor {name:?}")))?;
        let info = &self.tensors[index];
        let file_type = info.tensor_type.file_type().ok_or_else(|| unsupported(info))?;
        let mapping = &self.parts[self.range_of_tensor[index]];
        mapping.ensure_unchanged()?;
        Ok(RawTensor::new(&info.name, file_type, &info.shape, mapping, info.range.clone()))
    }

    /// Checks that every tensor can be read, so that a load fails before it starts.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Unsupported`] naming the first tensor that cannot, and its type.
    pub fn ensure_supported(&self) -> Result<()> {
        match self.tensors.iter().find(|info| matches!(info.tensor_type, TensorType::Unknown(_))) {
            Some(info) => Err(unsupported(info)),
            None => Ok(()),
        }
    }

    fn from_parts(parts: Vec<(Arc<Mapping>, Header)>) -> Result<Self> {
        let mut file = Self {
            metadata: Metadata::default(),
            parts: Vec::with_capacity(parts.len()),
            tensors: Vec::new(),
            range_of_tensor: Vec::new(),
            index: HashMap::new(),
        };
        for (number, (mapping, header)) in parts.into_iter().enumerate() {
            if number == 0 {
                file.metadata = header.metadata;
            }
            file.parts.push(mapping);
            for info in header.tensors {
                let index = file.tensors.len();
                if file.index.insert(info.name.clone(), index).is_some() {
                    return Err(Error::invalid_model(format!("tensor {:?} is in two shards", info.name)));
                }
                file.tensors.push(info);
                file.range_of_tensor.push(number);
            }
        }
        if let Some(expected) = file.metadata.usize("split.tensors.count")
            && expected != file.tensors.len()
        {
            return Err(Error::invalid_model(format!(
                "the shards hold {} tensors, but split.tensors.count is {expected}",
                file.tensors.len()
            )));
        }
        Ok(file)
    }
}

fn unsupported(info: &TensorInfo) -> Error {
    let supported: Vec<&str> = FileType::all().map(FileType::name).collect();
    Error::unsupported(format!(
        "tensor {:?} has the type {}, which this version cannot read",
        info.name, info.tensor_type
    ))
    .with_hint(format!("use a file with the types {}, such as a Q4_K_M or Q8_0 file", supported.join(", ")))
}

/// Compares the shard number in a file with that of its name.
fn check_split(header: &Header, number: usize, count: usize) -> Result<()> {
    let stated_count = header.metadata.usize("split.count").unwrap_or(count).max(1);
    let stated_number = header.metadata.usize("split.no").unwrap_or(number);
    if stated_count == count && stated_number == number {
        return Ok(());
    }
    let is =
        format!("the file is shard {} of {stated_count} of a split model", stated_number.saturating_add(1));
    Err(match count {
        1 => Error::invalid_model(format!("{is}, but its name has no shard number")).with_hint(
            "keep the original names (name-00001-of-0000N.gguf), so that the other shards can be found",
        ),
        _ => Error::invalid_model(format!("{is}, but its name says shard {} of {count}", number + 1)),
    })
}

/// A file name of the form `stem-00002-of-00005.gguf`.
#[derive(Debug, PartialEq, Eq)]
struct ShardName {
    folder: PathBuf,
    stem: String,
    count: usize,
}

impl ShardName {
    /// None if `path` is not named like a shard.
    fn of(path: &Path) -> Option<Self> {
        let rest = path.file_name()?.to_str()?.strip_suffix(".gguf")?;
        let (rest, count) = rest.rsplit_once("-of-")?;
        let (stem, number) = rest.rsplit_once('-')?;
        let parse = |digits: &str| {
            let all_digits = digits.len() == 5 && digits.bytes().all(|byte| byte.is_ascii_digit());
            all_digits.then(|| digits.parse::<usize>().ok())?
        };
        let (number, count) = (parse(number)?, parse(count)?);
        let folder = path.parent().unwrap_or(Path::new("")).to_owned();
        (1..=count).contains(&number).then(|| Self { folder, stem: stem.to_owned(), count })
    }

    fn path_of(&self, number: usize) -> PathBuf {
        self.folder.join(format!("{}-{number:05}-of-{:05}.gguf", self.stem, self.count))
    }
}

#[cfg(test)]
mod tests;
