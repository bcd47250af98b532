//! The batch metadata of a step, on the host and on the device.

use crate::ops::context::Context;
use crate::ops::device::{Device, Held, MetadataBuffers, Ops, on_device};
use crate::ops::kv_cache::KvCache;
use crate::ops::sample::SampledTokens;
use crate::ops::{AttentionLimits, AttentionMetadata};
use crate::{Error, Result};

/// The operations of a device for the batch metadata of a step. A device that reads the host's metadata has nothing to
/// do.
pub(crate) trait InputOps: Device {
    /// Memory for steps within these limits.
    fn inputs(&self, limits: InputLimits) -> Result<Self::Inputs>;

    /// Copies the batch metadata of a step to the kernels' memory.
    fn upload(
        &self,
        _inputs: &mut Self::Inputs,
        _step: &StepInputs<'_>,
        _cache: &KvCache,
        _heads_per_kv_head: usize,
    ) -> Result<()> {
        Ok(())
    }
}

/// The limits of a step's metadata.
#[derive(Debug, Clone, Copy)]
pub(crate) struct InputLimits {
    pub(crate) max_num_tokens: usize,
    pub(crate) max_num_rows: usize,
    pub(crate) max_num_blocks: usize,
}

/// The inputs of a step's ops apart from activations: token ids, positions, and locations in the cache.
#[derive(Debug, Clone, Copy)]
pub struct StepInputs<'a> {
    /// The token at each index of the step. Length `num_tokens`.
    pub token_ids: &'a [u32],
    /// Position of each token in its sequence. Length `num_tokens`.
    pub positions: &'a [u32],
    /// Tokens that need results, ascending.
    pub outputs: &'a [usize],
    /// Rows, block tables and slots.
    pub attention: &'a AttentionMetadata,
    /// The tokens, if a device has sampled them and the host has not read them.
    pub sampled: Option<&'a SampledTokens>,
    /// The same metadata in the device's memory.
    held: Option<&'a Held<MetadataBuffers>>,
}

impl<'a> StepInputs<'a> {
    /// Metadata on the host, for the CPU or to be [uploaded](DeviceInputs::upload).
    #[must_use]
    pub fn new(
        token_ids: &'a [u32],
        positions: &'a [u32],
        outputs: &'a [usize],
        attention: &'a AttentionMetadata,
    ) -> Self {
        Self { token_ids, positions, outputs, attention, sampled: None, held: None }
    }

    /// The same tokens with other rows, block tables and slots, on the host.
    #[must_use]
    pub fn with_attention<'b>(&self, attention: &'b AttentionMetadata) -> StepInputs<'b>
    where
        'a: 'b,
    {
        StepInputs { attention, held: None, ..*self }
    }

    /// Tokens of the step.
    #[must_use]
    pub fn num_tokens(&self) -> usize {
        self.positions.len()
    }

    /// The metadata in the device's memory.
    pub(crate) fn lists<D: Ops>(&self, device: &D) -> Result<&'a D::Inputs> {
        self.held.ok_or_else(|| Error::internal("the batch metadata is not on the device"))?.on(device)
    }
}

/// The device's memory for the metadata of steps, if its kernels read it there.
#[derive(Debug)]
pub struct DeviceInputs {
    held: Held<MetadataBuffers>,
    heads_per_kv_head: usize,
}

impl DeviceInputs {
    /// Memory for steps within these limits, over blocks of at least `block_size` tokens.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Capacity`] if the device has no memory.
    pub fn new(context: &Context, limits: &AttentionLimits, block_size: usize) -> Result<Self> {
        let limits_of_lists = InputLimits {
            max_num_tokens: limits.max_num_tokens,
            max_num_rows: limits.max_rows(),
            max_num_blocks: limits.max_rows() * limits.max_model_len.div_ceil(block_size.max(1)),
        };
        let held = on_device!(context.backend(), |device| Held::new(device, device.inputs(limits_of_lists)?));
        Ok(Self { held, heads_per_kv_head: limits.heads.group() })
    }

    /// Copies the batch metadata of a step to the memory that ops read.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Internal`] if it exceeds the limits.
    pub fn upload<'a>(
        &'a mut self,
        context: &Context,
        step: StepInputs<'a>,
        cache: &KvCache,
    ) -> Result<StepInputs<'a>> {
        on_device!(context.backend(), |device| {
            device.upload(self.held.on_mut(device)?, &step, cache, self.heads_per_kv_head)?;
        });
        Ok(StepInputs { held: Some(&self.held), ..step })
    }
}
