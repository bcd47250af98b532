//! Objects: their keys in the order of the schema, then others, of which patterns, names and a number can be demanded.

use serde_json::{Map, Value};

use super::super::compiler::MAX_ITEMS;
use super::keywords::{self, listed, wrong};
use super::lists::times;
use super::merge::{NAMES, both_of};
use super::place::{Step, about};
use super::rules::{CHARACTER, PLAIN, Rules, either, json_text, literal};
use super::text::Text;
use super::{pattern, property_names};
use crate::{Error, Result, quoted};

/// Maximum keys of an object, any of which may come next. The parser has two items for each of them, and some for the
/// object's surroundings.
const MAX_OPTIONAL: usize = (MAX_ITEMS - 500) / 2;
/// Most pairs of a position and a number of keys before it.
const MAX_PAIRS: usize = 5_000;
/// Most patterns of keys.
const MAX_PATTERNS: usize = 32;
/// Most patterns of keys for which every set of them that a key may match is written. Of more, a key matches one.
const MAX_OVERLAPPING: usize = 3;

type Fields = Map<String, Value>;

/// The numbers of keys that an object may have.
#[derive(Debug, Clone, Copy)]
struct Count {
    min: usize,
    max: usize,
}

impl Rules<'_> {
    pub(super) fn object(&mut self, fields: &Fields) -> Result<Option<String>> {
        let none = Fields::new();
        let named_in = |keyword: &str| match fields.get(keyword) {
            None => Ok(&none),
            Some(Value::Object(named)) => Ok(named),
            Some(_) => Err(wrong(keyword, "an object")),
        };
        let (properties, patterns) = (named_in("properties")?, named_in("patternProperties")?);
        let required = match fields.get("required") {
            None => Vec::new(),
            Some(Value::Array(names)) => {
                let names = names.iter().map(|name| name.as_str());
                names.collect::<Option<Vec<_>>>().ok_or_else(|| wrong("required", "a list of names"))?
            }
            Some(_) => return Err(wrong("required", "a list of names")),
        };
        let others = match fields.get("additionalProperties") {
            Some(schema) => schema.clone(),
            None => {
                Value::Bool(!fields.contains_key("properties") && !fields.contains_key("patternProperties"))
            }
        };
        let is_said = fields.contains_key("additionalProperties");
        let unnamed = if others == false && !is_said { Value::Bool(true) } else { others.clone() };
        if patterns.len() > MAX_PATTERNS {
            let error = Error::invalid_request(format!(
                "patternProperties in the JSON schema has {} patterns; at most {MAX_PATTERNS} can be enforced",
                patterns.len()
            ));
            return Err(about("patternProperties", error.with_hint("combine some of them in one pattern")));
        }
        // Each pattern is tried with each name.
        (0..patterns.len() * (properties.len() + required.len())).try_for_each(|_| self.count_merge())?;
        let mut named = properties.clone();
        for name in &required {
            if !named.contains_key(*name) {
                let is_matched = matching(patterns, name)?.next().is_some();
                named.insert((*name).to_owned(), if is_matched { true.into() } else { unnamed.clone() });
            }
        }
        let num_required = named.keys().filter(|name| required.contains(&name.as_str())).count();
        let has_others = others != false || !patterns.is_empty();
        let count = count(fields, num_required, named.len(), has_others)?;
        let mut members: Vec<(String, bool)> = Vec::new();
        for (name, schema) in &named {
            let is_required = required.contains(&name.as_str());
            let schema = match may_be_named(fields, name)? {
                true => matching(patterns, name)?.fold(schema.clone(), |all, found| both_of(&all, found)),
                false => false.into(),
            };
            match self.value_at(Step::Named("properties", name.clone()), &schema)? {
                Some(value) => members.push((format!("{} \":\" {value}", key(name)), is_required)),
                None if is_required => return Ok(None),
                None => self.cause = None,
            }
        }
        let more = self.other_members(fields, patterns, &others, &named)?;
        self.cause = None;
        let members = match count {
            None => Some(self.members(&members, more.as_deref())?),
            Some(count) => self.counted_members(&members, more.as_deref(), count)?,
        };
        members.map(|members| self.rule("object", &format!("\"{{\" {members}"))).transpose()
    }

    /// A rule for the members that are not named; none if there are none.
    fn other_members(
        &mut self,
        fields: &Fields,
        patterns: &Fields,
        others: &Value,
        named: &Fields,
    ) -> Result<Option<String>> {
        let names: Vec<String> = named.keys().map(|name| key(name)).collect();
        let except = if names.is_empty() { String::new() } else { format!(" & ~({})", names.join(" | ")) };
        let wanted = fields.get(NAMES).and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
        if patterns.is_empty() && wanted.is_empty() {
            let Some(value) = self.value_at(Step::Keyword("additionalProperties"), others)? else {
                return Ok(None);
            };
            let key = match names.as_slice() {
                [] => self.any_string()?,
                _ => self.rule("KEY", &format!("/\"{CHARACTER}*\"/{except}"))?,
            };
            return self.rule("member", &format!("{key} \":\" {value}")).map(Some);
        }
        // Keys that need escapes are left out: then the text between the quotes is the key.
        let mut base = format!("/\"{PLAIN}*\"/{except}");
        for names in wanted.iter().filter_map(Value::as_object) {
            let Some(text) = Text::of(names)?.filter(|_| listed(names).is_none()) else {
                // There is no such name, or all are named.
                return Ok(None);
            };
            let expression = text.expression(PLAIN, "\"").map_err(|error| about("propertyNames", error))?;
            base.push_str(&format!(" & {expression}"));
            let not: Vec<String> = text.except.iter().map(|name| key(name)).collect();
            if !not.is_empty() {
                base.push_str(&format!(" & ~({})", not.join(" | ")));
            }
        }
        let mut found = Vec::new();
        for pattern in patterns.keys() {
            let expression =
                pattern::expression(pattern).map_err(|error| about("patternProperties", error))?;
            found.push(format!("(/\"/ {expression} /\"/)"));
        }
        let num_sets = 1_usize << found.len().min(MAX_OVERLAPPING);
        let sets: Vec<Vec<usize>> = match found.len() <= MAX_OVERLAPPING {
            true => {
                (0..num_sets).map(|set| (0..found.len()).filter(|at| set >> at & 1 == 1).collect()).collect()
            }
            false => std::iter::once(vec![]).chain((0..found.len()).map(|at| vec![at])).collect(),
        };
        let mut options = Vec::new();
        for set in sets {
            let mut schemas = patterns.iter().enumerate().filter(|(index, _)| set.contains(index));
            let (step, schema) = match schemas.next() {
                None => (Step::Keyword("additionalProperties"), others.clone()),
                Some((_, (name, first))) => {
                    let all = schemas.fold(first.clone(), |all, (_, (_, schema))| both_of(&all, schema));
                    (Step::Named("patternProperties", name.clone()), all)
                }
            };
            let Some(value) = self.value_at(step, &schema)? else { continue };
            let mut key = base.clone();
            for (index, pattern) in found.iter().enumerate() {
                key.push_str(if set.contains(&index) { " & " } else { " & ~" });
                key.push_str(pattern);
            }
            options.push(format!("{} \":\" {value}", self.rule("KEY", &key)?));
        }
        either(&options).map(|options| self.rule("member", &options)).transpose()
    }

    /// The members of an object in their order, others after them, and its end.
    ///
    /// Each position has its own rule up to the end of the object. So the parser has two items for each possible next
    /// key, and does not read earlier keys again before the end of the object.
    fn members(&mut self, members: &[(String, bool)], more: Option<&str>) -> Result<String> {
        let runs = members.split(|(_, is_required)| *is_required).map(<[_]>::len);
        let num_optional = runs.max().unwrap_or(0);
        if num_optional > MAX_OPTIONAL {
            let error = Error::invalid_request(format!(
                "an object in the JSON schema has {num_optional} keys in a row that are not required; at most \
                 {MAX_OPTIONAL} can be enforced"
            ));
            return Err(about("properties", error.with_hint("name some of them in required")));
        }
        // The continuation after a key, and after none; from the end.
        let end = "\"}\"";
        let mut after = more.map_or_else(|| end.to_owned(), |more| format!("(\",\" {more})* {end}"));
        let mut alone =
            more.map_or_else(|| end.to_owned(), |more| format!("({more} (\",\" {more})*)? {end}"));
        let num_first =
            members.iter().position(|(_, is_required)| *is_required).map_or(members.len(), |at| at + 1);
        for (index, (member, is_required)) in members.iter().enumerate().rev() {
            let or = |next: &str| if *is_required { String::new() } else { format!(" | {next}") };
            if index < num_first {
                alone = self.rule("first", &format!("{member} {after}{}", or(&alone)))?;
            }
            after = self.rule("next", &format!("\",\" {member} {after}{}", or(&after)))?;
        }
        Ok(alone)
    }

    /// The same with a number of keys; none if there is no such object. A rule is for a position and the number of keys
    /// before it.
    fn counted_members(
        &mut self,
        members: &[(String, bool)],
        more: Option<&str>,
        Count { min, max }: Count,
    ) -> Result<Option<String>> {
        // All larger numbers are alike.
        let last = if max < usize::MAX { max } else { min.max(1) };
        if members.len().saturating_mul(last.min(members.len())) > MAX_PAIRS {
            let error = Error::invalid_request(format!(
                "a number of keys can be enforced for {MAX_PAIRS} pairs of a position and a number; an object of {} \
                 properties has more",
                members.len()
            ));
            let keyword = if max < usize::MAX { "maxProperties" } else { "minProperties" };
            return Err(about(keyword, error.with_hint("leave it out, or name fewer properties")));
        }
        let mut after: Vec<Option<String>> = Vec::new();
        for before in 0..=last.min(members.len()) {
            let (least, most) = (min.saturating_sub(before), max.saturating_sub(before));
            after.push(match more.filter(|_| most > 0) {
                None if least > 0 => None,
                None => Some("\"}\"".to_owned()),
                Some(more) => {
                    let most = (max < usize::MAX).then_some(most);
                    let (first, least, most) = match before {
                        0 => (format!("{more} "), least.saturating_sub(1), most.map(|most| most - 1)),
                        _ => (String::new(), least, most),
                    };
                    let all = format!("{first}{}", times(&format!("\",\" {more}"), least, most));
                    let all = if before == 0 && min == 0 { format!("({all})?") } else { all };
                    Some(self.part(format!("{all} \"}}\""))?)
                }
            });
        }
        for (index, (member, is_required)) in members.iter().enumerate().rev() {
            let mut here = Vec::new();
            for before in 0..=last.min(index) {
                let comma = if before > 0 { "\",\" " } else { "" };
                let count = if max == usize::MAX { (before + 1).min(last) } else { before + 1 };
                let with = after.get(count).filter(|_| count <= max).cloned().flatten();
                let mut options: Vec<String> =
                    with.map(|after| format!("{comma}{member} {after}")).into_iter().collect();
                if !is_required {
                    options.extend(after.get(before).cloned().flatten());
                }
                here.push(either(&options).map(|body| self.rule("next", &body)).transpose()?);
            }
            after = here;
        }
        Ok(after.into_iter().next().flatten())
    }
}

/// A key as a terminal.
fn key(name: &str) -> String {
    literal(&json_text(name))
}

/// Whether a key may have this name, as far as names are constrained.
fn may_be_named(fields: &Fields, name: &str) -> Result<bool> {
    for names in fields.get(NAMES).and_then(Value::as_array).into_iter().flatten() {
        let allowed =
            names.as_object().map_or(Ok(Some(true)), |names| property_names::allows(names, name))?;
        match allowed {
            Some(true) => {}
            Some(false) => return Ok(false),
            None => {
                let message = format!("it is not known whether propertyNames allows {}", quoted(name));
                let hint = "use a pattern without look-ahead, or omit it";
                return Err(about("propertyNames", Error::invalid_request(message).with_hint(hint)));
            }
        }
    }
    Ok(true)
}

/// The schemas of the patterns that are found in a name.
fn matching<'p>(patterns: &'p Fields, name: &str) -> Result<impl Iterator<Item = &'p Value>> {
    let mut found = Vec::new();
    for (pattern, schema) in patterns {
        let is_found = pattern::is_found(pattern, name).ok_or_else(|| {
            let message = format!(
                "it is not known whether the pattern {} is found in the property {}",
                quoted(pattern),
                quoted(name)
            );
            let hint = "use a pattern without look-ahead, or omit it";
            about("patternProperties", Error::invalid_request(message).with_hint(hint))
        })?;
        found.extend(is_found.then_some(schema));
    }
    Ok(found.into_iter())
}

/// The number of keys, where it is not that of all objects with these keys.
fn count(fields: &Fields, num_required: usize, num_named: usize, has_others: bool) -> Result<Option<Count>> {
    let count = |name| fields.get(name).map(|value| keywords::count(name, value)).transpose();
    let min = count("minProperties")?.map_or(0, |min| usize::try_from(min).unwrap_or(usize::MAX));
    let max = count("maxProperties")?.and_then(|max| usize::try_from(max).ok());
    let max = max.filter(|max| *max < keywords::MAX_COUNT as usize).unwrap_or(usize::MAX);
    if min > num_required + 1 && has_others {
        let error = Error::invalid_request(format!(
            "minProperties is {min} in the JSON schema; it can be at most one more than the number of required \
             keys, because optional ones may be repeated"
        ));
        return Err(about("minProperties", error.with_hint("name more keys in required")));
    }
    let is_bounded = min > num_required || max < num_named || max < usize::MAX && has_others;
    Ok(is_bounded.then_some(Count { min, max }))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::super::GrammarSpec;
    use super::super::tests::check;
    use super::*;

    #[test]
    fn keys_with_patterns_have_all_their_schemas_and_no_other() {
        let schema = json!({
            "type": "object",
            "properties": {"ax": {"minimum": 5}},
            "patternProperties": {
                "^a": {"type": "integer"},
                "^b": {"not": {"const": 1}, "type": "integer", "minimum": 0},
                "c$": {"type": "integer", "minimum": 9_007_199_254_740_993_u64},
            },
            "additionalProperties": {"type": "object", "properties": {"x": {"type": "null"}}},
        });
        check(
            &schema,
            &[
                r#"{"ax": 5, "a": 1}"#,
                r#"{"b": 2, "d": {"x": null}}"#,
                r#"{"ac": 9007199254740993}"#,
                r#"{"abcd": 1}"#,
            ],
            &[
                r#"{"ax": 4}"#,
                r#"{"ax": "x"}"#,
                r#"{"b": 1}"#,
                // The library reads numbers as doubles, and leaves objects open.
                r#"{"ac": 9007199254740992}"#,
                r#"{"c": 1}"#,
                r#"{"d": {"y": null}}"#,
                r#"{"d": 1}"#,
            ],
        );
        let more: Fields = (0..33).map(|index| (format!("^{index}"), true.into())).collect();
        let error = GrammarSpec::lark_json(&json!({"patternProperties": more})).unwrap_err();
        assert!(error.message().contains("33 patterns"), "{error}");
        let many = json!({"type": "object", "patternProperties":
            {"^a": true, "^b": true, "^c": true, "d$": {"type": "null"}}});
        check(&many, &[r#"{"a": 1, "d": null}"#], &[r#"{"d": 1}"#, r#"{"ad": 1}"#, r#"{"e": 1}"#]);
        let required =
            json!({"type": "object", "patternProperties": {"^a": {"type": "null"}}, "required": ["ab"]});
        check(&required, &[r#"{"ab": null}"#], &["{}", r#"{"ab": 1}"#]);
    }

    #[test]
    fn objects_have_a_number_of_keys() {
        let (a, b, x) = (r#"{"a": 1}"#, r#"{"b": 1}"#, r#"{"x": 1}"#);
        let (two, open, three) =
            (r#"{"a": 1, "b": 1}"#, r#"{"b": 1, "x": 1}"#, r#"{"a": 1, "b": 1, "x": 1}"#);
        let of = |min: f64, max: f64, others: bool| {
            json!({"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                   "additionalProperties": others, "minProperties": min, "maxProperties": max})
        };
        check(&of(1.0, 1.0, false), &[a, b], &["{}", two, x]);
        check(&of(2.0, 9.0, false), &[two], &["{}", a, b]);
        check(&of(0.0, 0.0, false), &["{}"], &[a, b]);
        check(&of(1.0, 2.0, true), &[a, b, x, two, open], &["{}", three]);
        check(&of(0.0, 1.0, true), &["{}", a, x], &[two, open]);
        check(&of(1.0, 2_147_483_647.0, true), &[a, x, three], &["{}"]);
    }
}
