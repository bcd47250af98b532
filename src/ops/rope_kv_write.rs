//! What happens between the query, key and value projections and attention.

use std::sync::Arc;

use crate::config::RopeStyle;
use crate::ops::buffer::Buffer;
use crate::ops::context::{Backend, Context};
use crate::ops::cpu::rope::{self, RopeRows};
use crate::ops::cpu::rows::RowsMut;
use crate::ops::gpu::{self, GpuBackend, GpuBuffer, Placement};
use crate::ops::kv_cache::KvCache;
use crate::ops::reference;
use crate::ops::step_inputs::StepInputs;
use crate::ops::weights::RmsNorm;
use crate::{Error, Result};

/// Cosines and sines of `position · frequency`, for each position and pair.
///
/// The memory for all positions is reserved at once, but computed and touched only as far as sequences
/// have become long.
#[derive(Debug)]
pub struct RopeTable {
    style: RopeStyle,
    /// Radians per position of each pair.
    frequencies: Vec<f32>,
    factor: f32,
    max_positions: usize,
    /// `[positions][2][pairs]`: cosines, then sines.
    values: Vec<f32>,
    /// The same, where a GPU reads it.
    gpu: Option<(Arc<GpuBackend>, GpuBuffer)>,
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
        let len = max_positions * frequencies.len() * 2;
        let gpu = match context.backend() {
            Backend::Cpu(_) | Backend::Reference(_) => None,
            Backend::Gpu(gpu) => {
                let buffer = gpu.device().allocate((len * 4).max(16), Placement::Shared)?;
                Some((Arc::clone(gpu), buffer))
            }
        };
        Ok(Self { style, frequencies, factor, max_positions, values: Vec::with_capacity(len), gpu })
    }

    /// Computes what is missing of the positions below `num_positions`.
    ///
    /// Angles are products of singles, as the models were trained with.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Internal`] if there are more than the table is made for.
    pub fn extend_to(&mut self, num_positions: usize) -> Result<()> {
        if num_positions > self.max_positions {
            return Err(Error::internal(format!(
                "position {} is not below the {} of the rope table",
                num_positions - 1,
                self.max_positions
            )));
        }
        if num_positions <= self.num_positions() {
            return Ok(());
        }
        let end = num_positions.next_multiple_of(Self::STEP).min(self.max_positions);
        let num_old = self.values.len();
        for position in self.num_positions()..end {
            let angles = self.frequencies.iter().map(|frequency| position as f32 * frequency);
            self.values.extend(angles.clone().map(|angle| angle.cos() * self.factor));
            self.values.extend(angles.map(|angle| angle.sin() * self.factor));
        }
        if let Some((gpu, buffer)) = &self.gpu {
            gpu.device().write(buffer, 4 * num_old, bytemuck::cast_slice(&self.values[num_old..]))?;
        }
        Ok(())
    }

    /// Which values make a pair.
    #[must_use]
    pub fn style(&self) -> RopeStyle {
        self.style
    }

    /// Radians per position of each pair.
    pub(crate) fn frequencies(&self) -> &[f32] {
        &self.frequencies
    }

    /// What sines and cosines are multiplied by.
    pub(crate) fn factor(&self) -> f32 {
        self.factor
    }

    /// Pairs of a head that are rotated.
    #[must_use]
    pub fn num_pairs(&self) -> usize {
        self.frequencies.len()
    }

    /// Positions from 0 that are computed.
    #[must_use]
    pub fn num_positions(&self) -> usize {
        self.values.len() / (2 * self.num_pairs()).max(1)
    }

    pub(crate) fn gpu(&self) -> Result<&GpuBuffer> {
        let (_, buffer) =
            self.gpu.as_ref().ok_or_else(|| Error::internal("a rope table is not on the device"))?;
        Ok(buffer)
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

/// Normalises (if there are norms) and rotates queries in place and keys, and writes keys and values to
/// their slots of layer `layer` of the cache.
///
/// `qkv` is `[num_tokens, (num_heads + 2 · num_kv_heads) · head_dim]`: query heads, key heads, value
/// heads.
///
/// # Errors
/// [`crate::ErrorKind::Internal`] if shapes do not fit together, a slot does not exist, or `table` does not
/// extend to a position.
pub fn rope_kv_write(
    context: &Context,
    qkv: &mut Buffer,
    step: &StepInputs<'_>,
    norms: Option<HeadNorms<'_>>,
    table: &RopeTable,
    cache: &mut KvCache,
    layer: usize,
) -> Result<()> {
    let num_heads = check(qkv, step, norms, table, cache, layer)?;
    let (positions, slot_mapping) = (step.positions, &step.attention.slot_mapping[..]);
    let layout = cache.layout();
    let (num_kv_heads, head_dim) = (layout.num_kv_heads, layout.head_dim);
    let cpu = match context.launch() {
        Backend::Cpu(cpu) => cpu,
        Backend::Gpu(gpu) => {
            let rope = gpu_rope(qkv, num_heads, positions.len(), norms, table)?;
            return gpu::rope_kv_write(gpu, step.gpu()?, rope, cache.gpu(layer)?);
        }
        Backend::Reference(backend) => {
            let slots = slot_mapping;
            let operands =
                reference::RopeKvWrite { num_heads, num_kv_heads, head_dim, positions, slots, norms, table };
            let (qkv, pools) = (qkv.reference_mut()?, cache.reference_mut(layer)?);
            return backend.run(positions.len(), || reference::rope_kv_write(backend, operands, qkv, pools));
        }
    };
    let norms = norms.map(|norms| rope::HeadNorms { q: norms.q.into(), k: norms.k.into() });
    let table = table.rows();
    let operands =
        rope::RopeKvWrite { num_heads, num_kv_heads, head_dim, positions, slot_mapping, norms, table };
    let (width, pools) = (qkv.width(), cache.pools_mut(layer)?);
    qkv.write(positions.len(), |qkv| {
        // SAFETY: the heads are those of the layout, and all slots were looked for above.
        unsafe { rope::rope_kv_write(operands, &RowsMut::new(qkv, width), pools, &cpu.pool, cpu.level) };
    })
}

/// Everything that the kernels rely on. The number of query heads.
pub(super) fn check(
    qkv: &Buffer,
    step: &StepInputs<'_>,
    norms: Option<HeadNorms<'_>>,
    table: &RopeTable,
    cache: &KvCache,
    layer: usize,
) -> Result<usize> {
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
    let num_slots = cache.num_blocks() * layout.block_size;
    if let Some(slot) = slot_mapping.iter().find(|slot| **slot >= num_slots) {
        return Err(Error::internal(format!("slot {slot} is not below the {num_slots} of the cache")));
    }
    Ok(num_heads)
}

/// What a GPU's kernels rotate, and how.
pub(super) fn gpu_rope<'a>(
    qkv: &'a Buffer,
    num_heads: usize,
    num_tokens: usize,
    norms: Option<HeadNorms<'a>>,
    table: &'a RopeTable,
) -> Result<gpu::Rope<'a>> {
    let norms =
        norms.map(|norms| Ok::<_, Error>((norms.q.weight.gpu()?, norms.k.weight.gpu()?, norms.q.eps)));
    Ok(gpu::Rope {
        qkv: qkv.gpu()?,
        num_tokens,
        num_heads,
        num_pairs: table.num_pairs(),
        is_interleaved: table.style == RopeStyle::Interleaved,
        table: table.gpu()?,
        norms: norms.transpose()?,
    })
}
