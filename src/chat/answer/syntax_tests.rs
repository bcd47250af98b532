//! Each format on a text of its models, and the detection of formats in templates.

use serde_json::json;

use super::super::tests::tokenizer;
use super::super::{Chat, ChatConfig, ChatOptions, Message};
use super::*;

fn tools() -> Arc<[Tool]> {
    let parameters = json!({"type": "object", "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "ratio": {"type": "number"},
        "exact": {"type": "boolean"},
        "none": {"type": "null"},
        "note": {"type": ["string", "null"]},
        "either": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "word": {"enum": ["x", 1, true]},
        "list": {"type": "array", "items": {"type": "integer"}},
        "more": {"type": "object", "properties": {"tags": {"type": "array", "items": {"type": "string"}}}},
    }});
    ["weather", "time"].map(|name| Tool { name: name.into(), parameters: Some(parameters.clone()) }).into()
}

type Read = (String, String, Vec<(String, Value)>);

/// Reasoning, content and calls, which do not depend on how the text is cut.
fn read(format: &AnswerFormat, end: PromptEnd, text: &str) -> Read {
    let mut results = [false, true].map(|by_character| {
        let mut parser = AnswerParser::new(format, end, tools());
        let mut events = match by_character {
            true => text.chars().flat_map(|c| parser.push(c.encode_utf8(&mut [0; 4]))).collect(),
            false => parser.push(text),
        };
        events.extend(parser.finish());
        let (mut reasoning, mut content, mut calls) = (String::new(), String::new(), Vec::new());
        for event in events {
            match event {
                AnswerEvent::Reasoning(text) => reasoning.push_str(&text),
                AnswerEvent::Content(text) => content.push_str(&text),
                AnswerEvent::CallBegin { name, .. } => calls.push((name, String::new())),
                AnswerEvent::CallArguments { text, .. } => calls.last_mut().unwrap().1.push_str(&text),
            }
        }
        let json = |text: String| serde_json::from_str(&text).unwrap_or(Value::String(text));
        (reasoning, content, calls.into_iter().map(|(name, text)| (name, json(text))).collect())
    });
    assert_eq!(results[0], results[1], "{text:?}");
    std::mem::take(&mut results[0])
}

fn format(calls: &str, reasoning: &str) -> AnswerFormat {
    AnswerFormat { tool_calls: ToolCallFormat::named(calls), reasoning: ReasoningFormat::named(reasoning) }
}

#[test]
fn call_formats_are_read_as_models_write_them() {
    let both = vec![
        ("weather".to_owned(), json!({"city": "Rome", "days": 2})),
        ("time".to_owned(), json!({"none": null, "more": {"tags": ["a"]}})),
    ];
    let check = |name: &str, text: &str| {
        assert!(ToolCallFormat::named(name).is_some(), "{name}");
        let (_, content, calls) = read(&format(name, ""), PromptEnd::Plain, text);
        assert_eq!((content.as_str(), &calls), ("", &both), "{name}: {text}");
    };
    let (one, two) = (r#"{"city": "Rome", "days": 2}"#, r#"{"none": null, "more": {"tags": ["a"]}}"#);
    let object = |name: &str, arguments: &str| format!(r#"{{"name": "{name}", "arguments": {arguments}}}"#);
    let list = format!("[{}, {}]", object("weather", one), object("time", two));
    check("apriel", &format!("<tool_calls>{list}</tool_calls>"));
    check(
        "minimax",
        &format!("<tool_calls>\n{}\n{}\n</tool_calls>", object("weather", one), object("time", two)),
    );
    check("nemotron_json", &format!("<TOOLCALL>{list}</TOOLCALL>"));
    check("phi4_mini_json", &format!("<|tool_call|>{list}<|/tool_call|>"));
    check("granite", &format!("<|tool_call|>{list}"));
    check("firefunction", &format!(" functools{list}"));
    check("xlam", &list);
    let repr = "[{'name': 'weather', 'arguments': {'city': 'Rome', 'days': 2}}, {'name': 'time', 'arguments': {'none': None, 'more': {'tags': ['a']}}}]";
    check("xlam", repr);
    check("apriel", &format!("<tool_calls>{repr}</tool_calls>"));
    check("xlam", &format!("\n{}", list.replace("}, {\"name\"", "},\n{\"name\"")));
    check(
        "apertus",
        &format!("<|tools_prefix|>[{{\"weather\": {one}}}, {{\"time\": {two}}}]<|tools_suffix|>"),
    );
    let action = |number: u8, name: &str, arguments: &str| {
        format!(r#"{{"tool_call_id": "{number}", "tool_name": "{name}", "parameters": {arguments}}}"#)
    };
    let actions = [action(0, "weather", one), action(1, "time", two)].join(",\n    ");
    check("cohere", &format!("<|START_ACTION|>[\n    {actions}\n]<|END_ACTION|>"));
    check(
        "deepseek_v3",
        &format!(
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{one}\n```<｜tool▁call▁end｜>\n\
         <｜tool▁call▁begin｜>function<｜tool▁sep｜>time\n```json\n{two}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
    );
    check(
        "deepseek_v31",
        &format!(
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{one}<｜tool▁call▁end｜>\
         <｜tool▁call▁begin｜>time<｜tool▁sep｜>{two}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
    );
    check(
        "kimi_k2",
        &format!(
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{one}<|tool_call_end|>\
         <|tool_call_begin|>time:1 <|tool_call_argument_begin|> {two}<|tool_call_end|><|tool_calls_section_end|>"
        ),
    );
    check(
        "solar",
        &format!(
            "<|tool_calls|><|tool_call:begin|>a1<|tool_call:name|>weather<|tool_call:args|>{one}<|tool_call:end|>\
         <|tool_call:begin|>b2<|tool_call:name|>time<|tool_call:args|>{two}<|tool_call:end|><|calls|>"
        ),
    );
    check(
        "functionary_v3.1",
        &format!("<function=weather>{one}</function>\n<function=time>{two}</function>"),
    );
    check("functionary_v3.2", &format!("weather\n{one}>>>time\n{two}"));
    check("functionary_v3.2", &format!("all\n>>>weather\n{one}\n>>>time\n{two}"));
    check("mistral", &format!("[TOOL_CALLS]{list}"));
    check(
        "lfm2",
        "<|tool_call_start|>[weather(city='Rome', days=2), time(none=None, more={'tags': ['a']})]<|tool_call_end|>",
    );
    check("pythonic", "[weather(city=\"Rome\", days=2,), time(none=null, more={\"tags\": [\"a\",]})]");
    check(
        "gemma4",
        "<|tool_call>call:weather{city:<|\"|>Rome<|\"|>,days:2}<tool_call|><|tool_call>call:time{none:None,more:{tags:[<|\"|>a<|\"|>]}}<tool_call|>",
    );
    let pairs = |key: [&str; 2], end: &str, quoted: &str| {
        let pair = |name: &str, value: &str| format!("{}{name}{}{value}{end}", key[0], key[1]);
        [
            pair("city", "Rome") + &pair("days", "2"),
            pair("none", quoted) + &pair("more", "{\"tags\": [\"a\"]}"),
        ]
    };
    let [first, second] = pairs(["<parameter=", ">"], "</parameter>\n", "None");
    check(
        "seed_oss",
        &format!(
            "<seed:tool_call>\n<function=weather>\n{first}</function>\n</seed:tool_call>\n\
         <seed:tool_call><function=time>{second}</function></seed:tool_call>"
        ),
    );
    let [first, second] = pairs(["<parameter name=\"", "\">"], "</parameter>\n", "null");
    check(
        "minimax_m2",
        &format!(
            "<minimax:tool_call>\n<invoke name=\"weather\">\n{first}</invoke>\n<invoke name=\"time\">{second}</invoke>\n</minimax:tool_call>"
        ),
    );
    let [first, second] = pairs(["<param name=\"", "\">"], "</param>", "None");
    let first = first.replace("Rome", "<![CDATA[Rome]]>");
    check(
        "minicpm5",
        &format!(
            "<function name=\"weather\">{first}</function>\n<function name=\"time\">{second}</function>"
        ),
    );
    let dsml = |name: &str, is_text: bool, value: &str| {
        format!("<｜DSML｜parameter name=\"{name}\" string=\"{is_text}\">{value}</｜DSML｜parameter>\n")
    };
    check(
        "deepseek_v32",
        &format!(
            "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"weather\">\n{}{}</｜DSML｜invoke>\n<｜DSML｜invoke name=\"time\">\n{}{}\
         </｜DSML｜invoke>\n</｜DSML｜function_calls>",
            dsml("city", true, "Rome"),
            dsml("days", false, "2"),
            dsml("none", false, "null"),
            dsml("more", false, "{\"tags\": [\"a\"]}"),
        ),
    );
    let m = "]<]minimax[>[<";
    check(
        "minimax_m3",
        &format!(
            "{m}tool_call>\n{m}invoke name=\"weather\">{m}city>Rome{m}/city>{m}days>2{m}/days>{m}/invoke>\n{m}invoke name=\"time\">\
         {m}none>null{m}/none>{m}more>{m}tags>{m}item>a{m}/item>{m}/tags>{m}/more>{m}/invoke>\n{m}/tool_call>"
        ),
    );
}

#[test]
fn what_is_no_call_stays_as_it_is() {
    for name in ToolCallFormat::names() {
        for text in
            ["Hello [1, 2] {x} <b>\n", "a = f(x)", "{\"a\": 1}", "[weather", "<｜tool", "to=functions"]
        {
            let (_, content, calls) = read(&format(name, ""), PromptEnd::Plain, text);
            assert_eq!((content.as_str(), calls.len()), (text, 0), "{name}");
        }
    }
}

#[test]
fn values_without_quotes_follow_the_schema() {
    let check = |key: &str, value: &str, expected: Value| {
        for (name, text) in [
            (
                "qwen3_coder",
                format!(
                    "<tool_call>\n<function=weather>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n</tool_call>"
                ),
            ),
            (
                "glm45",
                format!(
                    "<tool_call>weather\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>"
                ),
            ),
        ] {
            let (_, _, calls) = read(&format(name, ""), PromptEnd::Plain, &text);
            assert_eq!(calls, [("weather".to_owned(), json!({key: expected}))], "{text}");
        }
    };
    check("exact", "True", json!(true));
    check("exact", "FALSE", json!(false));
    check("exact", "1", json!(true));
    check("note", "None", json!(null));
    check("note", "none", json!("none"));
    check("none", "None", json!(null));
    check("days", "3", json!(3));
    check("days", "3.0", json!(3));
    check("days", " 4 ", json!(4));
    check("ratio", "3", json!(3));
    check("ratio", "1e3", json!(1e3));
    check("either", "None", json!(null));
    check(
        "more",
        "{'tags': ['x', \"y\"], 'b': None, 'c': True,}",
        json!({"tags": ["x", "y"], "b": null, "c": true}),
    );
    check("list", "[1,2,]", json!([1, 2]));
    check("list", "(1, 2)", json!([1, 2]));
    check("city", "True", json!("True"));
    check("city", "12", json!("12"));
    check("word", "x", json!("x"));
    check("note", "'a'", json!("'a'"));
}

#[test]
fn texts_of_programs_are_read_to_their_end() {
    let check = |value: &str, expected: &str| {
        let text = format!("<|tool_call_start|>[weather(city={value}, days=1)]<|tool_call_end|>");
        let (_, content, calls) = read(&format("lfm2", ""), PromptEnd::Plain, &text);
        let expected = ("weather".to_owned(), json!({"city": expected, "days": 1}));
        assert_eq!((content.as_str(), calls), ("", vec![expected]), "{text}");
    };
    check("'a, b) c'", "a, b) c");
    check("\"it's\"", "it's");
    check("'it\\'s\\n'", "it's\n");
    check("'as \"it\" is 'and' \\d\n'", "as \"it\" is 'and' \\d\n");
}

#[test]
fn reasoning_stands_between_marks_of_many_kinds() {
    use PromptEnd::{AfterReasoning, InReasoning, Plain};
    let check = |name: &str, end: PromptEnd, text: &str, reasoning: &str, content: &str| {
        let (found, rest, _) = read(&format("", name), end, text);
        assert_eq!((found.as_str(), rest.as_str()), (reasoning, content), "{name}: {text}");
    };
    check("mistral", Plain, "[THINK]A[/THINK]B", "A", "B");
    check("seed_oss", InReasoning, "A</seed:think>B", "A", "B");
    check("cohere", Plain, "<|START_THINKING|>A<|END_THINKING|>B", "A", "B");
    check("gemma4", Plain, "<|channel>thought\nA\n<channel|>B", "A", "B");
    check("qwen3", AfterReasoning, "</think>\n\nB", "", "B");
    check("qwen3", Plain, "</think>B", "", "B");
    let harmony = "<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>final<|message|>B";
    check("openai_gptoss", Plain, harmony, "A", "B");
    check(
        "openai_gptoss",
        Plain,
        "<|channel|>commentary<|message|>C<|end|><|start|>assistant<|channel|>final<|message|>B<|return|>",
        "",
        "CB",
    );
    check("openai_gptoss", Plain, "Plain {text}", "", "Plain {text}");
    check(
        "muse",
        Plain,
        " to=self<|message|>A<|eom|><|start|>assistant to=user<|message|>B<|eot|>",
        "A",
        "B",
    );
    check("solar", Plain, "<|think|>A<|end|><|begin|>assistant<|content|>B<|end|>", "A", "B");
    check(
        "kimi_k3",
        InReasoning,
        "A<|close|>think<|sep|><|open|>response<|sep|>B<|close|>response<|sep|><|close|>message<|sep|>",
        "A",
        "B",
    );
}

#[test]
fn calls_come_after_reasoning() {
    let expected = vec![("weather".to_owned(), json!({"days": 2}))];
    let check = |calls: &str, thoughts: &str, end: PromptEnd, text: &str, reasoning: &str| {
        let (found, content, calls) = read(&format(calls, thoughts), end, text);
        assert_eq!((found.trim(), content.as_str(), &calls), (reasoning, "", &expected), "{text}");
    };
    for header in [
        " to=functions.weather<|channel|>commentary json",
        "<|channel|>commentary to=functions.weather <|constrain|>json",
        "<|channel|>commentary to=functions.weather",
    ] {
        let call = format!("{header}<|message|>{{\"days\": 2}}<|call|>");
        check("openai", "openai_gptoss", PromptEnd::Plain, &call, "");
        let thought = format!("<|channel|>analysis<|message|>A<|end|><|start|>assistant{call}");
        check("openai", "openai_gptoss", PromptEnd::Plain, &thought, "A");
    }
    // The end of the reasoning is missing.
    let call = "<minimax:tool_call>\n<invoke name=\"weather\">\n<parameter name=\"days\">2</parameter>\n</invoke>\n</minimax:tool_call>";
    check("minimax_m2", "qwen3", PromptEnd::InReasoning, &format!("A\n{call}"), "A");
    check("minimax_m2", "qwen3", PromptEnd::InReasoning, &format!("A</think>{call}"), "A");
    // A call within reasoning is not a call.
    let (reasoning, content, calls) =
        read(&format("minimax_m2", "qwen3"), PromptEnd::InReasoning, &format!("A {call} B</think>C"));
    assert_eq!((reasoning, content.as_str(), calls.len()), (format!("A {call} B"), "C", 0));
}

fn chat(source: &str) -> Chat {
    let config = ChatConfig { template: Some(source.to_owned()), ..ChatConfig::default() };
    Chat::with_config(&tokenizer(None, &["<s>", "</s>"], false), &config).unwrap()
}

/// A template that writes calls in this way.
fn template(call: &str) -> String {
    format!(
        "{{%- set tools = tools or [] -%}}{{% for t in tools %}}{{{{ t.function.name }}}}{{% endfor %}}{{% for m in messages %}}\
         [{{{{ m.role }}}}]{{% if m.tool_calls %}}{{% for c in m.tool_calls %}}{call}{{% endfor %}}{{% else %}}{{{{ m.content }}}}\
         {{% endif %}}{{% endfor %}}{{% if add_generation_prompt %}}[assistant]{{% endif %}}"
    )
}

#[test]
fn an_unknown_call_format_is_reported_at_load() {
    let known = chat(&template(
        "<tool_call>{\"name\": \"{{ c.function.name }}\", \"arguments\": {{ c.function.arguments | tojson }}}</tool_call>",
    ));
    assert_eq!(known.formats(), "tool calls hermes, reasoning none");
    assert_eq!((known.notice(), known.uses_tools()), (None, true));
    // The words of a known format are not enough.
    let unknown = chat(&template(
        "<tool_call>{{ c.function.name }} with {{ c.function.arguments | length }}</tool_call>",
    ));
    assert_eq!(unknown.formats(), "tool calls none, reasoning none");
    assert!(unknown.notice().unwrap().contains("--tool-call-parser"), "{:?}", unknown.notice());
    assert!(unknown.writes_calls());
    // A template that lists tools and writes no calls does not show how a model calls.
    let silent = chat(
        "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}",
    );
    assert!(silent.notice().unwrap().contains("not the format of calls"), "{:?}", silent.notice());
    let given = ChatConfig {
        template: Some(unknown.template_source().to_owned()),
        tool_calls: "hermes".parse().unwrap(),
        ..ChatConfig::default()
    };
    let given = Chat::with_config(&tokenizer(None, &["<s>", "</s>"], false), &given).unwrap();
    assert_eq!((given.formats().as_str(), given.notice()), ("tool calls hermes, reasoning none", None));
}

/// Formats without a name: learned from a template's output.
#[test]
fn unknown_formats_are_learned_from_what_a_template_writes() {
    let check = |call: &str, text: &str| {
        let source = template(call);
        let chat = chat(&source);
        let format = chat.answer_format();
        assert!(chat.formats().starts_with("tool calls as in the template, "), "{call}: {}", chat.formats());
        let expected = vec![
            ("weather".to_owned(), json!({"city": "Rome\n\"é\"", "days": 2, "list": [1]})),
            ("time".to_owned(), json!({"city": "x", "none": null})),
        ];
        let (_, content, calls) = read(format, PromptEnd::Plain, &format!("I look.\n{text}"));
        assert_eq!((content.as_str(), &calls), ("I look.", &expected), "{call}: {text}");
        // Enforced output is parsed, too.
        let tokenizer = tokenizer(None, &["<s>", "</s>"], false);
        let grammar = format.call_grammar(&tokenizer, &tools()[1..], false).unwrap().unwrap();
        assert!(grammar.contains("time"), "{grammar}");
    };
    let one = r#"{"city": "Rome\n\"é\"", "days": 2, "list": [1]}"#;
    let two = r#"{"city": "x", "none": null}"#;
    check(
        "<fn>{\"fn\": \"{{ c.function.name }}\", \"args\": {{ c.function.arguments | tojson }}}</fn>",
        &format!(
            "<fn>{{\"fn\": \"weather\", \"args\": {one}}}</fn><fn>{{\"fn\": \"time\", \"args\": {two}}}</fn>"
        ),
    );
    check(
        "{{ '<calls>[' if loop.first else ', ' }}{{ c | tojson }}{{ ']</calls>' if loop.last else '' }}",
        &format!(
            "<calls>[{{\"type\": \"function\", \"function\": {{\"name\": \"weather\", \"arguments\": {one}}}, \"id\": \"a\"}}, \
             {{\"id\": \"b\", \"type\": \"function\", \"function\": {{\"name\": \"time\", \"arguments\": {two}}}}}]</calls>"
        ),
    );
    check(
        "<|do|>{{ c.function.name }}<|with|>{{ c.function.arguments | tojson }}<|done|>\n",
        &format!("<|do|>weather<|with|>{one}<|done|>\n<|do|>time<|with|>{two}<|done|>\n"),
    );
    check(
        "{{ '<acts>' if loop.first else '' }}<act name=\"{{ c.function.name }}\">{% for k, v in c.function.arguments.items() %}\
         <arg key=\"{{ k }}\">{{ v if v is string else v | tojson }}</arg>{% endfor %}</act>{{ '</acts>' if loop.last else '' }}",
        "<acts><act name=\"weather\"><arg key=\"city\">Rome\n\"é\"</arg><arg key=\"days\">2</arg><arg key=\"list\">[1]</arg></act>\
         <act name=\"time\"><arg key=\"city\">x</arg><arg key=\"none\">null</arg></act></acts>",
    );
}

#[test]
fn marks_of_reasoning_are_learned_too() {
    let check = |write: &str, expected: &str| {
        let source = format!(
            "{{% for m in messages %}}[{{{{ m.role }}}}]{write}{{{{ m.content }}}}{{% endfor %}}{{% if add_generation_prompt %}}\
             [assistant]{{% endif %}}"
        );
        let chat = chat(&source);
        assert_eq!(chat.answer_format().reasoning_line(), expected, "{write}");
    };
    check(
        "{% if m.reasoning_content %}<muse>{{ m.reasoning_content }}</muse>\n{% endif %}",
        "<muse> … </muse>",
    );
    check("{% if m.thinking %}[[IDEA]{{ m.thinking }}[/IDEA]\n{% endif %}", "[[IDEA] … [/IDEA]");
    check("{% if m.reasoning %}<think>\n{{ m.reasoning }}\n</think>\n{% endif %}", "<think> … </think>");
    // Without marks it could not be distinguished from the rest.
    check("{% if m.reasoning %}{{ m.reasoning }} {% endif %}", "none");
}

#[test]
fn calls_are_written_also_where_their_content_has_to_be_null() {
    let source = "{% for m in messages %}{% if m.content is none %}{% for c in m.tool_calls %}<tool_call>{\"name\": \"{{ c.function.name }}\", \
                  \"arguments\": {{ c.function.arguments | tojson }}}</tool_call>{% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}";
    let chat = chat(source);
    assert_eq!(chat.formats(), "tool calls hermes, reasoning none");
    let mut call = Message::new("assistant", "");
    let list = json!([{"id": "a", "type": "function", "function": {"name": "weather", "arguments": {}}}]);
    call.extra.insert("tool_calls".to_owned(), list);
    let rendered = chat.render(&[Message::new("user", "Hi"), call], &ChatOptions::default()).unwrap();
    assert!(rendered.contains("\"weather\""), "{rendered}");
}

#[test]
fn ids_have_the_format_that_templates_accept() {
    let check = |name: &str, expected: &str| {
        let format = ToolCallFormat::named(name).unwrap();
        assert_eq!(format.call_id("weather", 2, "0123456789abcdef"), expected, "{name}");
    };
    check("hermes", "call_0123456789abcdef");
    check("mistral", "789abcdef");
    check("kimi_k2", "functions.weather:2");
}
