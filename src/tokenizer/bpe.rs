//! Byte-pair encoding: builds the library's model from parts that were checked here.
//!
//! The library trusts its input (a merge longer than every token makes it panic), so every merge is looked
//! up first. Control tokens are left out of the model: no text can produce them.

use std::collections::HashSet;

use tokenizers::Model as _;
use tokenizers::models::bpe::{BPE, Vocab};

use crate::{Error, Result};

/// The parts of a byte-pair model.
#[derive(Debug, Default)]
pub(super) struct BpeParts {
    /// Token text → id.
    pub(super) vocab: Vocab,
    /// Pairs, the first to be merged first.
    pub(super) merges: Vec<(String, String)>,
    /// A piece that is a token is taken whole.
    pub(super) ignore_merges: bool,
    /// Characters without a token become `<0xHH>` tokens.
    pub(super) byte_fallback: bool,
    /// What a character becomes that has no token.
    pub(super) unk_token: Option<String>,
    /// Neighbouring unknown characters become one unknown token.
    pub(super) fuse_unk: bool,
}

/// A byte-pair model.
#[derive(Debug)]
pub(super) struct BpeModel {
    model: BPE,
}

impl BpeModel {
    /// `control` are the tokens that text must not produce.
    ///
    /// # Errors
    /// If a merge names a token that is not in the vocabulary, or makes one that is not.
    pub(super) fn new(mut parts: BpeParts, control: &HashSet<String>) -> Result<Self> {
        let mut merged = String::new();
        let mut merges = Vec::with_capacity(parts.merges.len());
        for (rank, (left, right)) in parts.merges.into_iter().enumerate() {
            merged.clear();
            merged.push_str(&left);
            merged.push_str(&right);
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
        let mut builder = BPE::builder()
            .vocab_and_merges(parts.vocab, merges)
            .ignore_merges(parts.ignore_merges)
            .byte_fallback(parts.byte_fallback)
            .fuse_unk(parts.fuse_unk);
        if let Some(unk) = unk {
            builder = builder.unk_token(unk);
        }
        let model = builder.build().map_err(|error| {
            Error::invalid_model(format!("the vocabulary and merges do not fit together: {error}"))
        })?;
        Ok(Self { model })
    }

    /// Appends the ids of `piece`, which is in the vocabulary's characters. A character without a token is left out
    /// where nothing stands for unknown ones.
    ///
    /// # Errors
    /// If the library has one.
    pub(super) fn encode(&self, piece: &str, ids: &mut Vec<u32>) -> Result<()> {
        let tokens = self
            .model
            .tokenize(piece)
            .map_err(|error| Error::invalid_request(format!("the text cannot be tokenized: {error}")))?;
        ids.extend(tokens.iter().map(|token| token.id));
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

    fn parts(tokens: &[&str], merges: &[(&str, &str)]) -> BpeParts {
        BpeParts {
            vocab: tokens.iter().zip(0..).map(|(token, id)| ((*token).to_owned(), id)).collect(),
            merges: merges.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect(),
            ..BpeParts::default()
        }
    }

    fn encode(model: &BpeModel, piece: &str) -> Result<Vec<u32>> {
        let mut ids = Vec::new();
        model.encode(piece, &mut ids).map(|()| ids)
    }

    #[test]
    fn merges_must_stay_inside_the_vocabulary() {
        for merges in [[("a", "x")], [("x", "a")], [("b", "a")], [("ab", "ab")]] {
            let error = BpeModel::new(parts(&["a", "b", "ab"], &merges), &HashSet::new()).unwrap_err();
            assert!(error.message().contains("which the vocabulary lacks"), "{error:?}");
        }
    }

    #[test]
    fn no_text_becomes_a_control_token() {
        let control = HashSet::from(["ab".to_owned()]);
        let parts = BpeParts { ignore_merges: true, ..parts(&["a", "b", "ab"], &[("a", "b")]) };
        assert_eq!(encode(&BpeModel::new(parts, &control).unwrap(), "ab").unwrap(), [0, 1]);
    }

    #[test]
    fn a_byte_without_a_token_is_left_out() {
        let model = BpeModel::new(parts(&["a", "b", "ab"], &[("a", "b")]), &HashSet::new()).unwrap();
        assert_eq!(encode(&model, "aba").unwrap(), [2, 0]);
        // What then stand side by side merge, as in the library that the vocabularies were made with.
        assert_eq!(encode(&model, "aĠbĠ").unwrap(), [2]);
        assert!(encode(&model, "Ġ").unwrap().is_empty());
    }
}
