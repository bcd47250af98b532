//! Models on a device: against the logits of independent implementations, and compared with the CPU.

use std::path::Path;
use std::sync::Arc;

use super::oracle::error;
use super::{Check, Report};
use crate::config::ModelConfig;
use crate::models::{self, CausalLm, InputBatch, LoadOptions, Wanted};
use crate::ops::cpu::{CpuLevel, ThreadPool};
use crate::ops::{Context, EXPANDED_GROUP, KvCache, KvCacheDType, RowMode};
use crate::weights::Checkpoint;
use crate::{Error, Result, demo};

const BLOCK_SIZE: usize = 16;
const MAX_LEN: usize = 128;

/// Models in single precision with `golden.safetensors` next to their weights: `ids`, the `logits` of each, and `greedy`,
/// eight tokens with the 32 that follow.
const EXACT: [&str; 19] = [
    "tiny/llama",
    "tiny/llama3",
    "tiny/mistral",
    "tiny/qwen2",
    "tiny/qwen3",
    "tiny/gemma3",
    "tiny/smollm3",
    "tiny/granite",
    "tiny/phi3",
    "tiny/seed_oss",
    "tiny/glm4",
    "tiny/youtu",
    "tiny/deepseek_v2_lite",
    "tiny/glm4_moe_lite",
    "tiny/qwen3_moe",
    "tiny/mixtral",
    "tiny/gpt_oss",
    "tiny/olmo3",
    "tiny/ministral3",
];

/// Tokens of golden prompts. The second has a whole group, too.
const PROMPT_LENS: [usize; 2] = [8, 34];

/// Those of them whose weights are in half precision.
const IN_HALF: [&str; 3] = ["tiny/gpt_oss", "tiny/olmo3", "tiny/ministral3"];

/// Quantised models whose golden logits were computed with the quantised weights.
const QUANTIZED: [&str; 13] = [
    "tiny/llama/llama.q8_0.gguf",
    "tiny/llama3/llama3.q4_0.gguf",
    "tiny/qwen2/qwen2.q8_0.gguf",
    "tiny/gemma3/gemma3.q8_0.gguf",
    "tiny/youtu/youtu.q4_0.gguf",
    "tiny/deepseek_v2_lite/deepseek_v2_lite.q4_0.gguf",
    "tiny/deepseek_v2_lite/deepseek_v2_lite.q4_0-mixed.gguf",
    "tiny/deepseek_v2_lite/deepseek_v2_lite.f32-legacy.gguf",
    "tiny/glm4_moe_lite/glm4_moe_lite.q8_0.gguf",
    "tiny/qwen3_moe/qwen3_moe.q8_0.gguf",
    "tiny/gpt_oss/gpt_oss.mxfp4.gguf",
    "kquant/llama/llama.q4_k_mix.gguf",
    "kquant/qwen3/qwen3.q4_k_mix.gguf",
];

/// Generates with the built-in model on a device and on the CPU and compares.
pub fn demo_model(context: &Arc<Context>, report: &mut dyn Report) {
    const PROMPT_LEN: u32 = 24;
    const NUM_TOKENS: usize = 24;
    let run = |context: &Arc<Context>| {
        let mut model = Model::load(&Checkpoint::from_static(demo::MODEL)?, context, KvCacheDType::F16)?;
        let prompt: Vec<u32> = (0..PROMPT_LEN).map(|index| 300 + index * 37 % 1500).collect();
        model.generate(&prompt, NUM_TOKENS)
    };
    let cpu = Arc::new(Context::cpu(ThreadPool::default_num_threads(), CpuLevel::detect()));
    let names = ["demo: logits compared with the CPU's", "demo: tokens of the CPU"].map(str::to_owned);
    check_together(names, report, |[logits, tokens]| {
        let (device, cpu) = (run(context)?, run(&cpu)?);
        // The CPU rounds activations to eight bits.
        let logits = Check::error(logits, error(&device.logits, &cpu.logits), 1e-3);
        Ok([logits, same_tokens(tokens, &device.tokens, &cpu.tokens)])
    });
}

/// Runs checks that share most of their work, if any of them is selected; an error of that work fails each of them.
fn check_together<const N: usize>(
    names: [String; N],
    report: &mut dyn Report,
    outcome: impl FnOnce([String; N]) -> Result<[Check; N]>,
) {
    let wanted: Vec<String> = names.iter().filter(|name| report.wants(name)).cloned().collect();
    if wanted.is_empty() {
        return;
    }
    match outcome(names) {
        Ok(checks) => {
            checks
                .into_iter()
                .filter(|check| wanted.contains(&check.name))
                .for_each(|check| report.hear(check));
        }
        Err(error) => wanted.into_iter().for_each(|name| report.hear(Check::failed(name, &error))),
    }
}

/// Compares the golden models in a folder of fixtures with the device's results.
pub fn golden_models(context: &Arc<Context>, fixtures: &Path, report: &mut dyn Report) {
    for name in EXACT {
        let golden = PROMPT_LENS.map(|len| format!("{name}: golden tokens after {len}"));
        let [first, second] = golden;
        check_together([format!("{name}: logits"), first, second], report, |names| {
            exact(context, fixtures, name, names)
        });
    }
    for name in QUANTIZED {
        // The CPU rounds activations to eight bits, a GPU decoded weights to half precision.
        report.check(format!("{name}: logits"), 1e-2, || quantized(context, fixtures, name));
    }
}

fn exact(
    context: &Arc<Context>,
    fixtures: &Path,
    name: &str,
    [logits_name, first_name, second_name]: [String; 3],
) -> Result<[Check; 3]> {
    let golden = Golden::read(&fixtures.join(name).join("golden.safetensors"))?;
    let checkpoint = Checkpoint::open(&fixtures.join(name))?;
    let mut model = Model::load(&checkpoint, context, KvCacheDType::F32)?;
    let num_grouped = num_grouped(&golden.ids);
    let whole = error(&model.forward(&golden.ids, 0, num_grouped)?, &golden.logits);
    let (first, rest) = golden.ids.split_at(9);
    let mut logits = model.forward(first, 0, num_grouped)?;
    logits.extend(model.forward(rest, first.len(), num_grouped)?);
    let in_chunks = error(&logits, &golden.logits);
    let mut generate = |name, len| {
        let (prompt, expected) = golden.greedy.split_at(len);
        let generated = model.generate(prompt, expected.len())?;
        Ok::<_, Error>(same_tokens(name, &generated.tokens, expected))
    };
    Ok([
        Check::error(logits_name, whole.max(in_chunks), limit(context, name)),
        generate(first_name, PROMPT_LENS[0])?,
        generate(second_name, PROMPT_LENS[1])?,
    ])
}

/// The most that logits may differ. Tensor cores multiply weights in half precision by activations in half precision.
fn limit(context: &Context, name: &str) -> f64 {
    if context.has_tensor_cores() && IN_HALF.contains(&name) { 5e-6 } else { 1e-7 }
}

fn quantized(context: &Arc<Context>, fixtures: &Path, name: &str) -> Result<f64> {
    let golden = Golden::read(&fixtures.join(name.replace(".gguf", ".golden.safetensors")))?;
    let mut model = Model::load(&Checkpoint::open(&fixtures.join(name))?, context, KvCacheDType::F32)?;
    Ok(error(&model.forward(&golden.ids, 0, num_grouped(&golden.ids))?, &golden.logits))
}

/// Tokens of a prompt that are in whole groups.
fn num_grouped(prompt: &[u32]) -> usize {
    prompt.len() / EXPANDED_GROUP * EXPANDED_GROUP
}

fn same_tokens(name: String, actual: &[u32], expected: &[u32]) -> Check {
    let len = actual.iter().zip(expected).take_while(|(a, b)| a == b).count();
    let passed = actual == expected;
    let detail = if passed { format!("{len} tokens") } else { format!("differ from token {len} on") };
    Check { name, detail, passed }
}

/// A model with a cache for one sequence.
struct Model {
    model: Box<dyn CausalLm>,
    cache: KvCache,
}

/// The generated tokens, and the logits of every step.
struct Generated {
    tokens: Vec<u32>,
    logits: Vec<f64>,
}

impl Model {
    fn load(checkpoint: &Checkpoint, context: &Arc<Context>, dtype: KvCacheDType) -> Result<Self> {
        let config = ModelConfig::from_checkpoint(checkpoint)?;
        let options = LoadOptions {
            quantizer: None,
            expert_file: None,
            max_model_len: MAX_LEN,
            max_num_batched_tokens: MAX_LEN,
            max_num_seqs: MAX_LEN,
            num_speculative_tokens: 0,
            block_size: BLOCK_SIZE,
        };
        let model = models::load(checkpoint, &config, context, &options, &|_| ())?;
        let cache = KvCache::new(context, &config, MAX_LEN / BLOCK_SIZE, BLOCK_SIZE, dtype)?;
        Ok(Self { model, cache })
    }

    /// The logits of tokens from position `start` on, of a sequence of which this many are in whole groups of its prompt.
    fn forward(&mut self, token_ids: &[u32], start: usize, num_grouped: usize) -> Result<Vec<f64>> {
        let mut batch = InputBatch::default();
        batch.clear();
        batch.attention.block_size = BLOCK_SIZE;
        let end = start + token_ids.len();
        batch.token_ids.extend_from_slice(token_ids);
        batch.positions.extend(start as u32..end as u32);
        batch.attention.slot_mapping.extend(start..end);
        (0..token_ids.len()).for_each(|index| batch.want(index, Wanted::Logits));
        batch.attention.push(start..end, num_grouped, RowMode::of(token_ids.len()), |index| index as u32);
        let logits = self.model.forward(&batch, &mut self.cache)?;
        logits.read_exact(token_ids.len())
    }

    /// Always the most likely token.
    fn generate(&mut self, prompt: &[u32], num_tokens: usize) -> Result<Generated> {
        let vocab_size = self.model.config().vocab_size;
        let num_grouped = num_grouped(prompt);
        let mut logits = self.forward(prompt, 0, num_grouped)?;
        let mut tokens = Vec::new();
        while tokens.len() < num_tokens {
            let last = &logits[logits.len() - vocab_size..];
            let better = |best: usize, index: usize| if last[index] > last[best] { index } else { best };
            let token = (0..vocab_size).reduce(better).unwrap_or_default() as u32;
            tokens.push(token);
            let next = self.forward(&[token], prompt.len() + tokens.len() - 1, num_grouped)?;
            logits.extend(next);
        }
        Ok(Generated { tokens, logits })
    }
}

struct Golden {
    ids: Vec<u32>,
    logits: Vec<f64>,
    greedy: Vec<u32>,
}

impl Golden {
    fn read(path: &Path) -> Result<Self> {
        let damaged = |error: &dyn std::fmt::Display| {
            Error::invalid_model(format!("{} is damaged: {error}", path.display()))
        };
        let bytes = std::fs::read(path)
            .map_err(|error| Error::io(format!("cannot read {}", path.display()), error))?;
        let file = safetensors::SafeTensors::deserialize(&bytes).map_err(|error| damaged(&error))?;
        let ids = |name: &str| {
            file.tensor(name).map_or_else(
                |_| Vec::new(),
                |tensor| {
                    let values = tensor.data().as_chunks::<8>().0;
                    values.iter().map(|value| i64::from_le_bytes(*value) as u32).collect()
                },
            )
        };
        let logits = file.tensor("logits").map_err(|error| damaged(&error))?;
        let logits = logits.data().as_chunks::<4>().0;
        Ok(Self {
            ids: ids("ids"),
            logits: logits.iter().map(|value| f64::from(f32::from_le_bytes(*value))).collect(),
            greedy: ids("greedy"),
        })
    }
}
