//! Matmuls of groups of rows, each group with its own matrix, in one parallel region: tokens by their experts, and
//! heads.

use std::ops::Range;

use super::activations::{ActivationFormats, Activations, VECTOR_PANEL};
use super::layout::TILE_ROWS;
use super::packed::PackedMatrix;
use super::{Gate, ZERO_OUTPUTS, bias_of_tile, multiply_rows, rows_per_block, tile_rows_per_task};
use crate::gated::Activation;
use crate::pool::ThreadPool;
use crate::simd::CpuLevel;

/// Rows of the input that are multiplied with one matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowGroup {
    /// The first of them, a multiple of [`RowGroup::ALIGNMENT`]; rows between groups are not computed.
    pub first_row: usize,
    /// How many there are; may be 0.
    pub num_rows: usize,
    /// Which matrix.
    pub matrix: usize,
}

impl RowGroup {
    /// The alignment of a group's first row.
    pub const ALIGNMENT: usize = VECTOR_PANEL;

    /// The row after the last one.
    #[must_use]
    pub fn end_row(&self) -> usize {
        self.first_row + self.num_rows
    }
}

/// Computes `x[r] · matrix_of(group.matrix)[j]` for the rows of all groups, and gives `write` a row, the first of some
/// neighbouring `j` and the results, in any order and from any thread. The matrices have one shape and type.
///
/// # Panics
/// If the shapes do not fit together, or the activations do not have the format that a matrix needs.
pub fn matmul_groups<'a>(
    x: &Activations,
    groups: &[RowGroup],
    matrix_of: impl Fn(usize) -> &'a PackedMatrix + Sync,
    write: impl Fn(usize, usize, &[f32]) + Sync,
    pool: &ThreadPool,
    level: CpuLevel,
) {
    let multiply = |group: &RowGroup, tile_row: usize, rows: Range<usize>| {
        let matrix = matrix_of(group.matrix);
        let write = |row: usize, [outputs]: &mut [&mut [[f32; TILE_ROWS]]; 1]| {
            write_panel(matrix, tile_row, row, outputs, &write);
        };
        multiply_rows(x, rows, group.num_rows, [matrix], tile_row, &mut [ZERO_OUTPUTS], level, write);
    };
    run(x, groups, &matrix_of, pool, multiply, level);
}

/// The activation of a group's two matrices, `activation(x[r] · gate[j], x[r] · up[j])`, after both biases, which have
/// one value for each row of the matrix.
#[derive(Debug, Clone, Copy)]
pub struct GroupGate<'a> {
    /// The first matrix.
    pub gate: &'a PackedMatrix,
    /// The second one, of the same shape.
    pub up: &'a PackedMatrix,
    /// Of both.
    pub biases: [Option<&'a [f32]>; 2],
}

/// The same with two matrices for each group, combined by [`GroupGate`].
///
/// # Panics
/// As [`matmul_groups`], or if the number of biases differs from the rows of a matrix.
pub fn matmul_gated_groups<'a>(
    x: &Activations,
    groups: &[RowGroup],
    gate_of: impl Fn(usize) -> GroupGate<'a> + Sync,
    activation: Activation,
    write: impl Fn(usize, usize, &[f32]) + Sync,
    pool: &ThreadPool,
    level: CpuLevel,
) {
    let formula = activation.formula();
    let multiply = |group: &RowGroup, tile_row: usize, rows: Range<usize>| {
        let GroupGate { gate, up, biases } = gate_of(group.matrix);
        assert_eq!((gate.rows(), gate.cols()), (up.rows(), up.cols()), "gate and up differ in shape");
        let first_output = tile_row * TILE_ROWS;
        let num_outputs = TILE_ROWS.min(gate.rows() - first_output);
        let biases = biases.map(|bias| bias_of_tile(bias, first_output, num_outputs));
        let write = |row: usize, [gates, ups]: &mut [&mut [[f32; TILE_ROWS]]; 2]| {
            level.run(Gate { formula, gates, ups, biases: biases.each_ref().map(Option::as_ref) });
            write_panel(gate, tile_row, row, gates, &write);
        };
        multiply_rows(x, rows, group.num_rows, [gate, up], tile_row, &mut [ZERO_OUTPUTS; 2], level, write);
    };
    run(x, groups, &|matrix| gate_of(matrix).gate, pool, multiply, level);
}

/// Gives `multiply` each group with each sixteen rows of its matrix and each block of its rows.
fn run<'a>(
    x: &Activations,
    groups: &[RowGroup],
    matrix_of: &(impl Fn(usize) -> &'a PackedMatrix + Sync),
    pool: &ThreadPool,
    multiply: impl Fn(&RowGroup, usize, Range<usize>) + Sync,
    level: CpuLevel,
) {
    let row_block = rows_per_block(x, level);
    let tasks_of = |group: &RowGroup| {
        let matrix = matrix_of(group.matrix);
        let chunks = matrix.num_tile_rows().div_ceil(tile_rows_per_task(matrix, x, group.num_rows, level));
        (chunks, chunks * group.num_rows.div_ceil(row_block))
    };
    let mut num_tasks = 0;
    for group in groups.iter().filter(|group| group.num_rows > 0) {
        let matrix = matrix_of(group.matrix);
        assert_eq!(x.cols(), matrix.cols(), "the input does not have the matrix's columns");
        assert!(group.end_row() <= x.rows(), "there are no rows up to {}", group.end_row());
        assert!(group.first_row.is_multiple_of(RowGroup::ALIGNMENT), "row {} is in a panel", group.first_row);
        let formats = ActivationFormats::of([matrix.dtype()], level);
        assert!(x.has(formats), "a {} matrix needs {formats:?} of {x:?}", matrix.dtype());
        num_tasks += tasks_of(group).1;
    }
    pool.run(num_tasks, |mut task| {
        for group in groups {
            let (chunks, tasks) = tasks_of(group);
            if task >= tasks {
                task -= tasks;
                continue;
            }
            let matrix = matrix_of(group.matrix);
            let per_task = tile_rows_per_task(matrix, x, group.num_rows, level);
            let first_tile_row = task % chunks * per_task;
            let first_row = group.first_row + task / chunks * row_block;
            let end_row = group.end_row().min(first_row + row_block);
            for tile_row in first_tile_row..matrix.num_tile_rows().min(first_tile_row + per_task) {
                multiply(group, tile_row, first_row..end_row);
            }
            return;
        }
    });
}

fn write_panel(
    matrix: &PackedMatrix,
    tile_row: usize,
    first_row: usize,
    outputs: &[[f32; TILE_ROWS]],
    write: &impl Fn(usize, usize, &[f32]),
) {
    let first_output = tile_row * TILE_ROWS;
    let num_outputs = TILE_ROWS.min(matrix.rows() - first_output);
    for (index, outputs) in outputs.iter().enumerate() {
        write(first_row + index, first_output, &outputs[..num_outputs]);
    }
}
