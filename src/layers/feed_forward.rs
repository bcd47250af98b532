//! The feed-forward half of a layer, of either kind.

use crate::Result;
use crate::config::ModelConfig;
use crate::layers::{Activations, LayerInput, Loader, Mlp, Moe};

/// One network for all tokens, or experts.
#[derive(Debug)]
pub enum FeedForward {
    /// One network.
    Dense(Box<Mlp>),
    /// Experts.
    Experts(Box<Moe>),
}

impl FeedForward {
    /// Loads the tensors `{prefix}.ffn_*` of layer `index`.
    ///
    /// # Errors
    /// If one is missing or has another shape than `config` says.
    pub fn load(loader: &Loader<'_>, config: &ModelConfig, prefix: &str, index: usize) -> Result<Self> {
        match &config.experts {
            Some(experts) if index >= experts.num_dense_layers => {
                Moe::load(loader, config, prefix).map(|moe| Self::Experts(Box::new(moe)))
            }
            _ => Mlp::load(loader, config, prefix).map(|mlp| Self::Dense(Box::new(mlp))),
        }
    }

    /// Adds the layer's output for `hidden` to it.
    ///
    /// # Errors
    /// If the batch does not fit the activations.
    pub fn forward(&self, input: LayerInput<'_>, act: &mut Activations) -> Result<()> {
        match self {
            Self::Dense(mlp) => mlp.forward(input, act),
            Self::Experts(moe) => moe.forward(input, act),
        }
    }
}
