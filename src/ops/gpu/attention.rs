//! Launches of rotation and of attention over the paged cache.

use std::f32::consts::LOG2_E;
use std::ops::Range;

use bytemuck::{Pod, Zeroable, bytes_of};

use super::backend::{Flags, GpuBackend, Work};
use super::cost::Cost;
use super::decode_attention::{self, DecodeOperands, decode_attention};
use super::inputs::GpuInputs;
use super::kernel::Kernel;
use super::prefill_attention::{self, prefill_attention};
use super::rounded::{self, Pairs};
use super::{Binding, GpuBuffer, Placement, Tuning};
use crate::ops::KvCacheDType;
use crate::weights::DType;
use crate::{Error, Result};

/// Query heads that may share a key head: a tile of flash attention has at least so many rows.
const FLASH_ROWS: usize = 16;

/// Positions of a piece of the context. Shorter pieces spread a single sequence over more cores and cost more of
/// everything else: half of it took a fifth longer for 32 sequences of 4,096 tokens on an NVIDIA H200.
pub(super) const PIECE_SIZE: usize = 256;

/// Most pieces of a context: their partial results are kept for every sequence of a step.
pub(super) const MAX_PIECES: usize = 64;

/// Scores of a piece that threadgroup memory has room for.
const MAX_SCORES: usize = 7168;

/// Values of a head that a lane merges.
const MERGED: usize = 4;

/// Heads that a threadgroup rotates: a GPU takes long to begin as many threadgroups as a prompt has heads.
pub(super) const ROTATED_HEADS: usize = 8;

/// Most values of a head.
pub(super) const MAX_HEAD_DIM: usize = 256;

/// `Pages` of the kernels.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Pages {
    pub(super) num_kv_heads: u32,
    pub(super) block_size: u32,
    pub(super) head_dim: u32,
}

/// `Rotation` of the kernels.
#[derive(Debug, Clone, Copy, Default, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Rotation {
    num_pairs: u32,
    inverse_dim: f32,
    eps: f32,
}

/// `RopeArgs` of the kernels.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct RopeArgs {
    num_heads: u32,
    num_kv_heads: u32,
    head_dim: u32,
    block_size: u32,
    rotation: Rotation,
}

/// `PagedAttentionArgs` of the kernels.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct PagedAttentionArgs {
    pub(super) pages: Pages,
    pub(super) num_heads: u32,
    pub(super) q_stride: u32,
    pub(super) piece_size: u32,
    pub(super) num_pieces: u32,
    pub(super) window: u32,
    pub(super) num_slices: u32,
    pub(super) scale: f32,
}

/// `Span` of the kernels.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Span {
    pub(super) begin: u32,
    pub(super) end: u32,
    pub(super) num_plain: u32,
    pub(super) rotated_width: u32,
}

/// `FlashAttentionArgs` of the kernels.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct FlashAttentionArgs {
    pub(super) pages: Pages,
    pub(super) num_heads: u32,
    pub(super) q_stride: u32,
    pub(super) window: u32,
    pub(super) scale: f32,
    pub(super) span: Span,
    pub(super) num_tokens: u32,
}

/// The cache of one layer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pools<'a> {
    pub(crate) k: &'a GpuBuffer,
    pub(crate) v: &'a GpuBuffer,
    pub(crate) dtype: KvCacheDType,
    pub(crate) num_kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) block_size: usize,
}

impl Pools<'_> {
    pub(super) fn pages(&self) -> Pages {
        Pages {
            num_kv_heads: self.num_kv_heads as u32,
            block_size: self.block_size as u32,
            head_dim: self.head_dim as u32,
        }
    }

    /// Bytes of the keys and values of a position.
    pub(super) fn bytes_per_position(&self) -> usize {
        2 * self.num_kv_heads * self.head_dim * self.dtype.size_in_bytes()
    }
}

/// What is rotated, and how.
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
    pub(super) fn rotation(&self, head_dim: usize) -> Rotation {
        Rotation {
            num_pairs: self.num_pairs as u32,
            inverse_dim: 1.0 / head_dim as f32,
            eps: self.norms.map_or(0.0, |(_, _, eps)| eps),
        }
    }

    /// Whether there are norms, and whether pairs are neighbours.
    pub(super) fn flags(&self) -> [bool; 2] {
        [self.norms.is_some(), self.is_interleaved]
    }

    /// The norms, and the table, which stands for those that are not there.
    pub(super) fn norms_and_table(&self) -> [Binding<'a>; 3] {
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
        num_heads: rope.num_heads as u32,
        num_kv_heads: pools.num_kv_heads as u32,
        head_dim: pools.head_dim as u32,
        block_size: pools.block_size as u32,
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
            // In and out, as wide as the widest of caches.
            cost: Cost::bytes(2 * 4 * rope.num_tokens * num_all_heads * pools.head_dim),
        },
    )
}

/// The shape of attention and the memory of partial results.
#[derive(Debug)]
pub(crate) struct GpuAttention {
    num_heads: usize,
    scale: f32,
    window: usize,
    piece_size: usize,
    partials: GpuBuffer,
}

/// What [`GpuAttention`] is made for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AttentionSizes {
    pub(crate) num_heads: usize,
    pub(crate) num_kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) scale: f32,
    pub(crate) sliding_window: Option<usize>,
    pub(crate) max_model_len: usize,
    pub(crate) max_num_rows: usize,
}

impl GpuAttention {
    pub(crate) fn new(gpu: &GpuBackend, sizes: AttentionSizes) -> Result<Self> {
        let AttentionSizes { num_heads, num_kv_heads, head_dim, max_model_len, .. } = sizes;
        if !head_dim.is_multiple_of(8) || head_dim > MAX_HEAD_DIM || num_heads / num_kv_heads > FLASH_ROWS {
            return Err(Error::unsupported(format!(
                "attention of {num_heads} heads over {num_kv_heads} of {head_dim} values has no kernel on this \
                 device: heads must have a multiple of 8 values and at most {MAX_HEAD_DIM}, and at most \
                 {FLASH_ROWS} may share keys"
            ))
            .with_hint("use --device cpu"));
        }
        let Heads { heads, num_chunks } = Heads::of(num_heads / num_kv_heads);
        let wanted = max_model_len.div_ceil(MAX_PIECES).max(PIECE_SIZE);
        let piece_size = wanted.min(MAX_SCORES / (heads * num_chunks)) / 32 * 32;
        let num_pieces = max_model_len.div_ceil(piece_size);
        let window = sizes.sliding_window.unwrap_or(max_model_len);
        let mut values_per_head = num_pieces * (head_dim + 2);
        let mut is_cut = num_pieces > 1;
        if gpu.tuning().has_tensor_cores() {
            // The type of the cache, which decides between the kernels, is not known yet.
            let num_pieces = decode_attention::max_pieces(max_model_len, window);
            values_per_head = values_per_head.max(num_pieces * decode_attention::record_values(head_dim));
            is_cut |= num_pieces > 1;
        }
        let num_values = if is_cut { sizes.max_num_rows * num_heads * values_per_head } else { 4 };
        let partials = gpu.device().allocate(4 * num_values, Placement::Private)?;
        Ok(Self { num_heads, scale: sizes.scale * LOG2_E, window, piece_size, partials })
    }

    /// Tokens of a tile when `heads_per_kv_head` heads share keys.
    pub(crate) fn tokens_per_tile(
        gpu: &GpuBackend,
        heads_per_kv_head: usize,
        dtype: KvCacheDType,
        head_dim: usize,
    ) -> usize {
        let rows = match prefill_attention::is_for(gpu.tuning(), dtype) {
            true => prefill_attention::TILE_ROWS,
            false => Flash::of(dtype, head_dim).rows(),
        };
        (rows / heads_per_kv_head).max(1)
    }

    /// Attention of all tokens of a step: those of sequences with one token and those of the others. If all that reads the
    /// results is a product with weights of the format `next`, they may be rounded for it, and are if this says so.
    #[expect(clippy::too_many_arguments, reason = "an op's operands")]
    pub(crate) fn run(
        &self,
        gpu: &GpuBackend,
        inputs: &GpuInputs,
        q: &GpuBuffer,
        q_stride: usize,
        pools: Pools<'_>,
        out: &GpuBuffer,
        next: Option<DType>,
    ) -> Result<bool> {
        let rounds = prefill_attention::is_for(gpu.tuning(), pools.dtype) && inputs.decode().is_empty();
        let next = self.next(gpu, next.filter(|_| rounds), inputs.num_prefill_tokens(), pools.head_dim, out);
        self.decode(gpu, inputs, q, q_stride, pools, out)?;
        self.prefill(gpu, inputs, q, q_stride, pools, out, next)?;
        Ok(next.is_some())
    }

    /// For what product results of `num_tokens` tokens are rounded: kernels put whole steps of a product together, of one head.
    fn next(
        &self,
        gpu: &GpuBackend,
        next: Option<DType>,
        num_tokens: usize,
        head_dim: usize,
        out: &GpuBuffer,
    ) -> Option<Pairs> {
        let width = self.num_heads * head_dim;
        let are_whole = head_dim.is_multiple_of(64) && width == rounded::stride(width);
        rounded::for_next(gpu, next.filter(|_| are_whole), num_tokens, width, out)
    }

    /// Whether attention of all tokens of such a step is of the kind that can rotate.
    pub(crate) fn can_rotate(gpu: &GpuBackend, inputs: &GpuInputs, pools: Pools<'_>) -> bool {
        inputs.num_tiles() == 0 && decode_attention::has_kernel(gpu.tuning(), pools.dtype, pools.head_dim)
    }

    /// Rotation, the way into the cache and attention in one, if [`Self::can_rotate`] says so. Of rounded results as [`Self::run`].
    pub(crate) fn run_rotating(
        &self,
        gpu: &GpuBackend,
        inputs: &GpuInputs,
        rope: Rope<'_>,
        pools: Pools<'_>,
        out: &GpuBuffer,
        next: Option<DType>,
    ) -> Result<bool> {
        let q_stride = (rope.num_heads + 2 * pools.num_kv_heads) * pools.head_dim;
        let next = next.filter(|_| decode_attention::are_whole(inputs, self.window));
        let next = self.next(gpu, next, inputs.decode().lens().count(), pools.head_dim, out);
        self.decode_on_tensor_cores(gpu, inputs, rope.qkv, q_stride, Some(rope), pools, out, next)?;
        Ok(next.is_some())
    }

    #[expect(clippy::too_many_arguments, reason = "an op's operands")]
    fn decode_on_tensor_cores(
        &self,
        gpu: &GpuBackend,
        inputs: &GpuInputs,
        q: &GpuBuffer,
        q_stride: usize,
        rope: Option<Rope<'_>>,
        pools: Pools<'_>,
        out: &GpuBuffer,
        next: Option<Pairs>,
    ) -> Result<()> {
        let operands = DecodeOperands { q, q_stride, rope, pools, partials: &self.partials, out, next };
        decode_attention(gpu, inputs, self.num_heads, self.scale, self.window, operands)
    }

    fn decode(
        &self,
        gpu: &GpuBackend,
        inputs: &GpuInputs,
        q: &GpuBuffer,
        q_stride: usize,
        pools: Pools<'_>,
        out: &GpuBuffer,
    ) -> Result<()> {
        if decode_attention::has_kernel(gpu.tuning(), pools.dtype, pools.head_dim) {
            return self.decode_on_tensor_cores(gpu, inputs, q, q_stride, None, pools, out, None);
        }
        let Heads { heads, num_chunks } = Heads::of(self.num_heads / pools.num_kv_heads);
        let num_slices = (8 / num_chunks).clamp(1, 4);
        let num_simdgroups = num_slices * num_chunks;
        let tokens = inputs.decode();
        let num_pieces = tokens.max_len().div_ceil(self.piece_size);
        let args = PagedAttentionArgs {
            pages: pools.pages(),
            num_heads: self.num_heads as u32,
            q_stride: q_stride as u32,
            piece_size: self.piece_size as u32,
            num_pieces: num_pieces as u32,
            window: self.window as u32,
            num_slices: num_slices as u32,
            scale: self.scale,
        };
        let scores = num_chunks * heads * self.piece_size;
        let results = num_simdgroups * heads * pools.head_dim;
        let lanes_per_key = (pools.head_dim / 8).next_power_of_two().max(8);
        let num_padded_heads = pools.num_kv_heads * num_chunks * heads;
        // A record of each head and piece, which goes to memory and comes back.
        let record_bytes = 4 * (pools.head_dim + 2);
        let merge_cost = Cost::bytes(self.num_heads * num_pieces * record_bytes);
        let cost = |len: usize| {
            let num_keys = len.min(self.window);
            let keys = Cost {
                operations: 4 * (num_padded_heads * pools.head_dim * num_keys) as u64,
                bytes: (num_keys * pools.bytes_per_position()) as u64,
            };
            keys + merge_cost
        };
        for (rows, cost) in gpu.patience().pieces(tokens.lens().map(cost)) {
            let decode_rows = inputs.rows_from(tokens, rows.start);
            let partials_offset = rows.start * self.num_heads * num_pieces * record_bytes;
            let (out_binding, partials) = if num_pieces == 1 {
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
            ];
            gpu.launch(
                Kernel::PagedAttention { dtype: pools.dtype, heads, lanes_per_key },
                Flags::default(),
                Work {
                    args: bytes_of(&args),
                    buffers: &buffers,
                    threadgroup_memory: (2 * num_chunks * heads + scores.max(results)) * 4,
                    grid: [num_pieces, pools.num_kv_heads, rows.len()],
                    num_threads: num_simdgroups * 32,
                    cost,
                },
            )?;
            if num_pieces > 1 {
                let partials = Binding::read(&self.partials).at(partials_offset);
                let (num_rows, cost) = (rows.len(), rows.map(|_| merge_cost).sum());
                merge(gpu, &args, decode_rows, num_rows, partials, out, cost)?;
            }
        }
        Ok(())
    }

    #[expect(clippy::too_many_arguments, reason = "an op's operands")]
    fn prefill(
        &self,
        gpu: &GpuBackend,
        inputs: &GpuInputs,
        q: &GpuBuffer,
        q_stride: usize,
        pools: Pools<'_>,
        out: &GpuBuffer,
        next: Option<Pairs>,
    ) -> Result<()> {
        let args = FlashAttentionArgs {
            pages: pools.pages(),
            num_heads: self.num_heads as u32,
            q_stride: q_stride as u32,
            window: self.window as u32,
            scale: self.scale,
            num_tokens: inputs.num_prefill_tokens() as u32,
            span: Span { begin: 0, end: u32::MAX, num_plain: 0, rotated_width: 0 },
        };
        let operands = FlashOperands {
            dtype: pools.dtype,
            value_dim: pools.head_dim,
            q: Binding::read(q),
            k: Binding::read(pools.k),
            v: Binding::read(pools.v),
            out: Binding::write(out),
            between_spans: None,
            next,
        };
        flash_attention(gpu, inputs, 0..inputs.num_tiles(), args, operands)
    }
}

/// What flash attention reads and writes.
#[derive(Debug, Clone, Copy)]
pub(super) struct FlashOperands<'a> {
    /// Of keys and values.
    pub(super) dtype: KvCacheDType,
    pub(super) value_dim: usize,
    pub(super) q: Binding<'a>,
    pub(super) k: Binding<'a>,
    pub(super) v: Binding<'a>,
    pub(super) out: Binding<'a>,
    /// If keys and values are those of a span, rotated ends of queries, and maxima and sums.
    pub(super) between_spans: Option<[Binding<'a>; 2]>,
    /// For what product results are rounded, if they are; not between spans.
    pub(super) next: Option<Pairs>,
}

/// Attention of some tiles of a step's tokens.
pub(super) fn flash_attention(
    gpu: &GpuBackend,
    inputs: &GpuInputs,
    tiles: Range<usize>,
    args: FlashAttentionArgs,
    operands: FlashOperands<'_>,
) -> Result<()> {
    if prefill_attention::is_for(gpu.tuning(), operands.dtype) {
        return prefill_attention(gpu, inputs, tiles, args, operands);
    }
    let FlashOperands { dtype, value_dim, q, k, v, out, between_spans, .. } = operands;
    let FlashAttentionArgs { pages, window, span, .. } = args;
    let (head_dim, num_kv_heads) = (pages.head_dim as usize, pages.num_kv_heads as usize);
    let flash = Flash::of(dtype, head_dim.max(value_dim));
    let keys = flash.keys(gpu.tuning());
    // What a kernel does not read is bound to something that is there.
    let [rotated, totals] = between_spans.unwrap_or([q; 2]);
    let cost = |positions: Range<usize>| {
        let begin = (positions.start + 1).saturating_sub(window as usize).max(span.begin as usize);
        let num_values =
            num_kv_heads * (head_dim + value_dim) * (positions.end.min(span.end as usize) - begin);
        Cost {
            operations: 2 * (flash.rows() * num_values) as u64,
            bytes: (num_values * dtype.size_in_bytes()) as u64,
        }
    };
    let costs = inputs.tile_positions(tiles.clone()).map(cost);
    for (piece, cost) in gpu.patience().pieces(costs) {
        let prefill_tiles = inputs.prefill_tiles(tiles.start + piece.start);
        let buffers = [q, k, v, inputs.block_tables(), prefill_tiles, out, rotated, totals];
        gpu.launch(
            Kernel::FlashAttention { dtype, max_dim: flash.max_dim, keys, head_dim, value_dim },
            Flags::of([between_spans.is_some()]),
            Work {
                args: bytes_of(&args),
                buffers: &buffers,
                threadgroup_memory: flash.threadgroup_memory(keys),
                grid: [piece.len(), num_kv_heads, 1],
                num_threads: flash.simdgroups * 32,
                cost,
            },
        )?;
    }
    Ok(())
}

/// Merges the pieces of `num_rows` tokens. A head of the result is as wide as `args` say of the cache.
pub(super) fn merge(
    gpu: &GpuBackend,
    args: &PagedAttentionArgs,
    decode_rows: Binding<'_>,
    num_rows: usize,
    partials: Binding<'_>,
    out: &GpuBuffer,
    cost: Cost,
) -> Result<()> {
    gpu.launch(
        Kernel::PagedAttentionMerge,
        Flags::default(),
        Work {
            args: bytes_of(args),
            buffers: &[decode_rows, partials, Binding::write(out)],
            threadgroup_memory: 0,
            grid: [args.num_heads as usize, num_rows, (args.pages.head_dim as usize).div_ceil(MERGED * 32)],
            num_threads: 32,
            cost,
        },
    )
}

/// How the query heads of a key head are divided: a simdgroup takes a chunk of `heads`.
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

/// A variant of `metal_kernels/flash_attention.metal`, as it is instantiated there.
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
        let value_bytes = if dtype == KvCacheDType::F16 { 2 } else { 4 };
        Self { max_dim, simdgroups: if max_dim * value_bytes > 512 { 2 } else { 4 }, value_bytes }
    }

    fn rows(self) -> usize {
        8 * self.simdgroups
    }

    /// Keys at a time.
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
