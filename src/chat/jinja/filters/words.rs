//! Filters of texts.

use std::collections::VecDeque;

use minijinja::{State, Value};

use super::Filter;
use crate::chat::jinja::args::{Args, size};
use crate::chat::jinja::strings::{self, lines, strip};
use crate::chat::jinja::text::{Writer, escaped, repr_of, str_of};
use crate::chat::jinja::value::{Py, expect_str, int, iterate, string, type_name};
use crate::chat::jinja::{Result, budget, fail, format, predicates, shown};

pub(super) const FILTERS: &[(&str, Filter)] = &[
    ("capitalize", |_, value, args| args.none().and_then(|()| string(strings::capitalize(&copied(value)?)))),
    ("center", center),
    ("e", escape),
    ("escape", escape),
    ("forceescape", |_, value, args| {
        args.none()?;
        safe(escaped(&Value::from(str_of(value)?))?)
    }),
    ("format", |_, value, args| {
        if !args.positional.is_empty() && !args.named.is_empty() {
            return Err(fail("format accepts either positional or named arguments"));
        }
        let values = if args.named.is_empty() {
            crate::chat::jinja::value::tuple(args.positional)?
        } else {
            crate::chat::jinja::value::dict(
                args.named.into_iter().map(|(name, value)| (Value::from(name), value)),
            )?
        };
        format::percent(&str_of(value)?, &values)
    }),
    ("indent", indent),
    ("lower", |_, value, args| args.none().and_then(|()| string(copied(value)?.to_lowercase()))),
    ("pprint", |_, value, args| args.none().and_then(|()| string(repr_of(value)?))),
    ("replace", replace),
    ("safe", |_, value, args| args.none().and_then(|()| safe(str_of(value)?))),
    ("string", |_, value, args| {
        args.none()?;
        if let Py::Str(_) = Py::of(value) { Ok(value.clone()) } else { string(str_of(value)?) }
    }),
    ("striptags", strip_tags),
    ("title", |_, value, args| args.none().and_then(|()| string(title(&copied(value)?)))),
    ("trim", |_, value, args| {
        let args = args.bind(["chars"])?;
        let chars = args.some(0).map(|value| expect_str("chars", value)).transpose()?;
        string(strip(&str_of(value)?, chars, true, true))
    }),
    ("truncate", truncate),
    ("upper", |_, value, args| args.none().and_then(|()| string(copied(value)?.to_uppercase()))),
    ("urlencode", url_encode),
    ("wordcount", |_, value, args| {
        args.none()?;
        let text = str_of(value)?;
        budget::work(text.len())?;
        let words = text.split(|c: char| c != '_' && !c.is_alphanumeric()).filter(|word| !word.is_empty());
        Ok(int(words.count() as i128))
    }),
    ("wordwrap", word_wrap),
    ("xmlattr", xml_attributes),
];

/// A text of which the library makes another, which is paid for afterwards.
fn copied(value: &Value) -> Result<String> {
    let text = str_of(value)?;
    budget::afford(text.len().saturating_mul(2))?;
    Ok(text)
}

fn safe(text: String) -> Result<Value> {
    budget::charge(text.len())?;
    Ok(Value::from_safe_string(text))
}

fn escape(_: &mut State<'_, '_>, value: &Value, args: Args) -> Result<Value> {
    args.none()?;
    safe(escaped(value)?)
}

fn center(_: &mut State<'_, '_>, value: &Value, args: Args) -> Result<Value> {
    let args = args.bind(["width"])?;
    strings::pad(&str_of(value)?, size(args.int(0, 80)?), " ", "center")
}

fn indent(_: &mut State<'_, '_>, value: &Value, args: Args) -> Result<Value> {
    let args = args.bind(["width", "first", "blank"])?;
    let text = str_of(value)?;
    budget::charge(strings::num_lines(&text).saturating_mul(2 * size_of::<&str>()))?;
    let (first, blank) = (args.flag(1, false), args.flag(2, false));
    let indention = match args.get(0).map(Py::of) {
        Some(Py::Str(indention)) => indention.to_owned(),
        _ => {
            let width = size(args.int(0, 4)?);
            budget::charge(width)?;
            " ".repeat(width)
        }
    };
    let mut output = Writer::default();
    if first {
        output.push(&indention)?;
    }
    if blank {
        for (index, line) in lines(&(text + "\n"), false).into_iter().enumerate() {
            if index > 0 {
                output.push("\n")?;
                output.push(&indention)?;
            }
            output.push(line)?;
        }
        return Ok(Value::from(output.finish()?));
    }
    for (index, line) in lines(&(text + "\n"), false).into_iter().enumerate() {
        if index > 0 {
            output.push("\n")?;
            if !line.is_empty() {
                output.push(&indention)?;
            }
        }
        output.push(line)?;
    }
    Ok(Value::from(output.finish()?))
}

fn replace(_: &mut State<'_, '_>, value: &Value, args: Args) -> Result<Value> {
    let args = args.bind(["old", "new", "count"])?;
    let count = if args.some(2).is_some() { args.int(2, -1)? } else { -1 };
    strings::replace(&str_of(value)?, &str_of(args.required(0)?)?, &str_of(args.required(1)?)?, count)
}

fn strip_tags(_: &mut State<'_, '_>, value: &Value, args: Args) -> Result<Value> {
    args.none()?;
    let text = str_of(value)?;
    budget::charge(text.len().saturating_mul(4))?;
    let mut plain = String::with_capacity(text.len());
    let mut rest = text.as_str();
    while let Some(at) = rest.find("<!--") {
        let Some(end) = rest[at..].find("-->") else { break };
        plain.push_str(&rest[..at]);
        rest = &rest[at + end + 3..];
    }
    plain.push_str(rest);
    string(unescaped(&without_tags(&plain)))
}

fn without_tags(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('<') {
        let Some(end) = rest[at..].find('>') else { break };
        plain.push_str(&rest[..at]);
        rest = &rest[at + end + 1..];
    }
    plain.push_str(rest);
    plain.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn unescaped(text: &str) -> String {
    [("&lt;", "<"), ("&gt;", ">"), ("&#34;", "\""), ("&quot;", "\""), ("&#39;", "'"), ("&amp;", "&")]
        .iter()
        .fold(text.to_owned(), |text, (from, to)| text.replace(from, to))
}

/// Each word with a capital; words begin after blanks, hyphens and opening brackets.
fn title(text: &str) -> String {
    let mut titled = String::with_capacity(text.len());
    let mut at_start = true;
    for c in text.chars() {
        if strings::is_space(c) || "-({[<".contains(c) {
            titled.push(c);
            at_start = true;
        } else if at_start {
            titled.extend(c.to_uppercase());
            at_start = false;
        } else {
            titled.extend(c.to_lowercase());
        }
    }
    titled
}

fn truncate(_: &mut State<'_, '_>, value: &Value, args: Args) -> Result<Value> {
    let args = args.bind(["length", "killwords", "end", "leeway"])?;
    let (length, end) = (size(args.int(0, 255)?), args.str(2, "...")?);
    let leeway = if args.some(3).is_some() { size(args.int(3, 5)?) } else { 5 };
    let end_length = end.chars().count();
    if length < end_length {
        return Err(fail(format!("expected length >= {end_length}, got {length}")));
    }
    match crate::chat::jinja::value::length(value)? {
        Some(found) if found <= length.saturating_add(leeway) => return Ok(value.clone()),
        Some(_) => {}
        None => return Err(fail(format!("object of type '{}' has no length", type_name(value)))),
    }
    let text = expect_str("the truncated value", value)?;
    budget::afford(text.len().saturating_add(end.len()).saturating_mul(2))?;
    let kept: String = text.chars().take(length - end_length).collect();
    let kept = if args.flag(1, false) {
        kept.as_str()
    } else {
        kept.rsplit_once(' ').map_or(kept.as_str(), |(a, _)| a)
    };
    string(format!("{kept}{end}"))
}

fn url_encode(_: &mut State<'_, '_>, value: &Value, args: Args) -> Result<Value> {
    args.none()?;
    if !predicates::is_iterable(value) || matches!(Py::of(value), Py::Str(_)) {
        return string(quoted(&str_of(value)?, b"/", false)?);
    }
    let pairs = match Py::of(value) {
        Py::Dict(dict) => dict.iter().map(|(key, value)| (key.clone(), value.clone())).collect::<Vec<_>>(),
        _ => {
            let mut pairs = Vec::new();
            for pair in iterate(value)? {
                match <[Value; 2]>::try_from(iterate(&pair)?) {
                    Ok([key, value]) => pairs.push((key, value)),
                    Err(_) => return Err(fail("urlencode takes a text or pairs")),
                }
            }
            pairs
        }
    };
    let mut output = Writer::default();
    for (index, (key, value)) in pairs.iter().enumerate() {
        output.push(if index > 0 { "&" } else { "" })?;
        output.push(&quoted(&str_of(key)?, b"", true)?)?;
        output.push("=")?;
        output.push(&quoted(&str_of(value)?, b"", true)?)?;
    }
    Ok(Value::from(output.finish()?))
}

fn quoted(text: &str, also: &[u8], plus: bool) -> Result<String> {
    let mut output = Writer::default();
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"_.-~".contains(&byte) || also.contains(&byte) {
            output.push(char::from(byte).encode_utf8(&mut [0; 4]))?;
        } else if plus && byte == b' ' {
            output.push("+")?;
        } else {
            output.push(&format!("%{byte:02X}"))?;
        }
    }
    output.finish()
}

/// Lines of at most `width` characters, broken at blanks, at hyphens and, if need be, inside words.
fn word_wrap(_: &mut State<'_, '_>, value: &Value, args: Args) -> Result<Value> {
    let args = args.bind(["width", "break_long_words", "wrapstring", "break_on_hyphens"])?;
    let text = str_of(value)?;
    budget::charge(strings::num_lines(&text).saturating_mul(2 * size_of::<&str>()))?;
    let width = size(args.int(0, 79)?);
    if width == 0 {
        return Err(fail("invalid width 0 (must be > 0)"));
    }
    let break_words = args.flag(1, true);
    let wrap = args.some(2).map_or(Ok("\n"), |value| expect_str("wrapstring", value))?;
    let mut output = Writer::default();
    for (index, line) in lines(&text, false).into_iter().enumerate() {
        if index > 0 {
            output.push(wrap)?;
        }
        let wrapped = wrap_line(line, width, break_words, args.flag(3, true))?;
        for (index, part) in wrapped.iter().enumerate() {
            if index > 0 {
                output.push(wrap)?;
            }
            output.push(part)?;
        }
    }
    Ok(Value::from(output.finish()?))
}

/// Runs of blanks, and words that end after a hyphen if requested.
fn chunks(line: &str, at_hyphens: bool) -> Vec<&str> {
    let mut chunks = Vec::new();
    let mut start = 0;
    let mut before: Option<char> = None;
    for (at, c) in line.char_indices() {
        let is_break = before.is_some_and(|before| {
            strings::is_space(before) != strings::is_space(c)
                || at_hyphens && before == '-' && c.is_alphabetic() && ends_in_word(&line[start..at])
        });
        if is_break {
            chunks.push(&line[start..at]);
            start = at;
        }
        before = Some(c);
    }
    chunks.push(&line[start..]);
    chunks
}

fn ends_in_word(text: &str) -> bool {
    let word = text.trim_end_matches('-');
    text.len() == word.len() + 1 && word.chars().rev().take(2).filter(|c| c.is_alphanumeric()).count() == 2
}

/// Fills one line after the other, without blanks at their ends.
fn wrap_line(line: &str, width: usize, break_words: bool, at_hyphens: bool) -> Result<Vec<String>> {
    // A character may be a chunk, and a line.
    budget::charge(line.len().saturating_mul(size_of::<&str>() + size_of::<String>()))?;
    let is_blank = |text: &str| text.chars().all(strings::is_space);
    let mut chunks: VecDeque<&str> = chunks(line, at_hyphens).into();
    let mut wrapped = Vec::new();
    while !chunks.is_empty() {
        budget::charge(64)?;
        budget::work(width.min(line.len()))?;
        if !wrapped.is_empty() && chunks.front().is_some_and(|chunk| is_blank(chunk)) {
            chunks.pop_front();
        }
        let mut current: Vec<&str> = Vec::new();
        let mut space_left = width;
        while let Some(chunk) = chunks.front()
            && let Some(left) =
                space_left.checked_sub(chunk.chars().take(space_left.saturating_add(1)).count())
        {
            space_left = left;
            current.extend(chunks.pop_front());
        }
        // Not more of a word is read than fits a line.
        if let Some(chunk) = chunks.front_mut()
            && chunk.chars().nth(width).is_some()
        {
            if break_words {
                let at = chunk.char_indices().nth(space_left).map_or(chunk.len(), |(at, _)| at);
                current.push(&chunk[..at]);
                *chunk = &chunk[at..];
            } else if current.is_empty() {
                current.extend(chunks.pop_front());
            }
        }
        if current.last().is_some_and(|chunk| is_blank(chunk)) {
            current.pop();
        }
        if !current.is_empty() {
            wrapped.push(current.concat());
        }
    }
    Ok(wrapped)
}

fn xml_attributes(_: &mut State<'_, '_>, value: &Value, args: Args) -> Result<Value> {
    let args = args.bind(["autospace"])?;
    let Py::Dict(dict) = Py::of(value) else { return Err(fail("xmlattr takes a dict")) };
    let mut output = Writer::default();
    for (key, value) in dict.iter().filter(|(_, value)| !value.is_none() && !value.is_undefined()) {
        let key = str_of(key)?;
        if key.contains(|c: char| c.is_ascii_whitespace() || "/>=".contains(c)) {
            return Err(fail(format!("invalid character in attribute name: {}", shown(&key))));
        }
        output.push(" ")?;
        output.push(&escaped(&Value::from(key))?)?;
        output.push("=\"")?;
        output.push(&escaped(value)?)?;
        output.push("\"")?;
    }
    let text = output.finish()?;
    safe(if args.flag(0, true) { text } else { text.trim_start().to_owned() })
}
