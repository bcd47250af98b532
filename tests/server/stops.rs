//! How answers end, and errors where they cannot begin.

use serde_json::{Value, json};

use super::bad_inputs::check_error;
use super::client::{Server, named_events};
use super::scripted::scripted_model;
use super::structured::{self, CHAT, COMPLETIONS};
use super::{anthropic, responses, tools};

/// A short one, without chance.
fn body(path: &str, change: &Value) -> Value {
    let mut all = json!({"temperature": 0, "max_tokens": 12});
    all.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
    structured::body(path, &all)
}

/// The token ids, the text, and the last choice of an answer or of a stream.
fn answer(server: &Server, path: &str, change: &Value) -> (Vec<u64>, String, Value) {
    let mut request = body(path, change);
    request["return_token_ids"] = true.into();
    let whole = server.post(path, &request).success();
    let choice = whole["choices"][0].clone();
    let ids = choice["token_ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect();
    let text = choice["text"].as_str().or(choice["message"]["content"].as_str()).unwrap().to_owned();
    request["stream"] = true.into();
    let events = server.post(path, &request).events();
    let last = &events.last().unwrap()["choices"][0];
    assert_eq!(
        (&last["stop_reason"], &last["finish_reason"]),
        (&choice["stop_reason"], &choice["finish_reason"])
    );
    (ids, text, choice)
}

#[test]
fn stop_reasons_and_the_least_number_of_tokens() {
    let server = Server::start("--max-model-len 64");
    for path in [CHAT, COMPLETIONS] {
        let (ids, text, choice) = answer(&server, path, &json!({"ignore_eos": true}));
        assert_eq!((choice.get("stop_reason"), ids.len()), (None, 12), "{choice}");
        let third = ids[2];
        let first = ids.iter().position(|id| *id == third).unwrap();
        let (short, _, choice) =
            answer(&server, path, &json!({"stop_token_ids": [third], "ignore_eos": true}));
        assert_eq!((&choice["stop_reason"], &choice["finish_reason"]), (&json!(third), &json!("stop")));
        assert_eq!(short, ids[..=first]);
        // A stop string that comes early: it stops, unless min_tokens is beyond it.
        let word: String = text.trim_start().chars().take(3).collect();
        let (_, stopped, choice) = answer(&server, path, &json!({"stop": [word], "ignore_eos": true}));
        assert_eq!((&choice["stop_reason"], stopped.contains(&word)), (&json!(word), false));
        let (all, whole, choice) =
            answer(&server, path, &json!({"stop": [word], "min_tokens": 12, "ignore_eos": true}));
        assert_eq!((all.len(), whole.contains(&word)), (12, true), "{whole:?}");
        assert_eq!(choice["finish_reason"], "length");
    }
}

#[test]
fn delivered_tokens_are_counted() {
    let server = Server::start("--max-model-len 64 --num-scheduler-steps 8");
    let text = answer(&server, COMPLETIONS, &json!({"ignore_eos": true})).1;
    let before = server.metric("vllm:generation_tokens_total");
    assert_eq!(before, 24.0);
    let word: String = text.trim_start().chars().take(2).collect();
    let stopped = json!({"stop": [word], "ignore_eos": true, "return_token_ids": true});
    let whole = server.post(COMPLETIONS, &body(COMPLETIONS, &stopped)).success();
    let delivered = whole["choices"][0]["token_ids"].as_array().unwrap().len();
    assert!(delivered < 8, "{whole}");
    assert_eq!(whole["usage"]["completion_tokens"], delivered);
    assert_eq!(server.metric("vllm:generation_tokens_total"), before + delivered as f64);
}

#[test]
fn the_error_for_long_prompts_has_the_words_that_programs_know() {
    let server = Server::start("--max-model-len 64");
    let code = Some("context_length_exceeded");
    let long = "word ".repeat(100);
    let huge = "word ".repeat(100_000);
    let begin = "This model's maximum context length is 64 tokens. However, ";
    for (path, field) in [(CHAT, "messages"), (COMPLETIONS, "prompt")] {
        let prompt = |text: &str| match path {
            CHAT => json!([{"role": "user", "content": text}]),
            _ => json!(text),
        };
        let answer = server.post(path, &body(path, &json!({field: prompt(&long)})));
        check_error("the prompt", &answer, 400, Some(field), code, &format!("{begin}your request has "));
        check_error(
            "the prompt",
            &answer,
            400,
            Some(field),
            code,
            " input tokens. Please reduce the length of",
        );
        let answer = server.post(path, &body(path, &json!({field: prompt(&huge)})));
        check_error("the text", &answer, 400, Some(field), code, begin);
        let answer = server.post(path, &body(path, &json!({"max_tokens": 100})));
        let words = format!("{begin}you requested ");
        check_error("both", &answer, 400, Some("max_tokens"), code, &words);
        let message = answer.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(
            message.contains(" in the messages, 100 in the completion). Please reduce the length"),
            "{message}"
        );
    }
}

#[test]
fn minus_one_is_as_many_tokens_as_fit() {
    let server = Server::start("--max-model-len 64");
    let last = |path: &str, field: &str| {
        let mut asked = json!({"max_tokens": null, "seed": -1, "top_k": -1, "ignore_eos": true});
        asked[field] = json!(-1);
        server.post(path, &body(path, &asked)).success()
    };
    for (path, field) in [(CHAT, "max_tokens"), (CHAT, "max_completion_tokens"), (COMPLETIONS, "max_tokens")]
    {
        assert_eq!(last(path, field)["usage"]["total_tokens"], 64, "{path} {field}");
    }
}

#[test]
fn base_urls_may_lack_what_is_always_the_same() {
    let server = Server::start("--max-model-len 64");
    for path in
        ["/chat/completions", "//v1/chat/completions", "/v1/chat/completions/", "/v1/v1/chat/completions"]
    {
        server.post(path, &body(CHAT, &json!({"max_tokens": 1}))).success();
    }
    let elsewhere = server.post("/chats", &json!({}));
    check_error("elsewhere", &elsewhere, 404, None, None, "chats are at /v1/chat/completions");
}

#[test]
fn the_tokenizer_is_described() {
    let server = Server::start("--max-model-len 64");
    let info = server.get("/tokenizer_info").success();
    assert!(info["tokenizer_class"].is_string() && info["chat_template"].is_string(), "{info}");
    for name in ["bos_token", "eos_token"] {
        let Some(token) = info[name].as_str() else { continue };
        let ids = server.post("/tokenize", &json!({"prompt": token, "add_special_tokens": false})).success()
            ["tokens"]
            .clone();
        assert_eq!(ids, json!([info[format!("{name}_id")]]), "{name}");
    }
    assert!(info["eos_token"].is_string());
}

/// Reasoning, content and finish reason, whole and streamed, which must be the same.
fn thought_and_said(server: &Server, path: &str, stop: &str, change: &Value) -> [String; 3] {
    let field = if path == MESSAGES { "stop_sequences" } else { "stop" };
    let turns = json!([{"role": "user", "content": "Hello"}]);
    let limit = if path == RESPONSES { "max_output_tokens" } else { "max_tokens" };
    let mut body = json!({"temperature": 0, limit: 100, field: [stop]});
    body[if path == RESPONSES { "input" } else { "messages" }] = turns;
    body.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
    let [whole, streamed] = [false, true].map(|is_stream| {
        body["stream"] = is_stream.into();
        let answer = server.post(path, &body);
        assert_eq!(answer.header("x-ignored-fields"), None);
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        match path {
            CHAT => {
                let (message, reason) = match is_stream {
                    true => tools::joined(&answer.events()),
                    false => {
                        let choice = answer.success()["choices"][0].clone();
                        (choice["message"].clone(), choice["finish_reason"].clone())
                    }
                };
                [text(&message["reasoning_content"]), text(&message["content"]), text(&reason)]
            }
            RESPONSES => {
                let response = match is_stream {
                    true => responses::joined(&named_events(&answer)),
                    false => answer.success(),
                };
                let said = |kind: &str| {
                    let items = response["output"].as_array().unwrap().iter();
                    items
                        .filter(|item| item["type"] == kind)
                        .map(|item| text(&item["content"][0]["text"]))
                        .collect()
                };
                [said("reasoning"), said("message"), text(&response["status"])]
            }
            _ => {
                let message = match is_stream {
                    true => anthropic::joined(&named_events(&answer)),
                    false => answer.success(),
                };
                let said = |kind: &str| {
                    message["content"].as_array().unwrap().iter().map(|block| text(&block[kind])).collect()
                };
                [said("thinking"), said("text"), text(&message["stop_reason"])]
            }
        }
    });
    assert_eq!(whole, streamed, "{path} {stop:?}");
    whole
}

const RESPONSES: &str = "/v1/responses";
const MESSAGES: &str = "/v1/messages";

#[test]
fn stop_strings_do_not_end_reasoning_unless_asked() {
    let template = "{% for message in messages %}{{ message.content }}{% endfor %}<|begin|>";
    let special = ["<think>", "</think>"];
    let answer = "<think>\nFirst.\n\nThen STOP, so.\n</think>\n\nIt is.\n\nOr STOP it is not.";
    for special in [&special as &[&str], &[]] {
        let model = scripted_model(template, special, &[("<|begin|>", answer)]);
        let start = |flags: &str| Server::start(&format!("--model {} {flags}", model.path().display()));
        let server = start("--reasoning-parser qwen3");
        for path in [CHAT, RESPONSES, MESSAGES] {
            let thought = "First.\n\nThen STOP, so.";
            let ended = match path {
                CHAT => "stop",
                RESPONSES => "completed",
                _ => "stop_sequence",
            };
            let check = |stop: &str, change: Value, expected: [&str; 3]| {
                assert_eq!(
                    thought_and_said(&server, path, stop, &change),
                    expected,
                    "{path} {stop:?} {change}"
                );
            };
            check("STOP", json!({}), [thought, "It is.\n\nOr ", ended]);
            // White space between the two is neither.
            check("\n\n", json!({}), [thought, "It is.", ended]);
            check(
                "</think>",
                json!({}),
                [thought, "It is.\n\nOr STOP it is not.", if path == MESSAGES { "end_turn" } else { ended }],
            );
            check("STOP", json!({"stop_in_reasoning": true}), ["First.\n\nThen ", "", ended]);
            check("\n\n", json!({"stop_in_reasoning": true}), ["First.", "", ended]);
        }
        // Without parsers, all of it is the answer.
        let server = start("--reasoning-parser none");
        let [_, said, _] = thought_and_said(&server, CHAT, "STOP", &json!({}));
        assert!(said.ends_with("First.\n\nThen "), "{said:?}");
    }
}
