//! Launches of latent attention.

use std::f32::consts::LOG2_E;

use bytemuck::{Pod, Zeroable, bytes_of};

use super::decode_latent::{self, DecodeLatent, decode_latent_attention};
use super::grouped::{MAX_SPLITS, PagedAttentionArgs, Pages, ROTATED_HEADS, SPLIT_SIZE, is_half, merge};
use crate::ops::KvCacheDType;
use crate::ops::gpu::backend::{Flags, GpuBackend, Work};
use crate::ops::gpu::cost::Cost;
use crate::ops::gpu::kernel::Kernel;
use crate::ops::gpu::step_inputs::{DecodeRows, GpuInputs};
use crate::ops::gpu::{Binding, GpuBuffer, Placement};
use crate::{Error, Result};

/// A simdgroup's values of a row, and the rows that it reads at a time, as in the kernel.
const SLAB: usize = 64;
const KEYS: usize = 32;

/// Query heads of a threadgroup, as in the kernel.
const HEADS: usize = 8;

/// Simdgroups of a threadgroup, at most.
const MAX_SIMDGROUPS: usize = 12;

/// `LatentKvWriteArgs` of the kernels.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct LatentKvWriteArgs {
    pages: Pages,
    num_heads: u32,
    query_width: u32,
    query_stride: u32,
    kv_width: u32,
    rank: u32,
    num_pairs: u32,
    eps: f32,
}

/// `LatentAttentionArgs` of the kernels.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct LatentAttentionArgs {
    pages: Pages,
    num_heads: u32,
    value_dim: u32,
    q_stride: u32,
    split_size: u32,
    num_splits: u32,
    scale: f32,
}

/// The rows of one layer in the cache.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LatentRows<'a> {
    pub(crate) rows: &'a GpuBuffer,
    pub(crate) dtype: KvCacheDType,
    pub(crate) row_dim: usize,
    pub(in crate::ops::gpu) pages: Pages,
}

/// Rows to write to the cache, and queries whose ends are rotated.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LatentWrite<'a> {
    pub(crate) queries: &'a GpuBuffer,
    /// The strides of tokens' queries and of heads' queries, in values.
    pub(crate) query_width: usize,
    pub(crate) query_stride: usize,
    pub(crate) kv: &'a GpuBuffer,
    pub(crate) kv_width: usize,
    pub(crate) num_tokens: usize,
    pub(crate) num_heads: usize,
    pub(crate) norm: Binding<'a>,
    pub(crate) eps: f32,
    pub(crate) table: &'a GpuBuffer,
    pub(crate) num_pairs: usize,
    pub(crate) is_interleaved: bool,
    pub(crate) out: &'a GpuBuffer,
}

pub(crate) fn latent_kv_write(
    gpu: &GpuBackend,
    inputs: &GpuInputs,
    write: LatentWrite<'_>,
    rows: LatentRows<'_>,
) -> Result<()> {
    let LatentWrite { num_tokens, num_heads, num_pairs, .. } = write;
    let args = LatentKvWriteArgs {
        pages: rows.pages,
        num_heads: num_heads as u32,
        query_width: write.query_width as u32,
        query_stride: write.query_stride as u32,
        kv_width: write.kv_width as u32,
        rank: (rows.row_dim - 2 * num_pairs) as u32,
        num_pairs: num_pairs as u32,
        eps: write.eps,
    };
    let buffers = [
        Binding::read(write.queries),
        Binding::read(write.kv),
        inputs.positions(),
        inputs.slots(),
        write.norm,
        Binding::read(write.table),
        Binding::write(rows.rows),
        Binding::write(write.out),
    ];
    gpu.launch(
        Kernel::LatentKvWrite(rows.dtype),
        Flags::of([write.is_interleaved]),
        Work {
            args: bytes_of(&args),
            buffers: &buffers,
            threadgroup_memory: 0,
            grid: [(num_heads + 1).div_ceil(ROTATED_HEADS), num_tokens, 1],
            num_threads: 32 * ROTATED_HEADS,
            cost: Cost::bytes(2 * 4 * num_tokens * (num_heads * 2 * num_pairs + rows.row_dim)),
        },
    )
}

/// The shape of latent attention and the memory of partial results.
#[derive(Debug)]
pub(crate) struct GpuLatentAttention {
    num_heads: usize,
    value_dim: usize,
    split_size: usize,
    partials: GpuBuffer,
}

/// The inputs and outputs of a launch.
#[derive(Debug, Clone, Copy)]
struct Operands<'a> {
    /// The scale of scores, for exponents of two.
    scale: f32,
    q: &'a GpuBuffer,
    q_stride: usize,
    rows: LatentRows<'a>,
    out: &'a GpuBuffer,
}

/// The parameters of [`GpuLatentAttention`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct LatentSizes {
    pub(crate) num_heads: usize,
    /// Values of a row of the cache and of a query.
    pub(crate) row_dim: usize,
    /// The first values of a row, which are its value.
    pub(crate) value_dim: usize,
    pub(crate) max_model_len: usize,
    pub(crate) max_num_rows: usize,
}

impl GpuLatentAttention {
    pub(crate) fn new(gpu: &GpuBackend, sizes: LatentSizes) -> Result<Self> {
        let LatentSizes { num_heads, row_dim, value_dim, max_model_len, max_num_rows } = sizes;
        if !row_dim.is_multiple_of(8) || !value_dim.is_multiple_of(8) || row_dim > MAX_SIMDGROUPS * SLAB {
            return Err(Error::unsupported(format!(
                "attention over latent rows of {row_dim} values, {value_dim} of which are values, has no kernel on \
                 this device: both must be multiples of 8, and there may be {} of them",
                MAX_SIMDGROUPS * SLAB
            ))
            .with_hint("use --device cpu"));
        }
        let split_size = max_model_len.div_ceil(MAX_SPLITS).max(SPLIT_SIZE).next_multiple_of(KEYS);
        let num_splits = max_model_len.div_ceil(split_size);
        let mut values_per_head = num_splits * (value_dim + 2);
        let mut is_cut = num_splits > 1;
        if gpu.tuning().has_tensor_cores() {
            // The cache's type selects the kernel and is not known yet.
            let num_splits = decode_latent::max_splits(max_model_len);
            values_per_head = values_per_head.max(num_splits * decode_latent::record_values(value_dim));
            is_cut |= num_splits > 1;
        }
        let num_values = if is_cut { max_num_rows * num_heads * values_per_head } else { 4 };
        let partials = gpu.device().allocate(4 * num_values, Placement::Private)?;
        Ok(Self { num_heads, value_dim, split_size, partials })
    }

    /// Attention of all single tokens of a step: those of sequences with one token, whose context is split, and those
    /// of other sequences, which are enough without splits. Scores are multiplied by `scale`.
    #[expect(clippy::too_many_arguments, reason = "an op's operands")]
    pub(crate) fn run(
        &self,
        gpu: &GpuBackend,
        inputs: &GpuInputs,
        scale: f32,
        q: &GpuBuffer,
        q_stride: usize,
        rows: LatentRows<'_>,
        out: &GpuBuffer,
    ) -> Result<()> {
        let scale = scale * LOG2_E;
        if decode_latent::has_kernel(gpu.tuning(), rows, self.value_dim) {
            let &Self { num_heads, value_dim, ref partials, .. } = self;
            let latent = DecodeLatent { num_heads, value_dim, scale, q, q_stride, rows, partials, out };
            return decode_latent_attention(gpu, inputs, latent);
        }
        let operands = Operands { scale, q, q_stride, rows, out };
        self.launch(gpu, inputs, inputs.decode(), self.split_size, operands)?;
        let prefill = inputs.prefill_rows();
        self.launch(gpu, inputs, prefill, prefill.max_len().next_multiple_of(KEYS), operands)
    }

    fn launch(
        &self,
        gpu: &GpuBackend,
        inputs: &GpuInputs,
        tokens: DecodeRows<'_>,
        split_size: usize,
        operands: Operands<'_>,
    ) -> Result<()> {
        let &Self { num_heads, value_dim, .. } = self;
        let Operands { scale, q, q_stride, rows, out } = operands;
        let LatentRows { row_dim, pages, dtype, .. } = rows;
        let num_chunks = num_heads.div_ceil(HEADS);
        let num_simdgroups = row_dim.div_ceil(SLAB);
        let num_splits = tokens.max_len().div_ceil(split_size.max(1));
        let args = LatentAttentionArgs {
            pages,
            num_heads: num_heads as u32,
            value_dim: value_dim as u32,
            q_stride: q_stride as u32,
            split_size: split_size as u32,
            num_splits: num_splits as u32,
            scale,
        };
        let merge_args = PagedAttentionArgs {
            pages: Pages { head_dim: value_dim as u32, ..pages },
            num_heads: num_heads as u32,
            q_stride: q_stride as u32,
            split_size: split_size as u32,
            num_splits: num_splits as u32,
            window: u32::MAX,
            num_slices: 1,
            scale,
            soft_cap: 0.0,
        };
        let weight_bytes = if is_half(dtype) { 2 } else { 4 };
        let partial_scores = num_simdgroups * (KEYS + 4) * HEADS;
        let threadgroup_memory = 4 * (partial_scores + 3 * HEADS) + weight_bytes * HEADS * (KEYS + 8);
        let record_bytes = 4 * (value_dim + 2);
        let merge_cost = Cost::bytes(num_heads * num_splits * record_bytes);
        let cost = |len: usize| {
            let keys = Cost {
                operations: 4 * (num_chunks * HEADS * num_simdgroups * SLAB * len) as u64,
                bytes: (num_chunks * len * dtype.row_bytes(row_dim)) as u64,
            };
            keys + merge_cost
        };
        for (range, cost) in gpu.dispatch_budget().chunks(tokens.lens().map(cost)) {
            let (first, num_rows) = (range.start, range.len());
            let decode_rows = inputs.rows_from(tokens, first);
            let partials_offset = first * num_heads * num_splits * record_bytes;
            let (out_binding, partials) = if num_splits == 1 {
                (Binding::write(out), Binding::read(&self.partials))
            } else {
                (Binding::read(out), Binding::write(&self.partials).at(partials_offset))
            };
            let buffers = [
                Binding::read(q),
                Binding::read(rows.rows),
                inputs.block_tables(),
                decode_rows,
                out_binding,
                partials,
            ];
            gpu.launch(
                Kernel::LatentAttention(dtype),
                Flags::default(),
                Work {
                    args: bytes_of(&args),
                    buffers: &buffers,
                    threadgroup_memory,
                    grid: [num_chunks, num_splits, num_rows],
                    num_threads: num_simdgroups * 32,
                    cost,
                },
            )?;
            if num_splits > 1 {
                let partials = Binding::read(&self.partials).at(partials_offset);
                let cost = range.map(|_| merge_cost).sum();
                merge(gpu, &merge_args, None, decode_rows, num_rows, partials, out, cost)?;
            }
        }
        Ok(())
    }
}
