//! Keys and values of the cache as whole numbers, with a scale for each group of values of a token's head.
//!
//! A group is [`GROUP`] values, or the last ones of a head. Its scale is the smallest number in half precision such
//! that 127 times it reaches the largest magnitude, so that no code is beyond ±127; a code is the nearest integer, ties
//! to even. A group with NaN, or with values beyond every scale, has the scale NaN.
//!
//! A block has its slots in sixteens, the last of which may be filled up. For each head and sixteen there are:
//! * of K the codes, `[word][16 slots][4]`, where a word is four neighbouring values of the head (zeros where it has no more);
//! * of V the codes, `[word][values][4]`, where a word is four neighbouring slots, and values are padded to a multiple of 16;
//! * after either the scales, `[group][16 slots]` in half precision.
//!
//! So a vector of codes has the four neighbours that a byte dot product adds up in each of its lanes.

use half::f16;

use crate::paged_cache::{GROUP, KvFormat, KvLayout, LANES, Slot};
use crate::simd::F32x16;

/// Neighbours in a lane of codes.
pub(crate) const WORD: usize = 4;
/// Bytes of a vector of codes.
pub(crate) const VECTOR: usize = LANES * WORD;
/// Bytes of the scales of a group in a sixteen.
pub(crate) const SCALES: usize = LANES * size_of::<f16>();

/// A byte of a pool.
#[derive(Debug, Clone, Copy)]
#[repr(transparent)]
pub struct Q8_0(u8);

/// Bytes of the codes of a sixteen of K.
pub(crate) fn key_code_bytes(layout: &KvLayout) -> usize {
    layout.head_dim.div_ceil(WORD) * VECTOR
}

/// Bytes of a sixteen of K.
pub(crate) fn key_bytes(layout: &KvLayout) -> usize {
    key_code_bytes(layout) + layout.head_dim.div_ceil(GROUP) * SCALES
}

/// Bytes of the codes of a sixteen of V.
pub(crate) fn value_code_bytes(layout: &KvLayout) -> usize {
    LANES * layout.v_stride()
}

/// Bytes of a sixteen of V.
pub(crate) fn value_bytes(layout: &KvLayout) -> usize {
    value_code_bytes(layout) + layout.head_dim.div_ceil(GROUP) * SCALES
}

/// The sixteen of K with a slot.
#[inline(always)]
pub(crate) fn key_sixteen(layout: &KvLayout, block: usize, kv_head: usize, slot: usize) -> usize {
    ((block * layout.num_kv_heads + kv_head) * layout.num_sixteens() + slot / LANES) * key_bytes(layout)
}

/// The sixteen of V with a slot.
#[inline(always)]
pub(crate) fn value_sixteen(layout: &KvLayout, block: usize, kv_head: usize, slot: usize) -> usize {
    ((block * layout.num_kv_heads + kv_head) * layout.num_sixteens() + slot / LANES) * value_bytes(layout)
}

/// The codes of up to [`GROUP`] values, and their scale; codes that are missing are zero.
#[inline(always)]
fn quantize<V: F32x16>(values: &[f32]) -> ([i8; GROUP], f16) {
    let mut padded = [0.0; GROUP];
    padded[..values.len()].copy_from_slice(values);
    let mut codes = [0; GROUP];
    // SAFETY: the arrays have two vectors each.
    unsafe {
        let halves = [0, LANES].map(|at| V::load(padded.as_ptr().add(at)));
        let scale = scale_of(halves[0].largest_magnitude(halves[1]));
        // Codes of NaN do not matter.
        if scale.is_finite() && scale != f16::ZERO {
            let scale = V::splat(scale.to_f32());
            for (at, half) in [0, LANES].into_iter().zip(halves) {
                half.div(scale).round().store_i8(codes.as_mut_ptr().add(at));
            }
        }
        (codes, scale)
    }
}

/// The scale of a group by its largest magnitude.
#[inline(always)]
fn scale_of(largest: f32) -> f16 {
    let nearest = f16::from_f32(largest / 127.0);
    let is_below = nearest.to_f32() * 127.0 < largest;
    let scale = if is_below { f16::from_bits(nearest.to_bits() + 1) } else { nearest };
    if scale.is_finite() { scale } else { f16::NAN }
}

impl KvFormat for Q8_0 {
    #[inline(always)]
    unsafe fn store_key<V: F32x16>(pool: *mut Self, layout: &KvLayout, at: Slot, first: usize, key: &[f32]) {
        let (codes, scale) = quantize::<V>(key);
        let lane = at.slot % LANES;
        // SAFETY: the group of sixteen is in the pool, and has a lane for the slot in each word and in the scales.
        unsafe {
            let sixteen = pool.cast::<u8>().add(key_sixteen(layout, at.block, at.kv_head, at.slot));
            let num_words = key.len().div_ceil(WORD);
            for (word, codes) in codes.as_chunks::<WORD>().0[..num_words].iter().enumerate() {
                sixteen.add((first / WORD + word) * VECTOR + lane * WORD).cast::<[i8; WORD]>().write(*codes);
            }
            let scales = sixteen.add(key_code_bytes(layout) + first / GROUP * SCALES);
            scales.cast::<f16>().add(lane).write_unaligned(scale);
        }
    }

    #[inline(always)]
    unsafe fn store_value<V: F32x16>(
        pool: *mut Self,
        layout: &KvLayout,
        at: Slot,
        first: usize,
        value: &[f32],
    ) {
        let (codes, scale) = quantize::<V>(value);
        let lane = at.slot % LANES;
        // SAFETY: the group of sixteen is in the pool, and has a byte for the slot and each value, and a lane in the
        // scales.
        unsafe {
            let sixteen = pool.cast::<u8>().add(value_sixteen(layout, at.block, at.kv_head, at.slot));
            let word = sixteen.add((lane / WORD * layout.v_stride() + first) * WORD + lane % WORD);
            for (index, code) in codes[..value.len()].iter().enumerate() {
                word.add(index * WORD).cast::<i8>().write(*code);
            }
            let scales = sixteen.add(value_code_bytes(layout) + first / GROUP * SCALES);
            scales.cast::<f16>().add(lane).write_unaligned(scale);
        }
    }
}

/// Values `first..first + 4` of a sixteen of K: four vectors of sixteen slots.
///
/// # Safety
/// `sixteen` is one of K in such a layout, and `first` a multiple of four below `head_dim`.
#[inline(always)]
pub(crate) unsafe fn load_word<V: F32x16>(sixteen: *const u8, layout: &KvLayout, first: usize) -> [V; WORD] {
    // SAFETY: the caller's guarantees; there is a vector of codes for each word and one of scales for each group.
    unsafe {
        let codes = V::load_codes(sixteen.add(first / WORD * VECTOR));
        let scales = V::load_f16(sixteen.add(key_code_bytes(layout) + first / GROUP * SCALES).cast());
        // As u8 they are 128 more.
        let codes = V::sub_bytes(codes, 128);
        [0, 8, 16, 24].map(|shift| {
            let code = V::lowest_byte(V::shift_right(codes, shift)).sub(V::splat(128.0));
            code.mul(scales)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_head_of_every_slot_has_memory_of_its_own() {
        for (block_size, head_dim) in [(1, 24), (7, 30), (16, 64), (24, 80), (32, 16)] {
            let dtype = crate::paged_cache::KvCacheDType::Q8_0;
            let layout = KvLayout { dtype, block_size, num_kv_heads: 3, head_dim, has_values: true };
            let mut pools = [layout.k_block_bytes(), layout.v_block_bytes()].map(|len| vec![0_u8; 2 * len]);
            let at = |index: usize| Slot {
                block: index / 3 / block_size,
                kv_head: index % 3,
                slot: index / 3 % block_size,
            };
            let row = |index: usize, pool: usize| -> Vec<f32> {
                // The largest of each group makes the scale a power of two.
                let value = |d: usize| {
                    if d.is_multiple_of(GROUP) { 127 } else { (index * 7 + d * 5 + pool) as i32 % 255 - 127 }
                };
                (0..head_dim)
                    .map(|d| value(d) as f32 * [0.5, 2.0][pool] * (1 << (index % 4)) as f32)
                    .collect()
            };
            for index in 0..2 * 3 * block_size {
                for (first, key) in (0..).step_by(GROUP).zip(row(index, 0).chunks(GROUP)) {
                    // SAFETY: the slot is in the pool.
                    crate::simd::CpuLevel::detect().run(Store {
                        pools: &mut pools,
                        layout,
                        at: at(index),
                        first,
                        values: key,
                        pool: 0,
                    });
                }
                for (first, value) in (0..).step_by(GROUP).zip(row(index, 1).chunks(GROUP)) {
                    crate::simd::CpuLevel::detect().run(Store {
                        pools: &mut pools,
                        layout,
                        at: at(index),
                        first,
                        values: value,
                        pool: 1,
                    });
                }
            }
            for index in 0..2 * 3 * block_size {
                let Slot { block, kv_head, slot } = at(index);
                let lane = slot % LANES;
                let scale = |bytes: &[u8]| f16::from_le_bytes([bytes[0], bytes[1]]).to_f32();
                let k = &pools[0][key_sixteen(&layout, block, kv_head, slot)..][..key_bytes(&layout)];
                let v = &pools[1][value_sixteen(&layout, block, kv_head, slot)..][..value_bytes(&layout)];
                for (d, expected) in row(index, 0).into_iter().enumerate() {
                    let code = k[d / WORD * VECTOR + lane * WORD + d % WORD].cast_signed();
                    let scale = scale(&k[key_code_bytes(&layout) + d / GROUP * SCALES + 2 * lane..]);
                    assert_eq!(f32::from(code) * scale, expected, "key {d} of {index}");
                }
                for (d, expected) in row(index, 1).into_iter().enumerate() {
                    let code = v[(lane / WORD * layout.v_stride() + d) * WORD + lane % WORD].cast_signed();
                    let scale = scale(&v[value_code_bytes(&layout) + d / GROUP * SCALES + 2 * lane..]);
                    assert_eq!(f32::from(code) * scale, expected, "value {d} of {index}");
                }
            }
        }
    }

    struct Store<'a> {
        pools: &'a mut [Vec<u8>; 2],
        layout: KvLayout,
        at: Slot,
        first: usize,
        values: &'a [f32],
        pool: usize,
    }

    impl crate::simd::Kernel for Store<'_> {
        type Output = ();
        #[inline(always)]
        fn run<V: F32x16>(self) {
            let Self { pools, layout, at, first, values, pool } = self;
            let pointer = pools[pool].as_mut_ptr().cast::<Q8_0>();
            // SAFETY: the slot is in the pool.
            unsafe {
                match pool {
                    0 => Q8_0::store_key::<V>(pointer, &layout, at, first, values),
                    _ => Q8_0::store_value::<V>(pointer, &layout, at, first, values),
                }
            }
        }
    }

    #[test]
    fn scales_reach_the_largest_value() {
        for largest in [0.0, 1e-9, 3e-6, 0.3, 1.0, 127.0, 127.1, 1e4, 65_504.0 * 127.0] {
            let scale = scale_of(largest);
            assert!(scale.to_f32() * 127.0 >= largest, "{largest}");
            let below = f16::from_bits(scale.to_bits().saturating_sub(1)).to_f32();
            assert!(largest == 0.0 || below * 127.0 < largest, "{largest}");
        }
        for broken in [f32::NAN, f32::INFINITY, 65_504.0 * 127.1] {
            assert!(scale_of(broken).is_nan(), "{broken}");
        }
    }
}
