//! The lists of a step, on the host and on the device.

use crate::ops::context::{Backend, Context};
use crate::ops::gpu::{GpuAttention, GpuExpandedAttention, GpuInputs, InputLimits, PrefillForm};
use crate::ops::kv_cache::KvCache;
use crate::ops::sample::SampledTokens;
use crate::ops::{AttentionLimits, AttentionMetadata};
use crate::{Error, Result};

/// What ops know of a step besides activations: token ids, positions, and where everything is in the cache.
#[derive(Debug, Clone, Copy)]
pub struct StepInputs<'a> {
    /// The token at each place of the step. Length `num_tokens`.
    pub token_ids: &'a [u32],
    /// Position of each token in its sequence. Length `num_tokens`.
    pub positions: &'a [u32],
    /// Tokens whose results are wanted, ascending.
    pub outputs: &'a [usize],
    /// Rows, block tables and slots.
    pub attention: &'a AttentionMetadata,
    /// The tokens, if a device has sampled them and the host does not know them.
    pub sampled: Option<&'a SampledTokens>,
    /// The same lists in the device's memory.
    gpu: Option<&'a GpuInputs>,
}

impl<'a> StepInputs<'a> {
    /// Lists on the host, for the CPU or to be [uploaded](DeviceInputs::upload).
    #[must_use]
    pub fn new(
        token_ids: &'a [u32],
        positions: &'a [u32],
        outputs: &'a [usize],
        attention: &'a AttentionMetadata,
    ) -> Self {
        Self { token_ids, positions, outputs, attention, sampled: None, gpu: None }
    }

    /// Tokens of the step.
    #[must_use]
    pub fn num_tokens(&self) -> usize {
        self.positions.len()
    }

    pub(crate) fn gpu(&self) -> Result<&'a GpuInputs> {
        self.gpu.ok_or_else(|| Error::internal("a step's lists are not on the device"))
    }
}

/// The device's memory for the lists of steps, if its kernels read them there.
#[derive(Debug)]
pub struct DeviceInputs {
    gpu: Option<GpuInputs>,
    heads_per_kv_head: usize,
}

impl DeviceInputs {
    /// Memory for steps within these limits, over blocks of at least `block_size` tokens.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Capacity`] if the device has no memory.
    pub fn new(context: &Context, limits: &AttentionLimits, block_size: usize) -> Result<Self> {
        let gpu = match context.backend() {
            Backend::Cpu(_) | Backend::Reference(_) => None,
            Backend::Gpu(gpu) => Some(GpuInputs::new(
                gpu,
                InputLimits {
                    max_num_tokens: limits.max_num_tokens,
                    max_num_rows: limits.max_rows(),
                    max_num_blocks: limits.max_rows() * limits.max_model_len.div_ceil(block_size.max(1)),
                },
            )?),
        };
        Ok(Self { gpu, heads_per_kv_head: limits.num_heads / limits.num_kv_heads.max(1) })
    }

    /// Brings the lists of a step to where the ops need them.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Internal`] if there are more than the limits allow.
    pub fn upload<'a>(
        &'a mut self,
        context: &Context,
        step: StepInputs<'a>,
        cache: &KvCache,
    ) -> Result<StepInputs<'a>> {
        if let (Backend::Gpu(backend), Some(inputs)) = (context.backend(), &mut self.gpu) {
            let layout = cache.layout();
            let prefill_form = match layout.has_values {
                true => PrefillForm::Tiles(GpuAttention::tokens_per_tile(
                    backend,
                    self.heads_per_kv_head,
                    cache.dtype(),
                    layout.head_dim,
                )),
                false => PrefillForm::Latent(GpuExpandedAttention::tokens_per_tile(backend, cache.dtype())),
            };
            let StepInputs { token_ids, positions, outputs, attention, .. } = step;
            inputs.upload(backend, token_ids, positions, outputs, attention, prefill_form)?;
        }
        Ok(StepInputs { gpu: self.gpu.as_ref(), ..step })
    }
}
