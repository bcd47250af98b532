//! The command line. No other code of the crate prints, reads from the terminal or picks exit codes.
//!
//! [`args`] defines the flags. Each command is one file, which uses only the library's public interface.
//! Results go to standard output, everything else to standard error ([`console`]).

mod answer;
mod args;
mod bench;
mod cache;
mod chat;
mod console;
mod elsewhere;
mod flags;
mod generate;
mod http;
mod info;
mod interrupt;
mod keyboard;
mod list;
mod load;
mod progress;
mod ps;
mod pull;
mod render;
mod rm;
mod run;
mod self_test;
mod serve;
mod servers;
mod speculation;
mod stop;
mod table;
mod text_file;
mod timings;
mod top;
mod value;
mod verify;
mod wrap;

use std::io::{self, Write};
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{ArgMatches, FromArgMatches};

use args::{Cli, Command};
use console::Console;

/// Runs the program.
pub(crate) fn main() -> ExitCode {
    let command = args::command();
    let words = elsewhere::translate(std::env::args_os(), &command);
    let words =
        words.unwrap_or_else(|message| args::command().error(ErrorKind::InvalidValue, message).exit());
    let matches = command
        .try_get_matches_from(words.words)
        .unwrap_or_else(|error| elsewhere::as_typed(error, &words.renamed).exit());
    let cli = Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    let logs_json = matches!(&cli.command, Some(Command::Serve(args)) if args.logs_json());
    let console = Console::default().in_json(logs_json);
    if !words.not_needed.is_empty() && !is_quiet(&matches) {
        console.note(format_args!("ignored: {}", words.not_needed.join(", ")));
    }
    match obey(&cli) {
        Ok(code) => code,
        // The reader has enough: `tinyvllm … | head -1` is not an error.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            if let Some(usage) = error.downcast_ref::<clap::Error>() {
                usage.exit();
            }
            console.fail(&error);
            ExitCode::FAILURE
        }
    }
}

/// Whether any command has `--quiet`.
fn is_quiet(matches: &ArgMatches) -> bool {
    let of_command = matches.subcommand().is_some_and(|(_, matches)| is_quiet(matches));
    of_command || matches!(matches.try_get_one::<bool>("quiet"), Ok(Some(true)))
}

fn obey(cli: &Cli) -> anyhow::Result<ExitCode> {
    match &cli.command {
        None => generate::run(&cli.generate, generate::Caller::NoCommand),
        Some(Command::Generate(args)) => generate::run(args, generate::Caller::Command),
        Some(Command::Chat(args)) => chat::run(args),
        Some(Command::Bench(args)) => bench::run(args),
        Some(Command::Run(args)) => run::run(args),
        Some(Command::Serve(args)) => serve::run(args),
        Some(Command::Ps(args)) => ps::run(args),
        Some(Command::Stop(args)) => stop::run(args),
        Some(Command::List(args)) => list::run(args),
        Some(Command::Rm(args)) => rm::run(args),
        Some(Command::Top(args)) => top::run(args),
        Some(Command::Pull(args)) => pull::run(args),
        Some(Command::Cache(command)) => cache::run(command),
        Some(Command::Info(args)) => info::run(args),
        Some(Command::Verify(args)) => verify::run(args),
        Some(Command::SelfTest(args)) => self_test::run(args),
        Some(Command::Completions { shell }) => print_completions(*shell),
    }
}

fn print_completions(shell: clap_complete::Shell) -> anyhow::Result<ExitCode> {
    // Into memory first, because `clap_complete` panics if the pipe is closed.
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut args::command(), "tinyvllm", &mut script);
    io::stdout().write_all(&script)?;
    Ok(ExitCode::SUCCESS)
}

/// An error in the use of flags that `clap` cannot detect; exit status 2.
fn usage_error(kind: ErrorKind, message: &str) -> anyhow::Error {
    args::command().error(kind, message).into()
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        cause.downcast_ref::<io::Error>().is_some_and(|cause| cause.kind() == io::ErrorKind::BrokenPipe)
    })
}
