//! A request gives the same tokens however it is scheduled: thirty prompts, or ten more than `TINYVLLM_REAL_PIECES` says, greedily
//! and drawn.

use std::env;

use tinyvllm::config::SpeculativeConfig;
use tinyvllm::engine::{Event, Request, RequestStream};
use tinyvllm::llm::{Llm, LlmOptions};
use tinyvllm::ops::KvCache;
use tinyvllm::runner::EngineLimits;
use tinyvllm::sampling::SamplingParams;

use super::{Random, expected, gguf, ids, load, with_limits};

const NUM_TOKENS: usize = 24;

/// Chunks of the text that begin at few positions.
const NUM_ALIKE: usize = 20;

/// The ten prompts of the greedy test, and chunks of a text, of lengths around those of blocks. Some begin alike.
fn prompts(llm: &Llm) -> Vec<Vec<u32>> {
    let mut prompts: Vec<Vec<u32>> =
        expected()["greedy"].as_array().unwrap().iter().map(|golden| ids(&golden["prompt_ids"])).collect();
    let text = llm.encode_raw(include_str!("../fixtures/smollm2/text.txt")).unwrap();
    let mut random = Random(3);
    let num_pieces = env::var("TINYVLLM_REAL_PIECES").map_or(NUM_ALIKE, |number| number.parse().unwrap());
    for (index, len) in (0..num_pieces).zip([7, 31, 32, 33, 64, 90, 150, 257].into_iter().cycle()) {
        let start = if index < NUM_ALIKE { random.below(6) * 300 } else { random.below(text.len() - len) };
        prompts.push(text[start..][..len].to_vec());
    }
    prompts
}

fn requests(prompts: &[Vec<u32>]) -> Vec<Request> {
    let greedy =
        SamplingParams { max_tokens: Some(NUM_TOKENS), ignore_eos: true, ..SamplingParams::greedy() };
    let mut requests: Vec<Request> =
        prompts.iter().map(|prompt| Request::new(prompt.clone(), greedy.clone())).collect();
    for (prompt, seed) in prompts.iter().zip(1_000..) {
        let params = SamplingParams { temperature: 0.9, seed: Some(seed), ..greedy.clone() };
        requests.push(Request::new(prompt.clone(), params));
    }
    requests
}

#[derive(Debug, Default)]
struct Outcome {
    tokens: Vec<u32>,
    num_cached_tokens: usize,
    num_preemptions: usize,
}

fn collect(stream: RequestStream) -> Outcome {
    let mut outcome = Outcome::default();
    for event in stream {
        match event {
            Event::Token { token_id, .. } => outcome.tokens.push(token_id),
            Event::Finished { stats, .. } => {
                (outcome.num_cached_tokens, outcome.num_preemptions) =
                    (stats.num_cached_tokens, stats.num_preemptions);
            }
            Event::Hidden { .. }
            | Event::PromptLogits { .. }
            | Event::PromptLogprobs { .. }
            | Event::PromptProgress { .. } => {}
        }
    }
    outcome
}

#[test]
fn a_real_model_gives_the_same_tokens_however_requests_are_scheduled() {
    let Some(gguf) = gguf() else { return };
    let alone = load(
        &gguf,
        with_limits(|limits| {
            (limits.enable_prefix_caching, limits.speculative) = (false, SpeculativeConfig::off());
        }),
    );
    let requests = requests(&prompts(&alone));
    assert!(requests.len() >= 60, "{}", requests.len());
    let submit = |llm: &Llm, request: &Request| llm.engine().submit(request.clone()).unwrap();
    let expected: Vec<Vec<u32>> =
        requests.iter().map(|request| collect(submit(&alone, request)).tokens).collect();
    assert!(expected.iter().all(|tokens| tokens.len() == NUM_TOKENS));
    let bytes_per_token =
        KvCache::bytes_per_token(alone.model_config(), 16, LlmOptions::default().kv_cache_dtype.planned());
    drop(alone);

    let run = |what: &str, llm: &Llm| {
        let streams: Vec<_> = requests.iter().map(|request| submit(llm, request)).collect();
        let outcomes: Vec<Outcome> = streams.into_iter().map(collect).collect();
        for ((outcome, expected), request) in outcomes.iter().zip(&expected).zip(&requests) {
            let (len, temperature) = (request.prompt_token_ids.len(), request.params.temperature);
            assert_eq!(&outcome.tokens, expected, "{what}, a prompt of {len} at temperature {temperature}");
        }
        let sum = |count: fn(&Outcome) -> usize| outcomes.iter().map(count).sum::<usize>();
        (sum(|outcome| outcome.num_cached_tokens), sum(|outcome| outcome.num_preemptions))
    };
    let check = |what: &str, change: fn(&mut EngineLimits)| run(what, &load(&gguf, with_limits(change)));

    let llm = load(&gguf, with_limits(|limits| limits.max_num_seqs = 64));
    run("all at once", &llm);
    let (num_cached, _) = run("all at once, again", &llm);
    assert!(num_cached > 2_000, "{num_cached} tokens of prefixes were found");
    drop(llm);

    // With all drafts, whether or not they are worth their time.
    let all_drafts = with_limits(|limits| {
        limits.max_num_seqs = 2;
        limits.speculative.is_adaptive = false;
    });
    let llm = load(&gguf, all_drafts);
    run("drafts", &llm);
    let speculation = llm.engine().stats().unwrap().speculation;
    assert!(speculation.num_accepted_tokens > 100, "{speculation:?}");
    assert!(speculation.num_accepted_tokens < speculation.num_draft_tokens, "{speculation:?}");
    drop(llm);

    check("chunks of 64 tokens", |limits| limits.max_num_batched_tokens = Some(64));
    check("four steps at a time", |limits| limits.num_scheduler_steps = 4);

    // A cache that holds the longest sequences and little more, and everything else at once.
    let mut options = with_limits(|limits| {
        (limits.max_model_len, limits.block_size) = (Some(384), 16);
        (limits.max_num_batched_tokens, limits.num_scheduler_steps) = (Some(48), 4);
    });
    options.limits.kv_cache_memory_bytes = Some(400 * bytes_per_token as u64);
    options.threads = Some(2);
    let (_, num_preemptions) = run("preemption", &load(&gguf, options));
    assert!(num_preemptions > 0, "no preemption");
}
