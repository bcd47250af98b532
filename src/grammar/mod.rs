//! Structured output: the format of a text, as sets of allowed tokens.
//!
//! A [`GrammarSpec`] is a caller's request. The model's [`GrammarCompiler`] compiles it to a [`Grammar`], which the
//! engine uses as a [`Constraint`](crate::sampling::Constraint). Invariants: every output that ends by itself matches;
//! the allowed tokens depend on the sequence's own tokens only; no specification, however hostile, takes much longer
//! than [`MAX_COMPILE_TIME`] or exceeds the limits of memory. This module depends on tokenizers, but not on HTTP or on
//! the engine's loop.

mod after_reasoning;
mod attributes;
mod cache;
mod compiler;
mod expressions;
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
pub use schema::SchemaPlace;
pub use spec::GrammarSpec;

#[cfg(test)]
mod tests;
