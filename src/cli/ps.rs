//! `tinyvllm ps`: lists this user's servers on this machine.

use std::io::{self, Write};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use serde_json::{Value, json};

use super::console::Console;
use super::flags::{JsonArgs, MessageArgs};
use super::http::{HttpClient, read_body};
use super::servers::{self, Record, memory_bytes};
use super::table;
use super::value::{human_age, human_bytes};

/// Time for a server to answer. One on this machine that takes longer hangs.
const TIMEOUT: Duration = Duration::from_secs(2);
/// Size limit of the answer of /health.
const MAX_BYTES: usize = 64 << 10;

/// Servers that were started with `tinyvllm serve` and still run.
#[derive(Debug, Clone, Args)]
pub(crate) struct PsArgs {
    #[command(flatten)]
    output: JsonArgs,
    #[command(flatten)]
    messages: MessageArgs,
}

/// Prints a line for each server.
///
/// # Errors
/// If the output fails.
pub(crate) fn run(args: &PsArgs) -> anyhow::Result<ExitCode> {
    let console = Console::new(args.messages);
    let records = servers::running();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.context("cannot start the client")?;
    let states: Vec<String> = records.iter().map(|record| runtime.block_on(state(record))).collect();
    let mut out = io::stdout().lock();
    if args.output.json {
        for (record, state) in records.iter().zip(&states) {
            let line = json!({
                "models": record.models, "url": record.url(), "address": record.address, "state": state,
                "pid": record.pid, "seconds": record.age().as_secs(), "memory_bytes": memory_bytes(record.pid),
            });
            writeln!(out, "{line}")?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    if records.is_empty() {
        console.note("you have no running server; `tinyvllm serve MODEL` starts one");
        return Ok(ExitCode::SUCCESS);
    }
    let row = |(record, state): (&Record, String)| {
        let memory =
            memory_bytes(record.pid).map_or_else(|| "–".to_owned(), |bytes| human_bytes(bytes).to_string());
        let model = record.models.first().cloned().unwrap_or_default();
        let age = human_age(record.age());
        [model, record.address.to_string(), state, record.pid.to_string(), age, memory]
    };
    let rows: Vec<_> = records.iter().zip(states).map(row).collect();
    for line in table::lines(["MODEL", "ADDRESS", "STATE", "PID", "UP FOR", "MEMORY"], &rows) {
        writeln!(out, "{line}")?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The state that the server reports.
async fn state(record: &Record) -> String {
    let ask = async {
        let client = HttpClient::new(&record.url(), None)?;
        let body = read_body(client.get("/health").await?.into_body(), MAX_BYTES).await?;
        anyhow::Ok(serde_json::from_slice::<Value>(&body)?)
    };
    let answer = tokio::time::timeout(TIMEOUT, ask).await;
    match answer.ok().and_then(Result::ok).as_ref().and_then(|body| body["status"].as_str()) {
        Some("ok") => "ready".to_owned(),
        Some(status) => status.to_owned(),
        None => "does not answer".to_owned(),
    }
}
