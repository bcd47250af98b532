//! Lists that must contain something, so and so often.
//!
//! A list is a walk over pairs: how many items there are, and how many of them are what is wanted. Each pair is a rule
//! for what may follow.

use serde_json::{Value, json};

use super::rules::Rules;
use crate::{Error, Result};

/// Most pairs.
const MAX_PAIRS: usize = 2_000;

/// What a list says of its items.
pub(super) struct Counted<'s> {
    /// Those of the first places.
    pub(super) first: &'s [Value],
    /// The others.
    pub(super) item: Option<&'s Value>,
    /// What it must contain.
    pub(super) wanted: &'s Value,
    /// The fewest and the most items.
    pub(super) min: usize,
    pub(super) max: usize,
    /// The fewest of them that are wanted, and the most if there is a limit.
    pub(super) least: usize,
    pub(super) most: Option<usize>,
}

impl Counted<'_> {
    /// The last place and the last number of wanted items that are told apart: behind them all are alike.
    fn ends(&self) -> (usize, usize) {
        let last = if self.max < usize::MAX { self.max } else { self.first.len().max(self.min).max(1) };
        (last, self.most.unwrap_or(self.least))
    }
}

impl Rules<'_> {
    /// The list; none if there is no such list.
    pub(super) fn counted(&mut self, list: &Counted<'_>) -> Result<Option<String>> {
        if list.most.is_some_and(|most| most < list.least) || list.least > list.max || list.min > list.max {
            return Ok(None);
        }
        let (last, most) = list.ends();
        if last.saturating_add(1).saturating_mul(most.saturating_add(1)) > MAX_PAIRS {
            return Err(Error::invalid_request(format!(
                "contains in the JSON schema can be enforced for {MAX_PAIRS} pairs of a place and of how often something \
                 is contained; a list of {last} items with {most} of them has more"
            ))
            .with_hint("lower maxItems, minItems, minContains or maxContains"));
        }
        // From the end: what may follow after so many items. None if the list cannot end from there.
        let mut after: Vec<Option<String>> = vec![None; most + 1];
        for place in (0..=last).rev() {
            let mut here: Vec<Option<String>> = vec![None; most + 1];
            for found in (0..=most).rev() {
                let next = if place < last { &after } else { &here };
                here[found] = self.behind(list, place, found, next)?;
            }
            after = here;
        }
        match &after[0] {
            Some(items) => self.rule("array", &format!("\"[\" {items} \"]\"")).map(Some),
            None => Ok(None),
        }
    }

    /// What may follow `place` items of which `found` are wanted, if this may follow one item more.
    fn behind(
        &mut self,
        list: &Counted<'_>,
        place: usize,
        found: usize,
        next: &[Option<String>],
    ) -> Result<Option<String>> {
        let (last, most) = list.ends();
        let may_end = place >= list.min && found >= list.least;
        let mut options = Vec::new();
        let mut again = Vec::new();
        if place < list.max {
            let (wanted, other) = self.items_at(list, place, found)?;
            let comma = if place > 0 { "\",\" " } else { "" };
            for (item, count) in [(wanted, (found + 1).min(most)), (other, found)] {
                let Some(item) = item else { continue };
                match &next[count] {
                    // In the last place, it goes on with itself.
                    _ if place == last && count == found => again.push(format!("{comma}{item}")),
                    Some(behind) => options.push(format!("{comma}{item} {behind}")),
                    None => {}
                }
            }
        }
        if options.is_empty() && !may_end {
            return Ok(None);
        }
        let mark = if may_end { "?" } else { "" };
        let mut body = match options.is_empty() {
            true => String::new(),
            false => format!("({}){mark}", options.join(" | ")),
        };
        if !again.is_empty() {
            body = format!("({})* {body}", again.join(" | "));
        }
        self.part(body).map(Some)
    }

    /// What may stand in a place where so many are found: what is wanted, and anything else. What is not counted any more
    /// is anything else.
    fn items_at(
        &mut self,
        list: &Counted<'_>,
        place: usize,
        found: usize,
    ) -> Result<(Option<String>, Option<String>)> {
        let any = Value::Bool(true);
        let item = list.first.get(place).or(list.item).unwrap_or(&any);
        let is_counted = found < list.most.unwrap_or(list.least);
        let wanted = match is_counted {
            true => self.value(&json!({"allOf": [item, list.wanted]}))?,
            false => None,
        };
        let other = match list.most {
            None => self.value(item)?,
            Some(_) => self.value(&json!({"allOf": [item, {"not": list.wanted}]})).map_err(|_| {
                Error::invalid_request(
                    "maxContains in the JSON schema cannot be enforced, because it is not known how to write items \
                     that contains does not allow",
                )
                .with_hint("leave maxContains out, or let contains be a type, an enum, a const or a bound")
            })?,
        };
        Ok((wanted, other))
    }
}
