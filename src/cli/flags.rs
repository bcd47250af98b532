//! Flags that several commands share, in groups. A flag means the same wherever it is accepted.

mod engine;
mod sampling;

use std::path::PathBuf;

use clap::Args;
use clap::builder::NonEmptyStringValueParser;
use tinyvllm::llm::GenerationConfigChoice;

pub(crate) use self::engine::EngineArgs;
pub(crate) use self::sampling::SamplingArgs;
use super::value::parse_value;

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
    #[arg(long, value_parser = NonEmptyStringValueParser::new(), hide_short_help = true)]
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

/// How a model answers, for the commands that have it answer.
#[derive(Debug, Clone, Args)]
pub(crate) struct AnswerArgs {
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
}
