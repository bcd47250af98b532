//! Rotary embedding of queries and keys, and the way of keys and values into the cache.

use half::{bf16, f16};

use crate::Result;
use crate::config::RopeStyle;
use crate::ops::cpu::rows::RowsMut;
use crate::ops::cpu::simd::{F32x16, Kernel};
use crate::ops::cpu::{CpuLevel, ThreadPool};
use crate::ops::kv_cache::{KvCache, KvCacheDType, KvElement, KvLayout, LANES};
use crate::ops::rope_kv_write::{HeadNorms, RopeTable};

/// The operands, checked by the op.
#[derive(Clone, Copy)]
pub(crate) struct RopeKvWrite<'a> {
    pub(crate) num_heads: usize,
    pub(crate) num_kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) positions: &'a [u32],
    pub(crate) slot_mapping: &'a [usize],
    pub(crate) norms: Option<HeadNorms<'a>>,
    pub(crate) table: &'a RopeTable,
}

/// Rotates the queries in `qkv` in place and writes the rotated keys and the values to the cache.
///
/// Each task takes one key head with its query heads for all tokens, so that even two tokens with one
/// slot (which would be a mistake elsewhere) do not write to the same memory at the same time.
pub(crate) fn rope_kv_write(
    operands: RopeKvWrite<'_>,
    qkv: &RowsMut<'_>,
    cache: &mut KvCache,
    layer: usize,
    pool: &ThreadPool,
    level: CpuLevel,
) -> Result<()> {
    match cache.dtype() {
        KvCacheDType::F16 => typed::<f16>(operands, qkv, cache, layer, pool, level),
        KvCacheDType::Bf16 => typed::<bf16>(operands, qkv, cache, layer, pool, level),
        KvCacheDType::F32 => typed::<f32>(operands, qkv, cache, layer, pool, level),
    }
}

fn typed<E: KvElement>(
    operands: RopeKvWrite<'_>,
    qkv: &RowsMut<'_>,
    cache: &mut KvCache,
    layer: usize,
    pool: &ThreadPool,
    level: CpuLevel,
) -> Result<()> {
    /// Tokens up to which waking the other threads takes longer than the work.
    const SERIAL_TOKENS: usize = 4;
    let layout = cache.layout();
    let (k_pool, v_pool) = cache.pools_mut(layer)?;
    let pools = Pools::<E> { k: k_pool.cast(), v: v_pool.cast() };
    let task = |kv_head| level.run(HeadTask { operands, qkv, layout, pools: &pools, kv_head });
    if operands.positions.len() <= SERIAL_TOKENS {
        (0..operands.num_kv_heads).for_each(task);
    } else {
        pool.run(operands.num_kv_heads, task);
    }
    Ok(())
}

struct Pools<E> {
    k: *mut E,
    v: *mut E,
}

// SAFETY: each task writes the parts of its key head only.
unsafe impl<E: KvElement> Sync for Pools<E> {}

/// One key head and its query heads, for all tokens.
struct HeadTask<'a, E> {
    operands: RopeKvWrite<'a>,
    qkv: &'a RowsMut<'a>,
    layout: KvLayout,
    pools: &'a Pools<E>,
    kv_head: usize,
}

impl<E: KvElement> Kernel for HeadTask<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<V: F32x16>(self) {
        let RopeKvWrite { num_heads, num_kv_heads, head_dim, positions, slot_mapping, norms, table } =
            self.operands;
        let group = num_heads / num_kv_heads;
        for (token, (&position, &slot)) in positions.iter().zip(slot_mapping).enumerate() {
            let (cos, sin) = table.row(position as usize);
            let part = |column: usize, heads: usize| {
                // SAFETY: the heads belong to this task alone, and each part is used before the next.
                unsafe { self.qkv.part(token, column * head_dim, heads * head_dim) }
            };
            for query in part(self.kv_head * group, group).chunks_exact_mut(head_dim) {
                if let Some(norms) = norms {
                    rms_norm::<V>(query, &norms.q.weight, norms.q.eps);
                }
                rotate(query, cos, sin, table.style());
            }
            let key = part(num_heads + self.kv_head, 1);
            if let Some(norms) = norms {
                rms_norm::<V>(key, &norms.k.weight, norms.k.eps);
            }
            rotate(key, cos, sin, table.style());
            let value = part(num_heads + num_kv_heads + self.kv_head, 1);
            // SAFETY: the op has checked that the slot exists; this key head belongs to this task alone.
            unsafe { self.store::<V>(slot, key, value) };
        }
    }
}

impl<E: KvElement> HeadTask<'_, E> {
    /// # Safety
    /// The slot has to exist, and nobody else may use this key head of it.
    #[inline(always)]
    unsafe fn store<V: F32x16>(&self, slot: usize, key: &[f32], value: &[f32]) {
        let (block, slot) = (slot / self.layout.block_size, slot % self.layout.block_size);
        let group = self.layout.k_group(block, self.kv_head, slot / LANES * LANES);
        let row = self.layout.v_row(block, self.kv_head, slot);
        let head_dim = self.layout.head_dim;
        for d in (0..head_dim).step_by(LANES) {
            let len = LANES.min(head_dim - d);
            // SAFETY: the group and the row lie in the pools, and rows of V are padded to whole vectors.
            unsafe {
                let keys = round::<V, E>(&key[d..d + len]);
                for (lane, key) in keys[..len].iter().enumerate() {
                    self.pools.k.add(group + (d + lane) * LANES + slot % LANES).write(*key);
                }
                let values = round::<V, E>(&value[d..d + len]);
                self.pools.v.add(row + d).cast::<[E; LANES]>().write_unaligned(values);
            }
        }
    }
}

/// Rounds up to sixteen values; what is missing is zero.
///
/// # Safety
/// See [`F32x16`].
#[inline(always)]
pub(super) unsafe fn round<V: F32x16, E: KvElement>(values: &[f32]) -> [E; LANES] {
    let mut padded = [0.0; LANES];
    padded[..values.len()].copy_from_slice(values);
    // SAFETY: the array has sixteen values.
    unsafe { E::round(V::load(padded.as_ptr())) }
}

/// Rotates the first values of a head; `cos` and `sin` have one value for each pair.
#[inline(always)]
pub(super) fn rotate(head: &mut [f32], cos: &[f32], sin: &[f32], style: RopeStyle) {
    match style {
        RopeStyle::HalfSplit => {
            let (first, rest) = head.split_at_mut(cos.len());
            for (((a, b), cos), sin) in first.iter_mut().zip(rest).zip(cos).zip(sin) {
                (*a, *b) = (*a * cos - *b * sin, *a * sin + *b * cos);
            }
        }
        RopeStyle::Interleaved => {
            let (pairs, _) = head.as_chunks_mut::<2>();
            for ((pair, cos), sin) in pairs.iter_mut().zip(cos).zip(sin) {
                let [a, b] = *pair;
                *pair = [a * cos - b * sin, a * sin + b * cos];
            }
        }
    }
}

/// Normalises a head in place.
#[inline(always)]
fn rms_norm<V: F32x16>(head: &mut [f32], weight: &[f32], eps: f32) {
    let factor = norm_factor::<V>(head, eps);
    for (value, weight) in head.iter_mut().zip(weight) {
        *value = *value * factor * weight;
    }
}

/// One divided by the root of the mean square.
#[inline(always)]
pub(super) fn norm_factor<V: F32x16>(head: &[f32], eps: f32) -> f32 {
    let (vectors, tail) = head.as_chunks::<LANES>();
    let mut squares = V::splat(0.0);
    for vector in vectors {
        // SAFETY: a chunk has sixteen values.
        let vector = unsafe { V::load(vector.as_ptr()) };
        squares = vector.mul_add(vector, squares);
    }
    let sum = tail.iter().fold(squares.sum(), |sum, value| sum + value * value);
    1.0 / (sum / head.len() as f32 + eps).sqrt()
}
