//! Any bytes as a packed body: an error, or what was packed, within the limit.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tinyvllm_server::unpack_body;

const LIMIT: usize = 1 << 16;

fuzz_target!(|input: &[u8]| {
    if let Ok(body) = unpack_body(input, LIMIT) {
        assert!(body.len() <= LIMIT);
    }
});
