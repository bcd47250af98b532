//! Any metadata as that of a tokenizer: an error or a tokenizer, never a panic.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tinyvllm::tokenizer::Tokenizer;
use tinyvllm::weights::gguf::parse_header;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(header) = parse_header(bytes) {
        let _ = Tokenizer::from_gguf(&header.metadata);
    }
});
