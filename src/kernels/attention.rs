//! Attention of a step's tokens over their block tables.
//!
//! The context of a token is split at fixed absolute positions, every `SPLIT` tokens. Each split gives a partial result
//! (largest score, sum, weighted values), computed in the order of the positions, and the partial results are merged in
//! ascending order. So a token's result has the same bits for every rest of the step, every chunking of its prompt,
//! every block size and every number of threads.
//!
//! Work is divided into tiles: up to `TILE_ROWS` pairs of a token and a query head that share one key and value head,
//! so that K and V are read once for all of them. If there are fewer tiles than the threads need, each KV split becomes
//! a task. With only one key head, as in latent attention, groups of its query heads become tasks too.

pub mod expanded;
mod kernel;
mod latent;
mod quantized;
mod value_tile;

use std::ops::Range;
use std::ptr;
use std::sync::Mutex;

use half::{bf16, f16};

use self::kernel::{CachedFormat, KvSplit, Merge, Partial, Source, TileScratch};
use crate::AlignedFloats;
use crate::AttentionMetadata;
use crate::fp8::E4m3;
use crate::paged_cache::{CachePools, KvCacheDType};
use crate::pool::ThreadPool;
use crate::q8_0::Q8_0;
use crate::simd::CpuLevel;

/// Positions between two cuts of the context.
const SPLIT: usize = 256;
/// Rows that a tile may have, unless one token has more heads for a key head.
const TILE_ROWS: usize = 32;
/// Tasks for each thread below which the context is divided as well.
const TASKS_PER_THREAD: usize = 4;

/// The heads of attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionHeads {
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Values of a query and of a key head.
    pub head_dim: usize,
    /// Values of a value head: `head_dim`, or fewer if values are the first ones of keys.
    pub value_dim: usize,
}

impl AttentionHeads {
    /// Heads whose values are as wide as their keys.
    #[must_use]
    pub fn new(num_heads: usize, num_kv_heads: usize, head_dim: usize) -> Self {
        Self { num_heads, num_kv_heads, head_dim, value_dim: head_dim }
    }

    /// Query heads that share a key head.
    #[must_use]
    pub fn group(self) -> usize {
        self.num_heads / self.num_kv_heads.max(1)
    }

    /// Whether values are the first ones of keys.
    #[must_use]
    pub fn is_latent(self) -> bool {
        self.value_dim != self.head_dim
    }
}

/// Attention of one layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionSpec<'a> {
    /// Its heads.
    pub heads: AttentionHeads,
    /// The factor of scores.
    pub scale: f32,
    /// A token attends to itself and the `window - 1` tokens before it.
    pub window: Option<usize>,
    /// Scores become `soft_cap · tanh(score / soft_cap)`.
    pub soft_cap: Option<f32>,
    /// For each query head, a score without a value that is included in the softmax.
    pub sinks: Option<&'a [f32]>,
}

/// Memory for [`paged_attention`], allocated once.
pub struct AttentionScratch {
    heads: AttentionHeads,
    tiles: Vec<Tile>,
    max_tiles: usize,
    /// One for each thread; a task takes any that is free.
    workers: Vec<Mutex<TileScratch>>,
    /// Partial results, if the context is divided: `[tile][kv_head][split][row]`.
    partials: AlignedFloats,
}

/// Some consecutive tokens of one row of the step.
#[derive(Debug, Clone, Copy)]
struct Tile {
    row: usize,
    first_token: usize,
    num_tokens: usize,
    /// Position of the first token in its sequence.
    first_position: usize,
    /// First split of the context that any of the tokens attends to, and the end.
    first_split: usize,
    end_split: usize,
}

impl AttentionScratch {
    /// Memory for steps of at most `max_num_tokens` tokens in at most `max_num_rows` rows, with contexts
    /// of at most `max_model_len`.
    #[must_use]
    pub fn new(
        heads: AttentionHeads,
        max_num_tokens: usize,
        max_num_rows: usize,
        max_model_len: usize,
        num_threads: usize,
    ) -> Self {
        let group = heads.group();
        let rows = tile_tokens(group) * group;
        let max_tiles = max_num_tokens.div_ceil(tile_tokens(group)) + max_num_rows;
        // Only steps with few tiles split the context, and their tiles mostly have one token. Only used memory is
        // touched.
        let divided_tiles = (TASKS_PER_THREAD * num_threads).div_ceil(heads.num_kv_heads);
        let partials = divided_tiles
            * heads.num_heads
            * max_model_len.div_ceil(SPLIT)
            * kernel::partial_len(heads.value_dim);
        Self {
            heads,
            tiles: Vec::with_capacity(max_tiles),
            max_tiles,
            workers: (0..num_threads).map(|_| Mutex::new(TileScratch::new(rows, heads))).collect(),
            partials: AlignedFloats::zeroed(partials),
        }
    }
}

impl std::fmt::Debug for AttentionScratch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "AttentionScratch({:?}, {} tiles at most)", self.heads, self.max_tiles)
    }
}

/// Writes the attention of all tokens of the step.
///
/// `queries` has `query_stride` values for each token and begins with the query heads, rotated but not scaled; `out`
/// has `num_heads · value_dim` values for each token. The keys and values of the step's tokens are already in the
/// cache. Expanded rows of latent attention are left out.
///
/// Returns the number of parallel regions that were run: 1, or 2 if partial results had to be merged.
///
/// # Safety
/// The lists of `metadata` fit together and name blocks that the pools have; heads of the cache and of `scratch` are those
/// of `spec`, with a sink for each if there are any; `queries` and `out` have rows for all tokens of the step.
#[expect(clippy::too_many_arguments, reason = "a kernel's operands")]
pub unsafe fn paged_attention(
    scratch: &mut AttentionScratch,
    spec: AttentionSpec<'_>,
    queries: &[f32],
    query_stride: usize,
    cache: CachePools<'_>,
    metadata: &AttentionMetadata,
    out: &mut [f32],
    pool: &ThreadPool,
    level: CpuLevel,
) -> usize {
    match cache.layout.dtype {
        KvCacheDType::F16 => {
            typed::<f16>(scratch, spec, queries, query_stride, cache, metadata, out, pool, level)
        }
        KvCacheDType::Bf16 => {
            typed::<bf16>(scratch, spec, queries, query_stride, cache, metadata, out, pool, level)
        }
        KvCacheDType::F32 => {
            typed::<f32>(scratch, spec, queries, query_stride, cache, metadata, out, pool, level)
        }
        KvCacheDType::Fp8E4m3 => {
            typed::<E4m3>(scratch, spec, queries, query_stride, cache, metadata, out, pool, level)
        }
        KvCacheDType::Q8_0 => {
            typed::<Q8_0>(scratch, spec, queries, query_stride, cache, metadata, out, pool, level)
        }
    }
}

#[expect(clippy::too_many_arguments, reason = "as above")]
fn typed<F: CachedFormat>(
    scratch: &mut AttentionScratch,
    spec: AttentionSpec<'_>,
    queries: &[f32],
    query_stride: usize,
    cache: CachePools<'_>,
    metadata: &AttentionMetadata,
    out: &mut [f32],
    pool: &ThreadPool,
    level: CpuLevel,
) -> usize {
    let heads = spec.heads;
    let group = heads.group();
    fill_tiles(&mut scratch.tiles, spec, metadata);
    let tiles = &scratch.tiles[..];
    let num_tiles = tiles.len();
    let source = Source::<F> {
        queries: queries.as_ptr(),
        query_stride,
        k_pool: cache.k.as_ptr().cast(),
        v_pool: cache.v.map_or(ptr::null(), |v| v.as_ptr().cast()),
        layout: cache.layout,
        spec,
    };
    let out_rows = OutputRows { start: out.as_mut_ptr(), spec };
    let with_scratch = |work: &mut dyn FnMut(&mut TileScratch)| with_free(&scratch.workers, work);
    let max_splits = tiles.iter().map(|tile| tile.end_split - tile.first_split).max().unwrap_or(0);
    let num_groups_per_kv_head = match heads.num_kv_heads {
        1 => num_groups_per_kv_head(group, num_tiles * max_splits, pool.num_threads()),
        _ => 1,
    };
    // A task's heads: this many query heads, all of one key head.
    let (heads_each, num_head_groups) =
        (group / num_groups_per_kv_head, heads.num_kv_heads * num_groups_per_kv_head);
    let heads_of = |head_group: usize| head_group * heads_each..(head_group + 1) * heads_each;
    let split = |tile: &Tile, head_group: usize, index: usize| KvSplit {
        tokens: tile.first_token..tile.first_token + tile.num_tokens,
        first_position: tile.first_position,
        kv_head: head_group / num_groups_per_kv_head,
        heads: heads_of(head_group),
        block_table: metadata.block_table(tile.row),
        start: index * SPLIT,
    };

    let tile_rows = tiles.iter().map(|tile| tile.num_tokens).max().unwrap_or(0) * heads_each;
    let partial_len = kernel::partial_len(heads.value_dim);
    let num_partials = num_tiles * num_head_groups * max_splits * tile_rows;
    let divide = max_splits > 1
        && pool.num_threads() > 1
        && num_tiles * num_head_groups < TASKS_PER_THREAD * pool.num_threads()
        && num_partials * partial_len <= scratch.partials.len();
    if !divide {
        pool.run(num_tiles * num_head_groups, |task| {
            let (tile, head_group) = (&tiles[task / num_head_groups], task % num_head_groups);
            with_scratch(&mut |scratch| {
                let num_rows = tile.num_tokens * heads_each;
                scratch.start(num_rows);
                for index in tile.first_split..tile.end_split {
                    let split = split(tile, head_group, index);
                    partial(&source, &split, index == tile.first_split, scratch, level);
                    level.run(Merge { scratch, num_rows, value_dim: heads.value_dim, partials: None });
                }
                out_rows.write(tile, heads_of(head_group), scratch);
            });
        });
        return 1;
    }

    let partials = SharedPointer(scratch.partials.as_mut_ptr());
    let slot = |tile: usize, head_group: usize, index: usize| {
        ((tile * num_head_groups + head_group) * max_splits + index) * tile_rows * partial_len
    };
    pool.run(num_tiles * num_head_groups * max_splits, |task| {
        let (index, task) = (task % max_splits, task / max_splits);
        let (tile_index, head_group) = (task / num_head_groups, task % num_head_groups);
        let tile = &tiles[tile_index];
        if tile.first_split + index >= tile.end_split {
            return;
        }
        with_scratch(&mut |scratch| {
            let split = split(tile, head_group, tile.first_split + index);
            partial(&source, &split, true, scratch, level);
            // SAFETY: every task has a slot of its own, and all slots are in `partials` as checked above.
            let target = unsafe {
                std::slice::from_raw_parts_mut(
                    partials.get().add(slot(tile_index, head_group, index)),
                    tile.num_tokens * heads_each * partial_len,
                )
            };
            scratch.save_partial(tile.num_tokens * heads_each, target);
        });
    });
    pool.run(num_tiles * num_head_groups, |task| {
        let (tile_index, head_group) = (task / num_head_groups, task % num_head_groups);
        let tile = &tiles[tile_index];
        with_scratch(&mut |scratch| {
            let num_rows = tile.num_tokens * heads_each;
            scratch.start(num_rows);
            for index in 0..tile.end_split - tile.first_split {
                // SAFETY: as above; the tasks that wrote here have ended.
                let saved = unsafe {
                    std::slice::from_raw_parts(
                        partials.get().add(slot(tile_index, head_group, index)),
                        num_rows * partial_len,
                    )
                };
                level.run(Merge { scratch, num_rows, value_dim: heads.value_dim, partials: Some(saved) });
            }
            out_rows.write(tile, heads_of(head_group), scratch);
        });
    });
    2
}

/// Computes a KV split of a tile into its scratch.
fn partial<F: CachedFormat>(
    source: &Source<'_, F>,
    split: &KvSplit<'_>,
    is_first: bool,
    scratch: &mut TileScratch,
    level: CpuLevel,
) {
    let partial = Partial { source, split, is_first, scratch, wide: level.has_32_vectors() };
    if F::IN_BYTES { level.run_int8(partial) } else { level.run(partial) }
}

/// The number of groups of the key head's query heads, each of which reads the keys again: as many as the threads need,
/// with at least four heads each.
fn num_groups_per_kv_head(group: usize, num_tasks: usize, num_threads: usize) -> usize {
    const MIN_HEADS: usize = 4;
    let wanted = (TASKS_PER_THREAD * num_threads).div_ceil(num_tasks.max(1));
    let most = if num_threads > 1 { wanted.min(group / MIN_HEADS) } else { 1 };
    (1..=most).rev().find(|num| group.is_multiple_of(*num)).unwrap_or(1)
}

/// Tokens of a tile with `group` query heads for a key head.
fn tile_tokens(group: usize) -> usize {
    (TILE_ROWS / group).max(1)
}

fn fill_tiles(tiles: &mut Vec<Tile>, spec: AttentionSpec<'_>, metadata: &AttentionMetadata) {
    let (group, is_latent) = (spec.heads.group(), spec.heads.is_latent());
    tiles.clear();
    for row in 0..metadata.num_rows() {
        if is_latent && metadata.is_expanded(row) {
            continue;
        }
        let (start, end) = (metadata.query_start_loc[row], metadata.query_start_loc[row + 1]);
        let row_position = metadata.seq_lens[row] - (end - start);
        for first_token in (start..end).step_by(tile_tokens(group)) {
            let num_tokens = tile_tokens(group).min(end - first_token);
            let first_position = row_position + first_token - start;
            let oldest = spec.window.map_or(0, |window| (first_position + 1).saturating_sub(window));
            tiles.push(Tile {
                row,
                first_token,
                num_tokens,
                first_position,
                first_split: oldest / SPLIT,
                end_split: (first_position + num_tokens).div_ceil(SPLIT),
            });
        }
    }
}

/// Lends one of the scratch areas, of which there is one for each thread.
fn with_free<T>(workers: &[Mutex<T>], work: &mut dyn FnMut(&mut T)) {
    loop {
        for worker in workers {
            let guard = match worker.try_lock() {
                Ok(guard) => Some(guard),
                // A task that panicked leaves numbers that the next one overwrites.
                Err(std::sync::TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
                Err(std::sync::TryLockError::WouldBlock) => None,
            };
            if let Some(mut scratch) = guard {
                work(&mut scratch);
                return;
            }
        }
        std::thread::yield_now();
    }
}

/// A pointer that tasks share; each writes to a range of its own.
#[derive(Clone, Copy)]
struct SharedPointer(*mut f32);

impl SharedPointer {
    fn get(self) -> *mut f32 {
        self.0
    }
}

// SAFETY: tasks use disjoint ranges, see the uses.
unsafe impl Send for SharedPointer {}
// SAFETY: as above.
unsafe impl Sync for SharedPointer {}

/// Where the results go: `[token][head][value_dim]`.
struct OutputRows<'a> {
    start: *mut f32,
    spec: AttentionSpec<'a>,
}

// SAFETY: every task has its own tokens and heads, so that tasks write disjoint ranges.
unsafe impl Sync for OutputRows<'_> {}

impl OutputRows<'_> {
    fn write(&self, tile: &Tile, heads: Range<usize>, scratch: &TileScratch) {
        let AttentionHeads { num_heads, value_dim, .. } = self.spec.heads;
        for token in 0..tile.num_tokens {
            for (index, head) in heads.clone().enumerate() {
                let row = (tile.first_token + token) * num_heads + head;
                // SAFETY: the caller of `paged_attention` gave `num_heads · value_dim` values for each
                // token, and this token and head belong to this task alone.
                let out =
                    unsafe { std::slice::from_raw_parts_mut(self.start.add(row * value_dim), value_dim) };
                scratch.read_result(
                    token * heads.len() + index,
                    self.spec.sinks.map(|sinks| sinks[head]),
                    out,
                );
            }
        }
    }
}
