//! The key-value part of a GGUF header, with lenient getters.
//!
//! Writers disagree about integer widths, so every getter converts between them; a value of the wrong
//! kind (a string where a number is wanted) reads as absent.

use std::collections::BTreeMap;

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
    /// Arrays of arrays, of which only the length is kept: nothing reads them.
    Nested(usize),
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
