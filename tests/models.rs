//! Models against the logits of independent implementations, and against themselves under every
//! division of the work.
//!
//! The fixtures are tiny random models. `golden.safetensors` of a folder was computed with the original
//! weights in single precision: `ids`, `logits` for each of them, and `greedy`, eight prompt tokens with
//! the 32 that follow. `X.golden.safetensors` next to a GGUF file was computed in double precision with that
//! file's weights.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use safetensors::tensor::TensorView;
use tinyvllm::config::ModelConfig;
use tinyvllm::models::{self, CausalLm, InputBatch, LoadOptions, Wanted};
use tinyvllm::ops::cpu::matmul::MatrixFile;
use tinyvllm::ops::cpu::{CpuLevel, ThreadPool};
use tinyvllm::ops::reference::ReferenceBackend;
use tinyvllm::ops::{Context, EXPANDED_GROUP, KvCache, KvCacheDType, RowMode};
use tinyvllm::weights::{Checkpoint, DType, Quantization, Quantizer};

#[path = "models/biases.rs"]
mod biases;
#[path = "models/gpt_oss.rs"]
mod gpt_oss;
#[path = "models/hidden.rs"]
mod hidden;
#[path = "models/mtp.rs"]
mod mtp;
#[path = "models/names.rs"]
mod names;
#[path = "models/packed.rs"]
mod packed;
#[path = "models/pictures.rs"]
mod pictures;
#[path = "models/ranks.rs"]
mod ranks;

const BLOCK_SIZE: usize = 16;
const NUM_BLOCKS: usize = 24;
const MAX_TOKENS: usize = 128;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// A loaded model with a cache of its own.
struct Instance {
    model: Box<dyn CausalLm>,
    cache: KvCache,
    block_size: usize,
    /// Tokens of each sequence that are parts of a prompt's whole groups.
    num_grouped: usize,
}

/// What computes.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Kernels {
    Cpu(CpuLevel),
    Reference,
}

impl Kernels {
    fn all() -> impl Iterator<Item = Self> {
        CpuLevel::available().iter().map(|level| Self::Cpu(*level)).chain([Self::Reference])
    }
}

#[derive(Clone, Copy)]
struct Setup {
    num_threads: usize,
    kernels: Kernels,
    block_size: usize,
    dtype: KvCacheDType,
    quantization: Option<Quantization>,
    /// All matrices in F32, whatever the folder has.
    in_single_precision: bool,
    /// As at the second start with experts in a file: the first one has made it.
    experts_in_file: bool,
    /// With the block that predicts further tokens.
    drafts_itself: bool,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            num_threads: 2,
            kernels: Kernels::Cpu(CpuLevel::detect()),
            block_size: BLOCK_SIZE,
            dtype: KvCacheDType::F32,
            quantization: None,
            in_single_precision: false,
            experts_in_file: false,
            drafts_itself: false,
        }
    }
}

impl Setup {
    fn context(&self) -> Context {
        match self.kernels {
            Kernels::Cpu(level) => Context::cpu(self.num_threads, level),
            Kernels::Reference => Context::reference(ReferenceBackend::cpu()),
        }
    }
}

impl Instance {
    fn open(path: &str, setup: Setup) -> Self {
        Self::on(setup.context(), path, setup)
    }

    /// On a device, which may be one of several ranks.
    fn on(context: Context, path: &str, setup: Setup) -> Self {
        let checkpoint = Checkpoint::open(&fixture(path)).unwrap();
        let mut config = ModelConfig::from_checkpoint(&checkpoint).unwrap();
        if setup.drafts_itself {
            config.load_mtp_block(&checkpoint).unwrap();
        }
        let context = Arc::new(context);
        let single = || Quantizer::to_dense(DType::F32, NonZeroUsize::MIN);
        let quantizer = setup.quantization.map(|kind| Quantizer::new(kind, &checkpoint, None));
        let mut options = LoadOptions {
            quantizer: quantizer.or_else(|| setup.in_single_precision.then(single)),
            expert_file: None,
            max_model_len: 128,
            max_num_batched_tokens: MAX_TOKENS,
            max_num_seqs: MAX_TOKENS,
            num_speculative_tokens: 0,
            block_size: setup.block_size,
        };
        let folder = tempfile::tempdir().unwrap();
        let mut load = || {
            if setup.experts_in_file {
                options.expert_file =
                    Some(MatrixFile::open(folder.path().join("experts"), 1, 1 << 20).unwrap());
            }
            models::load(&checkpoint, &config, &context, &options, &|_| ()).unwrap()
        };
        let mut model = load();
        if setup.experts_in_file {
            model = load();
        }
        let num_blocks = NUM_BLOCKS * BLOCK_SIZE / setup.block_size;
        let cached = model.config().with_cached_layers();
        let cache = KvCache::new(&context, &cached, num_blocks, setup.block_size, setup.dtype).unwrap();
        Self { model, cache, block_size: setup.block_size, num_grouped: 0 }
    }

    /// A step of which nothing is wanted. A row is a sequence's number, its tokens so far and how many of them are new.
    /// Sequence `s` has every third block from `s` on, backwards.
    fn batch(&self, rows: &[(usize, &[u32], usize)]) -> InputBatch {
        let mut batch = InputBatch::default();
        batch.clear();
        batch.attention.block_size = self.block_size;
        for &(sequence, tokens, num_new) in rows {
            let table: Vec<usize> =
                (0..self.cache.num_blocks() / 3).rev().map(|index| 3 * index + sequence).collect();
            for (position, &token) in tokens.iter().enumerate().skip(tokens.len() - num_new) {
                batch.token_ids.push(token);
                batch.positions.push(position as u32);
                let slot = table[position / self.block_size] * self.block_size + position % self.block_size;
                batch.attention.slot_mapping.push(slot);
            }
            let positions = tokens.len() - num_new..tokens.len();
            let mode = RowMode::of(num_new);
            batch.attention.push(positions, self.num_grouped, mode, |index| table[index] as u32);
        }
        batch
    }

    /// The logits of every token of a step with these rows.
    fn step(&mut self, rows: &[(usize, &[u32], usize)]) -> Vec<Vec<f32>> {
        let mut batch = self.batch(rows);
        (0..batch.token_ids.len()).for_each(|index| batch.want(index, Wanted::Logits));
        let vocab_size = self.model.config().vocab_size;
        let logits = self.model.forward(&batch, &mut self.cache).unwrap();
        let num_rows = batch.num_logits();
        logits.read(num_rows, |logits| logits.chunks(vocab_size).map(<[f32]>::to_vec).collect()).unwrap()
    }

    /// The logits of all tokens of a prompt that is computed in chunks.
    fn run(&mut self, tokens: &[u32], chunks: &[usize]) -> Vec<Vec<f32>> {
        self.num_grouped = tokens.len() / EXPANDED_GROUP * EXPANDED_GROUP;
        let mut logits = Vec::new();
        for &chunk in chunks {
            let end = logits.len() + chunk;
            logits.extend(self.step(&[(0, &tokens[..end], chunk)]));
        }
        assert_eq!(logits.len(), tokens.len());
        logits
    }
}

struct Golden {
    ids: Vec<u32>,
    logits: Vec<Vec<f32>>,
    greedy: Vec<u32>,
}

impl Golden {
    fn read(path: &str) -> Self {
        let bytes = std::fs::read(fixture(path)).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let ids = |name: &str| {
            file.tensor(name).map_or_else(
                |_| Vec::new(),
                |tensor| {
                    let (values, []) = tensor.data().as_chunks::<8>() else { panic!("{name} is not i64") };
                    values.iter().map(|value| i64::from_le_bytes(*value) as u32).collect()
                },
            )
        };
        let logits = file.tensor("logits").unwrap();
        let vocab_size = logits.shape()[1];
        let (values, []) = logits.data().as_chunks::<4>() else { panic!("logits are not f32") };
        let values: Vec<f32> = values.iter().map(|value| f32::from_le_bytes(*value)).collect();
        Self {
            ids: ids("ids"),
            logits: values.chunks(vocab_size).map(<[f32]>::to_vec).collect(),
            greedy: ids("greedy"),
        }
    }
}

fn argmax(logits: &[f32]) -> u32 {
    let better = |best: usize, index: usize| if logits[index] > logits[best] { index } else { best };
    (0..logits.len()).reduce(better).unwrap() as u32
}

/// Largest difference, root mean square of the differences, and share of rows with the same argmax.
fn compare(actual: &[Vec<f32>], expected: &[Vec<f32>]) -> (f32, f32, f32) {
    assert_eq!(actual.len(), expected.len());
    let differences: Vec<f32> =
        actual.iter().flatten().zip(expected.iter().flatten()).map(|(a, b)| (a - b).abs()).collect();
    let squares: f32 = differences.iter().map(|difference| difference * difference).sum();
    let same = actual.iter().zip(expected).filter(|(a, b)| argmax(a) == argmax(b)).count();
    (
        differences.iter().fold(0.0, |a, b| a.max(*b)),
        (squares / differences.len() as f32).sqrt(),
        same as f32 / actual.len() as f32,
    )
}

/// Dense models are exact: logits within 1e-3, and the same 32 tokens.
fn check_dense(model: &str, golden: &str) {
    check_exact(model, golden, Setup::default());
}

fn check_exact(model: &str, golden: &str, setup: Setup) {
    for kernels in Kernels::all() {
        let golden = Golden::read(golden);
        let mut instance = Instance::open(model, Setup { kernels, ..setup });
        let logits = instance.run(&golden.ids, &[golden.ids.len()]);
        let (max, rms, _) = compare(&logits, &golden.logits);
        assert!(max < 1e-3 && rms < 1e-4, "{model} with {kernels:?}: logits differ by {max}, rms {rms}");

        let mut tokens = golden.greedy[..8].to_vec();
        let mut next = argmax(instance.step(&[(1, &tokens, 8)]).last().unwrap());
        while tokens.len() < golden.greedy.len() {
            tokens.push(next);
            next = argmax(&instance.step(&[(1, &tokens, 1)])[0]);
        }
        assert_eq!(tokens, golden.greedy, "{model} with {kernels:?}");
    }
}

#[test]
fn llama_folder() {
    check_dense("tiny/llama", "tiny/llama/golden.safetensors");
}

#[test]
fn llama_gguf() {
    check_dense("tiny/llama/llama.f32.gguf", "tiny/llama/golden.safetensors");
}

#[test]
fn llama3_folder() {
    check_dense("tiny/llama3", "tiny/llama3/golden.safetensors");
}

#[test]
fn mistral_folder() {
    check_dense("tiny/mistral", "tiny/mistral/golden.safetensors");
}

#[test]
fn qwen2_folder() {
    check_dense("tiny/qwen2", "tiny/qwen2/golden.safetensors");
}

#[test]
fn qwen3_folder() {
    check_dense("tiny/qwen3", "tiny/qwen3/golden.safetensors");
}

#[test]
fn qwen3_moe_folder() {
    check_dense("tiny/qwen3_moe", "tiny/qwen3_moe/golden.safetensors");
}

#[test]
fn mixtral_folder() {
    check_dense("tiny/mixtral", "tiny/mixtral/golden.safetensors");
}

#[test]
fn gemma3_folder() {
    check_dense("tiny/gemma3", "tiny/gemma3/golden.safetensors");
}

#[test]
fn gemma3_gguf() {
    check_dense("tiny/gemma3/gemma3.f32.gguf", "tiny/gemma3/golden.safetensors");
    check_quantized("tiny/gemma3/gemma3.q8_0.gguf");
}

#[test]
fn smollm3_folder() {
    check_dense("tiny/smollm3", "tiny/smollm3/golden.safetensors");
}

#[test]
fn smollm3_gguf() {
    check_dense("tiny/smollm3/smollm3.f32.gguf", "tiny/smollm3/golden.safetensors");
}

#[test]
fn granite() {
    check_dense("tiny/granite", "tiny/granite/golden.safetensors");
    check_dense("tiny/granite/granite.f16.gguf", "tiny/granite/golden.safetensors");
}

/// The context before scaling is four tokens, so the divisors for long sequences count.
#[test]
fn phi3() {
    check_dense("tiny/phi3", "tiny/phi3/golden.safetensors");
    check_dense("tiny/phi3/phi3.f16.gguf", "tiny/phi3/golden.safetensors");
}

#[test]
fn seed_oss() {
    check_dense("tiny/seed_oss", "tiny/seed_oss/golden.safetensors");
    check_dense("tiny/seed_oss/seed_oss.f16.gguf", "tiny/seed_oss/golden.safetensors");
}

#[test]
fn glm4() {
    check_dense("tiny/glm4", "tiny/glm4/golden.safetensors");
    check_dense("tiny/glm4/glm4.f16.gguf", "tiny/glm4/golden.safetensors");
}

/// Norms over all queries and over all keys of a token, and none before attention and networks. The layers with a window
/// have a rotation without scaling.
#[test]
fn ministral3() {
    check_dense("tiny/ministral3", "tiny/ministral3/golden.safetensors");
    check_dense("tiny/ministral3/ministral3.f16.gguf", "tiny/ministral3/golden.safetensors");
}

#[test]
fn olmo3() {
    check_dense("tiny/olmo3", "tiny/olmo3/golden.safetensors");
    check_dense("tiny/olmo3/olmo3.f16.gguf", "tiny/olmo3/golden.safetensors");
}

/// The same weights without windows, and with one rotation.
#[test]
fn olmo2() {
    let scaled = serde_json::json!({"rope_type": "linear", "factor": 4.0, "rope_theta": 500_000.0});
    let changes = [
        ("architectures", serde_json::json!(["Olmo2ForCausalLM"])),
        ("model_type", serde_json::json!("olmo2")),
        ("layer_types", serde_json::Value::Null),
        ("sliding_window", serde_json::Value::Null),
        ("rope_parameters", scaled),
    ];
    let folder = mixed_folder("tiny/olmo3", "tiny/olmo3", &changes);
    check_dense(folder.path().to_str().unwrap(), "tiny/olmo3/olmo2.golden.safetensors");
}

#[test]
fn youtu_folder() {
    check_dense("tiny/youtu", "tiny/youtu/golden.safetensors");
}

#[test]
fn deepseek_v2_lite_folder() {
    check_dense("tiny/deepseek_v2_lite", "tiny/deepseek_v2_lite/golden.safetensors");
}

#[test]
fn glm4_moe_lite_folder() {
    check_dense("tiny/glm4_moe_lite", "tiny/glm4_moe_lite/golden.safetensors");
}

/// What logits may differ by: the most, the root mean square, and the share of tokens that have to be the same.
type Limits = (f32, f32, f32);

const EXACT: Limits = (1e-3, 1e-4, 1.0);
/// With quantised weights, the CPU's kernels round activations to 8 bits, which moves logits (of standard deviation 1)
/// by some hundredths. The reference does not.
const ROUNDED: Limits = (0.3, 0.05, 0.9);
/// Where that takes another expert, the logits of the token are others.
const ROUNDED_EXPERTS: Limits = (2.5, 0.15, 0.87);

/// The golden logits of a GGUF file, which the reference gives exactly.
fn check_file(model: &str, limits: Limits) {
    check_file_within(model, EXACT, limits);
}

/// The same with limits for the reference and for the CPU's kernels.
fn check_file_within(model: &str, reference: Limits, limits: Limits) {
    check_within(model, &model.replace(".gguf", ".golden.safetensors"), reference, limits);
}

fn check_within(model: &str, golden: &str, reference: Limits, limits: Limits) {
    for kernels in Kernels::all() {
        let golden = Golden::read(golden);
        let mut instance = Instance::open(model, Setup { kernels, ..Setup::default() });
        let (max, rms, same) = compare(&instance.run(&golden.ids, &[golden.ids.len()]), &golden.logits);
        let (max_limit, rms_limit, same_limit) =
            if kernels == Kernels::Reference { reference } else { limits };
        assert!(
            max < max_limit && rms < rms_limit && same >= same_limit,
            "{model} with {kernels:?}: logits differ by {max}, rms {rms}, and {same} of the tokens agree"
        );
    }
}

fn check_quantized(model: &str) {
    check_file(model, ROUNDED);
}

#[test]
fn youtu_quantized() {
    for file in
        ["tiny/youtu/youtu.q8_0.gguf", "tiny/youtu/youtu.q4_0.gguf", "kquant/youtu/youtu.q4_k_mix.gguf"]
    {
        check_quantized(file);
    }
}

#[test]
fn deepseek_v2_lite_quantized() {
    for file in [
        "tiny/deepseek_v2_lite/deepseek_v2_lite.q8_0.gguf",
        "tiny/deepseek_v2_lite/deepseek_v2_lite.q4_0.gguf",
        "kquant/deepseek_v2_lite/deepseek_v2_lite.q4_k_mix.gguf",
    ] {
        check_file(file, ROUNDED_EXPERTS);
    }
}

#[test]
fn glm4_moe_lite_quantized() {
    for file in [
        "tiny/glm4_moe_lite/glm4_moe_lite.q8_0.gguf",
        "tiny/glm4_moe_lite/glm4_moe_lite.q4_0.gguf",
        "kquant/glm4_moe_lite/glm4_moe_lite.q4_k_mix.gguf",
    ] {
        check_file(file, ROUNDED_EXPERTS);
    }
}

#[test]
fn qwen3_moe_q8_0() {
    check_file("tiny/qwen3_moe/qwen3_moe.q8_0.gguf", ROUNDED_EXPERTS);
}

#[test]
fn mixtral_q8_0() {
    check_file("tiny/mixtral/mixtral.q8_0.gguf", ROUNDED_EXPERTS);
}

/// Older files have the projections of keys and values in one tensor, or other names for the same numbers.
#[test]
fn older_layouts_of_latent_attention() {
    check_file("tiny/deepseek_v2_lite/deepseek_v2_lite.f32-legacy.gguf", EXACT);
    check_file("tiny/glm4_moe_lite/glm4_moe_lite.q8_0-ollama.gguf", ROUNDED_EXPERTS);
    // The projections of keys are turned over, for which their blocks become halves.
    let legacy = "tiny/deepseek_v2_lite/deepseek_v2_lite.q8_0-legacy.gguf";
    check_file_within(legacy, (5e-3, 1e-3, 1.0), ROUNDED_EXPERTS);
}

/// What all tokens go through is of another type than the experts, so it stays a network of its own.
#[test]
fn experts_of_two_types() {
    check_file("tiny/deepseek_v2_lite/deepseek_v2_lite.q4_0-mixed.gguf", ROUNDED_EXPERTS);
}

#[test]
fn llama_q8_0() {
    check_quantized("tiny/llama/llama.q8_0.gguf");
}

#[test]
fn llama3_q4_0() {
    check_quantized("tiny/llama3/llama3.q4_0.gguf");
}

#[test]
fn qwen2_q8_0() {
    check_quantized("tiny/qwen2/qwen2.q8_0.gguf");
}

#[test]
fn llama_k_quants() {
    check_quantized("kquant/llama/llama.q4_k_mix.gguf");
}

#[test]
fn qwen3_k_quants() {
    check_quantized("kquant/qwen3/qwen3.q4_k_mix.gguf");
}

/// Every matrix of another one of the types that files of few bits hold; most are repacked when they are loaded.
#[test]
fn files_of_few_bits() {
    check_quantized("dynamic/llama.dynamic.gguf");
    check_file("dynamic/qwen3_moe.dynamic.gguf", ROUNDED_EXPERTS);
}

#[test]
fn quantising_at_load_is_what_the_quantised_file_has() {
    let golden = Golden::read("tiny/llama/llama.q8_0.golden.safetensors");
    let setup = Setup { quantization: Some(Quantization::Q8_0), ..Setup::default() };
    let at_load = Instance::open("tiny/llama/llama.f32.gguf", setup).run(&golden.ids, &[48]);
    let from_file = Instance::open("tiny/llama/llama.q8_0.gguf", Setup::default()).run(&golden.ids, &[48]);
    assert_eq!(at_load, from_file);
}

#[test]
fn experts_in_a_file_give_the_same_bits() {
    let tokens = Golden::read("tiny/llama/golden.safetensors").ids;
    for (model, quantization) in [
        ("tiny/deepseek_v2_lite", None),
        ("tiny/deepseek_v2_lite", Some(Quantization::Q4_0)),
        ("tiny/glm4_moe_lite", Some(Quantization::Q8_0)),
        ("tiny/qwen3_moe", Some(Quantization::Q4K)),
        ("tiny/mixtral", None),
        ("tiny/mixtral/mixtral.q8_0.gguf", None),
        ("kquant/deepseek_v2_lite/deepseek_v2_lite.q4_k_mix.gguf", None),
        ("tiny/glm4_moe_lite/glm4_moe_lite.q8_0-ollama.gguf", None),
        ("dynamic/qwen3_moe.dynamic.gguf", None),
        ("tiny/gpt_oss", None),
        ("tiny/gpt_oss", Some(Quantization::Q8_0)),
        ("tiny/gpt_oss_mxfp4", None),
        ("tiny/gpt_oss_mxfp4", Some(Quantization::Q4_0)),
    ] {
        let setup = Setup { quantization, ..Setup::default() };
        let expected = Instance::open(model, setup).run(&tokens, &[40, 1, 7]);
        let setup = Setup { experts_in_file: true, ..setup };
        assert!(
            Instance::open(model, setup).run(&tokens, &[40, 1, 7]) == expected,
            "{model} {quantization:?}"
        );
    }
}

const MODELS: [&str; 23] = [
    "tiny/olmo3",
    "tiny/ministral3",
    "tiny/gpt_oss/gpt_oss.f16.gguf",
    "tiny/gpt_oss_mxfp4",
    "tiny/granite",
    "tiny/phi3/phi3.f16.gguf",
    "tiny/seed_oss",
    "tiny/glm4/glm4.f16.gguf",
    "tiny/smollm3",
    "tiny/gemma3/gemma3.q8_0.gguf",
    "dynamic/llama.dynamic.gguf",
    "tiny/mixtral/mixtral.q8_0.gguf",
    "tiny/deepseek_v2_lite/deepseek_v2_lite.q8_0-legacy.gguf",
    "tiny/deepseek_v2_lite/deepseek_v2_lite.q4_0-mixed.gguf",
    "tiny/youtu",
    "tiny/glm4_moe_lite",
    "tiny/qwen3_moe/qwen3_moe.q8_0.gguf",
    "kquant/deepseek_v2_lite/deepseek_v2_lite.q4_k_mix.gguf",
    "tiny/llama",
    "tiny/mistral",
    "tiny/llama3/llama3.q4_0.gguf",
    "tiny/qwen2/qwen2.q8_0.gguf",
    "kquant/qwen3/qwen3.q4_k_mix.gguf",
];

/// A generator of numbers that need not be good, only different.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % limit
    }
}

#[test]
fn logits_have_the_same_bits_however_the_prompt_is_divided() {
    for name in MODELS {
        let tokens = Golden::read("tiny/llama/golden.safetensors").ids;
        let whole = Instance::open(name, Setup::default()).run(&tokens, &[48]);
        let mut numbers = Numbers(7);
        let mut divisions = vec![vec![1; tokens.len()], vec![31, 17], vec![32, 16], vec![33, 15]];
        for _ in 0..3 {
            let mut chunks = Vec::new();
            while chunks.iter().sum::<usize>() < tokens.len() {
                let left = tokens.len() - chunks.iter().sum::<usize>();
                chunks.push(left.min(1 + numbers.below(20)));
            }
            divisions.push(chunks);
        }
        for chunks in divisions {
            let divided = Instance::open(name, Setup::default()).run(&tokens, &chunks);
            assert_eq!(divided, whole, "{name} in chunks of {chunks:?}");
        }
    }
}

#[test]
fn logits_have_the_same_bits_whatever_else_is_in_the_step() {
    for name in MODELS {
        let tokens = Golden::read("tiny/llama/golden.safetensors").ids;
        // The second one has a whole group, as the prompts below have.
        let (first, second, third) = (&tokens[..37], &tokens[5..48], &tokens[8..44]);
        let alone = |tokens: &[u32]| Instance::open(name, Setup::default()).run(tokens, &[tokens.len()]);
        let expected = [alone(first), alone(second), alone(third)];

        let mut instance = Instance::open(name, Setup::default());
        instance.num_grouped = EXPANDED_GROUP;
        let mut logits = [Vec::new(), Vec::new(), Vec::new()];
        let mut numbers = Numbers(11);
        while logits.iter().zip([first, second, third]).any(|(logits, tokens)| logits.len() < tokens.len()) {
            let mut rows = Vec::new();
            for (sequence, tokens) in [first, second, third].into_iter().enumerate() {
                let done = logits[sequence].len();
                let num_new = (tokens.len() - done).min(numbers.below(40));
                if num_new > 0 {
                    rows.push((sequence, &tokens[..done + num_new], num_new));
                }
            }
            let mut results = instance.step(&rows).into_iter();
            for (sequence, _, num_new) in rows {
                logits[sequence].extend(results.by_ref().take(num_new));
            }
        }
        assert_eq!(logits, expected, "{name}");
    }
}

#[test]
fn logits_have_the_same_bits_for_any_number_of_threads_and_block_size() {
    for name in MODELS {
        for dtype in KvCacheDType::ALL {
            for chunks in [&[40, 8][..], &[48]] {
                let tokens = Golden::read("tiny/llama/golden.safetensors").ids;
                let base = Setup { dtype, ..Setup::default() };
                let expected = Instance::open(name, base).run(&tokens, chunks);
                for (num_threads, block_size) in [(1, 32), (3, 8), (2, 12)] {
                    let setup = Setup { num_threads, block_size, ..base };
                    let logits = Instance::open(name, setup).run(&tokens, chunks);
                    assert_eq!(logits, expected, "{name}, {num_threads} threads, blocks of {block_size}");
                }
            }
        }
    }
}

/// Models with latent attention, in single precision and with quantised weights.
const LATENT_MODELS: [(&str, f32); 4] = [
    ("tiny/youtu", 1e-4),
    ("tiny/glm4_moe_lite", 1e-4),
    ("tiny/deepseek_v2_lite/deepseek_v2_lite.f32-legacy.gguf", 1e-4),
    ("kquant/youtu/youtu.q4_k_mix.gguf", 0.3),
];

#[test]
fn the_mode_of_latent_attention_follows_the_position_in_the_prompt() {
    let tokens = Golden::read("tiny/llama/golden.safetensors").ids;
    for (name, bound) in LATENT_MODELS {
        let with = |num_grouped: usize| {
            let mut instance = Instance::open(name, Setup::default());
            instance.num_grouped = num_grouped;
            instance.step(&[(0, &tokens, 48)])
        };
        let (absorbed, both, expanded) = (with(0), with(32), with(48));
        let (max, _, _) = compare(&absorbed, &expanded);
        // Other bits, or one of the modes is not used.
        assert!(max > 0.0 && max < bound, "{name}: the modes differ by {max}");
        assert_eq!(both[..32], expanded[..32], "{name}");
        let (max, _, _) = compare(&both[32..], &expanded[32..]);
        assert!(max > 0.0 && max < bound, "{name}: the modes differ by {max}");
    }
}

#[test]
fn a_cache_that_rounds_is_close() {
    for (dtype, bound) in [
        (KvCacheDType::F16, 0.01),
        (KvCacheDType::Bf16, 0.08),
        (KvCacheDType::Q8_0, 0.15),
        (KvCacheDType::Fp8E4m3, 1.0),
    ] {
        for name in
            ["llama", "llama3", "mistral", "qwen2", "qwen3", "gemma3", "smollm3", "youtu", "deepseek_v2_lite"]
        {
            let golden = Golden::read(&format!("tiny/{name}/golden.safetensors"));
            let setup = Setup { dtype, ..Setup::default() };
            let logits = Instance::open(&format!("tiny/{name}"), setup).run(&golden.ids, &[48]);
            let (max, _, _) = compare(&logits, &golden.logits);
            assert!(max < bound && max > 0.0, "{name} with {dtype}: logits differ by {max}");
        }
    }
}

#[test]
fn a_copied_block_has_the_keys_and_values_of_its_source() {
    for (kernels, model) in
        Kernels::all().flat_map(|kernels| ["tiny/llama", "tiny/youtu"].map(|model| (kernels, model)))
    {
        let tokens = Golden::read("tiny/llama/golden.safetensors").ids;
        let mut instance = Instance::open(model, Setup { kernels, ..Setup::default() });
        instance.step(&[(0, &tokens[..9], 9)]);
        let expected = instance.step(&[(0, &tokens[..10], 1)]);
        // The first blocks of sequences 0 and 1.
        let first = (NUM_BLOCKS / 3 - 1) as u32 * 3;
        instance.cache.copy_block(first, first + 1).unwrap();
        assert_eq!(instance.step(&[(1, &tokens[..10], 1)]), expected, "{kernels:?}");
        // By way of the host, into the first block of sequence 2.
        let mut bytes = vec![0; instance.cache.block_bytes()];
        instance.cache.read_block(first, &mut bytes).unwrap();
        instance.cache.write_block(first + 2, &bytes).unwrap();
        assert_eq!(instance.step(&[(2, &tokens[..10], 1)]), expected, "{kernels:?}");
        assert!(instance.cache.copy_block(0, NUM_BLOCKS as u32).is_err());
    }
}

#[test]
fn a_step_has_few_dispatches() {
    // Embedding and logits; six for each layer of Llama, nine with latent attention, four more with experts and shared
    // ones.
    assert_eq!(num_dispatches("tiny/llama", 1), 2 + 3 * 6);
    assert_eq!(num_dispatches("tiny/youtu", 1), 2 + 3 * 9);
    assert_eq!(num_dispatches("tiny/glm4_moe_lite", 1), 2 + 9 + 2 * 11);
    assert_eq!(num_dispatches("tiny/qwen3_moe", 1), 2 + 3 * 8);
    // The activation is fused into the first GEMM here, with biases as without.
    assert_eq!(num_dispatches("tiny/gpt_oss", 1), 2 + 2 * 8);
    // No norm in a GEMM, but one of queries, one of keys and two after halves.
    assert_eq!(num_dispatches("tiny/olmo3", 1), 2 + 2 * 11);
    // Two norms after halves, and an activation that no GEMM has.
    assert_eq!(num_dispatches("tiny/gemma3", 1), 2 + 6 * 9);
    // Two fewer where keys and values are made instead of being projected, one more where there is both.
    assert_eq!(num_dispatches("tiny/youtu", 32), 2 + 3 * 7);
    assert_eq!(num_dispatches("tiny/youtu", 40), 2 + 3 * 10);
}

/// Dispatches of a step of this many tokens of one sequence.
fn num_dispatches(model: &str, num_tokens: usize) -> u64 {
    let checkpoint = Checkpoint::open(&fixture(model)).unwrap();
    let config = ModelConfig::from_checkpoint(&checkpoint).unwrap();
    let context = Arc::new(Context::cpu(ThreadPool::default_num_threads(), CpuLevel::detect()));
    let options = LoadOptions {
        quantizer: None,
        expert_file: None,
        max_model_len: 64,
        max_num_batched_tokens: 48,
        max_num_seqs: 48,
        num_speculative_tokens: 0,
        block_size: BLOCK_SIZE,
    };
    let model = models::load(&checkpoint, &config, &context, &options, &|_| ()).unwrap();
    let cache = KvCache::new(&context, &config, NUM_BLOCKS, BLOCK_SIZE, KvCacheDType::F16).unwrap();
    assert_eq!(context.num_dispatches(), 0);
    let num_grouped = num_tokens / EXPANDED_GROUP * EXPANDED_GROUP;
    let mut instance = Instance { model, cache, block_size: BLOCK_SIZE, num_grouped };
    instance.step(&[(0, &vec![5; num_tokens], num_tokens)]);
    context.num_dispatches()
}

#[test]
fn mistakes_in_a_batch_are_errors() {
    let mut instance = Instance::open("tiny/llama", Setup::default());
    let good = || {
        let mut batch = InputBatch::default();
        batch.clear();
        batch.attention.block_size = BLOCK_SIZE;
        batch.token_ids.push(3);
        batch.positions.push(0);
        batch.attention.slot_mapping.push(0);
        batch.attention.query_start_loc.push(1);
        batch.attention.seq_lens.push(1);
        batch.attention.block_tables.push(0);
        batch.attention.block_table_starts.push(1);
        batch.attention.modes.push(RowMode::Decode);
        batch.want(0, Wanted::Logits);
        batch
    };
    assert!(instance.model.forward(&good(), &mut instance.cache).is_ok());
    type Change = fn(&mut InputBatch);
    let mistakes: [(&str, Change); 12] = [
        ("[Hidden, Logits] is wanted", |batch| {
            batch.token_ids.push(4);
            batch.positions.push(1);
            batch.attention.slot_mapping.push(1);
            batch.attention.query_start_loc[1] = 2;
            batch.attention.seq_lens[0] = 2;
            batch.attention.modes[0] = RowMode::Prefill;
            batch.clear_outputs();
            batch.want(0, Wanted::Hidden);
            batch.want(1, Wanted::Logits);
        }),
        ("of 1 tokens []", |batch| batch.wanted.clear()),
        ("vocabulary", |batch| batch.token_ids[0] = 288),
        ("position 128", |batch| batch.positions[0] = 128),
        ("slot 384", |batch| batch.attention.slot_mapping[0] = NUM_BLOCKS * BLOCK_SIZE),
        ("block 24", |batch| batch.attention.block_tables[0] = NUM_BLOCKS as u32),
        ("0 blocks", |batch| batch.attention.block_table_starts[1] = 0),
        ("sequence of 0", |batch| batch.attention.seq_lens[0] = 0),
        ("lists of", |batch| batch.attention.query_start_loc[1] = 2),
        ("lists of", |batch| batch.attention.modes.clear()),
        ("2 positions", |batch| batch.positions.push(1)),
        ("token 1 of 1", |batch| batch.outputs[0] = 1),
    ];
    for (expected, mistake) in mistakes {
        let mut batch = good();
        mistake(&mut batch);
        let error = instance.model.forward(&batch, &mut instance.cache).unwrap_err();
        assert!(error.message().contains(expected), "{error}");
    }
}

/// For models that are loaded and not run.
fn small_options() -> LoadOptions {
    LoadOptions {
        quantizer: None,
        expert_file: None,
        max_model_len: 8,
        max_num_batched_tokens: 8,
        max_num_seqs: 1,
        num_speculative_tokens: 0,
        block_size: 8,
    }
}

/// A folder with the weights of one model and the configuration of another, changed in `changes`.
fn mixed_folder(weights: &str, config: &str, changes: &[(&str, serde_json::Value)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let config = std::fs::read(fixture(config).join("config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_slice(&config).unwrap();
    for (key, value) in changes {
        config[*key] = value.clone();
    }
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    std::fs::copy(fixture(weights).join("model.safetensors"), folder.path().join("model.safetensors"))
        .unwrap();
    folder
}

#[test]
fn weights_that_do_not_fit_the_configuration_are_refused_by_name() {
    let check = |weights: &str, config: &str, changes: &[(&str, serde_json::Value)], expected: &str| {
        let folder = mixed_folder(weights, config, changes);
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let config = ModelConfig::from_checkpoint(&checkpoint).unwrap();
        let context = Arc::new(Context::cpu(1, CpuLevel::detect()));
        let options = small_options();
        let error = models::load(&checkpoint, &config, &context, &options, &|_| ()).err().unwrap();
        assert!(error.message().contains(expected), "{error}");
    };
    let llama = ("architectures", serde_json::json!(["LlamaForCausalLM"]));
    check("tiny/qwen3", "tiny/qwen3", std::slice::from_ref(&llama), "no use for: blk.0.attn_k_norm.weight");
    check("tiny/qwen2", "tiny/qwen2", std::slice::from_ref(&llama), "no use for: blk.0.attn_k.bias");
    check("tiny/llama3", "tiny/qwen3", &[], "blk.0.attn_q_norm.weight");
    check("tiny/llama", "tiny/llama", &[("num_hidden_layers", 4.into())], "blk.3.attn_q.weight");
    check("tiny/llama", "tiny/llama", &[("num_hidden_layers", 2.into())], "9 tensors");
    check("tiny/llama", "tiny/llama", &[("intermediate_size", 96.into())], "blk.0.ffn_gate.weight");
    check("tiny/llama", "tiny/llama", &[("num_key_value_heads", 4.into())], "blk.0.attn_k.weight");
    check("tiny/llama", "tiny/llama", &[("vocab_size", 300.into())], "token_embd.weight");
}

/// AutoGPTQ writes biases of zeros, and others leave what training or an older library needed.
#[test]
fn tensors_that_change_nothing_are_left_unread() {
    let load = |name: &str, value: f32| {
        let folder = mixed_folder("tiny/llama", "tiny/llama", &[]);
        let path = folder.path().join("model.safetensors");
        let file = std::fs::read(&path).unwrap();
        let known = safetensors::SafeTensors::deserialize(&file).unwrap();
        let added: Vec<u8> = std::iter::repeat_n(value.to_le_bytes(), 64).flatten().collect();
        let added = TensorView::new(safetensors::Dtype::F32, vec![64], &added).unwrap();
        let all = known.tensors().into_iter().chain([(name.to_owned(), added)]);
        std::fs::write(&path, safetensors::serialize(all, None).unwrap()).unwrap();
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let config = ModelConfig::from_checkpoint(&checkpoint).unwrap();
        let context = Arc::new(Context::cpu(1, CpuLevel::detect()));
        models::load(&checkpoint, &config, &context, &small_options(), &|_| ()).map(|_| ())
    };
    load("model.layers.0.mlp.down_proj.bias", 0.0).unwrap();
    load("model.layers.0.self_attn.rotary_emb.cos_cached", 0.5).unwrap();
    load("v_head.summary.weight", 0.5).unwrap();
    let error = load("model.layers.0.mlp.down_proj.bias", 0.5).unwrap_err();
    assert!(error.message().contains("blk.0.ffn_down.bias"), "{error}");
}

/// A block after the layers, which predicts further tokens, is not loaded. The layer instead is one of the model's.
#[test]
fn layers_that_predict_further_tokens_are_left_out() {
    let changes = [("num_hidden_layers", 2.into()), ("num_nextn_predict_layers", 1.into())];
    let folder = mixed_folder("tiny/youtu", "tiny/youtu", &changes);
    let more = [("num_nextn_predict_layers", u64::MAX.into())];
    let many = Checkpoint::open(mixed_folder("tiny/youtu", "tiny/youtu", &more).path()).unwrap();
    let config = ModelConfig::from_checkpoint(&many).unwrap();
    let context = Arc::new(Context::cpu(1, CpuLevel::detect()));
    models::load(&many, &config, &context, &small_options(), &|_| ()).unwrap();
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let config = ModelConfig::from_checkpoint(&checkpoint).unwrap();
    assert_eq!((config.num_layers, config.num_nextn_layers), (2, 1));
    let context = Arc::new(Context::cpu(1, CpuLevel::detect()));
    let options = small_options();
    let most = AtomicU64::new(0);
    let on_progress = |progress: models::LoadProgress| {
        most.fetch_max(progress.loaded_bytes, Ordering::Relaxed);
    };
    models::load(&checkpoint, &config, &context, &options, &on_progress).unwrap();
    let total: usize = checkpoint.tensors().iter().map(|tensor| tensor.num_bytes).sum();
    assert_eq!(most.into_inner(), total as u64);
}

/// The experts of a layer in two tensors, those of gate and up in one, as some programs save them.
#[test]
fn stacked_experts_are_the_same_model() {
    let bytes = std::fs::read(fixture("tiny/qwen3_moe/model.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let part = |layer: usize, expert: usize, part: &str| {
        let name = format!("model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight");
        file.tensor(&name).unwrap().data().to_vec()
    };
    let mut tensors: Vec<(String, Vec<usize>, Vec<u8>)> = file
        .tensors()
        .into_iter()
        .filter(|(name, _)| !name.contains("experts"))
        .map(|(name, tensor)| (name, tensor.shape().to_vec(), tensor.data().to_vec()))
        .collect();
    for layer in 0..3 {
        let name = |part: &str| format!("model.layers.{layer}.mlp.experts.{part}_proj");
        let gate_up = (0..8).flat_map(|expert| [part(layer, expert, "gate"), part(layer, expert, "up")]);
        tensors.push((name("gate_up"), vec![8, 64, 64], gate_up.flatten().collect()));
        let down = (0..8).flat_map(|expert| part(layer, expert, "down"));
        tensors.push((name("down"), vec![8, 64, 32], down.collect()));
    }
    let views = tensors.iter().map(|(name, shape, data)| {
        let view = safetensors::tensor::TensorView::new(safetensors::Dtype::F32, shape.clone(), data);
        (name.clone(), view.unwrap())
    });
    let folder = mixed_folder("tiny/qwen3_moe", "tiny/qwen3_moe", &[]);
    std::fs::write(folder.path().join("model.safetensors"), safetensors::serialize(views, None).unwrap())
        .unwrap();
    let tokens = Golden::read("tiny/qwen3_moe/golden.safetensors").ids;
    for quantization in [None, Some(Quantization::Q8_0)] {
        let setup = Setup { quantization, ..Setup::default() };
        let expected = Instance::open("tiny/qwen3_moe", setup).run(&tokens, &[tokens.len()]);
        for experts_in_file in [false, true] {
            let setup = Setup { experts_in_file, ..setup };
            let logits = Instance::open(folder.path().to_str().unwrap(), setup).run(&tokens, &[tokens.len()]);
            assert_eq!(logits, expected, "{quantization:?}, in a file: {experts_in_file}");
        }
    }
    // Experts of another width.
    let narrow = mixed_folder("tiny/qwen3_moe", "tiny/qwen3_moe", &[("moe_intermediate_size", 16.into())]);
    let weights = std::fs::read(folder.path().join("model.safetensors")).unwrap();
    std::fs::write(narrow.path().join("model.safetensors"), weights).unwrap();
    let checkpoint = Checkpoint::open(narrow.path()).unwrap();
    let config = ModelConfig::from_checkpoint(&checkpoint).unwrap();
    let context = Arc::new(Context::cpu(1, CpuLevel::detect()));
    let error = models::load(&checkpoint, &config, &context, &small_options(), &|_| ()).err().unwrap();
    assert!(error.message().contains("ffn_gate_up_exps.weight\" has the shape [8, 64, 64]"), "{error}");
}

#[test]
fn progress_ends_with_all_bytes() {
    let quantized = Some(Quantization::Q4_0);
    for (model, quantization) in [
        ("tiny/qwen2", None),
        ("tiny/qwen2", quantized),
        ("tiny/deepseek_v2_lite", None),
        ("tiny/deepseek_v2_lite", quantized),
    ] {
        let checkpoint = Checkpoint::open(&fixture(model)).unwrap();
        let config = ModelConfig::from_checkpoint(&checkpoint).unwrap();
        let total: usize = checkpoint.tensors().iter().map(|tensor| tensor.num_bytes).sum();
        let context = Arc::new(Context::cpu(2, CpuLevel::detect()));
        let folder = tempfile::tempdir().unwrap();
        let file = || Some(MatrixFile::open(folder.path().join("experts"), 1, 1 << 20).unwrap());
        let no_file = || None;
        // In memory; in a file, which is made first and then there.
        let files: [&dyn Fn() -> Option<Arc<MatrixFile>>; 3] = [&no_file, &file, &file];
        for (start, file) in files.into_iter().enumerate() {
            let quantizer = quantization.map(|kind| Quantizer::new(kind, &checkpoint, None));
            let options = LoadOptions { quantizer, expert_file: file(), ..small_options() };
            let most = AtomicU64::new(0);
            let on_progress = |progress: models::LoadProgress| {
                assert!(progress.loaded_bytes <= progress.total_bytes);
                most.fetch_max(progress.loaded_bytes, Ordering::Relaxed);
            };
            models::load(&checkpoint, &config, &context, &options, &on_progress).unwrap();
            assert_eq!(most.into_inner(), total as u64, "{model} {quantization:?}, start {start}");
        }
    }
}
