//! The operators of Python: arithmetic, comparison, membership, subscripts and slices.

use std::cmp::Ordering;

use minijinja::Value;

use super::value::{Py, Range, VALUE_SIZE, int, is_same_object, iterate, list, string, tuple, type_name};
use super::{Result, budget, fail, format, methods, shown, text};

fn unsupported(operator: &str, left: &Value, right: &Value) -> minijinja::Error {
    fail(format!(
        "unsupported operand types for {operator}: '{}' and '{}'",
        type_name(left),
        type_name(right)
    ))
}

/// Two numbers of one type.
enum Pair {
    Int(i128, i128),
    Float(f64, f64),
}

fn number(value: &Value) -> Option<Result<i128, f64>> {
    match Py::of(value) {
        Py::Bool(flag) => Some(Ok(flag.into())),
        Py::Int(number) => Some(Ok(number)),
        Py::Float(number) => Some(Err(number)),
        _ => None,
    }
}

fn pair(left: &Value, right: &Value) -> Option<Pair> {
    Some(match (number(left)?, number(right)?) {
        (Ok(a), Ok(b)) => Pair::Int(a, b),
        (Ok(a), Err(b)) => Pair::Float(a as f64, b),
        (Err(a), Ok(b)) => Pair::Float(a, b as f64),
        (Err(a), Err(b)) => Pair::Float(a, b),
    })
}

fn checked(number: Option<i128>) -> Result<Value> {
    number.map(int).ok_or_else(|| fail("an integer has more than 127 bits"))
}

/// `left + right`.
pub(super) fn add(left: &Value, right: &Value) -> Result<Value> {
    match (Py::of(left), Py::of(right)) {
        (Py::Str(a), Py::Str(b)) => {
            if left.is_safe() || right.is_safe() {
                let (left, right) = (text::escaped(left)?, text::escaped(right)?);
                budget::charge(left.len() + right.len())?;
                let text = left + &right;
                return Ok(Value::from_safe_string(text));
            }
            budget::charge(a.len() + b.len())?;
            Ok(Value::from([a, b].concat()))
        }
        (Py::List(a), Py::List(b)) if a.is_tuple == b.is_tuple => {
            budget::charge((a.items.len() + b.items.len()) * VALUE_SIZE)?;
            let items = [&a.items[..], &b.items[..]].concat();
            if a.is_tuple { tuple(items) } else { list(items) }
        }
        _ => match pair(left, right) {
            Some(Pair::Int(a, b)) => checked(a.checked_add(b)),
            Some(Pair::Float(a, b)) => Ok(Value::from(a + b)),
            None => Err(unsupported("+", left, right)),
        },
    }
}

/// `left - right`.
pub(super) fn sub(left: &Value, right: &Value) -> Result<Value> {
    match pair(left, right) {
        Some(Pair::Int(a, b)) => checked(a.checked_sub(b)),
        Some(Pair::Float(a, b)) => Ok(Value::from(a - b)),
        None => Err(unsupported("-", left, right)),
    }
}

/// `left * right`.
pub(super) fn mul(left: &Value, right: &Value) -> Result<Value> {
    match (Py::of(left), Py::of(right)) {
        (Py::Str(text), _) if let Some(Ok(times)) = number(right) => repeat_str(text, times),
        (_, Py::Str(text)) if let Some(Ok(times)) = number(left) => repeat_str(text, times),
        (Py::List(items), _) if let Some(Ok(times)) = number(right) => repeat_list(items, times),
        (_, Py::List(items)) if let Some(Ok(times)) = number(left) => repeat_list(items, times),
        _ => match pair(left, right) {
            Some(Pair::Int(a, b)) => checked(a.checked_mul(b)),
            Some(Pair::Float(a, b)) => Ok(Value::from(a * b)),
            None => Err(unsupported("*", left, right)),
        },
    }
}

fn times(length: usize, times: i128) -> Result<usize> {
    let times = usize::try_from(times.max(0)).unwrap_or(usize::MAX);
    budget::charge(length.saturating_mul(times))?;
    Ok(times)
}

fn repeat_str(text: &str, count: i128) -> Result<Value> {
    Ok(Value::from(text.repeat(times(text.len(), count)?)))
}

fn repeat_list(items: &super::value::List, count: i128) -> Result<Value> {
    let count = times(items.items.len() * VALUE_SIZE, count)?;
    let repeated = if items.items.is_empty() {
        Vec::new()
    } else {
        std::iter::repeat_n(&items.items, count).flatten().cloned().collect()
    };
    if items.is_tuple { tuple(repeated) } else { list(repeated) }
}

fn by_zero() -> minijinja::Error {
    fail("division by zero")
}

/// `left / right`.
pub(super) fn div(left: &Value, right: &Value) -> Result<Value> {
    let (a, b) = match pair(left, right) {
        Some(Pair::Int(a, b)) => (a as f64, b as f64),
        Some(Pair::Float(a, b)) => (a, b),
        None => return Err(unsupported("/", left, right)),
    };
    if b == 0.0 { Err(by_zero()) } else { Ok(Value::from(a / b)) }
}

/// Quotient and remainder; the remainder has the sign of the divisor.
fn int_div_rem(a: i128, b: i128) -> Result<(i128, i128)> {
    if b == 0 {
        return Err(by_zero());
    }
    let (Some(quotient), Some(remainder)) = (a.checked_div(b), a.checked_rem(b)) else {
        return Err(fail("an integer has more than 127 bits"));
    };
    if remainder != 0 && (remainder < 0) != (b < 0) {
        return Ok((quotient - 1, remainder + b));
    }
    Ok((quotient, remainder))
}

fn float_div_rem(a: f64, b: f64) -> Result<(f64, f64)> {
    if b == 0.0 {
        return Err(by_zero());
    }
    let mut remainder = a % b;
    let mut quotient = (a - remainder) / b;
    if remainder == 0.0 {
        remainder = 0.0_f64.copysign(b);
    } else if (remainder < 0.0) != (b < 0.0) {
        remainder += b;
        quotient -= 1.0;
    }
    let quotient = if quotient == 0.0 { 0.0_f64.copysign(a / b) } else { quotient.round() };
    Ok((quotient, remainder))
}

/// `left // right`.
pub(super) fn floor_div(left: &Value, right: &Value) -> Result<Value> {
    match pair(left, right) {
        Some(Pair::Int(a, b)) => Ok(int(int_div_rem(a, b)?.0)),
        Some(Pair::Float(a, b)) => Ok(Value::from(float_div_rem(a, b)?.0)),
        None => Err(unsupported("//", left, right)),
    }
}

/// `left % right`, which formats where `left` is a text.
pub(super) fn rem(left: &Value, right: &Value) -> Result<Value> {
    if let Py::Str(pattern) = Py::of(left) {
        return format::percent(pattern, right);
    }
    match pair(left, right) {
        Some(Pair::Int(a, b)) => Ok(int(int_div_rem(a, b)?.1)),
        Some(Pair::Float(a, b)) => Ok(Value::from(float_div_rem(a, b)?.1)),
        None => Err(unsupported("%", left, right)),
    }
}

/// `left ** right`.
pub(super) fn pow(left: &Value, right: &Value) -> Result<Value> {
    let (a, b) = match pair(left, right) {
        Some(Pair::Int(a, b)) if b >= 0 => {
            // Only these have large powers that fit.
            let power = match (a, u32::try_from(b)) {
                (0 | 1, _) => Some(if b == 0 { 1 } else { a }),
                (-1, _) => Some(if b % 2 == 0 { 1 } else { -1 }),
                (_, Ok(exponent)) => a.checked_pow(exponent),
                (_, Err(_)) => None,
            };
            return checked(power);
        }
        Some(Pair::Int(a, b)) => (a as f64, b as f64),
        Some(Pair::Float(a, b)) => (a, b),
        None => return Err(unsupported("**", left, right)),
    };
    if a == 0.0 && b < 0.0 {
        return Err(by_zero());
    }
    if a < 0.0 && b.fract() != 0.0 {
        return Err(fail("the power is a complex number"));
    }
    let power = a.powf(b);
    if power.is_infinite() && a.is_finite() && b.is_finite() {
        return Err(fail("the power is out of range"));
    }
    Ok(Value::from(power))
}

/// `-value`.
pub(super) fn neg(value: &Value) -> Result<Value> {
    match number(value) {
        Some(Ok(number)) => checked(number.checked_neg()),
        Some(Err(number)) => Ok(Value::from(-number)),
        None => Err(fail(format!("bad operand type for unary -: '{}'", type_name(value)))),
    }
}

/// `+value`.
pub(super) fn pos(value: &Value) -> Result<Value> {
    match number(value) {
        Some(Ok(number)) => Ok(int(number)),
        Some(Err(number)) => Ok(Value::from(number)),
        None => Err(fail(format!("bad operand type for unary +: '{}'", type_name(value)))),
    }
}

/// `left == right`.
pub(super) fn eq(left: &Value, right: &Value) -> Result<bool> {
    equal(left, right, 0)
}

fn equal(left: &Value, right: &Value, depth: usize) -> Result<bool> {
    if depth > 2 * super::value::MAX_DEPTH {
        return Err(fail("the value contains itself and cannot be compared"));
    }
    budget::work(1)?;
    if is_same_object(left, right) {
        return Ok(true);
    }
    Ok(match (Py::of(left), Py::of(right)) {
        (Py::Undefined, Py::Undefined) | (Py::None, Py::None) => true,
        (Py::Str(a), Py::Str(b)) => {
            budget::work(a.len().min(b.len()))?;
            a == b
        }
        (Py::List(a), Py::List(b)) => {
            if a.is_tuple != b.is_tuple || a.items.len() != b.items.len() {
                return Ok(false);
            }
            for (a, b) in a.items.iter().zip(&b.items) {
                if !equal(a, b, depth + 1)? {
                    return Ok(false);
                }
            }
            true
        }
        (Py::Dict(a), Py::Dict(b)) => {
            if a.len() != b.len() {
                return Ok(false);
            }
            for (key, value) in a.iter() {
                match b.get(key) {
                    Some(other) if equal(value, other, depth + 1)? => {}
                    _ => return Ok(false),
                }
            }
            true
        }
        (Py::Range(a), Py::Range(b)) => {
            a.len == b.len && (a.len == 0 || a.start == b.start) && (a.len < 2 || a.step == b.step)
        }
        (Py::Other, Py::Other) => left.as_bytes().is_some() && left.as_bytes() == right.as_bytes(),
        _ => match pair(left, right) {
            Some(Pair::Int(a, b)) => a == b,
            Some(Pair::Float(a, b)) => a == b,
            None => false,
        },
    })
}

/// How two values are ordered; none for NaN.
pub(super) fn compare(left: &Value, right: &Value) -> Result<Option<Ordering>> {
    match (Py::of(left), Py::of(right)) {
        (Py::Str(a), Py::Str(b)) => {
            budget::work(a.len().min(b.len()))?;
            Ok(Some(a.cmp(b)))
        }
        (Py::List(a), Py::List(b)) if a.is_tuple == b.is_tuple => {
            for (a, b) in a.items.iter().zip(&b.items) {
                if !eq(a, b)? {
                    return compare(a, b);
                }
            }
            Ok(Some(a.items.len().cmp(&b.items.len())))
        }
        _ => match pair(left, right) {
            Some(Pair::Int(a, b)) => Ok(Some(a.cmp(&b))),
            Some(Pair::Float(a, b)) => Ok(a.partial_cmp(&b)),
            None => Err(fail(format!("'{}' and '{}' have no order", type_name(left), type_name(right)))),
        },
    }
}

/// `left operator right` for the operators of comparison.
pub(super) fn holds(operator: &str, left: &Value, right: &Value) -> Result<bool> {
    Ok(match operator {
        "==" => eq(left, right)?,
        "!=" => !eq(left, right)?,
        "in" => contains(right, left)?,
        "not in" => !contains(right, left)?,
        "<" => compare(left, right)? == Some(Ordering::Less),
        "<=" => matches!(compare(left, right)?, Some(Ordering::Less | Ordering::Equal)),
        ">" => compare(left, right)? == Some(Ordering::Greater),
        _ => matches!(compare(left, right)?, Some(Ordering::Greater | Ordering::Equal)),
    })
}

/// `value in container`.
pub(super) fn contains(container: &Value, value: &Value) -> Result<bool> {
    match Py::of(container) {
        Py::Str(text) => match Py::of(value) {
            Py::Str(part) => {
                budget::work(text.len())?;
                Ok(text.contains(part))
            }
            other => Err(fail(format!("'in <string>' requires a string, not {}", other.type_name()))),
        },
        Py::Dict(dict) => {
            super::value::Key::of(value)?;
            Ok(dict.get(value).is_some())
        }
        Py::List(list) => any_equal(&list.items, value),
        _ => any_equal(&iterate(container)?, value),
    }
}

fn any_equal(items: &[Value], value: &Value) -> Result<bool> {
    for item in items {
        if eq(item, value)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// A position in something of this length, counted from the end if it is negative.
pub(super) fn position(index: i128, len: usize) -> Option<usize> {
    let index = if index < 0 { index + len as i128 } else { index };
    usize::try_from(index).ok().filter(|index| *index < len)
}

/// The character at a position.
fn char_at(text: &str, index: i128) -> Result<Option<Value>> {
    budget::work(text.len())?;
    if text.is_ascii() {
        return Ok(position(index, text.len()).map(|index| Value::from(&text[index..=index])));
    }
    let position = position(index, text.chars().count());
    Ok(position.and_then(|index| text.chars().nth(index)).map(Value::from))
}

/// `value[key]` as Jinja reads it: an item, else an attribute, else undefined.
pub(super) fn item(value: &Value, key: &Value) -> Result<Value> {
    budget::work(key.as_str().map_or(0, str::len))?;
    let index = match Py::of(key) {
        Py::Int(index) => Some(index),
        Py::Bool(flag) => Some(flag.into()),
        _ => None,
    };
    let found = match (Py::of(value), index) {
        (Py::Undefined, _) => return Err(fail("the value is undefined, so it has no items")),
        (Py::Str(text), Some(index)) => char_at(text, index)?,
        (Py::List(list), Some(index)) => {
            position(index, list.items.len()).map(|index| list.items[index].clone())
        }
        (Py::List(_), None) => {
            key.as_str().and_then(|name| value.get_attr(name).ok()).filter(|item| !item.is_undefined())
        }
        (Py::Range(range), Some(index)) => position(index, range.len).and_then(|index| range.get(index)),
        (Py::Dict(dict), _) => dict.get(key).cloned(),
        (Py::Namespace(_), _) => key.as_str().and_then(|_| value.get_item(key).ok()),
        (Py::Other, _) => value.get_item(key).ok().filter(|value| !value.is_undefined()),
        _ => None,
    };
    match (found, Py::of(key)) {
        (Some(found), _) => Ok(found),
        (None, Py::Str(name)) => Ok(methods::bound(value, name).unwrap_or_default()),
        (None, _) => Ok(Value::UNDEFINED),
    }
}

/// `value.name` as Jinja reads it: an attribute, else an item, else undefined.
pub(super) fn attribute(value: &Value, name: &str) -> Result<Value> {
    if value.is_undefined() {
        return Err(fail(format!("the value is undefined, so it has no attribute {}", shown(name))));
    }
    match methods::bound(value, name) {
        Some(method) => budget::charge(size_of::<super::value::BoundMethod>()).map(|()| method),
        None => item(value, &Value::from(name)),
    }
}

/// `value[start:stop:step]`.
pub(super) fn slice(value: &Value, start: &Value, stop: &Value, step: &Value) -> Result<Value> {
    let bound = |value: &Value| match Py::of(value) {
        Py::None => Ok(None),
        Py::Int(number) => Ok(Some(number)),
        Py::Bool(flag) => Ok(Some(flag.into())),
        other => Err(fail(format!("slice indices are integers, not {}", text::described(&other)))),
    };
    let (start, stop, step) = (bound(start)?, bound(stop)?, bound(step)?.unwrap_or(1));
    if step == 0 {
        return Err(fail("slice step cannot be zero"));
    }
    match Py::of(value) {
        Py::Str(text) => {
            budget::work(text.len())?;
            if text.is_ascii() {
                let bytes = text.as_bytes();
                if step == 1 {
                    let (first, _, count) = span(start, stop, step, bytes.len());
                    let first = usize::try_from(first).unwrap_or(0);
                    return string(&text[first..first + count]);
                }
                let picked: String =
                    positions(start, stop, step, bytes.len()).map(|index| char::from(bytes[index])).collect();
                return string(picked);
            }
            budget::charge(text.len() * 2 * size_of::<char>())?;
            let chars: Vec<char> = text.chars().collect();
            let picked: String =
                positions(start, stop, step, chars.len()).map(|index| chars[index]).collect();
            string(picked)
        }
        Py::List(items) => {
            let (_, _, count) = span(start, stop, step, items.items.len());
            budget::afford(count * VALUE_SIZE)?;
            let positions = positions(start, stop, step, items.items.len());
            let picked: Vec<_> = positions.map(|index| items.items[index].clone()).collect();
            if items.is_tuple { tuple(picked) } else { list(picked) }
        }
        Py::Range(range) => {
            let (first, last, count) = span(start, stop, step, range.len);
            let at = |index: i128| {
                range.step.checked_mul(index).and_then(|offset| range.start.checked_add(offset))
            };
            match (at(first), at(last), range.step.checked_mul(step)) {
                (Some(start), Some(stop), Some(step)) => {
                    Ok(Value::from_object(Range { start, stop, step, len: count }))
                }
                _ => Err(fail("a range is too large")),
            }
        }
        Py::Undefined => Err(fail("the value is undefined, so it has no attributes")),
        // Values without items have no such item.
        _ => Ok(Value::UNDEFINED),
    }
}

/// First position, the position after the last one, and the number of positions of a slice.
fn span(start: Option<i128>, stop: Option<i128>, step: i128, len: usize) -> (i128, i128, usize) {
    let len = len as i128;
    let (lowest, highest) = if step > 0 { (0, len) } else { (-1, len - 1) };
    let clamp = |index: i128| {
        let index = if index < 0 { index.saturating_add(len) } else { index };
        index.clamp(lowest, highest)
    };
    let start = start.map_or(if step > 0 { lowest } else { highest }, clamp);
    let stop = stop.map_or(if step > 0 { highest } else { lowest }, clamp);
    let distance = if step > 0 { stop - start } else { start - stop };
    let count = if distance > 0 { (distance - 1) / step.checked_abs().unwrap_or(i128::MAX) + 1 } else { 0 };
    (start, stop, usize::try_from(count).unwrap_or(0))
}

fn positions(start: Option<i128>, stop: Option<i128>, step: i128, len: usize) -> impl Iterator<Item = usize> {
    let (first, _, count) = span(start, stop, step, len);
    (0..count).filter_map(move |index| usize::try_from(first + step * index as i128).ok())
}
