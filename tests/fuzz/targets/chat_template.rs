//! Any text as a chat template: an error, or a template whose rendering ends within its limits, whatever it does. Time and
//! memory are the fuzzer's to measure (`-timeout`, `-rss_limit_mb`).
#![no_main]

use libfuzzer_sys::fuzz_target;
use serde_json::json;
use tinyvllm::chat::ChatTemplate;

/// More than a rendering of so small a conversation may write.
const MAX_OUTPUT: usize = 5 << 20;
/// More than an error repeats of what it is about.
const MAX_ERROR: usize = 4_000;

fuzz_target!(|source: &str| {
    let template = match ChatTemplate::new(source) {
        Ok(template) => template,
        Err(error) => {
            assert!(error.to_string().len() < MAX_ERROR);
            return;
        }
    };
    let tool = json!({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}});
    let context = json!({
        "messages": [
            {"role": "system", "content": "é"},
            {"role": "user", "content": [{"type": "text", "text": "a b"}]},
            {"role": "assistant", "content": null, "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1.5}}}]},
        ],
        "tools": [tool],
        "bos_token": "<s>",
        "add_generation_prompt": true,
    });
    match template.render(&context) {
        Ok(text) => assert!(text.len() < MAX_OUTPUT),
        Err(error) => assert!(error.to_string().len() < MAX_ERROR),
    }
});
