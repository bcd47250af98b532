//! Latent attention: the published models in both formats, and the keys of files of several ages.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use super::*;
use crate::config::Decoder;

/// DeepSeek-V2-Lite's `config.json`.
pub(super) fn deepseek_v2_lite() -> Value {
    json!({
        "architectures": ["DeepseekV2ForCausalLM"], "attention_bias": false, "aux_loss_alpha": 0.001,
        "bos_token_id": 100000, "eos_token_id": 100001, "ep_size": 1, "first_k_dense_replace": 1,
        "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 10944, "kv_lora_rank": 512,
        "max_position_embeddings": 163840, "model_type": "deepseek_v2", "moe_intermediate_size": 1408,
        "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2,
        "norm_topk_prob": false, "num_attention_heads": 16, "num_experts_per_tok": 6,
        "num_hidden_layers": 27, "num_key_value_heads": 16, "q_lora_rank": null, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6,
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax",
        "tie_word_embeddings": false, "topk_group": 1, "topk_method": "greedy", "v_head_dim": 128,
        "vocab_size": 102400,
    })
}

/// Youtu-LLM-2B's, in the revision with a yarn without effect.
fn youtu() -> Value {
    json!({
        "architectures": ["YoutuForCausalLM"], "attention_bias": false, "bos_token_id": 128000,
        "eos_token_id": 128001, "head_dim": 64, "hidden_size": 2048, "intermediate_size": 6144,
        "kv_lora_rank": 512, "max_position_embeddings": 131072, "mlp_bias": false,
        "num_attention_heads": 16, "num_hidden_layers": 32, "num_key_value_heads": 16,
        "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6,
        "rope_interleave": true,
        "rope_scaling": {"factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0, "type": "yarn"},
        "rope_theta": 1600000, "tie_word_embeddings": true, "v_head_dim": 128, "vocab_size": 128256,
    })
}

/// GLM-4.7-Flash's, which does not name its probabilities.
pub(super) fn glm_flash() -> Value {
    json!({
        "architectures": ["Glm4MoeLiteForCausalLM"], "attention_bias": false,
        "eos_token_id": [154820, 154827, 154829], "first_k_dense_replace": 1, "hidden_size": 2048,
        "intermediate_size": 10240, "kv_lora_rank": 512, "max_position_embeddings": 202752,
        "moe_intermediate_size": 1536, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 1,
        "norm_topk_prob": true, "num_attention_heads": 20, "num_experts_per_tok": 4,
        "num_hidden_layers": 47, "num_key_value_heads": 20, "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 1.0, "q_lora_rank": 768, "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64, "rms_norm_eps": 1e-5, "rope_scaling": null, "rope_theta": 1000000,
        "routed_scaling_factor": 1.8, "tie_word_embeddings": false, "topk_group": 1,
        "topk_method": "noaux_tc", "v_head_dim": 256, "vocab_size": 154880,
    })
}

pub(super) fn with(mut config: Value, changes: &Value) -> Value {
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    config
}

pub(super) fn from_hf(config: &Value) -> Result<ModelConfig> {
    ModelConfig::from_hf(config, None, |_| true)
}

/// The contents of a GGUF file: keys of the architecture `arch`, and shapes of tensors.
#[derive(Clone)]
pub(super) struct File {
    arch: &'static str,
    keys: Vec<(&'static str, gguf::Value)>,
    shapes: HashMap<String, Vec<usize>>,
}

impl File {
    pub(super) fn new(arch: &'static str, keys: &[(&'static str, f64)]) -> Self {
        let file = Self { arch, keys: Vec::new(), shapes: HashMap::new() };
        keys.iter().fold(file, |file, (key, value)| file.key(key, number(*value)))
    }

    /// The last value of a key counts.
    pub(super) fn key(mut self, key: &'static str, value: gguf::Value) -> Self {
        self.keys.push((key, value));
        self
    }

    pub(super) fn numbers(self, keys: &[(&'static str, f64)]) -> Self {
        keys.iter().fold(self, |file, (key, value)| file.key(key, number(*value)))
    }

    pub(super) fn without(mut self, key: &str) -> Self {
        self.keys.retain(|(name, _)| *name != key);
        self
    }

    pub(super) fn arch(mut self, arch: &'static str) -> Self {
        self.arch = arch;
        self
    }

    pub(super) fn tensor(mut self, name: &str, shape: &[usize]) -> Self {
        self.shapes.insert(name.into(), shape.to_vec());
        self
    }

    pub(super) fn no_tensor(mut self, name: &str) -> Self {
        self.shapes.remove(name);
        self
    }

    pub(super) fn read(&self) -> Result<ModelConfig> {
        let mut metadata = Metadata::default();
        metadata.entries.insert("general.architecture".into(), gguf::Value::String(self.arch.into()));
        for (key, value) in &self.keys {
            metadata.entries.insert(format!("{}.{key}", self.arch), value.clone());
        }
        ModelConfig::from_gguf(&metadata, |name| self.shapes.get(name).map(Vec::as_slice))
    }

    pub(super) fn refused(&self, kind: ErrorKind, expected: &str) {
        let error = self.read().unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        assert!(error.message().contains(expected), "{error} does not say {expected:?}");
    }
}

/// Whole numbers are integers in files, and floats of 32 bits otherwise.
fn number(value: f64) -> gguf::Value {
    if value.fract() == 0.0 {
        gguf::Value::Unsigned(value as u64)
    } else {
        gguf::Value::Float(f64::from(value as f32))
    }
}

const K_B: &str = "blk.0.attn_k_b.weight";
const V_B: &str = "blk.0.attn_v_b.weight";
const KV_B: &str = "blk.0.attn_kv_b.weight";

pub(super) fn deepseek_v2_lite_gguf() -> File {
    File::new(
        "deepseek2",
        &[
            ("block_count", 27.0),
            ("context_length", 163_840.0),
            ("embedding_length", 2048.0),
            ("feed_forward_length", 10944.0),
            ("vocab_size", 102_400.0),
            ("attention.head_count", 16.0),
            ("attention.head_count_kv", 1.0),
            ("attention.kv_lora_rank", 512.0),
            ("attention.key_length", 576.0),
            ("attention.value_length", 512.0),
            ("attention.key_length_mla", 192.0),
            ("attention.value_length_mla", 128.0),
            ("attention.layer_norm_rms_epsilon", 1e-6),
            ("rope.dimension_count", 64.0),
            ("rope.freq_base", 10000.0),
            ("rope.scaling.factor", 40.0),
            ("rope.scaling.original_context_length", 4096.0),
            ("rope.scaling.yarn_log_multiplier", 0.0707),
            ("leading_dense_block_count", 1.0),
            ("expert_count", 64.0),
            ("expert_used_count", 6.0),
            ("expert_shared_count", 2.0),
            ("expert_feed_forward_length", 1408.0),
            ("expert_weights_scale", 1.0),
        ],
    )
    .key("rope.scaling.type", gguf::Value::String("yarn".into()))
    .tensor("output.weight", &[102_400, 2048])
    .tensor(K_B, &[16, 512, 128])
    .tensor(V_B, &[16, 128, 512])
}

fn youtu_gguf() -> File {
    File::new(
        "deepseek2",
        &[
            ("block_count", 32.0),
            ("context_length", 131_072.0),
            ("embedding_length", 2048.0),
            ("feed_forward_length", 6144.0),
            ("vocab_size", 128_256.0),
            ("attention.head_count", 16.0),
            ("attention.head_count_kv", 1.0),
            ("attention.q_lora_rank", 1536.0),
            ("attention.kv_lora_rank", 512.0),
            ("attention.key_length", 576.0),
            ("attention.value_length", 512.0),
            ("attention.key_length_mla", 192.0),
            ("attention.value_length_mla", 128.0),
            ("attention.layer_norm_rms_epsilon", 1e-6),
            ("rope.dimension_count", 64.0),
            ("rope.freq_base", 1_600_000.0),
            ("rope.scaling.factor", 1.0),
            ("rope.scaling.yarn_log_multiplier", 0.0),
            ("leading_dense_block_count", 32.0),
            ("expert_shared_count", 0.0),
            ("expert_feed_forward_length", 6144.0),
        ],
    )
    .key("rope.scaling.type", gguf::Value::String("yarn".into()))
    .tensor(K_B, &[16, 512, 128])
    .tensor(V_B, &[16, 128, 512])
}

/// With the block that predicts further tokens.
pub(super) fn glm_flash_gguf() -> File {
    File::new(
        "deepseek2",
        &[
            ("block_count", 48.0),
            ("nextn_predict_layers", 1.0),
            ("context_length", 202_752.0),
            ("embedding_length", 2048.0),
            ("feed_forward_length", 10240.0),
            ("vocab_size", 154_880.0),
            ("attention.head_count", 20.0),
            ("attention.head_count_kv", 1.0),
            ("attention.q_lora_rank", 768.0),
            ("attention.kv_lora_rank", 512.0),
            ("attention.key_length", 576.0),
            ("attention.value_length", 512.0),
            ("attention.key_length_mla", 256.0),
            ("attention.value_length_mla", 256.0),
            ("attention.layer_norm_rms_epsilon", 1e-5),
            ("rope.dimension_count", 64.0),
            ("rope.freq_base", 1_000_000.0),
            ("leading_dense_block_count", 1.0),
            ("expert_count", 64.0),
            ("expert_used_count", 4.0),
            ("expert_shared_count", 1.0),
            ("expert_feed_forward_length", 1536.0),
            ("expert_group_count", 1.0),
            ("expert_group_used_count", 1.0),
            ("expert_weights_scale", 1.8),
        ],
    )
    .key("expert_weights_norm", gguf::Value::Bool(true))
    .tensor("output.weight", &[154_880, 2048])
    .tensor("blk.1.exp_probs_b.bias", &[64])
    .tensor(K_B, &[20, 512, 192])
    .tensor(V_B, &[20, 256, 512])
}

fn check_deepseek_v2_lite(config: &ModelConfig) {
    assert_eq!(config.architecture.hf_name, "DeepseekV2ForCausalLM");
    assert_eq!(config.architecture.decoder, Decoder::DeepSeek);
    assert_eq!((config.vocab_size, config.hidden_size, config.num_layers), (102_400, 2048, 27));
    assert_eq!((config.num_heads, config.num_kv_heads, config.head_dim), (16, 1, 192));
    assert_eq!((config.intermediate_size, config.max_position_embeddings), (10944, 163_840));
    assert!(!config.tie_word_embeddings);
    assert_eq!(config.rms_norm_eps, 1e-6);
    assert_eq!(
        config.rope,
        RopeConfig {
            theta: 1e4,
            dim: 64,
            style: RopeStyle::Interleaved,
            scaling: RopeScaling::Yarn {
                factor: 40.0,
                original_context: 4096,
                beta_fast: 32.0,
                beta_slow: 1.0,
                attention_factor: 1.0,
                truncate: true,
            },
            query_growth: None,
        }
    );
    let latent = config.latent_attention.as_ref().unwrap();
    assert!((latent.softmax_scale - 0.114_721_39).abs() < 1e-8, "{}", latent.softmax_scale);
    assert_eq!((latent.q_lora_rank, latent.kv_lora_rank), (None, 512));
    assert_eq!((latent.qk_nope_head_dim, latent.v_head_dim, latent.lora_norm_eps), (128, 128, 1e-6));
    let expected = ExpertsConfig {
        num_dense_layers: 1,
        num_experts: 64,
        num_experts_per_tok: 6,
        intermediate_size: 1408,
        shared_intermediate_size: Some(2816),
        scoring: Scoring::Softmax,
        has_selection_bias: false,
        has_router_bias: false,
        has_biases: false,
        is_interleaved: false,
        num_groups: 1,
        num_groups_per_tok: 1,
        normalize: false,
        scale: 1.0,
    };
    assert_eq!(config.experts, Some(expected));
}

fn check_youtu(config: &ModelConfig) {
    assert_eq!(config.architecture.hf_name, "YoutuForCausalLM");
    assert_eq!((config.vocab_size, config.hidden_size, config.num_layers), (128_256, 2048, 32));
    assert_eq!((config.num_heads, config.num_kv_heads, config.head_dim), (16, 1, 192));
    assert!(config.tie_word_embeddings);
    assert_eq!((config.rope.theta, config.rope.dim, config.rope.style), (1.6e6, 64, RopeStyle::Interleaved));
    let RopeScaling::Yarn { factor, attention_factor, .. } = config.rope.scaling else {
        panic!("{:?}", config.rope.scaling)
    };
    assert_eq!((factor, attention_factor), (1.0, 1.0));
    let latent = config.latent_attention.as_ref().unwrap();
    assert!((latent.softmax_scale - 0.072_168_78).abs() < 1e-8, "{}", latent.softmax_scale);
    assert_eq!((latent.q_lora_rank, latent.kv_lora_rank), (Some(1536), 512));
    assert_eq!((latent.qk_nope_head_dim, latent.v_head_dim), (128, 128));
    assert_eq!(config.experts, None);
}

fn check_glm_flash(config: &ModelConfig) {
    assert_eq!((config.vocab_size, config.hidden_size, config.num_layers), (154_880, 2048, 47));
    assert_eq!((config.num_heads, config.num_kv_heads, config.head_dim), (20, 1, 256));
    assert_eq!((config.intermediate_size, config.rms_norm_eps), (10240, 1e-5));
    assert_eq!(config.rope.scaling, RopeScaling::None);
    assert_eq!((config.rope.theta, config.rope.dim, config.rope.style), (1e6, 64, RopeStyle::Interleaved));
    let latent = config.latent_attention.as_ref().unwrap();
    assert_eq!((latent.softmax_scale, latent.q_lora_rank, latent.kv_lora_rank), (0.0625, Some(768), 512));
    assert_eq!((latent.qk_nope_head_dim, latent.v_head_dim), (192, 256));
    let expected = ExpertsConfig {
        num_dense_layers: 1,
        num_experts: 64,
        num_experts_per_tok: 4,
        intermediate_size: 1536,
        shared_intermediate_size: Some(1536),
        scoring: Scoring::Sigmoid,
        has_selection_bias: true,
        has_router_bias: false,
        has_biases: false,
        is_interleaved: false,
        num_groups: 1,
        num_groups_per_tok: 1,
        normalize: true,
        scale: 1.8,
    };
    assert_eq!(config.experts, Some(expected));
}

#[test]
fn the_published_models_are_read_from_either_format() {
    check_deepseek_v2_lite(&from_hf(&deepseek_v2_lite()).unwrap());
    check_deepseek_v2_lite(&deepseek_v2_lite_gguf().read().unwrap());
    check_youtu(&from_hf(&youtu()).unwrap());
    check_youtu(&youtu_gguf().read().unwrap());
    for (config, lora_norm_eps) in
        [(from_hf(&glm_flash()).unwrap(), 1e-6), (glm_flash_gguf().read().unwrap(), 1e-5)]
    {
        check_glm_flash(&config);
        assert_eq!(config.latent_attention.unwrap().lora_norm_eps, lora_norm_eps);
    }
    // In folders of transformers 5, `head_dim` is the rotated width.
    let config = with(deepseek_v2_lite(), &json!({"head_dim": 64, "q_lora_rank": 0}));
    check_deepseek_v2_lite(&from_hf(&config).unwrap());
}

#[test]
fn tensors_give_the_widths_whatever_the_keys_mean() {
    // Split tensors and no key of a length.
    let file = deepseek_v2_lite_gguf()
        .without("attention.key_length")
        .without("attention.value_length")
        .without("attention.key_length_mla")
        .without("attention.value_length_mla")
        .without("attention.kv_lora_rank");
    check_deepseek_v2_lite(&file.read().unwrap());

    // From before the split: widths of heads, and the same number of key heads as of query heads.
    let legacy = deepseek_v2_lite_gguf()
        .no_tensor(K_B)
        .no_tensor(V_B)
        .tensor(KV_B, &[16 * 256, 512])
        .without("attention.key_length_mla")
        .without("attention.value_length_mla")
        .numbers(&[
            ("attention.head_count_kv", 16.0),
            ("attention.key_length", 192.0),
            ("attention.value_length", 128.0),
        ]);
    check_deepseek_v2_lite(&legacy.read().unwrap());
    // The same with today's keys.
    let joint = deepseek_v2_lite_gguf().no_tensor(K_B).no_tensor(V_B).tensor(KV_B, &[16 * 256, 512]);
    check_deepseek_v2_lite(&joint.read().unwrap());

    // Early conversions of GLM, with another name and the two pairs of keys swapped.
    let swapped = glm_flash_gguf().arch("glm4moelite").numbers(&[
        ("attention.head_count_kv", 20.0),
        ("attention.key_length", 256.0),
        ("attention.value_length", 256.0),
        ("attention.key_length_mla", 576.0),
        ("attention.value_length_mla", 512.0),
    ]);
    check_glm_flash(&swapped.read().unwrap());
    assert_eq!(swapped.read().unwrap().architecture.hf_name, "Glm4MoeLiteForCausalLM");
}

#[test]
fn tensors_and_keys_that_contradict_each_other_are_refused() {
    let file = deepseek_v2_lite_gguf;
    for (file, expected) in [
        (file().no_tensor(K_B), "neither blk.0.attn_k_b.weight and blk.0.attn_v_b.weight nor"),
        (file().no_tensor(K_B).no_tensor(V_B), "neither"),
        (file().tensor(K_B, &[8, 512, 128]), "[8, 512, 128]"),
        (file().tensor(K_B, &[16 * 512, 128]), "[8192, 128]"),
        (file().tensor(V_B, &[16, 128, 256]), "[16, 128, 256]"),
        (file().tensor(K_B, &[16, 512, 64]), "heads of (128, 128) values"),
        (file().numbers(&[("attention.kv_lora_rank", 256.0)]), "kv_lora_rank is 256, but tensors have 512"),
        (file().numbers(&[("nextn_predict_layers", 28.0)]), "nextn_predict_layers is 28"),
        (file().numbers(&[("nextn_predict_layers", 27.0)]), "block_count is 0"),
        (file().without("rope.dimension_count"), "rope.dimension_count is missing"),
        (
            file().no_tensor(K_B).no_tensor(V_B).tensor(KV_B, &[16 * 255, 512]),
            "attn_kv_b has 4080 rows for 16 heads",
        ),
        (file().no_tensor(K_B).no_tensor(V_B).tensor(KV_B, &[512]), "attn_kv_b has the shape [512]"),
        (file().tensor(K_B, &[16, 512, 0]), "heads of (64, 128)"),
        (file().numbers(&[("attention.q_lora_rank", 1e12)]), "q_lora_rank is 1000000000000"),
    ] {
        file.refused(ErrorKind::InvalidModel, expected);
    }
}

#[test]
fn the_factor_of_yarn_is_on_the_scores() {
    let scale = |config: Result<ModelConfig>| {
        let config = config.unwrap();
        let RopeScaling::Yarn { attention_factor, .. } = config.rope.scaling else { panic!() };
        (attention_factor, config.latent_attention.unwrap().softmax_scale)
    };
    let plain = (1.0 / 192.0_f64.sqrt()) as f32;
    let without = deepseek_v2_lite_gguf().without("rope.scaling.yarn_log_multiplier");
    assert_eq!(scale(without.read()), (1.0, plain));

    let yarn = |mscale: Value, all_dim: Value| json!({"rope_scaling": {"type": "yarn", "factor": 40, "mscale": mscale, "mscale_all_dim": all_dim}});
    let read = |changes: Value| scale(from_hf(&with(deepseek_v2_lite(), &changes)));
    let m = |weight: f64| 0.1 * weight * 40.0_f64.ln() + 1.0;
    // Different weights leave a factor on sine and cosine.
    let (factor, with_all_dim) = read(yarn(json!(1.0), json!(0.5)));
    assert!((factor - m(1.0) / m(0.5)).abs() < 1e-12);
    assert!((f64::from(with_all_dim) - m(0.5).powi(2) / 192.0_f64.sqrt()).abs() < 1e-8);
    assert_eq!(read(yarn(Value::Null, Value::Null)), (m(1.0), plain));
}

#[test]
fn what_latent_attention_cannot_do_is_refused() {
    for (changes, expected) in [
        (json!({"use_mla": false}), "use_mla = false"),
        (json!({"partial_rotary_factor": 0.5}), "rotating 32 of the 64 values"),
        (json!({"attention_bias": true}), "attention_bias = true"),
        (json!({"index_topk": 2048}), "index_topk = 2048"),
    ] {
        let error = from_hf(&with(deepseek_v2_lite(), &changes)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{changes}: {error}");
        assert!(error.message().contains(expected), "{changes}: {error}");
    }
    for (changes, expected) in [
        (json!({"kv_lora_rank": 0}), "kv_lora_rank is 0"),
        (json!({"qk_rope_head_dim": 63}), "rotated in pairs"),
        (json!({"qk_nope_head_dim": 0}), "qk_nope_head_dim is 0"),
        (json!({"qk_nope_head_dim": u64::MAX}), "head_dim is 18446744073709551615"),
        (json!({"v_head_dim": 5000}), "v_head_dim is 5000"),
        (json!({"q_lora_rank": 1_u64 << 40}), "q_lora_rank is 1099511627776"),
    ] {
        let error = from_hf(&with(deepseek_v2_lite(), &changes)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidModel, "{changes}: {error}");
        assert!(error.message().contains(expected), "{changes}: {error}");
    }
    deepseek_v2_lite_gguf()
        .numbers(&[("rope.scaling.attn_factor", 0.5)])
        .refused(ErrorKind::Unsupported, "rope.scaling.attn_factor = 0.5");
    // Keys that the class does not use.
    for (changes, expected) in [
        (json!({"rope_interleave": false}), "rope_interleave = false"),
        (json!({"sliding_window": 4096}), "sliding_window = 4096"),
    ] {
        let config = from_hf(&with(deepseek_v2_lite(), &changes)).unwrap();
        assert_eq!((config.rope.style, config.longest_window()), (RopeStyle::Interleaved, None));
        assert!(config.notices[0].contains(expected), "{:?}", config.notices);
    }
    let config = from_hf(&with(glm_flash(), &json!({"rope_interleave": false}))).unwrap();
    assert_eq!((config.rope.style, config.notices.len()), (RopeStyle::HalfSplit, 0));
    let linear = json!({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": null});
    let config = from_hf(&with(glm_flash(), &linear)).unwrap();
    assert_eq!(config.rope.scaling, RopeScaling::Linear { factor: 2.0 });
}

fn fixture(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(path)
}

#[test]
fn the_fixtures_say_the_same_in_all_their_files() {
    let read =
        |path: String| ModelConfig::from_checkpoint(&Checkpoint::open(&fixture(&path)).unwrap()).unwrap();
    for (name, types) in [
        ("deepseek_v2_lite", &["q8_0", "q4_0", "f32-legacy", "q8_0-legacy"][..]),
        ("youtu", &["q8_0", "q4_0"]),
        ("glm4_moe_lite", &["q8_0", "q4_0", "q8_0-ollama"]),
        ("qwen3_moe", &["q8_0"]),
    ] {
        let folder = read(format!("tiny/{name}"));
        for kind in types {
            let mut file = read(format!("tiny/{name}/{name}.{kind}.gguf"));
            // The differences between the two formats: names, the precision of numbers, an epsilon.
            file.architecture = folder.architecture;
            if let (Some(file), Some(folder)) = (&mut file.latent_attention, &folder.latent_attention) {
                assert!((file.softmax_scale - folder.softmax_scale).abs() < 1e-8, "{name}.{kind}");
                file.softmax_scale = folder.softmax_scale;
                file.lora_norm_eps = folder.lora_norm_eps;
            }
            assert_eq!(file, folder, "{name}.{kind}");
        }
    }
}
