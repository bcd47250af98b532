//! The server, over real sockets: the program on a port of its own, or the library with a device that fails.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod agents;
mod answers;
mod anthropic;
mod bad_inputs;
mod bench;
mod bounds;
#[cfg(unix)]
mod browser;
mod client;
mod cors;
mod failures;
mod fair;
mod fake;
#[cfg(unix)]
mod few_files;
mod ignored;
mod kv_events;
mod life;
mod load;
mod logs;
mod memory;
mod models;
mod ollama;
mod operators;
mod page;
mod predictions;
mod real_clients;
mod requests;
mod responses;
mod rows;
mod said;
mod schema;
mod scripted;
mod stops;
mod structured;
mod throughput;
mod tools;
mod top;
mod zmq;
