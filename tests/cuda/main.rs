//! What NVIDIA GPUs compute, for whoever has one.
#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "in tests a failure to prepare is a failure")]

mod benchmark;
mod on_a_gpu;
#[path = "../metal/schedules.rs"]
mod schedules;
