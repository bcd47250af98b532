//! Models whose experts stay in a file: the same tokens, at the first start and later ones.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use tinyvllm::ErrorKind;
use tinyvllm::engine::{Event, Request};
use tinyvllm::hub::{ModelFiles, ResolvedModel};
use tinyvllm::llm::{KernelChoice, Llm, LlmOptions, LoadProgress};
use tinyvllm::runner::ExpertWeights;
use tinyvllm::sampling::SamplingParams;
use tinyvllm::weights::Quantization;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

fn resolved(path: &Path) -> ResolvedModel {
    let path = path.to_owned();
    ResolvedModel {
        display_name: "model".to_owned(),
        files: if path.is_dir() { ModelFiles::Folder(path) } else { ModelFiles::Gguf(path) },
        revision: None,
        notice: None,
    }
}

/// Experts in a file in `folder`.
fn in_file(folder: &Path) -> LlmOptions {
    let mut options =
        LlmOptions { expert_weights_dir: Some(folder.to_owned()), threads: Some(2), ..LlmOptions::default() };
    options.limits.expert_weights = ExpertWeights::File;
    options.limits.kv_cache_memory_bytes = Some(8 << 20);
    options
}

fn in_memory() -> LlmOptions {
    let mut options = in_file(Path::new("/nowhere"));
    options.limits.expert_weights = ExpertWeights::Memory;
    options
}

/// Counts the bytes that are said to be loaded.
#[derive(Default)]
struct Counter {
    total: AtomicU64,
    done: AtomicU64,
}

impl LoadProgress for Counter {
    fn begin(&self, _stage: &str, total: u64) {
        self.total.store(total, Ordering::Relaxed);
    }
    fn advance(&self, bytes: u64) {
        self.done.fetch_add(bytes, Ordering::Relaxed);
    }
    fn end(&self) {}
}

/// Loads the model; the tokens of a greedy answer with their log-probabilities, and the bytes that loading counted.
fn run(model: &Path, options: &LlmOptions) -> (Vec<(u32, f32)>, u64) {
    let counter = Counter::default();
    let llm = Llm::load(&resolved(model), options, &counter).unwrap();
    assert_eq!(llm.expert_file().is_some(), options.limits.expert_weights == ExpertWeights::File);
    let params = SamplingParams {
        max_tokens: Some(24),
        ignore_eos: true,
        logprobs: Some(1),
        ..SamplingParams::greedy()
    };
    let mut tokens = Vec::new();
    for event in llm.engine().submit(Request::new((5..45).collect(), params)).unwrap() {
        if let Event::Token { token_id, logprobs, .. } = event {
            tokens.push((token_id, logprobs.unwrap().logprob));
        }
    }
    assert_eq!(tokens.len(), 24);
    let (done, total) = (counter.done.into_inner(), counter.total.into_inner());
    assert!(done <= total && done > total / 2, "{done} of {total}");
    (tokens, done)
}

fn files_in(folder: &Path) -> Vec<PathBuf> {
    let paths = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    paths.filter(|path| path.extension().is_some_and(|ending| ending == "experts")).collect()
}

#[test]
fn tokens_are_the_same_at_every_start() {
    let folder = tempfile::tempdir().unwrap();
    for (model, quantization) in [
        ("tiny/deepseek_v2_lite", None),
        ("tiny/deepseek_v2_lite", Some(Quantization::Q8_0)),
        ("kquant/deepseek_v2_lite/deepseek_v2_lite.q4_k_mix.gguf", None),
        ("tiny/glm4_moe_lite", Some(Quantization::Q4_0)),
        ("tiny/glm4_moe_lite/glm4_moe_lite.q4_0.gguf", None),
        ("tiny/qwen3_moe", Some(Quantization::Q4K)),
        ("tiny/qwen3_moe/qwen3_moe.q8_0.gguf", None),
        ("tiny/mixtral", None),
        ("tiny/mixtral/mixtral.q8_0.gguf", None),
    ] {
        let path = fixture(model);
        let expected = run(&path, &LlmOptions { quantization, ..in_memory() });
        let options = LlmOptions { quantization, ..in_file(folder.path()) };
        assert_eq!(run(&path, &options), expected, "{model} {quantization:?}, first start");
        assert_eq!(run(&path, &options), expected, "{model} {quantization:?}, second start");
    }
    assert_eq!(files_in(folder.path()).len(), 8, "one for each model, whatever it is converted to");
}

/// A model of one file, with zeros instead of its experts.
fn without_experts(model: &Path) -> Vec<u8> {
    let mut bytes = fs::read(model).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let start = bytes.as_ptr().addr();
    let experts = file.tensors().into_iter().filter(|(name, _)| name.contains(".experts."));
    let ranges: Vec<_> = experts
        .map(|(_, tensor)| {
            let at = tensor.data().as_ptr().addr() - start;
            at..at + tensor.data().len()
        })
        .collect();
    assert!(!ranges.is_empty());
    ranges.into_iter().for_each(|range| bytes[range].fill(0));
    bytes
}

#[test]
fn the_second_start_reads_no_experts_and_a_changed_model_is_noticed() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model");
    fs::create_dir(&model).unwrap();
    for name in ["config.json", "model.safetensors"] {
        fs::copy(fixture("tiny/deepseek_v2_lite").join(name), model.join(name)).unwrap();
    }
    let options = in_file(folder.path());
    let expected = run(&model, &options).0;

    let written = || fs::metadata(&files_in(folder.path())[0]).unwrap().modified().unwrap();
    let first = written();
    assert_eq!(run(&model, &options).0, expected);
    assert_eq!(written(), first);

    // Another model of the same name, size and time.
    let weights = model.join("model.safetensors");
    let modified = fs::metadata(&weights).unwrap().modified().unwrap();
    fs::write(&weights, without_experts(&weights)).unwrap();
    fs::File::options().write(true).open(&weights).unwrap().set_modified(modified).unwrap();
    let zeros = run(&model, &in_memory()).0;
    assert_ne!(zeros, expected);
    assert_eq!(run(&model, &options).0, zeros);
    assert!(written() > first);
    assert_eq!(files_in(folder.path()).len(), 1);

    // What was cut off is made again.
    let file = &files_in(folder.path())[0];
    let len = fs::metadata(file).unwrap().len();
    fs::File::options().write(true).open(file).unwrap().set_len(len - 1).unwrap();
    assert_eq!(run(&model, &options).0, zeros);
    assert_eq!(fs::metadata(file).unwrap().len(), len);
}

/// Weights that still are numbers, so that only their checksum shows the damage.
#[test]
fn a_damaged_file_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let model = fixture("tiny/mixtral/mixtral.q8_0.gguf");
    let options = in_file(folder.path());
    let expected = run(&model, &options).0;
    let file = &files_in(folder.path())[0];
    let mut bytes = fs::read(file).unwrap();
    // The first byte of each page, up to the checksums.
    let end = bytes.len() / 2;
    bytes[16 << 10..end].iter_mut().step_by(16 << 10).for_each(|byte| *byte ^= 1);
    fs::write(file, bytes).unwrap();
    let llm = Llm::load(&resolved(&model), &options, &Counter::default()).unwrap();
    let params = SamplingParams { max_tokens: Some(2), ..SamplingParams::greedy() };
    let events = llm.engine().submit(Request::new((5..45).collect(), params)).unwrap();
    let errors: Vec<String> = events
        .filter_map(|event| match event {
            Event::Finished { error, .. } => error,
            _ => None,
        })
        .collect();
    let [error] = &errors[..] else { panic!("{errors:?}") };
    assert!(error.contains("are damaged") && error.contains(file.to_str().unwrap()), "{error}");
    assert!(error.contains("delete the file"), "{error}");
    drop(llm);
    // What the error says helps.
    fs::remove_file(file).unwrap();
    assert_eq!(run(&model, &options).0, expected);
}

#[test]
fn what_cannot_stay_in_a_file_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let check = |model: &str, options: &LlmOptions, words: &[&str]| {
        let error = Llm::load(&resolved(&fixture(model)), options, &Counter::default()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidRequest);
        let text = format!("{error} {}", error.hint().unwrap());
        words.iter().for_each(|word| assert!(text.contains(word), "{text}: {word}"));
    };
    let options = in_file(folder.path());
    check("tiny/llama", &options, &["--expert-weights file", "models with experts"]);
    let reference = LlmOptions { kernels: KernelChoice::Reference, threads: None, ..options };
    check("tiny/mixtral", &reference, &["--expert-weights file", "--kernels reference", "--device cpu"]);
    assert_eq!(files_in(folder.path()).len(), 0);
}
