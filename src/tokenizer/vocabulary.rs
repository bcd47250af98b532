//! The bytes and the kind of each token id.
//!
//! Decoding only concatenates these bytes, for every type of tokenizer. An id without a token, such as the padding rows
//! of an embedding matrix, has no bytes.

use crate::{Error, Result};

/// Ids at or above this are refused, so that one huge id in a damaged file cannot cause an allocation of gigabytes.
const MAX_VOCAB_SIZE: usize = 1 << 24;

/// The kind of a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum TokenKind {
    /// No token has this id.
    #[default]
    Absent,
    /// Text.
    Text,
    /// A special token, omitted when special tokens are skipped.
    Control,
}

/// A table from id to bytes.
#[derive(Debug, Default)]
pub(super) struct Vocabulary {
    bytes: Vec<u8>,
    /// Where each id's bytes end; they start where the previous id's end.
    ends: Vec<usize>,
    kinds: Vec<TokenKind>,
}

impl Vocabulary {
    /// Builds the table. Later entries for an id replace earlier ones.
    ///
    /// # Errors
    /// If an id is not below 2^24.
    pub(super) fn new(tokens: impl IntoIterator<Item = (u32, Vec<u8>, TokenKind)>) -> Result<Self> {
        let mut rows: Vec<(Vec<u8>, TokenKind)> = Vec::new();
        for (id, bytes, kind) in tokens {
            let index = id as usize;
            if index >= MAX_VOCAB_SIZE {
                return Err(Error::invalid_model(format!(
                    "token id {id} is too large, expected ids below {MAX_VOCAB_SIZE}"
                )));
            }
            if index >= rows.len() {
                rows.resize_with(index + 1, Default::default);
            }
            rows[index] = (bytes, kind);
        }
        let mut vocabulary = Self::default();
        for (bytes, kind) in rows {
            vocabulary.bytes.extend_from_slice(&bytes);
            vocabulary.ends.push(vocabulary.bytes.len());
            vocabulary.kinds.push(kind);
        }
        Ok(vocabulary)
    }

    /// One more than the highest id.
    pub(super) fn len(&self) -> usize {
        self.ends.len()
    }

    /// The bytes of `id`; none if there is no such token.
    pub(super) fn bytes(&self, id: u32) -> &[u8] {
        let index = id as usize;
        let Some(&end) = self.ends.get(index) else { return &[] };
        let start = index.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.bytes[start..end]
    }

    /// Makes a token a control token.
    pub(super) fn set_control(&mut self, id: u32) {
        if let Some(kind) = self.kinds.get_mut(id as usize) {
            *kind = TokenKind::Control;
        }
    }

    pub(super) fn kind(&self, id: u32) -> TokenKind {
        self.kinds.get(id as usize).copied().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_and_ids_beyond_the_end_are_empty() {
        let vocabulary =
            Vocabulary::new([(3, b"xyz".to_vec(), TokenKind::Control), (0, b"a".to_vec(), TokenKind::Text)])
                .unwrap();
        assert_eq!(vocabulary.len(), 4);
        let bytes: Vec<_> = [0, 1, 2, 3, 4, u32::MAX].map(|id| vocabulary.bytes(id)).to_vec();
        assert_eq!(bytes, [b"a".as_slice(), b"", b"", b"xyz", b"", b""]);
        assert_eq!(vocabulary.kind(3), TokenKind::Control);
        assert_eq!(vocabulary.kind(2), TokenKind::Absent);
        assert_eq!(vocabulary.kind(9), TokenKind::Absent);
    }

    #[test]
    fn a_huge_id_is_an_error() {
        let error = Vocabulary::new([(u32::MAX, Vec::new(), TokenKind::Text)]).unwrap_err();
        assert!(error.message().contains("4294967295"), "{error:?}");
    }
}
