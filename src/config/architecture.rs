//! The registry of model architectures: what a file calls them and in what they differ.
//!
//! A model that differs from its relatives only in the ways listed here is one entry of
//! [`ARCHITECTURES`]; one with a forward pass of its own is an entry with a new [`Decoder`] and a file in
//! `models`.

use crate::{Error, Result};

/// A model architecture that can be run.
#[derive(Debug, PartialEq, Eq)]
pub struct Architecture {
    /// Its name in `architectures` of a Hugging Face `config.json`.
    pub hf_name: &'static str,
    /// Its name under `general.architecture` in a GGUF file. Several may share one.
    pub gguf_name: &'static str,
    /// How its GGUF files order the rows that rotary embedding rotates. In a Hugging Face folder they
    /// are always [`RopeStyle::HalfSplit`] for the decoders of today.
    pub gguf_rope_style: RopeStyle,
    /// True if the query, key and value projections have biases.
    pub qkv_bias: bool,
    /// True if each query and key head is normalised before it is rotated.
    pub qk_norm: bool,
    /// The forward pass.
    pub decoder: Decoder,
}

/// A forward pass, implemented once in `models`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decoder {
    /// Grouped-query attention and a gated feed-forward network: `models/llama.rs`.
    Llama,
}

/// Which values of a head rotary embedding rotates with each other. `d` is the number of rotated values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopeStyle {
    /// Pairs `(x[2i], x[2i + 1])`.
    Interleaved,
    /// Pairs `(x[i], x[i + d/2])`.
    HalfSplit,
}

/// Every architecture that can be run.
pub static ARCHITECTURES: [Architecture; 4] = [
    Architecture::llama_like("LlamaForCausalLM", "llama", RopeStyle::Interleaved),
    Architecture::llama_like("MistralForCausalLM", "llama", RopeStyle::Interleaved),
    Architecture {
        qkv_bias: true,
        ..Architecture::llama_like("Qwen2ForCausalLM", "qwen2", RopeStyle::HalfSplit)
    },
    Architecture {
        qk_norm: true,
        ..Architecture::llama_like("Qwen3ForCausalLM", "qwen3", RopeStyle::HalfSplit)
    },
];

impl Architecture {
    const fn llama_like(hf_name: &'static str, gguf_name: &'static str, gguf_rope_style: RopeStyle) -> Self {
        Self { hf_name, gguf_name, gguf_rope_style, qkv_bias: false, qk_norm: false, decoder: Decoder::Llama }
    }

    /// The architecture that a `config.json` calls `name`.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Unsupported`] with the names that are known.
    pub fn from_hf_name(name: &str) -> Result<&'static Self> {
        ARCHITECTURES
            .iter()
            .find(|architecture| architecture.hf_name == name)
            .ok_or_else(|| unknown(name, ARCHITECTURES.iter().map(|architecture| architecture.hf_name)))
    }

    /// The first architecture that a GGUF file calls `name`.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Unsupported`] with the names that are known.
    pub fn from_gguf_name(name: &str) -> Result<&'static Self> {
        ARCHITECTURES
            .iter()
            .find(|architecture| architecture.gguf_name == name)
            .ok_or_else(|| unknown(name, ARCHITECTURES.iter().map(|architecture| architecture.gguf_name)))
    }
}

fn unknown(name: &str, known: impl Iterator<Item = &'static str>) -> Error {
    let mut known: Vec<_> = known.collect();
    known.dedup();
    Error::unsupported(format!("the model architecture {name:?} is not supported"))
        .with_hint(format!("supported are {}", known.join(", ")))
}
