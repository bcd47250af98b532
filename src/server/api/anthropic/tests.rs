use serde_json::{Value, json};

use super::super::super::ignored::Ignored;
use super::super::super::json::parse_object;
use super::*;
use tinyvllm::chat::Content;

fn question(change: &Value) -> Result<Question, ApiError> {
    let mut body = json!({"messages": [{"role": "user", "content": "Rome?"}]});
    for (name, value) in change.as_object().unwrap() {
        body[name] = value.clone();
    }
    Question::parse(&mut parse_object(body.to_string().as_bytes()).unwrap())
}

#[test]
fn a_conversation_becomes_that_of_chats() {
    let body = json!({
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "Be kind."}],
        "messages": [
            {"role": "user", "content": "Hello"},
            {"role": "user", "content": [{"type": "text", "text": "Rome?"}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "Rome, then.", "signature": "x"},
                {"type": "redacted_thinking", "data": "abc"},
                {"type": "text", "text": "I'll look."},
                {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Rome"}},
                {"type": "tool_use", "id": "toolu_2", "name": "time", "input": {}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "sunny"}]},
                {"type": "tool_result", "tool_use_id": "toolu_2", "content": "no clock", "is_error": true},
                {"type": "text", "text": "Well?"},
            ]},
        ],
    });
    let Question { conversation, .. } = question(&body).unwrap();
    let messages: Vec<Value> = conversation
        .messages
        .iter()
        .map(|message| json!([message.role, message.content.as_text(), message.extra]))
        .collect();
    let call = |id: &str, name: &str, arguments: Value| json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
    let calls =
        json!([call("toolu_1", "weather", json!({"city": "Rome"})), call("toolu_2", "time", json!({}))]);
    let expected = json!([
        ["system", "Be brief.\nBe kind.", {}],
        ["user", "Hello\nRome?", {}],
        ["assistant", "I'll look.", {"reasoning_content": "Rome, then.", "tool_calls": calls}],
        ["tool", "sunny", {"tool_call_id": "toolu_1"}],
        ["tool", "no clock", {"tool_call_id": "toolu_2", "is_error": true}],
        ["user", "Well?", {}],
    ]);
    assert_eq!(Value::from(messages), expected);
    assert_eq!(conversation.about_tools.as_deref(), Some("messages[2].content[3]"));
}

#[test]
fn tools_and_choices_become_those_of_chats() {
    let schema = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    let tool = json!({"name": "weather", "description": "Tells it", "input_schema": schema, "type": "custom",
                      "cache_control": {"type": "ephemeral"}});
    let read = |choice: Value| {
        let question = question(&json!({"tools": [tool], "tool_choice": choice})).unwrap();
        question.conversation.tools
    };
    let tools = read(Value::Null);
    assert_eq!((&tools.choice, tools.is_parallel), (&ToolChoice::Auto, true));
    let function = json!({"name": "weather", "description": "Tells it", "parameters": schema});
    assert_eq!(tools.source, Some(json!([{"type": "function", "function": function}])));
    assert_eq!(
        (tools.tools[0].name.as_str(), &tools.tools[0].parameters),
        ("weather", &Some(schema.clone()))
    );
    let any = read(json!({"type": "any", "disable_parallel_tool_use": true}));
    assert_eq!((any.choice, any.is_parallel), (ToolChoice::Required, false));
    assert_eq!(read(json!({"type": "none"})).choice, ToolChoice::None);
    let named = read(json!({"type": "tool", "name": "weather"}));
    assert_eq!(named.choice, ToolChoice::Named("weather".to_owned()));
}

#[test]
fn what_agents_send_by_themselves_is_taken() {
    let check = |change: Value, expected: Value, reported: &[&str]| {
        let mut body = json!({"messages": [{"role": "user", "content": "Rome?"}]});
        for (name, value) in change.as_object().unwrap() {
            body[name] = value.clone();
        }
        let ignored = Ignored::default();
        let mut fields = parse_object(body.to_string().as_bytes()).unwrap().telling(&ignored);
        let question = Question::parse(&mut fields).unwrap();
        drop(fields);
        let said = |content: &Content| match content {
            Content::Text(text) => Value::from(text.as_str()),
            Content::Null | Content::Missing => Value::Null,
        };
        let messages = question.conversation.messages.iter();
        let messages: Vec<Value> =
            messages.map(|message| json!([message.role, said(&message.content), message.extra])).collect();
        if !expected.is_null() {
            assert_eq!(Value::from(messages), expected, "{change}");
        }
        assert_eq!(ignored.take(), reported, "{change}");
    };
    let rome = json!(["user", "Rome?", {}]);
    let turns = |turns: Value| {
        let mut messages = vec![json!({"role": "user", "content": "Rome?"})];
        messages.extend(turns.as_array().unwrap().clone());
        json!({"messages": messages})
    };
    let brief = json!({"role": "system", "content": [{"type": "text", "text": "Be brief."}]});
    check(turns(json!([brief])), json!([rome, ["system", "Be brief.", {}]]), &[]);
    let first = json!({"system": "Be kind.", "messages": [brief, {"role": "user", "content": "Rome?"}]});
    check(first, json!([["system", "Be kind.\n\nBe brief.", {}], rome]), &[]);
    let go_on = json!({"role": "user", "content": "Go on"});
    let nothing = json!({"role": "assistant", "content": []});
    check(turns(json!([nothing, go_on])), json!([rome, ["assistant", "", {}], ["user", "Go on", {}]]), &[]);
    check(turns(json!([nothing])), json!([rome]), &[]);
    check(turns(json!([{"role": "user", "content": []}])), json!([rome]), &[]);
    for empty in [json!([]), json!("")] {
        let alone = json!({"messages": [{"role": "user", "content": empty}]});
        check(alone, json!([["user", "", {}]]), &[]);
    }
    let said = |content: Value, lines: &str| {
        check(
            turns(json!([{"role": "user", "content": content}])),
            json!([["user", format!("Rome?\n{lines}"), {}]]),
            &[],
        );
    };
    said(
        json!([{"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "D"}}]),
        "T\nD",
    );
    let inner = json!([{"type": "text", "text": "D"}]);
    said(json!([{"type": "document", "source": {"type": "content", "content": inner}}]), "D");
    said(
        json!([{"type": "search_result", "title": "T", "source": "http://a", "content": inner}]),
        "T\nhttp://a\nD",
    );
    said(json!([{"type": "tool_reference", "tool_name": "f"}]), "f");
    let found =
        json!([{"type": "web_search_result", "title": "T", "url": "http://a", "encrypted_content": "x"}]);
    let searched = json!([
        {"type": "server_tool_use", "id": "1", "name": "web_search", "input": {"query": "q"}},
        {"type": "web_search_tool_result", "tool_use_id": "1", "content": found},
        {"type": "text", "text": "So."},
    ]);
    let lines = "web_search: {\"query\":\"q\"}\nT\nhttp://a\nSo.";
    check(
        turns(json!([{"role": "assistant", "content": searched}])),
        json!([rome, ["assistant", lines, {}]]),
        &[],
    );
    // Arguments that were cut off are accepted in the form in which they are shown, and always become an
    // object.
    for (input, expected) in [
        (json!("{\"a"), json!({"INVALID_JSON": "{\"a"})),
        (Value::Null, json!({})),
        (json!([1]), json!({"INVALID_JSON": "[1]"})),
    ] {
        let call = json!([{"type": "tool_use", "id": "1", "name": "f", "input": input}]);
        let called = json!({"tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": expected}}]});
        let result = json!([{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "tool_reference", "tool_name": "f"}]}]);
        let turns =
            turns(json!([{"role": "assistant", "content": call}, {"role": "user", "content": result}]));
        check(turns, json!([rome, ["assistant", null, called], ["tool", "f", {"tool_call_id": "1"}]]), &[]);
    }
    let tool = |name: &str| json!({"name": name, "input_schema": {"type": "object"}});
    let bash = json!({"type": "bash_20250124", "name": "bash", "max_characters": 5});
    check(json!({"tools": [tool("f"), bash]}), Value::Null, &["tools[1].bash_20250124"]);
    let many: Vec<Value> = (0..150).map(|index| tool(&format!("f{index}"))).collect();
    check(json!({"tools": many}), Value::Null, &[]);
    let clears = json!({"edits": [{"type": "clear_tool_uses_20250919"}]});
    check(json!({"context_management": clears}), Value::Null, &["context_management.edits"]);
    let keeps = json!({"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]});
    check(json!({"context_management": keeps}), Value::Null, &[]);
    check(json!({"speed": "fast"}), Value::Null, &["speed"]);
}

#[test]
fn thinking_reaches_the_template() {
    let check = |change: Value, variables: Value, shows: bool| {
        let question = question(&change).unwrap();
        assert_eq!(Value::from(question.conversation.variables.values), variables, "{change}");
        assert_eq!(question.shows_thinking, shows, "{change}");
    };
    let switches = |value: bool| json!({"enable_thinking": value, "thinking": value});
    check(json!({}), switches(false), true);
    check(json!({"thinking": {"type": "disabled"}}), switches(false), true);
    check(json!({"thinking": {"type": "adaptive", "display": "omitted"}}), switches(true), false);
    let mut enabled = switches(true);
    enabled["thinking_budget"] = json!(2048);
    check(json!({"thinking": {"type": "enabled", "budget_tokens": 2048}}), enabled, true);
    let mut effort = switches(false);
    effort["reasoning_effort"] = json!("low");
    check(json!({"output_config": {"effort": "low"}}), effort, true);
    check(
        json!({"chat_template_kwargs": {"enable_thinking": true}}),
        json!({"enable_thinking": true, "thinking": false}),
        true,
    );
}

#[test]
fn what_is_not_valid_is_refused_by_name() {
    let check = |change: Value, param: &str, words: &str| {
        let error = question(&change).err().unwrap_or_else(|| panic!("{change} was accepted")).body();
        assert_eq!(error["error"]["param"], param, "{change}");
        assert!(error["error"]["message"].as_str().unwrap().contains(words), "{error}");
    };
    let user = |content: Value| json!({"messages": [{"role": "user", "content": content}]});
    let assistant = |content: Value| json!({"messages": [{"role": "assistant", "content": content}]});
    check(json!({"messages": null}), "messages", "missing");
    check(json!({"messages": []}), "messages", "empty");
    check(json!({"messages": [1]}), "messages[0]", "an object");
    check(json!({"messages": [{"content": "x"}]}), "messages[0].role", "missing");
    check(json!({"messages": [{"role": "tool", "content": "x"}]}), "messages[0].role", "expected user");
    check(user(Value::Null), "messages[0].content", "missing");
    check(user(json!(5)), "messages[0].content", "blocks");
    check(user(json!([{"type": "text"}])), "messages[0].content[0].text", "missing");
    check(user(json!([{"type": "image", "source": {}}])), "messages[0].content[0]", "text only");
    for kind in ["redacted_thinking", "thinking", "tool_use"] {
        check(user(json!([{"type": kind}])), "messages[0].content[0]", "belongs to a turn of the assistant");
    }
    let results = json!([{"type": "tool_result", "tool_use_id": "1"}]);
    check(assistant(results), "messages[0].content[0]", "belongs to a turn of the user");
    let summary = json!([{"type": "compaction", "content": "x"}]);
    check(assistant(summary), "messages[0].content[0]", "as a block of text");
    check(user(json!([{"type": "tool_result"}])), "messages[0].content[0].tool_use_id", "missing");
    let image = json!([{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image"}]}]);
    check(user(image), "messages[0].content[0].content[0]", "text only");
    check(assistant(json!([{"type": "tool_use", "id": "1"}])), "messages[0].content[0].name", "missing");
    check(assistant(json!([{"type": "tool_result"}])), "messages[0].content[0]", "tool_result");
    check(assistant(json!("So ")), "messages", "white space");
    check(assistant(json!("")), "messages", "at least one turn must have content");
    check(assistant(json!([{"type": "thinking", "thinking": "So"}])), "messages", "no text");
    let call =
        json!([{"type": "text", "text": "So"}, {"type": "tool_use", "id": "1", "name": "f", "input": {}}]);
    check(assistant(call), "messages", "tool_result");
    let begun = |name: &str, value: Value| {
        let mut body = assistant(json!("So"));
        body[name] = value;
        body
    };
    check(begun("thinking", json!({"type": "adaptive"})), "messages", "thinking sets its beginning");
    let format = json!({"format": {"type": "json_schema", "schema": {}}});
    check(begun("output_config", format), "messages", "output_config.format.schema sets its beginning");
    for name in ["output_format", "guided_regex", "structured_outputs.choice"] {
        let value = match name {
            "output_format" => json!({"type": "json_object"}),
            "guided_regex" => json!("a"),
            _ => json!({"choice": ["a"]}),
        };
        let field = name.split('.').next().unwrap();
        check(begun(field, value), "messages", &format!("{name} sets its beginning"));
    }
    check(json!({"continue_final_message": true}), "continue_final_message", "the last turn");
    question(&json!({"continue_final_message": false})).unwrap();
    question(&begun("thinking", json!({"type": "disabled"}))).unwrap();
    check(json!({"system": [{"type": "image"}]}), "system[0]", "text only");
    check(json!({"tools": [{"name": "f"}]}), "tools[0].input_schema", "missing");
    let bash = json!([{"type": "bash_20250124", "name": "bash"}]);
    let words = "tools[0] of type \"bash_20250124\"";
    check(json!({"tools": bash, "tool_choice": {"type": "tool", "name": "bash"}}), "tool_choice", words);
    question(&json!({"tools": bash})).unwrap();
    check(json!({"tools": [{"name": "a b", "input_schema": {}}]}), "tools[0].name", "a-z");
    let tool = json!({"name": "f", "input_schema": {"type": "object"}});
    check(json!({"tools": vec![tool.clone(); 1_025]}), "tools", "1025 entries");
    check(json!({"tool_choice": {"type": "any"}}), "tool_choice", "no tools");
    check(json!({"tools": [tool], "tool_choice": {"type": "tool"}}), "tool_choice.name", "missing");
    check(json!({"tools": [tool], "tool_choice": {"type": "some"}}), "tool_choice.type", "any");
    let other = json!({"type": "tool", "name": "g"});
    check(json!({"tools": [tool], "tool_choice": other}), "tool_choice", "not in tools");
    check(json!({"thinking": {"type": "enabled"}}), "thinking.budget_tokens", "missing");
    check(json!({"thinking": {"type": "between_tools"}}), "thinking.type", "adaptive");
    check(json!({"thinking": {"type": "adaptive", "display": "x"}}), "thinking.display", "omitted");
    check(json!({"mcp_servers": [{}]}), "mcp_servers", "not supported");
    check(json!({"output_format": {"type": "json_schema"}}), "output_format.schema", "missing");
    check(json!({"output_config": {"format": {"type": "xml"}}}), "output_config.format.type", "xml");
    let format = json!({"type": "json_schema", "schema": {}});
    let both = json!({"output_format": format, "output_config": {"format": format}});
    check(both, "output_format.schema", "exclude");
    let both = json!({"guided_choice": ["a"], "output_config": {"format": format}});
    check(both, "guided_choice", "output_config.format.schema and guided_choice exclude each other");
    question(&json!({"mcp_servers": [], "container": null, "speed": "standard", "betas": []})).unwrap();
}
