//! All kernels of a model's steps are compiled while it is loaded, and none in a request.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tinyvllm::config::{SpeculativeConfig, SpeculativeMethod};
use tinyvllm::engine::{Event, Request};
use tinyvllm::hub::{ModelFiles, ResolvedModel};
use tinyvllm::llm::{Llm, LlmOptions, LoadProgress, NoProgress};
use tinyvllm::ops::gpu::ChipClass;
use tinyvllm::ops::{Context, KvCacheDType};
use tinyvllm::sampling::SamplingParams;
use tinyvllm::self_test::{self, Check, Effort, Family};
use tinyvllm::weights::Quantization;

use crate::recorder::Recorder;

#[derive(Debug, Clone, Copy)]
struct Case {
    /// In the folder of fixtures; none is the built-in model.
    model: Option<&'static str>,
    quantization: Option<Quantization>,
    dtype: KvCacheDType,
    max_num_batched_tokens: usize,
    max_num_seqs: usize,
}

const DEMO: Case = Case {
    model: None,
    quantization: None,
    dtype: KvCacheDType::F16,
    max_num_batched_tokens: 512,
    max_num_seqs: 32,
};

fn load(gpu: Arc<Recorder>, case: Case, progress: &dyn LoadProgress) -> Llm {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let files = match case.model {
        None => ModelFiles::Demo,
        Some(name) if name.ends_with(".gguf") => ModelFiles::Gguf(fixtures.join(name)),
        Some(name) => ModelFiles::Folder(fixtures.join(name)),
    };
    let model = ResolvedModel { display_name: "test".to_owned(), files, revision: None, notice: None };
    let mut options = LlmOptions {
        gpu: Some(gpu),
        quantization: case.quantization,
        kv_cache_dtype: case.dtype.into(),
        ..LlmOptions::default()
    };
    options.limits.max_model_len = Some(512);
    options.limits.kv_cache_memory_bytes = Some(16 << 20);
    options.limits.max_num_batched_tokens = Some(case.max_num_batched_tokens);
    options.limits.max_num_seqs = case.max_num_seqs;
    options.limits.enable_prefix_caching = false;
    options.limits.speculative =
        SpeculativeConfig { is_adaptive: false, ..SpeculativeConfig::of(SpeculativeMethod::Forced) };
    Llm::load(&model, &options, progress).unwrap()
}

/// Generates with prompts and batches of many sizes, on the device and with help of the host.
fn generate(llm: &Llm, case: Case) {
    let submit = |request: Request| {
        for event in llm.engine().submit(request).unwrap() {
            if let Event::Finished { error, .. } = event {
                assert_eq!(error, None);
            }
        }
    };
    let prompt = |len: usize| (0..len as u32).map(|index| 3 + index % 200).collect::<Vec<_>>();
    let run = |prompt_len: usize, n: usize, prompt_logprobs: Option<usize>| {
        let params = SamplingParams {
            n,
            max_tokens: Some(3),
            ignore_eos: true,
            temperature: 0.8,
            top_k: 5,
            seed: Some(1),
            ..SamplingParams::default()
        };
        // The drafts differ from the output.
        let prediction = vec![7, 8, 9, 10];
        submit(Request { prompt_logprobs, prediction, ..Request::new(prompt(prompt_len), params) });
    };
    for n in [1, 2, 3, 4, 5, 9, 17, 32].into_iter().filter(|n| *n <= case.max_num_seqs) {
        run(7, n, None);
    }
    for prompt_len in [1, 2, 3, 4, 5, 8, 9, 16, 17, 33, 50, 70, 150, 300] {
        run(prompt_len, 1, None);
        run(prompt_len, 1, Some(1));
        submit(Request::hidden_state(prompt(prompt_len)));
    }
}

#[test]
fn nothing_is_compiled_in_a_request() {
    nothing_is_compiled_on(ChipClass::Base);
}

#[test]
fn nothing_is_compiled_in_a_request_on_tensor_cores() {
    nothing_is_compiled_on(ChipClass::Nvidia);
}

fn nothing_is_compiled_on(class: ChipClass) {
    let fixture = |model| Case { model: Some(model), ..DEMO };
    let cases = [
        DEMO,
        Case { max_num_batched_tokens: 3, max_num_seqs: 3, ..DEMO },
        Case { dtype: KvCacheDType::Bf16, max_num_batched_tokens: 12, max_num_seqs: 1, ..DEMO },
        // Biases; norms of heads and another cache; values of another format; a window, converted at load.
        fixture("tiny/qwen2/qwen2.q8_0.gguf"),
        Case { dtype: KvCacheDType::F32, ..fixture("tiny/qwen3") },
        fixture("kquant/llama/llama.q4_k_mix.gguf"),
        Case { quantization: Some(Quantization::Q4K), ..fixture("tiny/mistral") },
        // Latent attention, with experts of the same type as the shared experts and of another one.
        Case { dtype: KvCacheDType::F32, ..fixture("tiny/youtu/youtu.q4_0.gguf") },
        fixture("tiny/deepseek_v2_lite/deepseek_v2_lite.q4_0.gguf"),
        Case { max_num_batched_tokens: 40, max_num_seqs: 2, ..fixture("tiny/glm4_moe_lite") },
        fixture("tiny/qwen3_moe/qwen3_moe.q8_0.gguf"),
    ];
    for case in cases {
        let gpu = Arc::new(Recorder::new(Duration::MAX).with_class(class));
        let llm = load(gpu.clone(), case, &NoProgress);
        let at_load = gpu.compiled();
        generate(&llm, case);
        let compiled = gpu.compiled();
        let late: Vec<_> = compiled.keys().filter(|name| !at_load.contains_key(*name)).collect();
        assert!(late.is_empty(), "{case:?}: compiled in a request: {late:?}");
        // Each of them is used, so a missing one would have been compiled in a request.
        let unused: Vec<_> = compiled.iter().filter(|(_, num_dispatches)| **num_dispatches == 0).collect();
        assert!(unused.is_empty(), "{case:?}: compiled for nothing: {unused:?}");
    }
}

#[test]
fn the_kernels_of_checks_are_compiled_together() {
    let gpu = Arc::new(Recorder::new(Duration::MAX));
    let context = Context::gpu(gpu.clone());
    self_test::compile_kernels(&context, Effort::Small, &|_| true, &|_, _| ());
    let before = gpu.compiled();
    // The output is empty, because nothing is computed.
    for family in [Family::Rows, Family::Experts, Family::Sampling] {
        family.check(&context, Effort::Small, &mut |_: Check| ());
    }
    let all = gpu.compiled();
    let late: Vec<_> = all.keys().filter(|name| !before.contains_key(*name)).collect();
    assert!(before.len() > 50 && late.is_empty(), "{} before, then {late:?}", before.len());
}

#[test]
fn a_kernel_that_is_left_out_is_noticed() {
    for kernel in ["embed_Q8_0", "matmul_Q8_0_16", "paged_attention_merge", "sample", "copy_block"] {
        let gpu = Arc::new(Recorder::new(Duration::MAX).with_late_compilation(kernel));
        let llm = load(gpu.clone(), DEMO, &NoProgress);
        let is_compiled = || gpu.compiled().keys().any(|name| name.starts_with(kernel));
        assert!(!is_compiled(), "{kernel}");
        generate(&llm, DEMO);
        assert!(is_compiled(), "{kernel} is not needed by what is generated");
    }
}

/// Records the calls.
#[derive(Debug, Default)]
struct Heard(Mutex<Vec<(usize, usize)>>);

impl LoadProgress for Heard {
    fn begin(&self, _stage: &str, _total: u64) {}

    fn advance(&self, _bytes: u64) {}

    fn end(&self) {}

    fn compiling(&self, num_done: usize, num_kernels: usize) {
        self.0.lock().unwrap().push((num_done, num_kernels));
    }
}

#[test]
fn progress_is_reported_for_every_kernel() {
    let gpu = Arc::new(Recorder::new(Duration::MAX));
    let heard = Heard::default();
    load(gpu.clone(), DEMO, &heard);
    let heard = heard.0.into_inner().unwrap();
    let num_kernels = gpu.compiled().len();
    assert_eq!(heard, (1..=num_kernels).map(|number| (number, num_kernels)).collect::<Vec<_>>());
}
