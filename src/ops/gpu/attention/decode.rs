//! Launches of attention of one token per sequence on tensor cores, `cuda/kernels/decode_attention.cu`.

use bytemuck::{Pod, Zeroable, bytes_of};

use super::grouped::{GpuAttentionSpec, Pages, Pools, Rope, Rotation};
use crate::Result;
use crate::config::SpeculativeConfig;
use crate::ops::KvCacheDType;
use crate::ops::gpu::backend::{Flags, GpuBackend, Work};
use crate::ops::gpu::cost::Cost;
use crate::ops::gpu::kernel::Kernel;
use crate::ops::gpu::matmul::rounded::Pairs;
use crate::ops::gpu::step_inputs::GpuInputs;
use crate::ops::gpu::{Binding, GpuBuffer, Tuning};

/// Query heads of a threadgroup, and its warps, as in the kernel.
const HEADS: usize = 8;
const NUM_WARPS: usize = 8;

/// Positions that a warp takes at a time, as in the kernel. The first piece begins at a multiple of it.
const TILE: usize = 16;

/// Positions of a context that is not cut: merging takes a launch, which is longer than two or three tiles take a warp.
const WHOLE_SIZE: usize = 512;

/// Positions of a piece of other contexts, so that one of some thousands is spread over the GPU. What a piece leaves to
/// be merged is a small part of what it reads.
const PIECE_SIZE: usize = 256;

/// Groups of heads with which pieces of q8_0 are twice as long: they have half the bytes, and what a piece begins and ends with
/// shows. With fewer groups, pieces of a single sequence would be too few for a GPU: one of TinyLlama's shape, which has four,
/// generated at 0.94 of the speed at context 4,000 on an H200.
const MIN_GROUPS: usize = 8;

fn piece_size(dtype: KvCacheDType, num_groups: usize) -> usize {
    let is_longer = dtype == KvCacheDType::Q8_0 && num_groups >= MIN_GROUPS;
    if is_longer { 2 * PIECE_SIZE } else { PIECE_SIZE }
}

/// Most pieces of a context, as in the kernel: pieces of longer contexts are longer.
const MAX_PIECES: usize = 32;

/// Positions before a token's own that the same step may compute, as in the kernel.
const MAX_DRAFTED: usize = 64;
const _: () = assert!(SpeculativeConfig::MAX_TOKENS <= MAX_DRAFTED);

/// Values of a partial result: the head's, and room for maximum and sum up to the next 16 bytes.
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
    piece_size: u32,
    num_pieces: u32,
    num_tokens: u32,
    scale: f32,
    rotation: Rotation,
    soft_cap: f32,
}

/// Whether attention over such a cache has a kernel of tensor cores.
pub(in crate::ops::gpu) fn has_kernel(tuning: Tuning, dtype: KvCacheDType, head_dim: usize) -> bool {
    tuning.has_tensor_cores() && dtype != KvCacheDType::F32 && head_dim.is_multiple_of(16)
}

/// Pieces that the context of a token is cut into which attends to so many positions up to itself.
fn num_pieces(mut piece_size: usize, seq_len: usize, window: usize) -> usize {
    let len = seq_len - seq_len.saturating_sub(window) / TILE * TILE;
    if len <= WHOLE_SIZE {
        return 1;
    }
    while piece_size * MAX_PIECES < len {
        piece_size *= 2;
    }
    len.div_ceil(piece_size)
}

/// Whether none of the step's contexts is cut.
pub(in crate::ops::gpu) fn are_whole(inputs: &GpuInputs, window: usize) -> bool {
    inputs.decode().lens().all(|len| num_pieces(PIECE_SIZE, len, window) == 1)
}

/// The most pieces of any context up to this length.
pub(in crate::ops::gpu) fn max_pieces(max_model_len: usize, window: usize) -> usize {
    let len = max_model_len.min(window.saturating_add(TILE - 1));
    if len <= WHOLE_SIZE { 1 } else { len.div_ceil(PIECE_SIZE).min(MAX_PIECES) }
}

/// What is read and written.
#[derive(Debug, Clone, Copy)]
pub(in crate::ops::gpu) struct DecodeOperands<'a> {
    pub(in crate::ops::gpu) q: &'a GpuBuffer,
    /// Values from one token's queries to the next.
    pub(in crate::ops::gpu) q_stride: usize,
    /// How queries are rotated, behind which are the keys and values for the cache, if that is not done.
    pub(in crate::ops::gpu) rope: Option<Rope<'a>>,
    pub(in crate::ops::gpu) pools: Pools<'a>,
    /// Room for the pieces of all rows.
    pub(in crate::ops::gpu) partials: &'a GpuBuffer,
    pub(in crate::ops::gpu) out: &'a GpuBuffer,
    /// For what product results are rounded, if they are: of whole contexts only, see [`are_whole`].
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
    let piece_size = piece_size(pools.dtype, pools.num_kv_heads * num_chunks);
    let num_pieces = tokens.lens().map(|len| num_pieces(piece_size, len, window)).max().unwrap_or(0);
    let args = DecodeAttentionArgs {
        pages: pools.pages,
        num_heads: num_heads as u32,
        q_stride: q_stride as u32,
        num_chunks: num_chunks as u32,
        window: window as u32,
        whole_size: WHOLE_SIZE as u32,
        piece_size: piece_size as u32,
        num_pieces: num_pieces as u32,
        num_tokens: tokens.lens().count() as u32,
        scale,
        rotation: rope.map(|rope| rope.rotation(head_dim)).unwrap_or_default(),
        soft_cap: spec.soft_cap(),
    };
    let [has_norms, is_interleaved] = rope.map(|rope| rope.flags()).unwrap_or_default();
    let [has_sinks, has_soft_cap] = spec.flags();
    let flags = Flags::of([has_norms, is_interleaved, rope.is_some(), has_sinks, has_soft_cap]);
    let sinks = spec.sinks_or(Binding::read(q));
    // What does not rotate does not read these.
    let [q_norm, k_norm, table] = rope.map_or([Binding::read(q); 3], |rope| rope.norms_and_table());
    let cached = |pool| if rope.is_some() { Binding::read_write(pool) } else { Binding::read(pool) };
    // Both go to memory and come back.
    let record_bytes = 4 * record_values(head_dim);
    let merge_cost = Cost::bytes(2 * num_heads * num_pieces * record_bytes);
    let cost = |len: usize| {
        let num_keys = len.min(window);
        let keys = Cost {
            operations: (4 * pools.num_kv_heads * num_chunks * HEADS * head_dim * num_keys) as u64,
            bytes: (num_keys * pools.bytes_per_position()) as u64,
        };
        keys + merge_cost
    };
    for (rows, cost) in gpu.patience().pieces(tokens.lens().map(cost)) {
        let decode_rows = inputs.rows_from(tokens, rows.start);
        let partials_offset = rows.start * num_heads * num_pieces * record_bytes;
        let (out_binding, partials_binding) = if num_pieces == 1 {
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
                grid: [num_pieces, pools.num_kv_heads * num_chunks, rows.len()],
                num_threads: 32 * NUM_WARPS,
                cost,
            },
        )?;
        if num_pieces > 1 {
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

/// The widest head of the kernel's variant for this one.
pub(in crate::ops::gpu) fn max_dim(head_dim: usize) -> usize {
    if head_dim <= 128 { 128 } else { 256 }
}

/// Bytes for maxima and sums, and then queries in halves with a key and a value, or the results of `num_heads` heads of all
/// warps.
fn threadgroup_memory(dtype: KvCacheDType, head_dim: usize, num_heads: usize) -> usize {
    let totals = 4 * HEADS * (2 * NUM_WARPS + 1);
    let queries = HEADS * 2 * (max_dim(head_dim) + 32);
    let results = 4 * NUM_WARPS * num_heads * (head_dim + 4);
    let own = match dtype {
        // Codes and scales, and what they are made of.
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
        for (seq_len, window, pieces) in [
            (1, whole, 1),
            (512, whole, 1),
            (513, whole, 3),
            (768, whole, 3),
            (769, whole, 4),
            (4000, whole, 16),
            (8192, whole, 32),
            (8193, whole, 17),
            (131_072, whole, 32),
            // From the last multiple of a tile before the window on.
            (100_000, 512, 1),
            (100_001, 512, 3),
            (100_000, 4096, 16),
            (100_001, 4096, 17),
            (7, 1, 1),
        ] {
            assert_eq!(num_pieces(PIECE_SIZE, seq_len, window), pieces, "{seq_len}, {window}");
        }
    }

    #[test]
    fn there_is_room_for_the_pieces_of_any_length() {
        for max_len in [1, 512, 513, 1000, 8192, 8193, 40_000] {
            for window in [1, 500, 512, 2049, usize::MAX] {
                let most = (1..=max_len).map(|len| num_pieces(PIECE_SIZE, len, window)).max();
                let room = max_pieces(max_len, window);
                assert!(
                    most.is_some_and(|most| (most..=most + 1).contains(&room)),
                    "{max_len}, {window}: {most:?}, {room}"
                );
                let longer = (1..=max_len).map(|len| num_pieces(2 * PIECE_SIZE, len, window)).max();
                assert!(
                    longer.is_some_and(|longer| longer <= room),
                    "{max_len}, {window}: {longer:?}, {room}"
                );
            }
        }
    }
}
