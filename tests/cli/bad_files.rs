//! Model files that are damaged, cut off, or lie about themselves: one line that says what is wrong,
//! exit status 1, never a panic and never silent nonsense.

use std::fs;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use crate::program::{fixture, tinyvllm};

/// A copy of the small model's folder that a test may damage.
struct Folder(TempDir);

impl Folder {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        for name in ["config.json", "generation_config.json", "model.safetensors"] {
            fs::copy(fixture("tiny/llama").join(name), folder.path().join(name)).unwrap();
        }
        Self(folder)
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn file(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }

    /// Replaces text in a file, once; the file keeps its length only if the texts have the same.
    fn replace(&self, name: &str, from: &str, to: &str) {
        let bytes = fs::read(self.file(name)).unwrap();
        let at = bytes.windows(from.len()).position(|window| window == from.as_bytes());
        let at = at.unwrap_or_else(|| panic!("{name} has no {from}"));
        let changed = [&bytes[..at], to.as_bytes(), &bytes[at + from.len()..]].concat();
        fs::write(self.file(name), changed).unwrap();
    }

    #[track_caller]
    fn check(&self, expected: &[&str]) {
        for command in ["generate --prompt-ids 5 --max-tokens 2", "info"] {
            tinyvllm(command).model(self.path()).run().error(1, expected);
        }
    }
}

#[test]
fn an_undamaged_copy_works() {
    let folder = Folder::new();
    tinyvllm("--prompt-ids 5 --max-tokens 2").model(folder.path()).run().success();
}

#[test]
fn folders_with_missing_files() {
    let folder = Folder::new();
    fs::remove_file(folder.file("model.safetensors")).unwrap();
    folder.check(&["safetensors"]);
    // One of the shards, without an index.
    let shard = |number: usize| format!("model-0000{number}-of-00003.safetensors");
    fs::write(folder.file(&shard(1)), "").unwrap();
    folder.check(&["2 shards are missing", &shard(2), &shard(3)]);
    let folder = Folder::new();
    fs::remove_file(folder.file("config.json")).unwrap();
    tinyvllm("info").model(folder.path()).run().error(1, &[]);
}

#[test]
fn damaged_safetensors() {
    let bytes = fs::read(fixture("tiny/llama/model.safetensors")).unwrap();
    let check = |bytes: &[u8], expected: &[&str]| {
        let folder = Folder::new();
        fs::write(folder.file("model.safetensors"), bytes).unwrap();
        folder.check(expected);
    };
    check(&[], &["model.safetensors"]);
    check(&bytes[..4], &["model.safetensors"]);
    check(&bytes[..100], &["model.safetensors"]);
    check(&bytes[..bytes.len() - 1], &["model.safetensors"]);
    let huge_header = [&(1u64 << 63).to_le_bytes(), &bytes[8..]].concat();
    check(&huge_header, &["model.safetensors"]);
    let no_json = [&bytes[..8], &vec![b'x'; bytes.len() - 8]].concat();
    check(&no_json, &["model.safetensors"]);
}

#[test]
fn tensors_that_do_not_fit_the_configuration() {
    let norm = "model.layers.1.input_layernorm.weight";
    let folder = Folder::new();
    folder.replace("model.safetensors", norm, "model.layers.1.inputXlayernorm.weight");
    folder.check_generate(&[norm]);
    let folder = Folder::new();
    folder.replace("config.json", "\"vocab_size\": 288", "\"vocab_size\": 300");
    folder.check_generate(&["[288, 64]", "[300, 64]"]);
    let folder = Folder::new();
    folder.replace("config.json", "\"intermediate_size\": 128", "\"intermediate_size\": 96");
    folder.check_generate(&["96", "128"]);
}

impl Folder {
    /// For what only shows when tensors are read.
    #[track_caller]
    fn check_generate(&self, expected: &[&str]) {
        tinyvllm("--prompt-ids 5 --max-tokens 2").model(self.path()).run().error(1, expected);
    }
}

#[test]
fn configurations_that_cannot_be() {
    let check = |from: &str, to: &str, expected: &[&str]| {
        let folder = Folder::new();
        folder.replace("config.json", from, to);
        folder.check(expected);
    };
    check("\"hidden_size\": 64,", "", &["hidden_size"]);
    check("\"hidden_size\": 64", "\"hidden_size\": 0", &["hidden_size"]);
    check("\"hidden_size\": 64", "\"hidden_size\": -64", &["hidden_size"]);
    check("\"hidden_size\": 64", "\"hidden_size\": \"64\"", &["hidden_size"]);
    check("\"num_hidden_layers\": 3", "\"num_hidden_layers\": 4000000000", &["num_hidden_layers"]);
    check("LlamaForCausalLM", "GptNeverForCausalLM", &["GptNeverForCausalLM"]);
    check("{", "[", &["config.json"]);
}

#[test]
fn end_tokens_may_be_a_list_and_generation_config_wins() {
    let folder = Folder::new();
    // The first greedy tokens after this prompt are 165, 80, 189.
    folder.replace("generation_config.json", "\"eos_token_id\": 2", "\"eos_token_id\": [2, 189]");
    let words = "--prompt-ids 168,190,169,239,181,120,50,62 --temperature 0 --max-tokens 9 --json";
    let object = tinyvllm(words).model(folder.path()).run().json().remove(0);
    assert_eq!(object["output_token_ids"], serde_json::json!([165, 80, 189]));
    assert_eq!(object["finish_reason"], "stop");
}

#[test]
fn damaged_gguf_files() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let bytes = fs::read(fixture("tiny/llama/llama.q8_0.gguf")).unwrap();
    let check = |bytes: &[u8], expected: &[&str]| {
        fs::write(&path, bytes).unwrap();
        for command in ["generate --prompt-ids 5 --max-tokens 2", "info"] {
            tinyvllm(command).model(&path).run().error(1, expected);
        }
    };
    check(&[], &["model.gguf"]);
    check(b"GGUF", &["model.gguf"]);
    check(b"GGML\x03\0\0\0", &["model.gguf"]);
    for length in [20, 100, 2_000, bytes.len() / 2, bytes.len() - 1] {
        check(&bytes[..length], &["model.gguf"]);
    }
    // Magic and version, then the counts of tensors and of metadata entries.
    let with_counts = |tensors: u64, entries: u64| {
        [&bytes[..8], &tensors.to_le_bytes(), &entries.to_le_bytes(), &bytes[24..]].concat()
    };
    check(&with_counts(u64::MAX, 1), &["model.gguf"]);
    check(&with_counts(1, u64::MAX), &["model.gguf"]);
    check(&with_counts(1 << 62, 1 << 62), &["model.gguf"]);
    let with_version = |version: u32| [&bytes[..4], &version.to_le_bytes(), &bytes[8..]].concat();
    check(&with_version(99), &["version", "99"]);
    let mut unknown = bytes.clone();
    let name = b"blk.0.ffn_up.weight";
    let at = unknown.windows(name.len()).position(|window| window == name).unwrap() + name.len();
    // Number of dimensions (4 bytes), two dimensions (8 bytes each), then the type.
    unknown[at + 20..at + 24].copy_from_slice(&250u32.to_le_bytes());
    check(&unknown, &["blk.0.ffn_up.weight", "250"]);
    let mut overflowing = bytes;
    overflowing[at + 4..at + 12].copy_from_slice(&(u64::MAX / 32 * 32).to_le_bytes());
    check(&overflowing, &["blk.0.ffn_up.weight"]);
}

#[test]
fn damaged_tokenizers() {
    let folder = Folder::new();
    for text in ["{}", "not json"] {
        fs::write(folder.file("tokenizer.json"), text).unwrap();
        check_text_is_refused(folder.path(), &["tokenizer.json", "--prompt-ids"]);
    }
}

/// A tokenizer that cannot be used is no obstacle to prompts in token ids.
#[track_caller]
fn check_text_is_refused(model: &Path, expected: &[&str]) {
    let ids = tinyvllm("generate --prompt-ids 5 --max-tokens 2 --ignore-eos").model(model).run();
    assert!(ids.stderr.contains("note: the tokenizer cannot be used"), "{}", ids.stderr);
    ids.success();
    let info = tinyvllm("info").model(model).run().success();
    assert!(info.contains("cannot be used; give prompts with --prompt-ids"), "{info}");
    for command in ["generate --prompt hello --max-tokens 2", "generate --raw --prompt hello", "chat"] {
        tinyvllm(command).model(model).run().error(1, expected);
    }
}

/// A copy of a GGUF file with other bytes instead of the first ones like these.
fn patched(folder: &Path, from: &[u8], to: &[u8]) -> PathBuf {
    let mut bytes = fs::read(fixture("tiny/llama/llama.q8_0.gguf")).unwrap();
    let at = bytes.windows(from.len()).position(|window| window == from).unwrap();
    bytes[at..at + to.len()].copy_from_slice(to);
    let path = folder.join("patched.gguf");
    fs::write(&path, bytes).unwrap();
    path
}

#[test]
fn unknown_tokenizers_of_gguf_files() {
    let folder = tempfile::tempdir().unwrap();
    let model = patched(folder.path(), b"llama-bpe", b"llama-bpx");
    check_text_is_refused(&model, &["\"llama-bpx\"", "--pre-tokenizer", "smollm", "--prompt-ids"]);
    let generate = "generate --raw --prompt hello --max-tokens 2 --ignore-eos --json";
    let as_chosen = tinyvllm(&format!("{generate} --pre-tokenizer llama-bpe")).model(&model).run().json();
    let as_named = tinyvllm(generate).model(fixture("tiny/llama/llama.q8_0.gguf")).run().json();
    assert_eq!(as_chosen[0]["prompt_token_ids"], as_named[0]["prompt_token_ids"]);
    let wrong = tinyvllm(&format!("{generate} --pre-tokenizer llama-bpx")).model(&model).run();
    wrong.error(1, &["\"llama-bpx\"", "smollm"]);
    let folder_model =
        tinyvllm(&format!("{generate} --pre-tokenizer llama-bpe")).model(fixture("tiny/llama")).run();
    folder_model.error(1, &["--pre-tokenizer llama-bpe is for GGUF files"]);
    check_text_is_refused(&patched(folder.path(), b"gpt2", b"rwkv"), &["\"rwkv\""]);
    // Two tokens with the same text: one wins.
    let twice = patched(folder.path(), b"[PAD286]", b"[PAD287]");
    let run = tinyvllm(generate).model(&twice).run();
    assert!(run.stderr.contains("several tokens with the same text"), "{}", run.stderr);
    assert_eq!(run.json()[0]["prompt_token_ids"], as_named[0]["prompt_token_ids"]);
}

#[test]
fn files_without_the_name_of_a_pre_tokenizer_warn() {
    let folder = tempfile::tempdir().unwrap();
    let model = patched(folder.path(), b"tokenizer.ggml.pre", b"tokenizer.ggml.prx");
    let run = tinyvllm("generate --raw --prompt hello --max-tokens 2").model(&model).run();
    assert!(run.stderr.contains("WARNING") && run.stderr.contains("--pre-tokenizer NAME"), "{}", run.stderr);
    run.success();
}

#[test]
fn keys_of_the_wrong_kind_are_named() {
    let folder = tempfile::tempdir().unwrap();
    // The type of a value follows its key: 4 is a whole number, 6 is one with a point.
    let wrong = [b"tokenizer.ggml.eos_token_id".as_slice(), &6u32.to_le_bytes()].concat();
    let model = patched(folder.path(), b"tokenizer.ggml.eos_token_id", &wrong);
    for command in ["info", "generate --prompt-ids 5 --max-tokens 2"] {
        tinyvllm(command).model(&model).run().error(1, &["tokenizer.ggml.eos_token_id is", "a token id"]);
    }
}

/// Byte-level vocabularies may lack bytes.
#[test]
fn bytes_without_a_token_are_dropped_and_named() {
    let folder = tempfile::tempdir().unwrap();
    // What stands for the byte 0x07 becomes a character that stands for none.
    let model = patched(folder.path(), "ć".as_bytes(), "š".as_bytes());
    let ids = |text: &str| {
        let words = ["generate", "--raw", "--prompt", text, "--max-tokens", "1", "--json"];
        let run = tinyvllm("").args(words).model(&model).run();
        let (stderr, ids) = (run.stderr.clone(), run.json()[0]["prompt_token_ids"].clone());
        (ids, stderr.contains("no token for 0x07, which is dropped"))
    };
    assert_eq!(ids("he\u{7}llo"), (ids("he\u{7}llo").0, true));
    assert!(!ids("hello").1);
}

/// A pipe is not waited for, and a device is not read until memory is full.
#[cfg(unix)]
#[test]
fn model_files_that_have_no_end_are_refused() {
    for name in ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"] {
        for kind in ["pipe", "device"] {
            let folder = Folder::new();
            let path = folder.file(name);
            let _ = fs::remove_file(&path);
            match kind {
                "pipe" => nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap(),
                _ => std::os::unix::fs::symlink("/dev/zero", &path).unwrap(),
            }
            let outcome = tinyvllm("generate --prompt-ids 5 --max-tokens 2").model(folder.path()).run();
            let expected = match name {
                "config.json" => "has neither config.json".to_owned(),
                _ => format!("{name}: it is a {kind}, not a file"),
            };
            assert!(outcome.stderr.contains(&expected), "{name}, {kind}: {}", outcome.stderr);
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("model.gguf");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
    tinyvllm("info").model(&pipe).run().error(1, &["it is a pipe, not a file"]);
}

/// What a user names may be a pipe, and is read up to a limit.
#[cfg(unix)]
#[test]
fn texts_that_have_no_end_are_refused() {
    let zero = || fs::File::open("/dev/zero").unwrap();
    let mut command = tinyvllm("generate --model demo -n 2").into_command();
    let output = command.stdin(zero()).output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(stderr.contains("standard input has more than 16 MB"), "{stderr}");
    for flags in [
        "generate --model demo --prompt a --chat-template /dev/zero",
        "serve --model demo --port 0 --api-key-file /dev/zero",
    ] {
        let output = tinyvllm(flags).into_command().output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && stderr.contains("which is the limit"), "{flags}: {stderr}");
    }
}
