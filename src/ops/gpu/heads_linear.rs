//! Matmuls of heads, each with a matrix of its own.

use std::ops::Range;
use std::sync::Arc;

use super::backend::GpuBackend;
use super::linear::operands;
use super::matmul::{GpuProjection, Operands, Stacked, matmul};
use crate::Result;
use crate::ops::buffer::Buffer;
use crate::ops::heads_linear::{Heads, HeadsLinear};
use crate::ops::linear::LinearScratch;
use crate::ops::weights::MatrixStack;

impl HeadsLinear for Arc<GpuBackend> {
    fn heads_linear(
        &self,
        scratch: &mut LinearScratch,
        rows: Range<usize>,
        x: Heads<'_>,
        heads: &MatrixStack,
        out: &mut Buffer,
        out_stride: usize,
    ) -> Result<()> {
        let stacked = Stacked::Heads { num_heads: heads.len(), x_stride: x.stride, out_stride };
        let projection = GpuProjection::of_stack(heads.held().on(self)?.stack());
        let operands = operands(self, scratch.held().on(self)?, rows.end, x.rows, None, out)?.of_rows(rows);
        matmul(self, &[projection], &Operands { stacked, ..operands })
    }
}
