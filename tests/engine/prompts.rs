//! Reports about prompts: their logits, their log-probabilities, and the reasons for cache misses.

use std::collections::HashMap;

use proptest::prelude::*;
use tinyvllm::config::EngineConfig;
use tinyvllm::engine::{EngineCore, Event, PromptProgress, Request, RequestId};
use tinyvllm::kv_cache::BlockMiss;
use tinyvllm::sampling::{RankedLogprobs, SamplingParams};
use tinyvllm::scheduler::PrefixMiss;

use super::fake_runner::{VOCAB_SIZE, logits};
use super::{core, run_to_end, small_config};

/// In double precision and the plainest way: the tokens from the most likely one on.
fn oracle(context: &[u32]) -> Vec<(u32, f64)> {
    let logits = logits(context);
    let sum: f64 = logits.iter().map(|logit| f64::from(*logit).exp()).sum();
    let mut all: Vec<(u32, f64)> =
        (0..).zip(logits.iter().map(|logit| f64::from(*logit) - sum.ln())).collect();
    all.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    all
}

fn check_logprobs(prompt: &[u32], num_top: usize, found: &[RankedLogprobs]) {
    assert_eq!(found.len(), prompt.len() - 1, "one for each token but the first");
    for (index, RankedLogprobs { logprobs, rank }) in (1..).zip(found) {
        let wanted = oracle(&prompt[..index]);
        let own = wanted.iter().find(|(id, _)| *id == prompt[index]).unwrap().1;
        assert!((f64::from(logprobs.logprob) - own).abs() < 1e-6, "{} is not {own}", logprobs.logprob);
        assert_eq!(*rank as usize, 1 + wanted.iter().filter(|(_, other)| *other > own).count());
        assert_eq!(logprobs.top.len(), num_top.min(VOCAB_SIZE));
        for ((id, logprob), (wanted_id, wanted)) in logprobs.top.iter().zip(&wanted) {
            assert_eq!(id, wanted_id, "place {index}");
            assert!((f64::from(*logprob) - wanted).abs() < 1e-6, "{logprob} is not {wanted}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Exact, and the same whole or in chunks, alone or in a batch, also when a prompt is computed twice.
    #[test]
    fn prompt_logprobs_do_not_depend_on_scheduling(
        prompts in proptest::collection::vec(
            (proptest::collection::vec(1_u32..20, 1..40), proptest::option::of(0_usize..30), 1_usize..4),
            1..7,
        ),
        max_num_seqs in 3_usize..8,
        budget in 8_usize..70,
        num_blocks in 16_usize..40,
        num_scheduler_steps in 1_usize..4,
    ) {
        let config = EngineConfig {
            max_num_seqs, max_num_batched_tokens: budget, num_blocks, num_scheduler_steps, ..small_config()
        };
        let mut core = core(&config);
        let params = |n| SamplingParams { max_tokens: Some(20), ignore_eos: true, n, ..SamplingParams::greedy() };
        let ids: Vec<RequestId> = prompts.iter().map(|(prompt, num_top, n)| {
            let prompt_logprobs = num_top.map(|num_top| num_top.min(20));
            let request = Request { prompt_logprobs, ..Request::new(prompt.clone(), params(*n)) };
            core.submit(request).unwrap()
        }).collect();
        let collected = run_to_end(&mut core);
        for (id, (prompt, num_top, _)) in ids.iter().zip(&prompts) {
            match num_top {
                Some(num_top) => check_logprobs(prompt, (*num_top).min(20), &collected[id].prompt_logprobs),
                None => prop_assert!(collected[id].prompt_logprobs.is_empty()),
            }
        }
    }
}

#[test]
fn several_prompts_share_the_rows_of_logits() {
    let mut core = core(&small_config());
    let params = SamplingParams { max_tokens: Some(3), n: 2, ..SamplingParams::greedy() };
    let submit = |core: &mut EngineCore, first: u32| {
        let prompt: Vec<u32> = (first..first + 21).map(|i| i % 7 + 1).collect();
        let request = Request {
            prompt_logits: first == 2,
            prompt_logprobs: Some(2),
            ..Request::new(prompt.clone(), params.clone())
        };
        (prompt, core.submit(request).unwrap())
    };
    let requests: Vec<_> = (1..5).map(|first| submit(&mut core, first)).collect();
    // The fake model fails if a step needs more rows than there are.
    let collected = run_to_end(&mut core);
    for (prompt, id) in &requests {
        check_logprobs(prompt, 2, &collected[id].prompt_logprobs);
    }
    let wanted: Vec<f32> = (1..=21).flat_map(|end| logits(&requests[1].0[..end])).collect();
    assert_eq!(collected[&requests[1].1].prompt_logits, wanted);
}

#[test]
fn an_aborted_leader_still_reports_the_prompt() {
    let mut core = core(&small_config());
    let prompt: Vec<u32> = (1..=21).collect();
    let params = SamplingParams { max_tokens: Some(3), n: 2, ..SamplingParams::greedy() };
    let id =
        core.submit(Request { prompt_logprobs: Some(1), ..Request::new(prompt.clone(), params) }).unwrap();
    let mut found = Vec::new();
    let mut keep = |events: Vec<(RequestId, Event)>| {
        for (_, event) in events {
            if let Event::PromptLogprobs { logprobs } = event {
                found.extend(logprobs);
            }
        }
    };
    keep(core.step());
    keep(core.abort(id, Some(0)));
    while core.has_unfinished() {
        keep(core.step());
    }
    check_logprobs(&prompt, 1, &found);
}

#[test]
fn return_progress_reports_the_progress_of_a_prompt() {
    let mut core = core(&small_config());
    let params = SamplingParams { max_tokens: Some(3), n: 2, ..SamplingParams::greedy() };
    let mut run = |prompt: Vec<u32>, prompt_progress| {
        let request = Request { prompt_progress, ..Request::new(prompt, params.clone()) };
        let id = core.submit(request).unwrap();
        let found = run_to_end(&mut core)[&id].prompt_progress.clone();
        assert!(found.windows(2).all(|pair| pair[0].time <= pair[1].time));
        let numbers = |progress: &PromptProgress| {
            (progress.num_cached_tokens, progress.num_processed_tokens, progress.num_prompt_tokens)
        };
        found.iter().map(numbers).collect::<Vec<_>>()
    };
    // A step holds 16 tokens, and each prompt is reported once, without the generated tokens.
    let prompt: Vec<u32> = (0..41).map(|i| i % 7 + 1).collect();
    assert_eq!(run(prompt.clone(), true), [(0, 16, 41), (0, 32, 41), (0, 41, 41)]);
    // Cached tokens cost nothing.
    assert_eq!(run(prompt.clone(), true), [(40, 41, 41)]);
    assert_eq!(run(prompt, false), []);
}

/// A prompt's tokens, as far as they are computed and cached after its end.
fn computed(prompt: &[u32], output: &[u32]) -> Vec<u32> {
    [prompt, &output[..output.len() - 1]].concat()
}

fn run(
    core: &mut EngineCore,
    prompt: &[u32],
    salt: Option<&str>,
    max_tokens: usize,
) -> (Vec<u32>, PrefixMiss) {
    let params =
        SamplingParams { max_tokens: Some(max_tokens), ignore_eos: true, ..SamplingParams::greedy() };
    let request = Request { cache_salt: salt.map(str::to_owned), ..Request::new(prompt.to_vec(), params) };
    let id = core.submit(request).unwrap();
    let collected = run_to_end(core);
    (computed(prompt, &collected[&id].tokens[&0]), collected[&id].prefix_miss.unwrap())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// Against a comparison with everything that came before.
    #[test]
    fn the_first_differing_token_is_right(
        block_size in 1_usize..6,
        prompts in proptest::collection::vec(
            (proptest::collection::vec(1_u32..3, 1..30), proptest::option::weighted(0.3, 0_u32..2), 1_usize..12),
            1..14,
        ),
    ) {
        let mut core = core(&EngineConfig { block_size, num_blocks: 2_000, ..small_config() });
        let mut before: HashMap<Option<String>, Vec<Vec<u32>>> = HashMap::new();
        for (prompt, salt, max_tokens) in &prompts {
            let salt = salt.map(|salt| salt.to_string());
            let (tokens, miss) = run(&mut core, prompt, salt.as_deref(), *max_tokens);
            let earlier = before.entry(salt).or_default();
            let findable = (prompt.len() - 1) / block_size;
            let equal = |other: &Vec<u32>| prompt.iter().zip(other).take_while(|(a, b)| a == b).count();
            let found = earlier.iter().map(|other| equal(other) / block_size).max().unwrap_or(0).min(findable);
            let (start, end) = (found * block_size, (found + 1) * block_size);
            let rivals = earlier.iter().filter(|other| other.len() >= end && equal(other) >= start);
            let longest = rivals.clone().map(equal).max();
            match longest {
                _ if findable == 0 => prop_assert_eq!(miss, PrefixMiss::ShortPrompt),
                _ if found == findable => prop_assert_eq!(miss, PrefixMiss::None),
                None => prop_assert_eq!(miss, PrefixMiss::Block { start, reason: BlockMiss::Unseen }),
                Some(longest) => {
                    let (position, own, token_id) = miss.first_difference().unwrap();
                    prop_assert_eq!(position, longest);
                    prop_assert_eq!(own, prompt[position]);
                    prop_assert!(token_id != own);
                    let has_it = |other: &Vec<u32>| equal(other) == longest && other[longest] == token_id;
                    prop_assert!(rivals.clone().any(has_it));
                }
            }
            earlier.push(tokens);
        }
    }
}

#[test]
fn a_miss_has_its_reason() {
    let config = EngineConfig { num_blocks: 16, ..small_config() };
    let mut engine = core(&config);
    let a: Vec<u32> = (1..=13).collect();
    let unseen = PrefixMiss::Block { start: 0, reason: BlockMiss::Unseen };
    assert_eq!(run(&mut engine, &a, None, 1).1, unseen);
    assert_eq!(run(&mut engine, &a, None, 1).1, PrefixMiss::None);
    assert_eq!(run(&mut engine, &a[..4], None, 1).1, PrefixMiss::ShortPrompt);
    // A salt hides everything outside it, including differences.
    assert_eq!(run(&mut engine, &a, Some("s"), 1).1, unseen);
    let mut b = a.clone();
    b[9] = 20;
    assert_eq!(run(&mut engine, &b, None, 1).1.first_difference(), Some((9, 20, 10)));
    // Enough others to fill the cache: the last blocks of the first are evicted, but remembered.
    assert_eq!(run(&mut engine, &[9; 50], None, 1).1.first_difference(), Some((0, 9, 1)));
    let evicted = run(&mut engine, &a, None, 1).1;
    assert!(matches!(evicted, PrefixMiss::Block { reason: BlockMiss::Evicted, .. }), "{evicted:?}");

    let params = SamplingParams { max_tokens: Some(1), ..SamplingParams::greedy() };
    let id = engine.submit(Request { prompt_logprobs: Some(0), ..Request::new(a.clone(), params) }).unwrap();
    assert_eq!(run_to_end(&mut engine)[&id].prefix_miss, Some(PrefixMiss::PromptLogits));
    let mut plain = core(&EngineConfig { enable_prefix_caching: false, ..config });
    assert_eq!(run(&mut plain, &a, None, 1).1, PrefixMiss::Disabled);
    assert_eq!(run(&mut plain, &a, None, 1).1, PrefixMiss::Disabled);
}

#[test]
fn what_was_computed_in_another_way_is_not_found() {
    let mut engine = core(&EngineConfig { prompt_group: Some(8), ..small_config() });
    let a: Vec<u32> = (1..=13).collect();
    let (tokens, _) = run(&mut engine, &a, None, 12);
    assert!(tokens.len() >= 20, "{tokens:?}");
    // Of the first prompt, eight tokens were computed in a group; of this one, sixteen would be.
    let turn = [&tokens[..17], &[3]].concat();
    let other_form = |start| PrefixMiss::Block { start, reason: BlockMiss::OtherGrouping };
    assert_eq!(run(&mut engine, &turn, None, 1).1, other_form(8));
    assert_eq!(run(&mut engine, &turn, None, 1).1, PrefixMiss::None);
    assert_eq!(run(&mut engine, &tokens[..12], None, 1).1, PrefixMiss::None);
    assert_eq!(run(&mut engine, &tokens[..7], None, 1).1, other_form(0));
}
