//! `tinyvllm run`: chats with a model, or answers one prompt.

use std::process::ExitCode;

use clap::Args;
use clap::error::ErrorKind;
use tinyvllm::hub::ModelSource;

use super::flags::PositionalModel;
use super::generate::GenerateArgs;
use super::load::merge_model;
use super::{generate, usage_error};

/// Without a prompt it chats on a terminal. Text on standard input is the prompt, or is appended to it.
#[derive(Debug, Clone, Args)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    positional: PositionalModel,
    /// Prompt to answer
    #[arg(value_name = "PROMPT", conflicts_with = "prompt_ids")]
    words: Vec<String>,
    #[command(flatten)]
    generate: GenerateArgs,
}

/// Chats or answers.
///
/// # Errors
/// As [`generate::run`], and if no model was named.
pub(crate) fn run(args: &RunArgs) -> anyhow::Result<ExitCode> {
    let mut generate = args.generate.clone();
    generate.model = merge_model(&args.positional, &generate.model)?;
    if generate.model.model.is_none() {
        let message = "which model? Give it by name, as in `tinyvllm run llama3.2`; `demo` needs no download";
        return Err(usage_error(ErrorKind::MissingRequiredArgument, message));
    }
    // A wrong name is reported before the program waits for input.
    if let Some(name) = &generate.model.model {
        ModelSource::parse(name, generate.model.revision.revision.as_deref())?;
    }
    if !args.words.is_empty() {
        generate.prompt.prompt.insert(0, args.words.join(" "));
    }
    generate::run(&generate, generate::Caller::NoCommand)
}
