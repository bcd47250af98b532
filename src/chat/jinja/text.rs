//! How Python writes values: `str` and `repr`.

use std::fmt::Write as _;

use minijinja::Value;
use minijinja::value::ValueKind;

use super::value::{BoundMethod, DictView, MAX_DEPTH, Py};
use super::{Result, budget, fail};

/// `str(value)`.
pub(super) fn str_of(value: &Value) -> Result<String> {
    let mut writer = Writer::default();
    writer.str(value)?;
    writer.finish()
}

/// `repr(value)`.
pub(super) fn repr_of(value: &Value) -> Result<String> {
    let mut writer = Writer::default();
    writer.repr(value, 0)?;
    writer.finish()
}

/// `a list`, `None` and so on, for errors.
pub(super) fn described(value: &Py<'_>) -> String {
    match value {
        Py::None => "None".to_owned(),
        Py::Undefined => "undefined".to_owned(),
        other => format!("of type {}", other.type_name()),
    }
}

/// The size of the chunks in which escaped text is written.
pub(super) const CHUNK_BYTES: usize = 1 << 12;

/// A text that is paid for while it grows.
#[derive(Default)]
pub(super) struct Writer {
    text: String,
    paid: usize,
}

impl Writer {
    pub(super) fn push(&mut self, text: &str) -> Result<()> {
        if self.text.len() + text.len() > self.paid {
            // In steps, so that a character more does not cost a look.
            let more = text.len() + 256;
            budget::charge(more)?;
            self.paid = self.text.len() + more;
        }
        self.text.push_str(text);
        Ok(())
    }

    pub(super) fn finish(self) -> Result<String> {
        budget::work(self.text.len())?;
        Ok(self.text)
    }

    pub(super) fn str(&mut self, value: &Value) -> Result<()> {
        match Py::of(value) {
            Py::Undefined => Ok(()),
            Py::Str(text) => self.push(text),
            _ => self.repr(value, 0),
        }
    }

    pub(super) fn repr(&mut self, value: &Value, depth: usize) -> Result<()> {
        // Only namespaces that hold themselves get here.
        if depth > 2 * MAX_DEPTH {
            return Err(fail("the value contains itself and cannot be written"));
        }
        match Py::of(value) {
            Py::Undefined => self.push("Undefined"),
            Py::None => self.push("None"),
            Py::Bool(flag) => self.push(if flag { "True" } else { "False" }),
            Py::Int(number) => self.push(&number.to_string()),
            Py::Float(number) => self.push(&float_repr(number)),
            Py::Str(text) => self.str_repr(text),
            Py::List(list) if list.is_tuple => {
                self.push("(")?;
                self.items(&list.items, depth)?;
                self.push(if list.items.len() == 1 { ",)" } else { ")" })
            }
            Py::List(list) => {
                self.push("[")?;
                self.items(&list.items, depth)?;
                self.push("]")
            }
            Py::Dict(dict) => self.fields(dict.iter(), depth),
            Py::View(view) => {
                self.push(view.part.type_name())?;
                self.push("([")?;
                for (index, (key, value)) in view.dict.iter().enumerate() {
                    self.push(if index > 0 { ", " } else { "" })?;
                    match view.part {
                        DictView::Keys => self.repr(key, depth + 1)?,
                        DictView::Values => self.repr(value, depth + 1)?,
                        DictView::Items => {
                            self.push("(")?;
                            self.repr(key, depth + 1)?;
                            self.push(", ")?;
                            self.repr(value, depth + 1)?;
                            self.push(")")?;
                        }
                    }
                }
                self.push("])")
            }
            Py::Generator(_) => self.push("<generator object>"),
            Py::Range(range) if range.step == 1 => {
                self.push(&format!("range({}, {})", range.start, range.stop))
            }
            Py::Range(range) => self.push(&format!("range({}, {}, {})", range.start, range.stop, range.step)),
            Py::Namespace(namespace) => {
                self.push("<Namespace ")?;
                let fields: Vec<_> =
                    namespace.fields().into_iter().map(|(name, value)| (Value::from(name), value)).collect();
                self.fields(fields.iter().map(|(name, value)| (name, value)), depth)?;
                self.push(">")
            }
            Py::Other => match value.downcast_object_ref::<BoundMethod>() {
                Some(method) => self.push(&format!("<built-in method {}>", method.name)),
                None if matches!(value.kind(), ValueKind::Bytes | ValueKind::Number) => {
                    // A byte may be written as four.
                    budget::charge(value.as_bytes().map_or(0, <[u8]>::len).saturating_mul(4))?;
                    self.push(&format!("{value:?}"))
                }
                None if value
                    .as_object()
                    .is_some_and(|object| object.repr() == minijinja::value::ObjectRepr::Map) =>
                {
                    // A macro, or a loop's state.
                    self.push("<object>")
                }
                None => self.push(&format!("{value:?}")),
            },
        }
    }

    fn items(&mut self, items: &[Value], depth: usize) -> Result<()> {
        for (index, item) in items.iter().enumerate() {
            self.push(if index > 0 { ", " } else { "" })?;
            self.repr(item, depth + 1)?;
        }
        Ok(())
    }

    fn fields<'v>(
        &mut self,
        fields: impl Iterator<Item = (&'v Value, &'v Value)>,
        depth: usize,
    ) -> Result<()> {
        self.push("{")?;
        for (index, (key, value)) in fields.enumerate() {
            self.push(if index > 0 { ", " } else { "" })?;
            self.repr(key, depth + 1)?;
            self.push(": ")?;
            self.repr(value, depth + 1)?;
        }
        self.push("}")
    }

    fn str_repr(&mut self, text: &str) -> Result<()> {
        budget::charge(text.len())?;
        let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
        let mut escaped = String::new();
        escaped.push(quote);
        for c in text.chars() {
            // A character may be written as ten.
            if escaped.len() > CHUNK_BYTES {
                self.push(&escaped)?;
                escaped.clear();
            }
            match c {
                '\\' => escaped.push_str("\\\\"),
                '\n' => escaped.push_str("\\n"),
                '\r' => escaped.push_str("\\r"),
                '\t' => escaped.push_str("\\t"),
                c if c == quote => {
                    escaped.push('\\');
                    escaped.push(c);
                }
                c if is_printable(c) => escaped.push(c),
                c => {
                    let code = u32::from(c);
                    let wrote = match code {
                        0..=0xFF => write!(escaped, "\\x{code:02x}"),
                        0x100..=0xFFFF => write!(escaped, "\\u{code:04x}"),
                        _ => write!(escaped, "\\U{code:08x}"),
                    };
                    debug_assert!(wrote.is_ok(), "writing to a string does not fail");
                }
            }
        }
        escaped.push(quote);
        self.push(&escaped)
    }
}

/// Whether Python writes a character unescaped. Plane 15 counts as printable, although it is not: its characters
/// replace spellings of special tokens.
pub(super) fn is_printable(c: char) -> bool {
    if c.is_ascii() {
        return !c.is_ascii_control();
    }
    if ('\u{F0000}'..='\u{FFFFD}').contains(&c) {
        return true;
    }
    // After a letter, a combining character is not escaped.
    let mut text = String::from("a");
    text.push(c);
    text.escape_debug().nth(1) == Some(c)
}

/// `repr` of a float: the fewest digits that distinguish it from all others.
pub(super) fn float_repr(number: f64) -> String {
    if number.is_nan() {
        return "nan".to_owned();
    }
    if number.is_infinite() {
        return if number > 0.0 { "inf" } else { "-inf" }.to_owned();
    }
    let scientific = format!("{number:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let text = number.to_string();
        return if text.contains('.') { text } else { text + ".0" };
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}

/// `str(value)` with the characters of HTML escaped, unless they are already.
pub(super) fn escaped(value: &Value) -> Result<String> {
    let text = str_of(value)?;
    if value.is_safe() {
        return Ok(text);
    }
    budget::charge(text.len())?;
    let mut escaped = Writer::default();
    for c in text.chars() {
        match c {
            '&' => escaped.push("&amp;")?,
            '<' => escaped.push("&lt;")?,
            '>' => escaped.push("&gt;")?,
            '\'' => escaped.push("&#39;")?,
            '"' => escaped.push("&#34;")?,
            c => escaped.push(c.encode_utf8(&mut [0; 4]))?,
        }
    }
    escaped.finish()
}
