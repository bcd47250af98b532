//! Chats and JSON through the server, over real sockets.

use std::path::Path;
use std::sync::Mutex;
use std::thread;

use serde_json::{Value, json};

use super::client::{Server, post};
use super::{gguf, random};

const CHAT: &str = "/v1/chat/completions";

fn start(gguf: &Path, flags: &str) -> Server {
    // A path may have spaces, which flags are cut at.
    Server::start_with(flags, |command| {
        command.arg("--model").arg(gguf);
    })
}

/// What the model's template makes of a conversation that begins with the system's message.
fn rendered(messages: &[Value]) -> String {
    let turns = messages.iter().map(|message| {
        let [role, content] = ["role", "content"].map(|key| message[key].as_str().unwrap());
        format!("<|im_start|>{role}\n{content}<|im_end|>\n")
    });
    turns.chain(["<|im_start|>assistant\n".to_owned()]).collect()
}

/// The text of a stream, and why it ended.
fn joined(chunks: &[Value]) -> (String, String) {
    let choices = chunks.iter().map(|chunk| &chunk["choices"][0]);
    let content = choices.clone().filter_map(|choice| choice["delta"]["content"].as_str()).collect();
    (content, choices.filter_map(|choice| choice["finish_reason"].as_str()).collect())
}

#[test]
fn a_conversation_of_six_turns() {
    let Some(gguf) = gguf() else { return };
    let server = start(&gguf, "--max-model-len 2048 --kv-cache-memory-bytes 128M");
    let mut messages =
        vec![json!({"role": "system", "content": "You are a helpful assistant. Answer in one sentence."})];
    let mut num_said = 0;
    for (turn, question) in [
        "What is the capital of France?",
        "And of Italy?",
        "Which of the two cities is larger?",
        "Write a line of a poem about it.",
        "Say that in German.",
        "Thank you! What was my first question?",
    ]
    .into_iter()
    .enumerate()
    {
        messages.push(json!({"role": "user", "content": question}));
        let mut body = json!({"messages": messages, "temperature": 0, "max_tokens": 60});
        let answer = server.post(CHAT, &body).success();
        let choice = &answer["choices"][0];
        let content = choice["message"]["content"].as_str().unwrap();
        assert!(!content.trim().is_empty() && !content.contains("<|"), "{content:?}");
        if turn == 0 {
            assert!(content.contains("Paris"), "{content}");
            assert_eq!(choice["finish_reason"], "stop", "{content}");
        }
        // What was said before is in the cache, but for a block that was not full.
        let usage = &answer["usage"];
        let num_cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
        assert!(num_cached + 32 > num_said, "turn {turn}: {usage} after {num_said} tokens");
        num_said = usage["prompt_tokens"].as_u64().unwrap();

        // The same as a stream, and as a prompt that is written out.
        body["stream"] = json!(true);
        assert_eq!(joined(&server.post(CHAT, &body).events()).0, content);
        let raw = json!({"prompt": rendered(&messages), "temperature": 0, "max_tokens": 60});
        let raw = server.post("/v1/completions", &raw).success();
        assert_eq!(raw["choices"][0]["text"], content);
        assert_eq!(raw["usage"]["prompt_tokens"], usage["prompt_tokens"]);
        messages.push(json!({"role": "assistant", "content": content}));
    }
    assert!(num_said > 100, "the last prompt has {num_said} tokens");
}

#[test]
fn fifty_answers_of_fifty_are_valid_under_a_schema() {
    let Some(gguf) = gguf() else { return };
    let server = start(&gguf, "--max-model-len 512 --max-num-seqs 25 --kv-cache-memory-bytes 256M");
    let schema = json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 30},
            "born": {"type": "integer", "minimum": 1000, "maximum": 2020},
            "fields": {"type": "array", "minItems": 1, "maxItems": 3,
                       "items": {"enum": ["mathematics", "physics", "chemistry", "biology", "medicine", "other"]}},
            "prize": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/prize"}]},
        },
        "required": ["name", "born", "fields", "prize"],
        "additionalProperties": false,
        "$defs": {"prize": {
            "type": "object",
            "properties": {"year": {"type": "integer", "minimum": 1901, "maximum": 2025},
                           "shared": {"type": "boolean"}},
            "required": ["year", "shared"], "additionalProperties": false,
        }},
    });
    let people = ["Marie Curie", "Isaac Newton", "Ada Lovelace", "Emmy Noether", "Charles Darwin"];
    let fields = [
        "",
        " Be brief.",
        " Answer in JSON.",
        " Answer as JSON with the keys name, born, fields and prize.",
        " Guess.",
    ];
    let prompts: Vec<String> =
        people.iter().flat_map(|person| fields.map(|field| format!("Who was {person}?{field}"))).collect();
    assert_eq!(prompts.len(), 25);
    let answers = Mutex::new(Vec::new());
    for temperature in [0, 1] {
        thread::scope(|scope| {
            for (seed, prompt) in prompts.iter().enumerate() {
                let (answers, schema, address) = (&answers, &schema, server.address());
                scope.spawn(move || {
                    let format = json!({"type": "json_schema",
                                      "json_schema": {"name": "person", "strict": true, "schema": schema}});
                    let body = json!({"messages": [{"role": "user", "content": prompt}], "response_format": format,
                                      "temperature": temperature, "seed": seed, "max_tokens": 200, "stream": true});
                    let chunks = post(address, CHAT, &body).events();
                    let (content, reason) = joined(&chunks);
                    assert_eq!(reason, "stop", "{content}");
                    let value: Value =
                        serde_json::from_str(&content).unwrap_or_else(|error| panic!("{content}: {error}"));
                    assert_eq!(random::fault(&value, schema, schema), None, "{content}");
                    answers.lock().unwrap().push(content);
                });
            }
        });
    }
    let mut answers = answers.into_inner().unwrap();
    assert_eq!(answers.len(), 50);
    answers.sort();
    answers.dedup();
    assert!(answers.len() > 25, "only {} different answers", answers.len());
}
