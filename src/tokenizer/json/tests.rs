use serde_json::json;

use super::super::SpecialTokens::{AsText, Parse};
use super::*;

fn open(json: &Value) -> Result<Tokenizer> {
    Tokenizer::from_json(json.to_string().as_bytes())
}

/// A SentencePiece tokenizer as converters write it.
fn sentencepiece() -> Value {
    json!({
        "added_tokens": [
            {"id": 0, "content": "<unk>", "special": true, "normalized": false},
            {"id": 1, "content": "<s>", "special": true, "normalized": false},
        ],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ]},
        "pre_tokenizer": null,
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ]},
        "model": {
            "type": "BPE", "dropout": null, "unk_token": "<unk>", "fuse_unk": true, "byte_fallback": true,
            "vocab": {"<unk>": 0, "<s>": 1, "<0xC3>": 2, "<0xA9>": 3, "▁": 4, "a": 5, "▁a": 6, "<": 7, "s": 8, ">": 9},
            "merges": ["▁ a"],
        },
    })
}

fn byte_level() -> Value {
    json!({
        "added_tokens": [
            {"id": 6, "content": "<e>", "special": true},
            {"id": 7, "content": "ø", "special": false},
        ],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": r"\p{L}+|\s+(?!\S)|\s+"}, "behavior": "Isolated", "invert": false},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        ]},
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "vocab": {"a": 0, "Ġ": 1, "ĠĠ": 2, "Ã": 3, "©": 4, "Ã©": 5},
            "merges": [["Ġ", "Ġ"], ["Ã", "©"]]},
    })
}

#[test]
fn sentencepiece_files() {
    let tokenizer = open(&sentencepiece()).unwrap();
    assert_eq!(tokenizer.encode("a aé", Parse).unwrap(), [6, 6, 2, 3]);
    assert_eq!(tokenizer.encode("a<s>a", Parse).unwrap(), [6, 1, 6]);
    assert_eq!(tokenizer.encode("<s>", AsText).unwrap(), [4, 7, 8, 9]);
    assert_eq!(tokenizer.decode(&[6, 6, 2, 3], true), "a aé");
    assert_eq!(tokenizer.decode(&[1, 6], true), "a");
    assert_eq!(tokenizer.decode(&[1, 6], false), "<s> a");
}

#[test]
fn byte_level_files() {
    let tokenizer = open(&byte_level()).unwrap();
    assert_eq!(tokenizer.encode("a   a<e>ø", Parse).unwrap(), [0, 2, 1, 0, 6, 7]);
    // The normaliser composes e and the accent.
    assert_eq!(tokenizer.encode("e\u{301}", Parse).unwrap(), [5]);
    // "ø" would be a single byte if the added token were read as byte-level characters.
    assert_eq!(tokenizer.decode(&[5, 7, 6, 1], true), "éø ");
    assert_eq!(tokenizer.vocab_size(), 8);
    assert_eq!(tokenizer.decode(&[8, 1_000_000], true), "");
}

#[test]
fn only_the_first_piece_gets_a_space_if_the_file_requires_it() {
    let mut file = sentencepiece();
    file["normalizer"] = Value::Null;
    file["pre_tokenizer"] =
        json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": false});
    file["decoder"] =
        json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": false});
    let tokenizer = open(&file).unwrap();
    assert_eq!(tokenizer.encode("a<s>a a", Parse).unwrap(), [6, 1, 5, 6]);
    assert_eq!(tokenizer.decode(&[6, 6], true), "a a");
}

#[test]
fn normalized_added_tokens_are_found_and_protected() {
    let mut file = sentencepiece();
    file["added_tokens"][1]["normalized"] = json!(true);
    file["normalizer"] = json!({"type": "Lowercase"});
    let tokenizer = open(&file).unwrap();
    assert_eq!(tokenizer.encode("a<S>a", Parse).unwrap(), [5, 1, 5]);
    assert_eq!(tokenizer.encode("a<S>a", AsText).unwrap(), [5, 7, 8, 9, 5]);
    assert_eq!(
        tokenizer.encode_protected("<s>a<s>", std::slice::from_ref(&(4..7))).unwrap(),
        [1, 5, 7, 8, 9]
    );
}

/// Ids and text as the library has them, for files of this kind.
fn check_against_library(file: &Value, texts: &[&str]) {
    let theirs = tokenizers::Tokenizer::from_bytes(file.to_string()).unwrap();
    let ours = std::sync::Arc::new(open(file).unwrap());
    for text in texts {
        let ids = theirs.encode_fast(*text, false).unwrap().get_ids().to_vec();
        assert_eq!(ours.encode(text, Parse).unwrap(), ids, "{text:?} {file}");
        let expected = theirs.decode(&ids, false).unwrap();
        assert_eq!(ours.decode(&ids, false), expected, "{text:?} {file}");
        let mut stream = super::super::Detokenizer::new(std::sync::Arc::clone(&ours), false);
        let mut streamed: String = ids.iter().map(|id| stream.push(*id)).collect();
        streamed.push_str(&stream.finish());
        assert_eq!(streamed, expected, "{text:?} {file}");
    }
}

fn special(id: u32, content: &str) -> Value {
    json!({"id": id, "content": content, "special": true, "normalized": false, "single_word": false, "lstrip": false,
        "rstrip": false})
}

#[test]
fn wordpiece_files() {
    let file = json!({
        "version": "1.0",
        "added_tokens": [special(0, "[UNK]"), special(1, "[CLS]"), special(2, "[SEP]")],
        "normalizer": {"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true,
            "strip_accents": null, "lowercase": true},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {"type": "BertProcessing", "sep": ["[SEP]", 2], "cls": ["[CLS]", 1]},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true},
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100, "vocab": {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "play": 3, "##ing": 4, "!": 5,
            "##s": 6, "e": 7, "字": 8, "[": 9, "cls": 10, "]": 11, "'": 12, "t": 13, "n": 14}},
    });
    check_against_library(
        &file,
        &["Playing plays!", "É 字字 unknown e", "[CLS] play [SEP]", "", "play ! ' t", "n't"],
    );
    let tokenizer = open(&file).unwrap();
    assert_eq!(tokenizer.encode_prompt("play", true).unwrap(), [1, 3]);
    assert_eq!(tokenizer.encode("[CLS]", AsText).unwrap(), [9, 10, 11]);
}

#[test]
fn unigram_files() {
    let metaspace =
        json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true});
    let file = json!({
        "version": "1.0",
        "added_tokens": [special(0, "<unk>"), special(1, "</s>")],
        "normalizer": {"type": "NFKC"},
        "pre_tokenizer": metaspace,
        "post_processor": null,
        "decoder": metaspace,
        "model": {"type": "Unigram", "unk_id": 0, "byte_fallback": false, "vocab": [["<unk>", 0.0], ["</s>", 0.0],
            ["▁", -2.0], ["a", -3.0], ["b", -3.5], ["ab", -4.0], ["▁ab", -4.5], ["<", -5.0], ["/", -5.0], ["s", -5.0],
            [">", -5.0]]},
    });
    check_against_library(&file, &["ab ab", "aab b", "a</s>b", "ﬀ ab", "xyz", ""]);
    let tokenizer = open(&file).unwrap();
    assert_eq!(tokenizer.encode("</s>", AsText).unwrap(), [2, 7, 8, 9, 10]);
    let mut with_bytes = file;
    with_bytes["model"]["byte_fallback"] = json!(true);
    with_bytes["decoder"] = json!({"type": "Sequence", "decoders": [{"type": "ByteFallback"}, metaspace]});
    let vocab = with_bytes["model"]["vocab"].as_array_mut().unwrap();
    vocab.extend([json!(["<0xC3>", -9.0]), json!(["<0xA9>", -9.0])]);
    check_against_library(&with_bytes, &["abé", "é", "aéé b"]);
}

#[test]
fn words_as_they_are() {
    let file = json!({
        "version": "1.0", "added_tokens": [special(0, "<unk>")], "normalizer": {"type": "Lowercase"},
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "unk_token": "<unk>", "vocab": {"<unk>": 0, "one": 1, "two": 2, ".": 3}},
    });
    check_against_library(&file, &["One two.", "three <unk> one", ""]);
}

#[test]
fn byte_pairs_that_mark_parts_of_words() {
    let mut file = json!({
        "version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": null, "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": false},
        "model": {"type": "BPE", "dropout": null, "unk_token": "?", "continuing_subword_prefix": "##",
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": {"?": 0, "a": 1, "##a": 2, "##b": 3, "a##b": 4, "ab": 5, "##bb": 6}, "merges": ["a ##b", "##b \
             ##b"]},
    });
    file["model"]["vocab"]["a##b"] = Value::Null;
    file["model"]["vocab"].as_object_mut().unwrap().remove("a##b");
    check_against_library(&file, &["ab aab", "abb", "b a"]);
    file["model"]["continuing_subword_prefix"] = Value::Null;
    file["model"]["end_of_word_suffix"] = json!("</w>");
    file["model"]["vocab"] = json!({"?": 0, "a": 1, "b": 2, "a</w>": 3, "b</w>": 4, "ab</w>": 5});
    file["model"]["merges"] = json!(["a b</w>"]);
    file["decoder"] = json!({"type": "BPEDecoder", "suffix": "</w>"});
    let tokenizer = open(&file).unwrap();
    assert_eq!(tokenizer.encode("ab a", Parse).unwrap(), [5, 3]);
    // The last word is unknown here, so the blank after it stays.
    assert_eq!(tokenizer.decode(&[5, 3], false), "ab a ");
}

#[test]
fn decoders_that_work_token_by_token() {
    let mut file = sentencepiece();
    file["version"] = json!("1.0");
    for token in file["added_tokens"].as_array_mut().unwrap() {
        for name in ["single_word", "lstrip", "rstrip"] {
            token[name] = json!(false);
        }
    }
    for decoders in [
        json!([{"type": "Replace", "pattern": {"Regex": "▁+"}, "content": " "}, {"type": "Fuse"}]),
        json!([{"type": "Strip", "content": "▁", "start": 1, "stop": 0}]),
        json!([{"type": "Strip", "content": "a", "start": 1, "stop": 1}, {"type": "ByteFallback"}]),
    ] {
        file["decoder"] = json!({"type": "Sequence", "decoders": decoders});
        check_against_library(&file, &["a a", "a<s>a"]);
    }
    for decoders in [
        json!([{"type": "Fuse"}, {"type": "Strip", "content": "a", "start": 1, "stop": 0}]),
        json!([{"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 0, "stop": 1}]),
        json!([{"type": "CTC", "pad_token": "a", "word_delimiter_token": "|", "cleanup": true}]),
    ] {
        file["decoder"] = json!({"type": "Sequence", "decoders": decoders});
        assert!(open(&file).unwrap_err().message().contains("decoder step"), "{}", file["decoder"]);
    }
}

#[test]
fn damaged_and_foreign_files_are_errors() {
    let check = |change: &dyn Fn(&mut Value), expected: &str| {
        let mut file = byte_level();
        change(&mut file);
        let error = open(&file).unwrap_err();
        assert!(error.message().contains(expected), "{error:?} should contain {expected:?}");
    };
    check(&|file| *file = json!([]), "not a valid tokenizer.json");
    check(&|file| file["model"] = Value::Null, "not a valid tokenizer.json");
    check(&|file| file["model"]["type"] = json!("New"), "\"New\"");
    check(&|file| file["model"]["type"] = json!("Unigram"), "a list of tokens and scores");
    check(&|file| file["model"] = json!({"type": "Unigram", "vocab": [["a", "x"]]}), "entry 0 is");
    check(&|file| file["model"] = json!({"type": "Unigram", "vocab": [["a", 0]], "unk_id": 7}), "Unigram");
    check(&|file| file["model"]["type"] = json!("WordPiece"), "\"[UNK]\" is not in the vocabulary");
    check(&|file| file["model"]["type"] = json!("WordLevel"), "\"<unk>\" is not in the vocabulary");
    check(&|file| file["model"]["vocab"] = json!({}), "missing or empty");
    check(&|file| file["model"]["vocab"]["a"] = json!(-1), "id of token \"a\" is -1");
    check(&|file| file["model"]["vocab"]["a"] = json!(1), "same id 1");
    check(&|file| file["model"]["vocab"]["a"] = json!(u32::MAX), "too large");
    check(&|file| file["model"]["merges"] = json!(["a"]), "merge 0 is \"a\"");
    check(&|file| file["model"]["merges"] = json!([["Ã©", "Ã©"]]), "merge 0");
    check(&|file| file["model"]["unk_token"] = json!("<none>"), "<none>");
    check(&|file| file["model"]["continuing_subword_prefix"] = json!("##"), "has no \"##\" before");
    check(&|file| file["normalizer"] = json!({"type": "New"}), "normalizer");
    check(&|file| file["decoder"]["type"] = json!("CTC"), "CTC");
    check(&|file| file["pre_tokenizer"] = json!({"type": "New"}), "pre_tokenizer");
    check(&|file| file["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = json!("("), "not valid");
    check(&|file| file["added_tokens"][0]["content"] = json!(""), "added token 6");
    assert!(Tokenizer::from_json(b"\xff").is_err());
    assert!(Tokenizer::from_file("no/such/tokenizer.json").unwrap_err().message().contains("no/such"));
}

/// Multiplies by ten, this many times.
fn tenfold(count: usize) -> Vec<Value> {
    vec![json!({"type": "Replace", "pattern": {"String": "a"}, "content": "aaaaaaaaaa"}); count]
}

#[test]
fn what_the_steps_of_a_file_make_is_bounded() {
    let check = |part: &str, value: Value, expected: &str| {
        let mut file = if part == "pre_tokenizer" { byte_level() } else { sentencepiece() };
        file[part] = value;
        let outcome = open(&file).and_then(|tokenizer| tokenizer.encode(&"aé".repeat(40_000), Parse));
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains(expected) && error.len() < 1_000, "{part}: {error}");
    };
    let most = "more than 16 times as much";
    check("normalizer", json!({"type": "Sequence", "normalizers": tenfold(12)}), most);
    check("normalizer", json!({"type": "Sequence", "normalizers": tenfold(65)}), "65 steps");
    // Each step writes two characters for one that is not ASCII.
    let bytes =
        json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": false});
    let sequence = |steps: Vec<Value>| json!({"type": "Sequence", "pretokenizers": steps});
    check("pre_tokenizer", sequence(vec![bytes.clone(); 40]), most);
    check("pre_tokenizer", sequence(vec![bytes; 65]), "65 steps");
    check("pre_tokenizer", json!({"type": "FixedLength", "length": 0}), "length 0");
    let slow = json!({"type": "Split", "pattern": {"Regex": "(?:(?:(?!c)a?){13}b|)a|aé"}, "behavior": "Removed", "invert": false});
    let mut file = byte_level();
    file["pre_tokenizer"] = slow;
    let tokenizer = open(&file).unwrap();
    assert!(tokenizer.encode(&"a".repeat(20_000), Parse).unwrap_err().message().contains("needs more time"));
    // Decoders write the vocabulary when the file is read.
    check("decoder", json!({"type": "Sequence", "decoders": tenfold(12)}), most);
    check("decoder", json!({"type": "Sequence", "decoders": tenfold(65)}), "65 steps");
    let template = |count: usize, listed: usize| {
        json!({"type": "TemplateProcessing", "single": vec![json!({"SpecialToken": {"id": "<s>", "type_id": 0}}); count],
            "special_tokens": {"<s>": {"id": "<s>", "ids": vec![1; listed], "tokens": ["<s>"]}}})
    };
    check("post_processor", template(100, 1), "65 tokens before every text");
    check("post_processor", template(1, 100), "100 tokens before every text");
    check("post_processor", json!({"type": "Sequence", "processors": vec![template(1, 1); 65]}), "65 steps");
}

/// A prompt without the tokens before it would be another one.
#[test]
fn a_post_processor_that_cannot_be_read_is_an_error() {
    let check = |post_processor: Value, expected: &str| {
        let mut file = byte_level();
        file["post_processor"] = post_processor;
        let error = open(&file).expect_err(expected);
        assert!(error.message().contains(expected), "{error}");
    };
    let template = |single: Value, ids: Value| json!({"type": "TemplateProcessing", "single": single, "special_tokens": {"<s>": {"ids": ids}}});
    let token = json!([{"SpecialToken": {"id": "<s>"}}]);
    check(json!("template"), "type of the post-processor is null");
    check(json!({"type": "Unknown"}), "type of the post-processor is \"Unknown\"");
    check(template(json!("<s> $A"), json!([1])), "single of the post-processor is \"<s> $A\"");
    check(
        template(json!([{"SpecialToken": "<s>"}]), json!([1])),
        "an entry of single of the post-processor is {",
    );
    check(template(token.clone(), json!(1)), "ids of the post-processor is 1");
    check(template(token, json!([1, -1])), "ids of the post-processor is [1,-1]");
    check(json!({"type": "BertProcessing", "cls": "[CLS]"}), "cls of the post-processor is \"[CLS]\"");
}

#[test]
fn added_tokens_are_normalised_within_one_bound() {
    let mut file = sentencepiece();
    file["normalizer"] = json!({"type": "Sequence", "normalizers": tenfold(2)});
    let token = |id: usize, content: &str| json!({"id": id, "content": content, "special": false, "normalized": true});
    file["added_tokens"].as_array_mut().unwrap().push(token(10, "aaaa"));
    assert!(open(&file).is_ok());
    file["added_tokens"].as_array_mut().unwrap().push(token(11, "aaaaaa"));
    assert!(open(&file).unwrap_err().message().contains("600 bytes long when it is normalised"));
}

#[test]
fn the_notice_about_a_suffix_is_short() {
    let mut file = sentencepiece();
    let end = json!({"SpecialToken": {"id": "x".repeat(10_000), "type_id": 0}});
    let single: Vec<Value> =
        [json!({"Sequence": {"id": "A", "type_id": 0}})].into_iter().chain(vec![end; 1_000]).collect();
    file["post_processor"] = json!({"type": "TemplateProcessing", "single": single, "special_tokens": {}});
    let tokenizer = open(&file).unwrap();
    assert!(tokenizer.notices().iter().all(|notice| notice.len() < 2_000) && !tokenizer.notices().is_empty());
}
