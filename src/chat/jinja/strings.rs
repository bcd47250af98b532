//! The methods of Python's `str`.

use std::collections::HashSet;

use minijinja::Value;

use super::args::{Args, size};
use super::text::{Writer, is_printable, str_of};
use super::value::{Py, expect_str, int, iterate, list, string, tuple, type_name};
use super::{Result, budget, fail, format};

/// All that can be called.
pub(in crate::chat) const METHODS: &[&str] = &[
    "capitalize",
    "casefold",
    "center",
    "count",
    "encode",
    "endswith",
    "expandtabs",
    "find",
    "format",
    "format_map",
    "index",
    "isalnum",
    "isalpha",
    "isascii",
    "isdecimal",
    "isdigit",
    "isidentifier",
    "islower",
    "isnumeric",
    "isprintable",
    "isspace",
    "istitle",
    "isupper",
    "join",
    "ljust",
    "lower",
    "lstrip",
    "partition",
    "removeprefix",
    "removesuffix",
    "replace",
    "rfind",
    "rindex",
    "rjust",
    "rpartition",
    "rsplit",
    "rstrip",
    "split",
    "splitlines",
    "startswith",
    "strip",
    "swapcase",
    "title",
    "translate",
    "upper",
    "zfill",
];

/// Calls a method of a text.
pub(super) fn call(text: &str, method: &'static str, args: &[Value]) -> Result<Value> {
    budget::work(text.len())?;
    if matches!(method, "capitalize" | "casefold" | "lower" | "upper" | "swapcase" | "title") {
        // The library creates the result after it is charged.
        budget::afford(text.len().saturating_mul(2))?;
    }
    let args = Args::new(method, args);
    match method {
        "capitalize" => args.none().and_then(|()| string(capitalize(text))),
        "casefold" => {
            args.none()?;
            string(text.to_lowercase().replace('ß', "ss").replace('ς', "σ"))
        }
        "lower" => args.none().and_then(|()| string(text.to_lowercase())),
        "upper" => args.none().and_then(|()| string(text.to_uppercase())),
        "swapcase" => args.none().and_then(|()| string(swapcase(text))),
        "title" => args.none().and_then(|()| string(title(text))),
        "center" | "ljust" | "rjust" => {
            let args = args.bind(["width", "fillchar"])?;
            args.required(0)?;
            pad(text, size(args.int(0, 0)?), args.str(1, " ")?, method)
        }
        "zfill" => {
            let args = args.bind(["width"])?;
            args.required(0)?;
            let missing = size(args.int(0, 0)?).saturating_sub(text.chars().count());
            budget::charge(missing.saturating_mul(2).saturating_add(text.len()))?;
            let sign = usize::from(text.starts_with(['+', '-']));
            string(format!("{}{}{}", &text[..sign], "0".repeat(missing), &text[sign..]))
        }
        "count" => {
            let args = args.bind(["sub", "start", "end"])?;
            let Some((part, _)) = window(text, &args)? else { return Ok(int(0)) };
            let sub = args.required_str(0)?;
            let count = if sub.is_empty() { part.chars().count() + 1 } else { part.matches(sub).count() };
            Ok(int(count as i128))
        }
        "find" | "rfind" | "index" | "rindex" => {
            let args = args.bind(["sub", "start", "end"])?;
            let sub = args.required_str(0)?;
            let found = window(text, &args)?.and_then(|(part, start)| {
                let at = if method.starts_with('r') { part.rfind(sub) } else { part.find(sub) };
                at.map(|at| start + part[..at].chars().count())
            });
            match found {
                Some(at) => Ok(int(at as i128)),
                None if method.ends_with("find") => Ok(int(-1)),
                None => Err(fail("substring not found")),
            }
        }
        "startswith" | "endswith" => {
            let args = args.bind(["prefix", "start", "end"])?;
            let Some((part, _)) = window(text, &args)? else { return Ok(Value::from(false)) };
            let matches = |value: &Value| {
                let affix = expect_str("the text to look for", value)?;
                Ok(if method == "startswith" { part.starts_with(affix) } else { part.ends_with(affix) })
            };
            let affix = args.required(0)?;
            match Py::of(affix) {
                Py::List(affixes) if affixes.is_tuple => {
                    for affix in &affixes.items {
                        if matches(affix)? {
                            return Ok(Value::from(true));
                        }
                    }
                    Ok(Value::from(false))
                }
                _ => matches(affix).map(Value::from),
            }
        }
        "strip" | "lstrip" | "rstrip" => {
            let args = args.bind(["chars"])?;
            let chars = args.some(0).map(|value| expect_str("chars", value)).transpose()?;
            string(strip(text, chars, method != "rstrip", method != "lstrip"))
        }
        "removeprefix" => {
            let args = args.bind(["prefix"])?;
            string(text.strip_prefix(args.required_str(0)?).unwrap_or(text))
        }
        "removesuffix" => {
            let args = args.bind(["suffix"])?;
            string(text.strip_suffix(args.required_str(0)?).unwrap_or(text))
        }
        "replace" => {
            let args = args.bind(["old", "new", "count"])?;
            let count = args.int(2, -1)?;
            replace(text, args.required_str(0)?, args.required_str(1)?, count)
        }
        "split" | "rsplit" => {
            let args = args.bind(["sep", "maxsplit"])?;
            let separator = args.some(0).map(|value| expect_str("sep", value)).transpose()?;
            let most = usize::try_from(args.int(1, -1)?).unwrap_or(usize::MAX);
            list(texts(split(text, separator, most, method == "rsplit")?)?)
        }
        "splitlines" => {
            let args = args.bind(["keepends"])?;
            budget::charge(num_lines(text).saturating_mul(2 * size_of::<&str>()))?;
            list(texts(lines(text, args.flag(0, false)))?)
        }
        "partition" | "rpartition" => {
            let args = args.bind(["sep"])?;
            let separator = args.required_str(0)?;
            if separator.is_empty() {
                return Err(fail("empty separator"));
            }
            let parts = if method == "partition" {
                text.split_once(separator).map_or([text, "", ""], |(a, b)| [a, separator, b])
            } else {
                text.rsplit_once(separator).map_or(["", "", text], |(a, b)| [a, separator, b])
            };
            tuple(texts(parts.to_vec())?)
        }
        "join" => {
            let args = args.bind(["iterable"])?;
            let items = iterate(args.required(0)?)?;
            let mut output = Writer::default();
            for (index, item) in items.iter().enumerate() {
                if index > 0 {
                    output.push(text)?;
                }
                output.push(expect_str(&format!("item {index} of join()"), item)?)?;
            }
            Ok(Value::from(output.finish()?))
        }
        "expandtabs" => {
            let args = args.bind(["tabsize"])?;
            expand_tabs(text, size(args.int(0, 8)?))
        }
        "encode" => {
            args.bind(["encoding", "errors"])?;
            budget::charge(text.len())?;
            Ok(Value::from_bytes(text.as_bytes().to_vec()))
        }
        "format" => format::format(text, &args.positional, &args.named).map(Value::from),
        "format_map" => {
            let args = args.bind(["mapping"])?;
            let Py::Dict(dict) = Py::of(args.required(0)?) else {
                return Err(fail("format_map() takes a mapping"));
            };
            let mut named = Vec::with_capacity(dict.len());
            for (key, value) in dict.iter() {
                named.push((str_of(key)?, value.clone()));
            }
            format::format(text, &[], &named).map(Value::from)
        }
        "translate" => {
            let args = args.bind(["table"])?;
            translate(text, args.required(0)?)
        }
        _ => args.none().map(|()| Value::from(is(text, method))),
    }
}

fn texts(parts: Vec<&str>) -> Result<Vec<Value>> {
    parts.into_iter().map(string).collect()
}

/// The substring between `start` and `end`, and its offset, in characters.
fn window<'t>(text: &'t str, args: &super::args::Bound<3>) -> Result<Option<(&'t str, usize)>> {
    if args.some(1).is_none() && args.some(2).is_none() {
        return Ok(Some((text, 0)));
    }
    let len = text.chars().count() as i128;
    let clamp = |index: i128| if index < 0 { (index + len).max(0) } else { index };
    let start = args.some(1).map_or(Ok(0), |_| args.int(1, 0)).map(clamp)?;
    let end = args.some(2).map_or(Ok(len), |_| args.int(2, len)).map(clamp)?.min(len);
    if start > end {
        return Ok(None);
    }
    let byte = |index: i128| text.char_indices().nth(size(index)).map_or(text.len(), |(at, _)| at);
    Ok(Some((&text[byte(start)..byte(end)], size(start))))
}

/// Whitespace in the eyes of Python, which counts four separators of ASCII too.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1C}'..='\u{1F}').contains(&c)
}

/// The text without these characters, or whitespace, at its ends.
pub(super) fn strip<'t>(text: &'t str, chars: Option<&str>, left: bool, right: bool) -> &'t str {
    // Each is searched for at each position.
    let set: HashSet<char> = chars.unwrap_or_default().chars().collect();
    let dropped = |c: char| if chars.is_none() { is_space(c) } else { set.contains(&c) };
    let text = if left { text.trim_start_matches(dropped) } else { text };
    if right { text.trim_end_matches(dropped) } else { text }
}

/// The text with at most `count` occurrences replaced, all if it is negative.
pub(super) fn replace(text: &str, old: &str, new: &str, count: i128) -> Result<Value> {
    let most = usize::try_from(count).unwrap_or(usize::MAX);
    let num_found = match old.as_bytes() {
        [] => text.chars().count() + 1,
        [byte] => text.bytes().filter(|found| found == byte).count(),
        _ => text.matches(old).count(),
    };
    let num_replaced = num_found.min(most);
    budget::charge(new.len().saturating_mul(num_replaced).saturating_add(text.len()))?;
    Ok(Value::from(if count < 0 { text.replace(old, new) } else { text.replacen(old, new, most) }))
}

fn split<'t>(text: &'t str, separator: Option<&str>, most: usize, from_right: bool) -> Result<Vec<&'t str>> {
    // Substrings of few characters take more memory than the text.
    let Some(separator) = separator else {
        let words = text.split(is_space).filter(|word| !word.is_empty()).count();
        budget::charge(words.min(most).saturating_mul(2 * size_of::<&str>()))?;
        return Ok(split_space(text, most, from_right));
    };
    if separator.is_empty() {
        return Err(fail("empty separator"));
    }
    let limit = most.saturating_add(1);
    let num_parts = text.matches(separator).count().min(most).saturating_add(1);
    budget::charge(num_parts.saturating_mul(2 * size_of::<&str>()))?;
    if from_right {
        let mut parts: Vec<_> = text.rsplitn(limit, separator).collect();
        parts.reverse();
        return Ok(parts);
    }
    Ok(text.splitn(limit, separator).collect())
}

fn split_space(text: &str, most: usize, from_right: bool) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut rest = strip(text, None, !from_right, from_right);
    while !rest.is_empty() {
        if parts.len() == most {
            parts.push(strip(rest, None, false, !from_right || most == 0));
            let last = parts.len() - 1;
            parts[last] = if from_right { strip(rest, None, false, true) } else { rest };
            break;
        }
        let at = if from_right { rest.rfind(is_space) } else { rest.find(is_space) };
        let Some(at) = at else {
            parts.push(rest);
            break;
        };
        if from_right {
            let width = rest[at..].chars().next().map_or(1, char::len_utf8);
            parts.push(&rest[at + width..]);
            rest = strip(&rest[..at], None, false, true);
        } else {
            parts.push(&rest[..at]);
            rest = strip(&rest[at..], None, true, false);
        }
    }
    if from_right {
        parts.reverse();
    }
    parts
}

fn is_line_end(c: char) -> bool {
    matches!(c, '\n'..='\r' | '\u{1C}'..='\u{1E}' | '\u{85}' | '\u{2028}' | '\u{2029}')
}

/// At least the number of lines that [`lines`] returns.
pub(super) fn num_lines(text: &str) -> usize {
    text.chars().filter(|c| is_line_end(*c)).count() + 1
}

/// The lines of a text, at all line ends of Python.
pub(super) fn lines(text: &str, keep_ends: bool) -> Vec<&str> {
    let mut lines = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let Some(end) = rest.find(is_line_end) else {
            lines.push(rest);
            break;
        };
        let width = if rest[end..].starts_with("\r\n") {
            2
        } else {
            rest[end..].chars().next().map_or(1, char::len_utf8)
        };
        lines.push(&rest[..if keep_ends { end + width } else { end }]);
        rest = &rest[end + width..];
    }
    lines
}

/// The text in the middle, or at an end, of `width` characters.
pub(super) fn pad(text: &str, width: usize, fill: &str, method: &str) -> Result<Value> {
    let mut chars = fill.chars();
    let (Some(fill), None) = (chars.next(), chars.next()) else {
        return Err(fail("the fill character must be exactly one character long"));
    };
    let missing = width.saturating_sub(text.chars().count());
    budget::charge(missing.saturating_mul(fill.len_utf8()).saturating_add(text.len()))?;
    let before = match method {
        "ljust" => 0,
        "rjust" => missing,
        // Python puts the odd one to the left if the width is odd.
        _ => missing / 2 + (missing & width & 1),
    };
    let fill = |count| std::iter::repeat_n(fill, count);
    string(fill(before).chain(text.chars()).chain(fill(missing - before)).collect::<String>())
}

/// The first character in upper case, all others in lower case.
pub(super) fn capitalize(text: &str) -> String {
    let mut chars = text.chars();
    match chars.next() {
        Some(first) => titlecase(first) + &chars.as_str().to_lowercase(),
        None => String::new(),
    }
}

/// A character at the start of a word: of a two-letter ligature, only the first letter is upper case.
fn titlecase(c: char) -> String {
    let mut upper = c.to_uppercase();
    upper.next().into_iter().chain(upper.flat_map(char::to_lowercase)).collect()
}

fn swapcase(text: &str) -> String {
    text.chars()
        .map(|c| if c.is_uppercase() { c.to_lowercase().to_string() } else { c.to_uppercase().to_string() })
        .collect()
}

fn title(text: &str) -> String {
    let mut titled = String::with_capacity(text.len());
    let mut in_word = false;
    for c in text.chars() {
        if in_word {
            titled.extend(c.to_lowercase());
        } else {
            titled.push_str(&titlecase(c));
        }
        in_word = c.is_uppercase() || c.is_lowercase();
    }
    titled
}

fn expand_tabs(text: &str, width: usize) -> Result<Value> {
    let mut output = Writer::default();
    let mut column = 0;
    for c in text.chars() {
        match c {
            '\t' => {
                let count = if width == 0 { 0 } else { width - column % width };
                budget::charge(count)?;
                output.push(&" ".repeat(count))?;
                column += count;
            }
            c => {
                column = if matches!(c, '\n' | '\r') { 0 } else { column + 1 };
                output.push(c.encode_utf8(&mut [0; 4]))?;
            }
        }
    }
    Ok(Value::from(output.finish()?))
}

fn translate(text: &str, table: &Value) -> Result<Value> {
    let Py::Dict(table) = Py::of(table) else {
        return Err(fail(format!("translate() takes a dict, not {}", type_name(table))));
    };
    let mut output = Writer::default();
    for c in text.chars() {
        match table.get(&Value::from(u32::from(c))).map(|value| (Py::of(value), value)) {
            None => output.push(c.encode_utf8(&mut [0; 4]))?,
            Some((Py::None, _)) => {}
            Some((Py::Int(code), _)) => {
                let c = u32::try_from(code).ok().and_then(char::from_u32);
                let c = c.ok_or_else(|| fail("character mapping must be in range(0x110000)"))?;
                output.push(c.encode_utf8(&mut [0; 4]))?;
            }
            Some((_, value)) => output.push(expect_str("a character's translation", value)?)?,
        }
    }
    Ok(Value::from(output.finish()?))
}

/// Whether a text has a property, by the name of the method that asks.
pub(super) fn is(text: &str, method: &str) -> bool {
    let all = |test: fn(char) -> bool| !text.is_empty() && text.chars().all(test);
    // Cased characters are all of one case, and there is one.
    let cased = |upper: bool| {
        let mut found = false;
        for c in text.chars() {
            if if upper { c.is_lowercase() } else { c.is_uppercase() } {
                return false;
            }
            found |= if upper { c.is_uppercase() } else { c.is_lowercase() };
        }
        found
    };
    match method {
        "isalnum" => all(char::is_alphanumeric),
        "isalpha" => all(char::is_alphabetic),
        "isascii" => text.is_ascii(),
        "isdecimal" => all(|c| c.is_numeric() && c.is_ascii_digit() || c.is_numeric() && is_decimal(c)),
        "isdigit" => all(|c| is_decimal(c) || "²³¹⁰⁴⁵⁶⁷⁸⁹₀₁₂₃₄₅₆₇₈₉".contains(c)),
        "isnumeric" => all(char::is_numeric),
        "isidentifier" => {
            let word = |c: char| c == '_' || c.is_alphanumeric();
            text.chars().all(word) && text.chars().next().is_some_and(|c| !c.is_numeric())
        }
        "islower" => cased(false),
        "isupper" => cased(true),
        "isprintable" => text.chars().all(is_printable),
        "isspace" => all(is_space),
        "istitle" => {
            let (mut in_word, mut found) = (false, false);
            for c in text.chars() {
                let (upper, lower) = (c.is_uppercase(), c.is_lowercase());
                if upper && in_word || lower && !in_word {
                    return false;
                }
                found |= upper || lower;
                in_word = upper || lower;
            }
            found
        }
        _ => false,
    }
}

/// Digits of the scripts that have ten of their own, by the zeros that their blocks begin with.
fn is_decimal(c: char) -> bool {
    const ZEROS: [u32; 20] = [
        0x30, 0x660, 0x6F0, 0x7C0, 0x966, 0x9E6, 0xA66, 0xAE6, 0xB66, 0xBE6, 0xC66, 0xCE6, 0xD66, 0xE50,
        0xED0, 0xF20, 0x1040, 0x17E0, 0x1810, 0xFF10,
    ];
    let code = u32::from(c);
    ZEROS.iter().any(|zero| (*zero..zero + 10).contains(&code))
}
