//! Launches of attention of one token per sequence on tensor cores, `cuda/kernels/decode_attention.cu`.

use bytemuck::{Pod, Zeroable, bytes_of};

use super::grouped::{GpuAttentionSpec, Pages, Pools, Rope, Rotation};
use crate::Result;
use crate::config::SpeculativeConfig;
use crate::ops::KvCacheDType;
use crate::ops::gpu::backend::{Flags, GpuBackend, Work};
use crate::ops::gpu::cost::Cost;
use crate::ops::gpu::kernel::Kernel;
use crate::ops::gpu::matmul::packed_activations::Pairs;
use crate::ops::gpu::step_inputs::GpuInputs;
use crate::ops::gpu::{Binding, GpuBuffer, Tuning};

/// Query heads of a thread block, and its warps, as in the kernel.
const HEADS: usize = 8;
const NUM_WARPS: usize = 8;

/// Positions of a warp's tile, as in the kernel. The first split begins at a multiple of it.
const TILE: usize = 16;

/// The longest context that is not split, in positions: merging takes a launch, which costs more than two or three
/// tiles.
const WHOLE_SIZE: usize = 512;

/// Positions of a KV split: small enough to spread contexts of some thousands over the GPU, and large enough that a
/// split's partial result is small compared with its reads.
const SPLIT_SIZE: usize = 256;

/// Groups of heads from which splits of values of eight bits are twice as long: they have half the bytes, so the fixed
/// costs of a split weigh more. With fewer groups, a single sequence would have too few splits for a GPU: TinyLlama's
/// shape, with four groups, then generated at 0.94 of the speed at context 4,000 on an H200.
const MIN_GROUPS: usize = 8;

fn split_size(dtype: KvCacheDType, num_groups: usize) -> usize {
    let has_eight_bits = matches!(dtype, KvCacheDType::Q8_0 | KvCacheDType::Fp8E4m3);
    let is_longer = has_eight_bits && num_groups >= MIN_GROUPS;
    if is_longer { 2 * SPLIT_SIZE } else { SPLIT_SIZE }
}

/// Maximum KV splits of a context, as in the kernel; longer contexts have longer splits.
const MAX_SPLITS: usize = 32;

/// Positions before a token's own that the same step may compute, as in the kernel.
const MAX_DRAFTED: usize = 64;
const _: () = assert!(SpeculativeConfig::MAX_TOKENS <= MAX_DRAFTED);

/// Values of a partial result: the head's, maximum and sum, padded to 16 bytes.
pub(in crate::ops::gpu) const fn record_values(head_dim: usize) -> usize {
    head_dim + 4
}

/// `DecodeAttentionArgs` of the kernels.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct DecodeAttentionArgs {
    pages: Pages,
    num_heads: u32,
    q_stride: u32,
    num_chunks: u32,
    window: u32,
    whole_size: u32,
    split_size: u32,
    num_splits: u32,
    num_tokens: u32,
    scale: f32,
    rotation: Rotation,
    soft_cap: f32,
}

/// Whether tensor cores have a kernel for attention over such a cache.
pub(in crate::ops::gpu) fn has_kernel(tuning: Tuning, dtype: KvCacheDType, head_dim: usize) -> bool {
    tuning.has_tensor_cores() && dtype != KvCacheDType::F32 && head_dim.is_multiple_of(16)
}

/// KV splits for a token that attends to this many positions, including its own.
fn num_splits(mut split_size: usize, seq_len: usize, window: usize) -> usize {
    let len = seq_len - seq_len.saturating_sub(window) / TILE * TILE;
    if len <= WHOLE_SIZE {
        return 1;
    }
    while split_size * MAX_SPLITS < len {
        split_size *= 2;
    }
    len.div_ceil(split_size)
}

/// Whether none of the step's contexts is split.
pub(in crate::ops::gpu) fn are_whole(inputs: &GpuInputs, window: usize) -> bool {
    inputs.decode().lens().all(|len| num_splits(SPLIT_SIZE, len, window) == 1)
}

/// The maximum number of splits of any context up to this length.
pub(in crate::ops::gpu) fn max_splits(max_model_len: usize, window: usize) -> usize {
    let len = max_model_len.min(window.saturating_add(TILE - 1));
    if len <= WHOLE_SIZE { 1 } else { len.div_ceil(SPLIT_SIZE).min(MAX_SPLITS) }
}

/// The inputs and outputs.
#[derive(Debug, Clone, Copy)]
pub(in crate::ops::gpu) struct DecodeOperands<'a> {
    pub(in crate::ops::gpu) q: &'a GpuBuffer,
    /// The stride of tokens' queries, in values.
    pub(in crate::ops::gpu) q_stride: usize,
    /// The rotation of queries; keys and values for the cache follow them. None if they are rotated already.
    pub(in crate::ops::gpu) rope: Option<Rope<'a>>,
    pub(in crate::ops::gpu) pools: Pools<'a>,
    /// Space for the partial results of all rows.
    pub(in crate::ops::gpu) partials: &'a GpuBuffer,
    pub(in crate::ops::gpu) out: &'a GpuBuffer,
    /// The order in which results are packed for a matmul, if they are: without splits only, see [`are_whole`].
    pub(in crate::ops::gpu) next: Option<Pairs>,
}

/// Attention of the step's sequences of one token.
pub(in crate::ops::gpu) fn decode_attention(
    gpu: &GpuBackend,
    inputs: &GpuInputs,
    spec: GpuAttentionSpec<'_>,
    operands: DecodeOperands<'_>,
) -> Result<()> {
    let DecodeOperands { q, q_stride, rope, pools, partials, out, next } = operands;
    let GpuAttentionSpec { num_heads, scale, window, .. } = spec;
    let head_dim = pools.head_dim;
    let heads_per_kv_head = num_heads / pools.num_kv_heads;
    let num_chunks = heads_per_kv_head.div_ceil(HEADS);
    let tokens = inputs.decode();
    let split_size = split_size(pools.dtype, pools.num_kv_heads * num_chunks);
    let num_splits = tokens.lens().map(|len| num_splits(split_size, len, window)).max().unwrap_or(0);
    let args = DecodeAttentionArgs {
        pages: pools.pages,
        num_heads: num_heads as u32,
        q_stride: q_stride as u32,
        num_chunks: num_chunks as u32,
        window: window as u32,
        whole_size: WHOLE_SIZE as u32,
        split_size: split_size as u32,
        num_splits: num_splits as u32,
        num_tokens: tokens.lens().count() as u32,
        scale,
        rotation: rope.map(|rope| rope.rotation(head_dim)).unwrap_or_default(),
        soft_cap: spec.soft_cap(),
    };
    let [has_norms, is_interleaved] = rope.map(|rope| rope.flags()).unwrap_or_default();
    let [has_sinks, has_soft_cap] = spec.flags();
    let flags = Flags::of([has_norms, is_interleaved, rope.is_some(), has_sinks, has_soft_cap]);
    let sinks = spec.sinks_or(Binding::read(q));
    // The kernel variants without rotation do not read these.
    let [q_norm, k_norm, table] = rope.map_or([Binding::read(q); 3], |rope| rope.norms_and_table());
    let cached = |pool| if rope.is_some() { Binding::read_write(pool) } else { Binding::read(pool) };
    // Partial results are written to memory and read back.
    let record_bytes = 4 * record_values(head_dim);
    let merge_cost = Cost::bytes(2 * num_heads * num_splits * record_bytes);
    let cost = |len: usize| {
        let num_keys = len.min(window);
        let keys = Cost {
            operations: (4 * pools.num_kv_heads * num_chunks * HEADS * head_dim * num_keys) as u64,
            bytes: (num_keys * pools.bytes_per_position()) as u64,
        };
        keys + merge_cost
    };
    for (rows, cost) in gpu.dispatch_budget().chunks(tokens.lens().map(cost)) {
        let decode_rows = inputs.rows_from(tokens, rows.start);
        let partials_offset = rows.start * num_heads * num_splits * record_bytes;
        let (out_binding, partials_binding) = if num_splits == 1 {
            (Binding::write(out), Binding::read(partials))
        } else {
            (Binding::read(out), Binding::write(partials).at(partials_offset))
        };
        let buffers = [
            Binding::read(q),
            cached(pools.k),
            cached(pools.v),
            inputs.block_tables(),
            decode_rows,
            out_binding,
            partials_binding,
            inputs.positions(),
            inputs.slots(),
            q_norm,
            k_norm,
            table,
            sinks,
        ];
        gpu.launch(
            Kernel::DecodeAttention { dtype: pools.dtype, head_dim, next },
            flags,
            Work {
                args: bytes_of(&args),
                buffers: &buffers,
                threadgroup_memory: threadgroup_memory(pools.dtype, head_dim, heads_per_kv_head.min(HEADS)),
                grid: [num_splits, pools.num_kv_heads * num_chunks, rows.len()],
                num_threads: 32 * NUM_WARPS,
                cost,
            },
        )?;
        if num_splits > 1 {
            gpu.launch(
                Kernel::DecodeAttentionMerge { head_dim },
                Flags::of([false, false, false, has_sinks]),
                Work {
                    args: bytes_of(&args),
                    buffers: &[
                        decode_rows,
                        Binding::read(partials).at(partials_offset),
                        Binding::write(out),
                        sinks,
                    ],
                    threadgroup_memory: 4 * NUM_WARPS * head_dim,
                    grid: [num_heads, rows.len(), 1],
                    num_threads: 32 * NUM_WARPS,
                    cost: rows.map(|_| merge_cost).sum(),
                },
            )?;
        }
    }
    Ok(())
}

/// The widest head of the kernel variant for this one.
pub(in crate::ops::gpu) fn max_dim(head_dim: usize) -> usize {
    if head_dim <= 128 { 128 } else { 256 }
}

/// Bytes for maxima and sums, and then for queries in halves with a key and a value, or for the results of `num_heads`
/// heads of all warps.
fn threadgroup_memory(dtype: KvCacheDType, head_dim: usize, num_heads: usize) -> usize {
    let totals = 4 * HEADS * (2 * NUM_WARPS + 1);
    let queries = HEADS * 2 * (max_dim(head_dim) + 32);
    let results = 4 * NUM_WARPS * num_heads * (head_dim + 4);
    let own = match dtype {
        // Codes and scales, and space for quantization.
        KvCacheDType::Q8_0 => 2 * (dtype.row_bytes(max_dim(head_dim)) + 4 * max_dim(head_dim)),
        _ => 2 * 2 * max_dim(head_dim),
    };
    totals + (queries + own).max(results)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_context_is_cut_by_what_is_attended_to() {
        let whole = usize::MAX;
        for (seq_len, window, splits) in [
            (1, whole, 1),
            (512, whole, 1),
            (513, whole, 3),
            (768, whole, 3),
            (769, whole, 4),
            (4000, whole, 16),
            (8192, whole, 32),
            (8193, whole, 17),
            (131_072, whole, 32),
            // Splits start at the last multiple of a tile before the window.
            (100_000, 512, 1),
            (100_001, 512, 3),
            (100_000, 4096, 16),
            (100_001, 4096, 17),
            (7, 1, 1),
        ] {
            assert_eq!(num_splits(SPLIT_SIZE, seq_len, window), splits, "{seq_len}, {window}");
        }
    }

    #[test]
    fn scratch_memory_holds_the_splits_of_any_length() {
        for max_len in [1, 512, 513, 1000, 8192, 8193, 40_000] {
            for window in [1, 500, 512, 2049, usize::MAX] {
                let most = (1..=max_len).map(|len| num_splits(SPLIT_SIZE, len, window)).max();
                let capacity = max_splits(max_len, window);
                assert!(
                    most.is_some_and(|most| (most..=most + 1).contains(&capacity)),
                    "{max_len}, {window}: {most:?}, {capacity}"
                );
                let longer = (1..=max_len).map(|len| num_splits(2 * SPLIT_SIZE, len, window)).max();
                assert!(
                    longer.is_some_and(|longer| longer <= capacity),
                    "{max_len}, {window}: {longer:?}, {capacity}"
                );
            }
        }
    }
}
