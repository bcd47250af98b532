//! What decoder-only models have in common: tokens in, layers one after the other, logits out.

use std::sync::Arc;

use crate::Result;
use crate::config::ModelConfig;
use crate::layers::{Activations, FeedForward, LayerInput, Loader, RopeTables, SelfAttention};
use crate::models::{CausalLm, InputBatch, LoadOptions};
use crate::ops::{Buffer, Context, DeviceInputs, KvCache, Matrix, RmsNorm, StepInputs, embed, norm_logits};

/// A pre-normalised layer: attention, then a feed-forward network.
#[derive(Debug)]
struct Layer<A> {
    attention: A,
    feed_forward: FeedForward,
}

/// A decoder, by the kind of its attention. What else models differ in, the layers take from the configuration.
#[derive(Debug)]
pub(super) struct DecoderLm<A> {
    config: ModelConfig,
    context: Arc<Context>,
    embedding: Matrix,
    layers: Vec<Layer<A>>,
    norm: RmsNorm,
    /// None if the embedding is also the head.
    head: Option<Matrix>,
    ropes: RopeTables,
    activations: Activations,
    device_inputs: DeviceInputs,
}

impl<A: SelfAttention> DecoderLm<A> {
    /// Loads the weights and allocates the memory of a step.
    ///
    /// # Errors
    /// If a tensor is missing or has another shape than `config` says, or there is no memory.
    pub(super) fn load(
        loader: &Loader<'_>,
        config: &ModelConfig,
        context: &Arc<Context>,
        options: &LoadOptions,
    ) -> Result<Self> {
        let (vocab, hidden) = (config.vocab_size, config.hidden_size);
        let limits = options.attention_limits(config);
        if config.tie_word_embeddings {
            // Some checkpoints store the head although it is the embedding.
            loader.ignore("output.weight");
        }
        let layer = |index: usize| {
            let prefix = format!("blk.{index}");
            Ok(Layer {
                attention: A::load(loader, config, &prefix, index)?,
                feed_forward: FeedForward::load(loader, config, &prefix, index)?,
            })
        };
        Ok(Self {
            embedding: loader.matrix("token_embd.weight", vocab, hidden)?,
            layers: (0..config.num_layers).map(layer).collect::<Result<_>>()?,
            norm: loader.norm_times("output_norm", hidden, config.rms_norm_eps, config.logits_scale)?,
            head: (!config.tie_word_embeddings)
                .then(|| loader.matrix("output.weight", vocab, hidden))
                .transpose()?,
            ropes: RopeTables::new(loader, config, options.max_model_len)?,
            activations: Activations::new(context, config, &limits)?,
            device_inputs: DeviceInputs::new(context, &limits, options.block_size)?,
            config: config.clone(),
            context: Arc::clone(context),
        })
    }
}

impl<A: SelfAttention> CausalLm for DecoderLm<A> {
    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn context(&self) -> &Arc<Context> {
        &self.context
    }

    fn forward(&mut self, batch: &InputBatch, cache: &mut KvCache) -> Result<&Buffer> {
        let Self { context, activations, device_inputs, .. } = self;
        batch.validate()?;
        let num_positions = batch.positions.iter().max().map_or(0, |position| *position as usize + 1);
        self.ropes.extend_to(num_positions)?;
        let outputs = &batch.logits_indices[..];
        let mut step = StepInputs::new(&batch.token_ids, &batch.positions, outputs, &batch.attention);
        step.sampled = batch.sampled.as_ref();
        let step = &device_inputs.upload(context, step, cache)?;
        embed(context, step, &self.embedding, self.config.embedding_scale, &mut activations.hidden)?;
        for (index, layer) in self.layers.iter().enumerate() {
            // Behind the last layer's attention, only tokens whose logits are wanted matter.
            let only_outputs = index + 1 == self.layers.len() && outputs.len() < batch.token_ids.len();
            let input = LayerInput { context, step, ropes: &self.ropes, layer: index, only_outputs };
            layer.attention.forward(input, activations, cache)?;
            layer.feed_forward.forward(input, activations)?;
        }
        norm_logits(
            context,
            &mut activations.linear_scratch,
            outputs.len(),
            &activations.hidden,
            &self.norm,
            self.head.as_ref().unwrap_or(&self.embedding),
            &mut activations.logits,
        )?;
        Ok(&activations.logits)
    }
}
