//! An inference engine for language models: vLLM's core (paged KV cache, continuous batching, prefix
//! sharing) in one small crate, on [candle](https://github.com/huggingface/candle).
//!
//! [`Llm`](llm::Llm) is a model ready to use, with a running [`Engine`](engine::Engine): many requests at
//! once, and no async runtime. This example uses the small model that is part of the crate:
//!
//! ```
//! use tinyvllm::engine::{Event, Request};
//! use tinyvllm::hub::{HubConfig, ModelSource, NoProgress, resolve};
//! use tinyvllm::llm::{self, Llm, LlmOptions};
//! use tinyvllm::sampling::SamplingParams;
//!
//! # fn main() -> tinyvllm::Result<()> {
//! let source = ModelSource::parse("demo", None)?; // or "tinyllama", "org/name:Q4_K_M", a path, …
//! let model = resolve(&source, &HubConfig::from_env()?, &NoProgress)?;
//! let llm = Llm::load(&model, &LlmOptions::default(), &llm::NoProgress)?;
//!
//! let params = SamplingParams { max_tokens: Some(16), ..SamplingParams::greedy() };
//! let submit = |text| llm.engine().submit(Request::new(llm.encode_raw(text)?, params.clone()));
//! // Both requests run in the same steps, and share what their prompts have in common.
//! for stream in [submit("Once upon a time, in a village")?, submit("Once upon a time, in a forest")?] {
//!     let token_ids: Vec<u32> = stream.filter_map(|event| match event {
//!         Event::Token { token_id, .. } => Some(token_id),
//!         _ => None,
//!     }).collect();
//!     assert_eq!(token_ids.len(), 16);
//! }
//! # Ok(())
//! # }
//! ```
//!
//! [`Llm::submit`](llm::Llm::submit) is the same with text instead of token ids. One level below,
//! [`engine::EngineCore::step`] is the engine without a thread, for whoever wants to drive it.
//! `ARCHITECTURE.md` in the repository says how the parts fit together.

pub mod chat;
pub mod config;
pub mod demo;
pub mod engine;
pub mod grammar;
pub mod hub;
pub mod kv_cache;
pub mod layers;
pub mod llm;
pub mod models;
pub mod ops;
pub mod runner;
pub mod sampling;
pub mod scheduler;
pub mod self_test;
pub mod server;
pub mod tokenizer;
pub mod weights;

pub use tinyvllm_kernels::{Error, ErrorKind, Result};
