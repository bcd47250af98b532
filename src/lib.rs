//! tinyvllm: vLLM's core (paged KV cache, continuous batching, prefix sharing) in one small crate.

pub mod chat;
pub mod config;
pub mod engine;
mod error;
pub mod hub;
pub mod kv_cache;
pub mod layers;
pub mod models;
pub mod ops;
pub mod runner;
pub mod sampling;
pub mod scheduler;
pub mod tokenizer;
pub mod weights;

pub use error::{Error, ErrorKind, Result};
