//! Against ids of the reference implementations, for every fixture.

mod library;
mod vectors;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, LazyLock, Mutex};

use serde_json::Value as Json;

use super::*;
use crate::weights::gguf::GgufFile;

pub(crate) const FIXTURES: [&str; 8] =
    ["llama-bpe", "glm4", "qwen2", "deepseek-llm", "deepseek-v3", "youtu", "tekken", "spm"];

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tok").join(name)
}

/// The tokenizer of a fixture, read once.
pub(crate) fn tokenizer(name: &str) -> Arc<Tokenizer> {
    static READ: LazyLock<Mutex<HashMap<String, Arc<Tokenizer>>>> = LazyLock::new(Mutex::default);
    let mut read = READ.lock().unwrap();
    let entry = read.entry(name.to_owned()).or_insert_with(|| {
        let file = GgufFile::open(&fixture(&format!("tok-{name}.gguf"))).unwrap();
        Arc::new(Tokenizer::from_gguf(file.metadata()).unwrap())
    });
    Arc::clone(entry)
}

fn expected() -> Json {
    serde_json::from_slice(&std::fs::read(fixture("expected.json")).unwrap()).unwrap()
}

fn texts(expected: &Json) -> Vec<&str> {
    expected["texts"].as_array().unwrap().iter().map(|text| text.as_str().unwrap()).collect()
}

fn ids(list: &Json) -> Vec<u32> {
    serde_json::from_value(list.clone()).unwrap()
}

#[test]
fn ids_equal_the_reference() {
    let expected = expected();
    for name in FIXTURES {
        let tokenizer = tokenizer(name);
        // The SentencePiece ids come from an encoder that does not look for special tokens.
        let special = if name == "spm" { SpecialTokens::AsText } else { SpecialTokens::Parse };
        for (index, text) in texts(&expected).into_iter().enumerate() {
            let found = tokenizer.encode(text, special).unwrap();
            assert_eq!(found, ids(&expected[name][index]), "{name}: {text:?}");
            assert_eq!(tokenizer.decode(&found, false), text, "{name}");
        }
    }
    let last = texts(&expected).len() - 6;
    for (text, list) in texts(&expected)[last..].iter().zip(expected["spm_bos"].as_array().unwrap()) {
        assert_eq!(tokenizer("spm").encode_prompt(text, true).unwrap(), ids(list), "{text:?}");
    }
}

#[test]
fn text_that_spells_special_tokens_stays_text() {
    for name in FIXTURES {
        let tokenizer = tokenizer(name);
        let bos = tokenizer.bos_token_id().unwrap();
        let text = format!("a{}b", tokenizer.token_text(bos));
        assert!(tokenizer.encode(&text, SpecialTokens::Parse).unwrap().contains(&bos), "{name}");
        let plain = tokenizer.encode(&text, SpecialTokens::AsText).unwrap();
        assert!(!plain.iter().any(|id| tokenizer.is_special(*id)), "{name}");
        assert_eq!(tokenizer.decode(&plain, true), text, "{name}");
    }
}

#[test]
fn a_megabyte_of_one_character_takes_no_unreasonable_time() {
    for name in ["llama-bpe", "deepseek-llm", "spm"] {
        let tokenizer = tokenizer(name);
        for unit in ["a", " ", "\n", "\0", "🦙", "<|", "1"] {
            let text = unit.repeat((1 << 20) / unit.len());
            let ids = tokenizer.encode(&text, SpecialTokens::Parse).unwrap();
            assert_eq!(tokenizer.decode(&ids, false), text, "{name} {unit:?}");
        }
    }
}

#[test]
fn bos_is_added_once() {
    let tokenizer = tokenizer("qwen2");
    let bos = tokenizer.bos_token_id().unwrap();
    let ids = tokenizer.encode_prompt("hi", tokenizer.add_bos()).unwrap();
    assert_eq!(ids.iter().filter(|id| **id == bos).count(), 1);
    let spelled = format!("{}hi", tokenizer.token_text(bos));
    assert_eq!(tokenizer.encode_prompt(&spelled, true).unwrap(), ids);
    assert_eq!(tokenizer.encode_prompt("hi", false).unwrap(), ids[1..]);
}

#[test]
fn lookups_agree() {
    for name in FIXTURES {
        let tokenizer = tokenizer(name);
        let eos = tokenizer.eos_token_ids()[0];
        assert_eq!(tokenizer.token_id(&tokenizer.token_text(eos)), Some(eos), "{name}");
        assert!(tokenizer.is_special(eos) && tokenizer.stop_token_ids(&[]).contains(&eos));
        let beyond = tokenizer.vocab_size() as u32;
        assert_eq!(tokenizer.token_bytes(beyond), b"");
        assert_eq!(tokenizer.decode(&[beyond, u32::MAX], false), "");
        assert_eq!(tokenizer.token_id("no such token"), None);
    }
}
