//! Products of heads.

use std::ops::Range;

use candle_core::Tensor;

use super::Result;
use super::{ReferenceBackend, ReferenceBuffer, ReferenceMatrix};

/// `x` has a head every `stride` values, `out` every `out_stride`; what is between two results stays as it is, and so do
/// the rows before these.
pub(crate) fn heads_linear(
    backend: &ReferenceBackend,
    rows: Range<usize>,
    x: &ReferenceBuffer,
    stride: usize,
    heads: &[ReferenceMatrix],
    out: &mut ReferenceBuffer,
    out_stride: usize,
) -> Result<()> {
    let of_rows = |buffer: &ReferenceBuffer| -> Result<Tensor> {
        Ok(buffer.rows(rows.end)?.narrow(0, rows.start, rows.len())?)
    };
    let (x, old, before) = (of_rows(x)?, of_rows(out)?, out.rows(rows.start)?);
    let mut parts = Vec::new();
    for (head, matrix) in heads.iter().enumerate() {
        let own = x.narrow(1, head * stride, matrix.num_cols())?.contiguous()?;
        parts.push(matrix.product(backend, &own)?);
        let rest = matrix.num_rows();
        parts.push(old.narrow(1, head * out_stride + rest, out_stride - rest)?);
    }
    let behind = heads.len() * out_stride;
    parts.push(old.narrow(1, behind, old.dim(1)? - behind)?);
    let parts: Vec<Tensor> = parts.into_iter().filter(|part| part.elem_count() > 0).collect();
    out.set_rows(&Tensor::cat(&[before, Tensor::cat(&parts, 1)?], 0)?)
}
