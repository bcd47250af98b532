//! The experts of a step and their slots, on the host.

use super::Router;
use super::choose::choose;
use crate::config::ExpertsConfig;
use crate::ops::cpu::matmul::RowGroup;
use crate::{Error, Result};

/// The batch metadata of a step.
#[derive(Debug)]
pub(crate) struct HostRouting {
    pub(in crate::ops) per_tok: usize,
    /// `[num_rows][per_tok]`, the best first, followed by the shared ones.
    experts: Vec<u32>,
    weights: Vec<f32>,
    /// The slot of each choice.
    slots: Vec<u32>,
    /// The row of each slot; undefined for padding between groups.
    pub(in crate::ops) row_at: Vec<u32>,
    /// The slots of each expert with any.
    pub(in crate::ops) groups: Vec<RowGroup>,
    /// The next slot of each expert.
    next_slots: Vec<u32>,
    logits: Vec<f32>,
}

impl HostRouting {
    /// Memory for `max_rows` tokens.
    pub(in crate::ops) fn new(config: &ExpertsConfig, max_rows: usize) -> Self {
        let num_experts = config.num_experts + config.num_shared_experts();
        let pairs = max_rows * (config.num_experts_per_tok + config.num_shared_experts());
        Self {
            per_tok: 0,
            experts: vec![0; pairs],
            weights: vec![0.0; pairs],
            slots: vec![0; pairs],
            row_at: vec![0; super::Routing::max_slots(config, max_rows)],
            groups: Vec::with_capacity(num_experts),
            next_slots: vec![0; num_experts],
            logits: vec![0.0; max_rows * config.num_experts],
        }
    }

    /// Space for the router's logits.
    pub(in crate::ops) fn logits(&mut self, num_rows: usize, num_experts: usize) -> Result<&mut [f32]> {
        self.logits.get_mut(..num_rows * num_experts).ok_or_else(|| over_capacity(num_rows, num_experts))
    }

    /// Chooses by the logits.
    pub(in crate::ops) fn choose(&mut self, router: &Router, num_rows: usize) -> Result<()> {
        let Router { config, selection_bias, num_shared, .. } = router;
        let (num_experts, num_chosen) = (config.num_experts, config.num_experts_per_tok);
        let (per_tok, num_all) = (num_chosen + num_shared, num_experts + num_shared);
        if num_rows * per_tok > self.experts.len() || num_all > self.next_slots.len() {
            return Err(over_capacity(num_rows, num_all));
        }
        self.per_tok = per_tok;
        let choices = self.experts.chunks_exact_mut(per_tok).zip(self.weights.chunks_exact_mut(per_tok));
        let logits = self.logits[..num_rows * num_experts].chunks_exact_mut(num_experts);
        for (logits, (experts, weights)) in logits.zip(choices) {
            let (chosen, shared) = experts.split_at_mut(num_chosen);
            let (chosen_weights, shared_weights) = weights.split_at_mut(num_chosen);
            choose(config, selection_bias.as_deref(), logits, chosen, chosen_weights);
            shared.iter_mut().zip(num_experts as u32..).for_each(|(shared, expert)| *shared = expert);
            shared_weights.fill(1.0);
        }
        self.find_slots(num_rows, num_all);
        Ok(())
    }

    /// The slots of the choices of each token, `[num_rows][per_tok]`, and their weights.
    pub(in crate::ops) fn choices(&self, num_rows: usize) -> (&[u32], &[f32]) {
        let len = num_rows * self.per_tok;
        (&self.slots[..len], &self.weights[..len])
    }

    /// The experts of each token, `[num_rows][per_tok]`.
    pub(in crate::ops) fn experts(&self, num_rows: usize) -> &[u32] {
        &self.experts[..num_rows * self.per_tok]
    }

    /// Slots in use, including padding between groups.
    pub(in crate::ops) fn num_slots(&self) -> usize {
        self.groups.last().map_or(0, RowGroup::end_row)
    }

    /// Gives every token and expert a slot. Those of an expert are adjacent, in the order of the tokens.
    fn find_slots(&mut self, num_rows: usize, num_experts: usize) {
        let experts = &self.experts[..num_rows * self.per_tok];
        self.groups.clear();
        self.groups.extend((0..num_experts).map(|matrix| RowGroup { first_row: 0, num_rows: 0, matrix }));
        for expert in experts {
            self.groups[*expert as usize].num_rows += 1;
        }
        let mut next = 0;
        for (group, next_slot) in self.groups.iter_mut().zip(&mut self.next_slots) {
            group.first_row = next;
            *next_slot = next as u32;
            next = (next + group.num_rows).next_multiple_of(RowGroup::ALIGNMENT);
        }
        for (pair, expert) in experts.iter().enumerate() {
            let next = &mut self.next_slots[*expert as usize];
            self.slots[pair] = *next;
            self.row_at[*next as usize] = (pair / self.per_tok) as u32;
            *next += 1;
        }
        self.groups.retain(|group| group.num_rows > 0);
    }
}

fn over_capacity(num_rows: usize, num_experts: usize) -> Error {
    Error::internal(format!("route: {num_rows} rows and {num_experts} experts exceed the capacity"))
}
