//! Any bytes as the JSON of a request: an error or a value, as serde_json has them, and no more memory than was charged.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tinyvllm_server::read_charged;

const LIMIT: usize = 1 << 20;

fuzz_target!(|input: &[u8]| {
    let parsed = serde_json::from_slice::<serde_json::Value>(input).ok();
    match read_charged(input, LIMIT) {
        Ok((value, charged)) => {
            assert!(charged <= LIMIT);
            assert_eq!(parsed.as_ref(), Some(&value));
        }
        // Bounds of depth and memory are ours.
        Err(error) => assert!(!error.to_string().is_empty()),
    }
});
