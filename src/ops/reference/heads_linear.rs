//! Products of heads.

use candle_core::Tensor;

use super::Result;
use super::{ReferenceBackend, ReferenceBuffer, ReferenceMatrix};

/// `x` has a head every `stride` values, `out` every `out_stride`; what is between two results stays as it is.
pub(crate) fn heads_linear(
    backend: &ReferenceBackend,
    num_rows: usize,
    x: &ReferenceBuffer,
    stride: usize,
    heads: &[ReferenceMatrix],
    out: &mut ReferenceBuffer,
    out_stride: usize,
) -> Result<()> {
    let (x, old) = (x.rows(num_rows)?, out.rows(num_rows)?);
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
    out.set_rows(&Tensor::cat(&parts, 1)?)
}
