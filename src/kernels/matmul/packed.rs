//! A weight matrix in the layout that the kernels read.

use std::sync::{Arc, OnceLock};

use super::file::{MatrixFile, Slot};
use super::layout::{self, TILE_ROWS};
use crate::blocks::repack;
use crate::memory::{AlignedBuffer, SharedPointer};
use crate::pool::ThreadPool;
use crate::simd::CpuLevel;
use crate::{DType, Error, ErrorKind, FileType, Result};

/// A weight matrix of `rows` outputs and `cols` inputs, at the size that its type has in files.
///
/// Rows are padded to a multiple of sixteen, columns of BF16 to a multiple of two; there is no other padding.
pub struct PackedMatrix {
    dtype: DType,
    rows: usize,
    cols: usize,
    pub(super) tiles: Tiles,
}

/// The storage of the tiles, which kernels do not see.
pub(super) enum Tiles {
    Memory(AlignedBuffer),
    File(Arc<MatrixFile>, Slot),
}

impl Tiles {
    pub(super) fn as_slice(&self) -> &[u8] {
        match self {
            Self::Memory(buffer) => buffer.as_slice(),
            Self::File(file, slot) => file.bytes(slot.range.clone()),
        }
    }
}

impl std::fmt::Debug for PackedMatrix {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PackedMatrix({} {} × {})", self.dtype, self.rows, self.cols)
    }
}

impl PackedMatrix {
    /// Packs the row-major `bytes` of a file, reading them once and in order, as the type that `file_type` is kept as.
    ///
    /// The layout is the same at every level today; `level` is the level that the matrix will be used at.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidModel`] if a row is not a whole number of blocks or `bytes` has another size
    /// than `rows × cols` values, [`ErrorKind::Capacity`] if there is no memory for the copy.
    pub fn pack(
        file_type: impl Into<FileType>,
        bytes: &[u8],
        rows: usize,
        cols: usize,
        pool: &ThreadPool,
        level: CpuLevel,
    ) -> Result<Self> {
        let _ = level;
        let file_type = file_type.into();
        let dtype = file_type.kept_as();
        check_size(file_type, bytes.len(), rows, cols)?;
        let mut tiles = Self::packed_bytes(dtype, rows, cols)
            .and_then(AlignedBuffer::zeroed)
            .ok_or_else(|| no_memory(bytes.len()))?;
        Self::pack_into(file_type, bytes, rows, cols, tiles.as_mut_slice(), pool)?;
        Ok(Self { dtype, rows, cols, tiles: Tiles::Memory(tiles) })
    }

    /// The matrix whose tiles are at `slot` of a file.
    pub(super) fn in_file(dtype: DType, rows: usize, cols: usize, file: Arc<MatrixFile>, slot: Slot) -> Self {
        Self { dtype, rows, cols, tiles: Tiles::File(file, slot) }
    }

    /// Bytes of all tiles.
    pub(super) fn packed_bytes(dtype: DType, rows: usize, cols: usize) -> Option<usize> {
        tile_row_bytes(dtype, cols)?.checked_mul(rows.div_ceil(TILE_ROWS))
    }

    /// Packs the row-major `bytes` of a file into `tiles`, which are [`Self::packed_bytes`] long.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidModel`] as [`Self::pack`].
    pub(super) fn pack_into(
        file_type: FileType,
        bytes: &[u8],
        rows: usize,
        cols: usize,
        tiles: &mut [u8],
        pool: &ThreadPool,
    ) -> Result<()> {
        let dtype = file_type.kept_as();
        let (row_bytes, kept_bytes) =
            (check_size(file_type, bytes.len(), rows, cols)?, dtype.row_bytes(cols)?);
        let tile_row_bytes = tile_row_bytes(dtype, cols).unwrap_or(0);
        let num_tile_rows = rows.div_ceil(TILE_ROWS);
        if tiles.len() != tile_row_bytes * num_tile_rows {
            return Err(Error::internal(format!("{} bytes for the tiles of {rows} × {cols}", tiles.len())));
        }
        if row_bytes == 0 {
            return Ok(());
        }
        let has_odd_column = !cols.is_multiple_of(layout::tile_cols(dtype));
        let target = SharedPointer::new(tiles.as_mut_ptr());
        let failure = OnceLock::new();
        pool.run(num_tile_rows, |tile_row| {
            // SAFETY: there are `num_tile_rows` of these ranges, and each task takes its own.
            let tiles = unsafe {
                std::slice::from_raw_parts_mut(target.get().add(tile_row * tile_row_bytes), tile_row_bytes)
            };
            if has_odd_column || rows < (tile_row + 1) * TILE_ROWS {
                // The value of padding rows and columns; the memory may have been used before.
                tiles.fill(0);
            }
            let rows = bytes.chunks_exact(row_bytes).skip(tile_row * TILE_ROWS).take(TILE_ROWS);
            if file_type == FileType::Kept(dtype) {
                for (lane, row) in rows.enumerate() {
                    layout::pack_row(dtype, row, tiles, lane);
                }
                return;
            }
            let mut kept = vec![0; kept_bytes];
            for (lane, row) in rows.enumerate() {
                match repack(file_type, dtype, row, &mut kept) {
                    Ok(()) => layout::pack_row(dtype, &kept, tiles, lane),
                    Err(error) => drop(failure.set(error)),
                }
            }
        });
        failure.into_inner().map_or(Ok(()), Err)
    }

    /// Outputs.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Inputs.
    #[must_use]
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The type that it is kept as.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Bytes of memory, or of the file.
    #[must_use]
    pub fn num_bytes(&self) -> usize {
        match &self.tiles {
            Tiles::Memory(buffer) => buffer.len(),
            Tiles::File(_, slot) => slot.range.len(),
        }
    }

    /// Whether the tiles are in a [`MatrixFile`].
    #[must_use]
    pub fn is_in_file(&self) -> bool {
        matches!(self.tiles, Tiles::File(..))
    }

    /// Starts to read the bytes that are not in memory, without waiting.
    pub fn fetch(&self) {
        if let Tiles::File(file, slot) = &self.tiles {
            file.fetch(slot.range.clone());
        }
    }

    /// Compares tiles in a file with their checksum, once in a process. Whoever multiplies with a matrix that may be in
    /// a file has to call it first.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidModel`] naming the file, if it is damaged.
    pub fn check(&self) -> Result<()> {
        match &self.tiles {
            Tiles::Memory(_) => Ok(()),
            Tiles::File(file, slot) => file.check(slot),
        }
    }

    /// Writes the values of row `row`, exactly those of the file, into `out`.
    ///
    /// # Panics
    /// If there is no such row, or `out` does not have the length of a row.
    pub fn dequantize_row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.rows, "row {row} of a matrix of {} rows", self.rows);
        assert_eq!(out.len(), self.cols, "a row has {} columns", self.cols);
        let tile_row_bytes = self.tile_row_bytes();
        let tiles = &self.tiles.as_slice()[row / TILE_ROWS * tile_row_bytes..][..tile_row_bytes];
        let tiles = tiles.chunks_exact(layout::tile_bytes(self.dtype));
        for (tile, out) in tiles.zip(out.chunks_mut(layout::tile_cols(self.dtype))) {
            layout::unpack_tile(self.dtype, tile, row % TILE_ROWS, out);
        }
    }

    /// Groups of sixteen rows.
    pub(super) fn num_tile_rows(&self) -> usize {
        self.rows.div_ceil(TILE_ROWS)
    }

    /// Tiles of a group of rows.
    pub(super) fn tiles_per_row(&self) -> usize {
        self.cols.div_ceil(layout::tile_cols(self.dtype))
    }

    /// Bytes of a group of rows.
    pub(super) fn tile_row_bytes(&self) -> usize {
        self.tiles_per_row() * layout::tile_bytes(self.dtype)
    }

    /// The first tile of a group of rows.
    pub(super) fn tile_row(&self, tile_row: usize) -> *const u8 {
        debug_assert!(tile_row < self.num_tile_rows());
        self.tiles.as_slice().as_ptr().wrapping_add(tile_row * self.tile_row_bytes())
    }
}

/// Bytes of a row in the file, if all rows have `num_bytes`.
fn check_size(file_type: FileType, num_bytes: usize, rows: usize, cols: usize) -> Result<usize> {
    let row_bytes = file_type.row_bytes(cols)?;
    if row_bytes.checked_mul(rows) == Some(num_bytes) {
        return Ok(row_bytes);
    }
    Err(Error::invalid_model(format!(
        "a {rows} × {cols} matrix of {file_type} does not have {num_bytes} bytes"
    )))
}

fn tile_row_bytes(dtype: DType, cols: usize) -> Option<usize> {
    cols.div_ceil(layout::tile_cols(dtype)).checked_mul(layout::tile_bytes(dtype))
}

fn no_memory(len: usize) -> Error {
    Error::new(ErrorKind::Capacity, format!("no memory for {len} bytes of weights"))
        .with_hint("use a smaller or a more strongly quantised model")
}
