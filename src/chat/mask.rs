//! Keeps text that spells special tokens apart from the template's own tokens.
//!
//! Before rendering, every such spelling in the messages is replaced by one private-use character that occurs nowhere
//! else; templates can trim, split and compare the text as before. After rendering, the spellings are restored and
//! their positions are known. Text without such spellings is unchanged.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use serde_json::{Map, Value};

use crate::tokenizer::Tokenizer;
use crate::{Error, Result};

/// The private-use characters of plane 15.
const PRIVATE: std::ops::RangeInclusive<char> = '\u{F0000}'..='\u{FFFFD}';

/// The replaced spellings, and their replacements.
#[derive(Debug)]
pub(super) struct Mask<'t> {
    tokenizer: &'t Tokenizer,
    /// Private-use characters that already mean something.
    taken: HashSet<char>,
    spellings: HashMap<char, String>,
    characters: HashMap<String, char>,
}

impl<'t> Mask<'t> {
    /// Characters of `texts` are not used as replacements.
    pub(super) fn new<'s>(tokenizer: &'t Tokenizer, texts: impl IntoIterator<Item = &'s str>) -> Self {
        let mut mask =
            Self { tokenizer, taken: HashSet::new(), spellings: HashMap::new(), characters: HashMap::new() };
        texts.into_iter().for_each(|text| mask.take(text));
        mask
    }

    pub(super) fn is_empty(&self) -> bool {
        self.spellings.is_empty()
    }

    /// Replaces the spellings in all strings of `value`.
    ///
    /// # Errors
    /// If the messages use up all private-use characters.
    pub(super) fn hide(&mut self, value: &mut Value) -> Result<()> {
        match value {
            Value::String(text) => {
                if let Some(hidden) = self.hide_text(text)? {
                    *text = hidden;
                }
            }
            Value::Array(items) => {
                for item in items {
                    self.hide(item)?;
                }
            }
            Value::Object(fields) => {
                let mut hidden = Map::new();
                for (name, mut field) in std::mem::take(fields) {
                    self.hide(&mut field)?;
                    hidden.insert(self.hide_text(&name)?.unwrap_or(name), field);
                }
                *fields = hidden;
            }
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
        Ok(())
    }

    /// The text with the spellings restored, and their positions.
    pub(super) fn restore(&self, rendered: &str) -> (String, Vec<Range<usize>>) {
        let mut text = String::with_capacity(rendered.len());
        let mut protected = Vec::new();
        for c in rendered.chars() {
            match self.spellings.get(&c) {
                Some(spelling) => {
                    let start = text.len();
                    text.push_str(spelling);
                    protected.push(start..text.len());
                }
                None => text.push(c),
            }
        }
        (text, protected)
    }

    fn take(&mut self, text: &str) {
        self.taken.extend(text.chars().filter(|c| PRIVATE.contains(c)));
    }

    fn hide_text(&mut self, text: &str) -> Result<Option<String>> {
        let spans = self.tokenizer.find_special(text);
        // Private-use characters of a message are replaced too, so that they are restored to themselves.
        if spans.is_empty() && !text.chars().any(|c| PRIVATE.contains(&c)) {
            return Ok(None);
        }
        let mut hidden = String::with_capacity(text.len());
        let mut done = 0;
        for span in spans {
            self.hide_private(&text[done..span.start], &mut hidden)?;
            hidden.push(self.character(&text[span.clone()])?);
            done = span.end;
        }
        self.hide_private(&text[done..], &mut hidden)?;
        Ok(Some(hidden))
    }

    fn hide_private(&mut self, text: &str, hidden: &mut String) -> Result<()> {
        for c in text.chars() {
            hidden.push(if PRIVATE.contains(&c) { self.character(c.encode_utf8(&mut [0; 4]))? } else { c });
        }
        Ok(())
    }

    fn character(&mut self, spelling: &str) -> Result<char> {
        if let Some(c) = self.characters.get(spelling) {
            return Ok(*c);
        }
        let free = PRIVATE.skip(self.spellings.len()).find(|c| !self.taken.contains(c));
        let c = free.ok_or_else(|| {
            Error::invalid_request("the messages have too many different private-use characters")
        })?;
        self.taken.insert(c);
        self.spellings.insert(c, spelling.to_owned());
        self.characters.insert(spelling.to_owned(), c);
        Ok(c)
    }
}
