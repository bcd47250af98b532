//! Launches of latent attention with expanded keys and values.
//!
//! They are expanded for a span of a sequence's context at a time. Latent rows are read from the cache; matmuls with
//! the projections of all heads make keys and values, a cache with one block for each head; flash attention over it
//! continues with the running results of earlier spans. Span bounds depend on positions alone, so a token's result does
//! not depend on the rest of the step.

use std::f32::consts::LOG2_E;
use std::ops::Range;

use bytemuck::{Pod, Zeroable, bytes_of};

use super::grouped::{
    FlashAttentionArgs, FlashOperands, GpuAttention, MAX_HEAD_DIM, Pages, Span, flash_attention, is_half,
};
use super::latent::LatentRows;
use super::prefill::MAX_KEYS;
use crate::ops::KvCacheDType;
use crate::ops::cpu::attention::expanded::ExpandedShape;
use crate::ops::gpu::backend::{Flags, GpuBackend, Work};
use crate::ops::gpu::cost::Cost;
use crate::ops::gpu::kernel::Kernel;
use crate::ops::gpu::matmul::GpuStack;
use crate::ops::gpu::matmul::PackedActivations;
use crate::ops::gpu::matmul::{GpuProjection, Operands, Stacked, matmul};
use crate::ops::gpu::step_inputs::{ExpandedRow, GpuInputs};
use crate::ops::gpu::{Binding, GpuBuffer, Placement};
use crate::{Error, Result};

/// Positions of a span.
const SPAN: usize = 1024;
const _: () = assert!(SPAN.is_multiple_of(MAX_KEYS));

/// Positions are expanded in multiples of this: all matmuls use the same kernel, that of the largest tile.
const UNIT: usize = 32;

/// `LatentReadArgs` of the kernels.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct LatentReadArgs {
    pages: Pages,
    rank: u32,
    num_heads: u32,
    head_dim: u32,
    capacity: u32,
    begin: u32,
    end: u32,
}

/// The inputs and outputs of expanded attention.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ExpandedOperands<'a> {
    /// Queries, whose heads begin with the values that are not rotated.
    pub(crate) queries: &'a GpuBuffer,
    /// The stride of tokens' queries, in values.
    pub(crate) query_width: usize,
    /// Heads as wide as a row of the cache, which end with the rotated values.
    pub(crate) absorbed: &'a GpuBuffer,
    pub(crate) rows: LatentRows<'a>,
    /// The projections of latent rows to keys, `[heads, nope, rank]`, and to values, `[heads, value_dim, rank]`.
    pub(crate) keys: &'a GpuStack,
    pub(crate) values: &'a GpuStack,
    pub(crate) out: &'a GpuBuffer,
}

/// The shape of expanded attention and the memory of a span.
#[derive(Debug)]
pub(crate) struct GpuExpandedAttention {
    shape: ExpandedShape,
    scale: f32,
    /// The capacity in positions.
    capacity: usize,
    /// `[position, rank]`.
    latent: GpuBuffer,
    packed: Option<PackedActivations>,
    /// `[head, position, head_dim]` and `[head, position, value_dim]`.
    keys: GpuBuffer,
    values: GpuBuffer,
    /// The maximum score and the running sum of each token and head.
    totals: GpuBuffer,
}

impl GpuExpandedAttention {
    pub(crate) fn new(
        gpu: &GpuBackend,
        shape: ExpandedShape,
        scale: f32,
        max_num_tokens: usize,
        max_model_len: usize,
    ) -> Result<Self> {
        let ExpandedShape { num_heads, rank, value_dim, .. } = shape;
        let head_dim = shape.head_dim();
        if !head_dim.is_multiple_of(8)
            || !value_dim.is_multiple_of(8)
            || head_dim.max(value_dim) > MAX_HEAD_DIM
        {
            return Err(Error::unsupported(format!(
                "latent attention with keys of {head_dim} and values of {value_dim} values has no kernel on this \
                 device: both must be multiples of 8 and at most {MAX_HEAD_DIM}"
            ))
            .with_hint("use --device cpu"));
        }
        let capacity = SPAN.min(max_model_len).next_multiple_of(UNIT);
        // For single precision; half precision takes half of it.
        let floats = |len: usize| gpu.device().allocate(4 * len, Placement::Private);
        Ok(Self {
            shape,
            scale: scale * LOG2_E,
            capacity,
            latent: floats(capacity * rank)?,
            packed: PackedActivations::new(gpu, capacity, rank)?,
            keys: floats(capacity * num_heads * head_dim)?,
            values: floats(capacity * num_heads * value_dim)?,
            totals: floats(2 * max_num_tokens * num_heads)?,
        })
    }

    /// The type of keys and values that are expanded from rows of this type. Single precision keeps the results exact
    /// to more digits than bf16 rows have; half precision would round them once more.
    fn dtype(rows: KvCacheDType) -> KvCacheDType {
        if is_half(rows) { KvCacheDType::F16 } else { KvCacheDType::F32 }
    }

    /// Tokens of a tile over rows of this type: the number in the kernel for the widest heads.
    pub(crate) fn tokens_per_tile(gpu: &GpuBackend, rows: KvCacheDType) -> usize {
        GpuAttention::tokens_per_tile(gpu, 1, Self::dtype(rows), MAX_HEAD_DIM)
    }

    /// Attention of the tokens of a step's expanded sequences.
    pub(crate) fn run(
        &self,
        gpu: &GpuBackend,
        inputs: &GpuInputs,
        operands: ExpandedOperands<'_>,
    ) -> Result<()> {
        for row in inputs.expanded_rows() {
            for begin in (0..row.seq_len).step_by(self.capacity) {
                let span = begin..row.seq_len.min(begin + self.capacity);
                self.expand(gpu, inputs, row, span.clone(), operands)?;
                self.attend(gpu, inputs, row, span, operands)?;
            }
        }
        Ok(())
    }

    /// Expands the keys and values of a span.
    fn expand(
        &self,
        gpu: &GpuBackend,
        inputs: &GpuInputs,
        row: &ExpandedRow,
        span: Range<usize>,
        operands: ExpandedOperands<'_>,
    ) -> Result<()> {
        let &Self { shape, capacity, .. } = self;
        let ExpandedShape { num_heads, rank, rotated, value_dim, .. } = shape;
        let LatentRows { rows, dtype, row_dim, pages } = operands.rows;
        let num_positions = span.len().next_multiple_of(UNIT);
        let args = LatentReadArgs {
            pages,
            rank: rank as u32,
            num_heads: num_heads as u32,
            head_dim: shape.head_dim() as u32,
            capacity: capacity as u32,
            begin: span.start as u32,
            end: span.end as u32,
        };
        let buffers = [
            Binding::read(rows),
            inputs.block_table(row),
            Binding::write(&self.latent),
            Binding::write(&self.keys),
        ];
        gpu.launch(
            Kernel::LatentRead(dtype),
            Flags::default(),
            Work {
                args: bytes_of(&args),
                buffers: &buffers,
                threadgroup_memory: 0,
                grid: [num_positions, 1, 1],
                num_threads: 32,
                cost: Cost::bytes(4 * num_positions * (2 * row_dim + num_heads * rotated)),
            },
        )?;
        for (stack, target, width) in
            [(operands.keys, &self.keys, shape.head_dim()), (operands.values, &self.values, value_dim)]
        {
            let operands = Operands {
                num_tokens: num_positions,
                x: Binding::read(&self.latent),
                x_stride: rank,
                norm: None,
                out: Binding::write(target),
                out_stride: width,
                is_half: Self::dtype(dtype) == KvCacheDType::F16,
                // All heads are expanded from the same rows.
                stacked: Stacked::Heads { num_heads, x_stride: 0, out_stride: capacity * width },
                packed: self.packed.as_ref(),
                is_packed: false,
            };
            matmul(gpu, &[GpuProjection::of_stack(stack)], &operands)?;
        }
        Ok(())
    }

    /// Adds a span to the results of the tiles that attend to it.
    fn attend(
        &self,
        gpu: &GpuBackend,
        inputs: &GpuInputs,
        row: &ExpandedRow,
        span: Range<usize>,
        operands: ExpandedOperands<'_>,
    ) -> Result<()> {
        let &Self { shape, capacity, .. } = self;
        let num_heads = shape.num_heads as u32;
        let num_before =
            inputs.tile_positions(row.tiles.clone()).take_while(|own| own.end <= span.start).count();
        let args = FlashAttentionArgs {
            pages: Pages {
                num_kv_heads: num_heads,
                block_size: capacity as u32,
                head_dim: shape.head_dim() as u32,
                block_rows: num_heads * capacity as u32,
                scales: 0,
            },
            num_heads,
            q_stride: operands.query_width as u32,
            window: u32::MAX,
            scale: self.scale,
            soft_cap: 0.0,
            num_tokens: inputs.num_prefill_tokens() as u32,
            span: Span {
                begin: span.start as u32,
                end: span.end as u32,
                num_plain: shape.nope as u32,
                rotated_width: operands.rows.row_dim as u32,
            },
        };
        // The first span initialises the running results, and the last one writes the final ones.
        let (is_first, is_last) = (span.start == 0, span.end == row.seq_len);
        let (out, totals) = match (is_first, is_last) {
            (true, true) => (Binding::write(operands.out), Binding::read(&self.totals)),
            (true, false) => (Binding::write(operands.out), Binding::write(&self.totals)),
            (false, true) => (Binding::read_write(operands.out), Binding::read(&self.totals)),
            (false, false) => (Binding::read_write(operands.out), Binding::read_write(&self.totals)),
        };
        let flash = FlashOperands {
            dtype: Self::dtype(operands.rows.dtype),
            value_dim: shape.value_dim,
            q: Binding::read(operands.queries),
            k: Binding::read(&self.keys),
            v: Binding::read(&self.values),
            out,
            between_spans: Some([Binding::read(operands.absorbed), totals]),
            sinks: None,
            has_soft_cap: false,
            next: None,
        };
        flash_attention(gpu, inputs, row.tiles.start + num_before..row.tiles.end, args, flash)
    }
}
