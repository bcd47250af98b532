//! Launches of products on tensor cores, `few_rows.cu`, `several_rows.cu` and `many_rows.cu` of `cuda/kernels`.

use super::tiles::Lanes;
use crate::ops::gpu::Binding;
use crate::ops::gpu::backend::{GpuBackend, Work};
use crate::ops::gpu::cost::Cost;
use crate::weights::DType;

/// The form of a product, by the number of rows of activations.
///
/// A row has the same bits in every form of [`Form::Few`] and [`Form::Several`], and so in every batch of up to [`MAX_SEVERAL`]
/// rows: the order of additions depends on the matrix only. So it does in [`Form::Many`] for up to [`MAX_SHARED`] rows, and for
/// more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(in crate::ops::gpu) enum Form {
    /// Weights go from memory to registers; each is decoded once for all rows of a threadgroup.
    Few {
        /// Tiles of 8 rows of activations.
        token_tiles: usize,
        /// Chunks of columns that are in threadgroup memory or on their way there.
        num_stages: usize,
        /// Times eight columns of a row of activations that a thread brings at a time.
        own_eights: usize,
    },
    /// Tiles of 128 rows of weights by all of activations, which are rounded before.
    Several {
        /// Tiles of 8 rows of activations.
        token_tiles: usize,
        /// Pieces of columns that are in threadgroup memory or on their way there.
        num_stages: usize,
        /// Threadgroups that share the columns of a tile: 1, 2 or 4.
        num_parts: usize,
    },
    /// Tiles of 128 rows of weights by 64 to 256 of activations, which are rounded before.
    Many {
        /// Tiles of 8 rows of activations.
        token_tiles: usize,
        /// Threadgroups that share the columns of a tile: 1, 2 or 4.
        num_parts: usize,
        /// Threadgroups with neighbouring tiles that bring the same activations together; 0 if threads copy them.
        cluster: usize,
    },
}

/// The fewest rows of activations of [`Form::Several`]: [`Form::Few`] would read the weights twice.
pub(in crate::ops::gpu) const MIN_SEVERAL: usize = 17;

/// The fewest weights for each core with which that pays for less than 33 rows: with those of TinyLlama's layers, the launches
/// that round and add up took longer on an H200 than the second reading.
const MIN_WEIGHTS_OF_A_CORE: usize = 1 << 17;

/// The most rows of activations of [`Form::Few`] and [`Form::Several`].
pub(in crate::ops::gpu) const MAX_SEVERAL: usize = 64;

/// The most rows of activations for which the threadgroups of [`Form::Many`] may share the columns of a tile. It is those of
/// the largest tile: of more rows there are several tiles for each 128 rows of weights.
pub(in crate::ops::gpu) const MAX_SHARED: usize = Form::MAX_TOKENS;

/// The most threadgroups that share the columns of a tile.
pub(in crate::ops::gpu) const MAX_PARTS: usize = 4;

/// Threads of a threadgroup that adds up what those leave, and results of it, as in the kernel.
pub(in crate::ops::gpu) const NUM_ADDING_THREADS: usize = 256;
pub(in crate::ops::gpu) const ADDED_RESULTS: usize = 4 * NUM_ADDING_THREADS;

/// Warps of a threadgroup of [`Form::Few`], which are slices of a row, and of the others.
pub(in crate::ops::gpu) const SLICES: usize = 16;
const NUM_WARPS: usize = 8;

/// Rows of weights of a tile of [`Form::Several`] and [`Form::Many`].
const TILE: usize = 128;

/// Columns of a step of [`Form::Many`], and how many steps are in threadgroup memory at a time.
const STEP: usize = 64;
const STAGES: usize = 6;

/// Threadgroups that bring activations together, where they lie together and weights need no decoding: with Q4_0, gate and up
/// of 256 rows took 5 to 12 % longer on an H100 than with threads that copy them.
const CLUSTER: usize = 2;

/// Rows of activations of its tiles, in eights. With 96 or 224, tiles took longer on an H200 than larger ones.
const TOKEN_TILES: [usize; 4] = [32, 20, 16, 8];

/// What a tile of [`Form::Many`] takes whatever it has of activations, in rows of these: as measured on an H200 with 2,048
/// rows of 2,048 and of 5,632 columns.
const ROWS_OF_A_TILE: usize = 320;

/// What the launch takes that adds up the sums of shared tiles, in rows of one column: about 6 µs of an H100.
const COST_OF_ADDING: usize = 1 << 18;

impl Form {
    /// Rows of activations of the largest tile.
    pub(in crate::ops::gpu) const MAX_TOKENS: usize = 256;

    /// The form of products of so many rows of activations; none if other kernels compute these.
    pub(in crate::ops::gpu) fn of(gpu: &GpuBackend, format: DType, size: Size) -> Option<Self> {
        let is_here = gpu.tuning().has_tensor_cores() && format != DType::F32;
        let (num_cores, threadgroup_memory) = (gpu.device().num_cores(), gpu.device().threadgroup_memory());
        is_here.then(|| match size.num_rows {
            0..=MAX_SEVERAL => Self::several(size, num_cores, threadgroup_memory)
                .unwrap_or_else(|| Self::few(size, threadgroup_memory)),
            _ => Self::many(format, size, num_cores, threadgroup_memory),
        })
    }

    /// [`Form::Several`] for one matrix, where there are so many rows and there is room.
    fn several(size: Size, num_cores: usize, threadgroup_memory: usize) -> Option<Self> {
        let is_large = size.num_results * size.num_columns >= MIN_WEIGHTS_OF_A_CORE * num_cores;
        let pays = size.num_rows > 32 || size.num_rows >= MIN_SEVERAL && is_large;
        if !pays || !size.is_alone() || size.max_parts == 0 {
            return None;
        }
        let num_tiles = size.num_results.div_ceil(TILE);
        // What is done first if tiles leave cores idle, in quarters of the time that one takes for all columns of a tile.
        let time = |num_parts: &usize| (num_tiles * num_parts).div_ceil(num_cores) * (MAX_PARTS / num_parts);
        let max_parts = if num_tiles < num_cores { size.max_parts } else { 1 };
        let all_parts = [1, 2, MAX_PARTS].into_iter().filter(|num_parts| *num_parts <= max_parts);
        let num_parts = all_parts.min_by_key(time).unwrap_or(1);
        // As the kernel is instantiated.
        let token_tiles = if size.num_rows <= 32 { 4 } else { 8 };
        let forms = [4, 3].map(|num_stages| Self::Several { token_tiles, num_stages, num_parts });
        forms.into_iter().find(|form| form.several_bytes(size) <= threadgroup_memory)
    }

    /// As many rows of activations together as there are and as there is room for, and as many stages.
    fn few(size: Size, threadgroup_memory: usize) -> Self {
        let own_eights = size.chunked_columns().div_ceil(8 * 32 * SLICES).clamp(1, 4);
        // As the kernel is instantiated.
        let all: &[usize] = if size.num_rows <= 8 { &[1] } else { &[2, 1] };
        let mut forms = all.iter().flat_map(|&token_tiles| {
            [3, 2].map(|num_stages| Self::Few { token_tiles, num_stages, own_eights })
        });
        let smallest = Self::Few { token_tiles: 1, num_stages: 2, own_eights };
        let fits = |form: &Self| form.bytes_beside_activations(size) <= threadgroup_memory;
        // Room for all activations is worth more than a third stage.
        let is_whole = |form: &Self| form.is_whole(size, threadgroup_memory);
        forms.clone().find(is_whole).or_else(|| forms.find(fits)).unwrap_or(smallest)
    }

    /// The tiles with which a GPU is done first, if each core computes one at a time.
    ///
    /// It depends on the next power of two of the number of rows, so that all forms that a model takes can be known
    /// before its first step. How many threadgroups share columns, and so the order of additions, is the same for all numbers of
    /// rows for which it may be several.
    fn many(format: DType, size: Size, num_cores: usize, threadgroup_memory: usize) -> Self {
        let num_tiles = size.num_results.div_ceil(TILE) * size.num_matrices;
        let cluster = if size.is_alone() && !format.is_quantized() { CLUSTER } else { 0 };
        let best = |num_rows: usize, max_parts: usize, min_parts: usize| {
            let cost = |form: &Self| {
                let num_groups = num_rows.div_ceil(form.tokens()) * num_tiles * form.num_parts();
                let adding = if form.num_parts() > 1 { COST_OF_ADDING } else { 0 };
                let columns = size.num_columns.div_ceil(form.num_parts());
                num_groups.div_ceil(num_cores) * (form.tokens() + ROWS_OF_A_TILE) * columns + adding
            };
            let all_parts =
                [1, 2, MAX_PARTS].into_iter().filter(|parts| (min_parts..=max_parts).contains(parts));
            let forms = all_parts.flat_map(|num_parts| {
                TOKEN_TILES.map(|token_tiles| Self::Many { token_tiles, num_parts, cluster })
            });
            // Of equal ones the first.
            let fits = forms.filter(|form| form.staged_bytes() <= threadgroup_memory);
            let smallest = TOKEN_TILES[TOKEN_TILES.len() - 1];
            fits.min_by_key(cost).unwrap_or(Self::Many {
                token_tiles: smallest,
                num_parts: min_parts,
                cluster,
            })
        };
        let num_rows = size.num_rows.next_power_of_two();
        let may_share = size.is_alone() && num_rows <= MAX_SHARED && num_tiles < num_cores;
        // Each has two steps at least.
        let max_parts =
            if may_share { size.max_parts.min(size.num_columns.div_ceil(2 * STEP)).max(1) } else { 1 };
        let num_parts = best(MAX_SHARED, max_parts, 1).num_parts();
        best(num_rows, num_parts, num_parts)
    }

    /// What the kernels of this form are called, in front of the format and behind it.
    pub(in crate::ops::gpu) fn names(self) -> (&'static str, String) {
        match self {
            Self::Few { token_tiles, .. } => ("few_rows", format!("_{token_tiles}")),
            Self::Several { token_tiles, .. } => ("several_rows", format!("_{token_tiles}")),
            Self::Many { .. } => ("many_rows", format!("_{}", self.tokens())),
        }
    }

    /// Rows of weights of a threadgroup.
    pub(in crate::ops::gpu) fn rows(self) -> usize {
        match self {
            Self::Few { .. } => 16,
            Self::Several { .. } | Self::Many { .. } => TILE,
        }
    }

    /// Rows of activations of a threadgroup.
    pub(in crate::ops::gpu) fn tokens(self) -> usize {
        match self {
            Self::Few { token_tiles, .. }
            | Self::Several { token_tiles, .. }
            | Self::Many { token_tiles, .. } => 8 * token_tiles,
        }
    }

    /// Threads of a threadgroup.
    pub(in crate::ops::gpu) fn num_threads(self) -> usize {
        match self {
            Self::Few { .. } => 32 * SLICES,
            Self::Several { .. } | Self::Many { .. } => 32 * NUM_WARPS,
        }
    }

    /// How many threadgroups share the columns of a tile, so that their sums are still to be added up.
    pub(in crate::ops::gpu) fn num_parts(self) -> usize {
        match self {
            Self::Few { .. } => 1,
            Self::Several { num_parts, .. } | Self::Many { num_parts, .. } => num_parts,
        }
    }

    /// Bytes of threadgroup memory of [`Form::Several`]: activations and weights of some pieces.
    fn several_bytes(self, size: Size) -> usize {
        let Self::Several { num_stages, .. } = self else { return 0 };
        num_stages * (2 * self.tokens() * size.lanes.columns + 2 * self.num_threads() * size.lanes.bytes)
    }

    /// Bytes of threadgroup memory of [`Form::Many`]: activations, a factor for each row, and two barriers for each step.
    fn staged_bytes(self) -> usize {
        self.tokens() * (STAGES * 2 * STEP + 4) + STAGES * 2 * 8
    }

    /// Rows of activations that a threadgroup of [`Form::Few`] has room for: a power of two, so that all variants of a
    /// kernel that a model takes can be known before its first step.
    fn rows_with_room(self, size: Size) -> usize {
        size.num_rows.next_power_of_two().min(self.tokens())
    }

    /// Bytes of threadgroup memory of [`Form::Few`] for weights on their way, sums of slices (of few rows twice), squares and
    /// factors.
    fn bytes_beside_activations(self, size: Size) -> usize {
        let Self::Few { num_stages, token_tiles, .. } = self else { return 0 };
        let ring = num_stages * 2 * SLICES * 32 * size.lanes.bytes;
        // Twice those of one tile of activations, once those of two. Slices are as far apart as banks want it.
        let sums = if token_tiles == 1 { 2 } else { 1 } * SLICES * (16 * self.tokens() + 2);
        ring + 4 * (sums + (SLICES + 1) * self.tokens())
    }

    /// Bytes of a threadgroup's activations.
    fn activation_bytes(self, size: Size) -> usize {
        // As far apart as banks want it.
        let padding = if size.lanes.columns == 64 { 16 } else { 64 };
        self.rows_with_room(size) * (2 * size.chunked_columns() + padding)
    }

    /// Whether a threadgroup has room for all columns of its activations, which the kernels of [`Form::Few`] know
    /// beforehand.
    pub(in crate::ops::gpu) fn is_whole(self, size: Size, threadgroup_memory: usize) -> bool {
        let bytes = self.bytes_beside_activations(size) + self.activation_bytes(size);
        matches!(self, Self::Few { .. }) && bytes <= threadgroup_memory
    }

    /// Bytes of a threadgroup's memory.
    fn bytes(self, size: Size, threadgroup_memory: usize) -> usize {
        match self {
            Self::Few { .. } if self.is_whole(size, threadgroup_memory) => {
                self.bytes_beside_activations(size) + self.activation_bytes(size)
            }
            Self::Few { .. } => self.bytes_beside_activations(size),
            Self::Several { .. } => self.several_bytes(size),
            Self::Many { .. } => self.staged_bytes(),
        }
    }

    /// Threadgroups for the `num_tiles` tiles of a matrix, or of [`Form::Few`] for those of all groups. There they go from
    /// tile to tile, and no core has more than one of them: those that begin when others end would double the time.
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
        // A step in which nobody wants logits has no rows, and its grid no threadgroups.
        let others = (size.num_rows.div_ceil(self.tokens()) * num_stacked).max(1);
        num_tiles.min((num_cores / others).max(1))
    }

    /// The launch with so many threadgroups, as [`Self::num_threadgroups`] counts them.
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
            Self::Several { num_parts, .. } => [num_threadgroups, num_parts, 1],
            // Those that are on the GPU together have few weights and many activations, which stay in its cache.
            // Matrices of a stack, or parts. The last cluster may have a threadgroup without a tile.
            Self::Many { num_parts, cluster, .. } => {
                let num_threadgroups = num_threadgroups.next_multiple_of(cluster.max(1));
                [token_groups, num_threadgroups, size.num_matrices * num_parts]
            }
        };
        let threadgroup_memory = self.bytes(size, threadgroup_memory);
        Work { args, buffers, threadgroup_memory, grid, num_threads: self.num_threads(), cost }
    }
}

/// How many of the threadgroups have the tiles of each of two formats, at least one: as many as are done first, if the time of
/// a tile is that of its bytes.
pub(in crate::ops::gpu) fn share_out(num_threadgroups: usize, tiles: [(usize, DType); 2]) -> [usize; 2] {
    let num_threadgroups = num_threadgroups.max(2);
    // Of a super-block.
    let bytes = tiles.map(|(_, format)| format.row_bytes(256).unwrap_or(0));
    let time = |shared: &[usize; 2]| {
        let times = [0, 1].map(|index| tiles[index].0.div_ceil(shared[index]) * bytes[index]);
        times[0].max(times[1])
    };
    // Of equal ones the one with most for the first format.
    let shares = (1..num_threadgroups).rev().map(|first| [first, num_threadgroups - first]);
    let shared = shares.min_by_key(time).unwrap_or([1, 1]);
    [0, 1].map(|index| shared[index].min(tiles[index].0))
}

/// What the form of a product depends on.
#[derive(Debug, Clone, Copy)]
pub(in crate::ops::gpu) struct Size {
    /// Rows of activations of a matrix.
    pub(in crate::ops::gpu) num_rows: usize,
    /// Rows of weights of a matrix, of a gated product both.
    pub(in crate::ops::gpu) num_results: usize,
    /// Matrices of a stack, or groups that there may be.
    pub(in crate::ops::gpu) num_matrices: usize,
    /// Whether they are those of groups, each with rows of its own.
    pub(in crate::ops::gpu) is_grouped: bool,
    /// Columns of matrices.
    pub(in crate::ops::gpu) num_columns: usize,
    /// What a lane has of them.
    pub(in crate::ops::gpu) lanes: Lanes,
    /// How many threadgroups may share the columns of a tile, 0 if there is no memory for rounded activations.
    pub(in crate::ops::gpu) max_parts: usize,
}

impl Size {
    /// Columns of a chunk of [`Form::Few`]: a piece for each warp.
    fn chunk(self) -> usize {
        SLICES * self.lanes.columns
    }

    /// Whether it is of one matrix, so that all rows of activations lie together.
    fn is_alone(self) -> bool {
        self.num_matrices == 1 && !self.is_grouped
    }

    /// Of a product whose columns are not shared, if there is memory for rounded activations at all.
    pub(in crate::ops::gpu) fn with_one_part(self) -> Self {
        Self { max_parts: self.max_parts.min(1), ..self }
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
            max_parts: MAX_PARTS,
        }
    }

    fn work(form: Form, size: Size, num_tiles: usize, memory: usize) -> ([usize; 3], usize) {
        let num_threadgroups = form.num_threadgroups(size, num_tiles, NUM_CORES);
        let work = form.work(&[], &[], size, num_threadgroups, memory, Cost::bytes(0));
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
                        let form = match num_rows {
                            0..=MAX_SEVERAL => Form::few(size, memory),
                            _ => Form::many(format, size, NUM_CORES, memory),
                        };
                        let (mut grid, bytes) = work(form, size, num_tiles, memory);
                        if matches!(form, Form::Many { .. }) {
                            grid.swap(0, 1);
                        }
                        assert!(bytes <= memory && bytes.is_multiple_of(16), "{form:?} {size:?}: {bytes}");
                        assert!(
                            (1..=num_tiles.next_multiple_of(CLUSTER)).contains(&grid[0]),
                            "{form:?} {size:?}: {grid:?}"
                        );
                        assert!(grid[1] * form.tokens() >= num_rows, "{form:?} {size:?}: {grid:?}");
                        assert_eq!(grid[1] == 0, num_rows == 0, "{form:?} {size:?}: {grid:?}");
                        assert_eq!(grid[2], num_matrices);
                    }
                }
            }
        }
    }

    #[test]
    fn no_core_has_a_second_threadgroup_while_others_wait_for_it() {
        // Experts of one token and of many, heads, and rows that take several threadgroups.
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
            let form = Form::few(size, MEMORY);
            assert_eq!(work(form, size, num_tiles, MEMORY).0, expected, "{size:?}");
        }
    }

    #[test]
    fn tiles_of_two_formats_are_shared_out_by_their_bytes() {
        let shared = |num_threadgroups, first, last| {
            share_out(num_threadgroups, [(first, DType::Q4K), (last, DType::Q6K)])
        };
        // Q, K and V of 7B models: three tiles of one format take as long as two of the other.
        assert_eq!(shared(132, 320, 64), [100, 32]);
        assert_eq!(shared(132, 144, 16), [116, 16]);
        // Never none, and never more than tiles.
        assert_eq!(shared(1, 10, 1), [1, 1]);
        assert_eq!(shared(132, 4, 2), [4, 2]);
        assert_eq!(shared(132, 1, 300), [1, 100]);
    }

    #[test]
    fn activations_are_kept_where_there_is_room() {
        let form = |num_rows, num_columns, memory| {
            let size = size(DType::BF16, num_rows, num_columns);
            let form = Form::few(size, memory);
            (form, form.is_whole(size, memory))
        };
        let few = |token_tiles, num_stages, own_eights| Form::Few { token_tiles, num_stages, own_eights };
        assert_eq!(form(1, 14336, MEMORY), (few(1, 3, 4), true));
        assert_eq!(form(8, 4096, MEMORY), (few(1, 3, 1), true));
        assert_eq!(form(8, 14336, MEMORY), (few(1, 3, 4), false));
        assert_eq!(form(1, 4096, SMALL_MEMORY), (few(1, 2, 1), true));
        // Of many rows all columns have no room, and those of a few have more than one turn of weights.
        assert_eq!(form(32, 14336, MEMORY), (few(2, 3, 4), false));
        assert_eq!(form(32, 5632, MEMORY), (few(1, 3, 2), true));
        let q4_k = size(DType::Q4K, 64, 4096);
        assert_eq!(Form::few(q4_k, MEMORY), few(2, 2, 1));
        assert!(few(2, 2, 1).is_whole(q4_k, MEMORY));
        // Sums of slices, and weights of three stages.
        let size = size(DType::BF16, 8, 4096);
        let expected = 4 * (2 * 16 * 130 + 17 * 8) + 3 * 2 * 512 * 32 + 8 * (2 * 4096 + 16);
        assert_eq!(work(few(1, 3, 1), size, 896, MEMORY), ([132, 1, 1], expected));
    }

    #[test]
    fn several_rows_share_weights_where_that_pays() {
        let form = |num_rows, num_results, num_columns, memory| {
            Form::several(Size { num_results, ..size(DType::Q4_0, num_rows, num_columns) }, NUM_CORES, memory)
        };
        let several =
            |token_tiles, num_stages, num_parts| Some(Form::Several { token_tiles, num_stages, num_parts });
        // Of an 8B model: queries, keys and values; both matrices of a gate; down; the head.
        assert_eq!(form(20, 6144, 4096, MEMORY), several(4, 4, 2));
        assert_eq!(form(32, 28672, 4096, MEMORY), several(4, 4, 1));
        assert_eq!(form(33, 4096, 14336, MEMORY), several(8, 4, 4));
        assert_eq!(form(64, 128_256, 4096, MEMORY), several(8, 4, 1));
        // Of few rows, and of not many and a small matrix, weights are read as often as it takes.
        assert_eq!(form(16, 28672, 4096, MEMORY), None);
        assert_eq!(form(32, 2560, 2048, MEMORY), None);
        assert_eq!(form(33, 2560, 2048, MEMORY), several(8, 4, 4));
        // As many stages as there is room for, and one threadgroup for all columns where sums have no place.
        assert_eq!(form(64, 4096, 4096, SMALL_MEMORY), several(8, 3, 4));
        let alone = Size { num_results: 2560, ..size(DType::Q4_0, 64, 2048) }.with_one_part();
        assert_eq!(Form::several(alone, NUM_CORES, MEMORY), several(8, 4, 1));
        assert_eq!(Form::several(Size { max_parts: 0, ..alone }, NUM_CORES, MEMORY), None);
        assert_eq!(Form::several(Size { num_matrices: 8, ..alone }, NUM_CORES, MEMORY), None);
        let work = several(8, 4, 4).unwrap().work(&[], &[], alone, 20, MEMORY, Cost::bytes(0));
        assert_eq!((work.grid, work.threadgroup_memory), ([20, 4, 1], 4 * (64 * 256 + 2 * 256 * 24)));
    }

    #[test]
    fn tiles_fill_the_gpu_and_fit_into_it() {
        let tokens = |num_rows, num_results, memory| {
            let size = Size { num_results, ..size(DType::Q4_0, num_rows, 4096) };
            let form = Form::many(DType::Q4_0, size, NUM_CORES, memory);
            assert_eq!(
                form,
                Form::many(
                    DType::Q4_0,
                    Size { num_rows: num_rows.next_power_of_two(), ..size },
                    NUM_CORES,
                    memory
                )
            );
            form.tokens()
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
        let form = |num_rows, num_results, num_columns| {
            let size = Size { num_results, ..size(DType::BF16, num_rows, num_columns) };
            let Form::Many { token_tiles, num_parts, .. } = Form::many(DType::BF16, size, NUM_CORES, MEMORY)
            else {
                panic!("products of many rows")
            };
            (8 * token_tiles, num_parts)
        };
        // Of an 8B model: queries, keys and values; what attention gives; both matrices of a gate; down; the head.
        assert_eq!(form(256, 6144, 4096), (256, 2));
        assert_eq!(form(256, 4096, 4096), (256, 4));
        assert_eq!(form(256, 28672, 4096), (256, 1));
        assert_eq!(form(256, 4096, 14336), (256, 4));
        assert_eq!(form(256, 128_256, 4096), (256, 1));
        // A row has the same bits in every batch in which they may be shared.
        assert_eq!(form(65, 4096, 4096), (128, 4));
        assert_eq!(form(65, 4096, 14336), (128, 4));
        assert_eq!(form(257, 4096, 14336), (128, 1));
        // As many parts as there is memory for, and of one matrix only.
        let size = size(DType::BF16, 256, 4096);
        let parts = |size| Form::many(DType::BF16, size, NUM_CORES, MEMORY).num_parts();
        assert_eq!(parts(Size { max_parts: 2, ..size }), 2);
        assert_eq!(parts(size.with_one_part()), 1);
        assert_eq!(parts(Size { num_matrices: 8, ..size }), 1);
        assert_eq!(parts(Size { is_grouped: true, ..size }), 1);
        let work =
            Form::many(DType::BF16, size, NUM_CORES, MEMORY).work(&[], &[], size, 32, MEMORY, Cost::bytes(0));
        assert_eq!(work.grid, [1, 32, 4]);
    }

    #[test]
    fn neighbours_bring_activations_together_where_these_do_and_weights_are_dense() {
        let cluster = |format, num_matrices| {
            let size = Size { num_matrices, ..size(format, 256, 4096) };
            let Form::Many { cluster, .. } = Form::many(format, size, NUM_CORES, MEMORY) else {
                panic!("products of many rows")
            };
            cluster
        };
        assert_eq!([DType::F16, DType::Q4_0, DType::Q6K].map(|format| cluster(format, 1)), [CLUSTER, 0, 0]);
        assert_eq!(cluster(DType::F16, 8), 0);
    }
}
