use super::*;
use proptest::prelude::*;

fn strings(values: &[&str]) -> Value {
    Value::Strings(values.iter().map(|value| (*value).to_owned()).collect())
}

fn metadata(entries: Vec<(&str, Value)>) -> Metadata {
    let entry = |(key, value): (&str, Value)| match key {
        "template" => ("tokenizer.chat_template".to_owned(), value),
        key if key.starts_with("template.") => (format!("tokenizer.chat_{key}"), value),
        key => (format!("tokenizer.ggml.{key}"), value),
    };
    Metadata { entries: entries.into_iter().map(entry).collect() }
}

fn bpe(changes: Vec<(&'static str, Value)>) -> Metadata {
    let mut entries = vec![
        ("model", Value::String("gpt2".into())),
        ("pre", Value::String("qwen2".into())),
        ("tokens", strings(&["a", "b", "ab", "<e>", "<u>"])),
        ("merges", strings(&["a b"])),
        ("token_type", Value::Integers(vec![1, 1, 1, 3, 4])),
    ];
    entries.extend(changes);
    metadata(entries)
}

fn spm(changes: Vec<(&'static str, Value)>) -> Metadata {
    let mut entries = vec![
        ("model", Value::String("llama".into())),
        ("tokens", strings(&["<unk>", "<s>", "</s>", "▁", "a"])),
        ("scores", Value::Floats(vec![0.0, 0.0, 0.0, -1.0, -2.0])),
        ("token_type", Value::Integers(vec![2, 3, 3, 1, 1])),
    ];
    entries.extend(changes);
    metadata(entries)
}

#[test]
fn defaults_follow_the_type() {
    let tokenizer = Tokenizer::from_gguf(&spm(vec![])).unwrap();
    assert_eq!(tokenizer.encode_prompt("a", tokenizer.add_bos()).unwrap(), [1, 3, 4]);
    assert_eq!((tokenizer.bos_token_id(), tokenizer.stop_token_ids(&[])), (Some(1), vec![2]));
    let tokenizer = Tokenizer::from_gguf(&bpe(vec![("bos_token_id", Value::Unsigned(3))])).unwrap();
    assert_eq!((tokenizer.bos_token_id(), tokenizer.add_bos()), (Some(3), false));
    let tokenizer = Tokenizer::from_gguf(&bpe(vec![
        ("bos_token_id", Value::Unsigned(3)),
        ("pre", Value::String("llama-bpe".into())),
    ]))
    .unwrap();
    assert_eq!(tokenizer.encode_prompt("ab", true).unwrap(), [3, 2]);
    assert_eq!(tokenizer.encode_prompt("<e>ab", true).unwrap(), [3, 2]);
}

#[test]
fn a_token_after_every_text_is_omitted_with_a_notice() {
    let tokenizer = Tokenizer::from_gguf(&bpe(vec![
        ("eos_token_id", Value::Unsigned(3)),
        ("add_eos_token", Value::Bool(true)),
        ("add_sep_token", Value::Bool(true)),
    ]))
    .unwrap();
    assert_eq!(tokenizer.encode_prompt("ab", true).unwrap(), [2]);
    let [notice] = tokenizer.notices() else { panic!("{:?}", tokenizer.notices()) };
    assert!(notice.contains("add_eos_token is true, which puts \"<e>\" after every text"), "{notice}");
}

#[test]
fn ids_are_the_order_of_merges_where_a_vocabulary_is_known_for_it() {
    let without_merges = |pre: &str| {
        let mut metadata = bpe(vec![
            ("pre", Value::String(pre.into())),
            ("tokens", strings(&["a", "b", "c", "d", "bc", "ab", "abc", "cd", "abcd", "bcd", "<e>"])),
            ("token_type", Value::Integers(vec![1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 3])),
        ]);
        metadata.entries.remove("tokenizer.ggml.merges");
        Tokenizer::from_gguf(&metadata)
    };
    let tokenizer = without_merges("kimi-k2").unwrap();
    let check = |text: &str, expected: &[u32]| {
        assert_eq!(tokenizer.encode(text, super::super::SpecialTokens::Parse).unwrap(), expected, "{text}");
    };
    check("abc", &[6]);
    check("ab", &[5]);
    check("abd", &[5, 3]);
    check("cd", &[7]);
    check("bcd", &[9]);
    check("abcd", &[8]);
    check("dabcdab<e>", &[3, 8, 5, 10]);
    let error = without_merges("qwen2").unwrap_err();
    assert!(error.message().contains("merges is missing") && error.hint().is_some(), "{error:?}");
}

#[test]
fn types_decide_what_text_may_become() {
    let tokenizer = Tokenizer::from_gguf(&bpe(vec![
        ("tokens", strings(&["a", "b", "ab", "<e>", "<u>", "<", "e", ">"])),
        ("token_type", Value::Integers(vec![1, 1, 1, 3, 4, 1, 1, 1])),
    ]))
    .unwrap();
    use super::super::SpecialTokens::{AsText, Parse};
    assert_eq!(tokenizer.encode("a<e><u>", Parse).unwrap(), [0, 3, 4]);
    assert_eq!(tokenizer.encode("a<e><u>", AsText).unwrap(), [0, 5, 6, 7, 4]);
    assert_eq!(tokenizer.decode(&[0, 3, 4], true), "a<u>");
    assert_eq!(tokenizer.decode(&[0, 3, 4, 99], false), "a<e><u>");
}

#[test]
fn chat_templates_are_found_by_name() {
    let text = |text: &str| Value::String(text.into());
    let tokenizer =
        Tokenizer::from_gguf(&bpe(vec![("template", text("main")), ("template.tool_use", text("tools"))]))
            .unwrap();
    assert_eq!(tokenizer.chat_template(), Some("main"));
    assert_eq!(tokenizer.named_chat_template("tool_use"), Some("tools"));
    assert_eq!(tokenizer.chat_template_names().collect::<Vec<_>>(), ["default", "tool_use"]);
    // Entries that are none keep nobody from encoding text, and each is reported by those who need it.
    let odd = Value::Unsigned(7);
    let entries = vec![("template", odd.clone()), ("template.tool_use", odd.clone()), ("template.rag", odd)];
    let tokenizer = Tokenizer::from_gguf(&bpe(entries)).unwrap();
    assert_eq!(tokenizer.chat_template_names().count(), 0);
    let why = "tokenizer.chat_template is 7, expected a text";
    assert_eq!(tokenizer.default_chat_template_problem().as_deref(), Some(why));
    let why = "tokenizer.chat_template.tool_use is 7, expected a text";
    assert_eq!(tokenizer.chat_template_problem("tool_use").as_deref(), Some(why));
    assert_eq!(tokenizer.notices(), ["tokenizer.chat_template.rag is 7, expected a text; it is left out"]);
    let tokenizer = Tokenizer::from_gguf(&bpe(vec![("template.rag", text("R"))])).unwrap();
    let why = "no chat template of the model is named \"default\"; its names are rag";
    assert_eq!(tokenizer.default_chat_template_problem().as_deref(), Some(why));
}

#[test]
fn stop_tokens_are_the_union_of_all_sources() {
    let tokens = strings(&["a", "<e>", "<|eot_id|>", "<|im_end|>", "</s>"]);
    let tokenizer = Tokenizer::from_gguf(&bpe(vec![
        ("tokens", tokens),
        ("merges", strings(&[])),
        ("token_type", Value::Integers(vec![1, 3, 3, 3, 1])),
        ("eos_token_id", Value::Signed(1)),
        ("eot_token_id", Value::Unsigned(2)),
    ]))
    .unwrap();
    assert_eq!(tokenizer.eos_token_ids(), [1, 2]);
    // "</s>" is ordinary text in this file, so it does not stop.
    assert_eq!(tokenizer.stop_token_ids(&[0]), [0, 1, 2, 3]);
}

#[test]
fn contradictions_are_errors_that_name_them() {
    let check = |metadata: Metadata, expected: &str| {
        let error = Tokenizer::from_gguf(&metadata).unwrap_err();
        assert!(error.message().contains(expected), "{error:?} should contain {expected:?}");
    };
    check(Metadata::default(), "tokenizer.ggml.model is missing");
    check(bpe(vec![("model", Value::String("rwkv".into()))]), "\"rwkv\"");
    check(bpe(vec![("model", Value::String("bert".into()))]), "unknown_token_id is missing");
    check(bpe(vec![("pre", Value::String("future".into()))]), "\"future\"");
    check(bpe(vec![("pre", Value::Unsigned(1))]), "tokenizer.ggml.pre is 1, expected a text");
    check(bpe(vec![("tokens", strings(&[]))]), "missing or empty");
    check(bpe(vec![("tokens", Value::Unsigned(5))]), "tokens is 5, expected a list of strings");
    check(bpe(vec![("merges", Value::Unsigned(5))]), "merges is 5, expected a list of strings");
    check(bpe(vec![("merges", strings(&["ab"]))]), "merge 0 is \"ab\"");
    check(bpe(vec![("merges", strings(&["a "]))]), "merge 0 is \"a \"");
    check(bpe(vec![("merges", strings(&["a b", "b a"]))]), "merge 1");
    check(bpe(vec![("token_type", Value::Integers(vec![1]))]), "has 1 entries");
    check(bpe(vec![("token_type", Value::Integers(vec![1, 1, 1, 3, 9]))]), "token 4 has the type 9");
    check(bpe(vec![("eos_token_id", Value::Unsigned(5))]), "eos_token_id is 5, but there are only 5");
    check(bpe(vec![("bos_token_id", Value::Unsigned(99))]), "bos_token_id is 99");
    check(spm(vec![("scores", Value::Unsigned(1))]), "scores is 1, expected a list of numbers");
    check(spm(vec![("scores", Value::Floats(vec![1.0]))]), "scores has 1 entries");
    check(spm(vec![("scores", Value::Floats(vec![f32::NAN; 5]))]), "not a number");
    check(spm(vec![("token_type", Value::Integers(vec![2, 3, 3, 6, 1]))]), "byte token");
    check(spm(vec![("unknown_token_id", Value::Unsigned(77))]), "unknown_token_id is 77");
}

#[test]
fn keys_of_another_kind_are_errors_that_name_them() {
    for (key, is_spm) in [
        ("model", false),
        ("pre", false),
        ("tokens", false),
        ("token_type", false),
        ("merges", false),
        ("bos_token_id", false),
        ("eos_token_id", false),
        ("eot_token_id", false),
        ("eom_token_id", false),
        ("add_bos_token", false),
        ("scores", true),
        ("unknown_token_id", true),
        ("add_space_prefix", true),
    ] {
        let wrong = || Value::Bools(vec![true]);
        let metadata = if is_spm { spm(vec![(key, wrong())]) } else { bpe(vec![(key, wrong())]) };
        let message = Tokenizer::from_gguf(&metadata).unwrap_err().message().to_owned();
        assert!(
            message.starts_with(&format!("tokenizer.ggml.{key} is a list of 1 truth values")),
            "{message}"
        );
    }
    let error = Tokenizer::from_gguf(&bpe(vec![("eos_token_id", Value::String("2".into()))])).unwrap_err();
    assert!(error.message().contains("eos_token_id is the text \"2\""), "{error:?}");
    // Some writers mark its absence in this way.
    let none = bpe(vec![("eos_token_id", Value::Unsigned(u64::from(u32::MAX)))]);
    assert!(Tokenizer::from_gguf(&none).unwrap().eos_token_ids().is_empty());
}

#[test]
fn files_without_a_pre_tokenizer_run_with_a_warning() {
    let check = |pre: Option<&str>, chosen: Option<&str>, warns: bool| {
        let mut metadata = bpe(pre.map(|pre| ("pre", Value::String(pre.into()))).into_iter().collect());
        if pre.is_none() {
            metadata.entries.remove("tokenizer.ggml.pre");
        }
        let tokenizer = Tokenizer::from_gguf_with(&metadata, chosen).unwrap();
        let is_warning = |line: &String| line.contains("WARNING") && line.contains("--pre-tokenizer");
        assert_eq!(tokenizer.notices().iter().any(is_warning), warns, "{pre:?} {chosen:?}");
    };
    check(None, None, true);
    check(Some(""), None, true);
    check(Some("default"), None, true);
    check(Some("qwen2"), None, false);
    check(None, Some("gpt-2"), false);
    check(Some("no such"), Some("gpt-2"), false);
    let error = Tokenizer::from_gguf_with(&bpe(vec![]), Some("no such")).unwrap_err();
    assert!(error.message().contains("\"no such\"") && error.hint().unwrap().contains("smollm"), "{error:?}");
    let error = Tokenizer::from_gguf_with(&spm(vec![]), Some("gpt-2")).unwrap_err();
    assert!(error.message().contains("--pre-tokenizer gpt-2 is for byte-pair vocabularies"), "{error:?}");
}

#[test]
fn of_tokens_with_the_same_text_one_wins() {
    let check = |tokens: &[&str], types: Vec<i64>, expected: &[u32], notice: &str| {
        let changes = vec![
            ("tokens", strings(tokens)),
            ("token_type", Value::Integers(types)),
            ("merges", strings(&["a b"])),
        ];
        let tokenizer = Tokenizer::from_gguf(&bpe(changes)).unwrap();
        assert_eq!(tokenizer.encode("ab<e>", super::super::SpecialTokens::Parse).unwrap(), expected);
        assert_eq!(tokenizer.notices().concat().contains("same text"), !notice.is_empty());
        assert!(tokenizer.notices().concat().contains(notice), "{:?}", tokenizer.notices());
    };
    check(&["a", "b", "ab", "<e>", "ab"], vec![1, 1, 1, 3, 1], &[4, 3], "\"ab\" (2 and 4)");
    check(&["a", "b", "ab", "<e>", "<e>"], vec![1, 1, 1, 3, 1], &[2, 3], "\"<e>\" (3 and 4)");
    check(&["a", "b", "ab", "<e>", "<e>"], vec![1, 1, 1, 3, 3], &[2, 4], "\"<e>\" (3 and 4)");
    check(&["a", "b", "ab", "<e>", "", ""], vec![1, 1, 1, 3, 1, 3], &[2, 3], "");
    // All text is in the tokens, whichever won.
    let tokenizer =
        Tokenizer::from_gguf(&spm(vec![("tokens", strings(&["<unk>", "<s>", "</s>", "a", "a"]))]));
    assert_eq!(tokenizer.unwrap().decode(&[3, 4], false), "aa");
}

#[test]
fn ends_of_turns_are_control_tokens_whatever_their_type_is() {
    let tokens = ["a", "<|im_start|>", "<|im_end|>", "</s>", "<end>", "<|x|>", "<b>", "<", "|"];
    let check = |changes: Vec<(&'static str, Value)>, control: &[u32]| {
        let mut all = vec![("tokens", strings(&tokens)), ("merges", strings(&[]))];
        all.push(("token_type", Value::Integers(vec![1; tokens.len()])));
        all.extend(changes);
        let tokenizer = Tokenizer::from_gguf(&bpe(all)).unwrap();
        let found: Vec<u32> = (0..9).filter(|id| tokenizer.is_special(*id)).collect();
        assert_eq!(found, control);
        assert_eq!(tokenizer.notices().len(), usize::from(!control.is_empty()), "{:?}", tokenizer.notices());
        for id in control {
            let text = tokens[*id as usize];
            assert!(tokenizer.notices()[0].contains(text), "{:?}", tokenizer.notices());
            assert_eq!(tokenizer.encode(text, super::super::SpecialTokens::Parse).unwrap(), [*id]);
            assert_ne!(tokenizer.encode(text, super::super::SpecialTokens::AsText).unwrap(), [*id]);
        }
    };
    let template = |text: &str| ("template", Value::String(text.into()));
    check(vec![], &[2]);
    check(vec![template("{{ '<|im_start|>' + x + '<|im_end|>' }}")], &[1, 2]);
    check(vec![template("</s> <b> <|x|>")], &[2, 3, 5]);
    check(vec![("eos_token_id", Value::Unsigned(4)), ("bos_token_id", Value::Unsigned(6))], &[2, 4, 6]);
    // A token that every tokenizer treats as text stays text.
    check(vec![("bos_token_id", Value::Unsigned(0))], &[2]);
    let mut without_types = bpe(vec![("tokens", strings(&["a", "b", "ab", "<|im_end|>"]))]);
    without_types.entries.remove("tokenizer.ggml.token_type");
    assert_eq!(Tokenizer::from_gguf(&without_types).unwrap().stop_token_ids(&[]), [3]);
}

#[test]
fn the_end_of_one_of_several_messages_ends_no_answer() {
    let check = |tokens: &[&str], expected: &[u32]| {
        let types = Value::Integers(vec![3; tokens.len()]);
        let changes = vec![("tokens", strings(tokens)), ("token_type", types), ("merges", strings(&[]))];
        assert_eq!(Tokenizer::from_gguf(&bpe(changes)).unwrap().stop_token_ids(&[]), expected);
    };
    check(&["<|end|>", "<|return|>", "<|call|>"], &[1, 2]);
    check(&["<|end|>", "<|call|>"], &[0, 1]);
}

#[test]
fn words_of_bert() {
    let tokenizer = Tokenizer::from_gguf(&metadata(vec![
        ("model", Value::String("bert".into())),
        ("tokens", strings(&["[UNK]", "[CLS]", "▁play", "ing", "▁!", "▁ing"])),
        ("token_type", Value::Integers(vec![3, 3, 1, 1, 1, 1])),
        ("unknown_token_id", Value::Unsigned(0)),
        ("cls_token_id", Value::Unsigned(1)),
    ]))
    .unwrap();
    let ids = tokenizer.encode_prompt("Playing ing! [CLS] x", true).unwrap();
    assert_eq!(ids, [1, 2, 3, 5, 4, 1, 0]);
    assert_eq!(tokenizer.decode(&ids[1..5], false), "playing ing !");
}

#[test]
fn blanks_are_marked_where_the_vocabulary_has_no_bytes() {
    let tokenizer = Tokenizer::from_gguf(&metadata(vec![
        ("model", Value::String("gemma4".into())),
        ("tokens", strings(&["<bos>", "a", "▁", "▁a", "<0xC3>", "<0xA9>", "\n", "\n\n"])),
        ("token_type", Value::Integers(vec![3, 1, 1, 1, 6, 6, 1, 1])),
        ("merges", strings(&["▁ a", "\n \n"])),
        ("bos_token_id", Value::Unsigned(0)),
        ("add_bos_token", Value::Bool(false)),
    ]))
    .unwrap();
    let ids = tokenizer.encode_prompt("a aé\n\n", tokenizer.add_bos()).unwrap();
    assert_eq!(ids, [0, 1, 3, 4, 5, 7]);
    assert_eq!(tokenizer.decode(&ids[1..], false), "a aé\n\n");
    assert!(tokenizer.notices()[0].contains("add_bos_token is false"), "{:?}", tokenizer.notices());
}

fn value() -> impl Strategy<Value = Value> {
    let word = prop::sample::select(vec![
        "a",
        "b",
        "ab",
        "a b",
        " ",
        "",
        "▁",
        "<0x41>",
        "<s>",
        "gpt2",
        "llama",
        "qwen2",
        "gemma4",
        "bert",
        "whitespace",
        "superbpe",
    ]);
    prop_oneof![
        any::<u64>().prop_map(Value::Unsigned),
        (0u64..6).prop_map(Value::Unsigned),
        any::<bool>().prop_map(Value::Bool),
        word.clone().prop_map(|word| Value::String(word.into())),
        prop::collection::vec(word.prop_map(String::from), 0..6).prop_map(Value::Strings),
        prop::collection::vec(-1i64..8, 0..6).prop_map(Value::Integers),
        prop::collection::vec(any::<f32>(), 0..6).prop_map(Value::Floats),
    ]
}

proptest! {
    #[test]
    fn damaged_metadata_never_panics(
        changes in prop::collection::vec(
            (prop::sample::select(vec![
                "model", "pre", "tokens", "merges", "scores", "token_type", "bos_token_id", "eos_token_id",
                "unknown_token_id", "cls_token_id", "add_bos_token", "add_space_prefix", "template",
            ]), value()),
            0..4,
        ),
        is_spm in any::<bool>(),
        text in any::<String>(),
    ) {
        let metadata = if is_spm { spm(changes) } else { bpe(changes) };
        if let Ok(tokenizer) = Tokenizer::from_gguf(&metadata)
            && let Ok(ids) = tokenizer.encode_prompt(&text, true)
        {
            prop_assert!(ids.iter().all(|id| (*id as usize) < tokenizer.vocab_size()));
        }
    }
}
