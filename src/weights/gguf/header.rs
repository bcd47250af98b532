//! Reading a GGUF header, versions 1 to 3, from untrusted bytes.
//!
//! [`parse_header`] is a pure function of the bytes. For any bytes, it returns a header whose tensors are inside the
//! file, or an error; it never panics, and it allocates at most a small multiple of the input.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashSet};
use std::ops::Range;

use super::reader::Reader;
use super::tensor_type::TensorType;
use super::{Metadata, Value};
use crate::weights::foreign;
use crate::{Error, Result};

const MAGIC: &[u8] = b"GGUF";
/// Most dimensions that ggml tensors have.
const MAX_DIMS: usize = 4;
/// Nested arrays: no known key goes deeper than two.
const MAX_ARRAY_DEPTH: usize = 4;
/// Most elements of one metadata array: 60 times the largest vocabulary.
const MAX_ARRAY_LEN: usize = 1 << 24;
/// The default alignment of the data section.
const DEFAULT_ALIGNMENT: usize = 32;

/// The header of a GGUF file.
#[derive(Debug, Clone, PartialEq)]
pub struct Header {
    /// 1, 2 or 3.
    pub version: u32,
    /// The key-value section.
    pub metadata: Metadata,
    /// All tensors in file order; no name occurs twice.
    pub tensors: Vec<TensorInfo>,
}

/// A tensor as the header describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// The name, unique in the file.
    pub name: String,
    /// The element type.
    pub tensor_type: TensorType,
    /// Row-major dimensions, `[out, in]` for a matrix (the reverse of the order in the file). None is 0.
    pub shape: Vec<usize>,
    /// The range of the data in the file. Checked to be inside; empty if the type is unknown, because then so is the
    /// size.
    pub range: Range<usize>,
}

impl TensorInfo {
    /// Number of elements; it was checked not to overflow.
    #[must_use]
    pub fn num_elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// Reads the header of a GGUF file and checks it against the file's length.
///
/// `bytes` is the whole file; only the header is read.
///
/// # Errors
/// [`crate::ErrorKind::InvalidModel`] if the bytes are not a GGUF file or contradict themselves,
/// [`crate::ErrorKind::Unsupported`] for a version or byte order that cannot be read.
pub fn parse_header(bytes: &[u8]) -> Result<Header> {
    if !bytes.starts_with(MAGIC) {
        return Err(foreign::not_a("GGUF file", bytes));
    }
    let mut reader = Reader::new(bytes);
    let version = read_version(&mut reader)?;
    reader.set_version(version);
    let length_bytes = reader.length_bytes();
    // The least that a tensor takes: name length, dimension count, type, offset.
    let num_tensors = reader.count(length_bytes + 16, "tensors")?;
    // The least that an entry takes: key length, type, one byte of value.
    let num_entries = reader.count(length_bytes + 5, "metadata entries")?;

    let mut entries = BTreeMap::new();
    for index in 0..num_entries {
        let key = reader.name().map_err(|error| error.context(format!("metadata key {index}")))?;
        let value = read_value(&mut reader).map_err(|error| error.context(format!("metadata {key:?}")))?;
        match entries.entry(key.to_owned()) {
            Entry::Vacant(entry) => entry.insert(value),
            Entry::Occupied(_) => {
                return Err(Error::invalid_model(format!("metadata {key:?} occurs twice")));
            }
        };
    }
    let metadata = Metadata { entries };
    let alignment = alignment(&metadata)?;

    // Not `with_capacity(num_tensors)`: a large file can claim millions of tensors and hold none.
    let mut entries = Vec::new();
    let mut names = HashSet::new();
    for index in 0..num_tensors {
        let entry = read_entry(&mut reader).map_err(|error| error.context(format!("tensor {index}")))?;
        if !names.insert(entry.name) {
            return Err(Error::invalid_model(format!("tensor {:?} occurs twice", entry.name)));
        }
        entries.push(entry);
    }
    let data_start = reader
        .position()
        .checked_next_multiple_of(alignment)
        .ok_or_else(|| Error::invalid_model("the header is too long"))?;
    let mut tensors = Vec::with_capacity(entries.len());
    for entry in entries {
        tensors.push(locate(entry, data_start, alignment, bytes.len())?);
    }
    check_disjoint(&tensors)?;
    Ok(Header { version, metadata, tensors })
}

/// Tensors that share bytes are those of a damaged file: at least one of them reads another one's weights.
fn check_disjoint(tensors: &[TensorInfo]) -> Result<()> {
    let mut by_start: Vec<_> = tensors.iter().filter(|tensor| !tensor.range.is_empty()).collect();
    by_start.sort_by_key(|tensor| tensor.range.start);
    for (first, second) in by_start.iter().zip(by_start.iter().skip(1)) {
        if first.range.end > second.range.start {
            return Err(Error::invalid_model(format!(
                "the tensors {:?} and {:?} have bytes in common",
                first.name, second.name
            ))
            .with_hint("the file is damaged; fetch it again, or convert the model again"));
        }
    }
    Ok(())
}

/// A tensor's line in the header, not checked against the file yet.
struct TensorEntry<'a> {
    name: &'a str,
    tensor_type: TensorType,
    shape: Vec<usize>,
    offset: u64,
}

fn read_version(reader: &mut Reader<'_>) -> Result<u32> {
    reader.take(MAGIC.len())?;
    let version = reader.u32()?;
    match version {
        1..=3 => Ok(version),
        _ if (1..=3).contains(&version.swap_bytes()) => {
            Err(Error::unsupported("this GGUF file is big-endian").with_hint("use the little-endian file"))
        }
        _ => Err(Error::unsupported(format!("GGUF version {version} is not one of 1, 2 and 3"))
            .with_hint("update this program, or convert the model again")),
    }
}

fn read_value(reader: &mut Reader<'_>) -> Result<Value> {
    let value_type = reader.u32()?;
    Ok(match value_type {
        0 => Value::Unsigned(u8::from_le_bytes(reader.array()?).into()),
        1 => Value::Signed(i8::from_le_bytes(reader.array()?).into()),
        2 => Value::Unsigned(u16::from_le_bytes(reader.array()?).into()),
        3 => Value::Signed(i16::from_le_bytes(reader.array()?).into()),
        4 => Value::Unsigned(reader.u32()?.into()),
        5 => Value::Signed(i32::from_le_bytes(reader.array()?).into()),
        6 => Value::Float(f32::from_le_bytes(reader.array()?).into()),
        7 => Value::Bool(reader.array::<1>()? != [0]),
        8 => Value::String(reader.text()?),
        9 => read_array(reader)?,
        10 => Value::Unsigned(reader.u64()?),
        11 => Value::Signed(i64::from_le_bytes(reader.array()?)),
        12 => Value::Float(f64::from_le_bytes(reader.array()?)),
        _ => return Err(unknown_value_type(value_type)),
    })
}

fn read_array(reader: &mut Reader<'_>) -> Result<Value> {
    let element_type = reader.u32()?;
    let len = array_len(reader, element_type)?;
    Ok(match element_type {
        0 => integers(reader, len, u8::from_le_bytes)?,
        1 => integers(reader, len, i8::from_le_bytes)?,
        2 => integers(reader, len, u16::from_le_bytes)?,
        3 => integers(reader, len, i16::from_le_bytes)?,
        4 => integers(reader, len, u32::from_le_bytes)?,
        5 => integers(reader, len, i32::from_le_bytes)?,
        6 => Value::Floats(elements(reader, len, f32::from_le_bytes)?),
        7 => Value::Bools(elements(reader, len, |byte: [u8; 1]| byte != [0])?),
        8 => {
            let mut strings = Vec::new();
            for _ in 0..len {
                strings.push(reader.text()?);
            }
            Value::Strings(strings)
        }
        9 => {
            for _ in 0..len {
                skip_array(reader, 1)?;
            }
            Value::Nested(len)
        }
        10 => Value::Integers(elements(reader, len, |bytes| {
            i64::try_from(u64::from_le_bytes(bytes)).unwrap_or(i64::MAX)
        })?),
        11 => integers(reader, len, i64::from_le_bytes)?,
        12 => Value::Floats(elements(reader, len, |bytes| f64::from_le_bytes(bytes) as f32)?),
        _ => return Err(unknown_value_type(element_type)),
    })
}

/// The length of an array whose elements cannot be more than the rest of the file holds.
fn array_len(reader: &mut Reader<'_>, element_type: u32) -> Result<usize> {
    let min_bytes = match element_type {
        8 => reader.length_bytes(),
        9 => 4 + reader.length_bytes(),
        _ => scalar_bytes(element_type).ok_or_else(|| unknown_value_type(element_type))?,
    };
    let len = reader.count(min_bytes, "array elements")?;
    if len > MAX_ARRAY_LEN {
        return Err(Error::unsupported(format!("an array of {len} elements is over {MAX_ARRAY_LEN}")));
    }
    Ok(len)
}

fn scalar_bytes(value_type: u32) -> Option<usize> {
    match value_type {
        0 | 1 | 7 => Some(1),
        2 | 3 => Some(2),
        4..=6 => Some(4),
        10..=12 => Some(8),
        _ => None,
    }
}

fn elements<const N: usize, T>(
    reader: &mut Reader<'_>,
    len: usize,
    read: impl Fn([u8; N]) -> T,
) -> Result<Vec<T>> {
    let bytes = reader.take(len.saturating_mul(N))?;
    Ok(bytes.as_chunks::<N>().0.iter().map(|bytes| read(*bytes)).collect())
}

fn integers<const N: usize, T: Into<i64>>(
    reader: &mut Reader<'_>,
    len: usize,
    read: impl Fn([u8; N]) -> T,
) -> Result<Value> {
    Ok(Value::Integers(elements(reader, len, |bytes| read(bytes).into())?))
}

fn skip_array(reader: &mut Reader<'_>, depth: usize) -> Result<()> {
    if depth >= MAX_ARRAY_DEPTH {
        return Err(Error::unsupported(format!("arrays are nested more than {MAX_ARRAY_DEPTH} deep")));
    }
    let element_type = reader.u32()?;
    let len = array_len(reader, element_type)?;
    match scalar_bytes(element_type) {
        Some(bytes) => {
            reader.take(len.saturating_mul(bytes))?;
        }
        None => {
            for _ in 0..len {
                if element_type == 8 {
                    reader.string_bytes()?;
                } else {
                    skip_array(reader, depth + 1)?;
                }
            }
        }
    }
    Ok(())
}

fn unknown_value_type(value_type: u32) -> Error {
    Error::invalid_model(format!("{value_type} is not a metadata type (0 to 12)"))
}

fn alignment(metadata: &Metadata) -> Result<usize> {
    let Some(value) = metadata.get("general.alignment") else { return Ok(DEFAULT_ALIGNMENT) };
    match metadata.usize("general.alignment") {
        Some(alignment) if alignment.is_power_of_two() && alignment <= 1 << 24 => Ok(alignment),
        _ => Err(Error::invalid_model(format!(
            "general.alignment is {}, expected a power of two up to 2^24",
            value.describe()
        ))),
    }
}

fn read_entry<'a>(reader: &mut Reader<'a>) -> Result<TensorEntry<'a>> {
    let name = reader.name()?;
    let named = |error: Error| error.context(format!("{name:?}"));
    let num_dims = reader.u32().map_err(named)? as usize;
    if num_dims > MAX_DIMS {
        return Err(Error::invalid_model(format!(
            "{name:?} has {num_dims} dimensions, more than {MAX_DIMS}"
        )));
    }
    let mut shape = Vec::with_capacity(num_dims);
    for _ in 0..num_dims {
        shape.push(reader.length().map_err(named)?);
    }
    shape.reverse();
    let tensor_type = TensorType::from_id(reader.u32().map_err(named)?);
    let offset = reader.u64().map_err(named)?;
    Ok(TensorEntry { name, tensor_type, shape, offset })
}

/// Turns an offset into the data section into a range of the file, and checks it.
fn locate(
    entry: TensorEntry<'_>,
    data_start: usize,
    alignment: usize,
    file_len: usize,
) -> Result<TensorInfo> {
    let TensorEntry { name, tensor_type, shape, offset } = entry;
    let invalid = |what: String| Error::invalid_model(format!("tensor {name:?} {what}"));
    let num_elements = shape
        .iter()
        .try_fold(1_usize, |product, dim| product.checked_mul(*dim))
        .ok_or_else(|| invalid(format!("has the shape {shape:?}, which overflows")))?;
    if num_elements == 0 {
        return Err(invalid(format!("is empty: its shape is {shape:?}")));
    }
    if !offset.is_multiple_of(alignment as u64) {
        return Err(invalid(format!("starts at offset {offset}, not a multiple of {alignment}")));
    }
    let num_bytes = match tensor_type {
        TensorType::Known(file_type) => {
            let row_len = shape.last().copied().unwrap_or(1);
            let row_bytes =
                file_type.row_bytes(row_len).map_err(|error| error.context(format!("tensor {name:?}")))?;
            (num_elements / row_len)
                .checked_mul(row_bytes)
                .ok_or_else(|| invalid(format!("has the shape {shape:?}, which overflows")))?
        }
        TensorType::Unknown(_) => 0,
    };
    let start = usize::try_from(offset).ok().and_then(|offset| offset.checked_add(data_start));
    let end = start.and_then(|start| start.checked_add(num_bytes));
    match (start, end) {
        (Some(start), Some(end)) if end <= file_len => {
            Ok(TensorInfo { name: name.to_owned(), tensor_type, shape, range: start..end })
        }
        _ => Err(invalid(format!(
            "takes {num_bytes} bytes at offset {offset} of the data, beyond the file's {file_len} bytes"
        ))
        .with_hint("the download is incomplete; fetch the file again")),
    }
}

#[cfg(test)]
mod tests;
