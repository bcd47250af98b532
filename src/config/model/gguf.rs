//! The model's keys in a GGUF header.

use super::{ModelConfig, RopeConfig, RopeScaling};
use crate::config::architecture::Architecture;
use crate::weights::gguf::{Metadata, Value};
use crate::{Error, Result};

/// Keys (after the architecture's name) that change the computation, with the value that leaves it as it is.
const NEUTRAL: [(&str, f64); 8] = [
    ("attn_logit_softcapping", 0.0),
    ("final_logit_softcapping", 0.0),
    ("logit_scale", 1.0),
    ("residual_scale", 1.0),
    ("embedding_scale", 1.0),
    ("attention.clamp_kqv", 0.0),
    ("expert_count", 0.0),
    ("attention.kv_lora_rank", 0.0),
];

impl ModelConfig {
    /// Reads the metadata of a GGUF file. `has_tensor` says which tensors (by name) the file has.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Unsupported`] if the model is or needs something that cannot be run,
    /// [`crate::ErrorKind::InvalidModel`] if a value is missing or impossible.
    pub fn from_gguf(metadata: &Metadata, has_tensor: impl Fn(&str) -> bool) -> Result<Self> {
        Self::read_gguf(metadata, has_tensor)
            .and_then(Self::validate)
            .map_err(|error| error.context("GGUF metadata"))
    }

    fn read_gguf(metadata: &Metadata, has_tensor: impl Fn(&str) -> bool) -> Result<Self> {
        let name = metadata
            .str("general.architecture")
            .ok_or_else(|| Error::invalid_model("general.architecture is missing"))?;
        let architecture = Architecture::from_gguf_name(name)?;
        let keys = Keys { metadata, prefix: name };
        for (key, neutral) in NEUTRAL {
            if let Some(value) = keys.f64(key)?
                && value != neutral
            {
                return Err(Error::unsupported(format!("{name}.{key} = {value} is not supported")));
            }
        }

        let hidden_size = keys.required("embedding_length")?;
        let num_heads = keys.required("attention.head_count")?;
        let head_dim = match keys.usize("attention.key_length")? {
            Some(head_dim) => head_dim,
            None => hidden_size.checked_div(num_heads).unwrap_or(0),
        };
        if let Some(value_dim) = keys.usize("attention.value_length")?
            && value_dim != head_dim
        {
            return Err(Error::unsupported(format!(
                "{name}.attention.value_length is {value_dim}, but keys have {head_dim} values"
            )));
        }
        let vocab_size = match metadata.strings("tokenizer.ggml.tokens") {
            Some(tokens) => tokens.len(),
            None => keys.required("vocab_size")?,
        };
        let max_position_embeddings = keys.required("context_length")?;
        Ok(Self {
            architecture,
            vocab_size,
            hidden_size,
            num_layers: keys.required("block_count")?,
            num_heads,
            num_kv_heads: keys.usize("attention.head_count_kv")?.unwrap_or(num_heads),
            head_dim,
            intermediate_size: keys.required("feed_forward_length")?,
            rms_norm_eps: keys
                .f64("attention.layer_norm_rms_epsilon")?
                .ok_or_else(|| keys.missing("attention.layer_norm_rms_epsilon"))?
                as f32,
            rope: RopeConfig {
                theta: keys.f64("rope.freq_base")?.unwrap_or(10_000.0),
                dim: keys.usize("rope.dimension_count")?.unwrap_or(head_dim),
                style: architecture.gguf_rope_style,
                scaling: rope_scaling(&keys, max_position_embeddings, &has_tensor)?,
            },
            max_position_embeddings,
            tie_word_embeddings: !has_tensor("output.weight"),
            sliding_window: keys.usize("attention.sliding_window")?.filter(|window| *window > 0),
            bos_token_id: metadata.token_id("tokenizer.ggml.bos_token_id"),
            eos_token_ids: metadata.token_id("tokenizer.ggml.eos_token_id").into_iter().collect(),
        })
    }
}

/// The keys of one architecture, with errors that name the key.
struct Keys<'a> {
    metadata: &'a Metadata,
    prefix: &'a str,
}

impl Keys<'_> {
    fn get<T>(
        &self,
        key: &str,
        kind: &str,
        read: impl Fn(&Metadata, &str) -> Option<T>,
    ) -> Result<Option<T>> {
        let key = format!("{}.{key}", self.prefix);
        let Some(value) = self.metadata.get(&key) else { return Ok(None) };
        match read(self.metadata, &key) {
            Some(read) => Ok(Some(read)),
            None if matches!(value, Value::Integers(_)) => {
                Err(Error::unsupported(format!("{key} differs between layers, which is not supported")))
            }
            None => Err(Error::invalid_model(format!("{key} is {value:?}, not {kind}"))),
        }
    }

    fn usize(&self, key: &str) -> Result<Option<usize>> {
        self.get(key, "a non-negative integer", Metadata::usize)
    }

    fn f64(&self, key: &str) -> Result<Option<f64>> {
        self.get(key, "a number", Metadata::f64)
    }

    fn required(&self, key: &str) -> Result<usize> {
        self.usize(key)?.ok_or_else(|| self.missing(key))
    }

    fn missing(&self, key: &str) -> Error {
        Error::invalid_model(format!("{}.{key} is missing", self.prefix))
    }
}

fn rope_scaling(
    keys: &Keys<'_>,
    max_position_embeddings: usize,
    has_tensor: &impl Fn(&str) -> bool,
) -> Result<RopeScaling> {
    for name in ["rope_factors_long.weight", "rope_factors_short.weight"] {
        if has_tensor(name) {
            return Err(Error::unsupported(format!("rope scaling by the tensor {name} is not supported")));
        }
    }
    let factor = match keys.f64("rope.scaling.factor")? {
        Some(factor) => Some(factor),
        // The key's name in the first files with scaling.
        None => keys.f64("rope.scale_linear")?,
    }
    // Some writers put 0 for none.
    .filter(|factor| *factor != 0.0);
    let kind =
        keys.get("rope.scaling.type", "a string", |metadata, key| metadata.str(key).map(str::to_owned))?;
    let scaling = match (kind.as_deref(), factor) {
        (None | Some("none"), None) | (Some("none"), Some(_)) => RopeScaling::None,
        (None | Some("linear"), Some(factor)) => RopeScaling::Linear { factor },
        (Some("yarn"), Some(factor)) => yarn(keys, factor, max_position_embeddings)?,
        (Some("linear" | "yarn"), None) => return Err(keys.missing("rope.scaling.factor")),
        (Some(other), _) => {
            return Err(Error::unsupported(format!("the rope scaling type {other:?} is not supported")));
        }
    };
    if !has_tensor("rope_freqs.weight") {
        return Ok(scaling);
    }
    match scaling {
        RopeScaling::None => Ok(RopeScaling::FreqFactors),
        other => Err(Error::unsupported(format!(
            "the file has rope_freqs.weight and rope scaling {other:?}, and both together are not supported"
        ))),
    }
}

fn yarn(keys: &Keys<'_>, factor: f64, max_position_embeddings: usize) -> Result<RopeScaling> {
    // For the architectures with this key the factor on sine and cosine depends on more than it.
    if let Some(multiplier) = keys.f64("rope.scaling.yarn_log_multiplier")?
        && multiplier != 0.0
    {
        return Err(Error::unsupported(format!(
            "{}.rope.scaling.yarn_log_multiplier = {multiplier} is not supported",
            keys.prefix
        )));
    }
    let attention_factor = if factor <= 1.0 { 1.0 } else { 0.1 * factor.ln() + 1.0 };
    Ok(RopeScaling::Yarn {
        factor,
        original_context: keys
            .usize("rope.scaling.original_context_length")?
            .unwrap_or(max_position_embeddings),
        beta_fast: keys.f64("rope.scaling.yarn_beta_fast")?.unwrap_or(32.0),
        beta_slow: keys.f64("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0),
        attention_factor: attention_factor * keys.f64("rope.scaling.attn_factor")?.unwrap_or(1.0),
    })
}
