//! Turns a `--model` argument into files on disk, downloading them if need be.
//!
//! [`ModelSource::parse`] decides what the argument means, [`resolve`] gets the files. Downloads go
//! into the cache that the Hugging Face libraries share, so a model fetched by one program is there for
//! all, and a model that is there needs no network.
//!
//! The Hub and its cache are a feature of the crate, `hub`. Without it, a model is a file, a folder or the built-in one.
//!
//! This module knows nothing of what is inside the files.

pub mod alias;

#[cfg(feature = "hub")]
mod cache;
mod config;
#[cfg(feature = "hub")]
mod download;
#[cfg(feature = "hub")]
pub mod inventory;
mod progress;
#[cfg(feature = "hub")]
mod repository;
#[cfg_attr(not(feature = "hub"), expect(dead_code, reason = "most of it picks files of a repository"))]
mod select;
mod source;

use std::path::{Path, PathBuf};

pub use config::{HubConfig, Token};
pub use progress::{NoProgress, Progress};
pub use source::{HubModel, ModelSource, RepoId};

#[cfg(feature = "hub")]
use repository::resolve_hub;

use crate::Result;

/// A model whose files are on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResolvedModel {
    /// What to call the model: `org/name`, `org/name:Q4_K_M`, the name of a file or folder, or `demo`.
    pub display_name: String,
    /// Where its files are.
    pub files: ModelFiles,
    /// The commit, for a model from the Hub.
    pub revision: Option<String>,
    /// A notice although it worked: that the Hub could not be asked and an older
    /// copy is used.
    pub notice: Option<String>,
}

/// Where the files of a model are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelFiles {
    /// In the binary itself.
    Demo,
    /// A GGUF file; of a split one, the first shard, with the others next to it.
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
/// Of these [kinds](crate::ErrorKind):
/// - `NotFound`: no such model, revision, GGUF type, file or folder;
/// - `Unauthorized`: a gated or private model, no token or a wrong one;
/// - `RateLimited`: the Hub refuses more requests for now;
/// - `Unavailable`: the network or the Hub fails, or it must not be asked, and the cache does not have the model;
/// - `Unsupported` and `InvalidModel`: the repository holds nothing that can be loaded, or not all of it;
/// - `Unsupported`: a model from the Hub, and the crate is built without its feature `hub`;
/// - `Io`: the disk is full or cannot be written.
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
    let name = part(path).or_else(|| part(&full)).unwrap_or(path.as_os_str()).to_string_lossy();
    crate::visible(&name).into_owned()
}

fn resolve_folder(folder: &Path) -> Result<ModelFiles> {
    if folder.join("config.json").is_file() {
        return Ok(ModelFiles::Folder(folder.to_owned()));
    }
    std::fs::read_dir(folder)
        .map_err(|error| crate::Error::io(format_args!("cannot list `{}`", folder.display()), error))?;
    let mut files = Vec::new();
    list_files(folder, "", 0, &mut files);
    select::only_gguf(&folder.display().to_string(), &files).map(|file| ModelFiles::Gguf(folder.join(file)))
}

/// The names of the files below `folder`; links count if what they point to exists.
pub(super) fn list_files(folder: &Path, prefix: &str, depth: u32, files: &mut Vec<String>) {
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let Ok(name) = entry.file_name().into_string() else { continue };
        let path = entry.path();
        if path.is_file() {
            files.push(format!("{prefix}{name}"));
        } else if depth > 0 && path.is_dir() {
            list_files(&path, &format!("{prefix}{name}/"), depth - 1, files);
        }
    }
}

#[cfg(not(feature = "hub"))]
fn resolve_hub(model: &HubModel, _config: &HubConfig, _progress: &dyn Progress) -> Result<ResolvedModel> {
    let message = format!("`{}` is a model on the Hub, and this program is built without it", model.repo);
    Err(crate::Error::unsupported(message)
        .with_hint("give a .gguf file or a folder, or build tinyvllm with its feature `hub`"))
}

#[cfg(all(test, not(feature = "hub")))]
mod tests {
    use super::*;

    #[test]
    fn without_the_hub_a_name_is_an_error_and_files_are_found() {
        let found = |argument: &str| {
            resolve(&ModelSource::parse(argument, None)?, &HubConfig::new("unused"), &NoProgress)
        };
        let error = found("org/name").unwrap_err();
        assert_eq!(error.kind(), crate::ErrorKind::Unsupported);
        assert!(error.message().contains("org/name") && error.hint().unwrap().contains("`hub`"), "{error}");
        assert_eq!(found("demo").unwrap().files, ModelFiles::Demo);
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/src/demo/model.gguf");
        assert_eq!(found(file).unwrap().files, ModelFiles::Gguf(file.into()));
    }
}
