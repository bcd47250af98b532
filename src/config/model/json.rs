//! A JSON object of a Hugging Face folder, with getters that name the key.

use serde_json::Value;

use crate::{Error, Result};

/// Most characters of a value in a message.
const MAX_SHOWN: usize = 80;

/// An object with typed getters. `null` reads as absent; a value of the wrong kind is an error.
#[derive(Clone, Copy)]
pub(in crate::config) struct Json<'a> {
    pub(in crate::config) name: &'a str,
    pub(in crate::config) value: &'a Value,
}

impl<'a> Json<'a> {
    pub(in crate::config) fn present(&self, key: &str) -> Option<&'a Value> {
        self.value.get(key).filter(|value| !value.is_null())
    }

    /// Whether the key is missing, for keys where `null` has its own meaning.
    pub(super) fn is_missing(&self, key: &str) -> bool {
        self.value.get(key).is_none()
    }

    fn typed<T>(&self, key: &str, kind: &str, read: impl Fn(&'a Value) -> Option<T>) -> Result<Option<T>> {
        self.present(key)
            .map(|value| {
                read(value).ok_or_else(|| {
                    let value = shown(value);
                    Error::invalid_model(format!("{key} in {} is {value}, not {kind}", self.name))
                        .with_hint(format!("correct {key}, or omit it if it is not needed"))
                })
            })
            .transpose()
    }

    pub(super) fn usize(&self, key: &str) -> Result<Option<usize>> {
        self.typed(key, "a non-negative integer", integer)
    }

    pub(super) fn required_usize(&self, key: &str) -> Result<usize> {
        self.usize(key)?.ok_or_else(|| self.missing(key))
    }

    /// The value, or the one that the model's class has where the file has no such key.
    pub(super) fn usize_or(&self, key: &str, default: Option<usize>) -> Result<usize> {
        match (self.usize(key)?, default) {
            (Some(value), _) => Ok(value),
            (None, Some(default)) => Ok(default),
            (None, None) => Err(self.missing(key)),
        }
    }

    pub(super) fn f64(&self, key: &str) -> Result<Option<f64>> {
        self.typed(key, "a number", Value::as_f64)
    }

    pub(super) fn required_f64(&self, key: &str) -> Result<f64> {
        self.f64(key)?.ok_or_else(|| self.missing(key))
    }

    pub(super) fn bool(&self, key: &str) -> Result<Option<bool>> {
        self.typed(key, "true or false", boolean)
    }

    pub(super) fn str(&self, key: &str) -> Result<Option<&'a str>> {
        self.typed(key, "a string", Value::as_str)
    }

    pub(super) fn list(&self, key: &str) -> Result<Option<&'a [Value]>> {
        self.typed(key, "a list", |value| value.as_array().map(Vec::as_slice))
    }

    pub(super) fn numbers(&self, key: &str) -> Result<Option<Vec<f64>>> {
        let read = |value: &Value| value.as_array()?.iter().map(Value::as_f64).collect();
        self.typed(key, "a list of numbers", read)
    }

    /// An object in this one; none if it is empty, or `false`, as Python takes it.
    pub(super) fn object(&self, key: &'a str) -> Result<Option<Self>> {
        let says_nothing = |value: &Value| match value {
            Value::Bool(false) => true,
            Value::Object(fields) => fields.is_empty(),
            _ => false,
        };
        let object = self.typed(key, "an object", |value| {
            (value.is_object() || says_nothing(value)).then_some(Json { name: key, value })
        })?;
        Ok(object.filter(|object| !says_nothing(object.value)))
    }

    /// One id or a list of them. −1 means none.
    pub(super) fn token_ids(&self, key: &str) -> Result<Vec<u32>> {
        let id = |value: &Value| u32::try_from(integer(value)?).ok();
        let ids = |values: &[Value]| {
            values.iter().filter(|value| value.as_i64() != Some(-1)).map(id).collect::<Option<Vec<_>>>()
        };
        let read = |value: &Value| match value {
            Value::Array(values) => ids(values),
            value => ids(std::slice::from_ref(value)),
        };
        Ok(self.typed(key, "a token id or a list of them", read)?.unwrap_or_default())
    }

    fn missing(&self, key: &str) -> Error {
        Error::invalid_model(format!("{key} is missing in {}", self.name))
    }
}

/// An integer, which some writers give a point: `4096.0`.
fn integer(value: &Value) -> Option<usize> {
    match value.as_u64() {
        Some(value) => usize::try_from(value).ok(),
        None => {
            let value = value.as_f64().filter(|value| value.fract() == 0.0)?;
            // Beyond this, neighbours of an integer are not integers of their own.
            (0.0..=9.0e15).contains(&value).then_some(value as usize)
        }
    }
}

/// A switch, which some writers make a number.
fn boolean(value: &Value) -> Option<bool> {
    value.as_bool().or_else(|| match value.as_u64() {
        Some(0) => Some(false),
        Some(1) => Some(true),
        _ => None,
    })
}

/// The value for a message, cut if it is long.
pub(in crate::config) fn shown(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(MAX_SHOWN) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}
