//! Alternatives of which a value may be valid under one only.

use serde_json::{Map, Value, json};

use super::keywords::{TYPES, listed, type_of};
use super::merge::names;
use super::numbers::same;
use super::rules::Rules;
use crate::Result;

type Fields = Map<String, Value>;

/// Most alternatives of which some may hold at once.
const MAX_BRANCHES: usize = 24;
/// Most schemas that are written for one of them.
const MAX_OPTIONS: usize = 64;

impl Rules<'_> {
    /// Alternatives together with these fields, for the same values as `oneOf` these branches, but for those that are valid
    /// under two of them. None if they cannot be distinguished.
    pub(super) fn disjoint(&mut self, branches: &[Value], fields: &Fields) -> Result<Option<Vec<Value>>> {
        let flat = branches.iter().map(|branch| self.flat(branch)).collect::<Result<Vec<_>>>()?;
        let mut overlapping: Vec<Vec<usize>> = vec![Vec::new(); branches.len()];
        for (index, one) in flat.iter().enumerate() {
            for (at, other) in flat.iter().enumerate().skip(index + 1) {
                self.count_merge()?;
                let is_disjoint =
                    one.as_ref().zip(other.as_ref()).is_some_and(|(a, b)| self.are_disjoint(a, b, 0));
                if !is_disjoint {
                    overlapping[index].push(at);
                    overlapping[at].push(index);
                }
            }
        }
        if branches.len() > MAX_BRANCHES && overlapping.iter().any(|others| !others.is_empty()) {
            return Ok(None);
        }
        let mut all = Vec::new();
        for (branch, others) in branches.iter().zip(&overlapping) {
            let whole = match fields.is_empty() {
                true => branch.clone(),
                false => json!({"allOf": [fields, branch]}),
            };
            let others: Vec<&Value> = others.iter().map(|at| &branches[*at]).collect();
            match self.without_others(whole, &others)? {
                Some(options) => all.extend(options),
                None => return Ok(None),
            }
        }
        // A schema that only allows values that are valid under two of them is most likely a mistake.
        let is_lost = all.is_empty() && !branches.is_empty();
        Ok(Some(all).filter(|_| !is_lost))
    }

    /// The values of a schema that are not valid under the others. None if they cannot be written as a schema.
    fn without_others(&mut self, whole: Value, others: &[&Value]) -> Result<Option<Vec<Value>>> {
        if others.is_empty() {
            return Ok(Some(vec![whole]));
        }
        let base = self.base_of(&whole)?;
        let mut options = vec![whole];
        for other in others {
            let rest = self.complement(other, &base, 0)?;
            // For objects, distinguishing properties suffice.
            if !rest.is_whole() && (rest.options.is_empty() || !base.is_object()) {
                return Ok(None);
            }
            let mut kept = Vec::new();
            for option in &options {
                for more in &rest.options {
                    let both = json!({"allOf": [option, more]});
                    if self.value(&both)?.is_some() {
                        kept.push(both);
                    }
                }
            }
            if kept.len() > MAX_OPTIONS {
                return Ok(None);
            }
            options = kept;
        }
        Ok(Some(options))
    }

    /// Whether certainly no value is valid under both, by a simple check.
    fn are_disjoint(&self, one: &Value, other: &Value, depth: usize) -> bool {
        const MAX_DEPTH: usize = 8;
        let resolved = |schema: &Value| -> Option<Fields> {
            let mut schema = schema.as_object()?.clone();
            for _ in 0..MAX_DEPTH {
                let Some(path) = schema.get("$ref").and_then(Value::as_str) else { break };
                schema = self.resolve(path).ok()?.as_object()?.clone();
            }
            Some(schema)
        };
        let (Some(one), Some(other)) = (resolved(one), resolved(other)) else {
            return one == &Value::Bool(false) || other == &Value::Bool(false);
        };
        if let (Some(a), Some(b)) = (listed(&one), listed(&other)) {
            return !a.iter().any(|value| b.iter().any(|other| same(other, value)));
        }
        let types = |fields: &Fields| -> Vec<String> {
            match (fields.get("type"), listed(fields)) {
                (Some(kinds), _) => names(kinds).into_iter().map(str::to_owned).collect(),
                (None, Some(values)) => values.iter().map(|value| type_of(value).to_owned()).collect(),
                (None, None) => TYPES.iter().map(|(kind, _)| (*kind).to_owned()).collect(),
            }
        };
        let (a, b) = (types(&one), types(&other));
        // A listed number that is not whole is no integer.
        let [is_listed, is_other_listed] = [&one, &other].map(|fields| listed(fields).is_some());
        let meets = |kind: &String| {
            b.iter().any(|found| match (kind.as_str(), found.as_str()) {
                ("number", "integer") => !is_listed,
                ("integer", "number") => !is_other_listed,
                (kind, found) => kind == found,
            })
        };
        let shared: Vec<&String> = a.iter().filter(|kind| meets(kind)).collect();
        if shared.is_empty() {
            return true;
        }
        let (Some(a), Some(b)) = (one.get("properties"), other.get("properties")) else { return false };
        let is_required = |fields: &Fields, name: &str| {
            let required = fields.get("required").and_then(Value::as_array);
            required.is_some_and(|names| names.iter().any(|found| found == name))
        };
        shared.iter().all(|kind| *kind == "object")
            && depth < MAX_DEPTH
            && a.as_object().into_iter().flatten().any(|(name, schema)| {
                let both = is_required(&one, name) && is_required(&other, name);
                both && b.get(name).is_some_and(|found| self.are_disjoint(schema, found, depth + 1))
            })
    }
}
