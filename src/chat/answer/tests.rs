//! Outputs of models, and hostile outputs.

use proptest::prelude::*;
use serde_json::json;

use super::super::{Chat, ChatConfig};
use super::*;

/// An answer put together, as a client does it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct Answer {
    reasoning: String,
    content: String,
    calls: Vec<(String, String)>,
}

impl Answer {
    fn add(&mut self, events: Vec<AnswerEvent>) {
        for event in events {
            match event {
                AnswerEvent::Reasoning(text) => self.reasoning.push_str(&text),
                AnswerEvent::Content(text) => self.content.push_str(&text),
                AnswerEvent::CallBegin { index, name } => {
                    assert_eq!(index, self.calls.len());
                    self.calls.push((name, String::new()));
                }
                AnswerEvent::CallArguments { index, text } => {
                    assert_eq!(index + 1, self.calls.len());
                    self.calls[index].1.push_str(&text);
                }
            }
        }
    }

    fn all(&self) -> String {
        let calls: String = self.calls.iter().map(|(name, arguments)| format!("{name}{arguments}")).collect();
        format!("{}{}{calls}", self.reasoning, self.content)
    }
}

fn tools() -> Arc<[Tool]> {
    let parameters = json!({"type": "object", "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["c", "f"]},
        "note": {"type": ["string", "null"]},
        "any": {},
    }});
    Arc::new([
        Tool { name: "weather".into(), parameters: Some(parameters) },
        Tool { name: "time".into(), parameters: None },
    ])
}

fn parse(format: &AnswerFormat, end: PromptEnd, chunks: impl IntoIterator<Item = impl AsRef<str>>) -> Answer {
    let mut parser = AnswerParser::new(format, end, tools());
    let mut answer = Answer::default();
    for chunk in chunks {
        answer.add(parser.push(chunk.as_ref()));
    }
    answer.add(parser.finish());
    answer
}

fn check(format: &str, text: &str, content: &str, calls: &[(&str, &str)]) {
    let format = AnswerFormat { tool_calls: ToolCallFormat::named(format), reasoning: None };
    let calls = calls.iter().map(|(name, arguments)| ((*name).to_owned(), (*arguments).to_owned()));
    let expected = Answer { content: content.to_owned(), calls: calls.collect(), ..Answer::default() };
    assert_eq!(parse(&format, PromptEnd::Plain, [text]), expected, "{text:?}");
}

#[test]
fn hermes() {
    let check = |text: &str, content: &str, calls: &[(&str, &str)]| {
        check("hermes", text, content, calls);
    };
    check("Hello <b>you</b>\n", "Hello <b>you</b>\n", &[]);
    check(
        "Let me see.\n\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Rome\", \"days\": 2}}\n</tool_call>\n",
        "Let me see.",
        &[("weather", r#"{"city": "Rome", "days": 2}"#)],
    );
    check(
        "<tool_call>{\"name\": \"a\", \"arguments\": {}}</tool_call>\n<tool_call>\n{\"arguments\": {\"x\": [1, {}]}, \"name\": \"b\"}</tool_call> Done.",
        "Done.",
        &[("a", "{}"), ("b", r#"{"x": [1, {}]}"#)],
    );
    // Brackets, quotes and markers in strings; a call without an end; arguments in a string; none at all.
    let tricky = r#"{"x": "}</tool_call>\"{", "y": "\\"}"#;
    check(
        &format!("<tool_call>{{\"name\": \"a\", \"arguments\": {tricky}}}</tool_call>"),
        "",
        &[("a", tricky)],
    );
    check(
        "<tool_call>{\"name\": \"a\", \"arguments\": {}}<tool_call>{\"name\": \"b\"}",
        "",
        &[("a", "{}"), ("b", "{}")],
    );
    check(r#"<tool_call>{"name": "a", "arguments": "{\"x\": 1}"}</tool_call>"#, "", &[("a", r#"{"x": 1}"#)]);
    check(r#"<tool_call>{"name": "a", "arguments": null, "id": 7 }</tool_call>"#, "", &[("a", "{}")]);
    // No calls.
    for text in [
        "<tool_call>weather(Rome)</tool_call>",
        "<tool_call>{\"nam\": \"weather\"}</tool_call>",
        "<tool_call>{\"name\": 5}</tool_call>",
        "<tool_call>{\"name\": \"\"}</tool_call>",
        "<tool_call>{\"name\": \"a\", \"arguments\": [1]}</tool_call>",
        "<tool_call>{\"name\": \"a\", \"argu",
        "<tool_call>",
        "<tool_cal",
        "a < b, a <tool",
    ] {
        check(text, text, &[]);
    }
    // Broken or cut off after the name was emitted: all the rest is arguments.
    check(
        "<tool_call>{\"name\": \"a\", \"arguments\": {\"x\": ]} <b></tool_call> ok",
        "ok",
        &[("a", "{\"x\": ]} <b>")],
    );
    check("<tool_call>{\"name\": \"a\", \"arguments\": {\"x\": \"y", "", &[("a", "{\"x\": \"y")]);
    check(
        "<tool_call>{\"name\": \"a\", \"arguments\": {}, \"more\": 1}</tool_call>",
        "",
        &[("a", "{}, \"more\": 1}")],
    );
}

#[test]
fn llama3() {
    let check = |text: &str, content: &str, calls: &[(&str, &str)]| {
        check("llama3_json", text, content, calls);
    };
    let call = r#"{"name": "weather", "parameters": {"city": "Rome"}}"#;
    let expected = ("weather", r#"{"city": "Rome"}"#);
    check(call, "", &[expected]);
    check(&format!("\n<|python_tag|>{call}"), "", &[expected]);
    check(
        &format!("{call}; {{\"type\": \"function\", \"name\": \"time\", \"parameters\": {{}}}}"),
        "",
        &[expected, ("time", "{}")],
    );
    check(&format!("I look it up. <|python_tag|> {call}"), "I look it up.", &[expected]);
    check(&format!("{call} That is it."), "That is it.", &[expected]);
    for text in [
        r#"{"name": "Ann", "parameters": {}}"#,
        r#"{"city": "Rome"}"#,
        "Use {\"name\": \"weather\", \"parameters\": {}}.",
        "<|python_tag|>print(1)",
        "<|python",
        "{",
        "",
    ] {
        check(text, text, &[]);
    }
}

#[test]
fn mistral() {
    let check = |text: &str, content: &str, calls: &[(&str, &str)]| {
        check("mistral", text, content, calls);
    };
    check(
        r#"[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome"}}, {"name": "time", "arguments": {}, "id": "123456789"}]"#,
        "",
        &[("weather", r#"{"city": "Rome"}"#), ("time", "{}")],
    );
    check(
        r#"Wait. [TOOL_CALLS]weather[ARGS]{"city": "]}"}[TOOL_CALLS]time[CALL_ID]abc[ARGS]{}"#,
        "Wait.",
        &[("weather", r#"{"city": "]}"}"#), ("time", "{}")],
    );
    check(r#"[TOOL_CALLS]time{"a": 1}"#, "", &[("time", r#"{"a": 1}"#)]);
    check("[TOOL_CALLS]time[ARGS]{\"a\": ]x", "", &[("time", "{\"a\": ]x")]);
    check("[TOOL_CALLS]time[ARGS]5[TOOL_CALLS]time[ARGS]{}", "", &[("time", "5"), ("time", "{}")]);
    for text in [
        "[1, 2]",
        "[TOOL_CALLS]",
        "[TOOL_CALLS](no)",
        "[TOOL_CALLS]a b[ARGS]{}",
        "[TOOL_CALLS][5]",
        "[TOOL_CALLS]na[ARG",
        "[TOOL_CALLS]na[AR{",
        "[TOOL_CALLS][{\"x\": 1}]",
    ] {
        check(text, text, &[]);
    }
}

#[test]
fn glm() {
    let check = |text: &str, content: &str, calls: &[(&str, &str)]| {
        check("glm45", text, content, calls);
    };
    let argument = |key: &str, value: &str| format!("<arg_key>{key}</arg_key><arg_value>{value}</arg_value>");
    // String where the schema says so, JSON where it does not.
    let text = ["city", "days", "unit", "note", "any"].map(|key| argument(key, "12")).concat();
    check(
        &format!("Hm.\n<tool_call>weather{text}</tool_call>"),
        "Hm.",
        &[("weather", r#"{"city": "12", "days": 12, "unit": "12", "note": "12", "any": 12}"#)],
    );
    let text = ["days", "note", "any", "other"].map(|key| argument(key, "a \"b\"\n")).concat();
    let json = r#""a \"b\"\n""#;
    check(
        &format!("<tool_call>weather\n{text}\n</tool_call>"),
        "",
        &[(
            "weather",
            &format!("{{\"days\": {json}, \"note\": {json}, \"any\": {json}, \"other\": {json}}}"),
        )],
    );
    check(
        &format!("<tool_call>weather{}</tool_call><tool_call>time</tool_call>", argument("note", "null")),
        "",
        &[("weather", r#"{"note": null}"#), ("time", "{}")],
    );
    let list = argument("any", "[1, {\"a\": \"<\"}]");
    check(&format!("<tool_call>weather\n{list}"), "", &[("weather", r#"{"any": [1, {"a": "<"}]}"#)]);
    check("<tool_call>weather<arg_key>city</arg_key><arg_value>Ro", "", &[("weather", r#"{"city": "Ro"#)]);
    check("<tool_call>weather<arg_key>city</arg_key>x</tool_call>y", "y", &[("weather", r#"{"city": x"#)]);
    for text in [
        "<tool_call>{\"name\": \"time\"}</tool_call>",
        "<tool_call></tool_call>",
        "<tool_call>time",
        "<tool_call>two words</tool_call>",
    ] {
        check(text, text, &[]);
    }
}

#[test]
fn qwen3_coder() {
    let check = |text: &str, content: &str, calls: &[(&str, &str)]| {
        check("qwen3_coder", text, content, calls);
    };
    let argument = |key: &str, value: &str| format!("<parameter={key}>\n{value}\n</parameter>\n");
    let call = |name: &str, arguments: &str| {
        format!("<tool_call>\n<function={name}>\n{arguments}</function>\n</tool_call>")
    };
    // String where the schema says so, JSON where it does not.
    let text = ["city", "days", "unit", "note", "any"].map(|key| argument(key, "12")).concat();
    check(
        &format!("Hm.\n{}", call("weather", &text)),
        "Hm.",
        &[("weather", r#"{"city": "12", "days": 12, "unit": "12", "note": "12", "any": 12}"#)],
    );
    // The line ends next to the tags are none of the value, others are.
    let text = ["city", "any"].map(|key| argument(key, "\n  a \"b\" </param\n")).concat();
    let json = r#""\n  a \"b\" </param\n""#;
    check(&call("weather", &text), "", &[("weather", &format!("{{\"city\": {json}, \"any\": {json}}}"))]);
    let compact = "<tool_call><function=weather><parameter=city>Rome</parameter></function></tool_call>";
    check(compact, "", &[("weather", r#"{"city": "Rome"}"#)]);
    let empty = format!("{}<parameter=note>\n</parameter>", argument("city", ""));
    check(&call("weather", &empty), "", &[("weather", r#"{"city": "", "note": ""}"#)]);
    let list = argument("any", "[1,\n {\"a\": \"<\"}]");
    check(
        &format!("{}\n{} Done.", call("weather", &list), call("time", "")),
        "Done.",
        &[("weather", "{\"any\": [1,\n {\"a\": \"<\"}]}"), ("time", "{}")],
    );
    // Missing ends, and cut texts.
    check("<tool_call>\n<function=time>\n</tool_call>ok", "ok", &[("time", "{}")]);
    check("<tool_call>\n<function=time>\n", "", &[("time", "{}")]);
    check(
        "<tool_call><function=time></function><tool_call><function=time>",
        "",
        &[("time", "{}"), ("time", "{}")],
    );
    check("<tool_call><function=weather><parameter=city>\nRo", "", &[("weather", r#"{"city": "Ro"#)]);
    check("<tool_call><function=weather>x</tool_call>y", "y", &[("weather", "{x")]);
    for text in [
        "<tool_call>{\"name\": \"time\"}</tool_call>",
        "<tool_call></tool_call>",
        "<tool_call>\n<function=time",
        "<tool_call>\n<function=two words>",
        "<tool_call><function=>",
        "<tool_call>\n <func",
        "<function=time></function>",
    ] {
        check(text, text, &[]);
    }
}

/// The templates of these models, and the format that they describe.
#[test]
fn the_layouts_of_models_with_latent_attention_and_experts() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/tok/chat");
    let source = |name: &str| std::fs::read_to_string(format!("{folder}/{name}.jinja")).unwrap();
    let bare = super::super::tests::tokenizer(None, &["<s>", "</s>"], false);
    let check = |source: &str, calls: &str, reasoning: &str| {
        let config = ChatConfig { template: Some(source.to_owned()), ..ChatConfig::default() };
        let syntaxes = Chat::with_config(&bare, &config).unwrap().formats();
        assert_eq!(syntaxes, format!("tool calls {calls}, reasoning {reasoning}"), "{source}");
    };
    const THINK: &str = "<think> … </think>";
    check(&source("deepseek"), "none", "none");
    check(&source("mistral"), "none", "none");
    check(&source("youtu"), "none", THINK);
    // With tools, Youtu-LLM and Qwen 3 MoE write Hermes's format.
    let hermes = "{% if tools %}<tool_call>{{ 1 }}</tool_call>{% endif %}";
    check(&(source("youtu") + hermes), "hermes", THINK);
    check(&(source("chatml") + hermes), "hermes", THINK);
    let glm = "{% if tools %}<tool_call>{{ 1 }}<arg_key>{{ 2 }}</arg_key><arg_value>…</tool_call>{% endif %}";
    check(&(source("glm") + glm), "glm45", THINK);
    let coder = "{% if tools %}<tool_call>\n<function={{ 1 }}>\n<parameter={{ 2 }}></function>\n</tool_call>{% endif %}";
    check(coder, "qwen3_coder", "none");
}

#[test]
fn reasoning() {
    let check = |format: &str, end: PromptEnd, text: &str, reasoning: &str, content: &str| {
        let format = AnswerFormat {
            reasoning: ReasoningFormat::named(format),
            tool_calls: ToolCallFormat::named("hermes"),
        };
        let answer = parse(&format, end, [text]);
        assert_eq!((answer.reasoning.as_str(), answer.content.as_str()), (reasoning, content), "{text:?}");
    };
    use PromptEnd::{AfterReasoning, InReasoning, Plain};
    const THINK: &str = "qwen3";
    check(THINK, Plain, "<think>\nA\n\nB \n</think>\n\nC\n", "A\n\nB", "C\n");
    check(THINK, Plain, "\n<think></think>C", "", "C");
    check(THINK, Plain, "A <think>B</think>", "", "A <think>B</think>");
    check(THINK, Plain, " <thin", "", " <thin");
    check(THINK, Plain, "\n <th ink>", "", "\n <th ink>");
    check(THINK, Plain, "<think>A <b></thi", "A <b></thi", "");
    check(THINK, Plain, "<think>A</think>B</think><think>", "A", "B</think><think>");
    check(THINK, InReasoning, "A</think>B", "A", "B");
    check(THINK, InReasoning, "\n<think>A</think>B", "A", "B");
    check(THINK, InReasoning, "A ", "A ", "");
    check(THINK, AfterReasoning, "A</think>B", "", "A</think>B");
    check("deepseek_r1", Plain, "A</think>B", "A", "B");
    check("deepseek_r1", Plain, "<think>A</think>B", "A", "B");
    check("deepseek_r1", AfterReasoning, "A", "", "A");
    // Calls are looked for after the reasoning only.
    let call = "<tool_call>{\"name\": \"time\"}</tool_call>";
    let format = AnswerFormat {
        reasoning: ReasoningFormat::named(THINK),
        tool_calls: ToolCallFormat::named("hermes"),
    };
    let answer = parse(&format, InReasoning, [format!("I {call}</think>\n\n{call}")]);
    assert_eq!(answer.reasoning, format!("I {call}"));
    assert_eq!((answer.content.as_str(), answer.calls.len()), ("", 1));
    for (prompt, end) in
        [("x<think>\n", InReasoning), ("<think>\n\n</think>\n\n", AfterReasoning), ("x", Plain)]
    {
        assert_eq!(PromptEnd::of(prompt, ReasoningFormat::named(THINK).as_ref()), end, "{prompt:?}");
    }
}

/// Texts made of the parsers' marks. The letter q is in none of them. An answer may be cut anywhere: after its call, no
/// text of a marker is content, or arguments.
#[test]
fn an_answer_that_is_cut_after_a_call_has_no_part_of_a_marker() {
    let arguments = r#"{"city": "Rome", "days": 2}"#;
    let hermes =
        format!("<tool_call>\n{{\"name\": \"weather\", \"arguments\": {arguments}}}\n</tool_call>\n");
    let glm = "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>";
    let coder = "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>\n";
    for (format, call) in [
        ("hermes", hermes),
        ("llama3_json", format!("<|python_tag|>{{\"name\": \"weather\", \"parameters\": {arguments}}};")),
        ("mistral", format!("[TOOL_CALLS][{{\"name\": \"weather\", \"arguments\": {arguments}}}] ")),
        ("mistral", format!("[TOOL_CALLS]weather[CALL_ID]a[ARGS]{arguments}\n")),
        ("glm45", glm.to_owned()),
        ("qwen3_coder", coder.to_owned()),
    ] {
        let text = format!("I look.\n{call}");
        let format = AnswerFormat { tool_calls: ToolCallFormat::named(format), reasoning: None };
        let (mut num_cut, mut is_complete) = (0, false);
        for end in 0..=text.len() {
            let answer = parse(&format, PromptEnd::Plain, [&text[..end]]);
            let Some((_, found)) = answer.calls.first() else { continue };
            assert_eq!(answer.content, "I look.", "{:?}", &text[..end]);
            num_cut += 1;
            // From there on, results no longer change.
            is_complete |= found == arguments;
            assert!(!is_complete || found == arguments, "{:?}: {found}", &text[..end]);
        }
        // Nor is the beginning of a call, from the second character of its mark on.
        for end in 0..=text.len() {
            let mut parser = AnswerParser::new(&format, PromptEnd::Plain, tools());
            let mut answer = Answer::default();
            answer.add(parser.push(&text[..end]));
            answer.add(parser.cut_off());
            assert!(text[.."I look.\n<".len()].starts_with(&answer.content), "{end}: {}", answer.content);
        }
        assert!(num_cut > 10 && is_complete, "{text:?}");
    }
}

#[test]
fn a_mark_of_reasoning_that_is_cut_off_is_no_text() {
    for (name, text, is_all) in [
        ("qwen3", "<think>\nRome <b>?\n</think>", true),
        ("mistral", "[THINK]Rome <b>?[/THINK]", true),
        ("openai_gptoss", "<|channel|>analysis<|message|>Rome <b>?<|end|>", false),
    ] {
        let format = AnswerFormat { tool_calls: None, reasoning: ReasoningFormat::named(name) };
        let answer = |text: &str| {
            let mut parser = AnswerParser::new(&format, PromptEnd::Plain, tools());
            let mut answer = Answer::default();
            text.chars().for_each(|c| answer.add(parser.push(c.encode_utf8(&mut [0; 4]))));
            answer.add(parser.cut_off());
            answer
        };
        for end in 0..=text.len() {
            let Answer { reasoning, content, .. } = answer(&text[..end]);
            assert!(
                "Rome <b>?".starts_with(reasoning.trim_end_matches(['\n', '<', '['])),
                "{end}: {reasoning}"
            );
            assert!(!is_all || content.len() < 2, "{end}: {content}");
        }
        let all = answer(&format!("{text}\n1 < 2"));
        assert_eq!(all.reasoning, "Rome <b>?", "{name}");
    }
    let format = AnswerFormat { tool_calls: None, reasoning: ReasoningFormat::named("qwen3") };
    let mut parser = AnswerParser::new(&format, PromptEnd::Plain, tools());
    let mut answer = Answer::default();
    answer.add(parser.push("\n <thi"));
    answer.add(parser.cut_off());
    assert_eq!(answer, Answer::default());
}

/// What may as well be an answer in JSON stays one, and so does a call without its name that the model ends.
#[test]
fn the_beginning_of_a_call_is_content_unless_it_is_cut_off_after_a_mark() {
    let ended = |format: &str, text: &str, is_cut_off: bool| {
        let format = AnswerFormat { tool_calls: ToolCallFormat::named(format), reasoning: None };
        let mut parser = AnswerParser::new(&format, PromptEnd::Plain, tools());
        let mut answer = Answer::default();
        answer.add(parser.push(text));
        answer.add(if is_cut_off { parser.cut_off() } else { parser.finish() });
        answer.content
    };
    for (format, text, cut) in [
        ("hermes", "A <tool_call>\n{\"na", "A"),
        ("hermes", "1 <", "1 <"),
        ("hermes", "<tool_call>{\"name\": \"time\", \"arg", ""),
        ("mistral", "[TOOL_CALLS]wea", ""),
        ("llama3_json", "{\"name\": \"Bo", "{\"name\": \"Bo"),
        ("pythonic", "[1, 2", "[1, 2"),
    ] {
        assert_eq!(ended(format, text, true), cut, "{text}");
        assert_eq!(ended(format, text, false), text, "{text}");
    }
    let two = "{\"name\": \"time\", \"parameters\": {}}; {\"na";
    assert_eq!(ended("llama3_json", two, true), "");
}

fn texts() -> impl Strategy<Value = String> {
    let parts = [
        "<tool_call>",
        "</tool_call>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "<|python_tag|>",
        "<function=",
        "</function>",
        "<parameter=",
        "</parameter>",
        ">",
        "<think>",
        "</think>",
        "{\"name\": \"weather\", ",
        "\"arguments\": {",
        "\"parameters\": ",
        "{",
        "}",
        "[",
        "]",
        "\"",
        "\\",
        ":",
        ",",
        ";",
        "\n",
        " ",
        "<",
        "weather",
        "time",
        "city",
        "days",
        "\"id\": ",
        "5",
        "null",
        "q",
        "qq",
        "é🦙",
    ];
    let part = prop_oneof![
        8 => prop::sample::select(parts.to_vec()).prop_map(str::to_owned),
        1 => any::<char>().prop_map(|c| c.to_string()),
    ];
    prop::collection::vec(part, 0..24).prop_map(|parts| parts.concat())
}

fn formats() -> impl Strategy<Value = (AnswerFormat, PromptEnd)> {
    let reasoning: Vec<ReasoningFormat> =
        ReasoningFormat::names().into_iter().filter_map(ReasoningFormat::named).collect();
    (
        prop::option::of(prop::sample::select(ToolCallFormat::known().to_vec())),
        prop::option::of(prop::sample::select(reasoning)),
        prop::sample::select(vec![PromptEnd::Plain, PromptEnd::InReasoning, PromptEnd::AfterReasoning]),
    )
        .prop_map(|(tool_calls, reasoning, end)| (AnswerFormat { tool_calls, reasoning }, end))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn chunks_of_any_size_give_the_same((format, end) in formats(), text in texts(), size in 1usize..9) {
        let whole = parse(&format, end, [&text]);
        let characters: Vec<char> = text.chars().collect();
        let chunks: Vec<String> = characters.chunks(size).map(|chunk| chunk.iter().collect()).collect();
        prop_assert_eq!(&parse(&format, end, chunks), &whole);
        // No text is lost. Generated ids and types of calls do not count here.
        if !text.contains("\"id\"") {
            let count = |text: &str| text.chars().filter(|c| *c == 'q').count();
            prop_assert_eq!(count(&whole.all()), count(&text), "{:?}", whole);
        }
        if format == AnswerFormat::default() {
            prop_assert_eq!(whole.content, text);
        }
    }
}
