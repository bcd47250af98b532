//! Bytes of weights: mapped from disk, in the program itself, or made at load.

use std::fmt;
use std::fs::{self, Metadata};
use std::ops::{Deref, Range};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::SystemTime;

use memmap2::{Mmap, MmapOptions};

use crate::{Error, Result, files};

/// The bytes of one file, or of one tensor that was made at load.
///
/// The map is read-only. If another process overwrites the file during its use, the weights change; if it truncates the
/// file, the operating system ends this process as soon as it reads what is gone. [`Self::ensure_unchanged`] notices both
/// before more is read. Replacing a file by renaming a new one over it is safe.
pub(super) enum Mapping {
    Mapped(Mmap, FileStamp, FileId),
    Static(&'static [u8]),
    Owned(Vec<u8>),
}

/// Distinguishes the states of a file without reading it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct FileStamp {
    /// Where it is, links followed.
    pub path: PathBuf,
    /// Bytes.
    pub len: u64,
    /// When it was changed last, where the system reports it.
    pub modified: Option<SystemTime>,
}

/// Which file has a name at the moment, where the system tells: device and number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FileId(Option<(u64, u64)>);

impl FileId {
    fn of(metadata: &Metadata) -> Self {
        #[cfg(unix)]
        {
            use std::os::unix::fs::MetadataExt;
            Self(Some((metadata.dev(), metadata.ino())))
        }
        #[cfg(not(unix))]
        {
            let _ = metadata;
            Self(None)
        }
    }
}

impl Mapping {
    pub(super) fn open(path: &Path) -> Result<Self> {
        let doing = format!("cannot open {}", path.display());
        let file = files::open(path).map_err(|error| Error::io(&doing, error))?;
        let metadata = file.metadata().map_err(|error| Error::io(&doing, error))?;
        if metadata.len() == 0 {
            // An empty range cannot be mapped; as an empty file it gets the error of its format.
            return Ok(Self::Static(&[]));
        }
        let options = MmapOptions::new();
        // SAFETY: the map is only ever read, through `&[u8]`. Only another process that writes to the file at the same
        // time can break that reference, which no reader of mapped files can rule out; the type's documentation
        // describes the consequences.
        //
        // Apple's GPUs are known to read shared maps in place; with other maps the device might get copies of pages.
        let map = unsafe {
            if cfg!(target_os = "macos") { options.map(&file) } else { options.map_copy_read_only(&file) }
        };
        let stamp = FileStamp {
            path: path.canonicalize().unwrap_or_else(|_| path.to_owned()),
            len: metadata.len(),
            modified: metadata.modified().ok(),
        };
        let id = FileId::of(&metadata);
        Ok(Self::Mapped(map.map_err(|error| Error::io(&doing, error))?, stamp, id))
    }

    /// Fails if the file has another size or time than when it was opened. One that was replaced or deleted is not the
    /// mapped one any more, which stays as it was.
    pub(super) fn ensure_unchanged(&self) -> Result<()> {
        let Self::Mapped(_, stamp, id) = self else { return Ok(()) };
        let Ok(now) = fs::metadata(&stamp.path) else { return Ok(()) };
        let is_same = now.len() == stamp.len && now.modified().ok() == stamp.modified;
        if is_same || FileId::of(&now) != *id {
            return Ok(());
        }
        let path = stamp.path.display();
        let what = match now.len() {
            len if len == stamp.len => "another program writes to it".to_owned(),
            len => format!("it had {} bytes and has {len} now", stamp.len),
        };
        Err(Error::invalid_model(format!("{path} changed while it was loaded: {what}"))
            .with_hint("wait until the file is written or downloaded, then start again"))
    }

    /// The file that is mapped, if it is one.
    pub(super) fn stamp(&self) -> Option<&FileStamp> {
        match self {
            Self::Mapped(_, stamp, _) => Some(stamp),
            Self::Static(_) | Self::Owned(_) => None,
        }
    }
}

impl Mapping {
    /// Lets the operating system reclaim the memory of these bytes. They stay readable: later reads load them from the
    /// file again.
    pub(super) fn release(&self, range: Range<usize>) {
        #[cfg(unix)]
        if let Self::Mapped(map, ..) = self {
            // SAFETY: the map is never written, so its pages hold only the file's contents, and dropping them cannot
            // change a reader's bytes.
            let result = unsafe {
                map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, range.start, range.len())
            };
            // If the system ignores the advice, only memory is lost.
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
            Self::Mapped(map, ..) => map,
            Self::Static(bytes) => bytes,
            Self::Owned(bytes) => bytes,
        }
    }
}

impl fmt::Debug for Mapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mapped(map, ..) => write!(f, "Mapped({} bytes)", map.len()),
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
    /// `range` has to be inside the mapping.
    pub(super) fn new(mapping: &Arc<Mapping>, range: Range<usize>) -> Self {
        Self { mapping: Arc::clone(mapping), range }
    }

    /// Lets the operating system take back the memory of the bytes, which stay readable.
    pub(super) fn release(&self) {
        self.mapping.release(self.range.clone());
    }

    /// Bytes that are in no file.
    pub(crate) fn owned(bytes: Vec<u8>) -> Self {
        let range = 0..bytes.len();
        Self::new(&Arc::new(Mapping::Owned(bytes)), range)
    }

    /// A range of a file, for tests of types that share mapped bytes.
    #[cfg(test)]
    pub(crate) fn of_file(path: &Path, range: Range<usize>) -> Self {
        Self::new(&Arc::new(Mapping::open(path).unwrap()), range)
    }

    /// The pages that hold these bytes, for a device that can read a file's pages in place. They stay mapped as long as
    /// a clone of this value lives.
    ///
    /// None if the bytes are not of a mapped file, or the file is not mapped to whole pages of `page_size`
    /// bytes, which has to be the system's page size and a power of two.
    #[must_use]
    pub fn pages(&self, page_size: usize) -> Option<MappedPages> {
        let Mapping::Mapped(map, ..) = &*self.mapping else { return None };
        if self.range.is_empty() || !map.as_ptr().addr().is_multiple_of(page_size) {
            return None;
        }
        let start = self.range.start / page_size * page_size;
        let end = self.range.end.checked_next_multiple_of(page_size)?;
        let address = NonNull::from(map.get(start..)?).cast();
        Some(MappedPages { address, len: end - start, offset: self.range.start - start })
    }
}

/// Whole pages of a mapped file. The last page of the file ends after the file; the rest of it reads as zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MappedPages {
    /// Where the first page begins.
    pub address: NonNull<u8>,
    /// Bytes, a multiple of the page size.
    pub len: usize,
    /// The offset of the requested bytes in the pages.
    pub offset: usize,
}

impl Deref for SharedBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.mapping[self.range.clone()]
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn a_file_that_is_written_to_is_noticed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("weights");
        fs::write(&path, [1; 100]).unwrap();
        let check = |change: &dyn Fn(&fs::File), expected: &str| {
            let mapping = Mapping::open(&path).unwrap();
            mapping.ensure_unchanged().unwrap();
            change(&fs::File::options().append(true).open(&path).unwrap());
            let error = mapping.ensure_unchanged().unwrap_err();
            assert!(error.message().contains(path.file_name().unwrap().to_str().unwrap()), "{error}");
            assert!(error.message().contains(expected), "{error}");
            mapping
        };
        check(&|mut file| file.write_all(&[2; 20]).unwrap(), "had 100 bytes and has 120 now");
        check(&|file| file.set_modified(SystemTime::UNIX_EPOCH).unwrap(), "another program writes to it");
        check(&|file| file.set_len(100).unwrap(), "had 120 bytes and has 100 now");
        // The mapped file stays as it was.
        if cfg!(unix) {
            let mapping = Mapping::open(&path).unwrap();
            fs::write(folder.path().join("new"), [3; 7]).unwrap();
            fs::rename(folder.path().join("new"), &path).unwrap();
            mapping.ensure_unchanged().unwrap();
            fs::remove_file(&path).unwrap();
            mapping.ensure_unchanged().unwrap();
            assert_eq!(mapping[..2], [1, 1]);
        }
    }

    #[test]
    fn bytes_of_a_mapped_file_have_whole_pages() {
        const PAGE: usize = 4096;
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let contents: Vec<u8> = (0..3 * PAGE + 100).map(|i| (i % 251) as u8).collect();
        file.write_all(&contents).unwrap();
        let check = |range: Range<usize>, offset: usize, num_pages: usize| {
            let bytes = SharedBytes::of_file(file.path(), range);
            let pages = bytes.pages(PAGE).unwrap();
            assert_eq!((pages.offset, pages.len), (offset, num_pages * PAGE));
            assert_eq!(pages.address.as_ptr().wrapping_add(offset).cast_const(), bytes.as_ptr());
        };
        check(0..1, 0, 1);
        check(0..PAGE, 0, 1);
        check(PAGE - 1..PAGE + 1, PAGE - 1, 2);
        check(2 * PAGE + 7..3 * PAGE + 100, 7, 2);
        check(3 * PAGE..3 * PAGE + 100, 0, 1);
        assert_eq!(SharedBytes::of_file(file.path(), 5..5).pages(PAGE), None);
        // No map begins at a multiple of half the address space.
        assert_eq!(SharedBytes::of_file(file.path(), 0..1).pages(1 << (usize::BITS - 1)), None);
        let owned = Arc::new(Mapping::Owned(contents));
        assert_eq!(SharedBytes::new(&owned, 0..PAGE).pages(PAGE), None);
    }
}
