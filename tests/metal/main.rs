//! The Metal kernels and the code that launches them, executed on a machine without an Apple GPU.
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]
#![expect(clippy::unwrap_used, reason = "in tests a failure to prepare is a failure")]

mod batches;
mod buffers;
mod defects;
mod emulator;
mod first_use;
mod host_blocks;
mod language;
mod libraries;
mod limits;
mod memory;
mod models;
mod mtp;
#[path = "../promises/mtp_model.rs"]
mod mtp_model;
mod offload;
mod ops;
mod oracle;
mod packed;
mod planted;
mod probes;
mod promises;
mod prompts;
mod proved;
mod recorder;
mod registers;
mod rotation;
mod sampling;
mod schedules;
mod watchdog;
