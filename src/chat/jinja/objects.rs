//! The results of `cycler` and `joiner`.

use std::fmt;
use std::sync::{Arc, Mutex};

use minijinja::value::{Object, ObjectRepr};
use minijinja::{Error, State, Value};

use super::value::{VALUE_SIZE, depth_around, lock};
use super::{Result, budget, fail, shown};

/// The result of `cycler`: its values in turn.
pub(super) struct Cycler {
    items: Vec<Value>,
    at: Mutex<usize>,
    depth: usize,
}

impl Cycler {
    pub(super) fn value(items: Vec<Value>) -> Result<Value> {
        budget::charge(items.len() * VALUE_SIZE + size_of::<Self>())?;
        if items.is_empty() {
            return Err(fail("cycler takes at least one value"));
        }
        let depth = depth_around(&items)?;
        Ok(Value::from_object(Self { items, at: Mutex::new(0), depth }))
    }
}

impl Object for Cycler {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        (key.as_str()? == "current").then(|| self.items[*lock(&self.at)].clone())
    }

    fn call_method(
        self: &Arc<Self>,
        _state: &mut State<'_, '_>,
        method: &str,
        _args: &[Value],
    ) -> Result<Value, Error> {
        let mut at = lock(&self.at);
        match method {
            "next" => {
                let item = self.items[*at].clone();
                *at = (*at + 1) % self.items.len();
                Ok(item)
            }
            "reset" => {
                *at = 0;
                Ok(Value::from(()))
            }
            _ => Err(fail(format!("a cycler has no method {}", shown(method)))),
        }
    }
}

/// The result of `joiner`: empty at the first call, the separator at all others.
pub(super) struct Joiner {
    separator: Value,
    was_called: Mutex<bool>,
    depth: usize,
}

impl Joiner {
    pub(super) fn value(separator: Value) -> Result<Value> {
        budget::charge(size_of::<Self>())?;
        let depth = depth_around([&separator])?;
        Ok(Value::from_object(Self { separator, was_called: Mutex::new(false), depth }))
    }
}

/// How deep the values of one of these are nested.
pub(super) fn depth(value: &Value) -> Option<usize> {
    let cycler = value.downcast_object_ref::<Cycler>().map(|cycler| cycler.depth);
    cycler.or_else(|| value.downcast_object_ref::<Joiner>().map(|joiner| joiner.depth))
}

impl Object for Joiner {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn call(self: &Arc<Self>, _state: &mut State<'_, '_>, _args: &[Value]) -> Result<Value, Error> {
        let was_called = std::mem::replace(&mut *lock(&self.was_called), true);
        Ok(if was_called { self.separator.clone() } else { Value::from("") })
    }
}

impl fmt::Debug for Cycler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Cycler")
    }
}

impl fmt::Debug for Joiner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Joiner")
    }
}
