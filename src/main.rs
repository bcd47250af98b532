//! The command line: parses, runs, and turns an error into a message and an exit code.

mod cli;

use std::process::ExitCode;

fn main() -> ExitCode {
    cli::main()
}
