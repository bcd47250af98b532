//! Experts: the products of each one's tokens side by side.

use super::CpuBackend;
use super::batches::Batches;
use super::linear::LinearScratch as OwnScratch;
use super::matmul::{Forms, Mode, Part, matmul, matmul_groups, matmul_swiglu_groups};
use super::rows::RowsMut;
use crate::Result;
use crate::config::ExpertsConfig;
use crate::ops::buffer::Buffer;
use crate::ops::experts::{ExpertOps, HostRouting, Router, Routing};
use crate::ops::linear::LinearScratch;
use crate::ops::weights::{MatrixStack, RmsNorm};

/// Values that a thread adds up at least.
const VALUES_PER_TASK: usize = 1 << 14;

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
        let part = Part::new(router.weight.held().on(self)?, 0);
        let logits = routing.logits(num_rows, num_experts)?;
        let x = self.prepare(scratch, x, num_rows, x.width(), Some(norm), &[&router.weight])?;
        matmul(x, &[part], logits, num_experts, Mode::Store, &self.pool, self.level);
        routing.choose(router, num_rows)
    }

    fn fetch_experts(
        &self,
        routing: &HostRouting,
        gate: &MatrixStack,
        up: &MatrixStack,
        down: &MatrixStack,
    ) -> Result<()> {
        let [gate, up, down] =
            [gate.held().on(self)?, up.held().on(self)?, down.held().on(self)?].map(|stack| stack.matrices());
        Batches::new(&routing.groups, [gate, up]).fetch(0, &self.pool);
        Batches::new(&routing.groups, [down]).fetch(0, &self.pool);
        Ok(())
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
        let (num_rows, hidden, width) = (routing.num_rows(), x.width(), out.width());
        let routing = routing.held().on(self)?;
        let (gate, up) = (gate.held().on(self)?.matrices(), up.held().on(self)?.matrices());
        let OwnScratch { activations, .. } = scratch.held_mut().on_mut(self)?;
        let (pool, level) = (&self.pool, self.level);
        let forms = Forms::of(gate.iter().chain(up).map(|matrix| matrix.dtype()), level);
        let norm = Some((&norm.weight[..], norm.eps));
        let start_of = |place: usize| routing.row_at[place] as usize * hidden;
        let x = self.rows(x, num_rows)?;
        activations.prepare_groups(x, start_of, &routing.groups, hidden, norm, forms, pool, level);
        let out = RowsMut::new(self.rows_mut(out, routing.num_places())?, width);
        let write = |place: usize, first: usize, products: &[f32]| {
            // SAFETY: every place has outputs of its own, each of which is written once.
            unsafe { out.part(place, first, products.len()) }.copy_from_slice(products);
        };
        let (gate_of, up_of) = (|expert: usize| &gate[expert], |expert: usize| &up[expert]);
        Batches::new(&routing.groups, [gate, up]).run(pool, |groups| {
            matmul_swiglu_groups(activations, groups, gate_of, up_of, write, pool, level);
        });
        Ok(())
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
        let (num_rows, cols, hidden) = (routing.num_rows(), h.width(), x.width());
        let routing = routing.held().on(self)?;
        let (num_places, per_tok) = (routing.num_places(), routing.per_tok);
        let (places, weights) = routing.choices(num_rows);
        let down = down.held().on(self)?.matrices();
        let OwnScratch { activations, .. } = scratch.held_mut().on_mut(self)?;
        let (pool, level) = (&self.pool, self.level);
        let forms = Forms::of(down.iter().map(|matrix| matrix.dtype()), level);
        let start_of = |place: usize| place * cols;
        let h = self.rows(h, num_places)?;
        activations.prepare_groups(h, start_of, &routing.groups, cols, None, forms, pool, level);
        let own = RowsMut::new(self.rows_mut(products, num_places)?, hidden);
        let write = |place: usize, first: usize, values: &[f32]| {
            // SAFETY: every place has outputs of its own, each of which is written once.
            unsafe { own.part(place, first, values.len()) }.copy_from_slice(values);
        };
        Batches::new(&routing.groups, [down]).run(pool, |groups| {
            matmul_groups(activations, groups, |expert| &down[expert], write, pool, level);
        });
        let x = RowsMut::new(self.rows_mut(x, num_rows)?, hidden);
        let products = self.rows(products, num_places)?;
        let rows_per_task = VALUES_PER_TASK.div_ceil(hidden * per_tok).max(1);
        pool.run(num_rows.div_ceil(rows_per_task), |task| {
            for row in task * rows_per_task..num_rows.min((task + 1) * rows_per_task) {
                // SAFETY: every row belongs to one task.
                let x = unsafe { x.get(row) };
                let pairs = row * per_tok..(row + 1) * per_tok;
                for (place, weight) in places[pairs.clone()].iter().zip(&weights[pairs]) {
                    let products = &products[*place as usize * hidden..][..hidden];
                    for (x, product) in x.iter_mut().zip(products) {
                        *x += weight * product;
                    }
                }
            }
        });
        Ok(())
    }
}
