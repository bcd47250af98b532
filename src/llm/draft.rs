//! A second model that drafts for the first.

use std::sync::Arc;

use super::LlmOptions;
use super::load::{OpenedModel, num_threads};
use crate::config::EngineConfig;
use crate::hub::ResolvedModel;
use crate::models::{self, LoadOptions};
use crate::ops::{Context, KvCache};
use crate::runner::{DraftModel, MemoryDemand};
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};

/// A draft model without its weights.
pub(super) struct OpenedDraft {
    opened: OpenedModel,
}

impl OpenedDraft {
    /// Opens a model that is to draft for `main`.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidRequest`] if the two have different tokens, or one has no tokenizer to compare.
    pub(super) fn open(model: &ResolvedModel, options: &LlmOptions, main: &OpenedModel) -> Result<Self> {
        let opened = OpenedModel::open(model, options)?;
        let name = &model.display_name;
        let (Some(own), Some(of_main)) = (&opened.tokenizer, &main.tokenizer) else {
            return Err(Error::invalid_request(format!(
                "{name} cannot draft: without a tokenizer in both models their tokens cannot be compared"
            )));
        };
        if let Some(difference) = difference(own, of_main) {
            return Err(Error::invalid_request(format!(
                "{name} cannot draft: {difference}; a draft model has the vocabulary of the model that it drafts for"
            ))
            .with_hint("give another draft model, or use suffix, which needs none"));
        }
        Ok(Self { opened })
    }

    /// Adds its memory to the demand: its cache has as many tokens as the main model's.
    pub(super) fn add_to(
        &self,
        demand: &mut MemoryDemand,
        options: &LlmOptions,
        device: &super::OpenedDevice,
    ) -> Result<()> {
        let own = self.opened.demand(options, device)?;
        demand.weight_bytes += own.weight_bytes;
        demand.kv_bytes_per_token += own.kv_bytes_per_token;
        Ok(())
    }

    /// Loads it.
    ///
    /// # Errors
    /// As [`models::load`].
    pub(super) fn load(
        &self,
        options: &LlmOptions,
        engine: &EngineConfig,
        context: &Arc<Context>,
    ) -> Result<DraftModel> {
        let Self { opened } = self;
        let (checkpoint, config) = (&opened.checkpoint, &opened.config);
        // Positions beyond its training make poor drafts, but do no other harm.
        let load_options = LoadOptions {
            quantizer: opened.quantizer(options)?,
            expert_file: None,
            max_model_len: engine.max_model_len,
            max_num_batched_tokens: engine.max_num_batched_tokens,
            max_num_seqs: 1,
            num_speculative_tokens: 0,
            block_size: engine.block_size,
        };
        let dtype =
            options.kv_cache_dtype.choose(checkpoint, config, context.is_gpu(), num_threads(options)?)?;
        let model = models::load(checkpoint, config, context, &load_options, &|_| ())?;
        let cache = KvCache::new(context, config, engine.num_blocks, engine.block_size, dtype.dtype)?;
        DraftModel::new(model, cache, engine.max_num_batched_tokens)
    }
}

/// The difference between the tokens of two vocabularies. Padding rows have no tokens.
fn difference(own: &Tokenizer, of_main: &Tokenizer) -> Option<String> {
    let num_both = own.vocab_size().min(of_main.vocab_size());
    let ids = 0..u32::try_from(num_both).unwrap_or(u32::MAX);
    let mut differing = ids.filter(|id| own.token_bytes(*id) != of_main.token_bytes(*id));
    if let Some(id) = differing.next() {
        return Some(format!("token {id} has another text, and {} more have", differing.count()));
    }
    let longer = if own.vocab_size() > num_both { own } else { of_main };
    let rest = num_both as u32..longer.vocab_size() as u32;
    let num_more = rest.filter(|id| !longer.token_bytes(*id).is_empty() && !longer.is_special(*id)).count();
    (num_more > 0).then(|| format!("one of the two has {num_more} tokens more"))
}
