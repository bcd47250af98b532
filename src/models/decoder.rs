//! Common code of decoder-only models: embeds tokens, runs the layers, computes logits.

use std::sync::Arc;

use crate::config::ModelConfig;
use crate::layers::{Activations, Cut, FeedForward, LayerInput, Loader, RopeTables, SelfAttention};
use crate::models::mtp::{Mtp, MtpBlock};
use crate::models::{CausalLm, InputBatch, LoadOptions};
use crate::ops::{
    Buffer, Context, DeviceInputs, KvCache, Matrix, RmsNorm, StepInputs, embed, gather_rows, norm_logits,
    norm_part,
};
use crate::{Error, Result};

/// A pre-normalised layer: attention, then a feed-forward network.
#[derive(Debug)]
pub(super) struct Layer<A> {
    attention: A,
    feed_forward: FeedForward,
}

impl<A: SelfAttention> Layer<A> {
    /// Loads the tensors of layer `index`.
    ///
    /// # Errors
    /// If a tensor is missing or has another shape than `config` says.
    pub(super) fn load(loader: &Loader<'_>, config: &ModelConfig, index: usize) -> Result<Self> {
        let prefix = format!("blk.{index}");
        Ok(Self {
            attention: A::load(loader, config, &prefix, index)?,
            feed_forward: FeedForward::load(loader, config, &prefix, index)?,
        })
    }

    /// Adds the layer's output to the residual stream.
    ///
    /// # Errors
    /// If the batch does not fit the cache or the activations.
    pub(super) fn forward(
        &self,
        input: LayerInput<'_>,
        act: &mut Activations,
        cache: &mut KvCache,
    ) -> Result<()> {
        self.attention.forward(input, act, cache)?;
        self.feed_forward.forward(input, act)
    }
}

/// A decoder, by the kind of its attention. The layers read other differences between models from the configuration.
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
    /// For layers with a window.
    window_inputs: Option<DeviceInputs>,
    /// Present if the model drafts with it.
    mtp: Option<MtpBlock<A>>,
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
        Ok(Self {
            embedding: loader.matrix("token_embd.weight", vocab, hidden, Cut::Whole)?,
            layers: (0..config.num_layers)
                .map(|index| Layer::load(loader, config, index))
                .collect::<Result<_>>()?,
            norm: loader.norm_times("output_norm", hidden, config.rms_norm_eps, config.logits_scale)?,
            head: (!config.tie_word_embeddings)
                .then(|| loader.matrix("output.weight", vocab, hidden, Cut::Whole))
                .transpose()?,
            ropes: RopeTables::new(loader, config, options.max_model_len)?,
            activations: Activations::new(context, config, &limits)?,
            device_inputs: DeviceInputs::new(context, &limits, options.block_size)?,
            window_inputs: match config.windows() {
                (0, _) => None,
                _ => Some(DeviceInputs::new(context, &limits, options.block_size)?),
            },
            mtp: config
                .mtp_layer()
                .map(|index| MtpBlock::load(loader, config, context, &limits, index))
                .transpose()?,
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
        let Self { context, activations, device_inputs, window_inputs, mtp, .. } = self;
        batch.validate()?;
        let num_positions = batch.positions.iter().max().map_or(0, |position| *position as usize + 1);
        self.ropes.extend_to(num_positions)?;
        let (outputs, num_logits) = (&batch.outputs[..], batch.num_logits());
        let mut step = StepInputs::new(&batch.token_ids, &batch.positions, outputs, &batch.attention);
        step.sampled = batch.sampled.as_ref();
        let windowed = batch.windowed.as_ref().map(|attention| step.with_attention(attention));
        let step = &device_inputs.upload(context, step, cache)?;
        let windowed = window_inputs.as_mut().zip(windowed);
        let windowed = windowed.map(|(inputs, step)| inputs.upload(context, step, cache)).transpose()?;
        embed(context, step, &self.embedding, self.config.embedding_scale, &mut activations.hidden)?;
        for (index, layer) in self.layers.iter().enumerate() {
            // After the last layer's attention, only tokens of which something is wanted matter.
            let is_last = index + 1 == self.layers.len();
            let only_outputs = is_last && mtp.is_none() && outputs.len() < batch.token_ids.len();
            let step = windowed.as_ref().filter(|_| cache.is_windowed(index)).unwrap_or(step);
            let input = LayerInput { context, step, ropes: &self.ropes, layer: index, only_outputs };
            layer.forward(input, activations, cache)?;
        }
        if let Some(mtp) = mtp {
            // It is given all of them.
            mtp.take(context, step, &self.embedding, &activations.hidden, Some(&self.norm))?;
            if outputs.len() < batch.token_ids.len() {
                gather_rows(context, step, &mut activations.hidden)?;
            }
        }
        if num_logits > 0 {
            let head = self.head.as_ref().unwrap_or(&self.embedding);
            let Activations { hidden, logits, linear_scratch: scratch, .. } = activations;
            norm_logits(context, scratch, num_logits, hidden, &self.norm, head, logits)?;
        }
        if num_logits < outputs.len() {
            // Nothing else reads the residual stream any more.
            norm_part(context, outputs.len(), &mut activations.hidden, 0, &self.norm)?;
        }
        Ok(&activations.logits)
    }

    fn hidden_states(&self, batch: &InputBatch) -> Result<Vec<f32>> {
        let (hidden, scale) = (&self.activations.hidden, self.config.logits_scale);
        let num_before = batch.num_logits() * hidden.width();
        hidden.read(batch.outputs.len(), |values| {
            values[num_before..].iter().map(|value| value / scale).collect()
        })
    }

    fn mtp(&mut self) -> Option<&mut dyn Mtp> {
        self.mtp.is_some().then_some(self as &mut dyn Mtp)
    }
}

impl<A: SelfAttention> DecoderLm<A> {
    /// A pass of the MTP block, whose states are then in the residual stream; if there are fewer outputs, only those of
    /// the outputs. With `from_itself`, its input is the current residual stream.
    fn run_mtp(&mut self, batch: &InputBatch, cache: &mut KvCache, from_itself: bool) -> Result<()> {
        let Self { context, activations, device_inputs, mtp, .. } = self;
        let mtp = mtp.as_mut().ok_or_else(|| Error::internal("the model has no MTP block"))?;
        batch.validate()?;
        let num_positions = batch.positions.iter().max().map_or(0, |position| *position as usize + 1);
        self.ropes.extend_to(num_positions)?;
        let outputs = &batch.outputs[..];
        let step = StepInputs::new(&batch.token_ids, &batch.positions, outputs, &batch.attention);
        let step = &device_inputs.upload(context, step, cache)?;
        if from_itself {
            mtp.take(context, step, &self.embedding, &activations.hidden, None)?;
        }
        let input = LayerInput { context, step, ropes: &self.ropes, layer: 0, only_outputs: false };
        mtp.forward(input, &self.embedding, self.config.embedding_scale, activations, cache)?;
        if outputs.len() < batch.token_ids.len() {
            gather_rows(context, step, &mut activations.hidden)?;
        }
        Ok(())
    }

    /// The logits of the block's first state.
    fn mtp_logits(&mut self) -> Result<&Buffer> {
        let Self { context, activations, mtp, .. } = self;
        let mtp = mtp.as_ref().ok_or_else(|| Error::internal("the model has no MTP block"))?;
        let head = mtp.head.as_ref().or(self.head.as_ref()).unwrap_or(&self.embedding);
        let Activations { hidden, logits, linear_scratch: scratch, .. } = activations;
        norm_logits(context, scratch, 1, hidden, &mtp.norm, head, logits)?;
        Ok(logits)
    }
}

impl<A: SelfAttention> Mtp for DecoderLm<A> {
    fn follow(&mut self, batch: &InputBatch, cache: &mut KvCache) -> Result<&Buffer> {
        self.run_mtp(batch, cache, false)?;
        Ok(&self.activations.hidden)
    }

    fn predict(&mut self, state: &[f32]) -> Result<&Buffer> {
        let hidden = &mut self.activations.hidden;
        if state.len() != hidden.width() {
            return Err(Error::internal(format!(
                "a state of {} values, not {}",
                state.len(),
                hidden.width()
            )));
        }
        hidden.write(1, |values| values.copy_from_slice(state))?;
        self.mtp_logits()
    }

    fn predict_after(&mut self, batch: &InputBatch, cache: &mut KvCache) -> Result<&Buffer> {
        self.run_mtp(batch, cache, true)?;
        self.mtp_logits()
    }
}
