//! From pieces to ids: builds the library's models from checked data.
//!
//! The library trusts its input (a merge longer than every token makes it panic), so every merge is looked
//! up first. Control tokens are not in the model: no text can produce them.

use std::collections::HashSet;

use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::{Model as _, ModelWrapper};

use super::dropped::{self, Alphabet};
use super::{byte_level, spm};
use crate::{Error, Result};

/// The data of a byte-pair model.
#[derive(Debug, Default)]
pub(super) struct BpeModelData {
    /// Token text → id.
    pub(super) vocab: Vocab,
    /// Pairs, the first to be merged first.
    pub(super) merges: Vec<(String, String)>,
    /// A piece that is a token is not split further.
    pub(super) ignore_merges: bool,
    /// Characters without a token become `<0xHH>` tokens.
    pub(super) byte_fallback: bool,
    /// The token of characters that have none.
    pub(super) unk_token: Option<String>,
    /// Neighbouring unknown characters become one unknown token.
    pub(super) fuse_unk: bool,
    /// The prefix of tokens that do not begin a word.
    pub(super) continuing_subword_prefix: Option<String>,
    /// The suffix of tokens that end one.
    pub(super) end_of_word_suffix: Option<String>,
    /// The meaning of the characters of tokens.
    pub(super) alphabet: Alphabet,
}

/// Converts pieces to ids.
#[derive(Debug)]
pub(super) struct PieceModel {
    model: ModelWrapper,
    alphabet: Alphabet,
    /// The characters with a token, if others are dropped.
    known: Option<Known>,
    /// Control tokens in the library's model; no piece becomes one.
    control: HashSet<u32>,
}

/// The characters that have tokens.
#[derive(Debug)]
struct Known {
    characters: HashSet<char>,
    /// Bytes that characters without a token become.
    bytes: HashSet<u8>,
}

impl Known {
    /// None if everything has a token.
    fn of(parts: &BpeModelData) -> Option<Self> {
        let single = |token: &String| {
            let mut characters = token.chars();
            characters.next().filter(|_| characters.next().is_none())
        };
        let characters: HashSet<char> = parts.vocab.keys().filter_map(single).collect();
        let is_written = |byte: &u8| !matches!(byte, 0xC0 | 0xC1 | 0xF5..);
        let mut all = (0..=u8::MAX).filter(is_written);
        let has_all = match parts.alphabet {
            Alphabet::Bytes => all.all(|byte| characters.contains(&byte_level::char_of_byte(byte))),
            Alphabet::Characters => false,
        };
        let is_byte = |token: &String| spm::byte_of_token(token).filter(|_| parts.byte_fallback);
        let bytes = parts.vocab.keys().filter_map(is_byte).collect();
        (!has_all).then_some(Self { characters, bytes })
    }

    fn contains(&self, c: char) -> bool {
        self.characters.contains(&c)
            || !self.bytes.is_empty()
                && c.encode_utf8(&mut [0; 4]).bytes().all(|byte| self.bytes.contains(&byte))
    }
}

impl PieceModel {
    /// `control` are the tokens that text must not produce.
    ///
    /// # Errors
    /// If a merge names a token that is not in the vocabulary, or makes one that is not.
    pub(super) fn bpe(mut parts: BpeModelData, control: &HashSet<String>) -> Result<Self> {
        let prefix = parts.continuing_subword_prefix.clone().unwrap_or_default();
        let mut merged = String::new();
        let mut merges = Vec::with_capacity(parts.merges.len());
        for (rank, (left, right)) in std::mem::take(&mut parts.merges).into_iter().enumerate() {
            let Some(continued) = right.strip_prefix(&prefix) else {
                return Err(Error::invalid_model(format!(
                    "merge {rank} ({left:?} and {right:?}) has no {prefix:?} before its second token"
                )));
            };
            merged.clear();
            merged.push_str(&left);
            merged.push_str(continued);
            if let Some(token) = [&left, &right, &merged].into_iter().find(|&t| !parts.vocab.contains_key(t))
            {
                return Err(Error::invalid_model(format!(
                    "merge {rank} ({left:?} and {right:?}) needs the token {token:?}, which the vocabulary lacks"
                )));
            }
            if ![&left, &right, &merged].into_iter().any(|token| control.contains(token)) {
                merges.push((left, right));
            }
        }
        if let Some(unk) = &parts.unk_token
            && !parts.vocab.contains_key(unk)
        {
            return Err(Error::invalid_model(format!("the unknown token {unk:?} is not in the vocabulary")));
        }
        let unk = parts.unk_token.clone();
        parts.vocab.retain(|token, _| !control.contains(token) || Some(token) == unk.as_ref());
        let marks_ends = !prefix.is_empty() || parts.end_of_word_suffix.is_some();
        let known = if unk.is_some() || marks_ends { None } else { Known::of(&parts) };
        let mut builder = BPE::builder()
            .vocab_and_merges(parts.vocab, merges)
            .ignore_merges(parts.ignore_merges)
            .byte_fallback(parts.byte_fallback)
            .fuse_unk(parts.fuse_unk);
        if let Some(unk) = unk {
            builder = builder.unk_token(unk);
        }
        if !prefix.is_empty() {
            builder = builder.continuing_subword_prefix(prefix);
        }
        if let Some(suffix) = parts.end_of_word_suffix {
            builder = builder.end_of_word_suffix(suffix);
        }
        let model = builder.build().map_err(|error| {
            Error::invalid_model(format!("the vocabulary and merges do not fit together: {error}"))
        })?;
        Ok(Self { model: model.into(), alphabet: parts.alphabet, known, control: HashSet::new() })
    }

    /// A model of another kind, as read by the library. No piece becomes one of the tokens in `control`.
    pub(super) fn other(model: ModelWrapper, control: HashSet<u32>) -> Self {
        Self { model, alphabet: Alphabet::Characters, known: None, control }
    }

    /// Whether a piece that is a token is not split further.
    fn takes_whole(&self, piece: &str) -> bool {
        let ModelWrapper::BPE(bpe) = &self.model else { return false };
        bpe.ignore_merges && bpe.token_to_id(piece).is_some()
    }

    /// Appends the ids of `piece`, which is in the vocabulary's characters. A character without a token is dropped if
    /// there is no unknown token; see [`super::dropped_in`].
    ///
    /// # Errors
    /// If the library has one.
    pub(super) fn encode(&self, piece: &str, ids: &mut Vec<u32>) -> Result<()> {
        if let Some(known) = &self.known {
            let mut missing = piece.chars().filter(|c| !known.contains(*c)).peekable();
            if missing.peek().is_some() && !self.takes_whole(piece) {
                missing.for_each(|c| dropped::note(c, self.alphabet));
            }
        }
        let tokens = self
            .model
            .tokenize(piece)
            .map_err(|error| Error::invalid_request(format!("the text cannot be tokenized: {error}")))?;
        ids.extend(tokens.iter().map(|token| token.id).filter(|id| !self.control.contains(id)));
        Ok(())
    }

    /// The id of the token spelled exactly `text`.
    pub(super) fn id(&self, text: &str) -> Option<u32> {
        self.model.token_to_id(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(tokens: &[&str], merges: &[(&str, &str)]) -> BpeModelData {
        BpeModelData {
            vocab: tokens.iter().zip(0..).map(|(token, id)| ((*token).to_owned(), id)).collect(),
            merges: merges.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect(),
            ..BpeModelData::default()
        }
    }

    fn encode(model: &PieceModel, piece: &str) -> Result<Vec<u32>> {
        let mut ids = Vec::new();
        model.encode(piece, &mut ids).map(|()| ids)
    }

    #[test]
    fn merges_must_stay_inside_the_vocabulary() {
        for merges in [[("a", "x")], [("x", "a")], [("b", "a")], [("ab", "ab")]] {
            let error = PieceModel::bpe(parts(&["a", "b", "ab"], &merges), &HashSet::new()).unwrap_err();
            assert!(error.message().contains("which the vocabulary lacks"), "{error:?}");
        }
    }

    #[test]
    fn no_text_becomes_a_control_token() {
        let control = HashSet::from(["ab".to_owned()]);
        let parts = BpeModelData { ignore_merges: true, ..parts(&["a", "b", "ab"], &[("a", "b")]) };
        assert_eq!(encode(&PieceModel::bpe(parts, &control).unwrap(), "ab").unwrap(), [0, 1]);
    }

    #[test]
    fn a_byte_without_a_token_is_left_out() {
        let model = PieceModel::bpe(parts(&["a", "b", "ab"], &[("a", "b")]), &HashSet::new()).unwrap();
        assert_eq!(encode(&model, "aba").unwrap(), [2, 0]);
        // Neighbours merge then, as in the library that made the vocabularies.
        assert_eq!(encode(&model, "aĠbĠ").unwrap(), [2]);
        assert!(encode(&model, "Ġ").unwrap().is_empty());
        let dropped = |piece| dropped::dropped_in(|| encode(&model, piece).unwrap()).1;
        assert_eq!(dropped("aĠbĠć字"), ["0x07", "0x20", "U+5B57"]);
        assert_eq!(dropped("ab"), Vec::<String>::new());
    }

    #[test]
    fn bytes_stand_for_characters_where_all_of_them_are_there() {
        let parts = BpeModelData {
            byte_fallback: true,
            alphabet: Alphabet::Characters,
            ..parts(&["a", "<0xC3>", "<0xA9>"], &[])
        };
        let model = PieceModel::bpe(parts, &HashSet::new()).unwrap();
        let (ids, dropped) = dropped::dropped_in(|| encode(&model, "aéèa").unwrap());
        assert_eq!((ids, dropped), (vec![0, 1, 2, 0], vec!["U+00E8".to_owned()]));
    }
}
