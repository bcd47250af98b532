//! The `tojson` filter: the output of Python's `json.dumps`, without escapes for HTML.

use std::fmt::Write as _;

use minijinja::{State, Value};

use super::args::{Args, size};
use super::sort::try_sort;
use super::text::{CHUNK_BYTES, Writer, float_repr};
use super::value::{MAX_DEPTH, Py, expect_str, iterate, type_name};
use super::{Result, budget, fail, ops};

struct Style {
    ensure_ascii: bool,
    sort_keys: bool,
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
}

/// `value | tojson(ensure_ascii, indent, separators, sort_keys)`.
pub(super) fn tojson(_: &mut State<'_, '_>, value: &Value, args: Args) -> Result<Value> {
    let args = args.bind(["ensure_ascii", "indent", "separators", "sort_keys"])?;
    let indent = match args.some(1).map(Py::of) {
        None => None,
        Some(Py::Str(indent)) => Some(indent.to_owned()),
        Some(_) => {
            let width = size(args.int(1, 0)?);
            budget::charge(width)?;
            Some(" ".repeat(width))
        }
    };
    let (item_separator, key_separator) = match args.some(2) {
        Some(separators) => match <[Value; 2]>::try_from(iterate(separators)?) {
            Ok([item, key]) => {
                (expect_str("a separator", &item)?.to_owned(), expect_str("a separator", &key)?.to_owned())
            }
            Err(_) => return Err(fail("separators is not a pair")),
        },
        None => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
    };
    let style = Style {
        ensure_ascii: args.flag(0, false),
        sort_keys: args.flag(3, false),
        indent,
        item_separator,
        key_separator,
    };
    let mut output = Writer::default();
    style.write(value, 0, &mut output)?;
    Ok(Value::from(output.finish()?))
}

/// JSON with a blank after each comma and colon, as Python writes it.
pub(in crate::chat) fn json_text(json: &serde_json::Value) -> String {
    match json {
        serde_json::Value::Array(items) => {
            format!("[{}]", items.iter().map(json_text).collect::<Vec<_>>().join(", "))
        }
        serde_json::Value::Object(fields) => {
            let field = |(name, value): (&String, _)| {
                format!("{}: {}", serde_json::Value::from(name.as_str()), json_text(value))
            };
            format!("{{{}}}", fields.iter().map(field).collect::<Vec<_>>().join(", "))
        }
        other => other.to_string(),
    }
}

impl Style {
    fn write(&self, value: &Value, depth: usize, output: &mut Writer) -> Result<()> {
        if depth > 2 * MAX_DEPTH {
            return Err(fail("the value contains itself and cannot be written as JSON"));
        }
        match Py::of(value) {
            Py::None => output.push("null"),
            Py::Bool(flag) => output.push(if flag { "true" } else { "false" }),
            Py::Int(number) => output.push(&number.to_string()),
            Py::Float(number) => output.push(&json_float(number)),
            Py::Str(text) => self.string(text, output),
            Py::List(list) => {
                output.push("[")?;
                for (index, item) in list.items.iter().enumerate() {
                    self.begin_item(index, depth, output)?;
                    self.write(item, depth + 1, output)?;
                }
                self.end(list.items.is_empty(), depth, output)?;
                output.push("]")
            }
            Py::Dict(dict) => {
                budget::charge(dict.len() * size_of::<(&Value, &Value)>())?;
                let mut fields: Vec<_> = dict.iter().collect();
                if self.sort_keys {
                    budget::charge(fields.len() * 8 * size_of::<(&Value, &Value)>())?;
                    fields = try_sort(fields, &|(a, _), (b, _)| {
                        Ok(ops::compare(a, b)?.unwrap_or(std::cmp::Ordering::Equal))
                    })?;
                }
                output.push("{")?;
                for (index, (key, value)) in fields.into_iter().enumerate() {
                    self.begin_item(index, depth, output)?;
                    self.key(key, output)?;
                    output.push(&self.key_separator)?;
                    self.write(value, depth + 1, output)?;
                }
                self.end(dict.len() == 0, depth, output)?;
                output.push("}")
            }
            _ => Err(fail(format!("Object of type {} is not JSON serializable", type_name(value)))),
        }
    }

    fn key(&self, key: &Value, output: &mut Writer) -> Result<()> {
        match Py::of(key) {
            Py::Str(text) => self.string(text, output),
            Py::None => output.push("\"null\""),
            Py::Bool(flag) => output.push(if flag { "\"true\"" } else { "\"false\"" }),
            Py::Int(number) => output.push(&format!("\"{number}\"")),
            Py::Float(number) => output.push(&format!("\"{}\"", json_float(number))),
            _ => Err(fail(format!("keys must be str, int, float, bool or None, not {}", type_name(key)))),
        }
    }

    fn begin_item(&self, index: usize, depth: usize, output: &mut Writer) -> Result<()> {
        if index > 0 {
            output.push(&self.item_separator)?;
        }
        self.new_line(depth + 1, output)
    }

    fn end(&self, is_empty: bool, depth: usize, output: &mut Writer) -> Result<()> {
        if is_empty { Ok(()) } else { self.new_line(depth, output) }
    }

    fn new_line(&self, depth: usize, output: &mut Writer) -> Result<()> {
        let Some(indent) = &self.indent else { return Ok(()) };
        output.push("\n")?;
        for _ in 0..depth {
            output.push(indent)?;
        }
        Ok(())
    }

    fn string(&self, text: &str, output: &mut Writer) -> Result<()> {
        budget::charge(text.len())?;
        let mut escaped = String::from('"');
        for c in text.chars() {
            if escaped.len() > CHUNK_BYTES {
                output.push(&escaped)?;
                escaped.clear();
            }
            match c {
                '"' => escaped.push_str("\\\""),
                '\\' => escaped.push_str("\\\\"),
                '\n' => escaped.push_str("\\n"),
                '\r' => escaped.push_str("\\r"),
                '\t' => escaped.push_str("\\t"),
                '\u{8}' => escaped.push_str("\\b"),
                '\u{C}' => escaped.push_str("\\f"),
                // Characters of plane 15 replace spellings of special tokens.
                c if c >= ' ' && (!self.ensure_ascii || c.is_ascii() && c != '\u{7F}' || is_stand_in(c)) => {
                    escaped.push(c)
                }
                c if c == '\u{7F}' => escaped.push(c),
                c => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        let wrote = write!(escaped, "\\u{unit:04x}");
                        debug_assert!(wrote.is_ok(), "writing to a string does not fail");
                    }
                }
            }
        }
        escaped.push('"');
        output.push(&escaped)
    }
}

fn is_stand_in(c: char) -> bool {
    ('\u{F0000}'..='\u{FFFFD}').contains(&c)
}

fn json_float(number: f64) -> String {
    match float_repr(number).as_str() {
        "nan" => "NaN".to_owned(),
        "inf" => "Infinity".to_owned(),
        "-inf" => "-Infinity".to_owned(),
        text => text.to_owned(),
    }
}
