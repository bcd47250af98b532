//! JSON from clients: limited in size, and read field by field with errors that name the field.

use std::sync::Arc;

use indexmap::IndexMap;
use serde_json::{Map, Value};

use super::account::{allocated, charge, give_back, taken};
use super::error::ApiError;
use super::ignored::Ignored;
use super::schema_numbers;
use super::values::{self, BodyValue, MapCharge};

/// Memory for a field that was not read yet.
const FIELD_BYTES: usize = size_of::<(u64, String, BodyValue)>();

/// For a number of tokens: no limit but the context's.
pub(super) const NO_LIMIT: usize = usize::MAX;

/// Parses an object. Its fields are parsed when they are taken.
pub(super) fn parse_object(body: impl Into<Vec<u8>>) -> Result<Fields, ApiError> {
    let mut body = body.into();
    // Some programs on Windows begin texts with a byte-order mark.
    if body.starts_with(b"\xef\xbb\xbf") {
        body.drain(..3);
    }
    with_whole_characters(&mut body);
    values::check(&body)?;
    let body = Arc::new(body);
    let text = Arc::clone(&body);
    let body = BodyValue::whole(body);
    if !body.is_object() {
        let other = describe(&body.read()?);
        return Err(ApiError::not_json(format_args!("it is {other}, expected an object")));
    }
    let fields = Fields::of(body, String::new())?;
    let is_free = |choice: &Value| {
        let kind = choice.get("type").or(choice.get("mode")).unwrap_or(choice);
        ["auto", "none"].iter().any(|word| kind == word)
    };
    let requires_call = fields.look("tool_choice", |choice| !choice.is_null() && !is_free(choice))?;
    schema_numbers::check(&text, requires_call.unwrap_or(false))?;
    Ok(fields)
}

/// Replaces lone surrogates by U+FFFD. Clients send them when they cut a text in the middle of a pair.
fn with_whole_characters(body: &mut [u8]) {
    let is_half = |body: &[u8], offset: usize, second: &[u8]| {
        let digits = body.get(offset..offset + 6).and_then(|escape| escape.strip_prefix(b"\\u"));
        digits.is_some_and(|digits| {
            matches!(digits[0], b'd' | b'D')
                && second.contains(&digits[1])
                && digits[2..].iter().all(u8::is_ascii_hexdigit)
        })
    };
    let mut offset = 0;
    while let Some(found) = body.get(offset..).and_then(|rest| rest.iter().position(|byte| *byte == b'\\')) {
        offset += found;
        let (is_first, is_second) = (is_half(body, offset, b"89abAB"), is_half(body, offset, b"cdefCDEF"));
        offset += match (is_first, is_second) {
            (true, _) if is_half(body, offset + 6, b"cdefCDEF") => 12,
            (false, false) => 2,
            _ => {
                body[offset + 2..offset + 6].copy_from_slice(b"fffd");
                6
            }
        };
    }
}

/// The fields of an object, taken out one by one. A field that is `null` counts as absent.
#[derive(Debug)]
pub(super) struct Fields {
    fields: IndexMap<String, BodyValue>,
    /// The object's path in the body, with a dot at the end; empty for the body itself.
    path: String,
    /// Receives fields that were not read.
    ignored: Option<Ignored>,
}

impl Drop for Fields {
    fn drop(&mut self) {
        let Some(ignored) = &self.ignored else { return };
        for (name, value) in &self.fields {
            if !value.is_null() {
                ignored.add(&format!("{}{name}", self.path));
            }
        }
    }
}

impl Fields {
    /// The fields of a value that is an object.
    fn of(part: BodyValue, path: String) -> Result<Self, ApiError> {
        let mut fields = IndexMap::new();
        let mut charged = MapCharge::default();
        part.for_each_field(|name, part| {
            charged.grow(fields.len(), FIELD_BYTES, || {
                if fields.is_empty() {
                    fields = IndexMap::with_capacity(1);
                }
                fields.insert(name, part);
            })
        })?;
        Ok(Self { fields, path, ignored: None })
    }

    /// The object at `path` inside the body. Its unread fields are not reported.
    pub(super) fn inside(part: impl Into<BodyValue>, path: &str) -> Result<Self, ApiError> {
        let part = part.into();
        match part.is_object() {
            true => Self::of(part, format!("{path}.")),
            false => Err(wrong_type(path.to_owned(), &part.read()?, "an object")),
        }
    }

    /// The object that was taken out of the field `name`.
    pub(super) fn within(&self, name: &str, part: impl Into<BodyValue>) -> Result<Self, ApiError> {
        let mut inner = Self::inside(part, &self.path(name))?;
        inner.ignored.clone_from(&self.ignored);
        Ok(inner)
    }

    /// The objects of the list that was taken out of the field `name`.
    pub(super) fn objects<P: Into<BodyValue>>(
        &self,
        name: &str,
        items: Vec<P>,
    ) -> impl Iterator<Item = Result<Self, ApiError>> + use<P> {
        let (path, ignored) = (self.path(name), self.ignored.clone());
        items.into_iter().enumerate().map(move |(index, item)| {
            let mut inner = Self::inside(item, &format!("{path}[{index}]"))?;
            inner.ignored.clone_from(&ignored);
            Ok(inner)
        })
    }

    /// Reports the fields that are unread when this is dropped, including those of objects that are read from
    /// it.
    pub(super) fn telling(mut self, ignored: &Ignored) -> Self {
        self.ignored = Some(ignored.clone());
        self
    }

    /// The receiver of fields that were not read.
    pub(super) fn ignored(&self) -> Option<&Ignored> {
        self.ignored.as_ref()
    }

    /// The object's path in the body.
    pub(super) fn own_path(&self) -> &str {
        self.path.strip_suffix('.').unwrap_or(&self.path)
    }

    /// Whether the field is present and `null`. For the few fields where that differs from an absent field.
    pub(super) fn is_null(&self, name: &str) -> bool {
        self.fields.get(name).is_some_and(BodyValue::is_null)
    }

    /// Takes fields that are known and have no effect.
    pub(super) fn pass(&mut self, names: &[&str]) {
        names.iter().for_each(|name| drop(self.fields.swap_remove(*name)));
    }

    /// Takes the whole object, which has no effect here, and reports it once by its name.
    pub(super) fn leave_out(mut self, kind: &str) {
        if let Some(ignored) = self.ignored.take() {
            ignored.add(&format!("{}{kind}", self.path));
        }
    }

    /// Reports that the field `name` has no meaning here.
    pub(super) fn report(&self, name: &str) {
        if let Some(ignored) = &self.ignored {
            ignored.add(&self.path(name));
        }
    }

    /// The name of a field in errors.
    pub(super) fn path(&self, name: &str) -> String {
        format!("{}{name}", self.path)
    }

    /// Takes a field without reading it.
    pub(super) fn take_unread(&mut self, name: &str) -> Option<BodyValue> {
        self.fields.swap_remove(name).filter(|part| !part.is_null())
    }

    /// Takes a field.
    ///
    /// # Errors
    /// 429 or 413 if there is no memory for it.
    pub(super) fn take(&mut self, name: &str) -> Result<Option<Value>, ApiError> {
        self.take_unread(name).map(BodyValue::read).transpose()
    }

    /// Takes a list, whose items are not read yet.
    pub(super) fn list(&mut self, name: &str, expected: &str) -> Result<Option<Vec<BodyValue>>, ApiError> {
        let Some(part) = self.take_unread(name) else { return Ok(None) };
        match part.is_list() {
            true => part.into_items().map(Some),
            false => Err(wrong_type(self.path(name), &part.read()?, expected)),
        }
    }

    pub(super) fn bool(&mut self, name: &str) -> Result<Option<bool>, ApiError> {
        self.typed(name, "true or false", |value| value.as_bool())
    }

    /// An integer of at least 0.
    pub(super) fn unsigned(&mut self, name: &str) -> Result<Option<usize>, ApiError> {
        self.count(name, 0)
    }

    /// The same, where `least` is the smallest valid value, for the error message. Smaller values that are
    /// not negative are refused later, with the other limits.
    pub(super) fn count(&mut self, name: &str, least: usize) -> Result<Option<usize>, ApiError> {
        self.typed(name, &format!("an integer of at least {least}"), |value| {
            whole(value).and_then(|value| usize::try_from(value).ok())
        })
    }

    /// A number of tokens to generate, or −1 for the rest of the context: [`NO_LIMIT`]. `least` is as in
    /// [`Self::count`].
    pub(super) fn limit(&mut self, name: &str, least: usize) -> Result<Option<usize>, ApiError> {
        let expected = format!("an integer of at least {least}, or -1 for the rest of the context");
        self.typed(name, &expected, |value| match whole(value) {
            Some(-1) => Some(NO_LIMIT),
            value => value.and_then(|value| usize::try_from(value).ok()),
        })
    }

    /// A signed or unsigned 64-bit integer.
    pub(super) fn integer(&mut self, name: &str) -> Result<Option<i128>, ApiError> {
        self.typed(name, &format!("an integer from {} to {}", i64::MIN, u64::MAX), whole)
    }

    pub(super) fn number(&mut self, name: &str) -> Result<Option<f32>, ApiError> {
        self.typed(name, "a number", |value| value.as_f64().map(|value| value as f32))
    }

    pub(super) fn string(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        match self.take(name)? {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(wrong_type(self.path(name), &other, "a string")),
        }
    }

    pub(super) fn object(&mut self, name: &str) -> Result<Option<Self>, ApiError> {
        self.take_unread(name).map(|part| self.within(name, part)).transpose()
    }

    pub(super) fn token_ids(&mut self, name: &str) -> Result<Option<Vec<u32>>, ApiError> {
        let Some(part) = self.take_unread(name) else { return Ok(None) };
        match part.into_token_ids()? {
            Ok(ids) => Ok(Some(ids)),
            Err(other) => Err(wrong_token_ids(self.path(name), &other.read()?)),
        }
    }

    fn typed<T>(
        &mut self,
        name: &str,
        expected: &str,
        convert: impl FnOnce(&Value) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        let Some(value) = self.take(name)? else { return Ok(None) };
        convert(&value).map(Some).ok_or_else(|| wrong_type(self.path(name), &value, expected))
    }

    /// The name of a field that is not read yet.
    pub(super) fn first(&self) -> Option<&str> {
        self.fields.iter().find(|(_, value)| !value.is_null()).map(|(name, _)| name.as_str())
    }

    /// The result of `find` for the value at a path such as `text.format`. The value is not taken.
    ///
    /// # Errors
    /// 429 or 413 if there is no memory for it.
    pub(super) fn look<T>(&self, path: &str, find: impl FnOnce(&Value) -> T) -> Result<Option<T>, ApiError> {
        let (name, inner) = path.split_once('.').map_or((path, None), |(name, inner)| (name, Some(inner)));
        let Some(part) = self.fields.get(name) else { return Ok(None) };
        match (inner, part) {
            (None, BodyValue::Read(value)) => Ok(Some(find(value))),
            (None, unread) => {
                let before = taken();
                let found = find(&unread.clone().read()?);
                give_back(taken() - before);
                Ok(Some(found))
            }
            (Some(inner), part) if part.is_object() => {
                let before = taken();
                let found = Self::of(part.clone(), String::new())?.look(inner, find)?;
                give_back(taken() - before);
                Ok(found)
            }
            (Some(_), _) => Ok(None),
        }
    }

    /// The remaining fields.
    ///
    /// # Errors
    /// 429 or 413 if there is no memory for it.
    pub(super) fn into_map(mut self) -> Result<Map<String, Value>, ApiError> {
        let fields = std::mem::take(&mut self.fields);
        charge(values::map_bytes(fields.len(), values::ENTRY_BYTES))?;
        let entry = |(name, part): (String, BodyValue)| {
            charge(allocated(name.len()))?;
            Ok((name, part.read()?))
        };
        fields.into_iter().map(entry).collect()
    }
}

/// An integer, in any notation: 2.0 is 2.
fn whole(value: &Value) -> Option<i128> {
    /// Up to here, every integer is exact as a double.
    const MAX_EXACT: f64 = 9_007_199_254_740_992.0;
    let number = value.as_number()?;
    let exact = || number.as_f64().filter(|number| number.fract() == 0.0 && number.abs() <= MAX_EXACT);
    number.as_i128().or_else(|| exact().map(|number| number as i128))
}

/// 400: the value has another type.
pub(super) fn wrong_type(path: String, value: &Value, expected: &str) -> ApiError {
    let message = format!("{path} is {}, expected {expected}", describe(value));
    ApiError::invalid(path, message)
}

/// 400: the value is not a list of token ids. If it is a list, the error names its first invalid item.
pub(super) fn wrong_token_ids(path: String, value: &Value) -> ApiError {
    let is_wrong = |item: &&Value| item.as_u64().is_none_or(|id| id > u64::from(u32::MAX));
    let mut items = value.as_array().into_iter().flatten().enumerate();
    let Some((index, item)) = items.find(|(_, item)| is_wrong(item)) else {
        return wrong_type(path, value, "a list of token ids");
    };
    let found = describe(item);
    let expected = format!("a token id, which is an integer from 0 to {}", u32::MAX);
    let message = format!("{path}[{index}] is {found}, expected {expected}");
    ApiError::invalid(path, message)
}

/// A value for an error message, in one short line.
pub(super) fn describe(value: &Value) -> String {
    const MAX_CHARS: usize = 40;
    match value {
        Value::Object(_) => "an object".to_owned(),
        Value::Array(items) => format!("a list of {} items", items.len()),
        Value::String(text) if text.chars().nth(MAX_CHARS).is_some() => {
            format!("a string of {} bytes", text.len())
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => value.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(error: &ApiError) -> String {
        error.body()["error"]["message"].as_str().unwrap().to_owned()
    }

    #[test]
    fn bodies_are_bounded_and_errors_have_a_position() {
        let check = |body: &str, wanted: &str| {
            let message = message(&parse_object(body.as_bytes()).unwrap_err());
            assert!(message.contains(wanted), "{message} should say {wanted}");
        };
        check("", "line 1 column 0");
        check("{\"a\": 1", "EOF");
        check("{\"a\": NaN}", "line 1 column 7");
        check("{\"a\": 1e999}", "a is a number out of range");
        check("{\"a\": {\"b\": [1, {\"c\\\"\": -1e400}]}}", "a.b[1].c\" is a number out of range");
        check(&format!("{{\"a\": {}", "[".repeat(200)), "more than 127 lists and objects inside one another");
        check("{} {}", "trailing");
        let mut marked = parse_object("\u{feff}{\"a\": 2.0}".as_bytes()).unwrap();
        assert_eq!(marked.unsigned("a").unwrap(), Some(2));
        check("[1, 2]", "a list of 2 items");
        check(
            &format!("{{\"a\": {}{}}}", "[".repeat(10_000), "]".repeat(10_000)),
            "more than 127 lists and objects",
        );
        check(&format!("{{\"a\": [{}1]}}", "1,".repeat(1 << 21)), "more than 2097152 values");
        assert!(parse_object(b"{\"a\": \"\xff\"}").is_err());
    }

    #[test]
    fn half_a_character_becomes_a_replacement_character() {
        let check = |text: &str, expected: &str| {
            let mut fields = parse_object(format!("{{\"a\": \"{text}\"}}").as_bytes()).unwrap();
            assert_eq!(fields.string("a").unwrap().unwrap(), expected, "{text}");
        };
        check(r"a\ud83d b", "a\u{fffd} b");
        check(r"a\uD83D", "a\u{fffd}");
        check(r"\ude42 b", "\u{fffd} b");
        check(r"\ud83d\ude42", "\u{1f642}");
        check(r"\ud83d\ud83d\ude42\ude42", "\u{fffd}\u{1f642}\u{fffd}");
        check(r"\ud83d\n", "\u{fffd}\n");
        check(r"\\ud83d \ue000\u00d8", "\\ud83d \u{e000}\u{d8}");
        for text in [r"\ud83", r"\ud8", r"\u", "\\"] {
            assert!(parse_object(format!("{{\"a\": \"{text}").as_bytes()).is_err(), "{text}");
        }
    }

    #[test]
    fn fields_are_read_with_their_types() {
        let body =
            br#"{"a": null, "b": -1, "c": 9223372036854775808, "d": [1, 4294967296], "e": {"f": "x"}}"#;
        let mut fields = parse_object(body).unwrap();
        assert_eq!(fields.bool("a").unwrap(), None);
        assert_eq!(message(&fields.unsigned("b").unwrap_err()), "b is -1, expected an integer of at least 0");
        assert_eq!(fields.unsigned("c").unwrap(), Some(1 << 63));
        let look = |path: &str| fields.look(path, Value::clone).unwrap();
        assert_eq!(look("e.f"), Some("x".into()));
        assert_eq!((look("e.g"), look("d.f"), look("x")), (None, None, None));
        assert_eq!(
            message(&fields.token_ids("d").unwrap_err()),
            "d[1] is 4294967296, expected a token id, which is an integer from 0 to 4294967295"
        );
        let mut inner = fields.object("e").unwrap().unwrap();
        assert_eq!(message(&inner.number("f").unwrap_err()), "e.f is \"x\", expected a number");
        assert!(fields.into_map().unwrap().is_empty());
    }

    #[test]
    fn unread_fields_are_reported() {
        let ignored = Ignored::default();
        let body = br#"{"a": 1, "b": 2, "c": null, "d": {"e": 1, "f": 2}, "g": {"h": 1}}"#;
        let mut fields = parse_object(body).unwrap().telling(&ignored);
        fields.unsigned("a").unwrap();
        fields.object("d").unwrap().unwrap().unsigned("e").unwrap();
        fields.object("g").unwrap().unwrap().into_map().unwrap();
        drop(fields);
        assert_eq!(ignored.take(), ["b", "d.f"]);
    }
}
