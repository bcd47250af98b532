//! Structured output: what a text must look like, as sets of tokens.
//!
//! A [`GrammarSpec`] is what a caller asks for. The model's [`GrammarCompiler`] makes a [`Grammar`] of it, which
//! the engine takes as a [`Constraint`](crate::sampling::Constraint). Invariants: every output that ends by
//! itself matches; what is allowed depends on the sequence's own tokens only; no specification, however
//! hostile, takes much longer than [`MAX_COMPILE_TIME`] or leaves the limits of memory. This module knows
//! tokenizers, and nothing of HTTP or of the engine's loop.

mod after_reasoning;
mod attributes;
mod cache;
mod compiler;
mod forced;
mod gbnf;
mod matcher;
pub(crate) mod schema;
mod spec;
mod unwritable;
mod vocabulary;
mod watchdog;

pub use after_reasoning::{AfterReasoning, ReasoningStart};
pub use compiler::{GrammarCompiler, MAX_COMPILE_TIME};
pub use matcher::Grammar;
pub use spec::GrammarSpec;

#[cfg(test)]
mod tests;
