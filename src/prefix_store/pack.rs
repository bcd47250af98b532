//! The format of a pack: a file with blocks.
//!
//! ```text
//! header   128 bytes  magic, version, number of blocks, bytes and tokens of a block, fingerprint, checksum of header and index
//! blocks              one after another, as the device has them
//! index               for each block: name, parent, checksum, tokens in groups, flags, token ids
//! ```
//!
//! Numbers are little-endian. Contents of a file are used only after its checksum under the directory's secret is
//! verified, and a length only within the length of the file. Files are read, not mapped: truncating a mapped file ends
//! the processes that access it.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use super::name::{BlockName, Fingerprint, HASH_BYTES, Secret};

const MAGIC: [u8; 8] = *b"tvprefix";
/// To be raised with every change of the format.
const VERSION: u32 = 1;
const HEADER_BYTES: u64 = 128;
/// The bytes of the header under the checksum.
const CHECKED_BYTES: usize = 64;
/// More index than any pack has; no more memory than this is allocated for a file.
const MAX_INDEX_BYTES: u64 = 64 << 20;
const SALTED: u32 = 1;

/// The record of a block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct BlockRecord {
    pub(super) name: BlockName,
    pub(super) parent: BlockName,
    /// Of its tokens those that were computed in groups of a prompt.
    pub(super) num_grouped: u32,
    /// Whether the prefix has a salt.
    pub(super) is_salted: bool,
    pub(super) token_ids: Vec<u32>,
}

/// Why a pack, or a block of it, is not used.
#[derive(Debug)]
pub(super) enum PackFault {
    /// It is not one of ours.
    Foreign,
    /// It is of another version of the format.
    Version(u32),
    /// Its length differs from the header's.
    Torn,
    /// A checksum is wrong: it was changed, or written under another secret.
    Damaged,
    Io(io::Error),
}

impl std::fmt::Display for PackFault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Foreign => f.write_str("it is not a pack of cached prefixes"),
            Self::Version(version) => write!(f, "its format has version {version}, not {VERSION}"),
            Self::Torn => f.write_str("its length differs from the one in its header"),
            Self::Damaged => f.write_str("a checksum is wrong"),
            Self::Io(error) => write!(f, "{error}"),
        }
    }
}

impl From<io::Error> for PackFault {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::UnexpectedEof => Self::Torn,
            _ => Self::Io(error),
        }
    }
}

/// The common properties of a pack's blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PackShape {
    pub(super) fingerprint: Fingerprint,
    /// Tokens of a block.
    pub(super) block_size: u32,
    /// Bytes of a block.
    pub(super) block_bytes: u64,
}

impl PackShape {
    fn entry_bytes(&self) -> u64 {
        3 * HASH_BYTES as u64 + 8 + 4 * u64::from(self.block_size)
    }

    fn header(&self, num_blocks: u32) -> [u8; CHECKED_BYTES] {
        let mut header = [0; CHECKED_BYTES];
        header[..8].copy_from_slice(&MAGIC);
        header[8..12].copy_from_slice(&VERSION.to_le_bytes());
        header[12..16].copy_from_slice(&num_blocks.to_le_bytes());
        header[16..24].copy_from_slice(&self.block_bytes.to_le_bytes());
        header[24..28].copy_from_slice(&self.block_size.to_le_bytes());
        header[32..].copy_from_slice(&self.fingerprint.0);
        header
    }
}

/// A pack that is being written. Until it is [finished](Self::finish) readers ignore it.
#[derive(Debug)]
pub(super) struct PackWriter {
    file: File,
    path: PathBuf,
    shape: PackShape,
    secret: Secret,
    index: Vec<u8>,
    names: Vec<BlockName>,
}

impl PackWriter {
    /// Begins a file that does not exist yet.
    pub(super) fn create(path: PathBuf, shape: PackShape, secret: Secret) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        options.write(true).create_new(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        let mut file = options.open(&path)?;
        file.write_all(&[0; HEADER_BYTES as usize])?;
        Ok(Self { file, path, shape, secret, index: Vec::new(), names: Vec::new() })
    }

    /// Adds a block with the pack's numbers of tokens and bytes.
    pub(super) fn append(&mut self, record: &BlockRecord, bytes: &[u8]) -> io::Result<()> {
        let is_alike = bytes.len() as u64 == self.shape.block_bytes
            && record.token_ids.len() as u64 == u64::from(self.shape.block_size);
        if !is_alike {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "a block of another size"));
        }
        self.file.write_all(bytes)?;
        let flags = if record.is_salted { SALTED } else { 0 };
        self.index.extend_from_slice(&record.name.0);
        self.index.extend_from_slice(&record.parent.0);
        self.index.extend_from_slice(&checksum(&self.secret, record.name, bytes));
        self.index.extend_from_slice(&record.num_grouped.to_le_bytes());
        self.index.extend_from_slice(&flags.to_le_bytes());
        self.index.extend(record.token_ids.iter().flat_map(|token| token.to_le_bytes()));
        self.names.push(record.name);
        Ok(())
    }

    /// Bytes that the finished file has.
    pub(super) fn num_bytes(&self) -> u64 {
        HEADER_BYTES + self.names.len() as u64 * self.shape.block_bytes + self.index.len() as u64
    }

    /// The names of its blocks.
    pub(super) fn names(&self) -> &[BlockName] {
        &self.names
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Writes index and header, and returns when all is durable.
    pub(super) fn finish(&mut self) -> io::Result<()> {
        self.file.write_all(&self.index)?;
        let num_blocks = u32::try_from(self.names.len()).map_err(io::Error::other)?;
        let header = self.shape.header(num_blocks);
        self.file.seek(SeekFrom::Start(0))?;
        self.file.write_all(&header)?;
        self.file.write_all(&self.secret.hash("pack", &[&header, &self.index]))?;
        self.file.sync_all()
    }
}

fn checksum(secret: &Secret, name: BlockName, bytes: &[u8]) -> [u8; HASH_BYTES] {
    secret.hash("bytes", &[&name.0, bytes])
}

/// The contents of a pack.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct PackIndex {
    pub(super) shape: PackShape,
    pub(super) records: Vec<BlockRecord>,
    checksums: Vec<[u8; HASH_BYTES]>,
}

impl PackIndex {
    /// Reads header and index, and believes them if their checksum is right.
    pub(super) fn read(file: &mut File, secret: &Secret) -> Result<Self, PackFault> {
        let len = file.metadata()?.len();
        let mut header = [0; CHECKED_BYTES + HASH_BYTES];
        file.seek(SeekFrom::Start(0))?;
        file.read_exact(&mut header)?;
        let (header, wanted) = header.split_at(CHECKED_BYTES);
        if header[..8] != MAGIC {
            return Err(PackFault::Foreign);
        }
        let version = u32_at(header, 8);
        if version != VERSION {
            return Err(PackFault::Version(version));
        }
        let num_blocks = u32_at(header, 12);
        let shape = PackShape {
            fingerprint: Fingerprint(hash_at(header, 32)),
            block_size: u32_at(header, 24),
            block_bytes: u64::from(u32_at(header, 16)) | u64::from(u32_at(header, 20)) << 32,
        };
        let blocks_len = shape.block_bytes.checked_mul(num_blocks.into());
        let index_len = shape.entry_bytes().checked_mul(num_blocks.into());
        let (Some(blocks_len), Some(index_len)) = (blocks_len, index_len) else {
            return Err(PackFault::Torn);
        };
        let whole = blocks_len.checked_add(index_len).and_then(|sum| sum.checked_add(HEADER_BYTES));
        if whole != Some(len) || index_len > MAX_INDEX_BYTES {
            return Err(PackFault::Torn);
        }
        let mut index = vec![0; index_len as usize];
        file.seek(SeekFrom::Start(HEADER_BYTES + blocks_len))?;
        file.read_exact(&mut index)?;
        if secret.hash("pack", &[header, &index]) != wanted {
            return Err(PackFault::Damaged);
        }
        let entries = index.chunks_exact(shape.entry_bytes() as usize);
        let checksums = entries.clone().map(|entry| hash_at(entry, 2 * HASH_BYTES)).collect();
        let records = entries.map(|entry| {
            let numbers = &entry[3 * HASH_BYTES..];
            BlockRecord {
                name: BlockName(hash_at(entry, 0)),
                parent: BlockName(hash_at(entry, HASH_BYTES)),
                num_grouped: u32_at(numbers, 0),
                is_salted: u32_at(numbers, 4) & SALTED != 0,
                token_ids: (2..2 + shape.block_size as usize).map(|i| u32_at(numbers, 4 * i)).collect(),
            }
        });
        Ok(Self { shape, records: records.collect(), checksums })
    }

    /// Reads the bytes of block `index`, which exists, and compares their checksum.
    pub(super) fn read_block(
        &self,
        file: &mut File,
        index: usize,
        secret: &Secret,
    ) -> Result<Vec<u8>, PackFault> {
        let start = HEADER_BYTES + index as u64 * self.shape.block_bytes;
        let len = usize::try_from(self.shape.block_bytes).map_err(|_| PackFault::Torn)?;
        // The file may be shorter now than it was, and then no memory is allocated for its blocks.
        if file.metadata()?.len() < start.saturating_add(self.shape.block_bytes) {
            return Err(PackFault::Torn);
        }
        let mut bytes = vec![0; len];
        file.seek(SeekFrom::Start(start))?;
        file.read_exact(&mut bytes)?;
        match checksum(secret, self.records[index].name, &bytes) == self.checksums[index] {
            true => Ok(bytes),
            false => Err(PackFault::Damaged),
        }
    }
}

fn u32_at(bytes: &[u8], start: usize) -> u32 {
    let mut number = [0; 4];
    number.copy_from_slice(&bytes[start..start + 4]);
    u32::from_le_bytes(number)
}

fn hash_at(bytes: &[u8], start: usize) -> [u8; HASH_BYTES] {
    let mut hash = [0; HASH_BYTES];
    hash.copy_from_slice(&bytes[start..start + HASH_BYTES]);
    hash
}
