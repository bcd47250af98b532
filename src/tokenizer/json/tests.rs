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
fn only_the_first_piece_gets_a_space_when_the_file_says_so() {
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
    check(&|file| file["model"]["type"] = json!("Unigram"), "\"Unigram\"");
    check(&|file| file["model"]["vocab"] = json!({}), "missing or empty");
    check(&|file| file["model"]["vocab"]["a"] = json!(-1), "id of token \"a\" is -1");
    check(&|file| file["model"]["vocab"]["a"] = json!(1), "same id 1");
    check(&|file| file["model"]["vocab"]["a"] = json!(u32::MAX), "too large");
    check(&|file| file["model"]["merges"] = json!(["a"]), "merge 0 is \"a\"");
    check(&|file| file["model"]["merges"] = json!([["Ã©", "Ã©"]]), "merge 0");
    check(&|file| file["model"]["unk_token"] = json!("<none>"), "<none>");
    check(&|file| file["model"]["continuing_subword_prefix"] = json!("##"), "continuing_subword_prefix");
    check(&|file| file["decoder"] = Value::Null, "no decoder");
    check(&|file| file["decoder"]["type"] = json!("CTC"), "CTC");
    check(&|file| file["pre_tokenizer"] = json!({"type": "New"}), "pre_tokenizer");
    check(&|file| file["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = json!("("), "not valid");
    check(&|file| file["added_tokens"][0]["content"] = json!(""), "added token 6");
    assert!(Tokenizer::from_json(b"\xff").is_err());
    assert!(Tokenizer::from_file("no/such/tokenizer.json").unwrap_err().message().contains("no/such"));
}
