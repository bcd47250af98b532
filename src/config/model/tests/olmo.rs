//! OLMo 2 and 3, which share a name in GGUF files: with windows it is the third generation.

use super::latent::{File, from_hf};
use super::*;
use crate::config::{LayerAttention, QkNorm, RopeScaling, Rotation};

/// allenai/Olmo-3-7B-Instruct.
fn third() -> Value {
    json!({
        "architectures": ["Olmo3ForCausalLM"], "attention_bias": false, "eos_token_id": 100_257,
        "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 11008,
        "max_position_embeddings": 65536, "model_type": "olmo3", "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 32, "pad_token_id": 100_277, "rms_norm_eps": 1e-6,
        "rope_scaling": {
            "attention_factor": 1.207_944_154_167_983_6, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
            "original_max_position_embeddings": 8192, "rope_type": "yarn",
        },
        "rope_theta": 500_000, "sliding_window": 4096, "tie_word_embeddings": false, "vocab_size": 100_278,
    })
}

fn file() -> File {
    File::new(
        "olmo2",
        &[
            ("block_count", 32.0),
            ("context_length", 65536.0),
            ("embedding_length", 4096.0),
            ("feed_forward_length", 11008.0),
            ("vocab_size", 100_278.0),
            ("attention.head_count", 32.0),
            ("attention.head_count_kv", 32.0),
            ("attention.layer_norm_rms_epsilon", 1e-6),
            ("rope.freq_base", 500_000.0),
        ],
    )
}

fn check_norms(config: &ModelConfig, class: &str) {
    let own = config.architecture;
    assert_eq!((own.hf_name, own.qk_norm, own.pre_norms, own.post_norms), (class, QkNorm::All, false, true));
}

/// Every fourth layer has no window, and the scaling.
fn check_layers(config: &ModelConfig) {
    check_norms(config, "Olmo3ForCausalLM");
    for (index, layer) in config.layer_attention.iter().enumerate() {
        let expected = match index % 4 {
            3 => LayerAttention { window: None, rotation: Rotation::Usual },
            _ => LayerAttention { window: Some(4096), rotation: Rotation::Local },
        };
        assert_eq!(*layer, expected, "layer {index}");
    }
    let local = config.local_rope.as_ref().unwrap();
    assert_eq!((config.rope.theta, local.theta, &local.scaling), (5e5, 5e5, &RopeScaling::None));
    assert_eq!(config.max_position_embeddings, 65536);
}

#[test]
fn the_third_generation_has_windows() {
    let config = from_hf(&third()).unwrap();
    check_layers(&config);
    assert!(
        matches!(config.rope.scaling, RopeScaling::Yarn { attention_factor, .. } if attention_factor > 1.2)
    );

    let with_window = file().numbers(&[("attention.sliding_window", 4096.0)]);
    check_layers(&with_window.read().unwrap());
    // As the converter writes it: a flag for each layer.
    let flags = |num: usize| gguf::Value::Bools((0..num).map(|layer| layer % 4 != 3).collect());
    let pattern = "attention.sliding_window_pattern";
    check_layers(&with_window.clone().key(pattern, flags(32)).read().unwrap());
    let others = gguf::Value::Bools(vec![false; 32]);
    let config = with_window.clone().key(pattern, others).read().unwrap();
    assert!(config.layer_attention.iter().all(|layer| layer.window.is_none()));
    let yarn = with_window.clone().key("rope.scaling.type", gguf::Value::String("yarn".into())).numbers(&[
        ("rope.scaling.factor", 8.0),
        ("rope.scaling.attn_factor", 1.207_944_2),
        ("rope.scaling.original_context_length", 8192.0),
    ]);
    let config = yarn.read().unwrap();
    check_layers(&config);
    // The whole factor, as in a folder.
    assert!(
        matches!(config.rope.scaling, RopeScaling::Yarn { attention_factor, .. } if attention_factor < 1.21)
    );
    with_window.key(pattern, flags(31)).refused(ErrorKind::InvalidModel, "has 31 entries for 32 layers");
}

#[test]
fn the_second_generation_has_none() {
    let second = json!({
        "architectures": ["Olmo2ForCausalLM"], "hidden_size": 4096, "intermediate_size": 11008,
        "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 32, "rms_norm_eps": 1e-6, "rope_scaling": null, "rope_theta": 500_000,
        "tie_word_embeddings": false, "vocab_size": 100_352,
    });
    for config in [from_hf(&second).unwrap(), file().read().unwrap()] {
        check_norms(&config, "Olmo2ForCausalLM");
        assert!(config.local_rope.is_none() && config.longest_window().is_none());
        assert_eq!((config.rope.theta, &config.rope.scaling), (5e5, &RopeScaling::None));
    }
}
