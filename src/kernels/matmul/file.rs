//! Weight matrices that stay in a file, in the layout that the kernels read: for experts of a model that is larger than
//! memory.
//!
//! The file is a cache. The first start that needs it packs matrices into it, in the order in which they are loaded;
//! later starts map it and read none of the model's matrices. It is mapped read-only, so the operating system keeps
//! used pages while memory allows, and evicts pages without writing them.
//!
//! ```text
//! [header]    one page: magic, version, fingerprint, matrices, length, digest of their shapes, checksum of the checksums,
//!             checksum of all that
//! [tiles]     of one matrix after the other, each from a multiple of a page on
//! [checksums] of the tiles of each matrix
//! ```
//!
//! A matrix is compared with its checksum before its first use in a process, and not at the start, which would read all
//! of the file.
//!
//! A file appears under its name only when it is whole and on the disk. Until then it has another name, and a process that
//! makes it holds a lock; a second process waits for that one and finds the file.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use memmap2::{Mmap, MmapOptions};
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use super::packed::PackedMatrix;
use super::residency;
use crate::memory::AlignedBuffer;
use crate::pool::ThreadPool;
use crate::{DType, Error, ErrorKind, FileType, Result};

const MAGIC: [u8; 8] = *b"tvllmmat";
/// Of the file and of the tiles in it: has to change when `layout` does, or the order in which matrices are loaded.
const VERSION: u64 = 2;
/// Where matrices begin: at multiples of the largest page of the systems that are usual.
const PAGE: u64 = 16 << 10;
const HEADER_BYTES: usize = 72;
/// Bytes of a checksum.
const SUM_BYTES: usize = size_of::<u64>();
/// Bytes after which written data is flushed to the disk: unflushed data occupies memory.
const SYNC_BYTES: u64 = 128 << 20;

/// Packed matrices in a file, first while they are loaded and then while they are used.
#[derive(Debug)]
pub struct MatrixFile {
    path: PathBuf,
    /// From the moment on when all matrices are in the file.
    map: OnceLock<Mapped>,
    stage: Mutex<Stage>,
}

#[derive(Debug)]
struct Mapped {
    map: Mmap,
    matrices: Vec<Checksum>,
}

/// Of a matrix.
#[derive(Debug)]
struct Checksum {
    value: u64,
    /// Whether the matrix is known to have it.
    is_checked: AtomicBool,
}

/// Where a matrix is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Slot {
    pub(super) range: Range<usize>,
    /// Its number in the file.
    index: usize,
}

#[derive(Debug)]
enum Stage {
    /// The file is there; the matrices are taken one after the other.
    Taking { header: Header, position: Position },
    /// It is being made.
    Making(Box<Writer>),
    /// All matrices are in the file.
    Done,
}

/// How far the matrices are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Position {
    num_matrices: u64,
    /// Bytes of the file up to here.
    len: u64,
    /// Of types and shapes, in order.
    digest: u64,
}

impl Position {
    const START: Self = Self { num_matrices: 0, len: PAGE, digest: 0 };

    /// Returns the place of the next matrix, and advances past it.
    fn advance(&mut self, dtype: DType, rows: usize, cols: usize) -> Result<Slot> {
        let len = PackedMatrix::packed_bytes(dtype, rows, cols)
            .ok_or_else(|| Error::invalid_model(format!("a matrix of {rows} × {cols} is too large")))?;
        let (start, index) = (self.len as usize, self.num_matrices as usize);
        self.num_matrices += 1;
        self.len = (self.len + len as u64).next_multiple_of(PAGE);
        self.digest = xxh3_64_with_seed(format!("{dtype} {rows} {cols}").as_bytes(), self.digest);
        Ok(Slot { range: start..start + len, index })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Header {
    fingerprint: u128,
    end: Position,
    /// The checksum of those of the matrices.
    sums: u64,
}

impl Header {
    fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..16].copy_from_slice(&VERSION.to_le_bytes());
        bytes[16..32].copy_from_slice(&self.fingerprint.to_le_bytes());
        let Position { num_matrices, len, digest } = self.end;
        let fields = bytes[32..64].as_chunks_mut::<8>().0.iter_mut();
        for (field, value) in fields.zip([num_matrices, len, digest, self.sums]) {
            *field = value.to_le_bytes();
        }
        let checksum = xxh3_64(&bytes[..64]);
        bytes[64..].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    /// None if these bytes are no header of this version.
    fn from_bytes(bytes: &[u8; HEADER_BYTES]) -> Option<Self> {
        let number = |at: usize| u64::from_le_bytes(std::array::from_fn(|index| bytes[at + index]));
        let fingerprint = u128::from_le_bytes(std::array::from_fn(|index| bytes[16 + index]));
        let header = Self {
            fingerprint,
            end: Position { num_matrices: number(32), len: number(40), digest: number(48) },
            sums: number(56),
        };
        (header.to_bytes() == *bytes).then_some(header)
    }

    /// Bytes of the whole file.
    fn file_len(&self) -> Option<u64> {
        self.end.len.checked_add(self.end.num_matrices.checked_mul(SUM_BYTES as u64)?)
    }
}

impl MatrixFile {
    /// The file at `path`, if it is complete and has this `fingerprint`, otherwise a new one that replaces it, for
    /// matrices of about `num_bytes` bytes. Waits while another process writes it.
    ///
    /// The matrices are checked at their first use ([`PackedMatrix::check`]). A process that changes the file after that
    /// changes the weights; a process that shortens it ends this process. Replacing it by another file is harmless, and so is
    /// deleting it.
    ///
    /// # Errors
    /// [`ErrorKind::Io`] if the folder cannot be written, [`ErrorKind::Capacity`] if its disk has too little space; in
    /// both cases nothing has been written.
    pub fn open(path: PathBuf, fingerprint: u128, num_bytes: u64) -> Result<Arc<Self>> {
        if let Some(file) = Self::existing(&path, fingerprint)? {
            return Ok(Arc::new(file));
        }
        let folder = path.parent().unwrap_or(&path);
        fs::create_dir_all(folder)
            .map_err(|error| in_folder(Error::io(format!("cannot create {}", folder.display()), error)))?;
        let lock_path = with_ending(&path, "lock");
        let doing = format!("cannot lock {}", lock_path.display());
        let options = File::options().create(true).write(true).truncate(false).clone();
        let lock = options.open(&lock_path).map_err(|error| in_folder(Error::io(&doing, error)))?;
        lock.lock().map_err(|error| in_folder(Error::io(&doing, error)))?;
        // Another process may have written it during the wait.
        if let Some(file) = Self::existing(&path, fingerprint)? {
            return Ok(Arc::new(file));
        }
        let writer = Writer::new(&path, fingerprint, num_bytes, lock)?;
        Ok(Arc::new(Self { path, map: OnceLock::new(), stage: Mutex::new(Stage::Making(Box::new(writer))) }))
    }

    /// None if there is no file, or one that is not whole or of another model.
    fn existing(path: &Path, fingerprint: u128) -> Result<Option<Self>> {
        let doing = format!("cannot read {}", path.display());
        let mut file = match File::open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(in_folder(Error::io(doing, error))),
        };
        let mut bytes = [0; HEADER_BYTES];
        let header = file.read_exact(&mut bytes).ok().and_then(|()| Header::from_bytes(&bytes));
        let len = file.metadata().map_err(|error| Error::io(&doing, error))?.len();
        let is_whole = |header: &Header| header.fingerprint == fingerprint && header.file_len() == Some(len);
        let Some(header) = header.filter(is_whole) else { return Ok(None) };
        let map = map(&file).map_err(|error| Error::io(&doing, error))?;
        let sums = map.get(header.end.len as usize..).unwrap_or_default();
        if xxh3_64(sums) != header.sums {
            return Ok(None);
        }
        let sums = sums.as_chunks::<SUM_BYTES>().0.iter().map(|bytes| u64::from_le_bytes(*bytes));
        let matrices = sums.map(|value| Checksum { value, is_checked: AtomicBool::new(false) }).collect();
        let map = OnceLock::from(Mapped { map, matrices });
        let stage = Stage::Taking { header, position: Position::START };
        Ok(Some(Self { path: path.to_owned(), map, stage: Mutex::new(stage) }))
    }

    /// The next matrix, if the file had been there; none if [`Self::add`] has to make it.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidModel`] if there is none or another one in the file.
    pub fn next(self: &Arc<Self>, dtype: DType, rows: usize, cols: usize) -> Result<Option<PackedMatrix>> {
        let Stage::Taking { header, position } = &mut *self.stage() else { return Ok(None) };
        let slot = position.advance(dtype, rows, cols)?;
        if position.len > header.end.len {
            return Err(self.other_matrices());
        }
        Ok(Some(PackedMatrix::in_file(dtype, rows, cols, Arc::clone(self), slot)))
    }

    /// Packs a matrix into the file. It can be used after [`Self::finish`].
    ///
    /// # Errors
    /// Those of [`PackedMatrix::pack`], [`ErrorKind::Io`] or [`ErrorKind::Capacity`] if it cannot be written.
    pub fn add(
        self: &Arc<Self>,
        file_type: impl Into<FileType>,
        bytes: &[u8],
        rows: usize,
        cols: usize,
        pool: &ThreadPool,
    ) -> Result<PackedMatrix> {
        let Stage::Making(writer) = &mut *self.stage() else {
            return Err(Error::internal("a matrix is packed into a file that is complete"));
        };
        let file_type = file_type.into();
        let slot = writer.add(file_type, bytes, rows, cols, pool)?;
        Ok(PackedMatrix::in_file(file_type.kept_as(), rows, cols, Arc::clone(self), slot))
    }

    /// Marks the end of the matrices.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidModel`] if the file had others, [`ErrorKind::Io`] or [`ErrorKind::Capacity`] if it cannot be
    /// flushed to the disk.
    pub fn finish(&self) -> Result<()> {
        let stage = std::mem::replace(&mut *self.stage(), Stage::Done);
        match stage {
            Stage::Taking { header, position } if header.end != position => Err(self.other_matrices()),
            Stage::Taking { .. } | Stage::Done => Ok(()),
            Stage::Making(writer) => {
                let map = writer.finish(&self.path)?;
                self.map.set(map).map_err(|_| Error::internal("a file of matrices is finished twice"))
            }
        }
    }

    /// Where the file is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes of the file, once it is finished.
    #[must_use]
    pub fn num_bytes(&self) -> u64 {
        self.map.get().map_or(0, |file| file.map.len() as u64)
    }

    /// How many of them are in memory at the moment, in this process or another; none if the system does not report it.
    #[must_use]
    pub fn resident_bytes(&self) -> Option<u64> {
        residency::resident_bytes(&self.map.get()?.map)
    }

    /// The tiles of a matrix.
    ///
    /// # Panics
    /// If the file is not finished.
    pub(super) fn bytes(&self, range: Range<usize>) -> &[u8] {
        &self.map.get().map_or(&[][..], |file| &file.map[..])[range]
    }

    /// Starts to read the bytes of this range that are not in memory, without waiting.
    pub(super) fn fetch(&self, range: Range<usize>) {
        if let Some(file) = self.map.get() {
            residency::fetch(&file.map, range);
        }
    }

    /// Compares a matrix with its checksum, unless that was done. Two threads may do it at once, which does no harm.
    pub(super) fn check(&self, slot: &Slot) -> Result<()> {
        let checksum = self.map.get().and_then(|file| file.matrices.get(slot.index));
        let Some(checksum) = checksum.filter(|it| !it.is_checked.load(Ordering::Relaxed)) else {
            return Ok(());
        };
        if xxh3_64(self.bytes(slot.range.clone())) != checksum.value {
            // A request that fails reports the message alone, so the way out is part of it.
            return Err(Error::invalid_model(format!(
                "the experts in {} are damaged: the bytes {} to {} are not those that were written; delete the file, and \
                 the next start writes it again",
                self.path.display(),
                slot.range.start,
                slot.range.end
            )));
        }
        checksum.is_checked.store(true, Ordering::Relaxed);
        Ok(())
    }

    fn stage(&self) -> MutexGuard<'_, Stage> {
        self.stage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn other_matrices(&self) -> Error {
        Error::invalid_model(format!("{} has other matrices than the model", self.path.display()))
            .with_hint("delete the file; the next start makes it again")
    }
}

/// A file that is being made. Dropped before it is finished, it is removed.
#[derive(Debug)]
struct Writer {
    file: File,
    incomplete: PathBuf,
    fingerprint: u128,
    position: Position,
    /// One packed matrix.
    buffer: AlignedBuffer,
    /// The checksums of the matrices so far.
    sums: Vec<u64>,
    /// Bytes that may not be on the disk yet.
    num_unsynced: u64,
    is_finished: bool,
    _lock: File,
}

impl Writer {
    fn new(path: &Path, fingerprint: u128, num_bytes: u64, lock: File) -> Result<Self> {
        let folder = path.parent().unwrap_or(path);
        let incomplete = with_ending(path, "incomplete");
        // Removes outdated files, and those of processes that died, to free space first.
        for stale in [path, &incomplete] {
            match fs::remove_file(stale) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(in_folder(Error::io(format!("cannot remove {}", stale.display()), error)));
                }
                _ => {}
            }
        }
        if let Some(free) = residency::free_disk_bytes(folder)
            && free < num_bytes
        {
            return Err(disk_full(folder, num_bytes, Some(free)));
        }
        let mut options = File::options();
        let file = options.create_new(true).read(true).write(true).open(&incomplete).map_err(|error| {
            in_folder(Error::io(format!("cannot create {}", incomplete.display()), error))
        })?;
        let buffer = AlignedBuffer::empty();
        let position = Position::START;
        Ok(Self {
            file,
            incomplete,
            fingerprint,
            position,
            buffer,
            sums: Vec::new(),
            num_unsynced: 0,
            is_finished: false,
            _lock: lock,
        })
    }

    fn add(
        &mut self,
        file_type: FileType,
        bytes: &[u8],
        rows: usize,
        cols: usize,
        pool: &ThreadPool,
    ) -> Result<Slot> {
        let slot = self.position.advance(file_type.kept_as(), rows, cols)?;
        let range = slot.range.clone();
        if self.buffer.len() < range.len() {
            self.buffer = AlignedBuffer::zeroed(range.len()).ok_or_else(|| {
                Error::new(ErrorKind::Capacity, format!("no memory to pack {} bytes", range.len()))
            })?;
        }
        let packed = &mut self.buffer.as_mut_slice()[..range.len()];
        PackedMatrix::pack_into(file_type, bytes, rows, cols, packed, pool)?;
        let written = self.file.seek(SeekFrom::Start(range.start as u64));
        let written = written.and_then(|_| self.file.write_all(&self.buffer.as_slice()[..range.len()]));
        self.check(written)?;
        self.sums.push(xxh3_64(&self.buffer.as_slice()[..range.len()]));
        self.num_unsynced += range.len() as u64;
        if self.num_unsynced >= SYNC_BYTES {
            self.num_unsynced = 0;
            self.check(self.file.sync_data())?;
        }
        Ok(slot)
    }

    fn finish(mut self, path: &Path) -> Result<Mapped> {
        let sums: Vec<u8> = self.sums.iter().flat_map(|sum| sum.to_le_bytes()).collect();
        let header = Header { fingerprint: self.fingerprint, end: self.position, sums: xxh3_64(&sums) };
        let written = self.file.set_len(self.position.len).and_then(|()| {
            self.file.seek(SeekFrom::Start(self.position.len))?;
            self.file.write_all(&sums)?;
            self.file.seek(SeekFrom::Start(0))?;
            self.file.write_all(&header.to_bytes())?;
            self.file.sync_all()?;
            fs::rename(&self.incomplete, path)
        });
        self.check(written)?;
        self.is_finished = true;
        let map =
            map(&self.file).map_err(|error| Error::io(format!("cannot map {}", path.display()), error))?;
        // What this process has written is read from memory, or from a disk that has just taken it.
        let checked = |value: &u64| Checksum { value: *value, is_checked: AtomicBool::new(true) };
        Ok(Mapped { map, matrices: self.sums.iter().map(checked).collect() })
    }

    fn check(&self, written: io::Result<()>) -> Result<()> {
        written.map_err(|error| {
            let folder = self.incomplete.parent().unwrap_or(&self.incomplete);
            match error.kind() {
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                    disk_full(folder, self.position.len, None).with_source(error)
                }
                _ => in_folder(Error::io(format!("cannot write {}", self.incomplete.display()), error)),
            }
        })
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        if !self.is_finished {
            // The next start removes files that cannot be removed now.
            let _ = fs::remove_file(&self.incomplete);
        }
    }
}

fn map(file: &File) -> io::Result<Mmap> {
    // SAFETY: the map is only ever read, and this program changes no file that has its final name or is finished.
    // Another process that writes to it cannot be ruled out; the type's documentation describes the consequences.
    unsafe { MmapOptions::new().map(file) }
}

fn with_ending(path: &Path, ending: &str) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{ending}"));
    path.with_file_name(name)
}

fn in_folder(error: Error) -> Error {
    error.with_hint("--expert-weights-dir names another folder for the experts")
}

fn disk_full(folder: &Path, num_bytes: u64, free: Option<u64>) -> Error {
    let gigabytes = |bytes: u64| format!("{:.2} GB", bytes as f64 / 1e9);
    let free =
        free.map_or_else(|| "its disk is full".to_owned(), |free| format!("{} are free", gigabytes(free)));
    Error::new(
        ErrorKind::Capacity,
        format!("the experts take {} in {}, where {free}", gigabytes(num_bytes), folder.display()),
    )
    .with_hint(
        "name a folder on another disk with --expert-weights-dir, or use a smaller or more strongly quantised model",
    )
}

#[cfg(test)]
mod tests;
