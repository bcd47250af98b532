//! The second projections of latent attention, in all the ways in which checkpoints keep them.

use super::Loader;
use crate::Result;
use crate::ops::MatrixStack;
use crate::weights::{DType, Quantizer, RawTensor};

impl<'a> Loader<'a> {
    /// The second projections of latent attention, for each of the shard's heads: of queries into the latent row,
    /// `[rank, key_dim]`, and of the latent row into values, `[value_dim, rank]`. Files have them like this, or as one
    /// matrix from the latent row to keys and values, `[heads · (key_dim + value_dim), rank]`. Where kernels multiply
    /// the first ones from both sides, they come with their transposed ones.
    ///
    /// # Errors
    /// As [`Self::matrix`].
    pub fn latent_projections(
        &self,
        prefix: &str,
        num_heads: usize,
        rank: usize,
        key_dim: usize,
        value_dim: usize,
    ) -> Result<(MatrixStack, MatrixStack)> {
        let head_dim = key_dim + value_dim;
        let num_all_heads = num_heads * self.shard.size();
        let heads = self.shard.rank() * num_heads..(self.shard.rank() + 1) * num_heads;
        let (key_shape, value_shape) = ([key_dim, rank], [value_dim, rank]);
        let (mut keys, mut transposed, mut values) = (Vec::new(), Vec::new(), Vec::new());
        let wants_transposed = !self.context.is_reference();
        let [k_name, v_name] = ["attn_k_b", "attn_v_b"].map(|name| format!("{prefix}.{name}.weight"));
        if self.checkpoint.contains(&k_name) {
            let all_keys = self.take(&k_name)?.expect_shape(&[num_all_heads, rank, key_dim])?;
            let all_values = self.take(&v_name)?.expect_shape(&[num_all_heads, value_dim, rank])?;
            let heads_of = |tensor: &RawTensor<'a>| {
                heads.clone().map(|head| tensor.matrix(head)).collect::<Result<Vec<_>>>()
            };
            let own = heads_of(&all_keys)?;
            if wants_transposed {
                for head in &own {
                    // Compared with the loss of the file's type, the rounding to eight bits is small.
                    transposed.push(self.repack_made(&head.transposed(DType::Q8_0)?.as_raw(), 0)?);
                }
            }
            keys = self.repack_slices(&own, None)?;
            values = self.repack_slices(&heads_of(&all_values)?, None)?;
        } else {
            let name = format!("{prefix}.attn_kv_b.weight");
            let both = self.take(&name)?.expect_shape(&[num_all_heads * head_dim, rank])?;
            for head in heads {
                let own = both.rows(head * head_dim, &key_shape)?;
                // Bytes of the file are counted once, not for both.
                let num_bytes = if wants_transposed { 0 } else { own.num_bytes() };
                // A tensor with a chosen type is not rounded before it has that type.
                let is_chosen = self.quantizer_for(&own).is_some_and(Quantizer::is_chosen);
                let turned = if own.is_packed() && is_chosen { DType::F32 } else { DType::F16 };
                keys.push(self.repack_made(&own.transposed(turned)?.as_raw(), num_bytes)?);
                if wants_transposed {
                    transposed.push(self.repack(&own)?);
                }
                own.release();
                values.push(self.repack(&both.rows(head * head_dim + key_dim, &value_shape)?)?);
            }
            self.pass_over(both.num_bytes() - both.num_bytes() / self.shard.size());
        }
        let keys = MatrixStack::new(self.context, keys)?;
        let keys = if wants_transposed { keys.with_transposed(self.context, transposed)? } else { keys };
        Ok((keys, MatrixStack::new(self.context, values)?))
    }
}
