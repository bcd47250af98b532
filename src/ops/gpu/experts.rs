//! Experts: the products of each one's tokens side by side.

use std::sync::Arc;

use super::backend::GpuBackend;
use super::linear::{LinearScratch as OwnScratch, norm_of};
use super::matmul::{Operands, Part, Stacked, matmul, silu_mul, swiglu};
use super::routing::{GpuRouting, RouterForm, RoutingSizes};
use super::{Access, Binding, buffer};
use crate::config::{ExpertsConfig, Scoring};
use crate::ops::buffer::Buffer;
use crate::ops::experts::{ExpertOps, Router, Routing};
use crate::ops::linear::LinearScratch;
use crate::ops::weights::{MatrixStack, RmsNorm};
use crate::{Error, Result};

/// Operands of a product with experts. Rows and places need not be as many.
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
        rounded: scratch.rounded(),
        is_rounded: false,
    })
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
        routing.check_room(num_rows)?;
        let logits = Operands {
            num_tokens: num_rows,
            x: buffer::read(self, x)?,
            x_stride: x.width(),
            norm: Some(norm_of(self, norm)?),
            out: routing.logits(),
            out_stride: config.num_experts,
            is_half: false,
            stacked: Stacked::No,
            rounded: scratch.held().on(self)?.rounded(),
            is_rounded: false,
        };
        matmul(self, &[Part::new(router.weight.held().on(self)?)], &logits)?;
        let bias = router.selection_bias.as_ref();
        let bias = bias.map(|bias| Ok::<_, Error>(Binding::read(bias.held().on(self)?)));
        let form = RouterForm {
            is_sigmoid: config.scoring == Scoring::Sigmoid,
            normalizes: config.normalize,
            bias: bias.transpose()?,
            num_experts: config.num_experts,
            num_chosen: config.num_experts_per_tok,
            num_shared: router.num_shared,
            num_groups: config.num_groups,
            num_open_groups: config.num_groups_per_tok,
            scale: config.scale,
        };
        routing.choose(self, num_rows, form)
    }

    fn experts_swiglu(
        &self,
        scratch: &mut LinearScratch,
        routing: &Routing,
        x: &Buffer,
        norm: &RmsNorm,
        gate: &MatrixStack,
        up: &MatrixStack,
        out: &mut Buffer,
    ) -> Result<()> {
        let num_rows = routing.num_rows();
        let routing = routing.held().on(self)?;
        let stacks = [gate.held().on(self)?.stack(), up.held().on(self)?.stack()];
        let (has_one_format, parts) =
            (stacks[0].matrix().dtype() == stacks[1].matrix().dtype(), stacks.map(Part::of_stack));
        let scratch = scratch.held_mut().on_mut(self)?;
        if !has_one_format {
            scratch.reserve_up(self, out)?;
        }
        let num_values = num_rows * routing.per_token() * out.width();
        let groups = Stacked::Groups(routing.groups(true));
        let operands = grouped(self, scratch, num_rows, x, Some(norm), groups, out)?;
        if has_one_format {
            return swiglu(self, parts, &operands, None).map(drop);
        }
        let up_out = scratch.up()?;
        matmul(self, &parts[..1], &operands)?;
        matmul(self, &parts[1..], &Operands { out: Binding::write(up_out), ..operands })?;
        let gate = Binding { access: Access::ReadWrite, ..operands.out };
        silu_mul(self, num_values, Binding::read(up_out), gate)
    }

    fn experts_residual(
        &self,
        scratch: &mut LinearScratch,
        routing: &Routing,
        h: &Buffer,
        down: &MatrixStack,
        products: &mut Buffer,
        x: &mut Buffer,
    ) -> Result<()> {
        let (num_rows, hidden) = (routing.num_rows(), x.width());
        let routing = routing.held().on(self)?;
        let groups = Stacked::Groups(routing.groups(false));
        let operands = grouped(self, scratch.held().on(self)?, num_rows, h, None, groups, products)?;
        matmul(self, &[Part::of_stack(down.held().on(self)?.stack())], &operands)?;
        let (products, x) = (products.held().on(self)?.values()?, x.held().on(self)?.values()?);
        routing.combine(self, num_rows, hidden, products, x)
    }
}
