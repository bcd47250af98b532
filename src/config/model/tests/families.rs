//! Families that differ from Llama in values alone: multipliers, partial rotations, biases, norms after.

use super::latent::{File, from_hf, with};
use super::*;
use crate::config::{LayerAttention, Rotation};
use crate::weights::gguf::Value as GgufValue;

/// The keys that every file of a small model has, in both formats.
fn folder(class: &str, changes: &Value) -> Value {
    let config = json!({
        "architectures": [class], "hidden_size": 4096, "intermediate_size": 12800, "max_position_embeddings": 131072,
        "num_attention_heads": 32, "num_hidden_layers": 2, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
        "vocab_size": 1000,
    });
    with(config, changes)
}

fn gguf_file(arch: &'static str) -> File {
    File::new(
        arch,
        &[
            ("block_count", 2.0),
            ("context_length", 131_072.0),
            ("embedding_length", 4096.0),
            ("feed_forward_length", 12_800.0),
            ("vocab_size", 1000.0),
            ("attention.head_count", 32.0),
            ("attention.head_count_kv", 8.0),
            ("attention.layer_norm_rms_epsilon", 1e-5),
        ],
    )
}

/// ibm-granite/granite-3.3-8b-instruct. Layers' outputs are multiplied by 0.22, which embeddings and norms compensate.
#[test]
fn granite_in_folders_and_gguf() {
    let multipliers = json!({
        "attention_multiplier": 0.007_812_5, "embedding_multiplier": 12.0, "logits_scaling": 16.0,
        "residual_multiplier": 0.22,
    });
    let granite = |changes: &Value| from_hf(&with(folder("GraniteForCausalLM", &multipliers), changes));
    let file = || {
        gguf_file("granite")
            .key("attention.scale", GgufValue::Float(0.007_812_5))
            .key("embedding_scale", GgufValue::Float(12.0))
            .key("logit_scale", GgufValue::Float(16.0))
            .key("residual_scale", GgufValue::Float(0.22))
    };
    for config in [granite(&json!({})).unwrap(), file().read().unwrap()] {
        assert_eq!((config.attention_scale, config.logits_scale), (1.0 / 128.0, 1.0 / 16.0));
        assert!((config.embedding_scale - 12.0 / 0.22).abs() < 1e-4, "{}", config.embedding_scale);
        assert!((config.rms_norm_eps - 1e-5 / 0.0484).abs() < 1e-9, "{}", config.rms_norm_eps);
    }
    // The class's default is 1; in GGUF files that and 0 mean none.
    let config = from_hf(&folder("GraniteForCausalLM", &json!({}))).unwrap();
    assert_eq!((config.attention_scale, config.embedding_scale, config.rms_norm_eps), (1.0, 1.0, 1e-5));
    let config = gguf_file("granite").key("residual_scale", GgufValue::Float(0.0)).read().unwrap();
    assert_eq!((config.attention_scale, config.rms_norm_eps), (1.0 / 128_f64.sqrt(), 1e-5));
    for key in ["residual_multiplier", "logits_scaling", "attention_multiplier"] {
        let error = granite(&json!({key: -1.0})).unwrap_err().to_string();
        assert!(error.contains(&format!("{key} is -1")), "{error}");
    }
    let error = from_hf(&folder("LlamaForCausalLM", &multipliers)).unwrap_err().to_string();
    assert!(error.contains("is not supported for LlamaForCausalLM"), "{error}");
}

/// Without experts and states, the fourth generation is like the third one with other keys.
#[test]
fn granite_4_in_folders() {
    let keys = json!({
        "layer_types": ["attention", "attention"], "num_local_experts": 0, "position_embedding_type": "rope",
        "residual_multiplier": 0.22, "shared_intermediate_size": 8192,
    });
    let granite = |changes: &Value| from_hf(&with(folder("GraniteMoeHybridForCausalLM", &keys), changes));
    let config = granite(&json!({})).unwrap();
    assert_eq!(config.intermediate_size, 8192);
    assert_eq!(config.layer_attention, LayerAttention::all(2, None));
    let config = granite(&json!({"position_embedding_type": "nope"})).unwrap();
    assert!(config.layer_attention.iter().all(|layer| layer.rotation == Rotation::None));
    let error = granite(&json!({"layer_types": ["mamba", "attention"]})).unwrap_err().to_string();
    assert!(error.contains("layer_types has \"mamba\""), "{error}");
}

/// microsoft/Phi-4-mini-instruct: 96 of 128 values of a head are rotated, by two lists of divisors. GGUF files have these
/// as tensors and do not name the kind of scaling.
#[test]
fn phi3_in_folders_and_gguf() {
    let config = from_hf(&folder(
        "Phi3ForCausalLM",
        &json!({
            "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75, "sliding_window": 262144,
            "rope_scaling": {"long_factor": vec![2.0; 48], "short_factor": vec![1.0; 48], "type": "longrope"},
        }),
    ))
    .unwrap();
    let factors = ["rope_factors_long.weight", "rope_factors_short.weight"];
    let file = gguf_file("phi3")
        .key("attention.sliding_window", GgufValue::Unsigned(262_144))
        .key("rope.dimension_count", GgufValue::Unsigned(96))
        .key("rope.scaling.original_context_length", GgufValue::Unsigned(4096))
        .key("rope.scaling.attn_factor", GgufValue::Float((1.0 + 32_f64.ln() / 4096_f64.ln()).sqrt()));
    let file = factors.iter().fold(file, |file, name| file.tensor(name, &[48]));
    for config in [config, file.read().unwrap()] {
        assert_eq!((config.rope.dim, config.rope.style), (96, RopeStyle::HalfSplit));
        assert_eq!((config.usual_model_len, config.max_position_embeddings), (4096, 131_072));
        assert_eq!(config.longest_window(), Some(262_144));
        let RopeScaling::Long { original_context: 4096, attention_factor, .. } = config.rope.scaling else {
            panic!("{:?}", config.rope.scaling)
        };
        assert!((attention_factor - 1.190_238_7).abs() < 1e-6, "{attention_factor}");
    }
}

/// The query, key and value projections have biases by default, the output projection of attention only if the folder
/// has them.
#[test]
fn seed_oss_in_folders() {
    let read = |changes: &Value| from_hf(&folder("SeedOssForCausalLM", changes)).unwrap();
    let with_biases = read(&json!({"attention_bias": true, "mlp_bias": false}));
    assert_eq!((with_biases.qkv_bias, with_biases.mlp_bias, with_biases.head_dim), (true, false, 128));
    assert!(read(&json!({})).qkv_bias);
    let without = read(&json!({"attention_bias": false}));
    assert_eq!((without.qkv_bias, without.output_bias), (false, false));
    let after = read(&json!({"attention_bias": false, "attention_out_bias": true}));
    assert_eq!((after.qkv_bias, after.output_bias), (false, true));
}

/// zai-org/GLM-4-9B-0414: half of each head is rotated, in neighbouring pairs, in both formats.
#[test]
fn glm4_in_folders_and_gguf() {
    let folder = folder("Glm4ForCausalLM", &json!({"attention_bias": false, "head_dim": 128}));
    let config = from_hf(&folder).unwrap();
    assert!(!config.qkv_bias);
    let file = gguf_file("glm4").key("rope.dimension_count", GgufValue::Unsigned(64));
    for config in [config, file.read().unwrap()] {
        assert_eq!((config.rope.dim, config.rope.style), (64, RopeStyle::Interleaved));
        assert!(config.architecture.post_norms);
    }
}
