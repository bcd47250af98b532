//! Launches of rotation and of attention over the paged cache.

use std::f32::consts::LOG2_E;
use std::ops::Range;
use std::sync::Arc;

use bytemuck::{Pod, Zeroable, bytes_of};

use super::decode::{self, DecodeOperands, decode_attention};
use super::prefill::{self, prefill_attention};
use crate::ops::gpu::backend::{Flags, GpuBackend, Work};
use crate::ops::gpu::cost::Cost;
use crate::ops::gpu::kernel::Kernel;
use crate::ops::gpu::matmul::packed_activations::{self, Pairs};
use crate::ops::gpu::step_inputs::GpuInputs;
use crate::ops::gpu::{Binding, GpuBuffer, Placement, Tuning};
use crate::ops::{AttentionHeads, AttentionSpec, KvCacheDType};
use crate::weights::DType;
use crate::{Error, Result};

/// Query heads that may share a key head: a tile of flash attention has at least this many rows.
const FLASH_ROWS: usize = 16;

/// Positions of a KV split. Shorter splits spread a single sequence over more cores, but add overhead: half of this
/// took a fifth longer for 32 sequences of 4,096 tokens on an NVIDIA H200.
pub(in crate::ops::gpu) const SPLIT_SIZE: usize = 256;

/// Maximum KV splits of a context: partial results are kept for every sequence of a step.
pub(in crate::ops::gpu) const MAX_SPLITS: usize = 64;

/// Scores of a KV split that fit into threadgroup memory.
const MAX_SCORES: usize = 7168;

/// Values of a head that a lane merges.
const MERGED: usize = 4;

/// Heads that a threadgroup rotates: one threadgroup per head of a prompt would take long to launch.
pub(in crate::ops::gpu) const ROTATED_HEADS: usize = 8;

/// Maximum values of a head.
pub(in crate::ops::gpu) const MAX_HEAD_DIM: usize = 256;

/// `Pages` of the kernels.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(in crate::ops::gpu) struct Pages {
    pub(in crate::ops::gpu) num_kv_heads: u32,
    pub(in crate::ops::gpu) block_size: u32,
    pub(in crate::ops::gpu) head_dim: u32,
    /// The stride of blocks, in rows.
    pub(in crate::ops::gpu) block_rows: u32,
    /// The offset of scales in a pool, in units of 16 bytes; 0 without scales.
    pub(in crate::ops::gpu) scales: u32,
}

/// `Rotation` of the kernels.
#[derive(Debug, Clone, Copy, Default, Pod, Zeroable)]
#[repr(C)]
pub(in crate::ops::gpu) struct Rotation {
    num_pairs: u32,
    inverse_dim: f32,
    eps: f32,
}

/// `RopeArgs` of the kernels.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct RopeArgs {
    pages: Pages,
    num_heads: u32,
    rotation: Rotation,
}

/// `PagedAttentionArgs` of the kernels.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(in crate::ops::gpu) struct PagedAttentionArgs {
    pub(in crate::ops::gpu) pages: Pages,
    pub(in crate::ops::gpu) num_heads: u32,
    pub(in crate::ops::gpu) q_stride: u32,
    pub(in crate::ops::gpu) split_size: u32,
    pub(in crate::ops::gpu) num_splits: u32,
    pub(in crate::ops::gpu) window: u32,
    pub(in crate::ops::gpu) num_slices: u32,
    pub(in crate::ops::gpu) scale: f32,
    pub(in crate::ops::gpu) soft_cap: f32,
}

/// `Span` of the kernels.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(in crate::ops::gpu) struct Span {
    pub(in crate::ops::gpu) begin: u32,
    pub(in crate::ops::gpu) end: u32,
    pub(in crate::ops::gpu) num_plain: u32,
    pub(in crate::ops::gpu) rotated_width: u32,
}

/// `FlashAttentionArgs` of the kernels.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(in crate::ops::gpu) struct FlashAttentionArgs {
    pub(in crate::ops::gpu) pages: Pages,
    pub(in crate::ops::gpu) num_heads: u32,
    pub(in crate::ops::gpu) q_stride: u32,
    pub(in crate::ops::gpu) window: u32,
    pub(in crate::ops::gpu) scale: f32,
    pub(in crate::ops::gpu) span: Span,
    pub(in crate::ops::gpu) num_tokens: u32,
    pub(in crate::ops::gpu) soft_cap: f32,
}

/// Attention of one layer. In the kernels, scores are exponents of two.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GpuAttentionSpec<'a> {
    pub(in crate::ops::gpu) num_heads: usize,
    pub(in crate::ops::gpu) scale: f32,
    /// Positions that a token attends to, including its own.
    pub(in crate::ops::gpu) window: usize,
    soft_cap: Option<f32>,
    sinks: Option<Binding<'a>>,
}

impl<'a> GpuAttentionSpec<'a> {
    /// Arbitrary for kernels that do not read it.
    pub(in crate::ops::gpu) fn soft_cap(&self) -> f32 {
        self.soft_cap.unwrap_or(0.0)
    }

    /// Whether there are sinks, and whether scores have a cap.
    pub(in crate::ops::gpu) fn flags(&self) -> [bool; 2] {
        [self.sinks.is_some(), self.soft_cap.is_some()]
    }

    /// The sinks, or another buffer for kernels that do not read them.
    pub(in crate::ops::gpu) fn sinks_or(&self, other: Binding<'a>) -> Binding<'a> {
        self.sinks.unwrap_or(other)
    }
}

/// The cache of one layer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pools<'a> {
    pub(crate) k: &'a GpuBuffer,
    pub(crate) v: &'a GpuBuffer,
    pub(crate) dtype: KvCacheDType,
    pub(crate) num_kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(in crate::ops::gpu) pages: Pages,
}

impl Pools<'_> {
    /// Bytes of the keys and values of a position.
    pub(in crate::ops::gpu) fn bytes_per_position(&self) -> usize {
        2 * self.num_kv_heads * self.dtype.row_bytes(self.head_dim)
    }
}

/// The rotation's inputs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rope<'a> {
    pub(crate) qkv: &'a GpuBuffer,
    pub(crate) num_tokens: usize,
    pub(crate) num_heads: usize,
    pub(crate) num_pairs: usize,
    pub(crate) is_interleaved: bool,
    pub(crate) table: &'a GpuBuffer,
    /// The norms of queries and of keys, and their epsilon.
    pub(crate) norms: Option<(Binding<'a>, Binding<'a>, f32)>,
}

impl<'a> Rope<'a> {
    pub(in crate::ops::gpu) fn rotation(&self, head_dim: usize) -> Rotation {
        Rotation {
            num_pairs: self.num_pairs as u32,
            inverse_dim: 1.0 / head_dim as f32,
            eps: self.norms.map_or(0.0, |(_, _, eps)| eps),
        }
    }

    /// Whether there are norms, and whether pairs are neighbours.
    pub(in crate::ops::gpu) fn flags(&self) -> [bool; 2] {
        [self.norms.is_some(), self.is_interleaved]
    }

    /// The norms, or the table for kernels that do not read them, and the table.
    pub(in crate::ops::gpu) fn norms_and_table(&self) -> [Binding<'a>; 3] {
        let table = Binding::read(self.table);
        let (q_norm, k_norm) = self.norms.map_or((table, table), |(q, k, _)| (q, k));
        [q_norm, k_norm, table]
    }
}

pub(crate) fn rope_kv_write(
    gpu: &GpuBackend,
    inputs: &GpuInputs,
    rope: Rope<'_>,
    pools: Pools<'_>,
) -> Result<()> {
    let args = RopeArgs {
        pages: pools.pages,
        num_heads: rope.num_heads as u32,
        rotation: rope.rotation(pools.head_dim),
    };
    let [q_norm, k_norm, table] = rope.norms_and_table();
    let num_all_heads = rope.num_heads + 2 * pools.num_kv_heads;
    let buffers = [
        Binding::read_write(rope.qkv),
        inputs.positions(),
        inputs.slots(),
        q_norm,
        k_norm,
        table,
        Binding::write(pools.k),
        Binding::write(pools.v),
    ];
    gpu.launch(
        Kernel::RopeKvWrite(pools.dtype),
        Flags::of(rope.flags()),
        Work {
            args: bytes_of(&args),
            buffers: &buffers,
            threadgroup_memory: 0,
            grid: [num_all_heads.div_ceil(ROTATED_HEADS), rope.num_tokens, 1],
            num_threads: 32 * ROTATED_HEADS,
            // Read and written, at the widest type of caches.
            cost: Cost::bytes(2 * 4 * rope.num_tokens * num_all_heads * pools.head_dim),
        },
    )
}

/// The memory of partial results, shared by all layers.
#[derive(Debug)]
pub(crate) struct GpuAttention {
    max_model_len: usize,
    split_size: usize,
    partials: GpuBuffer,
}

/// The parameters of [`GpuAttention`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct AttentionSizes {
    pub(crate) heads: AttentionHeads,
    /// The longest window of any layer; none if some layer has none.
    pub(crate) max_window: Option<usize>,
    pub(crate) max_model_len: usize,
    pub(crate) max_num_rows: usize,
}

impl GpuAttention {
    pub(crate) fn new(gpu: &GpuBackend, sizes: AttentionSizes) -> Result<Self> {
        let AttentionSizes { heads, max_window, max_model_len, .. } = sizes;
        let AttentionHeads { num_heads, num_kv_heads, head_dim, .. } = heads;
        if !head_dim.is_multiple_of(8) || head_dim > MAX_HEAD_DIM || num_heads / num_kv_heads > FLASH_ROWS {
            return Err(Error::unsupported(format!(
                "attention of {num_heads} heads over {num_kv_heads} of {head_dim} values has no kernel on this \
                 device: heads must have a multiple of 8 values and at most {MAX_HEAD_DIM}, and at most \
                 {FLASH_ROWS} may share keys"
            ))
            .with_hint("use --device cpu"));
        }
        let Heads { heads, num_chunks } = Heads::of(num_heads / num_kv_heads);
        let wanted = max_model_len.div_ceil(MAX_SPLITS).max(SPLIT_SIZE);
        let split_size = wanted.min(MAX_SCORES / (heads * num_chunks)) / 32 * 32;
        let num_splits = max_model_len.div_ceil(split_size);
        let mut values_per_head = num_splits * (head_dim + 2);
        let mut is_cut = num_splits > 1;
        if gpu.tuning().has_tensor_cores() {
            // The cache's type selects the kernel and is not known yet.
            let longest = max_window.unwrap_or(max_model_len);
            let num_splits = decode::max_splits(max_model_len, longest);
            values_per_head = values_per_head.max(num_splits * decode::record_values(head_dim));
            is_cut |= num_splits > 1;
        }
        let num_values = if is_cut { sizes.max_num_rows * num_heads * values_per_head } else { 4 };
        let partials = gpu.device().allocate(4 * num_values, Placement::Private)?;
        Ok(Self { max_model_len, split_size, partials })
    }

    /// A layer's attention for the kernels.
    pub(in crate::ops::gpu) fn spec<'a>(
        &self,
        gpu: &Arc<GpuBackend>,
        spec: &'a AttentionSpec,
    ) -> Result<GpuAttentionSpec<'a>> {
        let window = spec.window.unwrap_or(self.max_model_len);
        let sinks = spec.sinks.as_ref();
        let sinks = sinks.map(|sinks| Ok::<_, Error>(Binding::read(sinks.held().on(gpu)?)));
        Ok(GpuAttentionSpec {
            num_heads: spec.heads.num_heads,
            scale: spec.scale as f32 * LOG2_E,
            window,
            soft_cap: spec.soft_cap.map(|cap| cap as f32 * LOG2_E),
            sinks: sinks.transpose()?,
        })
    }

    /// Tokens of a tile if `heads_per_kv_head` heads share keys.
    pub(crate) fn tokens_per_tile(
        gpu: &GpuBackend,
        heads_per_kv_head: usize,
        dtype: KvCacheDType,
        head_dim: usize,
    ) -> usize {
        let rows = match prefill::is_for(gpu.tuning(), dtype) {
            true => prefill::TILE_ROWS,
            false => Flash::of(dtype, head_dim).rows(),
        };
        (rows / heads_per_kv_head).max(1)
    }

    /// Attention of all tokens of a step. If the only reader of the results is a matmul with weights of the format
    /// `next`, the kernels may pack them for it. Returns whether they did.
    #[expect(clippy::too_many_arguments, reason = "an op's operands")]
    pub(crate) fn run(
        &self,
        gpu: &GpuBackend,
        inputs: &GpuInputs,
        spec: GpuAttentionSpec<'_>,
        q: &GpuBuffer,
        q_stride: usize,
        pools: Pools<'_>,
        out: &GpuBuffer,
        next: Option<DType>,
    ) -> Result<bool> {
        let rounds = prefill::is_for(gpu.tuning(), pools.dtype) && inputs.decode().is_empty();
        let width = spec.num_heads * pools.head_dim;
        let num_tokens = inputs.num_prefill_tokens();
        let next = Self::next(gpu, next.filter(|_| rounds), num_tokens, (width, pools.head_dim), out);
        self.decode(gpu, inputs, spec, q, q_stride, pools, out)?;
        prefill(gpu, inputs, spec, q, q_stride, pools, out, next)?;
        Ok(next.is_some())
    }

    /// The order in which results of `num_tokens` tokens are packed for a matmul: a step of the matmul has to be of one
    /// head.
    fn next(
        gpu: &GpuBackend,
        next: Option<DType>,
        num_tokens: usize,
        (width, head_dim): (usize, usize),
        out: &GpuBuffer,
    ) -> Option<Pairs> {
        let are_whole = head_dim.is_multiple_of(64) && width == packed_activations::stride(width);
        packed_activations::for_next(gpu, next.filter(|_| are_whole), num_tokens, width, out)
    }

    /// Whether the kernel for such a step can rotate.
    pub(crate) fn can_rotate(gpu: &GpuBackend, inputs: &GpuInputs, pools: Pools<'_>) -> bool {
        // That kernel would write its own key while other thread blocks read it.
        inputs.num_tiles() == 0
            && !inputs.has_drafts()
            && decode::has_kernel(gpu.tuning(), pools.dtype, pools.head_dim)
    }

    /// Rotation, the write to the cache and attention in one launch, if [`Self::can_rotate`]. Packs results as
    /// [`Self::run`] does.
    #[expect(clippy::too_many_arguments, reason = "an op's operands")]
    pub(crate) fn run_rotating(
        &self,
        gpu: &GpuBackend,
        inputs: &GpuInputs,
        spec: GpuAttentionSpec<'_>,
        rope: Rope<'_>,
        pools: Pools<'_>,
        out: &GpuBuffer,
        next: Option<DType>,
    ) -> Result<bool> {
        let q_stride = (rope.num_heads + 2 * pools.num_kv_heads) * pools.head_dim;
        let next = next.filter(|_| decode::are_whole(inputs, spec.window));
        let (width, num_tokens) = (spec.num_heads * pools.head_dim, inputs.decode().lens().count());
        let next = Self::next(gpu, next, num_tokens, (width, pools.head_dim), out);
        self.decode_on_tensor_cores(gpu, inputs, spec, rope.qkv, q_stride, Some(rope), pools, out, next)?;
        Ok(next.is_some())
    }

    #[expect(clippy::too_many_arguments, reason = "an op's operands")]
    fn decode_on_tensor_cores(
        &self,
        gpu: &GpuBackend,
        inputs: &GpuInputs,
        spec: GpuAttentionSpec<'_>,
        q: &GpuBuffer,
        q_stride: usize,
        rope: Option<Rope<'_>>,
        pools: Pools<'_>,
        out: &GpuBuffer,
        next: Option<Pairs>,
    ) -> Result<()> {
        let operands = DecodeOperands { q, q_stride, rope, pools, partials: &self.partials, out, next };
        decode_attention(gpu, inputs, spec, operands)
    }

    #[expect(clippy::too_many_arguments, reason = "an op's operands")]
    fn decode(
        &self,
        gpu: &GpuBackend,
        inputs: &GpuInputs,
        spec: GpuAttentionSpec<'_>,
        q: &GpuBuffer,
        q_stride: usize,
        pools: Pools<'_>,
        out: &GpuBuffer,
    ) -> Result<()> {
        if decode::has_kernel(gpu.tuning(), pools.dtype, pools.head_dim) {
            return self.decode_on_tensor_cores(gpu, inputs, spec, q, q_stride, None, pools, out, None);
        }
        let GpuAttentionSpec { num_heads, scale, window, .. } = spec;
        let Heads { heads, num_chunks } = Heads::of(num_heads / pools.num_kv_heads);
        let num_slices = (8 / num_chunks).clamp(1, 4);
        let num_simdgroups = num_slices * num_chunks;
        let tokens = inputs.decode();
        let num_splits = tokens.max_len().div_ceil(self.split_size);
        let args = PagedAttentionArgs {
            pages: pools.pages,
            num_heads: num_heads as u32,
            q_stride: q_stride as u32,
            split_size: self.split_size as u32,
            num_splits: num_splits as u32,
            window: window as u32,
            num_slices: num_slices as u32,
            scale,
            soft_cap: spec.soft_cap(),
        };
        let scores = num_chunks * heads * self.split_size;
        let results = num_simdgroups * heads * pools.head_dim;
        let lanes_per_key = (pools.head_dim / 8).next_power_of_two().max(8);
        let num_padded_heads = pools.num_kv_heads * num_chunks * heads;
        // A partial result for each head and split is written to memory and read back.
        let record_bytes = 4 * (pools.head_dim + 2);
        let merge_cost = Cost::bytes(num_heads * num_splits * record_bytes);
        let cost = |len: usize| {
            let num_keys = len.min(window);
            let keys = Cost {
                operations: 4 * (num_padded_heads * pools.head_dim * num_keys) as u64,
                bytes: (num_keys * pools.bytes_per_position()) as u64,
            };
            keys + merge_cost
        };
        for (rows, cost) in gpu.dispatch_budget().chunks(tokens.lens().map(cost)) {
            let decode_rows = inputs.rows_from(tokens, rows.start);
            let partials_offset = rows.start * num_heads * num_splits * record_bytes;
            let (out_binding, partials) = if num_splits == 1 {
                (Binding::write(out), Binding::read(&self.partials))
            } else {
                (Binding::read(out), Binding::write(&self.partials).at(partials_offset))
            };
            let buffers = [
                Binding::read(q),
                Binding::read(pools.k),
                Binding::read(pools.v),
                inputs.block_tables(),
                decode_rows,
                out_binding,
                partials,
                spec.sinks_or(Binding::read(q)),
            ];
            gpu.launch(
                Kernel::PagedAttention { dtype: pools.dtype, heads, lanes_per_key },
                Flags::of(spec.flags()),
                Work {
                    args: bytes_of(&args),
                    buffers: &buffers,
                    threadgroup_memory: (2 * num_chunks * heads + scores.max(results)) * 4,
                    grid: [num_splits, pools.num_kv_heads, rows.len()],
                    num_threads: num_simdgroups * 32,
                    cost,
                },
            )?;
            if num_splits > 1 {
                let partials = Binding::read(&self.partials).at(partials_offset);
                let (num_rows, cost) = (rows.len(), rows.map(|_| merge_cost).sum());
                merge(gpu, &args, spec.sinks, decode_rows, num_rows, partials, out, cost)?;
            }
        }
        Ok(())
    }
}

#[expect(clippy::too_many_arguments, reason = "an op's operands")]
fn prefill(
    gpu: &GpuBackend,
    inputs: &GpuInputs,
    spec: GpuAttentionSpec<'_>,
    q: &GpuBuffer,
    q_stride: usize,
    pools: Pools<'_>,
    out: &GpuBuffer,
    next: Option<Pairs>,
) -> Result<()> {
    let args = FlashAttentionArgs {
        pages: pools.pages,
        num_heads: spec.num_heads as u32,
        q_stride: q_stride as u32,
        window: spec.window as u32,
        scale: spec.scale,
        num_tokens: inputs.num_prefill_tokens() as u32,
        span: Span { begin: 0, end: u32::MAX, num_plain: 0, rotated_width: 0 },
        soft_cap: spec.soft_cap(),
    };
    let operands = FlashOperands {
        dtype: pools.dtype,
        value_dim: pools.head_dim,
        q: Binding::read(q),
        k: Binding::read(pools.k),
        v: Binding::read(pools.v),
        out: Binding::write(out),
        between_spans: None,
        sinks: spec.sinks,
        has_soft_cap: spec.soft_cap.is_some(),
        next,
    };
    flash_attention(gpu, inputs, 0..inputs.num_tiles(), args, operands)
}

/// The inputs and outputs of flash attention.
#[derive(Debug, Clone, Copy)]
pub(in crate::ops::gpu) struct FlashOperands<'a> {
    /// The pages of keys and values.
    pub(in crate::ops::gpu) dtype: KvCacheDType,
    pub(in crate::ops::gpu) value_dim: usize,
    pub(in crate::ops::gpu) q: Binding<'a>,
    pub(in crate::ops::gpu) k: Binding<'a>,
    pub(in crate::ops::gpu) v: Binding<'a>,
    pub(in crate::ops::gpu) out: Binding<'a>,
    /// For expanded keys and values: the rotated ends of queries, and maxima and sums.
    pub(in crate::ops::gpu) between_spans: Option<[Binding<'a>; 2]>,
    /// The sinks of query heads, if any.
    pub(in crate::ops::gpu) sinks: Option<Binding<'a>>,
    pub(in crate::ops::gpu) has_soft_cap: bool,
    /// The order in which results are packed for a matmul, if they are; not between spans.
    pub(in crate::ops::gpu) next: Option<Pairs>,
}

/// Attention of some tiles of a step's tokens.
pub(in crate::ops::gpu) fn flash_attention(
    gpu: &GpuBackend,
    inputs: &GpuInputs,
    tiles: Range<usize>,
    args: FlashAttentionArgs,
    operands: FlashOperands<'_>,
) -> Result<()> {
    if prefill::is_for(gpu.tuning(), operands.dtype) {
        return prefill_attention(gpu, inputs, tiles, args, operands);
    }
    let FlashOperands { dtype, value_dim, q, k, v, out, between_spans, sinks, has_soft_cap, .. } = operands;
    let FlashAttentionArgs { pages, window, span, .. } = args;
    let (head_dim, num_kv_heads) = (pages.head_dim as usize, pages.num_kv_heads as usize);
    let flash = Flash::of(dtype, head_dim.max(value_dim));
    let keys = flash.keys(gpu.tuning());
    // Buffers that the kernel variant does not read are bound to another one.
    let [rotated, totals] = between_spans.unwrap_or([q; 2]);
    let cost = |positions: Range<usize>| {
        let begin = (positions.start + 1).saturating_sub(window as usize).max(span.begin as usize);
        let num_values =
            num_kv_heads * (head_dim + value_dim) * (positions.end.min(span.end as usize) - begin);
        Cost { operations: 2 * (flash.rows() * num_values) as u64, bytes: dtype.row_bytes(num_values) as u64 }
    };
    let costs = inputs.tile_positions(tiles.clone()).map(cost);
    for (chunk, cost) in gpu.dispatch_budget().chunks(costs) {
        let prefill_tiles = inputs.prefill_tiles(tiles.start + chunk.start);
        let buffers =
            [q, k, v, inputs.block_tables(), prefill_tiles, out, rotated, totals, sinks.unwrap_or(q)];
        gpu.launch(
            Kernel::FlashAttention { dtype, max_dim: flash.max_dim, keys, head_dim, value_dim },
            Flags::of([between_spans.is_some(), sinks.is_some(), has_soft_cap]),
            Work {
                args: bytes_of(&args),
                buffers: &buffers,
                threadgroup_memory: flash.threadgroup_memory(keys),
                grid: [chunk.len(), num_kv_heads, 1],
                num_threads: flash.simdgroups * 32,
                cost,
            },
        )?;
    }
    Ok(())
}

/// Merges the KV splits of `num_rows` tokens, and adds the sinks of heads if there are any. `args` give the width of a
/// head of the result, as that of the cache.
#[expect(clippy::too_many_arguments, reason = "a kernel's operands")]
pub(in crate::ops::gpu) fn merge(
    gpu: &GpuBackend,
    args: &PagedAttentionArgs,
    sinks: Option<Binding<'_>>,
    decode_rows: Binding<'_>,
    num_rows: usize,
    partials: Binding<'_>,
    out: &GpuBuffer,
    cost: Cost,
) -> Result<()> {
    gpu.launch(
        Kernel::PagedAttentionMerge,
        Flags::of([sinks.is_some()]),
        Work {
            args: bytes_of(args),
            buffers: &[decode_rows, partials, Binding::write(out), sinks.unwrap_or(partials)],
            threadgroup_memory: 0,
            grid: [args.num_heads as usize, num_rows, (args.pages.head_dim as usize).div_ceil(MERGED * 32)],
            num_threads: 32,
            cost,
        },
    )
}

/// The division of a key head's query heads: a simdgroup has a chunk of `heads`.
#[derive(Debug, Clone, Copy)]
struct Heads {
    heads: usize,
    num_chunks: usize,
}

impl Heads {
    fn of(heads_per_kv_head: usize) -> Self {
        let heads = heads_per_kv_head.next_power_of_two().min(4);
        Self { heads, num_chunks: heads_per_kv_head.div_ceil(heads) }
    }
}

/// Whether kernels hold values of such a cache in half precision, like queries and weights.
pub(in crate::ops::gpu) fn is_half(dtype: KvCacheDType) -> bool {
    matches!(dtype, KvCacheDType::F16 | KvCacheDType::Q8_0 | KvCacheDType::Fp8E4m3)
}

/// A variant of `metal_kernels/flash_attention.metal`, as instantiated there.
#[derive(Debug, Clone, Copy)]
struct Flash {
    max_dim: usize,
    simdgroups: usize,
    /// Bytes of a query, key or value in threadgroup memory.
    value_bytes: usize,
}

impl Flash {
    fn of(dtype: KvCacheDType, head_dim: usize) -> Self {
        let max_dim = head_dim.next_multiple_of(64).max(64);
        let value_bytes = if is_half(dtype) { 2 } else { 4 };
        Self { max_dim, simdgroups: if max_dim * value_bytes > 512 { 2 } else { 4 }, value_bytes }
    }

    fn rows(self) -> usize {
        8 * self.simdgroups
    }

    /// Keys of a tile.
    fn keys(self, tuning: Tuning) -> usize {
        match (self.max_dim, self.value_bytes) {
            (64, _) => 32,
            (128, 2) => tuning.flash_keys,
            (128, _) | (192, 2) => 16,
            _ => 8,
        }
    }

    fn threadgroup_memory(self, keys: usize) -> usize {
        (self.rows() + keys) * (self.max_dim + 8) * self.value_bytes + keys * 4
    }
}
