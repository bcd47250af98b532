//! `tinyvllm stop`: stops this user's servers on this machine.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args;
use clap::builder::NonEmptyStringValueParser;
use tinyvllm::{Error, ErrorKind};

use super::console::Console;
use super::flags::MessageArgs;
use super::servers::{self, Record, send_stop};

/// Time for a server to finish its requests and end.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Interval of checking whether it has ended.
const LOOK: Duration = Duration::from_millis(50);
/// After this time, a message says what the program waits for.
const SILENCE: Duration = Duration::from_secs(2);

/// Running requests can finish first; a second `stop` ends the server at once.
#[derive(Debug, Clone, Args)]
pub(crate) struct StopArgs {
    /// Model, port, address or process id of the server [default: the only one that runs]
    #[arg(value_name = "SERVER", value_parser = NonEmptyStringValueParser::new(), conflicts_with = "all")]
    server: Option<String>,
    /// Stop all of them
    #[arg(long)]
    all: bool,
    #[command(flatten)]
    messages: MessageArgs,
}

/// Stops one server or all.
///
/// # Errors
/// If no server matches, several do, or one does not end.
pub(crate) fn run(args: &StopArgs) -> anyhow::Result<ExitCode> {
    let console = Console::new(args.messages);
    let running = servers::running();
    if args.all && running.is_empty() {
        console.note("you have no running server");
    }
    let meant = if args.all { running } else { vec![one(running, args.server.as_deref())?] };
    for record in &meant {
        stop(record, console)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Finds the server that `word` names.
fn one(running: Vec<Record>, word: Option<&str>) -> tinyvllm::Result<Record> {
    let list = |records: &[Record]| {
        let name = |record: &Record| {
            format!("{} on port {}", record.models.first().map_or("", String::as_str), record.address.port())
        };
        records.iter().map(name).collect::<Vec<_>>().join(", ")
    };
    if running.is_empty() {
        return Err(Error::new(ErrorKind::NotFound, "you have no running server")
            .with_hint("`tinyvllm ps` lists those of this user"));
    }
    let all = list(&running);
    let mut meant: Vec<Record> =
        running.into_iter().filter(|record| word.is_none_or(|word| record.is_meant_by(word))).collect();
    match (meant.len(), word) {
        (1, _) => Ok(meant.remove(0)),
        (0, word) => {
            let word = word.unwrap_or_default();
            let message = format!("no server has the name `{word}`; running are {all}");
            Err(Error::new(ErrorKind::NotFound, message).with_hint("name it by its model or its port"))
        }
        _ => {
            let message = format!("several servers match: {}", list(&meant));
            Err(Error::invalid_request(message).with_hint("name one by its port, or stop --all"))
        }
    }
}

fn stop(record: &Record, console: Console) -> tinyvllm::Result<()> {
    // It held its lock a moment ago, but may have ended since.
    if !record.is_same_process() {
        return Ok(());
    }
    send_stop(record.pid)?;
    let start = Instant::now();
    let mut is_stopping = false;
    while servers::running().contains(record) {
        if start.elapsed() > TIMEOUT {
            let message =
                format!("process {} still runs its requests after {} s", record.pid, TIMEOUT.as_secs());
            return Err(
                Error::new(ErrorKind::Unavailable, message).with_hint("`stop` once more ends it at once")
            );
        }
        if start.elapsed() > SILENCE && !std::mem::replace(&mut is_stopping, true) {
            console.note("running requests may finish first; `stop` once more ends it at once");
        }
        std::thread::sleep(LOOK);
    }
    let model = record.models.first().map_or("", String::as_str);
    console.note(format_args!("stopped {model} on {}", record.address));
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::*;

    #[test]
    fn only_one_can_be_meant() {
        let record = |port: u16, model: &str| {
            Record::own(SocketAddr::from(([127, 0, 0, 1], port)), vec![model.to_owned()])
        };
        let both = || vec![record(81, "a"), record(82, "b")];
        assert_eq!(one(both(), Some("b")).unwrap().address.port(), 82);
        assert_eq!(one(vec![record(81, "a")], None).unwrap().address.port(), 81);
        for (running, word, wanted) in [
            (vec![], None, "no running server"),
            (both(), None, "several servers match: a on port 81, b on port 82"),
            (both(), Some("c"), "no server has the name `c`; running are a on port 81, b on port 82"),
        ] {
            let error = one(running, word).unwrap_err();
            assert!(error.message().contains(wanted) && error.hint().is_some(), "{error:?}");
        }
    }
}
