//! The row of latent attention in the cache, and the rotated ends of queries.

use candle_core::Tensor;

use super::ReferenceBackend;
use super::linear::rms_norm;
use super::rope_kv_write::Rotation;
use crate::Result;
use crate::ops::buffer::Buffer;
use crate::ops::device::{Held, LayerPools};
use crate::ops::latent_kv_write::{LatentKvWrite, LatentRows};
use crate::ops::step_inputs::StepInputs;

impl LatentKvWrite for ReferenceBackend {
    fn latent_kv_write(
        &self,
        rows: LatentRows<'_>,
        step: &StepInputs<'_>,
        pools: &mut Held<LayerPools>,
        out: &mut Buffer,
    ) -> Result<()> {
        let LatentRows { num_heads, queries, kv, norm, table } = rows;
        let (positions, slots, stride) = (step.positions, &step.attention.slot_mapping[..], queries.stride);
        let (num_tokens, rank, rotated) = (positions.len(), norm.weight.len(), 2 * table.num_pairs());
        let (heads, kv) = (queries.rows.held().on(self)?, kv.held().on(self)?);
        let (pools, out) = (pools.on_mut(self)?, out.held_mut().on_mut(self)?);
        self.run(num_tokens, || {
            let rotation = Rotation::new(self, table, positions)?;
            let kv = kv.rows(num_tokens)?;
            let row = kv.narrow(1, kv.dim(1)? - rank - rotated, rank + rotated)?;
            let latent = rms_norm(self, &row.narrow(1, 0, rank)?.contiguous()?, norm)?;
            let key = row.narrow(1, rank, rotated)?.reshape((num_tokens, 1, rotated))?;
            let key = rotation.apply(&key)?.reshape((num_tokens, rotated))?;
            pools.write(self, slots, &Tensor::cat(&[&latent, &key], 1)?, None)?;

            let heads = heads.rows(num_tokens)?.narrow(1, 0, num_heads * stride)?;
            let heads = heads.reshape((num_tokens, num_heads, stride))?;
            let ends = rotation.apply(&heads.narrow(2, stride - rotated, rotated)?.contiguous()?)?;
            let old = out.rows(num_tokens)?.reshape((num_tokens, num_heads, rank + rotated))?;
            let heads = Tensor::cat(&[&old.narrow(2, 0, rank)?, &ends], 2)?;
            out.set_rows(&heads.reshape((num_tokens, num_heads * (rank + rotated)))?)
        })
    }
}
