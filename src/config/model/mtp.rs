//! Blocks after the layers that predict further tokens (multi-token prediction, MTP).
//!
//! A model is run without them unless it is to draft for itself. Then the first of them counts as one more layer in
//! [`ModelConfig::layer_attention`], which has an entry for each layer that is loaded.

use std::borrow::Cow;

use super::{LayerAttention, ModelConfig, Rotation};
use crate::weights::Checkpoint;
use crate::{Error, Result};

impl ModelConfig {
    /// Has the model loaded with its MTP block, to draft with.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidRequest`] if the model has no such block, or its files leave it out.
    pub fn load_mtp_block(&mut self, checkpoint: &Checkpoint) -> Result<()> {
        let way_out = r#"give another method: {"method": "suffix"} drafts with every model"#;
        if self.num_nextn_layers == 0 {
            return Err(Error::invalid_request(format!(
                "the method mtp drafts with the model's MTP block, and {} has none here",
                self.architecture.hf_name
            ))
            .with_hint(way_out));
        }
        let name = format!("blk.{}.nextn.eh_proj.weight", self.num_layers);
        if !checkpoint.contains(&name) {
            return Err(Error::invalid_request(format!(
                "the method mtp drafts with the model's MTP block, which its files lack ({name} is missing)"
            ))
            .with_hint(format!("give files that have it, or {}", way_out.trim_start_matches("give "))));
        }
        if self.mtp_layer().is_none() {
            self.layer_attention.push(LayerAttention { window: None, rotation: Rotation::Usual });
        }
        Ok(())
    }

    /// The number of the layer that the MTP block is, if the model is loaded with it.
    #[must_use]
    pub fn mtp_layer(&self) -> Option<usize> {
        (self.layer_attention.len() > self.num_layers).then_some(self.num_layers)
    }

    /// The same with all layers that have keys and values counted in `num_layers`, for a cache.
    #[must_use]
    pub fn with_cached_layers(&self) -> Cow<'_, Self> {
        match self.mtp_layer() {
            None => Cow::Borrowed(self),
            Some(layer) => Cow::Owned(Self { num_layers: layer + 1, ..self.clone() }),
        }
    }
}
