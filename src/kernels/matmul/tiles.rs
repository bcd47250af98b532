//! Matmuls of quantised matrices by a matrix unit: sixteen weight rows with panels of sixteen input rows.
//!
//! The unit takes codes of a byte, and all panels of a block of rows use the same ones. So sixteen weight rows are
//! unpacked once, into memory that stays in the second-level cache, and then multiplied by one panel after another. The
//! unit's sums are those of [`super::quantized`], exact integers, and the same functions scale and add them in the same
//! order: a row has the same bits whether it is multiplied alone, by vectors, or here.

use std::cell::Cell;
use std::marker::PhantomData;
use std::mem::MaybeUninit;

use super::activations::MAX_PANEL;
use super::kernels::PanelOutput;
use super::layout::{TILE_ROWS, WORD};
use super::packed::PackedMatrix;
use super::quantized::{
    Codes, Iq4Nl, Iq4Xs, Mxfp4, PanelBlock, Q2K, Q3K, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0, Q8S,
    Quantized, Visitor, add_halves, add_minima, add_minima_of_halves, add_scaled, first_half,
};
use crate::DType;
use crate::memory::AlignedBuffer;
use crate::simd::{ByteTiles, CpuLevel, F32x16, Kernel, TileSums};

thread_local! {
    /// This thread's memory for unpacked weights. It grows to the size of the largest matrix.
    static UNPACKED: Cell<AlignedBuffer> = const { Cell::new(AlignedBuffer::empty()) };
}

/// Adds the sums of a block to a result.
trait BlockLayout {
    /// Multiplications by the matrix unit for a block, each with 512 bytes of codes.
    const NUM_MULTIPLICATIONS: usize;
    /// Vectors of factors that follow the codes.
    const NUM_FACTORS: usize = 2;
    /// Bytes of an unpacked block.
    const BYTES: usize = Self::NUM_MULTIPLICATIONS * CODES_BYTES + Self::NUM_FACTORS * FACTORS_BYTES;

    /// `sum += value · activation` for row `row` of the panel.
    ///
    /// # Safety
    /// The panel has the row.
    unsafe fn add<V: F32x16>(
        sums_of_block: &[*const TileSums; 2],
        factors: [V; MAX_FACTORS],
        panel: PanelBlock<MAX_PANEL>,
        row: usize,
        sum: V,
    ) -> V;
}

/// The most factors that a layout has.
const MAX_FACTORS: usize = 4;

const CODES_BYTES: usize = 8 * WORD;
const FACTORS_BYTES: usize = 4 * TILE_ROWS;

/// One scale for a weight row.
struct Scaled;
/// A scale and a minimum.
struct WithMinima;
/// A scale for each half of the columns, perhaps with a minimum. The codes of each half are zero in the other one, so that
/// the unit's registers have one shape for all types.
struct InHalves<const MINIMA: bool>;

/// The sums of one row, in f32: 32 multiplied codes are below 2²².
///
/// # Safety
/// `sums` is readable, and has row `row`.
#[inline(always)]
unsafe fn sums_of<V: F32x16>(sums: *const TileSums, row: usize) -> V {
    // SAFETY: the caller's guarantee.
    V::from_small_sums(unsafe { V::load_sums(sums.cast::<i32>().add(TILE_ROWS * row)) })
}

impl BlockLayout for Scaled {
    const NUM_MULTIPLICATIONS: usize = 1;

    #[inline(always)]
    unsafe fn add<V: F32x16>(
        sums_of_block: &[*const TileSums; 2],
        factors: [V; MAX_FACTORS],
        panel: PanelBlock<MAX_PANEL>,
        row: usize,
        sum: V,
    ) -> V {
        // SAFETY: the caller's guarantee.
        unsafe { add_scaled(sums_of::<V>(sums_of_block[0], row), factors[0], panel.scale(row), sum) }
    }
}

impl BlockLayout for WithMinima {
    const NUM_MULTIPLICATIONS: usize = 1;

    #[inline(always)]
    unsafe fn add<V: F32x16>(
        sums_of_block: &[*const TileSums; 2],
        factors: [V; MAX_FACTORS],
        panel: PanelBlock<MAX_PANEL>,
        row: usize,
        sum: V,
    ) -> V {
        // SAFETY: the caller's guarantee.
        unsafe {
            let sum = Scaled::add(sums_of_block, factors, panel, row, sum);
            add_minima(factors[1], panel.scaled_sum(row), sum)
        }
    }
}

impl<const MINIMA: bool> BlockLayout for InHalves<MINIMA> {
    const NUM_MULTIPLICATIONS: usize = 2;
    const NUM_FACTORS: usize = if MINIMA { 4 } else { 2 };

    #[inline(always)]
    unsafe fn add<V: F32x16>(
        sums_of_block: &[*const TileSums; 2],
        factors: [V; MAX_FACTORS],
        panel: PanelBlock<MAX_PANEL>,
        row: usize,
        sum: V,
    ) -> V {
        // SAFETY: the caller's guarantee.
        unsafe {
            // Converted one way and the other: the machine has space for both at once.
            let first = V::from_sums(V::load_sums(sums_of_block[0].cast::<i32>().add(TILE_ROWS * row)));
            let mut half = first_half(first, factors[0]);
            if MINIMA {
                half = add_minima_of_halves(half, [factors[2], factors[3]], panel.half_sums(row));
            }
            add_halves(half, sums_of::<V>(sums_of_block[1], row), factors[1], panel.scale(row), sum)
        }
    }
}

/// Writes the blocks of a tile at `target`, in the layout `F`.
struct Unpack<F> {
    target: *mut u8,
    layout: PhantomData<F>,
}

impl<F: BlockLayout> Unpack<F> {
    /// # Safety
    /// There is space for the block, and the codes are those of a tile. The layout has as many factors.
    #[inline(always)]
    unsafe fn write<V: F32x16, C: Codes<V>, const FACTORS: usize>(
        &mut self,
        block: usize,
        codes: C,
        factors: [V; FACTORS],
    ) {
        // SAFETY: the caller's guarantee.
        unsafe {
            let target = self.target.add(block * F::BYTES);
            for word in 0..8 {
                // With two multiplications, the second half of the words is the second one's; the rest is zero.
                let index = (F::NUM_MULTIPLICATIONS - 1) * (word / 4);
                let code = V::sub_bytes(codes.word(word), C::WORD_OFFSET);
                V::store_codes(code, target.add(CODES_BYTES * index + WORD * word));
            }
            if F::NUM_MULTIPLICATIONS == 2 {
                target.add(CODES_BYTES / 2).write_bytes(0, CODES_BYTES);
            }
            for (index, factor) in factors.into_iter().enumerate() {
                factor.store(target.add(F::NUM_MULTIPLICATIONS * CODES_BYTES + FACTORS_BYTES * index).cast());
            }
        }
    }
}

impl<V: F32x16, F: BlockLayout> Visitor<V> for Unpack<F> {
    #[inline(always)]
    unsafe fn scaled<C: Codes<V>>(&mut self, block: usize, codes: C, scales: V) {
        // SAFETY: the caller's guarantee.
        unsafe { self.write(block, codes, [scales, V::splat(0.0)]) }
    }

    #[inline(always)]
    unsafe fn with_minima<C: Codes<V>>(&mut self, block: usize, codes: C, scales: V, minima: V) {
        // SAFETY: the caller's guarantee.
        unsafe { self.write(block, codes, [scales, minima]) }
    }

    #[inline(always)]
    unsafe fn in_halves<C: Codes<V>>(&mut self, block: usize, codes: C, scales: [V; 2]) {
        // SAFETY: the caller's guarantee.
        unsafe { self.write(block, codes, scales) }
    }

    #[inline(always)]
    unsafe fn in_halves_with_minima<C: Codes<V>>(
        &mut self,
        block: usize,
        codes: C,
        [a, b]: [V; 2],
        [c, d]: [V; 2],
    ) {
        // SAFETY: the caller's guarantee.
        unsafe { self.write(block, codes, [a, b, c, d]) }
    }
}

/// Unpacks sixteen weight rows of type `Q`.
struct UnpackRow<Q, F> {
    tiles: *const u8,
    num_tiles: usize,
    target: *mut u8,
    types: PhantomData<(Q, F)>,
}

impl<Q: Quantized, F: BlockLayout> Kernel for UnpackRow<Q, F> {
    type Output = ();

    #[inline(always)]
    fn run<V: F32x16>(self) {
        for tile in 0..self.num_tiles {
            let target = self.target.wrapping_add(tile * Q::NUM_BLOCKS * F::BYTES);
            let mut unpack = Unpack::<F> { target, layout: PhantomData };
            // SAFETY: the tiles exist, and the target has space for their blocks.
            unsafe { Q::visit::<V>(self.tiles.wrapping_add(tile * Q::BYTES), &mut unpack) };
        }
    }
}

/// Multiplies unpacked weight rows with one panel.
struct MultiplyPanel<'a, T, F> {
    unit: &'a mut T,
    blocks: *const u8,
    num_blocks: usize,
    panel: *const u8,
    out: &'a mut PanelOutput,
    layout: PhantomData<F>,
}

impl<T: ByteTiles, F: BlockLayout> MultiplyPanel<'_, T, F> {
    /// Has the unit begin the sums of block `block`, in the slots of `parity`.
    ///
    /// # Safety
    /// There is such a block.
    #[inline(always)]
    unsafe fn begin(&mut self, block: usize, parity: usize) {
        // SAFETY: the caller's guarantee.
        unsafe {
            let activations = PanelBlock::<MAX_PANEL>(self.panel).skip(block).codes(0, 0);
            let codes = self.blocks.add(block * F::BYTES);
            let slot = F::NUM_MULTIPLICATIONS * parity;
            self.unit.multiply(slot, activations, codes.cast());
            if F::NUM_MULTIPLICATIONS == 2 {
                self.unit.multiply_again(slot + 1, codes.add(CODES_BYTES).cast());
            }
        }
    }

    /// Writes the sums in the slots of `parity`.
    ///
    /// # Safety
    /// They are writable.
    #[inline(always)]
    unsafe fn store(&mut self, sums_of_block: &mut [MaybeUninit<TileSums>; 2], parity: usize) {
        for (index, sums) in sums_of_block[..F::NUM_MULTIPLICATIONS].iter_mut().enumerate() {
            // SAFETY: the caller's guarantee.
            unsafe { self.unit.store(F::NUM_MULTIPLICATIONS * parity + index, sums.as_mut_ptr()) };
        }
    }

    /// Adds the sums of block `block` to the results.
    ///
    /// # Safety
    /// There is such a block, and its sums have been written.
    #[inline(always)]
    unsafe fn add<V: F32x16>(
        &self,
        block: usize,
        sums_of_block: &[MaybeUninit<TileSums>; 2],
        sums: &mut [V; MAX_PANEL],
    ) {
        let sums_of_block = [sums_of_block[0].as_ptr(), sums_of_block[1].as_ptr()];
        // SAFETY: the caller's guarantee.
        unsafe {
            let panel = PanelBlock(self.panel).skip(block);
            let factors =
                self.blocks.add(block * F::BYTES + F::NUM_MULTIPLICATIONS * CODES_BYTES).cast::<f32>();
            let mut loaded = [V::splat(0.0); MAX_FACTORS];
            for (index, factor) in loaded[..F::NUM_FACTORS].iter_mut().enumerate() {
                *factor = V::load(factors.add(TILE_ROWS * index));
            }
            for (row, sum) in sums.iter_mut().enumerate() {
                *sum = F::add(&sums_of_block, loaded, panel, row, *sum);
            }
        }
    }
}

impl<T: ByteTiles, F: BlockLayout> Kernel for MultiplyPanel<'_, T, F> {
    type Output = ();

    /// The unit works on one block, writes the one before it, and vectors scale the one before that.
    #[inline(always)]
    fn run<V: F32x16>(mut self) {
        let mut sums = [V::splat(0.0); MAX_PANEL];
        let mut even = [const { MaybeUninit::uninit() }; 2];
        let mut odd = [const { MaybeUninit::uninit() }; 2];
        let num_blocks = self.num_blocks;
        // SAFETY: only blocks below `num_blocks` are begun, and each is added after its sums were written.
        unsafe {
            if num_blocks > 0 {
                self.begin(0, 0);
            }
            for block in (0..num_blocks).step_by(2) {
                if block + 1 < num_blocks {
                    self.begin(block + 1, 1);
                }
                self.store(&mut even, 0);
                if block > 0 {
                    self.add::<V>(block - 1, &odd, &mut sums);
                }
                if block + 2 < num_blocks {
                    self.begin(block + 2, 0);
                }
                if block + 1 < num_blocks {
                    self.store(&mut odd, 1);
                }
                self.add::<V>(block, &even, &mut sums);
            }
            if num_blocks > 0 && num_blocks.is_multiple_of(2) {
                self.add::<V>(num_blocks - 1, &odd, &mut sums);
            }
            for (sum, out) in sums.into_iter().zip(self.out.iter_mut()) {
                sum.store(out.as_mut_ptr());
            }
        }
    }
}

/// Calls `$function` with the type and the layout of blocks of a quantised type.
macro_rules! with_types {
    ($dtype:expr, $function:ident($($argument:expr),*)) => {
        match $dtype {
            DType::Q4_0 => $function::<Q4_0, Scaled>($($argument),*),
            DType::Q4_1 => $function::<Q4_1, WithMinima>($($argument),*),
            DType::Q5_0 => $function::<Q5_0, Scaled>($($argument),*),
            DType::Q5_1 => $function::<Q5_1, WithMinima>($($argument),*),
            DType::Q8_0 => $function::<Q8_0, Scaled>($($argument),*),
            DType::Q4K => $function::<Q4K, WithMinima>($($argument),*),
            DType::Q5K => $function::<Q5K, WithMinima>($($argument),*),
            DType::Q6K => $function::<Q6K, InHalves<false>>($($argument),*),
            DType::Q2K => $function::<Q2K, InHalves<true>>($($argument),*),
            DType::Q3K => $function::<Q3K, InHalves<false>>($($argument),*),
            DType::Iq4Nl => $function::<Iq4Nl, Scaled>($($argument),*),
            DType::Iq4Xs => $function::<Iq4Xs, Scaled>($($argument),*),
            DType::Mxfp4 => $function::<Mxfp4, Scaled>($($argument),*),
            DType::Q8S => $function::<Q8S, InHalves<false>>($($argument),*),
            DType::F32 | DType::F16 | DType::BF16 => unreachable!("{} is not quantised", $dtype),
        }
    };
}

fn block_bytes<Q: Quantized, F: BlockLayout>() -> usize {
    Q::NUM_BLOCKS * F::BYTES
}

/// # Safety
/// `target` has space for sixteen rows of `matrix`.
unsafe fn unpack<Q: Quantized, F: BlockLayout>(
    matrix: &PackedMatrix,
    tile_row: usize,
    target: *mut u8,
    level: CpuLevel,
) {
    let (tiles, num_tiles) = (matrix.tile_row(tile_row), matrix.tiles_per_row());
    level.run_tiles(UnpackRow::<Q, F> { tiles, num_tiles, target, types: PhantomData });
}

/// # Safety
/// `blocks` are those of sixteen rows of `matrix`, and the panel has its columns.
unsafe fn multiply<Q: Quantized, F: BlockLayout>(
    unit: &mut impl ByteTiles,
    matrix: &PackedMatrix,
    blocks: *const u8,
    panel: *const u8,
    out: &mut PanelOutput,
    level: CpuLevel,
) {
    let num_blocks = matrix.tiles_per_row() * Q::NUM_BLOCKS;
    level.run_tiles(MultiplyPanel { unit, blocks, num_blocks, panel, out, layout: PhantomData::<F> });
}

/// Sixteen rows of each of some matrices, unpacked for a matrix unit. Matrices that are not quantised are left out.
pub(super) struct UnpackedRows<'a, const N: usize> {
    matrices: [&'a PackedMatrix; N],
    /// Where the rows of each matrix begin.
    starts: [usize; N],
    buffer: AlignedBuffer,
    level: CpuLevel,
}

impl<'a, const N: usize> UnpackedRows<'a, N> {
    /// # Panics
    /// If there is no memory for the rows, as in `Vec`.
    pub(super) fn new(matrices: [&'a PackedMatrix; N], tile_row: usize, level: CpuLevel) -> Self {
        let mut len = 0;
        let starts = matrices.map(|matrix| {
            let start = len;
            if matrix.dtype().is_quantized() {
                len += matrix.tiles_per_row() * with_types!(matrix.dtype(), block_bytes());
            }
            start
        });
        let mut buffer = UNPACKED.take();
        if buffer.len() < len {
            buffer =
                AlignedBuffer::zeroed(len).unwrap_or_else(|| panic!("no memory for {len} bytes of weights"));
        }
        for (matrix, start) in matrices.into_iter().zip(starts) {
            if matrix.dtype().is_quantized() {
                let target = buffer.as_mut_slice()[start..].as_mut_ptr();
                // SAFETY: the rows of the matrices follow each other in `len` bytes.
                unsafe { with_types!(matrix.dtype(), unpack(matrix, tile_row, target, level)) };
            }
        }
        Self { matrices, starts, buffer, level }
    }

    /// The sums of the rows of matrix `index`, which is quantised, with a panel of sixteen rows.
    ///
    /// # Safety
    /// The panel has the columns of the matrix.
    pub(super) unsafe fn multiply(
        &self,
        unit: &mut impl ByteTiles,
        index: usize,
        panel: *const u8,
        out: &mut PanelOutput,
    ) {
        let (matrix, blocks) = (self.matrices[index], self.buffer.as_slice()[self.starts[index]..].as_ptr());
        // SAFETY: `new` has written the blocks; the caller guarantees the panel.
        unsafe { with_types!(matrix.dtype(), multiply(unit, matrix, blocks, panel, out, self.level)) };
    }
}

impl<const N: usize> Drop for UnpackedRows<'_, N> {
    fn drop(&mut self) {
        UNPACKED.set(std::mem::replace(&mut self.buffer, AlignedBuffer::empty()));
    }
}
