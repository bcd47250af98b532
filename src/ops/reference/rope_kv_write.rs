//! Norms and rotation of queries and keys, and the write to the cache.

use candle_core::{Device, Tensor};
use candle_nn::rotary_emb::{rope_i, rope_thd};

use super::linear::rms_norm;
use super::{Failure, ReferenceBackend, Result};
use crate::config::RopeStyle;
use crate::ops::buffer::Buffer;
use crate::ops::device::{Held, LayerPools};
use crate::ops::rope_kv_write::{RopeKvWrite, RotatedRows};
use crate::ops::step_inputs::StepInputs;
use crate::ops::{RmsNorm, RopeTable};

impl RopeKvWrite for ReferenceBackend {
    fn rope_table(&self, _len: usize) -> crate::Result<()> {
        Ok(())
    }

    fn rope_kv_write(
        &self,
        rows: RotatedRows<'_>,
        qkv: &mut Buffer,
        step: &StepInputs<'_>,
        pools: &mut Held<LayerPools>,
    ) -> crate::Result<()> {
        let RotatedRows { num_heads, num_kv_heads, head_dim, norms, table } = rows;
        let (positions, slots) = (step.positions, &step.attention.slot_mapping[..]);
        let (qkv, pools) = (qkv.held_mut().on_mut(self)?, pools.on_mut(self)?);
        self.run(positions.len(), || {
            let rows = qkv.rows(positions.len())?;
            let (q_width, kv_width) = (num_heads * head_dim, num_kv_heads * head_dim);
            let rotation = Rotation::new(self, table, positions)?;
            let heads = |first: usize, num_heads: usize, norm: Option<&RmsNorm>| {
                let heads = rows.narrow(1, first, num_heads * head_dim)?;
                let heads = heads.reshape((positions.len(), num_heads, head_dim))?;
                let heads = match norm {
                    Some(norm) => rms_norm(self, &heads, norm)?,
                    None => heads,
                };
                Ok::<_, Failure>(rotation.apply(&heads)?.reshape((positions.len(), num_heads * head_dim))?)
            };
            let factors = positions.iter().map(|position| table.query_factor(*position as usize)).collect();
            let factors = Tensor::from_vec::<_, f64>(factors, (positions.len(), 1), &Device::Cpu)?;
            let factors = self.bring(&factors.to_dtype(self.dtype())?)?;
            let queries = heads(0, num_heads, norms.map(|norms| norms.q))?.broadcast_mul(&factors)?;
            let keys = heads(q_width, num_kv_heads, norms.map(|norms| norms.k))?;
            let values = rows.narrow(1, q_width + kv_width, kv_width)?;
            pools.write(self, slots, &keys, Some(&values))?;
            qkv.set_rows(&Tensor::cat(&[&queries, &keys, &values], 1)?)
        })
    }
}

/// Cosines and sines of the angles of some positions, `[positions, pairs]`.
pub(super) struct Rotation {
    style: RopeStyle,
    cos: Tensor,
    sin: Tensor,
}

impl Rotation {
    pub(super) fn new(backend: &ReferenceBackend, table: &RopeTable, positions: &[u32]) -> Result<Self> {
        // Angles are computed in f32, as the models were trained with.
        let angles: Vec<f32> = positions
            .iter()
            .flat_map(|position| {
                table.frequencies().iter().map(move |frequency| *position as f32 * frequency)
            })
            .collect();
        // On the CPU: a GPU's fast functions lose large angles.
        let angles = Tensor::from_vec(angles, (positions.len(), table.num_pairs()), &Device::Cpu)?;
        let angles = angles.to_dtype(backend.dtype())?;
        let factor = f64::from(table.factor());
        Ok(Self {
            style: table.style(),
            cos: backend.bring(&(angles.cos()? * factor)?)?,
            sin: backend.bring(&(angles.sin()? * factor)?)?,
        })
    }

    /// Rotates the pairs of heads, `[positions, heads, head_dim]`; values after the pairs are unchanged.
    pub(super) fn apply(&self, heads: &Tensor) -> Result<Tensor> {
        let head_dim = heads.dim(2)?;
        let num_pairs = self.cos.dim(1)?;
        if num_pairs == 0 {
            return Ok(heads.clone());
        }
        let num_rotated = 2 * num_pairs;
        let pairs = heads.narrow(2, 0, num_rotated)?.unsqueeze(0)?;
        let rotated = match self.style {
            RopeStyle::HalfSplit => rope_thd(&pairs.contiguous()?, &self.cos, &self.sin)?,
            RopeStyle::Interleaved => {
                let pairs = pairs.transpose(1, 2)?.contiguous()?;
                rope_i(&pairs, &self.cos, &self.sin)?.transpose(1, 2)?
            }
        };
        let rotated = rotated.squeeze(0)?;
        if num_rotated == head_dim {
            return Ok(rotated);
        }
        let rest = heads.narrow(2, num_rotated, head_dim - num_rotated)?;
        Ok(Tensor::cat(&[&rotated, &rest], 2)?)
    }
}
