//! Where in a caller's schema an error is.
//!
//! Rules are written for schemas that were combined and rewritten. So the way to the current one is kept as steps, which
//! are looked up in the caller's schema when there is an error. The path is written as those in bodies of requests are:
//! `properties.a.items.anyOf[1].minimum`.

use std::collections::HashSet;

use serde_json::Value;

use super::keywords::percent_decoded;
use crate::{Error, shortened};

/// Most schemas that are looked at for one step.
const MAX_NODES: usize = 2_000;
/// Keywords whose schemas, lists of schemas or named schemas are about the same value.
const ABOUT_THE_SAME: [&str; 9] =
    ["allOf", "anyOf", "oneOf", "then", "else", "dependentSchemas", "dependencies", "not", "if"];

/// Where in a caller's schema an error is. It is the source of the error, whose message begins with the path.
#[derive(Debug, Clone, Default)]
pub struct SchemaPlace {
    path: String,
    reason: String,
    steps: Vec<Step>,
    keyword: Option<String>,
    tool: Option<String>,
}

/// From a schema to another one.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Step {
    /// To the value of a keyword.
    Keyword(&'static str),
    /// To one of a keyword's named schemas.
    Named(&'static str, String),
    /// To one of its list.
    Listed(&'static str, usize),
    /// To the target of a reference.
    Reference(String),
}

impl SchemaPlace {
    /// The place of an error about a schema.
    #[must_use]
    pub fn of(error: &Error) -> Option<&Self> {
        std::error::Error::source(error)?.downcast_ref()
    }

    /// The path from the schema itself; empty for that.
    #[must_use]
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The message without the path.
    #[must_use]
    pub fn reason(&self) -> &str {
        &self.reason
    }

    /// The name of the tool whose schema it is, if it is one's.
    #[must_use]
    pub fn tool(&self) -> Option<&str> {
        self.tool.as_deref()
    }

    /// `error` about a keyword of this schema.
    pub(crate) fn at_keyword(error: &Error, whole: &Value, keyword: &str) -> Error {
        let keyword = Some(keyword.to_owned());
        Self { reason: error.message().to_owned(), keyword, ..Self::default() }.into_error(error, whole)
    }

    /// The same error for this whole schema, where it was found for the schema of a property.
    pub(crate) fn in_property(error: &Error, whole: &Value, name: &str) -> Error {
        let mut place = Self::of(error).cloned().unwrap_or_default();
        if place.reason.is_empty() {
            place.reason = error.message().to_owned();
        }
        place.steps.insert(0, Step::Named("properties", name.to_owned()));
        place.into_error(error, whole)
    }

    /// The same error, about the schema of this tool.
    pub(crate) fn of_tool(error: &Error, name: &str) -> Error {
        let mut place = Self::of(error).cloned().unwrap_or_default();
        let reason = if place.reason.is_empty() { error.message() } else { &place.reason };
        place.reason = format!("the tool {name}: {reason}");
        place.tool = Some(name.to_owned());
        place.rebuilt(error)
    }

    /// `error`, found after these steps from the schema `root`.
    pub(super) fn after(error: &Error, root: &Value, steps: &[Step]) -> Error {
        let keyword = Self::of(error).and_then(|place| place.keyword.clone());
        let (reason, steps) = (error.message().to_owned(), steps.to_vec());
        Self { reason, steps, keyword, ..Self::default() }.into_error(error, root)
    }

    /// `error` about the value of this name, or at this position (`[0]`), further out than its path so far.
    pub(in super::super) fn within(error: &Error, name: &str) -> Error {
        let mut place = Self::of(error).cloned().unwrap_or_default();
        if place.reason.is_empty() {
            place.reason = error.message().to_owned();
        }
        let dot = if place.path.is_empty() || place.path.starts_with('[') { "" } else { "." };
        place.path = format!("{}{dot}{}", shortened(name), place.path);
        place.rebuilt(error)
    }

    /// `error` about a schema itself.
    pub(in super::super) fn whole(error: &Error) -> Error {
        Self { reason: error.message().to_owned(), ..Self::default() }.rebuilt(error)
    }

    fn into_error(mut self, error: &Error, root: &Value) -> Error {
        self.path = locate(root, &self.steps, self.keyword.as_deref());
        self.rebuilt(error)
    }

    fn rebuilt(self, error: &Error) -> Error {
        let message = match self.path.as_str() {
            "" => self.reason.clone(),
            path => format!("{path}: {}", self.reason),
        };
        let new = Error::new(error.kind(), message);
        let new = match error.hint() {
            Some(hint) => new.with_hint(hint),
            None => new,
        };
        new.with_source(self)
    }
}

impl std::fmt::Display for SchemaPlace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "at {} of the JSON schema", self.path)
    }
}

impl std::error::Error for SchemaPlace {}

/// The error about a keyword of the current schema.
pub(super) fn about(keyword: &str, error: Error) -> Error {
    error.with_source(SchemaPlace { keyword: Some(keyword.to_owned()), ..SchemaPlace::default() })
}

/// A path with one name more.
fn joined(path: &str, name: &str) -> String {
    let dot = if path.is_empty() { "" } else { "." };
    format!("{path}{dot}{}", shortened(name))
}

/// A schema inside the caller's.
#[derive(Clone)]
struct Node<'s> {
    path: String,
    schema: &'s Value,
}

impl<'s> Node<'s> {
    fn child(&self, name: &str) -> Option<Self> {
        self.schema.get(name).map(|schema| Self { path: joined(&self.path, name), schema })
    }

    fn item(&self, index: usize) -> Option<Self> {
        self.schema.get(index).map(|schema| Self { path: format!("{}[{index}]", self.path), schema })
    }

    /// The target of a reference from the root.
    fn target(root: &'s Value, reference: &str) -> Option<Self> {
        let pointer = reference.strip_prefix('#')?;
        let pointer = match root.pointer(pointer) {
            Some(_) => pointer.to_owned(),
            None => percent_decoded(pointer)?,
        };
        let whole = Self { path: String::new(), schema: root };
        pointer.split('/').skip(1).try_fold(whole, |node, name| match node.schema {
            Value::Array(_) => node.item(name.parse().ok()?),
            _ => node.child(&name.replace("~1", "/").replace("~0", "~")),
        })
    }

    fn after(&self, step: &Step) -> Option<Self> {
        match step {
            Step::Keyword(keyword) => self.child(keyword).filter(|node| !node.schema.is_array()),
            Step::Named(keyword, name) => self.child(keyword)?.child(name),
            Step::Listed(keyword, index) => self.child(keyword)?.item(*index),
            Step::Reference(_) => None,
        }
    }
}

/// The path after these steps, and to the keyword if it is there.
fn locate(root: &Value, steps: &[Step], keyword: Option<&str>) -> String {
    let exact = follow(root, steps, true);
    let find = |nodes: &[Node<'_>]| {
        let keyword = keyword?;
        around(root, nodes).iter().find_map(|node| Some(node.child(keyword)?.path))
    };
    // Alternatives may have been written here, which are not the caller's.
    let found = find(&exact).or_else(|| find(&follow(root, steps, false)));
    found.or_else(|| exact.first().map(|node| node.path.clone())).unwrap_or_default()
}

/// The schemas after these steps. Steps that the caller's schema does not have are left out.
fn follow<'s>(root: &'s Value, steps: &[Step], with_alternatives: bool) -> Vec<Node<'s>> {
    let mut nodes = vec![Node { path: String::new(), schema: root }];
    for step in steps {
        let next: Vec<Node<'_>> = match step {
            Step::Reference(path) => Node::target(root, path).into_iter().collect(),
            Step::Listed("anyOf" | "oneOf", _) if !with_alternatives => continue,
            step => around(root, &nodes).iter().filter_map(|node| node.after(step)).collect(),
        };
        if !next.is_empty() {
            nodes = next;
        }
    }
    nodes
}

/// These schemas, and those that are about the same values, the nearest first.
fn around<'s>(root: &'s Value, nodes: &[Node<'s>]) -> Vec<Node<'s>> {
    let mut found = nodes.to_vec();
    let mut known: HashSet<*const Value> = nodes.iter().map(|node| std::ptr::from_ref(node.schema)).collect();
    let mut index = 0;
    while let Some(node) = found.get(index).cloned() {
        index += 1;
        let mut near: Vec<Node<'s>> = Vec::new();
        near.extend(
            node.schema.get("$ref").and_then(Value::as_str).and_then(|path| Node::target(root, path)),
        );
        for inner in ABOUT_THE_SAME.iter().filter_map(|keyword| node.child(keyword)) {
            match (inner.schema, inner.path.ends_with("dependentSchemas")) {
                (Value::Array(items), _) => near.extend((0..items.len()).filter_map(|at| inner.item(at))),
                (Value::Object(named), true) => {
                    near.extend(named.keys().filter_map(|name| inner.child(name)))
                }
                _ => near.push(inner),
            }
        }
        near.retain(|node| known.insert(std::ptr::from_ref(node.schema)));
        found.extend(near);
        if found.len() > MAX_NODES {
            break;
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::super::GrammarSpec;
    use super::*;

    fn path(schema: &Value) -> String {
        let error = GrammarSpec::lark_json(schema).unwrap_err();
        let place = SchemaPlace::of(&error).unwrap_or_else(|| panic!("{error}"));
        let begins = error.message().strip_prefix(&place.path).unwrap();
        assert!(begins.ends_with(&place.reason), "{error}");
        place.path.clone()
    }

    #[test]
    fn an_error_names_its_place_in_the_schema() {
        let check = |schema: Value, wanted: &str| assert_eq!(path(&schema), wanted, "{schema}");
        let wrong = json!({"type": "integer", "minimum": "1"});
        check(wrong.clone(), "minimum");
        check(json!({"properties": {"a": wrong}}), "properties.a.minimum");
        check(json!({"items": {"properties": {"a b": wrong}}}), "items.properties.a b.minimum");
        check(json!({"prefixItems": [true, wrong]}), "prefixItems[1].minimum");
        check(json!({"additionalProperties": wrong}), "additionalProperties.minimum");
        check(json!({"anyOf": [{"type": "null"}, {"anyOf": [wrong]}]}), "anyOf[1].anyOf[0].minimum");
        check(
            json!({"allOf": [{"properties": {"a": {}}}, {"properties": {"a": wrong}}]}),
            "allOf[1].properties.a.minimum",
        );
        let named = json!({"$defs": {"x/y": wrong}, "properties": {"a": {"$ref": "#/$defs/x~1y"}}});
        check(named, "$defs.x/y.minimum");
        let dependent = json!({"properties": {"a": {}, "b": wrong}, "dependentRequired": {"a": ["b"]}});
        check(dependent, "properties.b.minimum");
        check(json!({"properties": {"a": {"type": "string", "not": {"pattern": "a"}}}}), "properties.a.not");
        check(json!({"properties": {"a": {"uniqueItems": true}}}), "properties.a.uniqueItems");
        check(json!({"properties": {"a": {"type": "text"}}}), "properties.a.type");
        check(json!({"properties": {"a": {"multipleOf": 0}}}), "properties.a.multipleOf");
        check(json!({"properties": {"a": {"pattern": "a("}}}), "properties.a.pattern");
        check(json!({"allOf": [{"items": {"multipleOf": 100_003}}]}), "allOf[0].items.multipleOf");
        check(json!({"properties": {"a": 5}}), "properties.a");
        check(json!({"properties": {"a": {"type": "array", "contains": 5}}}), "properties.a");
        check(json!([]), "");
    }

    #[test]
    fn what_has_no_value_is_named() {
        let none = |schema: Value, wanted: &str| {
            assert_eq!(path(&schema), wanted, "{schema}");
            let error = GrammarSpec::lark_json(&schema).unwrap_err();
            assert!(error.message().contains("no value") && error.hint().is_some(), "{error}");
        };
        let inside = |schema: Value| {
            let object = |name: &str, schema: Value| json!({"properties": {"free": {}, name: schema}, "required": [name]});
            object("a", object("b", schema))
        };
        for schema in [
            json!({"type": "integer", "minimum": 4, "maximum": 3}),
            json!({"type": "string", "pattern": "^a$", "not": {"const": "a"}}),
            json!({"type": "string", "pattern": "^a{3}$", "maxLength": 2}),
            json!({"allOf": [{"pattern": "^a"}, {"pattern": "^b"}]}),
            json!({"allOf": [{"format": "date"}, {"format": "email"}]}),
            json!({"type": "string", "minLength": 2, "maxLength": 1}),
            json!({"enum": ["a"], "type": "null"}),
            json!({"type": "number", "multipleOf": 0.5, "minimum": 0.1, "maximum": 0.4}),
            json!({"type": "array", "items": false, "minItems": 1}),
        ] {
            let items = if schema.get("items").is_some() { ".items" } else { "" };
            none(inside(schema.clone()), &format!("properties.a.properties.b{items}"));
            assert!(GrammarSpec::lark_json(&json!({"properties": {"a": schema}})).is_ok(), "{schema}");
        }
        none(json!({"properties": {"a": false}, "required": ["a"]}), "properties.a");
        let both = inside(json!({"$ref": "#/$defs/x"}));
        let mut named = both;
        named["$defs"] = json!({"x": {"minimum": 4, "maximum": 3}});
        none(named, "$defs.x");
        none(json!({"anyOf": [{"enum": []}, false]}), "");
    }
}
