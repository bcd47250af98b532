//! The step between the projections of latent attention and attention itself: norm, rotation, cache write.

use crate::ops::buffer::Buffer;
use crate::ops::context::Context;
use crate::ops::device::{Device, Held, LayerPools, on_device};
use crate::ops::heads_linear::Heads;
use crate::ops::kv_cache::KvCache;
use crate::ops::rope_kv_write::RopeTable;
use crate::ops::step_inputs::StepInputs;
use crate::ops::weights::RmsNorm;
use crate::{Error, Result};

/// The operation of a device.
pub(crate) trait LatentKvWrite: Device {
    /// [`latent_kv_write`].
    fn latent_kv_write(
        &self,
        rows: LatentRows<'_>,
        step: &StepInputs<'_>,
        pools: &mut Held<LayerPools>,
        out: &mut Buffer,
    ) -> Result<()>;
}

/// The operands of the norm, the rotation and the write.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LatentRows<'a> {
    pub(crate) num_heads: usize,
    pub(crate) queries: Heads<'a>,
    pub(crate) kv: &'a Buffer,
    pub(crate) norm: &'a RmsNorm,
    pub(crate) table: &'a RopeTable,
}

/// Writes the row `[norm(latent), rotated key]` of each token to the cache, and the rotated end of each query head to
/// `out`.
///
/// A row of `kv` ends with the latent values, of `norm`'s length, and the key, of the length that `table` rotates. A
/// head of `queries` ends with as many values to rotate; they become the end of the head of `out`, whose heads are as
/// wide as a row of the cache. The rest of `out` is unchanged.
///
/// # Errors
/// [`crate::ErrorKind::Internal`] if shapes do not match, a slot does not exist or the table does not extend to a
/// position.
#[expect(clippy::too_many_arguments, reason = "an op's operands")]
pub fn latent_kv_write(
    context: &Context,
    queries: Heads<'_>,
    kv: &Buffer,
    step: &StepInputs<'_>,
    norm: &RmsNorm,
    table: &RopeTable,
    cache: &mut KvCache,
    layer: usize,
    out: &mut Buffer,
) -> Result<()> {
    let (positions, slots) = (step.positions, &step.attention.slot_mapping[..]);
    let (layout, rotated) = (cache.layout(), 2 * table.num_pairs());
    let num_heads = out.width() / layout.head_dim.max(1);
    let fits = !layout.has_values
        && layout.num_kv_heads == 1
        && layout.head_dim == norm.weight.len() + rotated
        && kv.width() >= layout.head_dim
        && out.width() == num_heads * layout.head_dim
        && queries.stride >= rotated
        && queries.rows.width() >= num_heads * queries.stride
        && positions.len() == slots.len()
        && layer < cache.num_layers();
    if !fits {
        return Err(Error::internal(format!(
            "latent_kv_write: rows of {}, {} and {} values, {rotated} of them rotated, {} positions and {} slots do \
             not fit {layout:?}",
            queries.rows.width(),
            kv.width(),
            out.width(),
            positions.len(),
            slots.len()
        )));
    }
    if let Some(position) = positions.iter().find(|position| **position as usize >= table.num_positions()) {
        return Err(Error::internal(format!(
            "position {position} is not below the {} that the rope table has",
            table.num_positions()
        )));
    }
    let num_slots = cache.num_blocks_of(layer) * layout.block_size;
    if let Some(slot) = slots.iter().find(|slot| **slot >= num_slots) {
        return Err(Error::internal(format!("slot {slot} is not below the {num_slots} of the cache")));
    }
    let rows = LatentRows { num_heads, queries, kv, norm, table };
    on_device!(context.launch(), |device| device.latent_kv_write(rows, step, cache.layer_mut(layer), out))
}
