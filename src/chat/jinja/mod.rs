//! Jinja as Python runs it, on the template engine of Rust: its values, operators, methods, filters and tests.
//!
//! The engine implements the blocks, loops, macros and variables. Expressions are rewritten (`rewrite`) so that every
//! operator, subscript and method is a filter of ours: the filters return Python's results, and charge their costs
//! (`budget`). This module does not depend on chats.

mod args;
mod budget;
mod clock;
mod filters;
mod format;
mod functions;
mod json;
mod lexer;
mod loops;
mod methods;
mod objects;
mod ops;
mod predicates;
mod rewrite;
mod sort;
mod strings;
mod text;
mod value;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Rest, ValueOrKwargs};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Output, State, UndefinedBehavior, Value};

pub use self::budget::{Account, on_account};
pub(super) use self::budget::{Limits, Rendering, Spent, charged_for_text};
pub(super) use self::functions::Raised;
pub(super) use self::json::json_text;
pub(super) use self::rewrite::rewrite;
pub(super) use self::value::from_json;

#[cfg(test)]
pub(super) use self::{filters::names as filter_names, strings::METHODS};

/// `time` in UTC, in the notation of `strftime` that templates have: `%Y-%m-%dT%H:%M:%S`.
#[must_use]
pub fn format_time(time: std::time::SystemTime, format: &str) -> String {
    // Outside of a rendering there is no budget to exceed.
    clock::format(time, format).unwrap_or_default()
}

/// The error of a running template.
type Result<T, E = Error> = std::result::Result<T, E>;

/// An error with its description.
fn fail(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}

/// The beginning of a name or a text, for an error: it may be as long as all that a template may make.
fn shown(text: &str) -> String {
    const MAX_CHARS: usize = 100;
    let start: String = text.chars().take(MAX_CHARS).collect();
    let rest = if start.len() < text.len() { "…" } else { "" };
    format!("{start:?}{rest}")
}

/// Nesting of calls and blocks.
const MAX_CALL_DEPTH: usize = 100;

/// The engine for rewritten templates.
pub(super) fn environment(steps: u64) -> Result<Environment<'static>> {
    let mut environment = Environment::empty();
    // The rewriter has dealt with whitespace.
    environment.set_syntax(SyntaxConfig::builder().keep_trailing_newline(true).build()?);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_undefined_behavior(UndefinedBehavior::Lenient);
    environment.set_fuel(Some(steps));
    environment.set_recursion_limit(MAX_CALL_DEPTH);
    environment.set_formatter(write_value);
    functions::add_to(&mut environment);
    filters::add_to(&mut environment);
    add_operators(&mut environment);
    Ok(environment)
}

fn write_value(output: &mut Output<'_>, state: &mut State<'_, '_>, value: &Value) -> Result<()> {
    let written = if !matches!(state.auto_escape(), AutoEscape::None) {
        output.write_str(&text::escaped(value)?)
    } else if let value::Py::Str(text) = value::Py::of(value) {
        budget::charge(text.len())?;
        output.write_str(text)
    } else {
        output.write_str(&text::str_of(value)?)
    };
    written.map_err(Error::from)
}

/// The rewriter's filters for operators, subscripts and calls.
fn add_operators(environment: &mut Environment<'_>) {
    type Binary = fn(&Value, &Value) -> Result<Value>;
    let binary: [(&str, Binary); 7] = [
        ("add", ops::add),
        ("sub", ops::sub),
        ("mul", ops::mul),
        ("div", ops::div),
        ("floordiv", ops::floor_div),
        ("rem", ops::rem),
        ("pow", ops::pow),
    ];
    for (name, operator) in binary {
        environment.add_filter(format!("py_{name}"), move |first: Value, rest: Rest<Value>| {
            budget::work(1)?;
            rest.iter().try_fold(first, |left, right| operator(&left, right))
        });
    }
    environment.add_filter("py_neg", |value: Value| ops::neg(&value));
    environment.add_filter("py_pos", |value: Value| ops::pos(&value));
    environment.add_filter("py_concat", |first: Value, rest: Rest<Value>| {
        let mut output = text::Writer::default();
        output.str(&first)?;
        for value in rest.iter() {
            output.str(value)?;
        }
        output.finish().map(Value::from)
    });
    // Operators and right sides in turns.
    environment.add_filter("py_compare", |first: Value, rest: Rest<Value>| {
        let mut left = first;
        for pair in rest.chunks_exact(2) {
            if !ops::holds(pair[0].as_str().unwrap_or_default(), &left, &pair[1])? {
                return Ok(false);
            }
            left = pair[1].clone();
        }
        Ok::<_, Error>(true)
    });
    environment.add_filter("py_item", |value: Value, key: Value| ops::item(&value, &key));
    environment.add_filter("py_attr", |value: Value, name: String| ops::attribute(&value, &name));
    environment.add_filter("py_slice", |value: Value, start: Value, stop: Value, step: Value| {
        ops::slice(&value, &start, &stop, &step)
    });
    environment.add_filter(
        "py_call",
        |state: &mut State<'_, '_>, value: Value, rest: Rest<ValueOrKwargs>| {
            let rest = rest.into_values();
            let (name, args) = rest.split_first().ok_or_else(|| fail("a method has a name"))?;
            budget::read(args)?;
            match name.as_str() {
                Some("") => methods::call_open(state, &value, args),
                name => methods::call(state, &value, name.unwrap_or_default(), args),
            }
        },
    );
    environment.add_filter("py_test", |value: Value, rest: Rest<ValueOrKwargs>| {
        let rest = rest.into_values();
        let (name, args) = rest.split_first().ok_or_else(|| fail("a test has a name"))?;
        budget::read(std::slice::from_ref(&value))?;
        budget::read(args)?;
        predicates::holds(name.as_str().unwrap_or_default(), &value, args)
    });
    environment.add_filter("py_list", |value: Value| value::list(value.try_iter()?.collect()));
    environment.add_filter("py_tuple", |value: Value| value::tuple(value.try_iter()?.collect()));
    environment.add_filter("py_dict", |value: Value| {
        let flat: Vec<Value> = value.try_iter()?.collect();
        value::dict(flat.chunks_exact(2).map(|pair| (pair[0].clone(), pair[1].clone())))
    });
    environment.add_filter("py_iter", loops::looped);
    // The value after a star, or one that is unpacked.
    environment.add_filter("py_star", |value: Value| match value::Py::of(&value) {
        value::Py::List(list) => budget::charge(list.items.len() * value::VALUE_SIZE).map(|()| value),
        _ => value::list(value::iterate(&value)?),
    });
    environment.add_filter("py_stars", |value: Value| {
        if let value::Py::Dict(fields) = value::Py::of(&value) {
            budget::charge(fields.len() * 6 * value::VALUE_SIZE)?;
        }
        Ok::<_, Error>(value)
    });
    // Rows that several variables take apart.
    environment.add_filter("py_rows", |value: Value| {
        let rows = value::iterate(&value)?;
        let is_text = |row: &Value| matches!(value::Py::of(row), value::Py::Str(_));
        let rows = rows
            .into_iter()
            .map(|row| if is_text(&row) { value::list(value::iterate(&row)?) } else { Ok(row) });
        loops::looped(value::list(rows.collect::<Result<_>>()?)?)
    });
    environment.add_filter("py_text", |value: Value| text::repr_of(&value));
    environment.add_function("py_set", |target: Value, name: String, value: Value| {
        match value::Py::of(&target) {
            value::Py::Namespace(namespace) => namespace.set(&name, value),
            _ => Err(fail("cannot assign attribute on non-namespace object")),
        }
    });
    // The cost of a macro's definition: the engine keeps the variables that it reads, this many names.
    environment.add_filter("py_macro", |num_names: usize| {
        budget::charge(num_names.saturating_mul(3 * value::VALUE_SIZE).saturating_add(512)).map(|()| false)
    });
    // Where a macro begins, which costs the engine more than a step.
    environment.add_filter("py_look", |_: Value| budget::look().map(|()| false));
    environment.add_function("py_fail", |message: String| Err::<Value, _>(fail(message)));
}
