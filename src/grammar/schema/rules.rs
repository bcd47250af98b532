//! Writes the rules and terminals of a schema.

use std::cmp::Ordering;
use std::collections::{HashMap, HashSet};

use serde_json::{Map, Number, Value, json};

use super::keywords::{self, bound, kinds, listed, percent_decoded, wrong};
use super::library::{MAX_FRACTION, MAX_MULTIPLE, MAX_UNITS};
use super::lists::{literals, valid_values};
use super::merge::{EXCEPT, merged};
use super::numbers::{has_multiple, integers, numbers, same, units, unwritable_bound};
use super::place::{SchemaPlace, Step, about};
use super::text::Text;
use super::{dialects, endless, pattern};
use crate::{Error, Result, quoted, shortened};

/// Most rules and terminals.
const MAX_RULES: usize = 20_000;
/// Most schemas inside one another, references followed.
const MAX_DEPTH: usize = 200;
/// Most texts whose constraints are checked for a contradiction, each with a bounded amount of work.
const MAX_CHECKED: usize = 100;
/// Most schemas that are combined with another one.
const MAX_MERGES: usize = 5_000;
/// A character of a string in JSON. Each has one spelling only, so that no key has two.
pub(super) const CHARACTER: &str = r#"([^"\\\x00-\x1f\x7f]|\\["\\bfnrt]|\\u00(0[0-7bef]|1[0-9a-f]|7f))"#;
/// One that is written as itself.
pub(super) const PLAIN: &str = r#"[^"\\\x00-\x1f\x7f]"#;

/// A grammar for the values of a schema, as JSON with matches of the regular expression `space` between its tokens.
///
/// # Errors
/// If the schema is not one, no value is valid, or something in it cannot be enforced.
pub(in super::super) fn to_lark(schema: &Value, space: &'static str) -> Result<String> {
    let mut root = schema.clone();
    dialects::normalize(&mut root);
    let mut rules = Rules::new(&root, space);
    let start = rules.value(&root).map_err(|error| SchemaPlace::after(&error, schema, &rules.path))?;
    let start = start.ok_or_else(|| {
        let (error, steps) = rules.no_value();
        SchemaPlace::after(&error, schema, &steps)
    })?;
    let Rules { text, .. } = rules;
    Ok(format!("%llguidance {{\"ignore_once\": true}}\n%ignore /{space}/\nstart: {start}\n{text}"))
}

pub(super) struct Rules<'s> {
    pub(super) root: &'s Value,
    pub(super) space: &'static str,
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
    /// Texts whose constraints were checked for a contradiction.
    num_checked: usize,
    /// Negations inside one another, where it is.
    pub(super) num_nots: usize,
    /// The way to the current schema; after an error, to the wrong one.
    pub(super) path: Vec<Step>,
    /// The way to the schema because of which the last one without values has none.
    pub(super) cause: Option<Vec<Step>>,
    /// The same for known schemas without values, from the schema itself.
    causes: HashMap<String, Vec<Step>>,
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
            num_checked: 0,
            num_nots: 0,
            path: Vec::new(),
            cause: None,
            causes: HashMap::new(),
        }
    }

    /// The error where no value is valid, and the way to its cause.
    fn no_value(&self) -> (Error, Vec<Step>) {
        match self.endless.iter().min() {
            Some(path) => {
                let error = Error::invalid_request(format!(
                    "no value of the JSON schema could ever end: {} needs another one of itself inside",
                    quoted(path)
                ));
                let hint = "do not require it there, or allow null instead";
                (error.with_hint(hint), vec![Step::Reference(path.clone())])
            }
            None => {
                let error = Error::invalid_request("no value is valid under the JSON schema");
                let hint = "its keywords contradict each other: change one, or do not require such a value";
                (error.with_hint(hint), self.cause.clone().unwrap_or_default())
            }
        }
    }
}

impl Rules<'_> {
    /// The values of a schema in a rule; none if no value is valid.
    pub(super) fn value(&mut self, schema: &Value) -> Result<Option<String>> {
        let fields = match schema {
            Value::Bool(true) => return self.any().map(Some),
            Value::Bool(false) => {
                self.cause = Some(self.path.clone());
                return Ok(None);
            }
            Value::Object(fields) => fields,
            other => return Err(no_schema(other)),
        };
        let key = schema.to_string();
        if let Some(found) = self.known.get(&key) {
            if let Some(cause) = self.causes.get(&key) {
                self.cause = Some([self.path.as_slice(), cause].concat());
            }
            return Ok(found.clone());
        }
        let before = self.cause.take();
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return Err(too_complex());
        }
        let found = match self.plain(fields)? {
            Some(fields) => self.fields(fields)?,
            None => None,
        };
        self.depth -= 1;
        match (&found, self.cause.take()) {
            (Some(_), _) => self.cause = before,
            (None, cause) => {
                let cause = cause.unwrap_or_else(|| self.path.clone());
                let inner = cause.strip_prefix(self.path.as_slice()).unwrap_or_default().to_vec();
                self.causes.insert(key.clone(), inner);
                self.cause = Some(cause);
            }
        }
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

    /// The values of a schema inside the current one.
    pub(super) fn value_at(&mut self, step: Step, schema: &Value) -> Result<Option<String>> {
        self.path.push(step);
        let found = self.value(schema)?;
        self.path.pop();
        Ok(found)
    }

    /// All of these schemas together.
    fn combined(&mut self, members: &[Value]) -> Result<Option<String>> {
        let mut all = Fields::new();
        for (index, member) in members.iter().enumerate() {
            let member = match self.flat(member)? {
                Some(Value::Bool(true)) => continue,
                Some(Value::Bool(false)) => return Ok(None),
                Some(Value::Object(member)) => member,
                Some(other) => return Err(no_schema(&other)),
                None => return self.library(&json!({"allOf": members})),
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
                let error = Error::invalid_request(
                    "oneOf cannot be enforced where a value may be valid under two of its schemas",
                );
                about(name, error.with_hint("use anyOf, or give each a required property with its own const"))
            })?,
            _ => branches.clone(),
        };
        let mut options = Vec::new();
        for (index, branch) in disjoint.iter().enumerate() {
            // Of disjoint ones there may be several for one of the caller's.
            let keyword = if name == "oneOf" && disjoint.len() == branches.len() { "oneOf" } else { "anyOf" };
            self.path.push(Step::Listed(keyword, index));
            let option = match fields.is_empty() || name == "oneOf" {
                true => self.value(branch)?,
                false => self.combined(&[fields.clone().into(), branch.clone()])?,
            };
            self.path.pop();
            options.extend(option.filter(|option| !options.contains(option)));
        }
        if disjoint.len() > 1 {
            // None of them alone.
            self.cause = None;
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
        self.num_checked += 1;
        if self.num_checked <= MAX_CHECKED && text.has_none() {
            return Ok(None);
        }
        let except: Vec<String> = text.except.iter().map(|word| literal(&json_text(word))).collect();
        let except = if except.is_empty() { String::new() } else { format!(" & ~({})", except.join(" | ")) };
        if text.patterns.is_empty() {
            let body = format!("/\"{CHARACTER}{}\"/{except}", text.repetition());
            return self.rule("TEXT", &body).map(Some);
        }
        if !except.is_empty() || text.patterns.iter().any(|pattern| pattern::looks_ahead(pattern)) {
            // Texts that need escapes are excluded: then the text between the quotes is the value.
            let expression = text.expression(PLAIN, "\"").map_err(|error| about("pattern", error))?;
            return self.rule("TEXT", &format!("{expression}{except}")).map(Some);
        }
        let mut checked = text.patterns.iter().map(|pattern| pattern::check(pattern));
        checked.try_for_each(|checked| checked.map_err(|error| about("pattern", error)))?;
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
            if !has_multiple(divisor, min.as_ref(), max.as_ref()) {
                return Ok(None);
            }
            let limit = if is_whole { MAX_MULTIPLE } else { MAX_FRACTION };
            let limit = limit.min(MAX_UNITS / units(divisor));
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
                    return Err(about(name, Error::invalid_request(message).with_hint("omit multipleOf")));
                }
                if end.value.as_f64().is_some_and(|value| value * sign > -(limit as f64)) {
                    leaf[if end.is_exclusive { exclusive } else { name }] = end.value.into();
                }
            }
            return self.library(&leaf);
        }
        let regex = match is_whole {
            true => integers(min.as_ref(), max.as_ref()),
            false => numbers(min.as_ref(), max.as_ref()),
        };
        let regex = regex.map_err(|error| about(unwritable_bound(fields), error))?;
        regex.map(|regex| self.rule("NUMBER", &format!("/{regex}/"))).transpose()
    }

    fn reference(&mut self, path: &str) -> Result<Option<String>> {
        if let Some(name) = self.references.get(path) {
            return Ok(Some(name.clone()));
        }
        let target = self.resolve(path)?.clone();
        let name = format!("ref_{}", self.references.len());
        self.references.insert(path.to_owned(), name.clone());
        let body = self.value_at(Step::Reference(path.to_owned()), &target)?;
        match body {
            Some(body) if body == name => {
                let error = Error::invalid_request(format!("the reference {} leads to itself", quoted(path)));
                Err(about("$ref", error.with_hint("put properties or items between them")))
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
            let message = format!("the reference {} has no target in the JSON schema", quoted(path));
            let hint = "refer to parts of the same schema, such as #/$defs/name";
            about("$ref", Error::invalid_request(message).with_hint(hint))
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

    pub(super) fn any_string(&mut self) -> Result<String> {
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

fn no_schema(value: &Value) -> Error {
    Error::invalid_request(format!(
        "a schema in the JSON schema is {}, expected an object",
        shortened(&value.to_string())
    ))
    .with_hint("write true for any value and false for none")
}

pub(super) fn too_complex() -> Error {
    Error::invalid_request("the JSON schema is too complex: too many schemas inside one another or combined")
}

pub(super) fn literal(text: &str) -> String {
    Value::from(text).to_string()
}

/// A text as JSON, in the one spelling that strings have here.
pub(super) fn json_text(text: &str) -> String {
    Value::from(text).to_string().replace('\x7f', "\\u007f")
}

pub(super) fn either(options: &[String]) -> Option<String> {
    match options {
        [] => None,
        [one] => Some(one.clone()),
        several => Some(format!("({})", several.join(" | "))),
    }
}
