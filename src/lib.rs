//! An inference engine for language models: vLLM's core (paged KV cache, continuous batching, prefix
//! sharing) in one small crate, on [candle](https://github.com/huggingface/candle).
//!
//! [`Llm`](llm::Llm) is a model ready to use: text in, text out, many requests at once, and no async
//! runtime. This example uses the small model that is part of the crate:
//!
//! ```
//! use tinyvllm::hub::{HubConfig, ModelSource, NoProgress, resolve};
//! use tinyvllm::llm::{self, Llm, LlmOptions, TextEvent};
//! use tinyvllm::sampling::SamplingParams;
//!
//! # fn main() -> tinyvllm::Result<()> {
//! let source = ModelSource::parse("demo", None)?; // or "tinyllama", "org/name:Q4_K_M", a path, …
//! let model = resolve(&source, &HubConfig::from_env()?, &NoProgress)?;
//! let llm = Llm::load(&model, &LlmOptions::default(), &llm::NoProgress)?;
//!
//! let params = SamplingParams { max_tokens: Some(16), ..SamplingParams::greedy() };
//! // Both requests run in the same steps, and share what their prompts have in common.
//! let first = llm.submit(llm.encode_raw("Once upon a time")?, params.clone())?;
//! let second = llm.submit(llm.encode_raw("Once upon a time, in a forest")?, params)?;
//! for stream in [first, second] {
//!     let mut text = String::new();
//!     for event in stream {
//!         if let TextEvent::Delta { text: delta, .. } = event {
//!             text.push_str(&delta);
//!         }
//!     }
//!     assert!(text.len() > 20);
//! }
//! # Ok(())
//! # }
//! ```
//!
//! One level below, [`engine::Engine::submit`] takes token ids and gives an iterator of events, and
//! [`engine::EngineCore::step`] is the engine without a thread, for whoever wants to drive it.
//! `ARCHITECTURE.md` in the repository says how the parts fit together.

pub mod chat;
pub mod config;
pub mod demo;
pub mod engine;
mod error;
pub mod hub;
pub mod kv_cache;
pub mod layers;
pub mod llm;
pub mod models;
pub mod ops;
pub mod runner;
pub mod sampling;
pub mod scheduler;
pub mod tokenizer;
pub mod weights;

pub use error::{Error, ErrorKind, Result};
