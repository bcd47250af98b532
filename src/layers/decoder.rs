//! What passes between the layers of a step.

use crate::Result;
use crate::config::ModelConfig;
use crate::ops::{
    AttentionLimits, AttentionMetadata, AttentionScratch, Buffer, Context, LinearScratch, RopeTable,
};

/// The activations of a step and the scratch memory of the ops, allocated once.
#[derive(Debug)]
pub struct Activations {
    /// The residual stream, `[tokens, hidden]`.
    pub hidden: Buffer,
    /// Query, key and value heads, `[tokens, (heads + 2 · kv heads) · head_dim]`.
    pub qkv: Buffer,
    /// Results of attention, `[tokens, heads · head_dim]`.
    pub attention: Buffer,
    /// The inside of the feed-forward network, `[tokens, intermediate]`.
    pub intermediate: Buffer,
    /// `[sequences, vocabulary]`.
    pub logits: Buffer,
    /// Memory of products with weights.
    pub linear_scratch: LinearScratch,
    /// Memory of attention.
    pub attention_scratch: AttentionScratch,
}

impl Activations {
    /// Memory for steps of at most `max_num_tokens` tokens in `max_num_seqs` rows, with contexts of at
    /// most `max_model_len`.
    ///
    /// # Errors
    /// If the device has no memory.
    pub fn new(
        context: &Context,
        config: &ModelConfig,
        max_num_tokens: usize,
        max_num_seqs: usize,
        max_model_len: usize,
    ) -> Result<Self> {
        let buffer = |rows: usize, width: usize| Buffer::new(context.device(), rows, width);
        let widest = config.hidden_size.max(config.q_size()).max(config.intermediate_size);
        Ok(Self {
            hidden: buffer(max_num_tokens, config.hidden_size)?,
            qkv: buffer(max_num_tokens, config.q_size() + 2 * config.kv_size())?,
            attention: buffer(max_num_tokens, config.q_size())?,
            intermediate: buffer(max_num_tokens, config.intermediate_size)?,
            logits: buffer(max_num_seqs, config.vocab_size)?,
            linear_scratch: LinearScratch::new(context, max_num_tokens.max(max_num_seqs), widest)?,
            attention_scratch: AttentionScratch::new(
                context,
                AttentionLimits {
                    num_heads: config.num_heads,
                    num_kv_heads: config.num_kv_heads,
                    head_dim: config.head_dim,
                    sliding_window: config.sliding_window,
                    max_model_len,
                    max_num_tokens,
                    max_num_rows: max_num_seqs,
                },
            )?,
        })
    }
}

/// What a layer reads besides its weights and activations.
#[derive(Debug, Clone, Copy)]
pub struct LayerInput<'a> {
    /// The device.
    pub context: &'a Context,
    /// Position of each token in its sequence.
    pub positions: &'a [u32],
    /// Where the tokens' sequences are in the cache.
    pub attention: &'a AttentionMetadata,
    /// The angles of all positions.
    pub rope: &'a RopeTable,
    /// The index of the layer, which is also its index in the cache.
    pub layer: usize,
    /// The tokens whose results are wanted, ascending, or none for all. Behind attention, their rows are the
    /// first ones and the others are not computed any more.
    pub outputs: Option<&'a [usize]>,
}

impl LayerInput<'_> {
    /// Tokens of the step.
    #[must_use]
    pub fn num_tokens(&self) -> usize {
        self.positions.len()
    }

    /// Tokens whose results are wanted.
    #[must_use]
    pub fn num_outputs(&self) -> usize {
        self.outputs.map_or(self.num_tokens(), <[usize]>::len)
    }
}
