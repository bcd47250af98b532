//! JSON in templates: values that keep the order of their fields, and the `tojson` filter.

use std::fmt::Write as _;
use std::io;
use std::sync::Arc;

use minijinja::value::{Enumerator, Kwargs, Object, ObjectRepr, Value};
use minijinja::{Error, ErrorKind};
use serde::Serialize as _;
use serde_json::ser::Formatter;

/// The most that one use of the filter may write, in bytes, and the most blanks of one indentation.
const MAX_JSON_BYTES: usize = 32 << 20;
const MAX_INDENT: usize = 64;

/// An object whose fields stay in the order in which they were given: prompts depend on it.
#[derive(Debug)]
struct Fields(Vec<(String, Value)>);

impl Object for Fields {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Map
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        let key = key.as_str()?;
        self.0.iter().find(|(name, _)| name == key).map(|(_, value)| value.clone())
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Values(self.0.iter().map(|(name, _)| Value::from(name.as_str())).collect())
    }
}

/// A template value for JSON.
pub(super) fn to_template_value(json: &serde_json::Value) -> Value {
    match json {
        serde_json::Value::Null => Value::from(()),
        serde_json::Value::Bool(value) => Value::from(*value),
        serde_json::Value::Number(number) => {
            if let Some(value) = number.as_i64() {
                Value::from(value)
            } else if let Some(value) = number.as_u64() {
                Value::from(value)
            } else {
                Value::from(number.as_f64().unwrap_or(f64::NAN))
            }
        }
        serde_json::Value::String(text) => Value::from(text.as_str()),
        serde_json::Value::Array(items) => items.iter().map(to_template_value).collect(),
        serde_json::Value::Object(fields) => Value::from_object(Fields(
            fields.iter().map(|(name, value)| (name.clone(), to_template_value(value))).collect(),
        )),
    }
}

/// `tojson(ensure_ascii=false, indent=none, separators=none, sort_keys=false)` as Python's `json.dumps`
/// writes it: nothing is escaped for HTML.
#[expect(
    clippy::needless_pass_by_value,
    reason = "the template engine hands keyword arguments over by value"
)]
pub(super) fn tojson(value: &Value, options: Kwargs) -> Result<Value, Error> {
    let ensure_ascii = options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    let indent = options.get::<Option<usize>>("indent")?;
    let separators = options.get::<Option<Vec<String>>>("separators")?;
    let sort_keys = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    options.assert_all_used()?;
    if indent.is_some_and(|indent| indent > MAX_INDENT) {
        return Err(Error::new(ErrorKind::InvalidOperation, format!("indent is above {MAX_INDENT}")));
    }
    let (item_separator, key_separator) = match separators.as_deref() {
        Some([item, key]) => (item.clone(), key.clone()),
        Some(_) => return Err(Error::new(ErrorKind::InvalidOperation, "separators is not a pair")),
        None => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
    };
    let style =
        PythonStyle { ensure_ascii, indent, item_separator, key_separator, level: 0, is_empty: false };
    let failed = |error: serde_json::Error| {
        Error::new(ErrorKind::InvalidOperation, "the value cannot be written as JSON").with_source(error)
    };
    let mut output = Capped(Vec::new());
    if sort_keys {
        let mut json = serde_json::to_value(value).map_err(failed)?;
        json.sort_all_objects();
        json.serialize(&mut serde_json::Serializer::with_formatter(&mut output, style)).map_err(failed)?;
    } else {
        value.serialize(&mut serde_json::Serializer::with_formatter(&mut output, style)).map_err(failed)?;
    }
    String::from_utf8(output.0)
        .map(Value::from)
        .map_err(|error| Error::new(ErrorKind::InvalidOperation, "JSON is not text").with_source(error))
}

struct Capped(Vec<u8>);

impl io::Write for Capped {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > MAX_JSON_BYTES {
            return Err(io::Error::other(format!("more than {MAX_JSON_BYTES} bytes of JSON")));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

struct PythonStyle {
    ensure_ascii: bool,
    indent: Option<usize>,
    item_separator: String,
    key_separator: String,
    level: usize,
    /// Whether the innermost list or object has no items yet.
    is_empty: bool,
}

impl PythonStyle {
    fn open<W: ?Sized + io::Write>(&mut self, writer: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.level += 1;
        self.is_empty = true;
        writer.write_all(bracket)
    }

    fn close<W: ?Sized + io::Write>(&mut self, writer: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.level -= 1;
        if !std::mem::take(&mut self.is_empty) {
            self.new_line(writer)?;
        }
        writer.write_all(bracket)
    }

    fn item<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if !first {
            writer.write_all(self.item_separator.as_bytes())?;
        }
        self.new_line(writer)
    }

    fn new_line<W: ?Sized + io::Write>(&self, writer: &mut W) -> io::Result<()> {
        match self.indent {
            Some(indent) => write!(writer, "\n{:1$}", "", indent * self.level),
            None => Ok(()),
        }
    }
}

impl Formatter for PythonStyle {
    fn begin_array<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.open(writer, b"[")
    }

    fn end_array<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.close(writer, b"]")
    }

    fn begin_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.item(writer, first)
    }

    fn end_array_value<W: ?Sized + io::Write>(&mut self, _writer: &mut W) -> io::Result<()> {
        self.is_empty = false;
        Ok(())
    }

    fn begin_object<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.open(writer, b"{")
    }

    fn end_object<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.close(writer, b"}")
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.item(writer, first)
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(self.key_separator.as_bytes())
    }

    fn end_object_value<W: ?Sized + io::Write>(&mut self, _writer: &mut W) -> io::Result<()> {
        self.is_empty = false;
        Ok(())
    }

    fn write_string_fragment<W: ?Sized + io::Write>(
        &mut self,
        writer: &mut W,
        fragment: &str,
    ) -> io::Result<()> {
        if !self.ensure_ascii || fragment.is_ascii() {
            return writer.write_all(fragment.as_bytes());
        }
        let mut escaped = String::with_capacity(fragment.len() * 2);
        for c in fragment.chars() {
            if c.is_ascii() {
                escaped.push(c);
            } else {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    write!(escaped, "\\u{unit:04x}").map_err(io::Error::other)?;
                }
            }
        }
        writer.write_all(escaped.as_bytes())
    }
}
