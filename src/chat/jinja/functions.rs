//! The functions that templates can call by name.

use std::time::SystemTime;

use minijinja::value::{Kwargs, Rest};
use minijinja::{Environment, Error, ErrorKind, Value};

use super::args::Args;
use super::objects::{Cycler, Joiner};
use super::text::str_of;
use super::value::{
    Dict, Py, Range, VALUE_SIZE, dict_value, expect_int, expect_str, iterate, namespace, string,
};
use super::{Result, budget, clock, fail};

/// The sandbox lets a range be this long.
const MAX_RANGE: i128 = 100_000;
/// Characters of a message that are repeated in an error.
const MAX_MESSAGE: usize = 2_000;

/// The argument of `raise_exception`.
#[derive(Debug)]
pub(in crate::chat) struct Raised(pub(in crate::chat) String);

impl std::fmt::Display for Raised {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Raised {}

/// Adds all functions.
pub(super) fn add_to(environment: &mut Environment<'_>) {
    type Function = fn(Args) -> Result<Value>;
    let functions: [(&'static str, Function); 8] = [
        ("cycler", |args| Cycler::value(args.positional)),
        ("dict", |args| fields(args).and_then(Dict::new).map(dict_value)),
        ("joiner", |args| {
            let args = args.bind(["sep"])?;
            let separator = args.get(0).cloned().unwrap_or_else(|| Value::from(", "));
            Joiner::value(separator)
        }),
        ("lipsum", |_| string("Lorem ipsum dolor sit amet.")),
        ("namespace", |args| {
            let mut named = Vec::new();
            for (key, value) in fields(args)? {
                named.push((expect_str("the name of an attribute", &key)?.to_owned(), value));
            }
            namespace(named)
        }),
        ("raise_exception", |args| {
            let args = args.bind(["message"])?;
            let message: String = str_of(args.required(0)?)?.chars().take(MAX_MESSAGE).collect();
            Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Raised(message)))
        }),
        ("range", range),
        ("strftime_now", |args| {
            let args = args.bind(["format"])?;
            string(clock::format(SystemTime::now(), args.required_str(0)?)?)
        }),
    ];
    for (name, function) in functions {
        environment.add_function(name, move |args: Rest<Value>, named: Kwargs| {
            let mut all = args.0;
            all.push(named.into());
            function(Args::new(name, &all))
        });
    }
}

/// The arguments of `dict`.
fn fields(args: Args) -> Result<Vec<(Value, Value)>> {
    let mut fields = Vec::new();
    if args.positional.len() > 1 {
        return Err(fail(format!("dict expected at most 1 argument, got {}", args.positional.len())));
    }
    for first in &args.positional {
        if let Py::Dict(dict) = Py::of(first) {
            budget::charge(dict.len() * 2 * VALUE_SIZE)?;
            fields.extend(dict.iter().map(|(key, value)| (key.clone(), value.clone())));
            continue;
        }
        for pair in iterate(first)? {
            match <[Value; 2]>::try_from(iterate(&pair)?) {
                Ok([key, value]) => fields.push((key, value)),
                Err(_) => return Err(fail("dict takes a dictionary or pairs")),
            }
        }
    }
    fields.extend(args.named.into_iter().map(|(name, value)| (Value::from(name), value)));
    Ok(fields)
}

fn range(args: Args) -> Result<Value> {
    let args = args.bind(["start", "stop", "step"])?;
    let first = expect_int("the end of a range", args.required(0)?)?;
    let (start, stop) = match args.get(1) {
        Some(stop) => (first, expect_int("the end of a range", stop)?),
        None => (0, first),
    };
    let step = args.int(2, 1)?;
    let distance = if step > 0 { stop.checked_sub(start) } else { start.checked_sub(stop) };
    let distance = distance.ok_or_else(|| fail("a range is too large"))?;
    let len = match step {
        0 => return Err(fail("range() arg 3 must not be zero")),
        _ if distance <= 0 => 0,
        _ => (distance - 1) / step.checked_abs().unwrap_or(i128::MAX) + 1,
    };
    if len > MAX_RANGE {
        return Err(fail(format!(
            "a range of {len} numbers is larger than the sandbox allows, which is {MAX_RANGE}"
        )));
    }
    budget::charge(size_of::<Range>())?;
    Ok(Value::from_object(Range { start, stop, step, len: usize::try_from(len).unwrap_or(0) }))
}
