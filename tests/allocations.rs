//! From one generated token to the next, nothing is allocated, by any thread.
//!
//! The program has one test, because the counter counts for the whole process.

#![expect(clippy::unwrap_used, reason = "a test")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tinyvllm::config::ModelConfig;
use tinyvllm::kv_cache::BlockId;
use tinyvllm::models::{self, LoadOptions};
use tinyvllm::ops::cpu::matmul::MatrixFile;
use tinyvllm::ops::cpu::simd::CpuLevel;
use tinyvllm::ops::{Context, KvCache, KvCacheDType};
use tinyvllm::runner::{ModelRunner, Runner, ScheduledSequence, Step, StepDraft, Wanted};
use tinyvllm::sampling::{SamplerInput, SamplingParams};
use tinyvllm::scheduler::SeqId;
use tinyvllm::weights::Checkpoint;

/// The system's allocator, counting.
struct Counting;

static NUM_ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is handed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        NUM_ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's guarantees.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's guarantees.
        unsafe { System.dealloc(pointer, layout) }
    }
    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        NUM_ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's guarantees.
        unsafe { System.realloc(pointer, layout, new_size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// With dense and with quantised weights; with latent attention, with experts, which are then in a file.
const MODELS: [&str; 4] = [
    "tiny/llama",
    "kquant/llama/llama.q4_k_mix.gguf",
    "kquant/youtu/youtu.q4_k_mix.gguf",
    "tiny/glm4_moe_lite",
];
const BLOCK_SIZE: usize = 8;
const NUM_BLOCKS: usize = 64;
const NUM_ROWS: usize = 3;

fn runner(model: &str) -> ModelRunner {
    let path = format!("{}/tests/fixtures/{model}", env!("CARGO_MANIFEST_DIR"));
    let checkpoint = Checkpoint::open(path.as_ref()).unwrap();
    let config = ModelConfig::from_checkpoint(&checkpoint).unwrap();
    let context = Arc::new(Context::cpu(2, CpuLevel::detect()));
    let folder = tempfile::tempdir().unwrap();
    let options = LoadOptions {
        quantizer: None,
        expert_file: Some(MatrixFile::open(folder.path().join("experts"), 1, 1 << 20).unwrap()),
        max_model_len: 128,
        max_num_batched_tokens: 64,
        max_num_seqs: NUM_ROWS,
        num_speculative_tokens: 0,
        block_size: BLOCK_SIZE,
    };
    let model = models::load(&checkpoint, &config, &context, &options, &|_| ()).unwrap();
    let cache = KvCache::new(&context, &config, NUM_BLOCKS, BLOCK_SIZE, KvCacheDType::F16).unwrap();
    ModelRunner::new(model, cache).unwrap()
}

/// Allocations of a step that generates `num_steps` tokens for each of three sequences of 20 tokens.
fn allocations(runner: &mut ModelRunner, params: &SamplingParams, num_steps: usize) -> usize {
    let token_ids: Vec<u32> = (0..20).collect();
    let tables: Vec<Vec<BlockId>> =
        (0..NUM_ROWS as u32).map(|row| (16 * row..16 * row + 16).map(BlockId).collect()).collect();
    let input = SamplerInput {
        params,
        seed: 1,
        stream: 0,
        prompt_token_ids: &token_ids,
        output_token_ids: &[],
        end_token_ids: &[],
        allowed: None,
    };
    let row = |block_table, start, len| ScheduledSequence {
        seq: SeqId(0),
        token_ids: &token_ids,
        start,
        draft: StepDraft::default(),
        num_grouped_tokens: 0,
        len,
        block_table,
        copy: None,
        samples: if start + len == token_ids.len() { vec![input] } else { Vec::new() },
        wanted: Wanted::Logits,
        all_logits: false,
        prompt_logprobs: None,
    };
    let prompt = Step {
        window_slots: &[],
        sequences: tables.iter().map(|table| row(&table[..], 0, 19)).collect(),
        num_steps: 1,
        may_queue_next: false,
        may_draft_next: false,
    };
    runner.execute(&prompt).unwrap();
    let step = Step {
        window_slots: &[],
        sequences: tables.iter().map(|table| row(&table[..], 19, 1)).collect(),
        num_steps,
        may_queue_next: false,
        may_draft_next: false,
    };
    let before = NUM_ALLOCATIONS.load(Ordering::Relaxed);
    let outputs = runner.execute(&step).unwrap();
    let after = NUM_ALLOCATIONS.load(Ordering::Relaxed);
    assert!(outputs.iter().all(|output| output.samples[0].len() == num_steps));
    after - before
}

#[test]
fn a_decode_step_allocates_nothing() {
    let sampled = SamplingParams {
        temperature: 0.8,
        top_k: 20,
        top_p: 0.9,
        repetition_penalty: 1.1,
        ..SamplingParams::default()
    };
    for model in MODELS {
        let mut runner = runner(model);
        for params in [&SamplingParams::greedy(), &sampled] {
            // The first steps bring the scratch memory to its size.
            allocations(&mut runner, params, 40);
            let (few, many) = (allocations(&mut runner, params, 2), allocations(&mut runner, params, 40));
            // The remaining allocations are the lists that a step returns, however many tokens are in them.
            assert_eq!(many, few, "{model}: 38 more tokens for each of {NUM_ROWS} sequences");
            assert!(few <= 4 * NUM_ROWS + 8, "{model}: {few} allocations to begin and end a step");
        }
    }
}
