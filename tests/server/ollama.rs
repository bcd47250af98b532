//! Ollama's interface: the same answers whole and as lines, its shape of errors, what its clients ask of the model.

use serde_json::{Value, json};

use super::client::{Answer, Server, post_bytes, send};
use super::scripted::scripted_model;

const CHAT: &str = "/api/chat";
const GENERATE: &str = "/api/generate";
const TEMPLATE: &str = include_str!("../fixtures/tok/chat/tools.jinja");

fn with(mut body: Value, change: &Value) -> Value {
    for (name, value) in change.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

fn chat(change: &Value) -> Value {
    let body = json!({
        "model": "demo", "messages": [{"role": "user", "content": "Hello"}],
        "options": {"num_predict": 40, "temperature": 0}, "keep_alive": "5m",
    });
    with(body, change)
}

fn prompt(change: &Value) -> Value {
    with(json!({"prompt": "Once upon a time", "options": {"num_predict": 20, "temperature": 0}}), change)
}

/// The lines of a stream.
#[track_caller]
pub(super) fn lines(answer: &Answer) -> Vec<Value> {
    assert_eq!(answer.header("content-type"), Some("application/x-ndjson"), "{}", answer.text());
    answer.text().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// What a client puts together from lines.
#[track_caller]
pub(super) fn joined(path: &str, lines: &[Value]) -> Value {
    let (last, chunks) = lines.split_last().unwrap();
    assert_eq!(last["done"], true);
    let mut answer = last.clone();
    let message = |value: &Value| if path == CHAT { value["message"].clone() } else { value.clone() };
    for chunk in chunks.iter().map(message) {
        assert_ne!(chunk["done"], true, "{chunk}");
        let whole = if path == CHAT { &mut answer["message"] } else { &mut answer };
        for field in ["content", "response", "thinking"] {
            if let Some(text) = chunk[field].as_str() {
                whole[field] = (whole[field].as_str().unwrap_or_default().to_owned() + text).into();
            }
        }
        if let Some(calls) = chunk["tool_calls"].as_array() {
            let mut all = whole["tool_calls"].as_array().cloned().unwrap_or_default();
            all.extend(calls.clone());
            whole["tool_calls"] = all.into();
        }
    }
    answer
}

/// The answer as a whole, after checking that a stream says the same. Times and random ids are taken out.
#[track_caller]
fn both(server: &Server, path: &str, body: &Value) -> Value {
    let fixed = |mut answer: Value| {
        assert!(answer["created_at"].take().as_str().unwrap().ends_with('Z'));
        for time in ["total_duration", "prompt_eval_duration", "eval_duration"] {
            assert!(answer[time].take().as_u64().unwrap() > 0, "{time} of {answer}");
        }
        for call in answer["message"]["tool_calls"].as_array_mut().into_iter().flatten() {
            assert!(!call["id"].take().as_str().unwrap().is_empty());
        }
        answer
    };
    let whole = fixed(server.post(path, &with(body.clone(), &json!({"stream": false}))).success());
    // Without a word, an answer is a stream.
    let stream = lines(&server.post(path, body));
    assert!(stream.iter().all(|line| line["model"] == whole["model"] && line["created_at"].is_string()));
    assert_eq!(fixed(joined(path, &stream)), whole);
    whole
}

#[test]
fn a_chat_is_the_same_whole_and_as_lines() {
    let server = Server::start("--max-model-len 256");
    let answer = both(&server, CHAT, &chat(&json!({})));
    let text = answer["message"]["content"].as_str().unwrap();
    assert!(!text.is_empty() && answer["message"]["role"] == "assistant", "{answer}");
    assert_eq!((&answer["model"], &answer["done_reason"]), (&json!("demo"), &json!("stop")));
    // It is what a chat answers.
    let messages = json!([{"role": "user", "content": "Hello"}]);
    let same = json!({"messages": messages, "max_tokens": 40, "temperature": 0});
    let same = server.post("/v1/chat/completions", &same).success();
    assert_eq!(same["choices"][0]["message"]["content"], text);
    assert_eq!(same["usage"]["prompt_tokens"], answer["prompt_eval_count"]);
    assert_eq!(same["usage"]["completion_tokens"], answer["eval_count"]);
    // The ways to end.
    let cut = both(&server, CHAT, &chat(&json!({"options": {"num_predict": 2, "temperature": 0}})));
    assert_eq!((&cut["done_reason"], &cut["eval_count"]), (&json!("length"), &json!(2)));
    let all = json!({"options": {"num_predict": -1, "temperature": 0, "ignore_eos": true, "num_ctx": 4096}});
    let answer = server.post(CHAT, &chat(&with(all, &json!({"stream": false}))));
    assert_eq!(answer.header("x-ignored-fields"), Some("options.num_ctx"));
    let all = answer.success();
    assert_eq!(all["prompt_eval_count"].as_u64().unwrap() + all["eval_count"].as_u64().unwrap(), 256);
    let stop: String = text.chars().skip(2).take(3).collect();
    let options = json!({"num_predict": 40, "temperature": 0, "stop": [stop]});
    let stopped = both(&server, CHAT, &chat(&json!({"options": options})));
    assert!(text.starts_with(stopped["message"]["content"].as_str().unwrap()), "{stopped}");
    // A seed makes it the same, and the penalty counts.
    let drawn = |seed: i64, penalty: f64| {
        let options = json!({"seed": seed, "num_predict": 30, "temperature": 1.0, "repeat_penalty": penalty,
                             "top_k": 40, "top_p": 0.9, "min_p": 0.01, "num_thread": 3, "num_gpu": 0});
        let answer = server.post(CHAT, &chat(&json!({"options": options, "stream": false})));
        assert_eq!(answer.header("x-ignored-fields"), None);
        answer.success()["message"]["content"].clone()
    };
    assert_eq!(drawn(7, 1.0), drawn(7, 1.0));
    assert_ne!(drawn(7, 1.0), drawn(7, 1.9));
    // A last turn of the assistant is gone on with.
    let messages = json!([
        {"role": "user", "content": "Tell me a story."}, {"role": "assistant", "content": "Once upon a time"},
    ]);
    let begun = both(&server, CHAT, &chat(&json!({"messages": messages})));
    let same =
        json!({"messages": messages, "max_tokens": 40, "temperature": 0, "continue_final_message": true});
    let same = server.post("/v1/chat/completions", &same).success();
    assert_eq!(begun["message"]["content"], same["choices"][0]["message"]["content"]);
    // Names belong to results of tools.
    let messages = json!([{"role": "user", "content": "Hi", "name": "ann", "tool_call_id": "1"}]);
    let answer = server.post(CHAT, &chat(&json!({"messages": messages, "stream": false})));
    assert_eq!(answer.header("x-ignored-fields"), Some("messages[0].name, messages[0].tool_call_id"));
    // Nothing to answer loads the model, which is loaded.
    for (path, body) in
        [(CHAT, json!({"model": "demo", "messages": []})), (GENERATE, json!({"model": "demo"}))]
    {
        let loaded = lines(&server.post(path, &body));
        assert!(loaded.len() == 1 && loaded[0]["done"] == true, "{loaded:?}");
        assert_eq!(loaded[0]["done_reason"], "load");
    }
}

#[test]
fn a_prompt_is_answered_or_completed() {
    let server = Server::start("--max-model-len 256");
    let raw = both(&server, GENERATE, &prompt(&json!({"raw": true})));
    let same = json!({"prompt": "Once upon a time", "max_tokens": 20, "temperature": 0});
    let same = server.post("/v1/completions", &same).success();
    assert_eq!(raw["response"], same["choices"][0]["text"]);
    assert_eq!(raw["prompt_eval_count"], same["usage"]["prompt_tokens"]);
    let answer = both(&server, GENERATE, &prompt(&json!({"system": "You are kind."})));
    let messages = json!([
        {"role": "system", "content": "You are kind."}, {"role": "user", "content": "Once upon a time"},
    ]);
    let same = server.post(
        CHAT,
        &chat(&json!({"messages": messages, "stream": false,
        "options": {"num_predict": 20, "temperature": 0}})),
    );
    assert_eq!(answer["response"], same.success()["message"]["content"]);
    // Forms: any object, and a schema.
    let schema =
        json!({"type": "object", "properties": {"is_big": {"type": "boolean"}}, "required": ["is_big"]});
    let options = json!({"num_predict": 100, "temperature": 0});
    for raw in [true, false] {
        let answer =
            both(&server, GENERATE, &prompt(&json!({"format": schema, "raw": raw, "options": options})));
        let value: Value = serde_json::from_str(answer["response"].as_str().unwrap()).unwrap();
        assert!(value["is_big"].is_boolean(), "{answer}");
    }
    let answer = both(&server, CHAT, &chat(&json!({"format": "json"})));
    assert!(answer["message"]["content"].as_str().unwrap().starts_with('{'), "{answer}");
}

#[test]
fn thoughts_and_calls_have_their_fields() {
    let call = "<think>\nRome, then. </think>\n\nI'll look.\n<tool_call>\n{\"name\": \"get_weather\", \"arguments\": \
        {\"city\": \"Rôme 🦙\", \"days\": 2}}\n</tool_call>";
    let weather = json!({"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}});
    let scripts = [("<|begin|>", call), ("<think>", "A </think>\n\nBye"), ("<|answer|>", "It is sunny.")];
    let model = scripted_model(TEMPLATE, &[], &scripts[..1]);
    let server = Server::start(&format!("--model {} --served-model-name demo", model.path().display()));
    let options = json!({"num_predict": 300, "temperature": 0});
    let answer = both(&server, CHAT, &chat(&json!({"tools": [weather], "options": options})));
    let message = &answer["message"];
    assert_eq!((&message["thinking"], &message["content"]), (&json!("Rome, then."), &json!("I'll look.")));
    let called = json!({"name": "get_weather", "arguments": {"city": "Rôme 🦙", "days": 2}});
    assert_eq!(message["tool_calls"], json!([{"id": null, "function": called}]));
    let shown = server.post("/api/show", &json!({"model": "demo"})).success();
    assert_eq!(shown["capabilities"], json!(["completion", "tools", "thinking"]));
    drop(server);
    let model = scripted_model(TEMPLATE, &["<think>", "</think>"], &scripts[1..]);
    let server = Server::start(&format!("--model {} --served-model-name demo", model.path().display()));
    let answer = both(&server, CHAT, &chat(&json!({"think": true})));
    assert_eq!((&answer["message"]["thinking"], &answer["message"]["content"]), (&json!("A"), &json!("Bye")));
    // What was answered goes back, also as older clients send it.
    for (id, name) in
        [(json!("call_1"), Value::Null), (Value::Null, json!("get_weather")), (Value::Null, Value::Null)]
    {
        let messages = json!([
            {"role": "user", "content": "Rome?"},
            {"role": "assistant", "content": "", "thinking": "Well.", "tool_calls": [{"id": id, "function": called}]},
            {"role": "tool", "content": "25 °C", "tool_name": name, "tool_call_id": id},
        ]);
        let answer = both(&server, CHAT, &chat(&json!({"messages": messages, "tools": [weather]})));
        assert_eq!(answer["message"]["content"], "It is sunny.");
    }
    // A model without reasoning answers, with a notice.
    drop(server);
    let server = Server::start("--max-model-len 256");
    let answer = server.post(CHAT, &chat(&json!({"think": true, "stream": false})));
    assert_eq!(answer.header("x-ignored-fields"), Some("think"));
    assert!(answer.success()["message"]["thinking"].is_null());
}

#[test]
fn what_clients_ask_of_the_model() {
    let server = Server::start("--max-model-len 256 --served-model-name story --served-model-name tale");
    let tags = server.get("/api/tags").success();
    let names: Vec<&Value> = tags["models"].as_array().unwrap().iter().map(|model| &model["name"]).collect();
    assert_eq!(names, ["story", "tale"]);
    let model = &tags["models"][0];
    assert!(model["size"].as_u64().unwrap() > 1 << 20, "{model}");
    assert_eq!(model["digest"].as_str().unwrap().len(), 64);
    assert_eq!(model["details"]["family"], "llama");
    let running = server.get("/api/ps").success()["models"][0].clone();
    assert_eq!((&running["name"], &running["context_length"]), (&json!("story"), &json!(256)));
    assert!(server.get("/api/version").success()["version"].as_str().unwrap().contains('.'));
    let shown = server.post("/api/show", &json!({"name": "tale"})).success();
    assert_eq!(shown["capabilities"], json!(["completion"]));
    assert_eq!(shown["model_info"]["llama.context_length"], 256);
    // Names as ollama writes them.
    for name in ["story:latest", "tale", ""] {
        let answer = server.post(GENERATE, &prompt(&json!({"model": name, "stream": false})));
        assert_eq!(answer.success()["model"], "story");
    }
    let error = server.post("/api/show", &json!({"name": "llama3.2"}));
    assert_eq!(error.status, 404);
    // And a line for users that open the address.
    for path in ["/v1", "/v1/"] {
        let there = server.get(path).success();
        assert!(there["interfaces"].as_array().unwrap().contains(&json!("/api/chat")), "{there}");
    }
}

/// An answer that must be an error in ollama's shape.
#[track_caller]
fn check(answer: &Answer, status: u16, words: &str) {
    assert_eq!(answer.status, status, "{}", answer.text());
    assert_eq!(answer.header("content-type"), Some("application/json"));
    let body = answer.json();
    assert!(body.as_object().unwrap().len() == 1, "{body}");
    let message = body["error"].as_str().unwrap();
    assert!(message.contains(words), "{message:?} should say {words:?}");
}

#[test]
fn errors_have_ollamas_shape_and_say_what_is_wrong() {
    let server = Server::start("--max-model-len 64 --max-body-bytes 100K --api-key secret");
    let address = server.address();
    let key = "authorization: Bearer secret\r\n";
    let post = |path: &str, body: &Value| send(address, post_bytes(path, key, &body.to_string()));
    check(&send(address, post_bytes(CHAT, "", &chat(&json!({})).to_string())), 401, "API key");
    let chat = |change: Value, words: &str| check(&post(CHAT, &chat(&change)), 400, words);
    chat(
        json!({"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}),
        "the model reads text only",
    );
    chat(json!({"messages": [{"role": "wizard", "content": "x"}]}), "wizard");
    chat(json!({"messages": [{"content": "x"}]}), "messages[0].role is missing");
    chat(json!({"messages": [{"role": "user", "content": 5}]}), "messages[0].content is 5");
    chat(json!({"messages": [{"role": "user", "tool_calls": [{}]}]}), "only an assistant calls");
    chat(json!({"messages": [{"role": "assistant", "tool_calls": [{}]}]}), "function is missing");
    chat(json!({"format": "xml"}), "format is \"xml\", expected \"json\" or a JSON schema");
    chat(json!({"format": {"type": "array", "uniqueItems": true}}), "uniqueItems");
    chat(json!({"options": {"temperature": "hot"}}), "options.temperature is \"hot\"");
    chat(json!({"options": {"temperature": -1}}), "temperature is -1");
    chat(json!({"options": {"num_predict": 0}}), "num_predict");
    chat(json!({"options": {"num_predict": -3}}), "num_predict is -3");
    chat(json!({"options": {"repeat_penalty": -1}}), "repeat_penalty");
    chat(json!({"options": {"mirostat": 2}}), "options.mirostat is not supported");
    chat(json!({"options": {"n": 2}}), "options.n is 2");
    chat(json!({"think": "hard"}), "think is \"hard\"");
    chat(json!({"stream": "no"}), "stream");
    chat(json!({"logprobs": true}), "use /v1/chat/completions");
    chat(json!({"max_tokens": 5}), "use options.num_predict");
    let long = "word ".repeat(100);
    chat(json!({"messages": [{"role": "user", "content": long}]}), "maximum context length");
    let generate = |change: Value, words: &str| check(&post(GENERATE, &prompt(&change)), 400, words);
    generate(json!({"images": ["aGk="]}), "the model reads text only");
    generate(json!({"context": [1, 2]}), "send the conversation to /api/chat");
    generate(json!({"template": "{{ .Prompt }}"}), "--chat-template");
    generate(json!({"suffix": "end"}), "suffix is not supported");
    generate(json!({"raw": true, "system": "x"}), "raw sends the prompt unchanged");
    generate(json!({"raw": true, "prompt": long}), "maximum context length");
    check(&post(CHAT, &json!({"model": "llama3.2", "messages": []})), 404, "the model is \"demo\"");
    check(&post(GENERATE, &prompt(&json!({"prompt": "x".repeat(100 << 10)}))), 413, "102400");
    check(&send(address, post_bytes(CHAT, key, "{")), 400, "JSON");
    for (path, words) in [
        ("/api/embed", "models generate text only"),
        ("/api/embeddings", "models generate text only"),
        ("/api/pull", "tinyvllm pull"),
        ("/api/nothing", "/api/chat"),
    ] {
        check(&post(path, &json!({})), 404, words);
    }
}

#[test]
fn what_the_documentation_has_people_type_works_and_web_pages_are_kept_out() {
    let server = Server::start("--max-model-len 64");
    let body = prompt(&json!({"stream": false})).to_string();
    let typed = |path: &str, headers: &str| {
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\
             content-type: application/x-www-form-urlencoded\r\n{headers}content-length: {}\r\n\r\n",
            body.len()
        );
        send(server.address(), head + &body)
    };
    // What `curl -d` sends.
    typed(GENERATE, "").success();
    check(&typed(GENERATE, "origin: https://page.example\r\n"), 415, "application/json");
    check(&typed(GENERATE, "sec-fetch-site: cross-site\r\n"), 415, "application/json");
    assert_eq!(typed("/v1/completions", "").status, 415);
}
