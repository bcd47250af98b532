//! Experts: how they are counted, chosen and weighed in files of either format.

use super::latent::{
    File, deepseek_v2_lite, deepseek_v2_lite_gguf, from_hf, glm_flash, glm_flash_gguf, with,
};
use super::*;
use crate::config::QkNorm;

fn qwen3_moe() -> Value {
    json!({
        "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false, "decoder_sparse_step": 1,
        "head_dim": 128, "hidden_size": 2048, "intermediate_size": 6144,
        "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [],
        "moe_intermediate_size": 768, "norm_topk_prob": true, "num_attention_heads": 32,
        "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
        "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "sliding_window": null,
        "tie_word_embeddings": false, "use_sliding_window": false, "vocab_size": 151936,
    })
}

fn mixtral() -> Value {
    json!({
        "architectures": ["MixtralForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "num_attention_heads": 32, "num_experts_per_tok": 2,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8,
        "rms_norm_eps": 1e-5, "rope_theta": 1e6, "router_aux_loss_coef": 0.02, "sliding_window": null,
        "tie_word_embeddings": false, "vocab_size": 32000,
    })
}

/// A GGUF file of a model with grouped-query attention.
fn grouped(arch: &'static str) -> File {
    File::new(
        arch,
        &[
            ("block_count", 32.0),
            ("context_length", 32768.0),
            ("embedding_length", 4096.0),
            ("feed_forward_length", 14336.0),
            ("vocab_size", 32000.0),
            ("attention.head_count", 32.0),
            ("attention.head_count_kv", 8.0),
            ("attention.layer_norm_rms_epsilon", 1e-5),
            ("expert_count", 8.0),
            ("expert_used_count", 2.0),
        ],
    )
}

fn experts(config: Result<ModelConfig>) -> ExpertsConfig {
    config.unwrap().experts.unwrap()
}

/// Common keys of Qwen 3 MoE and Mixtral.
fn simple(num_experts: usize, num_experts_per_tok: usize, intermediate_size: usize) -> ExpertsConfig {
    ExpertsConfig {
        num_dense_layers: 0,
        num_experts,
        num_experts_per_tok,
        intermediate_size,
        shared_intermediate_size: None,
        scoring: Scoring::Softmax,
        has_selection_bias: false,
        has_router_bias: false,
        has_biases: false,
        is_interleaved: false,
        num_groups: 1,
        num_groups_per_tok: 1,
        normalize: true,
        scale: 1.0,
    }
}

/// Tensors of a folder without biases of routers.
fn no_bias(name: &str) -> bool {
    !name.contains("exp_probs_b")
}

#[test]
fn models_with_grouped_query_attention_may_have_experts() {
    let config = ModelConfig::from_hf(&qwen3_moe(), None, no_bias).unwrap();
    assert!(config.architecture.qk_norm == QkNorm::Heads && config.latent_attention.is_none());
    assert_eq!((config.num_kv_heads, config.head_dim), (4, 128));
    assert_eq!(config.rope.style, RopeStyle::HalfSplit);
    assert_eq!(config.experts, Some(simple(128, 8, 768)));
    // The class's defaults for missing keys.
    let silent = with(qwen3_moe(), &json!({"norm_topk_prob": null}));
    assert!(!experts(from_hf(&silent)).normalize);

    let config = ModelConfig::from_hf(&mixtral(), None, no_bias).unwrap();
    assert_eq!(config.experts, Some(simple(8, 2, 14336)));
}

#[test]
fn experts_make_an_architecture_of_a_name_in_gguf() {
    let config = grouped("llama").read().unwrap();
    assert_eq!(config.architecture.hf_name, "MixtralForCausalLM");
    assert_eq!(config.rope.style, RopeStyle::Interleaved);
    assert_eq!(config.experts, Some(simple(8, 2, 14336)));
    let dense = grouped("llama").numbers(&[("expert_count", 0.0), ("expert_used_count", 0.0)]);
    let config = dense.read().unwrap();
    assert_eq!((config.architecture.hf_name, config.experts), ("LlamaForCausalLM", None));

    let config = grouped("qwen3moe").numbers(&[("expert_feed_forward_length", 768.0)]).read().unwrap();
    assert_eq!(config.architecture.hf_name, "Qwen3MoeForCausalLM");
    assert_eq!((config.rope.style, config.experts), (RopeStyle::HalfSplit, Some(simple(8, 2, 768))));

    grouped("qwen3moe")
        .without("expert_count")
        .refused(ErrorKind::InvalidModel, "qwen3moe.expert_count is missing");
    grouped("qwen2").refused(ErrorKind::Unsupported, "qwen2.expert_count = 8");
    grouped("llama")
        .numbers(&[("attention.kv_lora_rank", 512.0)])
        .refused(ErrorKind::Unsupported, "llama.attention.kv_lora_rank = 512");
}

#[test]
fn probabilities_are_named_or_follow_from_the_bias() {
    let scoring = |file: File| experts(file.read()).scoring;
    let bias = "blk.1.exp_probs_b.bias";
    assert_eq!(scoring(glm_flash_gguf()), Scoring::Sigmoid);
    assert_eq!(scoring(glm_flash_gguf().no_tensor(bias)), Scoring::Softmax);
    assert_eq!(scoring(glm_flash_gguf().numbers(&[("expert_gating_func", 0.0)])), Scoring::Sigmoid);
    assert_eq!(scoring(glm_flash_gguf().numbers(&[("expert_gating_func", 1.0)])), Scoring::Softmax);
    let named = glm_flash_gguf().no_tensor(bias).numbers(&[("expert_gating_func", 2.0)]);
    assert_eq!(scoring(named.clone()), Scoring::Sigmoid);
    assert!(!experts(named.read()).has_selection_bias);
    glm_flash_gguf()
        .numbers(&[("expert_gating_func", 3.0)])
        .refused(ErrorKind::Unsupported, "deepseek2.expert_gating_func = 3");

    // The defaults of the classes.
    let read = |config: Value, changes: Value| experts(from_hf(&with(config, &changes)));
    let silent = json!({"scoring_func": null, "topk_method": null, "norm_topk_prob": null});
    let glm = read(glm_flash(), silent.clone());
    assert_eq!((glm.scoring, glm.has_selection_bias, glm.normalize), (Scoring::Sigmoid, true, true));
    let deepseek = with(deepseek_v2_lite(), &silent);
    let deepseek = experts(ModelConfig::from_hf(&deepseek, None, no_bias));
    assert_eq!(
        (deepseek.scoring, deepseek.has_selection_bias, deepseek.normalize),
        (Scoring::Softmax, false, false)
    );
}

#[test]
fn weights_are_scaled_only_if_there_is_a_factor() {
    let scale = |file: File| experts(file.read()).scale;
    assert_eq!(scale(glm_flash_gguf()), 1.8);
    assert_eq!(scale(glm_flash_gguf().numbers(&[("expert_weights_scale", 0.0)])), 1.0);
    assert_eq!(scale(glm_flash_gguf().without("expert_weights_scale")), 1.0);
    assert!(!experts(glm_flash_gguf().without("expert_weights_norm").read()).normalize);
}

#[test]
fn the_first_layers_may_be_dense_in_several_spellings() {
    let read = |changes: Value| from_hf(&with(glm_flash(), &changes));
    let kinds = |num_dense: usize| {
        let mut kinds = vec!["dense"; num_dense];
        kinds.resize(47, "sparse");
        kinds
    };
    let dense = |changes: Value| experts(read(changes)).num_dense_layers;
    assert_eq!(dense(json!({"first_k_dense_replace": 3})), 3);
    assert_eq!(dense(json!({"first_k_dense_replace": null, "mlp_layer_types": kinds(2)})), 2);
    assert_eq!(dense(json!({"mlp_layer_types": kinds(1)})), 1);
    let listed = with(qwen3_moe(), &json!({"mlp_only_layers": [1, 0]}));
    assert_eq!(experts(from_hf(&listed)).num_dense_layers, 2);
    // Neither: the tensors.
    let silent = with(glm_flash(), &json!({"first_k_dense_replace": null}));
    let config = ModelConfig::from_hf(&silent, None, |name| {
        ["blk.4.ffn_gate_inp.weight", "output.weight"].contains(&name)
    });
    assert_eq!(experts(config).num_dense_layers, 4);
    let error = ModelConfig::from_hf(&silent, None, |name| name == "output.weight").unwrap_err();
    assert!(error.message().contains("all routers are missing"), "{error}");

    assert_eq!(read(json!({"first_k_dense_replace": 47})).unwrap().experts, None);
    assert_eq!(read(json!({"n_routed_experts": null})).unwrap().experts, None);
    let all_dense = deepseek_v2_lite_gguf().numbers(&[("leading_dense_block_count", 27.0)]);
    assert_eq!(all_dense.read().unwrap().experts, None);

    let mut mixed = kinds(1);
    mixed[5] = "dense";
    for (changes, expected) in [
        (json!({"mlp_layer_types": kinds(2)}), "first_k_dense_replace is 1"),
        (json!({"mlp_layer_types": ["dense", "sparse"]}), "2 entries for 47 layers"),
        (json!({"mlp_layer_types": mixed}), "\"dense\" after 1 dense layers"),
        (json!({"mlp_layer_types": "sparse"}), "not a list"),
    ] {
        let error = read(changes).unwrap_err();
        assert!(error.message().contains(expected), "{error}");
    }
}

#[test]
fn groups_limit_the_choice_where_the_method_has_them() {
    let read = |config: Value, changes: Value| from_hf(&with(config, &changes));
    let groups = |config: Result<ModelConfig>| {
        let experts = experts(config);
        (experts.num_groups, experts.num_groups_per_tok)
    };
    let grouped = json!({"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3});
    assert_eq!(groups(read(deepseek_v2_lite(), grouped)), (8, 3));
    assert_eq!(groups(read(deepseek_v2_lite(), json!({"n_group": 8, "topk_group": 3}))), (1, 1));
    assert_eq!(groups(read(glm_flash(), json!({"n_group": 8, "topk_group": 4}))), (8, 4));
    let file = deepseek_v2_lite_gguf().numbers(&[("expert_group_count", 8.0)]);
    let file_limited = file.clone().numbers(&[("expert_group_used_count", 4.0)]);
    assert_eq!(groups(file_limited.read()), (8, 4));
    file.refused(ErrorKind::InvalidModel, "expert_group_used_count is missing");

    for (config, changes, expected) in [
        (
            deepseek_v2_lite(),
            json!({"topk_method": "noaux_tc", "n_group": 8, "topk_group": 3}),
            "topk_method = \"noaux_tc\" with groups",
        ),
        (
            glm_flash(),
            json!({"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3}),
            "topk_method = \"group_limited_greedy\" with groups",
        ),
        (glm_flash(), json!({"n_group": 5, "topk_group": 2}), "64 experts cannot be divided into 5 groups"),
        (glm_flash(), json!({"n_group": 4, "topk_group": 5}), "the number of groups of a token is 5"),
        (glm_flash(), json!({"n_group": 32, "topk_group": 1}), "chooses 4 experts from 1 groups of 2"),
        (glm_flash(), json!({"n_group": 64, "topk_group": 4}), "best two, but have 1 each"),
    ] {
        let error = read(config, changes).unwrap_err();
        assert!(error.message().contains(expected), "{error}");
    }
}

#[test]
fn experts_that_cannot_be_computed_are_refused() {
    let check = |kind: ErrorKind, config: Value, changes: Value, expected: &str| {
        let error = from_hf(&with(config, &changes)).unwrap_err();
        assert_eq!(error.kind(), kind, "{changes}: {error}");
        assert!(error.message().contains(expected), "{changes}: {error}");
    };
    for (config, changes, expected) in [
        (qwen3_moe(), json!({"decoder_sparse_step": 2}), "decoder_sparse_step = 2"),
        (qwen3_moe(), json!({"mlp_only_layers": [0, 2]}), "2 layers without experts (mlp_only_layers)"),
        (
            qwen3_moe(),
            json!({"shared_expert_intermediate_size": 512}),
            "shared_expert_intermediate_size = 512",
        ),
        (deepseek_v2_lite(), json!({"moe_layer_freq": 2}), "moe_layer_freq = 2"),
        (deepseek_v2_lite(), json!({"topk_method": "random"}), "topk_method = \"random\""),
        (deepseek_v2_lite(), json!({"scoring_func": "tanh"}), "scoring_func = \"tanh\""),
        (
            deepseek_v2_lite(),
            json!({"norm_topk_prob": true, "routed_scaling_factor": 16.0}),
            "norm_topk_prob = true with routed_scaling_factor = 16",
        ),
        (base(), json!({"num_experts": 8}), "num_experts = 8"),
        (base(), json!({"n_routed_experts": 8}), "n_routed_experts = 8"),
        (mixtral(), json!({"kv_lora_rank": 512}), "kv_lora_rank = 512"),
    ] {
        check(ErrorKind::Unsupported, config, changes, expected);
    }
    for (config, changes, expected) in [
        (mixtral(), json!({"num_local_experts": 0}), "the number of experts is missing"),
        (mixtral(), json!({"num_local_experts": 1025}), "the number of experts is 1025"),
        (deepseek_v2_lite(), json!({"num_experts_per_tok": null}), "num_experts_per_tok is missing"),
        (mixtral(), json!({"num_experts_per_tok": 9}), "num_experts_per_tok is 9"),
        (mixtral(), json!({"num_experts_per_tok": 0}), "num_experts_per_tok is 0"),
        (qwen3_moe(), json!({"moe_intermediate_size": 0}), "the width of experts is 0"),
        (
            deepseek_v2_lite(),
            json!({"n_shared_experts": u64::MAX}),
            "the width of shared experts is 18446744073709551615",
        ),
        (glm_flash(), json!({"routed_scaling_factor": -1}), "the factor on the weights of experts is -1"),
    ] {
        check(ErrorKind::InvalidModel, config, changes, expected);
    }
}
