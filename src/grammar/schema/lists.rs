//! Lists, and lists without repetition.

use std::cmp::Ordering;

use serde_json::{Map, Value, json};

use super::counted::Counted;
use super::keywords::{self, bound, divisor, listed, type_of, wrong};
use super::merge::{PATTERNS, names};
use super::numbers::{is_multiple, is_within, same};
use super::place::{Step, about};
use super::rules::{Rules, literal};
use super::text::Text;
use crate::{Error, Result};

/// Most values of a list without repetition: each set of them is a rule.
const MAX_SET: usize = 8;

type Fields = Map<String, Value>;

impl Rules<'_> {
    pub(super) fn array(&mut self, fields: &Fields) -> Result<Option<String>> {
        let count = |name: &str| match fields.get(name) {
            None => Ok(None),
            // The maximum that fits.
            Some(value) => keywords::count(name, value).map(|count| Some(count as usize)),
        };
        let (min, max) = (count("minItems")?.unwrap_or(0), count("maxItems")?);
        let (names, first, item) = match (fields.get("prefixItems"), fields.get("items")) {
            (Some(first), item) => (["prefixItems", "items"], Some(first), item),
            (None, Some(first @ Value::Array(_))) => {
                (["items", "additionalItems"], Some(first), fields.get("additionalItems"))
            }
            (None, item) => (["prefixItems", "items"], None, item),
        };
        let step_to_item = || Step::Keyword(names[1]);
        let first = match first {
            None => &[] as &[Value],
            Some(Value::Array(first)) => first,
            Some(_) => return Err(wrong("prefixItems", "a list of schemas")),
        };
        let mut max = max.unwrap_or(usize::MAX);
        if let Some(wanted) = fields.get("contains") {
            let (least, most) = (count("minContains")?.unwrap_or(1), count("maxContains")?);
            if fields.get("uniqueItems") == Some(&true.into()) {
                let message = "contains in the JSON schema cannot be enforced together with uniqueItems";
                let error = Error::invalid_request(message).with_hint("leave one of them out");
                return Err(about("uniqueItems", error));
            }
            let counted = Counted { first, item, wanted, min, max, least, most };
            return self.counted(&counted);
        }
        if max > 1 && fields.get("uniqueItems") == Some(&true.into()) {
            return self.set(item.filter(|_| first.is_empty()), min, max);
        }
        let mut items = Vec::new();
        for (index, schema) in first.iter().enumerate().take(max) {
            match self.value_at(Step::Listed(names[0], index), schema)? {
                Some(item) => items.push(item),
                None => {
                    max = items.len();
                    break;
                }
            }
        }
        let tail = match max > items.len() {
            true => self.value_at(step_to_item(), item.unwrap_or(&Value::Bool(true)))?,
            false => None,
        };
        if tail.is_none() {
            max = max.min(items.len());
        }
        if min > max {
            return Ok(None);
        }
        let num_first = items.len();
        // From the end: the rule after an item at this position.
        let mut after = match &tail {
            Some(tail) => {
                let num_min = min.saturating_sub(num_first.max(1));
                let comma = format!("\",\" {tail}");
                let num_max = (max < usize::MAX).then(|| max - num_first.max(1));
                times(&comma, num_min, num_max)
            }
            None => String::new(),
        };
        let body = match (num_first, &tail) {
            (0, None) => String::new(),
            (0, Some(tail)) if min > 0 => format!("{tail} {after}"),
            (0, Some(tail)) => format!("({tail} {after})?"),
            _ => {
                for (index, item) in items.iter().enumerate().skip(1).rev() {
                    after = match index < min {
                        true => format!("\",\" {item} {after}"),
                        false => format!("(\",\" {item} {after})?"),
                    };
                    after = self.part(after)?;
                }
                match min {
                    0 => format!("({} {after})?", items[0]),
                    _ => format!("{} {after}", items[0]),
                }
            }
        };
        self.rule("array", &format!("\"[\" {body} \"]\"")).map(Some)
    }

    /// A list without repetition.
    fn set(&mut self, item: Option<&Value>, min: usize, max: usize) -> Result<Option<String>> {
        let item = item.map(|item| self.flat(item)).transpose()?.flatten();
        let values = match item {
            Some(item) if item == json!({"type": "boolean"}) => Some(vec![literal("false"), literal("true")]),
            Some(Value::Object(fields)) => literals(&fields),
            _ => None,
        };
        let Some(values) = values.filter(|values| values.len() <= MAX_SET) else {
            let error = Error::invalid_request(format!(
                "uniqueItems in the JSON schema can be enforced only where items are an enum of at most {MAX_SET} \
                 values"
            ));
            let hint = "leave it out and look for repetitions in the answer";
            return Err(about("uniqueItems", error.with_hint(hint)));
        };
        let max = max.min(values.len());
        if min > max {
            return Ok(None);
        }
        // The rule after each set of values, from the largest one. A bit is a value.
        let mut after = vec![String::new(); 1 << values.len()];
        for used in (0..after.len()).rev() {
            let num_used = used.count_ones() as usize;
            if num_used >= max {
                continue;
            }
            let comma = if num_used > 0 { "\",\" " } else { "" };
            let left = values.iter().enumerate().filter(|(index, _)| used >> index & 1 == 0);
            let options: Vec<String> =
                left.map(|(index, value)| format!("{comma}{value} {}", after[used | 1 << index])).collect();
            let body = options.join(" | ");
            let body = if num_used < min { body } else { format!("({body})?") };
            after[used] = self.rule("set", &body)?;
        }
        self.rule("array", &format!("\"[\" {} \"]\"", after[0])).map(Some)
    }
}

/// The same fields with the listed values that are valid under the bounds of numbers and the constraints on texts, and
/// without those constraints.
pub(super) fn valid_values(mut fields: Fields) -> Result<Fields> {
    const OF_NUMBERS: [&str; 5] =
        ["exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf"];
    const OF_TEXTS: [&str; 5] = ["format", "maxLength", "minLength", "pattern", PATTERNS];
    let has = |names: &[&str]| names.iter().any(|name| fields.contains_key(*name));
    if !has(&OF_NUMBERS) && !has(&OF_TEXTS) {
        return Ok(fields);
    }
    let min = bound(&fields, "minimum", "exclusiveMinimum", Ordering::is_ge)?;
    let max = bound(&fields, "maximum", "exclusiveMaximum", Ordering::is_le)?;
    let divisor = fields.get("multipleOf").map(divisor).transpose()?;
    let text = Text::of(&fields)?;
    let mut is_known = true;
    let is_valid = |value: &&Value| match value {
        Value::Number(number) => {
            is_within(number, min.as_ref(), max.as_ref())
                && divisor.is_none_or(|divisor| is_multiple(number, divisor))
        }
        Value::String(string) => {
            let allows = text.as_ref().map_or(Some(false), |text| text.allows(string));
            is_known &= allows.is_some();
            allows.unwrap_or(true)
        }
        _ => true,
    };
    let left: Vec<Value> =
        listed(&fields).unwrap_or_default().into_iter().filter(is_valid).cloned().collect();
    let decided = OF_NUMBERS.iter().chain(OF_TEXTS.iter().filter(|_| is_known));
    decided.for_each(|name| drop(fields.remove(*name)));
    fields.remove("const");
    fields.insert("enum".to_owned(), left.into());
    Ok(fields)
}

/// The listed values as terminals, if only their types are checked.
pub(super) fn literals(fields: &Fields) -> Option<Vec<String>> {
    if !fields.keys().all(|name| matches!(name.as_str(), "const" | "enum" | "type")) {
        return None;
    }
    let is_of_type = |value: &Value| {
        fields.get("type").is_none_or(|kinds| {
            let kind = type_of(value);
            names(kinds).iter().any(|found| *found == kind || *found == "number" && kind == "integer")
        })
    };
    let mut values: Vec<&Value> = Vec::new();
    for value in listed(fields)?.into_iter().filter(|value| is_of_type(value)) {
        // Another spelling of a value is the same one.
        if !values.iter().any(|known| same(known, value)) {
            values.push(value);
        }
    }
    Some(values.into_iter().map(|value| literal(&value.to_string())).collect())
}

pub(super) fn times(part: &str, min: usize, max: Option<usize>) -> String {
    match (min, max) {
        (_, Some(0)) => String::new(),
        (0, None) => format!("({part})*"),
        (min, None) => format!("({part}){{{min}}} ({part})*"),
        (min, Some(max)) => format!("({part}){{{min},{max}}}"),
    }
}
