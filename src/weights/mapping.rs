//! Bytes of weights: mapped from disk, part of the program, or made at load.

use std::fmt;
use std::fs::File;
use std::ops::{Deref, Range};
use std::path::Path;
use std::sync::Arc;

use memmap2::{Mmap, MmapOptions};

use crate::{Error, ErrorKind, Result};

/// The bytes of one file, or of one tensor that was made at load.
///
/// The map is private and read-only. If another process overwrites or truncates the file meanwhile, the
/// weights change or the operating system ends this process; replacing a file by renaming a new one over
/// it is safe.
pub(super) enum Mapping {
    Mapped(Mmap),
    Static(&'static [u8]),
    Owned(Vec<u8>),
}

impl Mapping {
    pub(super) fn open(path: &Path) -> Result<Self> {
        let doing = format!("cannot open {}", path.display());
        let file = File::open(path).map_err(|error| Error::io(&doing, error))?;
        let metadata = file.metadata().map_err(|error| Error::io(&doing, error))?;
        if metadata.is_dir() {
            return Err(Error::new(
                ErrorKind::NotFound,
                format!("{} is a folder, not a file", path.display()),
            ));
        }
        if metadata.len() == 0 {
            // An empty range cannot be mapped; as an empty file it gets the error of its format.
            return Ok(Self::Static(&[]));
        }
        // SAFETY: the map is only ever read, through `&[u8]`. The one way to break that reference is
        // another process that writes to the file at the same time, which no reader of mapped files can
        // rule out; the type's documentation says what then happens.
        let map = unsafe { MmapOptions::new().map_copy_read_only(&file) };
        Ok(Self::Mapped(map.map_err(|error| Error::io(&doing, error))?))
    }
}

impl Mapping {
    /// Lets the operating system take back the memory of these bytes. They stay readable: what is read
    /// again comes from the file again.
    pub(super) fn release(&self, range: Range<usize>) {
        #[cfg(unix)]
        if let Self::Mapped(map) = self {
            // SAFETY: the map is private and never written, so its pages hold nothing but the file's
            // contents, and dropping them cannot change what a reader sees.
            let result = unsafe {
                map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, range.start, range.len())
            };
            // Advice that is not taken costs memory, nothing else.
            let _ = result;
        }
        #[cfg(not(unix))]
        let _ = range;
    }
}

impl Deref for Mapping {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Mapped(map) => map,
            Self::Static(bytes) => bytes,
            Self::Owned(bytes) => bytes,
        }
    }
}

impl fmt::Debug for Mapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mapped(map) => write!(f, "Mapped({} bytes)", map.len()),
            Self::Static(bytes) => write!(f, "Static({} bytes)", bytes.len()),
            Self::Owned(bytes) => write!(f, "Owned({} bytes)", bytes.len()),
        }
    }
}

/// A tensor's bytes with a share in the file that holds them, for weights that stay mapped.
#[derive(Debug, Clone)]
pub struct SharedBytes {
    mapping: Arc<Mapping>,
    range: Range<usize>,
}

impl SharedBytes {
    /// `range` has to lie inside the mapping.
    pub(super) fn new(mapping: &Arc<Mapping>, range: Range<usize>) -> Self {
        Self { mapping: Arc::clone(mapping), range }
    }
}

impl Deref for SharedBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.mapping[self.range.clone()]
    }
}
