//! Sampling where the logits are, so that a token can be fed back without the host.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::ops::buffer::Buffer;
use crate::ops::context::{Backend, Context};
use crate::ops::gpu::{Binding, GpuBuffer, GpuSampler};
use crate::{Error, Result};

/// How to choose the tokens of a row. The names and meanings are those of
/// [`SamplingParams`](crate::sampling::SamplingParams).
#[derive(Debug, Clone, Copy)]
pub struct SampleParams<'a> {
    /// Multiplies the logits; 0 chooses the most likely token.
    pub inverse_temperature: f32,
    /// Keep only so many tokens; 0 keeps all.
    pub top_k: usize,
    /// Keep the smallest set of tokens with this probability.
    pub top_p: f32,
    /// Drop tokens less likely than this times the most likely one.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens that were there.
    pub repetition_penalty: f32,
    /// Subtracted from the logits of tokens in the output.
    pub presence_penalty: f32,
    /// Subtracted once for each time that the token is in the output.
    pub frequency_penalty: f32,
    /// Added to logits.
    pub logit_bias: &'a BTreeMap<u32, f32>,
    /// Tokens that are not chosen while there are fewer than `min_tokens`.
    pub banned: &'a [u32],
    /// See `banned`.
    pub min_tokens: usize,
    /// The key of the random numbers.
    pub seed: u64,
    /// The number of the sequence in its request.
    pub stream: u32,
    /// Given tokens.
    pub prompt_token_ids: &'a [u32],
    /// Generated tokens; their number is the index of the next.
    pub output_token_ids: &'a [u32],
}

impl SampleParams<'static> {
    /// Any token, as the logits have it: no filter, penalty, bias or ban, and nothing before it.
    #[must_use]
    pub fn plain() -> Self {
        static NO_BIAS: BTreeMap<u32, f32> = BTreeMap::new();
        Self {
            inverse_temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: &NO_BIAS,
            banned: &[],
            min_tokens: 0,
            seed: 0,
            stream: 0,
            prompt_token_ids: &[],
            output_token_ids: &[],
        }
    }

    /// The most likely token.
    #[must_use]
    pub fn greedy() -> Self {
        Self { inverse_temperature: 0.0, ..Self::plain() }
    }
}

impl SampleParams<'_> {
    pub(crate) fn has_penalties(&self) -> bool {
        self.repetition_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }
}

/// Tokens that a device has sampled or is going to, in its own memory.
#[derive(Debug, Clone)]
pub struct SampledTokens {
    buffer: Arc<GpuBuffer>,
    offset: usize,
}

impl SampledTokens {
    pub(crate) fn gpu(&self) -> Binding<'_> {
        Binding::read(&self.buffer).at(self.offset)
    }
}

/// A sampler on the device.
#[derive(Debug)]
pub struct DeviceSampler {
    gpu: GpuSampler,
}

impl DeviceSampler {
    /// The sampler of a device; none where there is no kernel for it, and the host samples.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Capacity`] if the device has no memory.
    pub fn new(context: &Context) -> Result<Option<Self>> {
        match context.backend() {
            Backend::Cpu(_) | Backend::Reference(_) => Ok(None),
            Backend::Gpu(gpu) => Ok(Some(Self { gpu: GpuSampler::new(gpu)? })),
        }
    }

    /// Begins to sample `num_steps` tokens for each of some rows. What was sampled before is done with, whether
    /// or not it was read.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Capacity`] if the device has no memory.
    pub fn begin<'a>(
        &mut self,
        context: &Context,
        params: impl Iterator<Item = SampleParams<'a>>,
        num_steps: usize,
    ) -> Result<()> {
        let Backend::Gpu(gpu) = context.backend() else { return Err(elsewhere()) };
        self.gpu.begin(gpu, params, num_steps)
    }

    /// Queues the next token of each row. `logits` are `[num_rows, vocab_size]` and are changed.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Internal`] if the device does not take the work.
    pub fn launch(&mut self, context: &Context, logits: &Buffer) -> Result<()> {
        let Backend::Gpu(gpu) = context.backend() else { return Err(elsewhere()) };
        self.gpu.launch(gpu, logits.gpu()?, logits.width())
    }

    /// The tokens of a step that was queued, for the device.
    #[must_use]
    pub fn on_device(&self, step: usize) -> SampledTokens {
        let (buffer, offset) = self.gpu.on_device(step);
        SampledTokens { buffer, offset }
    }

    /// Waits for the tokens of a step, one for each row; `u32::MAX` stands for logits that are no numbers.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Internal`] if the device failed.
    pub fn tokens(&self, context: &Context, step: usize, tokens: &mut Vec<u32>) -> Result<()> {
        let Backend::Gpu(gpu) = context.backend() else { return Err(elsewhere()) };
        self.gpu.tokens(gpu, step, tokens)
    }
}

fn elsewhere() -> Error {
    Error::internal("a sampler is used on another device than it is on")
}
