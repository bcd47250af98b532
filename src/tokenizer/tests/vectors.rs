//! Against the vectors next to llama.cpp's vocabularies, which its authors made with the tokenizers' own libraries.
//!
//! `TINYVLLM_LLAMA_CPP` names the folder with them (`scripts/test_data.sh` downloads it); without it this test reports
//! that it skips, unless `TINYVLLM_REQUIRE_LLAMA_CPP` forbids it.

use std::path::{Path, PathBuf};

use crate::tokenizer::{SpecialTokens, Tokenizer};
use crate::weights::gguf::GgufFile;

/// The separator of two texts.
const SEPARATOR: &str = "\n__ggml_vocab_test__\n";
const WITH_VECTORS: [&str; 15] = [
    "bert-bge",
    "command-r",
    "deepseek-coder",
    "deepseek-llm",
    "falcon",
    "gemma-4",
    "gpt-2",
    "llama-bpe",
    "llama-spm",
    "mpt",
    "phi-3",
    "qwen2",
    "qwen35",
    "refact",
    "starcoder",
];
/// The tokenizers that need options.
const WITHOUT_VECTORS: [(&str, &str); 3] = [("aquila", "WARNING"), ("gpt-neox", "WARNING"), ("baichuan", "")];

fn vocabularies() -> Option<PathBuf> {
    let folder = std::env::var_os("TINYVLLM_LLAMA_CPP").map(|folder| PathBuf::from(folder).join("models"));
    let folder = folder.filter(|folder| folder.is_dir());
    let is_required = std::env::var_os("TINYVLLM_REQUIRE_LLAMA_CPP").is_some_and(|value| value == "1");
    assert!(folder.is_some() || !is_required, "TINYVLLM_LLAMA_CPP names no folder with models");
    if folder.is_none() {
        eprintln!("skipped: TINYVLLM_LLAMA_CPP names no folder with vocabularies");
    }
    folder
}

fn open(folder: &Path, name: &str) -> Tokenizer {
    let file = GgufFile::open(&folder.join(format!("ggml-vocab-{name}.gguf"))).unwrap();
    Tokenizer::from_gguf(file.metadata()).unwrap_or_else(|error| panic!("{name}: {error}"))
}

#[test]
fn ids_equal_the_vectors() {
    let Some(folder) = vocabularies() else { return };
    let mut num_texts = 0;
    for name in WITH_VECTORS {
        let tokenizer = open(&folder, name);
        let read =
            |what| std::fs::read_to_string(folder.join(format!("ggml-vocab-{name}.gguf.{what}"))).unwrap();
        let (texts, ids) = (read("inp"), read("out"));
        let texts: Vec<&str> = texts.strip_suffix(SEPARATOR).unwrap_or(&texts).split(SEPARATOR).collect();
        assert_eq!(ids.lines().count(), texts.len(), "{name}");
        for (text, ids) in texts.into_iter().zip(ids.lines()) {
            let expected: Vec<u32> = ids.split_whitespace().map(|id| id.parse().unwrap()).collect();
            let found = tokenizer.encode(text, SpecialTokens::Parse).unwrap();
            assert_eq!(found, expected, "{name}: {text:?}");
            // BERT's words are in another case, and the text between them is lost.
            assert!(name == "bert-bge" || tokenizer.decode(&found, false) == text, "{name}: {text:?}");
            num_texts += 1;
        }
    }
    assert!(num_texts >= 15 * 46, "{num_texts}");
}

#[test]
fn vocabularies_without_vectors_are_read() {
    let Some(folder) = vocabularies() else { return };
    for (name, notice) in WITHOUT_VECTORS {
        let tokenizer = open(&folder, name);
        assert!(tokenizer.notices().concat().contains(notice), "{name}: {:?}", tokenizer.notices());
        let text = "Hello, wörld! 12345\n\n  日本語";
        let ids = tokenizer.encode(text, SpecialTokens::AsText).unwrap();
        assert_eq!(tokenizer.decode(&ids, false), text, "{name}");
    }
}
