//! Text that a grammar leaves no choice about, in tokens.

use llguidance::toktrie::TokTrie;

use crate::tokenizer::{SpecialTokens, Tokenizer};

/// More bytes than a step drafts tokens of are not read.
const MAX_BYTES: usize = 512;

/// Tokens for the beginning of this text, as the model would be likely to write it.
///
/// As the tokenizer cuts it. Where that does not give the same bytes (it may put a space before a text), the longest tokens
/// first.
pub(super) fn tokens(bytes: &[u8], tokenizer: &Tokenizer, vocabulary: &TokTrie) -> Vec<u32> {
    let bytes = &bytes[..bytes.len().min(MAX_BYTES)];
    let text = match std::str::from_utf8(bytes) {
        Ok(text) => text,
        Err(error) => std::str::from_utf8(&bytes[..error.valid_up_to()]).unwrap_or_default(),
    };
    if text.is_empty() {
        return Vec::new();
    }
    let token_ids = tokenizer.encode(text, SpecialTokens::AsText).unwrap_or_default();
    let written = token_ids.iter().flat_map(|token_id| tokenizer.token_bytes(*token_id));
    match written.eq(text.as_bytes()) {
        true => token_ids,
        false => vocabulary.greedy_tokenize(text.as_bytes()),
    }
}
