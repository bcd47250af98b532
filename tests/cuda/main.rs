//! NVIDIA GPUs: what the program says where something is missing, which every machine can test, and what a GPU computes,
//! for users that have one.
#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "in tests a failure to prepare is a failure")]

mod benchmark;
mod drafted;
#[path = "../metal/host_blocks.rs"]
mod host_blocks;
mod missing;
mod on_a_gpu;
#[expect(dead_code, reason = "the tests of the program use all of it")]
#[path = "../cli/program.rs"]
mod program;
#[path = "../metal/schedules.rs"]
mod schedules;
