//! Every text chosen from the sets matches; and hostile specifications are refused.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::watchdog::{counter_of_this_thread, read_counter};
use super::*;
use crate::ErrorKind;
use crate::sampling::{Constraint, TokenMask};
use crate::tokenizer::Tokenizer;
use crate::tokenizer::tests::{FIXTURES, tokenizer};

/// Longer than any limit, in time that a thread computes.
pub(super) const TIMEOUT: Duration = Duration::from_secs(3);
/// Longer than work under these limits takes by the clock, on a busy machine.
const LONG_TIMEOUT: Duration = Duration::from_secs(30);

/// Measures work of this thread, including its waits.
pub(super) struct Stopwatch {
    start: Instant,
    computed: Option<Duration>,
}

impl Stopwatch {
    pub(super) fn start() -> Self {
        Self { start: Instant::now(), computed: Self::computed() }
    }

    fn computed() -> Option<Duration> {
        counter_of_this_thread().and_then(|counter| read_counter(&counter))
    }

    /// Where the system does not report a thread's CPU time, the clock counts.
    pub(super) fn is_over(&self, limit: Duration) -> bool {
        let elapsed = self.start.elapsed();
        let computed = Self::computed().zip(self.computed).map(|(now, before)| now.saturating_sub(before));
        elapsed > LONG_TIMEOUT || computed.unwrap_or(elapsed) > limit
    }
}

pub(super) fn compiler(tokenizer: &Arc<Tokenizer>) -> GrammarCompiler {
    let ends = tokenizer.stop_token_ids(&[]);
    GrammarCompiler::new(Arc::clone(tokenizer), tokenizer.vocab_size(), &ends)
}

/// A cheap generator, so that a failure can be repeated.
pub(super) fn next(state: &mut u64) -> usize {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*state >> 33) as usize
}

/// A text drawn blindly from the sets, ending as soon as it may; `None` if that takes too many tokens.
pub(super) fn draw(grammar: &Grammar, tokenizer: &Tokenizer, seed: u64) -> Option<String> {
    let mut rng = seed;
    let mut state = grammar.start();
    let mut allowed = TokenMask::default();
    let mut ids = Vec::new();
    for _ in 0..300 {
        let may_end = state.allowed(&mut allowed).unwrap();
        if allowed.is_empty() || may_end && next(&mut rng).is_multiple_of(2) {
            assert!(may_end);
            return Some(tokenizer.decode(&ids, false));
        }
        let candidates: Vec<u32> = allowed.iter().collect();
        // Closing something is as likely as all else together, or texts would hardly ever end.
        let closing: Vec<u32> = candidates
            .iter()
            .copied()
            .filter(|id| matches!(tokenizer.token_bytes(*id), [b'"' | b'}' | b']' | b',', ..]))
            .collect();
        let pool =
            if closing.is_empty() || next(&mut rng).is_multiple_of(2) { &candidates } else { &closing };
        let id = pool[next(&mut rng) % pool.len()];
        ids.push(id);
        state.accept(id).unwrap();
    }
    None
}

/// Texts of a grammar under a tokenizer: at least one of the many draws must be complete.
#[track_caller]
fn texts(spec: &GrammarSpec, name: &str) -> Vec<String> {
    let tokenizer = tokenizer(name);
    let grammar = compiler(&tokenizer).compile(spec).unwrap();
    let texts: Vec<String> = (0..30).filter_map(|seed| draw(&grammar, &tokenizer, seed)).collect();
    assert!(!texts.is_empty(), "{name}: no text of {spec:?} comes to an end");
    texts
}

#[test]
fn every_text_is_json_of_the_schema_with_every_tokenizer() {
    let schema = json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["a", "b\"c", "é"]}, "minItems": 1, "maxItems": 3},
            "next": {"anyOf": [{"$ref": "#/$defs/item"}, {"type": "null"}]},
        },
        "required": ["name", "age", "tags", "next"],
        "additionalProperties": false,
        "$defs": {"item": {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
                           "additionalProperties": false}},
    });
    for name in FIXTURES {
        for text in texts(&GrammarSpec::JsonSchema(schema.clone()), name) {
            let value: Value =
                serde_json::from_str(&text).unwrap_or_else(|error| panic!("{text:?}: {error}"));
            assert!(value["name"].as_str().unwrap().chars().count() <= 12, "{text}");
            assert!(value["age"].as_u64().unwrap() <= 150, "{text}");
            let tags = value["tags"].as_array().unwrap();
            assert!(
                (1..=3).contains(&tags.len())
                    && tags.iter().all(|tag| ["a", "b\"c", "é"].contains(&tag.as_str().unwrap()))
            );
            assert!(value["next"].is_null() || value["next"]["ok"].is_boolean(), "{text}");
            assert_eq!(value.as_object().unwrap().len(), 4, "{text}");
        }
        for text in texts(&GrammarSpec::JsonObject, name) {
            match serde_json::from_str::<Value>(&text) {
                Ok(value) => assert!(value.is_object(), "{text}"),
                // JSON has numbers that no float can hold.
                Err(error) => assert!(error.to_string().contains("out of range"), "{text}: {error}"),
            }
        }
    }
}

#[test]
fn an_answer_has_one_format_or_another() {
    let number = json!({"type": "integer", "minimum": 1, "maximum": 3});
    type IsOwn = fn(&str) -> bool;
    let cases: [(GrammarSpec, IsOwn); 8] = [
        (GrammarSpec::JsonSchema(number), |text| ["1", "2", "3"].contains(&text)),
        (GrammarSpec::JsonObject, |text| text.starts_with('{')),
        (GrammarSpec::Regex(r"^1\/2|3/4$".to_owned()), |text| ["1/2", "3/4"].contains(&text)),
        (GrammarSpec::Choice(["a -> b", "x<y>/"].map(str::to_owned).to_vec()), |text| {
            ["a -> b", "x<y>/"].contains(&text)
        }),
        (GrammarSpec::Regex(r"\<b\>\Z".to_owned()), |text| text == "<b>"),
        (GrammarSpec::Choice(["a\"", "b\n", "c"].map(str::to_owned).to_vec()), |text| {
            ["a\"", "b\n", "c"].contains(&text)
        }),
        (GrammarSpec::Lark("start: own\nown: \"x\"".to_owned()), |text| text == "x"),
        (GrammarSpec::Lark("root ::= \"y\"".to_owned()), |text| text == "y"),
    ];
    let other = "start: call+\ncall: \"<call>\" own\nown: %json {\"type\": \"boolean\"}\n";
    for (spec, is_own) in cases {
        let texts = texts(&spec.or_lark(other).unwrap(), "qwen2");
        let is_other = |text: &str| text.starts_with("<call>");
        assert!(texts.iter().all(|text| is_own(text) != is_other(text)), "{texts:?}");
        assert!(texts.iter().any(|text| is_own(text)), "{texts:?}");
        assert!(texts.iter().any(|text| is_other(text)), "{texts:?}");
    }
}

#[test]
fn choices_regular_expressions_and_grammars_hold() {
    for name in ["qwen2", "spm", "tekken"] {
        let choices = ["yes", "no \"quoted\"\n", "naïve 🦙", "yesterday"].map(str::to_owned).to_vec();
        for text in texts(&GrammarSpec::Choice(choices.clone()), name) {
            assert!(choices.contains(&text), "{text:?}");
        }
        for text in texts(&GrammarSpec::Regex(r"^[0-9]{3}-[a-f]+(x|y\$)$".to_owned()), name) {
            let (digits, rest) = text.split_at(3);
            assert!(digits.bytes().all(|byte| byte.is_ascii_digit()), "{text:?}");
            let rest = rest.strip_prefix('-').unwrap();
            let letters = rest.strip_suffix('x').or_else(|| rest.strip_suffix("y$")).unwrap();
            assert!(
                !letters.is_empty() && letters.bytes().all(|byte| (b'a'..=b'f').contains(&byte)),
                "{text:?}"
            );
        }
        let lark = "start: sum\nsum: NUMBER (\" + \" NUMBER){0,3}\nNUMBER: /[1-9]/";
        let gbnf = "# A sum\nroot ::= number\n  | number (\" + \" number){1,3}\nnumber ::= [1-9]";
        for grammar in [lark, gbnf] {
            for text in texts(&GrammarSpec::Lark(grammar.to_owned()), name) {
                assert!(text.split(" + ").all(|part| part.len() == 1 && part != "0"), "{text:?}");
            }
        }
        let optional = r#"root ::= "a" ("b" |) ("" | "c")"#;
        for text in texts(&GrammarSpec::Lark(optional.to_owned()), name) {
            assert!(["a", "ab", "ac", "abc"].contains(&text.as_str()), "{text:?}");
        }
        let nested = r#"root ::= "<" [^<>\x00-\x20\U0001f999-\U0010ffff]? root? ">" "#;
        for text in texts(&GrammarSpec::Lark(nested.to_owned()), name) {
            let open = text.chars().filter(|c| *c == '<').count();
            assert!(open > 0 && text.ends_with(&">".repeat(open)), "{text:?}");
            assert_eq!(text.chars().filter(|c| *c == '>').count(), open, "{text:?}");
        }
    }
}

#[test]
fn special_tokens_come_by_their_name_only() {
    let tokenizer = tokenizer("qwen2");
    let marker = tokenizer.token_id("<|sp|>").unwrap();
    let compiler = compiler(&tokenizer);
    let seven = GrammarSpec::lark_json(&json!({"type": "integer", "minimum": 7, "maximum": 7})).unwrap();
    let grammar = compiler.compile(&GrammarSpec::Lark(format!("start: <|sp|> {seven}"))).unwrap();
    assert_eq!(draw(&grammar, &tokenizer, 1).unwrap(), "<|sp|>7");
    let mut allowed = TokenMask::default();
    grammar.start().allowed(&mut allowed).unwrap();
    assert_eq!(allowed.iter().collect::<Vec<_>>(), [marker]);
    let grammar = compiler.compile(&GrammarSpec::Regex("(?s:.)*".to_owned())).unwrap();
    let mut state = grammar.start();
    assert!(state.allowed(&mut allowed).unwrap());
    assert!(allowed.iter().all(|id| !tokenizer.is_special(id)));
    assert!(allowed.iter().count() > tokenizer.vocab_size() / 2);
    let error = state.accept(marker).unwrap_err();
    assert!(error.message().contains("cannot be followed"), "{error}");
    let error = compiler.compile(&GrammarSpec::Lark("start: <|no_such_token|>".to_owned())).unwrap_err();
    assert!(error.message().contains("no_such_token"), "{error}");
}

#[test]
fn a_grammar_is_compiled_once_and_sequences_are_independent() {
    let tokenizer = tokenizer("llama-bpe");
    let compiler = compiler(&tokenizer);
    let spec = GrammarSpec::Regex("ab*c".to_owned());
    let grammar = compiler.compile(&spec).unwrap();
    assert!(Arc::ptr_eq(&grammar, &compiler.compile(&spec).unwrap()));
    let (mut one, mut other) = (grammar.start(), grammar.start());
    let (mut allowed, mut before) = (TokenMask::default(), TokenMask::default());
    other.allowed(&mut before).unwrap();
    one.accept(tokenizer.token_id("a").unwrap()).unwrap();
    one.accept(tokenizer.token_id("c").unwrap()).unwrap();
    assert!(one.allowed(&mut allowed).unwrap() && allowed.is_empty());
    other.allowed(&mut allowed).unwrap();
    assert_eq!(allowed, before);
}

#[test]
fn hostile_specifications_are_errors_in_time() {
    let tokenizer = tokenizer("qwen2");
    let compiler = compiler(&tokenizer);
    compiler.compile(&GrammarSpec::JsonObject).unwrap();
    let mut mistakes = Vec::new();
    let mut check = |what: &str, spec: GrammarSpec, words: &str| {
        let watch = Stopwatch::start();
        let Err(error) = compiler.compile(&spec) else {
            mistakes.push(format!("{what}: accepted"));
            return;
        };
        let is_short = error.message().len() < 600 && !error.message().contains('\n');
        let is_right = error.kind() == ErrorKind::InvalidRequest && error.message().contains(words);
        if watch.is_over(TIMEOUT) || !is_short || !is_right {
            mistakes.push(format!("{what}: {error} in {:?}", watch.start.elapsed()));
        }
    };
    let schema = GrammarSpec::JsonSchema;
    let regex = |text: &str| GrammarSpec::Regex(text.to_owned());
    let lark = |text: &str| GrammarSpec::Lark(text.to_owned());
    check("5 MB", schema(json!({"enum": ["x".repeat(5 << 20)]})), "131072 bytes");
    check("a schema that is a list", schema(json!([])), "expected an object");
    check("false", schema(json!(false)), "expected an object");
    check("an unknown keyword", schema(json!({"type": "array", "uniqueItems": true})), "uniqueItems");
    check("an unknown type", schema(json!({"type": "tuple"})), "tuple");
    check("a reference to nothing", schema(json!({"$ref": "#/$defs/x"})), "x");
    check("a reference elsewhere", schema(json!({"$ref": "http://127.0.0.1/x.json"})), "127.0.0.1");
    check("a reference to itself", schema(json!({"$ref": "#"})), "");
    check(
        "a huge table",
        schema(json!({"type": "integer", "multipleOf": 1_000_003})),
        "multipleOf is 1000003",
    );
    check(
        "no table",
        schema(json!({"type": "integer", "multipleOf": 0})),
        "multipleOf is 0 in the JSON schema",
    );
    check("a fine table", schema(json!({"type": "number", "multipleOf": 0.000_012_345})), "multipleOf");
    check("many intersections", schema(json!({"allOf": vec![json!({"pattern": "a.*b"}); 200]})), "by allOf");
    let doubled = |index: usize| json!({"allOf": vec![json!({"$ref": format!("#/$defs/{index}")}); 2]});
    let mut defs: serde_json::Map<String, Value> =
        (0..40).map(|index| ((index + 1).to_string(), doubled(index))).collect();
    defs.insert("0".to_owned(), json!({"type": "object"}));
    check("doubled references", schema(json!({"$defs": defs, "$ref": "#/$defs/40"})), "by allOf");
    let cycle = json!({"allOf": [{"$ref": "#"}]});
    check("a cycle of references", schema(cycle), "the reference \"#\" in the JSON schema leads to itself");
    check("a long pattern", schema(json!({"items": {"pattern": "a?".repeat(5_000)}})), "a pattern has more");
    check("our own options", schema(json!({"x-guidance": {"lenient": true}})), "x-guidance");
    check("a contradiction", schema(json!({"type": "integer", "minimum": 3, "maximum": 2})), "");
    check("a word in the middle", regex(r"a\b"), "the word boundary \\b");
    check("the end in the middle", regex("a$b"), "$ before something else");
    check("a word in a grammar", lark(r"start: /\bfoo/"), "the word boundary \\b");
    check("look-around", regex("a(?=b)"), "\"a(?=b)\" cannot be enforced: it has look-ahead");
    check("an open bracket", regex("(a"), "\"(a\" is not valid: unclosed group");
    check(
        "a class that is none",
        lark("start: /[z-a]/"),
        "\"[z-a]\" is not valid: invalid character class range",
    );
    check(
        "a fine fraction",
        schema(json!({"type": "number", "multipleOf": 1e-15})),
        "multipleOf is 1e-15, which has too many digits",
    );
    check(
        "a fraction that is not exact",
        schema(json!({"type": "number", "multipleOf": 0.07})),
        "multipleOf is 0.07, which has too many digits",
    );
    check(
        "multiples that are too large",
        schema(json!({"type": "number", "minimum": 2e9, "multipleOf": 0.01})),
        "minimum is 2000000000.0 next to multipleOf 0.01; multiples of numbers are enforced between -1000000000",
    );
    check("deep brackets", regex(&"(".repeat(3_000)), "128 brackets");
    check("a long expression", regex(&"a".repeat(20_000)), "4096 bytes");
    check("the empty text", regex(""), "empty");
    check("nothing at all", regex("[a&&b]"), "");
    check("no choice", GrammarSpec::Choice(vec![]), "0 choices");
    check("too many choices", GrammarSpec::Choice(vec!["a".to_owned(); 5_000]), "5000 choices");
    check("the empty choice", GrammarSpec::Choice(vec![String::new()]), "empty");
    check("no grammar", lark(""), "");
    check("no start", lark("a: \"b\""), "start");
    check("a rule that is missing", lark("start: x"), "x");
    check("endless recursion", lark("start: start"), "");
    check("a rule that is missing in GBNF", lark("root ::= \"a\" | b"), "no rule \"b\"");
    check(
        "a huge table inside",
        lark("start: %json {\"multiple\\u004ff\": 1000003}"),
        "multipleOf is 1000003",
    );
    check("a file to include", lark("%import common.x\nstart: x"), "");
    assert!(mistakes.is_empty(), "{mistakes:#?}");
}

/// The states that a text comes through are kept for each sequence, so their number follows from the memory that there is.
#[test]
fn a_sequence_takes_no_more_memory_than_there_is_for_it() {
    let tokenizer = tokenizer("qwen2");
    let spec = GrammarSpec::Regex(r"(\w{0,20}[aeiou]\w{12} ?){1,200}".to_owned());
    let num_tokens = |bytes: u64| {
        let grammar = match compiler(&tokenizer).with_memory(bytes).compile(&spec) {
            Ok(grammar) => grammar,
            Err(error) => return Err(error.message().to_owned()),
        };
        let (mut state, mut allowed, mut rng) = (grammar.start(), TokenMask::default(), 3);
        for num_tokens in 0..150 {
            let may_end = state.allowed(&mut allowed).map_err(|error| error.message().to_owned())?;
            let ids: Vec<u32> = allowed.iter().collect();
            if ids.is_empty() {
                assert!(may_end);
                return Ok(num_tokens);
            }
            state.accept(ids[next(&mut rng) % ids.len()]).map_err(|error| error.message().to_owned())?;
        }
        Ok(150)
    };
    // With the least memory an ordinary text still fits, and this one does not.
    assert!(compiler(&tokenizer).with_memory(0).compile(&GrammarSpec::JsonObject).is_ok());
    assert!(num_tokens(0).unwrap_err().contains("too complex"));
    assert!(num_tokens(u64::MAX).is_ok());
}

#[test]
fn hostile_specifications_that_are_accepted_stay_within_limits() {
    // The stack of a thread that makes masks.
    let walk = || {
        let tokenizer = tokenizer("qwen2");
        let compiler = compiler(&tokenizer);
        compiler.compile(&GrammarSpec::JsonObject).unwrap();
        let recursive = json!({
            "$defs": {"node": {"type": "object", "additionalProperties": {"$ref": "#/$defs/node"}}},
            "$ref": "#/$defs/node",
        });
        let branches: Vec<Value> = (0..500)
            .map(|index| json!({"type": "object", "properties": {format!("key{index}"): {"type": "string", "pattern": "^(a|ab|b)*$"}}, "required": [format!("key{index}")]}))
            .collect();
        let specs = [
            GrammarSpec::Regex("(a*)*b".to_owned()),
            GrammarSpec::Regex("(a|aa|aaa)+$".to_owned()),
            GrammarSpec::Regex("(.*a){20}".to_owned()),
            GrammarSpec::Regex(".*a.{1000}b".to_owned()),
            GrammarSpec::Regex("((a{1,9999}){1,9999}){1,9999}".to_owned()),
            GrammarSpec::Regex("a?".repeat(2_000) + "b"),
            GrammarSpec::Regex("a".repeat(4_000)),
            GrammarSpec::Regex(format!("{}a{}", "(".repeat(120), ")*".repeat(120))),
            GrammarSpec::Choice(vec!["x".repeat(60_000), "y".repeat(60_000)]),
            GrammarSpec::Choice((0..4_096).map(|index| format!("choice {index}")).collect()),
            GrammarSpec::JsonSchema(recursive),
            GrammarSpec::JsonSchema(json!({"anyOf": branches})),
            GrammarSpec::JsonSchema(json!({"type": "string", "pattern": "^(([a-z])+.)+[A-Z]([a-z])+$"})),
            GrammarSpec::JsonSchema(json!({"type": "array", "minItems": 100_000})),
            GrammarSpec::Lark("start: start start | \"a\" | \"b\"".to_owned()),
            GrammarSpec::Lark("start: a b\na: a a | \"x\" |\nb: b a b | a | \"y\"".to_owned()),
            GrammarSpec::Lark("root ::= (\"a\" | \"b\" root){100000,200000}".to_owned()),
            GrammarSpec::Lark("root ::= ((\"a\"{1,9999}){1,9999} | [^a]){1,9999}".to_owned()),
            GrammarSpec::Lark(format!("start: {}", "(\"a\" | \"b\")? ".repeat(5_000))),
            GrammarSpec::Lark(format!("start: \"x\" many\nmany: {}", "(\"a\" | \"b\")? ".repeat(5_000))),
        ];
        for spec in specs {
            let what: String = format!("{spec:?}").chars().take(80).collect();
            let watch = Stopwatch::start();
            let compiled = compiler.compile(&spec);
            assert!(!watch.is_over(TIMEOUT), "{what}: {:?}", watch.start.elapsed());
            let Ok(grammar) = compiled else { continue };
            let mut state = grammar.start();
            let mut allowed = TokenMask::default();
            let mut rng = 7;
            let watch = Stopwatch::start();
            for num_tokens in 1..200 {
                let step = Stopwatch::start();
                let result = state.allowed(&mut allowed);
                if result.is_err() || allowed.is_empty() {
                    break;
                }
                let candidates: Vec<u32> = allowed.iter().collect();
                if state.accept(candidates[next(&mut rng) % candidates.len()]).is_err() {
                    break;
                }
                let elapsed = step.start.elapsed();
                assert!(!step.is_over(TIMEOUT), "{what}: token {num_tokens} took {elapsed:?}");
            }
            assert!(!watch.is_over(2 * TIMEOUT), "{what}: {:?}", watch.start.elapsed());
        }
    };
    std::thread::Builder::new().stack_size(2 << 20).spawn(walk).unwrap().join().unwrap();
}
