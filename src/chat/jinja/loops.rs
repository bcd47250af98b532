//! The iterables of loops: a list or a range, item by item, within the time limit.

use std::fmt;
use std::sync::Arc;

use minijinja::Value;
use minijinja::value::{Enumerator, Object, ObjectRepr};

use super::value::{Py, iterate, list};
use super::{Result, budget};

/// A list or a range in a loop. The engine's own steps look at no clock, so each item does.
struct Looped(Value);

/// The items of a value for a loop.
pub(super) fn looped(value: Value) -> Result<Value> {
    let items = match Py::of(&value) {
        // These are iterated unchanged.
        Py::List(_) | Py::Range(_) => value,
        _ => list(iterate(&value)?)?,
    };
    budget::charge(2 * size_of::<LoopItems>())?;
    Ok(Value::from_object(Looped(items)))
}

impl Object for Looped {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Iterable
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        let len = match Py::of(&self.0) {
            Py::List(list) => list.items.len(),
            Py::Range(range) => range.len,
            _ => 0,
        };
        Enumerator::Iter(Box::new(LoopItems { items: self.0.clone(), at: 0, len }))
    }
}

impl fmt::Debug for Looped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Looped")
    }
}

struct LoopItems {
    items: Value,
    at: usize,
    len: usize,
}

impl Iterator for LoopItems {
    type Item = Value;

    fn next(&mut self) -> Option<Value> {
        if self.at == self.len || budget::look().is_err() {
            return None;
        }
        self.at += 1;
        match Py::of(&self.items) {
            Py::List(list) => list.items.get(self.at - 1).cloned(),
            Py::Range(range) => range.get(self.at - 1),
            _ => None,
        }
    }

    // The engine takes the number of turns from here.
    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = self.len - self.at;
        (left, Some(left))
    }
}
