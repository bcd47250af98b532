//! The server, over real sockets: the program on a port of its own, or the library with a device that fails.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod answers;
mod bad_inputs;
mod client;
mod failures;
mod life;
mod real_clients;
mod scripted;
mod structured;
mod tools;
