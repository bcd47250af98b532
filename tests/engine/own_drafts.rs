//! Drafts of the runner from its model's results: for any quality, the tokens are those of plain decoding, and the
//! runner learns the cached tokens of a sequence.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use proptest::prelude::*;
use tinyvllm::config::{EngineConfig, SpeculativeConfig, SpeculativeMethod};
use tinyvllm::engine::{EngineCore, Request};
use tinyvllm::sampling::SamplingParams;

use super::fake_runner::{FakeRunner, reference};
use super::{arrival, check_tokens, config, limits, run_to_end, small_config};

fn core(config: &EngineConfig, percent_right: u64) -> EngineCore {
    let mut runner = FakeRunner::new(config);
    runner.percent_right = Some(Arc::new(AtomicU64::new(percent_right)));
    EngineCore::new(Box::new(runner), limits(), config.clone()).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// The first promise, with a model that drafts for itself.
    #[test]
    fn tokens_do_not_depend_on_what_a_model_drafts(
        config in config(),
        arrivals in proptest::collection::vec(arrival(), 1..16),
        percent_right in proptest::sample::select(vec![0, 50, 90, 100]),
    ) {
        let speculative = SpeculativeConfig { method: SpeculativeMethod::Mtp, ..config.speculative };
        let config = EngineConfig { num_scheduler_steps: 1, speculative, ..config };
        check_tokens(core(&config, percent_right), &arrivals)?;
    }
}

#[test]
fn a_model_that_is_right_saves_steps() {
    let params = SamplingParams { max_tokens: Some(40), ignore_eos: true, ..SamplingParams::greedy() };
    let prompt = vec![1, 2, 3];
    for (percent_right, num_tokens, num_steps) in [(100, 3, 11), (100, 1, 21), (0, 3, 40), (100, 0, 40)] {
        let speculative = SpeculativeConfig {
            method: SpeculativeMethod::Mtp,
            num_speculative_tokens: num_tokens,
            is_adaptive: false,
        };
        let config = EngineConfig { speculative, max_num_batched_tokens: 32, ..small_config() };
        let mut core = core(&config, percent_right);
        let id = core.submit(Request::new(prompt.clone(), params.clone())).unwrap();
        let collected = run_to_end(&mut core);
        assert_eq!(collected[&id].tokens[&0], reference(&prompt, &params, 0, 0, 64));
        let stats = core.stats();
        assert_eq!(stats.num_steps, num_steps, "{percent_right} % of {num_tokens}");
        assert_eq!(stats.speculation.num_accepted_tokens, 40 - num_steps);
    }
}

/// A block that is hardly ever right, or takes as long as the steps that it saves, is not asked any more.
#[test]
fn a_model_that_is_never_right_is_hardly_asked() {
    let params = SamplingParams { max_tokens: Some(50), ignore_eos: true, ..SamplingParams::greedy() };
    let num_drafts = |percent_right: u64| {
        let speculative =
            SpeculativeConfig { num_speculative_tokens: 1, ..SpeculativeConfig::of(SpeculativeMethod::Mtp) };
        let config = EngineConfig { speculative, step_cost: 2, ..small_config() };
        let mut core = core(&config, percent_right);
        for _ in 0..8 {
            core.submit(Request::new(vec![1, 2, 3], params.clone())).unwrap();
            run_to_end(&mut core);
        }
        core.stats().speculation.num_drafts
    };
    let (never, always) = (num_drafts(0), num_drafts(100));
    // Of 400 tokens.
    assert!(always >= 190 && never < 20, "{never} and {always}");
}

#[test]
fn multi_steps_have_no_drafts() {
    let speculative = SpeculativeConfig::of(SpeculativeMethod::Mtp);
    let config = EngineConfig { speculative, num_scheduler_steps: 4, ..small_config() };
    let error = config.validate().unwrap_err();
    assert!(error.message().contains("--num-scheduler-steps is 4"), "{error}");
    assert!(error.hint().is_some());
    let off = SpeculativeConfig { num_speculative_tokens: 0, ..speculative };
    assert!(EngineConfig { speculative: off, ..config }.validate().is_ok());
}

/// Where the block is never right, it rests, and steps are queued early as without it; a model that has become good is asked
/// again, for requests that come later.
#[test]
fn a_block_that_is_never_right_costs_nothing_and_has_another_chance() {
    let speculative =
        SpeculativeConfig { num_speculative_tokens: 2, ..SpeculativeConfig::of(SpeculativeMethod::Mtp) };
    let config =
        EngineConfig { speculative, step_cost: 20, max_model_len: 2_000, num_blocks: 600, ..small_config() };
    let mut runner = FakeRunner::new(&config);
    let percent_right = Arc::new(AtomicU64::new(0));
    runner.percent_right = Some(Arc::clone(&percent_right));
    let num_queued = Arc::clone(&runner.num_queued);
    let mut core = EngineCore::new(Box::new(runner), limits(), config.clone()).unwrap();
    let mut generate = |num_tokens| {
        let params =
            SamplingParams { max_tokens: Some(num_tokens), ignore_eos: true, ..SamplingParams::greedy() };
        let before = (core.stats(), num_queued.load(Ordering::Relaxed));
        core.submit(Request::new(vec![1, 2, 3], params)).unwrap();
        run_to_end(&mut core);
        let stats = core.stats();
        let num_drafts = stats.speculation.num_drafts - before.0.speculation.num_drafts;
        let num_steps = stats.num_steps - before.0.num_steps;
        (num_drafts, num_steps, num_queued.load(Ordering::Relaxed) - before.1)
    };
    let (num_drafts, _, num_queued) = generate(400);
    // Every fifth step is not queued in any case.
    assert!(num_drafts < 20 && num_queued > 280, "{num_drafts} drafts, {num_queued} queued");
    // Now and then it is tried.
    let num_drafts: u64 = (0..20).map(|_| generate(100).0).sum();
    assert!((1..=60).contains(&num_drafts), "{num_drafts}");
    percent_right.store(100, Ordering::Relaxed);
    (0..10).for_each(|_| {
        generate(100);
    });
    let (_, num_steps, num_queued) = generate(99);
    assert!(num_steps < 40 && num_queued == 0, "{num_steps} steps, {num_queued} queued");
}
