//! The log of the server: a line for each request, on standard error.

use std::io::{self, Write};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use clap::ValueEnum;
use tinyvllm_server::{AccessLog, AccessRecord};

use super::super::console::{Console, json_notice};

/// Log lines that may wait for standard error. Further lines are dropped.
const MAX_WAITING_LINES: usize = 4_096;
/// Time to write the last lines.
const FLUSH_TIME: Duration = Duration::from_secs(1);
/// Paths that probes and `top` request every second. Their usual answers would be noise: 200, and 503 while the
/// model is loading and while the server stops. Other lines report both.
const POLLED: [&str; 2] = ["/health", "/metrics"];
const USUAL: [u16; 2] = [200, 503];

/// Format of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum LogFormat {
    /// For people
    Text,
    /// For programs
    Json,
}

/// Commands for the thread that writes the log.
enum LogCommand {
    Write(String),
    /// All earlier lines are written when this sender is dropped.
    Flush(SyncSender<()>),
}

/// A log whose lines are written by a thread, so that no request waits for standard error.
pub(super) struct LineLog {
    format: LogFormat,
    /// Whether requests of [`POLLED`] are logged.
    logs_polls: bool,
    /// `None` if logging is off.
    commands: Option<SyncSender<LogCommand>>,
}

impl AccessLog for LineLog {
    fn record(&self, record: AccessRecord) {
        let Some(commands) = &self.commands else { return };
        if is_poll(&record) && !self.logs_polls {
            return;
        }
        let line = match self.format {
            LogFormat::Text => text_line(&record),
            // The record has string keys, so it serialises without errors.
            LogFormat::Json => serde_json::to_string(&record).unwrap_or_default(),
        };
        // A log that is not read must not stop the server.
        let _ = commands.try_send(LogCommand::Write(line));
    }

    fn notice(&self, message: &str) {
        let Some(commands) = &self.commands else { return };
        let line = match self.format {
            LogFormat::Text => format!("note: {message}"),
            LogFormat::Json => json_notice(message),
        };
        let _ = commands.try_send(LogCommand::Write(line));
    }
}

impl LineLog {
    /// Starts a log in this format, or one that writes nothing.
    pub(super) fn start(format: LogFormat, is_wanted: bool, console: Console) -> anyhow::Result<Self> {
        let logs_polls = console.is_verbose();
        if !is_wanted || console.is_quiet() {
            return Ok(Self { format, logs_polls, commands: None });
        }
        let (commands, receiver) = sync_channel(MAX_WAITING_LINES);
        std::thread::Builder::new().name("tinyvllm-log".to_owned()).spawn(move || write_lines(&receiver))?;
        Ok(Self { format, logs_polls, commands: Some(commands) })
    }

    /// Waits until everything is written, or for a limited time if standard error is not read.
    pub(super) fn flush(&self) {
        let (done, written) = sync_channel(1);
        let command = LogCommand::Flush(done);
        if self.commands.as_ref().is_some_and(|commands| commands.try_send(command).is_ok()) {
            // The thread drops the sender, which is an error here.
            let _ = written.recv_timeout(FLUSH_TIME);
        }
    }
}

fn write_lines(commands: &Receiver<LogCommand>) {
    for command in commands {
        match command {
            // A user who closed standard error needs no error about it.
            LogCommand::Write(line) => drop(writeln!(io::stderr().lock(), "{line}")),
            LogCommand::Flush(done) => drop(done),
        }
    }
}

/// Whether this is the usual answer to a probe.
fn is_poll(record: &AccessRecord) -> bool {
    USUAL.contains(&record.status) && POLLED.contains(&record.path.as_str())
}

fn text_line(record: &AccessRecord) -> String {
    let AccessRecord { request_id, method, path, status, duration_ms, tokens, cut, .. } = record;
    let cut = cut.as_ref().map_or_else(String::new, |reason| format!(" · cut: {reason}"));
    let tokens = tokens.map_or_else(String::new, |tokens| {
        format!(
            " · prompt {} ({} cached) · output {}",
            tokens.prompt_tokens, tokens.cached_tokens, tokens.completion_tokens
        )
    });
    format!("{status} {method} {path} · {duration_ms:.1} ms{tokens}{cut} · {request_id}")
}

#[cfg(test)]
mod tests {
    use tinyvllm_server::TokenCounts;

    use super::*;

    #[test]
    fn lines() {
        let mut record = AccessRecord {
            time: 1.5,
            request_id: "abc".to_owned(),
            method: "GET".to_owned(),
            path: "/health".to_owned(),
            status: 200,
            duration_ms: 0.25,
            cut: None,
            tokens: None,
        };
        assert_eq!(text_line(&record), "200 GET /health · 0.2 ms · abc");
        for (status, expected) in [(200, true), (503, true), (401, false), (500, false)] {
            assert_eq!(is_poll(&AccessRecord { status, ..record.clone() }), expected, "{status}");
        }
        record.tokens = Some(TokenCounts { prompt_tokens: 5, cached_tokens: 2, completion_tokens: 7 });
        assert!(text_line(&record).contains("prompt 5 (2 cached) · output 7"));
        record.cut = Some("the client disconnected".to_owned());
        assert!(text_line(&record).contains(" · cut: the client disconnected · abc"));
        let json: serde_json::Value = serde_json::to_value(&record).unwrap();
        assert_eq!((json["status"].as_u64(), json["completion_tokens"].as_u64()), (Some(200), Some(7)));
    }
}
