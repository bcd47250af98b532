//! Launches of attention of several tokens on tensor cores, `prefill_attention.cu` of `cuda/kernels`.

use std::ops::Range;

use bytemuck::bytes_of;

use super::grouped::{FlashAttentionArgs, FlashOperands};
use crate::Result;
use crate::ops::KvCacheDType;
use crate::ops::gpu::Tuning;
use crate::ops::gpu::backend::{Flags, GpuBackend, Work};
use crate::ops::gpu::cost::Cost;
use crate::ops::gpu::kernel::Kernel;
use crate::ops::gpu::step_inputs::GpuInputs;

/// Rows of a tile: the query heads of a key head, of neighbouring tokens. A group with more rows takes several thread
/// blocks.
pub(in crate::ops::gpu) const TILE_ROWS: usize = 128;

/// Threads of a thread block.
pub(in crate::ops::gpu) const NUM_THREADS: usize = 128;

/// Keys of the largest variant's tile. Contexts are split only at multiples of it.
pub(in crate::ops::gpu) const MAX_KEYS: usize = 64;

/// Whether the kernel supports keys and values of this type.
pub(in crate::ops::gpu) fn is_for(tuning: Tuning, dtype: KvCacheDType) -> bool {
    tuning.has_tensor_cores() && dtype != KvCacheDType::F32
}

/// A variant of the kernel, as instantiated there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(in crate::ops::gpu) struct Variant {
    /// Its name.
    pub(in crate::ops::gpu) max_dim: usize,
    /// Rows of a thread block.
    rows: usize,
    /// Keys of a tile.
    keys: usize,
    /// Whether queries are kept in shared memory instead of registers.
    stages_queries: bool,
}

impl Variant {
    fn of(head_dim: usize, value_dim: usize) -> Self {
        if head_dim.max(value_dim) <= 64 {
            Self { max_dim: 64, rows: TILE_ROWS, keys: MAX_KEYS, stages_queries: false }
        } else if head_dim <= 192 && value_dim <= 128 {
            Self { max_dim: 128, rows: TILE_ROWS, keys: MAX_KEYS, stages_queries: true }
        } else {
            Self { max_dim: 256, rows: TILE_ROWS / 2, keys: MAX_KEYS / 2, stages_queries: true }
        }
    }

    /// Bytes for keys and values, the cache rows of the current and the next tile, the tile's rows, and queries.
    fn threadgroup_memory(self, head_dim: usize, value_dim: usize) -> usize {
        let stride = |dim: usize| ((dim / 8) | 1) * 8;
        let queries = if self.stages_queries { self.rows * head_dim.next_multiple_of(16) } else { 0 };
        2 * (self.keys * (stride(head_dim) + stride(value_dim)) + queries) + 8 * self.keys + 16 * self.rows
    }
}

/// Attention of some tiles of a step's tokens, as [`super::grouped::flash_attention`].
pub(in crate::ops::gpu) fn prefill_attention(
    gpu: &GpuBackend,
    inputs: &GpuInputs,
    tiles: Range<usize>,
    args: FlashAttentionArgs,
    operands: FlashOperands<'_>,
) -> Result<()> {
    let FlashOperands { dtype, value_dim, q, k, v, out, between_spans, sinks, has_soft_cap, next } = operands;
    // The kernel uses one unsigned comparison for the window and for causality.
    let args = FlashAttentionArgs { window: args.window.min(1 << 31), ..args };
    let FlashAttentionArgs { pages, window, span, .. } = args;
    let (head_dim, num_kv_heads) = (pages.head_dim as usize, pages.num_kv_heads as usize);
    let variant = Variant::of(head_dim, value_dim);
    // Buffers that the kernel variant does not read are bound to another one.
    let [rotated, totals] = between_spans.unwrap_or([q; 2]);
    let cost = |positions: Range<usize>| {
        let begin = (positions.start + 1).saturating_sub(window as usize).max(span.begin as usize);
        let num_values =
            num_kv_heads * (head_dim + value_dim) * (positions.end.min(span.end as usize) - begin);
        Cost { operations: 2 * (TILE_ROWS * num_values) as u64, bytes: dtype.row_bytes(num_values) as u64 }
    };
    let costs = inputs.tile_positions(tiles.clone()).map(cost);
    for (chunk, cost) in gpu.dispatch_budget().chunks(costs) {
        let prefill_tiles = inputs.prefill_tiles(tiles.start + chunk.start);
        gpu.launch(
            Kernel::PrefillAttention { dtype, variant, head_dim, value_dim, next },
            Flags::of([between_spans.is_some(), sinks.is_some(), has_soft_cap]),
            Work {
                args: bytes_of(&args),
                buffers: &[
                    q,
                    k,
                    v,
                    inputs.block_tables(),
                    prefill_tiles,
                    out,
                    rotated,
                    totals,
                    sinks.unwrap_or(q),
                ],
                threadgroup_memory: variant.threadgroup_memory(head_dim, value_dim),
                grid: [num_kv_heads, chunk.len(), TILE_ROWS / variant.rows],
                num_threads: NUM_THREADS,
                cost,
            },
        )?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_heads_fit_and_common_ones_twice() {
        for head_dim in (8..=256).step_by(8) {
            for value_dim in (8..=256).step_by(8) {
                let variant = Variant::of(head_dim, value_dim);
                let bytes = variant.threadgroup_memory(head_dim, value_dim);
                assert!(bytes <= 96 << 10 && bytes.is_multiple_of(16), "{head_dim} {value_dim}: {bytes}");
                assert!(value_dim <= variant.max_dim, "{head_dim} {value_dim}");
                assert!(TILE_ROWS.is_multiple_of(variant.rows) && MAX_KEYS.is_multiple_of(variant.keys));
            }
        }
        let bytes =
            |head_dim, value_dim| Variant::of(head_dim, value_dim).threadgroup_memory(head_dim, value_dim);
        assert_eq!(bytes(64, 64), 2 * 64 * 2 * 72 + 512 + 2048);
        assert_eq!(bytes(128, 128), 2 * (64 * 2 * 136 + 128 * 128) + 512 + 2048);
        assert_eq!(bytes(80, 80), 2 * (64 * 2 * 88 + 128 * 80) + 512 + 2048);
        assert_eq!(bytes(192, 128), 2 * (64 * (200 + 136) + 128 * 192) + 512 + 2048);
        assert_eq!(bytes(256, 256), 2 * (32 * 2 * 264 + 64 * 256) + 256 + 1024);
    }
}
