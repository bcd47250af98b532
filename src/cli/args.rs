//! Every flag of the program, each defined once.
//!
//! A command is made of groups ([`ModelArgs`], [`EngineArgs`], …) by `flatten`, so a flag means the same
//! wherever it is accepted. From these definitions `clap` makes the help, the completions and, by the one
//! rule in [`command`], the environment variables. This module only says what was typed, with a library
//! type where there is one; it opens no file and asks no terminal.

use std::path::PathBuf;

use clap::builder::BoolishValueParser;
use clap::{ArgAction, Args, CommandFactory, Parser, Subcommand};
use tinyvllm::chat::ChatConfig;
use tinyvllm::llm::{
    DenseDType, DeviceChoice, GenerationConfigChoice, KernelChoice, KvCacheChoice, LlmOptions,
};
use tinyvllm::ops::cpu::simd::CpuLevel;
use tinyvllm::runner::{EngineLimits, ExpertWeights};
use tinyvllm::sampling::{SamplingDefaults, SamplingParams};
use tinyvllm::weights::Quantization;

use super::bench::BenchArgs;
use super::cache::{CacheCommand, PrefixStoreArgs};
use super::info::InfoArgs;
use super::list::ListArgs;
use super::ps::PsArgs;
use super::pull::PullArgs;
use super::rm::RmArgs;
use super::run::RunArgs;
use super::self_test::SelfTestArgs;
use super::serve::ServeArgs;
use super::speculation::SpeculationArgs;
use super::stop::StopArgs;
use super::top::TopArgs;
use super::value::{LogitBias, TokenIds, parse_bytes, parse_count, parse_cpu_level, parse_value};
use super::verify::VerifyArgs;

const EXAMPLES: &str = "\
Examples:
  tinyvllm                                  The built-in model tells a story
  tinyvllm -m tinyllama                     Download TinyLlama and chat with it
  tinyvllm run llama3.2 'Why is the sky blue?'
  tinyvllm serve llama3.2                   A chat page, and the interfaces of OpenAI, Anthropic and ollama
  tinyvllm -m model.gguf --raw --prompt 'The sky is' --max-tokens 20
  cat letter.txt | tinyvllm -m qwen3-0.6b --system 'Say it in one sentence.'";

const MORE_EXAMPLES: &str = "\
Examples:
  tinyvllm                                  The built-in model tells a story
  tinyvllm -m tinyllama                     Download TinyLlama and chat with it
  tinyvllm run llama3.2 'Why is the sky blue?'
  tinyvllm serve llama3.2                   A chat page, and the interfaces of OpenAI, Anthropic and ollama
  tinyvllm -m model.gguf --raw --prompt 'The sky is' --max-tokens 20
  cat letter.txt | tinyvllm -m qwen3-0.6b --system 'Say it in one sentence.'

  Several prompts run as one batch; --json prints one object per sequence:
  tinyvllm -m model.gguf --prompt One --prompt Two --json
  tinyvllm -m model.gguf --prompt-ids 5,6,7 --temperature 0 --ignore-eos --max-tokens 32 --json

  tinyvllm info -m model.gguf               What is in the file, and the memory it needs
  tinyvllm pull Qwen/Qwen3-0.6B             Download, and print where it is

Environment:
  Every flag can be set by a variable: --max-model-len by TINYVLLM_MAX_MODEL_LEN, and so on.
  HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE mean what they mean to the Hugging Face tools.
  NO_COLOR switches colours off.

Exit status:
  0 success, 1 error, 2 wrong usage, 130 interrupted.";

/// Runs a language model on this machine.
///
/// Without a command it generates: from --prompt, from text on standard input, or, on a terminal and
/// with a model given, in a chat. Without arguments it runs the small built-in model.
#[derive(Debug, Parser)]
#[command(
    name = "tinyvllm",
    version,
    args_conflicts_with_subcommands = true,
    after_help = EXAMPLES,
    after_long_help = MORE_EXAMPLES
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
    #[command(flatten)]
    pub(crate) generate: GenerateArgs,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Continue or answer prompts (the same as without a command)
    Generate(Box<GenerateArgs>),
    /// Chat with a model
    Chat(Box<ChatArgs>),
    /// Chat with a model, or answer the prompt after its name
    Run(Box<RunArgs>),
    /// Serve a model over HTTP, with OpenAI's interface and others
    Serve(Box<ServeArgs>),
    /// Show the servers that run on this machine
    Ps(PsArgs),
    /// Stop a server that runs on this machine
    Stop(StopArgs),
    /// Measure tokens per second; `bench serve` measures a running server
    Bench(Box<BenchArgs>),
    /// Watch what a running server does
    ///
    /// Reads /metrics of this server or of vLLM's: requests, tokens/s, KV cache, prefix cache and latencies of the
    /// last interval. On a terminal it redraws the screen (q quits, p pauses); in a pipe it writes a line for each
    /// interval.
    Top(TopArgs),
    /// Download a model and print where it is
    Pull(PullArgs),
    /// List the models that were downloaded
    #[command(visible_alias = "ls")]
    List(ListArgs),
    /// Remove models that were downloaded
    Rm(RmArgs),
    /// Show, check or clear a directory of cached prefixes
    #[command(subcommand)]
    Cache(CacheCommand),
    /// Show what a model is, the memory it needs and its speed limit
    #[command(visible_alias = "show")]
    Info(Box<InfoArgs>),
    /// Compare logits and greedy tokens with a reference file
    Verify(Box<VerifyArgs>),
    /// Check every op and the built-in model on this machine's device, and measure
    SelfTest(SelfTestArgs),
    /// Print completions for a shell
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
}

/// The command with what holds for every flag: `--max-model-len` is also `TINYVLLM_MAX_MODEL_LEN`.
pub(crate) fn command() -> clap::Command {
    with_rules(Cli::command())
}

fn with_rules(command: clap::Command) -> clap::Command {
    let command = command.mut_args(|arg| {
        let Some(long) = arg.get_long().filter(|long| !is_negation(long)) else { return arg };
        let variable = format!("TINYVLLM_{}", long.replace('-', "_").to_uppercase());
        let keeps_empty = long == "api-key";
        // `TINYVLLM_JSON=1` is what people write; by itself a flag takes `true` and `false` only.
        let arg = match arg.get_action() {
            ArgAction::SetTrue => arg.value_parser(BoolishValueParser::new()),
            _ => arg,
        };
        // `--temperature -1` is a value out of range, not an unknown flag.
        let takes_values = arg.get_action().takes_values();
        let arg = arg.allow_negative_numbers(takes_values);
        // An empty variable counts as unset, as shell scripts switch one off. But an empty key must not open a server.
        let is_unset = std::env::var_os(&variable).is_some_and(|value| value.is_empty());
        if is_unset && !keeps_empty { arg } else { arg.env(variable).hide_env(true) }
    });
    command.mut_subcommands(with_rules)
}

/// `--no-x` has no variable: `TINYVLLM_X=false` says it.
fn is_negation(long: &str) -> bool {
    long.starts_with("no-")
}

/// Which model.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Model")]
pub(crate) struct ModelArgs {
    /// Alias (tinyllama, qwen3-0.6b, …), org/name, org/name:Q4_K_M, .gguf file or folder
    ///
    /// An alias or org/name is downloaded from the Hugging Face Hub into the cache that all Hugging
    /// Face tools share; org/name:Q4_K_M picks the GGUF file of that type. ollama's names for models that run here
    /// (llama3.2:1b) and addresses on the Hub (hf.co/org/name) work too. A folder holds config.json and safetensors.
    /// Without this flag the small built-in model runs.
    #[arg(long, short)]
    pub(crate) model: Option<String>,
    #[command(flatten)]
    pub(crate) revision: RevisionArgs,
}

/// Which version of a model.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Model")]
pub(crate) struct RevisionArgs {
    /// Branch, tag or commit of a model on the Hub
    #[arg(long, hide_short_help = true)]
    pub(crate) revision: Option<String>,
}

/// How many processors compute.
#[derive(Debug, Clone, Copy, Default, Args)]
#[command(next_help_heading = "Engine")]
pub(crate) struct ThreadsArgs {
    /// Number of threads [default: the processors that this process may use]
    #[arg(long, short, value_name = "N")]
    pub(crate) threads: Option<usize>,
}

/// The format of results for programs.
#[derive(Debug, Clone, Copy, Default, Args)]
#[command(next_help_heading = "Output")]
pub(crate) struct JsonArgs {
    /// Print one JSON object for each result, one a line
    #[arg(long)]
    pub(crate) json: bool,
}

/// The model as an argument by itself: `tinyvllm chat tinyllama`.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct PositionalModel {
    /// The model, instead of --model
    #[arg(value_name = "MODEL")]
    pub(crate) positional_model: Option<String>,
}

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
    #[arg(long, value_name = "NAME", help_heading = "Model", hide_short_help = true)]
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
    pub(crate) fn options(&self) -> LlmOptions {
        LlmOptions {
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
        }
    }
}

/// A seed, or none.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Seed(Option<u64>);

impl Seed {
    fn parse(text: &str) -> Result<Self, std::num::ParseIntError> {
        Ok(Self(if text == "-1" { None } else { Some(text.parse()?) }))
    }
}

/// The window that the model has.
const AUTO: usize = usize::MAX;

/// `auto`, which is −1 with vLLM, is what the model has.
fn window(text: &str) -> Result<usize, String> {
    if ["auto", "-1"].contains(&text) { Ok(AUTO) } else { parse_count(text) }
}

/// −1 is as many as fit.
fn limit(text: &str) -> Result<usize, std::num::ParseIntError> {
    // To the end of the window: vLLM's and llama.cpp's number, and another one of llama.cpp's.
    if ["-1", "-2"].contains(&text) { Ok(usize::MAX) } else { text.parse() }
}

/// −1 is all, as 0 is.
fn top_k(text: &str) -> Result<usize, std::num::ParseIntError> {
    if text == "-1" { Ok(0) } else { text.parse() }
}

/// How tokens are chosen and when a sequence ends.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Sampling")]
pub(crate) struct SamplingArgs {
    /// Maximum number of tokens to generate; -1 fills the context [default: the model's, or -1]
    #[arg(long, short = 'n', aliases = ["n-predict", "predict"], value_name = "N", value_parser = limit)]
    pub(crate) max_tokens: Option<usize>,
    /// 0 always picks the most likely token, higher values vary more [default: the model's, or 0.7]
    #[arg(long, alias = "temp", value_name = "X")]
    pub(crate) temperature: Option<f32>,
    /// Sample from the most likely tokens that together have this probability [default: the model's, or 0.95]
    #[arg(long, value_name = "X", hide_short_help = true)]
    pub(crate) top_p: Option<f32>,
    /// Sample from this many most likely tokens; 0 and -1 are all [default: the model's, or 0]
    #[arg(long, value_name = "N", value_parser = top_k, hide_short_help = true)]
    pub(crate) top_k: Option<usize>,
    /// Drop tokens less likely than this times the most likely one [default: the model's, or 0]
    #[arg(long, value_name = "X", hide_short_help = true)]
    pub(crate) min_p: Option<f32>,
    /// Seed that makes each request reproducible; -1 is a new seed for each [default: -1]
    #[arg(long, short, value_name = "N", value_parser = Seed::parse)]
    pub(crate) seed: Option<Seed>,
    /// End before this text; may be repeated
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub(crate) stop: Vec<String>,
    /// End at these tokens too
    #[arg(long, value_name = "IDS", hide_short_help = true)]
    pub(crate) stop_token_ids: Option<TokenIds>,
    /// Minimum number of tokens before a sequence may end
    #[arg(long, default_value_t = 0, hide_short_help = true, value_name = "N")]
    pub(crate) min_tokens: usize,
    /// Do not end at the model's own end tokens
    #[arg(long, hide_short_help = true)]
    pub(crate) ignore_eos: bool,
    /// Above 1, tokens of the prompt and the output become less likely [default: the model's, or 1]
    #[arg(long, alias = "repeat-penalty", hide_short_help = true, value_name = "X")]
    pub(crate) repetition_penalty: Option<f32>,
    /// Subtracted from the logits of tokens in the output
    #[arg(long, default_value_t = 0.0, hide_short_help = true, value_name = "X")]
    pub(crate) presence_penalty: f32,
    /// Subtracted from the logit of a token for each time that it is in the output
    #[arg(long, default_value_t = 0.0, hide_short_help = true, value_name = "X")]
    pub(crate) frequency_penalty: f32,
    /// Add BIAS to the logit of token ID; may be repeated
    #[arg(long, value_name = "ID=BIAS", hide_short_help = true)]
    pub(crate) logit_bias: Vec<LogitBias>,
}

impl SamplingArgs {
    /// These flags as the library's type, with the values of the model's files where none was given. `max_tokens` depends on
    /// the prompt: see `Llm::default_max_tokens`.
    pub(crate) fn params(&self, model: &SamplingDefaults) -> SamplingParams {
        let own = SamplingParams { temperature: 0.7, top_p: 0.95, ..SamplingParams::default() };
        let defaults = model.apply(own);
        SamplingParams {
            temperature: self.temperature.unwrap_or(defaults.temperature),
            top_k: self.top_k.unwrap_or(defaults.top_k),
            top_p: self.top_p.unwrap_or(defaults.top_p),
            min_p: self.min_p.unwrap_or(defaults.min_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(defaults.repetition_penalty),
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            seed: self.seed.and_then(|seed| seed.0),
            stop: self.stop.clone(),
            stop_token_ids: self.stop_token_ids.clone().unwrap_or_default().0,
            max_tokens: self.max_tokens,
            min_tokens: self.min_tokens,
            ignore_eos: self.ignore_eos,
            logit_bias: self.logit_bias.iter().map(|entry| (entry.token_id, entry.bias)).collect(),
            ..SamplingParams::default()
        }
    }
}

/// What is printed about the run in addition to its result.
#[derive(Debug, Clone, Copy, Default, Args)]
#[command(next_help_heading = "Messages")]
pub(crate) struct MessageArgs {
    /// Print results and errors only
    #[arg(long, short, conflicts_with = "verbose")]
    pub(crate) quiet: bool,
    /// Print more about what happens
    #[arg(long, short)]
    pub(crate) verbose: bool,
}

/// How a conversation becomes a prompt.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Model")]
pub(crate) struct TemplateArgs {
    /// File with a chat template (Jinja), instead of the model's own
    #[arg(long, value_name = "FILE", hide_short_help = true)]
    pub(crate) chat_template: Option<PathBuf>,
}

/// What requests have that say nothing themselves.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Model")]
pub(crate) struct GenerationConfigArgs {
    /// Default sampling: auto (from the model's files), vllm (ignores these files), or a folder with a
    /// generation_config.json
    #[arg(
        long,
        default_value = "auto",
        value_parser = parse_value::<GenerationConfigChoice>,
        value_name = "FOLDER",
        hide_short_help = true
    )]
    pub(crate) generation_config: GenerationConfigChoice,
}

/// Whether a model that can reason before it answers does.
#[derive(Debug, Clone, Copy, Default, Args)]
#[command(next_help_heading = "Prompt")]
pub(crate) struct ThinkingArgs {
    /// Answer without reasoning first, if the chat template has a switch for it
    #[arg(long)]
    pub(crate) no_thinking: bool,
}

/// The system message.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Prompt")]
pub(crate) struct SystemArgs {
    /// System prompt of the conversation
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub(crate) system: Option<String>,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct GenerateArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    #[command(flatten)]
    pub(crate) prompt: PromptArgs,
    #[command(flatten)]
    pub(crate) template: TemplateArgs,
    #[command(flatten)]
    pub(crate) generation: GenerationConfigArgs,
    #[command(flatten)]
    pub(crate) system: SystemArgs,
    #[command(flatten)]
    pub(crate) thinking: ThinkingArgs,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
    #[command(flatten)]
    pub(crate) messages: MessageArgs,
}

/// What to generate from.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Prompt")]
pub(crate) struct PromptArgs {
    /// Text to answer or continue; several run as one batch
    ///
    /// A model with a chat template answers; any other model continues the text. Without --prompt and --prompt-ids
    /// the text comes from standard input.
    #[arg(long, short, value_name = "TEXT", allow_hyphen_values = true)]
    pub(crate) prompt: Vec<String>,
    /// File with a text to answer or continue; may be repeated
    #[arg(long, short, value_name = "FILE")]
    pub(crate) file: Vec<PathBuf>,
    /// Token ids such as 5,6,7 instead of text; several run as one batch
    #[arg(long, value_name = "IDS", conflicts_with_all = ["prompt", "file", "raw", "system", "no_thinking"])]
    pub(crate) prompt_ids: Vec<TokenIds>,
    /// Continue the text as it is, without the chat template
    #[arg(long, conflicts_with_all = ["system", "no_thinking"])]
    pub(crate) raw: bool,
}

/// The format of the output.
#[derive(Debug, Clone, Copy, Args)]
#[command(next_help_heading = "Output")]
pub(crate) struct OutputArgs {
    #[command(flatten)]
    pub(crate) format: JsonArgs,
    /// Sequences for each prompt
    #[arg(long = "n", value_name = "N", default_value_t = 1)]
    pub(crate) num_sequences: usize,
    /// Report the log-probability of each token, and of this many alternatives
    #[arg(long, value_name = "N", requires = "json", hide_short_help = true)]
    pub(crate) logprobs: Option<usize>,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct ChatArgs {
    #[command(flatten)]
    pub(crate) positional: PositionalModel,
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    #[command(flatten)]
    pub(crate) template: TemplateArgs,
    #[command(flatten)]
    pub(crate) generation: GenerationConfigArgs,
    #[command(flatten)]
    pub(crate) system: SystemArgs,
    #[command(flatten)]
    pub(crate) thinking: ThinkingArgs,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
    #[command(flatten)]
    pub(crate) output: JsonArgs,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
    #[command(flatten)]
    pub(crate) messages: MessageArgs,
}

#[cfg(test)]
mod tests {
    use clap::FromArgMatches;

    use super::*;

    fn parse(words: &[&str]) -> Result<Cli, clap::Error> {
        let matches = command().try_get_matches_from([&["tinyvllm"], words].concat())?;
        Cli::from_arg_matches(&matches)
    }

    #[test]
    fn definitions_are_consistent() {
        command().debug_assert();
    }

    #[test]
    fn every_flag_has_a_variable_and_a_line_of_help() {
        fn check(command: &clap::Command) {
            let is_flag = |arg: &&clap::Arg| arg.get_long().is_some_and(|long| !is_negation(long));
            for arg in command.get_arguments().filter(is_flag) {
                let variable = arg.get_env().unwrap_or_else(|| panic!("{arg} has no variable"));
                assert!(variable.to_str().unwrap().starts_with("TINYVLLM_"), "{arg}");
                assert!(arg.get_help().is_some(), "{arg} has no help");
            }
            command.get_subcommands().for_each(check);
        }
        check(&command());
    }

    #[test]
    fn flags_become_library_values() {
        let words = "--prompt-ids 5,6,7 --prompt-ids 8 --kv-cache-memory-bytes 2M --device cuda:1 \
                     --gpu-memory-utilization 0.5 --quantization q4_k --logit-bias 5=-1.5 --stop-token-ids 1,2 -c 64 --temperature 0";
        let cli = parse(&words.split_whitespace().collect::<Vec<_>>()).unwrap();
        let GenerateArgs { prompt, sampling, engine, .. } = cli.generate;
        let ids: Vec<_> = prompt.prompt_ids.into_iter().map(|ids| ids.0).collect();
        assert_eq!(ids, [vec![5, 6, 7], vec![8]]);
        let options = engine.options();
        assert_eq!(options.limits.kv_cache_memory_bytes, Some(2 << 20));
        assert_eq!((options.limits.max_model_len, options.limits.gpu_memory_utilization), (Some(64), 0.5));
        assert!(options.limits.enable_prefix_caching);
        assert_eq!((options.device, options.quantization), (DeviceChoice::Cuda(1), Some(Quantization::Q4K)));
        let params = sampling.params(&SamplingDefaults::default());
        assert_eq!((params.logit_bias[&5], params.stop_token_ids), (-1.5, vec![1, 2]));
        assert_eq!(params.temperature, 0.0);
    }

    #[test]
    fn the_last_of_two_opposite_flags_counts() {
        let check = |words: &[&str], expected: bool| {
            let engine = parse(words).unwrap().generate.engine;
            assert_eq!(engine.options().limits.enable_prefix_caching, expected, "{words:?}");
        };
        check(&[], true);
        check(&["--enable-prefix-caching"], true);
        check(&["--no-enable-prefix-caching"], false);
        check(&["--enable-prefix-caching=false"], false);
        check(&["--no-enable-prefix-caching", "--enable-prefix-caching"], true);
        check(&["--enable-prefix-caching", "--no-enable-prefix-caching"], false);
    }

    #[test]
    fn contradictions_are_refused() {
        for words in [
            "--prompt a --prompt-ids 1",
            "--raw --system be-brief",
            "--prompt-ids 1 --system be-brief",
            "--quiet --verbose",
            "--logprobs 2",
            "chat --prompt a",
            "chat --n 2",
            "verify",
            "completions",
            "completions cmd",
            "nonsense",
        ] {
            let error = parse(&words.split_whitespace().collect::<Vec<_>>()).unwrap_err();
            assert_eq!(error.exit_code(), 2, "{words}");
        }
    }
}
