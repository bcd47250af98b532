//! gpt-oss: alternating windows, YaRN without whole pairs, biases everywhere, and an activation with its own constants.

use super::latent::{File, from_hf, with};
use super::*;
use crate::config::{Activation, LayerAttention, RopeScaling, Rotation};

/// openai/gpt-oss-20b.
fn folder() -> Value {
    let kinds: Vec<&str> =
        (0..24).map(|layer| if layer % 2 == 0 { "sliding_attention" } else { "full_attention" }).collect();
    json!({
        "architectures": ["GptOssForCausalLM"], "attention_bias": true, "attention_dropout": 0.0,
        "eos_token_id": 200_002, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu",
        "hidden_size": 2880, "initial_context_length": 4096, "intermediate_size": 2880, "layer_types": kinds,
        "max_position_embeddings": 131_072, "model_type": "gpt_oss", "num_attention_heads": 64,
        "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32,
        "output_router_logits": false, "pad_token_id": 199_999, "rms_norm_eps": 1e-5,
        "quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"},
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": false,
        },
        "rope_theta": 150_000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
        "tie_word_embeddings": false, "vocab_size": 201_088,
    })
}

/// As written by llama.cpp's converter, without the layers of the window and the end of the ramp.
fn file() -> File {
    File::new(
        "gpt-oss",
        &[
            ("block_count", 24.0),
            ("context_length", 131_072.0),
            ("embedding_length", 2880.0),
            ("feed_forward_length", 2880.0),
            ("expert_feed_forward_length", 2880.0),
            ("expert_count", 32.0),
            ("expert_used_count", 4.0),
            ("vocab_size", 201_088.0),
            ("attention.head_count", 64.0),
            ("attention.head_count_kv", 8.0),
            ("attention.key_length", 64.0),
            ("attention.value_length", 64.0),
            ("attention.layer_norm_rms_epsilon", 1e-5),
            ("attention.sliding_window", 128.0),
            ("rope.freq_base", 150_000.0),
            ("rope.scaling.factor", 32.0),
            ("rope.scaling.original_context_length", 4096.0),
        ],
    )
    .key("rope.scaling.type", gguf::Value::String("yarn".into()))
    .tensor("blk.0.attn_q.bias", &[4096])
    .tensor("blk.0.attn_output.bias", &[2880])
    .tensor("output.weight", &[201_088, 2880])
}

fn check(config: &ModelConfig, is_interleaved: bool) {
    for (index, layer) in config.layer_attention.iter().enumerate() {
        let window = (index % 2 == 0).then_some(128);
        assert_eq!(*layer, LayerAttention { window, rotation: Rotation::Usual }, "layer {index}");
    }
    let RopeScaling::Yarn { factor, original_context, attention_factor, truncate, .. } = config.rope.scaling
    else {
        panic!("{:?}", config.rope.scaling)
    };
    assert_eq!((factor, original_context, truncate, config.rope.theta), (32.0, 4096, false, 150_000.0));
    assert!((attention_factor - 1.346_573_6).abs() < 1e-6, "{attention_factor}");
    assert_eq!((config.max_position_embeddings, config.usual_model_len), (131_072, 131_072));
    assert_eq!(config.activation, Activation::ClampedSwiglu { alpha: 1.702, limit: 7.0 });
    assert!(config.has_sinks && config.qkv_bias && config.output_bias && !config.mlp_bias);
    assert!(!config.tie_word_embeddings && config.local_rope.is_none());
    assert_eq!(config.attention_scale, 0.125);
    let experts = config.experts.as_ref().unwrap();
    assert_eq!((experts.num_experts, experts.num_experts_per_tok, experts.intermediate_size), (32, 4, 2880));
    assert!(experts.has_router_bias && experts.has_biases && experts.normalize);
    assert_eq!(experts.is_interleaved, is_interleaved);
}

#[test]
fn folders_and_files_say_the_same() {
    let config = from_hf(&folder()).unwrap();
    check(&config, true);
    assert!(config.notices.is_empty(), "{:?}", config.notices);
    check(&file().read().unwrap(), false);
}

#[test]
fn what_a_folder_leaves_out_is_as_in_its_class() {
    let mut config = folder();
    for key in [
        "attention_bias",
        "head_dim",
        "layer_types",
        "num_attention_heads",
        "num_key_value_heads",
        "num_experts_per_tok",
        "rms_norm_eps",
        "rope_scaling",
        "rope_theta",
        "sliding_window",
        "swiglu_limit",
        "tie_word_embeddings",
    ] {
        config.as_object_mut().unwrap().remove(key);
    }
    check(&from_hf(&config).unwrap(), true);
}

#[test]
fn the_numbers_of_the_activation_are_read_and_checked() {
    let read = |changes: &Value| from_hf(&with(folder(), changes));
    let config = read(&json!({"swiglu_alpha": 1.5, "swiglu_limit": 4})).unwrap();
    assert_eq!(config.activation, Activation::ClampedSwiglu { alpha: 1.5, limit: 4.0 });
    for (key, value) in [("swiglu_limit", 0.0), ("swiglu_alpha", -1.0)] {
        let error = read(&json!({key: value})).unwrap_err();
        assert!(error.message().contains(&format!("{key} is {value}")), "{error}");
    }
}
