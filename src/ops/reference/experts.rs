//! A feed-forward network of experts. Which ones a token goes through is decided by [`crate::ops::route`].

use candle_core::{DType, Device, Tensor};

use super::Result;
use super::linear::rms_norm;
use super::{ReferenceBackend, ReferenceBuffer, ReferenceMatrix};
use crate::ops::RmsNorm;
use crate::ops::cpu::matmul::RowGroup;

/// `W·norm(x)` on the host, `[num_rows · num_experts]`.
pub(crate) fn router_logits(
    backend: &ReferenceBackend,
    num_rows: usize,
    x: &ReferenceBuffer,
    norm: &RmsNorm,
    weight: &ReferenceMatrix,
) -> Result<Vec<f32>> {
    let logits = weight.product(backend, &rms_norm(backend, &x.rows(num_rows)?, norm)?)?;
    Ok(logits.flatten_all()?.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.to_vec1()?)
}

/// The rows of each group through the matrices of its expert.
pub(crate) fn experts_swiglu(
    backend: &ReferenceBackend,
    groups: &[RowGroup],
    row_at: &[u32],
    x: &ReferenceBuffer,
    norm: &RmsNorm,
    [gate, up]: [&[ReferenceMatrix]; 2],
    out: &mut ReferenceBuffer,
) -> Result<()> {
    let rows = by_group(groups, |group| {
        let tokens = row_at[group.first_row..group.end_row()].iter().map(|row| *row as usize);
        let x = x.rows(tokens.clone().max().map_or(0, |last| last + 1))?;
        let x = x.index_select(&backend.indices(tokens)?, 0)?;
        let x = rms_norm(backend, &x, norm)?;
        let gate = gate[group.matrix].product(backend, &x)?.silu()?;
        Ok((gate * up[group.matrix].product(backend, &x)?)?)
    })?;
    out.set_rows(&rows)
}

/// `places` and `weights` are `[num_rows][experts of a row]`.
#[expect(clippy::too_many_arguments, reason = "an op's operands")]
pub(crate) fn experts_residual(
    backend: &ReferenceBackend,
    num_rows: usize,
    groups: &[RowGroup],
    places: &[u32],
    weights: &[f32],
    h: &ReferenceBuffer,
    down: &[ReferenceMatrix],
    x: &mut ReferenceBuffer,
) -> Result<()> {
    let products = by_group(groups, |group| {
        let h = h.rows(group.end_row())?.narrow(0, group.first_row, group.num_rows)?;
        down[group.matrix].product(backend, &h.contiguous()?)
    })?;
    let products = products.index_select(&backend.indices(places.iter().map(|place| *place as usize))?, 0)?;
    let weights = backend.tensor(weights, (weights.len(), 1))?;
    let products = products.broadcast_mul(&weights)?;
    let width = products.dim(1)?;
    let sum = products.reshape((num_rows, places.len() / num_rows, width))?.sum(1)?;
    let sum = (x.rows(num_rows)? + sum)?;
    x.set_rows(&sum)
}

/// The results of all groups where they belong, with zeros between them.
fn by_group(groups: &[RowGroup], result: impl Fn(&RowGroup) -> Result<Tensor>) -> Result<Tensor> {
    let mut parts: Vec<Tensor> = Vec::new();
    let mut end = 0;
    for group in groups {
        let part = result(group)?;
        if group.first_row > end {
            parts.push(Tensor::zeros((group.first_row - end, part.dim(1)?), part.dtype(), part.device())?);
        }
        end = group.end_row();
        parts.push(part);
    }
    Ok(Tensor::cat(&parts, 0)?)
}
