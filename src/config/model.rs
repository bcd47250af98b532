//! A model's configuration: its dimensions and the variant of each layer, read from either format and checked.
//!
//! Invariant: every [`ModelConfig`] can be computed; no size computed from its dimensions overflows the address space,
//! and unsupported features of the file have been refused.

use crate::config::architecture::Architecture;
use crate::config::{Activation, RopeStyle};
use crate::weights::Checkpoint;
use crate::{Error, Result};
use tinyvllm_kernels::attention::AttentionHeads;

mod experts;
mod gguf;
mod hf;
mod hf_rope;
mod json;
mod latent;
mod layers;
mod mtp;
mod multipliers;

pub use layers::{LayerAttention, Rotation};

/// Maximum rows and columns of a matrix, so that no size overflows.
const MAX_SIZE: usize = 1 << 24;
const MAX_LAYERS: usize = 4096;
const MAX_HEAD_DIM: usize = 1024;
/// Longest sequence that a scaling makes possible, which is the longest of the engine.
const MAX_SCALED_LEN: usize = 1 << 24;

/// The configuration of a decoder-only language model.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// The entry of the registry.
    pub architecture: &'static Architecture,
    /// Rows of the embedding and of the language-model head.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Decoder layers.
    pub num_layers: usize,
    /// Blocks after them that predict further tokens. They are not loaded unless the model drafts with the first of them
    /// (see [`Self::load_mtp_block`]).
    pub num_nextn_layers: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Values in a head; not always `hidden_size / num_heads`.
    pub head_dim: usize,
    /// Width of the feed-forward network; of those without experts, if a model has both.
    pub intermediate_size: usize,
    /// Added to the mean square under the root. If layers multiply their outputs, it applies to the residual stream
    /// before the multipliers.
    pub rms_norm_eps: f32,
    /// The activation between the two halves of feed-forward networks and of experts.
    pub activation: Activation,
    /// Rotary position embedding.
    pub rope: RopeConfig,
    /// That of layers which set it.
    pub local_rope: Option<RopeConfig>,
    /// The longest sequence that the model was made for, or that its rope scaling makes possible.
    pub max_position_embeddings: usize,
    /// The longest sequence with the best results; longer ones must be requested.
    pub usual_model_len: usize,
    /// The hint for a longer one than `max_position_embeddings`, if there is a reason in addition to its
    /// training.
    pub context_hint: Option<&'static str>,
    /// The query, key and value projections have biases.
    pub qkv_bias: bool,
    /// The projection after attention has a bias.
    pub output_bias: bool,
    /// The three projections of feed-forward networks have biases.
    pub mlp_bias: bool,
    /// Each query head has a score without a value.
    pub has_sinks: bool,
    /// The embedding matrix is also the language-model head.
    pub tie_word_embeddings: bool,
    /// The factor of embeddings.
    pub embedding_scale: f32,
    /// The factor of logits, applied to the weights of the last norm.
    pub logits_scale: f32,
    /// The offset of norm weights.
    pub norm_offset: f32,
    /// The factor of attention scores.
    pub attention_scale: f64,
    /// Per-layer settings of attention, including those of the MTP block if the model drafts with it.
    pub layer_attention: Vec<LayerAttention>,
    /// Keys and values are projections of one latent row for each token, which the cache holds. Then `head_dim` is that
    /// of queries and `num_kv_heads` is 1.
    pub latent_attention: Option<LatentAttentionConfig>,
    /// Layers whose feed-forward network is a choice of experts.
    pub experts: Option<ExpertsConfig>,
    /// The token that starts a text, if the model has one.
    pub bos_token_id: Option<u32>,
    /// The tokens that end a text, from the model's files. The tokenizer may have more.
    pub eos_token_ids: Vec<u32>,
    /// Notices about settings whose effect differs from their author's likely intention, a line each.
    pub notices: Vec<String>,
}

/// How long sequences may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Window {
    longest: usize,
    usual: usize,
    hint: Option<&'static str>,
}

impl Window {
    fn plain(max_position_embeddings: usize) -> Self {
        Self { longest: max_position_embeddings, usual: max_position_embeddings, hint: None }
    }

    /// With a scaling that makes longer sequences possible than `max_position_embeddings`, if the file has not counted
    /// it in. `original` is the context before scaling, where a file names it.
    fn of(scaling: &RopeScaling, original: Option<usize>, max_position_embeddings: usize) -> Self {
        match scaling {
            RopeScaling::Linear { factor } | RopeScaling::Yarn { factor, .. } => {
                let original = original.unwrap_or(max_position_embeddings);
                let scaled = (original as f64 * factor).round() as usize;
                Self::plain(max_position_embeddings.max(scaled.min(MAX_SCALED_LEN)))
            }
            // Longer contexts use other divisors, for all of their tokens, so they must be requested.
            RopeScaling::Long { original_context, .. } => Self {
                usual: max_position_embeddings.min(*original_context),
                ..Self::plain(max_position_embeddings)
            },
            RopeScaling::FreqFactors(scaling) => Self::of(scaling, original, max_position_embeddings),
            // Its factor is for wavelengths, and its files count it in.
            RopeScaling::Llama3 { .. } | RopeScaling::None => Self::plain(max_position_embeddings),
        }
    }

    /// Its notices.
    fn notice(self) -> Option<String> {
        let Self { longest, usual, .. } = self;
        (usual < longest).then(|| {
            format!(
                "the context is {usual} tokens unless --max-model-len sets more, up to {longest}; then short \
                 sequences use the rotary divisors for long ones, too"
            )
        })
    }
}

/// Multi-head latent attention. A query head has `qk_nope_head_dim` values without a position and after them the
/// `rope.dim` that are rotated.
#[derive(Debug, Clone, PartialEq)]
pub struct LatentAttentionConfig {
    /// Width of the row between the two projections of queries; none if there is one projection.
    pub q_lora_rank: Option<usize>,
    /// Width of the latent row, without the rotated key that is cached after it.
    pub kv_lora_rank: usize,
    /// Values of a query or key head that are not rotated.
    pub qk_nope_head_dim: usize,
    /// Values of a value head.
    pub v_head_dim: usize,
    /// The factor of scores.
    pub softmax_scale: f32,
    /// Added to the mean square under the root, in the norms of the two low ranks.
    pub lora_norm_eps: f32,
}

/// A feed-forward network of experts that a router chooses, token by token.
#[derive(Debug, Clone, PartialEq)]
pub struct ExpertsConfig {
    /// Layers before the first one with experts.
    pub num_dense_layers: usize,
    /// Experts to choose from.
    pub num_experts: usize,
    /// Experts that a token goes through.
    pub num_experts_per_tok: usize,
    /// Width of an expert.
    pub intermediate_size: usize,
    /// Width of the network that every token goes through in addition to its experts; none if there is none.
    pub shared_intermediate_size: Option<usize>,
    /// How logits become probabilities.
    pub scoring: Scoring,
    /// The router adds a bias of each expert to its probability, to choose by but not to weigh with.
    pub has_selection_bias: bool,
    /// The router adds a bias to each logit.
    pub has_router_bias: bool,
    /// The three projections of each expert have biases.
    pub has_biases: bool,
    /// The checkpoint has the rows of gate and up of an expert in turns, and dense ones with rows and columns exchanged.
    pub is_interleaved: bool,
    /// Groups that experts are divided into, and of how many of them some may be chosen.
    pub num_groups: usize,
    /// At most `num_groups`; equal if groups have no effect.
    pub num_groups_per_tok: usize,
    /// The weights of the chosen experts are divided by their sum.
    pub normalize: bool,
    /// The final factor of weights.
    pub scale: f32,
}

/// How a router's logits become probabilities.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scoring {
    /// Of all experts together. A group is as good as its best expert.
    Softmax,
    /// Each by itself. A group is as good as its best two experts.
    Sigmoid,
}

/// Rotary position embedding: pairs of values are rotated by `position · frequency`.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeConfig {
    /// The base of the frequencies: pair `i` has `theta^(-2i/dim)`.
    pub theta: f64,
    /// Values of a head that are rotated, its first ones; even.
    pub dim: usize,
    /// Which values make a pair.
    pub style: RopeStyle,
    /// How the frequencies are changed for longer contexts.
    pub scaling: RopeScaling,
    /// How queries grow with their position, if they do.
    pub query_growth: Option<QueryGrowth>,
}

/// How queries grow with their position, so that attention over long contexts stays sharp: they are multiplied by
/// `1 + beta · ln(1 + ⌊position / period⌋)`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QueryGrowth {
    /// 0 for none.
    pub beta: f64,
    /// Positions with one factor; at least 1.
    pub period: usize,
}

impl QueryGrowth {
    /// Growth with every `period` positions; none if it is none.
    #[must_use]
    pub fn new(beta: f64, period: usize) -> Option<Self> {
        (beta != 0.0 && period > 0).then_some(Self { beta, period })
    }

    /// The factor of a position's queries.
    #[must_use]
    pub fn factor(self, position: usize) -> f64 {
        self.beta.mul_add((1.0 + (position / self.period.max(1)) as f64).ln(), 1.0)
    }
}

/// How rotary frequencies are changed for longer contexts.
#[derive(Debug, Clone, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// All are divided by `factor`.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// Those with long wavelengths are divided, those with short ones are not, with a ramp between.
    Llama3 {
        /// The divisor of long wavelengths.
        factor: f64,
        /// Wavelengths above `original_context / low_freq_factor` are long.
        low_freq_factor: f64,
        /// Wavelengths below `original_context / high_freq_factor` are short.
        high_freq_factor: f64,
        /// The context length before scaling.
        original_context: usize,
    },
    /// A ramp between dividing and not by the number of rotations in the original context, and a factor
    /// on the rotated values.
    Yarn {
        /// The divisor.
        factor: f64,
        /// The context length before scaling.
        original_context: usize,
        /// Pairs with more rotations than this are not divided.
        beta_fast: f64,
        /// Pairs with fewer rotations than this are divided.
        beta_slow: f64,
        /// The factor of sine and cosine.
        attention_factor: f64,
        /// The ends of the ramp are whole pairs.
        truncate: bool,
    },
    /// Each pair has its own divisor, and another one where sequences may be longer than `original_context`.
    Long {
        /// The divisors for short and for long sequences; none if they are in the tensors `rope_factors_short.weight`
        /// and `rope_factors_long.weight` of the checkpoint.
        divisors: Option<(Vec<f64>, Vec<f64>)>,
        /// The context length before scaling.
        original_context: usize,
        /// The factor of sine and cosine.
        attention_factor: f64,
    },
    /// After that scaling, each pair has its own divisor, in the tensor `rope_freqs.weight` of the checkpoint.
    FreqFactors(Box<Self>),
}

impl RopeScaling {
    /// Without the divisors of single pairs that come after it.
    #[must_use]
    pub fn without_divisors(&self) -> &Self {
        match self {
            Self::FreqFactors(scaling) => scaling.without_divisors(),
            other => other,
        }
    }
}

impl ModelConfig {
    /// The configuration in a checkpoint of either format.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Unsupported`] if the model is or needs something that cannot be run,
    /// [`crate::ErrorKind::InvalidModel`] if a value is missing or impossible.
    pub fn from_checkpoint(checkpoint: &Checkpoint) -> Result<Self> {
        match (checkpoint.gguf_metadata(), checkpoint.config_json()) {
            (Some(metadata), _) => Self::from_gguf(metadata, |name| checkpoint.shape(name)),
            (None, Some(config)) => {
                let has_tensor = |name: &str| checkpoint.contains(name);
                let config = Self::from_hf(config, checkpoint.generation_config_json(), has_tensor)?;
                config.with_own_head(checkpoint)
            }
            (None, None) => Err(Error::internal("a checkpoint is neither a GGUF file nor a folder")),
        }
    }

    /// A separate head is used, for every value of the switch: it was trained.
    fn with_own_head(mut self, checkpoint: &Checkpoint) -> Result<Self> {
        let (embedding, head) = ("token_embd.weight", "output.weight");
        if self.tie_word_embeddings && checkpoint.contains(embedding) && checkpoint.contains(head) {
            let (embedding, head) = (checkpoint.tensor(embedding)?, checkpoint.tensor(head)?);
            // A matrix that must be converted first is separate: no embedding is stored like that.
            let is_same = embedding.dtype == head.dtype
                && embedding.shape == head.shape
                && matches!((embedding.data(), head.data()), (Ok(one), Ok(other)) if one == other);
            if !is_same {
                self.tie_word_embeddings = false;
                self.notices.push(
                    "config.json ties lm_head.weight to the embedding (tie_word_embeddings), but the weights have \
                     another one, which is used"
                        .to_owned(),
                );
            }
        }
        Ok(self)
    }

    /// Values of all query heads.
    #[must_use]
    pub fn q_size(&self) -> usize {
        self.num_heads * self.head_dim
    }

    /// Values of all key heads, and of all value heads.
    #[must_use]
    pub fn kv_size(&self) -> usize {
        self.num_kv_heads * self.head_dim
    }

    /// The longest window of any layer; none if a layer has none.
    #[must_use]
    pub fn longest_window(&self) -> Option<usize> {
        let windows: Option<Vec<usize>> = self.layer_attention.iter().map(|layer| layer.window).collect();
        windows?.into_iter().max()
    }

    /// Whether tokens attend to a window only in this layer.
    #[must_use]
    pub fn has_window(&self, layer: usize) -> bool {
        self.layer_attention.get(layer).is_some_and(|layer| layer.window.is_some())
    }

    /// How many layers have a window, and the longest one.
    #[must_use]
    pub fn windows(&self) -> (usize, Option<usize>) {
        let windows = self.layer_attention.iter().filter_map(|layer| layer.window);
        (windows.clone().count(), windows.max())
    }

    /// The heads that attention is over: of latent attention, those of queries that have gone through the projection of
    /// keys.
    #[must_use]
    pub fn attention_heads(&self) -> AttentionHeads {
        match &self.latent_attention {
            None => AttentionHeads::new(self.num_heads, self.num_kv_heads, self.head_dim),
            Some(latent) => AttentionHeads {
                num_heads: self.num_heads,
                num_kv_heads: self.num_kv_heads,
                head_dim: latent.kv_lora_rank + self.rope.dim,
                value_dim: latent.kv_lora_rank,
            },
        }
    }

    /// Checks that both formats share.
    fn validate(self) -> Result<Self> {
        in_range("vocab_size", self.vocab_size, MAX_SIZE)?;
        in_range("hidden_size", self.hidden_size, MAX_SIZE)?;
        in_range("num_hidden_layers", self.num_layers, MAX_LAYERS)?;
        in_range("num_attention_heads", self.num_heads, MAX_HEAD_DIM)?;
        in_range("num_key_value_heads", self.num_kv_heads, self.num_heads)?;
        in_range("head_dim", self.head_dim, MAX_HEAD_DIM)?;
        in_range("intermediate_size", self.intermediate_size, MAX_SIZE)?;
        in_range("max_position_embeddings", self.max_position_embeddings, 1 << 28)?;
        in_range("the number of rotated values of a head", self.rope.dim, self.head_dim)?;
        for window in self.layer_attention.iter().filter_map(|layer| layer.window) {
            in_range("sliding_window", window, usize::MAX)?;
        }
        if !self.num_heads.is_multiple_of(self.num_kv_heads) {
            return Err(Error::invalid_model(format!(
                "num_attention_heads is {}, which is not a multiple of num_key_value_heads {}",
                self.num_heads, self.num_kv_heads
            )));
        }
        if !self.rope.dim.is_multiple_of(2) {
            return Err(Error::invalid_model(format!(
                "{} values of a head are rotated (head_dim is {}), but they are rotated in pairs",
                self.rope.dim, self.head_dim
            )));
        }
        if !(self.rms_norm_eps > 0.0 && self.rms_norm_eps < 1.0) {
            return Err(Error::invalid_model(format!(
                "rms_norm_eps is {}, but must be between 0 and 1",
                self.rms_norm_eps
            )));
        }
        if let Activation::ClampedSwiglu { alpha, limit } = self.activation {
            for (key, value) in [("swiglu_alpha", alpha), ("swiglu_limit", limit)] {
                if !(value > 0.0 && value.is_finite()) {
                    return Err(Error::invalid_model(format!("{key} is {value}; it must be positive")));
                }
            }
        }
        self.rope.validate()?;
        self.local_rope.iter().try_for_each(RopeConfig::validate)?;
        if let Some(latent) = &self.latent_attention {
            latent.validate(self.layer_attention.iter().find_map(|layer| layer.window))?;
        }
        if let Some(experts) = &self.experts {
            experts.validate(self.num_layers)?;
        }
        let vocab_size = self.vocab_size;
        for id in self.bos_token_id.iter().chain(&self.eos_token_ids) {
            if *id as usize >= vocab_size {
                return Err(Error::invalid_model(format!(
                    "the special token {id} is outside the vocabulary of {vocab_size} tokens"
                ))
                .with_hint("correct bos_token_id or eos_token_id, or omit it"));
            }
        }
        Ok(self)
    }
}

fn in_range(key: &str, value: usize, max: usize) -> Result<()> {
    if (1..=max).contains(&value) {
        Ok(())
    } else {
        Err(Error::invalid_model(format!("{key} is {value}, but must be from 1 to {max}")))
    }
}

impl RopeConfig {
    fn validate(&self) -> Result<()> {
        self.validate_scaling(&self.scaling)
    }

    fn validate_scaling(&self, scaling: &RopeScaling) -> Result<()> {
        let positive = |key: &str, value: f64| {
            if value > 0.0 && value.is_finite() {
                Ok(())
            } else {
                Err(Error::invalid_model(format!("{key} is {value}; it must be positive")))
            }
        };
        let ordered = |small: (&str, f64), large: (&str, f64)| {
            if small.1 < large.1 {
                Ok(())
            } else {
                Err(Error::invalid_model(format!(
                    "the rope scaling has {} {}, which is not below {} {}",
                    small.0, small.1, large.0, large.1
                )))
            }
        };
        positive("rope_theta", self.theta)?;
        match *scaling {
            RopeScaling::None => Ok(()),
            RopeScaling::FreqFactors(ref scaling) => self.validate_scaling(scaling),
            RopeScaling::Linear { factor } => positive("the rope scaling factor", factor),
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
                positive("the rope scaling factor", factor)?;
                positive("low_freq_factor", low_freq_factor)?;
                positive("original_max_position_embeddings", original_context as f64)?;
                ordered(("low_freq_factor", low_freq_factor), ("high_freq_factor", high_freq_factor))
            }
            RopeScaling::Long { original_context, attention_factor, .. } => {
                positive("original_max_position_embeddings", original_context as f64)?;
                positive("the rope attention factor", attention_factor)
            }
            RopeScaling::Yarn {
                factor, original_context, beta_fast, beta_slow, attention_factor, ..
            } => {
                positive("the rope scaling factor", factor)?;
                positive("original_max_position_embeddings", original_context as f64)?;
                positive("beta_slow", beta_slow)?;
                positive("the rope attention factor", attention_factor)?;
                if self.theta <= 1.0 {
                    return Err(Error::invalid_model(format!(
                        "rope_theta is {}, but yarn scaling needs more than 1",
                        self.theta
                    )));
                }
                ordered(("beta_slow", beta_slow), ("beta_fast", beta_fast))
            }
        }
    }
}

#[cfg(test)]
mod tests;
