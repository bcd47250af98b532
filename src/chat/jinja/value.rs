//! The values of templates as Python has them: lists, tuples, dictionaries in order, views, generators that run dry,
//! ranges, namespaces.
//!
//! Invariants: a function that creates a value pays for it; values are nested at most [`MAX_DEPTH`] deep, so that every
//! traversal, even dropping one, needs little stack. Namespaces can hold each other; they live until the rendering ends
//! and are emptied then.

use std::collections::VecDeque;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use indexmap::{Equivalent, IndexMap};
use minijinja::value::{Enumerator, Object, ObjectRepr, Tuple, ValueKind};
use minijinja::{Error, State, Value};

use super::{Result, budget, fail, methods, objects, shown, text};

/// How deep lists and dictionaries may be nested.
pub(super) const MAX_DEPTH: usize = 200;
/// The size of a value in a list, and of a list without its values.
pub(super) const VALUE_SIZE: usize = size_of::<Value>();
const VALUE_BYTES: usize = VALUE_SIZE;
const OBJECT_BYTES: usize = 64;

/// A value by its Python type.
pub(super) enum Py<'a> {
    Undefined,
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Str(&'a str),
    List(&'a List),
    Dict(&'a Arc<Dict>),
    View(&'a View),
    Generator(&'a Generator),
    Range(&'a Range),
    Namespace(&'a Namespace),
    Other,
}

impl<'a> Py<'a> {
    pub(super) fn of(value: &'a Value) -> Self {
        match value.kind() {
            ValueKind::Undefined => Self::Undefined,
            ValueKind::None => Self::None,
            ValueKind::Bool => Self::Bool(value.is_true()),
            ValueKind::Number if value.is_integer() => match i128::try_from(value.clone()) {
                Ok(number) => Self::Int(number),
                Err(_) => Self::Other,
            },
            ValueKind::Number => Self::Float(f64::try_from(value.clone()).unwrap_or(f64::NAN)),
            ValueKind::String => value.as_str().map_or(Self::Other, Self::Str),
            _ => {
                if let Some(list) = value.downcast_object_ref::<List>() {
                    Self::List(list)
                } else if let Some(dict) = value.downcast_object_ref::<DictObject>() {
                    Self::Dict(&dict.0)
                } else if let Some(view) = value.downcast_object_ref::<View>() {
                    Self::View(view)
                } else if let Some(generator) = value.downcast_object_ref::<Generator>() {
                    Self::Generator(generator)
                } else if let Some(range) = value.downcast_object_ref::<Range>() {
                    Self::Range(range)
                } else if let Some(namespace) = value.downcast_object_ref::<Namespace>() {
                    Self::Namespace(namespace)
                } else {
                    Self::Other
                }
            }
        }
    }

    /// The name of the type, as Python's errors have it.
    pub(super) fn type_name(&self) -> &'static str {
        match self {
            Self::Undefined => "Undefined",
            Self::None => "NoneType",
            Self::Bool(_) => "bool",
            Self::Int(_) => "int",
            Self::Float(_) => "float",
            Self::Str(_) => "str",
            Self::List(list) if list.is_tuple => "tuple",
            Self::List(_) => "list",
            Self::Dict(_) => "dict",
            Self::View(view) => view.part.type_name(),
            Self::Generator(_) => "generator",
            Self::Range(_) => "range",
            Self::Namespace(_) => "Namespace",
            Self::Other => "object",
        }
    }
}

/// The name of a value's type.
pub(super) fn type_name(value: &Value) -> &'static str {
    Py::of(value).type_name()
}

fn depth(value: &Value) -> usize {
    match Py::of(value) {
        Py::List(list) => list.depth,
        Py::Dict(dict) => dict.depth,
        Py::View(view) => view.dict.depth + 1,
        Py::Generator(generator) => generator.depth,
        Py::Other => {
            let method = value.downcast_object_ref::<BoundMethod>().map(|method| depth(&method.receiver) + 1);
            method.or_else(|| objects::depth(value)).unwrap_or(0)
        }
        _ => 0,
    }
}

/// Counts the engine's object of a loop, whose depth is unknown.
fn keep(value: &Value) -> Result<()> {
    let is_loop = matches!(Py::of(value), Py::Other)
        && value.as_object().is_some_and(|object| object.type_name().ends_with("::Loop"));
    if is_loop { budget::keep_loop() } else { Ok(()) }
}

pub(super) fn depth_around<'v>(values: impl IntoIterator<Item = &'v Value>) -> Result<usize> {
    let mut deepest = 0;
    for value in values {
        keep(value)?;
        deepest = deepest.max(depth(value));
    }
    let depth = deepest + 1;
    if depth > MAX_DEPTH {
        return Err(fail(format!("values are nested more than {MAX_DEPTH} deep")));
    }
    Ok(depth)
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A list or a tuple.
pub(super) struct List {
    pub(super) items: Vec<Value>,
    pub(super) is_tuple: bool,
    /// Attributes that are names of positional items.
    names: &'static [&'static str],
    depth: usize,
}

impl List {
    fn value(items: Vec<Value>, is_tuple: bool, names: &'static [&'static str]) -> Result<Value> {
        budget::charge(items.len() * VALUE_BYTES + OBJECT_BYTES)?;
        let depth = depth_around(&items)?;
        Ok(Value::from_object(Self { items, is_tuple, names, depth }))
    }
}

/// A list of these values.
pub(super) fn list(items: Vec<Value>) -> Result<Value> {
    List::value(items, false, &[])
}

/// A tuple of these values.
pub(super) fn tuple(items: Vec<Value>) -> Result<Value> {
    List::value(items, true, &[])
}

/// The item of `groupby` for each group.
pub(super) fn group(grouper: Value, members: Vec<Value>) -> Result<Value> {
    List::value(vec![grouper, list(members)?], true, &["grouper", "list"])
}

impl Object for List {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        let index = match key.as_str() {
            Some(name) => self.names.iter().position(|known| *known == name),
            None => key.as_usize(),
        };
        self.items.get(index?).cloned()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(self.items.len())
    }
}

/// A key of a dictionary: equal keys of Python are equal, as `1`, `1.0` and `True` are.
#[derive(PartialEq, Eq, Clone)]
pub(super) enum Key {
    Undefined,
    None,
    /// Values without contents that could identify them.
    Object(&'static str),
    Int(i128),
    Float(u64),
    Str(Arc<str>),
    Tuple(Vec<Self>),
}

impl Key {
    pub(super) fn of(value: &Value) -> Result<Self> {
        Ok(match Py::of(value) {
            Py::None => Self::None,
            Py::Bool(flag) => Self::Int(flag.into()),
            Py::Int(number) => Self::Int(number),
            Py::Float(number) if number.fract() == 0.0 && number.abs() < 1e30 => Self::Int(number as i128),
            Py::Float(number) => Self::Float(number.to_bits()),
            Py::Str(text) => {
                budget::work(text.len())?;
                Self::Str(value.to_str().unwrap_or_else(|| Arc::from(text)))
            }
            Py::List(tuple) if tuple.is_tuple => {
                // Tuples with shared elements are many times longer than they are large.
                budget::charge(tuple.items.len() * size_of::<Self>())?;
                Self::Tuple(tuple.items.iter().map(Self::of).collect::<Result<_>>()?)
            }
            Py::Undefined => Self::Undefined,
            other @ (Py::List(_) | Py::Dict(_)) => {
                return Err(fail(format!("unhashable type: '{}'", other.type_name())));
            }
            other => Self::Object(other.type_name()),
        })
    }
}

impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        match self {
            Self::Undefined => state.write_u8(0),
            Self::None => state.write_u8(1),
            Self::Object(name) => name.hash(state),
            Self::Int(number) => number.hash(state),
            Self::Float(bits) => bits.hash(state),
            Self::Str(text) => text.hash(state),
            Self::Tuple(keys) => keys.hash(state),
        }
    }
}

struct StrKey<'a>(&'a str);

impl Hash for StrKey<'_> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.hash(state);
    }
}

impl Equivalent<Key> for StrKey<'_> {
    fn equivalent(&self, key: &Key) -> bool {
        matches!(key, Key::Str(text) if **text == *self.0)
    }
}

/// A dictionary; its fields stay in the order in which they came.
#[derive(Default)]
pub(super) struct Dict {
    fields: IndexMap<Key, (Value, Value)>,
    depth: usize,
}

impl Dict {
    pub(super) fn new(pairs: impl IntoIterator<Item = (Value, Value)>) -> Result<Arc<Self>> {
        let mut fields = IndexMap::new();
        for (key, value) in pairs {
            budget::charge(8 * VALUE_BYTES)?;
            // As in Python, the first key stays and the last value counts.
            let entry = fields.entry(Key::of(&key)?).or_insert((key, Value::UNDEFINED));
            entry.1 = value;
        }
        budget::charge(OBJECT_BYTES)?;
        let depth = depth_around(fields.values().flat_map(|(key, value)| [key, value]))?;
        Ok(Arc::new(Self { fields, depth }))
    }

    pub(super) fn len(&self) -> usize {
        self.fields.len()
    }

    pub(super) fn get(&self, key: &Value) -> Option<&Value> {
        match key.as_str() {
            Some(text) => self.get_str(text),
            None => self.fields.get(&Key::of(key).ok()?).map(|(_, value)| value),
        }
    }

    pub(super) fn get_str(&self, key: &str) -> Option<&Value> {
        self.fields.get(&StrKey(key)).map(|(_, value)| value)
    }

    pub(super) fn iter(&self) -> impl DoubleEndedIterator<Item = (&Value, &Value)> {
        self.fields.values().map(|(key, value)| (key, value))
    }
}

/// A dictionary as the template engine sees it.
pub(super) struct DictObject(pub(super) Arc<Dict>);

/// A dictionary as a value.
pub(super) fn dict_value(dict: Arc<Dict>) -> Value {
    Value::from_object(DictObject(dict))
}

/// A dictionary of these fields.
pub(super) fn dict(pairs: impl IntoIterator<Item = (Value, Value)>) -> Result<Value> {
    Dict::new(pairs).map(dict_value)
}

impl Object for DictObject {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Map
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.0.get(key).cloned()
    }

    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<Value> {
        budget::note_work(key.len());
        self.0.get_str(key).cloned()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Values(self.0.iter().map(|(key, _)| key.clone()).collect())
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        Some(self.0.len())
    }
}

/// The contents of a view of a dictionary.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum DictView {
    Keys,
    Values,
    Items,
}

impl DictView {
    pub(super) fn type_name(self) -> &'static str {
        match self {
            Self::Keys => "dict_keys",
            Self::Values => "dict_values",
            Self::Items => "dict_items",
        }
    }
}

/// The results of `keys`, `values` and `items` of a dictionary.
pub(super) struct View {
    pub(super) dict: Arc<Dict>,
    pub(super) part: DictView,
}

impl View {
    pub(super) fn items(&self) -> Result<Vec<Value>> {
        budget::charge(self.dict.len() * VALUE_BYTES)?;
        self.dict
            .iter()
            .map(|(key, value)| match self.part {
                DictView::Keys => Ok(key.clone()),
                DictView::Values => Ok(value.clone()),
                DictView::Items => tuple(vec![key.clone(), value.clone()]),
            })
            .collect()
    }
}

impl Object for View {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Iterable
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Values(self.items().unwrap_or_default())
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        Some(self.dict.len())
    }
}

/// Values that can be taken once, from the first to the last.
pub(super) struct Generator {
    items: Mutex<VecDeque<Value>>,
    depth: usize,
}

impl Generator {
    pub(super) fn next(&self) -> Option<Value> {
        lock(&self.items).pop_front()
    }

    pub(super) fn rest(&self) -> Vec<Value> {
        std::mem::take(&mut *lock(&self.items)).into()
    }
}

/// A generator of these values.
pub(super) fn generator(items: Vec<Value>) -> Result<Value> {
    budget::charge(items.len() * VALUE_BYTES + OBJECT_BYTES)?;
    let depth = depth_around(&items)?;
    Ok(Value::from_object(Generator { items: Mutex::new(items.into()), depth }))
}

impl Object for Generator {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Iterable
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Values(self.rest())
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        None
    }

    fn is_true(self: &Arc<Self>) -> bool {
        true
    }
}

/// The result of `range`.
pub(super) struct Range {
    pub(super) start: i128,
    pub(super) stop: i128,
    pub(super) step: i128,
    pub(super) len: usize,
}

impl Range {
    pub(super) fn get(&self, index: usize) -> Option<Value> {
        (index < self.len).then(|| int(self.start + self.step * index as i128))
    }

    pub(super) fn items(&self) -> Result<Vec<Value>> {
        budget::charge(self.len * VALUE_BYTES)?;
        Ok((0..self.len).filter_map(|index| self.get(index)).collect())
    }
}

impl Object for Range {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.get(key.as_usize()?)
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(self.len)
    }
}

/// Variables that inner blocks may set.
#[derive(Default)]
pub(super) struct Namespace(Mutex<IndexMap<String, Value>>);

impl Namespace {
    pub(super) fn set(&self, name: &str, value: Value) -> Result<()> {
        // Python keeps templates away from its own attributes in this way.
        if name.starts_with('_') {
            return Err(fail(format!(
                "a namespace cannot have an attribute {} that begins with an underscore",
                shown(name)
            )));
        }
        budget::charge(name.len() + 4 * VALUE_BYTES)?;
        keep(&value)?;
        let before = lock(&self.0).insert(name.to_owned(), value);
        drop(before);
        Ok(())
    }

    pub(super) fn get(&self, name: &str) -> Option<Value> {
        lock(&self.0).get(name).cloned()
    }

    pub(super) fn fields(&self) -> Vec<(String, Value)> {
        lock(&self.0).iter().map(|(name, value)| (name.clone(), value.clone())).collect()
    }

    pub(super) fn clear(&self) {
        let values = std::mem::take(&mut *lock(&self.0));
        drop(values);
    }
}

/// A namespace with these variables.
pub(super) fn namespace(fields: Vec<(String, Value)>) -> Result<Value> {
    budget::charge(OBJECT_BYTES)?;
    let namespace = Arc::new(Namespace::default());
    budget::keep(&namespace);
    for (name, value) in fields {
        namespace.set(&name, value)?;
    }
    Ok(Value::from_dyn_object(namespace))
}

impl Object for Namespace {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.get(key.as_str()?)
    }
}

/// A method with the value it belongs to, not called yet.
pub(super) struct BoundMethod {
    pub(super) receiver: Value,
    pub(super) name: &'static str,
}

impl Object for BoundMethod {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn call(self: &Arc<Self>, state: &mut State<'_, '_>, args: &[Value]) -> Result<Value, Error> {
        methods::call(state, &self.receiver, self.name, args)
    }
}

macro_rules! debug_by_name {
    ($($type:ty),*) => {$(
        impl fmt::Debug for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(stringify!($type))
            }
        }
    )*};
}

// The contents are written by `text`, which pays for them.
debug_by_name!(List, DictObject, View, Generator, Range, Namespace, BoundMethod);

/// An integer.
pub(super) fn int(number: i128) -> Value {
    i64::try_from(number).map_or_else(|_| Value::from(number), Value::from)
}

/// A text; it is paid for.
pub(super) fn string(text: impl AsRef<str>) -> Result<Value> {
    budget::charge(text.as_ref().len())?;
    Ok(Value::from(text.as_ref()))
}

/// Whether two values are one object.
pub(super) fn is_same_object(left: &Value, right: &Value) -> bool {
    match (Py::of(left), Py::of(right)) {
        (Py::List(a), Py::List(b)) => std::ptr::eq(a, b),
        (Py::Dict(a), Py::Dict(b)) => Arc::ptr_eq(a, b),
        (Py::Generator(a), Py::Generator(b)) => std::ptr::eq(a, b),
        (Py::Namespace(a), Py::Namespace(b)) => std::ptr::eq(a, b),
        _ => false,
    }
}

/// The values that a loop over this one sees.
pub(super) fn iterate(value: &Value) -> Result<Vec<Value>> {
    match Py::of(value) {
        Py::Undefined => Ok(Vec::new()),
        Py::Str(text) => {
            budget::charge(text.len() * VALUE_BYTES)?;
            Ok(text.chars().map(Value::from).collect())
        }
        Py::List(list) => {
            budget::charge(list.items.len() * VALUE_BYTES)?;
            Ok(list.items.clone())
        }
        Py::Dict(dict) => {
            budget::charge(dict.len() * VALUE_BYTES)?;
            Ok(dict.iter().map(|(key, _)| key.clone()).collect())
        }
        Py::View(view) => view.items(),
        Py::Generator(generator) => Ok(generator.rest()),
        Py::Range(range) => range.items(),
        Py::Other if value.downcast_object_ref::<Tuple>().is_some() || is_foreign_iterable(value) => {
            let items: Vec<Value> = value.try_iter()?.collect();
            budget::charge(items.len() * VALUE_BYTES)?;
            Ok(items)
        }
        other => Err(fail(format!("'{}' object is not iterable", other.type_name()))),
    }
}

/// Lists of the template engine's own, such as the names of a macro's arguments.
pub(super) fn is_foreign_iterable(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable | ValueKind::Map)
}

/// The number of values in this one; none if it has no length.
pub(super) fn length(value: &Value) -> Result<Option<usize>> {
    Ok(match Py::of(value) {
        Py::Undefined => Some(0),
        Py::Str(text) => {
            budget::work(text.len())?;
            Some(text.chars().count())
        }
        Py::List(list) => Some(list.items.len()),
        Py::Dict(dict) => Some(dict.len()),
        Py::View(view) => Some(view.dict.len()),
        Py::Range(range) => Some(range.len),
        Py::Other => value.len(),
        _ => None,
    })
}

/// A template value for JSON.
pub(in crate::chat) fn from_json(json: &serde_json::Value) -> Result<Value> {
    Ok(match json {
        serde_json::Value::Null => Value::from(()),
        serde_json::Value::Bool(value) => Value::from(*value),
        serde_json::Value::Number(number) => {
            if let Some(value) = number.as_i64() {
                Value::from(value)
            } else if let Some(value) = number.as_u64() {
                Value::from(value)
            } else {
                Value::from(number.as_f64().unwrap_or(f64::NAN))
            }
        }
        serde_json::Value::String(text) => string(text)?,
        serde_json::Value::Array(items) => list(items.iter().map(from_json).collect::<Result<_>>()?)?,
        serde_json::Value::Object(fields) => {
            let mut pairs = Vec::with_capacity(fields.len());
            for (name, value) in fields {
                pairs.push((Value::from(name.as_str()), from_json(value)?));
            }
            dict(pairs)?
        }
    })
}

/// The text of a value that has to be one.
pub(super) fn expect_str<'v>(what: &str, value: &'v Value) -> Result<&'v str> {
    match Py::of(value) {
        Py::Str(text) => Ok(text),
        other => Err(fail(format!("{what} is {}, not a string", text::described(&other)))),
    }
}

/// The number of a value that has to be an integer.
pub(super) fn expect_int(what: &str, value: &Value) -> Result<i128> {
    match Py::of(value) {
        Py::Int(number) => Ok(number),
        Py::Bool(flag) => Ok(flag.into()),
        other => Err(fail(format!("{what} is {}, not an integer", text::described(&other)))),
    }
}
