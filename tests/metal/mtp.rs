//! Models that draft for themselves, on the emulated GPU: the same tokens, in fewer steps.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tinyvllm::config::{SpeculativeConfig, SpeculativeMethod};
use tinyvllm::engine::Request;
use tinyvllm::hub::{ModelFiles, ResolvedModel};
use tinyvllm::llm::{Llm, LlmOptions, NoProgress};
use tinyvllm::ops::gpu::{ChipClass, Gpu};
use tinyvllm::runner::EngineLimits;
use tinyvllm::sampling::SamplingParams;

use crate::emulator::{Emulator, Timing, Variant};
use crate::mtp_model::{Layers, folder};
use crate::recorder::Recorder;
use crate::schedules::tokens;

fn load(gpu: &Arc<dyn Gpu>, folder: &Path, num_tokens: usize, change: &dyn Fn(&mut EngineLimits)) -> Llm {
    let files = ModelFiles::Folder(folder.to_owned());
    let model = ResolvedModel { display_name: "mtp".to_owned(), files, revision: None, notice: None };
    let mut options = LlmOptions { gpu: Some(Arc::clone(gpu)), ..LlmOptions::default() };
    options.limits.max_model_len = Some(128);
    options.limits.kv_cache_memory_bytes = Some(1 << 20);
    options.limits.speculative = SpeculativeConfig {
        method: SpeculativeMethod::Mtp,
        num_speculative_tokens: num_tokens,
        is_adaptive: false,
    };
    change(&mut options.limits);
    Llm::load(&model, &options, &NoProgress).unwrap()
}

fn requests() -> Vec<Request> {
    let prompt = |len: u32| (0..len).map(|at| (at * at * 7 + at * 13 + 5) % 120 + 3).collect::<Vec<_>>();
    let greedy = SamplingParams { max_tokens: Some(9), ignore_eos: true, ..SamplingParams::greedy() };
    let seeded = SamplingParams { temperature: 0.8, seed: Some(11), ..greedy.clone() };
    let penalised = SamplingParams { repetition_penalty: 1.3, logprobs: Some(1), ..seeded.clone() };
    let several = SamplingParams { n: 2, top_k: 30, ..seeded.clone() };
    [(33, greedy), (40, seeded), (20, penalised), (5, several)]
        .into_iter()
        .map(|(len, params)| Request::new(prompt(len), params))
        .collect()
}

#[test]
fn what_a_model_drafts_for_itself_changes_no_token() {
    for class in [ChipClass::Base, ChipClass::Nvidia] {
        for layers in [Layers::Full, Layers::Little, Layers::Nothing] {
            let Some(gpu) = Emulator::new(Variant::Fast) else { return };
            let gpu: Arc<dyn Gpu> = Arc::new(gpu.with_timing(Timing::Late).with_class(class));
            let folder = folder(layers, false);
            let plain = load(&gpu, folder.path(), 0, &|limits| limits.enable_prefix_caching = false);
            let alone: Vec<_> =
                requests().into_iter().flat_map(|request| tokens(&plain, vec![request])).collect();
            let chunks = |limits: &mut EngineLimits| {
                (limits.max_num_seqs, limits.max_num_batched_tokens) = (8, Some(8));
            };
            let small = |limits: &mut EngineLimits| limits.block_size = 8;
            // The block rests where it is not right, and steps are queued early.
            let resting = |limits: &mut EngineLimits| limits.speculative.is_adaptive = true;
            let changes: [&dyn Fn(&mut EngineLimits); 4] = [&|_| (), &chunks, &small, &resting];
            for change in changes {
                let llm = load(&gpu, folder.path(), 3, change);
                for _ in 0..2 {
                    assert_eq!(tokens(&llm, requests()), alone, "{class:?} {layers:?}");
                }
                // Drafts of a step are few where matmuls of many rows round otherwise.
                for (request, expected) in requests().into_iter().zip(&alone) {
                    assert_eq!(&tokens(&llm, vec![request])[0], expected, "{class:?} {layers:?}, alone");
                }
                let speculation = llm.engine().stats().unwrap().speculation;
                assert!(speculation.num_drafts > 0, "{speculation:?}");
                assert!(layers != Layers::Nothing || speculation.num_accepted_tokens > 0, "{speculation:?}");
            }
        }
    }
}

/// Those of the block and of its drafts too.
#[test]
fn nothing_is_compiled_in_a_request_that_a_model_drafts_for() {
    for class in [ChipClass::Base, ChipClass::Nvidia] {
        let recorder = Arc::new(Recorder::new(Duration::MAX).with_class(class));
        let gpu: Arc<dyn Gpu> = recorder.clone();
        let folder = folder(Layers::Full, false);
        let llm = load(&gpu, folder.path(), 3, &|limits| {
            (limits.max_num_batched_tokens, limits.max_num_seqs) = (Some(80), 16);
            limits.enable_prefix_caching = false;
        });
        let at_load = recorder.compiled();
        for n in [1, 2, 3, 5, 9, 16] {
            for prompt_len in [1, 2, 3, 5, 9, 17, 31, 32, 33, 40, 64, 70, 100] {
                let prompt: Vec<u32> = (0..prompt_len).map(|index| 3 + index).collect();
                for logprobs in [None, Some(1)] {
                    let params = SamplingParams {
                        n,
                        max_tokens: Some(5),
                        ignore_eos: true,
                        logprobs,
                        ..SamplingParams::greedy()
                    };
                    let num_tokens: usize = tokens(&llm, vec![Request::new(prompt.clone(), params)])[0]
                        .iter()
                        .map(Vec::len)
                        .sum();
                    assert_eq!(num_tokens, 5 * n);
                }
            }
        }
        assert!(llm.engine().stats().unwrap().speculation.num_drafts > 0);
        assert!(llm.engine().submit(Request::hidden_state(vec![3, 4, 5])).unwrap().count() > 0);
        let compiled = recorder.compiled();
        let late: Vec<_> = compiled.keys().filter(|name| !at_load.contains_key(*name)).collect();
        assert!(late.is_empty(), "{class:?}: compiled in a request: {late:?}");
        let unused: Vec<_> = compiled.iter().filter(|(_, num_dispatches)| **num_dispatches == 0).collect();
        assert!(unused.is_empty(), "{class:?}: compiled for nothing: {unused:?}");
    }
}
