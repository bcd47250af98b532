//! The inner loops: one group of sixteen weight rows times one panel of input rows.
//!
//! Sums stay in registers over all columns, and every output is accumulated over its columns in the same order for
//! every width of the panel. So a row's result does not depend on its batch. This file has the loop over the columns
//! and the dense types; [`super::quantized`] has the block types.

use std::marker::PhantomData;

use super::layout::TILE_ROWS;
use super::quantized::{Iq4Nl, Iq4Xs, Mxfp4, Q2K, Q3K, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0, Q8S};
use crate::DType;
use crate::memory::prefetch_early;
use crate::simd::{CpuLevel, F32x16, Kernel};

/// The outputs of one panel with sixteen weight rows, one array for each input row.
pub(super) type PanelOutput = [[f32; TILE_ROWS]; super::activations::MAX_PANEL];

/// The distance between loads and prefetches to the second-level cache, in bytes: one page, where the hardware
/// prefetcher stops.
const PREFETCH_DISTANCE: usize = 4096;

/// Sixteen weight rows and a panel of input rows.
#[derive(Debug, Clone, Copy)]
pub(super) struct TileRow {
    pub(super) dtype: DType,
    /// The first tile.
    pub(super) tiles: *const u8,
    pub(super) num_tiles: usize,
    /// Input rows in the format that the type reads: f32 rows, or an interleaved panel of int8 or bf16.
    pub(super) panel: *const u8,
    /// Bytes between the rows of an f32 panel.
    pub(super) stride: usize,
    /// Rows of the panel: 1, 2, 4 or 8.
    pub(super) width: usize,
}

impl TileRow {
    /// Writes the outputs into the first `width` rows of `out`.
    ///
    /// # Safety
    /// The tiles and the panel have the columns of `num_tiles` tiles of `dtype`.
    pub(super) unsafe fn multiply(self, out: &mut [[f32; TILE_ROWS]], level: CpuLevel) {
        match self.dtype {
            DType::F32 => self.with_format::<F32>(out, level),
            DType::F16 => self.with_format::<F16>(out, level),
            DType::BF16 if level.has_bf16_dot() => self.with_bf16_dot(out, level),
            DType::BF16 => self.with_format::<BF16>(out, level),
            DType::Q4_0 => self.with_int8_dot::<Q4_0>(out, level),
            DType::Q4_1 => self.with_int8_dot::<Q4_1>(out, level),
            DType::Q5_0 => self.with_int8_dot::<Q5_0>(out, level),
            DType::Q5_1 => self.with_int8_dot::<Q5_1>(out, level),
            DType::Q8_0 => self.with_int8_dot::<Q8_0>(out, level),
            DType::Q4K => self.with_int8_dot::<Q4K>(out, level),
            DType::Q5K => self.with_int8_dot::<Q5K>(out, level),
            DType::Q6K => self.with_int8_dot::<Q6K>(out, level),
            DType::Q2K => self.with_int8_dot::<Q2K>(out, level),
            DType::Q3K => self.with_int8_dot::<Q3K>(out, level),
            DType::Iq4Nl => self.with_int8_dot::<Iq4Nl>(out, level),
            DType::Iq4Xs => self.with_int8_dot::<Iq4Xs>(out, level),
            DType::Mxfp4 => self.with_int8_dot::<Mxfp4>(out, level),
            DType::Q8S => self.with_int8_dot::<Q8S>(out, level),
        }
    }

    fn with_format<F: Format>(self, out: &mut [[f32; TILE_ROWS]], level: CpuLevel) {
        match self.width {
            1 => level.run(TileKernel::<F, 1>::new(self, out)),
            2 => level.run(TileKernel::<F, 2>::new(self, out)),
            4 => level.run(TileKernel::<F, 4>::new(self, out)),
            _ => level.run(TileKernel::<F, 8>::new(self, out)),
        }
    }

    /// The dot products of quantised weights with activations in bytes.
    fn with_int8_dot<F: Format>(self, out: &mut [[f32; TILE_ROWS]], level: CpuLevel) {
        match self.width {
            1 => level.run_int8(TileKernel::<F, 1>::new(self, out)),
            2 => level.run_int8(TileKernel::<F, 2>::new(self, out)),
            4 => level.run_int8(TileKernel::<F, 4>::new(self, out)),
            _ => level.run_int8(TileKernel::<F, 8>::new(self, out)),
        }
    }

    /// The dot products of BF16 with activations in bf16, for the levels that have an instruction for them.
    fn with_bf16_dot(self, out: &mut [[f32; TILE_ROWS]], level: CpuLevel) {
        match self.width {
            1 => level.run_bf16(TileKernel::<BF16Dot, 1>::new(self, out)),
            2 => level.run_bf16(TileKernel::<BF16Dot, 2>::new(self, out)),
            4 => level.run_bf16(TileKernel::<BF16Dot, 4>::new(self, out)),
            _ => level.run_bf16(TileKernel::<BF16Dot, 8>::new(self, out)),
        }
    }
}

/// The work of one [`TileRow`], a separate function for each type, width and level.
struct TileKernel<'a, F, const P: usize> {
    task: TileRow,
    out: &'a mut [[f32; TILE_ROWS]],
    format: PhantomData<F>,
}

impl<'a, F, const P: usize> TileKernel<'a, F, P> {
    fn new(task: TileRow, out: &'a mut [[f32; TILE_ROWS]]) -> Self {
        Self { task, out, format: PhantomData }
    }
}

impl<F: Format, const P: usize> Kernel for TileKernel<'_, F, P> {
    type Output = ();

    #[inline(always)]
    fn run<V: F32x16>(self) {
        let mut sums = [V::splat(0.0); P];
        let mut tile = self.task.tiles;
        let mut panel = self.task.panel;
        for _ in 0..self.task.num_tiles {
            // SAFETY: the tiles and the panel have this step.
            unsafe { F::step::<V, P>(tile, panel, self.task.stride, &mut sums) };
            tile = tile.wrapping_add(F::BYTES);
            panel = panel.wrapping_add(if F::INTERLEAVED { F::PANEL_BYTES * P } else { F::PANEL_BYTES });
        }
        for (sum, out) in sums.into_iter().zip(self.out.iter_mut()) {
            // SAFETY: the row has sixteen values.
            unsafe { sum.store(out.as_mut_ptr()) };
        }
    }
}

/// Prefetches `len` bytes at a distance after `weights`.
#[inline(always)]
pub(super) fn prefetch(weights: *const u8, len: usize) {
    prefetch_early(weights.wrapping_add(PREFETCH_DISTANCE), len);
}

/// How one tile is multiplied with its columns of a panel.
pub(super) trait Format {
    /// Bytes of a tile.
    const BYTES: usize;
    /// Bytes of one panel row that belong to the columns of a tile.
    const PANEL_BYTES: usize;
    /// True if the rows of a panel are interleaved, false if they are `stride` bytes apart.
    const INTERLEAVED: bool = true;

    /// Adds the dot products of a tile to `sums`, and prefetches later bytes.
    ///
    /// # Safety
    /// `tile` has `BYTES` bytes, `panel` has `PANEL_BYTES` in each of P rows.
    unsafe fn step<V: F32x16, const P: usize>(
        tile: *const u8,
        panel: *const u8,
        stride: usize,
        sums: &mut [V; P],
    );
}

struct F32;
struct F16;
struct BF16;
struct BF16Dot;

/// `sums += weights · value` for one column, `stride` bytes from row to row.
#[inline(always)]
unsafe fn add_column<V: F32x16, const P: usize>(
    weights: V,
    column: *const u8,
    stride: usize,
    sums: &mut [V; P],
) {
    for (row, sum) in sums.iter_mut().enumerate() {
        // SAFETY: the panel has P rows.
        let value = unsafe { column.add(row * stride).cast::<f32>().read() };
        *sum = weights.mul_add(V::splat(value), *sum);
    }
}

impl Format for F32 {
    const BYTES: usize = 64;
    const PANEL_BYTES: usize = 4;
    const INTERLEAVED: bool = false;

    #[inline(always)]
    unsafe fn step<V: F32x16, const P: usize>(
        tile: *const u8,
        panel: *const u8,
        stride: usize,
        sums: &mut [V; P],
    ) {
        prefetch(tile, Self::BYTES);
        // SAFETY: a tile is sixteen f32.
        unsafe { add_column(V::load(tile.cast()), panel, stride, sums) }
    }
}

impl Format for F16 {
    const BYTES: usize = 32;
    const PANEL_BYTES: usize = 4;
    const INTERLEAVED: bool = false;

    #[inline(always)]
    unsafe fn step<V: F32x16, const P: usize>(
        tile: *const u8,
        panel: *const u8,
        stride: usize,
        sums: &mut [V; P],
    ) {
        prefetch(tile, Self::BYTES);
        // SAFETY: a tile is sixteen f16.
        unsafe { add_column(V::load_f16(tile.cast()), panel, stride, sums) }
    }
}

impl Format for BF16 {
    const BYTES: usize = 64;
    const PANEL_BYTES: usize = 8;
    const INTERLEAVED: bool = false;

    #[inline(always)]
    unsafe fn step<V: F32x16, const P: usize>(
        tile: *const u8,
        panel: *const u8,
        stride: usize,
        sums: &mut [V; P],
    ) {
        prefetch(tile, Self::BYTES);
        // SAFETY: a tile is sixteen pairs of bf16, a panel step two columns of P values.
        unsafe {
            let (even, odd) = V::load_bf16_pairs(tile);
            add_column(even, panel, stride, sums);
            add_column(odd, panel.add(4), stride, sums);
        }
    }
}

impl Format for BF16Dot {
    const BYTES: usize = 64;
    const PANEL_BYTES: usize = 4;

    #[inline(always)]
    unsafe fn step<V: F32x16, const P: usize>(
        tile: *const u8,
        panel: *const u8,
        _: usize,
        sums: &mut [V; P],
    ) {
        prefetch(tile, Self::BYTES);
        for (row, sum) in sums.iter_mut().enumerate() {
            // SAFETY: a tile is sixteen pairs of bf16, a panel step one pair of P rows.
            *sum = unsafe { sum.dot_bf16(tile, panel.cast::<u32>().add(row).read_unaligned()) };
        }
    }
}
