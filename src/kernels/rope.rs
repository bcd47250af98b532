//! Rotary embedding of queries and keys, and the way of keys and values into the cache.

use std::ptr;

use half::{bf16, f16};

use crate::fp8::E4m3;
use crate::paged_cache::{CachePoolsMut, GROUP, KvCacheDType, KvFormat, KvLayout, LANES, Slot};
use crate::pool::ThreadPool;
use crate::q8_0::Q8_0;
use crate::rows::RowsMut;
use crate::simd::CpuLevel;
use crate::simd::{F32x16, Kernel};

/// Which values of a head rotary embedding rotates with each other. `d` is the number of rotated values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopeStyle {
    /// Pairs `(x[2i], x[2i + 1])`.
    Interleaved,
    /// Pairs `(x[i], x[i + d/2])`.
    HalfSplit,
}

/// Cosines and sines of the positions from 0 on.
#[derive(Debug, Clone, Copy)]
pub struct RopeRows<'a> {
    /// Which values make a pair.
    pub style: RopeStyle,
    /// Pairs of a head that are rotated.
    pub num_pairs: usize,
    /// `[positions][2 · num_pairs + 1]`: cosines, then sines, then the factor of queries.
    pub values: &'a [f32],
}

impl<'a> RopeRows<'a> {
    /// Cosines and sines of a position.
    ///
    /// # Panics
    /// If there is no row for it.
    #[must_use]
    #[inline(always)]
    pub fn row(self, position: usize) -> (&'a [f32], &'a [f32]) {
        let len = 2 * self.num_pairs;
        self.values[position * (len + 1)..][..len].split_at(self.num_pairs)
    }

    /// The factor of a position's queries.
    ///
    /// # Panics
    /// If there is no row for it.
    #[must_use]
    #[inline(always)]
    pub fn query_factor(self, position: usize) -> f32 {
        let len = 2 * self.num_pairs;
        self.values[position * (len + 1) + len]
    }
}

/// `y = w · x / √(mean(x²) + eps)`.
#[derive(Debug, Clone, Copy)]
pub struct Norm<'a> {
    /// A factor for each value.
    pub weight: &'a [f32],
    /// Added to the mean square.
    pub eps: f32,
}

/// The norms over the values of each query head and of each key head.
#[derive(Debug, Clone, Copy)]
pub struct HeadNorms<'a> {
    /// `[head_dim]`.
    pub q: Norm<'a>,
    /// `[head_dim]`.
    pub k: Norm<'a>,
}

/// The operands, checked by the op.
#[derive(Debug, Clone, Copy)]
pub struct RopeKvWrite<'a> {
    /// Query heads.
    pub num_heads: usize,
    /// Key heads, and the same number of value heads.
    pub num_kv_heads: usize,
    /// Values of a head.
    pub head_dim: usize,
    /// Of each token.
    pub positions: &'a [u32],
    /// Of each token, the slot of the cache.
    pub slot_mapping: &'a [usize],
    /// Over the values of each query head and of each key head.
    pub norms: Option<HeadNorms<'a>>,
    /// Has a row for each of the positions.
    pub table: RopeRows<'a>,
}

/// Rotates the queries in `qkv` in place and writes the rotated keys and the values to the cache.
///
/// Each task takes one key head with its query heads for all tokens, so that even two tokens with one
/// slot (which would be a mistake elsewhere) do not write to the same memory at the same time.
///
/// # Safety
/// The pools have all slots, and the heads of `operands`.
pub unsafe fn rope_kv_write(
    operands: RopeKvWrite<'_>,
    qkv: &RowsMut<'_>,
    cache: CachePoolsMut<'_>,
    pool: &ThreadPool,
    level: CpuLevel,
) {
    match cache.layout.dtype {
        KvCacheDType::F16 => typed::<f16>(operands, qkv, cache, pool, level),
        KvCacheDType::Bf16 => typed::<bf16>(operands, qkv, cache, pool, level),
        KvCacheDType::F32 => typed::<f32>(operands, qkv, cache, pool, level),
        KvCacheDType::Fp8E4m3 => typed::<E4m3>(operands, qkv, cache, pool, level),
        KvCacheDType::Q8_0 => typed::<Q8_0>(operands, qkv, cache, pool, level),
    }
}

fn typed<F: KvFormat>(
    operands: RopeKvWrite<'_>,
    qkv: &RowsMut<'_>,
    cache: CachePoolsMut<'_>,
    pool: &ThreadPool,
    level: CpuLevel,
) {
    /// Tokens up to which waking the other threads takes longer than the work.
    const SERIAL_TOKENS: usize = 4;
    let layout = cache.layout;
    let v = cache.v.map_or(ptr::null_mut(), |v| v.as_mut_ptr());
    let pools = Pools::<F> { k: cache.k.as_mut_ptr().cast(), v: v.cast() };
    let task = |kv_head| level.run(HeadTask { operands, qkv, layout, pools: &pools, kv_head });
    if operands.positions.len() <= SERIAL_TOKENS {
        (0..operands.num_kv_heads).for_each(task);
    } else {
        pool.run(operands.num_kv_heads, task);
    }
}

struct Pools<F> {
    k: *mut F,
    v: *mut F,
}

// SAFETY: each task writes the ranges of its key head only.
unsafe impl<F: KvFormat> Sync for Pools<F> {}

/// One key head and its query heads, for all tokens.
struct HeadTask<'a, F> {
    operands: RopeKvWrite<'a>,
    qkv: &'a RowsMut<'a>,
    layout: KvLayout,
    pools: &'a Pools<F>,
    kv_head: usize,
}

impl<F: KvFormat> Kernel for HeadTask<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<V: F32x16>(self) {
        let RopeKvWrite { num_heads, num_kv_heads, head_dim, positions, slot_mapping, norms, table } =
            self.operands;
        let group = num_heads / num_kv_heads;
        for (token, (&position, &slot)) in positions.iter().zip(slot_mapping).enumerate() {
            let (cos, sin) = table.row(position as usize);
            let factor = table.query_factor(position as usize);
            let part = |column: usize, heads: usize| {
                // SAFETY: the heads belong to this task alone, and each range is used before the next.
                unsafe { self.qkv.range(token, column * head_dim, heads * head_dim) }
            };
            for query in part(self.kv_head * group, group).chunks_exact_mut(head_dim) {
                if let Some(norms) = norms {
                    rms_norm::<V>(query, norms.q);
                }
                rotate(query, cos, sin, table.style);
                if factor != 1.0 {
                    query.iter_mut().for_each(|value| *value *= factor);
                }
            }
            let key = part(num_heads + self.kv_head, 1);
            if let Some(norms) = norms {
                rms_norm::<V>(key, norms.k);
            }
            rotate(key, cos, sin, table.style);
            let value = part(num_heads + num_kv_heads + self.kv_head, 1);
            // SAFETY: the op has checked that the slot exists; this key head belongs to this task alone.
            unsafe { self.store::<V>(slot, key, value) };
        }
    }
}

impl<F: KvFormat> HeadTask<'_, F> {
    /// # Safety
    /// The slot has to exist, and no other code may use this key head of it.
    #[inline(always)]
    unsafe fn store<V: F32x16>(&self, slot: usize, key: &[f32], value: &[f32]) {
        let at = Slot::of(&self.layout, slot, self.kv_head);
        let parts = key.chunks(GROUP).zip(value.chunks(GROUP));
        for (first, (key, value)) in (0..).step_by(GROUP).zip(parts) {
            // SAFETY: the caller's guarantees.
            unsafe {
                F::store_key::<V>(self.pools.k, &self.layout, at, first, key);
                F::store_value::<V>(self.pools.v, &self.layout, at, first, value);
            }
        }
    }
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
fn rms_norm<V: F32x16>(head: &mut [f32], norm: Norm<'_>) {
    let factor = norm_factor::<V>(head, norm.eps);
    for (value, weight) in head.iter_mut().zip(norm.weight) {
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
