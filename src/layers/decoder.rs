//! What passes between the layers of a step.

use crate::Result;
use crate::config::ModelConfig;
use crate::ops::{AttentionLimits, AttentionScratch, Buffer, Context, LinearScratch, RopeTable, StepInputs};

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
    /// Memory for steps within these limits.
    ///
    /// # Errors
    /// If the device has no memory.
    pub fn new(context: &Context, config: &ModelConfig, limits: &AttentionLimits) -> Result<Self> {
        let (max_num_tokens, max_num_seqs) = (limits.max_num_tokens, limits.max_num_rows);
        let buffer = |rows: usize, width: usize| Buffer::new(context, rows, width);
        let widest = config.hidden_size.max(config.q_size()).max(config.intermediate_size);
        Ok(Self {
            hidden: buffer(max_num_tokens, config.hidden_size)?,
            qkv: buffer(max_num_tokens, config.q_size() + 2 * config.kv_size())?,
            attention: buffer(max_num_tokens, config.q_size())?,
            intermediate: buffer(max_num_tokens, config.intermediate_size)?,
            logits: Buffer::shared(context, max_num_seqs, config.vocab_size)?,
            linear_scratch: LinearScratch::new(context, max_num_tokens.max(max_num_seqs), widest)?,
            attention_scratch: AttentionScratch::new(context, *limits)?,
        })
    }
}

/// What a layer reads besides its weights and activations.
#[derive(Debug, Clone, Copy)]
pub struct LayerInput<'a> {
    /// The device.
    pub context: &'a Context,
    /// The tokens and where their sequences are in the cache.
    pub step: &'a StepInputs<'a>,
    /// The angles of all positions.
    pub rope: &'a RopeTable,
    /// The index of the layer, which is also its index in the cache.
    pub layer: usize,
    /// Whether only the step's outputs are wanted. Behind attention, their rows are then the first ones and the
    /// others are not computed any more.
    pub only_outputs: bool,
}

impl LayerInput<'_> {
    /// Tokens of the step.
    #[must_use]
    pub fn num_tokens(&self) -> usize {
        self.step.num_tokens()
    }

    /// Tokens whose results are wanted.
    #[must_use]
    pub fn num_outputs(&self) -> usize {
        if self.only_outputs { self.step.outputs.len() } else { self.num_tokens() }
    }
}
