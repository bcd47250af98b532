//! Output: results to standard output, everything else to standard error.
//!
//! Only this file decides whether a line is printed (`--quiet`, `--verbose`), whether it has colours (on a
//! terminal, without `NO_COLOR`), and whether it is JSON (`--log-format json`).

use std::fmt::Display;
use std::io::{self, IsTerminal, Write};
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::json;

use super::flags::MessageArgs;

/// How much is printed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
enum Verbosity {
    Quiet,
    #[default]
    Normal,
    Verbose,
}

/// Prints messages for the user.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Console {
    verbosity: Verbosity,
    /// Whether each line is a JSON object.
    is_json: bool,
}

/// The style of a word on a terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Style {
    /// The word `error:`.
    Error,
    /// Important text.
    Bold,
    /// Unimportant text.
    Dim,
}

impl Console {
    pub(crate) fn new(args: MessageArgs) -> Self {
        let verbosity = match (args.quiet, args.verbose) {
            (true, _) => Verbosity::Quiet,
            (false, false) => Verbosity::Normal,
            (false, true) => Verbosity::Verbose,
        };
        Self { verbosity, is_json: false }
    }

    /// The same, with lines that are JSON objects if `is_json`.
    pub(crate) fn in_json(self, is_json: bool) -> Self {
        Self { is_json, ..self }
    }

    /// Whether progress bars are drawn.
    pub(crate) fn draws_progress(self) -> bool {
        !self.is_quiet() && !self.is_json && io::stderr().is_terminal()
    }

    /// Whether progress and summaries are printed.
    pub(crate) fn is_quiet(self) -> bool {
        self.verbosity == Verbosity::Quiet
    }

    /// Whether details are printed.
    pub(crate) fn is_verbose(self) -> bool {
        self.verbosity == Verbosity::Verbose
    }

    /// Prints a line about the run, unless quiet.
    pub(crate) fn note(self, line: impl Display) {
        if self.verbosity >= Verbosity::Normal {
            self.write(&line);
        }
    }

    /// Prints the reply to a command, even if quiet.
    pub(crate) fn reply(self, line: impl Display) {
        self.write(&line);
    }

    /// Prints a line with --verbose only.
    pub(crate) fn detail(self, line: impl Display) {
        if self.verbosity >= Verbosity::Verbose {
            match self.is_json {
                true => self.write(&line),
                false => write_message(&paint(&line.to_string(), Style::Dim, &io::stderr())),
            }
        }
    }

    /// Prints an error that ends the program, even if quiet.
    pub(crate) fn fail(self, error: &anyhow::Error) {
        match self.is_json {
            true => {
                let line = json!({"time": unix_time(), "error": message(error), "hint": hint(error)});
                write_message(&line);
            }
            false => print_error(error),
        }
    }

    fn write(self, text: &dyn Display) {
        match self.is_json {
            true => text.to_string().lines().for_each(|line| write_message(&json_notice(line))),
            false => write_message(text),
        }
    }
}

/// A line of a log in JSON.
pub(crate) fn json_notice(text: &str) -> String {
    json!({"time": unix_time(), "notice": text}).to_string()
}

/// Seconds since 1970.
fn unix_time() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64())
}

/// Prints `error: …` and, after an empty line, `hint: …`, even if quiet.
pub(crate) fn print_error(error: &anyhow::Error) {
    let stderr = io::stderr();
    write_message(&format_args!("{} {}", paint("error:", Style::Error, &stderr), message(error)));
    if let Some(hint) = hint(error) {
        write_message(&format_args!("\n{} {hint}", paint("hint:", Style::Bold, &stderr)));
    }
}

/// The way out of an error.
fn hint(error: &anyhow::Error) -> Option<&str> {
    error.downcast_ref::<tinyvllm::Error>().and_then(|error| error.hint())
}

/// The contexts of an error and its cause. The library's messages include their own causes, so the chain ends
/// with the first of them.
fn message(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain() {
        if !text.is_empty() {
            text.push_str(": ");
        }
        text.push_str(&cause.to_string());
        if cause.is::<tinyvllm::Error>() {
            break;
        }
    }
    text
}

/// `text` in `style` if `stream` supports styles.
pub(crate) fn paint(text: &str, style: Style, stream: &impl IsTerminal) -> String {
    if has_styles(stream) { styled(text, style) } else { text.to_owned() }
}

/// `text` in `style`.
pub(crate) fn styled(text: &str, style: Style) -> String {
    let code = match style {
        Style::Error => "1;31",
        Style::Bold => "1",
        Style::Dim => "2",
    };
    format!("\x1b[{code}m{text}\x1b[0m")
}

/// Whether `stream` is a terminal that supports styles.
pub(crate) fn has_styles(stream: &impl IsTerminal) -> bool {
    let is_set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    stream.is_terminal() && !is_set("NO_COLOR") && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
}

fn write_message(line: &dyn Display) {
    // A user who closed standard error needs no error about it.
    let _ = writeln!(io::stderr().lock(), "{line}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_is_printed_once() {
        let cause = || io::Error::new(io::ErrorKind::PermissionDenied, "not allowed");
        let library = || tinyvllm::Error::io("cannot open the model", cause());
        let check = |error: anyhow::Error, wanted| assert_eq!(message(&error), wanted);
        check(library().into(), "cannot open the model: not allowed");
        check(
            anyhow::Error::from(library()).context("prompt 2"),
            "prompt 2: cannot open the model: not allowed",
        );
        check(anyhow::Error::from(cause()).context("cannot write"), "cannot write: not allowed");
    }
}
