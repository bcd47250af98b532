//! Any metadata as that of a tokenizer: an error, or a tokenizer that encodes and decodes without a panic
//! and only with tokens that it has.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tinyvllm::tokenizer::{SpecialTokens, Tokenizer};
use tinyvllm::weights::gguf::parse_header;

const TEXT: &str = "Hello world's <s>\u{0}\n\n  12345 </s> naïve 你好 👋🏽";

fuzz_target!(|bytes: &[u8]| {
    let Ok(header) = parse_header(bytes) else { return };
    let Ok(tokenizer) = Tokenizer::from_gguf(&header.metadata) else { return };
    for special in [SpecialTokens::Parse, SpecialTokens::AsText] {
        if let Ok(ids) = tokenizer.encode(TEXT, special) {
            assert!(ids.iter().all(|id| (*id as usize) < tokenizer.vocab_size()));
            let _ = tokenizer.decode(&ids, true);
        }
    }
    let _ = tokenizer.decode(&[0, 1, u32::MAX], false);
});
