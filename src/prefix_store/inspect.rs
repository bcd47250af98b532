//! Inspects a directory without a model.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::directory::Directory;
use super::pack::{PackFault, PackIndex};
use crate::{Error, Result};

/// A directory of cached prefixes.
#[derive(Debug, Clone)]
pub struct DirectoryReport {
    /// Its packs, the one that was used least recently first.
    pub packs: Vec<PackReport>,
    /// Files of it, packs counted in.
    pub num_files: usize,
    /// Bytes of all files.
    pub num_bytes: u64,
}

/// A pack.
#[derive(Debug, Clone)]
pub struct PackReport {
    /// The file.
    pub path: PathBuf,
    /// Its bytes.
    pub num_bytes: u64,
    /// When a block of it was read last, or it was written.
    pub used: SystemTime,
    /// Its contents, or the reason why it is not used.
    pub contents: std::result::Result<PackContents, String>,
}

/// The contents of a pack.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackContents {
    /// The first bytes of the fingerprint, in hexadecimal: packs of the same model, settings and device have the same.
    pub fingerprint: String,
    /// Blocks.
    pub num_blocks: usize,
    /// Tokens of a block.
    pub block_size: usize,
    /// Blocks with a salt after them.
    pub num_salted: usize,
}

/// Looks at a directory. With `verify` every block is read and its checksum compared.
///
/// # Errors
/// If it is not a directory of cached prefixes or cannot be read.
pub fn inspect_directory(path: &Path, verify: bool) -> Result<DirectoryReport> {
    let directory = Directory::look_at(path)?;
    let entries = directory.entries().map_err(|error| failed("read", path, error))?;
    let (num_files, num_bytes) = (entries.len(), entries.iter().map(|entry| entry.len).sum());
    let packs = entries.into_iter().filter(super::directory::Entry::is_pack).map(|entry| {
        let contents = contents(&directory, &entry.path, verify).map_err(|fault| fault.to_string());
        PackReport { path: entry.path, num_bytes: entry.len, used: entry.used, contents }
    });
    Ok(DirectoryReport { packs: packs.collect(), num_files, num_bytes })
}

/// Removes everything but the secret; returns the number of files and their bytes.
///
/// # Errors
/// If it is not a directory of cached prefixes, or a file cannot be removed.
pub fn clear_directory(path: &Path) -> Result<(usize, u64)> {
    Directory::look_at(path)?.clear().map_err(|error| failed("clear", path, error))
}

fn failed(what: &str, path: &Path, error: std::io::Error) -> Error {
    Error::io(format!("cannot {what} {}", path.display()), error)
}

fn contents(
    directory: &Directory,
    path: &Path,
    verify: bool,
) -> std::result::Result<PackContents, PackFault> {
    let mut file = File::open(path)?;
    let index = PackIndex::read(&mut file, &directory.secret)?;
    if verify {
        for block in 0..index.records.len() {
            index.read_block(&mut file, block, &directory.secret)?;
        }
    }
    Ok(PackContents {
        fingerprint: blake3::Hash::from(index.shape.fingerprint.0).to_hex()[..16].to_owned(),
        num_blocks: index.records.len(),
        block_size: index.shape.block_size as usize,
        num_salted: index.records.iter().filter(|record| record.is_salted).count(),
    })
}
