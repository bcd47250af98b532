//! Patterns with look-ahead, which regular expressions of the grammar library do not have.
//!
//! A look-ahead requires that the rest of the text also matches an expression, or that it does not. So such a pattern
//! is an intersection, and a terminal in the Lark language can be one.

use std::borrow::Cow;

use llguidance::regex_to_lark;

use super::super::expressions;
use crate::{Error, Result, quoted};

/// Maximum elements of an expression, since each alternative repeats its continuation.
const MAX_PARTS: usize = 500;
/// Any text.
const REST: &str = "/(?s:.*)/";
/// The start of pydantic's pattern for a `Decimal` with limited digits. Of the two alternatives that follow, only the
/// second one anchors the end of the text.
const LIMITED_DECIMAL: &str = r"^(?!^[-+.]*$)[+-]?0*(?:";

/// Whether the library does not support the pattern directly.
pub(super) fn looks_ahead(pattern: &str) -> bool {
    let looks = |(at, _): (usize, &str)| !pattern[..at].ends_with('\\');
    pattern.match_indices("(?=").any(looks) || pattern.match_indices("(?!").any(looks)
}

/// A terminal's expression for the texts in which the pattern is found.
///
/// # Errors
/// If a look-ahead cannot be enforced at its position, for example in a repetition.
pub(super) fn expression(pattern: &str) -> Result<String> {
    let pattern = &*with_end(pattern);
    let mut parser = Parser { rest: pattern, pattern };
    let alternatives = parser.alternatives()?;
    if !parser.rest.is_empty() {
        return Err(unsupported(pattern));
    }
    let mut writer = Writer { pattern, num_left: MAX_PARTS };
    let branches = alternatives.iter().map(|branch| {
        let is_anchored = matches!(branch.first(), Some(Item::Start));
        let before = if is_anchored { "" } else { REST };
        Ok(format!("{before} {}", writer.sequence(&[branch], is_anchored)?))
    });
    Ok(format!("({})", branches.collect::<Result<Vec<_>>>()?.join(" | ")))
}

/// Whether the library can read a pattern without look-ahead.
///
/// # Errors
/// If it cannot be written, with the reason.
pub(super) fn check(pattern: &str) -> Result<()> {
    check_part(pattern, pattern)
}

/// Whether the pattern is found in a text. None if that is not known.
pub(super) fn is_found(pattern: &str, text: &str) -> Option<bool> {
    if looks_ahead(pattern) {
        return None;
    }
    expressions::is_found(&in_library(pattern), text)
}

/// A pattern without look-ahead as the library reads it.
pub(super) fn in_library(pattern: &str) -> String {
    regex_to_lark(pattern, "dw")
}

fn check_part(part: &str, pattern: &str) -> Result<()> {
    expressions::check("the pattern", pattern, &regex_to_lark(part, "dw"), true)
}

/// Pydantic means a number, and not a text that begins with one or with none of its digits.
fn with_end(pattern: &str) -> Cow<'_, str> {
    match pattern.starts_with(LIMITED_DECIMAL) && pattern.ends_with("$)") {
        true => Cow::Owned(format!("{pattern}$")),
        false => Cow::Borrowed(pattern),
    }
}

fn unsupported(pattern: &str) -> Error {
    Error::invalid_request(format!(
        "the pattern {} has a look-ahead that cannot be enforced there",
        quoted(pattern)
    ))
    .with_hint("use look-ahead at the beginning only")
}

/// One alternative.
type Branch = Vec<Item>;

/// An element of a pattern.
enum Item {
    /// `^`
    Start,
    /// `$`
    End,
    /// An expression without look-ahead.
    Text(String),
    /// A group that is not repeated and has look-ahead in it. An optional one has an empty branch.
    Group(Vec<Branch>),
    Ahead {
        is_wanted: bool,
        branches: Vec<Branch>,
    },
}

struct Parser<'p> {
    rest: &'p str,
    pattern: &'p str,
}

impl<'p> Parser<'p> {
    /// Up to the end or the bracket that closes the group.
    fn alternatives(&mut self) -> Result<Vec<Branch>> {
        let mut branches = vec![Vec::new()];
        while let Some(c) = self.rest.chars().next() {
            let item = match c {
                ')' => break,
                '|' => {
                    self.rest = &self.rest[1..];
                    branches.push(Vec::new());
                    continue;
                }
                '^' => self.single(Item::Start),
                '$' => self.single(Item::End),
                '(' => self.group()?,
                _ => {
                    let length = segment(self.rest).ok_or_else(|| unsupported(self.pattern))?;
                    Item::Text(self.take(length + repetition(&self.rest[length..])))
                }
            };
            match (branches.last_mut(), item) {
                (Some(branch), Item::Text(more)) if matches!(branch.last(), Some(Item::Text(_))) => {
                    if let Some(Item::Text(text)) = branch.last_mut() {
                        text.push_str(&more);
                    }
                }
                (Some(branch), item) => branch.push(item),
                (None, _) => {}
            }
        }
        Ok(branches)
    }

    fn single(&mut self, item: Item) -> Item {
        self.rest = &self.rest[1..];
        item
    }

    fn take(&mut self, length: usize) -> String {
        let (taken, rest) = self.rest.split_at(length);
        self.rest = rest;
        taken.to_owned()
    }

    fn group(&mut self) -> Result<Item> {
        let before = self.rest;
        let is_wanted = match before.get(..3) {
            Some("(?=") => Some(true),
            Some("(?!") => Some(false),
            _ => None,
        };
        let head = match before.get(..3) {
            Some("(?=" | "(?!" | "(?:") => 3,
            // A name, or look-behind, which the library refuses.
            Some("(?P" | "(?<") => 0,
            // Flags, which would also apply to the continuation.
            Some(text) if text.starts_with("(?") => return Err(unsupported(self.pattern)),
            _ => 1,
        };
        self.rest = &before[head.max(1)..];
        let mut branches = self.alternatives()?;
        self.rest = self.rest.strip_prefix(')').ok_or_else(|| unsupported(self.pattern))?;
        let repeated = repetition(self.rest);
        match is_wanted {
            Some(is_wanted) if repeated == 0 => return Ok(Item::Ahead { is_wanted, branches }),
            Some(_) => return Err(unsupported(self.pattern)),
            None => {}
        }
        if !branches.iter().flatten().any(Item::looks_ahead) {
            let length = before.len() - self.rest.len() + repeated;
            self.rest = before;
            return Ok(Item::Text(self.take(length)));
        }
        match self.take(repeated).trim_end_matches('?') {
            "" if head > 0 => {
                // It is optional.
                if repeated > 0 {
                    branches.push(Vec::new());
                }
                Ok(Item::Group(branches))
            }
            _ => Err(unsupported(self.pattern)),
        }
    }
}

impl Item {
    fn looks_ahead(&self) -> bool {
        match self {
            Self::Ahead { .. } => true,
            Self::Group(branches) => branches.iter().flatten().any(Self::looks_ahead),
            Self::Start | Self::End | Self::Text(_) => false,
        }
    }
}

/// The bytes of a character, an escape or a class.
fn segment(text: &str) -> Option<usize> {
    let mut chars = text.char_indices();
    match chars.next()?.1 {
        '\\' => chars.next().map(|(at, c)| at + c.len_utf8()),
        '[' => {
            let mut is_escaped = false;
            let mut is_first = true;
            for (at, c) in chars {
                match c {
                    _ if is_escaped => is_escaped = false,
                    '\\' => is_escaped = true,
                    '^' if is_first => continue,
                    ']' if !is_first => return Some(at + 1),
                    _ => {}
                }
                is_first = false;
            }
            None
        }
        c => Some(c.len_utf8()),
    }
}

/// The bytes of the quantifier of the element before it.
fn repetition(text: &str) -> usize {
    let length = match text.chars().next() {
        Some('*' | '+' | '?') => 1,
        Some('{') => text.find('}').map_or(0, |end| end + 1),
        _ => return 0,
    };
    length + usize::from(text[length..].starts_with('?'))
}

struct Writer<'p> {
    pattern: &'p str,
    num_left: usize,
}

impl Writer<'_> {
    /// The expression for the elements in sequence, and then the end of the text or any text. `is_start`: the text
    /// begins here.
    fn sequence(&mut self, parts: &[&[Item]], is_start: bool) -> Result<String> {
        self.num_left = self.num_left.checked_sub(1).ok_or_else(|| unsupported(self.pattern))?;
        let Some((part, after)) = parts.split_first() else { return Ok(REST.to_owned()) };
        let Some((item, rest)) = part.split_first() else { return self.sequence(after, is_start) };
        let mut following = vec![rest];
        following.extend_from_slice(after);
        match item {
            Item::Start if is_start => self.sequence(&following, true),
            Item::End if following.iter().copied().flatten().all(|item| matches!(item, Item::End)) => {
                Ok("\"\"".to_owned())
            }
            Item::Start | Item::End => Err(unsupported(self.pattern)),
            Item::Text(text) => {
                check_part(text, self.pattern)?;
                let rest = self.sequence(&following, false)?;
                Ok(format!("/{}/ {rest}", regex_to_lark(text, "dw")))
            }
            Item::Group(branches) => {
                let branches = branches.iter().map(|branch| {
                    let parts: Vec<&[Item]> =
                        std::iter::once(branch.as_slice()).chain(following.iter().copied()).collect();
                    self.sequence(&parts, is_start)
                });
                Ok(format!("({})", branches.collect::<Result<Vec<_>>>()?.join(" | ")))
            }
            Item::Ahead { is_wanted, branches } => {
                let ahead = branches.iter().map(|branch| self.sequence(&[branch], is_start));
                let ahead = ahead.collect::<Result<Vec<_>>>()?.join(" | ");
                let rest = self.sequence(&following, is_start)?;
                let sign = if *is_wanted { "" } else { "~" };
                Ok(format!("({sign}({ahead}) & {rest})"))
            }
        }
    }
}
