//! Filters that make numbers.

use minijinja::{State, Value};

use super::Filter;
use crate::chat::jinja::args::{Args, size};
use crate::chat::jinja::value::{Py, expect_int, int, string, type_name};
use crate::chat::jinja::{Result, fail};

pub(super) const FILTERS: &[(&str, Filter)] =
    &[("abs", abs), ("filesizeformat", file_size), ("float", float), ("int", integer), ("round", round)];

fn abs(_: &mut State<'_, '_>, value: &Value, args: Args) -> Result<Value> {
    args.none()?;
    match Py::of(value) {
        Py::Int(number) => Ok(int(number.checked_abs().unwrap_or(i128::MAX))),
        Py::Bool(flag) => Ok(int(flag.into())),
        Py::Float(number) => Ok(Value::from(number.abs())),
        _ => Err(fail(format!("bad operand type for abs(): '{}'", type_name(value)))),
    }
}

/// Digits with single underscores between them, as Python allows.
fn without_underscores(text: &str) -> Option<String> {
    let is_digit = |c: Option<char>| c.is_some_and(char::is_alphanumeric);
    let mut before = None;
    let mut rest = text.chars().peekable();
    let mut plain = String::with_capacity(text.len());
    while let Some(c) = rest.next() {
        if c == '_' {
            if !is_digit(before) || !is_digit(rest.peek().copied()) {
                return None;
            }
        } else {
            plain.push(c);
        }
        before = Some(c);
    }
    Some(plain)
}

/// `int(text, base)`.
fn parse_int(text: &str, base: i128) -> Option<i128> {
    let plain = without_underscores(text.trim())?;
    let (negative, digits) = match plain.strip_prefix('-') {
        Some(digits) => (true, digits),
        None => (false, plain.strip_prefix('+').unwrap_or(&plain)),
    };
    let lower = digits.to_ascii_lowercase();
    let named = [("0b", 2), ("0o", 8), ("0x", 16)];
    let prefix = named.iter().find(|(prefix, _)| lower.starts_with(prefix));
    let (base, digits) = match prefix {
        Some((prefix, own)) if base == 0 || base == *own => (*own, &lower[prefix.len()..]),
        _ if base == 0 => (10, lower.as_str()),
        _ => (base, lower.as_str()),
    };
    if digits.starts_with(['+', '-']) {
        return None;
    }
    let base = u32::try_from(base).ok().filter(|base| (2..=36).contains(base))?;
    let number = i128::from_str_radix(digits, base).ok()?;
    Some(if negative { -number } else { number })
}

/// `float(text)`.
pub(super) fn parse_float(text: &str) -> Option<f64> {
    without_underscores(text.trim())?.parse().ok()
}

fn integer(_: &mut State<'_, '_>, value: &Value, args: Args) -> Result<Value> {
    let args = args.bind(["default", "base"])?;
    let default = || args.get(0).cloned().unwrap_or_else(|| Value::from(0));
    let truncated = |number: f64| {
        if number.is_finite() && number.abs() < 1e38 { int(number.trunc() as i128) } else { default() }
    };
    match Py::of(value) {
        Py::Undefined => Err(fail("the value is undefined, so it is not an integer")),
        Py::Int(number) => Ok(int(number)),
        Py::Bool(flag) => Ok(int(flag.into())),
        Py::Float(number) => Ok(truncated(number)),
        Py::Str(text) => {
            let base = args.int(1, 10)?;
            Ok(match parse_int(text, base) {
                Some(number) => int(number),
                None => parse_float(text).map_or_else(default, truncated),
            })
        }
        _ => Ok(default()),
    }
}

fn float(_: &mut State<'_, '_>, value: &Value, args: Args) -> Result<Value> {
    let args = args.bind(["default"])?;
    let number = match Py::of(value) {
        Py::Undefined => return Err(fail("the value is undefined, so it is not a float")),
        Py::Int(number) => Some(number as f64),
        Py::Bool(flag) => Some(f64::from(u8::from(flag))),
        Py::Float(number) => Some(number),
        Py::Str(text) => parse_float(text),
        _ => None,
    };
    Ok(number.map_or_else(|| args.get(0).cloned().unwrap_or_else(|| Value::from(0.0)), Value::from))
}

fn round(_: &mut State<'_, '_>, value: &Value, args: Args) -> Result<Value> {
    let args = args.bind(["precision", "method"])?;
    let precision = args.int(0, 0)?;
    let method = args.str(1, "common")?;
    let number = match Py::of(value) {
        Py::Int(_) | Py::Bool(_) if method == "common" => {
            return round_int(expect_int("the value", value)?, precision);
        }
        Py::Int(number) => number as f64,
        Py::Bool(flag) => f64::from(u8::from(flag)),
        Py::Float(number) => number,
        _ => return Err(fail(format!("type {} has no round", type_name(value)))),
    };
    if !["common", "ceil", "floor"].contains(&method) {
        return Err(fail("method must be common, ceil or floor"));
    }
    if !number.is_finite() {
        return if method == "common" {
            Ok(Value::from(number))
        } else {
            Err(fail("the number is not finite"))
        };
    }
    if method == "common" {
        // No float has more digits than these.
        return Ok(Value::from(if precision > 350 {
            number
        } else if precision < -350 {
            0.0_f64.copysign(number)
        } else if precision >= 0 {
            format!("{number:.*}", size(precision)).parse().unwrap_or(number)
        } else {
            let scale = 10_f64.powi(i32::try_from(-precision).unwrap_or(i32::MAX));
            (number / scale).round_ties_even() * scale
        }));
    }
    let scale =
        10_f64.powi(i32::try_from(precision).unwrap_or(if precision > 0 { i32::MAX } else { i32::MIN }));
    if !scale.is_finite() {
        return Err(fail("the precision is out of range"));
    }
    let scaled = number * scale;
    Ok(Value::from(if method == "ceil" { scaled.ceil() } else { scaled.floor() } / scale))
}

fn round_int(number: i128, precision: i128) -> Result<Value> {
    if precision >= 0 {
        return Ok(int(number));
    }
    let Some(scale) = u32::try_from(-precision).ok().and_then(|digits| 10_i128.checked_pow(digits)) else {
        return Ok(int(0));
    };
    let (down, rest) = (number.div_euclid(scale), number.rem_euclid(scale));
    let up = rest > scale / 2 || rest == scale / 2 && down % 2 != 0;
    Ok(int((down + i128::from(up)) * scale))
}

fn file_size(_: &mut State<'_, '_>, value: &Value, args: Args) -> Result<Value> {
    let args = args.bind(["binary"])?;
    let bytes = match Py::of(value) {
        Py::Float(number) => number,
        Py::Str(text) => parse_float(text).ok_or_else(|| fail("could not convert string to float"))?,
        _ => expect_int("the size", value)? as f64,
    };
    let (base, prefixes) = if args.flag(0, false) {
        (1024.0, ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB", "ZiB", "YiB"])
    } else {
        (1000.0, ["kB", "MB", "GB", "TB", "PB", "EB", "ZB", "YB"])
    };
    if bytes == 1.0 {
        return string("1 Byte");
    }
    if bytes < base {
        return string(format!("{} Bytes", bytes.trunc()));
    }
    let mut unit = base;
    for prefix in prefixes {
        unit *= base;
        if bytes < unit || prefix.starts_with('Y') {
            return string(format!("{:.1} {prefix}", base * bytes / unit));
        }
    }
    Ok(Value::UNDEFINED)
}
