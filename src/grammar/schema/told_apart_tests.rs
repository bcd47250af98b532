//! Negative constraints of a schema: `not`, one of several alternatives, and lists that contain an item.

use serde_json::{Value, json};

use super::super::GrammarSpec;
use super::super::tests::{Stopwatch, TIMEOUT, compiler, draw};
use super::for_each;
use super::random::{Schemas, fault};
use super::tests::check;
use crate::Error;
use crate::tokenizer::tests::tokenizer;

#[track_caller]
fn refused(schema: Value) -> Error {
    compiler(&tokenizer("qwen2")).compile(&GrammarSpec::JsonSchema(schema)).unwrap_err()
}

#[test]
fn what_must_not_be_is_none_of_it() {
    let not = |schema: Value, refused: Value| {
        let mut schema = schema;
        schema["not"] = refused;
        schema
    };
    let text = json!({"type": "string"});
    check(&not(text.clone(), json!({"const": "a"})), &["\"b\"", "\"aa\"", "\"\""], &["\"a\"", "1"]);
    let words = json!({"enum": ["a\"b", "é", 5]});
    check(&not(text.clone(), words), &["\"a\"", "\"5\""], &["\"a\\\"b\"", "\"é\""]);
    let long = json!({"type": "string", "minLength": 2, "pattern": "^a"});
    check(&not(long, json!({"enum": ["ab"]})), &["\"ac\"", "\"abc\""], &["\"ab\"", "\"a\"", "\"b\""]);
    check(&not(json!({"type": "integer"}), json!({"enum": [0, 7]})), &["1", "8", "-3"], &["0", "7"]);
    check(&not(json!({"type": "number"}), json!({"const": 0})), &["0.5", "-1"], &["0"]);
    check(
        &not(json!({"type": ["string", "null", "integer"]}), json!({"type": "null"})),
        &["\"a\"", "1"],
        &["null"],
    );
    check(&not(json!({}), json!({"type": ["object", "array"]})), &["1", "null", "\"a\""], &["{}", "[]"]);
    check(&not(json!({}), json!({"type": "string", "minLength": 2})), &["\"a\"", "[1]"], &["\"ab\""]);
    check(&not(json!({"type": "integer"}), json!({"minimum": 5, "maximum": 9})), &["4", "10"], &["5", "9"]);
    check(&not(json!({"type": "array"}), json!({"maxItems": 1})), &["[1, 2]"], &["[]", "[1]"]);
    check(
        &not(json!({"type": "string"}), json!({"anyOf": [{"const": "a"}, {"minLength": 3}]})),
        &["\"b\"", "\"ab\""],
        &["\"a\"", "\"abc\""],
    );
    // It does not constrain types without these values.
    check(&not(json!({"type": "integer"}), json!({"type": "string", "pattern": "a"})), &["1"], &["\"b\""]);
    let object = json!({"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}});
    let (none, a, b, both) = ("{}", r#"{"a": 1}"#, r#"{"b": "x"}"#, r#"{"a": 1, "b": "x"}"#);
    check(&not(object.clone(), json!({"required": ["a", "b"]})), &[none, a, b], &[both]);
    check(&not(object.clone(), json!({"required": ["c"]})), &[none, a, both], &[r#"{"c": 1}"#]);
    let pair = json!({"properties": {"a": {"const": 1}}, "required": ["a"]});
    check(&not(object.clone(), pair), &[none, b, r#"{"a": 2}"#], &[a, both]);
    let free = json!({"type": "object"});
    check(&not(free, json!({"required": ["a"]})), &[none, b, r#"{"c": [1]}"#], &[a, both]);
    // The error names the property.
    for (schema, inner) in [
        (json!({"type": "string"}), json!({"pattern": "^a"})),
        (json!({"type": "number"}), json!({"type": "integer"})),
        (json!({"type": "array"}), json!({"const": [1]})),
    ] {
        let list = json!({"type": "array", "items": {"properties": {"n": not(schema, inner)}}});
        let error = refused(json!({"properties": {"a": {"type": "null"}, "b": list}}));
        let is_named = error.message().starts_with("properties.b.items.properties.n.not: ");
        assert!(is_named && error.message().contains("keyword not") && error.hint().is_some(), "{error}");
    }
    assert!(refused(not(json!({"const": "a"}), json!({"type": "string"}))).message().contains("no value"));
}

#[test]
fn alternatives_exclude_each_other() {
    let one_of = |branches: Value| json!({"oneOf": branches});
    let (none, a, b, both) = ("{}", r#"{"a": 1}"#, r#"{"b": "x"}"#, r#"{"a": 1, "b": "x"}"#);
    let object = |named: &[&str], required: Value| {
        let all = [("a", json!({"type": "integer"})), ("b", json!({"type": "string"}))];
        let named: serde_json::Map<String, Value> = all
            .into_iter()
            .filter(|(name, _)| named.contains(name))
            .map(|(name, schema)| (name.to_owned(), schema))
            .collect();
        json!({"type": "object", "properties": named, "required": required})
    };
    // One key or the other.
    check(
        &one_of(json!([object(&["a"], json!(["a"])), object(&["b"], json!(["b"]))])),
        &[a, b],
        &[none, both],
    );
    let mut either = object(&["a", "b"], json!([]));
    either["oneOf"] = json!([{"required": ["a"]}, {"required": ["b"]}]);
    check(&either, &[a, b], &[none, both]);
    // The second is the first with a further key.
    let mut small = object(&["a"], json!(["a"]));
    small["additionalProperties"] = false.into();
    let mut large = object(&["a", "b"], json!(["a"]));
    large["additionalProperties"] = false.into();
    check(&one_of(json!([small, large])), &[both], &[none, a, b]);
    // A mark that need not be there is there.
    let marked = |mark: &str, more: &str| json!({"type": "object", "properties": {"kind": {"const": mark, "default": mark}, more: {"type": "integer"}}});
    let schema = one_of(json!([marked("x", "p"), marked("y", "q")]));
    check(
        &schema,
        &[r#"{"kind": "x"}"#, r#"{"kind": "x", "p": 1}"#, r#"{"kind": "y", "q": 1}"#],
        &[none, r#"{"kind": "z"}"#, r#"{"kind": "x", "q": 1}"#],
    );
    check(
        &one_of(json!([{"type": "integer", "maximum": 5}, {"type": "integer", "minimum": 3}])),
        &["2", "6"],
        &["3", "5"],
    );
    check(
        &one_of(json!([{"type": "string"}, {"enum": ["a", "b"]}])),
        &["\"c\"", "\"ab\""],
        &["\"a\"", "\"b\""],
    );
    check(
        &one_of(json!([{"type": "string", "maxLength": 2}, {"type": ["string", "null"]}])),
        &["\"abc\"", "null"],
        &["\"ab\""],
    );
    for other in [json!({"type": "string", "pattern": "^a"}), json!({"type": "integer", "minimum": 3})] {
        let error = refused(one_of(json!([{"type": ["string", "number"]}, other])));
        let says_way_out = error.hint().is_some_and(|hint| hint.contains("anyOf"));
        assert!(error.message().contains("oneOf") && says_way_out, "{error}");
    }
    let error = refused(one_of(json!([{"type": "null"}, {"type": "null"}])));
    assert!(error.message().contains("oneOf"), "{error}");
}

#[test]
fn lists_contain_what_they_must() {
    let list = |more: Value| {
        let mut schema = json!({"type": "array", "items": {"type": "integer"}, "contains": {"const": 1}});
        schema.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        schema
    };
    check(&list(json!({})), &["[1]", "[2, 1]", "[1, 2, 3]", "[1, 1]"], &["[]", "[2]", "[\"a\", 1]", "[1,]"]);
    check(&list(json!({"minContains": 2})), &["[1, 1]", "[1, 2, 1, 3]"], &["[1]", "[1, 2]"]);
    check(&list(json!({"maxContains": 1})), &["[1]", "[2, 1, 3]"], &["[]", "[1, 1]", "[1, 2, 1]"]);
    check(&list(json!({"minContains": 0, "maxContains": 1})), &["[]", "[2]", "[2, 1]"], &["[1, 1]"]);
    check(&list(json!({"maxContains": 0, "minContains": 0})), &["[]", "[2, 3]"], &["[1]", "[2, 1]"]);
    check(&list(json!({"minItems": 3})), &["[1, 2, 3]", "[2, 3, 4, 1]"], &["[1]", "[1, 2]", "[2, 3, 4]"]);
    check(&list(json!({"maxItems": 2})), &["[1]", "[2, 1]"], &["[]", "[2, 3, 1]", "[2, 3]"]);
    check(
        &list(json!({"minItems": 2, "maxItems": 3, "minContains": 2, "maxContains": 2})),
        &["[1, 1]", "[1, 2, 1]"],
        &["[1]", "[1, 2]", "[1, 1, 1]", "[1, 1, 2, 3]"],
    );
    let tuple = list(json!({"prefixItems": [{"type": "string"}, {"enum": [1, 2]}]}));
    check(
        &tuple,
        &["[\"a\", 1]", "[\"a\", 2, 1]", "[\"a\", 1, 5]"],
        &["[1]", "[\"a\"]", "[\"a\", 2]", "[\"a\", 3, 1]"],
    );
    check(&json!({"contains": {"type": "string"}, "type": "array"}), &["[1, \"a\", {}]"], &["[]", "[1]"]);
    let object =
        json!({"type": "object", "properties": {"kind": {"enum": ["x", "y"]}}, "required": ["kind"]});
    let wanted = json!({"properties": {"kind": {"const": "x"}}, "required": ["kind"]});
    let objects = json!({"type": "array", "items": object, "contains": wanted, "maxContains": 1});
    let (x, y) = (r#"{"kind": "x"}"#, r#"{"kind": "y"}"#);
    check(
        &objects,
        &[&format!("[{x}]"), &format!("[{y}, {x}, {y}]")],
        &["[]", &format!("[{y}]"), &format!("[{x}, {x}]")],
    );
    for (more, words) in [
        (json!({"minContains": 3, "maxItems": 2}), "no value"),
        (json!({"minContains": 3, "maxContains": 2}), "no value"),
        (json!({"contains": {"type": "string"}}), "no value"),
        (json!({"contains": {"multipleOf": 2}, "maxContains": 1}), "maxContains"),
        (
            json!({"allOf": [{"contains": {"const": 2}}]}),
            "contains in the JSON schema cannot be enforced together",
        ),
        (json!({"uniqueItems": true}), "uniqueItems"),
        (json!({"maxItems": 100, "minContains": 50}), "2000 pairs"),
    ] {
        let error = refused(list(more));
        assert!(error.message().contains(words), "{error}");
    }
}

#[test]
fn durations_are_those_of_iso() {
    // zod's pattern for `z.iso.duration()`.
    let zod =
        r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$";
    let right = ["\"P3D\"", "\"P2W\"", "\"PT5M\"", "\"P1Y2M3DT4H\"", "\"PT1H30M\""];
    let wrong = ["\"P\"", "\"PT\"", "\"P1W2D\"", "\"3D\"", "\"P1DT\"", "\"P1S\"", "\"\""];
    check(&json!({"type": "string", "format": "duration"}), &right, &wrong);
    check(&json!({"type": "string", "pattern": zod}), &right, &wrong);
    check(&json!({"type": "string", "format": "duration", "pattern": zod}), &right, &wrong);
    check(&json!({"type": "string", "pattern": zod}), &["\"PT1.5S\"", "\"P1YT2S\""], &["\"PT.5S\""]);
}

/// A schema of a few values, so that several are often valid for the same.
fn few(random: &mut Schemas, depth: usize) -> Value {
    match random.below(if depth == 0 { 7 } else { 11 }) {
        0 => json!({"enum": ["a", "b", 1]}),
        1 => json!({"const": "a"}),
        2 => json!({"type": "integer", "minimum": random.below(4), "maximum": 3 + random.below(4)}),
        3 => json!({"type": "string", "maxLength": random.below(4)}),
        4 => json!({"type": ["boolean", "null"]}),
        5 => {
            json!({"type": ["integer", "string"], "exclusiveMaximum": random.below(9), "minLength": 2, "maxLength": 4, "minimum": 0})
        }
        6 => json!({"type": "string", "enum": ["b", "c"]}),
        7 => {
            json!({"type": "array", "items": few(random, 0), "minItems": random.below(2), "maxItems": 1 + random.below(3)})
        }
        _ => {
            let mut schema = json!({"type": "object", "properties": {}, "required": []});
            for name in ["a", "b", "kind"] {
                if random.below(3) > 0 {
                    schema["properties"][name] = few(random, depth - 1);
                }
                if random.below(3) == 0 {
                    schema["required"].as_array_mut().unwrap().push(name.into());
                }
            }
            match random.below(3) {
                0 => schema["additionalProperties"] = false.into(),
                1 => drop(schema.as_object_mut().unwrap().remove("properties")),
                _ => {}
            }
            schema
        }
    }
}

/// The same schema for validators that do not close objects with named keys.
fn open(schema: &Value) -> Value {
    let mut schema = schema.clone();
    for_each(&mut schema, &mut |fields| {
        if fields.contains_key("properties") {
            fields.entry("additionalProperties").or_insert(true.into());
        }
    });
    schema
}

#[test]
fn no_answer_is_valid_under_what_is_excluded() {
    let tokenizer = tokenizer("qwen2");
    let compiler = compiler(&tokenizer);
    let (mut num_compiled, mut num_texts) = (0, 0);
    for seed in 0..300 {
        let mut random = Schemas::new(seed);
        let (one, other) = (few(&mut random, 2), few(&mut random, 2));
        let schema = match seed % 3 {
            0 => json!({"allOf": [one], "not": other}),
            1 => json!({"oneOf": [one, other]}),
            _ => json!({"oneOf": [one, other, few(&mut random, 1)], "type": ["object", "string", "integer"]}),
        };
        // Some allow no value, and some cannot be enforced.
        let Ok(grammar) = compiler.compile(&GrammarSpec::JsonSchema(schema.clone())) else { continue };
        num_compiled += 1;
        for draw_seed in 0..6 {
            let Some(text) = draw(&grammar, &tokenizer, seed * 100 + draw_seed) else { continue };
            let value: Value = serde_json::from_str(&text).unwrap();
            let is_valid = |schema: &Value| fault(&value, &open(schema), schema).is_none();
            let branches = schema["oneOf"].as_array().into_iter().flatten();
            let num_valid = branches.filter(|branch| is_valid(branch)).count();
            assert!(schema.get("oneOf").is_none() || num_valid == 1, "{text} under {schema}");
            assert!(schema.get("not").is_none_or(|refused| !is_valid(refused)), "{text} under {schema}");
            assert!(schema.get("allOf").is_none_or(|all| is_valid(&all[0])), "{text} under {schema}");
            num_texts += 1;
        }
    }
    assert!(num_compiled > 150 && num_texts > 500, "{num_compiled} schemas, {num_texts} texts");
}

#[test]
fn patterns_that_cannot_be_read_are_named() {
    for (pattern, reason) in [
        ("(a", "unclosed group"),
        (r"(?<=a)b", "look-behind"),
        (r"(a)\1", r"the back-reference \1"),
        (r"^(?=a)(?<=b)", "look-behind"),
    ] {
        let text = json!({"type": "string", "pattern": pattern});
        let error = refused(json!({"properties": {"p": text}}));
        let message = error.message();
        let is_named = message.starts_with("properties.p.pattern: the pattern ") && message.contains(reason);
        assert!(is_named && error.hint().is_some(), "{pattern}: {error}");
        let error = refused(json!({"type": "object", "patternProperties": {"(a": true}}));
        assert!(error.message().contains("\"(a\""), "{error}");
    }
}

#[test]
fn distinguishing_ends_in_time() {
    let wide = |index: usize| {
        let keys = (0..40).map(|key| (format!("k{key}"), json!({"enum": [index, key, "x"]})));
        json!({"type": "object", "properties": keys.collect::<serde_json::Map<_, _>>()})
    };
    let mut nested = json!({"type": "string", "pattern": "a"});
    let mut inside = nested.clone();
    for _ in 0..50 {
        nested = json!({"not": nested});
        inside = json!({"properties": {"p": {"not": inside}, "q": {"oneOf": [{"type": "string"}, {"const": "a"}]}}, "required": ["p"]});
    }
    let step = |name: &str| json!({"type": "object", "properties": {name: {"$ref": "#/$defs/node"}, "leaf": {"type": "string"}}});
    let node = json!({"oneOf": [step("a"), step("b"), step("c")]});
    for (what, words, schema) in [
        ("wide", "too complex", json!({"oneOf": (0..24).map(wide).collect::<Vec<_>>()})),
        ("many", "oneOf", json!({"oneOf": (0..90).map(wide).collect::<Vec<_>>()})),
        ("nested", "too complex", nested),
        ("inside", "too complex", inside),
        ("recursive", "oneOf", json!({"$defs": {"node": node}, "$ref": "#/$defs/node"})),
        (
            "not itself",
            "too complex",
            json!({"$defs": {"node": {"not": {"$ref": "#/$defs/node"}}}, "$ref": "#/$defs/node"}),
        ),
        (
            "not inside",
            "too complex",
            json!({"$defs": {"node": {"type": "object", "properties": {"a": {"not": {"$ref": "#/$defs/node"}}, "b": {"$ref": "#/$defs/node"}}, "required": ["a"]}}, "$ref": "#/$defs/node"}),
        ),
        ("counted", "", json!({"type": "array", "contains": wide(1), "maxContains": 30, "maxItems": 50})),
    ] {
        let watch = Stopwatch::start();
        let result = super::to_lark(&schema, "");
        assert!(!watch.is_over(TIMEOUT), "{what}");
        match words {
            "" => assert!(result.is_ok(), "{what}: {result:?}"),
            words => assert!(result.is_err_and(|error| error.message().contains(words)), "{what}"),
        }
    }
}

#[test]
fn numeric_constants_are_told_apart() {
    let one = |branches: Value| json!({"oneOf": branches});
    let integer = |branches: Value| json!({"type": "integer", "oneOf": branches});
    check(&one(json!([{"const": 1}, {"const": 2}])), &["1", "2"], &["3", "1.5", "\"1\""]);
    check(&integer(json!([{"const": 1, "title": "One"}, {"const": 2}])), &["1", "2"], &["0", "3"]);
    check(&one(json!([{"const": 1.5}, {"const": 2}])), &["1.5", "2"], &["1", "2.5"]);
    check(&one(json!([{"const": 1}, {"enum": [1.0, 2]}])), &["2"], &["1", "1.0", "3"]);
    check(&one(json!([{"const": 1}, {"type": "string"}])), &["1", "\"1\""], &["2"]);
    check(&one(json!([{"type": "integer"}, {"const": 1.5}])), &["1", "-3", "1.5"], &["2.5"]);
    check(&integer(json!([{"const": 0}, {"minimum": 5}])), &["0", "5", "12"], &["1", "4"]);
    check(&integer(json!([{"const": 7}, {"minimum": 5}])), &["5", "8"], &["7", "4"]);
    check(&json!({"not": {"const": 0}}), &["1", "-1", "\"0\"", "null", "[0]"], &["0"]);
    check(&json!({"type": "integer", "not": {"const": 0}}), &["1", "-1", "10"], &["0"]);
    check(&json!({"type": "number", "not": {"enum": [0, 1.5]}}), &["1", "1.25", "-0.5"], &["0", "1.5"]);
    check(&json!({"type": "integer", "minimum": 0, "not": {"const": 0}}), &["1", "10"], &["0", "-1"]);
    let property =
        json!({"type": "object", "properties": {"n": integer(json!([{"const": 1}, {"const": 2}]))}});
    check(&property, &["{\"n\": 1}", "{\"n\": 2}"], &["{\"n\": 3}"]);
}
