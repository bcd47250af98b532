//! Launches of matmuls on tensor cores, `few_rows.cu`, `several_rows.cu` and `many_rows.cu` of `cuda/kernels`.

use super::tiles::Lanes;
use crate::ops::gpu::Binding;
use crate::ops::gpu::backend::{GpuBackend, Work};
use crate::ops::gpu::cost::Cost;
use crate::weights::DType;

/// The variant of a matmul, by the number of rows of activations.
///
/// A row has the same bits in every variant of [`MatmulVariant::Few`] and [`MatmulVariant::Several`], and so in every
/// batch of up to [`MAX_SEVERAL`] rows: the order of additions depends on the matrix only. The same holds within
/// [`MatmulVariant::Many`] for up to [`MAX_SPLIT_ROWS`] rows, and for more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(in crate::ops::gpu) enum MatmulVariant {
    /// Weights are loaded to registers; each is decoded once for all rows of a thread block.
    Few {
        /// Tiles of 8 rows of activations.
        token_tiles: usize,
        /// Chunks of columns in shared memory, in use or loading.
        num_stages: usize,
        /// Groups of eight columns of a row of activations that a thread loads at a time.
        own_eights: usize,
    },
    /// Tiles of 128 rows of weights by all rows of activations, which are packed beforehand.
    Several {
        /// Tiles of 8 rows of activations.
        token_tiles: usize,
        /// K tiles in shared memory, in use or loading.
        num_stages: usize,
        /// Thread blocks that share the columns of a tile (split-K): 1, 2 or 4.
        num_k_splits: usize,
    },
    /// Tiles of 128 rows of weights by 64 to 256 rows of activations, which are packed beforehand.
    Many {
        /// Tiles of 8 rows of activations.
        token_tiles: usize,
        /// Thread blocks that share the columns of a tile (split-K): 1, 2 or 4.
        num_k_splits: usize,
        /// Thread blocks with neighbouring tiles that load the same activations together; 0 if threads copy them.
        cluster: usize,
    },
}

/// The minimum rows of activations of [`MatmulVariant::Several`]: below, [`MatmulVariant::Few`] reads the weights only
/// once.
pub(in crate::ops::gpu) const MIN_SEVERAL: usize = 17;

/// The minimum weights per core for which it pays below 33 rows: for TinyLlama's layers, the launches that pack and
/// reduce took longer on an H200 than a second read of the weights.
const MIN_WEIGHTS_OF_A_CORE: usize = 1 << 17;

/// The maximum rows of activations of [`MatmulVariant::Few`] and [`MatmulVariant::Several`].
pub(in crate::ops::gpu) const MAX_SEVERAL: usize = 64;

/// The maximum rows of activations for which thread blocks of [`MatmulVariant::Many`] may share the columns of a tile,
/// those of the largest tile: more rows have several tiles for each 128 rows of weights.
pub(in crate::ops::gpu) const MAX_SPLIT_ROWS: usize = MatmulVariant::MAX_TOKENS;

/// The maximum number of thread blocks that share the columns of a tile.
pub(in crate::ops::gpu) const MAX_K_SPLITS: usize = 4;

/// Threads of a thread block of the reduce kernel, and its results, as in the kernel.
pub(in crate::ops::gpu) const NUM_REDUCE_THREADS: usize = 256;
pub(in crate::ops::gpu) const REDUCED_RESULTS: usize = 4 * NUM_REDUCE_THREADS;

/// Warps of a thread block: of [`MatmulVariant::Few`], where each is a slice of a row, and of the others.
pub(in crate::ops::gpu) const SLICES: usize = 16;
const NUM_WARPS: usize = 8;

/// Rows of weights of a tile of [`MatmulVariant::Several`] and [`MatmulVariant::Many`].
const TILE: usize = 128;

/// Columns of a step of [`MatmulVariant::Many`], and the number of steps in shared memory.
const STEP: usize = 64;
const STAGES: usize = 6;

/// Thread blocks that load activations together, if these are contiguous and weights need no decoding: with Q4_0, gate
/// and up of 256 rows took 5 to 12 % longer on an H100 than with copies by threads.
const CLUSTER: usize = 2;

/// Rows of activations of its tiles, in eights. With 96 or 224, tiles took longer on an H200 than larger ones.
const TOKEN_TILES: [usize; 4] = [32, 20, 16, 8];

/// The fixed cost of a tile of [`MatmulVariant::Many`], in rows of activations: as measured on an H200 with 2,048 rows
/// of 2,048 and of 5,632 columns.
const ROWS_OF_A_TILE: usize = 320;

/// The cost of the reduce launch, in rows of one column: about 6 µs of an H100.
const REDUCE_COST: usize = 1 << 18;

impl MatmulVariant {
    /// Rows of activations of the largest tile.
    pub(in crate::ops::gpu) const MAX_TOKENS: usize = 256;

    /// The variant for matmuls of this size; none if other kernels compute them.
    pub(in crate::ops::gpu) fn of(gpu: &GpuBackend, format: DType, size: Size) -> Option<Self> {
        let is_here = gpu.tuning().has_tensor_cores() && format != DType::F32;
        let (num_cores, threadgroup_memory) = (gpu.device().num_cores(), gpu.device().threadgroup_memory());
        is_here.then(|| match size.num_rows {
            0..=MAX_SEVERAL => Self::several(size, num_cores, threadgroup_memory)
                .unwrap_or_else(|| Self::few(size, threadgroup_memory)),
            _ => Self::many(format, size, num_cores, threadgroup_memory),
        })
    }

    /// [`MatmulVariant::Several`] for one matrix, if there are enough rows and enough memory.
    fn several(size: Size, num_cores: usize, threadgroup_memory: usize) -> Option<Self> {
        let is_large = size.num_results * size.num_columns >= MIN_WEIGHTS_OF_A_CORE * num_cores;
        let pays = size.num_rows > 32 || size.num_rows >= MIN_SEVERAL && is_large;
        if !pays || !size.is_alone() || size.max_k_splits == 0 {
            return None;
        }
        let num_tiles = size.num_results.div_ceil(TILE);
        // Minimises the time if tiles leave cores idle, in quarters of the time of a tile with all columns.
        let time = |num_k_splits: &usize| {
            (num_tiles * num_k_splits).div_ceil(num_cores) * (MAX_K_SPLITS / num_k_splits)
        };
        let max_k_splits = if num_tiles < num_cores { size.max_k_splits } else { 1 };
        let all_k_splits =
            [1, 2, MAX_K_SPLITS].into_iter().filter(|num_k_splits| *num_k_splits <= max_k_splits);
        let num_k_splits = all_k_splits.min_by_key(time).unwrap_or(1);
        // As the kernel is instantiated.
        let token_tiles = if size.num_rows <= 32 { 4 } else { 8 };
        let variants = [4, 3].map(|num_stages| Self::Several { token_tiles, num_stages, num_k_splits });
        variants.into_iter().find(|variant| variant.several_bytes(size) <= threadgroup_memory)
    }

    /// The most rows of activations and the most stages that fit.
    fn few(size: Size, threadgroup_memory: usize) -> Self {
        let own_eights = size.chunked_columns().div_ceil(8 * 32 * SLICES).clamp(1, 4);
        // As the kernel is instantiated.
        let all: &[usize] = if size.num_rows <= 8 { &[1] } else { &[2, 1] };
        let mut variants = all.iter().flat_map(|&token_tiles| {
            [3, 2].map(|num_stages| Self::Few { token_tiles, num_stages, own_eights })
        });
        let smallest = Self::Few { token_tiles: 1, num_stages: 2, own_eights };
        let fits = |variant: &Self| variant.bytes_without_activations(size) <= threadgroup_memory;
        // Space for all activations is worth more than a third stage.
        let is_whole = |variant: &Self| variant.is_whole(size, threadgroup_memory);
        variants.clone().find(is_whole).or_else(|| variants.find(fits)).unwrap_or(smallest)
    }

    /// The fastest tiles, if each core computes one at a time.
    ///
    /// They depend on the next power of two of the number of rows, so that all variants of a model are known before its
    /// first step. The number of thread blocks that share columns determines the order of additions. It is the same for
    /// all numbers of rows up to [`MAX_SPLIT_ROWS`].
    fn many(format: DType, size: Size, num_cores: usize, threadgroup_memory: usize) -> Self {
        let num_tiles = size.num_results.div_ceil(TILE) * size.num_matrices;
        let cluster = if size.is_alone() && !format.is_quantized() { CLUSTER } else { 0 };
        let best = |num_rows: usize, max_k_splits: usize, min_k_splits: usize| {
            let cost = |variant: &Self| {
                let num_groups = num_rows.div_ceil(variant.tokens()) * num_tiles * variant.num_k_splits();
                let reduce_cost = if variant.num_k_splits() > 1 { REDUCE_COST } else { 0 };
                let columns = size.num_columns.div_ceil(variant.num_k_splits());
                num_groups.div_ceil(num_cores) * (variant.tokens() + ROWS_OF_A_TILE) * columns + reduce_cost
            };
            let all_k_splits = [1, 2, MAX_K_SPLITS]
                .into_iter()
                .filter(|k_splits| (min_k_splits..=max_k_splits).contains(k_splits));
            let variants = all_k_splits.flat_map(|num_k_splits| {
                TOKEN_TILES.map(|token_tiles| Self::Many { token_tiles, num_k_splits, cluster })
            });
            // The first of equal ones.
            let fits = variants.filter(|variant| variant.staged_bytes() <= threadgroup_memory);
            let smallest = TOKEN_TILES[TOKEN_TILES.len() - 1];
            fits.min_by_key(cost).unwrap_or(Self::Many {
                token_tiles: smallest,
                num_k_splits: min_k_splits,
                cluster,
            })
        };
        let num_rows = size.num_rows.next_power_of_two();
        let may_split_k = size.is_alone() && num_rows <= MAX_SPLIT_ROWS && num_tiles < num_cores;
        // Each has at least two steps.
        let max_k_splits =
            if may_split_k { size.max_k_splits.min(size.num_columns.div_ceil(2 * STEP)).max(1) } else { 1 };
        let num_k_splits = best(MAX_SPLIT_ROWS, max_k_splits, 1).num_k_splits();
        best(num_rows, num_k_splits, num_k_splits)
    }

    /// The name of the variant's kernels, before and after the format.
    pub(in crate::ops::gpu) fn names(self) -> (&'static str, String) {
        match self {
            Self::Few { token_tiles, .. } => ("few_rows", format!("_{token_tiles}")),
            Self::Several { token_tiles, .. } => ("several_rows", format!("_{token_tiles}")),
            Self::Many { .. } => ("many_rows", format!("_{}", self.tokens())),
        }
    }

    /// Rows of weights of a thread block.
    pub(in crate::ops::gpu) fn rows(self) -> usize {
        match self {
            Self::Few { .. } => 16,
            Self::Several { .. } | Self::Many { .. } => TILE,
        }
    }

    /// Rows of activations of a thread block.
    pub(in crate::ops::gpu) fn tokens(self) -> usize {
        match self {
            Self::Few { token_tiles, .. }
            | Self::Several { token_tiles, .. }
            | Self::Many { token_tiles, .. } => 8 * token_tiles,
        }
    }

    /// Threads of a thread block.
    pub(in crate::ops::gpu) fn num_threads(self) -> usize {
        match self {
            Self::Few { .. } => 32 * SLICES,
            Self::Several { .. } | Self::Many { .. } => 32 * NUM_WARPS,
        }
    }

    /// The number of thread blocks that share the columns of a tile, and whose partial sums have to be reduced.
    pub(in crate::ops::gpu) fn num_k_splits(self) -> usize {
        match self {
            Self::Few { .. } => 1,
            Self::Several { num_k_splits, .. } | Self::Many { num_k_splits, .. } => num_k_splits,
        }
    }

    /// Bytes of shared memory of [`MatmulVariant::Several`]: activations and weights of some K tiles.
    fn several_bytes(self, size: Size) -> usize {
        let Self::Several { num_stages, .. } = self else { return 0 };
        num_stages * (2 * self.tokens() * size.lanes.columns + 2 * self.num_threads() * size.lanes.bytes)
    }

    /// Bytes of shared memory of [`MatmulVariant::Many`]: activations, a factor for each row, and two barriers for each step.
    fn staged_bytes(self) -> usize {
        self.tokens() * (STAGES * 2 * STEP + 4) + STAGES * 2 * 8
    }

    /// Rows of activations that fit into a thread block of [`MatmulVariant::Few`]: a power of two, so that all kernel
    /// variants of a model are known before its first step.
    fn rows_that_fit(self, size: Size) -> usize {
        size.num_rows.next_power_of_two().min(self.tokens())
    }

    /// Bytes of shared memory of [`MatmulVariant::Few`] for weights in flight, sums of slices (twice for few rows),
    /// squares and factors.
    fn bytes_without_activations(self, size: Size) -> usize {
        let Self::Few { num_stages, token_tiles, .. } = self else { return 0 };
        let ring = num_stages * 2 * SLICES * 32 * size.lanes.bytes;
        // Two buffers for one tile of activations, one for two. Slices are padded to avoid bank conflicts.
        let sums = if token_tiles == 1 { 2 } else { 1 } * SLICES * (16 * self.tokens() + 2);
        ring + 4 * (sums + (SLICES + 1) * self.tokens())
    }

    /// Bytes of a thread block's activations.
    fn activation_bytes(self, size: Size) -> usize {
        // Padded to avoid bank conflicts.
        let padding = if size.lanes.columns == 64 { 16 } else { 64 };
        self.rows_that_fit(size) * (2 * size.chunked_columns() + padding)
    }

    /// Whether all columns of a thread block's activations fit, a compile-time constant of the kernels of
    /// [`MatmulVariant::Few`].
    pub(in crate::ops::gpu) fn is_whole(self, size: Size, threadgroup_memory: usize) -> bool {
        let bytes = self.bytes_without_activations(size) + self.activation_bytes(size);
        matches!(self, Self::Few { .. }) && bytes <= threadgroup_memory
    }

    /// Bytes of a thread block's memory.
    fn bytes(self, size: Size, threadgroup_memory: usize) -> usize {
        match self {
            Self::Few { .. } if self.is_whole(size, threadgroup_memory) => {
                self.bytes_without_activations(size) + self.activation_bytes(size)
            }
            Self::Few { .. } => self.bytes_without_activations(size),
            Self::Several { .. } => self.several_bytes(size),
            Self::Many { .. } => self.staged_bytes(),
        }
    }

    /// Thread blocks for the `num_tiles` tiles of a matrix, or of all groups. Those of [`MatmulVariant::Few`] loop over
    /// tiles, with at most one per core: a second wave of thread blocks would double the time.
    pub(in crate::ops::gpu) fn num_threadgroups(
        self,
        size: Size,
        num_tiles: usize,
        num_cores: usize,
    ) -> usize {
        if !matches!(self, Self::Few { .. }) {
            return num_tiles;
        }
        let (num_tiles, num_stacked) = match size.is_grouped {
            true => (num_tiles * size.num_matrices, 1),
            false => (num_tiles, size.num_matrices),
        };
        // A step without logits has no rows, and its grid would have no thread blocks.
        let others = (size.num_rows.div_ceil(self.tokens()) * num_stacked).max(1);
        num_tiles.min((num_cores / others).max(1))
    }

    /// The launch with this many thread blocks, as [`Self::num_threadgroups`] counts them.
    pub(in crate::ops::gpu) fn work<'a>(
        self,
        args: &'a [u8],
        buffers: &'a [Binding<'a>],
        size: Size,
        num_threadgroups: usize,
        threadgroup_memory: usize,
        cost: Cost,
    ) -> Work<'a> {
        let token_groups = size.num_rows.div_ceil(self.tokens());
        let grid = match self {
            Self::Few { .. } if size.is_grouped => [num_threadgroups, token_groups, 1],
            Self::Few { .. } => [num_threadgroups, token_groups, size.num_matrices],
            Self::Several { num_k_splits, .. } => [num_threadgroups, num_k_splits, 1],
            // Concurrent thread blocks have few weights and many activations, which stay in the L2 cache. The grid's
            // last axis: matrices of a stack, or K splits. The last cluster may have a thread block without a tile.
            Self::Many { num_k_splits, cluster, .. } => {
                let num_threadgroups = num_threadgroups.next_multiple_of(cluster.max(1));
                [token_groups, num_threadgroups, size.num_matrices * num_k_splits]
            }
        };
        let threadgroup_memory = self.bytes(size, threadgroup_memory);
        Work { args, buffers, threadgroup_memory, grid, num_threads: self.num_threads(), cost }
    }
}

/// The division of the thread blocks between the tiles of two formats, at least one each: the fastest, if a tile's time
/// is proportional to its bytes.
pub(in crate::ops::gpu) fn divide_between_formats(
    num_threadgroups: usize,
    tiles: [(usize, DType); 2],
) -> [usize; 2] {
    let num_threadgroups = num_threadgroups.max(2);
    // Of a super-block.
    let bytes = tiles.map(|(_, format)| format.row_bytes(256).unwrap_or(0));
    let time = |shared: &[usize; 2]| {
        let times = [0, 1].map(|index| tiles[index].0.div_ceil(shared[index]) * bytes[index]);
        times[0].max(times[1])
    };
    // Of equal ones, the one with most for the first format.
    let shares = (1..num_threadgroups).rev().map(|first| [first, num_threadgroups - first]);
    let shared = shares.min_by_key(time).unwrap_or([1, 1]);
    [0, 1].map(|index| shared[index].min(tiles[index].0))
}

/// The properties that select the variant of a matmul.
#[derive(Debug, Clone, Copy)]
pub(in crate::ops::gpu) struct Size {
    /// Rows of activations of a matrix.
    pub(in crate::ops::gpu) num_rows: usize,
    /// Rows of weights of a matrix; of a gated matmul, of both.
    pub(in crate::ops::gpu) num_results: usize,
    /// Matrices of a stack, or the maximum number of groups.
    pub(in crate::ops::gpu) num_matrices: usize,
    /// Whether they are those of groups, each with rows of its own.
    pub(in crate::ops::gpu) is_grouped: bool,
    /// Columns of matrices.
    pub(in crate::ops::gpu) num_columns: usize,
    /// A lane's fragment.
    pub(in crate::ops::gpu) lanes: Lanes,
    /// The maximum number of thread blocks that share the columns of a tile; 0 without memory for packed activations.
    pub(in crate::ops::gpu) max_k_splits: usize,
}

impl Size {
    /// Columns of a chunk of [`MatmulVariant::Few`]: a K tile for each warp.
    fn chunk(self) -> usize {
        SLICES * self.lanes.columns
    }

    /// Whether there is only one matrix, so that all rows of activations are adjacent.
    fn is_alone(self) -> bool {
        self.num_matrices == 1 && !self.is_grouped
    }

    /// For a matmul whose columns are not shared, if there is memory for packed activations.
    pub(in crate::ops::gpu) fn without_k_splits(self) -> Self {
        Self { max_k_splits: self.max_k_splits.min(1), ..self }
    }

    /// Columns of all its chunks.
    fn chunked_columns(self) -> usize {
        self.num_columns.next_multiple_of(self.chunk())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of an H200, and of a smaller GPU.
    const NUM_CORES: usize = 132;
    const MEMORY: usize = 227 << 10;
    const SMALL_MEMORY: usize = 99 << 10;

    fn size(format: DType, num_rows: usize, num_columns: usize) -> Size {
        Size {
            num_rows,
            num_results: 4096,
            num_matrices: 1,
            is_grouped: false,
            num_columns,
            lanes: Lanes::of(format, None),
            max_k_splits: MAX_K_SPLITS,
        }
    }

    fn work(variant: MatmulVariant, size: Size, num_tiles: usize, memory: usize) -> ([usize; 3], usize) {
        let num_threadgroups = variant.num_threadgroups(size, num_tiles, NUM_CORES);
        let work = variant.work(&[], &[], size, num_threadgroups, memory, Cost::bytes(0));
        (work.grid, work.threadgroup_memory)
    }

    #[test]
    fn every_shape_fits_and_every_tile_has_a_threadgroup() {
        let has_tiles = |format: &DType| *format != DType::F32;
        for format in DType::ALL.into_iter().filter(has_tiles) {
            for (memory, most_columns) in [(MEMORY, 1 << 16), (SMALL_MEMORY, 14336)] {
                for (num_rows, num_columns) in [0, 1, 8, 13, 64, 1000]
                    .into_iter()
                    .flat_map(|num_rows| [32, 2048, most_columns].map(|num_columns| (num_rows, num_columns)))
                {
                    for (num_tiles, num_matrices) in [(1, 1), (8000, 1), (20, 64), (20, 0)] {
                        let size = Size { num_matrices, ..size(format, num_rows, num_columns) };
                        let variant = match num_rows {
                            0..=MAX_SEVERAL => MatmulVariant::few(size, memory),
                            _ => MatmulVariant::many(format, size, NUM_CORES, memory),
                        };
                        let (mut grid, bytes) = work(variant, size, num_tiles, memory);
                        if matches!(variant, MatmulVariant::Many { .. }) {
                            grid.swap(0, 1);
                        }
                        assert!(bytes <= memory && bytes.is_multiple_of(16), "{variant:?} {size:?}: {bytes}");
                        assert!(
                            (1..=num_tiles.next_multiple_of(CLUSTER)).contains(&grid[0]),
                            "{variant:?} {size:?}: {grid:?}"
                        );
                        assert!(grid[1] * variant.tokens() >= num_rows, "{variant:?} {size:?}: {grid:?}");
                        assert_eq!(grid[1] == 0, num_rows == 0, "{variant:?} {size:?}: {grid:?}");
                        assert_eq!(grid[2], num_matrices);
                    }
                }
            }
        }
    }

    #[test]
    fn no_core_has_a_second_threadgroup_while_others_wait_for_it() {
        // Experts of one token and of many, heads, and rows that take several thread blocks.
        for (num_rows, num_tiles, num_matrices, is_grouped, expected) in [
            (1, 176, 8, true, [132, 1, 1]),
            (8, 128, 98, true, [132, 1, 1]),
            (64, 128, 98, true, [33, 4, 1]),
            (1, 3, 8, true, [24, 1, 1]),
            (1, 20, 0, true, [0, 1, 1]),
            (1, 32, 16, false, [8, 1, 16]),
            (64, 4000, 1, false, [33, 4, 1]),
            (40, 4000, 1, false, [44, 3, 1]),
        ] {
            let size = Size { num_matrices, is_grouped, ..size(DType::Q4_0, num_rows, 2048) };
            let variant = MatmulVariant::few(size, MEMORY);
            assert_eq!(work(variant, size, num_tiles, MEMORY).0, expected, "{size:?}");
        }
    }

    #[test]
    fn tiles_of_two_formats_are_shared_out_by_their_bytes() {
        let shared = |num_threadgroups, first, last| {
            divide_between_formats(num_threadgroups, [(first, DType::Q4K), (last, DType::Q6K)])
        };
        // Q, K and V of 7B models: three tiles of one format take as long as two of the other.
        assert_eq!(shared(132, 320, 64), [100, 32]);
        assert_eq!(shared(132, 144, 16), [116, 16]);
        // At least one each, and at most one per tile.
        assert_eq!(shared(1, 10, 1), [1, 1]);
        assert_eq!(shared(132, 4, 2), [4, 2]);
        assert_eq!(shared(132, 1, 300), [1, 100]);
    }

    #[test]
    fn activations_are_kept_where_they_fit() {
        let variant = |num_rows, num_columns, memory| {
            let size = size(DType::BF16, num_rows, num_columns);
            let variant = MatmulVariant::few(size, memory);
            (variant, variant.is_whole(size, memory))
        };
        let few =
            |token_tiles, num_stages, own_eights| MatmulVariant::Few { token_tiles, num_stages, own_eights };
        assert_eq!(variant(1, 14336, MEMORY), (few(1, 3, 4), true));
        assert_eq!(variant(8, 4096, MEMORY), (few(1, 3, 1), true));
        assert_eq!(variant(8, 14336, MEMORY), (few(1, 3, 4), false));
        assert_eq!(variant(1, 4096, SMALL_MEMORY), (few(1, 2, 1), true));
        // With many rows, not all columns fit; with a few rows, there is more than one round of weights.
        assert_eq!(variant(32, 14336, MEMORY), (few(2, 3, 4), false));
        assert_eq!(variant(32, 5632, MEMORY), (few(1, 3, 2), true));
        let q4_k = size(DType::Q4K, 64, 4096);
        assert_eq!(MatmulVariant::few(q4_k, MEMORY), few(2, 2, 1));
        assert!(few(2, 2, 1).is_whole(q4_k, MEMORY));
        // Sums of slices, and weights of three stages.
        let size = size(DType::BF16, 8, 4096);
        let expected = 4 * (2 * 16 * 130 + 17 * 8) + 3 * 2 * 512 * 32 + 8 * (2 * 4096 + 16);
        assert_eq!(work(few(1, 3, 1), size, 896, MEMORY), ([132, 1, 1], expected));
    }

    #[test]
    fn several_rows_share_weights_where_that_pays() {
        let variant = |num_rows, num_results, num_columns, memory| {
            MatmulVariant::several(
                Size { num_results, ..size(DType::Q4_0, num_rows, num_columns) },
                NUM_CORES,
                memory,
            )
        };
        let several = |token_tiles, num_stages, num_k_splits| {
            Some(MatmulVariant::Several { token_tiles, num_stages, num_k_splits })
        };
        // Of an 8B model: queries, keys and values; both matrices of a gate; down; the head.
        assert_eq!(variant(20, 6144, 4096, MEMORY), several(4, 4, 2));
        assert_eq!(variant(32, 28672, 4096, MEMORY), several(4, 4, 1));
        assert_eq!(variant(33, 4096, 14336, MEMORY), several(8, 4, 4));
        assert_eq!(variant(64, 128_256, 4096, MEMORY), several(8, 4, 1));
        // With few rows, or more rows and a small matrix, weights are read several times.
        assert_eq!(variant(16, 28672, 4096, MEMORY), None);
        assert_eq!(variant(32, 2560, 2048, MEMORY), None);
        assert_eq!(variant(33, 2560, 2048, MEMORY), several(8, 4, 4));
        // The most stages that fit, and one thread block for all columns if there is no space for sums.
        assert_eq!(variant(64, 4096, 4096, SMALL_MEMORY), several(8, 3, 4));
        let alone = Size { num_results: 2560, ..size(DType::Q4_0, 64, 2048) }.without_k_splits();
        assert_eq!(MatmulVariant::several(alone, NUM_CORES, MEMORY), several(8, 4, 1));
        assert_eq!(MatmulVariant::several(Size { max_k_splits: 0, ..alone }, NUM_CORES, MEMORY), None);
        assert_eq!(MatmulVariant::several(Size { num_matrices: 8, ..alone }, NUM_CORES, MEMORY), None);
        let work = several(8, 4, 4).unwrap().work(&[], &[], alone, 20, MEMORY, Cost::bytes(0));
        assert_eq!((work.grid, work.threadgroup_memory), ([20, 4, 1], 4 * (64 * 256 + 2 * 256 * 24)));
    }

    #[test]
    fn tiles_fill_the_gpu_and_fit_into_it() {
        let tokens = |num_rows, num_results, memory| {
            let size = Size { num_results, ..size(DType::Q4_0, num_rows, 4096) };
            let variant = MatmulVariant::many(DType::Q4_0, size, NUM_CORES, memory);
            assert_eq!(
                variant,
                MatmulVariant::many(
                    DType::Q4_0,
                    Size { num_rows: num_rows.next_power_of_two(), ..size },
                    NUM_CORES,
                    memory
                )
            );
            variant.tokens()
        };
        assert_eq!(tokens(4096, 4096, MEMORY), 256);
        assert_eq!(tokens(3000, 4096, MEMORY), 256);
        assert_eq!(tokens(512, 2560, MEMORY), 128);
        assert_eq!(tokens(2048, 2560, MEMORY), 160);
        assert_eq!(tokens(4096, 4096, SMALL_MEMORY), 128);
        assert_eq!(tokens(4096, 4096, 48 << 10), 64);
    }

    #[test]
    fn columns_are_shared_where_there_are_few_tiles_and_not_many_rows() {
        let variant = |num_rows, num_results, num_columns| {
            let size = Size { num_results, ..size(DType::BF16, num_rows, num_columns) };
            let MatmulVariant::Many { token_tiles, num_k_splits, .. } =
                MatmulVariant::many(DType::BF16, size, NUM_CORES, MEMORY)
            else {
                panic!("matmuls of many rows")
            };
            (8 * token_tiles, num_k_splits)
        };
        // Of an 8B model: queries, keys and values; the output projection of attention; both matrices of a gate; down;
        // the head.
        assert_eq!(variant(256, 6144, 4096), (256, 2));
        assert_eq!(variant(256, 4096, 4096), (256, 4));
        assert_eq!(variant(256, 28672, 4096), (256, 1));
        assert_eq!(variant(256, 4096, 14336), (256, 4));
        assert_eq!(variant(256, 128_256, 4096), (256, 1));
        // A row has the same bits in every batch for which columns may be shared.
        assert_eq!(variant(65, 4096, 4096), (128, 4));
        assert_eq!(variant(65, 4096, 14336), (128, 4));
        assert_eq!(variant(257, 4096, 14336), (128, 1));
        // The most K splits that memory allows, and for one matrix only.
        let size = size(DType::BF16, 256, 4096);
        let k_splits = |size| MatmulVariant::many(DType::BF16, size, NUM_CORES, MEMORY).num_k_splits();
        assert_eq!(k_splits(Size { max_k_splits: 2, ..size }), 2);
        assert_eq!(k_splits(size.without_k_splits()), 1);
        assert_eq!(k_splits(Size { num_matrices: 8, ..size }), 1);
        assert_eq!(k_splits(Size { is_grouped: true, ..size }), 1);
        let work = MatmulVariant::many(DType::BF16, size, NUM_CORES, MEMORY).work(
            &[],
            &[],
            size,
            32,
            MEMORY,
            Cost::bytes(0),
        );
        assert_eq!(work.grid, [1, 32, 4]);
    }

    #[test]
    fn neighbours_bring_activations_together_where_these_do_and_weights_are_dense() {
        let cluster = |format, num_matrices| {
            let size = Size { num_matrices, ..size(format, 256, 4096) };
            let MatmulVariant::Many { cluster, .. } = MatmulVariant::many(format, size, NUM_CORES, MEMORY)
            else {
                panic!("matmuls of many rows")
            };
            cluster
        };
        assert_eq!([DType::F16, DType::Q4_0, DType::Q6K].map(|format| cluster(format, 1)), [CLUSTER, 0, 0]);
        assert_eq!(cluster(DType::F16, 8), 0);
    }
}
