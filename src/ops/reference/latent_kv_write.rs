//! The row of latent attention in the cache, and the rotated ends of queries.

use candle_core::Tensor;

use super::Result;
use super::linear::rms_norm;
use super::rope_kv_write::Rotation;
use super::{ReferenceBackend, ReferenceBuffer, ReferencePools};
use crate::ops::{RmsNorm, RopeTable};

/// Operands of [`latent_kv_write`], checked.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LatentKvWrite<'a> {
    pub(crate) num_heads: usize,
    pub(crate) positions: &'a [u32],
    pub(crate) slots: &'a [usize],
    pub(crate) norm: &'a RmsNorm,
    pub(crate) table: &'a RopeTable,
}

pub(crate) fn latent_kv_write(
    backend: &ReferenceBackend,
    operands: LatentKvWrite<'_>,
    queries: &ReferenceBuffer,
    query_stride: usize,
    kv: &ReferenceBuffer,
    pools: &mut ReferencePools,
    out: &mut ReferenceBuffer,
) -> Result<()> {
    let LatentKvWrite { num_heads, positions, slots, norm, table } = operands;
    let (num_tokens, rank, rotated) = (positions.len(), norm.weight.len(), 2 * table.num_pairs());
    let rotation = Rotation::new(backend, table, positions)?;
    let kv = kv.rows(num_tokens)?;
    let row = kv.narrow(1, kv.dim(1)? - rank - rotated, rank + rotated)?;
    let latent = rms_norm(backend, &row.narrow(1, 0, rank)?.contiguous()?, norm)?;
    let key = row.narrow(1, rank, rotated)?.reshape((num_tokens, 1, rotated))?;
    let key = rotation.apply(&key)?.reshape((num_tokens, rotated))?;
    pools.write(backend, slots, &Tensor::cat(&[&latent, &key], 1)?, None)?;

    let heads = queries.rows(num_tokens)?.narrow(1, 0, num_heads * query_stride)?;
    let heads = heads.reshape((num_tokens, num_heads, query_stride))?;
    let ends = rotation.apply(&heads.narrow(2, query_stride - rotated, rotated)?.contiguous()?)?;
    let old = out.rows(num_tokens)?.reshape((num_tokens, num_heads, rank + rotated))?;
    let heads = Tensor::cat(&[&old.narrow(2, 0, rank)?, &ends], 2)?;
    out.set_rows(&heads.reshape((num_tokens, num_heads * (rank + rotated)))?)
}
