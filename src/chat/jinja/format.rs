//! Formatting as Python does it: `pattern % values`, `str.format` and its small language of widths and precisions.
//!
//! Widths and precisions are paid for before anything is written.

use minijinja::Value;

use super::args::size;
use super::text::{self, Writer, float_repr, repr_of, str_of};
use super::value::{Py, expect_int, int, type_name};
use super::{Result, budget, fail, ops, shown};

/// A float has at most this many digits after the point; more are zeros.
const MAX_FRACTION: usize = 1_100;

/// How a value is written.
#[derive(Default)]
struct Spec {
    fill: Option<char>,
    align: Option<char>,
    sign: Option<char>,
    alternate: bool,
    zero: bool,
    width: usize,
    grouping: Option<char>,
    precision: Option<usize>,
    kind: Option<char>,
}

impl Spec {
    fn pad(&self, text: &str, default_align: char) -> Result<String> {
        let length = text.chars().count();
        let missing = self.width.saturating_sub(length);
        let fill = self.fill.unwrap_or(' ');
        pay(missing.saturating_mul(fill.len_utf8()).saturating_add(text.len()))?;
        let fill = |count| std::iter::repeat_n(fill, count);
        let before = match self.align.unwrap_or(default_align) {
            '<' => 0,
            '^' => missing / 2,
            _ => missing,
        };
        Ok(fill(before).chain(text.chars()).chain(fill(missing - before)).collect())
    }

    /// A number: the sign, the prefix of its base, digits.
    fn pad_number(&self, negative: bool, prefix: &str, digits: &str) -> Result<String> {
        let sign = match (negative, self.sign) {
            (true, _) => "-",
            (false, Some('+')) => "+",
            (false, Some(' ')) => " ",
            (false, _) => "",
        };
        if self.zero && self.align.is_none() || self.align == Some('=') {
            let used = sign.len() + prefix.len() + digits.chars().count();
            let missing = self.width.saturating_sub(used);
            pay(missing)?;
            let fill = self.fill.unwrap_or(if self.zero { '0' } else { ' ' });
            let padding: String = std::iter::repeat_n(fill, missing).collect();
            return Ok(format!("{sign}{prefix}{padding}{digits}"));
        }
        self.pad(&format!("{sign}{prefix}{digits}"), '>')
    }

    fn grouped(&self, digits: &str, group: usize) -> String {
        let Some(separator) = self.grouping else { return digits.to_owned() };
        let whole = digits.find(|c: char| !c.is_ascii_alphanumeric()).unwrap_or(digits.len());
        let mut text = String::with_capacity(digits.len() * 4 / 3 + 1);
        for (index, c) in digits[..whole].chars().enumerate() {
            if index > 0 && (whole - index) % group == 0 {
                text.push(separator);
            }
            text.push(c);
        }
        text + &digits[whole..]
    }

    fn int(&self, number: i128) -> Result<String> {
        let magnitude = number.unsigned_abs();
        let (prefix, mut digits, group) = match self.kind {
            Some('b') => ("0b", format!("{magnitude:b}"), 4),
            Some('o') => ("0o", format!("{magnitude:o}"), 4),
            Some('x') => ("0x", format!("{magnitude:x}"), 4),
            Some('X') => ("0X", format!("{magnitude:X}"), 4),
            _ => ("", magnitude.to_string(), 3),
        };
        if let Some(precision) = self.precision {
            let missing = precision.saturating_sub(digits.len());
            pay(missing)?;
            digits.insert_str(0, &"0".repeat(missing));
        }
        self.pad_number(number < 0, if self.alternate { prefix } else { "" }, &self.grouped(&digits, group))
    }

    fn float(&self, number: f64) -> Result<String> {
        let magnitude = number.abs();
        let negative = number.is_sign_negative() && !number.is_nan();
        let kind = self.kind.unwrap_or('r');
        if !number.is_finite() {
            let mut word = if number.is_nan() { "nan" } else { "inf" }.to_owned();
            if kind.is_ascii_uppercase() {
                word.make_ascii_uppercase();
            }
            return Self {
                zero: false,
                fill: self.fill,
                align: self.align,
                sign: self.sign,
                width: self.width,
                ..Self::default()
            }
            .pad_number(negative, "", &word);
        }
        let precision = self.precision.unwrap_or(6);
        let mut digits = match kind {
            'f' | 'F' => fixed(magnitude, precision)?,
            '%' => fixed(magnitude * 100.0, precision)? + "%",
            'e' | 'E' => exponential(magnitude, precision)?,
            'g' | 'G' | 'n' => general(magnitude, precision, self.alternate)?,
            _ => match self.precision {
                None => float_repr(magnitude),
                Some(precision) => {
                    let text = general(magnitude, precision, false)?;
                    if text.contains(['.', 'e']) { text } else { text + ".0" }
                }
            },
        };
        if kind.is_ascii_uppercase() {
            digits.make_ascii_uppercase();
        }
        self.pad_number(negative, "", &self.grouped(&digits, 3))
    }
}

/// A text that was padded is copied several times: for its sign, in groups, to its width.
fn pay(bytes: usize) -> Result<()> {
    budget::charge(bytes.saturating_mul(4))
}

fn fixed(number: f64, precision: usize) -> Result<String> {
    let shown = precision.min(MAX_FRACTION);
    pay(precision)?;
    Ok(format!("{number:.shown$}{}", "0".repeat(precision - shown)))
}

fn exponential(number: f64, precision: usize) -> Result<String> {
    let shown = precision.min(MAX_FRACTION);
    pay(precision)?;
    let text = format!("{number:.shown$e}");
    let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let (sign, exponent) = match exponent.strip_prefix('-') {
        Some(exponent) => ('-', exponent),
        None => ('+', exponent),
    };
    Ok(format!("{digits}{}e{sign}{exponent:0>2}", "0".repeat(precision - shown)))
}

fn general(number: f64, precision: usize, keep_zeros: bool) -> Result<String> {
    let precision = precision.max(1);
    let rounded = exponential(number, precision - 1)?;
    let exponent: i64 = rounded.split_once('e').and_then(|(_, e)| e.parse().ok()).unwrap_or(0);
    let strip = |text: &str| {
        if keep_zeros || !text.contains('.') {
            return text.to_owned();
        }
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    };
    if exponent < -4 || exponent >= precision as i64 {
        let (digits, exponent) = rounded.split_once('e').unwrap_or((&rounded, "+00"));
        return Ok(format!("{}e{exponent}", strip(digits)));
    }
    let decimals = usize::try_from(precision as i64 - 1 - exponent).unwrap_or(0);
    Ok(strip(&fixed(number, decimals)?))
}

fn read_number(chars: &mut std::iter::Peekable<std::str::Chars<'_>>) -> Result<Option<usize>> {
    let mut number = None;
    while let Some(digit) = chars.peek().and_then(|c| c.to_digit(10)) {
        chars.next();
        let value: usize = number.unwrap_or(0);
        let next = value.checked_mul(10).and_then(|value| value.checked_add(digit as usize));
        number = Some(next.ok_or_else(|| fail("a width is too large"))?);
    }
    Ok(number)
}

/// `pattern % values`.
pub(super) fn percent(pattern: &str, values: &Value) -> Result<Value> {
    let (positional, mapping) = match Py::of(values) {
        Py::List(list) if list.is_tuple => {
            budget::work(list.items.len() * size_of::<Value>())?;
            (list.items.clone(), None)
        }
        Py::Dict(dict) => (vec![values.clone()], Some(dict)),
        _ => (vec![values.clone()], None),
    };
    // Values with items may stay unused.
    let may_stay = match Py::of(values) {
        Py::List(list) => !list.is_tuple,
        Py::Dict(_) | Py::Range(_) | Py::Undefined => true,
        _ => false,
    };
    let mut rest = positional.into_iter();
    let missing = || fail("not enough arguments for format string");
    let mut output = Writer::default();
    let mut chars = pattern.chars().peekable();
    while let Some(c) = chars.next() {
        if c != '%' {
            output.push(c.encode_utf8(&mut [0; 4]))?;
            continue;
        }
        let mut named = None;
        if chars.peek() == Some(&'(') {
            chars.next();
            let mut name = String::new();
            let mut open = 1;
            loop {
                let c = chars.next().ok_or_else(|| fail("incomplete format key"))?;
                open += i32::from(c == '(') - i32::from(c == ')');
                if open == 0 {
                    break;
                }
                name.push(c);
            }
            let dict = mapping.ok_or_else(|| fail("format requires a mapping"))?;
            named =
                Some(dict.get_str(&name).cloned().ok_or_else(|| fail(format!("no field {}", shown(&name))))?);
        }
        let mut spec = Spec::default();
        while let Some(flag) = chars.next_if(|c| "#0- +".contains(*c)) {
            match flag {
                '#' => spec.alternate = true,
                '0' => spec.zero = true,
                '-' => spec.align = Some('<'),
                sign => spec.sign = if spec.sign == Some('+') { Some('+') } else { Some(sign) },
            }
        }
        if chars.next_if_eq(&'*').is_some() {
            let width = expect_int("a width", &rest.next().ok_or_else(missing)?)?;
            if width < 0 {
                spec.align = Some('<');
            }
            spec.width = size(width.saturating_abs());
        } else {
            spec.width = read_number(&mut chars)?.unwrap_or(0);
        }
        if chars.next_if_eq(&'.').is_some() {
            spec.precision = Some(if chars.next_if_eq(&'*').is_some() {
                size(expect_int("a precision", &rest.next().ok_or_else(missing)?)?)
            } else {
                read_number(&mut chars)?.unwrap_or(0)
            });
        }
        while chars.next_if(|c| "hlL".contains(*c)).is_some() {}
        let kind = chars.next().ok_or_else(|| fail("incomplete format"))?;
        if kind == '%' {
            output.push("%")?;
            continue;
        }
        let value = match named {
            Some(value) => value,
            None => rest.next().ok_or_else(missing)?,
        };
        output.push(&converted(&value, kind, spec)?)?;
    }
    if !may_stay && rest.next().is_some() {
        return Err(fail("not all arguments were converted while formatting"));
    }
    Ok(Value::from(output.finish()?))
}

/// A value under one conversion of `%`.
fn converted(value: &Value, kind: char, mut spec: Spec) -> Result<String> {
    spec.kind = Some(kind);
    if spec.align == Some('<') {
        spec.zero = false;
    }
    match kind {
        's' | 'r' | 'a' => {
            let mut text = match kind {
                's' => str_of(value)?,
                'r' => repr_of(value)?,
                _ => ascii(&repr_of(value)?)?,
            };
            if let Some(precision) = spec.precision {
                text = text.chars().take(precision).collect();
            }
            spec.pad(&text, '>')
        }
        'c' => {
            let text = match Py::of(value) {
                Py::Str(text) if text.chars().count() == 1 => text.to_owned(),
                Py::Int(code) => character(code)?.to_string(),
                Py::Bool(flag) => character(flag.into())?.to_string(),
                _ => return Err(fail("%c requires an integer or a character")),
            };
            spec.pad(&text, '>')
        }
        'd' | 'i' | 'u' => match Py::of(value) {
            Py::Int(number) => spec.int(number),
            Py::Bool(flag) => spec.int(flag.into()),
            Py::Float(number) if number.is_finite() && number.abs() < 1e38 => {
                spec.int(number.trunc() as i128)
            }
            _ => Err(fail(format!("%{kind} format: a number is required, not {}", type_name(value)))),
        },
        'x' | 'X' | 'o' => spec.int(expect_int(&format!("the value of %{kind}"), value)?),
        'e' | 'E' | 'f' | 'F' | 'g' | 'G' => match Py::of(value) {
            Py::Float(number) => spec.float(number),
            Py::Int(number) => spec.float(number as f64),
            Py::Bool(flag) => spec.float(f64::from(u8::from(flag))),
            _ => Err(fail(format!("must be real number, not {}", type_name(value)))),
        },
        other => Err(fail(format!("unsupported format character {other:?}"))),
    }
}

fn character(code: i128) -> Result<char> {
    u32::try_from(code)
        .ok()
        .and_then(char::from_u32)
        .ok_or_else(|| fail(format!("{code} is not the code of a character")))
}

fn ascii(text: &str) -> Result<String> {
    let mut output = Writer::default();
    for c in text.chars() {
        match u32::from(c) {
            0..0x80 => output.push(c.encode_utf8(&mut [0; 4]))?,
            code @ 0x80..=0xFF => output.push(&format!("\\x{code:02x}"))?,
            code @ 0x100..=0xFFFF => output.push(&format!("\\u{code:04x}"))?,
            code => output.push(&format!("\\U{code:08x}"))?,
        }
    }
    output.finish()
}

/// `pattern.format(*positional, **named)`.
pub(super) fn format(pattern: &str, positional: &[Value], named: &[(String, Value)]) -> Result<String> {
    Formatter { positional, named, next: 0 }.format(pattern, 0)
}

struct Formatter<'a> {
    positional: &'a [Value],
    named: &'a [(String, Value)],
    next: usize,
}

impl Formatter<'_> {
    fn format(&mut self, pattern: &str, depth: usize) -> Result<String> {
        if depth > 2 {
            return Err(fail("fields are nested too deep in a format string"));
        }
        let mut output = Writer::default();
        let mut rest = pattern;
        while let Some(at) = rest.find(['{', '}']) {
            output.push(&rest[..at])?;
            let brace = &rest[at..=at];
            let after = &rest[at + 1..];
            if let Some(after) = after.strip_prefix(brace) {
                output.push(brace)?;
                rest = after;
                continue;
            }
            if brace == "}" {
                return Err(fail("single '}' encountered in format string"));
            }
            let mut open = 1;
            let end = after.find(|c| {
                open += i32::from(c == '{') - i32::from(c == '}');
                open == 0
            });
            let end = end.ok_or_else(|| fail("expected '}' before end of string"))?;
            output.push(&self.field(&after[..end], depth)?)?;
            rest = &after[end + 1..];
        }
        output.push(rest)?;
        output.finish()
    }

    fn field(&mut self, field: &str, depth: usize) -> Result<String> {
        let end = field.find(['!', ':']).unwrap_or(field.len());
        let (name, rest) = field.split_at(end);
        let (conversion, spec) = match rest.strip_prefix('!') {
            Some(rest) => {
                let (conversion, spec) = rest.split_once(':').unwrap_or((rest, ""));
                (Some(conversion), spec)
            }
            None => (None, rest.strip_prefix(':').unwrap_or("")),
        };
        let value = self.lookup(name)?;
        let value = match conversion {
            None => value,
            Some("s") => Value::from(str_of(&value)?),
            Some("r") => Value::from(repr_of(&value)?),
            Some("a") => Value::from(ascii(&repr_of(&value)?)?),
            Some(other) => return Err(fail(format!("unknown conversion {}", shown(other)))),
        };
        let spec = if spec.contains(['{', '}']) { self.format(spec, depth + 1)? } else { spec.to_owned() };
        with_spec(&value, &spec)
    }

    fn lookup(&mut self, name: &str) -> Result<Value> {
        let end = name.find(['.', '[']).unwrap_or(name.len());
        let (first, mut rest) = name.split_at(end);
        let index = if first.is_empty() {
            self.next += 1;
            Some(self.next - 1)
        } else {
            first.parse::<usize>().ok()
        };
        let found = match index {
            Some(index) => self.positional.get(index),
            None if self.named.len() > 8 => {
                // Few fields are named; many are looked up one after the other.
                budget::work(self.named.len().saturating_mul(16))?;
                self.named.iter().find(|(known, _)| known == first).map(|(_, value)| value)
            }
            None => self.named.iter().find(|(known, _)| known == first).map(|(_, value)| value),
        };
        let mut value =
            found.cloned().ok_or_else(|| fail(format!("no argument for field {}", shown(first))))?;
        while !rest.is_empty() {
            if let Some(after) = rest.strip_prefix('.') {
                let end = after.find(['.', '[']).unwrap_or(after.len());
                value = ops::attribute(&value, &after[..end])?;
                rest = &after[end..];
            } else {
                let (key, after) = rest[1..]
                    .split_once(']')
                    .filter(|_| rest.starts_with('['))
                    .ok_or_else(|| fail("missing ']' in format string"))?;
                let key = key.parse::<i64>().map_or_else(|_| Value::from(key), Value::from);
                value = ops::item(&value, &key)?;
                rest = after;
            }
        }
        Ok(value)
    }
}

/// `format(value, spec)`.
fn with_spec(value: &Value, text: &str) -> Result<String> {
    if text.is_empty() {
        return str_of(value);
    }
    let mut spec = Spec::default();
    let mut chars = text.chars().peekable();
    let mut ahead = text.chars();
    if let (Some(fill), Some(align @ ('<' | '>' | '=' | '^'))) = (ahead.next(), ahead.next()) {
        spec.fill = Some(fill);
        spec.align = Some(align);
        chars.next();
        chars.next();
    } else if let Some(align) = chars.next_if(|c| "<>=^".contains(*c)) {
        spec.align = Some(align);
    }
    spec.sign = chars.next_if(|c| "+- ".contains(*c));
    chars.next_if_eq(&'z');
    spec.alternate = chars.next_if_eq(&'#').is_some();
    spec.zero = chars.next_if_eq(&'0').is_some();
    spec.width = read_number(&mut chars)?.unwrap_or(0);
    spec.grouping = chars.next_if(|c| ",_".contains(*c));
    if chars.next_if_eq(&'.').is_some() {
        spec.precision =
            Some(read_number(&mut chars)?.ok_or_else(|| fail("format specifier missing precision"))?);
    }
    spec.kind = chars.next();
    if chars.next().is_some() {
        return Err(fail(format!("invalid format specifier {}", shown(text))));
    }
    let wrong = |value: &Value, kind: char| {
        fail(format!("unknown format code {kind:?} for object of type '{}'", type_name(value)))
    };
    let value_as_int = if let Py::Bool(flag) = Py::of(value) { int(flag.into()) } else { value.clone() };
    match (Py::of(&value_as_int), spec.kind) {
        (Py::Str(text), None | Some('s')) => {
            if spec.zero {
                spec.fill.get_or_insert('0');
                spec.align.get_or_insert('<');
            }
            let shown: String = text.chars().take(spec.precision.unwrap_or(usize::MAX)).collect();
            spec.pad(&shown, '<')
        }
        (Py::Int(number), Some('c')) => spec.pad(&character(number)?.to_string(), '<'),
        (Py::Int(number), None | Some('b' | 'd' | 'n' | 'o' | 'x' | 'X')) => spec.int(number),
        (Py::Int(number), Some('e' | 'E' | 'f' | 'F' | 'g' | 'G' | '%')) => spec.float(number as f64),
        (Py::Float(number), None | Some('e' | 'E' | 'f' | 'F' | 'g' | 'G' | 'n' | '%')) => spec.float(number),
        (_, Some(kind)) => Err(wrong(value, kind)),
        (other, None) => Err(fail(format!("{} has no format {}", text::described(&other), shown(text)))),
    }
}
