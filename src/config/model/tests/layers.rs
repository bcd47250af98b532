//! Models whose layers differ in their attention.

use super::latent::{File, from_hf, with};
use super::*;
use crate::config::{Activation, LayerAttention, RopeScaling, Rotation};

/// google/gemma-3-1b-it.
fn gemma3_1b() -> Value {
    json!({
        "architectures": ["Gemma3ForCausalLM"], "attention_bias": false, "attn_logit_softcapping": null,
        "bos_token_id": 2, "eos_token_id": [1, 106], "final_logit_softcapping": null, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "intermediate_size": 6912,
        "max_position_embeddings": 32768, "model_type": "gemma3_text", "num_attention_heads": 4,
        "num_hidden_layers": 26, "num_key_value_heads": 1, "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-6, "rope_local_base_freq": 10000, "rope_scaling": null,
        "rope_theta": 1_000_000, "sliding_window": 512, "sliding_window_pattern": 6, "vocab_size": 262144,
    })
}

/// google/gemma-3-27b-it, whose class has the rest.
fn gemma3_27b() -> Value {
    json!({
        "architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106], "model_type": "gemma3",
        "text_config": {
            "head_dim": 128, "hidden_size": 5376, "intermediate_size": 21504, "model_type": "gemma3_text",
            "num_attention_heads": 32, "num_hidden_layers": 62, "num_key_value_heads": 16,
            "query_pre_attn_scalar": 168, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
    })
}

fn gemma3_gguf(num_layers: f64) -> File {
    File::new(
        "gemma3",
        &[
            ("block_count", num_layers),
            ("context_length", 131_072.0),
            ("embedding_length", 5376.0),
            ("feed_forward_length", 21_504.0),
            ("vocab_size", 262_208.0),
            ("attention.head_count", 32.0),
            ("attention.head_count_kv", 16.0),
            ("attention.key_length", 128.0),
            ("attention.value_length", 128.0),
            ("attention.layer_norm_rms_epsilon", 1e-6),
            ("attention.sliding_window", 1024.0),
            ("rope.freq_base", 1e6),
            ("rope.scaling.factor", 8.0),
        ],
    )
}

fn check_layers(config: &ModelConfig, window: usize) {
    for (index, layer) in config.layer_attention.iter().enumerate() {
        let expected = match index % 6 {
            5 => LayerAttention { window: None, rotation: Rotation::Usual },
            _ => LayerAttention { window: Some(window), rotation: Rotation::Local },
        };
        assert_eq!(*layer, expected, "layer {index}");
    }
    assert_eq!(config.layer_attention.len(), config.num_layers);
    let local = config.local_rope.as_ref().unwrap();
    assert_eq!((config.rope.theta, local.theta), (1e6, 1e4));
    assert_eq!(local.scaling, RopeScaling::None);
}

/// Folders have the root of a number of their own in scores, one more in the weights of norms, and one more name.
#[test]
fn gemma_3_in_folders() {
    let config = from_hf(&gemma3_1b()).unwrap();
    check_layers(&config, 512);
    assert_eq!(
        (config.architecture.activation, config.architecture.post_norms),
        (Activation::GeluTanh, true)
    );
    assert_eq!((config.attention_scale, config.embedding_scale), (1.0 / 16.0, 1152_f32.sqrt()));
    assert_eq!((config.norm_offset, config.rope.scaling), (1.0, RopeScaling::None));

    let config = from_hf(&gemma3_27b()).unwrap();
    check_layers(&config, 1024);
    assert_eq!(config.attention_scale, 1.0 / 168_f64.sqrt());
    assert_eq!((config.num_heads, config.head_dim, config.vocab_size), (32, 128, 262_208));
    assert_eq!(config.eos_token_ids, [1, 106]);
    // The files have counted the scaling in.
    assert_eq!(config.max_position_embeddings, 131_072);
    assert_eq!(config.rope.scaling, RopeScaling::Linear { factor: 8.0 });
    assert!(config.notices[0].contains("vision part"), "{:?}", config.notices);

    let changed = |changes: &Value| from_hf(&with(gemma3_1b(), changes));
    let config = changed(&json!({"sliding_window_pattern": 2})).unwrap();
    assert_eq!(config.layer_attention[1].window, None);
    for (changes, part) in [
        (json!({"hidden_activation": "relu"}), "hidden_activation"),
        (json!({"query_pre_attn_scalar": 0}), "query_pre_attn_scalar is 0"),
        (json!({"attn_logit_softcapping": 50.0}), "attn_logit_softcapping = 50"),
        (json!({"use_bidirectional_attention": true}), "use_bidirectional_attention"),
    ] {
        let error = changed(&changes).unwrap_err().to_string();
        assert!(error.contains(part), "{changes}: {error}");
    }
}

/// Files leave out which layers have a window, the base of their rotation, and the scale of the largest one.
#[test]
fn gemma_3_in_gguf() {
    for (num_layers, scalar) in [(62.0, 168_f64), (34.0, 128.0)] {
        let config = gemma3_gguf(num_layers).read().unwrap();
        check_layers(&config, 1024);
        assert_eq!(config.attention_scale, 1.0 / scalar.sqrt());
        assert_eq!((config.norm_offset, config.embedding_scale), (0.0, 5376_f32.sqrt()));
        assert_eq!(config.max_position_embeddings, 131_072);
        assert_eq!(config.rope.scaling, RopeScaling::Linear { factor: 8.0 });
    }
    let config = gemma3_gguf(34.0).without("attention.sliding_window").read().unwrap();
    assert_eq!(config.longest_window(), None);
}

/// The last of every four layers is not rotated, or those that a folder names.
#[test]
fn smollm3_in_folders_and_gguf() {
    let rotated = |config: &ModelConfig| -> Vec<bool> {
        config.layer_attention.iter().map(|layer| layer.rotation != Rotation::None).collect()
    };
    let folder = json!({
        "architectures": ["SmolLM3ForCausalLM"], "hidden_size": 2048, "intermediate_size": 11008,
        "num_attention_heads": 16, "num_hidden_layers": 6, "rope_theta": 5e6, "vocab_size": 128256,
    });
    let config = from_hf(&folder).unwrap();
    assert_eq!(rotated(&config), [true, true, true, false, true, true]);
    assert_eq!((config.num_kv_heads, config.rope.theta, config.longest_window()), (4, 5e6, None));
    let flags = json!({"no_rope_layers": [0, 1, 1, 1, 1, 0]});
    let config = from_hf(&with(folder.clone(), &flags)).unwrap();
    assert_eq!(rotated(&config), [false, true, true, true, true, false]);
    let windows = json!({"use_sliding_window": true, "sliding_window": 64, "no_rope_layer_interval": 2});
    let config = from_hf(&with(folder.clone(), &windows)).unwrap();
    let windows: Vec<_> = config.layer_attention.iter().map(|layer| layer.window).collect();
    assert_eq!(windows, [None, Some(64), None, Some(64), None, Some(64)]);
    let error = from_hf(&with(folder, &json!({"no_rope_layers": [1]}))).unwrap_err().to_string();
    assert!(error.contains("no_rope_layers has 1 entries for 6 layers"), "{error}");

    let gguf = File::new(
        "smollm3",
        &[
            ("block_count", 5.0),
            ("context_length", 65_536.0),
            ("embedding_length", 2048.0),
            ("feed_forward_length", 11_008.0),
            ("vocab_size", 128_256.0),
            ("attention.head_count", 16.0),
            ("attention.head_count_kv", 4.0),
            ("attention.layer_norm_rms_epsilon", 1e-6),
            ("rope.freq_base", 5e6),
        ],
    );
    let config = gguf.read().unwrap();
    assert_eq!(rotated(&config), [true, true, true, false, true]);
    assert_eq!(config.rope.style, RopeStyle::Interleaved);
}
