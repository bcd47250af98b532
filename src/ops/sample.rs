//! Sampling on the device, so that a token can be fed back without the host.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::ops::buffer::Buffer;
use crate::ops::context::Context;
use crate::ops::device::{Device, Held, Samplers, on_device};
use crate::ops::gpu::{Binding, GpuBuffer};
use crate::{Error, Result};

/// The sampling parameters of a row. The names and meanings are those of
/// [`SamplingParams`](crate::sampling::SamplingParams).
#[derive(Debug, Clone, Copy)]
pub struct SampleParams<'a> {
    /// Multiplies the logits; 0 chooses the most likely token.
    pub inverse_temperature: f32,
    /// Keep only this many tokens; 0 keeps all.
    pub top_k: usize,
    /// Keep the smallest set of tokens with this probability.
    pub top_p: f32,
    /// Drop tokens less likely than this times the most likely one.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens in the prompt or the output.
    pub repetition_penalty: f32,
    /// Subtracted from the logits of tokens in the output.
    pub presence_penalty: f32,
    /// Subtracted once for each time that the token is in the output.
    pub frequency_penalty: f32,
    /// Added to logits.
    pub logit_bias: &'a BTreeMap<u32, f32>,
    /// Tokens that are banned below `min_tokens`.
    pub banned: &'a [u32],
    /// See `banned`.
    pub min_tokens: usize,
    /// The key of the random numbers.
    pub seed: u64,
    /// The number of the sequence in its request.
    pub stream: u32,
    /// Tokens of the prompt.
    pub prompt_token_ids: &'a [u32],
    /// Generated tokens; their number is the index of the next.
    pub output_token_ids: &'a [u32],
}

impl SampleParams<'static> {
    /// Unfiltered sampling from the logits: no filter, penalty, bias or ban, and an empty history.
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

/// Tokens in a device's memory that it has sampled or is going to sample.
#[derive(Debug, Clone)]
pub struct SampledTokens {
    buffer: Arc<GpuBuffer>,
    offset: usize,
}

impl SampledTokens {
    pub(crate) fn new(buffer: Arc<GpuBuffer>, offset: usize) -> Self {
        Self { buffer, offset }
    }

    pub(crate) fn binding(&self) -> Binding<'_> {
        Binding::read(&self.buffer).at(self.offset)
    }
}

/// The operations of a device. The defaults are for devices whose host samples.
pub(crate) trait Sample: Device {
    /// A sampler; none if the host samples.
    fn sampler(&self) -> Result<Option<Self::Sampler>> {
        Ok(None)
    }

    /// [`DeviceSampler::begin`].
    fn begin<'a>(
        &self,
        _sampler: &mut Self::Sampler,
        _params: impl Iterator<Item = SampleParams<'a>>,
        _num_steps: usize,
    ) -> Result<()> {
        Err(host_samples())
    }

    /// [`DeviceSampler::launch`].
    fn launch(&self, _sampler: &mut Self::Sampler, _logits: &Buffer) -> Result<()> {
        Err(host_samples())
    }

    /// [`DeviceSampler::on_device`].
    fn on_device(&self, _sampler: &Self::Sampler, _step: usize) -> Result<SampledTokens> {
        Err(host_samples())
    }

    /// [`DeviceSampler::tokens`].
    fn tokens(&self, _sampler: &Self::Sampler, _step: usize, _tokens: &mut Vec<u32>) -> Result<()> {
        Err(host_samples())
    }
}

fn host_samples() -> Error {
    Error::internal("a device samples that has no sampler")
}

/// A sampler on the device.
#[derive(Debug)]
pub struct DeviceSampler {
    held: Held<Samplers>,
}

impl DeviceSampler {
    /// The sampler of a device; none if it has no kernel for it, and the host samples.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Capacity`] if the device has no memory.
    pub fn new(context: &Context) -> Result<Option<Self>> {
        on_device!(context.backend(), |device| {
            Ok(device.sampler()?.map(|sampler| Self { held: Held::new(device, sampler) }))
        })
    }

    /// Starts to sample `num_steps` tokens for each of some rows. Earlier samples are discarded, even if they were not
    /// read.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Capacity`] if the device has no memory.
    pub fn begin<'a>(
        &mut self,
        context: &Context,
        params: impl Iterator<Item = SampleParams<'a>>,
        num_steps: usize,
    ) -> Result<()> {
        on_device!(context.backend(), |device| { device.begin(self.held.on_mut(device)?, params, num_steps) })
    }

    /// Queues the next token of each row. `logits` are `[num_rows, vocab_size]` and are changed.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Internal`] if the device rejects the work.
    pub fn launch(&mut self, context: &Context, logits: &Buffer) -> Result<()> {
        on_device!(context.backend(), |device| Sample::launch(device, self.held.on_mut(device)?, logits))
    }

    /// The tokens of a step that was queued, for the device.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Internal`] on another device.
    pub fn on_device(&self, context: &Context, step: usize) -> Result<SampledTokens> {
        on_device!(context.backend(), |device| device.on_device(self.held.on(device)?, step))
    }

    /// Waits for the tokens of a step, one for each row; `u32::MAX` means NaN logits.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Internal`] if the device failed.
    pub fn tokens(&self, context: &Context, step: usize, tokens: &mut Vec<u32>) -> Result<()> {
        on_device!(context.backend(), |device| device.tokens(self.held.on(device)?, step, tokens))
    }
}
