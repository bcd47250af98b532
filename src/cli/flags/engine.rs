//! How a model is loaded, and the limits of the engine.

use std::path::PathBuf;

use clap::builder::{BoolishValueParser, NonEmptyStringValueParser};
use clap::{ArgAction, Args};
use tinyvllm::chat::ChatConfig;
use tinyvllm::llm::{
    DenseDType, DeviceChoice, GenerationConfigChoice, KernelChoice, KvCacheChoice, LlmOptions,
};
use tinyvllm::ops::cpu::simd::CpuLevel;
use tinyvllm::runner::{EngineLimits, ExpertWeights};
use tinyvllm::weights::Quantization;

use super::ThreadsArgs;
use crate::cache::PrefixStoreArgs;
use crate::speculation::SpeculationArgs;
use crate::value::{at_most_a_sequence, parse_bytes, parse_count, parse_cpu_level, parse_value};

/// How the model is loaded, and the limits of the engine.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Engine")]
pub(crate) struct EngineArgs {
    /// Device: auto, cpu, metal, cuda or cuda:N; a missing device is an error
    #[arg(long, default_value = "auto", value_parser = parse_value::<DeviceChoice>)]
    pub(crate) device: DeviceChoice,
    /// Kernels: fused, or reference (candle's tensors, slow, for a device whose kernels fail)
    #[arg(
        long,
        default_value = "fused",
        value_parser = parse_value::<KernelChoice>,
        value_name = "NAME",
        hide_short_help = true
    )]
    pub(crate) kernels: KernelChoice,
    #[command(flatten)]
    pub(crate) threads: ThreadsArgs,
    /// Pre-tokenizer of a GGUF file that names none or a wrong one
    #[arg(
        long,
        value_name = "NAME",
        value_parser = NonEmptyStringValueParser::new(),
        help_heading = "Model",
        hide_short_help = true
    )]
    pub(crate) pre_tokenizer: Option<String>,
    /// Pin each thread to a processor (Linux); for machines that run nothing else
    #[arg(long, hide_short_help = true)]
    pub(crate) pin_threads: bool,
    /// Instruction set of the CPU kernels [default: the best one of this machine]
    #[arg(long, value_parser = parse_cpu_level, hide_short_help = true, value_name = "NAME")]
    pub(crate) cpu_level: Option<CpuLevel>,
    /// Type of weights that are not quantised: auto, f32, f16, bf16
    #[arg(
        long,
        default_value = "auto",
        value_parser = parse_value::<DenseDType>,
        value_name = "TYPE",
        hide_short_help = true
    )]
    pub(crate) dtype: DenseDType,
    /// Quantise dense weights while loading: q4_0, q4_1, q5_0, q5_1, q8_0, q4_k, q5_k, q6_k
    #[arg(long, value_parser = parse_value::<Quantization>, value_name = "TYPE")]
    pub(crate) quantization: Option<Quantization>,
    /// Longest sequence in tokens, prompt and output together, such as 4096, 4k or auto [default: auto, the model's]
    #[arg(long, short = 'c', visible_alias = "ctx-size", value_name = "N", value_parser = window)]
    pub(crate) max_model_len: Option<usize>,
    /// Type of the KV cache: auto (f16, or bf16 for a model whose keys overflow f16), f16, bf16, f32, or q8_0
    /// or fp8_e4m3, of half the memory of f16 (fp8_e4m3 is less exact and holds values up to 448)
    #[arg(
        long,
        value_parser = parse_value::<KvCacheChoice>,
        value_name = "TYPE",
        hide_short_help = true
    )]
    pub(crate) kv_cache_dtype: Option<KvCacheChoice>,
    /// Memory of the KV cache, such as 512M or 2G [default: half of the free memory; on NVIDIA GPUs all of it]
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    pub(crate) kv_cache_memory_bytes: Option<u64>,
    /// Share of an NVIDIA GPU's free memory that this process may use; no effect on other devices
    ///
    /// Weights, KV cache and everything else of this process must fit into this share of the memory that is free when
    /// the GPU is opened. On the CPU the limit is the free memory, on Apple GPUs the system's recommendation.
    #[arg(long, value_name = "FRACTION", default_value_t = EngineLimits::default().gpu_memory_utilization)]
    pub(crate) gpu_memory_utilization: f64,
    /// Where the experts of a MoE model are: auto, memory or file; auto uses a file if they do not fit into memory
    #[arg(
        long,
        default_value = "auto",
        value_parser = parse_value::<ExpertWeights>,
        value_name = "PLACE",
        hide_short_help = true
    )]
    pub(crate) expert_weights: ExpertWeights,
    /// Folder of the file with experts, on a fast disk [default: tinyvllm/experts in the user's cache folder]
    #[arg(long, value_name = "FOLDER", hide_short_help = true)]
    pub(crate) expert_weights_dir: Option<PathBuf>,
    /// Maximum number of sequences in a step
    #[arg(
        long,
        default_value_t = EngineLimits::default().max_num_seqs,
        value_name = "N",
        hide_short_help = true
    )]
    pub(crate) max_num_seqs: usize,
    /// Maximum number of tokens in a step; longer prompts are computed in chunks [default: 512, on NVIDIA GPUs 4096]
    #[arg(long, value_name = "N", value_parser = parse_count, hide_short_help = true)]
    pub(crate) max_num_batched_tokens: Option<usize>,
    /// Tokens in a block of the KV cache
    #[arg(
        long,
        default_value_t = EngineLimits::default().block_size,
        hide_short_help = true,
        value_name = "N"
    )]
    pub(crate) block_size: usize,
    /// Steps between two scheduling decisions
    #[arg(
        long,
        default_value_t = EngineLimits::default().num_scheduler_steps,
        hide_short_help = true,
        value_name = "N"
    )]
    pub(crate) num_scheduler_steps: usize,
    #[command(flatten)]
    pub(crate) speculation: SpeculationArgs,
    /// Share the keys and values of common prefixes
    #[arg(
        long,
        action = ArgAction::Set,
        num_args = 0..=1,
        value_name = "BOOL",
        require_equals = true,
        default_value = "true",
        default_missing_value = "true",
        value_parser = BoolishValueParser::new(),
        overrides_with = "no_enable_prefix_caching",
        hide_short_help = true
    )]
    pub(crate) enable_prefix_caching: bool,
    /// The opposite: compute every prompt in full
    #[arg(long, overrides_with = "enable_prefix_caching", hide_short_help = true)]
    pub(crate) no_enable_prefix_caching: bool,
    #[command(flatten)]
    pub(crate) prefix_store: PrefixStoreArgs,
}

impl EngineArgs {
    /// These flags as the library's type.
    ///
    /// # Errors
    /// If a value is out of its range, or two contradict each other.
    pub(crate) fn options(&self) -> tinyvllm::Result<LlmOptions> {
        self.speculation.check()?;
        let options = LlmOptions {
            gpu: None,
            device: self.device,
            kernels: self.kernels,
            threads: self.threads.threads,
            pin_threads: self.pin_threads,
            cpu_level: self.cpu_level,
            quantization: self.quantization,
            dtype: self.dtype,
            generation_config: GenerationConfigChoice::Auto,
            kv_cache_dtype: self.kv_cache_dtype.unwrap_or_default(),
            limits: EngineLimits {
                max_model_len: self.max_model_len.filter(|len| *len != AUTO),
                max_num_seqs: self.max_num_seqs,
                max_num_batched_tokens: self.max_num_batched_tokens,
                block_size: self.block_size,
                kv_cache_memory_bytes: self.kv_cache_memory_bytes,
                gpu_memory_utilization: self.gpu_memory_utilization,
                enable_prefix_caching: self.enable_prefix_caching && !self.no_enable_prefix_caching,
                num_scheduler_steps: self.num_scheduler_steps,
                speculative: self.speculation.config(),
                expert_weights: self.expert_weights,
            },
            expert_weights_dir: self.expert_weights_dir.clone(),
            pre_tokenizer: self.pre_tokenizer.clone(),
            draft_model: None,
            prefix_store: None,
            kv_offload: None,
            chat: ChatConfig::default(),
        };
        options.limits.validate()?;
        Ok(options)
    }
}

/// The window that the model has. Nobody can type it as a number.
const AUTO: usize = usize::MAX;

/// `auto`, which is −1 with vLLM, is what the model has.
fn window(text: &str) -> Result<usize, String> {
    match text {
        "auto" | "-1" => Ok(AUTO),
        text => at_most_a_sequence(parse_count(text)?),
    }
}
