//! What is sent to do harm.

use std::io::Write;

use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::{Value, json};

use super::server::{HOG, post};

const COMPLETIONS: &str = "/v1/completions";
const GZIP: &str = "Content-Encoding: gzip\r\n";

/// A request of the hog: the number makes it different from others of its kind.
pub(crate) type Attack = fn(usize) -> Vec<u8>;

fn gzip(data: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(data).unwrap();
    encoder.finish().unwrap()
}

fn json_of(path: &str, body: &Value) -> Vec<u8> {
    post(path, HOG, "", body.to_string().as_bytes())
}

/// A completion of 60 tokens, with these fields alongside or instead of the usual ones.
fn completion(seed: usize, fields: &Value) -> Vec<u8> {
    let mut body = json!({"prompt": "Once upon a time", "max_tokens": 60, "ignore_eos": true, "seed": seed});
    for (name, value) in fields.as_object().unwrap() {
        body[name] = value.clone();
    }
    json_of(COMPLETIONS, &body)
}

/// A text in an unknown field of an otherwise good request, packed.
fn unknown_field(value: &str) -> Vec<u8> {
    let body = format!(r#"{{"prompt":"a","max_tokens":1,"x":{value}}}"#);
    post(COMPLETIONS, HOG, GZIP, &gzip(body.as_bytes()))
}

fn list(item: &str, count: usize) -> String {
    format!("[{}]", vec![item; count].join(","))
}

/// Small messages that become large ones, and others that each took a server down or stopped it once.
pub(crate) const BOMBS: &[(&str, Attack)] = &[
    ("objects in an unknown field, packed", |_| unknown_field(&list(r#"{"a":1}"#, 1_000_000))),
    ("lists in an unknown field, packed", |_| unknown_field(&list("[]", 3_000_000))),
    ("a long text in an unknown field, packed", |_| unknown_field(&format!("\"{}\"", "a".repeat(14 << 20)))),
    ("messages, packed", |_| {
        let message = r#"{"role":"user","content":"a"}"#;
        let body = format!(r#"{{"max_tokens":1,"messages":{}}}"#, list(message, 300_000));
        post("/v1/chat/completions", HOG, GZIP, &gzip(body.as_bytes()))
    }),
    ("nested lists", |_| {
        let nested = format!("{}{}", "[".repeat(200_000), "]".repeat(200_000));
        post(COMPLETIONS, HOG, "", format!(r#"{{"prompt":{nested}}}"#).as_bytes())
    }),
    ("a nested schema", |_| {
        let mut schema = json!({"type": "string"});
        for _ in 0..60 {
            schema = json!({"type": "object", "properties": {"a": schema.clone(), "b": {"type": "array", "items": schema["type"]}}});
        }
        completion(1, &json!({"structured_outputs": {"json": schema}}))
    }),
    ("many optional properties", |_| {
        let properties: serde_json::Map<String, Value> =
            (0..400).map(|index| (format!("p{index}"), json!({"type": "string"}))).collect();
        completion(1, &json!({"structured_outputs": {"json": {"type": "object", "properties": properties}}}))
    }),
    ("a regular expression that counts", |number| {
        completion(
            1,
            &json!({"structured_outputs": {"regex": format!("(a{{1,900}}b{{1,900}}){{1,900}}{number}")}}),
        )
    }),
    ("a gzip of gzip members", |_| post(COMPLETIONS, HOG, GZIP, &gzip(b"").repeat(50_000))),
    ("half a gzip", |_| {
        let packed = gzip(br#"{"prompt":"a"}"#);
        post(COMPLETIONS, HOG, GZIP, &packed[..packed.len() / 2])
    }),
    ("a long model name", |_| json_of(COMPLETIONS, &json!({"model": "m".repeat(5 << 20), "prompt": "a"}))),
    ("a long prompt", |_| json_of(COMPLETIONS, &json!({"prompt": "the quick brown fox ".repeat(45_000)}))),
    ("long token ids", |_| json_of(COMPLETIONS, &json!({"prompt": vec![7; 1_000_000]}))),
    ("a bias for each token", |_| {
        let bias: serde_json::Map<String, Value> =
            (0..200_000).map(|token| (token.to_string(), json!(1))).collect();
        completion(1, &json!({"logit_bias": bias}))
    }),
    ("stop strings", |_| completion(1, &json!({"stop": vec!["a".repeat(1_000); 1_000]}))),
    ("two lengths", |_| {
        let two =
            "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n{}";
        two.as_bytes().to_vec()
    }),
    ("headers without end", |_| {
        format!("GET /health HTTP/1.1\r\n{}\r\n", "X-A: b\r\n".repeat(100_000)).into_bytes()
    }),
    ("a length without a body", |_| {
        format!("POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {HOG}\r\nContent-Length: {}\r\n\r\n", u64::MAX)
            .into_bytes()
    }),
];

/// The load of one client over this many connections, against a light one.
pub(crate) const LOADS: &[(&str, usize, Attack)] = &[
    ("short prompts", 120, |number| completion(number, &json!({}))),
    ("prompts of 900 tokens", 120, |number| {
        let prompt: Vec<usize> = (0..900).map(|index| 300 + (number * 7 + index) % 1_500).collect();
        completion(number, &json!({"prompt": prompt}))
    }),
    ("32 answers", 1, |number| completion(number, &json!({"n": 32, "max_tokens": 900, "temperature": 1}))),
    ("lists of 128 prompts", 2, |number| {
        let prompts: Vec<String> = (0..128).map(|index| format!("Once upon a time {index}")).collect();
        completion(number, &json!({"prompt": prompts, "max_tokens": 300}))
    }),
    ("a name for each request", 120, |number| {
        let body =
            json!({"prompt": "Once upon a time", "max_tokens": 60, "ignore_eos": true, "seed": number});
        let name = format!("x-client-id: n{number}\r\n");
        post(COMPLETIONS, HOG, &name, body.to_string().as_bytes())
    }),
    ("megabytes of gzip members", 64, |_| post(COMPLETIONS, HOG, GZIP, &gzip(b"").repeat(50_000))),
    ("JSON bombs", 8, |_| unknown_field(&list(r#"{"a":1}"#, 300_000))),
    ("counts of 10,000 blocks", 64, |_| {
        let blocks = vec![json!({"type": "text", "text": "a"}); 10_000];
        json_of(
            "/v1/messages/count_tokens",
            &json!({"model": "demo", "messages": [{"role": "user", "content": blocks}]}),
        )
    }),
    ("regular expressions", 16, |number| {
        let regex = format!("({}x{number})", ".*".repeat(700));
        completion(number, &json!({"structured_outputs": {"regex": regex}}))
    }),
    // Compiled at once, and then each set of allowed tokens is dear.
    ("an ambiguous grammar", 1, |number| {
        let grammar = "start: start start start | start start | /[a-z ]/ | \"\"";
        completion(number, &json!({"max_tokens": 400, "structured_outputs": {"grammar": grammar}}))
    }),
    ("schemas of 900 properties", 6, |number| {
        let properties: serde_json::Map<String, Value> =
            (0..900).map(|index| (format!("p{index}"), json!({"type": "string"}))).collect();
        let schema = json!({"type": "object", "properties": properties, "additionalProperties": false});
        completion(number, &json!({"max_tokens": 400, "structured_outputs": {"json": schema}}))
    }),
];
