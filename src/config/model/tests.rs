use serde_json::{Value, json};

use super::*;
use crate::ErrorKind;
use crate::config::ARCHITECTURES;
use crate::weights::gguf::{self, Metadata};

mod experts;
mod families;
mod gpt_oss;
mod latent;
mod layers;
mod mistral;
mod olmo;
mod settings;

/// A small valid `config.json`.
fn base() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 288,
        "max_position_embeddings": 512,
    })
}

/// The base with keys replaced; `null` removes one.
fn changed(changes: &Value) -> Value {
    let mut config = base();
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    config
}

fn read(changes: &Value) -> Result<ModelConfig> {
    ModelConfig::from_hf(&changed(changes), None, |_| true)
}

#[test]
fn what_is_missing_has_its_default() {
    let config = read(&json!({})).unwrap();
    assert_eq!(config.num_kv_heads, 4);
    assert_eq!(config.head_dim, 16);
    assert_eq!(config.rms_norm_eps, 1e-6);
    assert_eq!(
        config.rope,
        RopeConfig {
            theta: 1e4,
            dim: 16,
            style: RopeStyle::HalfSplit,
            scaling: RopeScaling::None,
            query_growth: None
        }
    );
    assert_eq!(config.longest_window(), None);
    assert_eq!((config.bos_token_id, config.eos_token_ids.len()), (None, 0));
    assert_eq!((config.q_size(), config.kv_size()), (64, 64));
}

#[test]
fn tied_embeddings_follow_the_switch_or_the_tensors() {
    for (switch, has_head, expected) in [
        (json!(true), true, Some(true)),
        (json!(true), false, Some(true)),
        (json!(false), true, Some(false)),
        (json!(false), false, None),
        (Value::Null, false, Some(true)),
        (Value::Null, true, Some(false)),
    ] {
        let config = changed(&json!({"tie_word_embeddings": switch}));
        let config = ModelConfig::from_hf(&config, None, |name| has_head && name == "output.weight");
        match (config, expected) {
            (Ok(config), Some(expected)) => {
                assert_eq!(config.tie_word_embeddings, expected, "{switch}, {has_head}")
            }
            (Err(error), None) => {
                assert!(error.message().contains("no lm_head.weight"), "{error}");
                assert!(error.hint().unwrap().contains("\"tie_word_embeddings\": true"), "{error:?}");
            }
            (config, _) => panic!("{switch}, {has_head}: {config:?}"),
        }
    }
}

#[test]
fn special_tokens_come_as_numbers_and_lists_and_the_generation_config_wins() {
    let check = |eos: Value, generation: Value, expected: &[u32]| {
        let config = changed(&json!({"eos_token_id": eos, "bos_token_id": 1}));
        let config = ModelConfig::from_hf(&config, Some(&generation), |_| true).unwrap();
        assert_eq!(config.eos_token_ids, expected);
        assert_eq!(config.bos_token_id, Some(1));
    };
    check(json!(2), json!({}), &[2]);
    check(json!([2, 3]), json!({}), &[2, 3]);
    check(json!(2), json!({"eos_token_id": [5, 6]}), &[5, 6]);
    check(json!(2), json!({"eos_token_id": null}), &[2]);
    check(Value::Null, json!({"eos_token_id": 7}), &[7]);
    check(json!(-1), json!({}), &[]);
    check(json!([2, -1]), json!({"eos_token_id": -1}), &[2]);
}

#[test]
fn rope_is_read_in_both_spellings() {
    let check = |changes: Value, theta: f64, dim: usize, scaling: RopeScaling| {
        let rope = read(&changes).unwrap().rope;
        assert_eq!(
            rope,
            RopeConfig { theta, dim, style: RopeStyle::HalfSplit, scaling, query_growth: None },
            "{changes}"
        );
    };
    check(json!({"rope_theta": 5e5}), 5e5, 16, RopeScaling::None);
    check(
        json!({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}),
        1e6,
        16,
        RopeScaling::None,
    );
    check(json!({"rope_scaling": null}), 1e4, 16, RopeScaling::None);
    check(json!({"partial_rotary_factor": 0.5}), 1e4, 8, RopeScaling::None);
    check(
        json!({"rope_scaling": {"type": "linear", "factor": 2}}),
        1e4,
        16,
        RopeScaling::Linear { factor: 2.0 },
    );
    let llama3 = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    });
    let scaling = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_context: 8192,
    };
    check(json!({"rope_theta": 5e5, "rope_scaling": llama3}), 5e5, 16, scaling.clone());
    let mut llama3 = llama3;
    llama3["rope_theta"] = json!(5e5);
    check(json!({"rope_parameters": llama3}), 5e5, 16, scaling);

    let yarn = |attention_factor, original_context| RopeScaling::Yarn {
        factor: 4.0,
        original_context,
        beta_fast: 32.0,
        beta_slow: 1.0,
        attention_factor,
        truncate: true,
    };
    check(
        json!({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}}),
        1e4,
        16,
        yarn(0.1 * 4.0_f64.ln() + 1.0, 128),
    );
    check(
        json!({"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.7}}),
        1e4,
        16,
        yarn(1.0, 512),
    );
    check(
        json!({"rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": 1.5}}),
        1e4,
        16,
        yarn(1.5, 512),
    );
}

#[test]
fn what_cannot_be_computed_is_refused_by_name() {
    let check = |kind: ErrorKind, changes: Value, expected: &str| {
        let error = read(&changes).unwrap_err();
        assert_eq!(error.kind(), kind, "{changes}: {error}");
        assert!(error.message().starts_with("config.json: "), "{error}");
        assert!(error.message().contains(expected), "{changes}: {error}");
    };
    for (changes, expected) in [
        (json!({"architectures": ["MambaForCausalLM"]}), "\"MambaForCausalLM\" is not supported"),
        (json!({"hidden_act": "gelu"}), "hidden_act = \"gelu\""),
        (json!({"num_local_experts": 8}), "num_local_experts = 8"),
        (json!({"kv_lora_rank": 512}), "kv_lora_rank = 512"),
        (json!({"final_logit_softcapping": 30.0}), "final_logit_softcapping = 30"),
        (json!({"rope_scaling": {"type": "ntk"}}), "rope_type = \"ntk\""),
        (
            json!({"architectures": ["MistralForCausalLM"], "num_key_value_heads": 4, "layer_types": ["x"]}),
            "layer_types has \"x\"",
        ),
    ] {
        check(ErrorKind::Unsupported, changes.clone(), expected);
        assert!(read(&changes).unwrap_err().hint().is_some(), "{changes} has no way out");
    }
    for (changes, expected) in [
        (json!({"architectures": []}), "architectures"),
        (json!({"hidden_size": null}), "hidden_size is missing"),
        (json!({"hidden_size": "64"}), "hidden_size in config.json is \"64\""),
        (json!({"hidden_size": -1}), "hidden_size in config.json is -1"),
        (json!({"hidden_size": u64::MAX}), "hidden_size is 18446744073709551615"),
        (json!({"num_hidden_layers": 0}), "num_hidden_layers is 0"),
        (json!({"num_attention_heads": 0}), "num_attention_heads is 0"),
        (json!({"num_key_value_heads": 3}), "not a multiple of num_key_value_heads 3"),
        (json!({"num_key_value_heads": 8}), "num_key_value_heads is 8"),
        (json!({"head_dim": 15}), "15 values of a head are rotated"),
        (json!({"head_dim": 5000}), "head_dim is 5000"),
        (json!({"vocab_size": 0}), "vocab_size is 0"),
        (json!({"max_position_embeddings": 0}), "max_position_embeddings is 0"),
        (
            json!({"architectures": ["MistralForCausalLM"], "num_key_value_heads": 4, "sliding_window": 0}),
            "sliding_window is 0",
        ),
        (json!({"rms_norm_eps": 0}), "rms_norm_eps is 0"),
        (json!({"rope_theta": -1}), "rope_theta is -1"),
        (json!({"partial_rotary_factor": 1.5}), "partial_rotary_factor is 1.5"),
        (json!({"rope_scaling": {"type": "linear"}}), "factor is missing in rope_scaling"),
        (json!({"rope_scaling": {"type": "linear", "factor": 0}}), "factor is 0"),
        (json!({"eos_token_id": 288}), "special token 288"),
        (json!({"eos_token_id": "x"}), "eos_token_id in config.json is \"x\""),
        (
            json!({"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4,
                "high_freq_factor": 4, "original_max_position_embeddings": 64}}),
            "low_freq_factor 4, which is not below high_freq_factor 4",
        ),
    ] {
        check(ErrorKind::InvalidModel, changes, expected);
    }
}

#[test]
fn biases_are_by_nature_or_switched_on_and_there() {
    let check = |name: &str, bias: Value, has: &[&str], expected: (bool, bool)| {
        let config =
            changed(&json!({"architectures": [name], "attention_bias": bias, "num_key_value_heads": 4}));
        let has_tensor = |name: &str| !name.ends_with(".bias") || has.contains(&name);
        let config = ModelConfig::from_hf(&config, None, has_tensor).unwrap();
        assert_eq!((config.qkv_bias, config.output_bias), expected, "{name}, {bias}, {has:?}");
        assert!(!config.mlp_bias);
        config.notices
    };
    let (qkv, output) = ("blk.0.attn_q.bias", "blk.0.attn_output.bias");
    check("LlamaForCausalLM", json!(true), &[qkv, output], (true, true));
    check("LlamaForCausalLM", json!(true), &[qkv], (true, false));
    check("LlamaForCausalLM", json!(false), &[], (false, false));
    check("Qwen3ForCausalLM", json!(true), &[qkv, output], (true, true));
    assert!(check("Qwen2ForCausalLM", json!(true), &[qkv], (true, false)).is_empty());
    let notices = check("MistralForCausalLM", json!(true), &[], (false, false));
    assert!(notices[0].contains("attention_bias = true"), "{notices:?}");
}

#[test]
fn feed_forward_networks_have_biases_if_they_are_switched_on_and_there() {
    let check = |name: &str, bias: Value, has_tensors: bool, expected: (bool, Option<&str>)| {
        let config = changed(&json!({"architectures": [name], "mlp_bias": bias, "num_key_value_heads": 4}));
        let has_tensor = |name: &str| has_tensors || !name.ends_with(".bias");
        let config = ModelConfig::from_hf(&config, None, has_tensor).unwrap();
        let notice = config.notices.first().map(String::as_str).unwrap_or_default();
        assert_eq!(
            (config.mlp_bias, notice.is_empty()),
            (expected.0, expected.1.is_none()),
            "{name}, {bias}"
        );
        assert!(notice.contains(expected.1.unwrap_or_default()), "{notice}");
    };
    check("LlamaForCausalLM", json!(true), true, (true, None));
    check("LlamaForCausalLM", json!(false), true, (false, None));
    check("LlamaForCausalLM", json!(true), false, (false, Some("the weights have no blk.0.ffn_up.bias")));
    check("MistralForCausalLM", json!(true), true, (false, Some("does not apply to MistralForCausalLM")));
    let config =
        ModelConfig::from_gguf(&metadata(&[]), |name| (name == "blk.0.ffn_up.bias").then_some(&[128]));
    assert!(config.unwrap().mlp_bias);
}

/// Metadata of a small valid file of arch `llama`, with entries replaced.
fn metadata(changes: &[(&str, Option<gguf::Value>)]) -> Metadata {
    let mut metadata = Metadata::default();
    let number = gguf::Value::Unsigned;
    for (key, value) in [
        ("general.architecture", gguf::Value::String("llama".into())),
        ("llama.block_count", number(3)),
        ("llama.context_length", number(512)),
        ("llama.embedding_length", number(64)),
        ("llama.feed_forward_length", number(128)),
        ("llama.attention.head_count", number(4)),
        ("llama.attention.layer_norm_rms_epsilon", gguf::Value::Float(1e-5)),
        ("llama.vocab_size", number(288)),
    ] {
        metadata.entries.insert(key.into(), value);
    }
    for (key, value) in changes {
        match value {
            Some(value) => metadata.entries.insert((*key).into(), value.clone()),
            None => metadata.entries.remove(*key),
        };
    }
    metadata
}

#[test]
fn gguf_metadata_has_defaults_and_all_widths_of_integers() {
    let config = ModelConfig::from_gguf(&metadata(&[]), |_| None).unwrap();
    assert_eq!((config.num_kv_heads, config.head_dim, config.vocab_size), (4, 16, 288));
    assert_eq!(config.rope.style, RopeStyle::Interleaved);
    assert_eq!(config.rope.scaling, RopeScaling::None);
    assert!(config.tie_word_embeddings);

    let changes = [
        ("llama.attention.head_count_kv", Some(gguf::Value::Integers(vec![2, 2, 2]))),
        ("llama.attention.key_length", Some(gguf::Value::Signed(24))),
        ("llama.attention.value_length", Some(gguf::Value::Unsigned(24))),
        ("llama.rope.dimension_count", Some(gguf::Value::Unsigned(24))),
        ("llama.rope.freq_base", Some(gguf::Value::Float(5e5))),
        ("tokenizer.ggml.tokens", Some(gguf::Value::Strings(vec!["a".into(); 300]))),
        ("tokenizer.ggml.eos_token_id", Some(gguf::Value::Unsigned(2))),
    ];
    let config =
        ModelConfig::from_gguf(&metadata(&changes), |name| (name == "rope_freqs.weight").then_some(&[12]))
            .unwrap();
    assert_eq!((config.num_kv_heads, config.head_dim, config.vocab_size), (2, 24, 300));
    assert_eq!(config.rope.theta, 5e5);
    assert_eq!(config.rope.scaling, RopeScaling::FreqFactors(Box::new(RopeScaling::None)));
    assert_eq!(config.eos_token_ids, [2]);
}

#[test]
fn no_token_has_several_spellings_in_gguf() {
    for none in [gguf::Value::Signed(-1), gguf::Value::Unsigned(u64::from(u32::MAX))] {
        let changes = [
            ("tokenizer.ggml.bos_token_id", Some(none.clone())),
            ("tokenizer.ggml.eos_token_id", Some(none)),
        ];
        let config = ModelConfig::from_gguf(&metadata(&changes), |_| None).unwrap();
        assert_eq!((config.bos_token_id, config.eos_token_ids), (None, vec![]));
    }
}

#[test]
fn gguf_rope_scaling_is_named_or_follows_from_a_factor() {
    let read = |changes: &[(&str, Option<gguf::Value>)]| {
        ModelConfig::from_gguf(&metadata(changes), |_| None).map(|config| config.rope.scaling)
    };
    let kind = |name: &str| ("llama.rope.scaling.type", Some(gguf::Value::String(name.into())));
    let factor = ("llama.rope.scaling.factor", Some(gguf::Value::Float(4.0)));
    assert_eq!(read(&[kind("none"), factor.clone()]).unwrap(), RopeScaling::None);
    assert_eq!(read(std::slice::from_ref(&factor)).unwrap(), RopeScaling::Linear { factor: 4.0 });
    assert_eq!(read(&[kind("linear"), factor.clone()]).unwrap(), RopeScaling::Linear { factor: 4.0 });
    let expected = RopeScaling::Yarn {
        factor: 4.0,
        original_context: 512,
        beta_fast: 32.0,
        beta_slow: 1.0,
        attention_factor: 0.1 * 4.0_f64.ln() + 1.0,
        truncate: true,
    };
    assert_eq!(read(&[kind("yarn"), factor.clone()]).unwrap(), expected);
    let config = ModelConfig::from_gguf(&metadata(&[kind("yarn"), factor.clone()]), |_| None).unwrap();
    assert_eq!(config.max_position_embeddings, 2048);
    assert!(read(&[kind("yarn")]).unwrap_err().message().contains("rope.scaling.factor is missing"));
    let error = read(&[kind("longrope"), factor.clone()]).unwrap_err();
    assert!(error.message().contains("no rope_factors_short.weight"), "{error}");
    let error = read(&[kind("ntk"), factor]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    let changes = [
        kind("longrope"),
        ("llama.rope.scaling.attn_factor", Some(gguf::Value::Float(1.25))),
        ("llama.rope.scaling.original_context_length", Some(gguf::Value::Unsigned(128))),
    ];
    let has = |name: &str| name.starts_with("rope_factors_").then_some(&[8][..]);
    let config = ModelConfig::from_gguf(&metadata(&changes), has).unwrap();
    let expected = RopeScaling::Long { divisors: None, original_context: 128, attention_factor: 1.25 };
    assert_eq!(config.rope.scaling, expected);
    assert_eq!((config.usual_model_len, config.max_position_embeddings), (128, 512));
}

#[test]
fn gguf_mistakes_name_the_key() {
    let number = |value| Some(gguf::Value::Unsigned(value));
    for (kind, key, value, expected) in [
        (
            ErrorKind::Unsupported,
            "general.architecture",
            Some(gguf::Value::String("rwkv".into())),
            "\"rwkv\"",
        ),
        (ErrorKind::InvalidModel, "general.architecture", None, "general.architecture is missing"),
        (ErrorKind::InvalidModel, "llama.block_count", None, "llama.block_count is missing"),
        (ErrorKind::InvalidModel, "llama.attention.head_count", number(0), "num_attention_heads is 0"),
        (ErrorKind::InvalidModel, "llama.attention.head_count_kv", number(3), "not a multiple"),
        (
            ErrorKind::InvalidModel,
            "tokenizer.ggml.eos_token_id",
            Some(gguf::Value::String("2".into())),
            "tokenizer.ggml.eos_token_id is the text \"2\", expected a token id",
        ),
        (
            ErrorKind::InvalidModel,
            "llama.embedding_length",
            Some(gguf::Value::String("x".into())),
            "llama.embedding_length",
        ),
        (
            ErrorKind::Unsupported,
            "llama.feed_forward_length",
            Some(gguf::Value::Integers(vec![1, 2, 3])),
            "llama.feed_forward_length differs between layers",
        ),
        (ErrorKind::InvalidModel, "llama.expert_count", number(8), "llama.expert_used_count is missing"),
        (
            ErrorKind::Unsupported,
            "llama.attention.kv_lora_rank",
            number(512),
            "llama.attention.kv_lora_rank = 512",
        ),
        (ErrorKind::Unsupported, "llama.attention.value_length", number(8), "value_length is 8"),
        (ErrorKind::Unsupported, "llama.logit_scale", Some(gguf::Value::Float(0.5)), "logit_scale = 0.5"),
    ] {
        let error = ModelConfig::from_gguf(&metadata(&[(key, value)]), |_| None).unwrap_err();
        assert_eq!(error.kind(), kind, "{key}: {error}");
        assert!(error.message().contains(expected), "{key}: {error}");
    }
}
