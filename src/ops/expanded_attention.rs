//! Latent attention with expanded keys and values, for sequences with many new tokens.

use crate::ops::buffer::Buffer;
use crate::ops::context::Context;
use crate::ops::cpu::attention::expanded::ExpandedShape;
use crate::ops::device::{Device, ExpandedScratches, Held, on_device};
use crate::ops::heads_linear::Heads;
use crate::ops::kv_cache::KvCache;
use crate::ops::paged_attention::check_lists;
use crate::ops::step_inputs::StepInputs;
use crate::ops::weights::MatrixStack;
use crate::{Error, Result};

/// The operations of a device.
pub(crate) trait ExpandedAttention: Device {
    /// Memory for attention of these widths.
    fn expanded_scratch(
        &self,
        shape: ExpandedShape,
        limits: &ExpandedLimits,
    ) -> Result<Self::ExpandedScratch>;

    /// [`expanded_attention`].
    fn expanded_attention(
        &self,
        scratch: &mut Self::ExpandedScratch,
        operands: ExpandedOperands<'_>,
        out: &mut Buffer,
    ) -> Result<()>;
}

/// The inputs of expanded attention.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ExpandedOperands<'a> {
    pub(crate) shape: ExpandedShape,
    pub(crate) scale: f64,
    pub(crate) queries: Heads<'a>,
    pub(crate) absorbed: &'a Buffer,
    pub(crate) cache: &'a KvCache,
    pub(crate) layer: usize,
    pub(crate) step: &'a StepInputs<'a>,
    pub(crate) keys: &'a MatrixStack,
    pub(crate) values: &'a MatrixStack,
}

/// The widths of expanded attention and its memory, allocated once.
#[derive(Debug)]
pub struct ExpandedScratch {
    shape: ExpandedShape,
    scale: f64,
    max_model_len: usize,
    max_num_rows: usize,
    held: Held<ExpandedScratches>,
}

/// The parameters of [`ExpandedScratch`].
#[derive(Debug, Clone, Copy)]
pub struct ExpandedLimits {
    /// Query heads, each with a key and a value head of its own.
    pub num_heads: usize,
    /// Values of a latent row.
    pub rank: usize,
    /// Values of a query and of a key head that are not rotated.
    pub nope: usize,
    /// Values of a query head, and of the key in a row of the cache, that are rotated.
    pub rotated: usize,
    /// Values of a value head.
    pub value_dim: usize,
    /// The factor of scores.
    pub scale: f64,
    /// Longest sequence.
    pub max_model_len: usize,
    /// Maximum tokens of a step.
    pub max_num_tokens: usize,
    /// Maximum sequences of a step.
    pub max_num_rows: usize,
}

impl ExpandedScratch {
    /// Memory for attention of these widths.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Capacity`] if the device has no memory, [`crate::ErrorKind::Unsupported`] if it has no
    /// kernels for these widths.
    pub fn new(context: &Context, limits: ExpandedLimits) -> Result<Self> {
        let ExpandedLimits { num_heads, rank, nope, rotated, value_dim, scale, .. } = limits;
        let shape = ExpandedShape { num_heads, rank, nope, rotated, value_dim };
        let held = on_device!(context.backend(), |device| {
            Held::new(device, device.expanded_scratch(shape, &limits)?)
        });
        let ExpandedLimits { max_model_len, max_num_rows, .. } = limits;
        Ok(Self { shape, scale, max_model_len, max_num_rows, held })
    }
}

/// `out = softmax((q·W_kᵀ·c + q_rotated·k_rotated) · scale)·(W_v·c)` for each head and the tokens of expanded
/// sequences, over the cached rows `[c, k_rotated]` of the sequence up to the token. Other rows of `out` are unchanged.
///
/// A head of `queries`, as wide as a key, begins with the values that are not rotated; a head of `absorbed`, as wide as
/// a row of the cache, ends with those that are. `keys` is `[heads, rank, nope]`, `values` is `[heads, value_dim,
/// rank]`, and `out` is `[num_tokens, heads · value_dim]`. The tokens' own rows are already in the cache.
///
/// # Errors
/// [`crate::ErrorKind::Internal`] if shapes do not match or a block does not exist.
#[expect(clippy::too_many_arguments, reason = "an op's operands")]
pub fn expanded_attention(
    context: &Context,
    scratch: &mut ExpandedScratch,
    queries: Heads<'_>,
    absorbed: &Buffer,
    cache: &KvCache,
    layer: usize,
    step: &StepInputs<'_>,
    keys: &MatrixStack,
    values: &MatrixStack,
    out: &mut Buffer,
) -> Result<()> {
    let (shape, metadata) = (scratch.shape, step.attention);
    let ExpandedShape { num_heads, rank, nope, rotated, value_dim } = shape;
    let layout = cache.layout();
    let fits = !layout.has_values
        && (layout.num_kv_heads, layout.head_dim) == (1, rank + rotated)
        && layer < cache.num_layers()
        && (keys.len(), keys.rows(), keys.cols()) == (num_heads, rank, nope)
        && (values.len(), values.rows(), values.cols()) == (num_heads, value_dim, rank)
        && queries.stride == nope + rotated
        && num_heads * queries.stride <= queries.rows.width()
        && absorbed.width() == num_heads * (rank + rotated)
        && out.width() == num_heads * value_dim;
    if !fits {
        return Err(Error::internal(format!(
            "expanded_attention: rows of {}, {} and {} values, {} of a query head, do not fit {shape:?} and {layout:?}",
            queries.rows.width(),
            absorbed.width(),
            out.width(),
            queries.stride
        )));
    }
    check_lists(metadata, cache, layer, scratch.max_num_rows, scratch.max_model_len)
        .map_err(|reason| Error::internal(format!("expanded_attention: {reason}")))?;
    let scale = scratch.scale;
    let operands = ExpandedOperands { shape, scale, queries, absorbed, cache, layer, step, keys, values };
    on_device!(context.launch(), |device| {
        device.expanded_attention(scratch.held.on_mut(device)?, operands, out)
    })
}
