//! `tinyvllm bench`.

use std::process::ExitCode;

use clap::Args;

use super::args::{EngineArgs, MessageArgs, ModelArgs, PositionalModel};

/// What to measure.
#[derive(Debug, Clone, Args)]
pub(crate) struct BenchArgs {
    #[command(flatten)]
    pub(crate) positional: PositionalModel,
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// Sequences that run at once, such as 1,4,8
    #[arg(long, value_delimiter = ',', default_value = "1,4,8")]
    pub(crate) batch_sizes: Vec<usize>,
    /// Prompt lengths in tokens, such as 128,512
    #[arg(long, visible_alias = "contexts", value_delimiter = ',', default_value = "128,512")]
    pub(crate) prompt_lens: Vec<usize>,
    /// Tokens to generate for each sequence
    #[arg(long, default_value_t = 64)]
    pub(crate) output_len: usize,
    /// Measurements of each combination
    #[arg(long, default_value_t = 3)]
    pub(crate) repeats: usize,
    /// One JSON object per measurement instead of a table
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
    #[command(flatten)]
    pub(crate) messages: MessageArgs,
}

/// Measures and prints.
///
/// # Errors
/// If the model cannot be loaded or a measurement fails.
pub(crate) fn run(args: &BenchArgs) -> anyhow::Result<ExitCode> {
    let _ = args;
    Err(tinyvllm::Error::unsupported("bench is not part of this build").into())
}
