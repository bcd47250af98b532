//! Experts: the products of each one's tokens side by side.

use super::CpuBackend;
use super::batches::Batches;
use super::linear::LinearScratch as OwnScratch;
use super::matmul::{Forms, GroupGate, Mode, PackedMatrix, Part, matmul, matmul_gated_groups, matmul_groups};
use super::rows::RowsMut;
use crate::Result;
use crate::config::{Activation, ExpertsConfig};
use crate::ops::buffer::Buffer;
use crate::ops::experts::{ExpertOps, HostRouting, Router, Routing};
use crate::ops::linear::LinearScratch;
use crate::ops::weights::{Linear, LinearStack, RmsNorm};

/// Values that a thread adds up at least.
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
        let part = Part { matrix: weight.held().on(self)?, out_offset: 0, bias: bias.as_deref() };
        let logits = routing.logits(num_rows, num_experts)?;
        let x = self.prepare(scratch, x, num_rows, x.width(), Some(norm), &[weight])?;
        matmul(x, &[part], logits, num_experts, Mode::Store, &self.pool, self.level);
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
        let forms = Forms::of(gates.iter().chain(ups).map(|matrix| matrix.dtype()), level);
        let norm = Some((&norm.weight[..], norm.eps));
        let start_of = |place: usize| routing.row_at[place] as usize * hidden;
        let x = self.rows(x, num_rows)?;
        activations.prepare_groups(x, start_of, &routing.groups, hidden, norm, forms, pool, level);
        let out = RowsMut::new(self.rows_mut(out, routing.num_places())?, width);
        let write = |place: usize, first: usize, products: &[f32]| {
            // SAFETY: every place has outputs of its own, each of which is written once.
            unsafe { out.part(place, first, products.len()) }.copy_from_slice(products);
        };
        let gate_of = |expert: usize| GroupGate {
            gate: &gates[expert],
            up: &ups[expert],
            biases: [gate.bias_of(expert), up.bias_of(expert)],
        };
        Batches::new(&routing.groups, [gates, ups]).run(pool, |groups| {
            matmul_gated_groups(activations, groups, gate_of, activation, write, pool, level);
        });
        Ok(())
    }

    fn experts_residual(
        &self,
        scratch: &mut LinearScratch,
        routing: &Routing,
        h: &Buffer,
        down: &LinearStack,
        products: &mut Buffer,
        x: &mut Buffer,
    ) -> Result<()> {
        let (num_rows, cols, hidden) = (routing.num_rows(), h.width(), x.width());
        let routing = routing.held().on(self)?;
        let (num_places, per_tok) = (routing.num_places(), routing.per_tok);
        let (places, weights) = routing.choices(num_rows);
        let experts = routing.experts(num_rows);
        let matrices = self.matrices(down)?;
        let OwnScratch { activations, .. } = scratch.held_mut().on_mut(self)?;
        let (pool, level) = (&self.pool, self.level);
        let forms = Forms::of(matrices.iter().map(|matrix| matrix.dtype()), level);
        let start_of = |place: usize| place * cols;
        let h = self.rows(h, num_places)?;
        activations.prepare_groups(h, start_of, &routing.groups, cols, None, forms, pool, level);
        let own = RowsMut::new(self.rows_mut(products, num_places)?, hidden);
        let write = |place: usize, first: usize, values: &[f32]| {
            // SAFETY: every place has outputs of its own, each of which is written once.
            unsafe { own.part(place, first, values.len()) }.copy_from_slice(values);
        };
        Batches::new(&routing.groups, [matrices]).run(pool, |groups| {
            matmul_groups(activations, groups, |expert| &matrices[expert], write, pool, level);
        });
        let x = RowsMut::new(self.rows_mut(x, num_rows)?, hidden);
        let products = self.rows(products, num_places)?;
        let rows_per_task = VALUES_PER_TASK.div_ceil(hidden * per_tok).max(1);
        pool.run(num_rows.div_ceil(rows_per_task), |task| {
            for row in task * rows_per_task..num_rows.min((task + 1) * rows_per_task) {
                // SAFETY: every row belongs to one task.
                let x = unsafe { x.get(row) };
                let pairs = row * per_tok..(row + 1) * per_tok;
                for pair in pairs {
                    let (place, weight) = (places[pair] as usize, weights[pair]);
                    let products = &products[place * hidden..][..hidden];
                    match down.bias_of(experts[pair] as usize) {
                        Some(bias) => {
                            for ((x, product), bias) in x.iter_mut().zip(products).zip(bias) {
                                *x += weight * (product + bias);
                            }
                        }
                        None => x.iter_mut().zip(products).for_each(|(x, product)| *x += weight * product),
                    }
                }
            }
        });
        Ok(())
    }
}
