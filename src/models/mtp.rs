//! The block after the layers that predicts the token after the next (multi-token prediction, MTP).
//!
//! For the token at a position, its inputs are the model's hidden state after the last norm and the token that follows;
//! it predicts the token after that one. It is a layer like the others with its own cache: the row of the model's next
//! layer. To predict further tokens, its own hidden state replaces the model's.

use super::InputBatch;
use super::decoder::Layer;
use crate::Result;
use crate::config::ModelConfig;
use crate::layers::{Activations, LayerInput, Loader, SelfAttention};
use crate::ops::{
    AttentionLimits, Buffer, Context, KvCache, Linear, Matrix, RmsNorm, StepInputs, embed, linear_residual,
    norm_linear, norm_part, norm_residual,
};

/// A model that predicts further tokens with an MTP block.
pub trait Mtp {
    /// Computes the block for the tokens of the last [forward pass](super::CausalLm::forward), from its hidden states.
    /// `batch` is the same except for `token_ids`, in which each token has been replaced by the one after it, and for
    /// `outputs`. Returns the block's states of these, `[outputs.len(), hidden]`.
    ///
    /// # Errors
    /// As [`forward`](super::CausalLm::forward).
    fn follow(&mut self, batch: &InputBatch, cache: &mut KvCache) -> Result<&Buffer>;

    /// The logits of the token after the next one, `[1, vocab_size]`, from a state of [`follow`](Self::follow).
    ///
    /// # Errors
    /// [`crate::ErrorKind::Internal`] if that is of another width, or the device failed.
    fn predict(&mut self, state: &[f32]) -> Result<&Buffer>;

    /// The logits after the single token of `batch`, `[1, vocab_size]`, if the last prediction is right that it comes.
    ///
    /// # Errors
    /// As [`forward`](super::CausalLm::forward).
    fn predict_after(&mut self, batch: &InputBatch, cache: &mut KvCache) -> Result<&Buffer>;
}

/// The block with the memory that it needs in addition to that of the layers.
#[derive(Debug)]
pub(super) struct MtpBlock<A> {
    token_norm: RmsNorm,
    state_norm: RmsNorm,
    /// The halves of the projection of both, by its columns.
    token_projection: Linear,
    state_projection: Linear,
    layer: Layer<A>,
    index: usize,
    /// After the layer.
    pub(super) norm: RmsNorm,
    /// None if it is the model's.
    embedding: Option<Matrix>,
    /// None if it is the model's.
    pub(super) head: Option<Matrix>,
    /// Hidden states after a norm, `[tokens, hidden]`.
    states: Buffer,
    /// Embeddings of the tokens that follow, `[tokens, hidden]`.
    tokens: Buffer,
}

impl<A: SelfAttention> MtpBlock<A> {
    /// Loads the block that is layer `index`.
    ///
    /// # Errors
    /// If a tensor is missing or has another shape than `config` says, or there is no memory.
    pub(super) fn load(
        loader: &Loader<'_>,
        config: &ModelConfig,
        context: &Context,
        limits: &AttentionLimits,
        index: usize,
    ) -> Result<Self> {
        let (vocab, hidden) = (config.vocab_size, config.hidden_size);
        let prefix = format!("blk.{index}.nextn");
        let norm = |name: &str| loader.norm(&format!("{prefix}.{name}"), hidden, config.rms_norm_eps);
        let own = |name: &str, original: &str| {
            loader.matrix_unless_copied(&format!("{prefix}.{name}.weight"), original, vocab, hidden)
        };
        let [token_projection, state_projection] =
            loader.halves(&format!("{prefix}.eh_proj"), hidden, hidden)?;
        let head = if config.tie_word_embeddings { "token_embd.weight" } else { "output.weight" };
        Ok(Self {
            token_norm: norm("enorm")?,
            state_norm: norm("hnorm")?,
            token_projection,
            state_projection,
            layer: Layer::load(loader, config, index)?,
            index,
            norm: norm("shared_head_norm")?,
            embedding: own("embed_tokens", "token_embd.weight")?,
            head: own("shared_head_head", head)?,
            states: Buffer::new(context, limits.max_num_tokens, hidden)?,
            tokens: Buffer::new(context, limits.max_num_tokens, hidden)?,
        })
    }

    /// Takes `norm(hidden)` of all tokens of a step, for the next pass of the block; with its own norm if none is given.
    ///
    /// # Errors
    /// If the batch does not fit the activations.
    pub(super) fn take(
        &mut self,
        context: &Context,
        step: &StepInputs<'_>,
        embedding: &Matrix,
        hidden: &Buffer,
        norm: Option<&RmsNorm>,
    ) -> Result<()> {
        // No op copies rows: these are zeros, to which the states are added.
        embed(context, step, embedding, 0.0, &mut self.states)?;
        let norm = norm.unwrap_or(&self.norm);
        norm_residual(context, step.num_tokens(), hidden, norm, &mut self.states)
    }

    /// `hidden = layer(W · [norm(embedding of the token), norm(state that was taken)])` for all tokens of a step.
    ///
    /// # Errors
    /// If the batch does not fit the cache or the activations.
    pub(super) fn forward(
        &mut self,
        input: LayerInput<'_>,
        embedding: &Matrix,
        scale: f32,
        act: &mut Activations,
        cache: &mut KvCache,
    ) -> Result<()> {
        let Self { states, tokens, .. } = self;
        let LayerInput { context, step, .. } = input;
        let num_tokens = input.num_tokens();
        embed(context, step, self.embedding.as_ref().unwrap_or(embedding), scale, tokens)?;
        let Activations { hidden, linear_scratch: scratch, .. } = act;
        norm_linear(
            context,
            scratch,
            num_tokens,
            tokens,
            Some(&self.token_norm),
            [&self.token_projection],
            hidden,
        )?;
        norm_part(context, num_tokens, states, 0, &self.state_norm)?;
        linear_residual(context, scratch, num_tokens, states, &self.state_projection, hidden)?;
        self.layer.forward(LayerInput { layer: self.index, ..input }, act, cache)
    }
}
