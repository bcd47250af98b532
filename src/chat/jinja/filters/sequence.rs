//! Filters of lists, dictionaries and everything that can be looped over.

use std::cmp::Ordering;

use minijinja::value::ValueKind;
use minijinja::{State, Value};

use super::Filter;
use crate::chat::jinja::args::{Args, size};
use crate::chat::jinja::methods::by_path;
use crate::chat::jinja::sort::try_sort;
use crate::chat::jinja::text::{Writer, escaped, str_of};
use crate::chat::jinja::value::{
    DictView, Key, Py, VALUE_SIZE, View, expect_str, generator, group, int, iterate, length, list, string,
    tuple, type_name,
};
use crate::chat::jinja::{Result, budget, fail, ops, predicates};

pub(super) const FILTERS: &[(&str, Filter)] = &[
    ("attr", |_, value, args| {
        let args = args.bind(["name"])?;
        match ops::attribute(value, args.required_str(0)?)? {
            // Only attributes, no items.
            found if matches!(Py::of(value), Py::Dict(_)) && found.kind() != ValueKind::Plain => {
                Ok(Value::UNDEFINED)
            }
            found => Ok(found),
        }
    }),
    ("batch", batch),
    ("count", count),
    ("d", default),
    ("default", default),
    ("dictsort", dict_sort),
    ("first", first),
    ("groupby", group_by),
    ("items", items),
    ("join", join),
    ("last", last),
    ("length", count),
    ("list", |_, value, args| args.none().and_then(|()| list(iterate(value)?))),
    ("map", map),
    ("max", |_, value, args| extreme(value, args, Ordering::Greater)),
    ("min", |_, value, args| extreme(value, args, Ordering::Less)),
    ("random", first),
    ("reject", |_, value, args| select(value, args, false, false)),
    ("rejectattr", |_, value, args| select(value, args, false, true)),
    ("reverse", reverse),
    ("select", |_, value, args| select(value, args, true, false)),
    ("selectattr", |_, value, args| select(value, args, true, true)),
    ("slice", slice),
    ("sort", sort),
    ("sum", sum),
    ("unique", unique),
];

fn default(_: &mut State<'_, '_>, value: &Value, args: Args) -> Result<Value> {
    let args = args.bind(["default_value", "boolean"])?;
    if value.is_undefined() || args.flag(1, false) && !value.is_true() {
        return Ok(args.get(0).cloned().unwrap_or_else(|| Value::from("")));
    }
    Ok(value.clone())
}

fn count(_: &mut State<'_, '_>, value: &Value, args: Args) -> Result<Value> {
    args.none()?;
    match length(value)? {
        Some(length) => Ok(int(length as i128)),
        None => Err(fail(format!("object of type '{}' has no length", type_name(value)))),
    }
}

fn first(_: &mut State<'_, '_>, value: &Value, args: Args) -> Result<Value> {
    args.none()?;
    match Py::of(value) {
        Py::Generator(generator) => Ok(generator.next().unwrap_or_default()),
        Py::List(list) => Ok(list.items.first().cloned().unwrap_or_default()),
        Py::Str(text) => Ok(text.chars().next().map(Value::from).unwrap_or_default()),
        _ => Ok(iterate(value)?.into_iter().next().unwrap_or_default()),
    }
}

fn last(_: &mut State<'_, '_>, value: &Value, args: Args) -> Result<Value> {
    args.none()?;
    match Py::of(value) {
        Py::Generator(_) => Err(fail("a generator cannot be read from its end")),
        Py::List(list) => Ok(list.items.last().cloned().unwrap_or_default()),
        Py::Str(text) => Ok(text.chars().next_back().map(Value::from).unwrap_or_default()),
        _ => Ok(iterate(value)?.pop().unwrap_or_default()),
    }
}

fn reverse(_: &mut State<'_, '_>, value: &Value, args: Args) -> Result<Value> {
    args.none()?;
    if let Py::Str(text) = Py::of(value) {
        budget::afford(text.len().saturating_mul(2))?;
        return string(text.chars().rev().collect::<String>());
    }
    let mut items = iterate(value)?;
    items.reverse();
    if let Py::Generator(_) = Py::of(value) { list(items) } else { generator(items) }
}

fn items(_: &mut State<'_, '_>, value: &Value, args: Args) -> Result<Value> {
    args.none()?;
    match Py::of(value) {
        Py::Undefined => generator(Vec::new()),
        Py::Dict(dict) => generator(View { dict: dict.clone(), part: DictView::Items }.items()?),
        _ => Err(fail("can only get item pairs from a mapping")),
    }
}

fn join(state: &mut State<'_, '_>, value: &Value, args: Args) -> Result<Value> {
    let args = args.bind(["d", "attribute"])?;
    let is_escaping = !matches!(state.auto_escape(), minijinja::AutoEscape::None);
    let write = |value: &Value| if is_escaping { escaped(value) } else { str_of(value) };
    let separator = args.get(0).map_or(Ok(String::new()), write)?;
    let mut output = Writer::default();
    for (index, item) in iterate(value)?.iter().enumerate() {
        if index > 0 {
            output.push(&separator)?;
        }
        match args.some(1) {
            Some(path) => output.push(&write(&by_path(item, path, None)?)?)?,
            None if is_escaping => output.push(&escaped(item)?)?,
            None => output.str(item)?,
        }
    }
    let text = output.finish()?;
    Ok(if is_escaping { Value::from_safe_string(text) } else { Value::from(text) })
}

fn batch(_: &mut State<'_, '_>, value: &Value, args: Args) -> Result<Value> {
    let args = args.bind(["linecount", "fill_with"])?;
    args.required(0)?;
    let width = args.int(0, 0)?;
    let mut rows = Vec::new();
    let mut row = Vec::new();
    for item in iterate(value)? {
        if row.len() as i128 == width {
            rows.push(list(std::mem::take(&mut row))?);
        }
        row.push(item);
    }
    if !row.is_empty() {
        if let Some(fill) = args.some(1)
            && (row.len() as i128) < width
        {
            // The complete list is charged again, since it grows to twice its length.
            budget::charge(size(width).saturating_mul(VALUE_SIZE * 2))?;
            row.resize(size(width), fill.clone());
        }
        rows.push(list(row)?);
    }
    generator(rows)
}

fn slice(_: &mut State<'_, '_>, value: &Value, args: Args) -> Result<Value> {
    let args = args.bind(["slices", "fill_with"])?;
    args.required(0)?;
    let count = size(args.int(0, 0)?);
    if count == 0 {
        return Err(fail("division by zero"));
    }
    let items = iterate(value)?;
    budget::charge(count.saturating_mul(VALUE_SIZE * 4))?;
    let (each, extra) = (items.len() / count, items.len() % count);
    let mut at = 0;
    let mut slices = Vec::with_capacity(count);
    for index in 0..count {
        let end = at + each + usize::from(index < extra);
        let mut part = items[at..end].to_vec();
        at = end;
        if let Some(fill) = args.some(1)
            && index >= extra
        {
            part.push(fill.clone());
        }
        slices.push(list(part)?);
    }
    generator(slices)
}

fn sum(_: &mut State<'_, '_>, value: &Value, args: Args) -> Result<Value> {
    let args = args.bind(["attribute", "start"])?;
    let mut total = args.get(1).cloned().unwrap_or_else(|| Value::from(0));
    if let Py::Str(_) = Py::of(&total) {
        return Err(fail("sum() can't sum strings"));
    }
    for item in iterate(value)? {
        budget::work(16)?;
        let item = match args.some(0) {
            Some(path) => by_path(&item, path, None)?,
            None => item,
        };
        total = ops::add(&total, &item)?;
    }
    Ok(total)
}

/// A key for sorting that does not see the case of letters, unless it is asked to.
fn folded(value: &Value, case_sensitive: bool) -> Result<Value> {
    match Py::of(value) {
        Py::Str(text) if !case_sensitive => {
            budget::afford(text.len().saturating_mul(2))?;
            string(text.to_lowercase())
        }
        _ => Ok(value.clone()),
    }
}

/// The values of one attribute or of several.
fn sort_key(value: &Value, attribute: Option<&Value>, case_sensitive: bool) -> Result<Vec<Value>> {
    let Some(attribute) = attribute else { return Ok(vec![folded(value, case_sensitive)?]) };
    match Py::of(attribute) {
        Py::Str(paths) => paths
            .split(',')
            .map(|path| folded(&by_path(value, &Value::from(path), None)?, case_sensitive))
            .collect(),
        _ => Ok(vec![folded(&by_path(value, attribute, None)?, case_sensitive)?]),
    }
}

/// Sorts stably by the first of each pair.
fn sort_pairs(pairs: Vec<(Vec<Value>, Value)>, reverse: bool) -> Result<Vec<(Vec<Value>, Value)>> {
    // Intermediate pairs, initially in lists of one.
    budget::charge(pairs.len() * VALUE_SIZE * 8)?;
    try_sort(pairs, &|(a, _), (b, _)| {
        compare_keys(a, b).map(|ordering| if reverse { ordering.reverse() } else { ordering })
    })
}

fn compare_keys(a: &[Value], b: &[Value]) -> Result<Ordering> {
    budget::work(16)?;
    for (a, b) in a.iter().zip(b) {
        if !ops::eq(a, b)? {
            return Ok(ops::compare(a, b)?.unwrap_or(Ordering::Equal));
        }
    }
    Ok(Ordering::Equal)
}

fn sort(_: &mut State<'_, '_>, value: &Value, args: Args) -> Result<Value> {
    let args = args.bind(["reverse", "case_sensitive", "attribute"])?;
    let mut pairs = Vec::new();
    for item in iterate(value)? {
        budget::charge(VALUE_SIZE * 4)?;
        pairs.push((sort_key(&item, args.some(2), args.flag(1, false))?, item));
    }
    let pairs = sort_pairs(pairs, args.flag(0, false))?;
    list(pairs.into_iter().map(|(_, item)| item).collect())
}

fn dict_sort(_: &mut State<'_, '_>, value: &Value, args: Args) -> Result<Value> {
    let args = args.bind(["case_sensitive", "by", "reverse"])?;
    let Py::Dict(dict) = Py::of(value) else {
        return Err(fail(format!("'{}' object has no items", type_name(value))));
    };
    let by_value = match args.str(1, "key")? {
        "key" => false,
        "value" => true,
        _ => return Err(fail("You can only sort by either \"key\" or \"value\"")),
    };
    let mut pairs = Vec::new();
    for (key, value) in dict.iter() {
        let sorted_by = folded(if by_value { value } else { key }, args.flag(0, false))?;
        pairs.push((vec![sorted_by], tuple(vec![key.clone(), value.clone()])?));
    }
    let pairs = sort_pairs(pairs, args.flag(2, false))?;
    list(pairs.into_iter().map(|(_, pair)| pair).collect())
}

fn group_by(_: &mut State<'_, '_>, value: &Value, args: Args) -> Result<Value> {
    let args = args.bind(["attribute", "default", "case_sensitive"])?;
    let path = args.required(0)?;
    let case_sensitive = args.flag(2, false);
    let mut pairs = Vec::new();
    for item in iterate(value)? {
        budget::charge(VALUE_SIZE * 4)?;
        let key = by_path(&item, path, args.get(1))?;
        pairs.push((vec![folded(&key, case_sensitive)?], tuple(vec![key, item])?));
    }
    let pairs = sort_pairs(pairs, false)?;
    let mut groups: Vec<(Vec<Value>, Value, Vec<Value>)> = Vec::new();
    for (sorted_by, pair) in pairs {
        let pair = iterate(&pair)?;
        match groups.last_mut() {
            Some((last, _, members)) if ops::eq(&last[0], &sorted_by[0])? => members.push(pair[1].clone()),
            // The group has the name that its first member has.
            _ => groups.push((sorted_by, pair[0].clone(), vec![pair[1].clone()])),
        }
    }
    list(groups.into_iter().map(|(_, key, members)| group(key, members)).collect::<Result<_>>()?)
}

fn unique(_: &mut State<'_, '_>, value: &Value, args: Args) -> Result<Value> {
    let args = args.bind(["case_sensitive", "attribute"])?;
    let mut seen = std::collections::HashSet::new();
    let mut kept = Vec::new();
    for item in iterate(value)? {
        let key = match args.some(1) {
            Some(path) => by_path(&item, path, None)?,
            None => item.clone(),
        };
        budget::charge(6 * VALUE_SIZE)?;
        if seen.insert(Key::of(&folded(&key, args.flag(0, false))?)?) {
            kept.push(item);
        }
    }
    generator(kept)
}

fn extreme(value: &Value, args: Args, wanted: Ordering) -> Result<Value> {
    let args = args.bind(["case_sensitive", "attribute"])?;
    let mut best: Option<(Value, Value)> = None;
    for item in iterate(value)? {
        let key = match args.some(1) {
            Some(path) => by_path(&item, path, None)?,
            None => item.clone(),
        };
        let key = folded(&key, args.flag(0, false))?;
        let is_better = match &best {
            Some((best, _)) => ops::compare(&key, best)? == Some(wanted),
            None => true,
        };
        if is_better {
            best = Some((key, item));
        }
    }
    Ok(best.map_or(Value::UNDEFINED, |(_, item)| item))
}

/// False values, such as `None`, have no items for these filters.
fn iterate_if_true(value: &Value) -> Result<Vec<Value>> {
    if value.is_true() { iterate(value) } else { Ok(Vec::new()) }
}

fn map(state: &mut State<'_, '_>, value: &Value, mut args: Args) -> Result<Value> {
    let mut mapped = Vec::new();
    if args.positional.is_empty() && args.named.iter().any(|(name, _)| name == "attribute") {
        let args = args.bind(["attribute", "default"])?;
        // These are not positional parameters.
        for item in iterate_if_true(value)? {
            mapped.push(by_path(&item, args.required(0)?, args.get(1))?);
        }
        return generator(mapped);
    }
    if args.positional.is_empty() {
        return Err(fail("map requires a filter argument"));
    }
    let name = args.positional.remove(0);
    let name = expect_str("the name of a filter", &name)?.to_owned();
    for item in iterate_if_true(value)? {
        budget::work((args.positional.len() + args.named.len()).saturating_mul(VALUE_SIZE))?;
        mapped.push(state.apply_filter(&name, &call_args(item, &args))?);
    }
    generator(mapped)
}

fn call_args(item: Value, args: &Args) -> Vec<Value> {
    let mut all = vec![item];
    all.extend(args.positional.iter().cloned());
    if !args.named.is_empty() {
        let named: minijinja::value::Kwargs = args.named.iter().cloned().collect();
        all.push(named.into());
    }
    all
}

fn select(value: &Value, mut args: Args, wanted: bool, by_attribute: bool) -> Result<Value> {
    let path = if by_attribute {
        if args.positional.is_empty() {
            return Err(fail("missing parameter for attribute name"));
        }
        Some(args.positional.remove(0))
    } else {
        None
    };
    let test = if args.positional.is_empty() { None } else { Some(args.positional.remove(0)) };
    let test = test.as_ref().map(|test| expect_str("the name of a test", test)).transpose()?;
    let mut kept = Vec::new();
    for item in iterate_if_true(value)? {
        budget::work(16)?;
        let tested = match &path {
            Some(path) => by_path(&item, path, None)?,
            None => item.clone(),
        };
        let holds = match test {
            Some(test) => predicates::holds(test, &tested, &args.positional)?,
            None => tested.is_true(),
        };
        if holds == wanted {
            kept.push(item);
        }
    }
    generator(kept)
}
