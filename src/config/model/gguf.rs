//! The model's keys in a GGUF header.

use super::multipliers::{self, Multipliers};
use super::{
    ExpertsConfig, LatentAttentionConfig, LayerAttention, MAX_LAYERS, ModelConfig, QueryGrowth, RopeConfig,
    RopeScaling, Window, in_range,
};
use crate::config::architecture::Architecture;
use crate::weights::gguf::{Metadata, Value};
use crate::{Error, Result};

/// Keys (after the architecture's name) that change the computation, with their neutral value.
const NEUTRAL: [(&str, f64); 6] = [
    ("attn_logit_softcapping", 0.0),
    ("final_logit_softcapping", 0.0),
    ("logit_scale", 1.0),
    ("residual_scale", 1.0),
    ("embedding_scale", 1.0),
    ("attention.clamp_kqv", 0.0),
];

/// Divisors of frequencies for short and for long sequences.
const LONG_DIVISORS: [&str; 2] = ["rope_factors_short.weight", "rope_factors_long.weight"];

/// Keys of an architecture with experts, and of one with latent attention, that no other may have.
const EXPERT_COUNT: &str = "expert_count";
const SLIDING_WINDOW: &str = "attention.sliding_window";
const KV_LORA_RANK: &str = "attention.kv_lora_rank";

impl ModelConfig {
    /// Reads the metadata of a GGUF file. `shape_of` has the row-major dimensions of the tensors (by name)
    /// that are in the file.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Unsupported`] if the model is or needs something that cannot be run,
    /// [`crate::ErrorKind::InvalidModel`] if a value is missing or impossible.
    pub fn from_gguf<'a>(
        metadata: &Metadata,
        shape_of: impl Fn(&str) -> Option<&'a [usize]>,
    ) -> Result<Self> {
        Self::read_gguf(metadata, shape_of)
            .and_then(Self::validate)
            .map_err(|error| error.context("GGUF metadata"))
    }

    fn read_gguf<'a>(metadata: &Metadata, shape_of: impl Fn(&str) -> Option<&'a [usize]>) -> Result<Self> {
        let has_tensor = |name: &str| shape_of(name).is_some();
        let name = metadata
            .str("general.architecture")
            .ok_or_else(|| Error::invalid_model("general.architecture is missing"))?;
        let keys = Keys { metadata, prefix: name };
        let has_experts = keys.usize(EXPERT_COUNT)?.is_some_and(|count| count > 0);
        let has_window = keys.usize(SLIDING_WINDOW)?.is_some_and(|window| window > 0);
        let architecture = Architecture::from_gguf_name(name, has_experts, has_window)?;
        refuse_unsupported(&keys, architecture)?;

        let hidden_size = keys.required("embedding_length")?;
        let num_heads = keys.required("attention.head_count")?;
        let num_layers = num_layers(&keys)?;
        // Lists have this length.
        in_range(&keys.name("block_count"), num_layers, MAX_LAYERS)?;
        let intermediate_size = keys.required("feed_forward_length")?;
        let eps = keys
            .f64("attention.layer_norm_rms_epsilon")?
            .ok_or_else(|| keys.missing("attention.layer_norm_rms_epsilon"))?;
        let multipliers = Multipliers::from_gguf(&keys, architecture)?;
        let rms_norm_eps = multipliers.rms_norm_eps(eps);
        let vocab_size = match metadata.strings("tokenizer.ggml.tokens") {
            Some(tokens) => tokens.len(),
            None => keys.required("vocab_size")?,
        };
        let max_position_embeddings = keys.required("context_length")?;
        let rope = |dim: usize| {
            Ok::<_, Error>(RopeConfig {
                theta: keys.f64("rope.freq_base")?.unwrap_or(10_000.0),
                dim,
                style: architecture.gguf_rope_style,
                scaling: rope_scaling(&keys, architecture, max_position_embeddings, &has_tensor)?,
                query_growth: growth(&keys, architecture, max_position_embeddings)?,
            })
        };
        let (num_kv_heads, head_dim, rope, latent_attention) = if architecture.has_latent_attention() {
            let rope = rope(keys.required("rope.dimension_count")?)?;
            let latent = LatentAttentionConfig::from_gguf(&keys, num_heads, rms_norm_eps, &rope, &shape_of)?;
            // The header may count heads and widths of the cached row or of the heads made from it.
            (1, latent.qk_nope_head_dim.saturating_add(rope.dim), rope, Some(latent))
        } else {
            let head_dim = head_dim(&keys, hidden_size, num_heads)?;
            let num_kv_heads = keys.usize("attention.head_count_kv")?.unwrap_or(num_heads);
            let rope = rope(keys.usize("rope.dimension_count")?.unwrap_or(head_dim))?;
            (num_kv_heads, head_dim, rope, None)
        };
        let windows = windows(&keys, architecture, num_layers)?;
        let local_rope = local_rope(&keys, architecture, &rope)?;
        let original_context = keys.usize("rope.scaling.original_context_length")?;
        let has_local_rope = local_rope.is_some();
        let rotated = match architecture.unrotated_period {
            Some(period) => LayerAttention::all_but_every(period, num_layers),
            None => vec![true; num_layers],
        };
        let window = match architecture.counts_scaling_in() {
            true => Window::plain(max_position_embeddings),
            false => Window::of(&rope.scaling, original_context, max_position_embeddings),
        };
        Ok(Self {
            architecture,
            vocab_size,
            hidden_size,
            num_layers,
            num_nextn_layers: keys.usize("nextn_predict_layers")?.unwrap_or(0),
            num_heads,
            num_kv_heads,
            head_dim,
            intermediate_size,
            rms_norm_eps,
            activation: architecture.activation,
            rope,
            local_rope,
            max_position_embeddings: window.longest,
            usual_model_len: window.usual,
            context_hint: window.hint,
            qkv_bias: architecture.qkv_bias || has_tensor("blk.0.attn_q.bias"),
            output_bias: has_tensor("blk.0.attn_output.bias"),
            mlp_bias: has_tensor("blk.0.ffn_up.bias"),
            has_sinks: architecture.has_sinks,
            tie_word_embeddings: !has_tensor("output.weight"),
            embedding_scale: multipliers.embedding_scale(architecture, hidden_size),
            logits_scale: multipliers.logits_scale(),
            // It is included in the weights.
            norm_offset: 0.0,
            attention_scale: multipliers.attention_scale(attention_scale(
                architecture,
                num_layers,
                hidden_size / num_heads.max(1),
                head_dim,
            )),
            layer_attention: LayerAttention::with_rotations(
                LayerAttention::with_windows(windows, has_local_rope),
                &rotated,
            ),
            latent_attention,
            experts: ExpertsConfig::from_gguf(
                &keys,
                architecture,
                num_layers,
                intermediate_size,
                has_tensor,
            )?,
            bos_token_id: metadata.checked_token_id("tokenizer.ggml.bos_token_id")?,
            eos_token_ids: metadata.checked_token_id("tokenizer.ggml.eos_token_id")?.into_iter().collect(),
            notices: window.notice().into_iter().collect(),
        })
    }
}

fn refuse_unsupported(keys: &Keys<'_>, architecture: &Architecture) -> Result<()> {
    let no_use =
        [(EXPERT_COUNT, architecture.router.is_some()), (KV_LORA_RANK, architecture.has_latent_attention())];
    let no_use = no_use.iter().filter(|(_, has_use)| !has_use).map(|(key, _)| (*key, 0.0));
    let is_known = |key: &str| architecture.has_multipliers && multipliers::GGUF_KEYS.contains(&key);
    for (key, neutral) in NEUTRAL.into_iter().chain(no_use).filter(|(key, _)| !is_known(key)) {
        if let Some(value) = keys.f64(key)?
            && value != neutral
        {
            return Err(keys.unsupported(key, &value));
        }
    }
    Ok(())
}

/// The window of each layer.
fn windows(keys: &Keys<'_>, architecture: &Architecture, num_layers: usize) -> Result<Vec<Option<usize>>> {
    let window = keys.usize(SLIDING_WINDOW)?.filter(|window| *window > 0);
    let has_window = match architecture.local_period {
        Some(usual) => {
            const PATTERN: &str = "attention.sliding_window_pattern";
            match keys.metadata.bools(&keys.name(PATTERN)) {
                Some(flags) if flags.len() >= num_layers => flags[..num_layers].to_vec(),
                Some(flags) => {
                    let (name, len) = (keys.name(PATTERN), flags.len());
                    return Err(Error::invalid_model(format!(
                        "{name} has {len} entries for {num_layers} layers"
                    )));
                }
                None => {
                    let period = keys.usize(PATTERN)?.unwrap_or(usual);
                    LayerAttention::all_but_every(period.max(1), num_layers)
                }
            }
        }
        None => vec![true; num_layers],
    };
    Ok(has_window.into_iter().map(|has_window| window.filter(|_| has_window)).collect())
}

/// The rotation of layers with a window, if the architecture has a separate one.
fn local_rope(
    keys: &Keys<'_>,
    architecture: &Architecture,
    usual: &RopeConfig,
) -> Result<Option<RopeConfig>> {
    let Some(base) = architecture.local_base else { return Ok(None) };
    let theta = keys.f64("rope.freq_base_swa")?.unwrap_or(base.or_usual(usual.theta));
    Ok(Some(RopeConfig { theta, scaling: RopeScaling::None, ..usual.clone() }))
}

/// The factor of attention scores, which files do not have. The largest Gemma 3 uses the root of its width by its
/// heads, and is identified by its number of layers, as in llama.cpp.
fn attention_scale(architecture: &Architecture, num_layers: usize, width: usize, head_dim: usize) -> f64 {
    const LARGEST_GEMMA3: usize = 62;
    let is_largest = architecture.scaled_embeddings && num_layers == LARGEST_GEMMA3;
    1.0 / (if is_largest { width } else { head_dim } as f64).sqrt()
}

/// Layers, without the blocks after them that predict further tokens and that are not used.
fn num_layers(keys: &Keys<'_>) -> Result<usize> {
    let num_blocks = keys.required("block_count")?;
    let num_predicting = keys.usize("nextn_predict_layers")?.unwrap_or(0);
    num_blocks.checked_sub(num_predicting).ok_or_else(|| {
        Error::invalid_model(format!(
            "{} is {num_predicting}, but there are {num_blocks} blocks",
            keys.name("nextn_predict_layers")
        ))
    })
}

/// Values of a head, if keys and values have the same number.
fn head_dim(keys: &Keys<'_>, hidden_size: usize, num_heads: usize) -> Result<usize> {
    let head_dim = match keys.usize("attention.key_length")? {
        Some(head_dim) => head_dim,
        None => hidden_size.checked_div(num_heads).unwrap_or(0),
    };
    match keys.usize("attention.value_length")? {
        Some(value_dim) if value_dim != head_dim => Err(Error::unsupported(format!(
            "{} is {value_dim}, but keys have {head_dim} values",
            keys.name("attention.value_length")
        ))
        .with_hint("supported are models whose keys and values have the same width")),
        _ => Ok(head_dim),
    }
}

/// The keys of one architecture, with errors that name the key.
pub(super) struct Keys<'a> {
    metadata: &'a Metadata,
    prefix: &'a str,
}

impl Keys<'_> {
    /// The whole name of a key.
    pub(super) fn name(&self, key: &str) -> String {
        format!("{}.{key}", self.prefix)
    }

    fn get<T>(
        &self,
        key: &str,
        kind: &str,
        read: impl Fn(&Metadata, &str) -> Option<T>,
    ) -> Result<Option<T>> {
        let key = self.name(key);
        let Some(value) = self.metadata.get(&key) else { return Ok(None) };
        match read(self.metadata, &key) {
            Some(read) => Ok(Some(read)),
            None if matches!(value, Value::Integers(_)) => {
                Err(Error::unsupported(format!("{key} differs between layers, which is not supported"))
                    .with_hint("supported are models whose layers are alike"))
            }
            None => Err(Error::invalid_model(format!("{key} is {}, expected {kind}", value.describe()))),
        }
    }

    pub(super) fn usize(&self, key: &str) -> Result<Option<usize>> {
        self.get(key, "a non-negative integer", Metadata::usize)
    }

    pub(super) fn f64(&self, key: &str) -> Result<Option<f64>> {
        self.get(key, "a number", Metadata::f64)
    }

    pub(super) fn required(&self, key: &str) -> Result<usize> {
        self.usize(key)?.ok_or_else(|| self.missing(key))
    }

    pub(super) fn bool(&self, key: &str) -> Result<Option<bool>> {
        self.get(key, "true or false", Metadata::bool)
    }

    pub(super) fn missing(&self, key: &str) -> Error {
        Error::invalid_model(format!("{} is missing", self.name(key)))
    }

    pub(super) fn unsupported(&self, key: &str, value: &dyn std::fmt::Display) -> Error {
        Error::unsupported(format!("{} = {value} is not supported", self.name(key)))
            .with_hint("a model that was trained without it runs if the key is removed from the file")
    }
}

fn rope_scaling(
    keys: &Keys<'_>,
    architecture: &Architecture,
    max_position_embeddings: usize,
    has_tensor: &impl Fn(&str) -> bool,
) -> Result<RopeScaling> {
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
        // Files of Phi 3 leave the kind out.
        (None, None) if has_tensor(LONG_DIVISORS[1]) => long_rope(keys, max_position_embeddings, has_tensor)?,
        (None | Some("none"), None) | (Some("none"), Some(_)) => RopeScaling::None,
        (None | Some("linear"), Some(factor)) => RopeScaling::Linear { factor },
        (Some("yarn"), Some(factor)) => yarn(keys, architecture, factor, max_position_embeddings)?,
        (Some("linear" | "yarn"), None) => return Err(keys.missing("rope.scaling.factor")),
        (Some("longrope"), _) => long_rope(keys, max_position_embeddings, has_tensor)?,
        (Some(other), _) => {
            let key = keys.name("rope.scaling.type");
            return Err(Error::unsupported(format!("{key} = {other:?} is not supported"))
                .with_hint("supported are none, linear, yarn and longrope"));
        }
    };
    if !has_tensor("rope_freqs.weight") {
        return Ok(scaling);
    }
    match scaling {
        // It is unknown which of the two applies.
        RopeScaling::Long { .. } => Err(Error::unsupported(format!(
            "the file has rope_freqs.weight, and {} is \"longrope\", which has divisors of its own",
            keys.name("rope.scaling.type")
        ))
        .with_hint("convert the model again, with one of them")),
        scaling => Ok(RopeScaling::FreqFactors(Box::new(scaling))),
    }
}

/// How queries grow with their position: in steps of the context before scaling.
fn growth(
    keys: &Keys<'_>,
    architecture: &Architecture,
    max_position_embeddings: usize,
) -> Result<Option<QueryGrowth>> {
    let Some(beta) = keys.f64("attention.temperature_scale")?.filter(|_| architecture.queries_grow) else {
        return Ok(None);
    };
    let period = keys.usize("rope.scaling.original_context_length")?.unwrap_or(max_position_embeddings);
    Ok(QueryGrowth::new(beta, period))
}

fn long_rope(
    keys: &Keys<'_>,
    max_position_embeddings: usize,
    has_tensor: &impl Fn(&str) -> bool,
) -> Result<RopeScaling> {
    for name in LONG_DIVISORS {
        if !has_tensor(name) {
            return Err(Error::invalid_model(format!(
                "{} is \"longrope\", but the file has no {name}",
                keys.name("rope.scaling.type")
            )));
        }
    }
    Ok(RopeScaling::Long {
        divisors: None,
        original_context: keys
            .usize("rope.scaling.original_context_length")?
            .unwrap_or(max_position_embeddings),
        attention_factor: keys.f64("rope.scaling.attn_factor")?.unwrap_or(1.0),
    })
}

fn yarn(
    keys: &Keys<'_>,
    architecture: &Architecture,
    factor: f64,
    max_position_embeddings: usize,
) -> Result<RopeScaling> {
    let written_factor = keys.f64("rope.scaling.attn_factor")?;
    let own_factor = written_factor.unwrap_or(1.0);
    let is_whole = architecture.gguf_has_whole_yarn_factor && written_factor.is_some();
    let attention_factor = if architecture.has_latent_attention() {
        // The factor is on the scores instead, and the rotation does not change lengths.
        if own_factor != 1.0 {
            return Err(keys.unsupported("rope.scaling.attn_factor", &own_factor));
        }
        1.0
    } else {
        // The factor of scores is divided out of the factor of sine and cosine.
        let multiplier = keys.f64("rope.scaling.yarn_log_multiplier")?.unwrap_or(0.0);
        let of = |weight: f64| if factor <= 1.0 { 1.0 } else { 0.1 * weight * factor.ln() + 1.0 };
        own_factor * if is_whole { 1.0 } else { of(1.0) / of(multiplier) }
    };
    Ok(RopeScaling::Yarn {
        factor,
        original_context: keys
            .usize("rope.scaling.original_context_length")?
            .unwrap_or(max_position_embeddings),
        beta_fast: keys.f64("rope.scaling.yarn_beta_fast")?.unwrap_or(32.0),
        beta_slow: keys.f64("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0),
        attention_factor,
        truncate: architecture.truncates_yarn,
    })
}
