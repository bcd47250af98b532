//! Launches of attention of single tokens over latent rows on tensor cores, `cuda/kernels/decode_latent_attention.cu`.

use bytemuck::{Pod, Zeroable, bytes_of};

use super::grouped::Pages;
use super::latent::LatentRows;
use crate::Result;
use crate::ops::KvCacheDType;
use crate::ops::gpu::backend::{Flags, GpuBackend, Work};
use crate::ops::gpu::cost::Cost;
use crate::ops::gpu::kernel::Kernel;
use crate::ops::gpu::step_inputs::{DecodeRows, GpuInputs};
use crate::ops::gpu::{Binding, GpuBuffer, Tuning};

/// Query heads of a thread block, its warps, and the positions of its tile, as in the kernel.
pub(in crate::ops::gpu) const HEADS: usize = 16;
const NUM_WARPS: usize = 8;
const TILE: usize = 32;

/// Partial sums of a score, as in the kernel.
const QUARTERS: usize = 4;

/// Maximum values of a row and of a result, as in the kernel.
const MAX_ROW_DIM: usize = 576;
const MAX_VALUE_DIM: usize = 512;

/// Positions of a KV split.
const SPLIT_SIZE: usize = 128;

/// Maximum KV splits of a context, as in the kernel; longer contexts have longer splits.
const MAX_SPLITS: usize = 64;

/// Values that a thread block merges, as in the kernel.
const MERGED: usize = 128;

/// Values of a partial result: the head's, maximum and sum, padded to 16 bytes.
pub(in crate::ops::gpu) const fn record_values(value_dim: usize) -> usize {
    value_dim + 4
}

/// `DecodeLatentAttentionArgs` of the kernels.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct DecodeLatentAttentionArgs {
    pages: Pages,
    num_heads: u32,
    value_dim: u32,
    q_stride: u32,
    split_size: u32,
    num_splits: u32,
    scale: f32,
}

/// Whether tensor cores have a kernel for attention over such rows.
pub(in crate::ops::gpu) fn has_kernel(tuning: Tuning, rows: LatentRows<'_>, value_dim: usize) -> bool {
    let is_whole = rows.row_dim.is_multiple_of(16) && value_dim.is_multiple_of(16);
    let fits = rows.row_dim <= MAX_ROW_DIM && value_dim <= MAX_VALUE_DIM;
    tuning.has_tensor_cores() && rows.dtype != KvCacheDType::F32 && is_whole && fits
}

/// KV splits of a context of this length.
fn num_splits(seq_len: usize) -> usize {
    let mut split_size = SPLIT_SIZE;
    while split_size * MAX_SPLITS < seq_len {
        split_size *= 2;
    }
    seq_len.div_ceil(split_size)
}

/// The maximum number of splits of any context up to this length.
pub(in crate::ops::gpu) fn max_splits(max_model_len: usize) -> usize {
    max_model_len.div_ceil(SPLIT_SIZE).min(MAX_SPLITS)
}

/// The inputs and outputs.
#[derive(Debug, Clone, Copy)]
pub(in crate::ops::gpu) struct DecodeLatent<'a> {
    pub(in crate::ops::gpu) num_heads: usize,
    /// Values of a result, which are the first ones of a row.
    pub(in crate::ops::gpu) value_dim: usize,
    /// The scale of scores, for exponents of two.
    pub(in crate::ops::gpu) scale: f32,
    pub(in crate::ops::gpu) q: &'a GpuBuffer,
    /// The stride of tokens' queries, in values.
    pub(in crate::ops::gpu) q_stride: usize,
    pub(in crate::ops::gpu) rows: LatentRows<'a>,
    /// Space for the partial results of all sequences of one token.
    pub(in crate::ops::gpu) partials: &'a GpuBuffer,
    pub(in crate::ops::gpu) out: &'a GpuBuffer,
}

/// Attention of all single tokens of a step: those of sequences with one token, whose context is split, and those of
/// other sequences, which are enough without splits.
pub(in crate::ops::gpu) fn decode_latent_attention(
    gpu: &GpuBackend,
    inputs: &GpuInputs,
    latent: DecodeLatent<'_>,
) -> Result<()> {
    let tokens = inputs.decode();
    latent.launch(gpu, inputs, tokens, SPLIT_SIZE, tokens.lens().map(num_splits).max().unwrap_or(0))?;
    let tokens = inputs.prefill_rows();
    latent.launch(gpu, inputs, tokens, tokens.max_len(), 1)
}

impl DecodeLatent<'_> {
    fn launch(
        &self,
        gpu: &GpuBackend,
        inputs: &GpuInputs,
        tokens: DecodeRows<'_>,
        split_size: usize,
        num_splits: usize,
    ) -> Result<()> {
        let &Self { num_heads, value_dim, scale, q, q_stride, rows, partials, out } = self;
        let LatentRows { row_dim, pages, dtype, .. } = rows;
        let num_chunks = num_heads.div_ceil(HEADS);
        let args = DecodeLatentAttentionArgs {
            pages,
            num_heads: num_heads as u32,
            value_dim: value_dim as u32,
            q_stride: q_stride as u32,
            split_size: split_size as u32,
            num_splits: num_splits as u32,
            scale,
        };
        // Partial results are written to memory and read back.
        let record_bytes = 4 * record_values(value_dim);
        let merge_cost = Cost::bytes(2 * num_heads * num_splits * record_bytes);
        let cost = |len: usize| {
            let keys = Cost {
                operations: (2 * num_chunks * HEADS * (row_dim + value_dim) * len) as u64,
                bytes: (num_chunks * len * dtype.row_bytes(row_dim)) as u64,
            };
            keys + merge_cost
        };
        for (range, cost) in gpu.dispatch_budget().chunks(tokens.lens().map(cost)) {
            let decode_rows = inputs.rows_from(tokens, range.start);
            let partials_offset = range.start * num_heads * num_splits * record_bytes;
            let (out_binding, partials_binding) = if num_splits == 1 {
                (Binding::write(out), Binding::read(partials))
            } else {
                (Binding::read(out), Binding::write(partials).at(partials_offset))
            };
            let buffers = [
                Binding::read(q),
                Binding::read(rows.rows),
                inputs.block_tables(),
                decode_rows,
                out_binding,
                partials_binding,
            ];
            gpu.launch(
                Kernel::DecodeLatentAttention { dtype, row_dim, value_dim },
                Flags::default(),
                Work {
                    args: bytes_of(&args),
                    buffers: &buffers,
                    threadgroup_memory: threadgroup_memory(row_dim),
                    grid: [num_chunks, num_splits, range.len()],
                    num_threads: 32 * NUM_WARPS,
                    cost,
                },
            )?;
            if num_splits > 1 {
                gpu.launch(
                    Kernel::DecodeLatentAttentionMerge,
                    Flags::default(),
                    Work {
                        args: bytes_of(&args),
                        buffers: &[
                            decode_rows,
                            Binding::read(partials).at(partials_offset),
                            Binding::write(out),
                        ],
                        threadgroup_memory: 4 * NUM_WARPS * MERGED,
                        grid: [num_heads, range.len(), value_dim.div_ceil(MERGED)],
                        num_threads: 32 * NUM_WARPS,
                        cost: range.map(|_| merge_cost).sum(),
                    },
                )?;
            }
        }
        Ok(())
    }
}

/// Bytes for two tiles of rows, partial scores, weights, the factors of heads' results and their sums.
fn threadgroup_memory(row_dim: usize) -> usize {
    let tiles = 2 * TILE * 2 * ((row_dim / 8) | 1) * 8;
    let partial_scores = 4 * QUARTERS * HEADS * (TILE + 4);
    let weights = 2 * HEADS * (TILE + 8);
    tiles + partial_scores + weights + 4 * 2 * HEADS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_context_is_cut_by_its_length() {
        for (seq_len, splits) in
            [(1, 1), (128, 1), (129, 2), (4096, 32), (8192, 64), (8193, 33), (16_385, 33), (131_072, 64)]
        {
            assert_eq!(num_splits(seq_len), splits, "{seq_len}");
            assert!(splits <= max_splits(seq_len), "{seq_len}");
        }
    }

    /// Fits the smallest limit of a thread block on any device, and half of a multiprocessor's memory on compute
    /// capability 9.0, minus the kilobyte that each thread block takes in addition.
    #[test]
    fn two_threadgroups_share_a_multiprocessor() {
        let bytes = threadgroup_memory(MAX_ROW_DIM);
        assert_eq!(bytes, 2 * 32 * 584 * 2 + 4 * 4 * 16 * 36 + 2 * 16 * 40 + 128);
        assert!(bytes <= 99 << 10 && 2 * (bytes + 1024) <= 228 << 10, "{bytes}");
    }
}
