//! Products with weights, and what is fused with them. Shapes are those of [`crate::ops`].

use candle_core::{D, Tensor};

use super::Result;
use super::{ReferenceBackend, ReferenceBuffer};
use crate::ops::{Linear, Matrix, RmsNorm};

/// `w · x / √(mean(x²) + eps)` over the last dimension.
pub(super) fn rms_norm(backend: &ReferenceBackend, x: &Tensor, norm: &RmsNorm) -> Result<Tensor> {
    let weight = backend.tensor(&norm.weight, norm.weight.len())?;
    let root_mean_square = (x.sqr()?.mean_keepdim(D::Minus1)? + f64::from(norm.eps))?.sqrt()?;
    Ok(x.broadcast_div(&root_mean_square)?.broadcast_mul(&weight)?)
}

/// `W·x + b` for each row of `x`.
fn linear(backend: &ReferenceBackend, x: &Tensor, linear: &Linear) -> Result<Tensor> {
    let product = linear.weight.reference()?.product(backend, x)?;
    match &linear.bias {
        Some(bias) => Ok(product.broadcast_add(&backend.tensor(bias, bias.len())?)?),
        None => Ok(product),
    }
}

pub(crate) fn norm_linear(
    backend: &ReferenceBackend,
    num_rows: usize,
    x: &ReferenceBuffer,
    norm: &RmsNorm,
    linears: &[&Linear],
    out: &mut ReferenceBuffer,
) -> Result<()> {
    let x = rms_norm(backend, &x.rows(num_rows)?.narrow(1, 0, norm.weight.len())?.contiguous()?, norm)?;
    let parts = linears.iter().map(|own| linear(backend, &x, own)).collect::<Result<Vec<_>>>()?;
    out.set_rows(&Tensor::cat(&parts, 1)?)
}

pub(crate) fn linear_residual(
    backend: &ReferenceBackend,
    num_rows: usize,
    h: &ReferenceBuffer,
    own: &Linear,
    x: &mut ReferenceBuffer,
) -> Result<()> {
    let sum = (x.rows(num_rows)? + linear(backend, &h.rows(num_rows)?, own)?)?;
    x.set_rows(&sum)
}

pub(crate) fn norm_swiglu(
    backend: &ReferenceBackend,
    num_rows: usize,
    x: &ReferenceBuffer,
    norm: &RmsNorm,
    gate: &Matrix,
    up: &Matrix,
    out: &mut ReferenceBuffer,
) -> Result<()> {
    let x = rms_norm(backend, &x.rows(num_rows)?, norm)?;
    let gate = gate.reference()?.product(backend, &x)?.silu()?;
    out.set_rows(&(gate * up.reference()?.product(backend, &x)?)?)
}

pub(crate) fn norm_swiglu_biased(
    backend: &ReferenceBackend,
    num_rows: usize,
    x: &ReferenceBuffer,
    norm: &RmsNorm,
    [gate, up]: [&Linear; 2],
    out: &mut ReferenceBuffer,
) -> Result<()> {
    let x = rms_norm(backend, &x.rows(num_rows)?, norm)?;
    out.set_rows(&(linear(backend, &x, gate)?.silu()? * linear(backend, &x, up)?)?)
}

pub(crate) fn norm_logits(
    backend: &ReferenceBackend,
    num_rows: usize,
    x: &ReferenceBuffer,
    norm: &RmsNorm,
    head: &Matrix,
    logits: &mut ReferenceBuffer,
) -> Result<()> {
    let x = rms_norm(backend, &x.rows(num_rows)?, norm)?;
    logits.set_rows(&head.reference()?.product(backend, &x)?)
}
