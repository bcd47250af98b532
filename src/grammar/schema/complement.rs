//! The complement of a schema, as other schemas: for `not`, and for alternatives that exclude each other.
//!
//! Invariant: no value that these schemas allow is valid under the first one, for every treatment of keys that it does
//! not name. Whether they allow all other values is returned with them, because they do not always.

use std::cmp::Ordering;

use serde_json::{Map, Value, json};

use super::keywords::{TYPES, kinds, listed, type_of};
use super::merge::{EXCEPT, merged, names};
use super::numbers::compare;
use super::rules::Rules;
use crate::{Error, Result};

type Fields = Map<String, Value>;

/// Most schemas inside one another.
const MAX_DEPTH: usize = 4;
/// Most schemas that are written for one.
const MAX_OPTIONS: usize = 64;
/// The values under test.
#[derive(Debug, Clone)]
pub(super) struct Base {
    /// Of these types.
    kinds: Vec<String>,
    /// The constraints of objects on the keys that they name.
    properties: Fields,
    /// Objects have no other keys than those.
    is_closed: bool,
    /// No keyword limits keys, so a schema that names one must allow others.
    is_free: bool,
}

/// Schemas that each allow some of the values outside another one.
#[derive(Debug, Default)]
pub(super) struct Complement {
    pub(super) options: Vec<Value>,
    /// There are further values.
    is_partial: bool,
}

impl Base {
    /// All values.
    fn any() -> Self {
        let kinds = TYPES.iter().map(|(kind, _)| (*kind).to_owned()).collect();
        Self { kinds, properties: Fields::new(), is_closed: false, is_free: false }
    }

    fn of(fields: &Fields) -> Result<Self> {
        let kinds = match listed(fields) {
            Some(values) => values.into_iter().map(|value| type_of(value).to_owned()).collect(),
            None => kinds(fields)?.into_iter().map(str::to_owned).collect(),
        };
        let properties = fields.get("properties").and_then(Value::as_object);
        let others = fields.get("additionalProperties");
        let has = |name: &str| fields.contains_key(name);
        let is_closed = match others {
            None => has("properties") && !has("patternProperties"),
            Some(others) => *others == false && !has("patternProperties"),
        };
        let says = ["properties", "patternProperties", "additionalProperties", "anyOf", "oneOf", "allOf"];
        Ok(Self {
            kinds,
            properties: properties.cloned().unwrap_or_default(),
            is_closed,
            is_free: !says.into_iter().any(has),
        })
    }

    pub(super) fn is_object(&self) -> bool {
        self.kinds.iter().all(|kind| kind == "object")
    }

    /// A schema of objects with these constraints.
    fn object(&self, mut schema: Value) -> Value {
        schema["type"] = "object".into();
        if self.is_free && schema.get("properties").is_some() {
            schema["additionalProperties"] = true.into();
        }
        schema
    }
}

impl Complement {
    fn unknown() -> Self {
        Self { options: Vec::new(), is_partial: true }
    }

    pub(super) fn is_whole(&self) -> bool {
        !self.is_partial
    }

    /// The union.
    fn add(&mut self, other: Self) {
        self.options.extend(other.options);
        self.is_partial |= other.is_partial;
    }

    /// The intersection.
    fn and(&self, other: &Self) -> Self {
        let mut both = Self { options: Vec::new(), is_partial: self.is_partial || other.is_partial };
        if self.options.len() * other.options.len() > MAX_OPTIONS {
            return Self::unknown();
        }
        for one in &self.options {
            both.options.extend(other.options.iter().map(|other| json!({"allOf": [one, other]})));
        }
        both
    }
}

impl Rules<'_> {
    /// The values of `fields` that are not valid under a schema.
    pub(super) fn complement_in(&mut self, schema: &Value, fields: &Fields) -> Result<Complement> {
        let base = self.base_of(&fields.clone().into())?;
        self.complement(schema, &base, 0)
    }

    /// The constraints of a schema on strings, in the keywords of texts.
    ///
    /// # Errors
    /// If it has others.
    pub(super) fn text_fields(&mut self, schema: &Value) -> Result<Fields> {
        let none = || Error::invalid_request("no string is valid under the JSON schema");
        let fields = self.as_one(schema, 0)?.ok_or_else(none)?;
        let is_of_texts = |name: &str| {
            name == "type" || TYPES.iter().any(|(kind, names)| *kind == "string" && names.contains(&name))
        };
        let is_of_others = |name: &str| TYPES.iter().any(|(_, names)| names.contains(&name));
        let other = fields.keys().find(|name| !is_of_texts(name) && !is_of_others(name));
        match other {
            Some(name) => Err(Error::invalid_request(format!(
                "the JSON schema of a string has {name}, which cannot be enforced for strings without quotes"
            ))
            .with_hint("use minLength, maxLength, pattern or enum")),
            None => Ok(fields),
        }
    }

    /// The known values of a schema.
    pub(super) fn base_of(&mut self, schema: &Value) -> Result<Base> {
        match self.as_one(schema, 0)? {
            Some(fields) => Base::of(&fields),
            None => Ok(Base::any()),
        }
    }

    /// A schema without `$ref` and `allOf`, if it can be written so.
    pub(super) fn as_one(&mut self, schema: &Value, depth: usize) -> Result<Option<Fields>> {
        let Some(Value::Object(mut fields)) = self.flat(schema)? else { return Ok(None) };
        let Some(members) = fields.remove("allOf") else { return Ok(Some(fields)) };
        for member in members.as_array().into_iter().flatten() {
            let member = if depth < MAX_DEPTH { self.as_one(member, depth + 1)? } else { None };
            let Some(member) = member else { return Ok(None) };
            match merged(fields, &member) {
                Some(Value::Object(both)) => fields = both,
                _ => return Ok(None),
            }
        }
        Ok(Some(fields))
    }

    /// Those of these values that are not valid under a schema at this depth.
    pub(super) fn complement(&mut self, schema: &Value, base: &Base, depth: usize) -> Result<Complement> {
        self.count_merge()?;
        if depth > MAX_DEPTH {
            return Ok(Complement::unknown());
        }
        let mut fields = match self.flat(schema)? {
            Some(Value::Bool(true)) => return Ok(Complement::default()),
            Some(Value::Bool(false)) => {
                let options = vec![json!({"type": base.kinds})];
                return Ok(Complement { options, is_partial: false });
            }
            Some(Value::Object(fields)) => fields,
            _ => return Ok(Complement::unknown()),
        };
        let mut found = Complement::default();
        if let Some(members) = fields.remove("allOf") {
            for member in members.as_array().into_iter().flatten() {
                found.add(self.complement(member, base, depth + 1)?);
            }
        }
        for name in ["anyOf", "oneOf"] {
            let Some(branches) = fields.remove(name) else { continue };
            let mut none =
                Complement { options: vec![json!({"type": base.kinds})], is_partial: name == "oneOf" };
            for branch in branches.as_array().into_iter().flatten() {
                none = none.and(&self.complement(branch, base, depth + 1)?);
            }
            found.add(none);
        }
        if fields.is_empty() {
            return Ok(found);
        }
        let shared = shared_kinds(&fields, base, &mut found);
        if let Some(values) = listed(&fields) {
            let is_other = |name: &String| !matches!(name.as_str(), "type" | "enum" | "const");
            found.is_partial |= fields.keys().any(is_other);
            except(&values, &shared, &mut found);
            return Ok(found);
        }
        for keyword in fields.keys() {
            found.add(self.not_keyword(keyword, &fields, &shared, base, depth)?);
        }
        Ok(found)
    }

    /// The values of these types for which a keyword does not hold.
    fn not_keyword(
        &mut self,
        keyword: &str,
        fields: &Fields,
        shared: &[String],
        base: &Base,
        depth: usize,
    ) -> Result<Complement> {
        let given = &fields[keyword];
        let owner = TYPES.iter().find(|(_, keywords)| keywords.contains(&keyword)).map(|(kind, _)| *kind);
        let is_owned =
            |kind: &&String| Some(kind.as_str()) == owner || *kind == "integer" && owner == Some("number");
        let kinds: Vec<&String> = shared.iter().filter(is_owned).collect();
        match keyword {
            _ if kinds.is_empty() => Ok(Complement::default()),
            "required" => {
                let names = given.as_array().into_iter().flatten().filter_map(Value::as_str);
                let options = names.map(|name| base.object(json!({"properties": {name: false}})));
                Ok(Complement { options: options.collect(), is_partial: false })
            }
            "properties" => {
                let mut found = Complement::default();
                for (name, schema) in given.as_object().into_iter().flatten() {
                    found.add(self.not_property(name, schema, base, depth)?);
                }
                Ok(found)
            }
            "additionalProperties" => Ok(has_others(fields, base)),
            _ => Ok(match opposite(keyword, fields) {
                Opposite::None => Complement::default(),
                Opposite::Unknown => Complement::unknown(),
                Opposite::Is(mut option) => {
                    option["type"] = json!(kinds);
                    Complement { options: vec![option], is_partial: false }
                }
            }),
        }
    }

    /// Objects that have a key with a value that is not valid under a schema.
    fn not_property(&mut self, name: &str, schema: &Value, base: &Base, depth: usize) -> Result<Complement> {
        let own = match base.properties.get(name) {
            Some(own) => self.base_of(own)?,
            // There is no such key.
            None if base.is_closed => return Ok(Complement::default()),
            None => Base { is_free: true, ..Base::any() },
        };
        let mut not = self.complement(schema, &own, depth + 1)?;
        let value = match not.options.as_slice() {
            [] => return Ok(not),
            [one] => one.clone(),
            several => json!({"anyOf": several}),
        };
        not.options = vec![base.object(json!({"properties": {name: value}, "required": [name]}))];
        Ok(not)
    }
}

/// The negation of a keyword about a value itself.
enum Opposite {
    /// None: it always holds, or another keyword covers it.
    None,
    Is(Value),
    /// It cannot be written.
    Unknown,
}

fn opposite(keyword: &str, fields: &Fields) -> Opposite {
    let given = &fields[keyword];
    let is_exclusive = |name: &str| fields.get(name) == Some(&Value::Bool(true));
    let bound = |name: &str| given.is_number().then(|| json!({name: given}));
    let count = given.as_u64();
    let less = |name: &str| count.map(|count| json!({name: count.saturating_sub(1)}));
    let more = |name: &str| count.map(|count| json!({name: count.saturating_add(1)}));
    let opposite = match keyword {
        "minLength" | "minItems" if count == Some(0) => return Opposite::None,
        "minLength" => less("maxLength"),
        "maxLength" => more("minLength"),
        "minItems" => less("maxItems"),
        "maxItems" => more("minItems"),
        // Draft 4 has a truth value next to the bound.
        "exclusiveMinimum" | "exclusiveMaximum" if given.is_boolean() => return Opposite::None,
        "minimum" if is_exclusive("exclusiveMinimum") => bound("maximum"),
        "maximum" if is_exclusive("exclusiveMaximum") => bound("minimum"),
        "minimum" => bound("exclusiveMaximum"),
        "maximum" => bound("exclusiveMinimum"),
        "exclusiveMinimum" => bound("maximum"),
        "exclusiveMaximum" => bound("minimum"),
        EXCEPT => Some(json!({"enum": given})),
        _ => None,
    };
    opposite.map_or(Opposite::Unknown, Opposite::Is)
}

/// Objects that have a key for which `additionalProperties` does not hold.
fn has_others(fields: &Fields, base: &Base) -> Complement {
    let given = &fields["additionalProperties"];
    if *given == true {
        return Complement::default();
    }
    if *given != false || fields.contains_key("patternProperties") {
        return Complement::unknown();
    }
    let known = fields.get("properties").and_then(Value::as_object);
    let others =
        base.properties.keys().filter(|name| known.is_none_or(|known| !known.contains_key(name.as_str())));
    let options = others.map(|name| base.object(json!({"required": [name]})));
    Complement { options: options.collect(), is_partial: !base.is_closed }
}

/// The common types of the schema and the values under test. The other types are added to the result.
fn shared_kinds(fields: &Fields, base: &Base, found: &mut Complement) -> Vec<String> {
    let Some(allowed) = fields.get("type").map(names) else { return base.kinds.clone() };
    let (mut shared, mut others) = (Vec::new(), Vec::new());
    for kind in &base.kinds {
        let has = |name: &str| allowed.contains(&name);
        if has(kind) || kind == "integer" && has("number") {
            shared.push(kind.clone());
        } else if kind == "number" && has("integer") {
            // Numbers that are not whole cannot be written.
            shared.push("integer".to_owned());
            found.is_partial = true;
        } else {
            others.push(kind.clone());
        }
    }
    if !others.is_empty() {
        found.options.push(json!({"type": others}));
    }
    shared
}

/// All values of these types but the listed ones.
fn except(values: &[&Value], kinds: &[String], found: &mut Complement) {
    for kind in kinds {
        let is_of_kind = |value: &&&Value| match type_of(value) {
            "integer" => kind == "integer" || kind == "number",
            of => of == kind,
        };
        let refused: Vec<&Value> = values.iter().filter(is_of_kind).copied().collect();
        match kind.as_str() {
            _ if refused.is_empty() => found.options.push(json!({"type": kind})),
            "null" => {}
            "boolean" => {
                let left: Vec<Value> = [json!(true), json!(false)]
                    .into_iter()
                    .filter(|value| !refused.contains(&value))
                    .collect();
                if !left.is_empty() {
                    found.options.push(json!({"enum": left}));
                }
            }
            "string" => found.options.push(json!({"type": "string", EXCEPT: refused})),
            "integer" | "number" => between(kind, &refused, found),
            _ => found.is_partial = true,
        }
    }
}

/// Numbers between these.
fn between(kind: &str, refused: &[&Value], found: &mut Complement) {
    let mut numbers: Vec<&Value> = refused.to_vec();
    numbers.sort_by(|a, b| a.as_number().zip(b.as_number()).map_or(Ordering::Equal, |(a, b)| compare(a, b)));
    let ends: Vec<Option<&Value>> =
        std::iter::once(None).chain(numbers.into_iter().map(Some)).chain([None]).collect();
    for pair in ends.windows(2) {
        let mut option = json!({"type": kind});
        for (end, name) in [(pair[0], "exclusiveMinimum"), (pair[1], "exclusiveMaximum")] {
            if let Some(end) = end {
                option[name] = end.clone();
            }
        }
        found.options.push(option);
    }
}
