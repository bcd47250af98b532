//! Greedy tokens and perplexity, against a forward pass in double precision.

use std::path::Path;

use tinyvllm::engine::{Event, Request};
use tinyvllm::llm::{DeviceChoice, KernelChoice, Llm, LlmOptions};
use tinyvllm::ops::KvCacheDType;
use tinyvllm::sampling::SamplingParams;
use tinyvllm::weights::Quantization;

use super::convert::f32_folder;
use super::{expected, gguf, ids, load, with_limits};

/// With a cache that rounds nothing either.
fn exact() -> LlmOptions {
    LlmOptions { kv_cache_dtype: KvCacheDType::F32.into(), ..with_limits(|_| ()) }
}

#[test]
fn greedy_tokens_are_those_of_the_independent_forward_pass() {
    let Some(gguf) = gguf() else { return };
    let llm = load(&f32_folder(&gguf), exact());
    let goldens = expected()["greedy"].as_array().unwrap().clone();
    assert_eq!(goldens.len(), 10);
    let streams = goldens.iter().map(|golden| {
        let prompt = golden["prompt"].as_str().unwrap();
        let prompt_ids = llm.encode_raw(prompt).unwrap();
        assert_eq!(prompt_ids, ids(&golden["prompt_ids"]), "{prompt}");
        let params = SamplingParams { max_tokens: Some(200), ignore_eos: true, ..SamplingParams::greedy() };
        llm.engine().submit(Request::new(prompt_ids, params)).unwrap()
    });
    for (stream, golden) in streams.collect::<Vec<_>>().into_iter().zip(&goldens) {
        let token = |event| match event {
            Event::Token { token_id, .. } => Some(token_id),
            _ => None,
        };
        let tokens: Vec<u32> = stream.filter_map(token).collect();
        let wanted = ids(&golden["ids"]);
        assert_eq!(wanted.len(), 200);
        let first = tokens.iter().zip(&wanted).position(|(found, wanted)| found != wanted);
        assert!(tokens == wanted, "{}: the first difference is at {first:?}", golden["prompt"]);
    }
}

/// The perplexity of the first `num_chunks` chunks of the text.
fn perplexity(llm: &Llm, num_chunks: usize) -> f64 {
    let golden = &expected()["perplexity"];
    let tokens = llm.encode_raw(include_str!("../fixtures/smollm2/text.txt")).unwrap();
    assert_eq!(tokens.len() as u64, golden["num_tokens"].as_u64().unwrap());
    let params = SamplingParams { max_tokens: Some(1), ..SamplingParams::greedy() };
    let chunks = tokens.chunks(golden["piece_len"].as_u64().unwrap() as usize).take(num_chunks);
    let streams = chunks.map(|chunk| {
        let request = Request { prompt_logprobs: Some(0), ..Request::new(chunk.to_vec(), params.clone()) };
        (chunk.len() - 1, llm.engine().submit(request).unwrap())
    });
    let mut losses = Vec::new();
    for (num, stream) in streams.collect::<Vec<_>>() {
        let before = losses.len();
        for event in stream {
            if let Event::PromptLogprobs { logprobs } = event {
                losses.extend(logprobs.iter().map(|found| -f64::from(found.logprobs.logprob)));
            }
        }
        assert_eq!(losses.len() - before, num);
    }
    (losses.iter().sum::<f64>() / losses.len() as f64).exp()
}

/// For each type of the cache the perplexity of a part of the text, and how many of 400 tokens that a cache in single
/// precision leads to are the likeliest ones with it too. The weights are in single precision, so that nothing else rounds.
#[test]
fn types_of_the_cache_are_nearly_as_good_as_single_precision() {
    let Some(gguf) = gguf() else { return };
    let folder = f32_folder(&gguf);
    let with = |dtype: KvCacheDType| {
        load(&folder, LlmOptions { kv_cache_dtype: dtype.into(), ..with_limits(|_| ()) })
    };
    let exact = with(KvCacheDType::F32);
    let goldens = expected()["greedy"].as_array().unwrap().clone();
    let params = SamplingParams { max_tokens: Some(200), ignore_eos: true, ..SamplingParams::greedy() };
    let sequences: Vec<(usize, Vec<u32>)> = goldens[..2]
        .iter()
        .map(|golden| {
            let mut sequence = ids(&golden["prompt_ids"]);
            let num_prompt = sequence.len();
            let stream = exact.engine().submit(Request::new(sequence.clone(), params.clone())).unwrap();
            sequence.extend(stream.filter_map(|event| match event {
                Event::Token { token_id, .. } => Some(token_id),
                _ => None,
            }));
            assert_eq!(sequence.len(), num_prompt + 200);
            (num_prompt, sequence)
        })
        .collect();
    let agreement = |llm: &Llm| {
        let params = SamplingParams { max_tokens: Some(1), ..SamplingParams::greedy() };
        let mut num_same = 0;
        for (num_prompt, sequence) in &sequences {
            let request = Request::new(sequence.clone(), params.clone());
            let stream = llm.engine().submit(Request { prompt_logprobs: Some(0), ..request }).unwrap();
            let ranks: Vec<u32> = stream
                .filter_map(|event| match event {
                    Event::PromptLogprobs { logprobs } => Some(logprobs),
                    _ => None,
                })
                .flatten()
                .map(|found| found.rank)
                .collect();
            // The first token of the prompt has none.
            num_same += ranks[num_prompt - 1..].iter().filter(|rank| **rank == 1).count();
        }
        num_same
    };
    let measured = KvCacheDType::ALL.map(|dtype| {
        let llm = with(dtype);
        (dtype, perplexity(&llm, 4), agreement(&llm))
    });
    let of = |wanted: KvCacheDType| measured.iter().find(|(dtype, ..)| *dtype == wanted).unwrap();
    let (_, half, _) = *of(KvCacheDType::F16);
    for (dtype, perplexity, num_same) in measured {
        println!("{dtype}: perplexity {perplexity:.4}, {num_same} of 400 tokens");
        let (tolerance, least) = match dtype {
            KvCacheDType::F32 | KvCacheDType::F16 => (5e-4, 396),
            KvCacheDType::Bf16 => (3e-3, 385),
            KvCacheDType::Q8_0 => (2e-3, 385),
            KvCacheDType::Fp8E4m3 => (8e-3, 370),
        };
        let difference = perplexity / half - 1.0;
        assert!(difference.abs() < tolerance, "{dtype}: {measured:?}");
        assert!(num_same >= least, "{dtype}: {measured:?}");
    }
}

/// That of the forward pass, over the same chunks.
fn expected_perplexity(num_chunks: usize) -> f64 {
    let losses = expected()["perplexity"]["losses"].clone();
    let (mut sum, mut num) = (0.0, 0);
    for chunk in losses.as_array().unwrap().iter().take(num_chunks) {
        sum += chunk[0].as_f64().unwrap();
        num += chunk[1].as_u64().unwrap();
    }
    (sum / num as f64).exp()
}

/// Relative to that of the forward pass.
#[track_caller]
fn check(path: &Path, options: LlmOptions, num_chunks: usize, tolerance: f64) {
    let what = format!("{:?} {:?} {:?}", options.kernels, options.quantization, path.extension());
    let found = perplexity(&load(path, options), num_chunks);
    let wanted = expected_perplexity(num_chunks);
    let difference = found / wanted - 1.0;
    assert!(
        difference.abs() < tolerance,
        "{what}: perplexity {found}, which is {difference:+} from {wanted}"
    );
}

#[test]
fn single_precision_has_the_perplexity_of_the_independent_forward_pass() {
    let Some(gguf) = gguf() else { return };
    check(&f32_folder(&gguf), exact(), usize::MAX, 1e-4);
}

#[test]
fn so_has_the_reference() {
    let Some(gguf) = gguf() else { return };
    let options = LlmOptions { kernels: KernelChoice::Reference, device: DeviceChoice::Cpu, ..exact() };
    check(&f32_folder(&gguf), options, 1, 1e-4);
}

#[test]
fn the_perplexity_of_the_file_and_of_eight_bits_is_nearly_that() {
    let Some(gguf) = gguf() else { return };
    check(&gguf, with_limits(|_| ()), usize::MAX, 5e-3);
    let quantization = Some(Quantization::Q8_0);
    check(&f32_folder(&gguf), LlmOptions { quantization, ..with_limits(|_| ()) }, usize::MAX, 5e-3);
}

#[test]
fn four_bits_for_all_weights_cost_some_per_cent() {
    let Some(gguf) = gguf() else { return };
    let quantization = Some(Quantization::Q4K);
    check(&f32_folder(&gguf), LlmOptions { quantization, ..with_limits(|_| ()) }, usize::MAX, 0.06);
}
