//! Models: from the tokens of a step to logits.
//!
//! A model sees token ids, positions and block tables, never sequences or requests. [`crate::config::ARCHITECTURES`]
//! lists the architectures; [`layers`](crate::layers) has their layers.

mod batch;
mod cached_range;
mod decoder;
mod first_use;
mod mtp;
mod traffic;

use std::sync::Arc;

use crate::config::{Decoder, ModelConfig};
use crate::layers::{Attention, LatentAttention, Loader};
use crate::ops::cpu::matmul::MatrixFile;
use crate::ops::{AttentionLimits, Buffer, Context, KvCache};
use crate::weights::{Checkpoint, Quantizer};
use crate::{Error, Result};

pub use crate::layers::LoadProgress;
pub use batch::{InputBatch, Wanted};
pub use cached_range::{CachedRange, cached_range};
pub use first_use::compile_kernels;
pub use mtp::Mtp;
pub use traffic::{ExpertTraffic, WeightTraffic};

use decoder::DecoderLm;

/// A language model with its weights and the memory of a step.
pub trait CausalLm: Send {
    /// The model's configuration: that of the shard that is computed here.
    fn config(&self) -> &ModelConfig;

    /// The device that it is on.
    fn context(&self) -> &Arc<Context>;

    /// Computes a step: writes the keys and values of its tokens to the cache and returns the logits of the tokens of which
    /// they are wanted, `[num_logits, vocab_size]`, which stay valid until the next step.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Internal`] if the batch is larger than the model was loaded for, or names tokens,
    /// positions or blocks that do not exist.
    fn forward(&mut self, batch: &InputBatch, cache: &mut KvCache) -> Result<&Buffer>;

    /// The hidden states after the last norm that the last step's `batch` wanted, in their order, `[num_hidden, hidden_size]`.
    /// They are those of the model before a factor that it has for logits.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Internal`] if the batch is larger than the model was loaded for, or the device failed.
    fn hidden_states(&self, batch: &InputBatch) -> Result<Vec<f32>>;

    /// The same with its MTP block, if it was loaded with it.
    fn mtp(&mut self) -> Option<&mut dyn Mtp>;
}

/// How a model is loaded.
#[derive(Debug, Clone)]
pub struct LoadOptions {
    /// Converts matrices to another type.
    pub quantizer: Option<Quantizer>,
    /// Where experts are, if not in memory. With the CPU's kernels only.
    pub expert_file: Option<Arc<MatrixFile>>,
    /// Longest sequence, in tokens.
    pub max_model_len: usize,
    /// Most tokens in a step.
    pub max_num_batched_tokens: usize,
    /// Most sequences in a step.
    pub max_num_seqs: usize,
    /// Most drafted tokens in a step in addition to a token of each sequence.
    pub num_speculative_tokens: usize,
    /// Tokens of a block of the cache, or fewer.
    pub block_size: usize,
}

impl LoadOptions {
    /// The limits of the model's attention.
    pub(crate) fn attention_limits(&self, config: &ModelConfig) -> AttentionLimits {
        AttentionLimits {
            heads: config.attention_heads(),
            max_window: config.longest_window(),
            max_model_len: self.max_model_len,
            max_num_tokens: self.max_num_batched_tokens,
            max_num_rows: self.max_num_rows(),
        }
    }

    /// Most rows in a step, most tokens that attend by themselves, and most logits.
    pub(crate) fn max_num_rows(&self) -> usize {
        self.max_num_seqs.saturating_add(self.num_speculative_tokens)
    }

    fn validate(&self) -> Result<()> {
        let sizes = [
            ("max_model_len", self.max_model_len),
            ("max_num_batched_tokens", self.max_num_batched_tokens),
            ("max_num_seqs", self.max_num_seqs),
            ("block_size", self.block_size),
        ];
        match sizes.iter().find(|(_, size)| *size == 0) {
            Some((name, _)) => Err(Error::invalid_request(format!("{name} is 0, but has to be at least 1"))),
            None => Ok(()),
        }
    }
}

/// Loads the weights of a model, or of the [shard](Context::shard) of it that is computed here. `on_progress` is called after
/// each tensor, or more often while weights are quantised, and from any thread.
///
/// # Errors
/// If a tensor is missing, has another shape than `config` says or cannot be read, if the checkpoint has tensors that
/// the architecture does not use, or the device has no kernels for it; [`crate::ErrorKind::Unsupported`] if it cannot be
/// divided among the ranks.
pub fn load(
    checkpoint: &Checkpoint,
    config: &ModelConfig,
    context: &Arc<Context>,
    options: &LoadOptions,
    on_progress: &(dyn Fn(LoadProgress) + Sync),
) -> Result<Box<dyn CausalLm>> {
    options.validate()?;
    let shard = context.shard();
    if !shard.is_whole() && options.expert_file.is_some() {
        return Err(Error::unsupported(
            "experts in a file are all of them, and a rank has only a part of each",
        )
        .with_hint("run the model on one rank, or keep experts in memory"));
    }
    let config = &config.of_shard(shard)?;
    let loader = Loader::new(checkpoint, context, options.quantizer.clone(), on_progress)?
        .of_shard(shard)
        .with_expert_file(options.expert_file.clone())
        .with_norm_offset(config.norm_offset);
    let first_unused = config.mtp_layer().map_or(config.num_layers, |layer| layer + 1);
    loader.ignore_layers(first_unused..config.num_layers.saturating_add(config.num_nextn_layers));
    let model: Box<dyn CausalLm> = match config.architecture.decoder {
        Decoder::Llama => Box::new(DecoderLm::<Attention>::load(&loader, config, context, options)?),
        Decoder::DeepSeek => Box::new(DecoderLm::<LatentAttention>::load(&loader, config, context, options)?),
    };
    loader.finish()?;
    checkpoint.ensure_unchanged()?;
    if let Some(file) = &options.expert_file {
        file.finish()?;
    }
    Ok(model)
}
