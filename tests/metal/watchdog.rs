//! No dispatch and no command buffer keeps a small GPU for long, however large model, context and batch are; and
//! that launches are divided shows in no bit.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tempfile::TempDir;
use tinyvllm::config::ModelConfig;
use tinyvllm::kv_cache::BlockId;
use tinyvllm::models::{self, LoadOptions};
use tinyvllm::ops::gpu::Gpu;
use tinyvllm::ops::{Context, KvCache, KvCacheDType};
use tinyvllm::runner::{ModelRunner, Runner, ScheduledSequence, SequenceOutput, Step, StepDraft, Wanted};
use tinyvllm::sampling::{SamplerInput, SamplingParams};
use tinyvllm::scheduler::SeqId;
use tinyvllm::weights::Checkpoint;

use crate::emulator::{Emulator, Timing, Variant};
use crate::recorder::{Dispatch, Recorder};

/// 0.2 TFLOP, and as long as they take on the smallest chip.
const MAX_OPERATIONS: f64 = 2e11;
const MAX_SECONDS: f64 = 0.1;

const MAX_MODEL_LEN: usize = 128 << 10;
const MAX_NUM_BATCHED_TOKENS: usize = 8192;
const MAX_NUM_SEQS: usize = 256;
const BLOCK_SIZE: usize = 32;

/// The shape of Llama 3.1 8B.
fn checkpoint_of_8b() -> TempDir {
    const HIDDEN: usize = 4096;
    const KV_SIZE: usize = 8 * 128;
    const INTERMEDIATE: usize = 14336;
    const VOCABULARY: usize = 128_256;
    const NUM_LAYERS: usize = 32;
    let config = serde_json::json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "head_dim": 128,
        "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "vocab_size": VOCABULARY,
        "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": NUM_LAYERS,
        "max_position_embeddings": MAX_MODEL_LEN, "rms_norm_eps": 1e-5, "tie_word_embeddings": false,
        "rope_parameters": {"rope_theta": 500_000.0, "rope_type": "default"},
    });
    let mut tensors = vec![
        ("model.embed_tokens.weight".to_owned(), vec![VOCABULARY, HIDDEN]),
        ("lm_head.weight".to_owned(), vec![VOCABULARY, HIDDEN]),
        ("model.norm.weight".to_owned(), vec![HIDDEN]),
    ];
    for layer in 0..NUM_LAYERS {
        let mut add = |name: &str, shape: Vec<usize>| {
            tensors.push((format!("model.layers.{layer}.{name}.weight"), shape));
        };
        add("input_layernorm", vec![HIDDEN]);
        add("post_attention_layernorm", vec![HIDDEN]);
        add("self_attn.q_proj", vec![HIDDEN, HIDDEN]);
        add("self_attn.k_proj", vec![KV_SIZE, HIDDEN]);
        add("self_attn.v_proj", vec![KV_SIZE, HIDDEN]);
        add("self_attn.o_proj", vec![HIDDEN, HIDDEN]);
        add("mlp.gate_proj", vec![INTERMEDIATE, HIDDEN]);
        add("mlp.up_proj", vec![INTERMEDIATE, HIDDEN]);
        add("mlp.down_proj", vec![HIDDEN, INTERMEDIATE]);
    }
    file_of_holes(&config, tensors)
}

/// The shape of GLM-4.7-Flash: latent attention, and 64 experts and one that is every token's.
fn checkpoint_of_experts() -> TempDir {
    const HIDDEN: usize = 2048;
    const HEADS: usize = 20;
    const EXPERT: usize = 1536;
    const NUM_EXPERTS: usize = 64;
    const VOCABULARY: usize = 154_880;
    // Experts that are not adjacent are copied to a stack, so they take memory.
    const NUM_LAYERS: usize = 3;
    let config = serde_json::json!({
        "architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite", "hidden_act": "silu",
        "hidden_size": HIDDEN, "intermediate_size": 10240, "vocab_size": VOCABULARY,
        "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "num_hidden_layers": NUM_LAYERS,
        "q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
        "v_head_dim": 256, "n_routed_experts": NUM_EXPERTS, "num_experts_per_tok": 4, "n_shared_experts": 1,
        "moe_intermediate_size": EXPERT, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
        "topk_method": "noaux_tc", "norm_topk_prob": true, "routed_scaling_factor": 1.8, "rope_interleave": true,
        "max_position_embeddings": MAX_MODEL_LEN, "rms_norm_eps": 1e-5, "tie_word_embeddings": false,
        "rope_parameters": {"rope_theta": 1_000_000.0, "rope_type": "default"},
    });
    let mut tensors = vec![
        ("model.embed_tokens.weight".to_owned(), vec![VOCABULARY, HIDDEN]),
        ("lm_head.weight".to_owned(), vec![VOCABULARY, HIDDEN]),
        ("model.norm.weight".to_owned(), vec![HIDDEN]),
    ];
    for layer in 0..NUM_LAYERS {
        let mut add = |name: &str, shape: &[usize]| {
            tensors.push((format!("model.layers.{layer}.{name}"), shape.to_vec()));
        };
        add("input_layernorm.weight", &[HIDDEN]);
        add("post_attention_layernorm.weight", &[HIDDEN]);
        add("self_attn.q_a_proj.weight", &[768, HIDDEN]);
        add("self_attn.q_a_layernorm.weight", &[768]);
        add("self_attn.q_b_proj.weight", &[HEADS * 256, 768]);
        add("self_attn.kv_a_proj_with_mqa.weight", &[576, HIDDEN]);
        add("self_attn.kv_a_layernorm.weight", &[512]);
        add("self_attn.kv_b_proj.weight", &[HEADS * 448, 512]);
        add("self_attn.o_proj.weight", &[HIDDEN, HEADS * 256]);
        let mut network = |prefix: &str, inside: usize| {
            for name in ["gate_proj", "up_proj"] {
                add(&format!("mlp.{prefix}{name}.weight"), &[inside, HIDDEN]);
            }
            add(&format!("mlp.{prefix}down_proj.weight"), &[HIDDEN, inside]);
        };
        if layer == 0 {
            network("", 10240);
            continue;
        }
        network("shared_experts.", EXPERT);
        (0..NUM_EXPERTS).for_each(|expert| network(&format!("experts.{expert}."), EXPERT));
        add("mlp.gate.weight", &[NUM_EXPERTS, HIDDEN]);
        add("mlp.gate.e_score_correction_bias", &[NUM_EXPERTS]);
    }
    file_of_holes(&config, tensors)
}

/// A folder with a file of holes, which is never read.
fn file_of_holes(config: &serde_json::Value, tensors: Vec<(String, Vec<usize>)>) -> TempDir {
    let mut header = serde_json::Map::new();
    let mut end = 0;
    for (name, shape) in tensors {
        let begin = end;
        end += 2 * shape.iter().product::<usize>();
        let entry = serde_json::json!({"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]});
        header.insert(name, entry);
    }
    let mut header = serde_json::to_string(&header).unwrap();
    // Weights begin at a multiple of 16 bytes.
    while !(8 + header.len()).is_multiple_of(16) {
        header.push(' ');
    }
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let mut file = File::create(folder.path().join("model.safetensors")).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    file.set_len((8 + header.len() + end) as u64).unwrap();
    folder
}

fn load(
    gpu: Arc<dyn Gpu>,
    model: &Path,
    dtype: KvCacheDType,
    limits: [usize; 3],
    num_blocks: usize,
) -> ModelRunner {
    let checkpoint = Checkpoint::open(model).unwrap();
    let config = ModelConfig::from_checkpoint(&checkpoint).unwrap();
    let context = Arc::new(Context::gpu(gpu));
    let [max_model_len, max_num_batched_tokens, max_num_seqs] = limits;
    let options = LoadOptions {
        quantizer: None,
        expert_file: None,
        max_model_len,
        max_num_batched_tokens,
        max_num_seqs,
        num_speculative_tokens: 0,
        block_size: BLOCK_SIZE,
    };
    let model = models::load(&checkpoint, &config, &context, &options, &|_| ()).unwrap();
    let cache = KvCache::new(&context, &config, num_blocks, BLOCK_SIZE, dtype).unwrap();
    ModelRunner::new(model, cache).unwrap()
}

/// A row of a step: `len` tokens from `start` on.
#[derive(Debug, Clone, Copy)]
struct Chunk {
    start: usize,
    len: usize,
    samples: bool,
    all_logits: bool,
}

impl Chunk {
    fn prompt(start: usize, len: usize) -> Self {
        Self { start, len, samples: false, all_logits: false }
    }

    fn token(start: usize) -> Self {
        Self { start, len: 1, samples: true, all_logits: false }
    }
}

/// Computes a step whose sequences use these blocks.
fn execute(
    runner: &mut ModelRunner,
    params: &SamplingParams,
    chunks: &[Chunk],
    num_steps: usize,
    table_of: impl Fn(usize) -> Vec<BlockId>,
) -> Vec<SequenceOutput> {
    let token_ids: Vec<u32> = (0..MAX_MODEL_LEN as u32).map(|index| 3 + index * 7 % 250).collect();
    let tables: Vec<_> = (0..chunks.len()).map(table_of).collect();
    let row = |(index, (chunk, table)): (usize, (&Chunk, &Vec<BlockId>))| {
        let input = SamplerInput {
            params,
            seed: 1,
            // Rows with the same logits draw different tokens.
            stream: index as u32,
            prompt_token_ids: &token_ids[..1],
            output_token_ids: &[],
            end_token_ids: &[],
            allowed: None,
        };
        (chunk.start, chunk.len, table.clone(), chunk.samples.then_some(input), chunk.all_logits)
    };
    let rows: Vec<_> = chunks.iter().zip(&tables).enumerate().map(row).collect();
    let rows = rows.iter().zip(0..).map(|((start, len, table, input, all_logits), seq)| ScheduledSequence {
        seq: SeqId(seq),
        token_ids: &token_ids[..start + len],
        start: *start,
        len: *len,
        draft: StepDraft::default(),
        num_grouped_tokens: if *len > 1 { start + len } else { 0 },
        block_table: table,
        copy: None,
        samples: input.iter().copied().collect(),
        wanted: Wanted::Logits,
        all_logits: *all_logits,
        prompt_logprobs: None,
    });
    runner
        .execute(&Step {
            sequences: rows.collect(),
            window_slots: &[],
            num_steps,
            may_queue_next: false,
            may_draft_next: false,
        })
        .unwrap()
}

/// Steps that are as large as they can be in one way or another.
fn large_steps() -> Vec<(&'static str, Vec<Chunk>, usize)> {
    let longest = MAX_MODEL_LEN - 2;
    let mut mixed = vec![Chunk::token(100_000); 200];
    mixed.push(Chunk::prompt(50_000, MAX_NUM_BATCHED_TOKENS - 200));
    let logits = Chunk { all_logits: true, ..Chunk::prompt(0, MAX_NUM_SEQS) };
    vec![
        ("the beginning of a prompt", vec![Chunk::prompt(0, MAX_NUM_BATCHED_TOKENS)], 1),
        (
            "the end of a prompt",
            vec![Chunk::prompt(longest - MAX_NUM_BATCHED_TOKENS, MAX_NUM_BATCHED_TOKENS)],
            1,
        ),
        ("many sequences with the same long beginning", vec![Chunk::token(longest); MAX_NUM_SEQS], 2),
        ("a prompt with sequences", mixed, 1),
        ("logits of a prompt", vec![logits], 1),
        ("one sequence", vec![Chunk::token(10)], 2),
        ("four sequences", vec![Chunk::token(longest); 4], 2),
    ]
}

/// Work that takes too long: dispatches, and command buffers by their slowest kernel.
fn too_long(commits: &[Vec<Dispatch>]) -> Vec<String> {
    let mut found = Vec::new();
    for commit in commits {
        let seconds = |dispatches: &[Dispatch]| dispatches.iter().map(Dispatch::seconds).sum::<f64>();
        let longest = commit.iter().max_by(|a, b| a.seconds().total_cmp(&b.seconds()));
        // The error of the launch code's rounding to whole nanoseconds.
        let rounding = 1e-9 * commit.len() as f64;
        if let Some(longest) = longest.filter(|_| seconds(commit) > MAX_SECONDS + rounding) {
            found.push(format!("a commit of {:.3} s, most of it {}", seconds(commit), longest.function));
        }
        let is_long = |dispatch: &&Dispatch| {
            dispatch.operations > MAX_OPERATIONS || dispatch.seconds() > MAX_SECONDS + rounding
        };
        let describe = |dispatch: &Dispatch| format!("{} of {:.3} s", dispatch.function, dispatch.seconds());
        found.extend(commit.iter().filter(is_long).map(describe));
    }
    found
}

/// Work of all large steps that takes too long on a GPU with this budget.
fn too_long_with(dispatch_budget: Duration, dtype: KvCacheDType, model: &Path) -> Vec<String> {
    let gpu = Arc::new(Recorder::new(dispatch_budget));
    let limits = [MAX_MODEL_LEN, MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS];
    // Sequences share their blocks, so that all may be as long as can be.
    let blocks: Vec<BlockId> = (0..MAX_MODEL_LEN as u32 / BLOCK_SIZE as u32).map(BlockId).collect();
    let mut runner = load(gpu.clone(), model, dtype, limits, blocks.len());
    let num_layers = ModelConfig::from_checkpoint(&Checkpoint::open(model).unwrap()).unwrap().num_layers;
    let params = SamplingParams { temperature: 1.0, top_k: 40, top_p: 0.9, ..SamplingParams::default() };
    gpu.take();
    let mut found = Vec::new();
    for (name, chunks, num_steps) in large_steps() {
        execute(&mut runner, &params, &chunks, num_steps, |_| blocks.clone());
        let commits = gpu.take();
        // A layer is six dispatches or more.
        let num_dispatches = commits.iter().flatten().count();
        assert!(num_dispatches > 6 * num_layers, "{name}: {num_dispatches} dispatches");
        found.extend(too_long(&commits).into_iter().map(|what| format!("{name}: {what}")));
    }
    found
}

#[test]
fn nothing_keeps_a_small_gpu_for_long() {
    let model = checkpoint_of_8b();
    for dtype in [KvCacheDType::F16, KvCacheDType::F32] {
        let found = too_long_with(Duration::from_millis(100), dtype, model.path());
        assert!(found.is_empty(), "{} findings:\n{}", found.len(), found.join("\n"));
    }
    let experts = checkpoint_of_experts();
    let found = too_long_with(Duration::from_millis(100), KvCacheDType::F16, experts.path());
    assert!(found.is_empty(), "{} findings:\n{}", found.len(), found.join("\n"));
    let found = too_long_with(Duration::MAX, KvCacheDType::F16, experts.path());
    for kernel in [
        "the beginning of a prompt: matmul_swiglu_BF16_32 of",
        // Spans of the context are launches by themselves.
        "the end of a prompt: a commit of",
        "a prompt with sequences: latent_attention_f16 of",
        "the same long beginning: latent_attention_f16 of",
    ] {
        assert!(found.iter().any(|found| found.contains(kernel)), "{kernel}\n{}", found.join("\n"));
    }
    // A GPU with an unlimited budget gets launches undivided.
    let found = too_long_with(Duration::MAX, KvCacheDType::F16, model.path());
    for kernel in [
        "the beginning of a prompt: matmul_BF16_32 of",
        "the beginning of a prompt: matmul_swiglu_BF16_32 of",
        "the end of a prompt: flash_attention_f16_128_16 of",
        "the same long beginning: paged_attention_f16_4_16 of",
        "the same long beginning: sample of",
        "one sequence: a commit of",
        "four sequences: a commit of",
    ] {
        assert!(found.iter().any(|found| found.contains(kernel)), "{kernel}\n{}", found.join("\n"));
    }
}

/// Logits and tokens of a few steps on a GPU with this budget, and the number of dispatches of each kernel.
fn logits_and_tokens(gpu: Emulator, model: &Path) -> (Vec<SequenceOutput>, BTreeMap<String, u64>) {
    let gpu = Arc::new(gpu.with_timing(Timing::Late));
    let mut runner = load(gpu.clone(), model, KvCacheDType::F16, [512, 512, 512], 128);
    let blocks_of = |row: usize| (0..16).map(|index| BlockId(index * 8 + row as u32)).collect();
    let wanted = |chunk: Chunk| Chunk { all_logits: true, ..chunk };
    let params = SamplingParams { temperature: 0.9, top_p: 0.9, seed: Some(1), ..SamplingParams::default() };
    // More than one tile of matmuls and of attention, more than one KV split, which the cache has as zeros
    // where it was not computed, and steps of few tokens.
    let steps: [(&[Chunk], usize); 5] = [
        (&[wanted(Chunk::prompt(0, 40)), wanted(Chunk::prompt(0, 21)), wanted(Chunk::prompt(0, 3))], 1),
        (&[wanted(Chunk::prompt(300, 1)), wanted(Chunk::prompt(21, 6)), wanted(Chunk::prompt(3, 1))], 1),
        (&[wanted(Chunk::prompt(301, 1)), wanted(Chunk::prompt(27, 2))], 1),
        (&[Chunk::token(302), Chunk::token(29), Chunk::token(4)], 3),
        (
            &[
                Chunk::token(305),
                Chunk::token(32),
                Chunk::token(7),
                Chunk::token(0),
                Chunk::token(0),
                Chunk::token(0),
            ],
            2,
        ),
    ];
    let mut outputs = Vec::new();
    for (chunks, num_steps) in steps {
        outputs.extend(execute(&mut runner, &params, chunks, num_steps, blocks_of));
    }
    (outputs, gpu.num_dispatches())
}

#[test]
fn that_launches_are_divided_shows_in_no_bit() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let attention = ["flash_attention", "paged_attention"];
    let latent = ["latent_attention", "paged_attention_merge", "flash_attention"];
    for (model, attention) in [
        ("tiny/qwen2/qwen2.q8_0.gguf", &attention[..]),
        ("kquant/llama/llama.q4_k_mix.gguf", &attention),
        ("tiny/mistral", &attention),
        ("tiny/qwen3_moe/qwen3_moe.q8_0.gguf", &attention),
        ("tiny/glm4_moe_lite/glm4_moe_lite.q4_0.gguf", &latent),
    ] {
        let run = |dispatch_budget| {
            let gpu = Emulator::new(Variant::Fast)?;
            Some(logits_and_tokens(gpu.with_dispatch_budget(dispatch_budget), &fixtures.join(model)))
        };
        let Some((expected, whole)) = run(Duration::MAX) else { return };
        assert!(expected.iter().any(|output| output.logits.iter().any(|logit| *logit != 0.0)));
        // Everything by itself, and several at a time.
        for nanoseconds in [1, 200] {
            let (outputs, divided) = run(Duration::from_nanos(nanoseconds)).unwrap();
            for family in ["matmul", "matmul_swiglu", "sample"].iter().chain(attention) {
                let count = |dispatches: &BTreeMap<String, u64>| -> u64 {
                    let own = dispatches.iter().filter(|(name, _)| name.starts_with(*family));
                    own.map(|(_, number)| number).sum()
                };
                assert!(
                    count(&divided) > count(&whole),
                    "{model}, {nanoseconds} ns: {family} is not divided"
                );
            }
            assert!(outputs == expected, "{model}: other results with dispatches of {nanoseconds} ns");
        }
    }
}
