//! Models whose layers attend to a window only, with few blocks in these layers: the same tokens as with all of them.

use std::path::Path;

use super::*;

const MAX_LEN: usize = 320;
const BLOCK_SIZE: usize = 16;

/// Prompts, some with a common beginning, and sequences that continue one prompt.
fn requests() -> Vec<Request> {
    let prompt =
        |seed: u32, len: u32| (0..len).map(|at| (at * at * seed + at * 13 + 5) % 240 + 3).collect::<Vec<_>>();
    let greedy = SamplingParams { max_tokens: Some(40), ignore_eos: true, ..SamplingParams::greedy() };
    let seeded = SamplingParams { temperature: 0.9, seed: Some(7), n: 3, ..greedy.clone() };
    let lens = [(7, 200), (7, 270), (11, 30), (7, 120), (3, 64), (11, 90), (5, 3)];
    let request = |((seed, len), params): ((u32, u32), &SamplingParams)| {
        Request::new(prompt(seed, len), params.clone())
    };
    lens.into_iter().zip([&greedy, &seeded, &greedy].into_iter().cycle()).map(request).collect()
}

#[test]
fn same_tokens_with_few_blocks_in_windows() {
    for fixture in ["gemma3", "gpt_oss", "olmo3", "phi3"] {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny").join(fixture);
        let load = |dtype: KvCacheDType, change: &dyn Fn(&mut EngineLimits)| {
            let mut options = LlmOptions { kv_cache_dtype: dtype.into(), ..LlmOptions::default() };
            options.limits.max_model_len = Some(MAX_LEN);
            options.limits.block_size = BLOCK_SIZE;
            options.limits.max_num_batched_tokens = Some(64);
            change(&mut options.limits);
            load_files(fixture, ModelFiles::Folder(folder.clone()), &options)
        };
        for dtype in [KvCacheDType::F16, KvCacheDType::Q8_0, KvCacheDType::Fp8E4m3] {
            let whole = load(dtype, &|limits| {
                (limits.enable_prefix_caching, limits.speculative) = (false, SpeculativeConfig::off());
                limits.kv_cache_memory_bytes = Some(64 << 20);
            });
            assert_eq!(whole.engine().config().windows, None);
            let submit = |llm: &Llm| {
                let submit = |request: Request| (request.params.n, llm.engine().submit(request).unwrap());
                requests().into_iter().map(submit).collect::<Vec<_>>()
            };
            let run = |llm: &Llm| -> Vec<Outcome> {
                submit(llm).into_iter().map(|(n, stream)| collect(stream, n)).collect()
            };
            let expected = run(&whole);
            let block = BLOCK_SIZE * KvCache::bytes_per_token(whole.model_config(), BLOCK_SIZE, dtype);
            let (mut num_preemptions, mut num_cached) = (0, 0);
            // In all layers, the longest sequence has 20 blocks.
            for num_blocks in [14, 24] {
                for (max_num_seqs, chunk) in [(8, 64), (8, 17), (3, 64)] {
                    let llm = load(dtype, &|limits| {
                        limits.kv_cache_memory_bytes = Some((num_blocks * block) as u64);
                        (limits.max_num_seqs, limits.max_num_batched_tokens) = (max_num_seqs, Some(chunk));
                    });
                    let config = llm.engine().config();
                    let windows = config.windows.expect("windows have blocks of their own");
                    assert!(windows.num_blocks < config.num_blocks, "{config:?}");
                    for _ in 0..2 {
                        let outcomes = run(&llm);
                        assert_eq!(tokens(&outcomes), tokens(&expected), "{fixture} {dtype:?} {config:?}");
                        num_preemptions +=
                            outcomes.iter().map(|outcome| outcome.num_preemptions).sum::<usize>();
                        num_cached += outcomes.iter().map(|outcome| outcome.num_cached_tokens).sum::<usize>();
                    }
                }
            }
            assert!(num_preemptions > 0 && num_cached > 0, "{fixture}: {num_preemptions}, {num_cached}");
        }
    }
}
