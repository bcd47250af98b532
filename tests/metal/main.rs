//! The Metal kernels and the code that launches them, executed on a machine without an Apple GPU.
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

mod emulator;
mod example;
mod ops;
