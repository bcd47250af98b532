//! OpenAI's interface for agents: the same answers whole and streamed, what is kept of them and for whom.

use serde_json::{Value, json};

use super::bad_inputs::check_error;
use super::client::{Answer, Server, named_events, post_bytes, send};
use super::scripted::scripted_model;

const RESPONSES: &str = "/v1/responses";
const TEMPLATE: &str = include_str!("../fixtures/tok/chat/tools.jinja");
const TEMPLATE_PATH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/tok/chat/tools.jinja");

fn weather() -> Value {
    json!({"type": "function", "name": "get_weather", "description": "Weather of a city", "strict": true, "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": false,
    }})
}

fn request(change: &Value) -> Value {
    let mut body = json!({"model": "demo", "input": "Hello", "temperature": 0, "max_output_tokens": 40});
    for (name, value) in change.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

/// Checks the events of a stream and puts their response together from the chunks.
#[track_caller]
pub(super) fn joined(events: &[Value]) -> Value {
    for (number, event) in (0..).zip(events) {
        assert_eq!(event["sequence_number"], json!(number), "{event}");
    }
    let [created, started, rest @ .., last] = events else { panic!("{events:?}") };
    assert_eq!(
        (&created["type"], &started["type"]),
        (&json!("response.created"), &json!("response.in_progress"))
    );
    let first = &created["response"];
    assert_eq!(
        (&first["status"], &first["output"], &first["usage"]),
        (&json!("in_progress"), &json!([]), &Value::Null)
    );
    assert_eq!(first, &started["response"]);
    let mut output: Vec<Value> = Vec::new();
    let mut is_open = false;
    for event in rest {
        let kind = event["type"].as_str().unwrap();
        let index = usize::try_from(event["output_index"].as_u64().unwrap()).unwrap();
        if kind == "response.output_item.added" {
            assert_eq!(
                (is_open, index, &event["item"]["status"]),
                (false, output.len(), &json!("in_progress"))
            );
            output.push(event["item"].clone());
            is_open = true;
            continue;
        }
        assert_eq!((is_open, index + 1), (true, output.len()), "{event}");
        let item = &mut output[index];
        if kind == "response.output_item.done" {
            // The chunks say the same as the end.
            item["status"] = event["item"]["status"].clone();
            assert_eq!(*item, event["item"]);
            is_open = false;
            continue;
        }
        assert_eq!(event["item_id"], item["id"]);
        let append = |to: &mut Value| {
            assert!(!event["delta"].as_str().unwrap().is_empty());
            *to = (to.as_str().unwrap().to_owned() + event["delta"].as_str().unwrap()).into();
        };
        match kind {
            "response.content_part.added" => {
                assert_eq!((&item["content"], &event["part"]["text"]), (&json!([]), &json!("")));
                item["content"] = json!([event["part"]]);
            }
            "response.output_text.delta" => {
                append(&mut item["content"][0]["text"]);
                let tokens = event["logprobs"].as_array().unwrap().clone();
                item["content"][0]["logprobs"].as_array_mut().unwrap().extend(tokens);
            }
            "response.reasoning_text.delta" => append(&mut item["content"][0]["text"]),
            "response.function_call_arguments.delta" => append(&mut item["arguments"]),
            "response.output_text.done" | "response.reasoning_text.done" => {
                assert_eq!(
                    (&event["text"], &event["content_index"]),
                    (&item["content"][0]["text"], &json!(0))
                );
            }
            "response.content_part.done" => assert_eq!(event["part"], item["content"][0]),
            "response.function_call_arguments.done" => {
                assert_eq!((&event["arguments"], &event["name"]), (&item["arguments"], &item["name"]));
            }
            other => panic!("{other}"),
        }
    }
    let response = &last["response"];
    assert_eq!(last["type"], format!("response.{}", response["status"].as_str().unwrap()));
    assert!(!is_open);
    assert_eq!((&response["output"], &response["id"]), (&json!(output), &first["id"]));
    response.clone()
}

/// The response as a whole, after checking that a stream says the same. What differs each time is taken out.
#[track_caller]
fn both(server: &Server, body: &Value) -> Value {
    let without_ids = |mut response: Value| {
        assert!(response["id"].take().as_str().unwrap().starts_with("resp_"));
        response["created_at"].take();
        response["completed_at"].take();
        // The second of two equal prompts finds the first one's cache.
        let details = response["usage"]["input_tokens_details"].take();
        assert_eq!((details["cached_tokens"].is_u64(), &details["cache_write_tokens"]), (true, &json!(0)));
        for item in response["output"].as_array_mut().unwrap() {
            let prefix = match item["type"].as_str().unwrap() {
                "message" => "msg_",
                "reasoning" => "rs_",
                _ => "fc_",
            };
            assert!(item["id"].take().as_str().unwrap().starts_with(prefix));
            if prefix == "fc_" {
                assert!(!item["call_id"].take().as_str().unwrap().is_empty());
            }
        }
        response
    };
    let whole = without_ids(server.post(RESPONSES, body).success());
    let mut streamed = body.clone();
    streamed["stream"] = json!(true);
    let events = named_events(&server.post(RESPONSES, &streamed));
    assert_eq!(without_ids(joined(&events)), whole);
    whole
}

#[test]
fn a_response_is_the_same_whole_and_streamed() {
    let server = Server::start("--max-model-len 256");
    let body = request(&json!({
        "instructions": "You are kind.", "metadata": {"run": "7"}, "store": true, "top_logprobs": 2, "user": "ann",
        "include": ["message.output_text.logprobs", "reasoning.encrypted_content"],
    }));
    let response = both(&server, &body);
    assert_eq!((&response["object"], &response["status"]), (&json!("response"), &json!("completed")));
    let text = response["output"][0]["content"][0]["text"].as_str().unwrap();
    // It is what a chat answers, and the report on its tokens.
    let chat = json!({
        "messages": [{"role": "system", "content": "You are kind."}, {"role": "user", "content": "Hello"}],
        "max_tokens": 40, "temperature": 0, "logprobs": true, "top_logprobs": 2,
    });
    let chat = server.post("/v1/chat/completions", &chat).success();
    assert_eq!(chat["choices"][0]["message"]["content"], text);
    let tokens = response["output"][0]["content"][0]["logprobs"].as_array().unwrap();
    let of_chat = chat["choices"][0]["logprobs"]["content"].as_array().unwrap();
    // Without the token that ends it, which is no text.
    assert_eq!(tokens[..], of_chat[..of_chat.len() - 1]);
    let usage = &response["usage"];
    assert_eq!(usage["input_tokens"], chat["usage"]["prompt_tokens"]);
    assert_eq!(
        (&usage["output_tokens"], &usage["total_tokens"]),
        (&chat["usage"]["completion_tokens"], &chat["usage"]["total_tokens"])
    );
    for (name, value) in [
        ("instructions", json!("You are kind.")),
        ("metadata", json!({"run": "7"})),
        ("max_output_tokens", json!(40)),
        ("temperature", json!(0.0)),
        ("top_p", json!(1.0)),
        ("top_logprobs", json!(2)),
        ("user", json!("ann")),
        ("error", Value::Null),
        ("incomplete_details", Value::Null),
        // Nothing is stored, and the response reports it.
        ("store", json!(false)),
    ] {
        assert_eq!(response[name], value, "{name}");
    }
    let cut = both(&server, &request(&json!({"max_output_tokens": 2})));
    assert_eq!((&cut["status"], &cut["usage"]["output_tokens"]), (&json!("incomplete"), &json!(2)));
    assert_eq!(
        (&cut["incomplete_details"], &cut["output"][0]["status"]),
        (&json!({"reason": "max_output_tokens"}), &json!("incomplete"))
    );
    let input = json!([{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}]);
    assert_eq!(
        both(&server, &request(&json!({"input": input, "max_output_tokens": 2})))["output"],
        cut["output"]
    );
    let format = json!({"type": "json_schema", "name": "size", "strict": true, "schema": {
        "type": "object", "properties": {"is_big": {"type": "boolean"}}, "required": ["is_big"], "additionalProperties": false,
    }});
    let response = both(&server, &request(&json!({"text": {"format": format}})));
    let answer: Value =
        serde_json::from_str(response["output"][0]["content"][0]["text"].as_str().unwrap()).unwrap();
    assert!(answer["is_big"].is_boolean());
    assert_eq!(response["text"]["format"], format);
    let id = server.post(RESPONSES, &request(&json!({}))).success()["id"].as_str().unwrap().to_owned();
    assert_eq!(server.get(&format!("/v1/requests/{id}")).success()["answer"], "response");
    check_error(
        "not kept",
        &server.get(&format!("{RESPONSES}/{id}")),
        404,
        Some("id"),
        None,
        "--responses-memory",
    );
}

#[test]
fn a_model_that_must_call_calls_and_goes_on() {
    let server = Server::start(&format!("--max-model-len 1024 --chat-template {TEMPLATE_PATH}"));
    let allowed = json!({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_weather"}]});
    let time = json!({"type": "function", "name": "get_time"});
    for choice in [json!({"type": "function", "name": "get_weather"}), allowed] {
        let change = json!({
            "tools": [time, weather()], "tool_choice": choice, "max_output_tokens": 200, "parallel_tool_calls": false,
            // Only text has a format, and there is none.
            "text": {"format": {"type": "json_object"}},
        });
        let body = request(&change);
        let response = both(&server, &body);
        let [call] = &response["output"].as_array().unwrap()[..] else { panic!("{response}") };
        assert_eq!((&call["type"], &call["name"]), (&json!("function_call"), &json!("get_weather")));
        let arguments: Value = serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap();
        assert!(["Rome", "Oslo"].contains(&arguments["city"].as_str().unwrap()), "{arguments}");
        // What came goes back as it is.
        let response = server.post(RESPONSES, &body).success();
        let mut input = vec![json!({"role": "user", "content": "Hello"})];
        input.extend(response["output"].as_array().unwrap().clone());
        input.push(json!({"type": "function_call_output", "call_id": response["output"][0]["call_id"], "output": "sunny"}));
        let answer =
            server.post(RESPONSES, &request(&json!({"input": input, "tools": [weather()]}))).success();
        assert!(!answer["output"].as_array().unwrap().is_empty(), "{answer}");
    }
}

#[test]
fn reasoning_text_and_calls_are_items() {
    let call = "<think>\nRome, then. </think>\n\nI'll look.\n<tool_call>\n{\"name\": \"get_weather\", \"arguments\": \
        {\"city\": \"Rôme 🦙\", \"days\": 2}}\n</tool_call>";
    let scripts = [("<|begin|>", call), ("<|answer|>", "It is sunny.")];
    let model = scripted_model(TEMPLATE, &["<think>", "</think>", "<tool_call>", "</tool_call>"], &scripts);
    let flags = format!("--model {} --served-model-name demo --responses-memory 10", model.path().display());
    let server = Server::start(&flags);
    let body = request(&json!({"tools": [weather()], "max_output_tokens": 300, "store": false}));
    let response = both(&server, &body);
    let output = response["output"].as_array().unwrap();
    let types: Vec<&str> = output.iter().map(|item| item["type"].as_str().unwrap()).collect();
    assert_eq!(types, ["reasoning", "message", "function_call"]);
    assert_eq!(output[0]["content"], json!([{"type": "reasoning_text", "text": "Rome, then."}]));
    assert_eq!(output[1]["content"][0]["text"], "I'll look.");
    assert_eq!(output[2]["arguments"], "{\"city\": \"Rôme 🦙\", \"days\": 2}");
    assert!(response["usage"]["output_tokens_details"]["reasoning_tokens"].as_u64().unwrap() > 2);
    assert_eq!(response["store"], json!(false));
    // With a memory, what the tool said is enough; items may be referred to.
    let mut body = body;
    body["store"] = json!(true);
    let first = server.post(RESPONSES, &body).success();
    assert_eq!(first["store"], json!(true));
    let result =
        json!({"type": "function_call_output", "call_id": first["output"][2]["call_id"], "output": "25 °C"});
    let change = json!({"previous_response_id": first["id"], "input": [result], "tools": [weather()]});
    let second = server.post(RESPONSES, &request(&change)).success();
    assert_eq!(second["output"][0]["content"][0]["text"], "It is sunny.");
    let reference = json!({"type": "item_reference", "id": first["output"][2]["id"]});
    let input = json!([{"role": "user", "content": "Hello"}, reference, result]);
    let third = server.post(RESPONSES, &request(&json!({"input": input, "tools": [weather()]}))).success();
    assert_eq!(third["output"][0]["content"][0]["text"], "It is sunny.");
    // The conversation before the second one: what was asked, the three items of the answer, the result.
    let items = server
        .get(&format!("{RESPONSES}/{}/input_items?order=asc", second["id"].as_str().unwrap()))
        .success();
    let types: Vec<&str> =
        items["data"].as_array().unwrap().iter().map(|item| item["type"].as_str().unwrap()).collect();
    assert_eq!(types, ["message", "reasoning", "message", "function_call", "function_call_output"]);
}

/// A request with this key.
fn with_key(server: &Server, key: &str, method: &str, path: &str, body: Option<&Value>) -> Answer {
    let header = format!("authorization: Bearer {key}\r\n");
    let bytes = match body {
        Some(body) => post_bytes(path, &header, &body.to_string()),
        None => format!("{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{header}\r\n"),
    };
    send(server.address(), bytes)
}

#[test]
fn responses_are_kept_for_their_key_only_and_the_oldest_are_forgotten() {
    let server = Server::start("--max-model-len 256 --responses-memory 2 --api-key a --api-key b");
    let create = |key: &str, change: Value| {
        let answer = with_key(&server, key, "POST", RESPONSES, Some(&request(&change)));
        assert_eq!(answer.status, 200, "{}", answer.text());
        let stream = answer.header("content-type") == Some("text/event-stream");
        if stream { joined(&named_events(&answer)) } else { answer.json() }
    };
    let path = |response: &Value| format!("{RESPONSES}/{}", response["id"].as_str().unwrap());
    let get = |key: &str, path: &str| with_key(&server, key, "GET", path, None);
    for stream in [false, true] {
        let first = create("a", json!({"stream": stream, "max_output_tokens": 4}));
        assert_eq!(get("a", &path(&first)).success(), first);
        // Another key's are not there.
        for (method, path) in [("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")]
            .map(|(method, more)| (method, path(&first) + more))
        {
            let answer = with_key(&server, "b", method, &path, None);
            check_error(&path, &answer, 404, Some("id"), None, "for the key that made them");
        }
        let next = json!({"previous_response_id": first["id"], "input": "And then?", "max_output_tokens": 4});
        let answer = with_key(&server, "b", "POST", RESPONSES, Some(&request(&next)));
        check_error(
            "previous",
            &answer,
            400,
            Some("previous_response_id"),
            Some("previous_response_not_found"),
            "no response",
        );
        let item = json!({"input": [{"type": "item_reference", "id": first["output"][0]["id"]}]});
        let answer = with_key(&server, "b", "POST", RESPONSES, Some(&request(&item)));
        check_error("reference", &answer, 400, Some("input[0]"), None, "not stored");
        // The same as if all had been sent.
        let second = create("a", next);
        let text = first["output"][0]["content"][0]["text"].clone();
        let whole = json!({"max_output_tokens": 4, "store": false, "input": [
            {"role": "user", "content": "Hello"}, {"role": "assistant", "content": text}, {"role": "user", "content": "And then?"},
        ]});
        let whole = create("a", whole);
        assert_eq!(whole["output"][0]["content"], second["output"][0]["content"]);
        assert_eq!(get("a", &path(&whole)).status, 404, "it was not to be kept");
        let page = get("a", &(path(&second) + "/input_items?limit=2")).success();
        assert_eq!(
            (&page["has_more"], &page["data"][0]["content"][0]["text"]),
            (&json!(true), &json!("And then?"))
        );
        let last = page["last_id"].as_str().unwrap();
        let page = get("a", &(path(&second) + "/input_items?limit=2&after=" + last)).success();
        assert_eq!((&page["has_more"], page["data"].as_array().unwrap().len()), (&json!(false), 1));
        create("a", json!({"max_output_tokens": 1}));
        assert_eq!(get("a", &path(&first)).status, 404, "two are stored");
        // What is forgotten takes nothing away from those that went on from it.
        let third = create(
            "a",
            json!({"previous_response_id": second["id"], "input": "So?", "max_output_tokens": 1}),
        );
        let deleted = with_key(&server, "a", "DELETE", &path(&third), None).success();
        assert_eq!(deleted, json!({"id": third["id"], "object": "response", "deleted": true}));
        assert_eq!(get("a", &path(&third)).status, 404);
    }
    let other = create("b", json!({"max_output_tokens": 1}));
    for (query, param) in
        [("?limit=0", "limit"), ("?limit=x", "limit"), ("?order=up", "order"), ("?after=x", "after")]
    {
        check_error(
            query,
            &get("b", &(path(&other) + "/input_items" + query)),
            400,
            Some(param),
            None,
            param,
        );
    }
    let answer = with_key(&server, "b", "POST", &(path(&other) + "/cancel"), None);
    check_error("cancel", &answer, 400, Some("id"), None, "background response");
    // Long conversations come in pages.
    let items: Vec<Value> =
        (0..25).map(|index| json!({"role": "user", "content": index.to_string()})).collect();
    let long = create("b", json!({"input": items, "max_output_tokens": 1}));
    let page = |query: &str| get("b", &(path(&long) + "/input_items" + query)).success();
    let texts = |page: &Value| -> Vec<usize> {
        let texts = page["data"].as_array().unwrap().iter().map(|item| item["content"].as_str().unwrap());
        texts.map(|text| text.parse().unwrap()).collect()
    };
    let first = page("");
    assert_eq!((texts(&first), &first["has_more"]), ((5..25).rev().collect(), &json!(true)));
    let rest = page(&format!("?after={}", first["last_id"].as_str().unwrap()));
    assert_eq!((texts(&rest), &rest["has_more"]), ((0..5).rev().collect(), &json!(false)));
    let end = page(&format!("?after={}", rest["last_id"].as_str().unwrap()));
    assert_eq!((texts(&end).len(), &end["has_more"], &end["first_id"]), (0, &json!(false), &Value::Null));
    assert_eq!(texts(&page("?order=asc&limit=100")), (0..25).collect::<Vec<_>>());
    check_error(
        "stream",
        &get("b", &(path(&other) + "?stream=true")),
        400,
        Some("stream"),
        Some("unsupported_parameter"),
        "complete",
    );
    assert_eq!(with_key(&server, "wrong", "GET", &path(&other), None).status, 401);
}

#[test]
fn what_cannot_be_honoured_is_refused() {
    let server = Server::start("--max-model-len 64");
    let check = |change: Value, param: &str, code: Option<&str>, words: &str| {
        check_error(
            &change.to_string(),
            &server.post(RESPONSES, &request(&change)),
            400,
            Some(param),
            code,
            words,
        );
    };
    let unsupported = Some("unsupported_parameter");
    check(json!({"max_output_tokens": 0}), "max_output_tokens", None, "max_output_tokens is 0");
    check(json!({"top_logprobs": 21}), "top_logprobs", None, "at most 20");
    check(json!({"n": 2}), "n", unsupported, "one answer");
    check(json!({"return_token_ids": true}), "return_token_ids", unsupported, "chat");
    let search = json!([{"type": "web_search"}]);
    let words = "tools[0] is of type \"web_search\"";
    check(json!({"tools": search, "tool_choice": "required"}), "tool_choice", None, words);
    let chosen = json!({"tools": search, "tool_choice": {"type": "web_search"}});
    check(chosen, "tool_choice.type", unsupported, "\"web_search\"");
    let custom = json!({"type": "custom", "name": "patch"});
    let chosen = json!({"tools": [custom], "tool_choice": custom});
    check(chosen, "tool_choice.type", unsupported, "of \"patch\" is \"custom\"");
    let mistyped = json!([{"type": "mesage", "role": "user", "content": "Say A"}]);
    check(json!({"input": mistyped}), "input[0].type", None, "\"mesage\", expected message, reasoning");
    check(json!({"reasoning": {"effort": "bogus"}}), "reasoning.effort", None, "none, minimal, low");
    let required = json!({"tools": [weather()], "tool_choice": "required"});
    check(required, "tool_choice", unsupported, "--chat-template");
    check(json!({"previous_response_id": "x"}), "previous_response_id", unsupported, "--responses-memory");
    let long = "word ".repeat(100);
    check(json!({"input": long}), "input", Some("context_length_exceeded"), "64");
    check(json!({"input": "x".repeat(1 << 20)}), "input", Some("context_length_exceeded"), "1048576 bytes");
    let name = server.post(RESPONSES, &request(&json!({"model": "gpt-5"})));
    check_error("model", &name, 404, Some("model"), Some("model_not_found"), "gpt-5");
    // Without a call nothing is missing.
    for kind in ["web_search", "custom", "mcp"] {
        let alone =
            json!({"tools": [{"type": kind, "name": "x"}], "max_output_tokens": 1, "max_tool_calls": 3});
        let answer = server.post(RESPONSES, &request(&alone));
        assert_eq!((answer.status, &answer.json()["tools"]), (200, &json!([])), "{}", answer.text());
        let reported = format!("max_tool_calls, tools[0].{kind}");
        assert_eq!(answer.header("x-ignored-fields"), Some(&*reported));
    }
}
