//! Launches of products on tensor cores, `cuda/kernels/products.cu`.

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
    /// Tiles of 128 rows of weights by as many of activations.
    Many,
}

/// The most rows of activations of [`Form::Few`].
const MAX_FEW: usize = 64;

/// Warps of a threadgroup, in either form of the kernel.
const NUM_WARPS: usize = 8;

/// Columns of a chunk of [`Form::Few`], and bytes between two rows of activations in threadgroup memory.
const CHUNK: usize = 512;
const ROW_PADDING: usize = 16;

/// Most bytes of threadgroup memory.
const MAX_BYTES: usize = 96 << 10;

/// Threadgroups of [`Form::Few`] that are on the GPU together: two on each of 132 multiprocessors. More or fewer take more
/// time and compute the same.
const GROUPS_IN_FLIGHT: usize = 264;

/// Rows of a tile of [`Form::Many`], and halves from one in threadgroup memory to the next.
const TILE: usize = 128;
const STRIDE: usize = 40;

impl Form {
    /// The form for so many rows of activations; none if other kernels compute these.
    pub(super) fn of(gpu: &GpuBackend, format: DType, num_rows: usize) -> Option<Self> {
        let is_here = gpu.tuning().has_tensor_cores() && format != DType::F32;
        // As the kernel is instantiated.
        is_here.then(|| match num_rows {
            0..=8 => Self::Few { row_tiles: 1, token_tiles: 1 },
            9..=16 => Self::Few { row_tiles: 2, token_tiles: 2 },
            17..=MAX_FEW => Self::Few { row_tiles: 2, token_tiles: 4 },
            _ => Self::Many,
        })
    }

    /// What the kernels of this form are called, in front of the format and behind it.
    pub(super) fn names(self) -> (&'static str, String) {
        match self {
            Self::Few { token_tiles, .. } => ("few_rows", format!("_{token_tiles}")),
            Self::Many => ("many_rows", String::new()),
        }
    }

    /// Rows of weights of a threadgroup.
    pub(super) fn rows(self) -> usize {
        match self {
            Self::Few { row_tiles, .. } => 16 * row_tiles,
            Self::Many => TILE,
        }
    }

    /// Rows of activations of a threadgroup.
    pub(super) fn tokens(self) -> usize {
        match self {
            Self::Few { token_tiles, .. } => 8 * token_tiles,
            Self::Many => TILE,
        }
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
        self != Self::Many && bytes <= MAX_BYTES
    }

    /// Threadgroups for the tiles of a matrix, which go from tile to tile.
    pub(super) fn num_groups(self, shape: Shape) -> usize {
        if self == Self::Many {
            return shape.num_tiles;
        }
        let others = shape.num_rows.div_ceil(self.tokens()) * shape.num_matrices;
        shape.num_tiles.min(GROUPS_IN_FLIGHT.div_ceil(others))
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
        let threadgroup_memory = match self {
            Self::Few { .. } if self.is_whole(shape) => {
                self.bytes_beside_activations() + self.activation_bytes(shape)
            }
            Self::Few { .. } => self.bytes_beside_activations(),
            // Two tiles of both, and a factor for each row of activations.
            Self::Many => 2 * 2 * 2 * TILE * STRIDE + 4 * TILE,
        };
        Work {
            args,
            buffers,
            threadgroup_memory,
            grid: [num_groups, shape.num_rows.div_ceil(self.tokens()), shape.num_matrices],
            num_threads: 32 * NUM_WARPS,
            cost,
        }
    }
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
