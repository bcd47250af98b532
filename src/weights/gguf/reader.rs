//! A bounds-checked cursor over the bytes of a GGUF header.
//!
//! No length is trusted: every read is checked against the remaining bytes before memory is allocated for it.

use crate::{Error, Result};

/// Most bytes of a header. The largest vocabularies take a tenth; the values of small integers take up to
/// eight times their bytes in memory, so without a limit a large sparse file could exhaust it.
const MAX_HEADER_BYTES: usize = 128 << 20;

/// Reads little-endian values from the front of a file.
#[derive(Debug)]
pub(super) struct Reader<'a> {
    /// The file, or as much of it as a header may take.
    bytes: &'a [u8],
    is_whole_file: bool,
    position: usize,
    /// Width of counts and lengths: 4 bytes in version 1, 8 later.
    wide_lengths: bool,
}

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        let is_whole_file = bytes.len() <= MAX_HEADER_BYTES;
        let bytes = &bytes[..bytes.len().min(MAX_HEADER_BYTES)];
        Self { bytes, is_whole_file, position: 0, wide_lengths: true }
    }

    pub(super) fn set_version(&mut self, version: u32) {
        self.wide_lengths = version >= 2;
    }

    pub(super) fn position(&self) -> usize {
        self.position
    }

    pub(super) fn remaining(&self) -> usize {
        self.bytes.len() - self.position
    }

    /// Bytes that a count or a length takes.
    pub(super) fn length_bytes(&self) -> usize {
        if self.wide_lengths { 8 } else { 4 }
    }

    pub(super) fn take(&mut self, len: usize) -> Result<&'a [u8]> {
        if len > self.remaining() {
            return Err(self.too_short(&format!("{len} bytes are needed at offset {}", self.position)));
        }
        let taken = &self.bytes[self.position..self.position + len];
        self.position += len;
        Ok(taken)
    }

    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    pub(super) fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub(super) fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// A count, a length or a dimension, in the width of the file's version.
    pub(super) fn length(&mut self) -> Result<usize> {
        let value = if self.wide_lengths { self.u64()? } else { u64::from(self.u32()?) };
        usize::try_from(value)
            .map_err(|_| Error::invalid_model(format!("the length {value} is too large for this machine")))
    }

    /// A count of things of at least `min_bytes` each, which must fit into the rest of the file.
    pub(super) fn count(&mut self, min_bytes: usize, what: &str) -> Result<usize> {
        let count = self.length()?;
        match count.checked_mul(min_bytes) {
            Some(bytes) if bytes <= self.remaining() => Ok(count),
            _ => Err(self.too_short(&format!("{count} {what} are claimed at offset {}", self.position))),
        }
    }

    fn too_short(&self, need: &str) -> Error {
        let end = self.bytes.len();
        if self.is_whole_file {
            Error::invalid_model(format!("{need}, but the file ends at {end}"))
                .with_hint("the file is damaged or its download is incomplete; fetch it again")
        } else {
            Error::invalid_model(format!("{need}, but a header has at most {end} bytes"))
                .with_hint("the file is damaged; fetch it again")
        }
    }

    pub(super) fn string_bytes(&mut self) -> Result<&'a [u8]> {
        let len = self.length()?;
        self.take(len)
    }

    /// A key or a tensor name, which must be UTF-8.
    pub(super) fn name(&mut self) -> Result<&'a str> {
        let offset = self.position;
        let bytes = self.string_bytes()?;
        std::str::from_utf8(bytes)
            .map_err(|_| Error::invalid_model(format!("the name at offset {offset} is not UTF-8")))
    }

    /// A string value. Files with broken UTF-8 in a token or a description exist and work elsewhere, so
    /// such bytes are replaced instead of refused.
    pub(super) fn text(&mut self) -> Result<String> {
        Ok(String::from_utf8_lossy(self.string_bytes()?).into_owned())
    }
}
