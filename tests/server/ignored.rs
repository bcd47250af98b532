//! Fields that have no effect here: reported, or refused.

use serde_json::{Value, json};

use super::bad_inputs::check_error;
use super::client::Server;

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

fn body(path: &str, change: &Value) -> Value {
    let mut body = match path {
        CHAT => json!({"messages": [{"role": "user", "content": "Hi", "refusal": "x"}]}),
        _ => json!({"prompt": "Hi"}),
    };
    body["max_tokens"] = 2.into();
    for (name, value) in change.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

#[test]
fn ignored_fields_are_reported_in_the_answer_and_once_in_the_log() {
    let server = Server::start("--max-model-len 64");
    let extras = json!({"metadata": "a", "store": true, "nothing": null, "a\r\nb": 1});
    for path in [CHAT, COMPLETIONS] {
        for stream in [false, true] {
            let mut change = extras.clone();
            change["stream"] = stream.into();
            let answer = server.post(path, &body(path, &change));
            assert_eq!(answer.status, 200, "{}", answer.text());
            assert_eq!(answer.header("x-ignored-fields"), Some("a??b, metadata, store"));
        }
        let answer = server.post(path, &body(path, &json!({"temperature": 0})));
        assert_eq!(answer.header("x-ignored-fields"), None);
        let options = json!({"stream": true, "stream_options": {"include_usage": true, "other": 1}});
        let answer = server.post(path, &body(path, &options));
        assert_eq!(answer.header("x-ignored-fields"), Some("stream_options.other"));
    }
    let many: Value =
        (0..100).map(|index| (format!("x{index:02}"), json!(1))).collect::<serde_json::Map<_, _>>().into();
    let answer = server.post("/tokenize", &{
        let mut body = json!({"prompt": "Hi"});
        many.as_object().unwrap().iter().for_each(|(name, value)| body[name] = value.clone());
        body
    });
    assert!(answer.header("x-ignored-fields").unwrap().ends_with(", and 84 more"), "{}", answer.head);
    #[cfg(unix)]
    {
        server.signal(nix::sys::signal::Signal::SIGTERM);
        let (_, log) = server.wait();
        let notes: Vec<&String> = log.iter().filter(|line| line.starts_with("note: ")).collect();
        assert_eq!(notes.iter().filter(|line| line.contains("metadata")).count(), 1, "{notes:?}");
        assert!(notes[0].contains("a??b, metadata, store") && notes.len() == 3, "{notes:?}");
    }
}

/// Characters without a token are reported in a header and in the log, and no grammar requires them.
#[test]
fn dropped_bytes_are_reported_in_the_answer_and_once_in_the_log() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let mut bytes = std::fs::read(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../tests/fixtures/tiny/llama/llama.q8_0.gguf"
    ))
    .unwrap();
    // What stands for the byte 0x07 becomes a character that stands for none.
    let (from, to) = ("ć".as_bytes(), "š".as_bytes());
    let at = bytes.windows(from.len()).position(|window| window == from).unwrap();
    bytes[at..at + to.len()].copy_from_slice(to);
    std::fs::write(&path, bytes).unwrap();
    let server = Server::start_with("--max-model-len 64", |command| {
        command.arg("--model").arg(&path);
    });
    let send = |text: &str, status: u16| {
        let body = json!({"prompt": text, "max_tokens": 2});
        let answer = server.post(COMPLETIONS, &body);
        assert_eq!(answer.status, status, "{}", answer.text());
        answer.header("x-dropped-bytes").map(str::to_owned)
    };
    assert_eq!(send("he\u{7}llo", 200).as_deref(), Some("0x07"));
    assert_eq!(send("hello", 200), None);
    // Without that character the prompt is empty.
    assert_eq!(send("\u{7}", 400).as_deref(), Some("0x07"));
    let with_grammar = |grammar: Value| {
        let body = json!({"prompt": "hello", "max_tokens": 2, "structured_outputs": grammar});
        server.post(COMPLETIONS, &body)
    };
    for grammar in [json!({"choice": ["a\u{7}"]}), json!({"regex": r"a(b|\x07c)"})] {
        let answer = with_grammar(grammar);
        assert_eq!(answer.status, 400, "{}", answer.text());
        assert!(answer.text().contains("0x07"), "{}", answer.text());
    }
    assert_eq!(with_grammar(json!({"regex": r"[^b]+"})).status, 200);
    #[cfg(unix)]
    {
        server.signal(nix::sys::signal::Signal::SIGTERM);
        let (_, log) = server.wait();
        let notes = log.iter().filter(|line| line.starts_with("note: ") && line.contains("0x07"));
        assert_eq!(notes.count(), 1, "{log:?}");
    }
}

const TEMPLATE: &str =
    concat!("--chat-template ", env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/tok/chat/tools.jinja");

/// For each interface a conversation in which every object has a field `extra`, what is ignored of it, and what
/// clients send back of answers.
fn conversations() -> [(&'static str, Value, &'static str); 3] {
    let schema = json!({"type": "object", "properties": {}, "extra": 1});
    [
        (
            CHAT,
            json!({
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there", "extra": 1}]},
                    {"role": "assistant", "refusal": "", "annotations": [], "extra": 1, "tool_calls": [
                        {"index": 0, "id": "1", "type": "function", "extra": 1, "function": {"name": "f", "arguments": "{}", "extra": 1}}]},
                    {"role": "tool", "tool_call_id": "1", "content": "x", "extra": 1},
                ],
                "tools": [{"type": "function", "extra": 1, "function": {"name": "f", "parameters": schema, "extra": 1}}],
                "tool_choice": {"type": "allowed_tools", "extra": 1, "allowed_tools": {
                    "mode": "auto", "extra": 1, "tools": [{"type": "function", "extra": 1, "function": {"name": "f", "extra": 1}}]}},
            }),
            "messages[0].content[1].extra, messages[1].extra, messages[1].tool_calls[0].extra, \
             messages[1].tool_calls[0].function.extra, tool_choice.allowed_tools.extra, \
             tool_choice.allowed_tools.tools[0].extra, tool_choice.allowed_tools.tools[0].function.extra, \
             tool_choice.extra, tools[0].extra, tools[0].function.extra",
        ),
        (
            "/v1/messages",
            json!({
                "system": [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}, "extra": 1}],
                "messages": [
                    {"role": "user", "content": "Hi", "extra": 1},
                    {"role": "assistant", "content": [
                        {"type": "thinking", "thinking": "So", "signature": "x", "extra": 1},
                        {"type": "tool_use", "id": "1", "name": "f", "input": {"extra": 1}, "extra": 1}]},
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "extra": 1,
                        "content": [{"type": "text", "text": "x", "cache_control": null, "extra": 1}]}]},
                ],
                "tools": [{"name": "f", "input_schema": schema, "cache_control": {"type": "ephemeral"}, "extra": 1}],
                "tool_choice": {"type": "auto", "extra": 1},
                "cache_control": {"type": "ephemeral"},
            }),
            "messages[0].extra, messages[1].content[0].extra, messages[2].content[0].content[0].extra, \
             system[0].extra, tool_choice.extra, tools[0].extra",
        ),
        (
            "/v1/responses",
            json!({
                "input": [
                    {"role": "user", "content": [{"type": "input_text", "text": "Hi", "extra": 1}], "extra": 1},
                    {"type": "reasoning", "id": "r", "encrypted_content": "x", "summary": [], "extra": 1},
                    {"type": "message", "id": "m", "status": "completed", "role": "assistant", "content": [
                        {"type": "output_text", "text": "So", "annotations": [], "logprobs": []}]},
                    {"type": "function_call", "id": "c", "call_id": "1", "name": "f", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "1", "output": "x"},
                ],
                "tools": [{"type": "function", "name": "f", "parameters": schema, "extra": 1}],
                "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f", "extra": 1}]},
                "text": {"format": {"type": "text", "extra": 1}},
            }),
            "input[0].content[0].extra, input[0].extra, text.format.extra, tool_choice.tools[0].extra, \
             tools[0].extra",
        ),
    ]
}

#[test]
fn fields_inside_lists_are_reported_with_their_first_path() {
    let server = Server::start(&format!("--max-model-len 1024 {TEMPLATE}"));
    for (path, mut body, ignored) in conversations() {
        (body["max_tokens"], body["max_output_tokens"]) = (2.into(), 2.into());
        let other = if path == "/v1/responses" { "max_tokens" } else { "max_output_tokens" };
        body[other] = Value::Null;
        let answer = server.post(path, &body);
        assert_eq!(answer.status, 200, "{path}: {}", answer.text());
        assert_eq!(answer.header("x-ignored-fields"), Some(ignored), "{path}");
    }
    let messages: Vec<Value> =
        (0..50).map(|index| json!({"role": "user", "content": "Hi", format!("x{index:02}"): 1})).collect();
    let answer = server.post(CHAT, &json!({"messages": messages, "max_tokens": 1}));
    let reported = answer.header("x-ignored-fields").unwrap();
    assert!(
        reported.starts_with("messages[0].x00, messages[10].x10, ") && reported.ends_with(", and 34 more"),
        "{reported}"
    );
    drop(server);

    let server = Server::start(&format!("--max-model-len 1024 --strict-fields {TEMPLATE}"));
    for (path, mut body, ignored) in conversations() {
        body[if path == "/v1/responses" { "max_output_tokens" } else { "max_tokens" }] = 2.into();
        let error = server.post(path, &body).json()["error"].clone();
        let message = error["message"].as_str().unwrap();
        assert!(message.starts_with(ignored) && message.contains("--strict-fields"), "{path}: {error}");
    }
}

/// Efforts are for templates that read them.
#[test]
fn an_effort_that_the_template_does_not_read_is_reported() {
    let server = Server::start("--max-model-len 64");
    let answer = server.post(CHAT, &body(CHAT, &json!({"reasoning_effort": "high"})));
    assert_eq!(answer.header("x-ignored-fields"), Some("reasoning_effort"));
    let request = json!({"input": "Hi", "max_output_tokens": 2, "reasoning": {"effort": "none"}});
    let answer = server.post("/v1/responses", &request);
    assert_eq!(answer.header("x-ignored-fields"), Some("reasoning.effort"));
}

/// Names of speakers, thinking and marks of errors are for templates that write them.
#[test]
fn what_a_template_does_not_write_of_messages_is_reported() {
    let server = Server::start("--max-model-len 256");
    let ignored = |path: &str, body: &Value| {
        let answer = server.post(path, body);
        assert_eq!(answer.status, 200, "{path}: {}", answer.text());
        answer.header("x-ignored-fields").map(str::to_owned)
    };
    let named = json!([{"role": "user", "content": "Hi"}, {"role": "user", "content": "Hi", "name": "Ann"}]);
    let change = json!({"messages": named, "metadata": {"run": "7"}});
    assert_eq!(ignored(CHAT, &body(CHAT, &change)).as_deref(), Some("messages[1].name"));
    let message = |change: Value| {
        let mut body = json!({"max_tokens": 2, "messages": [{"role": "user", "content": "Hi"}]});
        change.as_object().unwrap().iter().for_each(|(name, value)| body[name] = value.clone());
        ignored("/v1/messages", &body)
    };
    assert_eq!(message(json!({"thinking": {"type": "adaptive"}})).as_deref(), Some("thinking"));
    assert_eq!(
        message(json!({"thinking": {"type": "enabled", "budget_tokens": 1024}})).as_deref(),
        Some("thinking, thinking.budget_tokens")
    );
    // That is what the model does anyway.
    assert_eq!(message(json!({"thinking": {"type": "disabled"}})), None);
    let raw = json!({"model": "demo", "prompt": "Hi", "raw": true, "think": false, "stream": false,
                     "options": {"num_predict": 2}});
    assert_eq!(ignored("/api/generate", &raw).as_deref(), Some("think"));
    drop(server);
    let server = Server::start(&format!("--max-model-len 1024 {TEMPLATE}"));
    let results = |is_error: bool| {
        let body = json!({"max_tokens": 2, "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": "x", "is_error": is_error}]},
        ]});
        server.post("/v1/messages", &body).header("x-ignored-fields").map(str::to_owned)
    };
    assert_eq!(results(true).as_deref(), Some("messages[2].content[0].is_error"));
    assert_eq!(results(false), None);
    drop(server);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("names.jinja");
    std::fs::write(&path, "{% for m in messages %}{{ m.name or m.role }}: {{ m.content }}\n{% endfor %}")
        .unwrap();
    let server = Server::start_with("--max-model-len 256", |command| {
        command.arg("--chat-template").arg(&path);
    });
    let answer = server.post(CHAT, &body(CHAT, &json!({"messages": named})));
    assert_eq!(answer.header("x-ignored-fields"), None, "{}", answer.text());
}

/// A turn that the template leaves out is reported by its path, or by its role where turns are merged.
#[test]
fn a_message_that_the_template_leaves_out_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("first.jinja");
    let template = "{% if messages[0].role == 'system' %}{{ messages[0].content }}\n{% endif %}\
                    {% for m in messages if m.role != 'system' %}{{ m.content }}\n{% endfor %}";
    std::fs::write(&path, template).unwrap();
    let server = Server::start_with("--max-model-len 256", |command| {
        command.arg("--chat-template").arg(&path);
    });
    let turns = |last: Value| {
        let turns =
            json!([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello."}, last]);
        json!({"messages": turns, "input": turns, "max_tokens": 2})
    };
    let ignored = |path: &str, name: &str| {
        let mut body = turns(json!({"role": "system", "content": "In French."}));
        let other = if path == "/v1/responses" { ["messages", "max_tokens"] } else { ["input", "input"] };
        other.iter().for_each(|name| body[*name] = Value::Null);
        let answer = server.post(path, &body);
        assert_eq!(answer.header("x-ignored-fields"), Some(name), "{path}: {}", answer.text());
        assert_eq!(answer.status, 200);
    };
    ignored(CHAT, "messages[2].content");
    ignored("/v1/messages", "messages.system");
    ignored("/v1/responses", "input.system");
    let body = body(CHAT, &turns(json!({"role": "user", "content": "Go on."})));
    assert_eq!(server.post(CHAT, &body).header("x-ignored-fields"), Some("input"));
}

/// Documents are for templates that read them.
#[test]
fn documents_that_the_template_does_not_read_are_reported() {
    let documents = json!([{"text": "secret"}]);
    let change = json!({"documents": documents, "mm_processor_kwargs": {"fps": 1}});
    let server = Server::start("--max-model-len 64");
    let answer = server.post(CHAT, &body(CHAT, &change));
    assert_eq!(answer.header("x-ignored-fields"), Some("documents, mm_processor_kwargs"));
    let nothing = json!({"documents": [], "mm_processor_kwargs": {}});
    assert_eq!(server.post(CHAT, &body(CHAT, &nothing)).header("x-ignored-fields"), None);
    let differing = json!({"documents": documents, "chat_template_kwargs": {"documents": []}});
    check_error(
        "differ",
        &server.post(CHAT, &body(CHAT, &differing)),
        400,
        Some("documents"),
        None,
        "differ",
    );
    drop(server);
    let server = Server::start("--max-model-len 64 --strict-fields");
    let answer = server.post(CHAT, &body(CHAT, &json!({"documents": documents})));
    let unsupported = Some("unsupported_parameter");
    check_error("strict", &answer, 400, Some("documents"), unsupported, "documents has no effect here");
    drop(server);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("documents.jinja");
    let template = "{% for document in documents or [] %}{{ document.text }}{% endfor %}\
                    {% for message in messages %}{{ message.content }}{% endfor %}";
    std::fs::write(&path, template).unwrap();
    let server = Server::start_with("--max-model-len 64 --strict-fields", |command| {
        command.arg("--chat-template").arg(&path);
    });
    let num_tokens = |change: &Value| {
        server.post(CHAT, &body(CHAT, change)).success()["usage"]["prompt_tokens"].as_u64().unwrap()
    };
    assert!(num_tokens(&json!({"documents": documents})) > num_tokens(&json!({})));
}

#[test]
fn strict_fields_are_refused() {
    let server = Server::start("--max-model-len 64 --strict-fields");
    for path in [CHAT, COMPLETIONS] {
        server.post(path, &body(path, &json!({"nothing": null}))).success();
        let answer = server.post(path, &body(path, &json!({"service_tier": "flex", "store": true})));
        let unsupported = Some("unsupported_parameter");
        let words = "service_tier, store have no effect here (--strict-fields); omit them";
        check_error("extras", &answer, 400, Some("service_tier"), unsupported, words);
        let answer = server.post(path, &body(path, &json!({"store": true})));
        let words = "store has no effect here (--strict-fields); omit it";
        check_error("one", &answer, 400, Some("store"), unsupported, words);
        // What clients send and what is so without it.
        for change in [
            json!({"store": false, "metadata": {"a": "b"}, "service_tier": "auto"}),
            json!({"service_tier": "default", "stream": true, "stream_options": {"include_obfuscation": false}}),
        ] {
            let answer = server.post(path, &body(path, &change));
            assert_eq!(answer.status, 200, "{path}: {}", answer.text());
        }
    }
    for tier in ["auto", "standard_only"] {
        let mut body = body(CHAT, &json!({"service_tier": tier}));
        body["messages"] = json!([{"role": "user", "content": "Hi"}]);
        server.post("/v1/messages", &body).success();
    }
}

/// For each interface a request, the field that limits its answer, and the one that sets its format.
fn interfaces() -> [(&'static str, Value, &'static str, &'static str); 4] {
    let messages = json!([{"role": "user", "content": "Hi"}]);
    [
        (CHAT, json!({"messages": messages}), "max_tokens", "response_format"),
        (COMPLETIONS, json!({"prompt": "Hi"}), "max_tokens", "response_format"),
        ("/v1/messages", json!({"messages": messages}), "max_tokens", "output_config.format"),
        ("/v1/responses", json!({"input": "Hi"}), "max_output_tokens", "text.format"),
    ]
}

#[test]
fn words_of_another_interface_are_refused_with_the_way_out_of_this_one() {
    let server = Server::start("--max-model-len 64");
    for (path, body, limit, format) in interfaces() {
        let check = |name: &str, value: Value, way_out: &str| {
            let mut body = body.clone();
            body[limit] = 2.into();
            match name.split_once('.') {
                Some((object, field)) => body[object][field] = value,
                None => body[name] = value,
            }
            let answer = server.post(path, &body);
            assert_eq!(answer.status, 400, "{path} {name}: {}", answer.text());
            let message = answer.json()["error"]["message"].as_str().unwrap().to_owned();
            assert!(message.starts_with(name) && message.ends_with(way_out), "{path}: {message}");
        };
        for name in ["max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict"] {
            let is_known = name == limit || (path, name) == (CHAT, "max_completion_tokens");
            if !is_known {
                check(name, 2.into(), &format!(" use {limit}"));
            }
        }
        check("json_schema", json!({"type": "object"}), &format!(" use {format}"));
        check("json_object", true.into(), &format!(" use {format} of type json_object"));
        check("regex", "a".into(), " use structured_outputs.regex");
        check("guided_decoding", json!({"regex": "a"}), " use structured_outputs");
        for name in ["num_predict", "max_length"] {
            check(name, 2.into(), &format!(" use {limit}"));
        }
        for name in ["text.format", "output_config.format", "output_format"] {
            let own = if name == "output_format" { "output_config.format" } else { name };
            if own != format {
                check(name, json!({"type": "json_object"}), &format!(" use {format}"));
            }
        }
        check("options", json!({"num_predict": 2}), " use the fields of this interface");
        check("extra_body", json!({"top_k": 2}), " use the fields of this interface");
        check("nvext.guided_regex", "a".into(), " use the fields of this interface");
        check("bad_words_ids", json!([[5]]), " use logit_bias");
        check("thinking_token_budget", 5.into(), " omit it");
        let stop = if path == "/v1/messages" { "stop_sequences" } else { "stop" };
        for name in ["stop_words", "stop_sequences"] {
            if name != stop {
                check(name, json!(["a"]), &format!(" use {stop}"));
            }
        }
        if path != "/v1/responses" {
            check("previous_response_id", "resp_1".into(), " use /v1/responses");
        }
        let schema = json!({"name": "x", "schema": {}, "grammar": "a"});
        let format = json!({"type": "json_schema", "json_schema": schema});
        let mut request = body.clone();
        (request[limit], request["response_format"]) = (2.into(), format);
        let error = server.post(path, &request).json()["error"]["message"].clone();
        let message = error.as_str().unwrap();
        assert!(message.starts_with("response_format.json_schema.grammar is unknown"), "{path}: {message}");
        if ![CHAT, COMPLETIONS].contains(&path) {
            check("continue_final_message", true.into(), "");
        }
        let mut nothing = body.clone();
        nothing[limit] = 2.into();
        nothing["continue_final_message"] = false.into();
        let answer = server.post(path, &nothing);
        assert_eq!((answer.status, answer.header("x-ignored-fields")), (200, None), "{}", answer.text());
    }
}

#[test]
fn constraints_of_other_engines_are_refused_with_the_way_out() {
    let server = Server::start("--max-model-len 64");
    for path in [CHAT, COMPLETIONS] {
        for (name, way_out) in [
            ("grammar", "structured_outputs.grammar"),
            ("json_schema", "response_format"),
            ("regex", "structured_outputs.regex"),
            ("n_predict", "max_tokens"),
            ("guided_decoding_backend", "omit it"),
        ] {
            let answer = server.post(path, &body(path, &json!({name: "x"})));
            check_error(name, &answer, 400, Some(name), Some("unsupported_parameter"), way_out);
        }
        let unknown = json!({"structured_outputs": {"regex": "a", "backend": "x"}});
        let answer = server.post(path, &body(path, &unknown));
        let param = Some("structured_outputs.backend");
        check_error("unknown", &answer, 400, param, Some("unsupported_parameter"), "unknown");
    }
}
