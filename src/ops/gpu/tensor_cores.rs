//! Launches of products on tensor cores, `few_rows.cu` and `many_rows.cu` of `cuda/kernels`.

use super::Binding;
use super::backend::{GpuBackend, Work};
use super::cost::Cost;
use crate::weights::DType;

/// The form of a product, by the number of rows of activations.
///
/// A row has the same bits in every form of [`Form::Few`], and so in every batch of up to [`MAX_FEW`] rows: the order of
/// additions depends on the matrix only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Form {
    /// Weights go from memory to registers; each is decoded once for all rows of a threadgroup.
    Few {
        /// Tiles of 16 rows of weights that a threadgroup has.
        row_tiles: usize,
        /// Tiles of 8 rows of activations.
        token_tiles: usize,
    },
    /// Tiles of 128 rows of weights by 64, 128 or 256 of activations, which are rounded before.
    Many {
        /// Tiles of 8 rows of activations.
        token_tiles: usize,
    },
}

/// The most rows of activations of [`Form::Few`].
pub(super) const MAX_FEW: usize = 64;

/// Warps of a threadgroup, in either form of the kernel.
const NUM_WARPS: usize = 8;

/// Columns of a chunk of [`Form::Few`], and bytes between two rows of activations in threadgroup memory.
const CHUNK: usize = 512;
const ROW_PADDING: usize = 16;

/// Most bytes of threadgroup memory of [`Form::Few`]: two threadgroups are on a core together.
const MAX_BYTES: usize = 96 << 10;

/// Threadgroups of [`Form::Few`] on a core. More or fewer take more time and compute the same.
const GROUPS_OF_A_CORE: usize = 2;

/// Rows of weights of a tile of [`Form::Many`].
const TILE: usize = 128;

/// Bytes of a row of activations that are in threadgroup memory at a time: a step of 64 columns, six times.
const STAGED_BYTES: usize = 6 * 2 * 64;

/// What a tile of [`Form::Many`] takes beside the products, in rows of activations.
const ROWS_OF_A_START: usize = 32;

impl Form {
    /// Rows of activations of the largest tile.
    pub(super) const MAX_TOKENS: usize = 256;

    /// The form of products of so many rows of activations; none if other kernels compute these.
    pub(super) fn of(gpu: &GpuBackend, format: DType, size: Size) -> Option<Self> {
        let is_here = gpu.tuning().has_tensor_cores() && format != DType::F32;
        // As the kernel is instantiated.
        is_here.then(|| match size.num_rows {
            0..=8 => Self::Few { row_tiles: 1, token_tiles: 1 },
            9..=16 => Self::Few { row_tiles: 2, token_tiles: 2 },
            17..=MAX_FEW => Self::Few { row_tiles: 2, token_tiles: 4 },
            _ => Self::many(size, gpu.device().num_cores(), gpu.device().threadgroup_memory()),
        })
    }

    /// The tiles with which a GPU is done first, if each core computes one at a time.
    ///
    /// It depends on the next power of two of the number of rows, so that all forms that a model takes can be known
    /// before its first step.
    fn many(size: Size, num_cores: usize, threadgroup_memory: usize) -> Self {
        let num_rows = size.num_rows.next_power_of_two();
        let fits = |form: &Self| form.staged_bytes() <= threadgroup_memory;
        let cost = |form: &Self| {
            let num_groups =
                num_rows.div_ceil(form.tokens()) * size.num_results.div_ceil(TILE) * size.num_matrices;
            num_groups.div_ceil(num_cores) * (form.tokens() + ROWS_OF_A_START)
        };
        let forms = [32, 16, 8].map(|token_tiles| Self::Many { token_tiles });
        // Of equal ones the first.
        forms.into_iter().filter(fits).min_by_key(cost).unwrap_or(forms[2])
    }

    /// What the kernels of this form are called, in front of the format and behind it.
    pub(super) fn names(self) -> (&'static str, String) {
        match self {
            Self::Few { token_tiles, .. } => ("few_rows", format!("_{token_tiles}")),
            Self::Many { .. } => ("many_rows", format!("_{}", self.tokens())),
        }
    }

    /// Rows of weights of a threadgroup.
    pub(super) fn rows(self) -> usize {
        match self {
            Self::Few { row_tiles, .. } => 16 * row_tiles,
            Self::Many { .. } => TILE,
        }
    }

    /// Rows of activations of a threadgroup.
    pub(super) fn tokens(self) -> usize {
        match self {
            Self::Few { token_tiles, .. } | Self::Many { token_tiles } => 8 * token_tiles,
        }
    }

    /// Whether it takes activations that are rounded before.
    pub(super) fn is_rounded(self) -> bool {
        matches!(self, Self::Many { .. })
    }

    /// Bytes of threadgroup memory of [`Form::Many`]: activations, and a factor for each row.
    fn staged_bytes(self) -> usize {
        self.tokens() * (STAGED_BYTES + 4)
    }

    /// Bytes of threadgroup memory for sums of slices (twice), squares and factors.
    fn bytes_beside_activations(self) -> usize {
        let Self::Few { token_tiles, .. } = self else { return 0 };
        4 * (2 * NUM_WARPS * 4 * 32 * token_tiles + (NUM_WARPS + 1) * self.tokens())
    }

    /// Bytes of a threadgroup's activations.
    fn activation_bytes(self, shape: Shape) -> usize {
        shape.num_rows.min(self.tokens()) * (2 * shape.num_columns.next_multiple_of(CHUNK) + ROW_PADDING)
    }

    /// Whether a threadgroup has room for all columns of its activations.
    pub(super) fn is_whole(self, shape: Shape) -> bool {
        let bytes = self.bytes_beside_activations() + self.activation_bytes(shape);
        !self.is_rounded() && bytes <= MAX_BYTES
    }

    /// What the kernels of [`Form::Few`] know beforehand: whether there is such room, and whether the last chunk of columns
    /// is not a whole one.
    pub(super) fn flags(self, shape: Shape) -> [bool; 2] {
        match self {
            Self::Few { .. } => [self.is_whole(shape), !shape.num_columns.is_multiple_of(CHUNK)],
            Self::Many { .. } => [false; 2],
        }
    }

    /// Threadgroups for the tiles of a matrix, which go from tile to tile.
    pub(super) fn num_groups(self, shape: Shape, num_cores: usize) -> usize {
        if self.is_rounded() {
            return shape.num_tiles;
        }
        // A step in which nobody wants logits has no rows, and its grid no threadgroups.
        let others = (shape.num_rows.div_ceil(self.tokens()) * shape.num_matrices).max(1);
        shape.num_tiles.min((GROUPS_OF_A_CORE * num_cores).div_ceil(others))
    }

    /// The launch with so many threadgroups for the tiles of a matrix.
    pub(super) fn work<'a>(
        self,
        args: &'a [u8],
        buffers: &'a [Binding<'a>],
        shape: Shape,
        num_groups: usize,
        cost: Cost,
    ) -> Work<'a> {
        let token_groups = shape.num_rows.div_ceil(self.tokens());
        let (threadgroup_memory, grid) = match self {
            Self::Few { .. } if self.is_whole(shape) => {
                (self.bytes_beside_activations() + self.activation_bytes(shape), [num_groups, token_groups])
            }
            Self::Few { .. } => (self.bytes_beside_activations(), [num_groups, token_groups]),
            // Those that are on the GPU together have few weights and many activations, which stay in its cache.
            Self::Many { .. } => (self.staged_bytes(), [token_groups, num_groups]),
        };
        let grid = [grid[0], grid[1], shape.num_matrices];
        Work { args, buffers, threadgroup_memory, grid, num_threads: 32 * NUM_WARPS, cost }
    }
}

/// What the form of a product depends on.
#[derive(Debug, Clone, Copy)]
pub(super) struct Size {
    /// Rows of activations of a matrix.
    pub(super) num_rows: usize,
    /// Rows of weights of a matrix, of a gated product both.
    pub(super) num_results: usize,
    /// Matrices of a stack.
    pub(super) num_matrices: usize,
}

/// What a launch depends on.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    /// Tiles of rows of weights, of a matrix.
    pub(super) num_tiles: usize,
    /// Rows of activations of a matrix.
    pub(super) num_rows: usize,
    /// Matrices of a stack.
    pub(super) num_matrices: usize,
    /// Columns of matrices.
    pub(super) num_columns: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    const FORMS: [Form; 6] = [
        Form::Few { row_tiles: 1, token_tiles: 1 },
        Form::Few { row_tiles: 2, token_tiles: 2 },
        Form::Few { row_tiles: 2, token_tiles: 4 },
        Form::Many { token_tiles: 8 },
        Form::Many { token_tiles: 16 },
        Form::Many { token_tiles: 32 },
    ];

    /// Of an H200.
    const NUM_CORES: usize = 132;
    const MEMORY: usize = 227 << 10;

    fn work(form: Form, shape: Shape) -> ([usize; 3], usize) {
        let work = form.work(&[], &[], shape, form.num_groups(shape, NUM_CORES), Cost::bytes(0));
        (work.grid, work.threadgroup_memory)
    }

    #[test]
    fn every_shape_fits_and_every_tile_has_a_threadgroup() {
        for form in FORMS {
            for num_rows in [0, 1, 8, 13, 64, 1000] {
                for num_columns in [32, 2048, 14336, 1 << 17] {
                    for (num_tiles, num_matrices) in [(1, 1), (8000, 1), (20, 64), (20, 0)] {
                        let shape = Shape { num_tiles, num_rows, num_matrices, num_columns };
                        let (mut grid, bytes) = work(form, shape);
                        if form.is_rounded() {
                            grid.swap(0, 1);
                        }
                        assert!(bytes <= MEMORY && bytes.is_multiple_of(16), "{form:?} {shape:?}: {bytes}");
                        assert!((1..=num_tiles).contains(&grid[0]), "{form:?} {shape:?}: {grid:?}");
                        assert!(grid[1] * form.tokens() >= num_rows, "{form:?} {shape:?}: {grid:?}");
                        assert_eq!(grid[1] == 0, num_rows == 0, "{form:?} {shape:?}: {grid:?}");
                        assert_eq!(grid[2], num_matrices);
                    }
                }
            }
        }
    }

    #[test]
    fn activations_are_kept_where_there_is_room() {
        let shape = |num_rows, num_columns| Shape { num_tiles: 896, num_rows, num_matrices: 1, num_columns };
        let few = FORMS[0];
        assert!(few.is_whole(shape(1, 14336)) && few.is_whole(shape(8, 4096)));
        assert!(!few.is_whole(shape(8, 14336)) && !FORMS[2].is_whole(shape(32, 4096)));
        let (grid, bytes) = work(few, shape(8, 4096));
        assert_eq!((grid, bytes), ([264, 1, 1], 8 * (2 * 4096 + 16) + 4 * (2048 + 72)));
        // As a file's matrices may be: of no whole chunk.
        assert_eq!(work(few, shape(1, 576)).1, 2 * 1024 + 16 + 4 * (2048 + 72));
    }

    #[test]
    fn tiles_fill_the_gpu_and_fit_into_it() {
        let tokens = |num_rows, num_results, memory| {
            let size = Size { num_rows, num_results, num_matrices: 1 };
            let form = Form::many(size, NUM_CORES, memory);
            assert_eq!(
                form,
                Form::many(Size { num_rows: num_rows.next_power_of_two(), ..size }, NUM_CORES, memory)
            );
            form.tokens()
        };
        assert_eq!(tokens(4096, 4096, MEMORY), 256);
        assert_eq!(tokens(3000, 4096, MEMORY), 256);
        assert_eq!(tokens(256, 2560, MEMORY), 64);
        assert_eq!(tokens(4096, 4096, 99 << 10), 128);
        assert_eq!(tokens(4096, 4096, 48 << 10), 64);
    }
}
