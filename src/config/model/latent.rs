//! Latent attention in the files of either format: the widths of its projections and the scale of its scores.

use super::gguf::Keys;
use super::json::Json;
use super::{LatentAttentionConfig, MAX_HEAD_DIM, MAX_SIZE, RopeConfig, RopeScaling, in_range};
use crate::config::architecture::Architecture;
use crate::{Error, Result};

/// Hugging Face's models use it in the norms of the low ranks, for every `rms_norm_eps`.
const HF_LORA_NORM_EPS: f32 = 1e-6;

/// The factor of scores: from the root of the whole width, not of the cached row's, and the square of yarn's `mscale`,
/// which replaces a factor of sine and cosine there.
fn softmax_scale(head_dim: usize, mscale: f64) -> f32 {
    (mscale * mscale / (head_dim as f64).sqrt()) as f32
}

/// `mscale` of a scaling, from its weight of the logarithm of the factor.
fn mscale(scaling: &RopeScaling, log_multiplier: f64) -> f64 {
    match scaling.without_divisors() {
        RopeScaling::Yarn { factor, .. }
        | RopeScaling::Linear { factor }
        | RopeScaling::Llama3 { factor, .. }
            if *factor > 1.0 =>
        {
            1.0 + log_multiplier * factor.ln()
        }
        _ => 1.0,
    }
}

impl LatentAttentionConfig {
    /// Latent attention in a GGUF file, whose tensors give the widths: its keys have had several meanings.
    pub(super) fn from_gguf<'a>(
        keys: &Keys<'_>,
        num_heads: usize,
        rms_norm_eps: f32,
        rope: &RopeConfig,
        shape_of: impl Fn(&str) -> Option<&'a [usize]>,
    ) -> Result<Self> {
        let widths = Widths::from_gguf(keys, num_heads, rope.dim, shape_of)?;
        let log_multiplier = keys.f64("rope.scaling.yarn_log_multiplier")?.unwrap_or(0.0);
        let head_dim = widths.qk_nope_head_dim.saturating_add(rope.dim);
        Ok(Self {
            // 0 means none.
            q_lora_rank: keys.usize("attention.q_lora_rank")?.filter(|rank| *rank > 0),
            kv_lora_rank: widths.kv_lora_rank,
            qk_nope_head_dim: widths.qk_nope_head_dim,
            v_head_dim: widths.v_head_dim,
            softmax_scale: softmax_scale(head_dim, mscale(&rope.scaling, log_multiplier)),
            lora_norm_eps: rms_norm_eps,
        })
    }

    /// Latent attention in a Hugging Face folder. `rope_dim` is the rotated width in the file, of which the rope may
    /// rotate less.
    pub(super) fn from_hf(
        file: Json<'_>,
        architecture: &Architecture,
        rope_parameters: Json<'_>,
        (rope_dim, rope): (usize, &RopeConfig),
        has_tensor: &impl Fn(&str) -> bool,
    ) -> Result<Self> {
        if rope.dim != rope_dim {
            return Err(Error::unsupported(format!(
                "rotating {} of the {rope_dim} values of qk_rope_head_dim is not supported",
                rope.dim
            ))
            .with_hint("remove partial_rotary_factor from config.json if all of them are rotated"));
        }
        if file.bool("use_mla")? == Some(false) {
            return Err(Error::unsupported("use_mla = false is not supported")
                .with_hint("without latent attention the weights of this model need another class"));
        }
        let defaults = architecture.hf_defaults.latent;
        let qk_nope_head_dim = file.usize_or("qk_nope_head_dim", Some(defaults.qk_nope_head_dim))?;
        let log_multiplier = 0.1 * rope_parameters.f64("mscale_all_dim")?.unwrap_or(0.0);
        let head_dim = qk_nope_head_dim.saturating_add(rope_dim);
        // `null` means one projection of queries; for a missing key the weights decide.
        let has_rank = file.is_missing("q_lora_rank") && has_tensor("blk.0.attn_q_a.weight");
        let default_rank = has_rank.then_some(defaults.q_lora_rank);
        Ok(Self {
            q_lora_rank: file.usize("q_lora_rank")?.or(default_rank).filter(|rank| *rank > 0),
            kv_lora_rank: file.usize_or("kv_lora_rank", Some(512))?,
            qk_nope_head_dim,
            v_head_dim: file.usize_or("v_head_dim", Some(defaults.v_head_dim))?,
            softmax_scale: softmax_scale(head_dim, mscale(&rope.scaling, log_multiplier)),
            lora_norm_eps: HF_LORA_NORM_EPS,
        })
    }

    pub(super) fn validate(&self, sliding_window: Option<usize>) -> Result<()> {
        if let Some(rank) = self.q_lora_rank {
            in_range("q_lora_rank", rank, MAX_SIZE)?;
        }
        in_range("kv_lora_rank", self.kv_lora_rank, MAX_SIZE)?;
        in_range("qk_nope_head_dim", self.qk_nope_head_dim, MAX_HEAD_DIM)?;
        in_range("v_head_dim", self.v_head_dim, MAX_HEAD_DIM)?;
        if !(self.softmax_scale > 0.0 && self.softmax_scale.is_finite()) {
            return Err(Error::invalid_model(format!(
                "scores are multiplied by {}, but it must be positive",
                self.softmax_scale
            )));
        }
        if let Some(window) = sliding_window {
            return Err(Error::unsupported(format!(
                "a sliding window of {window} tokens with latent attention is not supported"
            ))
            .with_hint("remove the window from the file if the model was trained without one"));
        }
        Ok(())
    }
}

/// The widths that a GGUF file's tensors have.
struct Widths {
    kv_lora_rank: usize,
    qk_nope_head_dim: usize,
    v_head_dim: usize,
}

impl Widths {
    fn from_gguf<'a>(
        keys: &Keys<'_>,
        num_heads: usize,
        rope_dim: usize,
        shape_of: impl Fn(&str) -> Option<&'a [usize]>,
    ) -> Result<Self> {
        // Key and value width of a head. Files with split tensors have the widths of the cached row in one
        // of the two pairs, and it has not always been the same one.
        let mut head_widths = Vec::new();
        for (key, value) in [
            ("attention.key_length_mla", "attention.value_length_mla"),
            ("attention.key_length", "attention.value_length"),
        ] {
            head_widths.extend(keys.usize(key)?.zip(keys.usize(value)?));
        }
        let (key, value, joint) =
            ("blk.0.attn_k_b.weight", "blk.0.attn_v_b.weight", "blk.0.attn_kv_b.weight");
        let rank = keys.usize("attention.kv_lora_rank")?;
        let widths = match (shape_of(key), shape_of(value), shape_of(joint)) {
            (Some(key), Some(value), _) => Self::of_split(key, value, num_heads)?,
            (None, None, Some(joint)) => Self::of_joint(joint, num_heads, rope_dim, &head_widths)?,
            _ => {
                return Err(Error::invalid_model(format!(
                    "the file has neither {key} and {value} nor {joint} alone"
                )));
            }
        };
        if let Some(rank) = rank
            && rank != widths.kv_lora_rank
        {
            return Err(Error::invalid_model(format!(
                "{} is {rank}, but tensors have {}",
                keys.name("attention.kv_lora_rank"),
                widths.kv_lora_rank
            )));
        }
        let found = (widths.qk_nope_head_dim.saturating_add(rope_dim), widths.v_head_dim);
        if !head_widths.is_empty() && !head_widths.contains(&found) {
            return Err(Error::invalid_model(format!(
                "tensors have heads of {found:?} values for keys and values, but the header has {head_widths:?}"
            )));
        }
        Ok(widths)
    }

    /// `[heads, rank, nope]` and `[heads, value, rank]`.
    fn of_split(key: &[usize], value: &[usize], num_heads: usize) -> Result<Self> {
        match (key, value) {
            (&[key_heads, rank, nope], &[value_heads, v_head_dim, value_rank])
                if key_heads == num_heads && value_heads == num_heads && value_rank == rank =>
            {
                Ok(Self { kv_lora_rank: rank, qk_nope_head_dim: nope, v_head_dim })
            }
            _ => Err(Error::invalid_model(format!(
                "attn_k_b and attn_v_b have the shapes {key:?} and {value:?}, but for {num_heads} heads they must \
                 be [{num_heads}, rank, keys] and [{num_heads}, values, rank]"
            ))),
        }
    }

    /// `[heads · (nope + value), rank]`, which the header's widths divide.
    fn of_joint(
        joint: &[usize],
        num_heads: usize,
        rope_dim: usize,
        head_widths: &[(usize, usize)],
    ) -> Result<Self> {
        let &[num_rows, rank] = joint else {
            return Err(Error::invalid_model(format!(
                "attn_kv_b has the shape {joint:?}, but must have 2 dimensions"
            )));
        };
        head_widths
            .iter()
            .filter_map(|(key_width, v_head_dim)| Some((key_width.checked_sub(rope_dim)?, *v_head_dim)))
            .find(|(nope, value)| {
                nope.checked_add(*value).and_then(|width| width.checked_mul(num_heads)) == Some(num_rows)
            })
            .map(|(qk_nope_head_dim, v_head_dim)| Self { kv_lora_rank: rank, qk_nope_head_dim, v_head_dim })
            .ok_or_else(|| {
                Error::invalid_model(format!(
                    "attn_kv_b has {num_rows} rows for {num_heads} heads, which matches none of the widths of keys \
                     (with {rope_dim} rotated) and values in the header: {head_widths:?}"
                ))
            })
    }
}
