use serde_json::{Value, json};

use super::super::super::json::parse_object;
use super::*;

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
        .map(|message| json!([message.role, message.content, message.extra]))
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
fn thinking_is_told_to_the_template() {
    let check = |change: Value, variables: Value, shows: bool| {
        let question = question(&change).unwrap();
        assert_eq!(Value::from(question.conversation.variables), variables, "{change}");
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
    check(
        json!({"messages": [{"role": "system", "content": "x"}]}),
        "messages[0].role",
        "a field of its own",
    );
    check(user(Value::Null), "messages[0].content", "missing");
    check(user(json!([])), "messages[0].content", "empty");
    check(user(json!(5)), "messages[0].content", "blocks");
    check(user(json!([{"type": "text"}])), "messages[0].content[0].text", "missing");
    check(user(json!([{"type": "image", "source": {}}])), "messages[0].content[0]", "text only");
    check(user(json!([{"type": "tool_use"}])), "messages[0].content[0]", "tool_use");
    check(user(json!([{"type": "tool_result"}])), "messages[0].content[0].tool_use_id", "missing");
    let image = json!([{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image"}]}]);
    check(user(image), "messages[0].content[0].content[0]", "text only");
    check(assistant(json!([{"type": "tool_use", "id": "1"}])), "messages[0].content[0].name", "missing");
    let call = json!([{"type": "tool_use", "id": "1", "name": "f", "input": "x"}]);
    check(assistant(call), "messages[0].content[0].input", "an object");
    check(assistant(json!([{"type": "tool_result"}])), "messages[0].content[0]", "tool_result");
    check(assistant(json!("So ")), "messages", "white space");
    check(assistant(json!([{"type": "thinking", "thinking": "So"}])), "messages", "no text");
    let call =
        json!([{"type": "text", "text": "So"}, {"type": "tool_use", "id": "1", "name": "f", "input": {}}]);
    check(assistant(call), "messages", "tool_result");
    let begun = |name: &str, value: Value| {
        let mut body = assistant(json!("So"));
        body[name] = value;
        body
    };
    check(begun("thinking", json!({"type": "adaptive"})), "messages", "thinking is about its beginning");
    let format = json!({"format": {"type": "json_schema", "schema": {}}});
    check(begun("output_config", format), "messages", "output_config.format is about its beginning");
    for name in ["output_format", "guided_regex", "structured_outputs.choice"] {
        let value = match name {
            "output_format" => json!({"type": "json_object"}),
            "guided_regex" => json!("a"),
            _ => json!({"choice": ["a"]}),
        };
        let field = name.split('.').next().unwrap();
        check(begun(field, value), "messages", &format!("{name} is about its beginning"));
    }
    check(json!({"continue_final_message": true}), "continue_final_message", "the last turn");
    question(&json!({"continue_final_message": false})).unwrap();
    question(&begun("thinking", json!({"type": "disabled"}))).unwrap();
    check(json!({"system": [{"type": "image"}]}), "system[0]", "text only");
    check(json!({"tools": [{"name": "f"}]}), "tools[0].input_schema", "missing");
    check(json!({"tools": [{"type": "bash_20250124", "name": "bash"}]}), "tools[0].type", "bash_20250124");
    check(json!({"tools": [{"name": "a b", "input_schema": {}}]}), "tools[0].name", "a-z");
    let tool = json!({"name": "f", "input_schema": {"type": "object"}});
    check(json!({"tools": vec![tool.clone(); 129]}), "tools", "129 entries");
    check(json!({"tool_choice": {"type": "any"}}), "tool_choice", "no tools");
    check(json!({"tools": [tool], "tool_choice": {"type": "tool"}}), "tool_choice.name", "missing");
    check(json!({"tools": [tool], "tool_choice": {"type": "some"}}), "tool_choice.type", "any");
    let other = json!({"type": "tool", "name": "g"});
    check(json!({"tools": [tool], "tool_choice": other}), "tool_choice", "none of the tools");
    check(json!({"thinking": {"type": "enabled"}}), "thinking.budget_tokens", "missing");
    check(json!({"thinking": {"type": "between_tools"}}), "thinking.type", "adaptive");
    check(json!({"thinking": {"type": "adaptive", "display": "x"}}), "thinking.display", "omitted");
    check(json!({"mcp_servers": [{}]}), "mcp_servers", "not supported");
    let clears = json!({"edits": [{"type": "clear_tool_uses_20250919"}]});
    check(json!({"context_management": clears}), "context_management", "as it comes");
    check(json!({"context_management": {"edits": "all"}}), "context_management", "as it comes");
    let keeps = json!({"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]});
    question(&json!({"context_management": keeps})).unwrap();
    check(json!({"speed": "fast"}), "speed", "standard");
    check(json!({"output_format": {"type": "json_schema"}}), "output_format.schema", "missing");
    check(json!({"output_config": {"format": {"type": "xml"}}}), "output_config.format.type", "xml");
    let format = json!({"type": "json_schema", "schema": {}});
    let both = json!({"output_format": format, "output_config": {"format": format}});
    check(both, "output_format", "exclude");
    let both = json!({"guided_choice": ["a"], "output_config": {"format": format}});
    check(both, "guided_choice", "output_config.format and guided_choice exclude each other");
    question(&json!({"mcp_servers": [], "container": null, "speed": "standard", "betas": []})).unwrap();
}
