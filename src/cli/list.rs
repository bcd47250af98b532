//! `tinyvllm list`: the models in the cache.

use std::io::{self, Write};
use std::process::ExitCode;
use std::time::SystemTime;

use clap::Args;
use serde_json::json;
use tinyvllm::hub::{HubConfig, inventory};

use super::console::Console;
use super::flags::{JsonArgs, MessageArgs};
use super::table;
use super::value::{human_age, human_bytes};

/// Models that this program or others downloaded to the Hugging Face cache, under the names that --model
/// takes.
#[derive(Debug, Clone, Args)]
pub(crate) struct ListArgs {
    #[command(flatten)]
    output: JsonArgs,
    #[command(flatten)]
    messages: MessageArgs,
}

/// Prints a line for each model.
///
/// # Errors
/// If there is no cache folder, or it cannot be read.
pub(crate) fn run(args: &ListArgs) -> anyhow::Result<ExitCode> {
    let console = Console::new(args.messages);
    let folder = HubConfig::from_env()?.cache_dir;
    let models = inventory::list(&folder)?;
    let mut out = io::stdout().lock();
    if args.output.json {
        for model in &models {
            let last_used = model.last_used.and_then(|time| time.duration_since(SystemTime::UNIX_EPOCH).ok());
            let line = json!({
                "name": model.name, "bytes": model.num_bytes, "is_partial": model.is_partial,
                "last_used": last_used.map(|time| time.as_secs()),
            });
            writeln!(out, "{line}")?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    if models.is_empty() {
        console.note(format_args!(
            "there are no models in {}; `tinyvllm run llama3.2` downloads one and chats, and `tinyvllm run demo` \
             needs none",
            folder.display()
        ));
        return Ok(ExitCode::SUCCESS);
    }
    let row = |model: &inventory::CachedModel| {
        let size = human_bytes(model.num_bytes).to_string();
        let size = if model.is_partial { format!("{size}, incomplete") } else { size };
        [model.name.clone(), size, model.last_used.map_or_else(|| "unknown".to_owned(), ago)]
    };
    let rows: Vec<_> = models.iter().map(row).collect();
    for line in table::lines(["NAME", "SIZE", "LAST USED"], &rows) {
        writeln!(out, "{line}")?;
    }
    Ok(ExitCode::SUCCESS)
}

fn ago(time: SystemTime) -> String {
    match SystemTime::now().duration_since(time) {
        Ok(age) => format!("{} ago", human_age(age)),
        Err(_) => "just now".to_owned(),
    }
}
