//! `config.json` and `generation_config.json` of a Hugging Face folder.
//!
//! Both the spelling of transformers 5 (`dtype`, `rope_parameters`) and the one before it are read. A key
//! that changes what the model computes and that nothing here implements is refused, not skipped.

use serde_json::Value;

use super::experts::HF_NUM_EXPERTS;
use super::{ExpertsConfig, LatentAttentionConfig, ModelConfig, RopeConfig, RopeScaling};
use crate::config::RopeStyle;
use crate::config::architecture::Architecture;
use crate::{Error, Result};

/// Keys that change the computation, with the value that leaves it as it is.
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

/// Switches that change the computation when they are on.
const NEUTRAL_SWITCHES: [&str; 3] = ["mlp_bias", "attention_output_bias", "use_qk_norm"];

impl ModelConfig {
    /// Reads `config.json`, and `generation_config.json` if there is one, whose special tokens win.
    /// `has_tensor` says which tensors (by canonical name) the checkpoint has.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Unsupported`] if the model is or needs something that cannot be run,
    /// [`crate::ErrorKind::InvalidModel`] if a value is missing or impossible.
    pub fn from_hf(
        config: &Value,
        generation_config: Option<&Value>,
        has_tensor: impl Fn(&str) -> bool,
    ) -> Result<Self> {
        let file = Json { name: "config.json", value: config };
        Self::read_hf(file, generation_config, has_tensor)
            .and_then(Self::validate)
            .map_err(|error| error.context(file.name))
    }

    fn read_hf(
        file: Json<'_>,
        generation_config: Option<&Value>,
        has_tensor: impl Fn(&str) -> bool,
    ) -> Result<Self> {
        let name = file
            .present("architectures")
            .and_then(|names| names.get(0))
            .and_then(Value::as_str)
            .ok_or_else(|| Error::invalid_model("there is no \"architectures\" with a name in it"))?;
        let architecture = Architecture::from_hf_name(name)?;
        refuse_unsupported(file, architecture)?;

        let hidden_size = file.required_usize("hidden_size")?;
        let num_heads = file.required_usize("num_attention_heads")?;
        let num_layers = file.required_usize("num_hidden_layers")?;
        let intermediate_size = file.required_usize("intermediate_size")?;
        let max_position_embeddings = file.required_usize("max_position_embeddings")?;
        let (num_kv_heads, head_dim, rope, latent_attention) = if architecture.has_latent_attention() {
            // Here `head_dim` is the rotated part alone, and `num_key_value_heads` says nothing.
            let rope_dim = file.required_usize("qk_rope_head_dim")?;
            let rope = rope(file, architecture, rope_dim, max_position_embeddings)?;
            let latent = LatentAttentionConfig::from_hf(file, rope_parameters(file), &rope)?;
            (1, latent.qk_nope_head_dim.saturating_add(rope_dim), rope, Some(latent))
        } else {
            let head_dim = match file.usize("head_dim")? {
                Some(head_dim) => head_dim,
                None => hidden_size.checked_div(num_heads).unwrap_or(0),
            };
            let num_kv_heads = file.usize("num_key_value_heads")?.unwrap_or(num_heads);
            (num_kv_heads, head_dim, rope(file, architecture, head_dim, max_position_embeddings)?, None)
        };
        let generation =
            Json { name: "generation_config.json", value: generation_config.unwrap_or(&Value::Null) };
        let mut eos_token_ids = generation.token_ids("eos_token_id")?;
        if eos_token_ids.is_empty() {
            eos_token_ids = file.token_ids("eos_token_id")?;
        }
        let bos_token_ids = file.token_ids("bos_token_id")?;
        Ok(Self {
            architecture,
            vocab_size: file.required_usize("vocab_size")?,
            hidden_size,
            num_layers,
            num_nextn_layers: file.usize("num_nextn_predict_layers")?.unwrap_or(0),
            num_heads,
            num_kv_heads,
            head_dim,
            intermediate_size,
            rms_norm_eps: file.f64("rms_norm_eps")?.unwrap_or(1e-6) as f32,
            rope,
            max_position_embeddings,
            // Old files leave the switch out where the tensors tell.
            tie_word_embeddings: file
                .bool("tie_word_embeddings")?
                .unwrap_or_else(|| !has_tensor("output.weight")),
            sliding_window: sliding_window(file)?,
            latent_attention,
            experts: ExpertsConfig::from_hf(file, architecture, num_layers, intermediate_size, has_tensor)?,
            bos_token_id: bos_token_ids.first().copied(),
            eos_token_ids,
        })
    }
}

/// An object with typed getters. `null` reads as absent; a value of the wrong kind is an error.
#[derive(Clone, Copy)]
pub(super) struct Json<'a> {
    name: &'a str,
    value: &'a Value,
}

impl<'a> Json<'a> {
    fn present(&self, key: &str) -> Option<&'a Value> {
        self.value.get(key).filter(|value| !value.is_null())
    }

    fn typed<T>(&self, key: &str, kind: &str, read: impl Fn(&'a Value) -> Option<T>) -> Result<Option<T>> {
        self.present(key)
            .map(|value| {
                read(value).ok_or_else(|| {
                    Error::invalid_model(format!("{key} in {} is {value}, not {kind}", self.name))
                })
            })
            .transpose()
    }

    pub(super) fn usize(&self, key: &str) -> Result<Option<usize>> {
        self.typed(key, "a non-negative integer", |value| usize::try_from(value.as_u64()?).ok())
    }

    pub(super) fn required_usize(&self, key: &str) -> Result<usize> {
        self.usize(key)?.ok_or_else(|| Error::invalid_model(format!("{key} is missing")))
    }

    pub(super) fn f64(&self, key: &str) -> Result<Option<f64>> {
        self.typed(key, "a number", Value::as_f64)
    }

    fn required_f64(&self, key: &str) -> Result<f64> {
        self.f64(key)?.ok_or_else(|| Error::invalid_model(format!("{key} is missing in {}", self.name)))
    }

    pub(super) fn bool(&self, key: &str) -> Result<Option<bool>> {
        self.typed(key, "true or false", Value::as_bool)
    }

    pub(super) fn str(&self, key: &str) -> Result<Option<&'a str>> {
        self.typed(key, "a string", Value::as_str)
    }

    pub(super) fn list(&self, key: &str) -> Result<Option<&'a [Value]>> {
        self.typed(key, "a list", |value| value.as_array().map(Vec::as_slice))
    }

    /// One id or a list of them.
    fn token_ids(&self, key: &str) -> Result<Vec<u32>> {
        let id = |value: &Value| u32::try_from(value.as_u64()?).ok();
        let read = |value: &Value| match value {
            Value::Array(values) => values.iter().map(id).collect(),
            value => Some(vec![id(value)?]),
        };
        Ok(self.typed(key, "a token id or a list of them", read)?.unwrap_or_default())
    }
}

fn refuse_unsupported(file: Json<'_>, architecture: &Architecture) -> Result<()> {
    let refuse = |key: &str, value: &dyn std::fmt::Display| {
        Err(Error::unsupported(format!("{key} = {value} is not supported for {}", architecture.hf_name)))
    };
    for key in ["hidden_act", "hidden_activation"] {
        if let Some(activation) = file.str(key)?
            && activation != "silu"
            && activation != "swish"
        {
            return refuse(key, &format!("{activation:?}"));
        }
    }
    let experts = HF_NUM_EXPERTS.iter().filter(|_| architecture.router.is_none());
    let latent = ["kv_lora_rank"].iter().filter(|_| !architecture.has_latent_attention());
    let no_use = experts.chain(latent).map(|key| (*key, 0.0));
    for (key, neutral) in NEUTRAL_NUMBERS.into_iter().chain(no_use) {
        if let Some(value) = file.f64(key)?
            && value != neutral
        {
            return refuse(key, &value);
        }
    }
    for key in NEUTRAL_SWITCHES {
        if file.bool(key)? == Some(true) {
            return refuse(key, &true);
        }
    }
    if let Some(interleave) = file.bool("rope_interleave")?
        && interleave != (architecture.hf_rope_style == RopeStyle::Interleaved)
    {
        return refuse("rope_interleave", &interleave);
    }
    // Architectures with biases by nature have no such key; for the others it would mean an output bias
    // as well.
    if let Some(bias) = file.bool("attention_bias")?
        && bias != architecture.qkv_bias
    {
        return refuse("attention_bias", &bias);
    }
    Ok(())
}

/// The rope parameters under either name.
fn rope_parameters(file: Json<'_>) -> Json<'_> {
    let nested = ["rope_parameters", "rope_scaling"].into_iter().find_map(|key| file.present(key));
    Json { name: "the rope parameters", value: nested.unwrap_or(&Value::Null) }
}

fn rope(
    file: Json<'_>,
    architecture: &Architecture,
    head_dim: usize,
    max_position_embeddings: usize,
) -> Result<RopeConfig> {
    let parameters = rope_parameters(file);
    let theta = match parameters.f64("rope_theta")? {
        Some(theta) => theta,
        None => file.f64("rope_theta")?.unwrap_or(10_000.0),
    };
    let partial = match parameters.f64("partial_rotary_factor")? {
        Some(factor) => Some(factor),
        None => file.f64("partial_rotary_factor")?,
    };
    let dim = match partial {
        Some(factor) if factor > 0.0 && factor <= 1.0 => (head_dim as f64 * factor) as usize,
        Some(factor) => {
            return Err(Error::invalid_model(format!(
                "partial_rotary_factor is {factor}, but has to be above 0 and at most 1"
            )));
        }
        None => head_dim,
    };
    let kind = match parameters.str("rope_type")? {
        Some(kind) => kind,
        None => parameters.str("type")?.unwrap_or("default"),
    };
    let original_context = parameters.usize("original_max_position_embeddings")?;
    let scaling = match kind {
        "default" => RopeScaling::None,
        "linear" => RopeScaling::Linear { factor: parameters.required_f64("factor")? },
        "llama3" => RopeScaling::Llama3 {
            factor: parameters.required_f64("factor")?,
            low_freq_factor: parameters.required_f64("low_freq_factor")?,
            high_freq_factor: parameters.required_f64("high_freq_factor")?,
            original_context: original_context.ok_or_else(|| {
                Error::invalid_model("original_max_position_embeddings is missing in the rope parameters")
            })?,
        },
        "yarn" => yarn(parameters, original_context.unwrap_or(max_position_embeddings))?,
        other => return Err(Error::unsupported(format!("the rope type {other:?} is not supported"))),
    };
    Ok(RopeConfig { theta, dim, style: architecture.hf_rope_style, scaling })
}

fn yarn(parameters: Json<'_>, original_context: usize) -> Result<RopeScaling> {
    let factor = parameters.required_f64("factor")?;
    let mscale = |weight: f64| if factor <= 1.0 { 1.0 } else { 0.1 * weight * factor.ln() + 1.0 };
    let attention_factor = match parameters.f64("attention_factor")? {
        Some(attention_factor) => attention_factor,
        None => match (parameters.f64("mscale")?, parameters.f64("mscale_all_dim")?) {
            (Some(own), Some(all_dim)) if own != 0.0 && all_dim != 0.0 => mscale(own) / mscale(all_dim),
            _ => mscale(1.0),
        },
    };
    if parameters.bool("truncate")? == Some(false) {
        return Err(Error::unsupported("yarn scaling with truncate = false is not supported"));
    }
    Ok(RopeScaling::Yarn {
        factor,
        original_context,
        beta_fast: parameters.f64("beta_fast")?.unwrap_or(32.0),
        beta_slow: parameters.f64("beta_slow")?.unwrap_or(1.0),
        attention_factor,
    })
}

/// The window, if every layer has it. Files list the kind of each layer or switch the window off.
fn sliding_window(file: Json<'_>) -> Result<Option<usize>> {
    let Some(window) = file.usize("sliding_window")? else { return Ok(None) };
    if file.bool("use_sliding_window")? == Some(false) {
        return Ok(None);
    }
    if let Some(Value::Array(kinds)) = file.present("layer_types") {
        let sliding = kinds.iter().filter(|kind| kind.as_str() == Some("sliding_attention")).count();
        return match sliding {
            0 => Ok(None),
            all if all == kinds.len() => Ok(Some(window)),
            some => Err(Error::unsupported(format!(
                "{some} of {} layers have a sliding window, which is not supported",
                kinds.len()
            ))
            .with_hint("models with a window in all layers or in none can be run")),
        };
    }
    if file.bool("use_sliding_window")? == Some(true)
        && file.usize("max_window_layers")?.is_some_and(|n| n > 0)
    {
        return Err(Error::unsupported("a sliding window in some of the layers is not supported"));
    }
    Ok(Some(window))
}
