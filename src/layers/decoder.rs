//! Buffers that pass between the layers of a step.

use crate::Result;
use crate::config::{Activation, ModelConfig};
use crate::layers::{ExpertActivations, LatentActivations, RopeTables};
use crate::ops::{AttentionLimits, AttentionScratch, Buffer, Context, LinearScratch, StepInputs};

/// The activations of a step and the scratch memory of the ops, allocated once.
#[derive(Debug)]
pub struct Activations {
    /// The residual stream, `[tokens, hidden]`.
    pub hidden: Buffer,
    /// Query, key and value heads, `[tokens, (heads + 2 · kv heads) · head_dim]`; of width 0 with latent attention,
    /// which has its own memory.
    pub qkv: Buffer,
    /// That memory.
    pub latent: Option<LatentActivations>,
    /// Results of attention, `[tokens, heads · value_dim]`.
    pub attention: Buffer,
    /// The inside of the feed-forward network, `[tokens, intermediate]`.
    pub intermediate: Buffer,
    /// Both halves of that, `[tokens, 2 · intermediate]`, of no width if matmuls fuse them.
    pub halves: Buffer,
    /// The output of a half of a layer, `[tokens, hidden]`; of width 0 if it is not normalised.
    pub branch: Buffer,
    /// Memory of layers with experts.
    pub experts: Option<ExpertActivations>,
    /// `[sequences, vocabulary]`.
    pub logits: Buffer,
    /// Memory of matmuls with weights.
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
        let latent = config.latent_attention.as_ref();
        let attention_width = config.num_heads * latent.map_or(config.head_dim, |latent| latent.v_head_dim);
        let shared = config.experts.as_ref().and_then(|experts| experts.shared_intermediate_size);
        let low_rank = latent.and_then(|latent| latent.q_lora_rank);
        let widths = [config.hidden_size, attention_width, config.intermediate_size];
        let widest = widths.into_iter().chain(shared).chain(low_rank).max().unwrap_or(0);
        let max_rows = max_num_tokens.max(max_num_seqs);
        let mut linear_scratch = LinearScratch::new(context, max_rows, widest)?;
        let scratch = &mut linear_scratch;
        let latent = latent.map(|latent| LatentActivations::new(context, config, latent, limits, scratch));
        let latent = latent.transpose()?;
        let experts = config.experts.as_ref();
        let experts =
            experts.map(|experts| ExpertActivations::new(context, config, experts, limits, scratch));
        let experts = experts.transpose()?;
        let qkv_width = if latent.is_some() { 0 } else { config.q_size() + 2 * config.kv_size() };
        let is_fused = config.activation == Activation::Silu && config.architecture.pre_norms;
        let halves_width = if is_fused { 0 } else { 2 * config.intermediate_size };
        let branch_width = if config.architecture.post_norms { config.hidden_size } else { 0 };
        Ok(Self {
            hidden: buffer(max_num_tokens, config.hidden_size)?,
            qkv: buffer(max_num_tokens, qkv_width)?,
            latent,
            attention: buffer(max_num_tokens, attention_width)?,
            intermediate: buffer(max_num_tokens, config.intermediate_size)?,
            halves: buffer(max_num_tokens, halves_width)?,
            branch: buffer(max_num_tokens, branch_width)?,
            experts,
            logits: Buffer::shared(context, max_num_seqs, config.vocab_size)?,
            linear_scratch,
            attention_scratch: AttentionScratch::new(context, *limits)?,
        })
    }
}

/// A layer's inputs in addition to its weights and activations.
#[derive(Debug, Clone, Copy)]
pub struct LayerInput<'a> {
    /// The device.
    pub context: &'a Context,
    /// The tokens and where their sequences are in the cache.
    pub step: &'a StepInputs<'a>,
    /// The angles of all positions.
    pub ropes: &'a RopeTables,
    /// The index of the layer, which is also its index in the cache.
    pub layer: usize,
    /// Whether only the step's outputs are needed. After attention, their rows are then the first ones and the
    /// others are not computed any more.
    pub only_outputs: bool,
}

impl LayerInput<'_> {
    /// Tokens of the step.
    #[must_use]
    pub fn num_tokens(&self) -> usize {
        self.step.num_tokens()
    }

    /// Tokens whose results are needed.
    #[must_use]
    pub fn num_outputs(&self) -> usize {
        if self.only_outputs { self.step.outputs.len() } else { self.num_tokens() }
    }
}
