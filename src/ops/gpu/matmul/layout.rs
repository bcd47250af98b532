//! The layout of weights in a GPU's memory: writes what `metal_kernels/formats.h` reads, and gives the offsets of the
//! planes that `tiles.rs` writes for GPUs with tensor cores.
//!
//! A matrix is a few planes in sequence, each in the order of rows and of columns within a row, so that neighbouring
//! lanes read neighbouring bytes, in words as wide as a unit of sixteen weights. Together they have the size of the
//! file's blocks, or a few bytes more if its scales have fewer than eight bits.
//!
//! | plane | bytes | of each |
//! |---|---|---|
//! | codes | 8, or 16 for 8-bit codes, or 4 for codes of two and three bits | unit: nibbles in order, or bytes with 128 added, or two bits each in the order of [`HIGH_BITS`] |
//! | high bits | 2 for codes of three and five bits, 4 for 6-bit codes | unit: one or two bits a weight, in the order of [`HIGH_BITS`] |
//! | scales | 2 or 4 | 32 weights: f16 scale, f16 minimum; of `MXFP4` the upper half of an f32 |
//! | scales of `Q4_K`, `Q5_K` | 16 | 256 weights: f16 scale, f16 minimum; per 32 weights a byte with the low four bits of the scale and of the minimum; per 64 weights a byte with the high two bits of both scales and minima |
//! | scales of `Q3_K`, `Q6_K`, `IQ4_XS`, `Q8_S` | 1 | unit: i8 |
//! | their super-scales | 2 | 256 weights: f16 |
//! | scales of `Q2_K` | 1 | unit: scale and minimum, a nibble each |
//! | their super-scales | 4 | 256 weights: f16 scale, f16 minimum |
//!
//! Dense types have the file's layout.

use std::borrow::Cow;
use std::sync::{Mutex, OnceLock};

use bytemuck::{Pod, Zeroable};

use super::tiles::{self, TILE_ROWS};
use super::unpack::unpack_block;
use crate::ops::cpu::pool::ThreadPool;
use crate::weights::{DType, FileType, blocks};
use crate::{Error, Result};

/// Weights that a lane reads together.
pub(in crate::ops::gpu) const UNIT: usize = 16;

/// The order of the high bits of a unit. A kernel decodes pairs of nibbles of a word together, one from each half of
/// it, and reads their high bits at the same positions of the two halves.
const HIGH_BITS: [usize; UNIT] = [0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15];

/// Rows of a task.
const ROWS_PER_TASK: usize = 16;

/// Offsets of the planes after the codes, in units of 16 bytes. `Planes` of the kernels.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub(in crate::ops::gpu) struct Planes {
    high: u32,
    scales: u32,
    super_scales: u32,
}

impl Planes {
    pub(in crate::ops::gpu) const NONE: Self = Self { high: 0, scales: 0, super_scales: 0 };

    #[cfg(test)]
    pub(in crate::ops::gpu) fn scales(self) -> usize {
        self.scales as usize
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
        let (codes, high, scales, super_scales) = match dtype {
            DType::F32 => (1024, 0, 0, 0),
            DType::F16 | DType::BF16 => (512, 0, 0, 0),
            DType::Q4_0 | DType::Q4K | DType::Iq4Nl | DType::Mxfp4 => (128, 0, 16, 0),
            DType::Q4_1 => (128, 0, 32, 0),
            DType::Q5_0 | DType::Q5K => (128, 32, 16, 0),
            DType::Q5_1 => (128, 32, 32, 0),
            DType::Q8_0 => (256, 0, 16, 0),
            DType::Q6K => (128, 64, 16, 2),
            DType::Q2K => (64, 0, 16, 4),
            DType::Q3K => (64, 32, 16, 2),
            DType::Iq4Xs => (128, 0, 16, 2),
            DType::Q8S => (256, 0, 16, 2),
        };
        Self { codes, high, scales, super_scales }
    }

    fn all(self) -> [usize; 4] {
        [self.codes, self.high, self.scales, self.super_scales]
    }
}

/// The arrangement of weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::ops::gpu) enum Order {
    /// Row by row.
    Rows,
    /// Tiles of a few rows and columns for tensor cores; see `tiles.rs`.
    Tiles,
}

/// The planes of a matrix, or of a stack of them: the offset and the length of each, in bytes.
#[derive(Debug, Clone, Copy)]
pub(in crate::ops::gpu) struct Layout {
    order: Order,
    dtype: DType,
    rows: usize,
    cols: usize,
    begins: [usize; 4],
    num_bytes: usize,
}

impl Layout {
    /// For a matrix whose rows are whole blocks of `dtype`, a type of GPU memory, and whole units.
    pub(in crate::ops::gpu) fn new(order: Order, dtype: DType, rows: usize, cols: usize) -> Self {
        Self::of_stack(order, dtype, rows, cols, 1)
    }

    /// The same for a stack of `num_matrices`, in sequence in each plane.
    pub(in crate::ops::gpu) fn of_stack(
        order: Order,
        dtype: DType,
        rows: usize,
        cols: usize,
        num_matrices: usize,
    ) -> Self {
        // All GPUs use the same layout for single precision.
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

    /// The type in memory. Tensor cores multiply halves, so [`DType::BF16`] is converted on load. Two types become one
    /// where scales of super-blocks are multiplied by those of their blocks.
    pub(in crate::ops::gpu) fn stored(&self) -> DType {
        match (self.order, self.dtype) {
            (Order::Tiles, DType::BF16) => DType::F16,
            (Order::Tiles, DType::Iq4Xs) => DType::Iq4Nl,
            (_, dtype) => dtype,
        }
    }

    /// Whether memory has the file's bytes of a dense type.
    pub(in crate::ops::gpu) fn is_as_in_file(&self) -> bool {
        self.order == Order::Rows && self.dtype.block_len() == 1
    }

    /// Whether it is in tiles.
    pub(in crate::ops::gpu) fn is_tiled(&self) -> bool {
        self.order == Order::Tiles
    }

    /// Bytes of all planes.
    pub(in crate::ops::gpu) fn num_bytes(&self) -> usize {
        self.num_bytes
    }

    /// The offsets as arguments of kernels.
    pub(in crate::ops::gpu) fn planes(&self) -> Planes {
        let [_, high, scales, super_scales] = self.begins.map(|begin| (begin / 16) as u32);
        Planes { high, scales, super_scales }
    }

    /// Repacks rows of the type `file_type`. `target` has [`Self::num_bytes`].
    ///
    /// # Errors
    /// [`crate::ErrorKind::Internal`] if the layout's type cannot represent them exactly.
    pub(in crate::ops::gpu) fn pack(
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
        // Each task has its own range of each plane.
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

    /// For the layout of a stack: the planes of matrix `index`, each with its offset in a single matrix, its offset in
    /// the stack, and its bytes.
    pub(in crate::ops::gpu) fn ranges(
        &self,
        index: usize,
        one: &Self,
    ) -> impl Iterator<Item = (usize, usize, usize)> {
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
            let high = &mut high[index * part(1)..][..part(1)];
            match low_bits(self.dtype) {
                8 => codes.copy_from_slice(values),
                4 => {
                    for (byte, pair) in codes.iter_mut().zip(values.as_chunks::<2>().0) {
                        *byte = pair[0] & 15 | (pair[1] & 15) << 4;
                    }
                    pack_bits(values, 4, high);
                }
                _ => {
                    pack_bits(values, 0, codes);
                    pack_bits(values, 2, high);
                }
            }
        }
    }
}

/// The low bits of a code, which the plane of codes has.
pub(in crate::ops::gpu) fn low_bits(dtype: DType) -> usize {
    match dtype {
        DType::Q8_0 | DType::Q8S => 8,
        DType::Q2K | DType::Q3K => 2,
        _ => 4,
    }
}

/// The bits of codes from bit `first` on that fit into `packed`, in the order of [`HIGH_BITS`].
fn pack_bits(codes: &[u8], first: usize, packed: &mut [u8]) {
    if packed.is_empty() {
        return;
    }
    let codes_per_byte = codes.len() / packed.len();
    let bits = 8 / codes_per_byte;
    let units = codes.as_chunks::<UNIT>().0.iter().zip(packed.chunks_exact_mut(UNIT / codes_per_byte));
    for (unit, packed) in units {
        for (byte, positions) in packed.iter_mut().zip(HIGH_BITS.chunks_exact(codes_per_byte)) {
            let bits_at = |position: &usize| unit[*position] >> first & ((1 << bits) - 1);
            *byte = positions.iter().rev().fold(0, |byte, position| byte << bits | bits_at(position));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn planes_have_the_size_of_the_files_blocks() {
        for dtype in DType::ALL {
            // Scales of six bits, or for 32 weights, or of eight bits.
            let extra = match dtype {
                DType::Q3K => 16 - 12,
                DType::Iq4Xs => 16 - 6,
                DType::Mxfp4 => 16 - 8,
                _ => 0,
            };
            let layout = Layout::new(Order::Rows, dtype, 8, 256);
            let in_file = 256 / dtype.block_len() * dtype.block_bytes();
            assert_eq!(layout.num_bytes(), 8 * (in_file + extra), "{dtype}");
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
        // Of single columns, each at its position in `HIGH_BITS`.
        for col in 0..32 {
            block[2..6].copy_from_slice(&(1_u32 << col).to_le_bytes());
            layout.pack(DType::Q5_0.into(), &block, &mut target, &ThreadPool::new(1)).unwrap();
            let high =
                u32::from_le_bytes(*target[16 * layout.planes().high as usize..].first_chunk().unwrap());
            let position = HIGH_BITS.iter().position(|own| *own == col % 16).unwrap();
            assert_eq!(high, 1 << (col / 16 * 16 + position), "column {col}");
        }
    }
}
