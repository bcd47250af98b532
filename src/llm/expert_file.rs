//! Where experts stay that do not fit into memory: in their own file, next to other caches.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::SystemTime;

use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

use super::load::OpenedModel;
use super::{LlmOptions, cache_folder};
use crate::ops::cpu::matmul::MatrixFile;
use crate::runner::ExpertDemand;
use crate::weights::FileStamp;
use crate::{Error, ErrorKind, Result};

/// The file of a model, in `--expert-weights-dir` or in `$XDG_CACHE_HOME/tinyvllm/experts`, by default in `~/.cache`.
///
/// Each model has only one, for any conversion: they are large.
///
/// # Errors
/// [`ErrorKind::NotFound`] if there is no folder for it.
pub(super) fn path(opened: &OpenedModel, options: &LlmOptions) -> Result<PathBuf> {
    let folder = options.expert_weights_dir.clone().or_else(|| cache_folder("experts")).ok_or_else(|| {
        Error::new(ErrorKind::NotFound, "there is no home folder to keep the experts in")
            .with_hint("name a folder with --expert-weights-dir, or set XDG_CACHE_HOME")
    })?;
    let model = opened.checkpoint.path().map(|path| path.canonicalize().unwrap_or_else(|_| path.to_owned()));
    let model = model.unwrap_or_default();
    let name = model.file_stem().unwrap_or_default().to_string_lossy();
    let hash = xxh3_64(model.as_os_str().as_encoded_bytes());
    Ok(folder.join(format!("{name}-{hash:016x}.experts")))
}

/// Opens it, or begins to make it.
///
/// # Errors
/// Those of [`path`] and of [`MatrixFile::open`].
pub(super) fn open(
    opened: &OpenedModel,
    options: &LlmOptions,
    experts: ExpertDemand,
) -> Result<Arc<MatrixFile>> {
    // Every matrix begins at a page.
    let num_bytes = experts.num_bytes + experts.num_bytes / 64 + (1 << 20);
    MatrixFile::open(path(opened, options)?, fingerprint(opened, options), num_bytes)
}

/// Where they are and how much of them is in memory at the moment, as a line.
pub(super) fn summary(file: &MatrixFile) -> String {
    let size = |bytes: u64| match bytes {
        1_000_000_000.. => format!("{:.2} GB", bytes as f64 / 1e9),
        _ => format!("{:.2} MB", bytes as f64 / 1e6),
    };
    let resident = match file.resident_bytes() {
        Some(bytes) => format!(", {} of them in memory now", size(bytes)),
        None => String::new(),
    };
    let (all, path) = (size(file.num_bytes()), file.path().display());
    format!("experts: {all} stay in {path}{resident} (--expert-weights memory keeps all there)")
}

/// A hash of some of a file's bytes: copies keep their time, and so another model may have the same name, size and time.
fn sample(stamp: &FileStamp) -> u128 {
    const NUM_PLACES: u64 = 256;
    const LEN: usize = 1 << 10;
    let mut bytes = Vec::new();
    if let Ok(mut file) = File::open(&stamp.path) {
        for place in 0..NUM_PLACES {
            let begin = (u128::from(stamp.len) * u128::from(place) / u128::from(NUM_PLACES)) as u64;
            let is_read = file.seek(SeekFrom::Start(begin)).is_ok();
            if !is_read || Read::by_ref(&mut file).take(LEN as u64).read_to_end(&mut bytes).is_err() {
                break;
            }
        }
    }
    xxh3_128(&bytes)
}

/// All properties that decide on the experts in the file and their types.
fn fingerprint(opened: &OpenedModel, options: &LlmOptions) -> u128 {
    let mtp = opened.config.mtp_layer();
    let mut text =
        format!("{} {:?} {:?} {mtp:?}\n", env!("CARGO_PKG_VERSION"), options.quantization, options.dtype);
    for stamp in opened.checkpoint.file_stamps() {
        let modified = stamp.modified.and_then(|time| time.duration_since(SystemTime::UNIX_EPOCH).ok());
        text.push_str(&format!("{:?} {} {modified:?} {:032x}\n", stamp.path, stamp.len, sample(stamp)));
    }
    // That of a GGUF file is in the file.
    text.push_str(&opened.checkpoint.config_json().map(ToString::to_string).unwrap_or_default());
    xxh3_128(text.as_bytes())
}
