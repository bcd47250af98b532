//! Every text drawn from a schema's grammar is valid under it.

use std::io::Write;

use serde_json::{Value, json};

use super::super::tests::{compiler, draw};
use super::super::{Grammar, GrammarSpec};
use super::random::{Schemas, fault};
use crate::sampling::{Constraint, TokenMask};
use crate::tokenizer::tests::tokenizer;
use crate::tokenizer::{SpecialTokens, Tokenizer};

#[test]
fn every_answer_to_random_schemas_is_valid() {
    let mut num_texts = 0;
    // For a look with another program: pairs of a schema and a text.
    let mut log = std::env::var_os("TINYVLLM_SCHEMA_LOG").map(|path| std::fs::File::create(path).unwrap());
    let all = ["qwen2", "spm"].map(|name| (tokenizer(name), compiler(&tokenizer(name))));
    for seed in 0..200 {
        let schema = Schemas::new(seed).object();
        let (tokenizer, compiler) = &all[seed as usize % 2];
        let grammar = compiler
            .compile(&GrammarSpec::JsonSchema(schema.clone()))
            .unwrap_or_else(|error| panic!("{seed}: {error}: {schema}"));
        for draw_seed in 0..6 {
            let Some(text) = draw(&grammar, tokenizer, seed * 100 + draw_seed) else { continue };
            let value: Value = serde_json::from_str(&text)
                .unwrap_or_else(|error| panic!("{seed}: {error}: {text}: {schema}"));
            if let Some(fault) = fault(&value, &schema, &schema) {
                panic!("{seed}: {fault} in {text}: {schema}");
            }
            if let Some(log) = &mut log {
                writeln!(log, "{}", json!([schema, text])).unwrap();
            }
            num_texts += 1;
        }
    }
    assert!(num_texts > 600, "{num_texts}");
}

/// Listed numbers are compared with `multipleOf` digit by digit. The library, which computes with doubles and 64 bits, wrote
/// others, and ended the process for numbers at the limits of 64 bits.
#[test]
fn listed_numbers_are_multiples_to_the_last_digit() {
    check(
        &json!({"enum": [18446744073709551615_u64, 18446744073709551612_u64], "multipleOf": 4}),
        &["18446744073709551612"],
        &["18446744073709551615", "18446744073709552000"],
    );
    check(&json!({"enum": [0.1, 0.25, 0.3], "multipleOf": 0.1}), &["0.1", "0.3"], &["0.25"]);
    check(&json!({"const": i64::MIN, "multipleOf": 4}), &["-9223372036854775808"], &["-4"]);
    check(
        &json!({"anyOf": [{"type": "integer", "minimum": 1, "maximum": 2, "multipleOf": 5}, {"type": "null"}]}),
        &["null"],
        &["5", "0"],
    );
    let compile = |schema: Value| {
        let message = compiler(&tokenizer("qwen2")).compile(&GrammarSpec::JsonSchema(schema));
        message.map(drop).map_err(|error| error.to_string())
    };
    let lone = compile(json!({"const": i64::MIN, "multipleOf": 5})).unwrap_err();
    assert!(lone.contains("no value"), "{lone}");
    let many = json!({"allOf": [{"multipleOf": 4}, {"multipleOf": 6}, {"const": i64::MIN}]});
    assert!(compile(many).is_err());
    let odd = compile(json!({"type": "object", "minProperties": "1"})).unwrap_err();
    assert!(odd.contains("minProperties"), "{odd}");
    let negative = compile(json!({"const": -5, "multipleOf": -5})).unwrap_err();
    assert!(negative.contains("multipleOf"), "{negative}");
}

/// Whether the grammar takes the text from beginning to end.
fn accepts(grammar: &Grammar, tokenizer: &Tokenizer, text: &str) -> bool {
    let mut state = grammar.start();
    let mut allowed = TokenMask::default();
    for id in tokenizer.encode(text, SpecialTokens::AsText).unwrap() {
        state.allowed(&mut allowed).unwrap();
        if !allowed.contains(id) {
            return false;
        }
        state.accept(id).unwrap();
    }
    state.allowed(&mut allowed).unwrap()
}

/// Of a schema, texts that match and texts that do not.
#[track_caller]
pub(super) fn check(schema: &Value, right: &[&str], wrong: &[&str]) {
    let tokenizer = tokenizer("qwen2");
    let grammar = compiler(&tokenizer)
        .compile(&GrammarSpec::JsonSchema(schema.clone()))
        .unwrap_or_else(|error| panic!("{error}: {schema}"));
    for text in right {
        assert!(accepts(&grammar, &tokenizer, text), "{text} under {schema}");
    }
    for text in wrong {
        assert!(!accepts(&grammar, &tokenizer, text), "{text} under {schema}");
    }
}

#[test]
fn objects_are_closed_unless_they_say_otherwise() {
    let named = |others: Option<Value>| {
        let mut schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}});
        if let Some(others) = others {
            schema["additionalProperties"] = others;
        }
        schema
    };
    let (none, one, more) = ("{}", r#"{"a": 1}"#, r#"{"a": 1, "b": "x"}"#);
    check(&named(None), &[none, one], &[more, r#"{"b": 1}"#]);
    check(&named(Some(false.into())), &[none, one], &[more]);
    check(&named(Some(true.into())), &[none, one, more], &[r#"{"a": "x"}"#, r#"{"b": 1, "a": 1}"#]);
    check(&named(Some(json!({"type": "string"}))), &[one, more, r#"{"b": "x"}"#], &[r#"{"a": 1, "b": 1}"#]);
    check(&json!({"type": "object"}), &[none, one, more, r#"{"x": [{"y": null}]}"#], &["[]", "1"]);
    check(&json!({"type": "object", "properties": {}}), &[none], &[one]);
    // A required name is there without a description.
    check(&json!({"type": "object", "properties": {}, "required": ["b"]}), &[r#"{"b": [1]}"#], &[none, one]);
    // A key has one spelling, so that it has no duplicate.
    check(&named(Some(true.into())), &[r#"{"b\n": 1}"#], &[r#"{"\u0061": "x"}"#]);
    let map = json!({"type": "object", "additionalProperties": {"type": "integer"}});
    let strict = |schema: Value| GrammarSpec::closed(schema);
    check(&strict(named(Some(true.into()))), &[none, one], &[more]);
    check(&strict(json!({"type": "object"})), &[none], &[one]);
    check(&strict(map.clone()), &[none, one], &[more]);
    let nested = json!({"type": "array", "items": {"anyOf": [{"type": "object"}, {"type": "null"}]}});
    check(&nested.clone(), &["[{\"a\": 1}]"], &[]);
    check(&strict(nested), &["[{}, null]"], &["[{\"a\": 1}]"]);
    // A value that is not a schema is unchanged.
    let words = json!({"enum": [{"type": "object", "a": 1}]});
    assert_eq!(strict(words.clone()), words);
}

/// Generators of schemas write the largest number of some type where they mean none.
#[test]
fn bounds_that_no_answer_reaches_are_none() {
    for most in [json!(i32::MAX), json!(u32::MAX), json!(u64::MAX)] {
        check(&json!({"type": "string", "maxLength": most}), &["\"\"", "\"abc\""], &["1"]);
        let list = json!({"type": "array", "items": {"type": "boolean"}, "maxItems": most});
        check(&list, &["[]", "[true, false]"], &["[1]"]);
    }
    check(&json!({"type": "number", "multipleOf": 1e-6}), &["1", "0.5", "0.000001"], &["0.0000001"]);
    check(&json!({"type": "number", "multipleOf": 1e-8}), &["0.00000001", "7.5"], &["0.000000001"]);
    let error = GrammarSpec::lark_json(&json!({"type": "number", "multipleOf": 1e-9})).unwrap_err();
    assert!(error.message().starts_with("multipleOf: ") && error.hint().is_some(), "{error}");
    check(&json!({"type": "number", "minimum": 2, "maximum": f64::MAX}), &["2", "1000000"], &["1.5"]);
    check(&json!({"type": "integer", "minimum": -1e300}), &["-7", "7"], &["0.5"]);
}

#[test]
fn counts_are_whole_numbers_in_any_spelling() {
    check(&json!({"type": "string", "pattern": "^a", "maxLength": 2.0}), &["\"ab\""], &["\"abc\""]);
    check(&json!({"type": "string", "not": {"minLength": 2.0}}), &["\"a\""], &["\"ab\""]);
    let contains = json!({"type": "array", "contains": {"const": 1}, "minContains": 2.0, "maxItems": 3.0});
    check(&contains, &["[1, 1]", "[1, 2, 1]"], &["[1]", "[1, 1, 1, 1]"]);
    let error = GrammarSpec::lark_json(&json!({"type": "array", "items": {"$ref": "#"}, "minItems": 1.0}));
    assert!(error.unwrap_err().message().contains("could ever end"));
    // Wherever a reference leads.
    let elsewhere = json!({"$ref": "#/components/x", "components": {"x": {"$ref": "#/components/y"},
                           "y": {"type": "string", "maxLength": 1.0, "nullable": true}}});
    check(&elsewhere, &["null", "\"a\""], &["\"ab\""]);
}

#[test]
fn keywords_of_a_wrong_type_are_named() {
    for (keyword, given) in [
        ("uniqueItems", json!("yes")),
        ("required", json!([1])),
        ("format", json!(1)),
        ("minLength", json!(1.5)),
        ("minContains", json!("1")),
        ("enum", json!("a")),
        ("anyOf", json!({})),
        ("dependentRequired", json!({"a": "b"})),
        ("dependentSchemas", json!({"a": 5})),
    ] {
        let error = GrammarSpec::lark_json(&json!({"items": {keyword: given}})).unwrap_err();
        assert!(error.message().starts_with(&format!("items.{keyword}: ")), "{error}");
    }
}

#[test]
fn many_optional_keys_are_enforced_or_refused_before_the_answer() {
    check(&keys("p", 340), &["{}", r#"{"p7": 1, "p339": 2}"#], &[r#"{"p340": 1}"#]);
    let all: Vec<String> = (0..1_000).step_by(9).map(|index| format!("\"p{index}\": {index}")).collect();
    check(
        &keys("p", 1_000),
        &["{}", r#"{"p0": 1, "p999": 2}"#, &format!("{{{}}}", all.join(", "))],
        &[r#"{"p1": 1, "p0": 2}"#, r#"{"p1": 1, "p1": 2}"#, r#"{"p1": 1,}"#, r#"{, "p1": 1}"#],
    );
    let mut some = keys("p", 1_000);
    some["required"] = json!(["p400", "p500"]);
    some["additionalProperties"] = json!({"type": "null"});
    check(
        &some,
        &[r#"{"p400": 1, "p500": 2}"#, r#"{"p0": 0, "p400": 1, "p500": 2, "p999": 3, "x": null, "y": null}"#],
        &["{}", r#"{"p400": 1}"#, r#"{"p400": 1, "p999": 1}"#, r#"{"p400": 1, "p500": 2, "p1": null}"#],
    );
    let tokenizer = tokenizer("qwen2");
    let error = compiler(&tokenizer).compile(&GrammarSpec::JsonSchema(keys("p", 1_001))).unwrap_err();
    assert!(error.message().contains("1001 keys") && error.hint().is_some(), "{error}");
}

/// An object of this many keys, none of which is required.
fn keys(prefix: &str, num_keys: usize) -> Value {
    let keys = (0..num_keys).map(|index| (format!("{prefix}{index}"), json!({"type": "integer"})));
    json!({"type": "object", "properties": keys.collect::<serde_json::Map<_, _>>()})
}

#[test]
fn limits_that_are_reached_soon_are_reported_before_the_answer_in_words_about_the_schema() {
    let objects: Vec<Value> = ["a", "b", "c"].map(|prefix| keys(prefix, 450)).into();
    let tokenizer = tokenizer("qwen2");
    let compiler = compiler(&tokenizer);
    for schema in [
        json!({"anyOf": objects}),
        json!({"type": "array", "minItems": 1, "items": {"anyOf": objects}}),
        json!({"type": "object", "properties": {"a": {"anyOf": objects}}, "required": ["a"]}),
        json!({"type": "integer", "multipleOf": 9_973}),
        json!({"type": "string", "allOf": [{"pattern": "^.*a.{14}$"}, {"pattern": "^.*b.{13}c$"}]}),
    ] {
        let result = compiler.compile(&GrammarSpec::JsonSchema(schema.clone()));
        let (text, schema) = (format!("{result:?}"), schema.to_string());
        println!("{text} {}", &schema[..schema.len().min(100)]);
        if result.is_ok() {
            continue;
        }
        assert!(text.contains("too complex"), "{text} of {}", &schema[..schema.len().min(200)]);
        for word in ["fuel", "lexer", "limits.", "items", "recursive", "lexeme", "SearchRegex"] {
            assert!(!text.contains(word), "{text} of {}", &schema[..schema.len().min(200)]);
        }
    }
}

#[test]
fn conditions_are_written_in_other_keywords() {
    let (a, b, both, none) = (r#"{"a": true}"#, r#"{"b": true}"#, r#"{"a": true, "b": false}"#, "{}");
    let other = r#"{"c": true}"#;
    let map = |names: Value, more: Value| {
        let mut schema =
            json!({"type": "object", "propertyNames": names, "additionalProperties": {"type": "boolean"}});
        schema.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        schema
    };
    let ab = json!({"type": "string", "enum": ["a", "b"]});
    check(&map(ab.clone(), json!({})), &[none, a, b, both], &[other, r#"{"a": 1}"#]);
    check(&map(ab.clone(), json!({"required": ["a", "b"]})), &[both], &[none, a, b, other]);
    let defined = json!({"$defs": {"name": ab}});
    check(&map(json!({"$ref": "#/$defs/name"}), defined), &[none, a, both], &[other]);
    check(&map(json!({"const": "a"}), json!({"properties": {"b": {}}})), &[none, a], &[b, both]);
    check(&map(json!({"pattern": "^[ab]$"}), json!({})), &[none, a, b], &[other, r#"{"ab": true}"#]);
    check(&map(json!({}), json!({})), &[none, a, other], &[r#"{"a": 1}"#]);
    check(&map(json!(false), json!({})), &[none], &[a]);
    let truths = json!({"a": {"type": "boolean"}, "b": {"type": "boolean"}});
    let of = |more: Value| {
        let mut schema = json!({"type": "object", "properties": truths});
        schema.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        schema
    };
    check(&of(json!({"properties": {"a": {"type": "boolean"}, "b": {"not": {}}}})), &[none, a], &[b, both]);
    check(&of(json!({"dependentRequired": {"a": ["b"]}})), &[none, b, both], &[a]);
    check(&of(json!({"dependencies": {"b": ["a"], "a": []}})), &[none, a, both], &[b]);
    let free = json!({"type": "object", "dependentRequired": {"a": ["b"]}});
    check(&free, &[none, b, both, other], &[a]);
    let needs = json!({"a": {"properties": {"b": {"const": false}}, "required": ["b"]}});
    check(&of(json!({"dependentSchemas": needs})), &[none, b, both], &[a, r#"{"a": true, "b": true}"#]);
    for nothing in [
        json!({"if": {}, "propertyNames": {}, "dependentRequired": {}, "dependentSchemas": {}}),
        json!({"if": {"required": ["a"]}, "not": false, "propertyNames": {"type": "string"}}),
        json!({"then": false, "else": false, "minContains": 3}),
    ] {
        check(&of(nothing), &[none, a, b, both], &[other]);
    }
    check(&of(json!({"if": true, "then": {"required": ["a"]}, "else": false})), &[a, both], &[none, b]);
    check(&of(json!({"if": false, "then": false, "else": {"required": ["b"]}})), &[b, both], &[none, a]);
    check(&json!({"enum": [1, 2, null], "not": {"enum": [2, null]}}), &["1"], &["2", "null"]);
    check(&json!({"type": "boolean", "not": {"const": true}}), &["false"], &["true"]);
    let list = |more: Value| {
        let mut schema = json!({"type": "array", "items": {"type": "integer"}});
        schema.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        schema
    };
    check(&list(json!({"contains": {"const": 1}, "minContains": 0})), &["[]", "[2]"], &["[true]"]);
    check(&list(json!({"contains": true, "maxContains": 2})), &["[1]", "[1, 2]"], &["[]", "[1, 2, 3]"]);
    let refused = |schema: Value, words: &str| {
        let tokenizer = tokenizer("qwen2");
        let error = compiler(&tokenizer).compile(&GrammarSpec::JsonSchema(schema)).unwrap_err();
        assert!(error.message().contains(words), "{error}");
    };
    refused(json!({"not": {}}), "no value");
    refused(of(json!({"if": {"required": ["a"]}, "then": {"required": ["b"]}})), "if");
    let many: serde_json::Map<String, Value> =
        (0..7).map(|index| (format!("k{index}"), json!(["a"]))).collect();
    refused(of(json!({"dependentRequired": many})), "more than 6 keys");
}

#[test]
fn schemas_are_combined() {
    let base = json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]});
    let more = json!({"type": "object", "properties": {"b": {"type": "string"}}, "required": ["b"]});
    let both = r#"{"a": 1, "b": "x"}"#;
    check(&json!({"allOf": [base, more]}), &[both], &[r#"{"a": 1}"#, r#"{"b": "x"}"#]);
    let defined =
        json!({"$defs": {"base": base}, "$ref": "#/$defs/base", "properties": {"b": {"type": "string"}}});
    check(&defined, &[both, r#"{"a": 1}"#], &[r#"{"b": "x"}"#]);
    let either = json!({"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
                        "anyOf": [{"required": ["a"]}, {"required": ["b"]}]});
    check(&either, &[both, r#"{"a": 1}"#, r#"{"b": "x"}"#], &["{}"]);
    let tagged =
        |tag: &str| json!({"type": "object", "properties": {"tag": {"const": tag}}, "required": ["tag"]});
    let union = json!({"$defs": {"x": tagged("x"), "y": tagged("y")},
                       "oneOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}]});
    check(&union, &[r#"{"tag": "x"}"#, r#"{"tag": "y"}"#], &[r#"{"tag": "z"}"#]);
    let node = json!({"$ref": "#/$defs/node", "$defs": {"node": {"type": "object", "properties": {
        "next": {"anyOf": [{"allOf": [{"$ref": "#/$defs/node"}], "description": "."}, {"type": "null"}]}},
        "required": ["next"]}}});
    check(&node, &[r#"{"next": {"next": null}}"#], &["{}", r#"{"next": {}}"#]);
    check(&json!({"type": ["string", "null"], "enum": ["a", 1, null]}), &["\"a\"", "null"], &["1"]);
    check(
        &json!({"allOf": [{"type": "number", "minimum": 3}, {"type": "integer", "maximum": 4}]}),
        &["3", "4"],
        &["2", "5", "3.5"],
    );
    check(
        &json!({"type": "string", "allOf": [{"pattern": "^a"}, {"pattern": "b$"}]}),
        &["\"axb\"", "\"ab\""],
        &["\"ax\"", "\"b\""],
    );
    check(
        &json!({"properties": {"a": {"$ref": "#/properties/b"}, "b": {"type": "null"}}}),
        &[r#"{"a": null}"#],
        &[r#"{"a": 1}"#],
    );
    check(&json!({"$defs": {"a/b c": {"type": "null"}}, "$ref": "#/$defs/a~1b%20c"}), &["null"], &["1"]);
}

/// The effect of keywords on keys and positions depends on their neighbours.
#[test]
fn keys_and_positions_of_combined_schemas() {
    let all = |schemas: Value| json!({"allOf": schemas});
    let text = json!({"type": "string"});
    let word = json!({"const": "a"});
    let positional = json!({"prefixItems": [text, {"type": "null"}]});
    let (right, wrong) = (["[]", "[\"a\"]"], ["[\"b\"]", "[\"a\", null]", "[\"a\", \"a\"]", "[1]"]);
    check(&all(json!([positional, {"items": word}])), &right, &wrong);
    check(&all(json!([{"items": word}, positional])), &right, &wrong);
    let more = json!({"prefixItems": [word], "items": {"type": "integer"}});
    check(
        &all(json!([{"prefixItems": [text], "minItems": 1}, more])),
        &["[\"a\"]", "[\"a\", 1]"],
        &["[]", "[\"b\"]"],
    );
    check(&all(json!([{"items": false}, {"items": word}])), &["[]"], &["[\"a\"]"]);
    let closed = json!({"type": "object", "properties": {"x": true}, "additionalProperties": false});
    let patterns = json!({"patternProperties": {"^x": {"type": "integer"}}});
    check(&all(json!([patterns, closed])), &["{}", "{\"x\": 1}"], &["{\"x\": \"a\"}", "{\"xx\": 1}"]);
    let map = json!({"type": "object", "additionalProperties": {"type": "integer"}});
    let words = json!({"patternProperties": {"^x": {"type": ["string", "integer"]}}});
    check(&all(json!([map, words])), &["{\"y\": 1}", "{\"x\": 1}"], &["{\"x\": \"a\"}"]);
    // The bounds include required names without a description.
    let bounded =
        |named: Value, max: usize| json!({"properties": named, "required": ["b", "b"], "maxProperties": max});
    check(&bounded(json!({}), 1), &["{\"b\": 1}"], &["{}", "{\"b\": 1, \"b\": 1}"]);
    check(&bounded(json!({"a": true}), 2), &["{\"b\": 1}", "{\"a\": 1, \"b\": 1}"], &["{}"]);
    check(&json!({"type": "object", "minProperties": 1}), &["{\"a\": 1}"], &["{}"]);
    let compiled = |schema: Value| compiler(&tokenizer("qwen2")).compile(&GrammarSpec::JsonSchema(schema));
    assert!(compiled(bounded(json!({}), 0)).is_err());
    // A key may come twice, and then counts once.
    let error = compiled(json!({"type": "object", "minProperties": 2})).unwrap_err();
    assert!(error.message().contains("minProperties is 2"), "{error}");
}

#[test]
fn annotations_are_none_of_the_grammar() {
    check(&json!({"type": "string", "format": "phone"}), &["\"x\""], &["1"]);
    check(
        &json!({"type": "array", "items": {"type": "integer"}, "uniqueItems": false}),
        &["[1, 1]"],
        &["[\"a\"]"],
    );
    check(&json!({"type": "integer", "x-order": 1, "nullable": false, "default": "x"}), &["1"], &["null"]);
    check(
        &json!({"type": "object", "properties": {"a": true}, "unevaluatedProperties": false}),
        &["{\"a\": {}}"],
        &["{\"b\": 1}"],
    );
    check(
        &json!({"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "null"}}),
        &["{\"b\": null}"],
        &["{\"b\": 1}"],
    );
    // A required key that nothing evaluates has no value.
    let unknown = json!({"properties": {"a": true}, "required": ["b"], "unevaluatedProperties": false});
    assert!(GrammarSpec::lark_json(&unknown).unwrap_err().message().contains("no value"));
    let tokenizer = tokenizer("qwen2");
    for (keyword, given) in [
        ("not", json!({"uniqueItems": true})),
        ("propertyNames", json!({"anyOf": [{"maxLength": 3}, {"format": "email"}]})),
        ("unevaluatedItems", json!(false)),
    ] {
        let schema = json!({"type": "object", "properties": {"a": {"type": "array", keyword: given}}});
        let error = compiler(&tokenizer).compile(&GrammarSpec::JsonSchema(schema)).unwrap_err();
        assert!(error.message().contains(keyword) && error.hint().is_some(), "{error}");
    }
}

#[test]
fn formats_of_uuids_have_their_version() {
    let uuid = |version: &str| format!("\"01234567-89ab-{version}def-8123-456789abcdef\"");
    for version in ["1", "3", "4", "5", "6", "7", "8"] {
        let schema = json!({"type": "string", "format": format!("uuid{version}")});
        let other = if version == "4" { "7" } else { "4" };
        let no_variant = uuid(version).replace("-8123", "-0123");
        check(&schema, &[&uuid(version)], &[&uuid(other), &no_variant, "\"x\"", "\"\""]);
        check(&json!({"type": "string", "format": "uuid"}), &[&uuid(version)], &["\"x\""]);
    }
}

#[test]
fn patterns_may_look_ahead() {
    let text = |pattern: &str| json!({"type": "string", "pattern": pattern});
    // pydantic's patterns for Decimal, without limits and with five digits of which two follow the point.
    let decimal = text(r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$");
    check(&decimal, &["\"1.5\"", "\"-0\"", "\"+.5\""], &["\"\"", "\"-\"", "\".\"", "\"1.5.2\"", "\"x\""]);
    let limited = text(r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,3}|(?=[\d.]{1,6}0*$)\d{0,3}\.\d{0,2}0*$)");
    let right = ["\"123\"", "\"123.45\"", "\"0.5\"", "\"-007.5\"", "\"+.25\"", "\"12.\"", "\"1.5000\""];
    let wrong = ["\".\"", "\"-.\"", "\"\"", "\"1234\"", "\"1.234\"", "\"1x\"", "\"about 5\"", "\"5 euros\""];
    check(&limited, &right, &wrong);
    // The same from an author that noticed the missing end.
    check(&text(&format!("{}$", limited["pattern"].as_str().unwrap())), &right, &wrong);
    let digits = text(r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,3}|(?=[\d.]{1,4}0*$)\d*\.\d*0*$)");
    check(&digits, &["\"123\"", "\"1.23\"", "\".5\""], &["\"1.234\"", "\"1234\"", "\"one\"", "\"-\""]);
    let password = text(r"^(?=.*[A-Z])(?=.*\d)[A-Za-z\d]{4,8}$");
    check(&password, &["\"aB3d\"", "\"9ZZZ\""], &["\"abcd\"", "\"aBcd\"", "\"aB3\"", "\"aB3d-\""]);
    check(&text(r"^(?!\s*$).+"), &["\"a\"", "\" a\""], &["\"\"", "\"  \""]);
    check(&text(r"a(?!b)"), &["\"ac\"", "\"xa\"", "\"aba\""], &["\"ab\"", "\"b\""]);
    check(&text(r"^(?:a|(?!b)\w)$"), &["\"a\"", "\"c\""], &["\"b\"", "\"ac\""]);
    let both = json!({"type": "string", "pattern": "^(?!a)", "minLength": 2, "maxLength": 3});
    check(&both, &["\"ba\"", "\"bcd\""], &["\"b\"", "\"ab\"", "\"bcde\""]);
    let tokenizer = tokenizer("qwen2");
    for pattern in ["(?:(?=a)b)*", "(?i)(?=a)A", "a(?=b", "(?=a)+b", "a$b(?=c)"] {
        let error = compiler(&tokenizer).compile(&GrammarSpec::JsonSchema(text(pattern))).unwrap_err();
        assert!(error.message().contains("look-ahead"), "{pattern}: {error}");
    }
}

#[test]
fn lists_and_listed_values_hold() {
    let list = |more: Value| {
        let mut schema = json!({"type": "array", "items": {"type": "integer"}});
        more.as_object().unwrap().iter().for_each(|(name, value)| schema[name] = value.clone());
        schema
    };
    check(&list(json!({})), &["[]", "[1]", "[1, 2, 3]"], &["[\"a\"]", "[1,]"]);
    check(&list(json!({"minItems": 1, "maxItems": 2})), &["[1]", "[1, 2]"], &["[]", "[1, 2, 3]"]);
    check(&list(json!({"minItems": 2})), &["[1, 2]", "[1, 2, 3, 4]"], &["[]", "[1]"]);
    check(&list(json!({"maxItems": 0})), &["[]"], &["[1]"]);
    let tuple = list(json!({"prefixItems": [{"type": "string"}, {"type": "null"}]}));
    check(&tuple.clone(), &["[]", "[\"a\"]", "[\"a\", null, 1, 2]"], &["[1]", "[\"a\", 1]"]);
    let mut exact = tuple;
    exact["minItems"] = 3.into();
    exact["maxItems"] = 3.into();
    check(&exact, &["[\"a\", null, 1]"], &["[\"a\", null]", "[\"a\", null, 1, 2]"]);
    check(&json!({"type": "array", "prefixItems": [true], "items": false}), &["[]", "[{}]"], &["[1, 2]"]);
    let set = |item: Value, more: Value| {
        let mut set = list(more);
        (set["uniqueItems"], set["items"]) = (true.into(), item);
        set
    };
    let words = json!({"enum": ["a", "b", "c", "a", 1], "type": "string"});
    let right = ["[]", "[\"b\"]", "[\"c\", \"a\"]", "[\"b\", \"a\", \"c\"]"];
    let wrong = ["[\"a\", \"a\"]", "[\"a\", \"b\", \"a\"]", "[1]", "[\"a\",]", "[\"a\" \"b\"]"];
    check(&set(words.clone(), json!({})), &right, &wrong);
    check(
        &set(words.clone(), json!({"minItems": 2, "maxItems": 2})),
        &right[2..3],
        &["[]", "[\"a\"]", right[3]],
    );
    check(&set(words, json!({"minItems": 3})), &right[3..], &right[..3]);
    let named = json!({"$ref": "#/$defs/truth", "title": "x"});
    let mut truths = set(named, json!({}));
    truths["$defs"] = json!({"truth": {"type": "boolean"}});
    check(&truths, &["[]", "[true]", "[false, true]"], &["[true, true]"]);
    // Values are compared, and not their spelling.
    let equal = json!({"enum": [1, 1.0, {"a": 1, "b": [2]}, {"b": [2.0], "a": 1}]});
    check(
        &set(equal, json!({})),
        &["[1]", r#"[{"a":1,"b":[2]}, 1]"#],
        &["[1, 1.0]", r#"[{"a":1,"b":[2]}, {"b":[2.0],"a":1}]"#],
    );
    check(&json!({"enum": [[1], [2]], "not": {"const": [1.0]}}), &["[2]"], &["[1]"]);
    check(&json!({"allOf": [{"enum": [{"a": 1}, 2]}, {"enum": [{"a": 1.0}]}]}), &[r#"{"a":1}"#], &["2"]);
    let integer = json!({"type": "integer"});
    check(&set(integer.clone(), json!({"maxItems": 1})), &["[]", "[5]"], &["[5, 6]"]);
    let tokenizer = tokenizer("qwen2");
    let many: Vec<usize> = (0..9).collect();
    for (schema, words) in [
        (set(integer, json!({})), "at most 8 values"),
        (set(json!({"enum": many}), json!({})), "at most 8 values"),
        (set(json!({"enum": [1]}), json!({"prefixItems": [true]})), "at most 8 values"),
        (set(json!({"enum": [1]}), json!({"minItems": 2})), "no value"),
    ] {
        let error = compiler(&tokenizer).compile(&GrammarSpec::JsonSchema(schema)).unwrap_err();
        assert!(error.message().contains(words), "{error}");
    }
    check(
        &json!({"enum": [9_007_199_254_740_993_u64, -1.50, "é\"", {"a": [1]}]}),
        &["9007199254740993", "-1.5", "\"é\\\"\"", "{\"a\":[1]}"],
        &["9007199254740992", "1"],
    );
    check(
        &json!({"const": 18_446_744_073_709_551_615_u64}),
        &["18446744073709551615"],
        &["18446744073709551616"],
    );
}
