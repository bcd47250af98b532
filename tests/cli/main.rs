//! The program from outside: flags, standard streams, exit codes, signals and the terminal.
//!
//! Everything runs the real binary on the model that is built in or on the small ones in
//! `tests/fixtures`; nothing needs a network.

#![expect(clippy::unwrap_used, reason = "in tests a failure to prepare is a failure")]

mod bad_files;
mod bench;
mod cached;
mod deploy;
mod download;
mod elsewhere;
mod errors;
mod examples;
#[expect(dead_code, reason = "the tests of the hub use all of it")]
#[path = "../hub/fake.rs"]
mod fake;
mod generate;
mod other_commands;
mod program;
#[cfg(unix)]
mod readme;
mod servers;
mod settings;
#[cfg(unix)]
mod terminal;
mod verify;
