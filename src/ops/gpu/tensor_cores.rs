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

/// Bytes of a row of activations of [`Form::Few`] in threadgroup memory: 512 columns.
const CHUNK_BYTES: usize = 2 * 512 + 16;

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

    /// The launch for so many tiles of weights, rows of activations and matrices.
    pub(super) fn work<'a>(
        self,
        args: &'a [u8],
        buffers: &'a [Binding<'a>],
        [num_tiles, num_rows, num_matrices]: [usize; 3],
        cost: Cost,
    ) -> Work<'a> {
        let threadgroup_memory = match self {
            // Two chunks of activations; then, of each warp, four sums of each lane, and a factor for each row.
            Self::Few { token_tiles, .. } => {
                let sums = 4 * NUM_WARPS * 4 * 32 * token_tiles + 4 * self.tokens();
                sums.max(2 * self.tokens() * CHUNK_BYTES)
            }
            // Two tiles of both, and a factor for each row of activations.
            Self::Many => 2 * 2 * 2 * TILE * STRIDE + 4 * TILE,
        };
        Work {
            args,
            buffers,
            threadgroup_memory,
            grid: [num_tiles, num_rows.div_ceil(self.tokens()), num_matrices],
            num_threads: 32 * NUM_WARPS,
            cost,
        }
    }
}
