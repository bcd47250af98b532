//! Matmuls with weight matrices of every type: repacked once, read at the speed of memory.
//!
//! The guarantee: the bits of an output row depend on that input row, the weights and the level alone, not on the other
//! rows, the number of threads or the division of work. Three properties ensure it: rows are quantised one by one
//! (`activations`), a kernel adds the columns in one order for every panel width (`kernels`; `tiles` and `dense_tiles`
//! for matrix units), and an output is computed by one task over all columns. This module does not depend on models.

mod activations;
mod dense_tiles;
mod file;
mod grouped;
mod kernels;
mod layout;
mod packed;
mod prepare;
mod quantized;
mod residency;
mod stream;
#[cfg(test)]
mod tests;
mod tiles;

pub use activations::{ActivationFormats, Activations};
pub use file::MatrixFile;
pub use grouped::{GroupGate, RowGroup, matmul_gated_groups, matmul_groups};
pub use packed::PackedMatrix;
pub use stream::Stream;

use std::ops::Range;

use super::pool::ThreadPool;
use super::simd::{CpuLevel, F32x16, Kernel};
use crate::DType;
use crate::gated::{Activation, GatedFormula};
use crate::memory::{SharedPointer, prefetch};
use activations::{MAX_PANEL, VECTOR_PANEL, panels, widest_panel};
use dense_tiles::{DenseTiles, PANELS_AT_ONCE};
use kernels::{PanelOutput, TileRow};
use layout::TILE_ROWS;
use tiles::UnpackedRows;

/// Bytes of weights in a task for one row of the input.
const TASK_BYTES: usize = 32 << 10;

/// How results are combined with the previous values of the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// They are overwritten.
    Store,
    /// The result is added to them, as for a residual connection.
    Add,
}

/// One of several matrices that are multiplied with the same input.
#[derive(Debug, Clone, Copy)]
pub struct Projection<'a> {
    /// The weights.
    pub matrix: &'a PackedMatrix,
    /// The first column of the output that it writes.
    pub out_offset: usize,
    /// A value for each output, added to the result.
    pub bias: Option<&'a [f32]>,
}

impl<'a> Projection<'a> {
    /// A matrix without bias that writes from column `out_offset`.
    #[must_use]
    pub fn new(matrix: &'a PackedMatrix, out_offset: usize) -> Self {
        Self { matrix, out_offset, bias: None }
    }
}

/// Computes `out[r][out_offset..][j] = x[r] · matrix[j] + bias[j]` for all projections in one parallel region.
///
/// Rows of `out` start `out_stride` values apart. Does not allocate.
///
/// # Panics
/// If the shapes do not fit together, or the activations do not have the format that a matrix needs.
pub fn matmul(
    x: &Activations,
    projections: &[Projection<'_>],
    out: &mut [f32],
    out_stride: usize,
    mode: Mode,
    pool: &ThreadPool,
    level: CpuLevel,
) {
    for projection in projections {
        let rows = projection.matrix.rows();
        check_shapes(x, projection.matrix, out.len(), projection.out_offset, out_stride, level);
        assert!(
            projection.bias.is_none_or(|bias| bias.len() == rows),
            "the bias does not have {rows} values"
        );
    }
    let out = SharedPointer::new(out.as_mut_ptr());
    let row_block = rows_per_block(x, level);
    let chunks_of = |projection: &Projection<'_>| {
        projection.matrix.num_tile_rows().div_ceil(tile_rows_per_task(projection.matrix, x, x.rows(), level))
    };
    let num_chunks: usize = projections.iter().map(chunks_of).sum();
    // The projection that a task works on, and its first group of rows.
    let locate = |task: usize| {
        let mut chunk = task % num_chunks;
        projections.iter().find_map(|projection| {
            let chunks = chunks_of(projection);
            let found = (chunk < chunks)
                .then(|| (projection, chunk * tile_rows_per_task(projection.matrix, x, x.rows(), level)));
            chunk = chunk.wrapping_sub(chunks);
            found
        })
    };
    pool.run(num_chunks * x.rows().div_ceil(row_block), |task| {
        let Some((projection, first_tile_row)) = locate(task) else { return };
        let end_tile_row = first_tile_row + tile_rows_per_task(projection.matrix, x, x.rows(), level);
        let tile_rows = first_tile_row..projection.matrix.num_tile_rows().min(end_tile_row);
        let first_row = task / num_chunks * row_block;
        let end_row = x.rows().min(first_row + row_block);
        let mut outputs = [ZERO_OUTPUTS];
        for tile_row in tile_rows {
            let first_output = tile_row * TILE_ROWS;
            let num_outputs = TILE_ROWS.min(projection.matrix.rows() - first_output);
            let mut bias = [0.0; TILE_ROWS];
            if let Some(values) = projection.bias {
                bias[..num_outputs].copy_from_slice(&values[first_output..][..num_outputs]);
            }
            let write = |row: usize, [outputs]: &mut [&mut [[f32; TILE_ROWS]]; 1]| {
                let at = row * out_stride + projection.out_offset + first_output;
                let out = out.get().wrapping_add(at);
                // `check_shapes` has checked the range; no other task writes these outputs.
                level.run(WriteOutputs { outputs, bias: &bias, mode, out, out_stride, num_outputs });
            };
            multiply_rows(
                x,
                first_row..end_row,
                x.rows(),
                [projection.matrix],
                tile_row,
                &mut outputs,
                level,
                write,
            );
        }
    });
}

/// Computes `out[r][j] = silu(x[r] · gate[j]) · (x[r] · up[j])`, silu(v) = v / (1 + e^-v).
///
/// Rows of `out` start `out_stride` values apart. Does not allocate.
///
/// # Panics
/// As [`matmul`], or if the matrices differ in shape.
pub fn matmul_swiglu(
    x: &Activations,
    gate: &PackedMatrix,
    up: &PackedMatrix,
    out: &mut [f32],
    out_stride: usize,
    pool: &ThreadPool,
    level: CpuLevel,
) {
    matmul_swiglu_biased(x, [gate, up], [None; 2], out, out_stride, pool, level);
}

/// The same with biases of `gate` and `up`, which are added before the activation.
///
/// # Panics
/// As [`matmul_swiglu`], or if the number of biases differs from the rows of a matrix.
pub fn matmul_swiglu_biased(
    x: &Activations,
    [gate, up]: [&PackedMatrix; 2],
    biases: [Option<&[f32]>; 2],
    out: &mut [f32],
    out_stride: usize,
    pool: &ThreadPool,
    level: CpuLevel,
) {
    assert!(biases.iter().flatten().all(|bias| bias.len() == gate.rows()), "a bias does not fit its matrix");
    assert_eq!((gate.rows(), gate.cols()), (up.rows(), up.cols()), "gate and up differ in shape");
    check_shapes(x, gate, out.len(), 0, out_stride, level);
    check_shapes(x, up, out.len(), 0, out_stride, level);
    let out = SharedPointer::new(out.as_mut_ptr());
    let row_block = rows_per_block(x, level);
    let per_task = tile_rows_per_task(gate, x, x.rows(), level);
    let num_chunks = gate.num_tile_rows().div_ceil(per_task);
    let formula = Activation::Silu.formula();
    pool.run(num_chunks * x.rows().div_ceil(row_block), |task| {
        let first_tile_row = task % num_chunks * per_task;
        let first_row = task / num_chunks * row_block;
        let end_row = x.rows().min(first_row + row_block);
        let mut outputs = [ZERO_OUTPUTS; 2];
        for tile_row in first_tile_row..gate.num_tile_rows().min(first_tile_row + per_task) {
            let first_output = tile_row * TILE_ROWS;
            let num_outputs = TILE_ROWS.min(gate.rows() - first_output);
            let biases = biases.map(|bias| bias_of_tile(bias, first_output, num_outputs));
            let write = |row: usize, [gates, ups]: &mut [&mut [[f32; TILE_ROWS]]; 2]| {
                level.run(Gate { formula, gates, ups, biases: biases.each_ref().map(Option::as_ref) });
                let out = out.get().wrapping_add(row * out_stride + first_output);
                let (outputs, bias) = (&**gates, &[0.0; TILE_ROWS]);
                // As in `matmul`.
                level.run(WriteOutputs { outputs, bias, mode: Mode::Store, out, out_stride, num_outputs });
            };
            multiply_rows(x, first_row..end_row, x.rows(), [gate, up], tile_row, &mut outputs, level, write);
        }
    });
}

/// Multiplies some rows by all of a matrix on the calling thread alone, for use inside a task.
///
/// Gives `write` a row, the first of some neighbouring outputs and the results. `rows` begins at a multiple of sixteen and
/// ends at another or with the rows of `x`.
///
/// # Panics
/// If the shapes do not fit together, or the activations do not have the format that the matrix needs.
pub fn matmul_rows(
    x: &Activations,
    rows: Range<usize>,
    matrix: &PackedMatrix,
    mut write: impl FnMut(usize, usize, &[f32]),
    level: CpuLevel,
) {
    assert_eq!(x.cols(), matrix.cols(), "the input does not have the matrix's columns");
    assert!(
        x.has(ActivationFormats::of([matrix.dtype()], level)),
        "a {} matrix is not for {x:?}",
        matrix.dtype()
    );
    let is_whole = rows.end == x.rows() || rows.end.is_multiple_of(MAX_PANEL);
    assert!(rows.start.is_multiple_of(MAX_PANEL) && is_whole && rows.end <= x.rows(), "{rows:?} of {x:?}");
    let mut outputs = [ZERO_OUTPUTS];
    for tile_row in 0..matrix.num_tile_rows() {
        let first_output = tile_row * TILE_ROWS;
        let num_outputs = TILE_ROWS.min(matrix.rows() - first_output);
        let write = |row: usize, [outputs]: &mut [&mut [[f32; TILE_ROWS]]; 1]| {
            for (index, outputs) in outputs.iter().enumerate() {
                write(row + index, first_output, &outputs[..num_outputs]);
            }
        };
        multiply_rows(x, rows.clone(), x.rows(), [matrix], tile_row, &mut outputs, level, write);
    }
}

/// Writes the results of a panel to the output, whose rows have `num_outputs` of them, 1 to 16.
///
/// The caller guarantees that all rows of the output exist, and that no other code uses them.
struct WriteOutputs<'a> {
    outputs: &'a [[f32; TILE_ROWS]],
    bias: &'a [f32; TILE_ROWS],
    mode: Mode,
    out: *mut f32,
    out_stride: usize,
    num_outputs: usize,
}

impl Kernel for WriteOutputs<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: F32x16>(self) {
        for (index, outputs) in self.outputs.iter().enumerate() {
            // SAFETY: the caller guarantees the outputs; the other arrays have sixteen values.
            unsafe {
                let out = self.out.add(index * self.out_stride);
                prefetch::<true>(out.wrapping_add(self.outputs.len() * self.out_stride).cast(), 64);
                let value = V::load(outputs.as_ptr()).add(V::load(self.bias.as_ptr()));
                if self.num_outputs == TILE_ROWS {
                    let value = if self.mode == Mode::Add { V::load(out).add(value) } else { value };
                    value.store(out);
                } else {
                    let mut values = [0.0; TILE_ROWS];
                    value.store(values.as_mut_ptr());
                    for (lane, value) in values[..self.num_outputs].iter().enumerate() {
                        let before = if self.mode == Mode::Add { *out.add(lane) } else { 0.0 };
                        *out.add(lane) = before + value;
                    }
                }
            }
        }
    }
}

/// gates = activation(gates, ups), each with its bias.
struct Gate<'a> {
    formula: GatedFormula,
    gates: &'a mut [[f32; TILE_ROWS]],
    ups: &'a [[f32; TILE_ROWS]],
    biases: [Option<&'a [f32; TILE_ROWS]>; 2],
}

impl Kernel for Gate<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: F32x16>(self) {
        let Self { formula, gates, ups, biases: [gate_bias, up_bias] } = self;
        for (gates, ups) in gates.iter_mut().zip(ups) {
            // SAFETY: the arrays have sixteen values.
            unsafe {
                let (mut gate, mut up) = (V::load(gates.as_ptr()), V::load(ups.as_ptr()));
                if let Some(bias) = gate_bias {
                    gate = gate.add(V::load(bias.as_ptr()));
                }
                if let Some(bias) = up_bias {
                    up = up.add(V::load(bias.as_ptr()));
                }
                formula.of(gate, up).store(gates.as_mut_ptr());
            }
        }
    }
}

/// The biases of sixteen neighbouring rows of a matrix.
fn bias_of_tile(bias: Option<&[f32]>, first_output: usize, num_outputs: usize) -> Option<[f32; TILE_ROWS]> {
    let mut of_tile = [0.0; TILE_ROWS];
    of_tile[..num_outputs].copy_from_slice(&bias?[first_output..][..num_outputs]);
    Some(of_tile)
}

/// Space for the outputs of a panel with sixteen rows of a matrix.
const ZERO_OUTPUTS: PanelOutput = [[0.0; TILE_ROWS]; MAX_PANEL];

/// The outputs of some rows of a group of `num_rows` with sixteen rows of each of some matrices of one shape.
///
/// Gives `write` the first row of each panel and the panel's outputs with the matrices, which are computed in `matmuls`.
/// `rows` begins at a multiple of sixteen after the first row of the group.
#[expect(clippy::too_many_arguments, reason = "one call describes one tile of the output")]
fn multiply_rows<const N: usize>(
    x: &Activations,
    mut rows: Range<usize>,
    num_rows: usize,
    matrices: [&PackedMatrix; N],
    tile_row: usize,
    outputs: &mut [PanelOutput; N],
    level: CpuLevel,
    mut write: impl FnMut(usize, &mut [&mut [[f32; TILE_ROWS]]; N]),
) {
    let is_quantized = matrices.map(|matrix| matrix.dtype().is_quantized());
    let widest = widest_panel(num_rows, level);
    if widest == MAX_PANEL && matrices.iter().all(|matrix| has_dense_tiles(matrix, level)) {
        let mut outputs = [[[[0.0; TILE_ROWS]; MAX_PANEL]; PANELS_AT_ONCE]; N];
        while rows.len() >= PANELS_AT_ONCE * MAX_PANEL {
            for (matrix, outputs) in matrices.into_iter().zip(&mut outputs) {
                multiply_dense_tiles(x, matrix, tile_row, rows.start, MAX_PANEL, outputs, level);
            }
            for panel in 0..PANELS_AT_ONCE {
                write(rows.start, &mut outputs.each_mut().map(|outputs| &mut outputs[panel][..]));
                rows.start += MAX_PANEL;
            }
        }
    }
    let has_tiles = widest == MAX_PANEL && rows.len() >= MAX_PANEL && is_quantized.contains(&true);
    let unpacked = has_tiles.then(|| UnpackedRows::new(matrices, tile_row, level));
    // Matmuls of BF16 need the thread's unit for themselves; other matmuls configure it for each panel.
    let is_shared = !matrices.iter().any(|matrix| has_dense_tiles(matrix, level));
    let mut unit = if has_tiles && is_shared { level.matrix_unit() } else { None };
    for (row, width) in panels(rows.start, rows.end, widest) {
        for (index, outputs) in outputs.iter_mut().enumerate() {
            match &unpacked {
                Some(unpacked) if width == MAX_PANEL && is_quantized[index] => {
                    let mut own = if is_shared { None } else { level.matrix_unit() };
                    let Some(unit) = unit.as_mut().or(own.as_mut()) else { continue };
                    // SAFETY: the panel has the matrix's columns, which the callers have checked.
                    unsafe { unpacked.multiply(unit, index, x.int8_panel(row), outputs) };
                }
                _ => multiply(x, matrices[index], tile_row, row, width, outputs, level),
            }
        }
        write(row, &mut outputs.each_mut().map(|outputs| &mut outputs[..width]));
    }
}

/// Whether matmuls with the matrix, of any number of rows, go through a matrix unit that multiplies bf16.
fn has_dense_tiles(matrix: &PackedMatrix, level: CpuLevel) -> bool {
    level.has_matrix_unit() && matrix.dtype() == DType::BF16
}

/// `N` panels of `width` rows each from row `row` on times sixteen rows of `matrix`, by a matrix unit for bf16.
fn multiply_dense_tiles<const N: usize>(
    x: &Activations,
    matrix: &PackedMatrix,
    tile_row: usize,
    row: usize,
    width: usize,
    outputs: &mut [PanelOutput; N],
    level: CpuLevel,
) {
    let panel = x.bf16_panel(row);
    let panel_bytes = x.bf16_panel(row + width).addr() - panel.addr();
    let (tiles, num_tiles) = (matrix.tile_row(tile_row), matrix.tiles_per_row());
    let task = DenseTiles { tiles, num_tiles, panel, panel_bytes, width };
    // SAFETY: the panels have the matrix's columns, which the callers have checked.
    unsafe { task.multiply(outputs, level) };
}

/// One panel times sixteen rows of `matrix`.
fn multiply(
    x: &Activations,
    matrix: &PackedMatrix,
    tile_row: usize,
    row: usize,
    width: usize,
    outputs: &mut PanelOutput,
    level: CpuLevel,
) {
    let dtype = matrix.dtype();
    if has_dense_tiles(matrix, level) {
        return multiply_dense_tiles(x, matrix, tile_row, row, width, std::array::from_mut(outputs), level);
    }
    let (tiles, num_tiles) = (matrix.tile_row(tile_row), matrix.tiles_per_row());
    let stride = x.dense_stride();
    let panel = match ActivationFormats::of([dtype], level) {
        ActivationFormats { int8: true, .. } => x.int8_panel(row),
        ActivationFormats { bf16: true, .. } => x.bf16_panel(row),
        _ => x.dense_panel(row).cast(),
    };
    let task = TileRow { dtype, tiles, num_tiles, panel, stride, width };
    if width > VECTOR_PANEL && ActivationFormats::of([dtype], level).dense {
        // Rows of f32 follow each other, so a panel is two.
        for (half, outputs) in outputs[..width].chunks_mut(VECTOR_PANEL).enumerate() {
            let panel = panel.wrapping_add(half * VECTOR_PANEL * stride);
            // SAFETY: the panel has the matrix's columns, which the callers have checked.
            unsafe { TileRow { panel, width: outputs.len(), ..task }.multiply(outputs, level) };
        }
    } else {
        // SAFETY: as above.
        unsafe { task.multiply(outputs, level) };
    }
}

fn check_shapes(
    x: &Activations,
    matrix: &PackedMatrix,
    out_len: usize,
    out_offset: usize,
    out_stride: usize,
    level: CpuLevel,
) {
    let (rows, cols) = (matrix.rows(), matrix.cols());
    assert_eq!(x.cols(), cols, "the input does not have the matrix's {cols} columns");
    let formats = ActivationFormats::of([matrix.dtype()], level);
    assert!(x.has(formats), "a {} matrix needs {formats:?} of {x:?}", matrix.dtype());
    assert!(x.rows() <= 1 || out_offset + rows <= out_stride, "{rows} outputs overlap the next row");
    assert!(
        x.rows() == 0 || (x.rows() - 1) * out_stride + out_offset + rows <= out_len,
        "{} rows of {rows} outputs do not fit the output",
        x.rows()
    );
}

/// Rows that a task multiplies by its weights before the next weights: the maximum that fits into the second-level
/// cache.
fn rows_per_block(x: &Activations, level: CpuLevel) -> usize {
    // Processors with a matrix unit have 2 MB of it, and unpacked weights need many rows to pay.
    let cache_bytes = if level.has_matrix_unit() { 1 << 20 } else { 384 << 10 };
    (cache_bytes / x.row_bytes().max(1)).next_multiple_of(MAX_PANEL).max(MAX_PANEL)
}

/// Groups of sixteen weight rows in a task for `num_rows` rows of the input: enough work to outweigh taking it, little
/// enough to keep all threads busy to the end.
fn tile_rows_per_task(matrix: &PackedMatrix, x: &Activations, num_rows: usize, level: CpuLevel) -> usize {
    let panels = num_rows.min(rows_per_block(x, level)).div_ceil(VECTOR_PANEL).max(1);
    (TASK_BYTES / (matrix.tile_row_bytes().max(1) * panels)).clamp(1, 64)
}
