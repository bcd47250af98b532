//! Attention over the paged cache.

use crate::ops::AttentionMetadata;
use crate::ops::buffer::Buffer;
use crate::ops::context::{Backend, Context};
use crate::ops::cpu::attention::{self, AttentionShape};
use crate::ops::gpu::{AttentionSizes, GpuAttention, GpuBackend, GpuLatentAttention, LatentSizes};
use crate::ops::kv_cache::KvCache;
use crate::ops::linear::{ProductInput, next_format};
use crate::ops::reference;
use crate::ops::step_inputs::StepInputs;
use crate::ops::weights::Linear;
use crate::{Error, Result};

/// The shape of attention and the memory that it needs, allocated once.
#[derive(Debug)]
pub struct AttentionScratch {
    shape: AttentionShape,
    max_model_len: usize,
    max_num_rows: usize,
    device: DeviceScratch,
}

#[derive(Debug)]
enum DeviceScratch {
    Cpu(attention::AttentionScratch),
    Gpu(GpuAttention),
    GpuLatent(GpuLatentAttention),
    Reference,
}

/// What [`AttentionScratch`] is made for.
#[derive(Debug, Clone, Copy)]
pub struct AttentionLimits {
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Values of a query and of a key head.
    pub head_dim: usize,
    /// Values of a value head. Fewer than those of a key head if the values are the first ones of the keys.
    pub value_dim: usize,
    /// What scores are multiplied by.
    pub scale: f64,
    /// A token attends to itself and the `sliding_window - 1` tokens before it.
    pub sliding_window: Option<usize>,
    /// Longest sequence.
    pub max_model_len: usize,
    /// Most tokens in a step.
    pub max_num_tokens: usize,
    /// Most sequences in a step, each a row, or with latent attention up to two.
    pub max_num_rows: usize,
}

impl AttentionLimits {
    /// Whether values are the first ones of keys.
    fn is_latent(&self) -> bool {
        self.value_dim != self.head_dim
    }

    /// Most rows that the sequences of a step have.
    pub(crate) fn max_rows(&self) -> usize {
        if self.is_latent() { 2 * self.max_num_rows } else { self.max_num_rows }
    }
}

impl AttentionScratch {
    /// Memory for attention of this shape.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Unsupported`] if the device has no kernels for the shape,
    /// [`crate::ErrorKind::Capacity`] if it has no memory.
    pub fn new(context: &Context, limits: AttentionLimits) -> Result<Self> {
        let shape = AttentionShape {
            num_heads: limits.num_heads,
            num_kv_heads: limits.num_kv_heads,
            head_dim: limits.head_dim,
            value_dim: limits.value_dim,
            scale: limits.scale,
            sliding_window: limits.sliding_window,
        };
        let device = match context.backend() {
            Backend::Cpu(cpu) => DeviceScratch::Cpu(attention::AttentionScratch::new(
                shape,
                limits.max_num_tokens,
                limits.max_rows(),
                limits.max_model_len,
                cpu.pool.num_threads(),
            )),
            Backend::Gpu(_) if limits.is_latent() && shape.sliding_window.is_some() => {
                return Err(Error::unsupported(
                    "latent attention with a sliding window has no kernel on this device",
                )
                .with_hint("use --device cpu"));
            }
            Backend::Gpu(gpu) if limits.is_latent() => DeviceScratch::GpuLatent(GpuLatentAttention::new(
                gpu,
                LatentSizes {
                    num_heads: shape.num_heads,
                    row_dim: shape.head_dim,
                    value_dim: shape.value_dim,
                    scale: shape.scale as f32,
                    max_model_len: limits.max_model_len,
                    max_num_rows: limits.max_num_rows,
                },
            )?),
            Backend::Gpu(gpu) => DeviceScratch::Gpu(GpuAttention::new(
                gpu,
                AttentionSizes {
                    num_heads: shape.num_heads,
                    num_kv_heads: shape.num_kv_heads,
                    head_dim: shape.head_dim,
                    scale: shape.scale as f32,
                    sliding_window: shape.sliding_window,
                    max_model_len: limits.max_model_len,
                    max_num_rows: limits.max_num_rows,
                },
            )?),
            Backend::Reference(_) => DeviceScratch::Reference,
        };
        Ok(Self { shape, max_model_len: limits.max_model_len, max_num_rows: limits.max_rows(), device })
    }
}

/// What launches attention that also rotates the queries of a step and writes the cache, where the device has such a kernel.
pub(super) fn rotating<'a>(
    context: &'a Context,
    scratch: &'a AttentionScratch,
    cache: &KvCache,
    layer: usize,
    step: &StepInputs<'_>,
) -> Result<Option<(&'a GpuBackend, &'a GpuAttention)>> {
    let (Backend::Gpu(gpu), DeviceScratch::Gpu(attention)) = (context.backend(), &scratch.device) else {
        return Ok(None);
    };
    let can_rotate = GpuAttention::can_rotate(gpu, step.gpu()?, cache.gpu(layer)?);
    Ok(can_rotate.then_some((&**gpu, attention)))
}

/// `out = softmax(q·K · scale)·V` for each token and head, over the tokens of its sequence up to
/// itself. Long contexts with few tokens are divided and merged, which counts as a second dispatch. With latent attention,
/// expanded rows are left to [`super::expanded_attention`].
///
/// `qkv` is `[num_tokens, num_heads · head_dim or more]` of which the first ones, the rotated queries, are used,
/// `out` is `[num_tokens, num_heads · value_dim]`. The tokens' own keys and values are in the cache already.
///
/// # Errors
/// [`crate::ErrorKind::Internal`] if shapes do not fit together or a block does not exist.
pub fn paged_attention(
    context: &Context,
    scratch: &mut AttentionScratch,
    qkv: &Buffer,
    cache: &KvCache,
    layer: usize,
    step: &StepInputs<'_>,
    out: &mut Buffer,
) -> Result<()> {
    paged_attention_for(context, scratch, qkv, cache, layer, step, None, out).map(drop)
}

/// The same for a product with `next`, if there is one: nothing else can read the results.
///
/// # Errors
/// As [`paged_attention`].
#[expect(clippy::too_many_arguments, reason = "an op's operands")]
pub fn paged_attention_for<'a>(
    context: &Context,
    scratch: &mut AttentionScratch,
    qkv: &Buffer,
    cache: &KvCache,
    layer: usize,
    step: &StepInputs<'_>,
    next: Option<&Linear>,
    out: &'a mut Buffer,
) -> Result<ProductInput<'a>> {
    let metadata = step.attention;
    check(scratch, qkv, cache, layer, metadata, out)
        .map_err(|reason| Error::internal(format!("paged_attention: {reason}")))?;
    let num_tokens = metadata.num_tokens();
    let width = qkv.width();
    let (cpu, scratch) = match (context.launch(), &mut scratch.device) {
        (Backend::Cpu(cpu), DeviceScratch::Cpu(scratch)) => (cpu, scratch),
        (Backend::Gpu(gpu), DeviceScratch::Gpu(attention)) => {
            let pools = cache.gpu(layer)?;
            let next = next_format(next)?;
            let is_rounded = attention.run(gpu, step.gpu()?, qkv.gpu()?, width, pools, out.gpu()?, next)?;
            return Ok(ProductInput::new(out, is_rounded));
        }
        (Backend::Gpu(gpu), DeviceScratch::GpuLatent(attention)) => {
            let rows = cache.gpu_rows(layer)?;
            attention.run(gpu, step.gpu()?, qkv.gpu()?, width, rows, out.gpu()?)?;
            return Ok((&*out).into());
        }
        (Backend::Reference(backend), DeviceScratch::Reference) => {
            let (qkv, pools, values) = (qkv.reference()?, cache.reference(layer)?, out.reference_mut()?);
            let shape = scratch.shape;
            backend.run(num_tokens, || {
                reference::paged_attention(backend, shape, qkv, pools, metadata, values)
            })?;
            return Ok((&*out).into());
        }
        _ => return Err(Error::internal("paged_attention: its memory is on another device")),
    };
    let pools = cache.pools(layer)?;
    let regions = out.write(num_tokens, |out| {
        qkv.read(num_tokens, |qkv| {
            // SAFETY: `check` has looked for all of it.
            unsafe {
                attention::paged_attention(scratch, qkv, width, pools, metadata, out, &cpu.pool, cpu.level)
            }
        })
    })??;
    if regions > 1 {
        context.launch();
    }
    Ok((&*out).into())
}

/// Everything that the kernels rely on.
pub(super) fn check(
    scratch: &AttentionScratch,
    qkv: &Buffer,
    cache: &KvCache,
    layer: usize,
    metadata: &AttentionMetadata,
    out: &Buffer,
) -> Result<(), String> {
    let (shape, layout) = (scratch.shape, cache.layout());
    if (layout.num_kv_heads, layout.head_dim) != (shape.num_kv_heads, shape.head_dim)
        || layout.has_values != (shape.value_dim == shape.head_dim)
        || layer >= cache.num_layers()
    {
        return Err(format!("layer {layer} of {cache:?} does not fit {shape:?}"));
    }
    if out.width() != shape.num_heads * shape.value_dim || qkv.width() < shape.num_heads * shape.head_dim {
        return Err(format!("rows of {} and {} values do not fit {shape:?}", qkv.width(), out.width()));
    }
    check_lists(metadata, cache, scratch.max_num_rows, scratch.max_model_len)
}

/// That the lists of a step fit together and the blocks exist.
pub(super) fn check_lists(
    metadata: &AttentionMetadata,
    cache: &KvCache,
    max_num_rows: usize,
    max_model_len: usize,
) -> Result<(), String> {
    let layout = cache.layout();
    let (num_rows, num_tokens) = (metadata.num_rows(), metadata.num_tokens());
    if metadata.query_start_loc.len() != num_rows + 1
        || metadata.block_table_starts.len() != num_rows + 1
        || metadata.query_start_loc.first() != Some(&0)
        || metadata.query_start_loc.last() != Some(&num_tokens)
        || metadata.block_table_starts.last().is_none_or(|end| *end > metadata.block_tables.len())
        || metadata.block_size != layout.block_size
        || num_rows > max_num_rows
    {
        return Err(format!("the lists of {num_rows} rows and {num_tokens} tokens do not fit together"));
    }
    for row in 0..num_rows {
        let (start, end) = (metadata.query_start_loc[row], metadata.query_start_loc[row + 1]);
        let seq_len = metadata.seq_lens[row];
        let ascending = metadata.block_table_starts[row] <= metadata.block_table_starts[row + 1];
        if start >= end || end > num_tokens || seq_len < end - start || seq_len > max_model_len || !ascending
        {
            return Err(format!("row {row} has tokens {start}..{end} of a sequence of {seq_len}"));
        }
        let table = metadata.block_table(row);
        let num_used = seq_len.div_ceil(layout.block_size);
        if table.len() < num_used {
            return Err(format!("row {row} has {} blocks for {seq_len} tokens", table.len()));
        }
        if let Some(block) = table[..num_used].iter().find(|block| **block as usize >= cache.num_blocks()) {
            return Err(format!("block {block} is not below the {} of the cache", cache.num_blocks()));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
