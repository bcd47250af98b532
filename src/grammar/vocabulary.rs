//! A tokenizer's vocabulary as the grammar library sees it: a trie over the bytes of all tokens.

use std::sync::Arc;

use llguidance::toktrie::{ApproximateTokEnv, INVALID_TOKEN, TokEnv, TokRxInfo, TokTrie};

use crate::tokenizer::Tokenizer;
use crate::{Error, ErrorKind, Result};

/// Longer tokens are never chosen under a grammar, because the trie cannot hold them. No known vocabulary has one.
const MAX_TOKEN_BYTES: usize = 1_000;
/// Most bytes of all tokens together: the nodes that a trie can have.
const MAX_VOCABULARY_BYTES: usize = 4 << 20;

/// The trie of the tokens with ids below `vocab_size`.
///
/// # Errors
/// [`ErrorKind::Unsupported`] if the vocabulary is larger than a trie can be, or empty.
pub(super) fn token_env(tokenizer: &Tokenizer, vocab_size: usize, eos_token_ids: &[u32]) -> Result<TokEnv> {
    let vocab_size = u32::try_from(vocab_size.min(tokenizer.vocab_size())).unwrap_or(u32::MAX);
    let num_bytes: usize = (0..vocab_size).map(|id| tokenizer.token_bytes(id).len() + 1).sum();
    if num_bytes > MAX_VOCABULARY_BYTES || vocab_size == 0 {
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "structured output needs a vocabulary of 1 to {MAX_VOCABULARY_BYTES} bytes; this one has \
                 {vocab_size} tokens of {num_bytes} bytes"
            ),
        ));
    }
    let words: Vec<Vec<u8>> = (0..vocab_size).map(|id| word(tokenizer, id)).collect();
    let ends: Vec<u32> = eos_token_ids.iter().copied().filter(|id| *id < vocab_size).collect();
    let info = TokRxInfo::new(vocab_size, ends.first().copied().unwrap_or(INVALID_TOKEN));
    let mut trie = TokTrie::from(&info, &words);
    if !ends.is_empty() {
        trie = trie.with_eos_tokens(&ends);
    }
    // Approximate: any tokenization of a text is allowed, so no text has to be tokenized.
    Ok(Arc::new(ApproximateTokEnv::new(trie)))
}

/// The bytes of a token in the trie; none if a grammar can have no use for it. Special tokens begin with a byte
/// that is in no text, so that only their name in a grammar produces them.
fn word(tokenizer: &Tokenizer, token_id: u32) -> Vec<u8> {
    let bytes = tokenizer.token_bytes(token_id);
    if bytes.len() > MAX_TOKEN_BYTES || bytes.contains(&TokTrie::SPECIAL_TOKEN_MARKER) {
        return Vec::new();
    }
    match tokenizer.is_special(token_id) && !bytes.is_empty() {
        true => [&[TokTrie::SPECIAL_TOKEN_MARKER], bytes].concat(),
        false => bytes.to_vec(),
    }
}
