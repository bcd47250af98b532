//! The header of a safetensors file, from untrusted bytes.
//!
//! [`parse_header`] is a pure function of the bytes. Every tensor that it returns lies inside them, has as many bytes as
//! its type and shape need, and shares none with another one. What no model reads may be of any form, because nobody
//! needs it to run the model.

use std::fmt;

use ::safetensors::Dtype;
use serde::Deserialize;
use serde::de::value::StrDeserializer;
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};

use super::StoredTensor;
use crate::weights::{foreign, names};
use crate::{Error, Result, shortened};

/// Most bytes of a header, the limit of the format's reference implementation.
const MAX_HEADER_BYTES: usize = 100_000_000;
/// The entry that describes no tensor.
const METADATA: &str = "__metadata__";

#[derive(Deserialize)]
struct Entry {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: (usize, usize),
}

/// All tensors in the order of the header, names that occur twice included.
struct Entries(Vec<(String, Entry)>);

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Tensors;
        impl<'de> Visitor<'de> for Tensors {
            type Value = Entries;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Entries, A::Error> {
                let mut entries = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == METADATA {
                        map.next_value::<IgnoredAny>()?;
                    } else {
                        entries.push((name, map.next_value()?));
                    }
                }
                Ok(Entries(entries))
            }
        }
        deserializer.deserialize_map(Tensors)
    }
}

/// The tensors of one file, in the order of their data.
pub(super) fn parse_header(bytes: &[u8]) -> Result<Vec<StoredTensor>> {
    let Some((length, rest)) = bytes.split_first_chunk::<8>() else {
        return Err(foreign::not_a("safetensors file", bytes));
    };
    if rest.first() != Some(&b'{') {
        return Err(foreign::not_a("safetensors file", &bytes[..bytes.len().min(64)]));
    }
    let length = u64::from_le_bytes(*length);
    let Some(header) = usize::try_from(length)
        .ok()
        .filter(|length| *length <= MAX_HEADER_BYTES)
        .and_then(|length| rest.get(..length))
    else {
        return Err(Error::invalid_model(format!(
            "the header claims {length} bytes, but the file has {} and the limit is {MAX_HEADER_BYTES}",
            rest.len()
        ))
        .with_hint("the file is damaged or its download is incomplete; fetch it again"));
    };
    let Entries(entries) = serde_json::from_slice(header)
        .map_err(|error| Error::invalid_model(format!("the header is wrong: {error}")).with_source(error))?;
    let data = &rest[header.len()..];
    let needed = entries.iter().map(|(_, entry)| entry.data_offsets.1).max().unwrap_or(0);
    if needed != data.len() {
        return Err(Error::invalid_model(format!(
            "the tensors take {needed} bytes, but {} follow the header",
            data.len()
        ))
        .with_hint(match data.len().checked_sub(needed) {
            Some(more) => format!("the file is {more} bytes longer than its header says; fetch it again"),
            None => "the download is incomplete; fetch the file again".to_owned(),
        }));
    }
    let data_start = bytes.len() - data.len();
    let mut tensors = Vec::with_capacity(entries.len());
    for (file_name, entry) in entries {
        let name = names::canonical(&file_name).unwrap_or_else(|| file_name.clone());
        match stored(name, file_name, entry, data_start) {
            Ok(tensor) => tensors.push(tensor),
            Err((name, _)) if names::is_unread(&name) => {}
            Err((_, error)) => return Err(error),
        }
    }
    tensors.sort_by(|a, b| (a.range.start, &a.name).cmp(&(b.range.start, &b.name)));
    let mut last: Option<&StoredTensor> = None;
    for tensor in tensors.iter().filter(|tensor| !tensor.range.is_empty() && !names::is_unread(&tensor.name))
    {
        if let Some(last) = last
            && last.range.end > tensor.range.start
        {
            return Err(Error::invalid_model(format!(
                "the tensors {:?} and {:?} have bytes in common",
                shortened(&last.file_name),
                shortened(&tensor.file_name)
            ))
            .with_hint("the file is damaged; fetch it again"));
        }
        last = Some(tensor);
    }
    Ok(tensors)
}

/// A tensor that can be read as its entry says; otherwise its name and the error.
fn stored(
    name: String,
    file_name: String,
    entry: Entry,
    data_start: usize,
) -> std::result::Result<StoredTensor, (String, Error)> {
    let Entry { dtype, shape, data_offsets: (start, end) } = entry;
    let Some(stored_type) = known_type(&dtype) else {
        let error = Error::unsupported(format!(
            "tensor {:?} has the type {:?}, which this version does not know",
            shortened(&file_name),
            shortened(&dtype)
        ));
        return Err((name, error.with_hint("use a checkpoint in F32, F16 or BF16, or a GGUF file")));
    };
    let num_elements = shape.iter().try_fold(1_usize, |product, dim| product.checked_mul(*dim));
    let num_bits = num_elements.and_then(|number| number.checked_mul(stored_type.bitsize()));
    let num_bytes = num_bits.filter(|bits| bits.is_multiple_of(8)).map(|bits| bits / 8);
    if num_bytes.is_none() || end.checked_sub(start) != num_bytes {
        let error = Error::invalid_model(format!(
            "tensor {:?} has the type {stored_type}, the shape {} and the bytes {start} to {end}, which do not fit",
            shortened(&file_name),
            shortened(&format!("{shape:?}"))
        ));
        return Err((name, error.with_hint("the file is damaged; fetch it again")));
    }
    let range = data_start + start..data_start + end;
    Ok(StoredTensor { name, file_name, stored_type, shape, range, part: 0 })
}

fn known_type(name: &str) -> Option<Dtype> {
    Dtype::deserialize(StrDeserializer::<serde::de::value::Error>::new(name)).ok()
}
