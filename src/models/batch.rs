//! The input of a forward pass.

use crate::ops::{AttentionMetadata, SampledTokens};
use crate::{Error, Result};

/// What is wanted of a position.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Wanted {
    /// The logits of the token after it, to sample from.
    #[default]
    Logits,
    /// Its hidden state after the last norm, to be embedded by. The head is not computed for it.
    Hidden,
}

/// The tokens of one step, as a model sees them: no sequences, no requests.
#[derive(Debug, Clone, Default)]
pub struct InputBatch {
    /// Token ids of all rows, one after the other. Length `num_tokens`.
    pub token_ids: Vec<u32>,
    /// Position of each token in its sequence. Length `num_tokens`.
    pub positions: Vec<u32>,
    /// Rows, block tables and slots.
    pub attention: AttentionMetadata,
    /// The same in layers with a window, if these have other blocks.
    pub windowed: Option<AttentionMetadata>,
    /// Tokens of which something is wanted, ascending.
    pub outputs: Vec<usize>,
    /// What is wanted of each of them: first come those of which it is logits, so that these are the head's first rows.
    pub wanted: Vec<Wanted>,
    /// The tokens, if a device has sampled them; `token_ids` then has the right length and anything in it.
    pub sampled: Option<SampledTokens>,
}

impl InputBatch {
    /// Empties the batch and keeps its memory.
    pub fn clear(&mut self) {
        self.token_ids.clear();
        self.positions.clear();
        self.attention.clear();
        if let Some(windowed) = &mut self.windowed {
            windowed.clear();
        }
        self.clear_outputs();
        self.sampled = None;
    }

    /// Wants nothing of any token.
    pub fn clear_outputs(&mut self) {
        self.outputs.clear();
        self.wanted.clear();
    }

    /// Wants this of the token at `index`, which is after all others of which something is wanted.
    pub fn want(&mut self, index: usize, wanted: Wanted) {
        self.outputs.push(index);
        self.wanted.push(wanted);
    }

    /// How many tokens' logits are wanted.
    #[must_use]
    pub fn num_logits(&self) -> usize {
        self.wanted.partition_point(|wanted| *wanted == Wanted::Logits)
    }

    /// Checks that the lists have one length, and that something is wanted of tokens that exist, in their order and logits
    /// first. Whether blocks, positions and token ids exist is checked by the ops that use them.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Internal`] otherwise: a batch is made by the engine, not by a user.
    pub fn validate(&self) -> Result<()> {
        let num_tokens = self.token_ids.len();
        let is_other = |attention: &AttentionMetadata| attention.num_tokens() != num_tokens;
        if self.positions.len() != num_tokens
            || is_other(&self.attention)
            || self.windowed.as_ref().is_some_and(is_other)
        {
            return Err(Error::internal(format!(
                "a step of {num_tokens} tokens has {} positions and {} slots",
                self.positions.len(),
                self.attention.num_tokens()
            )));
        }
        let Self { outputs, wanted, .. } = self;
        if let Some(index) = outputs.iter().find(|index| **index >= num_tokens) {
            return Err(Error::internal(format!("a result of token {index} of {num_tokens} is wanted")));
        }
        if !outputs.is_sorted_by(|a, b| a < b) {
            return Err(Error::internal(format!(
                "results of the tokens {outputs:?} are wanted, which are not in order"
            )));
        }
        let is_logits = |wanted: &Wanted| *wanted == Wanted::Logits;
        if wanted.len() != outputs.len() || !wanted.is_sorted_by_key(|wanted| !is_logits(wanted)) {
            return Err(Error::internal(format!(
                "of {} tokens {wanted:?} is wanted, not one thing each with the logits first",
                outputs.len()
            )));
        }
        Ok(())
    }
}
