//! The tests of Jinja, which follow `is`.

use minijinja::Value;

use super::value::{BoundMethod, Py, is_foreign_iterable, is_same_object, length};
use super::{Result, fail, filters, ops, shown, strings, text};

/// Whether `value` passes the test of this name.
pub(super) fn holds(name: &str, value: &Value, args: &[Value]) -> Result<bool> {
    let other = || args.first().ok_or_else(|| fail(format!("the test {} takes an argument", shown(name))));
    let py = Py::of(value);
    Ok(match name {
        "boolean" => matches!(py, Py::Bool(_)),
        "callable" => is_callable(value),
        "defined" => !value.is_undefined(),
        "divisibleby" => ops::eq(&ops::rem(value, other()?)?, &Value::from(0))?,
        "==" | "eq" | "equalto" => ops::holds("==", value, other()?)?,
        "!=" | "ne" => ops::holds("!=", value, other()?)?,
        "<" | "lt" | "lessthan" => ops::holds("<", value, other()?)?,
        "<=" | "le" => ops::holds("<=", value, other()?)?,
        ">" | "gt" | "greaterthan" => ops::holds(">", value, other()?)?,
        ">=" | "ge" => ops::holds(">=", value, other()?)?,
        "in" => ops::holds("in", value, other()?)?,
        "escaped" => value.is_safe(),
        "even" => ops::eq(&ops::rem(value, &Value::from(2))?, &Value::from(0))?,
        "odd" => ops::eq(&ops::rem(value, &Value::from(2))?, &Value::from(1))?,
        "false" => matches!(py, Py::Bool(false)),
        "true" => matches!(py, Py::Bool(true)),
        "filter" => value.as_str().is_some_and(filters::is_known),
        "test" => value.as_str().is_some_and(is_known),
        "float" => matches!(py, Py::Float(_)),
        "integer" => matches!(py, Py::Int(_)),
        "number" => matches!(py, Py::Int(_) | Py::Float(_) | Py::Bool(_)),
        "iterable" => is_iterable(value),
        "lower" => strings::is(&text::str_of(value)?, "islower"),
        "upper" => strings::is(&text::str_of(value)?, "isupper"),
        "mapping" => matches!(py, Py::Dict(_)),
        "none" => value.is_none(),
        "sameas" => is_same(value, other()?),
        "sequence" => match py {
            Py::Undefined | Py::Str(_) | Py::List(_) | Py::Dict(_) | Py::Range(_) => true,
            Py::Other => value.kind() == minijinja::value::ValueKind::Seq && length(value)?.is_some(),
            _ => false,
        },
        "string" => matches!(py, Py::Str(_)),
        "undefined" => value.is_undefined(),
        _ => return Err(fail(format!("no test is named {}", shown(name)))),
    })
}

/// Whether a loop can go over the value.
pub(super) fn is_iterable(value: &Value) -> bool {
    match Py::of(value) {
        Py::None | Py::Bool(_) | Py::Int(_) | Py::Float(_) | Py::Namespace(_) => false,
        Py::Other => is_foreign_iterable(value) && !is_callable(value),
        _ => true,
    }
}

fn is_known(name: &str) -> bool {
    const NAMES: &[&str] = &[
        "!=",
        "<",
        "<=",
        "==",
        ">",
        ">=",
        "boolean",
        "callable",
        "defined",
        "divisibleby",
        "eq",
        "equalto",
        "escaped",
        "even",
        "false",
        "filter",
        "float",
        "ge",
        "greaterthan",
        "gt",
        "in",
        "integer",
        "iterable",
        "le",
        "lessthan",
        "lower",
        "lt",
        "mapping",
        "ne",
        "none",
        "number",
        "odd",
        "sameas",
        "sequence",
        "string",
        "test",
        "true",
        "undefined",
        "upper",
    ];
    NAMES.contains(&name)
}

/// Macros, methods and functions. Lists and dictionaries are objects too, and cannot be called.
fn is_callable(value: &Value) -> bool {
    match Py::of(value) {
        Py::Undefined => true,
        Py::Other => {
            value.downcast_object_ref::<BoundMethod>().is_some()
                || value.as_object().is_some_and(|object| {
                    object.type_name().contains("Macro") || object.type_name().contains("Function")
                })
                || value.downcast_object_ref::<super::objects::Joiner>().is_some()
        }
        _ => false,
    }
}

fn is_same(left: &Value, right: &Value) -> bool {
    match (Py::of(left), Py::of(right)) {
        (Py::None, Py::None) => true,
        (Py::Bool(a), Py::Bool(b)) => a == b,
        (Py::Int(a), Py::Int(b)) => a == b,
        (Py::Str(a), Py::Str(b)) => a == b,
        _ => is_same_object(left, right),
    }
}
