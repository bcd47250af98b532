use serde_json::{Value, json};

use super::super::super::ignored::Ignored;
use super::super::super::json::parse_object;
use super::super::super::memory::Memory;
use super::super::tools::ToolChoice;
use super::*;
use tinyvllm::chat::Content;

fn question(change: &Value) -> Result<Question, ApiError> {
    let mut body = json!({"input": "Rome?"});
    for (name, value) in change.as_object().unwrap() {
        body[name] = value.clone();
    }
    let mut fields = parse_object(body.to_string().as_bytes()).unwrap();
    Question::parse(&mut fields, &Memory::new(0, 0), Caller(0))
}

fn messages(change: &Value) -> Value {
    let Question { conversation, .. } = question(change).unwrap();
    conversation
        .messages
        .iter()
        .map(|message| json!([message.role, message.content.as_text(), message.extra]))
        .collect()
}

#[test]
fn items_become_the_messages_of_chats() {
    let check = |change: Value, expected: Value| assert_eq!(messages(&change), expected, "{change}");
    check(json!({}), json!([["user", "Rome?", {}]]));
    check(json!({"instructions": "Be brief."}), json!([["system", "Be brief.", {}], ["user", "Rome?", {}]]));
    let call = |id: &str, name: &str, arguments: &str| json!({"type": "function_call", "id": "fc_1", "call_id": id, "name": name, "arguments": arguments, "status": "completed"});
    let output =
        |id: &str, output: Value| json!({"type": "function_call_output", "call_id": id, "output": output});
    let said = |text: &str| json!({"type": "message", "id": "msg_1", "role": "assistant", "content": [{"type": "output_text", "text": text, "annotations": []}]});
    let thought = |text: &str| json!({"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": text}]});
    let asked = |id: &str, name: &str, arguments: Value| json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
    let input = json!([
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "input_text", "text": "Rome?"}, {"type": "input_text", "text": "Oslo?"}]},
        thought("Two calls."), said("I'll look."),
        call("1", "weather", "{\"city\": \"Rome\"}"), call("2", "time", ""),
        output("1", json!("sunny")), output("2", json!([{"type": "input_text", "text": "noon"}])),
        thought("Once more."), call("3", "weather", "{\"a\": "), said("Wait."),
        output("3", json!("rain")),
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Done."}], "encrypted_content": "x"},
        said("Rain."), said("And sun."),
        {"role": "system", "content": "Now be long."},
        {"role": "user", "content": "Well?"},
    ]);
    let expected = json!([
        ["system", "Be brief.\n\nBe kind.", {}],
        ["user", "Rome?\nOslo?", {}],
        ["assistant", "I'll look.", {"reasoning_content": "Two calls.", "tool_calls": [asked("1", "weather", json!({"city": "Rome"})), asked("2", "time", json!({}))]}],
        ["tool", "sunny", {"tool_call_id": "1"}],
        ["tool", "noon", {"tool_call_id": "2"}],
        ["assistant", "", {"reasoning_content": "Once more.", "tool_calls": [asked("3", "weather", json!({"INVALID_JSON": "{\"a\": "}))]}],
        ["assistant", "Wait.", {}],
        ["tool", "rain", {"tool_call_id": "3"}],
        ["assistant", "Rain.", {"reasoning_content": "Done."}],
        ["assistant", "And sun.", {}],
        ["system", "Now be long.", {}],
        ["user", "Well?", {}],
    ]);
    let change = json!({"instructions": "Be brief.", "input": input});
    check(change.clone(), expected);
    assert_eq!(question(&change).unwrap().conversation.about_tools.as_deref(), Some("input[4]"));
}

#[test]
fn tools_and_choices_become_those_of_chats() {
    let schema = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    let tool = |name: &str| json!({"type": "function", "name": name, "description": "Tells it", "parameters": schema, "strict": true});
    let given = json!([tool("weather"), tool("climate")]);
    let read = |choice: Value| {
        let question = question(&json!({"tools": given, "tool_choice": choice})).unwrap();
        assert_eq!(question.settings["tools"], given);
        let names: Vec<String> =
            question.conversation.tools.tools.iter().map(|tool| tool.name.clone()).collect();
        (question.conversation.tools, names)
    };
    let (tools, names) = read(Value::Null);
    assert_eq!((&tools.choice, tools.is_parallel, names.len()), (&ToolChoice::Auto, true, 2));
    let function = json!({"name": "weather", "description": "Tells it", "parameters": schema});
    assert_eq!(tools.source.unwrap()[0], json!({"type": "function", "function": function}));
    assert_eq!(read(json!("none")).0.choice, ToolChoice::None);
    assert_eq!(read(json!("required")).0.choice, ToolChoice::Required);
    let named = read(json!({"type": "function", "name": "climate"})).0;
    assert_eq!(named.choice, ToolChoice::Named("climate".to_owned()));
    // The prompt must not have tools that the model may not call.
    let allowed = json!({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "climate"}]});
    let (tools, names) = read(allowed);
    assert_eq!((tools.choice, names), (ToolChoice::Required, vec!["climate".to_owned()]));
    assert_eq!(tools.source.unwrap().as_array().unwrap().len(), 1);
}

#[test]
fn settings_are_read_and_repeated() {
    let question = question(&json!({
        "metadata": {"a": "b"}, "reasoning": {"effort": "none", "summary": "auto"}, "max_output_tokens": 7,
        "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "integer"}}},
        "include": ["reasoning.encrypted_content"], "top_logprobs": 2, "store": true, "prompt_cache_key": "k",
        "truncation": "disabled", "service_tier": "auto", "background": false, "prompt": null, "max_tool_calls": 3,
    }))
    .unwrap();
    assert_eq!((question.max_tokens, question.logprobs, question.is_stored), (Some(7), Some(2), false));
    assert!(question.output.is_some());
    let variables = json!({"reasoning_effort": "none", "enable_thinking": false, "thinking": false});
    assert_eq!(Value::from(question.conversation.variables.values), variables);
    for (name, value) in [
        ("metadata", json!({"a": "b"})),
        ("reasoning", json!({"effort": "none", "summary": "auto"})),
        (
            "text",
            json!({"format": {"type": "json_schema", "name": "x", "schema": {"type": "integer"}}, "verbosity": "medium"}),
        ),
        ("tool_choice", json!("auto")),
        ("tools", json!([])),
        ("parallel_tool_calls", json!(true)),
        ("store", json!(false)),
        ("prompt_cache_key", json!("k")),
        ("max_tool_calls", json!(3)),
        ("previous_response_id", Value::Null),
    ] {
        assert_eq!(question.settings[name], value, "{name}");
    }
    let question = self::question(&json!({"include": ["message.output_text.logprobs"]})).unwrap();
    assert_eq!(question.logprobs, Some(0));
}

#[test]
fn what_is_not_valid_is_refused_by_name() {
    let check = |change: Value, param: &str, words: &str| {
        let error = question(&change).err().unwrap_or_else(|| panic!("{change} was accepted")).body();
        assert_eq!(error["error"]["param"], param, "{change}");
        assert!(error["error"]["message"].as_str().unwrap().contains(words), "{error}");
    };
    let item = |item: Value| json!({"input": [item]});
    check(json!({"input": null}), "input", "missing");
    check(json!({"input": []}), "input", "empty");
    check(json!({"input": 5}), "input", "a list of items");
    check(item(json!(1)), "input[0]", "an object");
    check(item(json!({"content": "x"})), "input[0].role", "missing");
    let mistyped = json!({"type": "mesage", "role": "user", "content": "x"});
    check(item(mistyped), "input[0].type", "\"mesage\", expected message, reasoning, function_call");
    let part = json!({"type": "input_text", "text": "x"});
    check(item(part), "input[0].type", "belongs inside a message");
    check(item(json!({"role": "user"})), "input[0].content", "missing");
    check(item(json!({"role": "tool", "content": "x"})), "input[0].role", "developer");
    let image =
        json!({"role": "user", "content": [{"type": "input_image", "image_url": "file:///etc/passwd"}]});
    check(item(image), "input[0].content[0]", "text only");
    check(item(json!({"type": "function_call", "name": "f"})), "input[0].call_id", "missing");
    check(item(json!({"type": "function_call", "call_id": "1"})), "input[0].name", "missing");
    let call = json!({"type": "function_call", "call_id": "1", "name": "f", "arguments": {}});
    check(item(call), "input[0].arguments", "a string");
    check(item(json!({"type": "function_call_output", "call_id": "1"})), "input[0].output", "missing");
    check(item(json!({"type": "reasoning", "content": "x"})), "input[0].content", "a list of parts");
    for kind in [json!({"type": "item_reference"}), json!({"type": null}), json!({})] {
        let mut reference = kind;
        reference["id"] = "x".into();
        check(item(reference), "input", "--responses-memory");
    }
    check(item(json!({"id": "x", "content": "y"})), "input[0].role", "missing");
    check(json!({"previous_response_id": "resp_1"}), "previous_response_id", "--responses-memory");
    check(json!({"conversation": "x"}), "conversation", "not supported");
    check(json!({"prompt": {"id": "x"}}), "prompt", "not supported");
    check(json!({"background": true}), "background", "not supported");
    check(json!({"include": [1]}), "include[0]", "a string");
    check(json!({"include": "x"}), "include", "a list");
    check(json!({"metadata": {"a": 1}}), "metadata", "16 entries");
    check(json!({"metadata": {"a": "x".repeat(513)}}), "metadata", "512");
    check(json!({"prompt_cache_key": "x".repeat(1_025)}), "prompt_cache_key", "1025 bytes");
    check(json!({"text": {"format": {"type": "xml"}}}), "text.format.type", "xml");
    check(json!({"text": {"format": {"type": "json_schema", "name": "x"}}}), "text.format.schema", "missing");
    check(
        json!({"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}}),
        "structured_outputs.regex",
        "text.format and structured_outputs.regex exclude each other",
    );
    check(json!({"continue_final_message": true}), "continue_final_message", "/v1/chat/completions");
    let tool = json!({"type": "function", "name": "f", "parameters": {"type": "object"}});
    for kind in ["web_search", "local_shell", "custom", "mcp"] {
        let alone = json!([{"type": kind, "name": "x"}]);
        check(
            json!({"tools": alone, "tool_choice": "required"}),
            "tool_choice",
            &format!("of type \"{kind}\""),
        );
        assert!(self::question(&json!({"tools": alone})).unwrap().conversation.tools.source.is_none());
        let chosen = json!({"tools": [tool, {"type": kind, "name": "x"}], "tool_choice": {"type": kind}});
        check(chosen, "tool_choice.type", kind);
    }
    check(json!({"tools": [{"name": "f"}]}), "tools[0].type", "missing");
    check(json!({"tools": [{"type": "function"}]}), "tools[0].name", "missing");
    check(json!({"tools": vec![tool.clone(); 1_025]}), "tools", "1025 entries");
    check(json!({"tool_choice": "required"}), "tool_choice", "no tools");
    check(json!({"tool_choice": 1}), "tool_choice", "required");
    check(json!({"tools": [tool], "tool_choice": {"type": "web_search"}}), "tool_choice.type", "web_search");
    check(json!({"tools": [tool], "tool_choice": {"type": "function"}}), "tool_choice.name", "missing");
    let allowed = |mode: &str, tools: Value| json!({"tools": [tool], "tool_choice": {"type": "allowed_tools", "mode": mode, "tools": tools}});
    check(allowed("none", json!([])), "tool_choice.mode", "required");
    check(allowed("auto", json!("f")), "tool_choice.tools", "a list");
    check(allowed("auto", json!([{"name": "g"}])), "tool_choice", "not in tools");
    check(allowed("required", json!([])), "tool_choice", "no tools");
    check(allowed("auto", json!(vec![json!({"name": "f"}); 1_025])), "tool_choice", "1025 tools");
}

#[test]
fn what_agents_send_by_themselves_is_taken() {
    let check = |change: Value, reported: &[&str]| -> Question {
        let mut body = json!({"input": "Rome?"});
        for (name, value) in change.as_object().unwrap() {
            body[name] = value.clone();
        }
        let ignored = Ignored::default();
        let mut fields = parse_object(body.to_string().as_bytes()).unwrap().telling(&ignored);
        let question = Question::parse(&mut fields, &Memory::new(0, 0), Caller(0)).unwrap();
        drop(fields);
        assert_eq!(ignored.take(), reported, "{change}");
        question
    };
    let tool = json!({"type": "function", "name": "f", "parameters": {"type": "object"}});
    let tools = json!([{"type": "namespace", "name": "n", "tools": []}, tool, {"type": "web_search", "external_web_access": false}]);
    let Question { conversation, settings, .. } =
        check(json!({"tools": tools, "tool_choice": "auto"}), &["tools[0].namespace", "tools[2].web_search"]);
    assert_eq!((settings["tools"].clone(), conversation.tools.tools.len()), (json!([tool]), 1));
    let allowed = json!({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}, {"type": "function", "name": "f"}]});
    check(json!({"tools": [tool], "tool_choice": allowed}), &["tool_choice.tools[0].mcp"]);
    check(json!({"truncation": "auto", "service_tier": "priority"}), &["service_tier", "truncation"]);
    check(json!({"text": {"verbosity": "low"}, "safety_identifier": "x"}), &["text.verbosity"]);
    let include = json!(["reasoning.encrypted_content", "x"]);
    check(json!({"include": include, "reasoning": {"summary": "x", "effort": "none"}}), &["include[1].x"]);
    check(json!({"context_management": [{"type": "compaction"}]}), &["context_management"]);
    let input = json!([
        {"role": "user", "content": "Rome?"},
        {"type": "web_search_call", "id": "1", "status": "completed", "action": {}},
        {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "x", "status": "completed"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "done"},
        {"type": "function_call", "call_id": "d", "name": "f", "arguments": "null"},
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    ]);
    let messages = check(json!({"input": input}), &["input[1].web_search_call"]).conversation.messages;
    // A turn with calls only has no content, which differs from empty content.
    assert_eq!((&messages[1].content, &messages[3].content), (&Content::Missing, &Content::Missing));
    let messages: Vec<Value> = messages
        .iter()
        .map(|message| json!([message.role, message.content.as_text(), message.extra]))
        .collect();
    let call = |id: &str, name: &str, arguments: Value| json!([{"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}]);
    assert_eq!(
        Value::from(messages),
        json!([
            ["user", "Rome?", {}],
            ["assistant", "", {"tool_calls": call("c", "patch", json!({"input": "x"}))}],
            ["tool", "done", {"tool_call_id": "c"}],
            ["assistant", "", {"tool_calls": call("d", "f", json!({}))}],
            ["assistant", "No.", {}],
        ])
    );
}
