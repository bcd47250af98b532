//! One tile against one KV split of the context, and the merging of splits.
//!
//! A tile's rows are pairs of a token and a query head. The arithmetic of a row does not depend on the
//! other rows: a score is a sum over the head's values in their order; the scores of a KV split are taken in
//! vectors that begin at multiples of sixteen positions; the weighted values are added position by
//! position. Micro-tiles of several rows only change which row's next operation comes first. Of a tile with several
//! micro-tiles, keys and values in half precision are converted once, a few at a time that stay in the first-level cache.

use std::ops::Range;

use super::latent::LatentScratch;
use super::quantized::DigitScratch;
use super::value_tile::ValueTile;
use super::{AttentionHeads, AttentionSpec, SPLIT};
use crate::AlignedFloats;
use crate::paged_cache::{KvElement, KvLayout, LANES};
use crate::simd::{F32x16, Kernel};

/// Scores of a row: a KV split, and a vector on either side, because groups of sixteen tokens may stick out.
pub(super) const SCORE_STRIDE: usize = SPLIT + 2 * LANES;
/// Most groups of tokens, and most runs of values, that a KV split can consist of: one for each token, if
/// blocks have one token.
pub(super) const MAX_RUNS: usize = SPLIT;

/// f32 values that are converted together: 16 KB, half of a small first-level cache.
pub(super) const STAGED: usize = 4096;
/// Rows of the largest micro-tile.
pub(super) const MICRO_ROWS: usize = 8;

/// Whether this many rows have keys or values of the type `E` converted once for all of them: not if each is used once anyway,
/// nor if there is no space for at least two of these, of `len` values each.
pub(super) fn is_staged<E>(num_rows: usize, len: usize) -> bool {
    num_rows > MICRO_ROWS && size_of::<E>() < size_of::<f32>() && 2 * len <= STAGED
}

/// f32 values of a saved partial result: the largest score, the sum, and the padded values.
pub(super) fn partial_len(value_dim: usize) -> usize {
    value_dim.next_multiple_of(LANES) + 2
}

/// The inputs of all tasks.
pub(super) struct Source<'a, F> {
    pub(super) queries: *const f32,
    pub(super) query_stride: usize,
    pub(super) k_pool: *const F,
    /// Null if the values are the first ones of the keys.
    pub(super) v_pool: *const F,
    pub(super) layout: KvLayout,
    pub(super) spec: AttentionSpec<'a>,
}

// SAFETY: the pointers are only read while the caller of `paged_attention` holds the borrows.
unsafe impl<F: CachedFormat> Sync for Source<'_, F> {}

/// A tile's share of the work: its tokens against the positions `start..start + SPLIT`.
pub(super) struct KvSplit<'a> {
    /// The tokens, as indices into the step.
    pub(super) tokens: Range<usize>,
    /// Position of the first token; the others follow.
    pub(super) first_position: usize,
    pub(super) kv_head: usize,
    /// The query heads, all of this key head.
    pub(super) heads: Range<usize>,
    pub(super) block_table: &'a [u32],
    /// First position of the split.
    pub(super) start: usize,
}

impl KvSplit<'_> {
    /// Pairs of a token and a query head.
    pub(super) fn num_rows(&self) -> usize {
        self.tokens.len() * self.heads.len()
    }

    /// The positions of the split that a token attends to, of which `index` are before it in the tile.
    #[inline(always)]
    pub(super) fn visible(&self, index: usize, window: Option<usize>) -> Range<usize> {
        let end = self.first_position + index + 1;
        let oldest = window.map_or(0, |window| end.saturating_sub(window));
        let low = oldest.max(self.start).min(self.start + SPLIT);
        low..end.min(self.start + SPLIT).max(low)
    }
}

/// Memory of one task.
pub(super) struct TileScratch {
    value_dim: usize,
    /// The locations of the split's positions, first in K and then in V.
    pub(super) runs: Vec<Run>,
    /// Scaled queries, `[head_dim][rows]`.
    queries: AlignedFloats,
    /// `[rows][SCORE_STRIDE]`: scores, then weights.
    pub(super) scores: AlignedFloats,
    /// Converted keys, then converted values.
    staged: AlignedFloats,
    /// The split: `[rows][padded head_dim]`, largest scores and sums. A sum of 0 means no position.
    pub(super) values: AlignedFloats,
    maxima: Vec<f32>,
    pub(super) sums: Vec<f32>,
    /// All splits so far.
    merged_values: AlignedFloats,
    merged_maxima: Vec<f32>,
    merged_sums: Vec<f32>,
    /// If the values are the first ones of keys: the split's groups of sixteen positions, and space for those that no
    /// group of the cache holds completely.
    pub(super) latent: Option<LatentScratch>,
    /// Memory for a cache of integers.
    pub(super) digits: DigitScratch,
}

impl TileScratch {
    pub(super) fn new(rows: usize, heads: AttentionHeads) -> Self {
        let AttentionHeads { head_dim, value_dim, .. } = heads;
        let width = value_dim.next_multiple_of(LANES);
        Self {
            value_dim,
            latent: heads.is_latent().then(|| LatentScratch::new(value_dim)),
            digits: DigitScratch::new(rows, head_dim),
            runs: Vec::with_capacity(MAX_RUNS),
            queries: AlignedFloats::zeroed(rows * head_dim),
            scores: AlignedFloats::zeroed(rows * SCORE_STRIDE),
            staged: AlignedFloats::zeroed(STAGED),
            values: AlignedFloats::zeroed(rows * width),
            maxima: vec![0.0; rows],
            sums: vec![0.0; rows],
            merged_values: AlignedFloats::zeroed(rows * width),
            merged_maxima: vec![0.0; rows],
            merged_sums: vec![0.0; rows],
        }
    }

    /// Forgets merged splits.
    pub(super) fn start(&mut self, num_rows: usize) {
        self.merged_sums[..num_rows].fill(0.0);
    }

    /// Copies the split to `[row][max, sum, values…]`.
    pub(super) fn save_partial(&self, num_rows: usize, target: &mut [f32]) {
        let width = self.value_dim.next_multiple_of(LANES);
        for (row, target) in target.chunks_exact_mut(width + 2).take(num_rows).enumerate() {
            target[0] = self.maxima[row];
            target[1] = self.sums[row];
            target[2..].copy_from_slice(&self.values[row * width..][..width]);
        }
    }

    /// The result of a row: the merged values divided by the merged sum, in which a sink has its weight.
    pub(super) fn read_result(&self, row: usize, sink: Option<f32>, out: &mut [f32]) {
        let width = self.value_dim.next_multiple_of(LANES);
        let (max, sum) = (self.merged_maxima[row], self.merged_sums[row]);
        let inverse = match sink {
            None => 1.0 / sum,
            // Scaled by the larger of the two, so that no value is infinite.
            Some(sink) if sink > max => (max - sink).exp() / (sum * (max - sink).exp() + 1.0),
            Some(sink) => 1.0 / (sum + (sink - max).exp()),
        };
        for (out, value) in out.iter_mut().zip(&self.merged_values[row * width..]) {
            *out = value * inverse;
        }
    }
}

/// Computes a KV split of a tile into its scratch.
pub(super) struct Partial<'a, F> {
    pub(super) source: &'a Source<'a, F>,
    pub(super) split: &'a KvSplit<'a>,
    /// Whether the scratch has other queries than the split's so far.
    pub(super) is_first: bool,
    pub(super) scratch: &'a mut TileScratch,
    /// Use the micro-tiles for 32 registers of sixteen lanes.
    pub(super) wide: bool,
}

/// Sixteen tokens of K, or consecutive rows of V.
#[derive(Debug, Clone, Copy)]
pub(super) struct Run {
    /// Offset in the pool.
    pub(super) start: usize,
    /// Offset of the first position from the start of the split; groups of K may begin before it.
    pub(super) offset: isize,
    pub(super) len: usize,
}

impl<F: CachedFormat> Kernel for Partial<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<V: F32x16>(self) {
        let Self { source, split, is_first, scratch, wide } = self;
        let AttentionSpec { window, soft_cap, .. } = source.spec;
        let group = split.heads.len();
        let num_rows = split.num_rows();
        // The positions of the split that any row attends to.
        let (low, high) = (split.visible(0, window).start, split.visible(split.tokens.len() - 1, window).end);
        if is_first {
            F::load_queries::<V>(source, split, scratch);
        }
        F::score::<V>(source, split, low..high, scratch, wide);

        // To whole vectors: values between the positions are read, and their weights have to be zero.
        let relative = (low - split.start) / LANES * LANES..(high - split.start).next_multiple_of(LANES);
        for row in 0..num_rows {
            let own = split.visible(row / group, window);
            let scores = &mut scratch.scores[row * SCORE_STRIDE + LANES..][..SPLIT + LANES];
            if let Some(cap) = soft_cap {
                cap_scores::<V>(&mut scores[relative.clone()], cap);
            }
            (scratch.maxima[row], scratch.sums[row]) =
                weigh::<V>(scores, &relative, own.start - split.start..own.end - split.start);
        }

        F::add_values::<V>(source, split, low..high, scratch, wide);
    }
}

/// A format of the cache, as attention reads it.
pub(super) trait CachedFormat: Send + Sync + 'static {
    /// Whether it uses byte dot products.
    const IN_BYTES: bool;

    /// Scales the queries of the split's rows, and stores them in the format that scores are computed from.
    fn load_queries<V: F32x16>(source: &Source<'_, Self>, split: &KvSplit<'_>, scratch: &mut TileScratch)
    where
        Self: Sized;

    /// Writes the scores of the split's rows for `positions`, which are in the split. Groups of sixteen may overwrite
    /// neighbouring scores with arbitrary values.
    fn score<V: F32x16>(
        source: &Source<'_, Self>,
        split: &KvSplit<'_>,
        positions: Range<usize>,
        scratch: &mut TileScratch,
        wide: bool,
    ) where
        Self: Sized;

    /// Writes the weighted values of the split's rows over `positions`. Weights are at the indices of scores. They are
    /// zero for positions of the same vectors that a row does not attend to.
    fn add_values<V: F32x16>(
        source: &Source<'_, Self>,
        split: &KvSplit<'_>,
        positions: Range<usize>,
        scratch: &mut TileScratch,
        wide: bool,
    ) where
        Self: Sized;
}

impl<E: KvElement> CachedFormat for E {
    const IN_BYTES: bool = false;

    #[inline(always)]
    fn load_queries<V: F32x16>(source: &Source<'_, Self>, split: &KvSplit<'_>, scratch: &mut TileScratch) {
        let num_rows = split.num_rows();
        for (row, query) in queries(source, split).enumerate() {
            for (d, value) in query.iter().enumerate() {
                scratch.queries[d * num_rows + row] = value * source.spec.scale;
            }
        }
    }

    #[inline(always)]
    fn score<V: F32x16>(
        source: &Source<'_, Self>,
        split: &KvSplit<'_>,
        positions: Range<usize>,
        scratch: &mut TileScratch,
        wide: bool,
    ) {
        let AttentionHeads { head_dim, .. } = source.spec.heads;
        let num_rows = split.num_rows();

        list_runs(&mut scratch.runs, split, positions, source.layout.block_size, true, |block, slot| {
            source.layout.k_group(block, split.kv_head, slot)
        });
        let scores = ScoreTile {
            queries: scratch.queries.as_ptr(),
            num_rows,
            head_dim,
            k_pool: source.k_pool,
            groups: &scratch.runs,
            scores: scratch.scores[LANES..].as_mut_ptr(),
        };
        // SAFETY: the scratch has `num_rows` rows, and each group is sixteen tokens of the pool whose scores fit between
        // the margins of a row of scores.
        unsafe {
            match is_staged::<E>(num_rows, head_dim * LANES) {
                true => scores.compute_staged::<V>(wide, &mut scratch.staged),
                false => scores.compute_all::<V>(wide),
            }
        }
    }

    #[inline(always)]
    fn add_values<V: F32x16>(
        source: &Source<'_, Self>,
        split: &KvSplit<'_>,
        positions: Range<usize>,
        scratch: &mut TileScratch,
        wide: bool,
    ) {
        let num_rows = split.num_rows();
        if let Some(latent) = &mut scratch.latent {
            latent.list(source, split, positions);
            latent.add_values::<V, E>(source.k_pool, num_rows, &scratch.scores, &mut scratch.values);
            return;
        }
        list_runs(&mut scratch.runs, split, positions, source.layout.block_size, false, |block, slot| {
            source.layout.v_row(block, split.kv_head, slot)
        });
        let values = ValueTile {
            weights: scratch.scores[LANES..].as_ptr(),
            v_pool: source.v_pool,
            runs: &scratch.runs,
            width: source.layout.v_stride(),
            values: scratch.values.as_mut_ptr(),
            adds: false,
        };
        // SAFETY: the scratch has `num_rows` rows of `width` values, and each run is rows of the pool.
        unsafe {
            match is_staged::<E>(num_rows, values.width) {
                true => values.compute_staged::<V>(num_rows, wide, &mut scratch.staged),
                false => values.compute_all::<V>(num_rows, wide),
            }
        }
    }
}

/// The queries of the split's rows, in their order.
#[inline(always)]
pub(super) fn queries<'a, F>(
    source: &'a Source<'_, F>,
    split: &'a KvSplit<'_>,
) -> impl Iterator<Item = &'a [f32]> {
    let AttentionHeads { head_dim, .. } = source.spec.heads;
    split.tokens.clone().flat_map(move |token| {
        split.heads.clone().map(move |head| {
            let offset = token * source.query_stride + head * head_dim;
            // SAFETY: the caller of `paged_attention` gave `query_stride` values for each token, which
            // begin with all query heads.
            unsafe { std::slice::from_raw_parts(source.queries.add(offset), head_dim) }
        })
    })
}

/// Lists the locations of the positions: in groups of sixteen slots of a block, or in runs within a block. `address`
/// returns the offset of a block's slot in the pool.
#[inline(always)]
pub(super) fn list_runs(
    runs: &mut Vec<Run>,
    split: &KvSplit<'_>,
    positions: Range<usize>,
    block_size: usize,
    in_groups: bool,
    address: impl Fn(usize, usize) -> usize,
) {
    runs.clear();
    let mut position = positions.start;
    while position < positions.end {
        let (index, slot) = (position / block_size, position % block_size);
        // A group is always taken as a whole: scores of other positions in it are dropped later.
        let (first_slot, end_slot) = if in_groups {
            let first_slot = slot / LANES * LANES;
            (first_slot, (first_slot + LANES).min(block_size))
        } else {
            (slot, block_size.min(slot + positions.end - position))
        };
        runs.push(Run {
            start: address(split.block_table[index] as usize, first_slot),
            offset: (index * block_size + first_slot) as isize - split.start as isize,
            len: end_slot - first_slot,
        });
        position += end_slot - slot;
    }
}

/// Some rows' scores.
pub(super) struct ScoreTile<'a, E> {
    /// First row's first value; rows are next to each other, values `num_rows` apart.
    pub(super) queries: *const f32,
    pub(super) num_rows: usize,
    pub(super) head_dim: usize,
    pub(super) k_pool: *const E,
    pub(super) groups: &'a [Run],
    /// First row's score of the split's first position; rows are `SCORE_STRIDE` apart.
    pub(super) scores: *mut f32,
}

impl<E: KvElement> ScoreTile<'_, E> {
    /// Computes all rows.
    ///
    /// # Safety
    /// All pointers hold what their descriptions say.
    #[inline(always)]
    pub(super) unsafe fn compute_all<V: F32x16>(&self, wide: bool) {
        let mut row = 0;
        while row < self.num_rows {
            // SAFETY: the caller's guarantees; the computed rows exist.
            unsafe {
                let tile = ScoreTile {
                    queries: self.queries.add(row),
                    scores: self.scores.add(row * SCORE_STRIDE),
                    ..*self
                };
                row += match (self.num_rows - row, wide) {
                    (8.., true) => tile.compute::<V, 8, 2>(),
                    (4.., true) => tile.compute::<V, 4, 4>(),
                    (4.., false) => tile.compute::<V, 4, 1>(),
                    (2.., _) => tile.compute::<V, 2, 2>(),
                    _ => tile.compute::<V, 1, 4>(),
                };
            }
        }
    }

    /// The same with keys that are converted once for all rows, to `staged`.
    ///
    /// # Safety
    /// As of [`Self::compute_all`]; a group has space in `staged`.
    #[inline(always)]
    unsafe fn compute_staged<V: F32x16>(&self, wide: bool, staged: &mut [f32]) {
        const MAX_GROUPS: usize = 8;
        let len = self.head_dim * LANES;
        for groups in self.groups.chunks((staged.len() / len).min(MAX_GROUPS)) {
            let mut runs = [Run { start: 0, offset: 0, len: 0 }; MAX_GROUPS];
            for (index, (run, group)) in runs.iter_mut().zip(groups).enumerate() {
                let start = index * len;
                // SAFETY: a group has `len` values of the pool, a multiple of sixteen.
                unsafe { convert::<V, E>(self.k_pool.add(group.start), &mut staged[start..start + len]) };
                *run = Run { start, ..*group };
            }
            let tile = ScoreTile::<f32> {
                queries: self.queries,
                num_rows: self.num_rows,
                head_dim: self.head_dim,
                k_pool: staged.as_ptr(),
                groups: &runs[..groups.len()],
                scores: self.scores,
            };
            // SAFETY: the caller's guarantees, and the groups are in `staged`.
            unsafe { tile.compute_all::<V>(wide) };
        }
    }

    /// Computes `ROWS` rows, `GROUPS` groups at a time, and returns `ROWS`.
    ///
    /// # Safety
    /// There are `ROWS` rows, and all pointers hold what their descriptions say.
    #[inline(always)]
    unsafe fn compute<V: F32x16, const ROWS: usize, const GROUPS: usize>(&self) -> usize {
        let (several, single) = self.groups.as_chunks::<GROUPS>();
        for groups in several {
            // SAFETY: the caller's guarantees.
            unsafe { self.compute_groups::<V, ROWS, GROUPS>(groups) };
        }
        for group in single {
            // SAFETY: the caller's guarantees.
            unsafe { self.compute_groups::<V, ROWS, 1>(&[*group]) };
        }
        ROWS
    }

    #[inline(always)]
    unsafe fn compute_groups<V: F32x16, const ROWS: usize, const GROUPS: usize>(
        &self,
        groups: &[Run; GROUPS],
    ) {
        let mut sums = [[V::splat(0.0); GROUPS]; ROWS];
        // SAFETY: a group has sixteen values for each of `head_dim`, and the queries `num_rows`; scores
        // of a group begin at most fifteen before and end at most fifteen after the split.
        unsafe {
            for d in 0..self.head_dim {
                let mut keys = [V::splat(0.0); GROUPS];
                for (key, group) in keys.iter_mut().zip(groups) {
                    *key = E::load(self.k_pool.add(group.start + d * LANES));
                }
                let query = self.queries.add(d * self.num_rows);
                for (row, sums) in sums.iter_mut().enumerate() {
                    let query = V::splat(*query.add(row));
                    for (sum, key) in sums.iter_mut().zip(&keys) {
                        *sum = query.mul_add(*key, *sum);
                    }
                }
            }
            // In ascending order, because a group that is not full is overlapped by the next one.
            for (row, sums) in sums.iter().enumerate() {
                for (sum, group) in sums.iter().zip(groups) {
                    sum.store(self.scores.add(row * SCORE_STRIDE).offset(group.offset));
                }
            }
        }
    }
}

/// Converts `target.len()` values, a multiple of sixteen.
///
/// # Safety
/// `source` has that many.
#[inline(always)]
pub(super) unsafe fn convert<V: F32x16, E: KvElement>(source: *const E, target: &mut [f32]) {
    for at in (0..target.len()).step_by(LANES) {
        // SAFETY: both sides have sixteen more values.
        unsafe { E::load::<V>(source.add(at)).store(target.as_mut_ptr().add(at)) };
    }
}

/// `cap · tanh(x / cap)` of whole vectors, as `cap - 2 · cap / (e^(2x / cap) + 1)`: `exp` is bounded, so no value is
/// infinite. Arbitrary values between scores stay arbitrary.
#[inline(always)]
fn cap_scores<V: F32x16>(scores: &mut [f32], cap: f32) {
    let (one, cap, twice) = (V::splat(1.0), V::splat(cap), V::splat(2.0 * cap));
    let (vectors, _) = scores.as_chunks_mut::<LANES>();
    for vector in vectors {
        // SAFETY: a chunk has sixteen values.
        unsafe {
            let exponent = V::load(vector.as_ptr()).mul(V::splat(2.0)).div(cap);
            cap.sub(twice.div(exponent.exp().add(one))).store(vector.as_mut_ptr());
        }
    }
}

/// Turns the scores of a row into weights: e^(score - max) inside `own`, 0 in the rest of `all`. Offsets
/// are from the start of the split. Returns the largest score and the sum of the weights.
#[inline(always)]
pub(super) fn weigh<V: F32x16>(scores: &mut [f32], all: &Range<usize>, own: Range<usize>) -> (f32, f32) {
    if own.is_empty() {
        scores[all.clone()].fill(0.0);
        return (f32::NEG_INFINITY, 0.0);
    }
    let (first, end) = (own.start / LANES * LANES, own.end.next_multiple_of(LANES));
    scores[first..own.start].fill(f32::NEG_INFINITY);
    scores[own.end..end].fill(f32::NEG_INFINITY);
    let mut max = V::splat(f32::NEG_INFINITY);
    // SAFETY: `end` is at most SPLIT, and `scores` has more.
    unsafe {
        for offset in (first..end).step_by(LANES) {
            max = max.max(V::load(scores.as_ptr().add(offset)));
        }
    }
    let max = max.max_lane();
    let mut sum = V::splat(0.0);
    // SAFETY: as above.
    unsafe {
        for offset in (first..end).step_by(LANES) {
            let weight = V::load(scores.as_ptr().add(offset)).sub(V::splat(max)).exp();
            weight.store(scores.as_mut_ptr().add(offset));
            sum = sum.add(weight);
        }
    }
    scores[all.start.min(first)..own.start].fill(0.0);
    scores[own.end..all.end.max(end)].fill(0.0);
    (max, sum.sum())
}

/// Adds a KV split to the merged ones: the split in the scratch, or a saved one.
pub(super) struct Merge<'a> {
    pub(super) scratch: &'a mut TileScratch,
    pub(super) num_rows: usize,
    pub(super) value_dim: usize,
    pub(super) partials: Option<&'a [f32]>,
}

impl Kernel for Merge<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: F32x16>(self) {
        let Self { scratch, num_rows, value_dim, partials } = self;
        let width = value_dim.next_multiple_of(LANES);
        for row in 0..num_rows {
            let (max, sum, values) = match partials {
                Some(partials) => {
                    let saved = &partials[row * (width + 2)..][..width + 2];
                    (saved[0], saved[1], &saved[2..])
                }
                None => (scratch.maxima[row], scratch.sums[row], &scratch.values[row * width..][..width]),
            };
            // No position of the split is visible to this row.
            if sum == 0.0 {
                continue;
            }
            let merged = &mut scratch.merged_values[row * width..][..width];
            if scratch.merged_sums[row] == 0.0 {
                merged.copy_from_slice(values);
                scratch.merged_maxima[row] = max;
                scratch.merged_sums[row] = sum;
                continue;
            }
            let new_max = max.max(scratch.merged_maxima[row]);
            // The largest lane of equal lanes is a lane.
            let old_factor = V::splat(scratch.merged_maxima[row] - new_max).exp();
            let factor = V::splat(max - new_max).exp();
            for offset in (0..width).step_by(LANES) {
                // SAFETY: both have `width` values, a multiple of sixteen.
                unsafe {
                    let old = V::load(merged.as_ptr().add(offset)).mul(old_factor);
                    let value = V::load(values.as_ptr().add(offset));
                    value.mul_add(factor, old).store(merged.as_mut_ptr().add(offset));
                }
            }
            scratch.merged_maxima[row] = new_max;
            scratch.merged_sums[row] =
                scratch.merged_sums[row] * old_factor.max_lane() + sum * factor.max_lane();
        }
    }
}
