//! SentencePiece's byte-pair encoding: the adjacent pair that forms the token with the highest score is
//! merged first, leftmost on ties.
//!
//! The work is O(n log n) in the length of the text: a queue holds the candidate pairs, and a pair whose
//! symbols have changed since is recognised by its length and dropped.

use std::cmp::Ordering;
use std::collections::{BinaryHeap, HashMap};

use super::dropped::{self, Alphabet};
use crate::{Error, Result};

/// The character for a space.
pub(super) const SPACE: char = '\u{2581}';

/// A vocabulary with scores.
#[derive(Debug)]
pub(super) struct SpmModel {
    /// Ordinary tokens with id and score.
    tokens: HashMap<String, (u32, f32)>,
    /// The ids of `<0x00>` to `<0xFF>`, if all of them exist.
    bytes: Option<Box<[u32; 256]>>,
    unknown: Option<u32>,
    add_space_prefix: bool,
    longest_token: usize,
}

/// The data of a model with scores.
#[derive(Debug, Default)]
pub(super) struct SpmModelData {
    /// Ordinary tokens: text, id, score.
    pub(super) tokens: Vec<(String, u32, f32)>,
    /// Byte tokens: text (`<0x0A>`) and id.
    pub(super) bytes: Vec<(String, u32)>,
    /// The token of a character that has neither a token nor byte tokens.
    pub(super) unknown: Option<u32>,
    /// Whether a space is put before text.
    pub(super) add_space_prefix: bool,
}

/// The byte of a token of the form `<0x0A>`.
pub(super) fn byte_of_token(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    let is_hex = digits.len() == 2 && digits.bytes().all(|b| b.is_ascii_hexdigit());
    is_hex.then(|| u8::from_str_radix(digits, 16).ok()).flatten()
}

/// A stretch of the text that is one token, or one character; a merged-away symbol has length 0.
#[derive(Debug, Clone, Copy)]
struct Symbol {
    start: usize,
    len: usize,
    prev: usize,
    next: usize,
}

/// No neighbour.
const NONE: usize = usize::MAX;

#[derive(Debug)]
struct Candidate {
    score: f32,
    left: usize,
    right: usize,
    len: usize,
}

impl Ord for Candidate {
    fn cmp(&self, other: &Self) -> Ordering {
        self.score.total_cmp(&other.score).then_with(|| other.left.cmp(&self.left))
    }
}

impl PartialOrd for Candidate {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Candidate {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Candidate {}

impl SpmModel {
    /// # Errors
    /// If a score is not a number, or a byte token is not of the form `<0x0A>`.
    pub(super) fn new(parts: SpmModelData) -> Result<Self> {
        let mut tokens = HashMap::with_capacity(parts.tokens.len());
        for (text, id, score) in parts.tokens {
            if score.is_nan() {
                return Err(Error::invalid_model(format!(
                    "the score of token {id} ({text:?}) is not a number"
                )));
            }
            // Adding 0 turns -0 into 0: the two are one score.
            tokens.insert(text, (id, score + 0.0));
        }
        let mut bytes = [None; 256];
        for (text, id) in parts.bytes {
            let byte = byte_of_token(&text).ok_or_else(|| {
                Error::invalid_model(format!(
                    "token {id} is a byte token, expected text like <0x0A>, found {text:?}"
                ))
            })?;
            bytes[usize::from(byte)] = Some(id);
        }
        let bytes: Option<Vec<u32>> = bytes.into_iter().collect();
        Ok(Self {
            longest_token: tokens.keys().map(String::len).max().unwrap_or(0),
            tokens,
            bytes: bytes.and_then(|ids| <Box<[u32; 256]>>::try_from(ids.into_boxed_slice()).ok()),
            unknown: parts.unknown,
            add_space_prefix: parts.add_space_prefix,
        })
    }

    /// The id of the ordinary token or byte token spelled exactly `text`.
    pub(super) fn id(&self, text: &str) -> Option<u32> {
        let byte_token = || Some(self.bytes.as_ref()?[usize::from(byte_of_token(text)?)]);
        self.tokens.get(text).map(|(id, _)| *id).or_else(byte_token)
    }

    /// Appends the ids of raw text that contains no added token. A character without a token is dropped where there is
    /// no unknown token; see [`super::dropped_in`].
    pub(super) fn encode(&self, text: &str, ids: &mut Vec<u32>) {
        if text.is_empty() {
            return;
        }
        let mut marked = String::with_capacity(text.len() + text.len() / 4 + SPACE.len_utf8());
        if self.add_space_prefix {
            marked.push(SPACE);
        }
        marked.extend(text.chars().map(|c| if c == ' ' { SPACE } else { c }));
        let symbols = self.merge(&marked);
        let mut last_unknown = None;
        for (position, symbol) in symbols.iter().filter(|symbol| symbol.len > 0).enumerate() {
            let piece = &marked[symbol.start..symbol.start + symbol.len];
            if let Some((id, _)) = self.tokens.get(piece) {
                ids.push(*id);
            } else if let Some(bytes) = &self.bytes {
                ids.extend(piece.bytes().map(|byte| bytes[usize::from(byte)]));
            } else {
                let Some(unknown) = self.unknown else {
                    piece.chars().for_each(|c| dropped::note(c, Alphabet::Characters));
                    continue;
                };
                // A run of unknown characters is one unknown token.
                if last_unknown.is_none_or(|last| last + 1 != position) {
                    ids.push(unknown);
                }
                last_unknown = Some(position);
            }
        }
    }

    fn merge(&self, text: &str) -> Vec<Symbol> {
        let mut symbols: Vec<Symbol> = text
            .char_indices()
            .enumerate()
            .map(|(index, (start, c))| Symbol {
                start,
                len: c.len_utf8(),
                prev: index.wrapping_sub(1),
                next: index + 1,
            })
            .collect();
        if let Some(last) = symbols.last_mut() {
            last.next = NONE;
        }
        let mut queue = BinaryHeap::with_capacity(symbols.len());
        for right in 1..symbols.len() {
            queue.extend(self.candidate(text, &symbols, right - 1, right));
        }
        while let Some(Candidate { left, right, len, .. }) = queue.pop() {
            let (l, r) = (symbols[left], symbols[right]);
            if l.len == 0 || r.len == 0 || l.next != right || l.len + r.len != len {
                continue;
            }
            symbols[left] = Symbol { len, next: r.next, ..l };
            symbols[right].len = 0;
            if r.next != NONE {
                symbols[r.next].prev = left;
                queue.extend(self.candidate(text, &symbols, left, r.next));
            }
            if l.prev != NONE {
                queue.extend(self.candidate(text, &symbols, l.prev, left));
            }
        }
        symbols
    }

    fn candidate(&self, text: &str, symbols: &[Symbol], left: usize, right: usize) -> Option<Candidate> {
        let len = symbols[left].len + symbols[right].len;
        if len > self.longest_token {
            return None;
        }
        let start = symbols[left].start;
        let (_, score) = self.tokens.get(&text[start..start + len])?;
        Some(Candidate { score: *score, left, right, len })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn model(tokens: &[(&str, f32)]) -> SpmModel {
        let tokens =
            tokens.iter().zip(10..).map(|((text, score), id)| ((*text).to_owned(), id, *score)).collect();
        SpmModel::new(SpmModelData { tokens, unknown: Some(0), ..SpmModelData::default() }).unwrap()
    }

    fn encode(model: &SpmModel, text: &str) -> Vec<u32> {
        let mut ids = Vec::new();
        model.encode(text, &mut ids);
        ids
    }

    /// The definition, in quadratic time.
    fn encode_naively(model: &SpmModel, text: &str) -> Vec<u32> {
        let mut pieces: Vec<String> = text.chars().map(String::from).collect();
        loop {
            let mut best: Option<(f32, usize)> = None;
            for at in 1..pieces.len() {
                let score = model.tokens.get(&format!("{}{}", pieces[at - 1], pieces[at])).map(|(_, s)| *s);
                if let Some(score) = score
                    && best.is_none_or(|(highest, _)| score > highest)
                {
                    best = Some((score, at));
                }
            }
            let Some((_, at)) = best else { break };
            let right = pieces.remove(at);
            pieces[at - 1].push_str(&right);
        }
        let mut ids: Vec<u32> =
            pieces.iter().map(|piece| model.tokens.get(piece).map_or(0, |(id, _)| *id)).collect();
        ids.dedup_by(|a, b| *a == 0 && *b == 0);
        ids
    }

    #[test]
    fn ties_merge_leftmost_and_unknown_runs_fuse() {
        let model = model(&[("a", 0.0), ("aa", -1.0), ("aaa", -1.0)]);
        assert_eq!(encode(&model, "aaaa"), [12, 10]);
        assert_eq!(encode(&model, "axxax"), [10, 0, 10, 0]);
        assert!(encode(&model, "").is_empty());
    }

    #[test]
    fn what_has_no_token_is_left_out() {
        let parts = SpmModelData { tokens: vec![("a".into(), 3, 0.0)], ..SpmModelData::default() };
        let model = SpmModel::new(parts).unwrap();
        let (ids, dropped) = dropped::dropped_in(|| encode(&model, "axa"));
        assert_eq!((ids, dropped), (vec![3, 3], vec!["U+0078".to_owned()]));
    }

    #[test]
    fn bad_parts_are_errors() {
        let nan = SpmModelData { tokens: vec![("a".into(), 3, f32::NAN)], ..SpmModelData::default() };
        assert!(SpmModel::new(nan).unwrap_err().message().contains("token 3"));
        let byte = SpmModelData { bytes: vec![("<0x+1>".into(), 3)], ..SpmModelData::default() };
        assert!(SpmModel::new(byte).unwrap_err().message().contains("<0x+1>"));
    }

    proptest! {
        #[test]
        fn equals_the_definition(
            text in "[abcé]{0,30}",
            scores in prop::collection::vec(-3i8..3, 12),
        ) {
            let texts = ["a", "b", "é", "ab", "ba", "aa", "aba", "aab", "abab", "cc", "éa", "aéa"];
            let tokens: Vec<_> = texts.into_iter().zip(scores.into_iter().map(f32::from)).collect();
            let model = model(&tokens);
            prop_assert_eq!(encode(&model, &text), encode_naively(&model, &text));
        }
    }
}
