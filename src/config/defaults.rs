//! Defaults of Hugging Face's model classes for missing keys of `config.json`.

/// Values of an architecture's class. Essential keys (the width, the layers) have no default here: every writer writes
/// them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct HfDefaults {
    /// None if the file must have it.
    pub(crate) num_heads: Option<usize>,
    /// See `num_heads`.
    pub(crate) vocab_size: Option<usize>,
    /// None: the number of query heads.
    pub(crate) num_kv_heads: Option<usize>,
    /// None is the width divided by the query heads.
    pub(crate) head_dim: Option<usize>,
    /// The key of the width of feed-forward networks.
    pub(crate) intermediate_key: &'static str,
    pub(crate) max_position_embeddings: usize,
    pub(crate) rms_norm_eps: f64,
    pub(crate) rope_theta: f64,
    /// The rotated fraction of a head's values.
    pub(crate) partial_rotary_factor: f64,
    /// Factor and original context of the scaling that a file without any parameters of rotation means, if that is YaRN.
    pub(crate) yarn: Option<(f64, usize)>,
    pub(crate) tie_word_embeddings: bool,
    pub(crate) window: HfWindow,
    /// The default of `attention_bias`.
    pub(crate) attention_bias: bool,
    /// The class has `attention_bias`, of the query, key, value and output projections.
    pub(crate) has_attention_bias_key: bool,
    /// The class has `position_embedding_type`, and rotates only if that is `rope`.
    pub(crate) has_position_kind_key: bool,
    /// The class has `mlp_bias`, of all projections of a feed-forward network.
    pub(crate) has_mlp_bias_key: bool,
    /// The class has `rope_interleave`.
    pub(crate) has_interleave_key: bool,
    pub(crate) latent: HfLatentDefaults,
    pub(crate) experts: HfExpertsDefaults,
}

/// Which layers have the sliding window of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HfWindow {
    /// None: the class has no window.
    Unknown,
    /// All, with this one where the key is missing.
    All(Option<usize>),
    /// All except some, by [`super::Architecture::local_period`] or `layer_types`; this is the default window.
    Local(usize),
    /// All if `use_sliding_window` is on.
    SwitchedAll,
    /// The last ones from `max_window_layers` (by default this one) on if `use_sliding_window` is on, or those that
    /// `layer_types` names.
    SwitchedLast(usize),
}

/// Widths of latent attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HfLatentDefaults {
    pub(crate) q_lora_rank: usize,
    pub(crate) qk_nope_head_dim: usize,
    pub(crate) v_head_dim: usize,
}

/// Experts and their router; none if the file must have it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct HfExpertsDefaults {
    pub(crate) num_experts: Option<usize>,
    pub(crate) num_experts_per_tok: Option<usize>,
    /// None is the width of the network without experts.
    pub(crate) intermediate_size: Option<usize>,
    pub(crate) num_shared: usize,
    pub(crate) topk_method: Option<&'static str>,
    pub(crate) scale: f64,
}

impl HfDefaults {
    pub(crate) const LLAMA: Self = Self {
        num_heads: None,
        vocab_size: None,
        num_kv_heads: None,
        head_dim: None,
        intermediate_key: "intermediate_size",
        max_position_embeddings: 2_048,
        rms_norm_eps: 1e-6,
        rope_theta: 1e4,
        partial_rotary_factor: 1.0,
        yarn: None,
        tie_word_embeddings: false,
        window: HfWindow::Unknown,
        attention_bias: false,
        has_attention_bias_key: true,
        has_position_kind_key: false,
        has_mlp_bias_key: true,
        has_interleave_key: false,
        latent: HfLatentDefaults { q_lora_rank: 1_536, qk_nope_head_dim: 128, v_head_dim: 128 },
        experts: HfExpertsDefaults {
            num_experts: None,
            num_experts_per_tok: None,
            intermediate_size: None,
            num_shared: 0,
            topk_method: None,
            scale: 1.0,
        },
    };
    pub(crate) const MISTRAL: Self = Self {
        num_kv_heads: Some(8),
        max_position_embeddings: 131_072,
        window: HfWindow::All(Some(4_096)),
        has_mlp_bias_key: false,
        has_attention_bias_key: false,
        ..Self::LLAMA
    };
    pub(crate) const MINISTRAL3: Self = Self {
        head_dim: Some(128),
        max_position_embeddings: 262_144,
        rms_norm_eps: 1e-5,
        rope_theta: 1e6,
        yarn: Some((16.0, 16_384)),
        window: HfWindow::All(None),
        ..Self::MISTRAL
    };
    pub(crate) const MIXTRAL: Self = Self {
        rms_norm_eps: 1e-5,
        rope_theta: 1e6,
        window: HfWindow::All(None),
        experts: HfExpertsDefaults {
            num_experts: Some(8),
            num_experts_per_tok: Some(2),
            ..Self::LLAMA.experts
        },
        ..Self::MISTRAL
    };
    pub(crate) const QWEN2: Self = Self {
        num_kv_heads: Some(32),
        max_position_embeddings: 32_768,
        window: HfWindow::SwitchedLast(28),
        has_mlp_bias_key: false,
        has_attention_bias_key: false,
        ..Self::LLAMA
    };
    pub(crate) const QWEN3: Self = Self { head_dim: Some(128), has_attention_bias_key: true, ..Self::QWEN2 };
    pub(crate) const QWEN3_MOE: Self = Self {
        num_kv_heads: Some(4),
        window: HfWindow::SwitchedAll,
        has_attention_bias_key: true,
        experts: HfExpertsDefaults {
            num_experts: Some(128),
            num_experts_per_tok: Some(8),
            intermediate_size: Some(768),
            ..Self::LLAMA.experts
        },
        ..Self::QWEN2
    };
    pub(crate) const SMOLLM3: Self = Self {
        num_kv_heads: Some(4),
        max_position_embeddings: 32_768,
        rope_theta: 2e6,
        tie_word_embeddings: true,
        window: HfWindow::SwitchedAll,
        ..Self::LLAMA
    };
    pub(crate) const GEMMA3: Self = Self {
        num_heads: Some(8),
        vocab_size: Some(262_208),
        num_kv_heads: Some(4),
        head_dim: Some(256),
        max_position_embeddings: 131_072,
        rope_theta: 1e6,
        tie_word_embeddings: true,
        window: HfWindow::Local(4_096),
        has_mlp_bias_key: false,
        ..Self::LLAMA
    };
    pub(crate) const GRANITE4: Self = Self {
        intermediate_key: "shared_intermediate_size",
        has_position_kind_key: true,
        has_mlp_bias_key: false,
        ..Self::LLAMA
    };
    pub(crate) const PHI3: Self = Self {
        num_heads: Some(32),
        vocab_size: Some(32_064),
        max_position_embeddings: 4_096,
        rms_norm_eps: 1e-5,
        window: HfWindow::All(None),
        has_attention_bias_key: false,
        has_mlp_bias_key: false,
        ..Self::LLAMA
    };
    pub(crate) const SEED_OSS: Self = Self {
        num_heads: Some(80),
        vocab_size: Some(155_136),
        num_kv_heads: Some(8),
        head_dim: Some(128),
        max_position_embeddings: 524_288,
        attention_bias: true,
        ..Self::LLAMA
    };
    pub(crate) const GLM4: Self = Self {
        num_heads: Some(32),
        vocab_size: Some(151_552),
        num_kv_heads: Some(2),
        head_dim: Some(128),
        max_position_embeddings: 131_072,
        rms_norm_eps: 1.562_5e-7,
        partial_rotary_factor: 0.5,
        attention_bias: true,
        has_mlp_bias_key: false,
        ..Self::LLAMA
    };
    pub(crate) const OLMO2: Self = Self {
        num_heads: Some(32),
        vocab_size: Some(50_304),
        rms_norm_eps: 1e-5,
        rope_theta: 5e5,
        has_mlp_bias_key: false,
        ..Self::LLAMA
    };
    pub(crate) const OLMO3: Self = Self { window: HfWindow::Local(4_096), ..Self::OLMO2 };
    pub(crate) const GPT_OSS: Self = Self {
        num_heads: Some(64),
        vocab_size: Some(201_088),
        num_kv_heads: Some(8),
        head_dim: Some(64),
        max_position_embeddings: 131_072,
        rms_norm_eps: 1e-5,
        rope_theta: 1.5e5,
        yarn: Some((32.0, 4_096)),
        window: HfWindow::Local(128),
        attention_bias: true,
        has_mlp_bias_key: false,
        experts: HfExpertsDefaults {
            num_experts: Some(128),
            num_experts_per_tok: Some(4),
            ..Self::LLAMA.experts
        },
        ..Self::LLAMA
    };
    pub(crate) const DEEPSEEK_V2: Self = Self {
        has_mlp_bias_key: false,
        has_attention_bias_key: false,
        experts: HfExpertsDefaults {
            num_experts: Some(64),
            num_experts_per_tok: None,
            intermediate_size: Some(1_407),
            num_shared: 2,
            topk_method: Some("greedy"),
            scale: 1.0,
        },
        ..Self::LLAMA
    };
    pub(crate) const YOUTU: Self = Self {
        max_position_embeddings: 131_072,
        tie_word_embeddings: true,
        has_mlp_bias_key: false,
        has_attention_bias_key: false,
        has_interleave_key: true,
        ..Self::LLAMA
    };
    pub(crate) const GLM4_MOE_LITE: Self = Self {
        max_position_embeddings: 202_752,
        rms_norm_eps: 1e-5,
        tie_word_embeddings: false,
        latent: HfLatentDefaults { q_lora_rank: 768, qk_nope_head_dim: 192, v_head_dim: 256 },
        experts: HfExpertsDefaults {
            num_experts: Some(64),
            num_experts_per_tok: Some(4),
            intermediate_size: Some(1_536),
            num_shared: 1,
            topk_method: None,
            scale: 1.8,
        },
        ..Self::YOUTU
    };
}
