//! `config.json` and `generation_config.json` of a Hugging Face folder.
//!
//! Reads both the spelling of transformers 5 (`dtype`, `rope_parameters`) and the older one; missing keys have the
//! defaults of the architecture's class there. An unsupported key that changes the computation is refused, not skipped;
//! a notice names keys that have no effect for this model.

use serde_json::Value;

use super::experts::HF_NUM_EXPERTS;
use super::hf_rope::{local_parameters, plain_local_rope, rope, rope_parameters};
use super::json::{Json, shown};
use super::layers::{self, LayerAttention};
use super::multipliers::{self, Multipliers};
use super::{ExpertsConfig, LatentAttentionConfig, MAX_LAYERS, ModelConfig, in_range};
use crate::config::Activation;
use crate::config::architecture::{Architecture, QkNorm};
use crate::{Error, Result};

/// Keys that change the computation, with their neutral value.
const NEUTRAL_NUMBERS: [(&str, f64); 9] = [
    ("attn_logit_softcapping", 0.0),
    ("final_logit_softcapping", 0.0),
    ("logit_scale", 1.0),
    ("logits_scaling", 1.0),
    ("embedding_multiplier", 1.0),
    ("residual_multiplier", 1.0),
    ("clip_qkv", 0.0),
    ("attention_chunk_size", 0.0),
    ("index_topk", 0.0),
];

/// Switches for tensors that are not supported, and the tensor of the first layer that exists if they are on.
const SWITCHED_TENSORS: [(&str, &str); 2] =
    [("attention_output_bias", "blk.0.attn_output.bias"), ("use_qk_norm", "blk.0.attn_q_norm.weight")];

impl ModelConfig {
    /// Reads `config.json`, and `generation_config.json` if there is one, whose special tokens take precedence.
    /// `has_tensor` returns whether the checkpoint has a tensor (by canonical name).
    ///
    /// # Errors
    /// [`crate::ErrorKind::Unsupported`] if the model is or needs something that cannot be run,
    /// [`crate::ErrorKind::InvalidModel`] if a value is missing or impossible.
    pub fn from_hf(
        config: &Value,
        generation_config: Option<&Value>,
        has_tensor: impl Fn(&str) -> bool,
    ) -> Result<Self> {
        let text_part = text_part(config);
        let file = Json { name: "config.json", value: text_part.as_ref().unwrap_or(config) };
        Self::read_hf(file, generation_config, has_tensor)
            .and_then(Self::validate)
            .map_err(|error| error.context(file.name))
    }

    fn read_hf(
        file: Json<'_>,
        generation_config: Option<&Value>,
        has_tensor: impl Fn(&str) -> bool,
    ) -> Result<Self> {
        let architecture = architecture(file)?;
        let defaults = &architecture.hf_defaults;
        let mut notices = Vec::new();
        refuse_unsupported(file, architecture, &has_tensor, &mut notices)?;
        if file.present("vision_config").is_some() {
            notices.push("the model's vision part is not loaded: it runs with text only".to_owned());
        }

        let hidden_size = file.required_usize("hidden_size")?;
        let num_heads = file.usize_or("num_attention_heads", defaults.num_heads)?;
        let num_layers = file.required_usize("num_hidden_layers")?;
        // Lists have this length.
        in_range("num_hidden_layers", num_layers, MAX_LAYERS)?;
        let intermediate_size = file.required_usize(defaults.intermediate_key)?;
        let max_position_embeddings =
            file.usize_or("max_position_embeddings", Some(defaults.max_position_embeddings))?;
        let multipliers = Multipliers::from_hf(file, architecture)?;
        let windows = layers::windows(file, architecture, num_layers, &mut notices)?;
        let has_window = windows.iter().all(Option::is_some);
        let parameters = rope_parameters(file, has_window, &mut notices)?;
        let local_parameters = local_parameters(file, &windows)?;
        let mut local_rope = None;
        let mut rope = |head_dim: usize| {
            let mut read = |parameters| {
                rope(file, parameters, architecture, head_dim, max_position_embeddings, &mut notices)
            };
            let usual = read(parameters)?;
            local_rope = match local_parameters {
                Some(parameters) => Some(read(parameters)?.0),
                None => plain_local_rope(file, architecture, &usual.0)?,
            };
            Ok::<_, Error>(usual)
        };
        let (num_kv_heads, head_dim, (rope, window), latent_attention) =
            if architecture.has_latent_attention() {
                // Here `head_dim` is the rotated width alone, and `num_key_value_heads` is ignored.
                let rope_dim = file.usize_or("qk_rope_head_dim", Some(64))?;
                let (rope, window) = rope(rope_dim)?;
                let latent = LatentAttentionConfig::from_hf(
                    file,
                    architecture,
                    parameters,
                    (rope_dim, &rope),
                    &has_tensor,
                )?;
                (1, latent.qk_nope_head_dim.saturating_add(rope_dim), (rope, window), Some(latent))
            } else {
                let head_dim = match file.usize("head_dim")? {
                    Some(head_dim) => head_dim,
                    None if file.is_missing("head_dim") && defaults.head_dim.is_some() => {
                        defaults.head_dim.unwrap_or_default()
                    }
                    None => hidden_size.checked_div(num_heads).unwrap_or(0),
                };
                // `null` is the number of query heads, for every default of the class.
                let default = defaults.num_kv_heads.filter(|_| file.is_missing("num_key_value_heads"));
                let num_kv_heads = file.usize_or("num_key_value_heads", default.or(Some(num_heads)))?;
                (num_kv_heads, head_dim, rope(head_dim)?, None)
            };
        notices.extend(window.notice());
        let has_local_rope = local_rope.is_some();
        let generation =
            Json { name: "generation_config.json", value: generation_config.unwrap_or(&Value::Null) };
        let mut eos_token_ids = generation.token_ids("eos_token_id")?;
        if eos_token_ids.is_empty() {
            eos_token_ids = file.token_ids("eos_token_id")?;
        }
        let bos_token_ids = file.token_ids("bos_token_id")?;
        let has_biases = file.bool("attention_bias")?.unwrap_or(defaults.attention_bias)
            && defaults.has_attention_bias_key;
        let has_output_bias = has_biases || file.bool("attention_out_bias")? == Some(true);
        Ok(Self {
            architecture,
            vocab_size: file.usize_or("vocab_size", defaults.vocab_size)?,
            hidden_size,
            num_layers,
            num_nextn_layers: file.usize("num_nextn_predict_layers")?.unwrap_or(0),
            num_heads,
            num_kv_heads,
            head_dim,
            intermediate_size,
            rms_norm_eps: multipliers
                .rms_norm_eps(file.f64("rms_norm_eps")?.unwrap_or(defaults.rms_norm_eps)),
            activation: activation(file, architecture)?,
            rope,
            local_rope,
            max_position_embeddings: window.longest,
            usual_model_len: window.usual,
            context_hint: window.hint,
            // Biases that the file leaves out are zero.
            qkv_bias: architecture.qkv_bias || (has_biases && has_tensor("blk.0.attn_q.bias")),
            output_bias: has_output_bias && has_tensor("blk.0.attn_output.bias"),
            mlp_bias: has_mlp_bias(file, architecture, &has_tensor, &mut notices)?,
            has_sinks: architecture.has_sinks,
            tie_word_embeddings: is_tied(file, architecture, &has_tensor)?,
            embedding_scale: multipliers.embedding_scale(architecture, hidden_size),
            logits_scale: multipliers.logits_scale(),
            norm_offset: architecture.hf_norm_offset,
            attention_scale: multipliers.attention_scale(attention_scale(file, head_dim)?),
            layer_attention: LayerAttention::with_rotations(
                LayerAttention::with_windows(windows, has_local_rope),
                &layers::rotated(file, architecture, num_layers)?,
            ),
            latent_attention,
            experts: ExpertsConfig::from_hf(file, architecture, num_layers, intermediate_size, has_tensor)?,
            bos_token_id: bos_token_ids.first().copied(),
            eos_token_ids,
            notices,
        })
    }
}

/// The keys of the language model in a file of a model that looks at pictures too, with those around them that it does not
/// have itself; none if the file is not of that kind. Where the class is not one of ours, that of the language model counts.
fn text_part(config: &Value) -> Option<Value> {
    let mut text = config.get("text_config")?.as_object()?.clone();
    let knows_text = text.get("model_type").and_then(Value::as_str).map(Architecture::from_model_type);
    let knows_class = architecture(Json { name: "config.json", value: config }).is_ok();
    let is_of_text = !knows_class && matches!(knows_text, Some(Ok(_)));
    for (key, value) in config.as_object()? {
        let names_the_class = ["architectures", "model_type"].contains(&key.as_str());
        if names_the_class && is_of_text {
            continue;
        }
        if names_the_class || (key != "text_config" && !text.contains_key(key)) {
            text.insert(key.clone(), value.clone());
        }
    }
    Some(Value::Object(text))
}

/// The entry of the registry that `architectures` names, or else `model_type`.
fn architecture(file: Json<'_>) -> Result<&'static Architecture> {
    let names: Vec<&Value> = match file.present("architectures") {
        Some(Value::Array(names)) => names.iter().collect(),
        Some(name) => vec![name],
        None => Vec::new(),
    };
    let mut unknown = None;
    for name in names {
        let text = name.as_str().ok_or_else(|| {
            Error::invalid_model(format!("architectures has {}, which is not a name", shown(name)))
        })?;
        match Architecture::from_hf_name(text) {
            Ok(architecture) => return Ok(architecture),
            Err(error) => unknown = unknown.or(Some(error)),
        }
    }
    match (unknown, file.str("model_type")?) {
        (Some(error), _) => Err(error),
        (None, Some(model_type)) => Architecture::from_model_type(model_type),
        (None, None) => Err(Error::invalid_model("\"architectures\" and \"model_type\" are both missing")
            .with_hint(
                "add \"architectures\" with the name of the model's class, such as [\"LlamaForCausalLM\"]",
            )),
    }
}

fn refuse_unsupported(
    file: Json<'_>,
    architecture: &Architecture,
    has_tensor: &impl Fn(&str) -> bool,
    notices: &mut Vec<String>,
) -> Result<()> {
    let name = architecture.hf_name;
    let refuse = |key: &str, value: &dyn std::fmt::Display| {
        Err(Error::unsupported(format!("{key} = {value} is not supported for {name}")).with_hint(format!(
            "a model that was trained without it runs if {key} is removed from config.json"
        )))
    };
    let mut ignore = |key: &str, value: &dyn std::fmt::Display, why: &str| {
        notices.push(format!("{key} = {value} in config.json is ignored: {why}"));
    };
    // The second name is that of other models' classes.
    let activation = match file.str("hidden_act")? {
        Some(activation) => Some(("hidden_act", activation)),
        None => file.str("hidden_activation")?.map(|activation| ("hidden_activation", activation)),
    };
    if let Some((key, activation)) = activation
        && !names_of(architecture.activation).iter().any(|known| activation.eq_ignore_ascii_case(known))
    {
        return Err(Error::unsupported(format!("{key} = {activation:?} is not supported for {name}"))
            .with_hint(
                "the model was trained with this activation; run it with an engine that has it, such as transformers",
            ));
    }
    let is_known = |key: &str| architecture.has_multipliers && multipliers::HF_KEYS.contains(&key);
    for (key, neutral) in NEUTRAL_NUMBERS.into_iter().filter(|(key, _)| !is_known(key)) {
        if file.present(key) != Some(&Value::Bool(false))
            && let Some(value) = file.f64(key)?
            && value != neutral
        {
            return refuse(key, &value);
        }
    }
    let has_router = || {
        let layers = 0..file.usize("num_hidden_layers").ok().flatten().unwrap_or(0).min(MAX_LAYERS);
        layers.into_iter().any(|layer| has_tensor(&format!("blk.{layer}.ffn_gate_inp.weight")))
    };
    for key in HF_NUM_EXPERTS {
        if architecture.router.is_none()
            && let Some(value) = file.usize(key)?.filter(|value| *value > 0)
        {
            if has_router() {
                return Err(Error::unsupported(format!("{key} = {value} is not supported for {name}"))
                    .with_hint("models with experts name a class with experts in \"architectures\""));
            }
            ignore(key, &value, "there are no experts in the weights");
        }
    }
    if let Some(rank) =
        file.usize("kv_lora_rank")?.filter(|rank| *rank > 0 && !architecture.has_latent_attention())
    {
        if has_tensor("blk.0.attn_kv_a_mqa.weight") {
            return Err(Error::unsupported(format!("kv_lora_rank = {rank} is not supported for {name}"))
                .with_hint("models with latent attention name a class with it in \"architectures\""));
        }
        ignore("kv_lora_rank", &rank, "there is no latent attention in the weights");
    }
    for (key, tensor) in SWITCHED_TENSORS {
        let is_by_nature = key == "use_qk_norm" && architecture.qk_norm != QkNorm::None;
        if file.bool(key)? == Some(true) && !is_by_nature {
            if has_tensor(tensor) {
                return Err(Error::unsupported(format!(
                    "{key} = true is not supported for {name}, and the weights have such tensors"
                ))
                .with_hint("the model needs an engine that computes with them, such as transformers"));
            }
            ignore(key, &true, &format!("the weights have no {tensor}"));
        }
    }
    if file.bool("use_bidirectional_attention")? == Some(true) {
        return refuse("use_bidirectional_attention", &true);
    }
    if let Some(bias) = file.bool("attention_bias")?
        && bias != architecture.qkv_bias
        && !architecture.hf_defaults.has_attention_bias_key
    {
        if architecture.has_latent_attention() && bias && has_tensor("blk.0.attn_kv_a_mqa.bias") {
            return refuse("attention_bias", &bias);
        }
        ignore("attention_bias", &bias, &format!("it does not apply to {name}"));
    }
    Ok(())
}

/// The activations' names in files.
fn names_of(activation: Activation) -> &'static [&'static str] {
    match activation {
        Activation::Silu | Activation::ClampedSwiglu { .. } => &["silu", "swish", "swiglu"],
        // The first folders have "gelu" for this one.
        Activation::GeluTanh => &["gelu_pytorch_tanh", "gelu_tanh", "gelu_new", "gelu"],
    }
}

/// That of the architecture, with the numbers of the file.
fn activation(file: Json<'_>, architecture: &Architecture) -> Result<Activation> {
    let Activation::ClampedSwiglu { alpha, limit } = architecture.activation else {
        return Ok(architecture.activation);
    };
    let number =
        |key: &str, default: f32| Ok::<_, Error>(file.f64(key)?.map_or(default, |value| value as f32));
    Ok(Activation::ClampedSwiglu {
        alpha: number("swiglu_alpha", alpha)?,
        limit: number("swiglu_limit", limit)?,
    })
}

/// The factor of attention scores.
fn attention_scale(file: Json<'_>, head_dim: usize) -> Result<f64> {
    match file.f64("query_pre_attn_scalar")? {
        Some(scalar) if scalar <= 0.0 => {
            Err(Error::invalid_model(format!("query_pre_attn_scalar is {scalar}, but must be positive")))
        }
        scalar => Ok(1.0 / scalar.unwrap_or(head_dim as f64).sqrt()),
    }
}

/// Whether feed-forward networks have biases: the switch of Llama's class, if the weights have them.
fn has_mlp_bias(
    file: Json<'_>,
    architecture: &Architecture,
    has_tensor: &impl Fn(&str) -> bool,
    notices: &mut Vec<String>,
) -> Result<bool> {
    let is_known = architecture.hf_defaults.has_mlp_bias_key;
    if file.bool("mlp_bias")? != Some(true) || (is_known && has_tensor("blk.0.ffn_up.bias")) {
        return Ok(file.bool("mlp_bias")? == Some(true));
    }
    let why = match is_known {
        true => "the weights have no blk.0.ffn_up.bias".to_owned(),
        false => format!("it does not apply to {}", architecture.hf_name),
    };
    notices.push(format!("mlp_bias = true in config.json is ignored: {why}"));
    Ok(false)
}

/// Whether the embedding is also the head. Many files omit the switch where the tensors show it.
fn is_tied(file: Json<'_>, architecture: &Architecture, has_tensor: &impl Fn(&str) -> bool) -> Result<bool> {
    match (file.bool("tie_word_embeddings")?, has_tensor("output.weight")) {
        (Some(is_tied), true) => Ok(is_tied),
        (None, true) => Ok(architecture.hf_defaults.tie_word_embeddings),
        (Some(true) | None, false) => Ok(true),
        (Some(false), false) => {
            Err(Error::invalid_model("tie_word_embeddings is false, but the weights have no lm_head.weight")
                .with_hint(
                    "fetch the missing tensors; or, if the embedding is the head of this model, write \
             \"tie_word_embeddings\": true into config.json",
                ))
        }
    }
}
