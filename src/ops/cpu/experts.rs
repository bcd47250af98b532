//! Experts: grouped matmuls of each expert's tokens.

use super::CpuBackend;
use super::batches::Batches;
use super::linear::LinearScratch as OwnScratch;
use super::matmul::{
    ActivationFormats, GroupGate, Mode, PackedMatrix, Projection, matmul, matmul_gated_groups, matmul_groups,
};
use super::rows::RowsMut;
use crate::Result;
use crate::config::{Activation, ExpertsConfig};
use crate::ops::buffer::Buffer;
use crate::ops::experts::{ExpertOps, HostRouting, Router, Routing};
use crate::ops::linear::LinearScratch;
use crate::ops::weights::{Linear, LinearStack, RmsNorm};

/// Minimum values that a thread adds up.
const VALUES_PER_TASK: usize = 1 << 14;

impl CpuBackend {
    fn matrices<'a>(&self, stack: &'a LinearStack) -> Result<&'a [PackedMatrix]> {
        Ok(stack.weight.held().on(self)?.matrices())
    }
}

impl ExpertOps for CpuBackend {
    fn routing(&self, config: &ExpertsConfig, max_rows: usize) -> Result<HostRouting> {
        Ok(HostRouting::new(config, max_rows))
    }

    fn route(
        &self,
        scratch: &mut LinearScratch,
        num_rows: usize,
        x: &Buffer,
        norm: &RmsNorm,
        router: &Router,
        routing: &mut HostRouting,
    ) -> Result<()> {
        let num_experts = router.config.num_experts;
        let Linear { weight, bias } = &router.linear;
        let projection = Projection { matrix: weight.held().on(self)?, out_offset: 0, bias: bias.as_deref() };
        let logits = routing.logits(num_rows, num_experts)?;
        let x = self.prepare(scratch, x, num_rows, x.width(), Some(norm), &[weight])?;
        matmul(x, &[projection], logits, num_experts, Mode::Store, &self.pool, self.level);
        routing.choose(router, num_rows)
    }

    fn fetch_experts(
        &self,
        routing: &HostRouting,
        gate: &LinearStack,
        up: &LinearStack,
        down: &LinearStack,
    ) -> Result<()> {
        let [gate, up, down] = [self.matrices(gate)?, self.matrices(up)?, self.matrices(down)?];
        Batches::new(&routing.groups, [gate, up]).fetch(0, &self.pool);
        Batches::new(&routing.groups, [down]).fetch(0, &self.pool);
        Ok(())
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
        let (num_rows, hidden, width) = (routing.num_rows(), x.width(), out.width());
        let routing = routing.held().on(self)?;
        let (gates, ups) = (self.matrices(gate)?, self.matrices(up)?);
        let OwnScratch { activations, .. } = scratch.held_mut().on_mut(self)?;
        let (pool, level) = (&self.pool, self.level);
        let formats = ActivationFormats::of(gates.iter().chain(ups).map(|matrix| matrix.dtype()), level);
        let norm = Some((&norm.weight[..], norm.eps));
        let start_of = |slot: usize| routing.row_at[slot] as usize * hidden;
        let x = self.rows(x, num_rows)?;
        activations.prepare_groups(x, start_of, &routing.groups, hidden, norm, formats, pool, level);
        let out = RowsMut::new(self.rows_mut(out, routing.num_slots())?, width);
        let write = |slot: usize, first: usize, projected: &[f32]| {
            // SAFETY: every slot has outputs of its own, each of which is written once.
            unsafe { out.range(slot, first, projected.len()) }.copy_from_slice(projected);
        };
        let gate_of = |expert: usize| GroupGate {
            gate: &gates[expert],
            up: &ups[expert],
            biases: [gate.bias_of(expert), up.bias_of(expert)],
        };
        Batches::new(&routing.groups, [gates, ups]).run(pool, |groups| {
            matmul_gated_groups(activations, groups, gate_of, activation, write, pool, level);
        })
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
        let (num_rows, cols, hidden) = (routing.num_rows(), h.width(), x.width());
        let routing = routing.held().on(self)?;
        let (num_slots, per_tok) = (routing.num_slots(), routing.per_tok);
        let (slots, weights) = routing.choices(num_rows);
        let experts = routing.experts(num_rows);
        let matrices = self.matrices(down)?;
        let OwnScratch { activations, .. } = scratch.held_mut().on_mut(self)?;
        let (pool, level) = (&self.pool, self.level);
        let formats = ActivationFormats::of(matrices.iter().map(|matrix| matrix.dtype()), level);
        let start_of = |slot: usize| slot * cols;
        let h = self.rows(h, num_slots)?;
        activations.prepare_groups(h, start_of, &routing.groups, cols, None, formats, pool, level);
        let own = RowsMut::new(self.rows_mut(projected, num_slots)?, hidden);
        let write = |slot: usize, first: usize, values: &[f32]| {
            // SAFETY: every slot has outputs of its own, each of which is written once.
            unsafe { own.range(slot, first, values.len()) }.copy_from_slice(values);
        };
        Batches::new(&routing.groups, [matrices]).run(pool, |groups| {
            matmul_groups(activations, groups, |expert| &matrices[expert], write, pool, level);
        })?;
        let x = RowsMut::new(self.rows_mut(x, num_rows)?, hidden);
        let projected = self.rows(projected, num_slots)?;
        let rows_per_task = VALUES_PER_TASK.div_ceil(hidden * per_tok).max(1);
        pool.run(num_rows.div_ceil(rows_per_task), |task| {
            for row in task * rows_per_task..num_rows.min((task + 1) * rows_per_task) {
                // SAFETY: every row belongs to one task.
                let x = unsafe { x.get(row) };
                let pairs = row * per_tok..(row + 1) * per_tok;
                for pair in pairs {
                    let (slot, weight) = (slots[pair] as usize, weights[pair]);
                    let projected = &projected[slot * hidden..][..hidden];
                    match down.bias_of(experts[pair] as usize) {
                        Some(bias) => {
                            for ((x, projected), bias) in x.iter_mut().zip(projected).zip(bias) {
                                *x += weight * (projected + bias);
                            }
                        }
                        None => {
                            x.iter_mut().zip(projected).for_each(|(x, projected)| *x += weight * projected)
                        }
                    }
                }
            }
        });
        Ok(())
    }
}
