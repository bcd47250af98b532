//! The filters of Jinja, with the results that its sandbox gives.

mod number;
mod sequence;
mod words;

use minijinja::value::{Rest, ValueOrKwargs};
use minijinja::{Environment, State, Value};

use super::args::Args;
use super::{Result, budget, fail, json};

/// The value, and the arguments after it.
type Filter = fn(&mut State<'_, '_>, &Value, Args) -> Result<Value>;

const TOJSON: (&str, Filter) = ("tojson", json::tojson);

fn all() -> impl Iterator<Item = &'static (&'static str, Filter)> {
    sequence::FILTERS.iter().chain(words::FILTERS).chain(number::FILTERS).chain([&TOJSON])
}

/// Whether there is a filter of this name.
pub(super) fn is_known(name: &str) -> bool {
    all().any(|(known, _)| *known == name)
}

/// The names of all filters.
#[cfg(test)]
pub(in crate::chat) fn names() -> Vec<&'static str> {
    all().map(|(name, _)| *name).collect()
}

/// Adds all filters.
pub(super) fn add_to(environment: &mut Environment<'_>) {
    for (name, filter) in all() {
        environment.add_filter(*name, move |state: &mut State<'_, '_>, args: Rest<ValueOrKwargs>| {
            let args = args.into_values();
            budget::read(&args)?;
            let (value, args) = args.split_first().ok_or_else(|| fail(format!("{name} needs a value")))?;
            filter(state, value, Args::new(name, args))
        });
    }
}
