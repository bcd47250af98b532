//! Models with latent attention: DeepSeek-V2, GLM-4.7-Flash with experts in most layers, and Youtu-LLM without.

use crate::Result;
use crate::config::ModelConfig;
use crate::layers::{Activations, FeedForward, LatentAttention, LayerInput, Loader};
use crate::models::decoder::{DecoderLayer, DecoderLm};
use crate::ops::KvCache;

/// A model of the family.
pub(super) type DeepSeek = DecoderLm<Layer>;

#[derive(Debug)]
pub(super) struct Layer {
    attention: LatentAttention,
    feed_forward: FeedForward,
}

impl DecoderLayer for Layer {
    fn load(loader: &Loader<'_>, config: &ModelConfig, index: usize) -> Result<Self> {
        let prefix = format!("blk.{index}");
        Ok(Self {
            attention: LatentAttention::load(loader, config, &prefix)?,
            feed_forward: FeedForward::load(loader, config, &prefix, index)?,
        })
    }

    fn forward(
        &self,
        input: LayerInput<'_>,
        activations: &mut Activations,
        cache: &mut KvCache,
    ) -> Result<()> {
        self.attention.forward(input, activations, cache)?;
        self.feed_forward.forward(input, activations)
    }

    fn num_bytes_per_token(&self) -> usize {
        self.attention.num_bytes() + self.feed_forward.num_bytes_per_token()
    }
}
