//! The promises of scheduling and caching, against a model that notices every mistake.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod cache_events;
mod drafts;
mod fair;
mod fake_runner;
mod masks;
mod own_drafts;
mod pace;
mod prompts;
mod rule;
mod windows;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use fake_runner::{EOS, FakeRunner, VOCAB_SIZE, logits, reference};
use proptest::prelude::*;
use rule::Rule;
use tinyvllm::config::{EngineConfig, SpeculativeConfig, SpeculativeMethod, WindowLimits};
use tinyvllm::engine::{
    ClientId, Engine, EngineCore, Event, EventSink, FinishReason, ModelLimits, PromptProgress, Request,
    RequestId, Weight,
};
use tinyvllm::runner::{Runner, SequenceOutput, Step};
use tinyvllm::sampling::{RankedLogprobs, SamplingParams};
use tinyvllm::scheduler::PrefixMiss;
use tinyvllm::{Error, ErrorKind, Result};

fn limits() -> ModelLimits {
    ModelLimits {
        vocab_size: VOCAB_SIZE,
        eos_token_ids: vec![EOS],
        max_position_embeddings: 1_000,
        broken_logits_hint: Some("delete the file".to_owned()),
    }
}

fn core(config: &EngineConfig) -> EngineCore {
    EngineCore::new(Box::new(FakeRunner::new(config)), limits(), config.clone()).unwrap()
}

fn small_config() -> EngineConfig {
    EngineConfig {
        max_model_len: 64,
        max_num_seqs: 4,
        max_num_batched_tokens: 16,
        block_size: 4,
        num_blocks: 32,
        ..EngineConfig::default()
    }
}

/// The results of a request, by index of the sequence.
#[derive(Debug, Default, Clone)]
struct Collected {
    tokens: HashMap<usize, Vec<u32>>,
    finished: HashMap<usize, (FinishReason, Option<String>)>,
    num_cached_tokens: usize,
    num_preemptions: usize,
    prompt_progress: Vec<PromptProgress>,
    prompt_logits: Vec<f32>,
    prompt_logprobs: Vec<RankedLogprobs>,
    prefix_miss: Option<PrefixMiss>,
}

impl Collected {
    fn add(&mut self, event: Event) {
        match event {
            Event::PromptLogits { logits } => self.prompt_logits.extend(logits),
            Event::PromptLogprobs { logprobs } => {
                assert!(self.tokens.is_empty(), "they come before every token");
                self.prompt_logprobs.extend(logprobs);
            }
            Event::PromptProgress { progress } => {
                assert!(self.tokens.is_empty(), "it comes before every token");
                self.prompt_progress.push(progress);
            }
            Event::Hidden { .. } => panic!("the fake model has no hidden states"),
            Event::Token { index, token_id, .. } => {
                assert!(!self.finished.contains_key(&index), "a token after the end");
                self.tokens.entry(index).or_default().push(token_id);
            }
            Event::Finished { index, reason, error, stats, .. } => {
                assert_eq!(error.is_some(), reason == FinishReason::Error);
                assert!(self.finished.insert(index, (reason, error)).is_none(), "ended twice");
                self.num_cached_tokens += stats.num_cached_tokens;
                self.num_preemptions += stats.num_preemptions;
                self.prefix_miss = stats.prefix_miss;
            }
        }
    }
}

fn run_to_end(core: &mut EngineCore) -> HashMap<RequestId, Collected> {
    let mut collected: HashMap<RequestId, Collected> = HashMap::new();
    for _ in 0..100_000 {
        if !core.has_unfinished() {
            assert_eq!(core.check_integrity(), Ok(()));
            return collected;
        }
        for (id, event) in core.step() {
            collected.entry(id).or_default().add(event);
        }
        assert_eq!(core.check_integrity(), Ok(()));
    }
    panic!("the engine does not come to an end");
}

#[derive(Debug, Clone)]
struct Arrival {
    step: usize,
    abort_after: Option<usize>,
    request: Request,
    rule: Option<Rule>,
}

fn arrival() -> impl Strategy<Value = Arrival> {
    let prompt = (0_usize..4, 0_usize..12, proptest::collection::vec(1_u32..4, 1..14));
    let params = (0_usize..6, 1_usize..30, 0_usize..4, any::<bool>(), 1_usize..4, any::<u64>());
    let client = (0_u64..4, 1_u32..4, -1_i32..2);
    let abort_after = proptest::option::weighted(0.15, 0_usize..12);
    (0_usize..30, abort_after, prompt, params, any::<bool>(), client).prop_map(
        |(
            step,
            abort_after,
            (family, shared, mut tail),
            (kind, max_tokens, min, ignore_eos, n, seed),
            salted,
            (client, weight, priority),
        )| {
            // Prompts of a family have a common prefix.
            let mut prompt: Vec<u32> = (0..shared).map(|i| (family * 5 + i) as u32 % 20 + 1).collect();
            prompt.append(&mut tail);
            let mut params = SamplingParams {
                max_tokens: Some(max_tokens),
                min_tokens: min.min(max_tokens),
                ignore_eos,
                n,
                seed: Some(seed),
                ..SamplingParams::default()
            };
            match kind {
                0 | 1 => params.temperature = 0.0,
                2 => params.top_k = 3,
                3 => params.top_p = 0.7,
                4 => (params.repetition_penalty, params.frequency_penalty) = (1.3, 0.4),
                _ => params.stop_token_ids = vec![5, 6],
            }
            let cache_salt = salted.then(|| format!("salt {}", seed % 2));
            let mut request = Request { cache_salt, ..Request::new(prompt, params) };
            let rule = seed.is_multiple_of(3).then_some(Rule(seed));
            request.constraint = rule.map(|rule| Arc::new(rule) as _);
            request.client = ClientId(client);
            request.weight = Weight::new(weight).unwrap();
            request.priority = priority;
            Arrival { step, abort_after, request, rule }
        },
    )
}

fn config() -> impl Strategy<Value = EngineConfig> {
    let speculative = proptest::sample::select(vec![0_usize, 0, 1, 3, 8]);
    let switches = (1_usize..6, any::<bool>(), 0_usize..6, proptest::option::of(1_usize..7), speculative);
    let windows = proptest::option::of((1_usize..20, 1_usize..6, 0_usize..12));
    (1_usize..7, 1_usize..8, 4_usize..24, 0_usize..24, switches, windows).prop_map(
        |(block_size, max_num_seqs, tokens, extra_blocks, switches, windows)| {
            let (num_scheduler_steps, enable_prefix_caching, step_cost, prompt_group, num_speculative_tokens) =
                switches;
            let method = SpeculativeMethod::Suffix;
            let mut config = EngineConfig {
                max_model_len: 60,
                max_num_seqs: max_num_seqs.max(3),
                max_num_batched_tokens: tokens.max(max_num_seqs.max(3)),
                block_size,
                num_blocks: 60_usize.div_ceil(block_size) + extra_blocks / block_size,
                enable_prefix_caching,
                num_scheduler_steps,
                max_num_requests: 100,
                step_cost,
                prompt_group,
                speculative: SpeculativeConfig { method, num_speculative_tokens, is_adaptive: step_cost > 2 },
                windows: None,
            };
            config.windows = windows.map(|(window, tile, more)| {
                let windows = WindowLimits { window, tile, num_blocks: 0 };
                WindowLimits { num_blocks: config.min_window_blocks(&windows) + more / block_size, ..windows }
            });
            config
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// The first guarantee: the same tokens for any interleaving, chunking, preemption, prefix hit, step count, draft,
    /// and behaviour of other requests, including abort; with and without a constraint.
    #[test]
    fn tokens_do_not_depend_on_scheduling(
        config in config(),
        arrivals in proptest::collection::vec(arrival(), 1..16),
        percent_right in proptest::sample::select(vec![None, Some(0), Some(50), Some(90), Some(100)]),
    ) {
        check_tokens(drafts::core(&config, percent_right), &arrivals)?;
    }
}

/// Checks that these requests get the same results as alone.
fn check_tokens(mut core: EngineCore, arrivals: &[Arrival]) -> Result<(), TestCaseError> {
    let mut collected: HashMap<RequestId, Collected> = HashMap::new();
    let mut ids: HashMap<RequestId, (usize, bool)> = HashMap::new();
    for step in 0..5_000 {
        for (index, arrival) in arrivals.iter().enumerate().filter(|(_, a)| a.step == step) {
            ids.insert(core.submit(arrival.request.clone()).unwrap(), (index, false));
        }
        for (&id, (index, aborted)) in &mut ids {
            let arrival = &arrivals[*index];
            if arrival.abort_after.is_some_and(|after| arrival.step + after == step) {
                *aborted = true;
                let which = arrival.abort_after.filter(|after| after % 2 == 1).map(|after| after % 3);
                for (id, event) in core.abort(id, which) {
                    collected.entry(id).or_default().add(event);
                }
            }
        }
        for (id, event) in core.step() {
            collected.entry(id).or_default().add(event);
        }
        prop_assert_eq!(core.check_integrity(), Ok(()));
        if step > 60 && !core.has_unfinished() {
            break;
        }
    }
    prop_assert!(!core.has_unfinished(), "a request never ends");
    prop_assert_eq!(ids.len(), arrivals.len());
    for (id, (position, _)) in ids {
        let Request { prompt_token_ids, params, .. } = &arrivals[position].request;
        let collected = &collected[&id];
        prop_assert_eq!(collected.finished.len(), params.n);
        for (&index, (reason, _)) in &collected.finished {
            let rule = arrivals[position].rule;
            let (wanted, end) = match rule {
                Some(rule) => {
                    let (wanted, end) = rule::reference(rule, prompt_token_ids, params, index as u32, 60);
                    (wanted, Some(end))
                }
                None => {
                    let seed = params.seed.unwrap();
                    (reference(prompt_token_ids, params, seed, index as u32, 60), None)
                }
            };
            let tokens = collected.tokens.get(&index).cloned().unwrap_or_default();
            match reason {
                FinishReason::Abort => prop_assert!(wanted.starts_with(&tokens)),
                reason => {
                    prop_assert_eq!(&tokens, &wanted);
                    let ended = wanted.last().is_some_and(|token| {
                        params.stop_token_ids.contains(token) || (*token == EOS && !params.ignore_eos)
                    });
                    let unconstrained = if ended { FinishReason::Stop } else { FinishReason::Length };
                    prop_assert_eq!(*reason, end.unwrap_or(unconstrained));
                }
            }
        }
    }
    Ok(())
}

#[test]
fn running_requests_share_what_is_computed() {
    let mut core = core(&small_config());
    let prompt: Vec<u32> = (1..=13).collect();
    let request = Request::new(
        prompt.clone(),
        SamplingParams { max_tokens: Some(20), ignore_eos: true, ..SamplingParams::greedy() },
    );
    let first = core.submit(request.clone()).unwrap();
    let early = core.step();
    let second = core.submit(request).unwrap();
    let mut collected = run_to_end(&mut core);
    early.into_iter().for_each(|(id, event)| {
        let mut with_early = Collected::default();
        with_early.add(event);
        let rest = collected.remove(&id).unwrap();
        with_early.tokens.entry(0).or_default().extend(&rest.tokens[&0]);
        collected.insert(id, Collected { tokens: with_early.tokens, ..rest });
    });
    assert_eq!(collected[&first].num_cached_tokens, 0);
    assert_eq!(collected[&second].num_cached_tokens, 12, "three full blocks, while the first still runs");
    assert_eq!(collected[&first].tokens, collected[&second].tokens);
}

#[test]
fn a_hit_never_covers_the_whole_prompt_and_salts_separate() {
    let mut core = core(&small_config());
    let params = SamplingParams { max_tokens: Some(2), ..SamplingParams::greedy() };
    let request = Request::new((1..=8).collect(), params);
    let cached = |core: &mut EngineCore, salt: Option<&str>| {
        let request = Request { cache_salt: salt.map(str::to_owned), ..request.clone() };
        let id = core.submit(request).unwrap();
        run_to_end(core)[&id].num_cached_tokens
    };
    assert_eq!(cached(&mut core, None), 0);
    assert_eq!(cached(&mut core, None), 4, "eight tokens are two blocks, but one token must be computed");
    assert_eq!(cached(&mut core, Some("tenant")), 0);
    assert_eq!(cached(&mut core, Some("tenant")), 4);
    assert_eq!(cached(&mut core, Some("other")), 0);
}

#[test]
fn preemption_happens_and_changes_nothing() {
    let config = EngineConfig { num_blocks: 16, max_num_seqs: 4, ..small_config() };
    let mut core = core(&config);
    let params = SamplingParams { max_tokens: Some(40), ignore_eos: true, ..SamplingParams::greedy() };
    let prompts: Vec<Vec<u32>> = (0..4).map(|i| vec![i + 1; 6]).collect();
    let ids: Vec<RequestId> = prompts
        .iter()
        .map(|prompt| core.submit(Request::new(prompt.clone(), params.clone())).unwrap())
        .collect();
    let collected = run_to_end(&mut core);
    for (id, prompt) in ids.iter().zip(&prompts) {
        assert_eq!(collected[id].tokens[&0], reference(prompt, &params, 0, 0, 64));
    }
    assert!(collected.values().map(|c| c.num_preemptions).sum::<usize>() > 0, "the cache was too large");
}

#[test]
fn prompt_logits_come_once_and_in_order() {
    for max_num_seqs in [3, 4] {
        let mut core = core(&EngineConfig { max_num_seqs, ..small_config() });
        let prompt: Vec<u32> = (0..21).map(|i| i % 7 + 1).collect();
        let params = SamplingParams { max_tokens: Some(1), ..SamplingParams::greedy() };
        let other = core.submit(Request::new(prompt.clone(), params.clone())).unwrap();
        let request = Request { prompt_logits: true, ..Request::new(prompt.clone(), params) };
        let id = core.submit(request).unwrap();
        let collected = run_to_end(&mut core);
        let wanted: Vec<f32> = (1..=prompt.len()).flat_map(|end| logits(&prompt[..end])).collect();
        assert_eq!(collected[&id].prompt_logits, wanted);
        assert!(collected[&other].prompt_logits.is_empty());
    }
}

#[test]
fn a_failed_step_ends_its_requests_and_no_others() {
    let config = EngineConfig { max_num_seqs: 2, ..small_config() };
    let mut runner = FakeRunner::new(&config);
    runner.fail_at = Some(2);
    let mut core = EngineCore::new(Box::new(runner), limits(), config).unwrap();
    let params = SamplingParams { max_tokens: Some(5), ignore_eos: true, n: 2, ..SamplingParams::greedy() };
    let ids: Vec<RequestId> =
        (1..=2).map(|i| core.submit(Request::new(vec![i; 5], params.clone())).unwrap()).collect();
    let collected = run_to_end(&mut core);
    for index in 0..2 {
        let (reason, error) = &collected[&ids[0]].finished[&index];
        assert_eq!(*reason, FinishReason::Error);
        assert_eq!(error.as_deref(), Some("planned failure"));
        assert_eq!(collected[&ids[1]].finished[&index].0, FinishReason::Length);
    }
}

/// Also where several steps run at once for the others, and the rules' ends are of all kinds.
#[test]
fn a_dead_end_ends_its_sequence_and_no_other() {
    let mut core = core(&EngineConfig { num_scheduler_steps: 4, max_num_seqs: 8, ..small_config() });
    let params = SamplingParams { max_tokens: Some(30), seed: Some(1), n: 2, ..SamplingParams::default() };
    let prompt = vec![3; 5];
    let plain = core.submit(Request::new(prompt.clone(), params.clone())).unwrap();
    let rules: Vec<(RequestId, Rule)> = (0..3)
        .map(|index| {
            let rule = Rule(index * 5);
            let constraint = Some(Arc::new(rule) as _);
            let request = Request { constraint, ..Request::new(prompt.clone(), params.clone()) };
            (core.submit(request).unwrap(), rule)
        })
        .collect();
    let collected = run_to_end(&mut core);
    let mut num_errors = 0;
    for stream in 0..2 {
        let wanted = reference(&prompt, &params, 1, stream, 64);
        assert_eq!(collected[&plain].tokens[&(stream as usize)], wanted);
        for (id, rule) in &rules {
            let (wanted, end) = rule::reference(*rule, &prompt, &params, stream, 64);
            let (reason, error) = &collected[id].finished[&(stream as usize)];
            assert_eq!((&collected[id].tokens[&(stream as usize)], *reason), (&wanted, end), "{rule:?}");
            if let Some(error) = error {
                assert!(error.contains("neither a token nor the end"), "{error}");
                num_errors += 1;
            }
        }
    }
    assert!(num_errors > 0, "no rule led nowhere");
}

/// A model that has no numbers for sequences that begin with 9.
struct Broken(FakeRunner);

impl Runner for Broken {
    fn execute(&mut self, step: &Step<'_>) -> Result<Vec<SequenceOutput>> {
        let mut outputs = self.0.execute(step)?;
        for (scheduled, output) in step.sequences.iter().zip(&mut outputs) {
            if scheduled.token_ids[0] == 9 {
                output.samples.iter_mut().for_each(|samples| *samples = vec![None]);
            }
        }
        Ok(outputs)
    }
}

#[test]
fn a_sequence_whose_logits_are_no_numbers_ends_alone() {
    let config = small_config();
    let runner = Box::new(Broken(FakeRunner::new(&config)));
    let mut core = EngineCore::new(runner, limits(), config).unwrap();
    let params = SamplingParams { max_tokens: Some(5), ignore_eos: true, ..SamplingParams::greedy() };
    let whole = core.submit(Request::new(vec![1, 2, 3], params.clone())).unwrap();
    let broken = core.submit(Request::new(vec![9, 2, 3], params.clone())).unwrap();
    let collected = run_to_end(&mut core);
    let (reason, message) = &collected[&broken].finished[&0];
    assert_eq!(*reason, FinishReason::Error);
    assert_eq!(message.as_deref(), Some("the model's logits are not numbers; delete the file"));
    assert_eq!(collected[&whole].tokens[&0], reference(&[1, 2, 3], &params, 0, 0, 64));
}

#[test]
fn bad_requests_are_refused_with_value_and_limit() {
    let mut core = core(&small_config());
    let mut check = |request: Request, kind: ErrorKind, wanted: &[&str]| {
        let error = core.submit(request).unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        wanted.iter().for_each(|text| assert!(error.message().contains(text), "{error} should say {text}"));
    };
    let params = SamplingParams::default();
    check(Request::new(vec![], params.clone()), ErrorKind::InvalidRequest, &["empty"]);
    check(
        Request::new(vec![1; 64], params.clone()),
        ErrorKind::ContextLength,
        &["64 input tokens", "context length is 64 tokens"],
    );
    check(Request::new(vec![24], params.clone()), ErrorKind::InvalidRequest, &["24", "24 tokens"]);
    let long = SamplingParams { max_tokens: Some(60), ..params.clone() };
    check(Request::new(vec![1; 5], long), ErrorKind::ContextLength, &["5 tokens", "60", "64"]);
    let huge = SamplingParams { max_tokens: Some(usize::MAX), ..params.clone() };
    check(Request::new(vec![1; 5], huge), ErrorKind::ContextLength, &["18446744073709551615"]);
    let wide = SamplingParams { n: 5, ..params };
    check(Request::new(vec![1], wide), ErrorKind::InvalidRequest, &["n is 5", "at most 4"]);
    assert_eq!(core.check_integrity(), Ok(()));
    assert!(!core.has_unfinished());
}

#[test]
fn a_long_prompt_gets_a_hint() {
    // The model was trained for 1,000 tokens.
    let check = |num_tokens: usize, max_model_len: usize, num_blocks: usize, words: &str| {
        let config = EngineConfig { max_model_len, num_blocks, block_size: 16, ..small_config() };
        let request = Request::new(vec![1; num_tokens], SamplingParams::default());
        let error = request.validate(&limits(), &config).unwrap_err();
        let hint = error.hint().unwrap();
        assert!(hint.contains(words), "{hint}");
        assert_eq!(hint.contains("--max-model-len"), words.contains("--max-model-len"), "{hint}");
    };
    check(64, 64, 100, "a larger --max-model-len would hold it");
    check(999, 64, 100, "a larger --max-model-len would hold it");
    check(1_000, 64, 100, "model was trained for; shorten the prompt");
    check(1_000, 1_000, 100, "model was trained for; shorten the prompt");
    check(160, 160, 10, "raise --kv-cache-memory-bytes");
    check(2_000, 160, 10, "model was trained for; shorten the prompt");
}

#[test]
fn a_full_queue_refuses_and_keeps_the_rest() {
    let mut core = core(&EngineConfig { max_num_requests: 2, ..small_config() });
    let request =
        Request::new(vec![1, 2], SamplingParams { max_tokens: Some(3), ..SamplingParams::greedy() });
    core.submit(request.clone()).unwrap();
    core.submit(request.clone()).unwrap();
    assert_eq!(core.submit(request.clone()).unwrap_err().kind(), ErrorKind::Capacity);
    assert_eq!(run_to_end(&mut core).len(), 2);
    assert!(core.submit(request).is_ok());
}

#[test]
fn impossible_limits_are_refused() {
    let check = |change: fn(&mut EngineConfig), wanted: &str| {
        let mut config = small_config();
        change(&mut config);
        let error = config.validate().unwrap_err();
        assert!(error.message().contains(wanted), "{error} should say {wanted}");
    };
    check(|c| c.block_size = 0, "--block-size is 0");
    check(|c| c.max_num_seqs = 0, "--max-num-seqs is 0");
    check(|c| c.max_num_batched_tokens = 3, "--max-num-batched-tokens is 3");
    check(|c| c.num_scheduler_steps = 0, "--num-scheduler-steps is 0");
    check(|c| c.max_model_len = 1_000, "holds 128 tokens");
}

#[test]
fn streams_give_the_same_as_steps_and_survive_dropped_readers() {
    let config = small_config();
    let engine = Engine::start(core(&config)).unwrap();
    let params = SamplingParams { max_tokens: Some(12), ..SamplingParams::greedy() };
    let streams: Vec<_> = (1..20_u32)
        .map(|i| (i, engine.submit(Request::new(vec![i % 5 + 1; 7], params.clone())).unwrap()))
        .collect();
    for (i, mut stream) in streams {
        match i % 4 {
            0 => drop(stream),
            1 => {
                stream.next();
                drop(stream);
            }
            2 => {
                stream.abort(None);
                let mut collected = Collected::default();
                stream.for_each(|event| collected.add(event));
                assert_eq!(collected.finished.len(), 1);
            }
            _ => {
                let mut collected = Collected::default();
                stream.for_each(|event| collected.add(event));
                let wanted = reference(&[i % 5 + 1; 7], &params, 0, 0, 64);
                assert_eq!(collected.tokens[&0], wanted);
            }
        }
    }
    // Aborts are commands: after the answer to a later one they have been carried out.
    let stats = engine.stats().unwrap();
    assert_eq!((stats.num_running, stats.num_waiting), (0, 0));
}

/// Runs like the model of the other tests, and waits for permission in each step.
struct Held {
    runner: FakeRunner,
    go_on: std::sync::mpsc::Receiver<()>,
    begun: std::sync::mpsc::Sender<usize>,
}

impl Runner for Held {
    fn execute(&mut self, step: &Step<'_>) -> Result<Vec<SequenceOutput>> {
        let _ = self.begun.send(step.sequences.len());
        // Everything continues when the test ends.
        let _ = self.go_on.recv();
        self.runner.execute(step)
    }
}

#[test]
fn what_is_submitted_during_a_step_joins_the_next_one_together() {
    let (go_on, held) = std::sync::mpsc::channel();
    let (begun, steps) = std::sync::mpsc::channel();
    let config =
        EngineConfig { max_num_seqs: 8, max_num_batched_tokens: 64, num_blocks: 64, ..small_config() };
    let runner = Held { runner: FakeRunner::new(&config), go_on: held, begun };
    let engine = Engine::start(EngineCore::new(Box::new(runner), limits(), config).unwrap()).unwrap();
    let params = SamplingParams { max_tokens: Some(3), ..SamplingParams::greedy() };
    let submit = |token| engine.submit(Request::new(vec![token; 5], params.clone())).unwrap();
    let first = submit(1);
    assert_eq!(steps.recv().unwrap(), 1);
    // The step is running, and no thread waits for it.
    let others: Vec<_> = (2..7).map(submit).collect();
    go_on.send(()).unwrap();
    assert_eq!(steps.recv().unwrap(), 6);
    drop(go_on);
    for (token, stream) in (1..7).zip(std::iter::once(first).chain(others)) {
        let mut collected = Collected::default();
        stream.for_each(|event| collected.add(event));
        assert_eq!(collected.tokens[&0], reference(&[token; 5], &params, 0, 0, 64));
    }
}

#[test]
fn a_request_beyond_the_queue_ends_with_an_error() {
    let config = EngineConfig { max_num_requests: 1, ..small_config() };
    let (go_on, held) = std::sync::mpsc::channel();
    let runner = Held { runner: FakeRunner::new(&config), go_on: held, begun: std::sync::mpsc::channel().0 };
    let engine = Engine::start(EngineCore::new(Box::new(runner), limits(), config).unwrap()).unwrap();
    let submit = |n| {
        let params = SamplingParams { max_tokens: Some(3), n, ..SamplingParams::greedy() };
        engine.submit(Request::new(vec![1, 2], params)).unwrap()
    };
    let (first, second) = (submit(1), submit(2));
    drop(go_on);
    let events: Vec<Event> = second.collect();
    assert_eq!(events.len(), 2);
    for (number, event) in events.into_iter().enumerate() {
        let Event::Finished { index, reason, error, error_kind, .. } = event else { panic!("{event:?}") };
        assert_eq!((index, reason), (number, FinishReason::Error));
        assert_eq!(error_kind, Some(ErrorKind::Capacity));
        assert!(error.unwrap().contains("which is the limit"));
    }
    assert_eq!(first.count(), 4);
}

#[test]
fn a_panic_of_the_runner_ends_all_requests_and_refuses_new_ones() {
    struct Panicking;
    impl tinyvllm::runner::Runner for Panicking {
        fn execute(
            &mut self,
            _: &tinyvllm::runner::Step<'_>,
        ) -> tinyvllm::Result<Vec<tinyvllm::runner::SequenceOutput>> {
            panic!("broken kernel");
        }
    }
    let core = EngineCore::new(Box::new(Panicking), limits(), small_config()).unwrap();
    let engine = Engine::start(core).unwrap();
    let (fail, failed) = std::sync::mpsc::channel();
    let listener = fail.clone();
    engine.on_failure(move |error| listener.send(error.to_string()).unwrap());
    let request = Request::new(vec![1], SamplingParams::default());
    let events: Vec<Event> = engine.submit(request.clone()).unwrap().collect();
    assert!(
        matches!(&events[..], [Event::Finished { reason: FinishReason::Error, error: Some(text), .. }]
            if text.contains("broken kernel")),
        "{events:?}"
    );
    assert_eq!(engine.submit(request).unwrap_err().kind(), ErrorKind::Internal);
    assert!(failed.recv().unwrap().contains("broken kernel"));
    // Late callers get the error, too.
    engine.on_failure(move |error| fail.send(error.to_string()).unwrap());
    assert!(failed.recv().unwrap().contains("broken kernel"));
}

#[test]
fn a_lost_device_ends_all_requests_and_refuses_new_ones() {
    /// Whose errors are all of this kind.
    struct Lost(FakeRunner);
    impl Runner for Lost {
        fn execute(&mut self, step: &Step<'_>) -> Result<Vec<SequenceOutput>> {
            let lost = |_| Error::new(ErrorKind::DeviceLost, "the GPU fell off the bus");
            self.0.execute(step).map_err(lost)
        }
    }
    let start = |config: EngineConfig| {
        let mut runner = FakeRunner::new(&config);
        runner.fail_at = Some(3);
        EngineCore::new(Box::new(Lost(runner)), limits(), config).unwrap()
    };
    let fails = |event: Option<&Event>| {
        matches!(event, Some(Event::Finished { reason: FinishReason::Error, error: Some(text), .. })
            if text.contains("fell off the bus"))
    };
    let params = SamplingParams { max_tokens: Some(40), ignore_eos: true, ..SamplingParams::default() };
    let request = Request::new(vec![1], params);

    // One of the two waits for a permit and is in no step, so the core need not try it.
    let mut core = start(EngineConfig { max_num_seqs: 1, ..small_config() });
    let ids = [core.submit(request.clone()).unwrap(), core.submit(request.clone()).unwrap()];
    let events: Vec<_> = (0..3).flat_map(|_| core.step()).collect();
    assert!(fails(events.last().map(|(_, event)| event)), "{events:?}");
    assert!(!core.is_unfinished(ids[0]) && core.is_unfinished(ids[1]));
    assert!(core.lost_device().is_some_and(|error| error.kind() == ErrorKind::DeviceLost));

    let engine = Engine::start(start(small_config())).unwrap();
    let (fail, failed) = std::sync::mpsc::channel();
    engine.on_failure(move |error| fail.send(error.to_string()).unwrap());
    let events: Vec<Event> = engine.submit(request.clone()).unwrap().collect();
    assert!(fails(events.last()), "{events:?}");
    assert!(failed.recv().unwrap().contains("the device is lost: the GPU fell off the bus"));
    assert_eq!(engine.submit(request).unwrap_err().kind(), ErrorKind::Internal);
}

/// Takes some events, then refuses or closes.
struct Limited {
    num_left: usize,
    closes: bool,
    events: std::sync::mpsc::Sender<Event>,
}

impl EventSink for Limited {
    fn send(&mut self, event: Event) -> bool {
        if self.num_left == 0 {
            return false;
        }
        self.num_left -= 1;
        // The test may have ended.
        let _ = self.events.send(event);
        true
    }

    fn is_closed(&self) -> bool {
        self.closes && self.num_left == 0
    }
}

#[test]
fn a_sink_that_refuses_or_closes_gives_its_request_up() {
    let engine = Engine::start(core(&small_config())).unwrap();
    let params = SamplingParams { max_tokens: Some(40), ignore_eos: true, ..SamplingParams::greedy() };
    for (num_left, closes) in [(0, true), (3, true), (0, false), (3, false)] {
        let (events, received) = std::sync::mpsc::channel();
        let (accept, accepted) = std::sync::mpsc::channel();
        let sink = Box::new(Limited { num_left, closes, events });
        let on_accepted = Box::new(move |id: tinyvllm::Result<RequestId>| accept.send(id.is_ok()).unwrap());
        engine.submit_to(Request::new(vec![1, 2, 3], params.clone()), sink, on_accepted).unwrap();
        assert!(accepted.recv().unwrap());
        // The sink is dropped when the engine is done with it.
        let received: Vec<Event> = received.iter().collect();
        assert_eq!(received.len(), num_left);
        assert!(received.iter().all(|event| matches!(event, Event::Token { .. })));
    }
    let stats = engine.stats().unwrap();
    assert_eq!((stats.num_running, stats.num_waiting, stats.num_used_blocks), (0, 0, 0));
    assert!(stats.num_output_tokens < 20, "{stats:?}");
    assert_eq!(stats.step_sizes.counts.iter().sum::<u64>(), stats.num_steps);
    // An invalid request is refused through the same callback, and the engine continues.
    let (accept, accepted) = std::sync::mpsc::channel();
    let (events, _received) = std::sync::mpsc::channel::<Event>();
    let on_accepted = Box::new(move |id: tinyvllm::Result<RequestId>| accept.send(id.is_err()).unwrap());
    engine.submit_to(Request::new(vec![], params.clone()), Box::new(events), on_accepted).unwrap();
    assert!(accepted.recv().unwrap());
    // Everything unfinished can be ended with an error, without ending the engine.
    let stream = engine.submit(Request::new(vec![1], params.clone())).unwrap();
    engine.fail_all(tinyvllm::Error::internal("enough"));
    let last = stream.last().unwrap();
    let is_failure = matches!(&last, Event::Finished { error: Some(text), .. } if text == "enough");
    let is_complete = matches!(&last, Event::Finished { reason: FinishReason::Length, .. });
    assert!(is_failure || is_complete, "{last:?}");
    assert_eq!(engine.submit(Request::new(vec![1], params)).unwrap().count(), 41);
}

/// If all sequences decode, their next step is queued before the tokens of this one are read. A request that arrives
/// meanwhile starts in the step after that, and no step is queued past the last token of a sequence.
#[test]
fn steps_are_queued_early_and_delay_no_client() {
    let config = small_config();
    let runner = FakeRunner::new(&config);
    let num_ahead = Arc::clone(&runner.num_queued);
    let mut core = EngineCore::new(Box::new(runner), limits(), config.clone()).unwrap();
    let params = |max_tokens| SamplingParams {
        max_tokens: Some(max_tokens),
        ignore_eos: true,
        ..SamplingParams::greedy()
    };
    core.submit(Request::new(vec![1, 2, 3], params(20))).unwrap();
    let mut tokens = 0;
    while tokens < 10 {
        tokens += core.step().iter().filter(|(_, event)| matches!(event, Event::Token { .. })).count();
    }
    // One in five is not begun early.
    let before = num_ahead.load(Ordering::Relaxed);
    assert!((6..=9).contains(&before), "{before}");
    let second = core.submit(Request::new(vec![4, 5], params(3))).unwrap();
    let steps_of_others =
        (0..).take_while(|_| core.step().iter().all(|(id, _)| *id != second)).take(5).count();
    assert!(steps_of_others <= 1, "{steps_of_others}");
    while core.has_unfinished() {
        core.step();
        core.check_integrity().unwrap();
    }
    let after = num_ahead.load(Ordering::Relaxed);
    assert!(after > before && after < 20, "{after}");
}
