//! The registry of model architectures: what a file calls them and in what they differ.
//!
//! A model that differs from its relatives only in the ways listed here is one entry of
//! [`ARCHITECTURES`]; one with attention of its own is an entry with a new [`Decoder`] and a file in `layers`.

use crate::config::{RopeStyle, Scoring};
use crate::{Error, Result};

/// A model architecture that can be run.
#[derive(Debug, PartialEq, Eq)]
pub struct Architecture {
    /// Its name in `architectures` of a Hugging Face `config.json`.
    pub hf_name: &'static str,
    /// Its names under `general.architecture` in GGUF files, the usual one first. Several architectures may
    /// share one.
    pub gguf_names: &'static [&'static str],
    /// How its Hugging Face folders order the rows that rotary embedding rotates.
    pub hf_rope_style: RopeStyle,
    /// The same of its GGUF files, whose converter may have moved them.
    pub gguf_rope_style: RopeStyle,
    /// True if the query, key and value projections have biases.
    pub qkv_bias: bool,
    /// True if each query and key head is normalised before it is rotated.
    pub qk_norm: bool,
    /// What its files leave out about the router of experts; none if it has no experts.
    pub router: Option<RouterDefaults>,
    /// The forward pass.
    pub decoder: Decoder,
}

/// What holds for a router where a file does not say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RouterDefaults {
    /// How logits become probabilities, in a Hugging Face folder. In a GGUF file the tensors tell.
    pub hf_scoring: Scoring,
    /// If the weights of the chosen experts are divided by their sum, in a Hugging Face folder.
    pub hf_normalize: bool,
    /// The same in a GGUF file.
    pub gguf_normalize: bool,
}

/// A forward pass of `models`: what its layers have in front of their feed-forward networks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decoder {
    /// Grouped-query attention: `layers/attention.rs`.
    Llama,
    /// Latent attention: `layers/latent_attention.rs`.
    DeepSeek,
}

/// Every architecture that can be run. Of those that share a name in GGUF files the first one counts that
/// has experts if the file has, and none if it has none.
pub static ARCHITECTURES: [Architecture; 9] = [
    Architecture::llama_like("LlamaForCausalLM", &["llama"], RopeStyle::Interleaved),
    Architecture::llama_like("MistralForCausalLM", &["llama"], RopeStyle::Interleaved),
    Architecture {
        router: Some(RouterDefaults {
            hf_scoring: Scoring::Softmax,
            hf_normalize: true,
            gguf_normalize: true,
        }),
        ..Architecture::llama_like("MixtralForCausalLM", &["llama"], RopeStyle::Interleaved)
    },
    Architecture {
        qkv_bias: true,
        ..Architecture::llama_like("Qwen2ForCausalLM", &["qwen2"], RopeStyle::HalfSplit)
    },
    Architecture {
        qk_norm: true,
        ..Architecture::llama_like("Qwen3ForCausalLM", &["qwen3"], RopeStyle::HalfSplit)
    },
    Architecture {
        qk_norm: true,
        router: Some(RouterDefaults {
            hf_scoring: Scoring::Softmax,
            hf_normalize: false,
            // Its files have no key for it, and the models that there are normalise.
            gguf_normalize: true,
        }),
        ..Architecture::llama_like("Qwen3MoeForCausalLM", &["qwen3moe"], RopeStyle::HalfSplit)
    },
    Architecture {
        router: Some(RouterDefaults {
            hf_scoring: Scoring::Softmax,
            hf_normalize: false,
            gguf_normalize: false,
        }),
        ..Architecture::deepseek_like("DeepseekV2ForCausalLM", &["deepseek2"])
    },
    Architecture::deepseek_like("YoutuForCausalLM", &["deepseek2"]),
    Architecture {
        router: Some(RouterDefaults {
            hf_scoring: Scoring::Sigmoid,
            hf_normalize: true,
            gguf_normalize: false,
        }),
        // The second name is that of early conversions, with the same tensors.
        ..Architecture::deepseek_like("Glm4MoeLiteForCausalLM", &["deepseek2", "glm4moelite"])
    },
];

impl Architecture {
    const fn llama_like(
        hf_name: &'static str,
        gguf_names: &'static [&'static str],
        gguf_rope_style: RopeStyle,
    ) -> Self {
        Self {
            hf_name,
            gguf_names,
            hf_rope_style: RopeStyle::HalfSplit,
            gguf_rope_style,
            qkv_bias: false,
            qk_norm: false,
            router: None,
            decoder: Decoder::Llama,
        }
    }

    const fn deepseek_like(hf_name: &'static str, gguf_names: &'static [&'static str]) -> Self {
        Self {
            hf_rope_style: RopeStyle::Interleaved,
            decoder: Decoder::DeepSeek,
            ..Self::llama_like(hf_name, gguf_names, RopeStyle::Interleaved)
        }
    }

    /// True if keys and values are projections of a latent row.
    #[must_use]
    pub fn has_latent_attention(&self) -> bool {
        self.decoder == Decoder::DeepSeek
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

    /// The first architecture that a GGUF file calls `name`, preferably one that has experts if the file
    /// has and none if it has none.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Unsupported`] with the names that are known.
    pub fn from_gguf_name(name: &str, has_experts: bool) -> Result<&'static Self> {
        let named = || ARCHITECTURES.iter().filter(|architecture| architecture.gguf_names.contains(&name));
        named()
            .find(|architecture| architecture.router.is_some() == has_experts)
            .or_else(|| named().next())
            .ok_or_else(|| {
                let all = ARCHITECTURES.iter().flat_map(|architecture| architecture.gguf_names);
                unknown(name, all.copied())
            })
    }
}

fn unknown(name: &str, known: impl Iterator<Item = &'static str>) -> Error {
    let mut names = Vec::new();
    for name in known {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    Error::unsupported(format!("the model architecture {name:?} is not supported"))
        .with_hint(format!("supported are {}", names.join(", ")))
}
