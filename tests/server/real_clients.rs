//! Clients that others wrote: their types read our answers, and their programs talk to the server.

use std::io::Write;
use std::process::Command;

use async_openai::types::chat::{
    ChatCompletionMessageToolCalls, ChatCompletionRequestAssistantMessage, ChatCompletionTool,
    ChatCompletionTools, CreateChatCompletionResponse, CreateChatCompletionStreamResponse, FinishReason,
    FunctionObject, ResponseFormat, ResponseFormatJsonSchema,
};
use async_openai::types::completions::CreateCompletionResponse;
use serde_json::json;

use super::client::Server;

/// Gives the built-in model a template with tools.
const TOOL_FLAGS: &str =
    concat!("--chat-template ", env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/tok/chat/tools.jinja");

#[test]
fn async_openai_reads_the_answers() {
    let server = Server::start("--max-model-len 256");
    let mut body = json!({
        "model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_completion_tokens": 6,
        "n": 2, "logprobs": true, "top_logprobs": 2, "ignore_eos": true,
    });
    let answer = server.post("/v1/chat/completions", &body).success();
    let answer: CreateChatCompletionResponse = serde_json::from_value(answer).unwrap();
    assert_eq!(answer.choices.len(), 2);
    assert_eq!(answer.choices[1].finish_reason, Some(FinishReason::Length));
    let tokens = answer.choices[0].logprobs.as_ref().unwrap().content.as_ref().unwrap();
    assert_eq!((tokens.len(), tokens[0].top_logprobs.len()), (6, 2));
    assert_eq!(answer.usage.unwrap().completion_tokens, 12);

    body["stream"] = json!(true);
    body["stream_options"] = json!({"include_usage": true});
    let chunks = server.post("/v1/chat/completions", &body).events();
    let chunks: Vec<CreateChatCompletionStreamResponse> =
        chunks.into_iter().map(|chunk| serde_json::from_value(chunk).unwrap()).collect();
    let text: String = chunks
        .iter()
        .flat_map(|chunk| &chunk.choices)
        .filter(|choice| choice.index == 0)
        .filter_map(|choice| choice.delta.content.clone())
        .collect();
    assert!(!text.is_empty());
    assert_eq!(chunks.last().unwrap().usage.as_ref().unwrap().completion_tokens, 12);

    let body = json!({"model": "demo", "prompt": "Once", "max_tokens": 3, "logprobs": 1});
    let answer = server.post("/v1/completions", &body).success();
    let answer: CreateCompletionResponse = serde_json::from_value(answer).unwrap();
    assert_eq!(answer.choices[0].logprobs.as_ref().unwrap().tokens.len(), 3);
}

#[test]
fn async_openai_calls_tools() {
    let server = Server::start(&format!("--max-model-len 1024 {TOOL_FLAGS}"));
    let parameters = json!({"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}},
                            "required": ["city"], "additionalProperties": false});
    let function = FunctionObject {
        name: "weather".to_owned(),
        description: Some("Tells the weather".to_owned()),
        parameters: Some(parameters),
        strict: Some(true),
    };
    let tools = vec![ChatCompletionTools::Function(ChatCompletionTool { function })];
    let mut body = json!({
        "messages": [{"role": "user", "content": "Rome?"}], "temperature": 0, "max_tokens": 100,
        "tools": serde_json::to_value(tools).unwrap(), "tool_choice": "required", "parallel_tool_calls": false,
    });
    let answer = server.post("/v1/chat/completions", &body).success();
    let answer: CreateChatCompletionResponse = serde_json::from_value(answer).unwrap();
    let choice = &answer.choices[0];
    assert_eq!(choice.finish_reason, Some(FinishReason::ToolCalls));
    let [ChatCompletionMessageToolCalls::Function(call)] = &choice.message.tool_calls.as_ref().unwrap()[..]
    else {
        panic!("{choice:?}");
    };
    assert_eq!(call.function.name, "weather");

    body["stream"] = json!(true);
    let chunks = server.post("/v1/chat/completions", &body).events();
    let mut arguments = String::new();
    for chunk in chunks {
        let chunk: CreateChatCompletionStreamResponse = serde_json::from_value(chunk).unwrap();
        for call in chunk.choices.iter().filter_map(|choice| choice.delta.tool_calls.as_ref()).flatten() {
            assert_eq!(call.index, 0);
            arguments.push_str(call.function.as_ref().unwrap().arguments.as_deref().unwrap());
        }
    }
    assert_eq!(arguments, call.function.arguments);
    // What came goes back as it is.
    let message = ChatCompletionRequestAssistantMessage {
        tool_calls: choice.message.tool_calls.clone(),
        ..ChatCompletionRequestAssistantMessage::default()
    };
    let mut message = serde_json::to_value(message).unwrap();
    message["role"] = json!("assistant");
    let answer = json!({"role": "tool", "tool_call_id": call.id, "content": "sunny"});
    body["messages"].as_array_mut().unwrap().extend([message, answer]);
    body["tool_choice"] = json!("auto");
    assert_eq!(server.post("/v1/chat/completions", &body).status, 200);
}

#[test]
fn async_openais_response_formats_are_understood() {
    let server = Server::start("--max-model-len 256");
    let schema = json!({"type": "object", "properties": {"is_big": {"type": "boolean"}}, "required": ["is_big"],
                        "additionalProperties": false});
    let json_schema = ResponseFormatJsonSchema {
        name: "size".to_owned(),
        schema,
        strict: Some(true),
        ..ResponseFormatJsonSchema::default()
    };
    for (format, is_whole) in
        [(ResponseFormat::JsonSchema { json_schema }, true), (ResponseFormat::JsonObject, false)]
    {
        let body = json!({
            "messages": [{"role": "user", "content": "Is it big?"}], "max_tokens": 60, "seed": 1,
            "response_format": serde_json::to_value(format).unwrap(),
        });
        let answer = server.post("/v1/chat/completions", &body).success();
        let answer: CreateChatCompletionResponse = serde_json::from_value(answer).unwrap();
        let text = answer.choices[0].message.content.as_ref().unwrap();
        assert!(text.starts_with('{'), "{text:?}");
        if is_whole {
            assert_eq!(answer.choices[0].finish_reason, Some(FinishReason::Stop));
            let value: serde_json::Value = serde_json::from_str(text).unwrap();
            assert!(value["is_big"].is_boolean(), "{text}");
        }
    }
}

/// The Python that has the package, or a line that says that there is none.
fn python_with(package: &str) -> Option<String> {
    let python = std::env::var("TINYVLLM_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let import = Command::new(&python).args(["-c", &format!("import {package}")]).output();
    if import.is_ok_and(|output| output.status.success()) {
        return Some(python);
    }
    say_skipped(&format!("{python} has no package {package}"));
    None
}

/// Past the capture of output, so that it is seen.
fn say_skipped(what: &str) {
    let _ = writeln!(std::io::stderr(), "skipped: {what}");
}

/// What a script in scripts/checks prints, which must end well.
#[track_caller]
fn run_script(python: &str, script: &str, args: &[&str]) -> String {
    let script = format!("{}/../../scripts/checks/{script}", env!("CARGO_MANIFEST_DIR"));
    let output = Command::new(python).arg(script).args(args).output().unwrap();
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{printed}{}", String::from_utf8_lossy(&output.stderr));
    printed
}

fn check_openais_client(flags: &str, args: impl FnOnce(String) -> Vec<String>) {
    check_openais_client_with(flags, |python, url| {
        let args = args(url.to_owned());
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        assert!(run_script(python, "openai_client.py", &args).contains("ok"));
    });
}

/// Runs OpenAI's own client against a server. Needs Python with the package `openai`; prints a line if it is missing.
fn check_openais_client_with(flags: &str, check: impl FnOnce(&str, &str)) {
    let Some(python) = python_with("openai") else {
        let is_required = std::env::var_os("TINYVLLM_REQUIRE_OPENAI").is_some();
        assert!(!is_required, "there is no package openai");
        return;
    };
    let server = Server::start(flags);
    check(&python, &format!("http://{}/v1", server.address()));
}

#[test]
fn openais_python_client_works() {
    let flags =
        format!("--max-model-len 1024 --max-num-seqs 4 --api-key secret --responses-memory 100 {TOOL_FLAGS}");
    check_openais_client(&flags, |url| vec![url, "secret".to_owned()]);
}

#[test]
fn the_examples_in_python_work() {
    check_openais_client_with(
        &format!("--max-model-len 1024 --api-key secret {TOOL_FLAGS}"),
        |python, url| {
            let run = |name: &str| {
                let script = format!("{}/../../scripts/examples/{name}.py", env!("CARGO_MANIFEST_DIR"));
                let mut command = Command::new(python);
                command.arg(script).env("OPENAI_BASE_URL", url).env("OPENAI_API_KEY", "secret");
                let output = command.output().unwrap();
                let printed = String::from_utf8_lossy(&output.stdout).into_owned();
                assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
                printed
            };
            // It is sampled, so it may be short.
            assert!(!run("chat").trim().is_empty());
            assert!(run("structured").starts_with("kind='"));
            assert!(run("tools").starts_with("weather {'city': "));
        },
    );
}

#[test]
fn openais_python_client_tries_again() {
    check_openais_client("--max-num-seqs 1 --max-waiting 0", |url| vec!["--busy".to_owned(), url]);
}

/// The Python of a package: one of its own in the folder that TINYVLLM_PYTHON_CLIENTS names, because they need each
/// other's packages in different versions, or TINYVLLM_PYTHON. Says if there is none, which is a failure for those that
/// TINYVLLM_REQUIRE_CLIENTS lists.
fn python_of(name: &str) -> Option<String> {
    let folder = std::env::var("TINYVLLM_PYTHON_CLIENTS").unwrap_or_default();
    let own = format!("{folder}/{name}/bin/python");
    let own = std::path::Path::new(&own).exists().then_some(own);
    let python = own.or_else(|| python_with(name));
    let required = std::env::var("TINYVLLM_REQUIRE_CLIENTS").unwrap_or_default();
    let is_required = required.split_whitespace().any(|required| required == name);
    assert!(python.is_some() || !is_required, "{name} is not installed");
    python
}

#[test]
fn clients_that_others_wrote_work() {
    let mut server = None;
    let names = [
        "anthropic",
        "langchain_openai",
        "langchain_anthropic",
        "litellm",
        "instructor",
        "pydantic_ai",
        "ollama",
    ];
    for name in names {
        let Some(python) = python_of(name) else { continue };
        let server = server.get_or_insert_with(|| {
            Server::start(&format!(
                "--max-model-len 1024 --api-key secret --responses-memory 100 {TOOL_FLAGS}"
            ))
        });
        let url = format!("http://{}", server.address());
        let printed = run_script(&python, "clients.py", &[&url, "secret", name]);
        assert!(printed.contains(&format!("ok: {name}")), "{printed}");
    }
}

/// The sockets of ZeroMQ's own library, which the routers' Python has.
#[test]
fn zeromqs_own_sockets_hear_of_the_cache() {
    let Some(python) = python_of("vllm_router") else { return };
    let server = Server::start(
        "--max-model-len 256 --block-size 32 --kv-events-config {\"enable_kv_cache_events\":true,\
         \"endpoint\":\"tcp://127.0.0.1:0\",\"replay_endpoint\":\"tcp://127.0.0.1:0\",\"topic\":\"kv@demo\"}",
    );
    let url = format!("http://{}", server.address());
    assert!(run_script(&python, "cache_events.py", &[&url]).contains("ok: events"));
}

/// Three servers behind routers of other projects. The Python of `vllm_router` has those of the others too.
#[test]
fn routers_that_others_wrote_find_what_is_cached() {
    let Some(python) = python_of("vllm_router") else { return };
    let printed = run_script(&python, "fleet.py", &[env!("CARGO_BIN_EXE_tinyvllm")]);
    assert!(printed.contains("ok: the fleet"), "{printed}");
}

/// Three servers as workers of NVIDIA's Dynamo.
#[test]
fn dynamo_works() {
    let Some(python) = python_of("dynamo") else { return };
    let printed = run_script(&python, "dynamo_fleet.py", &[env!("CARGO_BIN_EXE_tinyvllm")]);
    assert!(printed.contains("ok: dynamo"), "{printed}");
}

/// Needs Node.js, and the packages in the folder that TINYVLLM_NODE_CLIENTS names; prints a line if it names none.
#[test]
fn the_ai_sdk_works() {
    let Ok(folder) = std::env::var("TINYVLLM_NODE_CLIENTS") else {
        return say_skipped("the AI SDK: TINYVLLM_NODE_CLIENTS names no folder with it");
    };
    let server =
        Server::start(&format!("--max-model-len 1024 --api-key secret --responses-memory 100 {TOOL_FLAGS}"));
    let url = format!("http://{}", server.address());
    let printed = run_script("node", "ai_sdk.mjs", &[&folder, &url, "secret", "demo"]);
    assert_eq!(printed.lines().filter(|line| line.starts_with("ok: ")).count(), 3, "{printed}");
}
