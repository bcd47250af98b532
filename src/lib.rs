//! An inference engine for language models: vLLM's core (paged KV cache, continuous batching, prefix
//! sharing) in one small crate, on [candle](https://github.com/huggingface/candle).
//!
//! [`Llm`](llm::Llm) is a model ready to use, with a running [`Engine`](engine::Engine): many requests at
//! once, and no async runtime. This example uses the small model that is part of the crate:
//!
//! ```
//! use tinyvllm::chat::Message;
//! use tinyvllm::llm::Llm;
//! use tinyvllm::sampling::SamplingParams;
//!
//! # fn main() -> tinyvllm::Result<()> {
//! let llm = Llm::open("demo")?; // or "tinyllama", "org/name:Q4_K_M", a path, …
//! let params = SamplingParams { max_tokens: Some(16), ..llm.sampling_params() };
//! let ask = |question| llm.chat(&[Message::new("user", question)], params.clone());
//! // Both are answered in the same steps, and share what their prompts have in common.
//! for answer in [ask("Tell me of a village.")?, ask("Tell me of a forest.")?] {
//!     println!("{}", answer.text()?);
//! }
//! # Ok(())
//! # }
//! ```
//!
//! An answer is an iterator of what the model reasons, says and calls, or a stream for a task
//! ([`into_stream`](llm::ChatStream::into_stream)). `scripts/examples` in the repository has more. On a
//! Mac, the feature `metal` is what makes it fast. The server is a crate of its own, `tinyvllm-server`, and so is the
//! program, `tinyvllm-cli`.
//!
//! [`Llm::submit`](llm::Llm::submit) takes token ids and gives text, and [`Llm::engine`](llm::Llm::engine) has no text at
//! all. One level below,
//! [`engine::EngineCore::step`] is the engine without a thread, for callers that drive it themselves.
//! `ARCHITECTURE.md` in the repository says how the parts fit together.

pub mod chat;
pub mod config;
mod deadline;
pub mod demo;
pub mod engine;
pub mod files;
pub mod grammar;
pub mod hub;
pub mod kv_cache;
pub mod layers;
pub mod llm;
pub mod models;
pub mod ops;
pub mod prefix_store;
pub mod runner;
pub mod sampling;
pub mod scheduler;
pub mod self_test;
pub mod speculation;
pub mod tokenizer;
pub mod weights;

pub use tinyvllm_kernels::{Error, ErrorKind, Result, quoted, shortened, visible};
