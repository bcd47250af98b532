//! What happens between the projections of latent attention and attention itself.

use crate::config::RopeStyle;
use crate::ops::buffer::Buffer;
use crate::ops::context::{Backend, Context};
use crate::ops::cpu::latent_row;
use crate::ops::cpu::rows::RowsMut;
use crate::ops::gpu;
use crate::ops::heads_linear::Heads;
use crate::ops::kv_cache::KvCache;
use crate::ops::reference;
use crate::ops::rope_kv_write::RopeTable;
use crate::ops::step_inputs::StepInputs;
use crate::ops::weights::RmsNorm;
use crate::{Error, Result};

/// Writes the row `[norm(latent), rotated key]` of each token to the cache, and the rotated end of each query head to
/// where attention wants it.
///
/// The last values of a row of `kv` are the latent ones, as many as `norm` has, and the key, as many as `table`
/// rotates. A head of `queries` ends with as many values to be rotated; they become the end of the head of `out`, whose
/// heads are as wide as a row of the cache. The rest of `out` stays as it is.
///
/// # Errors
/// [`crate::ErrorKind::Internal`] if shapes do not fit together, a slot does not exist or the table does not extend to
/// a position.
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
    let num_slots = cache.num_blocks() * layout.block_size;
    if let Some(slot) = slots.iter().find(|slot| **slot >= num_slots) {
        return Err(Error::internal(format!("slot {slot} is not below the {num_slots} of the cache")));
    }
    let num_tokens = positions.len();
    let cpu = match context.launch() {
        Backend::Cpu(cpu) => cpu,
        Backend::Reference(backend) => {
            let operands = reference::LatentKvWrite { num_heads, positions, slots, norm, table };
            let (rows, kv) = (queries.rows.reference()?, kv.reference()?);
            let (pools, out) = (cache.reference_mut(layer)?, out.reference_mut()?);
            return backend.run(num_tokens, || {
                reference::latent_kv_write(backend, operands, rows, queries.stride, kv, pools, out)
            });
        }
        Backend::Gpu(gpu) => {
            let write = gpu::LatentWrite {
                queries: queries.rows.gpu()?,
                query_width: queries.rows.width(),
                query_stride: queries.stride,
                kv: kv.gpu()?,
                kv_width: kv.width(),
                num_tokens,
                num_heads,
                norm: norm.weight.gpu()?,
                eps: norm.eps,
                table: table.gpu()?,
                num_pairs: table.num_pairs(),
                is_interleaved: table.style() == RopeStyle::Interleaved,
                out: out.gpu()?,
            };
            return gpu::latent_kv_write(gpu, step.gpu()?, write, cache.gpu_rows(layer)?);
        }
    };
    let operands = latent_row::LatentKvWrite {
        num_heads,
        positions,
        slots,
        norm: norm.into(),
        table: table.rows(),
        query_width: queries.rows.width(),
        query_stride: queries.stride,
        kv_width: kv.width(),
    };
    let (out_width, pools) = (out.width(), cache.pools_mut(layer)?);
    out.write(num_tokens, |out| {
        let out = RowsMut::new(out, out_width);
        queries.rows.read(num_tokens, |queries| {
            kv.read(num_tokens, |kv| {
                // SAFETY: the widths are those of the layout, and all slots were looked for above.
                unsafe {
                    latent_row::latent_kv_write(operands, queries, kv, &out, pools, &cpu.pool, cpu.level);
                }
            })
        })
    })??
}
