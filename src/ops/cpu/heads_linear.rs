//! Matmuls of heads, each with a matrix of its own.

use std::ops::Range;

use super::CpuBackend;
use super::linear::LinearScratch as OwnScratch;
use super::matmul::{ActivationFormats, RowGroup, matmul_groups};
use super::rows::RowsMut;
use crate::Result;
use crate::ops::buffer::Buffer;
use crate::ops::heads_linear::{Heads, HeadsLinear};
use crate::ops::linear::LinearScratch;
use crate::ops::weights::MatrixStack;

impl HeadsLinear for CpuBackend {
    fn heads_linear(
        &self,
        scratch: &mut LinearScratch,
        rows: Range<usize>,
        x: Heads<'_>,
        heads: &MatrixStack,
        out: &mut Buffer,
        out_stride: usize,
    ) -> Result<()> {
        let matrices = heads.held().on(self)?.matrices();
        let OwnScratch { activations, groups } = scratch.held_mut().on_mut(self)?;
        let (first_row, num_rows) = (rows.start, rows.len());
        let rows_of_head = num_rows.next_multiple_of(RowGroup::ALIGNMENT);
        groups.clear();
        groups.extend((0..heads.len()).map(|head| RowGroup {
            first_row: head * rows_of_head,
            num_rows,
            matrix: head,
        }));
        let (width, out_width) = (x.rows.width(), out.width());
        let start_of = |row: usize| (first_row + row % rows_of_head) * width + row / rows_of_head * x.stride;
        let formats = ActivationFormats::of(matrices.iter().map(|matrix| matrix.dtype()), self.level);
        let values = self.rows(x.rows, rows.end)?;
        let (pool, level) = (&self.pool, self.level);
        activations.prepare_groups(values, start_of, groups, heads.cols(), None, formats, pool, level);
        let out = RowsMut::new(self.rows_mut(out, rows.end)?, out_width);
        let write = |row: usize, first: usize, projected: &[f32]| {
            let (head, row) = (row / rows_of_head, first_row + row % rows_of_head);
            // SAFETY: every head of a row has outputs of its own, each of which is written once.
            let projection = unsafe { out.range(row, head * out_stride + first, projected.len()) };
            projection.copy_from_slice(projected);
        };
        matmul_groups(activations, groups, |head| &matrices[head], write, pool, level);
        Ok(())
    }
}
