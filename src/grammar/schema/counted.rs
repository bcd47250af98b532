//! Lists that must contain something, so and so often.
//!
//! A list is a walk over pairs: the number of items, and the number of matches. Each pair is a rule for the rest of the
//! list.

use serde_json::{Value, json};

use super::place::about;
use super::rules::Rules;
use crate::{Error, Result};

/// Most pairs.
const MAX_PAIRS: usize = 2_000;

/// The constraints on a list's items.
pub(super) struct Counted<'s> {
    /// Those of the first positions.
    pub(super) first: &'s [Value],
    /// The others.
    pub(super) item: Option<&'s Value>,
    /// The schema that it must contain.
    pub(super) wanted: &'s Value,
    /// The fewest and the most items.
    pub(super) min: usize,
    pub(super) max: usize,
    /// The minimum of matches, and the maximum if there is one.
    pub(super) least: usize,
    pub(super) most: Option<usize>,
}

impl Counted<'_> {
    /// The last position and the last number of matches that are distinguished: after them all are alike.
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
            let error = Error::invalid_request(format!(
                "contains in the JSON schema can be enforced for {MAX_PAIRS} pairs of a position and a number of \
                 matches; a list of {last} items with {most} matches has more"
            ));
            let hint = "lower maxItems, minItems, minContains or maxContains";
            return Err(about("contains", error.with_hint(hint)));
        }
        // From the end: the rule after this many items. None if the list cannot end from there.
        let mut after: Vec<Option<String>> = vec![None; most + 1];
        for index in (0..=last).rev() {
            let mut here: Vec<Option<String>> = vec![None; most + 1];
            for found in (0..=most).rev() {
                let next = if index < last { &after } else { &here };
                here[found] = self.after(list, index, found, next)?;
            }
            after = here;
        }
        match &after[0] {
            Some(items) => self.rule("array", &format!("\"[\" {items} \"]\"")).map(Some),
            None => Ok(None),
        }
    }

    /// The rule after `index` items with `found` matches, given the rules after one item more.
    fn after(
        &mut self,
        list: &Counted<'_>,
        index: usize,
        found: usize,
        next: &[Option<String>],
    ) -> Result<Option<String>> {
        let (last, most) = list.ends();
        let may_end = index >= list.min && found >= list.least;
        let mut options = Vec::new();
        let mut again = Vec::new();
        if index < list.max {
            let (wanted, other) = self.items_at(list, index, found)?;
            let comma = if index > 0 { "\",\" " } else { "" };
            for (item, count) in [(wanted, (found + 1).min(most)), (other, found)] {
                let Some(item) = item else { continue };
                match &next[count] {
                    // In the last position, it repeats itself.
                    _ if index == last && count == found => again.push(format!("{comma}{item}")),
                    Some(after) => options.push(format!("{comma}{item} {after}")),
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

    /// The items at a position with this many matches: a match, or another item. Matches beyond the counted ones are
    /// other items.
    fn items_at(
        &mut self,
        list: &Counted<'_>,
        index: usize,
        found: usize,
    ) -> Result<(Option<String>, Option<String>)> {
        let any = Value::Bool(true);
        let item = list.first.get(index).or(list.item).unwrap_or(&any);
        let depth = self.path.len();
        let is_counted = found < list.most.unwrap_or(list.least);
        let wanted = match is_counted {
            true => self.value(&json!({"allOf": [item, list.wanted]}))?,
            false => None,
        };
        let other = match list.most {
            None => self.value(item)?,
            Some(_) => self.value(&json!({"allOf": [item, {"not": list.wanted}]})).map_err(|_| {
                self.path.truncate(depth);
                let error = Error::invalid_request(
                    "maxContains in the JSON schema cannot be enforced, because it is not known how to write items \
                     that contains does not allow",
                );
                let hint = "leave maxContains out, or let contains be a type, an enum, a const or a bound";
                about("maxContains", error.with_hint(hint))
            })?,
        };
        Ok((wanted, other))
    }
}
