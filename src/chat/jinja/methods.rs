//! The methods of each type. Methods that modify a value are refused, as in the sandbox that chat templates are written
//! for.

use std::sync::Arc;

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{State, Value};

use super::args::{Args, is_absent};
use super::value::{
    BoundMethod, Dict, DictView, Py, View, dict, expect_int, int, iterate, list, tuple, type_name,
};
use super::{Result, budget, fail, ops, shown, strings, text};

const LIST: &[&str] = &["copy", "count", "index"];
const TUPLE: &[&str] = &["count", "index"];
const DICT: &[&str] = &["copy", "fromkeys", "get", "items", "keys", "values"];
/// Those that change the value.
const CHANGING: &[&str] = &[
    "append",
    "clear",
    "extend",
    "insert",
    "pop",
    "popitem",
    "remove",
    "reverse",
    "setdefault",
    "sort",
    "update",
];
const INT: &[&str] = &["as_integer_ratio", "bit_count", "bit_length", "conjugate", "is_integer"];
const FLOAT: &[&str] = &["conjugate", "is_integer"];

/// Whether some type has a method of this name, so that an attribute may mean it.
pub(super) fn is_name(name: &str) -> bool {
    [LIST, DICT, CHANGING, INT, FLOAT, strings::METHODS].iter().any(|names| names.contains(&name))
        || matches!(name, "decode" | "isdisjoint")
}

fn known(value: &Value, name: &str) -> Option<&'static str> {
    let names = match Py::of(value) {
        Py::Str(_) => strings::METHODS,
        Py::List(items) if items.is_tuple => TUPLE,
        Py::List(_) => LIST,
        Py::Dict(_) => DICT,
        Py::Int(_) | Py::Bool(_) => INT,
        Py::Float(_) => FLOAT,
        Py::Range(_) => TUPLE,
        _ if value.as_bytes().is_some() => &["decode"],
        _ => &[],
    };
    names.iter().find(|known| **known == name).copied()
}

/// The method of this name, if the value has it.
pub(super) fn bound(value: &Value, name: &str) -> Option<Value> {
    known(value, name).map(|name| Value::from_object(BoundMethod { receiver: value.clone(), name }))
}

/// `receiver.name(args)`.
pub(super) fn call(state: &mut State<'_, '_>, receiver: &Value, name: &str, args: &[Value]) -> Result<Value> {
    if let Some(name) = known(receiver, name) {
        return match Py::of(receiver) {
            Py::Str(text) => strings::call(text, name, args),
            Py::List(items) => match name {
                "copy" => Args::new(name, args).none().and_then(|()| list(items.items.clone())),
                _ => find(&items.items, name, args),
            },
            Py::Dict(fields) => of_dict(fields, name, args),
            Py::Range(range) => find(&range.items()?, name, args),
            Py::Float(number) => {
                Args::new(name, args).none()?;
                Ok(if name == "is_integer" {
                    Value::from(number.fract() == 0.0)
                } else {
                    Value::from(number)
                })
            }
            Py::Int(_) | Py::Bool(_) => of_int(expect_int("the value", receiver)?, name, args),
            _ => {
                let bytes = receiver.as_bytes().unwrap_or_default();
                // Each byte that is none of a character becomes one of three.
                budget::afford(bytes.len().saturating_mul(3))?;
                let text = String::from_utf8_lossy(bytes).into_owned();
                super::value::string(text)
            }
        };
    }
    match Py::of(receiver) {
        Py::Undefined => Err(fail(format!("the value is undefined, so it has no method {}", shown(name)))),
        // The engine divides by the number of values, and compares and keeps them unchanged.
        Py::Other if name == "cycle" && args.is_empty() => Err(fail("no items for cycling given")),
        Py::Other if name == "changed" => {
            let texts: Result<Vec<Value>> =
                args.iter().map(|value| text::repr_of(value).map(Value::from)).collect();
            receiver.call_method(state, name, &texts?)
        }
        Py::Other => receiver.call_method(state, name, args),
        _ if CHANGING.contains(&name) && matches!(Py::of(receiver), Py::List(_) | Py::Dict(_)) => {
            Err(fail(format!("chat templates cannot change a {} with {name}()", type_name(receiver))))
        }
        _ => {
            let value = ops::item(receiver, &Value::from(name))?;
            if value.is_undefined() {
                return Err(fail(format!("'{}' object has no method {}", type_name(receiver), shown(name))));
            }
            value.call(state, args)
        }
    }
}

/// Calls a macro that takes more arguments than it names: they are its `varargs` and `kwargs`.
pub(super) fn call_open(state: &mut State<'_, '_>, callee: &Value, args: &[Value]) -> Result<Value> {
    let names: Vec<String> = match callee.get_attr("arguments") {
        Ok(names) if names.kind() == ValueKind::Seq => {
            names.try_iter()?.map(|name| name.to_string()).collect()
        }
        _ => Vec::new(),
    };
    let [named @ .., varargs, kwargs] = &names[..] else { return callee.call(state, args) };
    if varargs != "varargs" || kwargs != "kwargs" {
        return callee.call(state, args);
    }
    let args = Args::new("macro", args);
    let mut positional = args.positional;
    let more = positional.split_off(named.len().min(positional.len()));
    let (mut own, mut others) = (vec![("varargs".to_owned(), tuple(more)?)], Vec::new());
    for (name, value) in args.named {
        if named.contains(&name) || name == "caller" {
            own.push((name, value));
        } else {
            others.push((Value::from(name), value));
        }
    }
    own.push(("kwargs".to_owned(), dict(others)?));
    positional.push(own.into_iter().collect::<Kwargs>().into());
    callee.call(state, &positional)
}

/// `count` and `index`.
fn find(items: &[Value], name: &'static str, args: &[Value]) -> Result<Value> {
    let args = Args::new(name, args).bind(["value", "start", "stop"])?;
    let wanted = args.required(0)?;
    let mut count = 0;
    let clamp = |index: i128| if index < 0 { (index + items.len() as i128).max(0) } else { index };
    let (start, stop) = (clamp(args.int(1, 0)?), clamp(args.int(2, i128::MAX)?));
    for (index, item) in (0_i128..).zip(items) {
        if index >= start && index < stop && ops::eq(item, wanted)? {
            if name == "index" {
                return Ok(int(index));
            }
            count += 1;
        }
    }
    if name == "index" { Err(fail("the value is not in the list")) } else { Ok(int(count)) }
}

fn of_dict(fields: &Arc<Dict>, name: &'static str, args: &[Value]) -> Result<Value> {
    let args = Args::new(name, args);
    match name {
        "get" => {
            let args = args.bind(["key", "default"])?;
            super::value::Key::of(args.required(0)?)?;
            let found = fields.get(args.required(0)?).or_else(|| args.get(1));
            Ok(found.cloned().unwrap_or_else(|| Value::from(())))
        }
        "copy" => {
            args.none()?;
            dict(fields.iter().map(|(key, value)| (key.clone(), value.clone())))
        }
        "fromkeys" => {
            let args = args.bind(["iterable", "value"])?;
            let value = args.get(1).cloned().unwrap_or_else(|| Value::from(()));
            dict(iterate(args.required(0)?)?.into_iter().map(|key| (key, value.clone())))
        }
        _ => {
            args.none()?;
            let part = match name {
                "keys" => DictView::Keys,
                "values" => DictView::Values,
                _ => DictView::Items,
            };
            budget::charge(size_of::<View>())?;
            Ok(Value::from_object(View { dict: Arc::clone(fields), part }))
        }
    }
}

fn of_int(number: i128, name: &'static str, args: &[Value]) -> Result<Value> {
    Args::new(name, args).none()?;
    match name {
        "bit_length" => Ok(int((128 - number.unsigned_abs().leading_zeros()).into())),
        "bit_count" => Ok(int(number.unsigned_abs().count_ones().into())),
        "as_integer_ratio" => tuple(vec![int(number), int(1)]),
        "is_integer" => Ok(Value::from(true)),
        _ => Ok(int(number)),
    }
}

/// The value of an attribute by its path, as filters take it: a position, or names and positions with dots.
pub(super) fn by_path(value: &Value, path: &Value, default: Option<&Value>) -> Result<Value> {
    let mut value = value.clone();
    match Py::of(path) {
        Py::Str(path) => {
            for part in path.split('.') {
                budget::work(part.len())?;
                let key = part.parse::<i64>().map_or_else(|_| Value::from(part), Value::from);
                value = step(&value, &key, default)?;
            }
        }
        Py::None => {}
        _ => value = step(&value, path, default)?,
    }
    Ok(value)
}

fn step(value: &Value, key: &Value, default: Option<&Value>) -> Result<Value> {
    let found = ops::item(value, key)?;
    Ok(match default {
        Some(default) if found.is_undefined() && !is_absent(default) => default.clone(),
        _ => found,
    })
}
