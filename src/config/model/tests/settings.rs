//! The defaults of transformers 5's classes for a `config.json`: missing keys, and repeated ones. The values were read
//! off `AutoConfig.from_pretrained` of transformers 5.24.

use super::*;

/// The base as a model of another class. No tensors are there but those without which a model is none.
fn of_class(name: &str, changes: &Value) -> Result<ModelConfig> {
    let mut config = changed(changes);
    config["architectures"] = json!([name]);
    let absent = ["bias", "attn_q_a", "attn_kv_a_mqa", "ffn_gate_inp"];
    ModelConfig::from_hf(&config, None, |name| !absent.iter().any(|part| name.contains(part)))
}

#[test]
fn what_is_missing_is_as_in_the_class_of_the_architecture() {
    let check = |name: &str, context: usize, eps: f32, theta: f64, kv: Option<usize>, head_dim: usize| {
        let mut changes = json!({"num_attention_heads": 32, "hidden_size": 1024});
        changes["num_hidden_layers"] = json!(30);
        let mut config = changed(&changes);
        config.as_object_mut().unwrap().remove("max_position_embeddings");
        config["architectures"] = json!([name]);
        if name.starts_with("Deepseek") {
            config["num_experts_per_tok"] = json!(6);
        }
        let config = ModelConfig::from_hf(&config, None, |name| !name.contains("attn_q_a")).unwrap();
        let rope = &config.rope;
        assert_eq!(
            (config.max_position_embeddings, config.rms_norm_eps, rope.theta),
            (context, eps, theta),
            "{name}"
        );
        match kv {
            Some(kv) => assert_eq!((config.num_kv_heads, config.head_dim), (kv, head_dim), "{name}"),
            None => assert_eq!(config.head_dim, head_dim, "{name}"),
        }
        config
    };
    check("LlamaForCausalLM", 2_048, 1e-6, 1e4, Some(32), 32);
    let mistral = check("MistralForCausalLM", 131_072, 1e-6, 1e4, Some(8), 32);
    assert_eq!(mistral.longest_window(), Some(4_096));
    let mixtral = check("MixtralForCausalLM", 131_072, 1e-5, 1e6, Some(8), 32);
    let experts = mixtral.experts.as_ref().unwrap();
    assert_eq!((experts.num_experts, experts.num_experts_per_tok, experts.intermediate_size), (8, 2, 128));
    assert_eq!((mixtral.longest_window(), experts.normalize), (None, true));
    check("Qwen2ForCausalLM", 32_768, 1e-6, 1e4, Some(32), 32);
    check("Qwen3ForCausalLM", 32_768, 1e-6, 1e4, Some(32), 128);
    let qwen = check("Qwen3MoeForCausalLM", 32_768, 1e-6, 1e4, Some(4), 32);
    let experts = qwen.experts.unwrap();
    assert_eq!((experts.num_experts, experts.num_experts_per_tok, experts.intermediate_size), (128, 8, 768));
    assert!(!experts.normalize);
    let deepseek = check("DeepseekV2ForCausalLM", 2_048, 1e-6, 1e4, None, 192);
    let experts = deepseek.experts.unwrap();
    assert_eq!((experts.num_experts, experts.shared_intermediate_size), (64, Some(2 * 1_407)));
    assert_eq!(deepseek.latent_attention.unwrap().v_head_dim, 128);
    check("YoutuForCausalLM", 131_072, 1e-6, 1e4, None, 192);
    let glm = check("Glm4MoeLiteForCausalLM", 202_752, 1e-5, 1e4, None, 256);
    let (latent, experts) = (glm.latent_attention.unwrap(), glm.experts.unwrap());
    assert_eq!((latent.kv_lora_rank, latent.v_head_dim, experts.scale), (512, 256, 1.8));
    assert_eq!((experts.num_experts, experts.num_experts_per_tok), (64, 4));
}

#[test]
fn null_is_not_the_same_as_missing() {
    let config = of_class("MistralForCausalLM", &json!({"num_key_value_heads": 2})).unwrap();
    assert_eq!(config.longest_window(), Some(4_096));
    let mut config = changed(&json!({"num_key_value_heads": 2}));
    config["architectures"] = json!(["MistralForCausalLM"]);
    config["sliding_window"] = Value::Null;
    assert_eq!(ModelConfig::from_hf(&config, None, |_| true).unwrap().longest_window(), None);
    config["num_key_value_heads"] = Value::Null;
    assert_eq!(ModelConfig::from_hf(&config, None, |_| true).unwrap().num_kv_heads, 4);
}

#[test]
fn a_sliding_window_counts_where_the_class_has_it() {
    let check = |name: &str, mut changes: Value, expected: Option<usize>, context: usize| {
        changes["num_key_value_heads"] = json!(2);
        let config = of_class(name, &changes).unwrap();
        assert_eq!(
            (config.longest_window(), config.max_position_embeddings),
            (expected, context),
            "{name} {changes}"
        );
        config
    };
    let kinds = |text: &str| -> Value {
        let kind = |letter| if letter == 's' { "sliding_attention" } else { "full_attention" };
        text.chars().map(kind).collect::<Vec<_>>().into()
    };
    let (mistral, qwen) = ("MistralForCausalLM", "Qwen2ForCausalLM");
    check(mistral, json!({"sliding_window": 256}), Some(256), 512);
    check(mistral, json!({"sliding_window": 256, "use_sliding_window": false}), None, 512);
    check(mistral, json!({"sliding_window": 256, "layer_types": kinds("fff")}), None, 512);
    check(mistral, json!({"sliding_window": 256, "layer_types": kinds("sss")}), Some(256), 512);
    for name in [qwen, "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"] {
        let has_experts = name == "Qwen3MoeForCausalLM";
        let with = |mut changes: Value| {
            if has_experts {
                changes["first_k_dense_replace"] = json!(0);
                changes["num_experts"] = json!(8);
            }
            changes
        };
        check(name, with(json!({})), None, 512);
        check(name, with(json!({"sliding_window": 8})), None, 512);
        check(name, with(json!({"sliding_window": 8, "use_sliding_window": false})), None, 512);
        let on = json!({"sliding_window": 8, "use_sliding_window": true, "max_window_layers": 0});
        check(name, with(on), Some(8), 512);
    }
    check(qwen, json!({"sliding_window": 8, "use_sliding_window": true}), None, 512);
    check(qwen, json!({"sliding_window": 8, "layer_types": kinds("sss")}), None, 512);
    check(qwen, json!({"use_sliding_window": true, "max_window_layers": 0}), Some(4_096), 512);
    let windows = |config: ModelConfig| -> Vec<Option<usize>> {
        config.layer_attention.iter().map(|layer| layer.window).collect()
    };
    let on = json!({"sliding_window": 100, "use_sliding_window": true, "max_window_layers": 2});
    assert_eq!(windows(check(qwen, on, None, 512)), [None, None, Some(100)]);
    let some = json!({"sliding_window": 100, "layer_types": kinds("sfs")});
    assert_eq!(windows(check(mistral, some, None, 512)), [Some(100), None, Some(100)]);
    let config = check("LlamaForCausalLM", json!({"sliding_window": 8}), None, 512);
    assert!(config.notices[0].contains("sliding_window = 8"), "{:?}", config.notices);
}

#[test]
fn of_two_spellings_of_the_rope_the_one_that_transformers_takes_counts() {
    let yarn = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64});
    let plain = json!({"rope_type": "default", "rope_theta": 1e6});
    let linear = json!({"type": "linear", "factor": 2.0, "rope_theta": 3e5});
    let check = |changes: Value, theta: f64, kind: &str, num_notices: usize| {
        let config = of_class("Qwen3ForCausalLM", &with_heads(&changes)).unwrap();
        let found = match config.rope.scaling {
            RopeScaling::None => "default",
            RopeScaling::Linear { .. } => "linear",
            RopeScaling::Yarn { .. } => "yarn",
            _ => "other",
        };
        assert_eq!((config.rope.theta, found), (theta, kind), "{changes}");
        assert_eq!(config.notices.len(), num_notices, "{changes}: {:?}", config.notices);
        config.notices
    };
    check(json!({"rope_parameters": plain}), 1e6, "default", 0);
    check(json!({"rope_parameters": plain, "rope_scaling": null}), 1e6, "default", 0);
    check(json!({"rope_parameters": plain, "rope_scaling": {}}), 1e6, "default", 0);
    check(json!({"rope_parameters": plain, "rope_theta": 7e5}), 1e6, "default", 0);
    check(json!({"rope_parameters": {"rope_type": "default"}, "rope_theta": 7e5}), 7e5, "default", 0);
    check(json!({"rope_scaling": yarn, "rope_theta": 7e5}), 7e5, "yarn", 0);
    let notices = check(json!({"rope_parameters": plain, "rope_scaling": yarn}), 1e4, "yarn", 1);
    assert!(notices[0].contains("rope_scaling is used") && notices[0].contains("rope_theta"), "{notices:?}");
    let notices =
        check(json!({"rope_parameters": plain, "rope_scaling": yarn, "rope_theta": 7e5}), 7e5, "yarn", 1);
    assert!(!notices[0].contains("rope_theta is"), "{notices:?}");
    check(json!({"rope_parameters": yarn, "rope_scaling": {"rope_type": "default"}}), 1e4, "default", 1);
    check(json!({"rope_parameters": yarn, "rope_scaling": linear}), 3e5, "linear", 1);
    check(json!({"rope_parameters": linear, "rope_scaling": linear}), 3e5, "linear", 0);
    check(json!({"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}}), 1e4, "yarn", 0);
    check(json!({"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}), 1e4, "default", 0);
    let of_layers = json!({"full_attention": plain, "sliding_attention": linear});
    check(json!({"rope_parameters": of_layers}), 1e6, "default", 0);
}

/// Matching numbers of heads, for every default of the class.
fn with_heads(changes: &Value) -> Value {
    let mut changes = changes.clone();
    changes["num_key_value_heads"] = json!(4);
    changes["head_dim"] = json!(16);
    changes
}

#[test]
fn a_scaling_makes_longer_sequences_possible() {
    let check = |rope: Value, context: usize, expected: (usize, usize)| {
        let changes = json!({"rope_scaling": rope, "max_position_embeddings": context});
        let config = read(&changes).unwrap();
        assert_eq!((config.usual_model_len, config.max_position_embeddings), expected, "{changes}");
        config
    };
    let yarn = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64});
    check(yarn.clone(), 64, (256, 256));
    check(yarn.clone(), 256, (256, 256));
    check(yarn, 512, (512, 512));
    check(json!({"type": "yarn", "factor": 4.0}), 64, (256, 256));
    check(json!({"type": "linear", "factor": 2}), 64, (128, 128));
    let llama3 = json!({
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    });
    check(llama3, 131_072, (131_072, 131_072));
    let config = check(json!({"type": "dynamic", "factor": 2.0}), 64, (64, 64));
    assert!(config.context_hint.unwrap().contains("dynamic") && config.notices[0].contains("64 tokens"));
    // In heads of 16 values there are 8 pairs.
    let long = json!({
        "type": "longrope", "short_factor": vec![1.0; 8], "long_factor": vec![2.0; 8],
        "original_max_position_embeddings": 64,
    });
    let config = check(long, 256, (64, 256));
    assert!(config.notices[0].contains("--max-model-len"), "{:?}", config.notices);
    let expected = (1.0 + 4.0_f64.ln() / 64.0_f64.ln()).sqrt();
    match config.rope.scaling {
        RopeScaling::Long { divisors: Some((short, long)), original_context: 64, attention_factor } => {
            assert_eq!((short, long, attention_factor), (vec![1.0; 8], vec![2.0; 8], expected));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn numbers_of_yarn_may_be_missing_null_or_next_to_it() {
    let check = |changes: Value, factor: f64, original_context: usize, truncate: bool| {
        let scaling = RopeScaling::Yarn {
            factor,
            original_context,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention_factor: 1.5,
            truncate,
        };
        assert_eq!(read(&changes).unwrap().rope.scaling, scaling, "{changes}");
    };
    let yarn = |changes: Value| {
        let mut yarn = json!({"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5});
        for (key, value) in changes.as_object().unwrap() {
            yarn[key] = value.clone();
        }
        yarn
    };
    check(json!({"rope_scaling": yarn(json!({}))}), 4.0, 512, true);
    check(json!({"rope_scaling": yarn(json!({"beta_fast": 0, "beta_slow": null}))}), 4.0, 512, true);
    check(json!({"rope_scaling": yarn(json!({"truncate": false}))}), 4.0, 512, false);
    let null_factor = yarn(json!({"factor": null, "original_max_position_embeddings": 256}));
    check(json!({"rope_scaling": null_factor}), 2.0, 256, true);
    let beside = yarn(json!({"original_max_position_embeddings": 256}));
    check(json!({"rope_scaling": beside, "original_max_position_embeddings": 128}), 4.0, 128, true);
}

#[test]
fn the_class_is_known_by_several_names() {
    let check = |changes: Value, expected: &str| {
        let mut config = changed(&changes);
        config["num_key_value_heads"] = json!(4);
        let config = ModelConfig::from_hf(&config, None, |_| true).unwrap();
        assert_eq!(config.architecture.hf_name, expected, "{changes}");
    };
    check(json!({"architectures": null, "model_type": "qwen3"}), "Qwen3ForCausalLM");
    check(json!({"architectures": [], "model_type": "mistral"}), "MistralForCausalLM");
    check(json!({"architectures": "Qwen2ForCausalLM"}), "Qwen2ForCausalLM");
    check(json!({"architectures": ["LLaMAForCausalLM"]}), "LlamaForCausalLM");
    check(json!({"architectures": ["Qwen3Model"], "model_type": "qwen3"}), "Qwen3ForCausalLM");
    check(json!({"architectures": ["Other", "Qwen3ForCausalLM"]}), "Qwen3ForCausalLM");
    // The class decides, for every type.
    check(json!({"architectures": ["LlamaForCausalLM"], "model_type": "deepseek_v2"}), "LlamaForCausalLM");
    for architecture in &ARCHITECTURES {
        for model_type in architecture.hf_model_types {
            assert_eq!(Architecture::from_model_type(model_type).unwrap(), architecture);
        }
    }
    for changes in [
        json!({"architectures": null, "model_type": "mamba"}),
        json!({"architectures": ["LlamaForSequenceClassification"], "model_type": "llama"}),
    ] {
        let error = read(&changes).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.hint().unwrap().contains("supported are"), "{error:?}");
    }
    let error = read(&json!({"architectures": [7]})).unwrap_err();
    assert!(error.message().contains("architectures has 7"), "{error}");
}

#[test]
fn what_means_nothing_is_named_and_blocks_nothing() {
    let check = |changes: Value, expected: Option<&str>| {
        let notices = of_class("LlamaForCausalLM", &changes).unwrap().notices;
        let found = notices.first().map(String::as_str);
        assert_eq!(found.is_some(), expected.is_some(), "{changes}: {notices:?}");
        assert!(found.unwrap_or_default().contains(expected.unwrap_or_default()), "{changes}: {notices:?}");
    };
    for changes in [
        json!({"hidden_act": "SiLU"}),
        json!({"hidden_act": "silu", "hidden_activation": "gelu"}),
        json!({"final_logit_softcapping": false, "clip_qkv": 0}),
        json!({"num_experts": 0, "num_hidden_layers": 3.0}),
        json!({"attention_bias": 0, "mlp_bias": false}),
        json!({"rope_scaling": false}),
    ] {
        check(changes, None);
    }
    check(json!({"num_local_experts": 8}), Some("num_local_experts = 8"));
    check(json!({"kv_lora_rank": 512}), Some("kv_lora_rank = 512"));
    check(json!({"mlp_bias": true}), Some("mlp_bias = true"));
    check(json!({"rope_interleave": true}), Some("rope_interleave = true"));
    let config = of_class("Qwen3ForCausalLM", &with_heads(&json!({"use_qk_norm": true}))).unwrap();
    assert!(config.notices.is_empty(), "{:?}", config.notices);
}

#[test]
fn values_of_the_wrong_type_name_the_key() {
    let check = |changes: Value, expected: &str| {
        let error = read(&changes).unwrap_err();
        assert!(error.message().contains(expected), "{changes}: {error}");
        assert!(error.hint().is_some(), "{changes}");
    };
    check(json!({"rope_scaling": "yarn"}), "rope_scaling in config.json is \"yarn\", not an object");
    check(json!({"rope_scaling": {"rope_type": 3}}), "rope_type in rope_scaling is 3, not a string");
    check(json!({"rope_parameters": {"rope_theta": "1e6"}}), "rope_theta in rope_parameters is \"1e6\"");
    check(json!({"num_hidden_layers": 2.5}), "num_hidden_layers in config.json is 2.5");
    check(
        json!({"tie_word_embeddings": "no"}),
        "tie_word_embeddings in config.json is \"no\", not true or false",
    );
    check(json!({"clip_qkv": "x"}), "clip_qkv in config.json is \"x\"");
    check(json!({"bos_token_id": vec!["a".repeat(99)]}), "bos_token_id in config.json is [\"aaa");
}
