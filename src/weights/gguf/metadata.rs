//! The key-value section of a GGUF header, with lenient getters.
//!
//! Writers disagree about integer widths, so every getter converts between them; a value of the wrong
//! kind (a string instead of a number) reads as absent, and [`Metadata::checked`] makes an error of it.

use std::collections::BTreeMap;

use crate::{Error, Result};

/// One metadata value.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// Any unsigned integer.
    Unsigned(u64),
    /// Any signed integer.
    Signed(i64),
    /// f32 or f64.
    Float(f64),
    /// A boolean.
    Bool(bool),
    /// UTF-8 text.
    String(String),
    /// Strings.
    Strings(Vec<String>),
    /// Integers of any width, as i64 (a u64 above `i64::MAX` saturates).
    Integers(Vec<i64>),
    /// f32 or f64 values.
    Floats(Vec<f32>),
    /// Booleans.
    Bools(Vec<bool>),
    /// Arrays of arrays, of which only the length is kept: no code reads them.
    Nested(usize),
}

impl Value {
    fn is_empty_list(&self) -> bool {
        match self {
            Self::Strings(list) => list.is_empty(),
            Self::Integers(list) => list.is_empty(),
            Self::Floats(list) => list.is_empty(),
            Self::Bools(list) => list.is_empty(),
            Self::Nested(length) => *length == 0,
            _ => false,
        }
    }

    /// The value in an error, always short.
    #[must_use]
    pub fn describe(&self) -> String {
        const MAX_CHARS: usize = 40;
        let list = |length: usize, what: &str| format!("a list of {length} {what}");
        match self {
            Self::Unsigned(value) => value.to_string(),
            Self::Signed(value) => value.to_string(),
            Self::Float(value) => value.to_string(),
            Self::Bool(value) => value.to_string(),
            Self::String(text) => match text.char_indices().nth(MAX_CHARS) {
                Some((end, _)) => format!("the text {:?} and more", &text[..end]),
                None => format!("the text {text:?}"),
            },
            Self::Strings(values) => list(values.len(), "strings"),
            Self::Integers(values) => list(values.len(), "whole numbers"),
            Self::Floats(values) => list(values.len(), "numbers"),
            Self::Bools(values) => list(values.len(), "truth values"),
            Self::Nested(length) => list(*length, "lists"),
        }
    }
}

/// All metadata of a file, sorted by key.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Metadata {
    /// Key → value.
    pub entries: BTreeMap<String, Value>,
}

impl Metadata {
    /// The value under `key`.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.entries.get(key)
    }

    /// The value under `key`, converted by `get`; an error for a value of another kind.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidModel`] with the key if there is a value of another kind. A list without entries is of
    /// every kind of list.
    pub fn checked<'m, T>(
        &'m self,
        key: &str,
        get: impl Fn(&'m Self, &str) -> Option<T>,
        expected: &str,
    ) -> Result<Option<T>> {
        match (self.get(key), get(self, key)) {
            (None, _) => Ok(None),
            (_, Some(found)) => Ok(Some(found)),
            (Some(value), None) if value.is_empty_list() => Ok(None),
            (Some(value), None) => {
                Err(Error::invalid_model(format!("{key} is {}, expected {expected}", value.describe())))
            }
        }
    }

    /// The token id under `key`; none where a writer marks its absence (-1 in some width).
    ///
    /// # Errors
    /// As [`Self::checked`].
    pub fn checked_token_id(&self, key: &str) -> Result<Option<u32>> {
        match self.get(key) {
            Some(Value::Signed(-1) | Value::Unsigned(0xFFFF_FFFF | u64::MAX)) => Ok(None),
            _ => self.checked(key, Self::token_id, "a token id, which is a whole number").map_err(|error| {
                error.with_hint("correct the key, or remove it from the file if the model has no such token")
            }),
        }
    }

    /// A non-negative integer of any stored width. An array (per-layer values) reads as its first
    /// element if all elements are equal.
    #[must_use]
    pub fn usize(&self, key: &str) -> Option<usize> {
        match self.get(key)? {
            Value::Unsigned(value) => usize::try_from(*value).ok(),
            Value::Signed(value) => usize::try_from(*value).ok(),
            Value::Integers(values) => {
                let first = *values.first()?;
                values.iter().all(|value| *value == first).then(|| usize::try_from(first).ok())?
            }
            _ => None,
        }
    }

    /// A token id.
    #[must_use]
    pub fn token_id(&self, key: &str) -> Option<u32> {
        self.usize(key).and_then(|value| u32::try_from(value).ok())
    }

    /// A number as f64; integers convert.
    #[must_use]
    pub fn f64(&self, key: &str) -> Option<f64> {
        match self.get(key)? {
            Value::Float(value) => Some(*value),
            Value::Unsigned(value) => Some(*value as f64),
            Value::Signed(value) => Some(*value as f64),
            _ => None,
        }
    }

    /// A boolean; 0 and 1 convert.
    #[must_use]
    pub fn bool(&self, key: &str) -> Option<bool> {
        match self.get(key)? {
            Value::Bool(value) => Some(*value),
            Value::Unsigned(0) | Value::Signed(0) => Some(false),
            Value::Unsigned(1) | Value::Signed(1) => Some(true),
            _ => None,
        }
    }

    /// Text.
    #[must_use]
    pub fn str(&self, key: &str) -> Option<&str> {
        match self.get(key)? {
            Value::String(value) => Some(value),
            _ => None,
        }
    }

    /// An array of strings.
    #[must_use]
    pub fn strings(&self, key: &str) -> Option<&[String]> {
        match self.get(key)? {
            Value::Strings(values) => Some(values),
            _ => None,
        }
    }

    /// An array of booleans.
    #[must_use]
    pub fn bools(&self, key: &str) -> Option<&[bool]> {
        match self.get(key)? {
            Value::Bools(values) => Some(values),
            _ => None,
        }
    }

    /// An array of integers.
    #[must_use]
    pub fn integers(&self, key: &str) -> Option<&[i64]> {
        match self.get(key)? {
            Value::Integers(values) => Some(values),
            _ => None,
        }
    }

    /// An array of floats.
    #[must_use]
    pub fn floats(&self, key: &str) -> Option<&[f32]> {
        match self.get(key)? {
            Value::Floats(values) => Some(values),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check<T: PartialEq + std::fmt::Debug>(
        get: impl Fn(&Metadata, &str) -> Option<T>,
        value: Value,
        expected: Option<T>,
    ) {
        let metadata = Metadata { entries: [("key".to_owned(), value)].into() };
        assert_eq!([get(&metadata, "key"), get(&metadata, "other")], [expected, None], "{metadata:?}");
    }

    #[test]
    fn numbers_convert() {
        check(Metadata::usize, Value::Unsigned(7), Some(7));
        check(Metadata::usize, Value::Signed(7), Some(7));
        check(Metadata::usize, Value::Signed(-7), None);
        check(Metadata::usize, Value::Float(7.0), None);
        check(Metadata::usize, Value::Integers(vec![8, 8]), Some(8));
        check(Metadata::usize, Value::Integers(vec![8, 9]), None);
        check(Metadata::usize, Value::Integers(vec![]), None);
        check(Metadata::token_id, Value::Unsigned(1 << 32), None);
        check(Metadata::f64, Value::Unsigned(2), Some(2.0));
        check(Metadata::f64, Value::Signed(-2), Some(-2.0));
        check(Metadata::f64, Value::Float(0.5), Some(0.5));
        check(Metadata::f64, Value::String("0.5".into()), None);
        check(Metadata::bool, Value::Bool(true), Some(true));
        check(Metadata::bool, Value::Unsigned(1), Some(true));
        check(Metadata::bool, Value::Signed(0), Some(false));
        check(Metadata::bool, Value::Unsigned(2), None);
    }

    #[test]
    fn values_of_another_kind_are_errors_where_they_are_not_to_be_ignored() {
        let with = |value: Value| Metadata { entries: [("key".to_owned(), value)].into() };
        let check = |value: Value, expected: &str| {
            let error = with(value).checked("key", Metadata::bool, "yes or no").unwrap_err();
            assert_eq!(error.message(), format!("key is {expected}, expected yes or no"));
        };
        check(Value::String("true".into()), "the text \"true\"");
        check(Value::String("x".repeat(50)), &format!("the text {:?} and more", "x".repeat(40)));
        check(Value::Unsigned(2), "2");
        check(Value::Float(0.5), "0.5");
        check(Value::Strings(vec!["x".into()]), "a list of 1 strings");
        assert_eq!(with(Value::Bool(true)).checked("key", Metadata::bool, "").unwrap(), Some(true));
        assert_eq!(with(Value::Integers(vec![])).checked("key", Metadata::strings, "").unwrap(), None);
        assert_eq!(Metadata::default().checked("key", Metadata::bool, "").unwrap(), None);
        for none in [Value::Signed(-1), Value::Unsigned(u64::from(u32::MAX))] {
            assert_eq!(with(none).checked_token_id("key").unwrap(), None);
        }
        assert_eq!(with(Value::Signed(5)).checked_token_id("key").unwrap(), Some(5));
        assert!(with(Value::Signed(-2)).checked_token_id("key").is_err());
    }

    #[test]
    fn values_of_another_kind_are_absent() {
        let is_string = |metadata: &Metadata, key: &str| metadata.str(key).map(str::to_owned);
        check(is_string, Value::String("x".into()), Some("x".into()));
        check(is_string, Value::Unsigned(1), None);
        let strings = |metadata: &Metadata, key: &str| metadata.strings(key).map(<[_]>::to_vec);
        check(strings, Value::Strings(vec!["x".into()]), Some(vec!["x".into()]));
        check(strings, Value::Integers(vec![1]), None);
        let floats = |metadata: &Metadata, key: &str| metadata.floats(key).map(<[_]>::to_vec);
        check(floats, Value::Floats(vec![1.0]), Some(vec![1.0]));
        check(floats, Value::Integers(vec![1]), None);
    }
}
