//! A feed-forward network of experts. The host chooses the experts of a token.

use candle_core::{DType, Device, Tensor};

use super::gated::activated;
use super::linear::rms_norm;
use super::{Failure, ReferenceBackend};
use crate::Result;
use crate::config::{Activation, ExpertsConfig};
use crate::ops::buffer::Buffer;
use crate::ops::cpu::matmul::RowGroup;
use crate::ops::experts::{ExpertOps, HostRouting, Router, Routing};
use crate::ops::linear::LinearScratch;
use crate::ops::weights::{LinearStack, RmsNorm};

impl ExpertOps for ReferenceBackend {
    fn routing(&self, config: &ExpertsConfig, max_rows: usize) -> Result<HostRouting> {
        Ok(HostRouting::new(config, max_rows))
    }

    fn route(
        &self,
        _scratch: &mut LinearScratch,
        num_rows: usize,
        x: &Buffer,
        norm: &RmsNorm,
        router: &Router,
        routing: &mut HostRouting,
    ) -> Result<()> {
        let logits = routing.logits(num_rows, router.config.num_experts)?;
        self.run(num_rows, || {
            let projected = self.matmul(&self.normed(x, num_rows, norm)?, &router.linear)?;
            let projected = projected.flatten_all()?.to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
            logits.copy_from_slice(&projected.to_vec1()?);
            Ok(())
        })?;
        routing.choose(router, num_rows)
    }

    /// The rows of each group through the matrices of its expert.
    fn experts_gated(
        &self,
        _scratch: &mut LinearScratch,
        routing: &Routing,
        x: &Buffer,
        norm: &RmsNorm,
        gate: &LinearStack,
        up: &LinearStack,
        activation: Activation,
        out: &mut Buffer,
    ) -> Result<()> {
        let (routing, x) = (routing.held().on(self)?, x.held().on(self)?);
        let out = out.held_mut().on_mut(self)?;
        self.run(routing.num_slots(), || {
            let rows = by_group(&routing.groups, |group| {
                let tokens = routing.row_at[group.first_row..group.end_row()].iter().map(|row| *row as usize);
                let x = x.rows(tokens.clone().max().map_or(0, |last| last + 1))?;
                let x = rms_norm(self, &x.index_select(&self.indices(tokens)?, 0)?, norm)?;
                let own = |stack| self.matmul_of(&x, stack, group.matrix);
                activated(activation, &own(gate)?, &own(up)?)
            })?;
            out.set_rows(&rows)
        })
    }

    fn experts_residual(
        &self,
        _scratch: &mut LinearScratch,
        routing: &Routing,
        h: &Buffer,
        down: &LinearStack,
        _projected: &mut Buffer,
        x: &mut Buffer,
    ) -> Result<()> {
        let num_rows = routing.num_rows();
        let routing = routing.held().on(self)?;
        let (h, x) = (h.held().on(self)?, x.held_mut().on_mut(self)?);
        let (slots, weights) = routing.choices(num_rows);
        self.run(routing.num_slots(), || {
            let projected = by_group(&routing.groups, |group| {
                let h = h.rows(group.end_row())?.narrow(0, group.first_row, group.num_rows)?;
                self.matmul_of(&h.contiguous()?, down, group.matrix)
            })?;
            let slots = self.indices(slots.iter().map(|slot| *slot as usize))?;
            let weights = self.tensor(weights, (weights.len(), 1))?;
            let projected = projected.index_select(&slots, 0)?.broadcast_mul(&weights)?;
            let (num_matmuls, width) = projected.dims2()?;
            let sum = projected.reshape((num_rows, num_matmuls / num_rows, width))?.sum(1)?;
            let sum = (x.rows(num_rows)? + sum)?;
            x.set_rows(&sum)
        })
    }
}

impl ReferenceBackend {
    /// `W·x + b` for each row of `x`, with the matrix at `index` of a stack.
    fn matmul_of(&self, x: &Tensor, stack: &LinearStack, index: usize) -> Result<Tensor, Failure> {
        let projected = stack.weight.held().on(self)?[index].matmul(self, x)?;
        match stack.bias_of(index) {
            Some(bias) => Ok(projected.broadcast_add(&self.tensor(bias, bias.len())?)?),
            None => Ok(projected),
        }
    }
}

/// The results of all groups at their slots, with zeros between them.
fn by_group(
    groups: &[RowGroup],
    result: impl Fn(&RowGroup) -> Result<Tensor, Failure>,
) -> Result<Tensor, Failure> {
    let mut parts: Vec<Tensor> = Vec::new();
    let mut end = 0;
    for group in groups {
        let part = result(group)?;
        if group.first_row > end {
            parts.push(Tensor::zeros((group.first_row - end, part.dim(1)?), part.dtype(), part.device())?);
        }
        end = group.end_row();
        parts.push(part);
    }
    Ok(Tensor::cat(&parts, 0)?)
}
