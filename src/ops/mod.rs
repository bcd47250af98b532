//! ops

mod attention_metadata;
pub mod cpu;

pub use attention_metadata::AttentionMetadata;
