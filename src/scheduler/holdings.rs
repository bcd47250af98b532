//! Permits and blocks of clients and groups, and their fair shares of them.

use std::collections::HashMap;

use super::fair_queue::{OUTPUT_TOKEN, PROMPT_TOKEN, WEIGHT_UNIT};
use super::{ClientId, Scheduler, SeqId};

/// Permits and blocks of a client.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Holding {
    pub(super) num_permits: usize,
    pub(super) num_blocks: usize,
    /// Blocks in layers with a window, if these have fewer.
    pub(super) num_window_blocks: usize,
}

impl std::ops::Add for Holding {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            num_permits: self.num_permits + other.num_permits,
            num_blocks: self.num_blocks + other.num_blocks,
            num_window_blocks: self.num_window_blocks + other.num_window_blocks,
        }
    }
}

/// The scope of a comparison: clients within a group, or groups as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scope {
    Client,
    Group,
}

/// Permits and blocks of clients and groups, and the weights of all that have a sequence.
pub(super) struct Holdings {
    of_clients: HashMap<ClientId, Holding>,
    of_groups: HashMap<ClientId, Holding>,
    weight: u64,
}

impl Scheduler {
    /// The sequence that the waiting one of `client` may replace: the last one of the client that has most, of those
    /// that do not lag.
    pub(super) fn preemption_victim(
        &self,
        client: ClientId,
        id: SeqId,
        holdings: &Holdings,
    ) -> Option<SeqId> {
        let gives = |other: &ClientId| {
            let last = self.last_of(*other)?;
            let scope = self.scope(client, *other);
            // Half, or permits would go to and fro where one client is always ahead.
            let is_less_served = self.is_less_served(*other, client, self.window() / 2);
            let sequence = &self.sequences[&last];
            let holding = self.holding(*other, scope, holdings);
            let left = Holding {
                num_permits: holding.num_permits - sequence.num_permits(),
                num_blocks: holding.num_blocks - sequence.block_table.len(),
                num_window_blocks: holding.num_window_blocks - self.num_held_in_windows(sequence),
            };
            let wanted = self.holding(client, scope, holdings) + self.demand(id);
            let may_give = !is_less_served
                && !self.is_over_fair_share(client, self.demand(id), scope, holdings)
                && self.is_over_fair_share(*other, Holding::default(), scope, holdings)
                && self.level(*other, left, scope) >= self.level(client, wanted, scope);
            let alone = self.holding(*other, Scope::Client, holdings);
            may_give
                .then(|| (self.level(*other, holding, scope), self.level(*other, alone, Scope::Client), last))
        };
        let others = self.running_clients();
        others.iter().filter(|other| **other != client).filter_map(gives).max().map(|(.., last)| last)
    }

    /// Clients with running sequences, in the order of their last ones.
    fn running_clients(&self) -> Vec<ClientId> {
        let mut clients = Vec::new();
        for id in self.running.iter().rev() {
            let client = self.sequences[id].client;
            if !clients.contains(&client) {
                clients.push(client);
            }
        }
        clients.reverse();
        clients
    }

    /// Of the client's running sequences the least urgent one, and of these the one admitted last.
    fn last_of(&self, client: ClientId) -> Option<SeqId> {
        let own = self.running.iter().filter(|id| self.sequences[id].client == client);
        own.copied().max_by_key(|id| self.sequences[id].priority)
    }

    /// Whether a client waits with its first sequence, because another one has less than its share and waits
    /// too. Not after one that has had much more.
    pub(super) fn must_stand_back(&self, client: ClientId, id: SeqId) -> bool {
        let holdings = self.holdings();
        let is_over = |client, id, scope| self.is_over_fair_share(client, self.demand(id), scope, &holdings);
        if !is_over(client, id, Scope::Group) && !is_over(client, id, Scope::Client) {
            return false;
        }
        self.queue.first_of_each().filter(|(other, _)| *other != client).any(|(other, others)| {
            let scope = self.scope(client, other);
            is_over(client, id, scope)
                && !is_over(other, others, scope)
                && !self.is_less_served(client, other, self.window())
        })
    }

    /// The difference of two clients' counters that outweighs their permits and blocks: the longest sequence and a full
    /// step.
    pub(super) fn window(&self) -> u64 {
        OUTPUT_TOKEN * self.config.max_model_len as u64
            + PROMPT_TOKEN * self.config.max_num_batched_tokens as u64
    }

    /// Whether the other one has had more, and by more than this.
    pub(super) fn is_less_served(&self, client: ClientId, other: ClientId, by: u64) -> bool {
        self.queue.served(client).is_less_served(self.queue.served(other), by)
    }

    pub(super) fn holdings(&self) -> Holdings {
        let (mut of_clients, mut of_groups) = (HashMap::new(), HashMap::new());
        for sequence in self.running.iter().map(|id| &self.sequences[id]) {
            // Blocks that several share count for each.
            let more = Holding {
                num_permits: sequence.num_permits(),
                num_blocks: sequence.block_table.len(),
                num_window_blocks: self.num_held_in_windows(sequence),
            };
            let group = self.queue.group(sequence.client);
            for holding in [of_clients.entry(sequence.client), of_groups.entry(group)] {
                let holding: &mut Holding = holding.or_default();
                *holding = *holding + more;
            }
        }
        Holdings { of_clients, of_groups, weight: self.queue.active_weight() }
    }

    fn scope(&self, client: ClientId, other: ClientId) -> Scope {
        if self.queue.group(client) == self.queue.group(other) { Scope::Client } else { Scope::Group }
    }

    /// The resources of the client, or of all of its group.
    fn holding(&self, client: ClientId, scope: Scope, holdings: &Holdings) -> Holding {
        let holding = match scope {
            Scope::Client => holdings.of_clients.get(&client),
            Scope::Group => holdings.of_groups.get(&self.queue.group(client)),
        };
        holding.copied().unwrap_or_default()
    }

    fn weight(&self, client: ClientId, scope: Scope) -> u64 {
        match scope {
            Scope::Client => self.queue.weight(client),
            Scope::Group => self.queue.weight_of_group(self.queue.group(client)) * WEIGHT_UNIT,
        }
    }

    /// The resources of a waiting sequence, without cached blocks.
    pub(super) fn demand(&self, id: SeqId) -> Holding {
        let sequence = &self.sequences[&id];
        let num_blocks = self.blocks_for(sequence.token_ids().len());
        let num_window_blocks = self.num_window_blocks(num_blocks, 0);
        Holding { num_permits: sequence.num_permits(), num_blocks, num_window_blocks }
    }

    /// The larger fraction of all permits and of all blocks, over the weight.
    fn level(&self, client: ClientId, holding: Holding, scope: Scope) -> u64 {
        let part = |part: usize, whole: usize| ((part as u64) << 24) * WEIGHT_UNIT / whole.max(1) as u64;
        let permits = part(holding.num_permits, self.config.max_num_seqs);
        let blocks = part(holding.num_blocks, self.config.num_blocks);
        let windows = part(holding.num_window_blocks, self.num_all_window_blocks());
        permits.max(blocks).max(windows) / self.weight(client, scope)
    }

    /// Whether this and the current resources exceed the share, which is the fraction of the weight among those of all
    /// clients with sequences.
    pub(super) fn is_over_fair_share(
        &self,
        client: ClientId,
        more: Holding,
        scope: Scope,
        holdings: &Holdings,
    ) -> bool {
        let weight = self.weight(client, scope);
        let holding = self.holding(client, scope, holdings) + more;
        let is_over = |part: usize, whole: usize| part as u64 * holdings.weight > whole as u64 * weight;
        is_over(holding.num_permits, self.config.max_num_seqs)
            || is_over(holding.num_blocks, self.config.num_blocks)
            || is_over(holding.num_window_blocks, self.num_all_window_blocks())
    }
}
