//! Latent attention with expanded keys and values, for rows with many new tokens. Each key and value of a head is
//! expanded once from the latent row and serves all tokens, which takes a third of the multiplications.
//!
//! The context is divided into spans, and a span into the KV splits of `SPLIT` positions that all attention here uses.
//! A task has a query head and some of the row's tokens. For each split it expands the head's keys and values, which
//! stay in the second-level cache, and adds the split to the results of its tokens. So the operations of a token's
//! result and their order depend on positions alone: not on the other tokens, the block size or the number of threads.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Mutex;

use half::{bf16, f16};

use super::kernel::{Run, SCORE_STRIDE, ScoreTile, weigh};
use super::value_tile::ValueTile;
use super::{SPLIT, with_free};
use crate::AlignedFloats;
use crate::AttentionMetadata;
use crate::fp8::E4m3;
use crate::matmul::{ActivationFormats, Activations, PackedMatrix, matmul_rows};
use crate::paged_cache::{CachePools, KvCacheDType, KvElement, KvLayout, LANES};
use crate::pool::ThreadPool;
use crate::q8_0::{self, Q8_0};
use crate::rows::RowsMut;
use crate::simd::{CpuLevel, F32x16, Kernel};

/// Positions whose latent rows are in memory as activations at once.
const SPAN: usize = 8 * SPLIT;
/// Tokens whose scores are computed together.
const TILE_TOKENS: usize = 32;
/// Fewest tokens for which a task makes keys and values.
const MIN_TASK_TOKENS: usize = 64;

/// The widths of expanded attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpandedShape {
    /// Query heads, each with a key and a value head of its own.
    pub num_heads: usize,
    /// Values of a latent row.
    pub rank: usize,
    /// Values of a query or key head that are not rotated, and those that are.
    pub nope: usize,
    /// See `nope`.
    pub rotated: usize,
    /// Values of a value head.
    pub value_dim: usize,
}

impl ExpandedShape {
    fn row_dim(self) -> usize {
        self.rank + self.rotated
    }

    /// Values of a query or key head.
    #[must_use]
    pub fn head_dim(self) -> usize {
        self.nope + self.rotated
    }

    fn value_width(self) -> usize {
        self.value_dim.next_multiple_of(LANES)
    }
}

/// Memory for [`expanded_attention`], allocated once; only used memory is touched.
pub struct ExpandedScratch {
    shape: ExpandedShape,
    /// Rows of the cache, `[span][row_dim]`.
    rows: AlignedFloats,
    /// Their latent values in the format of matmuls.
    latent: Activations,
    /// The largest score and the sum so far of each token and head, `[tokens][heads][2]`.
    totals: AlignedFloats,
    /// One for each thread.
    workers: Vec<Mutex<Worker>>,
}

impl std::fmt::Debug for ExpandedScratch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ExpandedScratch({:?})", self.shape)
    }
}

impl ExpandedScratch {
    /// Memory for steps of at most `max_num_tokens` tokens with contexts of at most `max_model_len`.
    ///
    /// # Panics
    /// If there is no memory.
    #[must_use]
    pub fn new(
        shape: ExpandedShape,
        max_num_tokens: usize,
        max_model_len: usize,
        num_threads: usize,
        level: CpuLevel,
    ) -> Self {
        let span = SPAN.min(max_model_len);
        let mut latent = Activations::new();
        latent.reserve(span, shape.rank, ActivationFormats::all(level));
        Self {
            shape,
            rows: AlignedFloats::zeroed(span * shape.row_dim()),
            latent,
            totals: AlignedFloats::zeroed(max_num_tokens * shape.num_heads * 2),
            workers: (0..num_threads).map(|_| Mutex::new(Worker::new(shape))).collect(),
        }
    }
}

/// The memory of a task.
struct Worker {
    /// The split's keys, `[group of sixteen positions][head_dim][16]`, and values, `[position][value_width]`.
    keys: AlignedFloats,
    values: AlignedFloats,
    groups: Vec<Run>,
    /// Scaled queries, `[head_dim][tokens]`.
    queries: AlignedFloats,
    /// `[tokens][SCORE_STRIDE]`.
    scores: AlignedFloats,
    /// `[tokens][value_width]`.
    results: AlignedFloats,
}

impl Worker {
    fn new(shape: ExpandedShape) -> Self {
        let group_len = shape.head_dim() * LANES;
        let groups = (0..SPLIT / LANES).map(|group| Run {
            start: group * group_len,
            offset: (group * LANES) as isize,
            len: LANES,
        });
        Self {
            keys: AlignedFloats::zeroed(SPLIT * shape.head_dim()),
            values: AlignedFloats::zeroed(SPLIT * shape.value_width()),
            groups: groups.collect(),
            queries: AlignedFloats::zeroed(TILE_TOKENS * shape.head_dim()),
            scores: AlignedFloats::zeroed(TILE_TOKENS * SCORE_STRIDE),
            results: AlignedFloats::zeroed(TILE_TOKENS * shape.value_width()),
        }
    }
}

/// The operands, checked by the op.
#[derive(Debug, Clone, Copy)]
pub struct ExpandedOperands<'a> {
    /// Heads that begin with the values that are not rotated.
    pub queries: &'a [f32],
    /// Values from one token to the next, and from one head to the next.
    pub query_width: usize,
    /// See `query_width`.
    pub query_stride: usize,
    /// `[tokens][heads][row_dim]`: heads that end with the rotated values.
    pub absorbed: &'a [f32],
    /// The factor of scores.
    pub scale: f32,
    /// Of the latent row into keys, `[nope, rank]` for each head, and into values, `[value_dim, rank]`.
    pub keys: &'a [PackedMatrix],
    /// See `keys`.
    pub values: &'a [PackedMatrix],
}

/// Writes the attention of the tokens of expanded rows, `num_heads · value_dim` values each. The rows of the step's
/// tokens are in the cache already.
///
/// # Safety
/// The lists of `metadata` fit together and name blocks that the pools have; rows of the cache and all operands are as
/// wide as the shape of `scratch` says.
pub unsafe fn expanded_attention(
    scratch: &mut ExpandedScratch,
    operands: ExpandedOperands<'_>,
    cache: CachePools<'_>,
    metadata: &AttentionMetadata,
    out: &RowsMut<'_>,
    pool: &ThreadPool,
    level: CpuLevel,
) {
    let ExpandedScratch { shape, rows, latent, totals, workers } = scratch;
    let shape = *shape;
    let dtypes = operands.keys.iter().chain(operands.values).map(PackedMatrix::dtype);
    let formats = ActivationFormats::of(dtypes, level);
    let totals = RowsMut::new(totals, 2);
    for row in metadata.expanded_rows() {
        let tokens = metadata.query_start_loc[row]..metadata.query_start_loc[row + 1];
        let seq_len = metadata.seq_lens[row];
        let task_tokens = task_tokens(tokens.len(), shape.num_heads, pool.num_threads());
        let num_groups_per_kv_head = tokens.len().div_ceil(task_tokens);
        for start in (0..seq_len).step_by(SPAN) {
            let span = start..seq_len.min(start + SPAN);
            read_rows(cache, metadata.block_table(row), span.clone(), rows, pool, level);
            let stride = shape.row_dim();
            latent.prepare(rows, stride, span.len(), shape.rank, None, formats, pool, level);
            let context = Span {
                shape,
                positions: span,
                rows: &rows[..],
                latent: &*latent,
                operands,
                totals: &totals,
                level,
            };
            pool.run(shape.num_heads * num_groups_per_kv_head, |task| {
                let (chunk, head) = (task / shape.num_heads, task % shape.num_heads);
                let first = tokens.start + chunk * task_tokens;
                let own = first..tokens.end.min(first + task_tokens);
                let position = seq_len - (tokens.end - first);
                with_free(workers, &mut |worker| context.run(worker, head, own.clone(), position, out));
            });
        }
    }
}

/// Tokens of a task: all of the row's, or fewer if the heads alone are not enough tasks for the threads.
fn task_tokens(num_tokens: usize, num_heads: usize, num_threads: usize) -> usize {
    let num_tasks = (2 * num_threads).div_ceil(num_heads).min(num_tokens / MIN_TASK_TOKENS).max(1);
    num_tokens.div_ceil(num_tasks).next_multiple_of(TILE_TOKENS)
}

/// A span of a row's context, with all that tasks read.
struct Span<'a> {
    shape: ExpandedShape,
    positions: Range<usize>,
    rows: &'a [f32],
    latent: &'a Activations,
    operands: ExpandedOperands<'a>,
    /// `[tokens · heads][2]`.
    totals: &'a RowsMut<'a>,
    level: CpuLevel,
}

impl Span<'_> {
    /// Adds the span to the results of some tokens, of which the first is at `position`.
    fn run(
        &self,
        worker: &mut Worker,
        head: usize,
        tokens: Range<usize>,
        position: usize,
        out: &RowsMut<'_>,
    ) {
        let end_position = position + tokens.len();
        let end = self.positions.end.min(end_position);
        for start in (self.positions.start..end).step_by(SPLIT) {
            let split = start..end.min(start + SPLIT);
            self.expand(worker, head, split.clone());
            for first in tokens.clone().step_by(TILE_TOKENS) {
                let own = first..tokens.end.min(first + TILE_TOKENS);
                let position = position + first - tokens.start;
                if position + own.len() > start {
                    let split = split.clone();
                    self.level.run(SplitTile { span: self, worker, head, tokens: own, position, split, out });
                }
            }
        }
        if self.positions.contains(&(end_position - 1)) {
            for token in tokens {
                // SAFETY: the task has this token and head.
                let (total, result) = unsafe { (self.total(token, head), self.result(out, token, head)) };
                let inverse = 1.0 / total[1];
                result.iter_mut().for_each(|value| *value *= inverse);
            }
        }
    }

    /// The result of a token and head.
    ///
    /// # Safety
    /// They belong to the calling task.
    #[inline(always)]
    #[expect(clippy::mut_from_ref, reason = "the caller makes sure that ranges are disjoint")]
    unsafe fn result<'o>(&self, out: &'o RowsMut<'_>, token: usize, head: usize) -> &'o mut [f32] {
        let value_dim = self.shape.value_dim;
        // SAFETY: the caller's guarantee.
        unsafe { out.range(token, head * value_dim, value_dim) }
    }

    /// The largest score and the sum so far of a token and head.
    ///
    /// # Safety
    /// They belong to the calling task.
    #[inline(always)]
    #[expect(clippy::mut_from_ref, reason = "the caller makes sure that ranges are disjoint")]
    unsafe fn total(&self, token: usize, head: usize) -> &mut [f32] {
        // SAFETY: the caller's guarantee.
        unsafe { self.totals.get(token * self.shape.num_heads + head) }
    }

    /// Makes the keys and values of a head for a KV split.
    fn expand(&self, worker: &mut Worker, head: usize, split: Range<usize>) {
        let ExpandedShape { rank, nope, .. } = self.shape;
        let (row_dim, head_dim, value_width) =
            (self.shape.row_dim(), self.shape.head_dim(), self.shape.value_width());
        let first = split.start - self.positions.start;
        // To the end of a panel, or of the span.
        let end = (first + split.len()).next_multiple_of(LANES).min(self.positions.len());
        let Worker { keys, values, .. } = worker;
        let write_key = |row: usize, d: usize, outputs: &[f32]| {
            let at = ((row - first) / LANES * head_dim + d) * LANES + (row - first) % LANES;
            for (index, output) in outputs.iter().enumerate() {
                keys[at + index * LANES] = *output;
            }
        };
        matmul_rows(self.latent, first..end, &self.operands.keys[head], write_key, self.level);
        let write_value = |row: usize, d: usize, outputs: &[f32]| {
            values[(row - first) * value_width + d..][..outputs.len()].copy_from_slice(outputs);
        };
        matmul_rows(self.latent, first..end, &self.operands.values[head], write_value, self.level);
        for (index, row) in (first..first + split.len()).enumerate() {
            let at = (index / LANES * head_dim + nope) * LANES + index % LANES;
            for (d, value) in self.rows[row * row_dim..][rank..row_dim].iter().enumerate() {
                keys[at + d * LANES] = *value;
            }
        }
    }
}

/// Some tokens of a head against a KV split whose keys and values are made.
struct SplitTile<'a> {
    span: &'a Span<'a>,
    worker: &'a mut Worker,
    head: usize,
    tokens: Range<usize>,
    /// Of the first token.
    position: usize,
    split: Range<usize>,
    out: &'a RowsMut<'a>,
}

impl Kernel for SplitTile<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: F32x16>(self) {
        let Self { span, worker, head, tokens, position, split, out } = self;
        let Worker { keys, values, groups, queries, scores, results } = worker;
        let ExpandedShape { rank, nope, .. } = span.shape;
        let (row_dim, head_dim, width) =
            (span.shape.row_dim(), span.shape.head_dim(), span.shape.value_width());
        let operands = span.operands;
        let num_tokens = tokens.len();
        for (index, token) in tokens.clone().enumerate() {
            let own =
                &operands.queries[token * operands.query_width + head * operands.query_stride..][..nope];
            let rotated =
                &operands.absorbed[(token * span.shape.num_heads + head) * row_dim..][rank..row_dim];
            for (d, value) in own.iter().chain(rotated).enumerate() {
                queries[d * num_tokens + index] = value * operands.scale;
            }
        }

        let len = split.end.min(position + num_tokens) - split.start;
        let wide = span.level.has_32_vectors();
        let tile = ScoreTile::<f32> {
            queries: queries.as_ptr(),
            num_rows: num_tokens,
            head_dim,
            k_pool: keys.as_ptr(),
            groups: &groups[..len.div_ceil(LANES)],
            scores: scores[LANES..].as_mut_ptr(),
        };
        // SAFETY: the worker has space for `TILE_TOKENS` tokens and for the keys of a KV split.
        unsafe { tile.compute_all::<V>(wide) };
        let all = 0..len.next_multiple_of(LANES);
        let mut weights = [(0.0, 0.0); TILE_TOKENS];
        for (index, weights) in weights[..num_tokens].iter_mut().enumerate() {
            let scores = &mut scores[index * SCORE_STRIDE + LANES..][..SPLIT + LANES];
            let own = 0..(position + index + 1).saturating_sub(split.start).min(len);
            *weights = weigh::<V>(scores, &all, own);
        }
        let rows = [Run { start: 0, offset: 0, len }];
        let tile = ValueTile::<f32> {
            weights: scores[LANES..].as_ptr(),
            v_pool: values.as_ptr(),
            runs: &rows,
            width,
            values: results.as_mut_ptr(),
            adds: false,
        };
        // SAFETY: as above, and of values.
        unsafe { tile.compute_all::<V>(num_tokens, wide) };

        let is_first = split.start == 0;
        for (index, token) in tokens.enumerate() {
            let (max, sum) = weights[index];
            let split = &results[index * width..][..span.shape.value_dim];
            // SAFETY: the task has this token and head.
            let (result, total) = unsafe { (span.result(out, token, head), span.total(token, head)) };
            if is_first {
                result.copy_from_slice(split);
                total.copy_from_slice(&[max, sum]);
                continue;
            }
            // No position of the split is visible to the token.
            if sum == 0.0 {
                continue;
            }
            let new_max = max.max(total[0]);
            // The largest lane of equal lanes is a lane.
            let old_factor = V::splat(total[0] - new_max).exp().max_lane();
            let factor = V::splat(max - new_max).exp().max_lane();
            for (result, value) in result.iter_mut().zip(split) {
                *result = *result * old_factor + value * factor;
            }
            total.copy_from_slice(&[new_max, total[1] * old_factor + sum * factor]);
        }
    }
}

/// Copies the cache's rows of some positions to the first of `rows`.
fn read_rows(
    cache: CachePools<'_>,
    block_table: &[u32],
    positions: Range<usize>,
    rows: &mut [f32],
    pool: &ThreadPool,
    level: CpuLevel,
) {
    let CachePools { layout, k: k_pool, .. } = cache;
    let rows = RowsMut::new(rows, layout.head_dim);
    let rows = CachedRows { k_pool, layout, block_table, positions, rows: &rows };
    match layout.dtype {
        KvCacheDType::F16 => rows.read::<f16>(pool, level),
        KvCacheDType::Bf16 => rows.read::<bf16>(pool, level),
        KvCacheDType::F32 => rows.read::<f32>(pool, level),
        KvCacheDType::Fp8E4m3 => rows.read::<E4m3>(pool, level),
        KvCacheDType::Q8_0 => rows.read::<Q8_0>(pool, level),
    }
}

struct CachedRows<'a> {
    k_pool: &'a [u8],
    layout: KvLayout,
    block_table: &'a [u32],
    positions: Range<usize>,
    rows: &'a RowsMut<'a>,
}

impl CachedRows<'_> {
    fn read<F: RowFormat>(&self, pool: &ThreadPool, level: CpuLevel) {
        const POSITIONS_PER_TASK: usize = 64;
        pool.run(self.positions.len().div_ceil(POSITIONS_PER_TASK), |task| {
            let start = self.positions.start + task * POSITIONS_PER_TASK;
            let positions = start..self.positions.end.min(start + POSITIONS_PER_TASK);
            level.run(ReadRows::<F> { cached: self, positions, format: PhantomData });
        });
    }
}

/// A format of the cache, for reading.
trait RowFormat {
    /// Values `first..` of the sixteen slots with `slot` of a block, up to sixteen of them.
    ///
    /// # Safety
    /// The pool is laid out so and has the block; see [`F32x16`] for the vector.
    unsafe fn load<V: F32x16>(
        pool: *const u8,
        layout: &KvLayout,
        block: usize,
        slot: usize,
        first: usize,
        values: &mut [[f32; LANES]],
    );
}

impl<E: KvElement> RowFormat for E {
    #[inline(always)]
    unsafe fn load<V: F32x16>(
        pool: *const u8,
        layout: &KvLayout,
        block: usize,
        slot: usize,
        first: usize,
        values: &mut [[f32; LANES]],
    ) {
        let group = pool.cast::<E>().wrapping_add(layout.k_group(block, 0, slot / LANES * LANES));
        for (index, values) in values.iter_mut().enumerate() {
            // SAFETY: a group has sixteen values for each of `head_dim`.
            unsafe { E::load::<V>(group.add((first + index) * LANES)).store(values.as_mut_ptr()) };
        }
    }
}

impl RowFormat for Q8_0 {
    #[inline(always)]
    unsafe fn load<V: F32x16>(
        pool: *const u8,
        layout: &KvLayout,
        block: usize,
        slot: usize,
        first: usize,
        values: &mut [[f32; LANES]],
    ) {
        let sixteen = pool.wrapping_add(q8_0::key_sixteen(layout, block, 0, slot));
        for (first, values) in (first..).step_by(q8_0::WORD).zip(values.chunks_mut(q8_0::WORD)) {
            // SAFETY: the caller's guarantees.
            let word = unsafe { q8_0::load_word::<V>(sixteen, layout, first) };
            for (values, loaded) in values.iter_mut().zip(word) {
                // SAFETY: the array has sixteen values.
                unsafe { loaded.store(values.as_mut_ptr()) };
            }
        }
    }
}

struct ReadRows<'a, F> {
    cached: &'a CachedRows<'a>,
    positions: Range<usize>,
    format: PhantomData<F>,
}

impl<F: RowFormat> Kernel for ReadRows<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<V: F32x16>(self) {
        let Self { cached, positions, .. } = self;
        let layout = cached.layout;
        let mut position = positions.start;
        while position < positions.end {
            let (index, slot) = (position / layout.block_size, position % layout.block_size);
            let first_slot = slot / LANES * LANES;
            let end_slot = (first_slot + LANES).min(layout.block_size).min(slot + positions.end - position);
            let (pool, block) = (cached.k_pool.as_ptr(), cached.block_table[index] as usize);
            for d in (0..layout.head_dim).step_by(LANES) {
                let len = LANES.min(layout.head_dim - d);
                let mut values = [[0.0; LANES]; LANES];
                // SAFETY: the op has checked that the block exists.
                unsafe { F::load::<V>(pool, &layout, block, first_slot, d, &mut values[..len]) };
                for slot_in_block in slot..end_slot {
                    let row = position - cached.positions.start + slot_in_block - slot;
                    // SAFETY: every position belongs to one task.
                    let target = unsafe { cached.rows.range(row, d, len) };
                    for (target, values) in target.iter_mut().zip(&values) {
                        *target = values[slot_in_block - first_slot];
                    }
                }
            }
            position += end_slot - slot;
        }
    }
}
