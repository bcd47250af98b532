//! Attention over integer keys and values, with byte dot products.
//!
//! Queries and weights become integers of two digits, ±127 · 128 ± 64, which is more precise than half precision: a
//! query by the largest of each [`GROUP`] of its values, weights times the scales of values by the largest scale that a
//! token attends to in the split. Each digit is multiplied by itself. Integer sums are exact, so that neither the block
//! size nor the rest of the tile changes a bit; inexact operations are done for each row alone, in a fixed order.

use std::ops::Range;

use super::kernel::{
    CachedFormat, KvSplit, MAX_RUNS, Run, SCORE_STRIDE, Source, TileScratch, list_runs, queries,
};
use super::{AttentionHeads, SPLIT};
use crate::memory::prefetch_early;
use crate::paged_cache::{GROUP, KvLayout, LANES};
use crate::q8_0::{self, Q8_0, SCALES, VECTOR, WORD};
use crate::simd::F32x16;

/// Codes of sixteen slots, in words.
const WORDS: usize = LANES / WORD;
/// The value of a unit of the first digit.
const BASE: f32 = 128.0;
/// The largest number of two digits.
const MAX: f32 = 127.0 * BASE + 63.0;
/// The largest sum of the weights of a KV split, with a margin for rounding.
const MAX_SUM: f32 = SPLIT as f32 + 1.0;

/// Numbers of two digits: those of a row and a group.
#[derive(Debug, Clone, Copy, Default)]
struct Unit {
    /// The value of a unit.
    scale: f32,
    /// The start of integer sums of dot products with a digit.
    starts: [i32; 2],
}

impl Unit {
    /// That of digits with these sums in each lane.
    #[inline(always)]
    fn new<V: F32x16>(scale: f32, sums: [V; 2]) -> Self {
        Self { scale, starts: sums.map(|sums| -V::SIGNED_BIAS * sums.sum() as i32) }
    }
}

/// Memory of one task.
pub(super) struct DigitScratch {
    /// Queries, `[group][row][digit][GROUP]`, with their units.
    queries: Vec<[[i8; GROUP]; 2]>,
    query_units: Vec<Unit>,
    /// Weights times the scales of a group of values, `[row][digit][run][16]`, with their units.
    weights: Vec<i8>,
    weight_units: Vec<Unit>,
    /// `[run][16]`: the factors that convert a token's weights to integers.
    factors: Vec<[f32; LANES]>,
    /// The runs in V; those of the scratch are in K.
    runs: Vec<Run>,
}

impl DigitScratch {
    pub(super) fn new(rows: usize, head_dim: usize) -> Self {
        let num_groups = head_dim.div_ceil(GROUP);
        Self {
            queries: vec![[[0; GROUP]; 2]; num_groups * rows],
            query_units: vec![Unit::default(); num_groups * rows],
            weights: vec![0; rows * 2 * MAX_RUNS * LANES],
            weight_units: vec![Unit::default(); rows],
            factors: vec![[0.0; LANES]; MAX_RUNS],
            runs: Vec::with_capacity(MAX_RUNS),
        }
    }
}

/// Writes the digits of sixteen whole numbers of at most `MAX`, and adds them to `sums`.
///
/// # Safety
/// There is space for sixteen at both pointers; see [`F32x16`].
#[inline(always)]
unsafe fn store_digits<V: F32x16>(numbers: V, digits: [*mut i8; 2], sums: &mut [V; 2]) {
    let high = numbers.mul(V::splat(1.0 / BASE)).round();
    let low = high.mul_add(V::splat(-BASE), numbers);
    // SAFETY: the caller's guarantees.
    unsafe {
        high.store_i8(digits[0]);
        low.store_i8(digits[1]);
    }
    *sums = [sums[0].add(high), sums[1].add(low)];
}

/// Combines the dot products of the digits.
#[inline(always)]
fn join<V: F32x16>([high, low]: [V::Sums; 2]) -> V {
    V::from_sums(high).mul_add(V::splat(BASE), V::from_sums(low))
}

/// The factor that converts numbers up to `largest` to integers, and the value of a unit.
#[inline(always)]
fn unit_of(largest: f32) -> (f32, f32) {
    // Of so small numbers the reciprocal would be infinite; a NaN stays one.
    if largest < 1e-30 { (0.0, 0.0) } else { (MAX / largest, largest / MAX) }
}

impl DigitScratch {
    /// Scales the tile's queries and makes whole numbers of them.
    #[inline(always)]
    fn load_queries<V: F32x16>(&mut self, source: &Source<'_, Q8_0>, split: &KvSplit<'_>) {
        let (num_rows, scale) = (split.num_rows(), V::splat(source.spec.scale));
        for (row, query) in queries(source, split).enumerate() {
            for (group, values) in query.chunks(GROUP).enumerate() {
                let mut padded = [0.0; GROUP];
                padded[..values.len()].copy_from_slice(values);
                let index = group * num_rows + row;
                let digits = &mut self.queries[index];
                // SAFETY: the arrays have two vectors each.
                unsafe {
                    let halves = [0, LANES].map(|at| V::load(padded.as_ptr().add(at)).mul(scale));
                    let (factor, scale) = unit_of(halves[0].largest_magnitude(halves[1]));
                    let mut sums = [V::splat(0.0); 2];
                    for (at, half) in [0, LANES].into_iter().zip(halves) {
                        let digits = digits.each_mut().map(|digit| digit.as_mut_ptr().add(at));
                        store_digits(half.mul(V::splat(factor)).round(), digits, &mut sums);
                    }
                    self.query_units[index] = Unit::new(scale, sums);
                }
            }
        }
    }

    /// Makes whole numbers of the weights of a token's rows, times the scales of a group of values.
    #[inline(always)]
    fn load_weights<V: F32x16>(
        &mut self,
        scales: *const u8,
        weights: &[f32],
        rows: Range<usize>,
        own: &Range<isize>,
    ) {
        let Self { runs, factors, weights: digits, weight_units, .. } = self;
        let lanes_of = |run: &Run| {
            let first = (own.start - run.offset).clamp(0, run.len as isize) as usize;
            first..(own.end - run.offset).clamp(first as isize, run.len as isize) as usize
        };
        let (mut largest, mut broken) = (V::splat(0.0), V::splat(0.0));
        for (run, factors) in runs.iter().zip(factors.iter_mut()) {
            // SAFETY: a run is a sixteen of V, with a vector of scales.
            let scales = unsafe { V::load_f16(scales.wrapping_add(run.start).cast()) };
            // SAFETY: the array has sixteen values.
            unsafe { scales.store(factors.as_mut_ptr()) };
            let lanes = lanes_of(run);
            if lanes != (0..LANES) {
                factors[..lanes.start].fill(0.0);
                factors[lanes.end..].fill(0.0);
            }
            // SAFETY: as above.
            let scales = unsafe { V::load(factors.as_ptr()) };
            largest = largest.max(scales);
            // x · 0 is 0 for a finite x and NaN otherwise.
            broken = broken.add(scales.mul(V::splat(0.0)));
        }
        let (factor, scale) = unit_of(largest.max_lane() + broken.sum());
        for factors in &mut factors[..runs.len()] {
            // SAFETY: as above.
            unsafe { V::load(factors.as_ptr()).mul(V::splat(factor)).store(factors.as_mut_ptr()) };
        }
        let len = runs.len() * LANES;
        for row in rows {
            let mut sums = [V::splat(0.0); 2];
            let digits = &mut digits[row * 2 * len..][..2 * len];
            for (index, (run, factors)) in runs.iter().zip(factors.iter()).enumerate() {
                let start = (row * SCORE_STRIDE + LANES).wrapping_add_signed(run.offset);
                let lanes = lanes_of(run);
                let mut masked = [0.0; LANES];
                let weights = if lanes == (0..LANES) {
                    weights[start..start + LANES].as_ptr()
                } else {
                    masked[lanes.clone()].copy_from_slice(&weights[start..][lanes]);
                    masked.as_ptr()
                };
                // SAFETY: there are sixteen weights and factors, and space for their digits.
                unsafe {
                    let numbers = V::load(weights).mul(V::load(factors.as_ptr())).round();
                    let digits = digits.as_mut_ptr().add(index * LANES);
                    store_digits(numbers, [digits, digits.add(len)], &mut sums);
                }
            }
            weight_units[row] = Unit::new(scale, sums);
        }
    }
}

impl CachedFormat for Q8_0 {
    const IN_BYTES: bool = true;

    #[inline(always)]
    fn load_queries<V: F32x16>(source: &Source<'_, Self>, split: &KvSplit<'_>, scratch: &mut TileScratch) {
        scratch.digits.load_queries::<V>(source, split);
    }

    #[inline(always)]
    fn score<V: F32x16>(
        source: &Source<'_, Self>,
        split: &KvSplit<'_>,
        positions: Range<usize>,
        scratch: &mut TileScratch,
        wide: bool,
    ) {
        let (num_rows, layout) = (split.num_rows(), &source.layout);
        let TileScratch { runs, scores, digits, .. } = scratch;
        list_runs(runs, split, positions.clone(), layout.block_size, true, |block, slot| {
            q8_0::key_sixteen(layout, block, split.kv_head, slot)
        });
        list_runs(&mut digits.runs, split, positions, layout.block_size, true, |block, slot| {
            q8_0::value_sixteen(layout, block, split.kv_head, slot)
        });
        let v_pool = if layout.has_values { source.v_pool.cast::<u8>() } else { std::ptr::null() };
        let tile = ScoreTile {
            layout,
            k_pool: source.k_pool.cast(),
            runs,
            values: (!v_pool.is_null()).then_some((v_pool, &digits.runs[..])),
            queries: &digits.queries,
            units: &digits.query_units,
            num_rows,
        };
        let mut row = 0;
        while row < num_rows {
            // SAFETY: a run is a sixteen of K, whose scores fit between the margins of a row of scores.
            unsafe {
                row += match (num_rows - row, wide) {
                    (8.., true) => tile.compute::<V, 8>(row, scores),
                    (4.., true) => tile.compute::<V, 4>(row, scores),
                    (2.., _) => tile.compute::<V, 2>(row, scores),
                    _ => tile.compute::<V, 1>(row, scores),
                };
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
        let (num_rows, layout) = (split.num_rows(), &source.layout);
        let TileScratch { scores, values, latent, digits, sums, .. } = scratch;
        let AttentionHeads { value_dim, .. } = source.spec.heads;
        let width = value_dim.next_multiple_of(LANES);
        if let Some(latent) = latent {
            latent.decode::<V>(source, split, positions);
            latent.add_values::<V, f32>(std::ptr::null(), num_rows, scores, values);
        } else {
            let codes = source.v_pool.cast::<u8>();
            for group in 0..value_dim.div_ceil(GROUP) {
                let scales = codes.wrapping_add(q8_0::value_code_bytes(layout) + group * SCALES);
                for token in 0..split.tokens.len() {
                    let own = split.visible(token, source.spec.window);
                    let own = (own.start - split.start) as isize..(own.end - split.start) as isize;
                    let rows = token * split.heads.len()..(token + 1) * split.heads.len();
                    digits.load_weights::<V>(scales, scores, rows, &own);
                }
                let tile = ValueTile {
                    layout,
                    codes,
                    runs: &digits.runs,
                    weights: &digits.weights,
                    units: &digits.weight_units,
                };
                for column in (group * GROUP..width.min((group + 1) * GROUP)).step_by(LANES) {
                    let mut row = 0;
                    while row < num_rows {
                        let values = &mut values[row * width + column..];
                        // SAFETY: a run is a sixteen of V, which has a vector of codes for each word and column.
                        unsafe {
                            row += match (num_rows - row, wide) {
                                (8.., true) => tile.compute::<V, 8>(row, column, values, width),
                                (4.., true) => tile.compute::<V, 4>(row, column, values, width),
                                (2.., _) => tile.compute::<V, 2>(row, column, values, width),
                                _ => tile.compute::<V, 1>(row, column, values, width),
                            };
                        }
                    }
                }
            }
        }
        // Weights are at most one, but for scores that are no numbers.
        for (row, sum) in sums[..num_rows].iter().enumerate() {
            if sum.is_nan() || *sum > MAX_SUM {
                values[row * width..][..width].fill(f32::NAN);
            }
        }
    }
}

/// Rows' scores for sixteens of K.
struct ScoreTile<'a> {
    layout: &'a KvLayout,
    k_pool: *const u8,
    runs: &'a [Run],
    /// V, at the same groups, which are read next.
    values: Option<(*const u8, &'a [Run])>,
    queries: &'a [[[i8; GROUP]; 2]],
    units: &'a [Unit],
    num_rows: usize,
}

impl ScoreTile<'_> {
    /// Prefetches groups that are read soon: blocks are not adjacent, so the processor cannot predict them.
    #[inline(always)]
    fn prefetch(&self, index: usize) {
        const AHEAD: usize = 2;
        if let Some(run) = self.runs.get(index + AHEAD) {
            prefetch_early(self.k_pool.wrapping_add(run.start), q8_0::key_bytes(self.layout));
        }
        if let Some((v_pool, runs)) = self.values {
            prefetch_early(v_pool.wrapping_add(runs[index].start), q8_0::value_bytes(self.layout));
        }
    }

    /// Computes `ROWS` rows and returns `ROWS`.
    ///
    /// # Safety
    /// All pointers hold what their descriptions say.
    #[inline(always)]
    unsafe fn compute<V: F32x16, const ROWS: usize>(&self, first_row: usize, scores: &mut [f32]) -> usize {
        let head_dim = self.layout.head_dim;
        for (index, run) in self.runs.iter().enumerate() {
            if first_row == 0 {
                self.prefetch(index);
            }
            let sixteen = self.k_pool.wrapping_add(run.start);
            let scales = sixteen.wrapping_add(q8_0::key_code_bytes(self.layout));
            let mut totals = [V::splat(0.0); ROWS];
            for group in 0..head_dim.div_ceil(GROUP) {
                let index = group * self.num_rows + first_row;
                let (queries, units) = (&self.queries[index..][..ROWS], &self.units[index..][..ROWS]);
                let mut sums = [[V::splat_sum(0); 2]; ROWS];
                for (sums, unit) in sums.iter_mut().zip(units) {
                    *sums = unit.starts.map(V::splat_sum);
                }
                let num_words = (head_dim - group * GROUP).min(GROUP).div_ceil(WORD);
                for word in 0..num_words {
                    // SAFETY: the sixteen has a vector of codes for each word, and a query four digits.
                    unsafe {
                        let codes = V::load_codes(sixteen.add((group * GROUP / WORD + word) * VECTOR));
                        for (sums, query) in sums.iter_mut().zip(queries) {
                            for (sums, digit) in sums.iter_mut().zip(query) {
                                *sums = V::dot_signed(*sums, codes, digit.as_ptr().add(word * WORD));
                            }
                        }
                    }
                }
                // SAFETY: the sixteen has a vector of scales for each group.
                let scales = unsafe { V::load_f16(scales.add(group * SCALES).cast()) };
                for ((total, sums), unit) in totals.iter_mut().zip(sums).zip(units) {
                    *total = join::<V>(sums).mul_add(scales.mul(V::splat(unit.scale)), *total);
                }
            }
            // In ascending order, because a sixteen that is not full is overlapped by the next one.
            for (row, total) in totals.iter().enumerate() {
                let start = ((first_row + row) * SCORE_STRIDE + LANES).wrapping_add_signed(run.offset);
                // SAFETY: the slice has sixteen values.
                unsafe { total.store(scores[start..start + LANES].as_mut_ptr()) };
            }
        }
        ROWS
    }
}

/// Rows' weighted values over sixteens of V.
struct ValueTile<'a> {
    layout: &'a KvLayout,
    codes: *const u8,
    runs: &'a [Run],
    weights: &'a [i8],
    units: &'a [Unit],
}

impl ValueTile<'_> {
    /// Computes sixteen columns of `ROWS` rows, which are `width` apart in `values`, and returns `ROWS`.
    ///
    /// # Safety
    /// All pointers hold what their descriptions say.
    #[inline(always)]
    unsafe fn compute<V: F32x16, const ROWS: usize>(
        &self,
        first_row: usize,
        column: usize,
        values: &mut [f32],
        width: usize,
    ) -> usize {
        let len = self.runs.len() * LANES;
        let weights = &self.weights[first_row * 2 * len..][..ROWS * 2 * len];
        let units = &self.units[first_row..][..ROWS];
        let mut sums = [[V::splat_sum(0); 2]; ROWS];
        for (sums, unit) in sums.iter_mut().zip(units) {
            *sums = unit.starts.map(V::splat_sum);
        }
        for (index, run) in self.runs.iter().enumerate() {
            let sixteen = self.codes.wrapping_add(run.start);
            for word in 0..run.len.div_ceil(WORD).min(WORDS) {
                // SAFETY: the sixteen has a vector of codes for each word and column, and a row's digit four weights.
                unsafe {
                    let codes = V::load_codes(sixteen.add((word * self.layout.v_stride() + column) * WORD));
                    let weights = weights.as_ptr().add(index * LANES + word * WORD);
                    for (row, sums) in sums.iter_mut().enumerate() {
                        for (digit, sums) in sums.iter_mut().enumerate() {
                            *sums = V::dot_signed(*sums, codes, weights.add((2 * row + digit) * len));
                        }
                    }
                }
            }
        }
        for (row, (sums, unit)) in sums.into_iter().zip(units).enumerate() {
            let values = &mut values[row * width..][..LANES];
            // SAFETY: the slice has sixteen values.
            unsafe { join::<V>(sums).mul(V::splat(unit.scale)).store(values.as_mut_ptr()) };
        }
        ROWS
    }
}
