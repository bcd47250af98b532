//! Experts: grouped matmuls of each expert's tokens.

use std::sync::Arc;

use super::backend::GpuBackend;
use super::linear::{LinearScratch as OwnScratch, norm_of, projection};
use super::matmul::{GpuProjection, Operands, Stacked, matmul, swiglu};
use super::routing::{GpuRouting, RouterRule, RoutingSizes};
use super::{Binding, buffer};
use crate::config::{Activation, ExpertsConfig, Scoring};
use crate::ops::buffer::Buffer;
use crate::ops::experts::{ExpertOps, Router, Routing};
use crate::ops::linear::LinearScratch;
use crate::ops::weights::{LinearStack, RmsNorm, Vector};
use crate::{Error, Result};

/// Operands of a matmul with experts. The numbers of rows and of slots may differ.
fn grouped<'a>(
    gpu: &Arc<GpuBackend>,
    scratch: &'a OwnScratch,
    num_tokens: usize,
    x: &'a Buffer,
    norm: Option<&'a RmsNorm>,
    groups: Stacked<'a>,
    out: &'a mut Buffer,
) -> Result<Operands<'a>> {
    Ok(Operands {
        num_tokens,
        x: buffer::read(gpu, x)?,
        x_stride: x.width(),
        norm: norm.map(|norm| norm_of(gpu, norm)).transpose()?,
        out_stride: out.width(),
        out: buffer::write(gpu, out)?,
        is_half: false,
        stacked: groups,
        packed: scratch.packed(),
        is_packed: false,
    })
}

/// A vector that a kernel reads.
fn bound<'a>(gpu: &Arc<GpuBackend>, vector: &'a Vector) -> Result<Binding<'a>> {
    Ok(Binding::read(vector.held().on(gpu)?))
}

impl ExpertOps for Arc<GpuBackend> {
    fn routing(&self, config: &ExpertsConfig, max_rows: usize) -> Result<GpuRouting> {
        let sizes = RoutingSizes {
            num_experts: config.num_experts + config.num_shared_experts(),
            per_token: config.num_experts_per_tok + config.num_shared_experts(),
            num_groups: config.num_groups,
            max_rows,
        };
        GpuRouting::new(self, sizes)
    }

    fn route(
        &self,
        scratch: &mut LinearScratch,
        num_rows: usize,
        x: &Buffer,
        norm: &RmsNorm,
        router: &Router,
        routing: &mut GpuRouting,
    ) -> Result<()> {
        let config = &router.config;
        routing.check_capacity(num_rows)?;
        let logits = Operands {
            num_tokens: num_rows,
            x: buffer::read(self, x)?,
            x_stride: x.width(),
            norm: Some(norm_of(self, norm)?),
            out: routing.logits(),
            out_stride: config.num_experts,
            is_half: false,
            stacked: Stacked::No,
            packed: scratch.held().on(self)?.packed(),
            is_packed: false,
        };
        matmul(self, &[projection(self, &router.linear, 0)?], &logits)?;
        let rule = RouterRule {
            is_sigmoid: config.scoring == Scoring::Sigmoid,
            normalizes: config.normalize,
            bias: router.selection_bias.as_ref().map(|bias| bound(self, bias)).transpose()?,
            num_experts: config.num_experts,
            num_chosen: config.num_experts_per_tok,
            num_shared: router.num_shared,
            num_groups: config.num_groups,
            num_open_groups: config.num_groups_per_tok,
            scale: config.scale,
        };
        routing.choose(self, num_rows, rule)
    }

    fn experts_gated(
        &self,
        scratch: &mut LinearScratch,
        routing: &Routing,
        x: &Buffer,
        norm: &RmsNorm,
        gate: &LinearStack,
        up: &LinearStack,
        activation: Activation,
        out: &mut Buffer,
    ) -> Result<()> {
        let num_rows = routing.num_rows();
        let routing = routing.held().on(self)?;
        let stacks = [gate.weight.held().on(self)?.stack(), up.weight.held().on(self)?.stack()];
        let has_one_format = stacks[0].matrix().dtype() == stacks[1].matrix().dtype();
        let projections = stacks.map(GpuProjection::of_stack);
        let biases = gate.bias.as_ref().zip(up.bias.as_ref());
        let biases =
            biases.map(|(gate, up)| Ok::<_, Error>([bound(self, gate)?, bound(self, up)?])).transpose()?;
        let is_fused = has_one_format && activation == Activation::Silu && biases.is_none();
        let scratch = scratch.held_mut().on_mut(self)?;
        if !is_fused {
            scratch.reserve_up(self, out)?;
        }
        let width = out.width();
        let groups = Stacked::Groups(routing.groups(true));
        let operands = grouped(self, scratch, num_rows, x, Some(norm), groups, out)?;
        if is_fused {
            return swiglu(self, projections, &operands, None).map(drop);
        }
        let up_out = scratch.up()?;
        matmul(self, &projections[..1], &operands)?;
        matmul(self, &projections[1..], &Operands { out: Binding::write(up_out), ..operands })?;
        routing.gated(self, num_rows, width, activation, biases, up_out, operands.out)
    }

    fn experts_residual(
        &self,
        scratch: &mut LinearScratch,
        routing: &Routing,
        h: &Buffer,
        down: &LinearStack,
        projected: &mut Buffer,
        x: &mut Buffer,
    ) -> Result<()> {
        let (num_rows, hidden) = (routing.num_rows(), x.width());
        let routing = routing.held().on(self)?;
        let groups = Stacked::Groups(routing.groups(false));
        let operands = grouped(self, scratch.held().on(self)?, num_rows, h, None, groups, projected)?;
        matmul(self, &[GpuProjection::of_stack(down.weight.held().on(self)?.stack())], &operands)?;
        let (projected, x) = (projected.held().on(self)?.values()?, x.held().on(self)?.values()?);
        let bias = down.bias.as_ref().map(|bias| bound(self, bias)).transpose()?;
        routing.combine(self, num_rows, hidden, projected, bias, x)
    }
}
