//! The registry of model architectures: their names in files and their differences.
//!
//! A model that differs from its relatives only in the listed properties is one entry of [`ARCHITECTURES`]; one with
//! its own attention is an entry with a new [`Decoder`] and a file in `layers`.

use crate::config::defaults::HfDefaults;
use crate::config::{Activation, RopeStyle, Scoring};
use crate::{Error, Result};

/// A model architecture that can be run.
#[derive(Debug, PartialEq)]
pub struct Architecture {
    /// Its name in `architectures` of a Hugging Face `config.json`.
    pub hf_name: &'static str,
    /// Its names under `model_type` there.
    pub hf_model_types: &'static [&'static str],
    /// Defaults for missing keys of `config.json`.
    pub(crate) hf_defaults: HfDefaults,
    /// Its names under `general.architecture` in GGUF files, the usual one first. Several architectures may
    /// share one.
    pub gguf_names: &'static [&'static str],
    /// How its Hugging Face folders order the rows that rotary embedding rotates.
    pub hf_rope_style: RopeStyle,
    /// The same of its GGUF files, whose converter may have moved them.
    pub gguf_rope_style: RopeStyle,
    /// True if the query, key and value projections have biases.
    pub qkv_bias: bool,
    /// Norms of queries and keys before they are rotated.
    pub qk_norm: QkNorm,
    /// The activation between the two halves of its feed-forward networks, and of its experts.
    pub activation: Activation,
    /// True if each query head has a score without a value that is included in the softmax.
    pub has_sinks: bool,
    /// True if its router and the projections of its experts have biases.
    pub has_expert_biases: bool,
    /// True if its Hugging Face folders have the rows of gate and up of an expert in turns, and dense ones with rows and
    /// columns exchanged.
    pub(crate) hf_interleaves_experts: bool,
    /// True if the ramp of its YaRN ends at whole pairs, where a file does not have it.
    pub(crate) truncates_yarn: bool,
    /// True if the attention factor of YaRN in its GGUF files is the complete factor of sine and cosine, instead of a
    /// multiplier of the one that follows from the scaling.
    pub(crate) gguf_has_whole_yarn_factor: bool,
    /// True if the inputs of attention and feed-forward networks are normalised.
    pub pre_norms: bool,
    /// True if their outputs are normalised.
    pub post_norms: bool,
    /// True if queries may grow with their position.
    pub queries_grow: bool,
    /// True if embeddings are multiplied by the root of their width.
    pub scaled_embeddings: bool,
    /// True if its files have multipliers of embeddings, scores, layers' outputs and logits.
    pub has_multipliers: bool,
    /// The offset of norm weights in its Hugging Face folders.
    pub hf_norm_offset: f32,
    /// Layers without a window, if its files do not list them: the last one of every this many.
    pub local_period: Option<usize>,
    /// The base of the rotation of layers with a window if files have none, for architectures with a separate one:
    /// without the scaling of the others.
    pub local_base: Option<LocalBase>,
    /// Layers without rotation, if its files do not list them: the last one of every this many.
    pub unrotated_period: Option<usize>,
    /// Defaults of the experts' router; none if it has no experts.
    pub router: Option<RouterDefaults>,
    /// The forward pass.
    pub decoder: Decoder,
}

/// The base of a rotation that only layers with a window have.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum LocalBase {
    /// That of the other layers.
    Usual,
    /// This one.
    Own(f64),
}

impl LocalBase {
    /// Alongside layers with this base.
    pub(crate) fn or_usual(self, usual: f64) -> f64 {
        match self {
            Self::Usual => usual,
            Self::Own(base) => base,
        }
    }
}

/// The norms of queries and keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QkNorm {
    /// None.
    None,
    /// Each head.
    Heads,
    /// All heads of a token together.
    All,
}

/// Defaults of a router.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RouterDefaults {
    /// How logits become probabilities, in a Hugging Face folder. In a GGUF file the tensors show it.
    pub hf_scoring: Scoring,
    /// If the weights of the chosen experts are divided by their sum, in a Hugging Face folder.
    pub hf_normalize: bool,
    /// The same in a GGUF file.
    pub gguf_normalize: bool,
}

/// A forward pass of `models`, by the attention of its layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decoder {
    /// Grouped-query attention: `layers/attention.rs`.
    Llama,
    /// Latent attention: `layers/latent_attention.rs`.
    DeepSeek,
}

/// Every architecture that can be run. Of those that share a name in GGUF files the first one counts that
/// has experts if the file has, and none if it has none.
pub static ARCHITECTURES: [Architecture; 21] = [
    Architecture::llama_like("LlamaForCausalLM", &["llama"], HfDefaults::LLAMA).interleaved_in_gguf(),
    Architecture {
        gguf_names: &["llama"],
        ..Architecture::llama_like("MistralForCausalLM", &["mistral"], HfDefaults::MISTRAL)
            .interleaved_in_gguf()
    },
    Architecture {
        gguf_names: &["mistral3"],
        queries_grow: true,
        ..Architecture::llama_like("Ministral3ForCausalLM", &["ministral3"], HfDefaults::MINISTRAL3)
            .interleaved_in_gguf()
    },
    Architecture {
        gguf_names: &["llama"],
        router: Some(RouterDefaults {
            hf_scoring: Scoring::Softmax,
            hf_normalize: true,
            gguf_normalize: true,
        }),
        ..Architecture::llama_like("MixtralForCausalLM", &["mixtral"], HfDefaults::MIXTRAL)
            .interleaved_in_gguf()
    },
    Architecture {
        qkv_bias: true,
        ..Architecture::llama_like("Qwen2ForCausalLM", &["qwen2"], HfDefaults::QWEN2)
    },
    Architecture {
        qk_norm: QkNorm::Heads,
        ..Architecture::llama_like("Qwen3ForCausalLM", &["qwen3"], HfDefaults::QWEN3)
    },
    Architecture {
        gguf_names: &["qwen3moe"],
        qk_norm: QkNorm::Heads,
        router: Some(RouterDefaults {
            hf_scoring: Scoring::Softmax,
            hf_normalize: false,
            // Its files have no key for it, and the models that there are normalise.
            gguf_normalize: true,
        }),
        ..Architecture::llama_like("Qwen3MoeForCausalLM", &["qwen3_moe"], HfDefaults::QWEN3_MOE)
    },
    Architecture {
        unrotated_period: Some(4),
        ..Architecture::llama_like("SmolLM3ForCausalLM", &["smollm3"], HfDefaults::SMOLLM3)
            .interleaved_in_gguf()
    },
    Architecture {
        has_multipliers: true,
        ..Architecture::llama_like("GraniteForCausalLM", &["granite"], HfDefaults::LLAMA)
            .interleaved_in_gguf()
    },
    // The fourth generation without experts and states. In GGUF files it is the one before.
    Architecture {
        gguf_names: &["granite"],
        has_multipliers: true,
        ..Architecture::llama_like("GraniteMoeHybridForCausalLM", &["granitemoehybrid"], HfDefaults::GRANITE4)
            .interleaved_in_gguf()
    },
    Architecture::llama_like("Phi3ForCausalLM", &["phi3"], HfDefaults::PHI3),
    Architecture::llama_like("SeedOssForCausalLM", &["seed_oss"], HfDefaults::SEED_OSS),
    Architecture {
        hf_rope_style: RopeStyle::Interleaved,
        post_norms: true,
        ..Architecture::llama_like("Glm4ForCausalLM", &["glm4"], HfDefaults::GLM4).interleaved_in_gguf()
    },
    Architecture {
        local_period: None,
        local_base: None,
        ..Architecture::olmo("Olmo2ForCausalLM", &["olmo2"], HfDefaults::OLMO2)
    },
    // In GGUF files it is the previous one with a window, of which they list the layers.
    Architecture {
        gguf_names: &["olmo2"],
        ..Architecture::olmo("Olmo3ForCausalLM", &["olmo3"], HfDefaults::OLMO3)
    },
    Architecture {
        gguf_names: &["gpt-oss"],
        activation: Activation::ClampedSwiglu { alpha: 1.702, limit: 7.0 },
        has_sinks: true,
        has_expert_biases: true,
        hf_interleaves_experts: true,
        truncates_yarn: false,
        local_period: Some(2),
        // A softmax of the chosen logits is that of all of them over the sum of the chosen.
        router: Some(RouterDefaults {
            hf_scoring: Scoring::Softmax,
            hf_normalize: true,
            gguf_normalize: true,
        }),
        ..Architecture::llama_like("GptOssForCausalLM", &["gpt_oss"], HfDefaults::GPT_OSS)
    },
    Architecture::gemma3("Gemma3ForCausalLM", &["gemma3_text"]),
    // With a vision encoder, which is not supported.
    Architecture::gemma3("Gemma3ForConditionalGeneration", &["gemma3"]),
    Architecture {
        router: Some(RouterDefaults {
            hf_scoring: Scoring::Softmax,
            hf_normalize: false,
            gguf_normalize: false,
        }),
        ..Architecture::deepseek_like("DeepseekV2ForCausalLM", &["deepseek_v2"], HfDefaults::DEEPSEEK_V2)
    },
    Architecture::deepseek_like("YoutuForCausalLM", &["youtu", "youtu_llm"], HfDefaults::YOUTU),
    Architecture {
        router: Some(RouterDefaults {
            hf_scoring: Scoring::Sigmoid,
            hf_normalize: true,
            gguf_normalize: false,
        }),
        // The second name is that of early conversions, with the same tensors.
        gguf_names: &["deepseek2", "glm4moelite"],
        ..Architecture::deepseek_like("Glm4MoeLiteForCausalLM", &["glm4_moe_lite"], HfDefaults::GLM4_MOE_LITE)
    },
];

impl Architecture {
    /// One whose GGUF files have the name of its folders, and the same order of rows.
    const fn llama_like(
        hf_name: &'static str,
        hf_model_types: &'static [&'static str],
        hf_defaults: HfDefaults,
    ) -> Self {
        Self {
            hf_name,
            hf_model_types,
            hf_defaults,
            gguf_names: hf_model_types,
            hf_rope_style: RopeStyle::HalfSplit,
            gguf_rope_style: RopeStyle::HalfSplit,
            qkv_bias: false,
            qk_norm: QkNorm::None,
            activation: Activation::Silu,
            has_sinks: false,
            has_expert_biases: false,
            hf_interleaves_experts: false,
            truncates_yarn: true,
            gguf_has_whole_yarn_factor: false,
            pre_norms: true,
            post_norms: false,
            queries_grow: false,
            scaled_embeddings: false,
            has_multipliers: false,
            hf_norm_offset: 0.0,
            local_period: None,
            local_base: None,
            unrotated_period: None,
            router: None,
            decoder: Decoder::Llama,
        }
    }

    /// The same with rows that the converter has moved.
    const fn interleaved_in_gguf(self) -> Self {
        Self { gguf_rope_style: RopeStyle::Interleaved, ..self }
    }

    const fn olmo(
        hf_name: &'static str,
        hf_model_types: &'static [&'static str],
        hf_defaults: HfDefaults,
    ) -> Self {
        Self {
            gguf_has_whole_yarn_factor: true,
            qk_norm: QkNorm::All,
            pre_norms: false,
            post_norms: true,
            local_period: Some(4),
            local_base: Some(LocalBase::Usual),
            ..Self::llama_like(hf_name, hf_model_types, hf_defaults)
        }
    }

    const fn gemma3(hf_name: &'static str, hf_model_types: &'static [&'static str]) -> Self {
        Self {
            gguf_names: &["gemma3"],
            qk_norm: QkNorm::Heads,
            activation: Activation::GeluTanh,
            post_norms: true,
            scaled_embeddings: true,
            hf_norm_offset: 1.0,
            local_period: Some(6),
            local_base: Some(LocalBase::Own(1e4)),
            ..Self::llama_like(hf_name, hf_model_types, HfDefaults::GEMMA3)
        }
    }

    const fn deepseek_like(
        hf_name: &'static str,
        hf_model_types: &'static [&'static str],
        hf_defaults: HfDefaults,
    ) -> Self {
        Self {
            gguf_names: &["deepseek2"],
            hf_rope_style: RopeStyle::Interleaved,
            decoder: Decoder::DeepSeek,
            ..Self::llama_like(hf_name, hf_model_types, hf_defaults).interleaved_in_gguf()
        }
    }

    /// True if the context that its files name is that after their scaling of positions.
    pub(crate) fn counts_scaling_in(&self) -> bool {
        self.local_base.is_some()
    }

    /// The factor of embeddings of this width.
    pub(crate) fn embedding_scale(&self, hidden_size: usize) -> f32 {
        if self.scaled_embeddings { (hidden_size as f32).sqrt() } else { 1.0 }
    }

    /// True if keys and values are projections of a latent row.
    #[must_use]
    pub fn has_latent_attention(&self) -> bool {
        self.decoder == Decoder::DeepSeek
    }

    /// The architecture with the name `name` in `config.json`, in any case. A folder with the model alone, without its
    /// head, has `Model` instead of `ForCausalLM`.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Unsupported`] with the known names.
    pub fn from_hf_name(name: &str) -> Result<&'static Self> {
        let is_named = |architecture: &&Self| {
            let own = architecture.hf_name;
            let model = own.strip_suffix("ForCausalLM").map(|stem| format!("{stem}Model"));
            own.eq_ignore_ascii_case(name) || model.is_some_and(|model| model.eq_ignore_ascii_case(name))
        };
        ARCHITECTURES
            .iter()
            .find(is_named)
            .ok_or_else(|| unknown(name, ARCHITECTURES.iter().map(|architecture| architecture.hf_name)))
    }

    /// The architecture that a `config.json` without the name of a class calls `model_type`.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Unsupported`] with the known names.
    pub fn from_model_type(model_type: &str) -> Result<&'static Self> {
        let named = |architecture: &&Self| architecture.hf_model_types.contains(&model_type);
        ARCHITECTURES.iter().find(named).ok_or_else(|| {
            unknown(
                model_type,
                ARCHITECTURES.iter().flat_map(|architecture| architecture.hf_model_types).copied(),
            )
        })
    }

    /// The first architecture that a GGUF file calls `name`, preferably one that has experts if the file
    /// has and none if it has none, and the same of layers with a window among others.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Unsupported`] with the known names.
    pub fn from_gguf_name(name: &str, has_experts: bool, has_window: bool) -> Result<&'static Self> {
        let named = || ARCHITECTURES.iter().filter(|architecture| architecture.gguf_names.contains(&name));
        let of_kind = || named().filter(|architecture| architecture.router.is_some() == has_experts);
        of_kind()
            .find(|architecture| architecture.local_period.is_some() == has_window)
            .or_else(|| of_kind().next())
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
