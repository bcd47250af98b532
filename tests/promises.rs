//! The promises of the engine once more, with the real kernels, the built-in model and tiny ones with latent
//! attention: a request gives the same tokens however it is scheduled.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;
use std::sync::Arc;

use tinyvllm::chat::{ChatOptions, Message};
use tinyvllm::config::ModelConfig;
use tinyvllm::config::{SpeculativeConfig, SpeculativeMethod};
use tinyvllm::engine::{Event, FinishReason, Request};
use tinyvllm::grammar::GrammarSpec;
use tinyvllm::hub::{ModelFiles, ResolvedModel};
use tinyvllm::llm::{DeviceChoice, KernelChoice, Llm, LlmOptions, NoProgress, TextEvent};
use tinyvllm::ops::cpu::simd::CpuLevel;
use tinyvllm::ops::{KvCache, KvCacheDType};
use tinyvllm::runner::EngineLimits;
use tinyvllm::sampling::{Constraint, RankedLogprobs, SamplingParams};
use tinyvllm::weights::Checkpoint;

#[path = "promises/hidden.rs"]
mod hidden;
#[path = "promises/mtp.rs"]
mod mtp;
#[path = "promises/mtp_model.rs"]
mod mtp_model;
#[path = "promises/windows.rs"]
mod windows;

fn load(options: &LlmOptions) -> Llm {
    load_files("demo", ModelFiles::Demo, options)
}

fn load_files(name: &str, files: ModelFiles, options: &LlmOptions) -> Llm {
    let model = ResolvedModel { display_name: name.to_owned(), files, revision: None, notice: None };
    Llm::load(&model, options, &NoProgress).unwrap()
}

fn with_limits(change: impl FnOnce(&mut EngineLimits)) -> LlmOptions {
    let mut options = LlmOptions::default();
    options.limits.max_model_len = Some(512);
    options.limits.kv_cache_memory_bytes = Some(64 << 20);
    change(&mut options.limits);
    options
}

fn with_cache(dtype: KvCacheDType, change: impl FnOnce(&mut EngineLimits)) -> LlmOptions {
    LlmOptions { kv_cache_dtype: dtype.into(), ..with_limits(change) }
}

/// Prompts of different lengths, two with a long common beginning, and different ways to sample.
fn requests(llm: &Llm) -> Vec<Request> {
    let story = "Once upon a time, in a small village by the sea, there lived a little girl who loved to \
                 look at the ships. One morning, she found a strange green bottle in the sand, and in it";
    let prompts = [
        story.to_owned(),
        format!("{story} there was a letter. She read it aloud:"),
        "The".to_owned(),
        "A paged cache is a way to".to_owned(),
        "One day, the fox and the owl".repeat(9),
    ];
    let greedy = SamplingParams { max_tokens: Some(40), ignore_eos: true, ..SamplingParams::greedy() };
    let seeded = SamplingParams { temperature: 0.9, top_p: 0.9, seed: Some(7), ..greedy.clone() };
    let filtered = SamplingParams { top_k: 20, repetition_penalty: 1.2, n: 2, ..seeded.clone() };
    let mut requests = Vec::new();
    for (prompt, params) in prompts.iter().zip([&greedy, &seeded, &filtered].into_iter().cycle()) {
        requests.push(Request::new(llm.encode_raw(prompt).unwrap(), params.clone()));
    }
    requests
}

/// Output tokens by sequence, cached tokens and preemptions.
#[derive(Debug, Default)]
struct Outcome {
    tokens: Vec<Vec<u32>>,
    num_cached_tokens: usize,
    num_preemptions: usize,
}

fn collect(events: impl Iterator<Item = Event>, n: usize) -> Outcome {
    let mut outcome = Outcome { tokens: vec![Vec::new(); n], ..Outcome::default() };
    for event in events {
        match event {
            Event::Token { index, token_id, .. } => outcome.tokens[index].push(token_id),
            Event::Finished { reason, stats, .. } => {
                assert_eq!(reason, FinishReason::Length);
                outcome.num_cached_tokens += stats.num_cached_tokens;
                outcome.num_preemptions += stats.num_preemptions;
            }
            Event::Hidden { .. }
            | Event::PromptLogits { .. }
            | Event::PromptLogprobs { .. }
            | Event::PromptProgress { .. } => {}
        }
    }
    outcome
}

/// One request after the other, nothing shared.
fn alone(llm: &Llm) -> Vec<Outcome> {
    let run = |request: Request| {
        let n = request.params.n;
        collect(llm.engine().submit(request).unwrap(), n)
    };
    requests(llm).into_iter().map(run).collect()
}

/// All requests at once.
fn together(llm: &Llm) -> Vec<Outcome> {
    let submit = |request: Request| (request.params.n, llm.engine().submit(request).unwrap());
    let streams: Vec<_> = requests(llm).into_iter().map(submit).collect();
    streams.into_iter().map(|(n, stream)| collect(stream, n)).collect()
}

fn tokens(outcomes: &[Outcome]) -> Vec<&Vec<Vec<u32>>> {
    outcomes.iter().map(|outcome| &outcome.tokens).collect()
}

#[test]
fn same_tokens_however_they_are_scheduled() {
    check_schedules(KvCacheDType::F16);
}

#[test]
fn same_tokens_with_a_cache_of_whole_numbers() {
    check_schedules(KvCacheDType::Q8_0);
}

#[test]
fn same_tokens_with_a_cache_of_eight_bit_floats() {
    check_schedules(KvCacheDType::Fp8E4m3);
}

fn check_schedules(dtype: KvCacheDType) {
    let reference_llm = load(&with_cache(dtype, |limits| {
        (limits.enable_prefix_caching, limits.speculative) = (false, SpeculativeConfig::off());
    }));
    let reference = alone(&reference_llm);
    assert!(reference.iter().all(|outcome| outcome.tokens.iter().all(|tokens| tokens.len() == 40)));
    let check = |what: &str, options: &LlmOptions| {
        let llm = load(options);
        let first = together(&llm);
        assert_eq!(tokens(&first), tokens(&reference), "{what}");
        let again = together(&llm);
        assert_eq!(tokens(&again), tokens(&reference), "{what}, again");
        (first, again)
    };

    let (_, again) = check("a batch", &with_cache(dtype, |_| ()));
    assert!(again.iter().map(|outcome| outcome.num_cached_tokens).sum::<usize>() > 64, "no prefix hit");

    check(
        "chunked prompts",
        &with_cache(dtype, |limits| {
            (limits.max_num_seqs, limits.max_num_batched_tokens) = (7, Some(7));
        }),
    );
    check("multi-step", &with_cache(dtype, |limits| limits.num_scheduler_steps = 5));
    check("small blocks", &with_cache(dtype, |limits| limits.block_size = 8));
    check("odd blocks", &with_cache(dtype, |limits| limits.block_size = 5));
    check("one thread", &LlmOptions { threads: Some(1), ..with_cache(dtype, |_| ()) });
    check("five threads", &LlmOptions { threads: Some(5), ..with_cache(dtype, |_| ()) });

    // A cache that holds the longest sequence and little more.
    let bytes = 288 * KvCache::bytes_per_token(reference_llm.model_config(), 16, dtype) as u64;
    let small = with_cache(dtype, |limits| {
        limits.max_model_len = Some(256);
        limits.block_size = 16;
        limits.kv_cache_memory_bytes = Some(bytes);
    });
    // On a busy machine requests may come so slowly that each has the cache to itself.
    let is_preempted = || {
        let (first, again) = check("preemption", &small);
        first.iter().chain(&again).any(|outcome| outcome.num_preemptions > 0)
    };
    assert!((0..20).any(|_| is_preempted()), "no preemption");
}

/// Latent attention has two modes, whose results differ by the rounding of activations to eight bits: which of them
/// computes a token must not depend on the schedule, nor on what a prefix was when it was computed.
#[test]
fn latent_attention_gives_the_same_tokens_however_it_is_scheduled() {
    // Prompts around whole groups of 32 tokens, with a common beginning.
    let prompt = |len: u32| (0..len).map(|at| (at * at * 7 + at * 13 + 5) % 240 + 3).collect::<Vec<_>>();
    let prompts: Vec<Vec<u32>> = [70, 20, 31, 32, 33, 64, 90, 40].map(prompt).into();
    let params = SamplingParams { max_tokens: Some(24), ignore_eos: true, ..SamplingParams::greedy() };
    for (fixture, dtype) in [
        ("youtu/youtu.q4_0.gguf", KvCacheDType::F16),
        ("youtu/youtu.q4_0.gguf", KvCacheDType::Q8_0),
        ("youtu/youtu.q4_0.gguf", KvCacheDType::Fp8E4m3),
        ("deepseek_v2_lite/deepseek_v2_lite.q4_0.gguf", KvCacheDType::F16),
        ("glm4_moe_lite/glm4_moe_lite.q8_0.gguf", KvCacheDType::F16),
    ] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny").join(fixture);
        let load = |change: &dyn Fn(&mut EngineLimits)| {
            let mut options = LlmOptions { kv_cache_dtype: dtype.into(), ..LlmOptions::default() };
            options.limits.max_model_len = Some(200);
            options.limits.kv_cache_memory_bytes = Some(4 << 20);
            change(&mut options.limits);
            load_files("tiny", ModelFiles::Gguf(path.clone()), &options)
        };
        let submit = |llm: &Llm, prompt: &Vec<u32>| {
            llm.engine().submit(Request::new(prompt.clone(), params.clone())).unwrap()
        };
        let alone = load(&|limits| {
            (limits.max_num_seqs, limits.enable_prefix_caching) = (1, false);
            limits.speculative = SpeculativeConfig::off();
        });
        let one_by_one = |llm: &Llm, prompts: &[Vec<u32>]| -> Vec<Vec<u32>> {
            prompts.iter().map(|prompt| collect(submit(llm, prompt), 1).tokens.remove(0)).collect()
        };
        let expected = one_by_one(&alone, &prompts);
        // The continuation of a conversation: what was generated is now part of a prompt.
        let turns: Vec<Vec<u32>> = prompts
            .iter()
            .zip(&expected)
            .map(|(prompt, output)| [prompt, &output[..], &[9, 8, 7]].concat())
            .collect();
        let next = one_by_one(&alone, &turns);
        let mut num_preemptions = 0;
        let mut check = |what: &str, change: &dyn Fn(&mut EngineLimits)| {
            let llm = load(change);
            for (prompts, expected) in [(&prompts, &expected), (&prompts, &expected), (&turns, &next)] {
                let streams: Vec<_> = prompts.iter().map(|prompt| submit(&llm, prompt)).collect();
                for ((stream, prompt), expected) in streams.into_iter().zip(prompts).zip(expected) {
                    let outcome = collect(stream, 1);
                    assert_eq!(
                        &outcome.tokens[0],
                        expected,
                        "{fixture}, {what}, a prompt of {}",
                        prompt.len()
                    );
                    num_preemptions += outcome.num_preemptions;
                }
            }
        };
        check("a batch", &|_| ());
        check("one by one", &|limits| limits.max_num_seqs = 1);
        for budget in [8, 31, 32, 33, 50] {
            check(&format!("chunks of {budget}"), &|limits| {
                (limits.max_num_seqs, limits.max_num_batched_tokens) = (8, Some(budget));
            });
        }
        for block_size in [8, 5, 48] {
            check(&format!("blocks of {block_size}"), &|limits| limits.block_size = block_size);
        }
        check("multi-step", &|limits| limits.num_scheduler_steps = 5);
        // A cache that holds the longest sequence and little more.
        let config = ModelConfig::from_checkpoint(&Checkpoint::open(&path).unwrap()).unwrap();
        let bytes = 256 * KvCache::bytes_per_token(&config, 8, dtype) as u64;
        check("preemption", &|limits| {
            (limits.block_size, limits.kv_cache_memory_bytes) = (8, Some(bytes));
        });
        assert!(num_preemptions > 0, "no preemption");
    }
}

/// Tokens with their log-probabilities, as bits, for each choice.
fn ranked(llm: &Llm, request: Request) -> Vec<Vec<(u32, Vec<u32>)>> {
    let mut choices = vec![Vec::new(); request.params.n];
    for event in llm.engine().submit(request).unwrap() {
        if let Event::Token { index, token_id, logprobs, .. } = event {
            let logprobs = logprobs.into_iter();
            let bits = logprobs.flat_map(|logprobs| {
                std::iter::once(logprobs.logprob)
                    .chain(logprobs.top.into_iter().map(|(_, logprob)| logprob))
                    .map(f32::to_bits)
                    .collect::<Vec<_>>()
            });
            choices[index].push((token_id, bits.collect()));
        }
    }
    choices
}

/// Whatever is drafted: right, wrong in some positions, or wrong everywhere; greedily, seeded, with penalties, for
/// several choices and under a grammar; the built-in model with every instruction set of this processor, and latent
/// attention and experts.
#[test]
fn drafts_change_no_token_and_no_log_probability() {
    let fixture = |name: &str| {
        ModelFiles::Gguf(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny").join(name))
    };
    let models = [
        ModelFiles::Demo,
        fixture("youtu/youtu.q4_0.gguf"),
        fixture("deepseek_v2_lite/deepseek_v2_lite.q4_0.gguf"),
    ];
    let best = CpuLevel::detect();
    let levels = |files: &ModelFiles| match files {
        ModelFiles::Demo => CpuLevel::available().to_vec(),
        _ => vec![best],
    };
    let cases = models.iter().flat_map(|files| {
        let dtypes = [KvCacheDType::F16, KvCacheDType::Q8_0, KvCacheDType::Fp8E4m3].into_iter();
        dtypes.flat_map(move |dtype| levels(files).into_iter().map(move |level| (files, dtype, level)))
    });
    for (files, dtype, level) in cases {
        let load = |num_speculative_tokens: usize| {
            let mut options = LlmOptions { cpu_level: Some(level), ..with_cache(dtype, |_| ()) };
            options.limits.speculative = SpeculativeConfig {
                method: SpeculativeMethod::Suffix,
                num_speculative_tokens,
                is_adaptive: false,
            };
            if !matches!(files, ModelFiles::Demo) {
                options.limits.max_model_len = Some(200);
            }
            load_files("model", files.clone(), &options)
        };
        let plain = load(0);
        let requests = drafted_requests(&plain, matches!(files, ModelFiles::Demo));
        let expected: Vec<_> = requests.iter().map(|request| ranked(&plain, request.clone())).collect();
        assert_eq!(plain.engine().stats().unwrap().speculation.num_drafts, 0);
        for num_tokens in [3, 8] {
            let llm = load(num_tokens);
            for (request, expected) in requests.iter().zip(&expected) {
                let right: Vec<u32> = expected[0].iter().map(|(token_id, _)| *token_id).collect();
                let wrong = |every: usize| {
                    let token =
                        |(at, token): (usize, &u32)| if at % every == every - 1 { token ^ 1 } else { *token };
                    right.iter().enumerate().map(token).collect::<Vec<u32>>()
                };
                let predictions = [right.clone(), wrong(4), wrong(1)];
                for prediction in predictions.into_iter().take(if num_tokens == 3 { 2 } else { 3 }) {
                    let request = Request { prediction, ..request.clone() };
                    let what = format!("{} {dtype} {num_tokens} {files:?}", level.name());
                    assert_eq!(&ranked(&llm, request), expected, "{what}");
                }
            }
            let speculation = llm.engine().stats().unwrap().speculation;
            assert!(speculation.num_accepted_tokens > 0, "{speculation:?}");
            assert!(speculation.num_accepted_tokens < speculation.num_draft_tokens, "{speculation:?}");
        }
    }
}

/// The built-in model with some of its bits turned, in a file: the same tokens, and often others to come.
fn model_that_is_much_alike(folder: &Path) -> ModelFiles {
    let mut bytes = tinyvllm::demo::MODEL.to_vec();
    // After the header, which has the tokenizer. The lowest bits of weights and scales.
    let first = bytes.len() / 2;
    bytes[first..].iter_mut().step_by(7).for_each(|byte| *byte ^= 1);
    let path = folder.join("alike.gguf");
    std::fs::write(&path, bytes).unwrap();
    ModelFiles::Gguf(path)
}

#[test]
fn a_draft_model_changes_nothing_but_the_time() {
    let folder = tempfile::tempdir().unwrap();
    let model =
        |files| ResolvedModel { display_name: "draft".to_owned(), files, revision: None, notice: None };
    let load = |draft: Option<ModelFiles>, change: &dyn Fn(&mut EngineLimits)| {
        let mut options = with_limits(|limits| {
            limits.speculative = SpeculativeConfig {
                method: SpeculativeMethod::Forced,
                num_speculative_tokens: 4,
                is_adaptive: false,
            };
            change(limits);
        });
        options.draft_model = draft.map(model);
        load_files("demo", ModelFiles::Demo, &options)
    };
    let plain = load(None, &|_| ());
    let requests = drafted_requests(&plain, true);
    let expected: Vec<_> = requests.iter().map(|request| ranked(&plain, request.clone())).collect();
    // Itself, which is right all the time, also where prompts take several steps; and one that is not.
    for (draft, max_chunk) in [
        (ModelFiles::Demo, None),
        (ModelFiles::Demo, Some(40)),
        (model_that_is_much_alike(folder.path()), None),
    ] {
        let is_itself = matches!(draft, ModelFiles::Demo);
        let llm = load(Some(draft), &|limits| limits.max_num_batched_tokens = max_chunk);
        for (request, expected) in requests.iter().zip(&expected) {
            assert_eq!(&ranked(&llm, request.clone()), expected, "{is_itself} {max_chunk:?}");
        }
        let speculation = llm.engine().stats().unwrap().speculation;
        let share = speculation.num_accepted_tokens as f64 / speculation.num_draft_tokens as f64;
        // Under the grammar it drafts without it.
        assert!(if is_itself { share > 0.9 } else { share > 0.05 && share < 0.95 }, "{speculation:?}");
        let streams: Vec<_> =
            requests.iter().map(|request| llm.engine().submit(request.clone()).unwrap()).collect();
        for (stream, expected) in streams.into_iter().zip(&expected) {
            let mut tokens = vec![Vec::new(); expected.len()];
            for event in stream {
                if let Event::Token { index, token_id, .. } = event {
                    tokens[index].push(token_id);
                }
            }
            let expected: Vec<Vec<u32>> =
                expected.iter().map(|choice| choice.iter().map(|(token, _)| *token).collect()).collect();
            assert_eq!(tokens, expected, "all at once");
        }
    }
}

#[test]
fn a_draft_model_has_the_same_tokens() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let mut options = with_limits(|_| ());
    options.draft_model = Some(ResolvedModel {
        display_name: "tiny".to_owned(),
        files: ModelFiles::Folder(fixtures.join("tiny/qwen3")),
        revision: None,
        notice: None,
    });
    let model = ResolvedModel {
        display_name: "demo".to_owned(),
        files: ModelFiles::Demo,
        revision: None,
        notice: None,
    };
    let error = Llm::load(&model, &options, &NoProgress).unwrap_err();
    assert!(error.message().starts_with("tiny cannot draft: "), "{error}");
}

/// Greedy, drawn, drawn with penalties, and three choices, with log-probabilities.
fn ways_to_sample(max_tokens: usize) -> [SamplingParams; 4] {
    let greedy = SamplingParams {
        max_tokens: Some(max_tokens),
        ignore_eos: true,
        logprobs: Some(2),
        ..SamplingParams::greedy()
    };
    let seeded = SamplingParams { temperature: 0.8, top_p: 0.95, seed: Some(11), ..greedy.clone() };
    let penalised = SamplingParams {
        repetition_penalty: 1.3,
        frequency_penalty: 0.2,
        min_tokens: 5,
        logit_bias: [(20, 3.0)].into(),
        ..seeded.clone()
    };
    let several = SamplingParams { n: 3, top_k: 30, ..seeded.clone() };
    [greedy, seeded, penalised, several]
}

fn drafted_requests(llm: &Llm, has_grammar: bool) -> Vec<Request> {
    let prompt = |len: u32| (0..len).map(|at| (at * at * 7 + at * 13 + 5) % 240 + 3).collect::<Vec<_>>();
    let [greedy, seeded, penalised, several] = ways_to_sample(20);
    let mut requests = vec![
        Request::new(prompt(33), greedy),
        Request::new(prompt(70), seeded.clone()),
        Request::new(prompt(31), penalised),
        Request::new(prompt(5), several),
    ];
    if has_grammar {
        let spec = GrammarSpec::Regex("\\{\"name\": \"[a-z]{2,9}\", \"number\": [0-9]{1,20}\\}".to_owned());
        let constraint: Option<Arc<dyn Constraint>> = Some(llm.compile_grammar(&spec).unwrap());
        requests.push(Request { constraint, ..Request::new(prompt(12), seeded) });
    }
    requests
}

/// The same of the definitions in candle's tensors: nothing is said there of the order of additions, but rounding is
/// far from what decides a token.
#[test]
fn the_reference_gives_the_same_tokens_however_they_are_scheduled() {
    let with_limits = |change: fn(&mut EngineLimits)| LlmOptions {
        kernels: KernelChoice::Reference,
        device: DeviceChoice::Cpu,
        ..with_limits(change)
    };
    let first = |llm: &Llm| {
        requests(llm).into_iter().map(|mut request| {
            request.params.max_tokens = Some(12);
            request
        })
    };
    let run = |options: &LlmOptions, together: bool| {
        let llm = load(options);
        assert!(
            llm.summary().contains("demo on cpu (reference kernels: candle in f32)"),
            "{}",
            llm.summary()
        );
        let submit = |request: Request| (request.params.n, llm.engine().submit(request).unwrap());
        let collect = |(n, stream)| collect(stream, n).tokens;
        if together {
            let streams: Vec<_> = first(&llm).map(submit).collect();
            streams.into_iter().map(collect).collect::<Vec<_>>()
        } else {
            first(&llm).map(submit).map(collect).collect()
        }
    };
    let expected = run(&with_limits(|limits| limits.enable_prefix_caching = false), false);
    assert!(expected.iter().flatten().all(|tokens| tokens.len() == 12));
    let check = |what: &str, change: fn(&mut EngineLimits)| {
        assert_eq!(run(&with_limits(change), true), expected, "{what}");
    };
    check("a batch", |_| ());
    check("chunked prompts", |limits| (limits.max_num_seqs, limits.max_num_batched_tokens) = (7, Some(7)));
    check("multi-step and small blocks", |limits| (limits.num_scheduler_steps, limits.block_size) = (5, 8));
}

/// A prompt's log-probabilities, and its logits if requested.
fn prompt_report(llm: &Llm, request: Request) -> (Vec<RankedLogprobs>, Vec<f32>) {
    let (mut report, mut rows) = (Vec::new(), Vec::new());
    for event in llm.engine().submit(request).unwrap() {
        match event {
            Event::PromptLogprobs { logprobs } => report.extend(logprobs),
            Event::PromptLogits { logits } => rows.extend(logits),
            Event::Token { .. }
            | Event::Finished { .. }
            | Event::Hidden { .. }
            | Event::PromptProgress { .. } => {}
        }
    }
    (report, rows)
}

#[test]
fn prompt_logprobs_are_exact_and_the_same_however_they_are_computed() {
    let llm = load(&with_limits(|_| ()));
    let prompts: Vec<Vec<u32>> = requests(&llm).into_iter().map(|request| request.prompt_token_ids).collect();
    let params = SamplingParams { max_tokens: Some(1), ..SamplingParams::greedy() };
    let request =
        |ids: &Vec<u32>| Request { prompt_logprobs: Some(5), ..Request::new(ids.clone(), params.clone()) };
    let mut whole = Vec::new();
    for ids in &prompts {
        let (report, logits) = prompt_report(&llm, Request { prompt_logits: true, ..request(ids) });
        let vocab_size = logits.len() / ids.len();
        assert_eq!(report.len(), ids.len() - 1);
        for ((row, &id), found) in logits.chunks(vocab_size).zip(&ids[1..]).zip(&report) {
            let row: Vec<f64> = row.iter().map(|logit| f64::from(*logit)).collect();
            let max = row.iter().copied().fold(f64::MIN, f64::max);
            let log_sum = max + row.iter().map(|logit| (logit - max).exp()).sum::<f64>().ln();
            let check = |id: u32, logprob: f32| {
                let wanted = row[id as usize] - log_sum;
                assert!((f64::from(logprob) - wanted).abs() < 1e-5, "{logprob} is not {wanted}");
            };
            check(id, found.logprobs.logprob);
            found.logprobs.top.iter().for_each(|(id, logprob)| check(*id, *logprob));
            let num_above = row.iter().filter(|logit| **logit > row[id as usize]).count();
            assert_eq!(found.rank as usize, num_above + 1);
            assert!((row[found.logprobs.top[0].0 as usize] - max).abs() < f64::EPSILON);
        }
        // In a cache that has the whole prompt by now.
        assert_eq!(prompt_report(&llm, request(ids)).0, report);
        whole.push(report);
    }
    let chunked = load(&with_limits(|limits| {
        (limits.max_num_seqs, limits.max_num_batched_tokens) = (7, Some(7));
    }));
    let together: Vec<_> = prompts.iter().map(|ids| chunked.engine().submit(request(ids)).unwrap()).collect();
    for (stream, wanted) in together.into_iter().zip(&whole) {
        let mut found = Vec::new();
        for event in stream {
            if let Event::PromptLogprobs { logprobs } = event {
                found.extend(logprobs);
            }
        }
        assert_eq!(&found, wanted);
    }
}

/// Prompts with the tokens and texts that the training script's own forward pass gives, in single
/// precision on the weights of the file.
fn goldens() -> Vec<serde_json::Value> {
    serde_json::from_str(include_str!("fixtures/demo/greedy.json")).unwrap()
}

fn ids(value: &serde_json::Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

#[test]
fn the_built_in_model_writes_what_its_training_script_writes() {
    says_what_its_training_script_says(&with_limits(|_| ()), usize::MAX);
}

#[test]
fn the_reference_writes_what_the_training_script_writes() {
    let options =
        LlmOptions { kernels: KernelChoice::Reference, device: DeviceChoice::Cpu, ..with_limits(|_| ()) };
    says_what_its_training_script_says(&options, 3);
}

fn says_what_its_training_script_says(options: &LlmOptions, num_stories: usize) {
    let llm = load(options);
    let tokenizer = llm.tokenizer().unwrap();
    for golden in goldens().iter().take(num_stories) {
        let prompt = golden["prompt"].as_str().unwrap();
        let prompt_ids = llm.encode_raw(prompt).unwrap();
        assert_eq!(prompt_ids, ids(&golden["prompt_ids"]), "{prompt}");
        let greedy_ids = ids(&golden["greedy_ids"]);
        let params = SamplingParams { max_tokens: Some(greedy_ids.len() + 1), ..SamplingParams::greedy() };
        let tokens: Vec<u32> = generated(llm.engine().submit(Request::new(prompt_ids, params)).unwrap());
        let (end, text) = tokens.split_last().unwrap();
        assert_eq!(text, greedy_ids, "{prompt}");
        assert!(llm.engine().model_limits().eos_token_ids.contains(end), "{prompt}");
        assert_eq!(tokenizer.decode(text, true), golden["greedy"].as_str().unwrap());
    }
}

/// What the built-in model answers to a first message, greedily, in at most 60 tokens.
fn answer_to(llm: &Llm, message: &str) -> (String, FinishReason) {
    let prompt = llm.encode_chat(&[Message::new("user", message)], &ChatOptions::default()).unwrap();
    let params = SamplingParams { max_tokens: Some(60), ..SamplingParams::greedy() };
    let mut answer = String::new();
    let mut ended = None;
    for event in llm.submit(prompt, params).unwrap() {
        match event {
            TextEvent::Delta { text, .. } => answer.push_str(&text),
            TextEvent::Finished { reason, .. } => ended = Some(reason),
            TextEvent::PromptLogprobs { .. } | TextEvent::PromptProgress { .. } => {
                panic!("they were not requested")
            }
        }
    }
    (answer, ended.unwrap())
}

#[test]
fn it_answers_in_its_chat_template() {
    let llm = load(&with_limits(|_| ()));
    let (answer, reason) = answer_to(&llm, "Are you a big model?");
    assert_eq!(reason, FinishReason::Stop);
    assert!(answer.starts_with("No, I am a tiny demo model"), "{answer}");
}

/// The most natural first prompt is a beginning; what it cannot know, it still says that it does not.
#[test]
fn a_beginning_gets_a_story_and_a_hard_question_a_modest_answer() {
    let llm = load(&with_limits(|_| ()));
    for opening in
        ["Once upon a time", "once upon a time...", "It was a dark and stormy night", "Long ago", "One day"]
    {
        let (answer, _) = answer_to(&llm, opening);
        assert!(answer.contains("lived") && !answer.contains("I "), "{opening}: {answer}");
    }
    for question in
        ["Why is the sky blue?", "What is quantum physics?", "How do planes fly?", "Explain gravity"]
    {
        let (answer, _) = answer_to(&llm, question);
        assert!(answer.contains("do not know") || answer.contains("too hard"), "{question}: {answer}");
    }
}

#[test]
fn every_instruction_set_writes_the_story() {
    for &level in CpuLevel::available() {
        let llm = load(&LlmOptions { cpu_level: Some(level), ..with_limits(|_| ()) });
        let golden = &goldens()[0];
        let greedy_ids = ids(&golden["greedy_ids"]);
        let params = SamplingParams { max_tokens: Some(64), ..SamplingParams::greedy() };
        let request = Request::new(llm.encode_raw(tinyvllm::demo::PROMPT).unwrap(), params);
        let tokens = generated(llm.engine().submit(request).unwrap());
        assert_eq!(tokens, greedy_ids[..64], "{}", level.name());
    }
}

fn generated(events: impl Iterator<Item = Event>) -> Vec<u32> {
    let token = |event| match event {
        Event::Token { token_id, .. } => Some(token_id),
        _ => None,
    };
    events.filter_map(token).collect()
}
