//! Matmuls with weights.

use std::sync::Arc;

use super::backend::GpuBackend;
use super::buffer;
use super::matmul::{GpuProjection, Operands, PackedActivations, Stacked, matmul, silu_mul, swiglu};
use super::{Access, Binding, GpuBuffer, Placement};
use crate::ops::buffer::Buffer;
use crate::ops::linear::{LinearOps, LinearScratch as AnyScratch, side_by_side};
use crate::ops::weights::{Linear, Matrix, RmsNorm};
use crate::{Error, Result};

/// The memory that matmuls need.
#[derive(Debug)]
pub(crate) struct LinearScratch {
    /// The up half of a gated matmul whose matrices have two formats, if there is one.
    up: Option<GpuBuffer>,
    /// Packed activations of matmuls with many rows, if the device has kernels for them.
    packed: Option<PackedActivations>,
}

impl LinearScratch {
    /// Reserves space for the up half of a gated matmul: the size of `out`, which has the gate.
    pub(super) fn reserve_up(&mut self, gpu: &GpuBackend, out: &Buffer) -> Result<()> {
        let len = (4 * out.max_rows() * out.width()).max(16);
        if self.up.as_ref().is_none_or(|up| up.len() < len) {
            self.up = Some(gpu.device().allocate(len, Placement::Private)?);
        }
        Ok(())
    }

    /// The space that [`Self::reserve_up`] reserved.
    pub(super) fn up(&self) -> Result<&GpuBuffer> {
        self.up.as_ref().ok_or_else(|| Error::internal("one half of a gated matmul has no memory"))
    }

    pub(super) fn packed(&self) -> Option<&PackedActivations> {
        self.packed.as_ref()
    }
}

/// A matrix of a matmul, with its bias.
pub(super) fn projection<'a>(
    gpu: &Arc<GpuBackend>,
    linear: &'a Linear,
    out_offset: usize,
) -> Result<GpuProjection<'a>> {
    let bias = linear.bias.as_ref().map(|bias| Ok::<_, Error>(Binding::read(bias.held().on(gpu)?)));
    Ok(GpuProjection::new(linear.weight.held().on(gpu)?).at(out_offset).with_bias(bias.transpose()?))
}

/// The weights of a norm and its epsilon.
pub(super) fn norm_of<'a>(gpu: &Arc<GpuBackend>, norm: &'a RmsNorm) -> Result<(Binding<'a>, f32)> {
    Ok((Binding::read(norm.weight.held().on(gpu)?), norm.eps))
}

/// Operands of a matmul that overwrites its output. `x` may be packed for it, if there is no norm.
pub(super) fn operands<'a>(
    gpu: &Arc<GpuBackend>,
    scratch: &'a LinearScratch,
    num_tokens: usize,
    x: &'a Buffer,
    norm: Option<&'a RmsNorm>,
    out: &'a mut Buffer,
) -> Result<Operands<'a>> {
    if num_tokens > x.max_rows().min(out.max_rows()) {
        return Err(Error::internal(format!(
            "{num_tokens} rows do not fit into buffers of {} and {}",
            x.max_rows(),
            out.max_rows()
        )));
    }
    let rows = x.held().on(gpu)?;
    let (x_buffer, is_packed) = match norm {
        None => rows.packed(),
        Some(_) => (rows.values()?, false),
    };
    Ok(Operands {
        num_tokens,
        x: Binding::read(x_buffer),
        x_stride: x.width(),
        norm: norm.map(|norm| norm_of(gpu, norm)).transpose()?,
        out_stride: out.width(),
        out: buffer::write(gpu, out)?,
        is_half: false,
        stacked: Stacked::No,
        packed: scratch.packed(),
        is_packed,
    })
}

impl LinearOps for Arc<GpuBackend> {
    fn linear_scratch(&self, max_rows: usize, max_cols: usize) -> Result<LinearScratch> {
        Ok(LinearScratch { up: None, packed: PackedActivations::new(self, max_rows, max_cols)? })
    }

    fn reserve_groups(
        &self,
        scratch: &mut LinearScratch,
        _max_groups: usize,
        max_rows: usize,
        max_cols: usize,
    ) -> Result<()> {
        PackedActivations::reserve(&mut scratch.packed, self, max_rows, max_cols)
    }

    fn norm_linear<const N: usize>(
        &self,
        scratch: &mut AnyScratch,
        num_rows: usize,
        x: &Buffer,
        norm: Option<&RmsNorm>,
        linears: [&Linear; N],
        out: &mut Buffer,
    ) -> Result<()> {
        let projections = side_by_side(linears, |linear, out_offset| projection(self, linear, out_offset))?;
        let operands = operands(self, scratch.held().on(self)?, num_rows, x, norm, out)?;
        matmul(self, &projections, &operands)
    }

    fn linear(
        &self,
        scratch: &mut AnyScratch,
        num_rows: usize,
        h: &Buffer,
        linear: &Linear,
        out: &mut Buffer,
    ) -> Result<()> {
        let operands = operands(self, scratch.held().on(self)?, num_rows, h, None, out)?;
        matmul(self, &[projection(self, linear, 0)?], &operands)
    }

    fn linear_residual(
        &self,
        scratch: &mut AnyScratch,
        num_rows: usize,
        h: &Buffer,
        linear: &Linear,
        x: &mut Buffer,
    ) -> Result<()> {
        let mut operands = operands(self, scratch.held().on(self)?, num_rows, h, None, x)?;
        operands.out.access = Access::ReadWrite;
        matmul(self, &[projection(self, linear, 0)?], &operands)
    }

    fn norm_swiglu(
        &self,
        scratch: &mut AnyScratch,
        num_rows: usize,
        x: &Buffer,
        norm: &RmsNorm,
        gate: &Matrix,
        up: &Matrix,
        reader: Option<&Linear>,
        out: &mut Buffer,
    ) -> Result<()> {
        let projections = [gate.held().on(self)?, up.held().on(self)?].map(GpuProjection::new);
        let scratch = scratch.held_mut().on_mut(self)?;
        if gate.dtype() != up.dtype() {
            return two_matmuls(self, scratch, num_rows, x, norm, projections, out);
        }
        let operands = operands(self, scratch, num_rows, x, Some(norm), out)?;
        let is_packed = swiglu(self, projections, &operands, reader.map(|reader| reader.weight.dtype()))?;
        out.held_mut().on_mut(self)?.set_packed(is_packed);
        Ok(())
    }

    fn norm_swiglu_biased(
        &self,
        scratch: &mut AnyScratch,
        num_rows: usize,
        x: &Buffer,
        norm: &RmsNorm,
        gate: &Linear,
        up: &Linear,
        out: &mut Buffer,
    ) -> Result<()> {
        let projections = [projection(self, gate, 0)?, projection(self, up, 0)?];
        two_matmuls(self, scratch.held_mut().on_mut(self)?, num_rows, x, norm, projections, out)
    }

    fn norm_logits(
        &self,
        scratch: &mut AnyScratch,
        num_rows: usize,
        x: &Buffer,
        norm: &RmsNorm,
        head: &Matrix,
        logits: &mut Buffer,
    ) -> Result<()> {
        let projection = GpuProjection::new(head.held().on(self)?);
        matmul(
            self,
            &[projection],
            &operands(self, scratch.held().on(self)?, num_rows, x, Some(norm), logits)?,
        )
    }
}

/// A gated matmul that no single kernel computes.
fn two_matmuls(
    gpu: &Arc<GpuBackend>,
    scratch: &mut LinearScratch,
    num_rows: usize,
    x: &Buffer,
    norm: &RmsNorm,
    [gate, up]: [GpuProjection<'_>; 2],
    out: &mut Buffer,
) -> Result<()> {
    scratch.reserve_up(gpu, out)?;
    let (up_out, num_values) = (scratch.up()?, num_rows * out.width());
    let operands = operands(gpu, scratch, num_rows, x, Some(norm), out)?;
    matmul(gpu, &[gate], &operands)?;
    matmul(gpu, &[up], &Operands { out: Binding::write(up_out), ..operands })?;
    let gate = Binding { access: Access::ReadWrite, ..operands.out };
    silu_mul(gpu, num_values, Binding::read(up_out), gate)
}
