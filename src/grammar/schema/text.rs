//! A schema's constraints on strings: lengths, patterns and formats, which are patterns too.

use serde_json::{Map, Value};

use super::super::expressions;
use super::keywords::{count, wrong};
use super::merge::{EXCEPT, PATTERNS};
use super::pattern;
use crate::Result;

macro_rules! date {
    () => {
        concat!(
            "((000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})-",
            "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))",
            "|([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)-02-29)"
        )
    };
}

macro_rules! time {
    () => {
        concat!(
            r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?",
            "(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
        )
    };
}

macro_rules! label {
    () => {
        "[A-Za-z0-9]([A-Za-z0-9-]{0,30}[A-Za-z0-9])?"
    };
}

macro_rules! byte {
    () => {
        "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
    };
}

macro_rules! uri_part {
    ($more:literal) => {
        concat!("([A-Za-z0-9._~!$&'()*+,;=:@", $more, "-]|%[0-9A-Fa-f]{2})*")
    };
}

macro_rules! uuid {
    ($version:literal) => {
        concat!(
            "^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-",
            $version,
            "[0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12}$"
        )
    };
}

/// Enforced formats: the subset that every program accepts, such as existing dates and times without leap seconds. Any
/// other format is an annotation.
const FORMATS: [(&str, &str); 17] = [
    ("date", concat!("^", date!(), "$")),
    ("date-time", concat!("^", date!(), "T", time!(), "$")),
    (
        "duration",
        "^P([0-9]{1,4}W|([0-9]{1,4}Y)?([0-9]{1,4}M)?[0-9]{1,4}D(T[0-9]{1,4}[HMS])?|[0-9]{1,4}[YM]|T([0-9]{1,4}H)?([0-9]{1,4}M)?[0-9]{1,4}S|T([0-9]{1,4}H)?[0-9]{1,4}M|T[0-9]{1,4}H)$",
    ),
    (
        "email",
        concat!(
            r"^[A-Za-z0-9_+-]{1,32}(\.[A-Za-z0-9_+-]{1,10}){0,2}@(",
            label!(),
            r"\.){1,3}[A-Za-z]{2,10}$"
        ),
    ),
    ("hostname", concat!("^", label!(), r"(\.", label!(), "){0,4}$")),
    ("ipv4", concat!("^(", byte!(), r"\.){3}", byte!(), "$")),
    (
        "ipv6",
        "^(([0-9a-fA-F]{1,4}:){7}[0-9a-fA-F]{1,4}|([0-9a-fA-F]{1,4}:){1,7}:|([0-9a-fA-F]{1,4}:){1,6}:[0-9a-fA-F]{1,4}|([0-9a-fA-F]{1,4}:){1,4}(:[0-9a-fA-F]{1,4}){1,3}|[0-9a-fA-F]{1,4}:(:[0-9a-fA-F]{1,4}){1,6}|:(:[0-9a-fA-F]{1,4}){1,7}|::)$",
    ),
    ("time", concat!("^", time!(), "$")),
    (
        "uri",
        concat!(
            "^[A-Za-z][A-Za-z0-9+.-]{0,15}:(//",
            label!(),
            r"(\.",
            label!(),
            "){0,4}(:[0-9]{1,4})?(/",
            uri_part!("/"),
            ")?",
            "|[A-Za-z0-9]",
            uri_part!("/"),
            r")(\?",
            uri_part!("/?"),
            ")?(#",
            uri_part!("/?"),
            ")?$"
        ),
    ),
    ("uuid", "^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}$"),
    // Pydantic's names.
    ("uuid1", uuid!("1")),
    ("uuid3", uuid!("3")),
    ("uuid4", uuid!("4")),
    ("uuid5", uuid!("5")),
    ("uuid6", uuid!("6")),
    ("uuid7", uuid!("7")),
    ("uuid8", uuid!("8")),
];

/// The expression of a format that is enforced.
fn pattern_of(format: &str) -> Option<&'static str> {
    FORMATS.iter().find(|(name, _)| *name == format).map(|(_, pattern)| *pattern)
}

/// Writes an enforced format as a pattern, and removes others.
pub(super) fn format_as_pattern(fields: &mut Map<String, Value>) {
    let Some(format) = fields.remove("format") else { return };
    if let Some(pattern) = format.as_str().and_then(pattern_of) {
        let patterns = fields.entry(PATTERNS).or_insert_with(|| Value::Array(Vec::new()));
        patterns.as_array_mut().into_iter().for_each(|patterns| patterns.push(pattern.into()));
    }
}

/// The constraints on a string.
#[derive(Debug)]
pub(super) struct Text<'s> {
    pub(super) min: u64,
    pub(super) max: Option<u64>,
    /// All of them are found in it.
    pub(super) patterns: Vec<&'s str>,
    /// It is none of these.
    pub(super) except: Vec<&'s str>,
}

impl<'s> Text<'s> {
    /// None if no string is valid.
    pub(super) fn of(fields: &'s Map<String, Value>) -> Result<Option<Self>> {
        let length = |name: &str| match fields.get(name) {
            None => Ok(None),
            Some(value) => count(name, value).map(Some),
        };
        let (min, max) = (length("minLength")?.unwrap_or(0), length("maxLength")?);
        if max.is_some_and(|max| max < min) {
            return Ok(None);
        }
        let mut patterns: Vec<&str> = Vec::new();
        match fields.get("pattern") {
            None => {}
            Some(Value::String(pattern)) => patterns.push(pattern),
            Some(_) => return Err(wrong("pattern", "a string")),
        }
        let more = fields.get(PATTERNS).and_then(Value::as_array);
        patterns.extend(more.into_iter().flatten().filter_map(Value::as_str));
        let format = match fields.get("format") {
            None => None,
            Some(Value::String(format)) => Some(format.as_str()),
            Some(_) => return Err(wrong("format", "a string")),
        };
        patterns.extend(format.and_then(pattern_of));
        let except = fields.get(EXCEPT).and_then(Value::as_array).into_iter().flatten();
        Ok(Some(Self { min, max, patterns, except: except.filter_map(Value::as_str).collect() }))
    }

    /// Whether any string will do.
    pub(super) fn is_free(&self) -> bool {
        self.min == 0 && self.max.is_none() && self.patterns.is_empty() && self.except.is_empty()
    }

    /// Whether there is certainly no such text, because its constraints contradict each other.
    pub(super) fn has_none(&self) -> bool {
        let is_only_format = |pattern: &&str| FORMATS.iter().any(|(_, known)| known == pattern);
        let lone = self.min == 0 && self.max.is_none() && self.except.is_empty() && self.patterns.len() <= 1;
        if self.patterns.is_empty() || lone && self.patterns.iter().all(is_only_format) {
            return false;
        }
        let patterns = self.patterns.iter().filter(|pattern| !pattern::looks_ahead(pattern));
        let lengths = format!("(?s:.){}", self.repetition());
        let patterns: Vec<String> = patterns.map(|pattern| pattern::in_library(pattern)).collect();
        expressions::excludes_all(&lengths, &patterns, &self.except)
    }

    /// Whether this is such a text. None if that is not known.
    pub(super) fn allows(&self, text: &str) -> Option<bool> {
        let num_chars = text.chars().count() as u64;
        if num_chars < self.min || self.max.is_some_and(|max| num_chars > max) || self.except.contains(&text)
        {
            return Some(false);
        }
        let mut allows = true;
        for pattern in &self.patterns {
            allows &= pattern::is_found(pattern, text)?;
        }
        Some(allows)
    }

    /// The lengths that it may have, as a repetition.
    pub(super) fn repetition(&self) -> String {
        match self.max {
            Some(max) => format!("{{{},{max}}}", self.min),
            None => format!("{{{},}}", self.min),
        }
    }

    /// A terminal's expression for it, of characters of this class and between two quotes or the like. It must have
    /// none that is written in another way.
    pub(super) fn expression(&self, class: &str, quote: &str) -> Result<String> {
        let mut parts = vec![format!("/{quote}{class}{}{quote}/", self.repetition())];
        for pattern in &self.patterns {
            let expression = pattern::expression(pattern)?;
            parts.push(match quote {
                "" => expression,
                quote => format!("/{quote}/ {expression} /{quote}/"),
            });
        }
        Ok(parts.join(" & "))
    }
}
