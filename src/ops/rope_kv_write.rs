//! What happens between the query, key and value projections and attention.

use crate::config::RopeStyle;
use crate::ops::buffer::Buffer;
use crate::ops::context::{Backend, Context};
use crate::ops::cpu::rope;
use crate::ops::cpu::rows::RowsMut;
use crate::ops::kv_cache::KvCache;
use crate::ops::weights::RmsNorm;
use crate::{Error, Result};

/// Cosines and sines of every position and pair.
#[derive(Debug, Clone)]
pub struct RopeTable {
    style: RopeStyle,
    num_pairs: usize,
    /// `[positions][2][num_pairs]`: cosines, then sines.
    values: Vec<f32>,
}

impl RopeTable {
    /// A table of `num_positions` positions: `angle(position, pair)` in radians, with sine and cosine
    /// multiplied by `factor`.
    #[must_use]
    pub fn new(
        style: RopeStyle,
        num_positions: usize,
        num_pairs: usize,
        factor: f32,
        angle: impl Fn(usize, usize) -> f32,
    ) -> Self {
        let mut values = Vec::with_capacity(num_positions * num_pairs * 2);
        for position in 0..num_positions {
            values.extend((0..num_pairs).map(|pair| angle(position, pair).cos() * factor));
            values.extend((0..num_pairs).map(|pair| angle(position, pair).sin() * factor));
        }
        Self { style, num_pairs, values }
    }

    /// Which values make a pair.
    #[must_use]
    pub fn style(&self) -> RopeStyle {
        self.style
    }

    /// Pairs of a head that are rotated.
    #[must_use]
    pub fn num_pairs(&self) -> usize {
        self.num_pairs
    }

    /// Positions from 0 that the table has.
    #[must_use]
    pub fn num_positions(&self) -> usize {
        self.values.len() / (2 * self.num_pairs)
    }

    /// Cosines and sines of a position.
    #[inline(always)]
    pub(crate) fn row(&self, position: usize) -> (&[f32], &[f32]) {
        self.values[position * 2 * self.num_pairs..][..2 * self.num_pairs].split_at(self.num_pairs)
    }
}

/// The norms over the values of each query head and of each key head.
#[derive(Debug, Clone, Copy)]
pub struct HeadNorms<'a> {
    /// `[head_dim]`.
    pub q: &'a RmsNorm,
    /// `[head_dim]`.
    pub k: &'a RmsNorm,
}

/// Normalises (if there are norms) and rotates queries in place and keys, and writes keys and values to
/// their slots of layer `layer` of the cache.
///
/// `qkv` is `[positions.len(), (num_heads + 2 · num_kv_heads) · head_dim]`: query heads, key heads, value
/// heads. `slot_mapping` has a slot for each token.
///
/// # Errors
/// [`crate::ErrorKind::Internal`] if shapes do not fit together, or a slot or a position does not exist.
#[expect(clippy::too_many_arguments, reason = "an op's operands")]
pub fn rope_kv_write(
    context: &Context,
    qkv: &mut Buffer,
    positions: &[u32],
    slot_mapping: &[usize],
    norms: Option<HeadNorms<'_>>,
    table: &RopeTable,
    cache: &mut KvCache,
    layer: usize,
) -> Result<()> {
    let layout = cache.layout();
    let (num_kv_heads, head_dim) = (layout.num_kv_heads, layout.head_dim);
    let num_heads = (qkv.width() / head_dim).saturating_sub(2 * num_kv_heads);
    let fits = qkv.width() == (num_heads + 2 * num_kv_heads) * head_dim
        && num_heads > 0
        && num_heads.is_multiple_of(num_kv_heads)
        && table.num_pairs * 2 <= head_dim
        && positions.len() == slot_mapping.len()
        && layer < cache.num_layers()
        && norms.is_none_or(|norms| norms.q.weight.len() == head_dim && norms.k.weight.len() == head_dim);
    if !fits {
        return Err(Error::internal(format!(
            "rope_kv_write: rows of {} values, {} pairs, {} positions and {} slots do not fit {layout:?}",
            qkv.width(),
            table.num_pairs,
            positions.len(),
            slot_mapping.len()
        )));
    }
    if let Some(position) = positions.iter().find(|position| **position as usize >= table.num_positions()) {
        return Err(Error::internal(format!(
            "position {position} is not below the {} of the rope table",
            table.num_positions()
        )));
    }
    let num_slots = cache.num_blocks() * layout.block_size;
    if let Some(slot) = slot_mapping.iter().find(|slot| **slot >= num_slots) {
        return Err(Error::internal(format!("slot {slot} is not below the {num_slots} of the cache")));
    }
    let Backend::Cpu(cpu) = context.launch("rope_kv_write")?;
    let operands =
        rope::RopeKvWrite { num_heads, num_kv_heads, head_dim, positions, slot_mapping, norms, table };
    let width = qkv.width();
    qkv.write(positions.len(), |qkv| {
        rope::rope_kv_write(operands, &RowsMut::new(qkv, width), cache, layer, &cpu.pool, cpu.level);
    })
}
