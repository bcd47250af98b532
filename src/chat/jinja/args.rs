//! Arguments of functions, filters and methods, bound to names as Python binds them.

use minijinja::Value;

use super::value::{Py, expect_int, expect_str};
use super::{Result, fail, shown};

/// The arguments of one call.
pub(super) struct Args {
    name: &'static str,
    pub(super) positional: Vec<Value>,
    pub(super) named: Vec<(String, Value)>,
}

impl Args {
    /// Takes the arguments of `name` apart.
    pub(super) fn new(name: &'static str, args: &[Value]) -> Self {
        let mut named = Vec::new();
        let positional = match args.split_last() {
            Some((last, before)) if last.is_kwargs() => {
                let pairs = last.as_object().and_then(|object| object.try_iter_pairs());
                for (key, value) in pairs.into_iter().flatten() {
                    named.push((key.as_str().unwrap_or_default().to_owned(), value));
                }
                before
            }
            _ => args,
        };
        Self { name, positional: positional.to_vec(), named }
    }

    /// The values for these parameters.
    pub(super) fn bind<const N: usize>(self, parameters: [&str; N]) -> Result<Bound<N>> {
        if self.positional.len() > N {
            return Err(fail(format!(
                "{}() takes at most {N} arguments, not {}",
                self.name,
                self.positional.len()
            )));
        }
        let mut values = [const { None }; N];
        for (slot, value) in values.iter_mut().zip(self.positional) {
            *slot = Some(value);
        }
        for (name, value) in self.named {
            let Some(index) = parameters.iter().position(|parameter| *parameter == name) else {
                return Err(fail(format!("{}() has no argument {}", self.name, shown(&name))));
            };
            if values[index].replace(value).is_some() {
                return Err(fail(format!("{}() got two values for {}", self.name, shown(&name))));
            }
        }
        Ok(Bound { name: self.name, values })
    }

    /// Makes sure that there are no arguments.
    pub(super) fn none(self) -> Result<()> {
        self.bind([]).map(drop)
    }
}

/// Values by the positions of their parameters.
pub(super) struct Bound<const N: usize> {
    name: &'static str,
    values: [Option<Value>; N],
}

impl<const N: usize> Bound<N> {
    pub(super) fn get(&self, index: usize) -> Option<&Value> {
        self.values[index].as_ref()
    }

    /// The value, unless it was left out or is `None`.
    pub(super) fn some(&self, index: usize) -> Option<&Value> {
        self.get(index).filter(|value| !value.is_none())
    }

    pub(super) fn required(&self, index: usize) -> Result<&Value> {
        self.get(index).ok_or_else(|| fail(format!("{}() is missing an argument", self.name)))
    }

    pub(super) fn str(&self, index: usize, default: &'static str) -> Result<&str> {
        match self.get(index) {
            Some(value) => expect_str(&self.what(index), value),
            None => Ok(default),
        }
    }

    pub(super) fn required_str(&self, index: usize) -> Result<&str> {
        expect_str(&self.what(index), self.required(index)?)
    }

    pub(super) fn int(&self, index: usize, default: i128) -> Result<i128> {
        match self.get(index) {
            Some(value) => expect_int(&self.what(index), value),
            None => Ok(default),
        }
    }

    pub(super) fn flag(&self, index: usize, default: bool) -> bool {
        self.get(index).map_or(default, Value::is_true)
    }

    fn what(&self, index: usize) -> String {
        format!("argument {} of {}()", index + 1, self.name)
    }
}

/// A number of characters or values that something may be wide; negative ones count as none.
pub(super) fn size(number: i128) -> usize {
    usize::try_from(number.max(0)).unwrap_or(usize::MAX)
}

/// An attribute's name, or a position.
pub(super) fn is_absent(value: &Value) -> bool {
    matches!(Py::of(value), Py::Undefined | Py::None)
}
