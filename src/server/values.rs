//! JSON values that are charged to their request, and read only as far as needed.
//!
//! A body is checked as a whole and split into its fields. A field becomes a value when it is taken. A field
//! that is never taken costs only its bytes, whatever it contains.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use serde::de::{Deserialize, DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use super::account::{allocated, charge, give_back, refusal};
use super::error::ApiError;

/// Most values in a body, including lists and objects: as many as a prompt in token ids for the longest
/// context windows.
const MAX_VALUES: usize = 1 << 21;
/// Most nested lists and objects, which is `serde_json`'s own limit.
const MAX_DEPTH: usize = 127;
/// Memory for an entry of an object: its hash, its name and its value.
pub(super) const ENTRY_BYTES: usize = size_of::<(u64, String, Value)>();

/// Why JSON could not be read.
#[derive(Debug)]
pub(super) enum ReadError {
    /// There is too little memory for it.
    Refused(ApiError),
    /// It is not JSON.
    Json(serde_json::Error),
}

impl From<serde_json::Error> for ReadError {
    fn from(error: serde_json::Error) -> Self {
        match refusal() {
            Some(refusal) => Self::Refused(refusal),
            None => Self::Json(error),
        }
    }
}

impl From<ReadError> for ApiError {
    fn from(error: ReadError) -> Self {
        match error {
            ReadError::Refused(refusal) => refusal,
            ReadError::Json(error) => Self::not_json(error),
        }
    }
}

/// Parses JSON, and charges the work on this thread for it.
pub(super) fn read(text: &[u8]) -> Result<Value, ReadError> {
    let mut deserializer = serde_json::Deserializer::from_slice(text);
    let value = Build.deserialize(&mut deserializer)?;
    deserializer.end()?;
    Ok(value)
}

/// Checks that a body is JSON without too many values, and keeps nothing. `serde_json` limits the depth.
pub(super) fn check(body: &[u8]) -> Result<(), ApiError> {
    let mut num_left = MAX_VALUES;
    let mut deserializer = serde_json::Deserializer::from_slice(body);
    Checked(&mut num_left).deserialize(&mut deserializer).map_err(|error| not_json(body, &error))?;
    deserializer.end().map_err(ApiError::not_json)
}

/// 400: the body is not JSON, or exceeds a limit.
fn not_json(body: &[u8], error: &serde_json::Error) -> ApiError {
    let words = error.to_string();
    let position = format!("at line {} column {}", error.line(), error.column());
    if words.starts_with("recursion limit exceeded") {
        let message =
            format_args!("it has more than {MAX_DEPTH} lists and objects inside one another {position}");
        return ApiError::not_json(message);
    }
    if words.starts_with("number out of range") {
        let path = super::path_in_body::path(body, error.line(), error.column());
        return ApiError::not_json(format_args!("{path} is a number out of range {position}"));
    }
    ApiError::not_json(words)
}

/// Memory for a copy of a value.
pub(super) fn copy_bytes(value: &Value) -> usize {
    match value {
        Value::Null | Value::Bool(_) | Value::Number(_) => 0,
        Value::String(text) => allocated(text.len()),
        Value::Array(items) => {
            allocated(items.len() * size_of::<Value>()) + items.iter().map(copy_bytes).sum::<usize>()
        }
        Value::Object(fields) => {
            let entry = |(name, value): (&String, &Value)| allocated(name.len()) + copy_bytes(value);
            map_bytes(fields.len(), ENTRY_BYTES) + fields.iter().map(entry).sum::<usize>()
        }
    }
}

/// Charges for copies of values before they are made.
///
/// # Errors
/// 429 or 413 if there is no memory for it.
pub(super) fn charge_copies<'v>(values: impl IntoIterator<Item = &'v Value>) -> Result<(), ApiError> {
    charge(values.into_iter().map(|value| size_of::<Value>() + copy_bytes(value)).sum())
}

/// Memory of a map that has grown to this many entries: the entries in their order, and the hash table.
pub(super) fn map_bytes(num_entries: usize, entry_bytes: usize) -> usize {
    if num_entries == 0 {
        return 0;
    }
    let num_buckets = match num_entries {
        1..=3 => 4,
        4..=7 => 8,
        _ => (num_entries * 8 / 7).next_power_of_two(),
    };
    let room = if num_buckets < 16 { num_buckets - 1 } else { num_buckets / 8 * 7 };
    let room = if num_entries == 1 { 1 } else { room };
    // For each bucket, an index into the entries and a byte of the hash; and one more group of such bytes.
    allocated(room * entry_bytes) + allocated(num_buckets * (size_of::<usize>() + 1) + 16)
}

/// The charge of a map that is being filled.
#[derive(Debug, Default)]
pub(super) struct MapCharge {
    num_bytes: usize,
}

impl MapCharge {
    /// Call before adding an entry to a map of `num_entries`. While the map grows, it exists twice.
    pub(super) fn grow<T>(
        &mut self,
        num_entries: usize,
        entry_bytes: usize,
        add: impl FnOnce() -> T,
    ) -> Result<T, ApiError> {
        let wanted = map_bytes(num_entries + 1, entry_bytes);
        if wanted == self.num_bytes {
            return Ok(add());
        }
        charge(wanted)?;
        let added = add();
        give_back(self.num_bytes);
        self.num_bytes = wanted;
        Ok(added)
    }
}

/// Reserves space for one more item. While the list grows, it exists twice.
pub(super) fn grow<T>(list: &mut Vec<T>) -> Result<(), ApiError> {
    if list.len() < list.capacity() {
        return Ok(());
    }
    let before = allocated(list.capacity() * size_of::<T>());
    let more = list.len().max(1);
    charge(allocated((list.len() + more) * size_of::<T>()))?;
    list.reserve_exact(more);
    give_back(before);
    Ok(())
}

/// Converts the error for a library that has its own type. The real one is read from the charge afterwards.
fn refused<E: serde::de::Error>(_: ApiError) -> E {
    E::custom("there is no memory for it")
}

/// Builds a value.
#[derive(Clone, Copy)]
struct Build;

impl<'de> DeserializeSeed<'de> for Build {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Build {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(Number::from_f64(value).map_or(Value::Null, Value::Number))
    }

    fn visit_str<E: serde::de::Error>(self, value: &str) -> Result<Value, E> {
        charge(allocated(value.len())).map_err(refused)?;
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut values = Vec::new();
        while let Some(value) = items.next_element_seed(self)? {
            grow(&mut values).map_err(refused)?;
            values.push(value);
        }
        Ok(Value::Array(values))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut fields = Map::new();
        let mut charged = MapCharge::default();
        while let Some(name) = entries.next_key::<String>()? {
            charge(allocated(name.len())).map_err(refused)?;
            let value = entries.next_value_seed(self)?;
            let num_entries = fields.len();
            let add = || {
                if num_entries == 0 {
                    // Most objects have few entries. By default, the map would have space for three.
                    fields = Map::with_capacity(1);
                }
                fields.insert(name, value)
            };
            charged.grow(num_entries, ENTRY_BYTES, add).map_err(refused)?;
        }
        Ok(Value::Object(fields))
    }
}

/// Counts values and builds nothing.
struct Checked<'a>(&'a mut usize);

impl<'de> DeserializeSeed<'de> for Checked<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        *self.0 = self
            .0
            .checked_sub(1)
            .ok_or_else(|| D::Error::custom(format_args!("it has more than {MAX_VALUES} values")))?;
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Checked<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        Ok(())
    }

    fn visit_u64<E>(self, _: u64) -> Result<(), E> {
        Ok(())
    }

    fn visit_i64<E>(self, _: i64) -> Result<(), E> {
        Ok(())
    }

    fn visit_f64<E>(self, _: f64) -> Result<(), E> {
        Ok(())
    }

    fn visit_str<E>(self, _: &str) -> Result<(), E> {
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        while items.next_element_seed(Checked(self.0))?.is_some() {}
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<(), A::Error> {
        while entries.next_key::<Name>()?.is_some() {
            entries.next_value_seed(Checked(self.0))?;
        }
        Ok(())
    }
}

/// A name that is checked as text and not kept.
struct Name;

impl<'de> Deserialize<'de> for Name {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(NameVisitor)
    }
}

struct NameVisitor;

impl Visitor<'_> for NameVisitor {
    type Value = Name;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a name")
    }

    fn visit_str<E>(self, _: &str) -> Result<Name, E> {
        Ok(Name)
    }
}

/// A value of a checked body, parsed or not.
#[derive(Debug, Clone)]
pub(super) enum BodyValue {
    /// Its range in the body.
    Unread(Arc<Vec<u8>>, Range<usize>),
    Read(Value),
}

impl From<Value> for BodyValue {
    fn from(value: Value) -> Self {
        Self::Read(value)
    }
}

impl BodyValue {
    /// The value of a whole body.
    pub(super) fn whole(body: Arc<Vec<u8>>) -> Self {
        let range = 0..body.len();
        Self::Unread(body, range).trimmed()
    }

    /// Removes the white space around it.
    fn trimmed(self) -> Self {
        match self {
            Self::Unread(body, range) => {
                let start = after_space(&body, range.start);
                let length = body[start..range.end].trim_ascii_end().len();
                Self::Unread(body, start..start + length)
            }
            read @ Self::Read(_) => read,
        }
    }

    /// Parses the value.
    ///
    /// # Errors
    /// 429 or 413 if there is no memory for it.
    pub(super) fn read(self) -> Result<Value, ApiError> {
        match self {
            Self::Unread(body, range) => Ok(read(&body[range])?),
            Self::Read(value) => Ok(value),
        }
    }

    pub(super) fn is_null(&self) -> bool {
        match self {
            Self::Unread(body, range) => &body[range.clone()] == b"null",
            Self::Read(value) => value.is_null(),
        }
    }

    /// Whether its first byte is that of an object, or of a list.
    fn begins_with(&self, sign: u8) -> bool {
        match self {
            Self::Unread(body, range) => body.get(range.start) == Some(&sign),
            Self::Read(value) => match sign {
                b'{' => value.is_object(),
                _ => value.is_array(),
            },
        }
    }

    pub(super) fn is_object(&self) -> bool {
        self.begins_with(b'{')
    }

    pub(super) fn is_list(&self) -> bool {
        self.begins_with(b'[')
    }

    pub(super) fn is_number(&self) -> bool {
        match self {
            Self::Unread(body, range) => {
                body.get(range.start).is_some_and(|byte| byte.is_ascii_digit() || *byte == b'-')
            }
            Self::Read(value) => value.is_number(),
        }
    }

    /// The items of a list, unparsed; empty if it is not a list.
    ///
    /// # Errors
    /// 429 or 413 if there is no memory for them.
    pub(super) fn into_items(self) -> Result<Vec<Self>, ApiError> {
        let mut items = Vec::new();
        match self {
            Self::Read(Value::Array(values)) => return Ok(values.into_iter().map(Self::Read).collect()),
            Self::Unread(body, range) if body[range.start] == b'[' => {
                let mut offset = after_space(&body, range.start + 1);
                while body[offset] != b']' {
                    let end = end_of_value(&body, offset);
                    grow(&mut items)?;
                    items.push(Self::Unread(Arc::clone(&body), offset..end));
                    offset = after_sign(&body, end, b',');
                }
            }
            _ => {}
        }
        Ok(items)
    }

    /// Calls `add` for each field of an object, unparsed.
    ///
    /// # Errors
    /// 429 or 413 if there is no memory for them, or the error of `add`.
    pub(super) fn for_each_field(
        self,
        mut add: impl FnMut(String, Self) -> Result<(), ApiError>,
    ) -> Result<(), ApiError> {
        match self {
            Self::Read(Value::Object(fields)) => {
                fields.into_iter().try_for_each(|(name, value)| add(name, Self::Read(value)))
            }
            Self::Unread(body, range) if body[range.start] == b'{' => {
                let mut offset = after_space(&body, range.start + 1);
                while body[offset] != b'}' {
                    let end = end_of_value(&body, offset);
                    charge(allocated(end - offset))?;
                    let name = serde_json::from_slice(&body[offset..end]).map_err(ApiError::not_json)?;
                    offset = after_sign(&body, end, b':');
                    let end = end_of_value(&body, offset);
                    add(name, Self::Unread(Arc::clone(&body), offset..end))?;
                    offset = after_sign(&body, end, b',');
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// The list of token ids, or the value itself if it is anything else.
    ///
    /// # Errors
    /// 429 or 413 if there is no memory for them.
    pub(super) fn into_token_ids(self) -> Result<Result<Vec<u32>, Self>, ApiError> {
        let found = match &self {
            Self::Unread(body, range) if self.is_list() => {
                let mut deserializer = serde_json::Deserializer::from_slice(&body[range.clone()]);
                match deserializer.deserialize_seq(TokenIds).map_err(ReadError::from) {
                    Ok(ids) => Some(ids),
                    Err(ReadError::Refused(refusal)) => return Err(refusal),
                    Err(ReadError::Json(_)) => None,
                }
            }
            Self::Unread(..) => None,
            Self::Read(value) => value.as_array().and_then(|items| {
                items.iter().map(|item| u32::try_from(item.as_u64()?).ok()).collect::<Option<Vec<u32>>>()
            }),
        };
        Ok(found.ok_or(self))
    }
}

/// Parses a list of numbers that can be token ids.
struct TokenIds;

impl<'de> Visitor<'de> for TokenIds {
    type Value = Vec<u32>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of token ids")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Vec<u32>, A::Error> {
        let mut ids = Vec::new();
        while let Some(id) = items.next_element()? {
            grow(&mut ids).map_err(refused)?;
            ids.push(id);
        }
        Ok(ids)
    }
}

/// The offset of the first byte from here that is not white space.
fn after_space(body: &[u8], offset: usize) -> usize {
    let is_space = |byte: &u8| matches!(byte, b' ' | b'\t' | b'\n' | b'\r');
    offset + body[offset..].iter().take_while(|byte| is_space(byte)).count()
}

/// The offset after white space, and after this sign with more white space if it is there.
fn after_sign(body: &[u8], offset: usize, sign: u8) -> usize {
    let offset = after_space(body, offset);
    if body.get(offset) == Some(&sign) { after_space(body, offset + 1) } else { offset }
}

/// The end of the value that begins here, in a checked body.
fn end_of_value(body: &[u8], start: usize) -> usize {
    let (mut offset, mut depth) = (start, 0_usize);
    while let Some(byte) = body.get(offset) {
        match byte {
            b'"' => {
                offset = end_of_string(body, offset);
                if depth == 0 {
                    return offset;
                }
                continue;
            }
            b'[' | b'{' => depth += 1,
            b']' | b'}' | b',' | b':' | b' ' | b'\t' | b'\n' | b'\r' if depth == 0 => return offset,
            b']' | b'}' => {
                depth -= 1;
                if depth == 0 {
                    return offset + 1;
                }
            }
            _ => {}
        }
        offset += 1;
    }
    offset
}

fn end_of_string(body: &[u8], start: usize) -> usize {
    let mut offset = start + 1;
    while let Some(byte) = body.get(offset) {
        match byte {
            b'"' => return offset + 1,
            b'\\' => offset += 2,
            _ => offset += 1,
        }
    }
    body.len()
}
