//! Token ids to text, one at a time.
//!
//! Invariant: the deltas of one sequence, joined, equal [`Tokenizer::decode`] of all its ids, and no delta
//! contains U+FFFD for a character whose bytes are still to come. The cost of a token does not depend on
//! how many came before: only the bytes of an unfinished character, at most three, are kept.

use std::sync::Arc;

use super::{Tokenizer, strip_leading_spaces};

/// The text stream of one sequence.
#[derive(Debug, Clone)]
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    skip_special: bool,
    /// Control tokens that are shown nevertheless, ascending.
    visible: Arc<[u32]>,
    /// Bytes of a character that is not complete.
    pending: Vec<u8>,
    num_leading_spaces: usize,
}

impl Detokenizer {
    /// A stream for a separate text, such as the answer in a chat: the space that encoding puts before a text is
    /// removed. With `skip_special`, control tokens are omitted.
    #[must_use]
    pub fn new(tokenizer: Arc<Tokenizer>, skip_special: bool) -> Self {
        let num_leading_spaces = tokenizer.num_leading_spaces();
        Self { tokenizer, skip_special, visible: Arc::default(), pending: Vec::new(), num_leading_spaces }
    }

    /// A stream that continues a text, as the completion of a prompt does: a leading space stays.
    #[must_use]
    pub fn continuing(tokenizer: Arc<Tokenizer>, skip_special: bool) -> Self {
        Self { num_leading_spaces: 0, ..Self::new(tokenizer, skip_special) }
    }

    /// Never leaves these control tokens out, which are in ascending order: a parser of the text needs them.
    #[must_use]
    pub fn with_visible(self, visible: Arc<[u32]>) -> Self {
        Self { visible, ..self }
    }

    /// Takes the next token and returns the text that is complete with it, possibly none.
    pub fn push(&mut self, token_id: u32) -> String {
        let skip_special = self.skip_special && self.visible.binary_search(&token_id).is_err();
        let mut bytes = self.tokenizer.emitted_bytes(token_id, skip_special);
        if self.num_leading_spaces > 0 {
            bytes = strip_leading_spaces(bytes, &mut self.num_leading_spaces);
        }
        self.pending.extend_from_slice(bytes);
        let (text, num_incomplete) = decode_complete(&self.pending);
        self.pending.drain(..self.pending.len() - num_incomplete);
        text
    }

    /// Ends the stream. A character that never became complete is U+FFFD.
    pub fn finish(&mut self) -> String {
        let text = String::from_utf8_lossy(&self.pending).into_owned();
        self.pending.clear();
        text
    }
}

/// The text of `bytes` up to an unfinished character at the end, and the length of that character.
fn decode_complete(bytes: &[u8]) -> (String, usize) {
    let mut text = String::new();
    let mut chunks = bytes.utf8_chunks().peekable();
    while let Some(chunk) = chunks.next() {
        text.push_str(chunk.valid());
        let invalid = chunk.invalid();
        if invalid.is_empty() {
            continue;
        }
        let is_incomplete = chunks.peek().is_none()
            && std::str::from_utf8(invalid).is_err_and(|error| error.error_len().is_none());
        if is_incomplete {
            return (text, invalid.len());
        }
        text.push(char::REPLACEMENT_CHARACTER);
    }
    (text, 0)
}

#[cfg(test)]
mod tests {
    use super::super::tests::{FIXTURES, tokenizer};
    use super::*;
    use proptest::prelude::*;

    fn stream(tokenizer: &Arc<Tokenizer>, ids: &[u32], skip_special: bool) -> Vec<String> {
        let mut detokenizer = Detokenizer::new(Arc::clone(tokenizer), skip_special);
        let mut deltas: Vec<String> = ids.iter().map(|id| detokenizer.push(*id)).collect();
        deltas.push(detokenizer.finish());
        deltas
    }

    #[test]
    fn an_emoji_cut_across_tokens_appears_once_it_is_complete() {
        for name in ["llama-bpe", "spm"] {
            let tokenizer = tokenizer(name);
            let space = tokenizer.num_leading_spaces();
            let bytes: Vec<u32> = "🦙"
                .bytes()
                .map(|byte| {
                    let text = match space {
                        0 => super::super::byte_level::char_of_byte(byte).to_string(),
                        _ => format!("<0x{byte:02X}>"),
                    };
                    tokenizer.token_id(&text).unwrap()
                })
                .collect();
            assert_eq!(stream(&tokenizer, &bytes, true), ["", "", "", "🦙", ""], "{name}");
            assert_eq!(stream(&tokenizer, &bytes[..2], true), ["", "", "\u{fffd}"], "{name}");
        }
    }

    #[test]
    fn only_a_stream_of_its_own_loses_the_leading_space() {
        let tokenizer = tokenizer("spm");
        let ids = tokenizer.encode("Hello", super::super::SpecialTokens::AsText).unwrap();
        assert_eq!(stream(&tokenizer, &ids, true).concat(), "Hello");
        let mut detokenizer = Detokenizer::continuing(tokenizer, true);
        assert_eq!(ids.iter().map(|id| detokenizer.push(*id)).collect::<String>(), " Hello");
    }

    #[test]
    fn visible_tokens_stay_while_others_are_left_out() {
        let tokenizer = tokenizer("llama-bpe");
        let special: Vec<u32> =
            (0..tokenizer.vocab_size() as u32).filter(|id| tokenizer.is_special(*id)).take(2).collect();
        let [hidden, visible] = special[..] else { panic!("too few special tokens") };
        let mut detokenizer = Detokenizer::new(Arc::clone(&tokenizer), true).with_visible([visible].into());
        let text: String = [hidden, visible, hidden].map(|id| detokenizer.push(id)).concat();
        assert_eq!(text, tokenizer.token_text(visible));
        assert!(!text.is_empty());
    }

    proptest! {
        #[test]
        fn deltas_join_to_the_full_decode(
            name in prop::sample::select(FIXTURES.to_vec()),
            ids in prop::collection::vec(0u32..1000, 0..60),
            skip_special in any::<bool>(),
        ) {
            let tokenizer = tokenizer(name);
            let deltas = stream(&tokenizer, &ids, skip_special);
            prop_assert_eq!(deltas.concat(), tokenizer.decode(&ids, skip_special));
        }
    }
}
