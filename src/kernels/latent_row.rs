//! The row of latent attention in the cache, and the rotated ends of queries.

use half::{bf16, f16};

use crate::fp8::E4m3;
use crate::paged_cache::{CachePoolsMut, GROUP, KvCacheDType, KvFormat, KvLayout, LANES, Slot};
use crate::pool::ThreadPool;
use crate::q8_0::Q8_0;
use crate::rope::{Norm, RopeRows, norm_factor, rotate};
use crate::rows::RowsMut;
use crate::simd::{CpuLevel, F32x16, Kernel};

/// The operands, checked by the op.
#[derive(Debug, Clone, Copy)]
pub struct LatentKvWrite<'a> {
    /// Query heads.
    pub num_heads: usize,
    /// Of each token.
    pub positions: &'a [u32],
    /// Of each token, the slot of the cache.
    pub slots: &'a [usize],
    /// Over the values of the latent row that are not rotated.
    pub norm: Norm<'a>,
    /// Has a row for each of the positions.
    pub table: RopeRows<'a>,
    /// Values from one row of queries to the next, and from one head to the next.
    pub query_width: usize,
    /// See `query_width`.
    pub query_stride: usize,
    /// Values from one row of `kv` to the next; a row ends with the latent row and the key that is rotated.
    pub kv_width: usize,
}

/// Writes the rows of a step's tokens to the cache, and the rotated ends of their queries to `out`.
///
/// One thread writes all rows of the cache, so that even two tokens with one slot (an error of the caller) do not race.
/// All threads rotate queries.
///
/// # Safety
/// The pools have all slots, and rows as wide as the norm and the rotated values together.
pub unsafe fn latent_kv_write(
    operands: LatentKvWrite<'_>,
    queries: &[f32],
    kv: &[f32],
    out: &RowsMut<'_>,
    cache: CachePoolsMut<'_>,
    pool: &ThreadPool,
    level: CpuLevel,
) {
    /// Tokens up to which waking the other threads takes longer than the work.
    const SERIAL_TOKENS: usize = 4;
    match cache.layout.dtype {
        KvCacheDType::F16 => write::<f16>(operands, kv, cache, level),
        KvCacheDType::Bf16 => write::<bf16>(operands, kv, cache, level),
        KvCacheDType::F32 => write::<f32>(operands, kv, cache, level),
        KvCacheDType::Fp8E4m3 => write::<E4m3>(operands, kv, cache, level),
        KvCacheDType::Q8_0 => write::<Q8_0>(operands, kv, cache, level),
    }
    let LatentKvWrite { num_heads, positions, norm, table, query_width, query_stride, .. } = operands;
    let (rank, rotated) = (norm.weight.len(), 2 * table.num_pairs);
    let task = |token: usize| {
        let (cos, sin) = table.row(positions[token] as usize);
        for head in 0..num_heads {
            let end = token * query_width + (head + 1) * query_stride;
            // SAFETY: a token's row belongs to its task alone, and each range is used before the next.
            let target = unsafe { out.range(token, head * (rank + rotated) + rank, rotated) };
            target.copy_from_slice(&queries[end - rotated..end]);
            rotate(target, cos, sin, table.style);
        }
    };
    if positions.len() <= SERIAL_TOKENS {
        (0..positions.len()).for_each(task);
    } else {
        pool.run(positions.len(), task);
    }
}

fn write<F: KvFormat>(operands: LatentKvWrite<'_>, kv: &[f32], cache: CachePoolsMut<'_>, level: CpuLevel) {
    let CachePoolsMut { layout, k, .. } = cache;
    level.run(WriteRows { operands, kv, layout, k_pool: k.as_mut_ptr().cast::<F>() });
}

/// All tokens' rows.
struct WriteRows<'a, F> {
    operands: LatentKvWrite<'a>,
    kv: &'a [f32],
    layout: KvLayout,
    k_pool: *mut F,
}

impl<F: KvFormat> Kernel for WriteRows<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<V: F32x16>(self) {
        let LatentKvWrite { positions, slots, norm, table, kv_width, .. } = self.operands;
        let (rank, head_dim) = (norm.weight.len(), self.layout.head_dim);
        let mut latent = [0.0; LANES];
        for ((&position, &slot), row) in positions.iter().zip(slots).zip(self.kv.chunks_exact(kv_width)) {
            let row = &row[kv_width - head_dim..];
            let (cos, sin) = table.row(position as usize);
            let factor = norm_factor::<V>(&row[..rank], norm.eps);
            let at = Slot::of(&self.layout, slot, 0);
            // Values come in their order, and are written in groups.
            let mut group = [0.0; GROUP];
            let mut num_values = 0;
            let mut store = |values: &[f32]| {
                for value in values {
                    group[num_values % GROUP] = *value;
                    num_values += 1;
                    if num_values.is_multiple_of(GROUP) || num_values == head_dim {
                        let first = (num_values - 1) / GROUP * GROUP;
                        let group = &group[..num_values - first];
                        // SAFETY: the op has checked that the slot exists, and no other code writes to the pool.
                        unsafe { F::store_key::<V>(self.k_pool, &self.layout, at, first, group) };
                    }
                }
            };
            for d in (0..rank).step_by(LANES) {
                let len = LANES.min(rank - d);
                for (index, latent) in latent[..len].iter_mut().enumerate() {
                    *latent = row[d + index] * factor * norm.weight[d + index];
                }
                store(&latent[..len]);
            }
            rotate_key(&row[rank..], cos, sin, table, &mut store);
        }
    }
}

/// Rotates a key and gives its values out.
#[inline(always)]
fn rotate_key(key: &[f32], cos: &[f32], sin: &[f32], table: RopeRows<'_>, store: &mut impl FnMut(&[f32])) {
    const MAX_ROTATED: usize = 1024;
    let mut rotated = [0.0; MAX_ROTATED];
    let rotated = &mut rotated[..key.len()];
    rotated.copy_from_slice(key);
    rotate(rotated, cos, sin, table.style);
    store(rotated);
}
