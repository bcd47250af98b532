//! Tokens that are matched as whole strings before the model sees the text: special tokens
//! (`<|im_end|>`) and user-defined ones (`<think>`).
//!
//! Invariant: a *guarded* token, one that can steer a model, is never matched inside a protected span.
//! That is how text that merely spells a special token stays text.

use std::collections::HashMap;
use std::ops::Range;

use crate::{Error, Result};

/// The longest spelling of an added token. Matching costs at most this many steps per byte of text, so
/// the limit keeps a hostile vocabulary from making a long prompt slow. Real ones stay below 100.
const MAX_ADDED_TOKEN_BYTES: usize = 512;

/// One added token and the rules for finding it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct AddedToken {
    pub(super) id: u32,
    pub(super) content: String,
    /// Left out of the text when special tokens are skipped.
    pub(super) control: bool,
    /// Matches only between characters that do not belong to a word.
    pub(super) single_word: bool,
    /// Takes the whitespace before it along.
    pub(super) lstrip: bool,
    /// Takes the whitespace after it along.
    pub(super) rstrip: bool,
    /// Is looked for in the normalised text instead of the raw text.
    pub(super) normalized: bool,
}

impl AddedToken {
    pub(super) fn control(id: u32, content: impl Into<String>) -> Self {
        Self { control: true, ..Self::user_defined(id, content) }
    }

    pub(super) fn user_defined(id: u32, content: impl Into<String>) -> Self {
        Self {
            id,
            content: content.into(),
            control: false,
            single_word: false,
            lstrip: false,
            rstrip: false,
            normalized: false,
        }
    }

    /// Whether plain text must not produce this token: tokens that are marked as special, and those that look it, since
    /// some files leave turn markers such as `<｜User｜>` unmarked.
    fn is_guarded(&self) -> bool {
        let wrapped = |open, close| self.content.starts_with(open) && self.content.ends_with(close);
        self.control || wrapped("<|", "|>") || wrapped("<｜", "｜>")
    }
}

/// A stretch of text, as an added token if `id` is set and as ordinary text if not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Fragment {
    pub(super) range: Range<usize>,
    pub(super) id: Option<u32>,
}

/// All added tokens of a tokenizer.
#[derive(Debug, Default)]
pub(super) struct AddedTokens {
    tokens: Vec<AddedToken>,
    ids: HashMap<String, u32>,
    raw: Trie,
    normalized: Trie,
    /// The guarded tokens of both kinds, as spelled in raw text.
    guarded: Trie,
}

impl AddedTokens {
    /// `normalize` gives the text in which a token with the `normalized` flag is looked for.
    ///
    /// # Errors
    /// If two tokens have the same spelling and different ids, or a spelling is empty or too long.
    pub(super) fn new(
        tokens: Vec<AddedToken>,
        mut normalize: impl FnMut(&str) -> Result<String>,
    ) -> Result<Self> {
        let mut added = Self::default();
        for token in tokens {
            let length = token.content.len();
            if length == 0 || length > MAX_ADDED_TOKEN_BYTES {
                return Err(Error::invalid_model(format!(
                    "added token {} is {length} bytes long, expected 1 to {MAX_ADDED_TOKEN_BYTES}",
                    token.id
                )));
            }
            match added.ids.insert(token.content.clone(), token.id) {
                Some(other) if other == token.id => continue,
                Some(other) => {
                    return Err(Error::invalid_model(format!(
                        "the added token {:?} has two ids, {other} and {}",
                        token.content, token.id
                    )));
                }
                None => {}
            }
            let index = added.tokens.len();
            if token.is_guarded() {
                added.guarded.insert(token.content.as_bytes(), index);
            }
            if token.normalized {
                let pattern = normalize(&token.content)?;
                if pattern.len() > MAX_ADDED_TOKEN_BYTES {
                    return Err(Error::invalid_model(format!(
                        "added token {} is {} bytes long when it is normalised, expected at most {MAX_ADDED_TOKEN_BYTES}",
                        token.id,
                        pattern.len()
                    )));
                }
                added.normalized.insert(pattern.as_bytes(), index);
            } else {
                added.raw.insert(token.content.as_bytes(), index);
            }
            added.tokens.push(token);
        }
        Ok(added)
    }

    /// Makes a token a control token that was none, or not looked for at all.
    pub(super) fn add_control(&mut self, id: u32, text: &str) {
        let index = self.tokens.iter().position(|token| token.id == id).unwrap_or_else(|| {
            self.raw.insert(text.as_bytes(), self.tokens.len());
            self.ids.insert(text.to_owned(), id);
            self.tokens.push(AddedToken::control(id, text));
            self.tokens.len() - 1
        });
        self.tokens[index].control = true;
        self.guarded.insert(text.as_bytes(), index);
    }

    /// The id of the token spelled exactly `text`.
    pub(super) fn id(&self, text: &str) -> Option<u32> {
        self.ids.get(text).copied()
    }

    /// Whether any token has to be looked for in normalised text.
    pub(super) fn has_normalized(&self) -> bool {
        !self.normalized.is_empty()
    }

    /// Splits raw text into tokens and the text between them. `is_protected` returns whether a span overlaps plain
    /// text, which never becomes a guarded token.
    pub(super) fn split_raw(&self, text: &str, is_protected: impl Fn(Range<usize>) -> bool) -> Vec<Fragment> {
        self.split(&self.raw, text, is_protected)
    }

    /// The same for text that has been through the normaliser.
    pub(super) fn split_normalized(
        &self,
        text: &str,
        is_protected: impl Fn(Range<usize>) -> bool,
    ) -> Vec<Fragment> {
        self.split(&self.normalized, text, is_protected)
    }

    /// The guarded tokens spelled in `text`, leftmost and longest first.
    pub(super) fn find_guarded(&self, text: &str) -> Vec<Range<usize>> {
        let mut found = Vec::new();
        let mut at = 0;
        while at < text.len() {
            match self.guarded.longest(&text.as_bytes()[at..], |_, _| true) {
                Some((_, length)) => {
                    found.push(at..at + length);
                    at += length;
                }
                None => at += 1,
            }
        }
        found
    }

    fn split(&self, trie: &Trie, text: &str, is_protected: impl Fn(Range<usize>) -> bool) -> Vec<Fragment> {
        let mut fragments = Vec::new();
        let mut done = 0;
        let mut at = 0;
        while at < text.len() {
            let found = trie.longest(&text.as_bytes()[at..], |index, length| {
                let token = &self.tokens[index];
                let span = at..at + length;
                (!token.single_word || stands_alone(text, span.clone()))
                    && !(token.is_guarded() && is_protected(span))
            });
            let Some((index, length)) = found else {
                at += 1;
                continue;
            };
            let token = &self.tokens[index];
            let mut start = at;
            let mut end = at + length;
            if token.lstrip {
                start = done + text[done..start].trim_end().len();
            }
            if token.rstrip {
                end = text.len() - text[end..].trim_start().len();
            }
            if done < start {
                fragments.push(Fragment { range: done..start, id: None });
            }
            fragments.push(Fragment { range: start..end, id: Some(token.id) });
            done = end;
            at = end;
        }
        if done < text.len() {
            fragments.push(Fragment { range: done..text.len(), id: None });
        }
        fragments
    }
}

fn stands_alone(text: &str, range: Range<usize>) -> bool {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    !text[..range.start].chars().next_back().is_some_and(is_word)
        && !text[range.end..].chars().next().is_some_and(is_word)
}

/// A set of byte strings, searched for the longest one at a position.
#[derive(Debug, Default)]
struct Trie {
    edges: HashMap<(u32, u8), u32>,
    /// The value that ends at each node; node 0 is the root.
    values: Vec<Option<usize>>,
}

impl Trie {
    fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    fn insert(&mut self, key: &[u8], value: usize) {
        if self.values.is_empty() {
            self.values.push(None);
        }
        let mut node = 0;
        for &byte in key {
            let next = self.values.len() as u32;
            node = *self.edges.entry((node, byte)).or_insert(next);
            if node == next {
                self.values.push(None);
            }
        }
        self.values[node as usize] = Some(value);
    }

    /// The value and length of the longest key that starts `text` and is accepted.
    fn longest(&self, text: &[u8], accept: impl Fn(usize, usize) -> bool) -> Option<(usize, usize)> {
        let mut node = 0;
        let mut found = None;
        for (at, &byte) in text.iter().enumerate() {
            match self.edges.get(&(node, byte)) {
                Some(&next) => node = next,
                None => break,
            }
            if let Some(value) = self.values[node as usize]
                && accept(value, at + 1)
            {
                found = Some((value, at + 1));
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn added(tokens: Vec<AddedToken>) -> AddedTokens {
        AddedTokens::new(tokens, |text| Ok(text.to_owned())).unwrap()
    }

    fn check(added: &AddedTokens, text: &str, protected: &Range<usize>, expected: &[(&str, Option<u32>)]) {
        let found: Vec<_> = added
            .split_raw(text, |span| protected.start < span.end && span.start < protected.end)
            .into_iter()
            .map(|fragment| (&text[fragment.range], fragment.id))
            .collect();
        assert_eq!(found, expected, "{text:?}");
    }

    #[test]
    fn the_longest_token_wins() {
        let added = added(vec![
            AddedToken::control(1, "<a>"),
            AddedToken::control(2, "<a><b>"),
            AddedToken::user_defined(3, "ab"),
        ]);
        check(
            &added,
            "x<a><b>y<a>ab",
            &(0..0),
            &[("x", None), ("<a><b>", Some(2)), ("y", None), ("<a>", Some(1)), ("ab", Some(3))],
        );
        check(&added, "", &(0..0), &[]);
    }

    #[test]
    fn protected_spans_match_only_harmless_tokens() {
        let added = added(vec![
            AddedToken::control(1, "<s>"),
            AddedToken::user_defined(2, "<|user|>"),
            AddedToken::user_defined(3, "<think>"),
            AddedToken::control(4, "><"),
        ]);
        check(&added, "<s><|user|><think>", &(0..18), &[("<s><|user|>", None), ("<think>", Some(3))]);
        check(&added, "<s><s>x<s>", &(3..6), &[("<s>", Some(1)), ("<s>x", None), ("<s>", Some(1))]);
        // A token that only overlaps the protected span must not match either.
        check(&added, "<s><x", &(0..3), &[("<s><x", None)]);
    }

    #[test]
    fn whitespace_and_word_flags() {
        let strip = AddedToken { lstrip: true, rstrip: true, ..AddedToken::control(1, "<m>") };
        let word = AddedToken { single_word: true, ..AddedToken::user_defined(2, "go") };
        let added = added(vec![strip, word]);
        check(&added, "a  <m> \n b", &(0..0), &[("a", None), ("  <m> \n ", Some(1)), ("b", None)]);
        check(&added, "gone go!", &(0..0), &[("gone ", None), ("go", Some(2)), ("!", None)]);
    }

    #[test]
    fn bad_spellings_are_errors() {
        let error = |tokens| AddedTokens::new(tokens, |text| Ok(text.to_owned())).unwrap_err();
        let twice = error(vec![AddedToken::control(1, "<s>"), AddedToken::control(2, "<s>")]);
        assert!(twice.message().contains("two ids, 1 and 2"), "{twice:?}");
        let empty = error(vec![AddedToken::control(7, "")]);
        assert!(empty.message().contains("added token 7 is 0 bytes"), "{empty:?}");
        error(vec![AddedToken::control(7, "x".repeat(513))]);
    }
}
