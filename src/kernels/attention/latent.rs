//! Weighted values that are the first ones of the keys, as in latent attention.
//!
//! K has sixteen positions in each vector, so a value of the result is a sum over lanes, which are reduced once for
//! each split. Lane `p % 16` has the positions `p` for every block size, so the order of additions is a function of the
//! positions alone. At the ends of the context, or if the block size is not a multiple of sixteen, the cache has no
//! such group; it is copied then, with zeros for other positions, whose contents in the cache are arbitrary.

use std::ops::Range;

use super::SPLIT;
use super::kernel::{KvSplit, SCORE_STRIDE, Source};
use crate::paged_cache::{KvElement, LANES};
use crate::q8_0::{self, Q8_0, WORD};
use crate::simd::F32x16;

/// Groups of sixteen positions of a KV split.
const MAX_GROUPS: usize = SPLIT / LANES;

/// The locations of a KV split's positions.
pub(super) struct LatentScratch {
    value_dim: usize,
    groups: Vec<Group>,
    /// Copied groups, `[group][value_dim][16]` in the cache's type, or in singles if that is no type of a value.
    copies: Vec<[u32; LANES]>,
}

/// Sixteen positions that begin at a multiple of sixteen.
#[derive(Debug, Clone, Copy)]
struct Group {
    /// Offset of the first position from the start of the split.
    offset: usize,
    /// Offset in the pool; none if it is the next of the copies.
    start: Option<usize>,
}

impl LatentScratch {
    pub(super) fn new(value_dim: usize) -> Self {
        Self {
            value_dim,
            groups: Vec::with_capacity(MAX_GROUPS),
            copies: vec![[0; LANES]; MAX_GROUPS * value_dim],
        }
    }

    /// Finds or makes the sixteens of `positions`, which are positions of the split.
    #[inline(always)]
    pub(super) fn list<E: KvElement>(
        &mut self,
        source: &Source<'_, E>,
        split: &KvSplit<'_>,
        positions: Range<usize>,
    ) {
        let (layout, value_dim) = (source.layout, self.value_dim);
        let address = |position: usize| {
            let (index, slot) = (position / layout.block_size, position % layout.block_size);
            let block = split.block_table[index] as usize;
            (layout.k_group(block, split.kv_head, slot / LANES * LANES), slot % LANES)
        };
        self.groups.clear();
        let mut num_copies = 0;
        for first in (positions.start / LANES * LANES..positions.end).step_by(LANES) {
            let offset = first - split.start;
            let is_whole = positions.start <= first && first + LANES <= positions.end;
            if is_whole && layout.block_size.is_multiple_of(LANES) {
                self.groups.push(Group { offset, start: Some(address(first).0) });
                continue;
            }
            self.groups.push(Group { offset, start: None });
            let copy = &mut self.copies[num_copies * value_dim..][..value_dim];
            num_copies += 1;
            copy.fill([0; LANES]);
            let copy = copy.as_mut_ptr().cast::<E>();
            for position in first.max(positions.start)..(first + LANES).min(positions.end) {
                let (start, lane) = address(position);
                for d in 0..value_dim {
                    // SAFETY: the position has a slot of the pool, and the copy has sixteen values of at most four
                    // bytes for each `d`.
                    unsafe {
                        let value = source.k_pool.add(start + d * LANES + lane).read();
                        copy.add(d * LANES + position % LANES).write(value);
                    }
                }
            }
        }
    }

    /// Makes the sixteens of `positions` of a cache of whole numbers.
    #[inline(always)]
    pub(super) fn decode<V: F32x16>(
        &mut self,
        source: &Source<'_, Q8_0>,
        split: &KvSplit<'_>,
        positions: Range<usize>,
    ) {
        let (layout, value_dim) = (source.layout, self.value_dim);
        self.groups.clear();
        let mut values = [0.0; LANES];
        for (index, first) in (positions.start / LANES * LANES..positions.end).step_by(LANES).enumerate() {
            self.groups.push(Group { offset: first - split.start, start: None });
            let copy = &mut self.copies[index * value_dim..][..value_dim];
            copy.fill([0; LANES]);
            let mut position = first.max(positions.start);
            let end = (first + LANES).min(positions.end);
            while position < end {
                let (block, slot) = (position / layout.block_size, position % layout.block_size);
                let len = (end - position).min(layout.block_size - slot).min(LANES - slot % LANES);
                let block = split.block_table[block] as usize;
                let sixteen = q8_0::key_sixteen(&layout, block, split.kv_head, slot);
                let sixteen = source.k_pool.cast::<u8>().wrapping_add(sixteen);
                for (first, copy) in (0..).step_by(WORD).zip(copy.chunks_mut(WORD)) {
                    // SAFETY: the block is in the pool.
                    let word = unsafe { q8_0::load_word::<V>(sixteen, &layout, first) };
                    for (copy, word) in copy.iter_mut().zip(word) {
                        // SAFETY: the array has sixteen values.
                        unsafe { word.store(values.as_mut_ptr()) };
                        let own = values[slot % LANES..][..len].iter().map(|value| value.to_bits());
                        copy[position % LANES..][..len]
                            .iter_mut()
                            .zip(own)
                            .for_each(|(copy, own)| *copy = own);
                    }
                }
                position += len;
            }
        }
    }

    /// `values[row][d] = Σ weight[row][position] · key[position][d]` over the listed positions.
    #[inline(always)]
    pub(super) fn add_values<V: F32x16, E: KvElement>(
        &self,
        k_pool: *const E,
        num_rows: usize,
        scores: &[f32],
        values: &mut [f32],
    ) {
        let mut row = 0;
        while row < num_rows {
            row += match num_rows - row {
                4.. => self.add_rows::<V, E, 4>(k_pool, row, scores, values),
                2.. => self.add_rows::<V, E, 2>(k_pool, row, scores, values),
                _ => self.add_rows::<V, E, 1>(k_pool, row, scores, values),
            };
        }
    }

    /// The same of `ROWS` rows, four values at a time. Returns `ROWS`.
    #[inline(always)]
    fn add_rows<V: F32x16, E: KvElement, const ROWS: usize>(
        &self,
        k_pool: *const E,
        first_row: usize,
        scores: &[f32],
        values: &mut [f32],
    ) -> usize {
        const VALUES: usize = 4;
        let width = self.value_dim.next_multiple_of(LANES);
        for first in (0..self.value_dim).step_by(VALUES) {
            let num_values = VALUES.min(self.value_dim - first);
            let mut sums = [[V::splat(0.0); VALUES]; ROWS];
            let mut next_copy = self.copies.as_ptr().cast::<E>();
            for group in &self.groups {
                let start = match group.start {
                    Some(start) => k_pool.wrapping_add(start),
                    None => {
                        let copy = next_copy;
                        next_copy = next_copy.wrapping_byte_add(self.value_dim * size_of::<[u32; LANES]>());
                        copy
                    }
                };
                let mut keys = [V::splat(0.0); VALUES];
                for (value, key) in keys.iter_mut().enumerate().take(num_values) {
                    // SAFETY: a group has sixteen values for each of `value_dim`, in the pool or in the copies.
                    *key = unsafe { E::load(start.add((first + value) * LANES)) };
                }
                for (row, sums) in sums.iter_mut().enumerate() {
                    let weights = &scores[(first_row + row) * SCORE_STRIDE + LANES + group.offset..][..LANES];
                    // SAFETY: the slice has sixteen values.
                    let weights = unsafe { V::load(weights.as_ptr()) };
                    for (sum, key) in sums.iter_mut().zip(&keys) {
                        *sum = weights.mul_add(*key, *sum);
                    }
                }
            }
            for (row, sums) in sums.iter().enumerate() {
                let values = &mut values[(first_row + row) * width + first..][..num_values];
                for (value, sum) in values.iter_mut().zip(sums) {
                    *value = sum.sum();
                }
            }
        }
        ROWS
    }
}
