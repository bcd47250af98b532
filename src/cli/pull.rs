//! `tinyvllm pull`: downloads a model and prints where it is.

use std::io::{self, Write};
use std::process::ExitCode;

use clap::Args;
use clap::error::ErrorKind;
use tinyvllm::hub::ModelFiles;

use super::console::Console;
use super::flags::{MessageArgs, ModelArgs, PositionalModel};
use super::load::{merge_model, resolve};
use super::usage_error;

/// The model to download.
#[derive(Debug, Clone, Args)]
pub(crate) struct PullArgs {
    #[command(flatten)]
    pub(crate) positional: PositionalModel,
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    #[command(flatten)]
    pub(crate) messages: MessageArgs,
}

/// Downloads missing files. Prints only the path to standard output.
///
/// # Errors
/// If no model was named, or it cannot be downloaded.
pub(crate) fn run(args: &PullArgs) -> anyhow::Result<ExitCode> {
    let console = Console::new(args.messages);
    let model = merge_model(&args.positional, &args.model)?;
    if model.model.is_none() {
        let message = "which model? Give it by name, as in `tinyvllm pull tinyllama`";
        return Err(usage_error(ErrorKind::MissingRequiredArgument, message));
    }
    let resolved = resolve(&model, console)?;
    match &resolved.files {
        ModelFiles::Demo => console.note("demo is part of this program: there is nothing to download"),
        ModelFiles::Gguf(path) | ModelFiles::Folder(path) => {
            writeln!(io::stdout(), "{}", path.display())?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
