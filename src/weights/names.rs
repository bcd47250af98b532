//! Hugging Face tensor names to canonical ones, which are GGUF's.
//!
//! This file only renames. Where the two formats differ in the order of rows (the rotary projections of arch `llama`),
//! in the grouping of tensors (`kv_b_proj`, single experts), or in a norm whose name collides with another one's, the
//! tensor keeps its layout under a separate name, and the model handles it.

/// Tensors outside the layers.
const GLOBAL: [(&str, &str); 3] = [
    ("model.embed_tokens.weight", "token_embd.weight"),
    ("model.norm.weight", "output_norm.weight"),
    ("lm_head.weight", "output.weight"),
];

/// Modules of a layer, without the `.weight` or `.bias` at the end.
const LAYER: [(&str, &str); 37] = [
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("pre_feedforward_layernorm", "pre_ffw_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("self_attn.q_a_proj", "attn_q_a"),
    ("self_attn.q_a_layernorm", "attn_q_a_norm"),
    ("self_attn.q_b_proj", "attn_q_b"),
    ("self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa"),
    ("self_attn.kv_a_layernorm", "attn_kv_a_norm"),
    ("self_attn.kv_b_proj", "attn_kv_b"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("mlp.gate", "ffn_gate_inp"),
    ("block_sparse_moe.gate", "ffn_gate_inp"),
    ("mlp.router", "ffn_gate_inp"),
    ("mlp.shared_experts.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_experts.up_proj", "ffn_up_shexp"),
    ("mlp.shared_experts.down_proj", "ffn_down_shexp"),
    ("post_self_attn_layernorm", "post_attention_norm"),
    ("post_mlp_layernorm", "post_ffw_norm"),
    ("self_attn.qkv_proj", "attn_qkv"),
    // In GGUF files, too, gate and up together have the name of the second one.
    ("mlp.gate_up_proj", "ffn_up"),
    ("shared_mlp.input_linear", "ffn_up"),
    ("shared_mlp.output_linear", "ffn_down"),
    // Of blocks that predict further tokens.
    ("eh_proj", "nextn.eh_proj"),
    ("enorm", "nextn.enorm"),
    ("hnorm", "nextn.hnorm"),
    ("embed_tokens", "nextn.embed_tokens"),
    ("shared_head.head", "nextn.shared_head_head"),
    ("shared_head.norm", "nextn.shared_head_norm"),
];

/// The projections of expert `E`, with their prefix: `mlp.experts.E.gate_proj` is `ffn_gate.E`, as in GGUF files from
/// before experts were stacked. The second three are Mixtral's.
const EXPERT: [(&str, &str, &str); 6] = [
    ("mlp.experts", "gate_proj", "ffn_gate"),
    ("mlp.experts", "up_proj", "ffn_up"),
    ("mlp.experts", "down_proj", "ffn_down"),
    ("block_sparse_moe.experts", "w1", "ffn_gate"),
    ("block_sparse_moe.experts", "w3", "ffn_up"),
    ("block_sparse_moe.experts", "w2", "ffn_down"),
];

/// Tensors of a layer whose ending changes as well: a bias, scores without a value, and the experts of all where they are
/// stacked, with their biases.
const WHOLE: [(&str, &str); 6] = [
    ("mlp.gate.e_score_correction_bias", "exp_probs_b.bias"),
    ("mlp.experts.gate_up_proj", "ffn_gate_up_exps.weight"),
    ("mlp.experts.down_proj", "ffn_down_exps.weight"),
    ("mlp.experts.gate_up_proj_bias", "ffn_gate_up_exps.bias"),
    ("mlp.experts.down_proj_bias", "ffn_down_exps.bias"),
    ("self_attn.sinks", "attn_sinks.weight"),
];

/// The canonical name of a Hugging Face tensor, if it has one. The prefix `model.` may be missing, as in checkpoints
/// that were saved without the language-model head, and multimodal models have longer prefixes.
pub(super) fn canonical(name: &str) -> Option<String> {
    let name = ["language_model.", "model.language_model."]
        .iter()
        .find_map(|front| name.strip_prefix(front))
        .unwrap_or(name);
    let bare = |(theirs, ours): &(&str, &'static str)| {
        (name == *theirs || Some(name) == theirs.strip_prefix("model.")).then_some(*ours)
    };
    if let Some(ours) = GLOBAL.iter().find_map(bare) {
        return Some(ours.to_owned());
    }
    let (layer, rest) =
        name.strip_prefix("model.").unwrap_or(name).strip_prefix("layers.")?.split_once('.')?;
    let layer: u32 = layer.parse().ok()?;
    if let Some((_, ours)) = WHOLE.iter().find(|(theirs, _)| *theirs == rest) {
        return Some(format!("blk.{layer}.{ours}"));
    }
    let (module, ending) = rest.rsplit_once('.')?;
    if !matches!(ending, "weight" | "bias") {
        return None;
    }
    let expert_of = |(path, theirs, ours): &(&str, &str, &'static str)| {
        let (expert, projection) = module.strip_prefix(path)?.strip_prefix('.')?.split_once('.')?;
        (projection == *theirs).then_some((expert.parse::<u32>().ok()?, *ours))
    };
    if let Some((expert, ours)) = EXPERT.iter().find_map(expert_of) {
        return Some(format!("blk.{layer}.{ours}.{expert}.{ending}"));
    }
    let (_, ours) = LAYER.iter().find(|(theirs, _)| *theirs == module)?;
    Some(format!("blk.{layer}.{ours}.{ending}"))
}

/// The Hugging Face name of a canonical tensor, for messages about files that use those names; the most
/// usual one if models differ.
pub(super) fn hugging_face(name: &str) -> Option<String> {
    if let Some((theirs, _)) = GLOBAL.iter().find(|(_, ours)| *ours == name) {
        return Some((*theirs).to_owned());
    }
    let (layer, rest) = name.strip_prefix("blk.")?.split_once('.')?;
    if let Some((theirs, _)) = WHOLE.iter().find(|(_, ours)| *ours == rest) {
        return Some(format!("model.layers.{layer}.{theirs}"));
    }
    let (module, ending) = rest.rsplit_once('.')?;
    if let Some((theirs, _)) = LAYER.iter().find(|(_, ours)| *ours == module) {
        return Some(format!("model.layers.{layer}.{theirs}.{ending}"));
    }
    let (module, expert) = module.rsplit_once('.')?;
    let (path, theirs, _) = EXPERT.iter().find(|(_, _, ours)| *ours == module)?;
    Some(format!("model.layers.{layer}.{path}.{expert}.{theirs}.{ending}"))
}

/// True for tensors that may stay unread: those that any implementation computes itself (rotary frequencies and
/// attention masks of old checkpoints), scales of integers that are not used here, and those of a model's vision encoder
/// or of the value head of its training.
pub(super) fn is_unread(name: &str) -> bool {
    let name_in_model = name.strip_prefix("model.").unwrap_or(name);
    let is_of_others = ["vision_tower.", "multi_modal_projector.", "v_head."]
        .iter()
        .any(|part| name_in_model.starts_with(part));
    let is_derived = [
        "rotary_emb.inv_freq",
        "rotary_emb.original_inv_freq",
        "rotary_emb.cos_cached",
        "rotary_emb.sin_cached",
        "attn_rot_embd.weight",
        "self_attn.bias",
        "self_attn.prob_output_scale",
        "attn.masked_bias",
    ]
    .iter()
    .any(|ending| name.ends_with(ending));
    is_of_others || is_derived
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_map_both_ways() {
        for (theirs, ours) in [
            ("model.embed_tokens.weight", "token_embd.weight"),
            ("model.norm.weight", "output_norm.weight"),
            ("lm_head.weight", "output.weight"),
            ("model.layers.0.input_layernorm.weight", "blk.0.attn_norm.weight"),
            ("model.layers.17.self_attn.q_proj.bias", "blk.17.attn_q.bias"),
            ("model.layers.3.self_attn.k_norm.weight", "blk.3.attn_k_norm.weight"),
            ("model.layers.3.self_attn.kv_a_proj_with_mqa.weight", "blk.3.attn_kv_a_mqa.weight"),
            ("model.layers.3.self_attn.kv_b_proj.weight", "blk.3.attn_kv_b.weight"),
            ("model.layers.3.self_attn.qkv_proj.weight", "blk.3.attn_qkv.weight"),
            ("model.layers.3.post_self_attn_layernorm.weight", "blk.3.post_attention_norm.weight"),
            ("model.layers.3.mlp.down_proj.weight", "blk.3.ffn_down.weight"),
            ("model.layers.3.mlp.gate.weight", "blk.3.ffn_gate_inp.weight"),
            ("model.layers.3.mlp.gate.e_score_correction_bias", "blk.3.exp_probs_b.bias"),
            ("model.layers.3.mlp.experts.63.up_proj.weight", "blk.3.ffn_up.63.weight"),
            ("model.layers.3.mlp.experts.gate_up_proj", "blk.3.ffn_gate_up_exps.weight"),
            ("model.layers.3.mlp.experts.down_proj", "blk.3.ffn_down_exps.weight"),
            ("model.layers.3.mlp.experts.gate_up_proj_bias", "blk.3.ffn_gate_up_exps.bias"),
            ("model.layers.3.mlp.experts.down_proj_bias", "blk.3.ffn_down_exps.bias"),
            ("model.layers.3.self_attn.sinks", "blk.3.attn_sinks.weight"),
            ("model.layers.3.mlp.shared_experts.gate_proj.weight", "blk.3.ffn_gate_shexp.weight"),
            ("model.layers.47.eh_proj.weight", "blk.47.nextn.eh_proj.weight"),
            ("model.layers.47.enorm.weight", "blk.47.nextn.enorm.weight"),
            ("model.layers.47.embed_tokens.weight", "blk.47.nextn.embed_tokens.weight"),
            ("model.layers.47.shared_head.norm.weight", "blk.47.nextn.shared_head_norm.weight"),
            ("model.layers.47.shared_head.head.weight", "blk.47.nextn.shared_head_head.weight"),
        ] {
            assert_eq!(canonical(theirs).as_deref(), Some(ours));
            assert_eq!(hugging_face(ours).as_deref(), Some(theirs));
        }
        for (theirs, ours) in [
            ("model.layers.3.block_sparse_moe.gate.weight", "blk.3.ffn_gate_inp.weight"),
            ("model.layers.3.mlp.router.bias", "blk.3.ffn_gate_inp.bias"),
            ("model.layers.3.block_sparse_moe.experts.7.w1.weight", "blk.3.ffn_gate.7.weight"),
            ("model.layers.3.block_sparse_moe.experts.7.w3.weight", "blk.3.ffn_up.7.weight"),
            ("model.layers.3.block_sparse_moe.experts.7.w2.weight", "blk.3.ffn_down.7.weight"),
        ] {
            assert_eq!(canonical(theirs).as_deref(), Some(ours));
        }
        for (theirs, ours) in [
            ("model.layers.3.mlp.gate_up_proj.weight", "blk.3.ffn_up.weight"),
            ("model.layers.3.post_mlp_layernorm.weight", "blk.3.post_ffw_norm.weight"),
        ] {
            assert_eq!(canonical(theirs).as_deref(), Some(ours));
        }
        for front in ["language_model.model", "model.language_model"] {
            let name = format!("{front}.layers.3.pre_feedforward_layernorm.weight");
            assert_eq!(canonical(&name).as_deref(), Some("blk.3.pre_ffw_norm.weight"));
        }
        assert_eq!(canonical("layers.1.mlp.up_proj.weight").as_deref(), Some("blk.1.ffn_up.weight"));
        assert_eq!(canonical("embed_tokens.weight").as_deref(), Some("token_embd.weight"));
    }

    #[test]
    fn other_names_do_not_map() {
        for name in [
            "",
            "model.layers.0.self_attn.rotary_emb.inv_freq",
            "model.layers.0.self_attn.rotary_emb.cos_cached",
            "model.rotary_emb.original_inv_freq",
            "model.layers.0.self_attn.prob_output_scale",
            "v_head.summary.weight",
            "model.layers.x.mlp.up_proj.weight",
            "model.layers.-1.mlp.up_proj.weight",
            "model.layers.0.mlp.up_proj.qweight",
            "model.layers.0.mlp.experts.x.up_proj.weight",
            "model.layers.0.mlp.experts.0.w1.weight",
            "model.layers.0.block_sparse_moe.experts.0.w4.weight",
            "vision_tower.layers.0.mlp.up_proj.weight",
            "blk.0.attn_q.weight",
        ] {
            assert_eq!(canonical(name), None, "{name}");
        }
        assert_eq!(hugging_face("rope_freqs.weight"), None);
        assert_eq!(hugging_face("blk.0.nextn.eh.weight"), None);
    }
}
