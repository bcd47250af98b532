//! The bytes of weights that a generated token reads, from the headers of a model's files alone.
//!
//! On most machines memory bandwidth limits generation: a step reads the matrices that its tokens go through once, for
//! every number of tokens. Only this function lists those matrices, for reports before loading and for measurements
//! after it.

use crate::Result;
use crate::config::{LatentAttentionConfig, ModelConfig};
use crate::weights::{Checkpoint, DType, FileType, Quantizer};

/// Parameters of a model, and the bytes of them that a step reads, in the types that they have when loaded.
///
/// An embedding that is not also the head counts as zero: it is a row for each token. Layers that are not loaded (those
/// that predict further tokens) do not count at all.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WeightTraffic {
    /// Parameters of the model.
    pub num_parameters: u64,
    /// Those that every token goes through.
    pub num_common_parameters: u64,
    /// Bytes of attention in all layers, with its norms.
    pub attention_bytes: u64,
    /// Bytes of the weights that every token goes through after attention: feed-forward networks of layers without
    /// experts, shared experts, routers and norms.
    pub feed_forward_bytes: u64,
    /// Experts to choose from, if there are any.
    pub experts: Option<ExpertTraffic>,
    /// Bytes of the matrix that makes logits, and the norm before it.
    pub head_bytes: u64,
}

/// The weights of which every token reads another range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertTraffic {
    /// Parameters of all experts of all layers.
    pub num_parameters: u64,
    /// Their bytes.
    pub num_bytes: u64,
    /// Experts of a layer.
    pub num_experts: usize,
    /// How many of them a token goes through.
    pub num_experts_per_tok: usize,
}

impl ExpertTraffic {
    /// Bytes that a step with one token of each of this many sequences reads: an expert is read once, for any number of
    /// tokens that chose it. The overlap of choices is unknown beforehand; this is the mean over tokens that choose
    /// independently and uniformly, `1 - (1 - k/E)^n` of all. Real routers favour some experts, so they read less.
    #[must_use]
    pub fn bytes_per_step(&self, num_sequences: usize) -> u64 {
        let chosen = self.num_experts_per_tok as f64 / self.num_experts.max(1) as f64;
        let left_out = (1.0 - chosen).powi(i32::try_from(num_sequences).unwrap_or(i32::MAX));
        (self.num_bytes as f64 * (1.0 - left_out)).round() as u64
    }
}

impl WeightTraffic {
    /// Counts the tensors of a checkpoint, after conversion by `quantizer`, if there is one, on a device that keeps
    /// types of files as `kept_as` returns.
    ///
    /// # Errors
    /// If a tensor cannot be read.
    pub fn of(
        checkpoint: &Checkpoint,
        config: &ModelConfig,
        quantizer: Option<&Quantizer>,
        kept_as: impl Fn(FileType) -> FileType,
    ) -> Result<Self> {
        let mut traffic = Self::empty(config);
        for name in checkpoint.tensor_names() {
            // One that cannot be read is either refused at load or one that no model uses.
            let Ok(tensor) = checkpoint.tensor(name) else { continue };
            // One that is converted anyhow gets the requested type.
            let stored = match quantizer {
                Some(quantizer) if tensor.is_packed() => quantizer.loaded_type_of(&tensor),
                _ => tensor.stored(),
            };
            traffic.add(config, quantizer, &kept_as, name, tensor.shape, stored)?;
        }
        Ok(traffic)
    }

    /// Parameters that a token goes through: all but the embedding and the experts that are not chosen for it.
    #[must_use]
    pub fn num_active_parameters(&self) -> u64 {
        let chosen = self.experts.map_or(0, |experts| {
            experts.num_parameters / experts.num_experts.max(1) as u64 * experts.num_experts_per_tok as u64
        });
        self.num_common_parameters + chosen
    }

    /// Bytes that a step with one token of each of this many sequences reads.
    #[must_use]
    pub fn bytes_per_step(&self, num_sequences: usize) -> u64 {
        let experts = self.experts.map_or(0, |experts| experts.bytes_per_step(num_sequences));
        self.attention_bytes + self.feed_forward_bytes + experts + self.head_bytes
    }

    fn empty(config: &ModelConfig) -> Self {
        let experts = config.experts.as_ref().map(|experts| ExpertTraffic {
            num_parameters: 0,
            num_bytes: 0,
            num_experts: experts.num_experts,
            num_experts_per_tok: experts.num_experts_per_tok,
        });
        Self { experts, ..Self::default() }
    }

    fn add(
        &mut self,
        config: &ModelConfig,
        quantizer: Option<&Quantizer>,
        kept_as: &impl Fn(FileType) -> FileType,
        name: &str,
        shape: &[usize],
        stored: FileType,
    ) -> Result<()> {
        let Some(component) = Component::of(name, config) else { return Ok(()) };
        let num_parameters = shape.iter().product::<usize>() as u64;
        let num_bytes = loaded_bytes(config, quantizer, kept_as, name, shape, stored)?;
        self.num_parameters += num_parameters;
        match (component, &mut self.experts) {
            (Component::Embedding, _) => return Ok(()),
            (Component::Experts, Some(experts)) => {
                experts.num_parameters += num_parameters;
                experts.num_bytes += num_bytes;
                return Ok(());
            }
            (Component::Attention, _) => self.attention_bytes += num_bytes,
            (Component::Head, _) => self.head_bytes += num_bytes,
            (Component::FeedForward | Component::Experts, _) => self.feed_forward_bytes += num_bytes,
        }
        self.num_common_parameters += num_parameters;
        Ok(())
    }
}

/// The class of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Component {
    Embedding,
    Attention,
    FeedForward,
    Experts,
    Head,
}

impl Component {
    /// By its canonical name; none for tensors that are not loaded, or that hold no parameters.
    fn of(name: &str, config: &ModelConfig) -> Option<Self> {
        match name {
            "token_embd.weight" if config.tie_word_embeddings => return Some(Self::Head),
            "token_embd.weight" => return Some(Self::Embedding),
            // A copy of the embedding.
            "output.weight" if config.tie_word_embeddings => return None,
            "output.weight" | "output_norm.weight" => return Some(Self::Head),
            _ => {}
        }
        let (layer, rest) = name.strip_prefix("blk.")?.split_once('.')?;
        if layer.parse::<usize>().ok()? >= config.num_layers {
            return None;
        }
        let (module, ending) = rest.split_once('.')?;
        // Experts are stacked, or each is a module with its number in front of the ending.
        let is_expert = module.ends_with("_exps") || ending.starts_with(|c: char| c.is_ascii_digit());
        match module {
            _ if module.starts_with("attn_") || module == "post_attention_norm" => Some(Self::Attention),
            "pre_ffw_norm" | "post_ffw_norm" => Some(Self::FeedForward),
            _ if is_expert => Some(Self::Experts),
            "exp_probs_b" => Some(Self::FeedForward),
            _ => module.starts_with("ffn_").then_some(Self::FeedForward),
        }
    }
}

/// Bytes of a tensor of this canonical name when it is loaded.
fn loaded_bytes(
    config: &ModelConfig,
    quantizer: Option<&Quantizer>,
    kept_as: &impl Fn(FileType) -> FileType,
    name: &str,
    shape: &[usize],
    stored: FileType,
) -> Result<u64> {
    let num_elements: usize = shape.iter().product();
    let as_loaded = |shape: &[usize], stored: FileType| {
        kept_as(quantizer.map_or(stored, |quantizer| quantizer.loaded_type(name, shape, stored)))
    };
    let num_bytes = match (&config.latent_attention, shape) {
        // Vectors and routers are always in single precision.
        (_, [] | [_]) => DType::F32.row_bytes(num_elements)?,
        _ if name.ends_with("ffn_gate_inp.weight") || name.ends_with(".bias") => {
            DType::F32.row_bytes(num_elements)?
        }
        // The projections of keys are turned over, for which blocks are decoded.
        (Some(latent), &[rows, rank]) if name.ends_with("attn_kv_b.weight") => {
            let LatentAttentionConfig { qk_nope_head_dim: key_dim, v_head_dim: value_dim, .. } = *latent;
            let num_heads = rows / (key_dim + value_dim).max(1);
            let turned = if stored.block_len() > 1 { DType::F16.into() } else { stored };
            let keys = as_loaded(&[rank, key_dim], turned).row_bytes(key_dim)? * rank;
            let values = as_loaded(&[value_dim, rank], stored).row_bytes(rank)? * value_dim;
            num_heads * (keys + values)
        }
        _ => as_loaded(shape, stored).row_bytes(num_elements)?,
    };
    Ok(num_bytes as u64)
}

#[cfg(test)]
mod tests;
