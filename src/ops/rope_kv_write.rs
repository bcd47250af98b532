//! The step between the query, key and value projections and attention: norms, rotation, cache write.

use crate::config::{QueryGrowth, RopeStyle};
use crate::ops::buffer::Buffer;
use crate::ops::context::Context;
use crate::ops::cpu::rope::RopeRows;
use crate::ops::device::{Device, Held, LayerPools, Tables, on_device, with_held};
use crate::ops::kv_cache::KvCache;
use crate::ops::step_inputs::StepInputs;
use crate::ops::weights::RmsNorm;
use crate::{Error, Result};

/// A table of cosines and sines in the kernels' memory.
pub(crate) trait DeviceTable: std::fmt::Debug {
    /// Writes values after the first `start` ones.
    fn extend(&mut self, _start: usize, _values: &[f32]) -> Result<()> {
        Ok(())
    }
}

/// Kernels read the host's own table.
impl DeviceTable for () {}

/// The operations of a device.
pub(crate) trait RopeKvWrite: Device {
    /// Memory for a table of `len` values.
    fn rope_table(&self, len: usize) -> Result<Self::Table>;

    /// [`rope_kv_write`].
    fn rope_kv_write(
        &self,
        rows: RotatedRows<'_>,
        qkv: &mut Buffer,
        step: &StepInputs<'_>,
        pools: &mut Held<LayerPools>,
    ) -> Result<()>;
}

/// The operands of a rotation.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RotatedRows<'a> {
    pub(crate) num_heads: usize,
    pub(crate) num_kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) norms: Option<HeadNorms<'a>>,
    pub(crate) table: &'a RopeTable,
}

/// Cosines and sines of `position · frequency`, for each position and pair. Without pairs it rotates nothing.
///
/// The memory for all positions is reserved at once, but computed and touched only up to the longest sequence so far.
#[derive(Debug)]
pub struct RopeTable {
    style: RopeStyle,
    /// Radians per position of each pair.
    frequencies: Vec<f32>,
    factor: f32,
    growth: Option<QueryGrowth>,
    max_positions: usize,
    num_positions: usize,
    /// `[positions][2 · pairs + 1]`: cosines, then sines, then the factor of queries.
    values: Vec<f32>,
    /// The same, in the kernels' memory.
    held: Held<Tables>,
}

impl RopeTable {
    /// Positions that are computed together.
    const STEP: usize = 256;

    /// A table for positions below `max_positions`. Sines and cosines are multiplied by `factor`.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Capacity`] if the device has no memory.
    pub fn new(
        context: &Context,
        style: RopeStyle,
        frequencies: Vec<f32>,
        factor: f32,
        max_positions: usize,
    ) -> Result<Self> {
        let len = max_positions * (frequencies.len() * 2 + 1);
        let held = on_device!(context.backend(), |device| Held::new(device, device.rope_table(len)?));
        let values = Vec::with_capacity(len);
        Ok(Self { style, frequencies, factor, growth: None, max_positions, num_positions: 0, values, held })
    }

    /// The same for queries with a factor that depends on the position.
    #[must_use]
    pub fn with_growth(self, growth: Option<QueryGrowth>) -> Self {
        Self { growth, ..self }
    }

    /// Computes the missing positions below `num_positions`.
    ///
    /// Angles are computed in f32, as the models were trained with.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Internal`] if the table has fewer positions.
    pub fn extend_to(&mut self, num_positions: usize) -> Result<()> {
        if num_positions > self.max_positions {
            return Err(Error::internal(format!(
                "position {} is not below the {} of the rope table",
                num_positions - 1,
                self.max_positions
            )));
        }
        if num_positions <= self.num_positions {
            return Ok(());
        }
        let end = num_positions.next_multiple_of(Self::STEP).min(self.max_positions);
        let num_old = self.values.len();
        for position in self.num_positions..end {
            let angles = self.frequencies.iter().map(|frequency| position as f32 * frequency);
            self.values.extend(angles.clone().map(|angle| angle.cos() * self.factor));
            self.values.extend(angles.map(|angle| angle.sin() * self.factor));
            self.values.push(self.query_factor(position) as f32);
        }
        self.num_positions = end;
        let new = &self.values[num_old..];
        with_held!(&mut self.held, |table| DeviceTable::extend(table, num_old, new))?;
        Ok(())
    }

    /// The order of pairs.
    #[must_use]
    pub fn style(&self) -> RopeStyle {
        self.style
    }

    /// Radians per position of each pair.
    pub(crate) fn frequencies(&self) -> &[f32] {
        &self.frequencies
    }

    /// The factor of sines and cosines.
    pub(crate) fn factor(&self) -> f32 {
        self.factor
    }

    /// The factor of a position's queries.
    pub(crate) fn query_factor(&self, position: usize) -> f64 {
        self.growth.map_or(1.0, |growth| growth.factor(position))
    }

    /// Pairs of a head that are rotated.
    #[must_use]
    pub fn num_pairs(&self) -> usize {
        self.frequencies.len()
    }

    /// The number of positions, from 0, that are computed.
    #[must_use]
    pub fn num_positions(&self) -> usize {
        self.num_positions
    }

    pub(crate) fn held(&self) -> &Held<Tables> {
        &self.held
    }

    /// Cosines and sines of the positions that are computed.
    pub(crate) fn rows(&self) -> RopeRows<'_> {
        RopeRows { style: self.style, num_pairs: self.num_pairs(), values: &self.values }
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

/// Normalises (if there are norms) and rotates queries in place, with the factor of their position, and keys, and
/// writes keys and values to their slots of layer `layer` of the cache.
///
/// `qkv` is `[num_tokens, (num_heads + 2 · num_kv_heads) · head_dim]`: query heads, key heads, value
/// heads.
///
/// # Errors
/// [`crate::ErrorKind::Internal`] if shapes do not match, a slot does not exist, or `table` does not extend to a
/// position.
pub fn rope_kv_write(
    context: &Context,
    qkv: &mut Buffer,
    step: &StepInputs<'_>,
    norms: Option<HeadNorms<'_>>,
    table: &RopeTable,
    cache: &mut KvCache,
    layer: usize,
) -> Result<()> {
    let rows = check(qkv, step, norms, table, cache, layer)?;
    on_device!(context.launch(), |device| device.rope_kv_write(rows, qkv, step, cache.layer_mut(layer)))
}

/// Checks everything that the kernels rely on. Returns the operands of the rotation.
pub(super) fn check<'a>(
    qkv: &Buffer,
    step: &StepInputs<'_>,
    norms: Option<HeadNorms<'a>>,
    table: &'a RopeTable,
    cache: &KvCache,
    layer: usize,
) -> Result<RotatedRows<'a>> {
    let (positions, slot_mapping) = (step.positions, &step.attention.slot_mapping[..]);
    let layout = cache.layout();
    let (num_kv_heads, head_dim) = (layout.num_kv_heads, layout.head_dim);
    let num_heads = (qkv.width() / head_dim).saturating_sub(2 * num_kv_heads);
    let fits = qkv.width() == (num_heads + 2 * num_kv_heads) * head_dim
        && num_heads > 0
        && num_heads.is_multiple_of(num_kv_heads)
        && table.num_pairs() * 2 <= head_dim
        && positions.len() == slot_mapping.len()
        && layer < cache.num_layers()
        && norms.is_none_or(|norms| norms.q.weight.len() == head_dim && norms.k.weight.len() == head_dim);
    if !fits {
        return Err(Error::internal(format!(
            "rope_kv_write: rows of {} values, {} pairs, {} positions and {} slots do not fit {layout:?}",
            qkv.width(),
            table.num_pairs(),
            positions.len(),
            slot_mapping.len()
        )));
    }
    if let Some(position) = positions.iter().find(|position| **position as usize >= table.num_positions()) {
        return Err(Error::internal(format!(
            "position {position} is not below the {} that the rope table has",
            table.num_positions()
        )));
    }
    let num_slots = cache.num_blocks_of(layer) * layout.block_size;
    if let Some(slot) = slot_mapping.iter().find(|slot| **slot >= num_slots) {
        return Err(Error::internal(format!("slot {slot} is not below the {num_slots} of the cache")));
    }
    Ok(RotatedRows { num_heads, num_kv_heads, head_dim, norms, table })
}
