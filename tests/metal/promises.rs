//! The engine's promises on the emulated GPU: a request gives the same tokens however it is scheduled.

use std::path::Path;
use std::sync::Arc;

use tinyvllm::engine::Request;
use tinyvllm::hub::{ModelFiles, ResolvedModel};
use tinyvllm::llm::{Llm, LlmOptions, NoProgress};
use tinyvllm::ops::gpu::{ChipClass, Gpu, LIBRARIES};
use tinyvllm::ops::{KvCache, KvCacheDType};
use tinyvllm::runner::EngineLimits;
use tinyvllm::sampling::SamplingParams;

use crate::emulator::{Emulator, Timing, Variant};
use crate::schedules::{self, NUM_TOKENS, load_on, tokens};

fn gpu() -> Option<Arc<dyn Gpu>> {
    Some(Arc::new(Emulator::new(Variant::Fast)?.with_timing(Timing::Late)))
}

fn load(change: impl FnOnce(&mut EngineLimits)) -> Option<Llm> {
    Some(load_on(gpu()?, change))
}

#[test]
fn same_tokens_however_they_are_scheduled() {
    if let Some(gpu) = gpu() {
        schedules::same_tokens_however_they_are_scheduled(&gpu);
    }
}

/// With matmuls on tensor cores, as on an NVIDIA GPU.
#[test]
fn same_tokens_on_tensor_cores() {
    if let Some(gpu) = Emulator::new(Variant::Fast) {
        let gpu: Arc<dyn Gpu> = Arc::new(gpu.with_timing(Timing::Late).with_class(ChipClass::Nvidia));
        schedules::same_tokens_however_they_are_scheduled(&gpu);
    }
}

/// Layers with a window read other blocks than the others.
#[test]
fn same_tokens_with_few_blocks_in_windows() {
    for fixture in ["gemma3", "gpt_oss"] {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny").join(fixture);
        let load = |kv_cache_memory_bytes: u64| {
            let files = ModelFiles::Folder(folder.clone());
            let model =
                ResolvedModel { display_name: fixture.to_owned(), files, revision: None, notice: None };
            let mut options = LlmOptions { gpu: Some(gpu()?), ..LlmOptions::default() };
            options.limits.max_model_len = Some(320);
            options.limits.block_size = 16;
            options.limits.max_num_batched_tokens = Some(64);
            options.limits.kv_cache_memory_bytes = Some(kv_cache_memory_bytes);
            Some(Llm::load(&model, &options, &NoProgress).unwrap())
        };
        let Some(whole) = load(16 << 20) else { return };
        let params = SamplingParams {
            max_tokens: Some(NUM_TOKENS),
            ignore_eos: true,
            n: 2,
            ..SamplingParams::greedy()
        };
        let requests = || {
            let prompt = |len: u32| (0..len).map(|at| (at * at * 7 + at * 13 + 5) % 240 + 3).collect();
            [250, 70, 180].map(|len| Request::new(prompt(len), params.clone())).into()
        };
        let expected = tokens(&whole, requests());
        let bytes_per_token = KvCache::bytes_per_token(whole.model_config(), 16, KvCacheDType::F16) as u64;
        let llm = load(340 * bytes_per_token).unwrap();
        let config = llm.engine().config();
        assert!(whole.engine().config().windows.is_none() && config.windows.is_some(), "{config:?}");
        for _ in 0..2 {
            assert_eq!(tokens(&llm, requests()), expected, "{fixture}");
        }
    }
}

/// The last block of a prompt of 29 tokens is copied for all but one of the sequences that continue it.
#[test]
fn each_fork_of_a_prompt_goes_on_as_if_alone() {
    let rows = LIBRARIES.into_iter().find(|library| library.name == "rows").unwrap();
    let (right, wrong) = ("pool[ulong(a.source)", "pool[ulong(a.target)");
    assert_eq!(rows.text().matches(right).count(), 1);
    for text in [rows.text(), rows.text().replace(right, wrong)] {
        let Some(gpu) = Emulator::new(Variant::Fast) else { return };
        let is_right = text == rows.text();
        let gpu = Arc::new(gpu.with_text(rows, text));
        let llm = load_on(gpu.clone(), |limits| limits.enable_prefix_caching = false);
        let prompt: Vec<u32> = (0..29).map(|index| 300 + index * 7 % 100).collect();
        let params =
            SamplingParams { max_tokens: Some(NUM_TOKENS), ignore_eos: true, ..SamplingParams::greedy() };
        let run = |n: usize| {
            tokens(&llm, vec![Request::new(prompt.clone(), SamplingParams { n, ..params.clone() })])
        };
        let alone = run(1);
        let num_copies = || gpu.num_dispatches().get("copy_block").copied().unwrap_or(0);
        assert_eq!(num_copies(), 0);
        assert_eq!(run(3)[0].iter().all(|tokens| *tokens == alone[0][0]), is_right);
        assert!(num_copies() > 0);
    }
}

#[test]
fn the_tokens_of_the_training_script() {
    if let Some(gpu) = gpu() {
        schedules::the_tokens_of_the_training_script(gpu);
    }
}

/// With latent attention and experts, of which one is every token's, a layer is ten kernels, eleven with queries of low
/// rank, and one more where the context is cut. Without experts it is seven and two.
#[test]
fn a_layer_with_experts_has_at_most_thirteen_dispatches() {
    let fixture = |name: &str| {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny").join(name);
        let files = ModelFiles::Folder(folder);
        let model = ResolvedModel { display_name: name.to_owned(), files, revision: None, notice: None };
        let gpu = Arc::new(Emulator::new(Variant::Fast)?.with_timing(Timing::Late));
        let mut options = LlmOptions { gpu: Some(gpu), ..LlmOptions::default() };
        options.limits.max_model_len = Some(512);
        options.limits.kv_cache_memory_bytes = Some(4 << 20);
        options.limits.enable_prefix_caching = false;
        Some(Llm::load(&model, &options, &NoProgress).unwrap())
    };
    let ends = 3;
    let cases = [
        ("youtu", 3 * 9),
        ("deepseek_v2_lite", 8 + 2 * 11),
        ("glm4_moe_lite", 9 + 2 * 12),
        ("qwen3_moe", 3 * 9),
    ];
    for (name, expected) in cases {
        let Some(llm) = fixture(name) else { return };
        assert_eq!(dispatches(&llm, 10), expected + ends, "{name}");
        assert_eq!(dispatches(&llm, 260), expected + 3 + ends, "{name}, a long context");
    }
}

/// Those of a token after a prompt of this length, with those of embedding, logits and sampling.
fn dispatches(llm: &Llm, prompt_len: u32) -> u64 {
    let count = |max_tokens: usize| {
        let before = llm.context().num_dispatches();
        let prompt = (0..prompt_len).map(|index| 10 + index % 100).collect();
        let params =
            SamplingParams { max_tokens: Some(max_tokens), ignore_eos: true, ..SamplingParams::greedy() };
        tokens(llm, vec![Request::new(prompt, params)]);
        llm.context().num_dispatches() - before
    };
    count(3) - count(2)
}

/// A layer is six kernels, and one more where the context is cut into KV splits that are merged.
#[test]
fn a_layer_of_a_token_has_at_most_seven_dispatches() {
    let Some(llm) = load(|limits| limits.enable_prefix_caching = false) else { return };
    let num_layers = llm.model_config().num_layers as u64;
    assert_eq!(dispatches(&llm, 10), 6 * num_layers + 3);
    assert_eq!(dispatches(&llm, 260), 7 * num_layers + 3);
}

/// Where attention rotates itself.
#[test]
fn a_layer_of_a_token_has_five_dispatches_on_tensor_cores() {
    let Some(gpu) = Emulator::new(Variant::Fast) else { return };
    let gpu = Arc::new(gpu.with_timing(Timing::Late).with_class(ChipClass::Nvidia));
    let llm = load_on(gpu, |limits| limits.enable_prefix_caching = false);
    let num_layers = llm.model_config().num_layers as u64;
    assert_eq!(dispatches(&llm, 10), 5 * num_layers + 3);
}
