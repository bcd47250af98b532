//! The engine's promises on the emulated GPU: a request gives the same tokens however it is scheduled.

use std::path::Path;
use std::sync::Arc;

use tinyvllm::engine::{Event, Request};
use tinyvllm::grammar::GrammarSpec;
use tinyvllm::hub::{ModelFiles, ResolvedModel};
use tinyvllm::llm::{Llm, LlmOptions, NoProgress};
use tinyvllm::ops::gpu::LIBRARIES;
use tinyvllm::runner::EngineLimits;
use tinyvllm::sampling::SamplingParams;

use crate::emulator::{Emulator, Timing, Variant};

const NUM_TOKENS: usize = 7;

fn load(change: impl FnOnce(&mut EngineLimits)) -> Option<Llm> {
    let gpu = Emulator::new(Variant::Fast)?.with_timing(Timing::Late);
    Some(load_on(&Arc::new(gpu), change))
}

fn load_on(gpu: &Arc<Emulator>, change: impl FnOnce(&mut EngineLimits)) -> Llm {
    let model = ResolvedModel {
        display_name: "demo".to_owned(),
        files: ModelFiles::Demo,
        revision: None,
        notice: None,
    };
    let mut options = LlmOptions { gpu: Some(gpu.clone()), ..LlmOptions::default() };
    options.limits.max_model_len = Some(512);
    options.limits.kv_cache_memory_bytes = Some(4 << 20);
    change(&mut options.limits);
    Llm::load(&model, &options, &NoProgress).unwrap()
}

/// Prompts with a common beginning and different ways to sample.
fn requests(llm: &Llm) -> Vec<Request> {
    let story = "Once upon a time, in a small village by the sea, there lived a little girl who loved to \
                 look at the ships.";
    let greedy =
        SamplingParams { max_tokens: Some(NUM_TOKENS), ignore_eos: true, ..SamplingParams::greedy() };
    let seeded = SamplingParams { temperature: 0.9, top_p: 0.9, seed: Some(7), ..greedy.clone() };
    let filtered = SamplingParams { top_k: 20, repetition_penalty: 1.2, ..seeded.clone() };
    let forked = SamplingParams { n: 2, logprobs: Some(1), ..seeded.clone() };
    let request = |prompt: &str, params| Request::new(llm.encode_raw(prompt).unwrap(), params);
    // Long enough for all tokens.
    let digits = llm.compile_grammar(&GrammarSpec::Regex("[0-9 ]{80}".to_owned())).unwrap();
    vec![
        request(story, greedy.clone()),
        request(&format!("{story} One morning,"), seeded.clone()),
        request("The", filtered),
        request(&format!("{story} At night,"), forked),
        // What the device cannot do, beside what it can.
        Request { constraint: Some(digits), ..request(&format!("{story} She counted:"), seeded) },
        Request { prompt_logprobs: Some(1), ..request("A paged cache is a way to", greedy) },
    ]
}

fn tokens(llm: &Llm, requests: Vec<Request>) -> Vec<Vec<Vec<u32>>> {
    let streams: Vec<_> = requests
        .into_iter()
        .map(|request| (request.params.n, llm.engine().submit(request).unwrap()))
        .collect();
    let collect = |(n, stream): (usize, _)| {
        let mut tokens = vec![Vec::new(); n];
        for event in stream {
            match event {
                Event::Token { index, token_id, .. } => tokens[index].push(token_id),
                Event::Finished { error, .. } => assert_eq!(error, None),
                Event::PromptLogits { .. } | Event::PromptLogprobs { .. } => {}
            }
        }
        tokens
    };
    streams.into_iter().map(collect).collect()
}

#[test]
fn same_tokens_however_they_are_scheduled() {
    let Some(llm) = load(|limits| limits.enable_prefix_caching = false) else { return };
    let alone: Vec<_> = requests(&llm).into_iter().flat_map(|request| tokens(&llm, vec![request])).collect();
    assert!(alone.iter().flatten().all(|tokens| tokens.len() == NUM_TOKENS));
    let check = |what: &str, change: &dyn Fn(&mut EngineLimits)| {
        let llm = load(change).unwrap();
        assert_eq!(tokens(&llm, requests(&llm)), alone, "{what}");
        llm
    };
    let llm = check("a batch", &|_| ());
    assert_eq!(tokens(&llm, requests(&llm)), alone, "prefixes from the cache");
    check("chunked prompts", &|limits| (limits.max_num_seqs, limits.max_num_batched_tokens) = (7, 7));
    check("multi-step", &|limits| limits.num_scheduler_steps = 3);
    check("small blocks", &|limits| limits.block_size = 8);
}

/// The last block of a prompt of 29 tokens is copied for all but one of the sequences that go on from it.
#[test]
fn each_fork_of_a_prompt_goes_on_as_if_alone() {
    let rows = LIBRARIES.into_iter().find(|library| library.name == "rows").unwrap();
    let (right, wrong) = ("pool[ulong(a.source)", "pool[ulong(a.target)");
    assert_eq!(rows.text().matches(right).count(), 1);
    for text in [rows.text(), rows.text().replace(right, wrong)] {
        let Some(gpu) = Emulator::new(Variant::Fast) else { return };
        let is_right = text == rows.text();
        let gpu = Arc::new(gpu.with_text(rows, text));
        let llm = load_on(&gpu, |limits| limits.enable_prefix_caching = false);
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
    let Some(llm) = load(|limits| limits.num_scheduler_steps = 4) else { return };
    let goldens: Vec<serde_json::Value> =
        serde_json::from_str(include_str!("../fixtures/demo/greedy.json")).unwrap();
    let ids = |value: &serde_json::Value| -> Vec<u32> {
        value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
    };
    for golden in goldens.iter().take(2) {
        let expected = ids(&golden["greedy_ids"]);
        let len = expected.len().min(24);
        let params = SamplingParams { max_tokens: Some(len), ..SamplingParams::greedy() };
        let actual = tokens(&llm, vec![Request::new(ids(&golden["prompt_ids"]), params)]);
        assert_eq!(actual, [[expected[..len].to_vec()]], "{}", golden["prompt"]);
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

/// Those of a token behind a prompt of this length, with those of embedding, logits and sampling.
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

/// A layer is six kernels, and one more where the context is cut into pieces that are merged.
#[test]
fn a_layer_of_a_token_has_at_most_seven_dispatches() {
    let Some(llm) = load(|limits| limits.enable_prefix_caching = false) else { return };
    let num_layers = llm.model_config().num_layers as u64;
    assert_eq!(dispatches(&llm, 10), 6 * num_layers + 3);
    assert_eq!(dispatches(&llm, 260), 7 * num_layers + 3);
}
