//! The Llama family: Llama, Mistral, Qwen 2 and Qwen 3, and of the last three those with experts.
//!
//! They differ in biases, norms of heads, rotary scaling, sliding windows and experts, all of which the layers take
//! from the configuration, so that there is one forward pass for all of them.

use crate::Result;
use crate::config::ModelConfig;
use crate::layers::{Activations, Attention, FeedForward, LayerInput, Loader};
use crate::models::decoder::{DecoderLayer, DecoderLm};
use crate::ops::KvCache;

/// A model of the family.
pub(super) type Llama = DecoderLm<Layer>;

#[derive(Debug)]
pub(super) struct Layer {
    attention: Attention,
    feed_forward: FeedForward,
}

impl DecoderLayer for Layer {
    fn load(loader: &Loader<'_>, config: &ModelConfig, index: usize) -> Result<Self> {
        let prefix = format!("blk.{index}");
        Ok(Self {
            attention: Attention::load(loader, config, &prefix)?,
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
