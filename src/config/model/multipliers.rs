//! The multipliers of Granite: of embeddings, of scores, of the outputs of a layer's halves, and of logits.
//!
//! The multiplier of the halves needs no operation of its own. A norm gives the same for a row and for a multiple of
//! it, except for `eps`, and only norms read the residual stream. So the stream is kept divided by the multiplier `m`:
//! embeddings are multiplied by `e / m`, halves add their outputs unscaled, and norms have `eps / m²`, which is exact.

use super::gguf::Keys;
use super::json::Json;
use crate::config::architecture::Architecture;
use crate::{Error, Result};

/// Keys of a `config.json` with multipliers.
pub(super) const HF_KEYS: [&str; 4] =
    ["embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"];

/// The same in GGUF files, after the architecture's name.
pub(super) const GGUF_KEYS: [&str; 4] =
    ["embedding_scale", "attention.scale", "residual_scale", "logit_scale"];

/// The multipliers of a model.
#[derive(Debug, Clone, Copy)]
pub(super) struct Multipliers {
    embeddings: f64,
    /// None is one by the root of the values of a head.
    scores: Option<f64>,
    halves: f64,
    /// Logits are divided by it.
    logits: f64,
}

impl Multipliers {
    /// Those of a `config.json`; 1 where a key is missing, as in the class.
    pub(super) fn from_hf(file: Json<'_>, architecture: &Architecture) -> Result<Self> {
        let own = Self::read(architecture, HF_KEYS, |key| file.f64(key))?;
        let scores = architecture.has_multipliers.then(|| own.scores.unwrap_or(1.0));
        Ok(Self { scores, ..own })
    }

    /// Those of a GGUF file, where 0 means none.
    pub(super) fn from_gguf(keys: &Keys<'_>, architecture: &Architecture) -> Result<Self> {
        Self::read(architecture, GGUF_KEYS, |key| Ok(keys.f64(key)?.filter(|value| *value != 0.0)))
    }

    fn read(
        architecture: &Architecture,
        keys: [&str; 4],
        value_of: impl Fn(&str) -> Result<Option<f64>>,
    ) -> Result<Self> {
        let read = |key: &str| match value_of(key)?.filter(|_| architecture.has_multipliers) {
            Some(value) if value <= 0.0 || !value.is_finite() => {
                Err(Error::invalid_model(format!("{key} is {value}; it must be positive")))
            }
            value => Ok(value),
        };
        let [embeddings, scores, halves, logits] = keys.map(read);
        Ok(Self {
            embeddings: embeddings?.unwrap_or(1.0),
            scores: scores?,
            halves: halves?.unwrap_or(1.0),
            logits: logits?.unwrap_or(1.0),
        })
    }

    /// The factor of embeddings of this width.
    pub(super) fn embedding_scale(&self, architecture: &Architecture, hidden_size: usize) -> f32 {
        (f64::from(architecture.embedding_scale(hidden_size)) * self.embeddings / self.halves) as f32
    }

    /// The epsilon under the root, if the model has `eps`.
    pub(super) fn rms_norm_eps(&self, eps: f64) -> f32 {
        (eps / self.halves.powi(2)) as f32
    }

    /// The factor of scores, which is `usual` in models without such a multiplier.
    pub(super) fn attention_scale(&self, usual: f64) -> f64 {
        self.scores.unwrap_or(usual)
    }

    /// The factor of logits.
    pub(super) fn logits_scale(&self) -> f32 {
        (1.0 / self.logits) as f32
    }
}
