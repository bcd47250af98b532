//! Anthropic's interface: the same answers whole and streamed, its shape of errors, its keys.

use serde_json::{Value, json};

use super::client::{Answer, Server, get, named_events, post_bytes, send};
use super::scripted::scripted_model;

const MESSAGES: &str = "/v1/messages";
const TEMPLATE: &str = include_str!("../fixtures/tok/chat/tools.jinja");
const TEMPLATE_PATH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/tok/chat/tools.jinja");

fn weather() -> Value {
    json!({"name": "get_weather", "description": "Weather of a city", "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": false,
    }})
}

fn request(change: &Value) -> Value {
    let mut body = json!({
        "model": "demo", "max_tokens": 40, "temperature": 0, "messages": [{"role": "user", "content": "Hello"}],
    });
    for (name, value) in change.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

/// The message that a client puts together from a stream.
#[track_caller]
pub(super) fn joined(events: &[Value]) -> Value {
    let (first, rest) = events.split_first().unwrap();
    assert_eq!(first["type"], "message_start");
    assert_eq!((&first["message"]["content"], &first["message"]["stop_reason"]), (&json!([]), &Value::Null));
    let mut message = first["message"].clone();
    let mut open: Option<(usize, String)> = None;
    let mut types = rest.iter().map(|event| event["type"].as_str().unwrap());
    assert_eq!(types.next(), Some("ping"));
    assert_eq!(types.next_back(), Some("message_stop"));
    assert_eq!(types.next_back(), Some("message_delta"));
    for event in rest {
        let index = event["index"].as_u64().map(|index| usize::try_from(index).unwrap());
        match event["type"].as_str().unwrap() {
            "ping" | "message_stop" => {}
            "content_block_start" => {
                let content = message["content"].as_array_mut().unwrap();
                assert_eq!((open.is_none(), index), (true, Some(content.len())));
                content.push(event["content_block"].clone());
                open = Some((index.unwrap(), String::new()));
            }
            "content_block_delta" => {
                let (open, json) = open.as_mut().unwrap();
                assert_eq!(index, Some(*open));
                let block = &mut message["content"][*open];
                let delta = &event["delta"];
                let name = match delta["type"].as_str().unwrap() {
                    "text_delta" => "text",
                    "thinking_delta" => "thinking",
                    "signature_delta" => "signature",
                    "input_json_delta" => {
                        json.push_str(delta["partial_json"].as_str().unwrap());
                        continue;
                    }
                    other => panic!("{other}"),
                };
                let text = delta[name].as_str().unwrap();
                assert!(!text.is_empty());
                block[name] = (block[name].as_str().unwrap().to_owned() + text).into();
            }
            "content_block_stop" => {
                let (open, json) = open.take().unwrap();
                assert_eq!(index, Some(open));
                if !json.is_empty() {
                    let input = serde_json::from_str(&json);
                    message["content"][open]["input"] =
                        input.unwrap_or_else(|_| json!({"INVALID_JSON": json}));
                }
            }
            "message_delta" => {
                assert_eq!(open, None);
                for (name, value) in event["delta"].as_object().unwrap() {
                    message[name] = value.clone();
                }
                message["usage"] = event["usage"].clone();
            }
            other => panic!("{other}"),
        }
    }
    message
}

/// The message as a whole, after checking that a stream says the same. Ids, which are random, are taken out.
#[track_caller]
fn both(server: &Server, body: &Value) -> Value {
    let without_ids = |mut message: Value| {
        assert!(message["id"].take().as_str().unwrap().starts_with("msg_"));
        for block in message["content"].as_array_mut().unwrap() {
            if block["type"] == "tool_use" {
                assert!(!block["id"].take().as_str().unwrap().is_empty());
            }
        }
        // The second of two equal prompts finds the first one's cache.
        let usage = message["usage"].take();
        let input = ["input_tokens", "cache_read_input_tokens"].map(|name| usage[name].as_u64().unwrap());
        message["usage"] =
            json!([input[0] + input[1], usage["output_tokens"], usage["output_tokens_details"]]);
        message
    };
    let whole = without_ids(server.post(MESSAGES, body).success());
    let mut streamed = body.clone();
    streamed["stream"] = json!(true);
    let events = named_events(&server.post(MESSAGES, &streamed));
    assert_eq!(without_ids(joined(&events)), whole);
    whole
}

#[test]
fn a_message_is_the_same_whole_and_streamed() {
    let server = Server::start("--max-model-len 256 --block-size 8");
    let message = both(&server, &request(&json!({"system": "You are kind."})));
    assert_eq!(
        (&message["type"], &message["role"], &message["model"]),
        (&json!("message"), &json!("assistant"), &json!("demo"))
    );
    let text = message["content"][0]["text"].as_str().unwrap();
    assert!(!text.is_empty() && message["content"].as_array().unwrap().len() == 1);
    assert_eq!((&message["stop_reason"], &message["stop_sequence"]), (&json!("end_turn"), &Value::Null));
    // It is what a chat answers.
    let chat = json!({
        "messages": [{"role": "system", "content": "You are kind."}, {"role": "user", "content": "Hello"}],
        "max_tokens": 40, "temperature": 0,
    });
    let chat = server.post("/v1/chat/completions", &chat).success();
    assert_eq!(chat["choices"][0]["message"]["content"], text);
    let count =
        server.post("/v1/messages/count_tokens", &request(&json!({"system": "You are kind."}))).success();
    assert_eq!(count, json!({"input_tokens": chat["usage"]["prompt_tokens"]}));
    assert_eq!(message["usage"][0], chat["usage"]["prompt_tokens"]);
    // The ways to end.
    let cut = both(&server, &request(&json!({"max_tokens": 2})));
    assert_eq!((&cut["stop_reason"], &cut["usage"][1]), (&json!("max_tokens"), &json!(2)));
    let stop: String = text.chars().skip(2).take(3).collect();
    let body = request(&json!({"system": "You are kind.", "stop_sequences": ["zzz", stop]}));
    let stopped = both(&server, &body);
    assert_eq!((&stopped["stop_reason"], &stopped["stop_sequence"]), (&json!("stop_sequence"), &json!(stop)));
    assert!(text.starts_with(stopped["content"][0]["text"].as_str().unwrap()));
    // More than the window has is all of it.
    let long = both(&server, &request(&json!({"max_tokens": 32_000, "ignore_eos": true})));
    assert_eq!(long["stop_reason"], "model_context_window_exceeded");
    assert_eq!(long["usage"][0].as_u64().unwrap() + long["usage"][1].as_u64().unwrap(), 256);
    // Cached tokens are counted separately.
    let body = request(&json!({"system": "You are kind and you are brief, always."}));
    server.post(MESSAGES, &body).success();
    let usage = server.post(MESSAGES, &body).success()["usage"].clone();
    let (read, rest) =
        (usage["cache_read_input_tokens"].as_u64().unwrap(), usage["input_tokens"].as_u64().unwrap());
    assert!(read >= 8 && rest >= 1, "{usage}");
    let count = server.post("/v1/messages/count_tokens", &body).success();
    assert_eq!(count["input_tokens"], read + rest);
    // What was asked is known afterwards.
    let id = server.post(MESSAGES, &body).success()["id"].as_str().unwrap().to_owned();
    assert_eq!(server.get(&format!("/v1/requests/{id}")).success()["answer"], "message");
}

#[test]
fn a_last_turn_of_the_assistant_is_gone_on_with() {
    let server = Server::start("--max-model-len 256");
    let messages = json!([
        {"role": "user", "content": "Tell me a story."}, {"role": "assistant", "content": "Once upon a time"},
    ]);
    let message = both(&server, &request(&json!({"messages": messages})));
    let [block] = &message["content"].as_array().unwrap()[..] else { panic!("{message}") };
    // It is what a chat with `continue_final_message` answers.
    let mut chat = json!({"messages": messages, "max_tokens": 40, "temperature": 0});
    (chat["continue_final_message"], chat["add_generation_prompt"]) = (true.into(), false.into());
    let chat = server.post("/v1/chat/completions", &chat).success();
    assert_eq!(block["text"], chat["choices"][0]["message"]["content"]);
    assert!(!block["text"].as_str().unwrap().contains("Once upon"), "{message}");
    let count = server.post("/v1/messages/count_tokens", &request(&json!({"messages": messages})));
    assert_eq!(count.success()["input_tokens"], chat["usage"]["prompt_tokens"]);
    // Several turns and blocks are one text.
    let divided = json!([
        {"role": "user", "content": "Tell me a story."},
        {"role": "assistant", "content": [{"type": "text", "text": "It is short."}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Once upon a time"}]},
    ]);
    let lines = json!([messages[0], {"role": "assistant", "content": "It is short.\nOnce upon a time"}]);
    let [divided, lines] =
        [divided, lines].map(|messages| both(&server, &request(&json!({"messages": messages}))));
    assert_eq!(divided["content"], lines["content"]);
}

#[test]
fn a_model_that_must_call_calls() {
    let server = Server::start(&format!("--max-model-len 1024 --chat-template {TEMPLATE_PATH}"));
    for choice in [
        json!({"type": "tool", "name": "get_weather"}),
        json!({"type": "any", "disable_parallel_tool_use": true}),
    ] {
        let body = request(&json!({"tools": [weather()], "tool_choice": choice, "max_tokens": 200}));
        let message = both(&server, &body);
        assert_eq!(message["stop_reason"], "tool_use", "{message}");
        let [block] = &message["content"].as_array().unwrap()[..] else { panic!("{message}") };
        assert_eq!((&block["type"], &block["name"]), (&json!("tool_use"), &json!("get_weather")));
        assert!(["Rome", "Oslo"].contains(&block["input"]["city"].as_str().unwrap()));
        assert!((1..=9).contains(&block["input"]["days"].as_i64().unwrap()));
    }
    // Cut off in the middle, the call is no call without arguments.
    let named = json!({"type": "tool", "name": "get_weather"});
    let cut = (20..80).find_map(|max_tokens| {
        let body = request(&json!({"tools": [weather()], "tool_choice": named, "max_tokens": max_tokens}));
        let message = server.post(MESSAGES, &body).success();
        let input = &message["content"][0]["input"];
        (input.is_object() && *input != json!({})).then_some((body, message))
    });
    let (body, message) = cut.unwrap();
    assert_eq!(message["stop_reason"], "max_tokens");
    assert!(message["content"][0]["input"]["INVALID_JSON"].is_string(), "{message}");
    both(&server, &body);
    // A schema for the answer.
    let format = json!({"type": "json_schema", "schema": {
        "type": "object", "properties": {"is_big": {"type": "boolean"}}, "required": ["is_big"], "additionalProperties": false,
    }});
    let message = both(&server, &request(&json!({"output_config": {"format": format}})));
    let answer: Value = serde_json::from_str(message["content"][0]["text"].as_str().unwrap()).unwrap();
    assert!(answer["is_big"].is_boolean(), "{answer}");
}

#[test]
fn thinking_text_and_calls_are_blocks() {
    let call = "<think>\nRome, then. </think>\n\nI'll look.\n<tool_call>\n{\"name\": \"get_weather\", \"arguments\": \
        {\"city\": \"Rôme 🦙\", \"days\": 2}}\n</tool_call>";
    let scripts = [("<|begin|>", call), ("<think>", "A </think>\n\nBye"), ("<|answer|>", "It is sunny.")];
    let model = scripted_model(TEMPLATE, &[], &scripts[..1]);
    let server = Server::start(&format!("--model {} --served-model-name demo", model.path().display()));
    let body = request(&json!({"tools": [weather()], "max_tokens": 300}));
    let message = both(&server, &body);
    let content = message["content"].as_array().unwrap();
    let types: Vec<&str> = content.iter().map(|block| block["type"].as_str().unwrap()).collect();
    assert_eq!(types, ["thinking", "text", "tool_use"]);
    assert_eq!((&content[0]["thinking"], &content[1]["text"]), (&json!("Rome, then."), &json!("I'll look.")));
    assert_eq!(content[2]["input"], json!({"city": "Rôme 🦙", "days": 2}));
    assert_eq!(message["stop_reason"], "tool_use");
    assert!(message["usage"][2]["thinking_tokens"].as_u64().unwrap() > 2);
    let hidden = json!({"tools": [weather()], "max_tokens": 300, "thinking": {"type": "disabled", "display": "omitted"}});
    let message = both(&server, &request(&hidden));
    assert_eq!(message["content"][0]["type"], "text");
    drop(server);
    // The template switches reasoning on, and the answer goes back.
    let model = scripted_model(TEMPLATE, &["<think>", "</think>"], &scripts[1..]);
    let server = Server::start(&format!("--model {} --served-model-name demo", model.path().display()));
    let thinking = json!({"type": "enabled", "budget_tokens": 1024});
    let message = both(&server, &request(&json!({"thinking": thinking})));
    assert_eq!(
        (&message["content"][0]["thinking"], &message["content"][1]["text"]),
        (&json!("A"), &json!("Bye"))
    );
    let conversation = json!([
        {"role": "user", "content": "Rome?"},
        {"role": "assistant", "content": [
            message["content"][0], {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"days": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "25 °C"}]},
    ]);
    let message = both(&server, &request(&json!({"messages": conversation, "tools": [weather()]})));
    assert_eq!(
        (&message["content"][0]["text"], &message["stop_reason"]),
        (&json!("It is sunny."), &json!("end_turn"))
    );
}

/// An answer that must be an error of this type, in Anthropic's shape.
#[track_caller]
fn check(answer: &Answer, status: u16, kind: &str, words: &str) {
    assert_eq!(answer.status, status, "{}", answer.text());
    assert_eq!(answer.header("content-type"), Some("application/json"));
    let body = answer.json();
    assert_eq!((&body["type"], &body["error"]["type"]), (&json!("error"), &json!(kind)), "{body}");
    let message = body["error"]["message"].as_str().unwrap();
    assert!(message.contains(words), "{message:?} should say {words:?}");
    let id = body["request_id"].as_str().unwrap();
    assert_eq!((answer.header("request-id"), answer.header("x-request-id")), (Some(id), Some(id)));
}

#[test]
fn errors_have_anthropics_shape_wherever_they_come_from() {
    let server = Server::start("--max-model-len 64 --max-body-bytes 100K --api-key secret --api-key other");
    let address = server.address();
    let post = |headers: &str, body: &Value| send(address, post_bytes(MESSAGES, headers, &body.to_string()));
    let key = "x-api-key: secret\r\nanthropic-version: 2023-06-01\r\n";
    assert_eq!(post(key, &request(&json!({}))).status, 200);
    let ok = post("authorization: Bearer wrong\r\nx-api-key: other\r\n", &request(&json!({})));
    assert!(ok.status == 200 && ok.header("request-id") == ok.header("x-request-id"));
    check(&post("", &request(&json!({}))), 401, "authentication_error", "x-api-key");
    check(&post("x-api-key: wrong\r\n", &request(&json!({}))), 401, "authentication_error", "not valid");
    let refused = |change: Value, words: &str| {
        check(&post(key, &request(&change)), 400, "invalid_request_error", words);
    };
    refused(json!({"max_tokens": null}), "max_tokens is missing");
    refused(json!({"max_tokens": 0}), "max_tokens");
    refused(json!({"temperature": 1.5}), "from 0 to 1");
    refused(json!({"temperature": -1}), "temperature is -1; it must be from 0 to 1");
    refused(json!({"n": 2}), "n is 2");
    refused(json!({"stop_sequences": [""]}), "stop_sequences[0] has 0 bytes");
    refused(json!({"stop_sequences": vec!["x"; 1_000]}), "1000 entries");
    refused(json!({"stop_sequences": [1]}), "stop_sequences[0] is 1");
    refused(json!({"prompt_logprobs": 1}), "prompt_logprobs");
    refused(json!({"metadata": {"user_id": 1}}), "metadata.user_id");
    refused(json!({"tools": [weather()], "tool_choice": {"type": "any"}}), "--chat-template");
    let long = "word ".repeat(100);
    refused(json!({"messages": [{"role": "user", "content": long}]}), "prompt is too long");
    refused(json!({"messages": [{"role": "user", "content": "x".repeat(90_000)}]}), "prompt is too long");
    let name = json!({"model": "claude-sonnet-4-5"});
    check(&post(key, &request(&name)), 404, "not_found_error", "the model is \"demo\"");
    check(
        &post(key, &request(&json!({"system": "x".repeat(100 << 10)}))),
        413,
        "request_too_large",
        "102400",
    );
    let not_json = send(address, post_bytes(MESSAGES, key, "{"));
    check(&not_json, 400, "invalid_request_error", "JSON");
    let deep = format!("{{\"messages\": {}{}}}", "[".repeat(10_000), "]".repeat(10_000));
    check(
        &send(address, post_bytes(MESSAGES, key, &deep)),
        400,
        "invalid_request_error",
        "127 lists and objects",
    );
    check(&get(address, MESSAGES), 401, "authentication_error", "API key");
    let nothing = send(address, post_bytes("/v1/messages/batches", key, "{}"));
    check(&nothing, 404, "not_found_error", "/v1/messages/batches");
    let count = send(address, post_bytes("/v1/messages/count_tokens", key, "{}"));
    check(&count, 400, "invalid_request_error", "messages is missing");
    // The other interface keeps its own shape.
    let chat = send(address, post_bytes("/v1/chat/completions", "", "{}"));
    assert_eq!((chat.status, &chat.json()["error"]["code"]), (401, &json!("invalid_api_key")));
}

#[test]
fn a_crowd_gets_retry_after() {
    let server = Server::start("--max-num-seqs 1 --max-waiting 0");
    let body = request(&json!({"stream": true, "max_tokens": 400, "ignore_eos": true}));
    let mut stream = super::client::connect(server.address());
    std::io::Write::write_all(&mut stream, post_bytes(MESSAGES, "", &body.to_string()).as_bytes()).unwrap();
    super::client::read_until(&mut stream, "content_block_delta");
    let answer = server.post(MESSAGES, &request(&json!({})));
    check(&answer, 429, "rate_limit_error", "unfinished");
    assert_eq!(answer.header("retry-after"), Some("1"));
}
