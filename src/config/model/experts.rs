//! Experts in the files of either format: which layers have them, and how a router chooses and weighs them.
//!
//! The order is: probabilities, the bias to select by, the limit to some groups, the best experts, their
//! probabilities without the bias, division by their sum, the factor. Other values in a file are refused.

use super::gguf::Keys;
use super::json::Json;
use super::{ExpertsConfig, MAX_LAYERS, MAX_SIZE, Scoring, in_range};
use crate::config::architecture::{Architecture, RouterDefaults};
use crate::{Error, Result};

/// Maximum experts of a layer; the largest models have half as many.
const MAX_EXPERTS: usize = 1024;

/// The names that Hugging Face folders have for the number of experts.
pub(super) const HF_NUM_EXPERTS: [&str; 3] = ["n_routed_experts", "num_experts", "num_local_experts"];

fn has_router(layer: usize, has_tensor: impl Fn(&str) -> bool) -> bool {
    has_tensor(&format!("blk.{layer}.ffn_gate_inp.weight"))
}

fn has_selection_bias(layer: usize, has_tensor: impl Fn(&str) -> bool) -> bool {
    has_tensor(&format!("blk.{layer}.exp_probs_b.bias"))
}

impl ExpertsConfig {
    /// The number of experts that the shared network's width equals; none, if it is not a multiple.
    #[must_use]
    pub fn num_shared_experts(&self) -> usize {
        match self.shared_intermediate_size {
            Some(width) if width.is_multiple_of(self.intermediate_size.max(1)) => {
                width / self.intermediate_size.max(1)
            }
            _ => 0,
        }
    }

    /// The experts of a GGUF file; none if all layers are dense.
    pub(super) fn from_gguf(
        keys: &Keys<'_>,
        architecture: &Architecture,
        num_layers: usize,
        intermediate_size: usize,
        has_tensor: impl Fn(&str) -> bool,
    ) -> Result<Option<Self>> {
        let Some(router) = architecture.router else { return Ok(None) };
        let num_experts = match keys.usize("expert_count")?.filter(|count| *count > 0) {
            Some(num_experts) => num_experts,
            None if architecture.has_latent_attention() => return Ok(None),
            None => return Err(keys.missing("expert_count")),
        };
        let num_dense_layers = keys.usize("leading_dense_block_count")?.unwrap_or(0);
        if num_dense_layers >= num_layers {
            return Ok(None);
        }
        let has_selection_bias = has_selection_bias(num_dense_layers, has_tensor);
        let scoring = match keys.usize("expert_gating_func")? {
            // Files from before the key: only sigmoids come with a bias.
            None | Some(0) if has_selection_bias => Scoring::Sigmoid,
            None | Some(0 | 1) => Scoring::Softmax,
            Some(2) => Scoring::Sigmoid,
            Some(other) => return Err(keys.unsupported("expert_gating_func", &other)),
        };
        let num_groups = keys.usize("expert_group_count")?.unwrap_or(1).max(1);
        let num_groups_per_tok = match keys.usize("expert_group_used_count")?.filter(|count| *count > 0) {
            Some(count) => count,
            None if num_groups == 1 => 1,
            None => return Err(keys.missing("expert_group_used_count")),
        };
        // The width of Mixtral's experts is the key of a network without experts.
        let width = keys.usize("expert_feed_forward_length")?.unwrap_or(intermediate_size);
        let num_shared = keys.usize("expert_shared_count")?.unwrap_or(0);
        let shared_width = match keys.usize("expert_shared_feed_forward_length")? {
            Some(width) => width,
            None => num_shared.saturating_mul(width),
        };
        Ok(Some(Self {
            num_dense_layers,
            num_experts,
            num_experts_per_tok: keys.required("expert_used_count")?,
            intermediate_size: width,
            shared_intermediate_size: Some(shared_width).filter(|width| *width > 0),
            scoring,
            has_selection_bias,
            has_router_bias: architecture.has_expert_biases,
            has_biases: architecture.has_expert_biases,
            is_interleaved: false,
            num_groups,
            num_groups_per_tok,
            normalize: keys.bool("expert_weights_norm")?.unwrap_or(router.gguf_normalize),
            // 0 means no factor.
            scale: keys.f64("expert_weights_scale")?.filter(|scale| *scale != 0.0).unwrap_or(1.0) as f32,
        }))
    }

    /// The experts of a Hugging Face folder; none if all layers are dense.
    pub(super) fn from_hf(
        file: Json<'_>,
        architecture: &Architecture,
        num_layers: usize,
        intermediate_size: usize,
        has_tensor: impl Fn(&str) -> bool,
    ) -> Result<Option<Self>> {
        let Some(router) = architecture.router else { return Ok(None) };
        let mut num_experts = None;
        for key in HF_NUM_EXPERTS {
            num_experts = num_experts.or(file.usize(key)?.filter(|count| *count > 0));
        }
        let defaults = architecture.hf_defaults.experts;
        let is_missing = HF_NUM_EXPERTS.iter().all(|key| file.is_missing(key));
        let has_routers = || (0..num_layers.min(MAX_LAYERS)).any(|layer| has_router(layer, &has_tensor));
        let num_experts = match num_experts.or(defaults.num_experts.filter(|_| is_missing && has_routers())) {
            Some(num_experts) => num_experts,
            None if architecture.has_latent_attention() => return Ok(None),
            None => {
                return Err(Error::invalid_model(format!(
                    "the number of experts is missing ({})",
                    HF_NUM_EXPERTS.join(", ")
                )));
            }
        };
        refuse_other_layers(file)?;
        let num_dense_layers = match hf_dense_layers(file, num_layers)? {
            Some(count) => count,
            // The routers' default without a key.
            None => (0..num_layers.min(MAX_LAYERS))
                .find(|layer| has_router(*layer, &has_tensor))
                .ok_or_else(|| Error::invalid_model("first_k_dense_replace and all routers are missing"))?,
        };
        if num_dense_layers >= num_layers {
            return Ok(None);
        }
        let width =
            file.usize("moe_intermediate_size")?.or(defaults.intermediate_size).unwrap_or(intermediate_size);
        // `null` is none.
        let default_shared = if file.is_missing("n_shared_experts") { defaults.num_shared } else { 0 };
        let num_shared = file.usize("n_shared_experts")?.unwrap_or(default_shared);
        let finds_bias = || has_selection_bias(num_dense_layers, &has_tensor);
        let chosen = HfChoice::read(file, architecture, router, finds_bias)?;
        Ok(Some(Self {
            num_dense_layers,
            num_experts,
            num_experts_per_tok: file.usize_or("num_experts_per_tok", defaults.num_experts_per_tok)?,
            intermediate_size: width,
            shared_intermediate_size: Some(num_shared.saturating_mul(width)).filter(|width| *width > 0),
            scoring: chosen.scoring,
            has_selection_bias: chosen.has_selection_bias,
            has_router_bias: architecture.has_expert_biases,
            has_biases: architecture.has_expert_biases,
            is_interleaved: architecture.hf_interleaves_experts,
            num_groups: chosen.num_groups,
            num_groups_per_tok: chosen.num_groups_per_tok,
            normalize: chosen.normalize,
            scale: chosen.scale as f32,
        }))
    }

    pub(super) fn validate(&self, num_layers: usize) -> Result<()> {
        in_range("the number of experts", self.num_experts, MAX_EXPERTS)?;
        in_range("num_experts_per_tok", self.num_experts_per_tok, self.num_experts)?;
        in_range("the width of experts", self.intermediate_size, MAX_SIZE)?;
        if let Some(width) = self.shared_intermediate_size {
            in_range("the width of shared experts", width, MAX_SIZE)?;
        }
        in_range(
            "the number of layers with experts",
            num_layers.saturating_sub(self.num_dense_layers),
            num_layers,
        )?;
        in_range("the number of groups of experts", self.num_groups, self.num_experts)?;
        in_range("the number of groups of a token", self.num_groups_per_tok, self.num_groups)?;
        if !self.num_experts.is_multiple_of(self.num_groups) {
            return Err(Error::invalid_model(format!(
                "{} experts cannot be divided into {} groups",
                self.num_experts, self.num_groups
            )));
        }
        let group_len = self.num_experts / self.num_groups;
        if group_len * self.num_groups_per_tok < self.num_experts_per_tok {
            return Err(Error::invalid_model(format!(
                "a token chooses {} experts from {} groups of {group_len}, which have fewer",
                self.num_experts_per_tok, self.num_groups_per_tok
            )));
        }
        let is_limited = self.num_groups_per_tok < self.num_groups;
        if is_limited && self.scoring == Scoring::Sigmoid && group_len < 2 {
            return Err(Error::invalid_model(format!(
                "{} groups of experts are compared by their best two, but have {group_len} each",
                self.num_groups
            )));
        }
        if !(self.scale > 0.0 && self.scale.is_finite()) {
            return Err(Error::invalid_model(format!(
                "the factor on the weights of experts is {}, but must be positive",
                self.scale
            )));
        }
        Ok(())
    }
}

/// How experts are chosen and weighed, in the keys of a Hugging Face folder.
struct HfChoice {
    scoring: Scoring,
    has_selection_bias: bool,
    num_groups: usize,
    num_groups_per_tok: usize,
    normalize: bool,
    scale: f64,
}

impl HfChoice {
    fn read(
        file: Json<'_>,
        architecture: &Architecture,
        router: RouterDefaults,
        finds_bias: impl Fn() -> bool,
    ) -> Result<Self> {
        let scoring = match file.str("scoring_func")? {
            None => router.hf_scoring,
            Some("softmax") => Scoring::Softmax,
            Some("sigmoid") => Scoring::Sigmoid,
            Some(other) => {
                return Err(Error::unsupported(format!("scoring_func = {other:?} is not supported"))
                    .with_hint("supported are softmax and sigmoid"));
            }
        };
        let num_groups = file.usize("n_group")?.unwrap_or(1).max(1);
        let num_groups_per_tok = file.usize("topk_group")?.unwrap_or(num_groups);
        let method = file.str("topk_method")?.or(architecture.hf_defaults.experts.topk_method);
        let (has_selection_bias, has_groups) = match method {
            None => (finds_bias(), true),
            Some("greedy") => (false, false),
            Some("group_limited_greedy") => (false, true),
            Some("noaux_tc") => (true, true),
            Some(other) => {
                return Err(Error::unsupported(format!("topk_method = {other:?} is not supported"))
                    .with_hint("supported are greedy, group_limited_greedy and noaux_tc"));
            }
        };
        let (num_groups, num_groups_per_tok) =
            if has_groups { (num_groups, num_groups_per_tok) } else { (1, 1) };
        // Groups are as good as their best expert with a softmax, and as their best two with sigmoids.
        let expected = match scoring {
            Scoring::Softmax => "group_limited_greedy",
            Scoring::Sigmoid => "noaux_tc",
        };
        if num_groups_per_tok < num_groups
            && let Some(method) = method
            && method != expected
        {
            return Err(Error::unsupported(format!(
                "topk_method = {method:?} with groups and the probabilities of a {scoring:?} is not supported"
            ))
            .with_hint(format!("there, groups are compared as with {expected:?}")));
        }
        let normalize = file.bool("norm_topk_prob")?.unwrap_or(router.hf_normalize);
        let scale = file.f64("routed_scaling_factor")?.unwrap_or(architecture.hf_defaults.experts.scale);
        // DeepSeek's own code for V2 either normalises or scales, transformers' does not normalise, llama.cpp
        // does both. No published model needs an answer.
        if scoring == Scoring::Softmax && normalize && scale != 1.0 {
            return Err(Error::unsupported(format!(
                "norm_topk_prob = true with routed_scaling_factor = {scale} and a softmax is not supported"
            ))
            .with_hint(
                "implementations differ; remove the one that the model was trained without from config.json",
            ));
        }
        Ok(Self { scoring, has_selection_bias, num_groups, num_groups_per_tok, normalize, scale })
    }
}

/// Refuses files in which the layers with experts are not simply the last ones.
fn refuse_other_layers(file: Json<'_>) -> Result<()> {
    for key in ["decoder_sparse_step", "moe_layer_freq"] {
        if let Some(step) = file.usize(key)?
            && step != 1
        {
            return Err(Error::unsupported(format!("{key} = {step} is not supported"))
                .with_hint("supported are models with experts in all layers after the first ones"));
        }
    }
    // The gated expert alongside the others of Qwen2-MoE.
    if let Some(width) = file.usize("shared_expert_intermediate_size")?.filter(|width| *width > 0) {
        return Err(Error::unsupported(format!(
            "shared_expert_intermediate_size = {width} is not supported"
        ))
        .with_hint("a model without that network runs if the key is removed from config.json"));
    }
    Ok(())
}

/// The number of layers that `mlp_only_layers` lists, which have to be the first ones; none without the key.
fn listed_dense_layers(file: Json<'_>) -> Result<Option<usize>> {
    let Some(listed) = file.numbers("mlp_only_layers")? else { return Ok(None) };
    let is_listed = |layer: usize| listed.contains(&(layer as f64));
    let num_first = (0..listed.len()).take_while(|layer| is_listed(*layer)).count();
    if listed.iter().any(|layer| *layer >= num_first as f64) {
        return Err(Error::unsupported(format!(
            "{} layers without experts (mlp_only_layers) that are not the first ones are not supported",
            listed.len()
        ))
        .with_hint("supported are models with experts in all layers after the first ones"));
    }
    Ok(Some(num_first))
}

/// Layers before the first one with experts, in any spelling.
fn hf_dense_layers(file: Json<'_>, num_layers: usize) -> Result<Option<usize>> {
    let count = match file.usize("first_k_dense_replace")? {
        Some(count) => Some(count),
        None => listed_dense_layers(file)?,
    };
    let Some(kinds) = file.list("mlp_layer_types")? else { return Ok(count) };
    if kinds.len() != num_layers {
        return Err(Error::invalid_model(format!(
            "mlp_layer_types has {} entries for {num_layers} layers",
            kinds.len()
        )));
    }
    let num_dense = kinds.iter().take_while(|kind| kind.as_str() == Some("dense")).count();
    if let Some(other) = kinds[num_dense..].iter().find(|kind| kind.as_str() != Some("sparse")) {
        return Err(Error::unsupported(format!(
            "mlp_layer_types has {other} after {num_dense} dense layers, which is not supported"
        ))
        .with_hint("supported are models with experts in all layers after the first ones"));
    }
    match count {
        Some(count) if count != num_dense => Err(Error::invalid_model(format!(
            "first_k_dense_replace is {count}, but mlp_layer_types begins with {num_dense} dense layers"
        ))),
        _ => Ok(Some(num_dense)),
    }
}
