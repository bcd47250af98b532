//! Writes the rules and terminals of a schema.

use std::cmp::Ordering;
use std::collections::{HashMap, HashSet};

use serde_json::{Map, Number, Value, json};

use super::super::compiler::MAX_ITEMS;
use super::keywords::{self, bound, kinds, listed, percent_decoded, wrong};
use super::lists::{literals, valid_values};
use super::merge::{EXCEPT, PATTERNS, merged};
use super::numbers::{Bound, integers, numbers, same};
use super::text::Text;
use super::{dialects, endless, for_each, pattern};
use crate::{Error, Result, quoted, shortened};

/// Most rules and terminals.
const MAX_RULES: usize = 20_000;
/// Most schemas inside one another, references followed.
const MAX_DEPTH: usize = 200;
/// Most schemas that are combined with another one.
const MAX_MERGES: usize = 5_000;
/// Keywords that the library does not support, with their names for callers.
const NOT_IN_LIBRARY: [(&str, &str); 5] = [
    ("contains", "contains"),
    ("maxContains", "maxContains"),
    ("minContains", "minContains"),
    ("uniqueItems", "uniqueItems"),
    (EXCEPT, "not"),
];
/// A character of a string in JSON. Each has one spelling only, so that no key has two.
const CHARACTER: &str = r#"([^"\\\x00-\x1f\x7f]|\\["\\bfnrt]|\\u00(0[0-7bef]|1[0-9a-f]|7f))"#;
/// Maximum keys of an object, any of which may come next. The parser has two items for each of them, and some for the
/// object's surroundings.
const MAX_OPTIONAL: usize = (MAX_ITEMS - 500) / 2;
/// The most of an integer that has to be a multiple of something: a double is exact up to here.
const MAX_MULTIPLE: i64 = (1 << 53) - 1;
/// The most of another number that has to be one.
const MAX_FRACTION: i64 = 1_000_000_000;

/// A grammar for the values of a schema, as JSON with matches of the regular expression `space` between its tokens.
///
/// # Errors
/// If the schema is not one, no value is valid, or something in it cannot be enforced.
pub(in super::super) fn to_lark(schema: &Value, space: &'static str) -> Result<String> {
    let mut root = schema.clone();
    // These have a meaning here.
    for_each(&mut root, &mut |fields| fields.retain(|name, _| ![EXCEPT, PATTERNS].contains(&name.as_str())));
    dialects::normalize(&mut root);
    let schema = &root;
    let mut rules = Rules::new(schema, space);
    let start = rules.value(schema).map_err(|error| with_path(error, &rules.path))?;
    let start = start.ok_or_else(|| match rules.endless.iter().min() {
        Some(path) => Error::invalid_request(format!(
            "no value of the JSON schema could ever end: {} needs another one of itself inside",
            quoted(path)
        ))
        .with_hint("do not require it there, or allow null instead"),
        None => Error::invalid_request("no value is valid under the JSON schema"),
    })?;
    let Rules { text, .. } = rules;
    Ok(format!("%llguidance {{\"ignore_once\": true}}\n%ignore /{space}/\nstart: {start}\n{text}"))
}

pub(super) struct Rules<'s> {
    root: &'s Value,
    space: &'static str,
    text: String,
    /// The rule of a schema, by its text; none if no value is valid.
    known: HashMap<String, Option<String>>,
    /// Rules and terminals by their bodies.
    bodies: HashMap<String, String>,
    references: HashMap<String, String>,
    /// Those of which no value ends.
    endless: HashSet<String>,
    depth: usize,
    num_merges: usize,
    /// Negations inside one another, where it is.
    pub(super) num_nots: usize,
    /// The path of properties to the current schema, outermost first; after an error, to the wrong one.
    path: Vec<String>,
}

type Fields = Map<String, Value>;

impl<'s> Rules<'s> {
    /// For schemas in this one.
    pub(super) fn new(root: &'s Value, space: &'static str) -> Self {
        Self {
            root,
            space,
            text: String::new(),
            known: HashMap::new(),
            bodies: HashMap::new(),
            references: HashMap::new(),
            endless: endless::references(root, |path| target(root, path)),
            depth: 0,
            num_merges: 0,
            num_nots: 0,
            path: Vec::new(),
        }
    }
}

impl Rules<'_> {
    /// The values of a schema in a rule; none if no value is valid.
    pub(super) fn value(&mut self, schema: &Value) -> Result<Option<String>> {
        let fields = match schema {
            Value::Bool(true) => return self.any().map(Some),
            Value::Bool(false) => return Ok(None),
            Value::Object(fields) => fields,
            other => {
                return Err(Error::invalid_request(format!(
                    "a schema in the JSON schema is {}, expected an object",
                    shortened(&other.to_string())
                )));
            }
        };
        let key = schema.to_string();
        if let Some(found) = self.known.get(&key) {
            return Ok(found.clone());
        }
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return Err(too_complex());
        }
        let found = match self.plain(fields)? {
            Some(fields) => self.fields(fields)?,
            None => None,
        };
        self.depth -= 1;
        self.known.insert(key, found.clone());
        Ok(found)
    }

    fn fields(&mut self, mut fields: Fields) -> Result<Option<String>> {
        if fields.is_empty() {
            return self.any().map(Some);
        }
        if let Some(path) = fields.remove("$ref") {
            let path = path.as_str().ok_or_else(|| wrong("$ref", "a string"))?.to_owned();
            if self.endless.contains(&path) {
                return Ok(None);
            }
            if fields.is_empty() {
                return self.reference(&path);
            }
            let target = self.resolve(&path)?.clone();
            return self.combined(&[target, fields.into()]);
        }
        for name in ["anyOf", "oneOf"] {
            if let Some(branches) = fields.remove(name) {
                return self.choice(name, &branches, &fields);
            }
        }
        if let Some(members) = fields.remove("allOf") {
            let Value::Array(mut members) = members else { return Err(wrong("allOf", "a list of schemas")) };
            if !fields.is_empty() {
                members.push(fields.into());
            }
            return match members.as_slice() {
                [one] => self.value(one),
                members => self.combined(members),
            };
        }
        if fields.contains_key("enum") || fields.contains_key("const") {
            return self.words(fields);
        }
        let kinds = kinds(&fields)?;
        let mut options = Vec::new();
        for kind in kinds {
            options.extend(match kind {
                "object" => self.object(&fields)?,
                "array" => self.array(&fields)?,
                "string" => self.string(&fields)?,
                "integer" | "number" => self.number(kind, &fields)?,
                "boolean" => Some(self.rule("BOOL", "\"true\" | \"false\"")?),
                _ => Some("\"null\"".to_owned()),
            });
        }
        Ok(either(&options))
    }

    /// All of these schemas together.
    fn combined(&mut self, members: &[Value]) -> Result<Option<String>> {
        let mut all = Fields::new();
        for (index, member) in members.iter().enumerate() {
            let member = match self.flat(member)? {
                Some(Value::Bool(true)) => continue,
                Some(Value::Bool(false)) => return Ok(None),
                Some(Value::Object(member)) => member,
                _ => return self.library(&json!({"allOf": members})),
            };
            self.count_merge()?;
            if let (true, Some(Value::Array(branches))) = (all.contains_key("anyOf"), member.get("anyOf")) {
                return self.each_with(branches, all, &member, &members[index + 1..]);
            }
            all = match merged(all, &member) {
                Some(Value::Object(all)) => all,
                Some(_) => return Ok(None),
                None => return self.library(&json!({"allOf": members})),
            };
        }
        self.value(&all.into())
    }

    /// Each of the alternatives in `member` together with everything else, which has alternatives too.
    fn each_with(
        &mut self,
        branches: &[Value],
        all: Fields,
        member: &Fields,
        others: &[Value],
    ) -> Result<Option<String>> {
        let mut rest = member.clone();
        rest.remove("anyOf");
        let mut branches_left = vec![all.into(), rest.into()];
        branches_left.extend_from_slice(others);
        let branches = branches.iter().map(|branch| {
            let mut together = branches_left.clone();
            together.push(branch.clone());
            json!({"allOf": together})
        });
        self.value(&json!({"anyOf": branches.collect::<Vec<_>>()}))
    }

    /// A schema without references; none if it cannot be written.
    pub(super) fn flat(&mut self, schema: &Value) -> Result<Option<Value>> {
        let mut schema = schema.clone();
        loop {
            let Value::Object(fields) = &mut schema else { return Ok(Some(schema)) };
            match self.plain(fields)? {
                Some(plain) => *fields = plain,
                None => return Ok(Some(Value::Bool(false))),
            }
            let Some(path) = fields.remove("$ref") else { return Ok(Some(schema)) };
            let path = path.as_str().unwrap_or_default();
            if self.endless.contains(path) {
                return Ok(Some(Value::Bool(false)));
            }
            let target = self.resolve(path)?.clone();
            self.count_merge()?;
            schema = match target {
                Value::Bool(true) => continue,
                Value::Object(mut target) => {
                    match self.plain(&target)? {
                        Some(plain) => target = plain,
                        None => return Ok(Some(Value::Bool(false))),
                    }
                    match merged(std::mem::take(fields), &target) {
                        Some(both) => both,
                        None => return Ok(None),
                    }
                }
                other => other,
            };
        }
    }

    pub(super) fn count_merge(&mut self) -> Result<()> {
        self.num_merges += 1;
        if self.num_merges > MAX_MERGES { Err(too_complex()) } else { Ok(()) }
    }

    /// One of several schemas, together with the other fields.
    fn choice(&mut self, name: &str, branches: &Value, fields: &Fields) -> Result<Option<String>> {
        let Value::Array(branches) = branches else { return Err(wrong(name, "a list of schemas")) };
        let disjoint = match name {
            "oneOf" => self.disjoint(branches, fields)?.ok_or_else(|| {
                Error::invalid_request(
                    "oneOf cannot be enforced where a value may be valid under two of its schemas",
                )
                .with_hint("use anyOf, or give each a required property with its own const")
            })?,
            _ => branches.clone(),
        };
        let mut options = Vec::new();
        for branch in &disjoint {
            let option = match fields.is_empty() || name == "oneOf" {
                true => self.value(branch)?,
                false => self.combined(&[fields.clone().into(), branch.clone()])?,
            };
            options.extend(option.filter(|option| !options.contains(option)));
        }
        Ok(either(&options))
    }

    /// Values that are listed.
    fn words(&mut self, mut fields: Fields) -> Result<Option<String>> {
        if let Some(name) = fields.get("enum").filter(|values| !values.is_array()).map(|_| "enum") {
            return Err(wrong(name, "a list"));
        }
        let except = fields.remove(EXCEPT);
        if let Some(values) = listed(&fields).filter(|_| except.is_some()) {
            let except = except.as_ref().and_then(Value::as_array);
            let is_left =
                |value: &&Value| except.is_none_or(|except| !except.iter().any(|other| same(other, value)));
            let left: Vec<Value> = values.into_iter().filter(is_left).cloned().collect();
            fields.remove("const");
            fields.insert("enum".to_owned(), left.into());
        }
        let fields = valid_values(fields)?;
        match literals(&fields).as_deref() {
            None => self.library(&fields.into()),
            Some([]) => Ok(None),
            Some(values) => self.rule("WORDS", &values.join(" | ")).map(Some),
        }
    }

    fn object(&mut self, fields: &Fields) -> Result<Option<String>> {
        let none = Fields::new();
        let properties = match fields.get("properties") {
            None => &none,
            Some(Value::Object(properties)) => properties,
            Some(_) => return Err(wrong("properties", "an object")),
        };
        let required = match fields.get("required") {
            None => Vec::new(),
            Some(Value::Array(names)) => names.iter().filter_map(Value::as_str).collect(),
            Some(_) => return Err(wrong("required", "a list of names")),
        };
        let others = match fields.get("additionalProperties") {
            Some(schema) => schema.clone(),
            None => {
                Value::Bool(!fields.contains_key("properties") && !fields.contains_key("patternProperties"))
            }
        };
        let unnamed = match &others {
            Value::Bool(false) if !fields.contains_key("additionalProperties") => Value::Bool(true),
            others => others.clone(),
        };
        let mut named = properties.clone();
        for name in &required {
            named.entry(*name).or_insert_with(|| unnamed.clone());
        }
        let count = |name| fields.get(name).map(|value| keywords::count(name, value)).transpose();
        let has_patterns = fields.contains_key("patternProperties");
        let num_required = named.keys().filter(|name| required.contains(&name.as_str())).count() as u64;
        let min = count("minProperties")?.unwrap_or(0);
        if min > num_required + 1 && (has_patterns || others != false) {
            return Err(Error::invalid_request(format!(
                "minProperties is {min} in the JSON schema; it can be at most one more than the number of required \
                 keys, because optional ones may be repeated"
            ))
            .with_hint("name more keys in required"));
        }
        let max = count("maxProperties")?;
        let is_bounded =
            min > num_required || max.is_some_and(|max| max < named.len() as u64 || others != false);
        let patterns = fields.get("patternProperties").and_then(Value::as_object);
        patterns.into_iter().flatten().try_for_each(|(pattern, _)| pattern::check(pattern))?;
        if has_patterns || is_bounded {
            let mut fields = fields.clone();
            fields.insert("type".to_owned(), "object".into());
            fields.insert("additionalProperties".to_owned(), others);
            if !has_patterns {
                fields.insert("properties".to_owned(), named.into());
            }
            return self.library(&fields.into());
        }
        let mut members: Vec<(String, bool)> = Vec::new();
        for (name, schema) in &named {
            let is_required = required.contains(&name.as_str());
            self.path.push(name.clone());
            let value = self.value(schema)?;
            self.path.pop();
            match value {
                Some(value) => {
                    let key = literal(&Value::from(name.as_str()).to_string());
                    members.push((format!("{key} \":\" {value}"), is_required));
                }
                None if is_required => return Ok(None),
                None => {}
            }
        }
        let more = match self.value(&others)? {
            Some(value) => {
                let names: Vec<String> =
                    named.keys().map(|name| literal(&Value::from(name.as_str()).to_string())).collect();
                let key = match names.as_slice() {
                    [] => self.any_string()?,
                    names => self.rule("KEY", &format!("/\"{CHARACTER}*\"/ & ~({})", names.join(" | ")))?,
                };
                Some(self.rule("member", &format!("{key} \":\" {value}"))?)
            }
            None => None,
        };
        let members = self.members(&members, more.as_deref())?;
        self.rule("object", &format!("\"{{\" {members}")).map(Some)
    }

    /// The members of an object in their order, others after them, and its end.
    ///
    /// Each position has its own rule up to the end of the object. So the parser has two items for each possible next
    /// key, and does not read earlier keys again before the end of the object.
    fn members(&mut self, members: &[(String, bool)], more: Option<&str>) -> Result<String> {
        let runs = members.split(|(_, is_required)| *is_required).map(<[_]>::len);
        let num_optional = runs.max().unwrap_or(0);
        if num_optional > MAX_OPTIONAL {
            return Err(Error::invalid_request(format!(
                "an object in the JSON schema has {num_optional} keys in a row that are not required; at most \
                 {MAX_OPTIONAL} can be enforced"
            ))
            .with_hint("name some of them in required"));
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

    /// A rule for text that would be repeated.
    pub(super) fn part(&mut self, body: String) -> Result<String> {
        const MAX_BYTES: usize = 60;
        if body.len() <= MAX_BYTES { Ok(body) } else { self.rule("part", &body) }
    }

    fn string(&mut self, fields: &Fields) -> Result<Option<String>> {
        let Some(text) = Text::of(fields)? else { return Ok(None) };
        if text.is_free() {
            return self.any_string().map(Some);
        }
        let except: Vec<String> = text.except.iter().map(|word| literal(&json_text(word))).collect();
        let except = if except.is_empty() { String::new() } else { format!(" & ~({})", except.join(" | ")) };
        if text.patterns.is_empty() {
            let body = format!("/\"{CHARACTER}{}\"/{except}", text.repetition());
            return self.rule("TEXT", &body).map(Some);
        }
        if !except.is_empty() || text.patterns.iter().any(|pattern| pattern::looks_ahead(pattern)) {
            // Texts that need escapes are excluded: then the text between the quotes is the value.
            let expression = text.expression(r#"[^"\\\x00-\x1f\x7f]"#, "\"")?;
            return self.rule("TEXT", &format!("{expression}{except}")).map(Some);
        }
        text.patterns.iter().try_for_each(|pattern| pattern::check(pattern))?;
        let mut leaf = json!({"type": "string"});
        for name in ["minLength", "maxLength"] {
            if let Some(value) = fields.get(name) {
                leaf[name] = value.clone();
            }
        }
        leaf["allOf"] = text.patterns.iter().map(|pattern| json!({"pattern": pattern})).collect();
        self.library(&leaf)
    }

    fn number(&mut self, kind: &str, fields: &Fields) -> Result<Option<String>> {
        let min = bound(fields, "minimum", "exclusiveMinimum", Ordering::is_ge)?;
        let max = bound(fields, "maximum", "exclusiveMaximum", Ordering::is_le)?;
        let divisor = fields.get("multipleOf").map(keywords::divisor).transpose()?;
        let is_whole = kind == "integer" || divisor.and_then(Number::as_f64) == Some(1.0);
        if let Some(divisor) = divisor.filter(|divisor| divisor.as_f64() != Some(1.0)) {
            if is_whole && !has_multiple(divisor, min.as_ref(), max.as_ref()) {
                return Ok(None);
            }
            let limit = if is_whole { MAX_MULTIPLE } else { MAX_FRACTION };
            let mut leaf = json!({"type": kind, "multipleOf": divisor, "minimum": -limit, "maximum": limit});
            let ends =
                [("minimum", "exclusiveMinimum", min, 1.0), ("maximum", "exclusiveMaximum", max, -1.0)];
            for (name, exclusive, end, sign) in ends {
                let Some(end) = end else { continue };
                if end.value.as_f64().is_some_and(|value| value * sign > limit as f64) {
                    let value = end.value;
                    let message = format!(
                        "{name} is {value} next to multipleOf {divisor}; multiples of {kind}s are enforced between \
                         -{limit} and {limit} only"
                    );
                    return Err(Error::invalid_request(message).with_hint("omit multipleOf"));
                }
                if end.value.as_f64().is_some_and(|value| value * sign > -(limit as f64)) {
                    leaf[if end.is_exclusive { exclusive } else { name }] = end.value.into();
                }
            }
            return self.library(&leaf);
        }
        let regex = match is_whole {
            true => integers(min.as_ref(), max.as_ref())?,
            false => numbers(min.as_ref(), max.as_ref())?,
        };
        regex.map(|regex| self.rule("NUMBER", &format!("/{regex}/"))).transpose()
    }

    /// A value that the library compiles.
    fn library(&mut self, schema: &Value) -> Result<Option<String>> {
        let mut schema = schema.clone();
        let text = schema.to_string();
        let mut unknown = None;
        for_each(&mut schema, &mut |fields| {
            unknown = unknown.or_else(|| NOT_IN_LIBRARY.iter().find(|(name, _)| fields.contains_key(*name)));
        });
        if let Some((_, keyword)) = unknown {
            return Err(Error::invalid_request(format!(
                "{keyword} in the JSON schema cannot be enforced together with the other keywords there"
            ))
            .with_hint("leave it out, or combine the conditions in one schema"));
        }
        // The library computes multiples with 64 bits, and ends the process for numbers at their limits.
        if text.contains("\"multipleOf\"") && largest(&schema) > MAX_MULTIPLE as f64 {
            return Err(Error::invalid_request(format!(
                "the JSON schema has multipleOf together with a number beyond {MAX_MULTIPLE}, which cannot be enforced"
            ))
            .with_hint("omit multipleOf"));
        }
        if let Value::Object(fields) = &mut schema {
            if let Some(patterns) = fields.remove(PATTERNS) {
                let patterns =
                    patterns.as_array().into_iter().flatten().map(|pattern| json!({"pattern": pattern}));
                let all = fields.entry("allOf").or_insert_with(|| Value::Array(Vec::new()));
                all.as_array_mut().into_iter().for_each(|all| all.extend(patterns.clone()));
            }
            for (at, _) in text.match_indices("\"$ref\":\"") {
                let path = &text[at + "\"$ref\":\"".len()..];
                if !["#/$defs/", "#/definitions/"].iter().any(|prefix| path.starts_with(prefix)) {
                    return Err(Error::invalid_request(
                        "the JSON schema combines keywords with a reference that leads to no definition",
                    )
                    .with_hint("put the referenced schema into $defs"));
                }
            }
            if text.contains("\"$ref\"") {
                for name in ["$defs", "definitions"] {
                    if let Some(definitions) = self.root.get(name) {
                        fields.insert(name.to_owned(), definitions.clone());
                    }
                }
            }
            let options = json!({"whitespace_pattern": self.space, "json_allowed_escapes": "nrbtf\\\""});
            fields.insert("x-guidance".to_owned(), options);
        }
        self.rule("json", &format!("%json {schema}")).map(Some)
    }

    fn reference(&mut self, path: &str) -> Result<Option<String>> {
        if let Some(name) = self.references.get(path) {
            return Ok(Some(name.clone()));
        }
        let target = self.resolve(path)?.clone();
        let name = format!("ref_{}", self.references.len());
        self.references.insert(path.to_owned(), name.clone());
        let body = self.value(&target)?;
        match body {
            Some(body) if body == name => {
                Err(Error::invalid_request(format!("the reference {} leads to itself", quoted(path))))
            }
            Some(body) => {
                self.add(&name, &body)?;
                Ok(Some(name))
            }
            None => {
                // Others may have referred to it already.
                self.add(&name, "/[a&&b]/")?;
                Ok(None)
            }
        }
    }

    pub(super) fn resolve(&self, path: &str) -> Result<&Value> {
        target(self.root, path).ok_or_else(|| {
            Error::invalid_request(format!("the reference {} has no target in the JSON schema", quoted(path)))
                .with_hint("refer to parts of the same schema, such as #/$defs/name")
        })
    }

    /// Any value.
    fn any(&mut self) -> Result<String> {
        const NAME: &str = "any";
        if self.known.insert(NAME.to_owned(), Some(NAME.to_owned())).is_none() {
            let string = self.any_string()?;
            let number = numbers(None, None)?.unwrap_or_default();
            let number = self.rule("NUMBER", &format!("/{number}/"))?;
            let bool = self.rule("BOOL", "\"true\" | \"false\"")?;
            self.add("any_member", &format!("{string} \":\" {NAME}"))?;
            self.add("any_object", "\"{\" (any_member (\",\" any_member)*)? \"}\"")?;
            self.add("any_array", &format!("\"[\" ({NAME} (\",\" {NAME})*)? \"]\""))?;
            self.add(NAME, &format!("{string} | {number} | {bool} | \"null\" | any_object | any_array"))?;
        }
        Ok(NAME.to_owned())
    }

    fn any_string(&mut self) -> Result<String> {
        self.rule("STRING", &format!("/\"{CHARACTER}*\"/"))
    }

    pub(super) fn rule(&mut self, prefix: &str, body: &str) -> Result<String> {
        if let Some(name) = self.bodies.get(body) {
            return Ok(name.clone());
        }
        let name = format!("{prefix}_{}", self.bodies.len());
        self.bodies.insert(body.to_owned(), name.clone());
        self.add(&name, body)?;
        Ok(name)
    }

    fn add(&mut self, name: &str, body: &str) -> Result<()> {
        if self.bodies.len() > MAX_RULES {
            return Err(too_complex());
        }
        let body = if body.trim().is_empty() { "\"\"" } else { body };
        self.text.push_str(&format!("{name}: {body}\n"));
        Ok(())
    }
}

/// The schema that a reference leads to.
fn target<'s>(root: &'s Value, path: &str) -> Option<&'s Value> {
    let pointer = path.strip_prefix('#').map(|pointer| if pointer == "/" { "" } else { pointer })?;
    root.pointer(pointer).or_else(|| root.pointer(&percent_decoded(pointer)?))
}

/// The same error with the property that it is about.
fn with_path(error: Error, path: &[String]) -> Error {
    if path.is_empty() {
        return error;
    }
    let path = path.join(".");
    let hint = error.hint().map(str::to_owned);
    let error = Error::new(error.kind(), format!("the property {}: {}", shortened(&path), error.message()));
    match hint {
        Some(hint) => error.with_hint(hint),
        None => error,
    }
}

pub(super) fn too_complex() -> Error {
    Error::invalid_request("the JSON schema is too complex: too many schemas inside one another or combined")
}

pub(super) fn literal(text: &str) -> String {
    Value::from(text).to_string()
}

/// A text as JSON, in the one spelling that strings have here.
fn json_text(text: &str) -> String {
    Value::from(text).to_string().replace('\x7f', "\\u007f")
}

fn either(options: &[String]) -> Option<String> {
    match options {
        [] => None,
        [one] => Some(one.clone()),
        several => Some(format!("({})", several.join(" | "))),
    }
}

/// Whether a range of integers has a multiple of a whole number. True where that is not known.
fn has_multiple(divisor: &Number, min: Option<&Bound>, max: Option<&Bound>) -> bool {
    let within = |value: f64| value.abs() <= MAX_MULTIPLE as f64;
    let end =
        |bound: Option<&Bound>| bound.and_then(|bound| Some((bound.value.as_f64()?, bound.is_exclusive)));
    let (Some(of), Some((low, is_low_out)), Some((high, is_high_out))) =
        (divisor.as_f64(), end(min), end(max))
    else {
        return true;
    };
    if of.fract() != 0.0 || ![of, low, high].into_iter().all(within) {
        return true;
    }
    let first = (low / of).ceil() * of;
    let first = if is_low_out && first <= low { first + of } else { first };
    if is_high_out { first < high } else { first <= high }
}

/// The largest magnitude of the numbers in a schema.
fn largest(value: &Value) -> f64 {
    let of_all = |values: &mut dyn Iterator<Item = &Value>| values.map(largest).fold(0.0, f64::max);
    match value {
        Value::Number(number) => number.as_f64().map_or(f64::INFINITY, f64::abs),
        Value::Array(values) => of_all(&mut values.iter()),
        Value::Object(fields) => of_all(&mut fields.values()),
        _ => 0.0,
    }
}
