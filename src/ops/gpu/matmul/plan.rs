//! The plan of a matmul without tensor cores, by its shape: tiles, rows and slices.

use super::layout::UNIT;
use crate::ops::gpu::backend::GpuBackend;
use crate::weights::DType;

/// The number of rows of activations from which tiles of simdgroup matrices are faster than GEMV kernels.
pub(super) const MIN_MATMUL_TOKENS: usize = 5;

/// Rows of a matrix per simdgroup of the GEMV kernels, as instantiated: more if weights are small compared with their
/// activations, fewer if activations fill the registers.
pub(super) fn rows_per_simdgroup(format: DType, columns: usize) -> usize {
    if format.block_len() > 1 && columns < 4 { 4 } else { 2 }
}

/// Simdgroups of a threadgroup that share activations but not rows, as in the kernels.
pub(super) const ROW_GROUPS: usize = 4;

/// Slices of simdgroups that divide the columns of a row among them: enough to have the wanted simdgroups in flight,
/// and at most the number of chunks. It is the same for every number of columns of the result, because it determines
/// the order of additions.
pub(super) fn num_slices(gpu: &GpuBackend, num_rows: usize, num_units: usize) -> usize {
    let wanted = gpu.tuning().simdgroups_in_flight.div_ceil(num_rows.div_ceil(4).max(1));
    wanted.min(num_units.div_ceil(CHUNK_UNITS)).min(MAX_SLICES)
}

/// With four, the activations of four columns would not fit.
pub(super) const MAX_SLICES: usize = 3;

/// Units of a chunk of activations, as in the kernels.
pub(super) const CHUNK_UNITS: usize = 32;

/// Bytes of threadgroup memory of the GEMV kernels, for `values` sums of a simdgroup.
pub(super) fn matvec_memory(num_slices: usize, values: usize, columns: usize) -> usize {
    // The values of a chunk's columns and a sum for each unit; two chunks, if the result has one column.
    let activations = num_slices * columns.max(2) * CHUNK_UNITS * (UNIT + 1);
    let sums = num_slices * ROW_GROUPS * (values + columns);
    4 * activations.max(sums)
}

/// A tile of `metal_kernels/matmul.metal`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tile {
    pub(super) tokens: usize,
    /// Bytes of a decoded weight.
    pub(super) weight_bytes: usize,
}

impl Tile {
    /// Rows of matrices.
    pub(super) const ROWS: usize = 64;
    /// Rows of activations of the largest tile.
    pub(super) const MAX_TOKENS: usize = 32;
    /// The stride of rows in threadgroup memory, in values.
    pub(super) const STRIDE: usize = 2 * UNIT + 8;

    pub(super) fn of(format: DType, last: Option<DType>, rows_each: usize) -> Self {
        let is_wide = |format: DType| matches!(format, DType::BF16 | DType::F32);
        let weight_bytes = if is_wide(format) || last.is_some_and(is_wide) { 4 } else { 2 };
        Self { tokens: rows_each.next_power_of_two().clamp(8, Self::MAX_TOKENS), weight_bytes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_fit_the_rows_and_the_decoded_weights() {
        for rows_each in 1..100 {
            for format in DType::ALL {
                let tile = Tile::of(format, None, rows_each);
                assert!([8, 16, 32].contains(&tile.tokens), "{format} {rows_each}");
                assert!(tile.tokens >= rows_each.min(Tile::MAX_TOKENS), "{format} {rows_each}");
                let is_wide = [DType::BF16, DType::F32].contains(&format);
                assert_eq!(tile.weight_bytes, if is_wide { 4 } else { 2 }, "{format}");
                // The wider of a launch's two formats.
                assert_eq!(Tile::of(format, Some(DType::F32), rows_each).weight_bytes, 4);
            }
        }
    }

    #[test]
    fn activations_of_a_slice_and_its_sums_share_their_memory() {
        for num_slices in 1..=MAX_SLICES {
            for columns in [1, 2, 4] {
                for rows in [1, 2, 4, 8] {
                    let bytes = matvec_memory(num_slices, rows * columns, columns);
                    assert!(bytes >= 4 * num_slices * columns * CHUNK_UNITS * UNIT);
                    assert!(bytes >= 4 * num_slices * ROW_GROUPS * (rows * columns + columns));
                    // The limit of every Apple GPU.
                    assert!(bytes <= 32 << 10, "{bytes}");
                }
            }
        }
    }
}
