//! Requests to an engine on some GPU, and guarantees about their tokens: emulated GPUs in this folder, and real ones in
//! `tests/cuda`.

use std::sync::Arc;

use tinyvllm::config::{SpeculativeConfig, SpeculativeMethod};
use tinyvllm::engine::{Event, Request};
use tinyvllm::grammar::GrammarSpec;
use tinyvllm::hub::{ModelFiles, ResolvedModel};
use tinyvllm::llm::{Llm, LlmOptions, NoProgress};
use tinyvllm::ops::KvCacheDType;
use tinyvllm::ops::gpu::Gpu;
use tinyvllm::runner::EngineLimits;
use tinyvllm::sampling::SamplingParams;

pub(crate) const NUM_TOKENS: usize = 7;

/// The demo model on a GPU, with a small cache.
pub(crate) fn load_on(gpu: Arc<dyn Gpu>, change: impl FnOnce(&mut EngineLimits)) -> Llm {
    load_with(gpu, KvCacheDType::F16, change)
}

/// The same with a cache of this type.
fn load_with(gpu: Arc<dyn Gpu>, dtype: KvCacheDType, change: impl FnOnce(&mut EngineLimits)) -> Llm {
    let model = ResolvedModel {
        display_name: "demo".to_owned(),
        files: ModelFiles::Demo,
        revision: None,
        notice: None,
    };
    let mut options = LlmOptions { gpu: Some(gpu), kv_cache_dtype: dtype.into(), ..LlmOptions::default() };
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
    // Draws that are far from a limit between two tokens: on tensor cores, attention of a token by itself and of a longer chunk
    // of a prompt round differently, as do matmuls of up to 64 rows and of more. With seed 7, one fell on the other side of a
    // limit if the last chunk of its prompt was one token.
    let seeded = SamplingParams { temperature: 0.9, top_p: 0.9, seed: Some(3), ..greedy.clone() };
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
        // Unsupported operations, along with supported ones.
        Request { constraint: Some(digits), ..request(&format!("{story} She counted:"), seeded) },
        Request { prompt_logprobs: Some(1), ..request("A paged cache is a way to", greedy) },
    ]
}

/// The tokens of each choice of each request, all of them submitted at once.
pub(crate) fn tokens(llm: &Llm, requests: Vec<Request>) -> Vec<Vec<Vec<u32>>> {
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
                Event::Hidden { .. }
                | Event::PromptLogits { .. }
                | Event::PromptLogprobs { .. }
                | Event::PromptProgress { .. } => {}
            }
        }
        tokens
    };
    streams.into_iter().map(collect).collect()
}

/// A request gives the same tokens alone, in a batch, from cached prefixes and with prompts in chunks.
pub(crate) fn same_tokens_however_they_are_scheduled(gpu: &Arc<dyn Gpu>) {
    for dtype in [KvCacheDType::F16, KvCacheDType::Q8_0, KvCacheDType::Fp8E4m3] {
        the_same_with(gpu, dtype);
    }
}

fn the_same_with(gpu: &Arc<dyn Gpu>, dtype: KvCacheDType) {
    let llm = load_with(Arc::clone(gpu), dtype, |limits| {
        (limits.enable_prefix_caching, limits.speculative) = (false, SpeculativeConfig::off());
    });
    let alone: Vec<_> =
        requests_for(&llm, dtype).into_iter().flat_map(|request| tokens(&llm, vec![request])).collect();
    assert!(alone.iter().flatten().all(|tokens| tokens.len() == NUM_TOKENS));
    let check = |what: &str, change: &dyn Fn(&mut EngineLimits)| {
        let llm = load_with(Arc::clone(gpu), dtype, change);
        assert_eq!(tokens(&llm, requests_for(&llm, dtype)), alone, "{dtype}: {what}");
        llm
    };
    let llm = check("a batch", &|_| ());
    assert_eq!(tokens(&llm, requests_for(&llm, dtype)), alone, "prefixes from the cache");
    check("chunked prompts", &|limits| (limits.max_num_seqs, limits.max_num_batched_tokens) = (7, Some(7)));
    if dtype == KvCacheDType::F16 {
        check("multi-step", &|limits| limits.num_scheduler_steps = 3);
        check("small blocks", &|limits| limits.block_size = 8);
    }
    the_same_with_drafts(gpu, dtype, &alone);
}

/// The requests for a cache of this type.
fn requests_for(llm: &Llm, dtype: KvCacheDType) -> Vec<Request> {
    let mut all = requests(llm);
    // Where tensor cores round a key or value differently, its code may be the next one. Of eight-bit floats that is 1/16 more
    // or less, which moves many draws across a limit between two tokens.
    if dtype == KvCacheDType::Fp8E4m3 {
        all.iter_mut().for_each(|request| request.params.temperature = 0.0);
    }
    all
}

/// Requests one by one, with correct predictions of their outputs or with a wrong token in them: the same tokens, in
/// fewer steps.
fn the_same_with_drafts(gpu: &Arc<dyn Gpu>, dtype: KvCacheDType, alone: &[Vec<Vec<u32>>]) {
    for (num_speculative_tokens, wrong_at) in [(3, NUM_TOKENS), (8, 3)] {
        let method = SpeculativeMethod::Forced;
        let llm = load_with(Arc::clone(gpu), dtype, |limits| {
            limits.speculative = SpeculativeConfig { method, num_speculative_tokens, is_adaptive: false };
        });
        for (mut request, expected) in requests_for(&llm, dtype).into_iter().zip(alone) {
            request.prediction.clone_from(&expected[0]);
            if let Some(token) = request.prediction.get_mut(wrong_at) {
                *token += 1;
            }
            let found = tokens(&llm, vec![request]);
            assert_eq!(&found[0], expected, "a draft that is wrong at {wrong_at}");
        }
        let speculation = llm.engine().stats().unwrap().speculation;
        assert!(speculation.num_accepted_tokens > 0, "{speculation:?}");
        let num_wrong = speculation.num_draft_tokens - speculation.num_accepted_tokens;
        assert!(num_wrong > 0 || wrong_at == NUM_TOKENS, "{speculation:?}");
    }
}

/// The demo model gives the output of the machine where it was trained.
pub(crate) fn the_tokens_of_the_training_script(gpu: Arc<dyn Gpu>) {
    let llm = load_on(gpu, |limits| limits.num_scheduler_steps = 4);
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
