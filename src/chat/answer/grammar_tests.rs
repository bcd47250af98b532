//! The texts of the grammars of calls, and that the parsers understand them.

use serde_json::json;

use super::super::Chat;
use super::super::tests::tokenizer;
use super::*;
use crate::grammar::schema::random::{Schemas, fault};
use crate::grammar::{Grammar, GrammarCompiler, GrammarSpec};
use crate::sampling::{Constraint, TokenMask};
use crate::tokenizer::{SpecialTokens, Tokenizer};

const SPECIAL: [&str; 9] = [
    "<s>",
    "</s>",
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<arg_key>",
    "</arg_key>",
    "<think>",
];

fn tools() -> Arc<[Tool]> {
    let parameters = json!({
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 8},
            "days": {"$ref": "#/$defs/days"},
            "unit": {"enum": ["c", "f"]},
            "more": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        },
        "required": ["city", "days"],
        "additionalProperties": false,
        "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
    });
    Arc::new([
        Tool { name: "weather".into(), parameters: Some(parameters) },
        Tool { name: "time".into(), parameters: None },
    ])
}

struct Setup {
    tokenizer: Arc<Tokenizer>,
    format: AnswerFormat,
    grammar: Arc<Grammar>,
}

impl Setup {
    fn new(format: &str, special: &[&str], tools: &[Tool], is_parallel: bool) -> Self {
        let tokenizer = Arc::new(tokenizer(None, special, false));
        let format = AnswerFormat { tool_calls: ToolCallFormat::named(format), reasoning: None };
        let text = format.call_grammar(&tokenizer, tools, is_parallel).unwrap().unwrap();
        let compiler = GrammarCompiler::new(Arc::clone(&tokenizer), tokenizer.vocab_size(), &[257]);
        let grammar = compiler
            .compile(&GrammarSpec::Lark(text.clone()))
            .unwrap_or_else(|error| panic!("{error}: {text}"));
        Self { tokenizer, format, grammar }
    }

    /// Whether the grammar takes the text from beginning to end.
    fn accepts(&self, text: &str) -> bool {
        let mut state = self.grammar.start();
        let mut allowed = TokenMask::default();
        for id in self.tokenizer.encode(text, SpecialTokens::Parse).unwrap() {
            state.allowed(&mut allowed).unwrap();
            if !allowed.contains(id) {
                return false;
            }
            state.accept(id).unwrap();
        }
        state.allowed(&mut allowed).unwrap()
    }

    fn calls(&self, text: &str) -> Vec<(String, Value)> {
        let mut parser = AnswerParser::new(&self.format, PromptEnd::Plain, tools());
        let mut events = parser.push(text);
        events.extend(parser.finish());
        let mut calls: Vec<(String, String)> = Vec::new();
        for event in events {
            match event {
                AnswerEvent::CallBegin { name, .. } => calls.push((name, String::new())),
                AnswerEvent::CallArguments { text, .. } => calls.last_mut().unwrap().1.push_str(&text),
                other => panic!("{other:?} in {text:?}"),
            }
        }
        calls.into_iter().map(|(name, text)| (name, serde_json::from_str(&text).unwrap())).collect()
    }
}

#[track_caller]
fn check(format: &str, special: &[&str], weather: &str, time: &str, separator: &str, wrap: [&str; 2]) {
    let wrapped = |calls: &str| format!("{}{calls}{}", wrap[0], wrap[1]);
    let one = Setup::new(format, special, &tools(), false);
    let several = Setup::new(format, special, &tools(), true);
    let named = Setup::new(format, special, &tools()[1..], false);
    let expected = ("weather".to_owned(), json!({"city": "Rome <3", "days": 2, "more": [true, false]}));
    let nothing = ("time".to_owned(), json!({}));
    assert!(one.accepts(&wrapped(weather)), "{weather}");
    assert_eq!(one.calls(&wrapped(weather)), std::slice::from_ref(&expected));
    assert!(named.accepts(&wrapped(time)) && !named.accepts(&wrapped(weather)));
    let both = wrapped(&format!("{weather}{separator}{time}"));
    assert!(several.accepts(&both) && several.accepts(&wrapped(time)) && !one.accepts(&both), "{both}");
    assert_eq!(several.calls(&both), [expected, nothing]);
    for (wrong, right) in
        [("Rome <3", "Rome and Oslo"), ("2", "12"), ("2", "two"), ("days", "nights"), ("weather", "fog")]
    {
        let text = wrapped(&weather.replace(wrong, right));
        assert!(!several.accepts(&text), "{text}");
    }
    assert!(!several.accepts("") && !several.accepts("Hello"));
}

#[test]
fn calls_follow_their_schemas() {
    let object = |key: &str| {
        let arguments = r#"{"city": "Rome <3", "days": 2, "more": [true, false]}"#;
        [
            format!("{{\"name\": \"weather\", \"{key}\": {arguments}}}"),
            format!("{{\"name\": \"time\", \"{key}\": {{}}}}"),
        ]
    };
    for special in [&SPECIAL as &[&str], &["<s>", "</s>"]] {
        let [weather, time] = object("arguments").map(|call| format!("<tool_call>\n{call}\n</tool_call>"));
        check("hermes", special, &weather, &time, "\n", ["", ""]);
        let [weather, time] = object("parameters");
        check("llama3_json", special, &weather, &time, "; ", ["", ""]);
        let pair =
            |key: &str, value: &str| format!("<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n");
        // No `<` here: in this format a bounded text has none.
        let weather = format!(
            "<tool_call>weather\n{}{}{}</tool_call>",
            pair("city", "Rome 3"),
            pair("days", "2"),
            pair("more", "[true, false]")
        );
        let setup = Setup::new("glm45", special, &tools(), true);
        let both = format!("{weather}\n<tool_call>time</tool_call>");
        assert!(setup.accepts(&weather) && setup.accepts(&both) && setup.accepts(&weather.replace('\n', "")));
        assert_eq!(
            setup.calls(&both),
            [
                ("weather".to_owned(), json!({"city": "Rome 3", "days": 2, "more": [true, false]})),
                ("time".to_owned(), json!({})),
            ]
        );
        assert!(setup.accepts(&weather.replace(&pair("more", "[true, false]"), &pair("unit", "f"))));
        for (wrong, right) in [("Rome 3", "Rome and Oslo"), ("2", "12"), ("true", "5"), ("days", "nights")] {
            assert!(!setup.accepts(&weather.replace(wrong, right)), "{right}");
        }
        let free = json!({"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]});
        let tools = [Tool { name: "say".into(), parameters: Some(free.clone()) }];
        let setup = Setup::new("glm45", special, &tools, false);
        let say = format!("<tool_call>say{}</tool_call>", pair("x", "a <b> && c < d\n\"é\""));
        assert!(setup.accepts(&say));
        assert!(!setup.accepts("<tool_call>say</tool_call>"));
        // Forbidden texts, and constraints of several schemas.
        let text = json!({"type": "string", "allOf": [{"maxLength": 5}], "not": {"enum": ["a", "b"]}});
        let other = json!({"type": "object", "properties": {"x": text}, "required": ["x"]});
        let tools = [Tool { name: "say".into(), parameters: Some(other) }];
        let setup = Setup::new("glm45", special, &tools, false);
        for (text, is_right) in [("c", true), ("ab", true), ("a", false), ("b", false), ("abcdef", false)] {
            let call = format!("<tool_call>say{}</tool_call>", pair("x", text));
            assert_eq!(setup.accepts(&call), is_right, "{text}");
        }
        // Keywords about all arguments together cannot be enforced in this format; keywords without effect need not be.
        for (keyword, given, is_refused) in [
            ("dependentRequired", json!({"x": ["y"]}), true),
            ("not", json!({"required": ["x"]}), true),
            ("dependentRequired", json!({}), false),
            ("if", json!({}), false),
        ] {
            let mut parameters = free.clone();
            parameters[keyword] = given;
            let tools = [Tool { name: "say".into(), parameters: Some(parameters) }];
            let result = setup.format.call_grammar(&setup.tokenizer, &tools, false);
            let is_named =
                |error: crate::Error| error.message().starts_with(&format!("{keyword}: the tool say: "));
            assert_eq!(result.is_err_and(is_named), is_refused, "{keyword}");
        }
        // The arguments have no schema, or there are none.
        let open = json!({"type": "object", "additionalProperties": true});
        for (parameters, is_open) in [(open, true), (json!({"type": "object"}), false)] {
            let tools = [Tool { name: "say".into(), parameters: Some(parameters) }];
            let setup = Setup::new("glm45", special, &tools, false);
            assert!(setup.accepts(&say) == is_open && setup.accepts("<tool_call>say</tool_call>"));
        }
        calls_of_qwen3_coder_follow_their_schemas(special);
    }
    let [weather, time] = object("arguments");
    check("mistral_list", &["<s>", "</s>", "[TOOL_CALLS]"], &weather, &time, ", ", ["[TOOL_CALLS][", "]"]);
    let weather = "[TOOL_CALLS]weather[ARGS]{\"city\": \"Rome <3\", \"days\": 2, \"more\": [true, false]}";
    check("mistral", &SPECIAL, weather, "[TOOL_CALLS]time[ARGS]{}", "", ["", ""]);
}

fn calls_of_qwen3_coder_follow_their_schemas(special: &[&str]) {
    let call = |name: &str, arguments: &str| {
        format!("<tool_call>\n<function={name}>\n{arguments}</function>\n</tool_call>")
    };
    let pair = |key: &str, value: &str| format!("<parameter={key}>\n{value}\n</parameter>\n");
    let arguments = [pair("city", "Rome 3"), pair("days", "2"), pair("more", "[true, false]")].concat();
    let weather = call("weather", &arguments);
    let both = format!("{weather}\n{}", call("time", ""));
    let setup = Setup::new("qwen3_coder", special, &tools(), true);
    assert!(setup.accepts(&weather) && setup.accepts(&both));
    assert_eq!(
        setup.calls(&both),
        [
            ("weather".to_owned(), json!({"city": "Rome 3", "days": 2, "more": [true, false]})),
            ("time".to_owned(), json!({})),
        ]
    );
    for (wrong, right) in [("Rome 3", "Rome and Oslo"), ("2", "12"), ("true", "5"), ("days", "nights")] {
        assert!(!setup.accepts(&weather.replace(wrong, right)), "{right}");
    }
    let text = "a <b> && c < d\n</param\n\"é\"";
    let free = json!({"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]});
    for parameters in [free, json!({"type": "object", "additionalProperties": true})] {
        let is_known = parameters.get("properties").is_some();
        let tools = [Tool { name: "say".into(), parameters: Some(parameters) }];
        let setup = Setup::new("qwen3_coder", special, &tools, false);
        let say = call("say", &pair("x", text));
        assert!(setup.accepts(&say), "{say}");
        assert_eq!(setup.calls(&say), [("say".to_owned(), json!({"x": text}))]);
        assert_eq!(setup.accepts(&call("say", "")), !is_known);
    }
}

#[test]
fn grammars_need_a_call_format_and_tools() {
    let tokenizer = tokenizer(None, &SPECIAL, false);
    assert_eq!(AnswerFormat::default().call_grammar(&tokenizer, &tools(), true).unwrap(), None);
    let format = AnswerFormat { tool_calls: ToolCallFormat::named("glm45"), reasoning: None };
    assert_eq!(format.call_grammar(&tokenizer, &[], true).unwrap(), None);
}

#[test]
fn the_call_format_is_known_from_the_template_or_the_vocabulary() {
    let check = |source: &str, special: &[&str], expected: &str| {
        let tokenizer = tokenizer(Some(source), special, false);
        let chat = Chat::new(&tokenizer).unwrap();
        let found = chat.answer_format().tool_calls.as_ref().map_or("none", ToolCallFormat::name);
        assert_eq!(found, expected, "{source}");
    };
    let only = ["<s>", "</s>"];
    check("<tool_call>{{ name }}<arg_key></tool_call>", &only, "glm45");
    check(
        "<tool_call>\n<function={{ name }}>\n<parameter={{ key }}>\n</function></tool_call>",
        &only,
        "qwen3_coder",
    );
    check("<tool_call>{{ call | tojson }}</tool_call>", &only, "hermes");
    check("{{ messages[0].content }}", &["<s>", "</s>", "[TOOL_CALLS]", "[ARGS]"], "mistral");
    check("{{ messages[0].content }}", &["<s>", "</s>", "[TOOL_CALLS]"], "mistral_list");
    check("{{ messages[0].content }}", &["<s>", "</s>", "<|tool_call_start|>", "<|tool_call_end|>"], "lfm2");
    check("<|python_tag|>", &only, "llama3_json");
    check("{{ messages[0].content }}", &only, "none");
    for name in ToolCallFormat::names() {
        let choice: FormatChoice<ToolCallFormat> = name.parse().unwrap();
        let FormatChoice::Named(format) = choice else { panic!("{name}") };
        assert_eq!(format.name(), name);
    }
    for name in ReasoningFormat::names() {
        assert!(matches!(name.parse(), Ok(FormatChoice::<ReasoningFormat>::Named(_))), "{name}");
    }
    assert!(matches!("auto".parse(), Ok(FormatChoice::<ReasoningFormat>::Auto)));
    assert!(matches!("none".parse(), Ok(FormatChoice::<ToolCallFormat>::None)));
    let error = "x".parse::<FormatChoice<ToolCallFormat>>().unwrap_err();
    assert!(error.hint().unwrap().contains("hermes"), "{error:?}");
}

/// A text drawn blindly from a grammar, in which closing something is as likely as all else together.
fn draw(setup: &Setup, rng: &mut Schemas) -> Option<String> {
    let mut state = setup.grammar.start();
    let mut allowed = TokenMask::default();
    let mut ids = Vec::new();
    for _ in 0..600 {
        let may_end = state.allowed(&mut allowed).unwrap();
        if allowed.is_empty() || may_end {
            assert!(may_end, "{:?}", setup.tokenizer.decode(&ids, false));
            return Some(setup.tokenizer.decode(&ids, false));
        }
        let candidates: Vec<u32> = allowed.iter().collect();
        let is_closing = |id: &u32| {
            let bytes = setup.tokenizer.token_bytes(*id);
            bytes.len() > 1 || matches!(bytes, [b'"' | b'}' | b']' | b',' | b'<' | b'/'])
        };
        let closing: Vec<u32> = candidates.iter().copied().filter(is_closing).collect();
        let pool = if closing.is_empty() || rng.below(2) == 0 { &candidates } else { &closing };
        let id = pool[rng.below(pool.len())];
        ids.push(id);
        state.accept(id).unwrap();
    }
    None
}

/// Text that looks like a special token, in the marks of a format.
fn tags(name: &str) -> Vec<String> {
    let format = ToolCallFormat::named(name).unwrap();
    let mut tags = Vec::new();
    for mark in format.0.marks() {
        for (start, open) in mark.char_indices().filter(|(_, c)| matches!(c, '<' | '[')) {
            let Some(end) = mark[start..].find(if open == '<' { '>' } else { ']' }) else { continue };
            let tag = &mark[start..=start + end];
            if tag.len() > 2 && !tag[1..].contains(open) && !tag.contains(char::is_whitespace) {
                tags.push(tag.to_owned());
            }
        }
    }
    tags.sort();
    tags.dedup();
    tags
}

#[test]
fn every_call_of_a_tool_with_a_random_schema_is_valid() {
    let only = || vec!["<s>".to_owned(), "</s>".to_owned()];
    let all = ToolCallFormat::names();
    // Marks are texts, or tokens of their own.
    let formats = all.iter().flat_map(|name| [(*name, only()), (*name, [only(), tags(name)].concat())]);
    let listed = [only(), vec!["[TOOL_CALLS]".to_owned()]].concat();
    let formats = formats.chain([("mistral_list", listed)]);
    for (number, (format, special)) in formats.enumerate() {
        let special: Vec<&str> = special.iter().map(String::as_str).collect();
        let mut num_calls = 0;
        for seed in 0..8 {
            let mut rng = Schemas::new(seed * 10 + number as u64);
            let schema = rng.object();
            let tools: Arc<[Tool]> = Arc::new([
                Tool { name: "files.read".into(), parameters: Some(schema.clone()) },
                Tool { name: "time".into(), parameters: None },
            ]);
            // Its marks need every key.
            if format == "minimax_m3"
                && schema.get("additionalProperties").is_some_and(|others| *others != json!(false))
            {
                continue;
            }
            let setup = Setup::new(format, &special, &tools[..1], false);
            for _ in 0..3 {
                let Some(text) = draw(&setup, &mut rng) else { continue };
                let mut parser = AnswerParser::new(&setup.format, PromptEnd::Plain, Arc::clone(&tools));
                let mut events = parser.push(&text);
                events.extend(parser.finish());
                let mut arguments = String::new();
                for event in events {
                    match event {
                        AnswerEvent::CallBegin { name, .. } => assert_eq!(name, "files.read"),
                        AnswerEvent::CallArguments { text, .. } => arguments.push_str(&text),
                        other => panic!("{format:?} {seed}: {other:?} in {text:?}"),
                    }
                }
                let value = serde_json::from_str(&arguments)
                    .unwrap_or_else(|error| panic!("{format:?} {seed}: {error}: {text:?} {arguments}"));
                if let Some(fault) = fault(&value, &schema, &schema) {
                    panic!("{format:?} {seed}: {fault} in {text:?}: {arguments}: {schema}");
                }
                num_calls += 1;
            }
        }
        assert!(num_calls > 5, "{format:?}: {num_calls}");
    }
}
