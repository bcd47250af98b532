//! `tinyvllm rm`: removes models from the cache.

use std::io::{self, BufRead, IsTerminal, Write};
use std::process::ExitCode;

use clap::Args;
use clap::error::ErrorKind;
use tinyvllm::Error;
use tinyvllm::hub::inventory::{Removal, plan_removal};
use tinyvllm::hub::{HubConfig, ModelSource};

use super::console::Console;
use super::flags::{MessageArgs, RevisionArgs};
use super::usage_error;
use super::value::human_bytes;

/// The cache is shared, so other programs lose the models too. Files that another revision needs are kept.
#[derive(Debug, Clone, Args)]
pub(crate) struct RmArgs {
    /// The models, as `list` names them
    #[arg(value_name = "MODEL", required = true)]
    models: Vec<String>,
    /// Remove without asking
    #[arg(long, short)]
    yes: bool,
    #[command(flatten)]
    revision: RevisionArgs,
    #[command(flatten)]
    messages: MessageArgs,
}

/// Removes models after a confirmation.
///
/// # Errors
/// If a model is not in the cache, there is no terminal for the confirmation, or files cannot be removed.
pub(crate) fn run(args: &RmArgs) -> anyhow::Result<ExitCode> {
    let console = Console::new(args.messages);
    let config = HubConfig::from_env()?;
    let plan = |name: &String| plan(name, args.revision.revision.as_deref(), &config);
    // All names are checked before the first model is removed.
    let removals: Vec<Removal> = args.models.iter().map(plan).collect::<anyhow::Result<_>>()?;
    if !args.yes && !confirm(&removals, &config)? {
        console.note("nothing was removed");
        return Ok(ExitCode::FAILURE);
    }
    for removal in removals {
        let line = format!("removed {}, {}", removal.name, human_bytes(removal.num_bytes));
        removal.run()?;
        console.note(line);
    }
    Ok(ExitCode::SUCCESS)
}

fn plan(name: &str, revision: Option<&str>, config: &HubConfig) -> anyhow::Result<Removal> {
    match ModelSource::parse(name, revision)? {
        ModelSource::Hub(model) => Ok(plan_removal(&config.cache_dir, &model, revision)?),
        ModelSource::Demo => {
            Err(Error::invalid_request("demo is part of this program and cannot be removed").into())
        }
        ModelSource::GgufFile(path) | ModelSource::Folder(path) => {
            let message = format!("`{}` is not in the cache: it is a file of your own", path.display());
            let hint = "remove it like any other file; the name of a model on the Hub is org/name";
            Err(Error::invalid_request(message).with_hint(hint).into())
        }
    }
}

fn confirm(removals: &[Removal], config: &HubConfig) -> anyhow::Result<bool> {
    if !io::stdin().is_terminal() {
        let message = "cannot ask for confirmation, because standard input is not a terminal; --yes removes without \
                       asking";
        return Err(usage_error(ErrorKind::MissingRequiredArgument, message));
    }
    let mut stderr = io::stderr().lock();
    for removal in removals {
        writeln!(stderr, "{}  {}", removal.name, human_bytes(removal.num_bytes))?;
    }
    write!(
        stderr,
        "Remove this from {}? Other programs that use the Hugging Face cache lose it, too. [y/N] ",
        config.cache_dir.display()
    )?;
    stderr.flush()?;
    let mut answer = String::new();
    io::stdin().lock().read_line(&mut answer)?;
    Ok(matches!(answer.trim().to_ascii_lowercase().as_str(), "y" | "yes"))
}
