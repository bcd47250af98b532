//! Matmuls of heads.

use std::ops::Range;

use candle_core::Tensor;

use super::{Failure, ReferenceBackend, ReferenceBuffer};
use crate::Result;
use crate::ops::buffer::Buffer;
use crate::ops::heads_linear::{Heads, HeadsLinear};
use crate::ops::linear::LinearScratch;
use crate::ops::weights::MatrixStack;

impl HeadsLinear for ReferenceBackend {
    /// Values between two results are unchanged, and so are earlier rows.
    fn heads_linear(
        &self,
        _scratch: &mut LinearScratch,
        rows: Range<usize>,
        x: Heads<'_>,
        heads: &MatrixStack,
        out: &mut Buffer,
        out_stride: usize,
    ) -> Result<()> {
        let (matrices, values) = (heads.held().on(self)?, x.rows.held().on(self)?);
        let out = out.held_mut().on_mut(self)?;
        self.run(rows.len(), || {
            let of_rows = |buffer: &ReferenceBuffer| -> Result<Tensor, Failure> {
                Ok(buffer.rows(rows.end)?.narrow(0, rows.start, rows.len())?)
            };
            let (values, old, before) = (of_rows(values)?, of_rows(out)?, out.rows(rows.start)?);
            let mut parts = Vec::new();
            for (head, matrix) in matrices.iter().enumerate() {
                let own = values.narrow(1, head * x.stride, matrix.num_cols())?.contiguous()?;
                parts.push(matrix.matmul(self, &own)?);
                let rest = matrix.num_rows();
                parts.push(old.narrow(1, head * out_stride + rest, out_stride - rest)?);
            }
            let rest_start = matrices.len() * out_stride;
            parts.push(old.narrow(1, rest_start, old.dim(1)? - rest_start)?);
            let parts: Vec<Tensor> = parts.into_iter().filter(|part| part.elem_count() > 0).collect();
            out.set_rows(&Tensor::cat(&[before, Tensor::cat(&parts, 1)?], 0)?)
        })
    }
}
