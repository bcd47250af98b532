//! Attention over the paged cache.

use crate::ops::AttentionMetadata;
use crate::ops::attention_spec::AttentionSpec;
use crate::ops::buffer::Buffer;
use crate::ops::context::Context;
use crate::ops::cpu::attention::AttentionHeads;
use crate::ops::device::{AttentionScratches, Device, Held, on_device};
use crate::ops::kv_cache::KvCache;
use crate::ops::step_inputs::StepInputs;
use crate::ops::weights::Linear;
use crate::{Error, Result};

/// The operations of a device.
pub(crate) trait PagedAttention: Device {
    /// Memory for attention of all layers.
    fn attention_scratch(&self, limits: &AttentionLimits) -> Result<Self::AttentionScratch>;

    /// [`paged_attention`]. Returns the number of dispatches.
    fn paged_attention(
        &self,
        scratch: &mut Self::AttentionScratch,
        operands: AttentionOperands<'_>,
        qkv: &Buffer,
        out: &mut Buffer,
    ) -> Result<usize>;
}

/// The inputs of attention except for queries.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AttentionOperands<'a> {
    pub(crate) spec: &'a AttentionSpec,
    pub(crate) cache: &'a KvCache,
    pub(crate) layer: usize,
    pub(crate) step: &'a StepInputs<'a>,
    /// The matrix of the only matmul that reads the results, if there is one.
    pub(crate) reader: Option<&'a Linear>,
}

/// The memory of attention of all layers, allocated once.
#[derive(Debug)]
pub struct AttentionScratch {
    heads: AttentionHeads,
    max_window: Option<usize>,
    max_model_len: usize,
    max_num_rows: usize,
    max_num_decode_tokens: usize,
    held: Held<AttentionScratches>,
}

/// The parameters of [`AttentionScratch`].
#[derive(Debug, Clone, Copy)]
pub struct AttentionLimits {
    /// The heads of all layers.
    pub heads: AttentionHeads,
    /// The longest window of any layer; none if some layer has none.
    pub max_window: Option<usize>,
    /// Longest sequence.
    pub max_model_len: usize,
    /// Maximum tokens of a step.
    pub max_num_tokens: usize,
    /// Maximum sequences of a step, counted once each, or with latent attention up to twice; also maximum tokens of the
    /// mode [`RowMode::Decode`](crate::ops::RowMode::Decode).
    pub max_num_rows: usize,
}

impl AttentionLimits {
    /// Maximum entries in a step's list of sequences.
    pub(crate) fn max_rows(&self) -> usize {
        if self.heads.is_latent() { 2 * self.max_num_rows } else { self.max_num_rows }
    }
}

impl AttentionScratch {
    /// Memory for attention within these limits.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Unsupported`] if the device has no kernels for the heads,
    /// [`crate::ErrorKind::Capacity`] if it has no memory.
    pub fn new(context: &Context, limits: AttentionLimits) -> Result<Self> {
        let held =
            on_device!(context.backend(), |device| Held::new(device, device.attention_scratch(&limits)?));
        let AttentionLimits { heads, max_window, max_model_len, max_num_rows, .. } = limits;
        Ok(Self {
            heads,
            max_window,
            max_model_len,
            max_num_rows: limits.max_rows(),
            max_num_decode_tokens: max_num_rows,
            held,
        })
    }

    pub(super) fn held(&self) -> &Held<AttentionScratches> {
        &self.held
    }
}

/// `out = softmax(q·K · scale)·V` for each token and head, over the tokens of its sequence up to itself, with the
/// deviations in `spec`. Long contexts with few tokens are split and merged, which counts as a second dispatch. With
/// latent attention, expanded sequences are left to [`super::expanded_attention`].
///
/// `qkv` is `[num_tokens, num_heads · head_dim or more]`, of which the first values, the rotated queries, are used;
/// `out` is `[num_tokens, num_heads · value_dim]`. The tokens' own keys and values are already in the cache. If
/// `reader` is given, only a matmul with it reads the results, so a device may pack them for this matmul.
///
/// # Errors
/// [`crate::ErrorKind::Internal`] if shapes do not match or a block does not exist.
#[expect(clippy::too_many_arguments, reason = "an op's operands")]
pub fn paged_attention(
    context: &Context,
    scratch: &mut AttentionScratch,
    spec: &AttentionSpec,
    qkv: &Buffer,
    cache: &KvCache,
    layer: usize,
    step: &StepInputs<'_>,
    reader: Option<&Linear>,
    out: &mut Buffer,
) -> Result<()> {
    check(scratch, spec, qkv, cache, layer, step.attention, out)
        .map_err(|reason| Error::internal(format!("paged_attention: {reason}")))?;
    let operands = AttentionOperands { spec, cache, layer, step, reader };
    let num_dispatches = on_device!(context.launch(), |device| {
        device.paged_attention(scratch.held.on_mut(device)?, operands, qkv, out)?
    });
    if num_dispatches > 1 {
        context.launch();
    }
    Ok(())
}

/// Checks everything that the kernels rely on.
pub(super) fn check(
    scratch: &AttentionScratch,
    spec: &AttentionSpec,
    qkv: &Buffer,
    cache: &KvCache,
    layer: usize,
    metadata: &AttentionMetadata,
    out: &Buffer,
) -> Result<(), String> {
    let (heads, layout) = (spec.heads, cache.layout());
    let num_sinks = spec.sinks.as_ref().map_or(heads.num_heads, |sinks| sinks.len());
    let fits = scratch.max_window.is_none_or(|longest| spec.window.is_some_and(|own| own <= longest));
    if heads != scratch.heads || num_sinks != heads.num_heads || !fits {
        return Err(format!("{spec:?} does not fit {scratch:?}"));
    }
    if (layout.num_kv_heads, layout.head_dim) != (heads.num_kv_heads, heads.head_dim)
        || layout.has_values == heads.is_latent()
        || layer >= cache.num_layers()
    {
        return Err(format!("layer {layer} of {cache:?} does not fit {heads:?}"));
    }
    if out.width() != heads.num_heads * heads.value_dim || qkv.width() < heads.num_heads * heads.head_dim {
        return Err(format!("rows of {} and {} values do not fit {heads:?}", qkv.width(), out.width()));
    }
    let (num_decode_tokens, max_num_decode_tokens) =
        (metadata.num_decode_tokens(), scratch.max_num_decode_tokens);
    if num_decode_tokens > max_num_decode_tokens {
        return Err(format!("{num_decode_tokens} tokens by themselves are over {max_num_decode_tokens}"));
    }
    check_lists(metadata, cache, layer, scratch.max_num_rows, scratch.max_model_len)
}

/// Checks that the batch metadata of a step is consistent and that the blocks exist.
pub(super) fn check_lists(
    metadata: &AttentionMetadata,
    cache: &KvCache,
    layer: usize,
    max_num_rows: usize,
    max_model_len: usize,
) -> Result<(), String> {
    let layout = cache.layout();
    let num_blocks = cache.num_blocks_of(layer);
    let (num_rows, num_tokens) = (metadata.num_rows(), metadata.num_tokens());
    if metadata.query_start_loc.len() != num_rows + 1
        || metadata.block_table_starts.len() != num_rows + 1
        || metadata.query_start_loc.first() != Some(&0)
        || metadata.query_start_loc.last() != Some(&num_tokens)
        || metadata.block_table_starts.last().is_none_or(|end| *end > metadata.block_tables.len())
        || metadata.block_size != layout.block_size
        || metadata.modes.len() != num_rows
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
        if let Some(block) = table[..num_used].iter().find(|block| **block as usize >= num_blocks) {
            return Err(format!("block {block} is not below the {num_blocks} of the cache"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
