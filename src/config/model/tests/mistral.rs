//! Mistral's models whose queries grow with their position.

use super::latent::{File, from_hf};
use super::*;
use crate::config::{QueryGrowth, RopeScaling};

const YARN: RopeScaling = RopeScaling::Yarn {
    factor: 16.0,
    original_context: 16_384,
    beta_fast: 32.0,
    beta_slow: 1.0,
    attention_factor: 1.0,
    truncate: true,
};

/// The language model of mistralai/Ministral-3-8B-Instruct-2512.
fn text() -> Value {
    json!({
        "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
        "max_position_embeddings": 262_144, "model_type": "ministral3", "num_attention_heads": 32,
        "num_hidden_layers": 34, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0,
            "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384, "rope_theta": 1_000_000.0,
            "rope_type": "yarn", "type": "yarn",
        },
        "sliding_window": null, "tie_word_embeddings": false, "vocab_size": 131_072,
    })
}

fn check(config: &ModelConfig) {
    assert_eq!(config.architecture.hf_name, "Ministral3ForCausalLM");
    assert_eq!((config.rope.theta, config.rope.dim, &config.rope.scaling), (1e6, 128, &YARN));
    assert_eq!(config.rope.query_growth, Some(QueryGrowth { beta: 0.1, period: 16_384 }));
    assert_eq!((config.max_position_embeddings, config.num_kv_heads, config.head_dim), (262_144, 8, 128));
}

/// The file's class has a vision encoder around it.
#[test]
fn ministral_3_in_folders() {
    let whole = json!({
        "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "text_config": text(),
        "vision_config": {"hidden_size": 1024, "num_hidden_layers": 24},
    });
    let config = from_hf(&whole).unwrap();
    check(&config);
    assert!(config.notices.iter().any(|notice| notice.contains("vision part")), "{:?}", config.notices);
    let growth = config.rope.query_growth.unwrap();
    assert_eq!((growth.factor(0), growth.factor(16_383)), (1.0, 1.0));
    assert!((growth.factor(16_384) - 1.069_314_718).abs() < 1e-9, "{}", growth.factor(16_384));
    // Of the previous class, with the same vision encoder.
    let mut older = whole;
    older["text_config"]["model_type"] = json!("mistral");
    older["text_config"]["rope_parameters"] = json!({"rope_type": "default", "rope_theta": 1e9});
    let config = from_hf(&older).unwrap();
    assert_eq!((config.architecture.hf_name, config.rope.query_growth), ("MistralForCausalLM", None));
}

/// An unknown class around an unknown language model keeps its name.
#[test]
fn other_classes_with_pictures_are_refused_by_name() {
    let other = json!({
        "architectures": ["OtherForConditionalGeneration"], "text_config": {"model_type": "other_text"},
    });
    let error = from_hf(&other).unwrap_err();
    assert!(error.message().contains("OtherForConditionalGeneration"), "{error}");
}

#[test]
fn ministral_3_in_gguf_files() {
    let keys = [
        ("block_count", 34.0),
        ("context_length", 262_144.0),
        ("embedding_length", 4096.0),
        ("feed_forward_length", 14_336.0),
        ("vocab_size", 131_072.0),
        ("attention.head_count", 32.0),
        ("attention.head_count_kv", 8.0),
        ("attention.key_length", 128.0),
        ("attention.value_length", 128.0),
        ("attention.layer_norm_rms_epsilon", 1e-5),
        ("attention.temperature_scale", 0.1),
        ("rope.dimension_count", 128.0),
        ("rope.freq_base", 1e6),
        ("rope.scaling.factor", 16.0),
        ("rope.scaling.original_context_length", 16_384.0),
        ("rope.scaling.yarn_beta_fast", 32.0),
        ("rope.scaling.yarn_beta_slow", 1.0),
        ("rope.scaling.yarn_log_multiplier", 1.0),
    ];
    let config = File::new("mistral3", &keys)
        .key("rope.scaling.type", gguf::Value::String("yarn".into()))
        .read()
        .unwrap();
    let growth = config.rope.query_growth.unwrap();
    // Numbers of such files have single precision.
    assert!((growth.beta - 0.1).abs() < 1e-8 && growth.period == 16_384, "{growth:?}");
    let rope =
        RopeConfig { query_growth: Some(QueryGrowth { beta: 0.1, period: 16_384 }), ..config.rope.clone() };
    check(&ModelConfig { rope, ..config });
}
