//! Tools and reasoning, with the built-in model where it is made to call and with scripted models where it calls by
//! itself.

use serde_json::{Value, json};

use super::client::{Answer, Server};
use super::scripted::scripted_model;

const CHAT: &str = "/v1/chat/completions";
const TEMPLATE: &str = include_str!("../fixtures/tok/chat/tools.jinja");
const TEMPLATE_PATH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/tok/chat/tools.jinja");

fn weather() -> Value {
    json!({"type": "function", "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 12},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
                "unit": {"enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "days", "unit"],
            "additionalProperties": false,
        },
    }})
}

fn time() -> Value {
    json!({"type": "function", "function": {"name": "get_time"}})
}

fn request(change: &Value) -> Value {
    let mut body = json!({
        "messages": [{"role": "user", "content": "Rome?"}],
        "tools": [weather(), time()],
        "max_tokens": 200,
        "temperature": 0,
    });
    for (name, value) in change.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

/// The message and the end of a stream, put together by a client's rules.
#[track_caller]
pub(super) fn joined(events: &[Value]) -> (Value, Value) {
    let mut message = json!({"role": null, "content": null});
    let mut finish_reason = Value::Null;
    for choice in events.iter().flat_map(|event| event["choices"].as_array().unwrap()) {
        assert!(finish_reason.is_null(), "something came after the end: {choice}");
        finish_reason = choice["finish_reason"].clone();
        let delta = choice["delta"].as_object().unwrap();
        for (name, value) in delta {
            match value {
                Value::Array(calls) => calls.iter().for_each(|call| add_call(&mut message, call)),
                Value::String(text) => {
                    let so_far = message[name].as_str().unwrap_or_default().to_owned();
                    message[name] = (so_far + text).into();
                }
                other => panic!("{name} is {other}"),
            }
        }
    }
    (message, finish_reason)
}

fn add_call(message: &mut Value, delta: &Value) {
    if message["tool_calls"].is_null() {
        message["tool_calls"] = json!([]);
    }
    let calls = message["tool_calls"].as_array_mut().unwrap();
    let index = usize::try_from(delta["index"].as_u64().unwrap()).unwrap();
    if delta.get("id").is_some() {
        assert_eq!(index, calls.len(), "a new call");
        assert_eq!(delta["function"]["arguments"], "");
        let mut call = delta.clone();
        call.as_object_mut().unwrap().remove("index");
        calls.push(call);
        return;
    }
    let arguments = calls[index]["function"]["arguments"].as_str().unwrap().to_owned();
    let more = delta["function"]["arguments"].as_str().unwrap();
    assert!(!more.is_empty());
    calls[index]["function"]["arguments"] = (arguments + more).into();
}

/// The answer as a whole, after checking that a stream says the same. Ids, which are random, are taken out.
#[track_caller]
fn both(server: &Server, body: &Value) -> Value {
    let whole = server.post(CHAT, body).success();
    let mut streamed = body.clone();
    streamed["stream"] = json!(true);
    streamed["stream_options"] = json!({"include_usage": true});
    let events = server.post(CHAT, &streamed).events();
    let (mut message, finish_reason) = joined(&events);
    let mut expected = whole["choices"][0]["message"].clone();
    let without_ids = |message: &mut Value| -> Vec<String> {
        let calls = message.get_mut("tool_calls").and_then(Value::as_array_mut).into_iter().flatten();
        calls.map(|call| call["id"].take().as_str().unwrap().to_owned()).collect()
    };
    let ids = [without_ids(&mut message), without_ids(&mut expected)].concat();
    let distinct: std::collections::BTreeSet<&String> = ids.iter().collect();
    assert_eq!(distinct.len(), ids.len());
    // Templates of Mistral take ids of nine characters only.
    assert!(ids.iter().all(|id| id.starts_with("call_") || id.len() == 9), "{ids:?}");
    for name in ["reasoning_content", "reasoning", "tool_calls"] {
        assert_eq!(message.get(name), expected.get(name), "{name}");
    }
    let content = |message: &Value| message["content"].as_str().unwrap_or_default().to_owned();
    assert_eq!(content(&message), content(&expected));
    assert_eq!(finish_reason, whole["choices"][0]["finish_reason"]);
    let usage = |answer: &Value| {
        [
            &answer["usage"]["completion_tokens"],
            &answer["usage"]["completion_tokens_details"]["reasoning_tokens"],
        ]
        .map(Value::clone)
    };
    assert_eq!(usage(events.last().unwrap()), usage(&whole));
    let mut choice = whole["choices"][0].clone();
    choice["message"] = expected;
    choice["usage"] = whole["usage"].clone();
    choice
}

fn calls(choice: &Value) -> Vec<(String, Value)> {
    let calls = choice["message"]["tool_calls"].as_array().unwrap().iter().map(|call| {
        assert_eq!(call["type"], "function");
        let arguments = serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap();
        (call["function"]["name"].as_str().unwrap().to_owned(), arguments)
    });
    calls.collect()
}

#[track_caller]
fn check_weather(arguments: &Value) {
    assert!(arguments["city"].as_str().unwrap().chars().count() <= 12, "{arguments}");
    assert!((1..=9).contains(&arguments["days"].as_i64().unwrap()), "{arguments}");
    assert!(["celsius", "fahrenheit"].contains(&arguments["unit"].as_str().unwrap()), "{arguments}");
    assert_eq!(arguments.as_object().unwrap().len(), 3, "{arguments}");
}

#[test]
fn a_model_that_must_call_calls() {
    for parser in ["auto", "llama3_json", "mistral", "glm45", "qwen3_coder"] {
        let flags =
            format!("--max-model-len 1024 --chat-template {TEMPLATE_PATH} --tool-call-parser {parser}");
        let server = Server::start(&flags);
        let named = json!({"type": "function", "function": {"name": "get_weather"}});
        for change in [
            json!({"tool_choice": named}),
            json!({"tool_choice": named, "temperature": 1.5, "seed": 3}),
            json!({"tool_choice": "required", "tools": [weather()], "parallel_tool_calls": false}),
        ] {
            let choice = both(&server, &request(&change));
            let calls = calls(&choice);
            assert_eq!((calls.len(), calls[0].0.as_str()), (1, "get_weather"), "{parser}: {choice}");
            check_weather(&calls[0].1);
            assert_eq!(choice["finish_reason"], "tool_calls");
            assert_eq!(choice["message"]["content"], Value::Null);
        }
        let choice = both(
            &server,
            &request(&json!({"tool_choice": {"type": "function", "function": {"name": "get_time"}}})),
        );
        assert_eq!(calls(&choice), [("get_time".to_owned(), json!({}))], "{parser}");
        // Cut off in the middle: what there is of the call, and the true reason.
        let choice = both(&server, &request(&json!({"tool_choice": named, "max_tokens": 24})));
        assert_eq!(choice["finish_reason"], "length", "{parser}");
    }
}

#[test]
fn the_prompt_has_tools_and_calls() {
    let server = Server::start(&format!("--max-model-len 1024 --chat-template {TEMPLATE_PATH}"));
    let prompt = |body: &Value| {
        let ids = server.post("/tokenize", body).success()["tokens"].clone();
        server.post("/detokenize", &json!({"tokens": ids})).success()["prompt"].as_str().unwrap().to_owned()
    };
    let conversation = json!([
        {"role": "user", "content": "Rome?"},
        {"role": "assistant", "content": null, "tool_calls": [
            {"id": "call_1", "type": "function",
             "function": {"name": "get_weather", "arguments": "{\"days\":2, \"city\": \"Rome\"}"}},
        ]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]);
    let text = prompt(&json!({"messages": conversation, "tools": [time()]}));
    let expected = "{\"type\": \"function\", \"function\": {\"name\": \"get_time\"}}\nuser: Rome?\nassistant: \n\
        <tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"days\": 2, \"city\": \"Rome\"}}\n</tool_call>\n\
        tool: sunny\n<|answer|>";
    assert!(text.ends_with(expected), "{text}");
    // As vLLM does it: with "none" the prompt has the tools, and calls are not parsed.
    let none = request(&json!({"tool_choice": "none", "max_tokens": 5}));
    assert!(prompt(&none).contains("get_weather"));
    let choice = both(&server, &none);
    assert_eq!(
        (choice["message"].get("tool_calls"), choice["finish_reason"].as_str()),
        (None, Some("length"))
    );
}

#[test]
fn a_model_that_calls_by_itself() {
    let call = "<think>\nRome, then. </think>\n\nI'll look.\n<tool_call>\n{\"name\": \"get_weather\", \"arguments\": \
        {\"city\": \"Rôme 🦙\", \"days\": 2}}\n</tool_call>";
    let answer = "It is sunny in Rome, <b>25 °C</b>.\n";
    for special in [&["<tool_call>", "</tool_call>", "<think>", "</think>"] as &[&str], &[]] {
        let model = scripted_model(TEMPLATE, special, &[("<|begin|>", call), ("<|answer|>", answer)]);
        let server = Server::start(&format!("--model {}", model.path().display()));
        let body = request(&json!({"logprobs": true}));
        let choice = both(&server, &body);
        let message = &choice["message"];
        assert_eq!(calls(&choice), [("get_weather".to_owned(), json!({"city": "Rôme 🦙", "days": 2}))]);
        assert_eq!(message["content"], "I'll look.");
        assert_eq!(
            (&message["reasoning_content"], &message["reasoning"]),
            (&json!("Rome, then."), &json!("Rome, then."))
        );
        assert_eq!(choice["finish_reason"], "tool_calls");
        let num_reasoning =
            choice["usage"]["completion_tokens_details"]["reasoning_tokens"].as_u64().unwrap();
        assert!((3..12).contains(&num_reasoning), "{num_reasoning}");
        // The conversation continues with the answer.
        let whole = server.post(CHAT, &body).success();
        let mut body = body;
        let id = whole["choices"][0]["message"]["tool_calls"][0]["id"].clone();
        body["messages"].as_array_mut().unwrap().extend([
            whole["choices"][0]["message"].clone(),
            json!({"role": "tool", "tool_call_id": id, "content": "25 °C"}),
        ]);
        let choice = both(&server, &body);
        assert_eq!(
            (&choice["message"]["content"], &choice["finish_reason"]),
            (&json!(answer), &json!("stop"))
        );
        assert_eq!(choice["message"].get("tool_calls"), None);
        // Nothing is parsed that was not requested; the markers are special tokens or text.
        let choice = both(&server, &request(&json!({"tool_choice": "none", "include_reasoning": false})));
        let content = choice["message"]["content"].as_str().unwrap();
        assert!(content.starts_with("I'll look.") && content.contains("get_weather"), "{content}");
        assert_eq!(content.contains("<tool_call>"), special.is_empty(), "{content}");
        assert_eq!(choice["message"].get("reasoning_content"), None);
        // The prompt opens the block, so that all is reasoning until it ends, and it has no end here.
        let thinking = scripted_model(TEMPLATE, special, &[("<think>", "A </think>\n\nBye")]);
        let server = Server::start(&format!("--model {}", thinking.path().display()));
        let body = json!({"messages": [{"role": "user", "content": "?"}], "chat_template_kwargs": {"enable_thinking": true}});
        let choice = both(&server, &body);
        assert_eq!(choice["message"]["content"], "Bye");
        assert_eq!(choice["message"]["reasoning_content"], "A");
    }
}

#[test]
fn what_is_enforced_comes_after_the_reasoning() {
    let special = ["<think>", "</think>", "<tool_call>", "</tool_call>"];
    let scripts = [("<|begin|>", "<think>Hm, hm.</think>"), ("<|answer|>", "Well.")];
    let model = scripted_model(TEMPLATE, &special, &scripts);
    let server = Server::start(&format!("--model {}", model.path().display()));
    let ask = |change: &Value| {
        let mut body = json!({
            "messages": [{"role": "user", "content": "?"}], "temperature": 0, "max_tokens": 200,
            "structured_outputs": {"choice": ["Yes", "No way"]},
        });
        for (name, value) in change.as_object().unwrap() {
            body[name] = value.clone();
        }
        let choice = both(&server, &body);
        let text = |name: &str| choice["message"][name].as_str().unwrap_or_default().to_owned();
        (text("reasoning_content"), text("content"), choice)
    };
    // The model begins to reason, which the grammar itself knows nothing of.
    let (reasoning, content, choice) = ask(&json!({}));
    assert_eq!((reasoning.as_str(), choice["finish_reason"].as_str()), ("Hm, hm.", Some("stop")));
    assert!(["Yes", "No way"].contains(&content.as_str()), "{content}");
    // It begins with the answer; then that is what is enforced.
    let again =
        json!([{"role": "user", "content": "?"}, {"role": "tool", "tool_call_id": "1", "content": "x"}]);
    let (reasoning, content, _) = ask(&json!({"messages": again}));
    assert_eq!(reasoning, "");
    assert!(["Yes", "No way"].contains(&content.as_str()), "{content}");
    // Calls follow reasoning in the same way.
    let called = request(&json!({"tool_choice": "required", "parallel_tool_calls": false}));
    let choice = both(&server, &called);
    assert_eq!(choice["message"]["reasoning_content"], "Hm, hm.");
    assert_eq!(calls(&choice).len(), 1);
    assert_eq!(choice["finish_reason"], "tool_calls");
    // The prompt has opened the block.
    let model = scripted_model(TEMPLATE, &special, &[("<think>", "So.</think>")]);
    let server = Server::start(&format!("--model {}", model.path().display()));
    let thinking = json!({"chat_template_kwargs": {"enable_thinking": true}});
    let mut body =
        request(&json!({"tool_choice": {"type": "function", "function": {"name": "get_weather"}}}));
    body["chat_template_kwargs"] = thinking["chat_template_kwargs"].clone();
    let choice = both(&server, &body);
    assert_eq!(choice["message"]["reasoning_content"], "So.");
    check_weather(&calls(&choice)[0].1);
    // Without a token for its end, that cannot be done.
    let model = scripted_model(TEMPLATE, &["<think>"], &[("<|begin|>", "Well.")]);
    let server = Server::start(&format!("--model {}", model.path().display()));
    check(&server.post(CHAT, &body), "tool_choice", "enable_thinking");
}

/// Templates whose models get tools in a message write earlier calls, and know no tools.
#[test]
fn calls_are_found_also_where_the_template_knows_no_tools() {
    let template = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}</tool_call>\
                    {% endfor %}{% endfor %}{% if add_generation_prompt %}<|begin|>{% endif %}";
    let model =
        scripted_model(template, &[], &[("<|begin|>", "<tool_call>{\"name\": \"get_time\"}</tool_call>")]);
    let server = Server::start(&format!("--model {}", model.path().display()));
    let answer = server.post(CHAT, &request(&json!({})));
    assert_eq!((answer.status, answer.header("x-ignored-fields")), (200, Some("tools")), "{}", answer.text());
    let message = &answer.success()["choices"][0]["message"];
    assert_eq!(message["tool_calls"][0]["function"], json!({"name": "get_time", "arguments": "{}"}));
    let info = server.get("/server_info").success();
    assert_eq!((&info["tool_call_parser"], &info["reasoning_parser"]), (&json!("hermes"), &Value::Null));
}

#[test]
fn parsers_are_chosen_by_flags() {
    let text = "<think>A</think>B <tool_call>{\"name\": \"get_time\"}</tool_call> [TOOL_CALLS]get_time[ARGS]{\"x\": 1}";
    let model = scripted_model(TEMPLATE, &["[TOOL_CALLS]", "[ARGS]"], &[("<|begin|>", text)]);
    let path = model.path().display();
    let server = Server::start(&format!("--model {path} --tool-call-parser mistral --reasoning-parser none"));
    let answer = server.post(CHAT, &request(&json!({}))).success();
    let message = &answer["choices"][0]["message"];
    assert_eq!(message["content"], "<think>A</think>B <tool_call>{\"name\": \"get_time\"}</tool_call>");
    assert_eq!(message["tool_calls"][0]["function"], json!({"name": "get_time", "arguments": "{\"x\": 1}"}));
    assert_eq!(message["tool_calls"][0]["id"].as_str().unwrap().len(), 9);
    drop(server);
    let server = Server::start(&format!("--model {path} --tool-call-parser none"));
    check(&server.post(CHAT, &request(&json!({}))), "tools", "--tool-call-parser");
    assert_eq!(server.post(CHAT, &request(&json!({"tool_choice": "none"}))).status, 200);
}

#[track_caller]
fn check(answer: &Answer, param: &str, words: &str) {
    assert_eq!(answer.status, 400, "{}", answer.text());
    let error = &answer.json()["error"];
    assert_eq!(error["param"], param, "{error}");
    assert!(error["message"].as_str().unwrap().contains(words), "{error}");
}

#[test]
fn what_cannot_be_honoured_is_refused() {
    // The built-in model's own template knows nothing of tools.
    let server = Server::start("--max-model-len 512");
    check(
        &server.post(CHAT, &request(&json!({"tool_choice": "required"}))),
        "tool_choice",
        "--chat-template",
    );
    // What is not required is dropped, and reported.
    for change in [json!({}), json!({"tool_choice": "none"})] {
        let answer = server.post(CHAT, &request(&change));
        assert_eq!(
            (answer.status, answer.header("x-ignored-fields")),
            (200, Some("tools")),
            "{}",
            answer.text()
        );
    }
    let answer = json!({"messages": [{"role": "user", "content": "?"}, {"role": "tool", "tool_call_id": "1", "content": "5"}], "max_tokens": 1});
    let answer = server.post(CHAT, &answer);
    assert_eq!(
        (answer.status, answer.header("x-ignored-fields")),
        (200, Some("messages[1]")),
        "{}",
        answer.text()
    );
    drop(server);

    let server = Server::start(&format!("--max-model-len 512 --chat-template {TEMPLATE_PATH}"));
    let tools = |change: &Value| server.post(CHAT, &request(change));
    check(&tools(&json!({"tools": "x"})), "tools", "a list");
    check(&tools(&json!({"tools": vec![time(); 10_000]})), "tools", "10000");
    check(&tools(&json!({"tools": [{"type": "function"}]})), "tools[0].function", "missing");
    check(
        &tools(&json!({"tool_choice": {"type": "function", "function": {"name": "x"}}})),
        "tool_choice",
        "not in tools",
    );
    check(&tools(&json!({"tools": [], "tool_choice": "required"})), "tool_choice", "no tools");
    check(&tools(&json!({"functions": [{"name": "x"}]})), "functions", "not supported here; use tools");
    check(&tools(&json!({"function_call": "auto"})), "function_call", "not supported here; use tool_choice");
    check(&tools(&json!({"tool_choice": "required", "guided_regex": "a"})), "guided_regex", "exclude");
    // A schema that cannot be kept to is refused where it has to be, and at once.
    let hostile = |parameters: Value| {
        let tool = json!({"type": "function", "function": {"name": "f", "parameters": parameters}});
        tools(&json!({"tools": [tool], "tool_choice": "required"}))
    };
    let place = "tools[0].function.parameters.properties.x";
    for (keyword, value) in [("type", "nothing"), ("pattern", "(a"), ("$ref", "https://example.com/")] {
        let parameters = json!({"type": "object", "properties": {"x": {keyword: value}}});
        check(&hostile(parameters), &format!("{place}.{keyword}"), "");
    }
    let long = json!({"type": "function", "function": {"name": "f", "description": "x".repeat(400_000)}});
    check(&tools(&json!({"tools": [long]})), "tools", "maximum context length");
    // Messages.
    let message = |message: Value| server.post(CHAT, &json!({"messages": [message], "max_tokens": 1}));
    let calling = |call: Value| message(json!({"role": "assistant", "tool_calls": [call]}));
    check(&message(json!({"role": "tool", "content": "5"})), "messages[0].tool_call_id", "missing");
    check(&message(json!({"role": "function", "content": "5"})), "messages[0].tool_call_id", "missing");
    check(&message(json!({"role": "user", "content": null})), "messages[0].content", "missing");
    check(&message(json!({"role": "assistant", "tool_calls": {}})), "messages[0].tool_calls", "a list");
    let user = json!({"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]});
    check(&message(user), "messages[0].tool_calls", "assistant");
    check(&calling(json!(1)), "messages[0].tool_calls[0]", "an object");
    check(&calling(json!({"id": "1"})), "messages[0].tool_calls[0].function", "missing");
    check(&calling(json!({"function": {}})), "messages[0].tool_calls[0].function.name", "missing");
    // What a model wrote may come back, whatever it is.
    for arguments in
        [json!("{\"a\": "), json!(""), json!("null"), json!("[1, 2]"), json!(5), json!({}), Value::Null]
    {
        let answer = calling(json!({"function": {"name": "f", "arguments": arguments}}));
        assert_eq!(answer.status, 200, "{arguments}: {answer:?}");
    }
    for turn in [
        json!({"role": "assistant", "content": null}),
        json!({"role": "assistant", "reasoning_content": "Hm."}),
        json!({"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}),
        json!({"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}),
        json!({"role": "function", "name": "f", "content": "5"}),
        json!({"role": "tool", "tool_call_id": "1", "content": null}),
    ] {
        assert_eq!(message(turn.clone()).status, 200, "{turn}");
    }
}

#[test]
fn a_tool_that_cannot_be_enforced_is_named_and_stops_no_other() {
    let server = Server::start(&format!("--max-model-len 1024 --chat-template {TEMPLATE_PATH}"));
    let tool = |schema: Value| json!({"type": "function", "function": {"name": "odd", "parameters": {"type": "object", "properties": {"in": {"type": "object", "properties": {"x": schema}}}}}});
    const PLACE: &str = "properties.in.properties.x";
    for (schema, keyword, words) in [
        (json!({"type": "string", "not": {"pattern": "a"}}), "not", "the keyword not"),
        (json!({"type": "string", "pattern": "(a"}), "pattern", "the pattern \"(a\""),
        (json!({"oneOf": [{"type": "string"}, {"type": "string", "pattern": "a"}]}), "oneOf", "oneOf"),
        (
            json!({"allOf": [{"contains": {"const": 1}}, {"contains": {"const": 2}}]}),
            "allOf[0].contains",
            "contains",
        ),
    ] {
        let tools = json!([weather(), tool(schema)]);
        let answer = server.post(CHAT, &request(&json!({"tools": tools, "tool_choice": "required"})));
        let message = answer.json()["error"]["message"].as_str().unwrap().to_owned();
        assert_eq!(answer.status, 400, "{message}");
        let path = format!("tools[1].function.parameters.{PLACE}.{keyword}");
        assert!(message.starts_with(&format!("{path}: the tool odd: ")), "{message}");
        assert_eq!(answer.json()["error"]["param"], path.as_str());
        assert!(
            message.contains(words) && message.contains("choose another one with tool_choice"),
            "{message}"
        );
        let named = json!({"type": "function", "function": {"name": "get_weather"}});
        let choice = both(&server, &request(&json!({"tools": tools, "tool_choice": named})));
        check_weather(&calls(&choice)[0].1);
        both(&server, &request(&json!({"tools": tools, "max_tokens": 3})));
    }
    // Each interface by its own fields.
    let schema = json!({"type": "object", "properties": {"a": {"uniqueItems": 1}}});
    let input = json!({"model": "demo", "max_tokens": 5, "messages": [{"role": "user", "content": "?"}]});
    let with = |change: Value| {
        let mut body = input.clone();
        body.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        body
    };
    let anthropic = json!({"tools": [{"type": "web_search_1", "name": "web_search"}, {"name": "f", "input_schema": schema}],
                           "tool_choice": {"type": "any"}});
    let format = json!({"type": "json_schema", "name": "x", "schema": schema});
    let responses = |change: Value| {
        let mut body = json!({"model": "demo", "input": "?"});
        body.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        body
    };
    let function = json!({"type": "function", "name": "f", "parameters": schema});
    for (path, body, place) in [
        ("/v1/messages", with(anthropic), "tools[1].input_schema"),
        ("/v1/messages", with(json!({"output_config": {"format": format}})), "output_config.format.schema"),
        (
            "/v1/responses",
            responses(json!({"tools": [function], "tool_choice": "required"})),
            "tools[0].parameters",
        ),
        ("/v1/responses", responses(json!({"text": {"format": format}})), "text.format.schema"),
        ("/api/chat", with(json!({"format": schema, "max_tokens": null})), "format"),
        (CHAT, with(json!({"guided_json": schema})), "guided_json"),
    ] {
        let answer = server.post(path, &body);
        let error = answer.json()["error"].clone();
        let message = error["message"].as_str().or(error.as_str()).unwrap();
        assert_eq!(answer.status, 400, "{message}");
        assert!(message.starts_with(&format!("{place}.properties.a.uniqueItems: ")), "{path}: {message}");
    }
}
