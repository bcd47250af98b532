//! Answers that must have a format, and formats that must be refused.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::answers::{joined, whole};
use super::bad_inputs::check_error;
use super::client::Server;

#[path = "../../src/grammar/schema/random.rs"]
mod random;

pub(crate) const CHAT: &str = "/v1/chat/completions";
pub(crate) const COMPLETIONS: &str = "/v1/completions";

/// A request for a story, with these fields alongside.
pub(crate) fn body(path: &str, change: &Value) -> Value {
    let mut body = match path {
        CHAT => json!({"messages": [{"role": "user", "content": "Tell me a story."}]}),
        _ => json!({"prompt": "Once upon a time"}),
    };
    body["max_tokens"] = json!(150);
    for (name, value) in change.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

fn paint() -> Value {
    json!({
        "type": "object",
        "properties": {
            "title": {"type": "string", "maxLength": 10},
            "colour": {"enum": ["red", "green", "dark blue"]},
            "coats": {"type": "integer", "minimum": 1, "maximum": 12},
            "places": {"type": "array", "items": {"$ref": "#/$defs/place"}, "minItems": 1, "maxItems": 2},
        },
        "required": ["title", "colour", "coats", "places"],
        "additionalProperties": false,
        "$defs": {"place": {"type": "object", "properties": {"inside": {"type": "boolean"}},
                            "required": ["inside"], "additionalProperties": false}},
    })
}

#[track_caller]
fn check_paint(text: &str) {
    let value: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{text:?}: {error}"));
    let fields: Vec<&String> = value.as_object().unwrap().keys().collect();
    assert_eq!(fields, ["title", "colour", "coats", "places"], "{text}");
    assert!(value["title"].as_str().unwrap().chars().count() <= 10, "{text}");
    assert!(["red", "green", "dark blue"].contains(&value["colour"].as_str().unwrap()), "{text}");
    assert!((1..=12).contains(&value["coats"].as_u64().unwrap()), "{text}");
    let places = value["places"].as_array().unwrap();
    assert!(
        (1..=2).contains(&places.len()) && places.iter().all(|place| place["inside"].is_boolean()),
        "{text}"
    );
}

fn named(schema: &Value) -> Value {
    json!({"type": "json_schema", "json_schema": {"name": "paint", "strict": true, "schema": schema}})
}

#[test]
fn answers_are_valid_under_the_schema_whole_and_as_streams() {
    let server = Server::start("--max-model-len 256 --max-num-seqs 8 --num-scheduler-steps 4");
    for path in [CHAT, COMPLETIONS] {
        for (what, change) in [
            ("four", json!({"response_format": named(&paint()), "n": 4, "seed": 3, "temperature": 1.5})),
            (
                "greedy",
                json!({"structured_outputs": {"json": paint()}, "temperature": 0, "ignore_eos": true}),
            ),
            ("text", json!({"guided_json": paint().to_string(), "seed": 9, "min_tokens": 140, "top_k": 3})),
        ] {
            let mut request = body(path, &change);
            let answer = server.post(path, &request).success();
            let choices = whole(&answer);
            for (text, reason) in choices.values() {
                assert_eq!(reason, "stop", "{what}: {text}");
                check_paint(text);
            }
            assert_eq!(whole(&server.post(path, &request).success()), choices, "{what}: a second time");
            request["stream"] = json!(true);
            assert_eq!(joined(&server.post(path, &request).events()), choices, "{what}: as a stream");
            if what == "four" {
                assert!(choices.values().any(|choice| *choice != choices[&0]), "all four are {choices:?}");
            }
        }
    }
    // Cut off is cut off.
    let short = body(CHAT, &json!({"response_format": {"type": "json_object"}, "max_tokens": 2, "seed": 1}));
    let (text, reason) = &whole(&server.post(CHAT, &short).success())[&0];
    assert!(text.starts_with('{') && reason == "length", "{text:?} {reason}");
    server.wait_until_idle();
    server.wait_for_metric("vllm:kv_cache_usage_perc", 0.0);
}

#[test]
fn regular_expressions_choices_and_grammars_hold() {
    let server = Server::start("--max-model-len 256");
    let date = |text: &str| {
        let parts: Vec<&str> = text.split('-').collect();
        parts.len() == 3 && parts.iter().all(|part| part.bytes().all(|byte| byte.is_ascii_digit()))
    };
    let is_choice = |text: &str| ["yes", "no", "a \"third\" way"].contains(&text);
    let is_sum =
        |text: &str| text.split(" + ").all(|part| part.len() == 1 && part.as_bytes()[0].is_ascii_digit());
    let regex = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$";
    let choice = json!(["yes", "no", "a \"third\" way"]);
    let grammar = "start: digit (\" + \" digit){1,3}\ndigit: /[0-9]/";
    let gbnf = "root ::= digit (\" + \" digit){1,3}\ndigit ::= [0-9]";
    for path in [CHAT, COMPLETIONS] {
        for seed in 0..3 {
            let check = |change: Value, is_right: &dyn Fn(&str) -> bool| {
                let mut change = change;
                change["seed"] = json!(seed);
                let (text, reason) = whole(&server.post(path, &body(path, &change)).success())[&0].clone();
                assert!(is_right(&text) && reason == "stop", "{change}: {text:?} {reason}");
            };
            check(json!({"structured_outputs": {"regex": regex}}), &date);
            check(json!({"guided_regex": regex}), &date);
            check(json!({"structured_outputs": {"choice": choice}}), &is_choice);
            check(json!({"guided_choice": choice, "temperature": 0}), &is_choice);
            check(json!({"structured_outputs": {"grammar": grammar}}), &is_sum);
            check(json!({"guided_grammar": grammar, "logprobs": null}), &is_sum);
            check(json!({"guided_grammar": gbnf}), &is_sum);
        }
    }
    // A biased token does not appear if it is not allowed.
    let biased = json!({"guided_choice": ["yes", "no"], "logit_bias": {"300": 100}, "presence_penalty": 2});
    let answer = whole(&server.post(CHAT, &body(CHAT, &biased)).success());
    assert!(is_choice(&answer[&0].0), "{answer:?}");
}

type Check<'a> = &'a dyn Fn(&str) -> bool;

#[test]
fn the_interfaces_for_agents_have_the_same_formats() {
    let server = Server::start("--max-model-len 256");
    let schema = json!({"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": false});
    let is_object = |text: &str| {
        let value: Value = serde_json::from_str(text).unwrap();
        value["a"].is_boolean()
    };
    let is_word = |text: &str| ["yes", "no"].contains(&text);
    let is_digit = |text: &str| text.len() == 1 && text.as_bytes()[0].is_ascii_digit();
    let messages = json!([{"role": "user", "content": "Tell me a story."}]);
    for (path, request, own) in [
        (
            "/v1/responses",
            json!({"input": "Tell me a story.", "max_output_tokens": 100}),
            json!({"text": {"format": {"type": "json_object"}}}),
        ),
        (
            "/v1/messages",
            json!({"messages": messages, "max_tokens": 100}),
            json!({"output_config": {"format": {"type": "json_object"}}}),
        ),
    ] {
        let with = |changes: &[&Value]| {
            let mut body = request.clone();
            let fields = changes.iter().flat_map(|change| change.as_object().unwrap());
            fields.for_each(|(name, value)| body[name] = value.clone());
            body
        };
        let formats: [(Value, Check); 8] = [
            (json!({"response_format": named(&schema)}), &is_object),
            (json!({"structured_outputs": {"json": schema}}), &is_object),
            (json!({"guided_json": schema}), &is_object),
            (json!({"structured_outputs": {"choice": ["yes", "no"]}}), &is_word),
            (json!({"guided_choice": ["yes", "no"]}), &is_word),
            (json!({"structured_outputs": {"regex": "[0-9]"}}), &is_digit),
            (json!({"guided_regex": "[0-9]"}), &is_digit),
            (json!({"guided_grammar": "start: /[0-9]/"}), &is_digit),
        ];
        for (format, is_right) in formats {
            let answer = server.post(path, &with(&[&format]));
            assert_eq!(answer.header("x-ignored-fields"), None, "{path} {format}");
            let answer = answer.success();
            let content =
                if path == "/v1/messages" { &answer["content"] } else { &answer["output"][0]["content"] };
            assert!(is_right(content[0]["text"].as_str().unwrap()), "{path} {format}: {answer}");
            // One format is enough.
            let error = server.post(path, &with(&[&format, &own])).json()["error"].clone();
            let message = error["message"].as_str().unwrap_or_else(|| panic!("{path} {format} was accepted"));
            assert!(message.ends_with(" exclude each other; give one of them"), "{path} {format}: {message}");
        }
        let broken = server.post(path, &with(&[&json!({"guided_regex": "(a"})]));
        assert_eq!(broken.status, 400, "{}", broken.text());
    }
}

/// Row 22.
#[test]
fn hostile_formats_are_refused_within_a_second() {
    let server = Server::start("--max-model-len 256");
    let ok = body(CHAT, &json!({"guided_choice": ["yes", "no"]}));
    server.post(CHAT, &ok).success();
    let schema = "response_format.json_schema.schema";
    let keywords = ["uniqueItems", "pattern", "allOf", "multipleOf"].map(|name| format!("{schema}.{name}"));
    let [unique, pattern, all_of, divisor] = keywords.each_ref().map(String::as_str);
    let regex = "structured_outputs.regex";
    let mut deep = json!({"type": "string"});
    for _ in 0..40 {
        deep = json!({"anyOf": [deep, {"type": "array", "items": {"enum": ["x".repeat(4_000)]}}]});
    }
    let of_schema = |schema: Value| json!({"response_format": named(&schema)});
    for (what, change, param, words) in [
        ("5 MB", of_schema(json!({"enum": ["x".repeat(5 << 20)]})), schema, "131072 bytes"),
        ("large and deep", of_schema(deep), schema, "131072 bytes"),
        ("recursive", of_schema(json!({"$ref": "#"})), schema, ""),
        ("unknown keyword", of_schema(json!({"type": "array", "uniqueItems": true})), unique, "uniqueItems"),
        ("pattern", of_schema(json!({"pattern": "(".repeat(3_000)})), pattern, "brackets"),
        (
            "intersections",
            of_schema(json!({"allOf": vec![json!({"pattern": "a.*b"}); 200]})),
            all_of,
            "allOf",
        ),
        ("a huge divisor", of_schema(json!({"multipleOf": 1_000_003})), divisor, "multipleOf"),
        ("no object", of_schema(json!([1])), schema, "expected an object"),
        ("open bracket", json!({"structured_outputs": {"regex": "(a"}}), regex, ""),
        ("look-around", json!({"structured_outputs": {"regex": "a(?=b)"}}), regex, ""),
        ("GBNF", json!({"guided_grammar": "root ::= b"}), "guided_grammar", "no rule"),
        ("no rule", json!({"guided_grammar": "start: nothing"}), "guided_grammar", "nothing"),
        ("no choice", json!({"guided_choice": []}), "guided_choice", "0 choices"),
        (
            "two formats",
            json!({"guided_choice": ["a"], "guided_regex": "a"}),
            "guided_choice",
            "exclude each other",
        ),
    ] {
        for path in [CHAT, COMPLETIONS] {
            let request = body(path, &change);
            // Other tests have the processors at times.
            let mut fastest = Duration::MAX;
            for _ in 0..5 {
                let start = Instant::now();
                let answer = server.post(path, &request);
                fastest = fastest.min(start.elapsed());
                check_error(what, &answer, 400, Some(param), None, words);
                if fastest < Duration::from_millis(1_500) {
                    break;
                }
            }
            assert!(fastest < Duration::from_millis(1_500), "{what}: {fastest:?}");
        }
    }
    let tag = json!({"response_format": {"type": "structural_tag", "structures": []}});
    let answer = server.post(CHAT, &body(CHAT, &tag));
    check_error(
        "a tag",
        &answer,
        400,
        Some("response_format.type"),
        Some("unsupported_parameter"),
        "not supported",
    );
    // A regular expression that takes backtracking matchers for ever is an ordinary one here.
    let regex = body(COMPLETIONS, &json!({"guided_regex": "((a+)+)+b", "max_tokens": 20}));
    let (text, _) = &whole(&server.post(COMPLETIONS, &regex).success())[&0];
    assert!(text.trim_end_matches('b').bytes().all(|byte| byte == b'a'), "{text:?}");
    server.post(CHAT, &ok).success();
    server.wait_until_idle();
}

#[test]
fn choices_with_any_sign_hold() {
    let server = Server::start("--max-model-len 256");
    let choices = ["a -> b", "<b>"];
    let tool = json!({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}});
    for change in [
        json!({"structured_outputs": {"choice": choices}}),
        json!({"guided_choice": choices}),
        json!({"structured_outputs": {"regex": r"a -\> b|\<b\>"}}),
        json!({"structured_outputs": {"choice": choices}, "tools": [tool], "tool_choice": "none"}),
    ] {
        let (text, _) = &whole(&server.post(CHAT, &body(CHAT, &change)).success())[&0];
        assert!(choices.contains(&text.as_str()), "{change}: {text:?}");
    }
    let regex = json!({"structured_outputs": {"regex": r"\bfoo\b"}});
    let answer = server.post(CHAT, &body(CHAT, &regex));
    let words = r#""\\bfoo\\b" cannot be enforced: it has the word boundary \b"#;
    check_error("boundary", &answer, 400, Some("structured_outputs.regex"), None, words);
}

/// Row 23.
#[test]
fn a_grammar_that_fails_on_the_way_ends_its_own_request_only() {
    let server = Server::start("--max-model-len 256 --max-num-seqs 4");
    let plain = body(COMPLETIONS, &json!({"seed": 4}));
    let alone = whole(&server.post(COMPLETIONS, &plain).success());
    let grammar = format!("start: \"once\" many\nmany: {}", "(\"a\" | \"b\")? ".repeat(2_500));
    std::thread::scope(|scope| {
        let neighbour = scope.spawn(|| whole(&server.post(COMPLETIONS, &plain).success()));
        let answer = server.post(CHAT, &body(CHAT, &json!({"guided_grammar": grammar})));
        assert_eq!(answer.status, 400, "{}", answer.text());
        let message = answer.json()["error"]["message"].to_string();
        assert!(message.contains("grammar"), "{message}");
        assert_eq!(neighbour.join().unwrap(), alone);
    });
    assert_eq!(whole(&server.post(COMPLETIONS, &plain).success()), alone);
    server.wait_for_metric("vllm:kv_cache_usage_perc", 0.0);
    assert_eq!(server.get("/health").status, 200);
}

/// A schema of objects of which too many keys may come next, after a text of this many characters.
fn too_many_keys(num_chars: usize) -> Value {
    let object = |prefix: &str| {
        let keys = (0..450).map(|index| (format!("{prefix}{index}"), json!({"type": "null"})));
        json!({"type": "object", "properties": keys.collect::<serde_json::Map<_, _>>()})
    };
    json!({
        "type": "object",
        "properties": {
            "a": {"const": "x".repeat(num_chars)},
            "b": {"anyOf": [object("p"), object("q"), object("r")]},
        },
        "required": ["a", "b"],
    })
}

#[test]
fn what_a_grammar_cannot_enforce_is_an_error_before_or_in_the_answer() {
    let server = Server::start("--max-model-len 1024");
    let ask = |schema: &Value, is_stream: bool| {
        let change = json!({"response_format": named(schema), "stream": is_stream, "max_tokens": 900});
        server.post(CHAT, &body(CHAT, &change))
    };
    let keys = (0..1_000).map(|index| (format!("p{index}"), json!({"type": "integer"})));
    let many = json!({"type": "object", "properties": keys.collect::<serde_json::Map<_, _>>()});
    ask(&many, false).success();
    for event in ask(&many, true).events() {
        assert!(event.get("error").is_none(), "{event}");
    }
    for is_stream in [false, true] {
        let soon = ask(&too_many_keys(1), is_stream);
        let param = Some("response_format.json_schema.schema");
        check_error("soon", &soon, 400, param, None, "too many continuations in one position");
    }
    // Beyond what is tried out.
    let late = too_many_keys(300);
    let words = "too many continuations in one position";
    check_error("late", &ask(&late, false), 400, None, Some("answer_not_possible"), words);
    let events = ask(&late, true).events();
    let error = &events.last().unwrap()["error"];
    assert_eq!(error["code"], "answer_not_possible", "{events:?}");
    assert_eq!(error["type"], "invalid_request_error");
    assert!(error["message"].as_str().unwrap().contains(words), "{error}");
    server.wait_until_idle();
}

/// What ends by itself is valid, whatever the schema and however wild the model.
#[test]
fn answers_to_random_schemas_are_valid_at_a_high_temperature() {
    const NUM_THREADS: u64 = 4;
    let template =
        concat!("--chat-template ", env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/tok/chat/tools.jinja");
    let server = Server::start(&format!("--max-model-len 1024 --max-num-seqs 8 {template}"));
    let ask = |seed: u64, as_call: bool| -> bool {
        let schema = random::Schemas::new(seed).object();
        let function = json!({"type": "function", "function": {"name": "a.b", "parameters": schema}});
        let change = match as_call {
            true => json!({"tools": [function], "tool_choice": "required"}),
            false => {
                json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}})
            }
        };
        let mut request = body(CHAT, &change);
        (request["temperature"], request["seed"], request["max_tokens"]) =
            (json!(1.5), json!(seed), json!(250));
        let answer = server.post(CHAT, &request);
        // A tool is part of the prompt, and some are too large for this small model.
        if as_call && answer.json()["error"]["code"] == "context_length_exceeded" {
            return false;
        }
        let choice = answer.success()["choices"][0].clone();
        if choice["finish_reason"] == "length" {
            return false;
        }
        let message = &choice["message"];
        let text = match as_call {
            true => &message["tool_calls"][0]["function"]["arguments"],
            false => &message["content"],
        };
        let text = text.as_str().unwrap_or_else(|| panic!("{seed}: {choice}"));
        let value =
            serde_json::from_str(text).unwrap_or_else(|error| panic!("{seed}: {error}: {text}: {schema}"));
        let fault = random::fault(&value, &schema, &schema);
        assert_eq!(fault, None, "{seed}: {text}: {schema}");
        true
    };
    for (as_call, num_schemas) in [(false, 60), (true, 40)] {
        let num_ended: usize = std::thread::scope(|scope| {
            let ask = &ask;
            let part =
                move |first: u64| (first..num_schemas).step_by(4).filter(|seed| ask(*seed, as_call)).count();
            let threads: Vec<_> = (0..NUM_THREADS).map(|first| scope.spawn(move || part(first))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        // An empty or hopeless text would be valid too: most come to their end.
        assert!(num_ended as u64 > num_schemas / 2, "{num_ended} of {num_schemas} came to an end");
    }
}
