//! How weights lie in a GPU's memory: the writer of what `metal_kernels/formats.h` reads, and the place of what
//! `tiles.rs` writes for GPUs with tensor cores.
//!
//! A matrix is a few planes, one after the other, each in the order of rows and of columns within a row, so that
//! neighbouring lanes read neighbouring bytes, in words as wide as a unit of sixteen weights. Together they have
//! the size of the file's blocks.
//!
//! | plane | bytes | of each |
//! |---|---|---|
//! | codes | 8, or 16 for 8-bit codes | unit: nibbles in order, or bytes with 128 added |
//! | high bits | 2 for 5-bit codes, 4 for 6-bit codes | unit: one or two bits a weight, in the order of [`HIGH_BITS`] |
//! | scales | 2 or 4 | 32 weights: f16 scale, f16 minimum |
//! | scales of `Q4_K`, `Q5_K` | 16 | 256 weights: f16 scale, f16 minimum; per 32 weights a byte with the low four bits of the scale and of the minimum; per 64 weights a byte with the high two bits of both scales and minima |
//! | scales of `Q6_K` | 1 | unit: i8 |
//! | super-scales of `Q6_K` | 2 | 256 weights: f16 |
//!
//! Dense types stay as they are in the file.

use std::borrow::Cow;
use std::sync::{Mutex, OnceLock};

use bytemuck::{Pod, Zeroable};

use super::tiles::{self, TILE_ROWS};
use crate::ops::cpu::pool::ThreadPool;
use crate::weights::{DType, FileType, blocks};
use crate::{Error, Result};

/// Weights that a lane reads together.
pub(super) const UNIT: usize = 16;

/// The order of the high bits of a unit. A kernel takes pairs of nibbles out of a word together, one from each half
/// of it, and finds their high bits at the same places of the two halves.
const HIGH_BITS: [usize; UNIT] = [0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15];

/// Rows of a task.
const ROWS_PER_TASK: usize = 16;

/// Where the planes behind the codes begin, in steps of 16 bytes. `Planes` of the kernels.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Planes {
    high: u32,
    scales: u32,
    super_scales: u32,
}

impl Planes {
    pub(super) const NONE: Self = Self { high: 0, scales: 0, super_scales: 0 };

    #[cfg(test)]
    pub(super) fn scales(self) -> usize {
        self.scales as usize
    }
}

/// The type that a GPU keeps weights of `dtype` as: its own where there are kernels for it, otherwise one that has the same
/// values.
#[must_use]
pub fn stored_as(dtype: DType) -> DType {
    match dtype {
        DType::Iq4Nl => DType::Q8_0,
        DType::Q3K => DType::Q6K,
        DType::Q2K | DType::Iq4Xs | DType::Mxfp4 | DType::Q8S => DType::F32,
        _ => dtype,
    }
}

/// Bytes of 256 weights in each plane.
#[derive(Debug, Clone, Copy)]
struct PlaneBytes {
    codes: usize,
    high: usize,
    scales: usize,
    super_scales: usize,
}

impl PlaneBytes {
    fn of(dtype: DType) -> Self {
        let (codes, high, scales, super_scales) = match stored_as(dtype) {
            // The others are not kept.
            DType::F32
            | DType::Q2K
            | DType::Q3K
            | DType::Iq4Nl
            | DType::Iq4Xs
            | DType::Mxfp4
            | DType::Q8S => (1024, 0, 0, 0),
            DType::F16 | DType::BF16 => (512, 0, 0, 0),
            DType::Q4_0 | DType::Q4K => (128, 0, 16, 0),
            DType::Q4_1 => (128, 0, 32, 0),
            DType::Q5_0 | DType::Q5K => (128, 32, 16, 0),
            DType::Q5_1 => (128, 32, 32, 0),
            DType::Q8_0 => (256, 0, 16, 0),
            DType::Q6K => (128, 64, 16, 2),
        };
        Self { codes, high, scales, super_scales }
    }

    fn all(self) -> [usize; 4] {
        [self.codes, self.high, self.scales, self.super_scales]
    }
}

/// What lies together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    /// Rows, one after the other.
    Rows,
    /// Tiles of a few rows and columns, as tensor cores take them; see `tiles.rs`.
    Tiles,
}

/// The planes of a matrix, or of a stack of them: where each begins and how long it is, in bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Layout {
    order: Order,
    dtype: DType,
    rows: usize,
    cols: usize,
    begins: [usize; 4],
    num_bytes: usize,
}

impl Layout {
    /// For a matrix whose rows are whole blocks of `dtype`, one that a GPU keeps, and whole units.
    pub(super) fn new(order: Order, dtype: DType, rows: usize, cols: usize) -> Self {
        Self::of_stack(order, dtype, rows, cols, 1)
    }

    /// The same for `num_matrices`, one behind the other in each plane.
    pub(super) fn of_stack(
        order: Order,
        dtype: DType,
        rows: usize,
        cols: usize,
        num_matrices: usize,
    ) -> Self {
        // Products in single precision are those of all GPUs.
        let order = if dtype == DType::F32 { Order::Rows } else { order };
        let mut layout = Self { order, dtype, rows, cols, begins: [0; 4], num_bytes: 0 };
        for plane in 0..4 {
            layout.begins[plane] = layout.num_bytes;
            layout.num_bytes += (num_matrices * layout.plane_bytes(plane)).next_multiple_of(UNIT);
        }
        layout
    }

    /// Bytes of a matrix in plane `plane`.
    fn plane_bytes(&self, plane: usize) -> usize {
        match self.order {
            Order::Rows => self.rows * self.cols * PlaneBytes::of(self.dtype).all()[plane] / 256,
            Order::Tiles => {
                self.rows.div_ceil(TILE_ROWS) * tiles::row_of_tiles_bytes(self.dtype, self.cols)[plane]
            }
        }
    }

    /// The type that kernels find: weights of tensor cores become halves at last, and those of [`DType::BF16`] do so at once.
    pub(super) fn stored(&self) -> DType {
        match (self.order, self.dtype) {
            (Order::Tiles, DType::BF16) => DType::F16,
            (_, dtype) => dtype,
        }
    }

    /// Whether the file's bytes of a dense type are what lies in memory.
    pub(super) fn is_as_in_file(&self) -> bool {
        self.order == Order::Rows && self.dtype.block_len() == 1
    }

    /// Whether it is in tiles.
    pub(super) fn is_tiled(&self) -> bool {
        self.order == Order::Tiles
    }

    /// Bytes of all planes.
    pub(super) fn num_bytes(&self) -> usize {
        self.num_bytes
    }

    /// The offsets that kernels get.
    pub(super) fn planes(&self) -> Planes {
        let [_, high, scales, super_scales] = self.begins.map(|begin| (begin / 16) as u32);
        Planes { high, scales, super_scales }
    }

    /// Repacks the rows of a file, which are of `file_type`. `target` has [`Self::num_bytes`].
    ///
    /// # Errors
    /// [`crate::ErrorKind::Internal`] if they are not exact in the type of the layout.
    pub(super) fn pack(
        &self,
        file_type: FileType,
        source: &[u8],
        target: &mut [u8],
        pool: &ThreadPool,
    ) -> Result<()> {
        let source_row = file_type.row_bytes(self.cols)?;
        if source_row == 0 {
            return Ok(());
        }
        if !blocks::can_repack(file_type, self.dtype) {
            return Err(Error::internal(format!("{file_type} is not exact in {}", self.dtype)));
        }
        let (codes, rest) = target.split_at_mut(self.begins[1]);
        let (high, rest) = rest.split_at_mut(self.begins[2] - self.begins[1]);
        let (scales, super_scales) = rest.split_at_mut(self.begins[3] - self.begins[2]);
        let mut planes = [codes, high, scales, super_scales].map(Some);
        // Each task has its own part of each plane.
        let tasks: Vec<_> = source
            .chunks(ROWS_PER_TASK * source_row)
            .map(|source| {
                let part = Self { rows: source.len() / source_row, ..*self };
                let targets = [0, 1, 2, 3].map(|plane| {
                    let rest = planes[plane].take().unwrap_or_default();
                    let (own, rest) = rest.split_at_mut(part.plane_bytes(plane));
                    planes[plane] = Some(rest);
                    own
                });
                Mutex::new((source, targets))
            })
            .collect();
        let failure = OnceLock::new();
        pool.run(tasks.len(), |task| {
            let mut task = tasks[task].lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            let (source, targets) = &mut *task;
            match self.as_kept(file_type, source) {
                Ok(source) => match self.order {
                    Order::Rows => self.pack_rows(&source, targets),
                    Order::Tiles => tiles::pack(self.dtype, self.cols, &source, targets),
                },
                Err(error) => drop(failure.set(error)),
            }
        });
        failure.into_inner().map_or(Ok(()), Err)
    }

    /// Whole rows as blocks of the layout's type.
    fn as_kept<'a>(&self, file_type: FileType, source: &'a [u8]) -> Result<Cow<'a, [u8]>> {
        if file_type == FileType::Kept(self.dtype) {
            return Ok(Cow::Borrowed(source));
        }
        let num_values = source.len() / file_type.block_bytes() * file_type.block_len();
        let mut kept = vec![0; self.dtype.row_bytes(num_values)?];
        blocks::repack(file_type, self.dtype, source, &mut kept)?;
        Ok(Cow::Owned(kept))
    }

    /// Where the planes of matrix `index` of a stack go, which this is the layout of: where each begins in the matrix by
    /// itself, where in the stack, and its bytes.
    pub(super) fn places(&self, index: usize, one: &Self) -> impl Iterator<Item = (usize, usize, usize)> {
        one.begins.into_iter().zip(self.begins).enumerate().filter_map(move |(plane, (from, to))| {
            let len = one.plane_bytes(plane);
            (len > 0).then_some((from, to + index * len, len))
        })
    }

    /// Packs whole rows, which are whole blocks.
    fn pack_rows(&self, source: &[u8], [codes, high, scales, super_scales]: &mut [&mut [u8]; 4]) {
        let block_len = self.dtype.block_len();
        if block_len == 1 {
            codes.copy_from_slice(source);
            return;
        }
        let part = |plane: usize| PlaneBytes::of(self.dtype).all()[plane] * block_len / 256;
        for (index, block) in source.chunks_exact(self.dtype.block_bytes()).enumerate() {
            let mut values = [0; 256];
            let values = &mut values[..block_len];
            let scales = &mut scales[index * part(2)..][..part(2)];
            let super_scales = &mut super_scales[index * part(3)..][..part(3)];
            unpack_block(self.dtype, block, values, scales, super_scales);
            let codes = &mut codes[index * part(0)..][..part(0)];
            if self.dtype == DType::Q8_0 {
                codes.copy_from_slice(values);
            } else {
                for (byte, pair) in codes.iter_mut().zip(values.as_chunks::<2>().0) {
                    *byte = pair[0] & 15 | (pair[1] & 15) << 4;
                }
            }
            let high = &mut high[index * part(1)..][..part(1)];
            if !high.is_empty() {
                let values_per_byte = block_len / high.len();
                let bits = 8 / values_per_byte;
                let units =
                    values.as_chunks::<UNIT>().0.iter().zip(high.chunks_exact_mut(UNIT / values_per_byte));
                for (unit, high) in units {
                    for (byte, places) in high.iter_mut().zip(HIGH_BITS.chunks_exact(values_per_byte)) {
                        *byte = places.iter().rev().fold(0, |byte, place| byte << bits | unit[*place] >> 4);
                    }
                }
            }
        }
    }
}

/// The codes of a block in the order of its columns, and its scales as they will lie.
pub(super) fn unpack_block(
    dtype: DType,
    block: &[u8],
    codes: &mut [u8],
    scales: &mut [u8],
    super_scales: &mut [u8],
) {
    match dtype {
        DType::Q4_0 => {
            scales.copy_from_slice(&block[..2]);
            nibbles(&block[2..], codes);
        }
        DType::Q4_1 => {
            scales.copy_from_slice(&block[..4]);
            nibbles(&block[4..], codes);
        }
        DType::Q5_0 => {
            scales.copy_from_slice(&block[..2]);
            nibbles(&block[6..], codes);
            fifth_bits(&block[2..6], codes);
        }
        DType::Q5_1 => {
            scales.copy_from_slice(&block[..4]);
            nibbles(&block[8..], codes);
            fifth_bits(&block[4..8], codes);
        }
        DType::Q8_0 => {
            scales.copy_from_slice(&block[..2]);
            for (code, byte) in codes.iter_mut().zip(&block[2..]) {
                *code = byte ^ 0x80;
            }
        }
        DType::Q4K => {
            super_block_scales(block, scales);
            for (codes, bytes) in codes.chunks_exact_mut(64).zip(block[16..].chunks_exact(32)) {
                nibbles(bytes, codes);
            }
        }
        DType::Q5K => {
            super_block_scales(block, scales);
            for (codes, bytes) in codes.chunks_exact_mut(64).zip(block[48..].chunks_exact(32)) {
                nibbles(bytes, codes);
            }
            for (col, code) in codes.iter_mut().enumerate() {
                *code |= (block[16 + col % 32] >> (col / 32) & 1) << 4;
            }
        }
        DType::Q6K => {
            scales.copy_from_slice(&block[192..208]);
            super_scales.copy_from_slice(&block[208..]);
            for (col, code) in codes.iter_mut().enumerate() {
                let (half, quarter, index) = (col / 128, col / 32 % 4, col % 32);
                let low = block[64 * half + 32 * (quarter % 2) + index] >> (4 * (quarter / 2)) & 15;
                let high = block[128 + 32 * half + index] >> (2 * quarter) & 3;
                *code = low | high << 4;
            }
        }
        // Dense types have no blocks, and the others are kept as one of these.
        _ => {}
    }
}

/// The low nibbles of all bytes, then the high ones.
fn nibbles(bytes: &[u8], codes: &mut [u8]) {
    let (low, high) = codes.split_at_mut(bytes.len());
    for ((byte, low), high) in bytes.iter().zip(low).zip(high) {
        (*low, *high) = (byte & 15, byte >> 4);
    }
}

fn fifth_bits(bytes: &[u8], codes: &mut [u8]) {
    for (col, code) in codes.iter_mut().enumerate() {
        *code |= (bytes[col / 8] >> (col % 8) & 1) << 4;
    }
}

/// The sixteen bytes of scales of a `Q4_K` or `Q5_K` block.
fn super_block_scales(block: &[u8], scales: &mut [u8]) {
    scales[..4].copy_from_slice(&block[..4]);
    let packed = &block[4..16];
    for index in 0..8 {
        let (scale, minimum) = if index < 4 {
            (packed[index] & 63, packed[index + 4] & 63)
        } else {
            (
                packed[index + 4] & 15 | packed[index - 4] >> 6 << 4,
                packed[index + 4] >> 4 | packed[index] >> 6 << 4,
            )
        };
        scales[4 + index] = scale & 15 | (minimum & 15) << 4;
        scales[12 + index / 2] |= (scale >> 4 | minimum >> 4 << 2) << (4 * (index % 2));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn planes_have_the_size_of_the_files_blocks() {
        for dtype in DType::ALL.into_iter().filter(|dtype| stored_as(*dtype) == *dtype) {
            let layout = Layout::new(Order::Rows, dtype, 8, 256);
            assert_eq!(layout.num_bytes(), 8 * 256 / dtype.block_len() * dtype.block_bytes(), "{dtype}");
        }
    }

    #[test]
    fn nibbles_keep_the_order_of_columns_and_high_bits_have_their_own() {
        // A block of Q5_0 whose codes are 0..32.
        let mut block = [0; 22];
        block[4..6].copy_from_slice(&[255, 255]);
        for (index, byte) in block[6..].iter_mut().enumerate() {
            *byte = index as u8 | (index as u8) << 4;
        }
        let layout = Layout::new(Order::Rows, DType::Q5_0, 1, 32);
        let mut target = vec![0; layout.num_bytes()];
        layout.pack(DType::Q5_0.into(), &block, &mut target, &ThreadPool::new(1)).unwrap();
        for unit in 0..2 {
            let codes = u64::from_le_bytes(*target[8 * unit..].first_chunk().unwrap());
            assert_eq!(codes, 0xFEDC_BA98_7654_3210, "unit {unit}");
        }
        assert_eq!(target[16 * layout.planes().high as usize..][..4], [0, 0, 255, 255]);
        // Of single columns: each is where `HIGH_BITS` has it.
        for col in 0..32 {
            block[2..6].copy_from_slice(&(1_u32 << col).to_le_bytes());
            layout.pack(DType::Q5_0.into(), &block, &mut target, &ThreadPool::new(1)).unwrap();
            let high =
                u32::from_le_bytes(*target[16 * layout.planes().high as usize..].first_chunk().unwrap());
            let place = HIGH_BITS.iter().position(|own| *own == col % 16).unwrap();
            assert_eq!(high, 1 << (col / 16 * 16 + place), "column {col}");
        }
    }
}
