//! Plans a step, fairly to each client.
//!
//! 1. A client that waits and has less than its share of permits and blocks takes from one that has more.
//! 2. Clients whose sequences take long may be skipped, for those that need little (`turns.rs`).
//! 3. Sequences that decode, of all other clients.
//! 4. Chunks of prompts, and new sequences: the least served client first, and none more than its
//!    share of the remaining tokens while others need some.
//! 5. Drafted tokens, where that pays (`drafts.rs`).

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

use super::fair_queue::{CACHED_TOKEN, PROMPT_TOKEN, Served};
use super::holdings::{Holding, Scope};
use super::pace::{Pace, PromptBounds};
use super::turns::{LeftOut, SMALLEST_GROWTH};
use super::{ClientId, PlannedSequence, Scheduler, SchedulerOutput, SeqId, Sequence, SequenceStatus};
use crate::kv_cache::BlockId;

/// One in this many permits is kept free for new requests, while several clients come and go.
const KEPT_PERMIT_RATIO: usize = 32;
/// If several clients have prompts, a chunk is at least this fraction of a step.
const MAX_CHUNKS_PER_STEP: usize = 16;

/// A step in the making.
struct Plan {
    output: SchedulerOutput,
    /// Tokens that may still be added.
    budget: usize,
    /// Rows of logits that may still be added, in addition to the one of every sequence.
    logits_budget: usize,
    /// A running sequence found no block: no sequence is admitted.
    is_short_of_blocks: bool,
    /// No client that was served more is admitted, because another one waits for blocks.
    most_served: MostServed,
    /// Clients that let others pass, whose turn comes again when one of those was admitted.
    stood_back: Vec<ClientId>,
}

impl Plan {
    /// The maximum tokens that may be added to the `num_planned` of this sequence. A token whose logits are needed
    /// takes a row of logits, so a long prompt with all of them is computed in many small chunks.
    fn token_limit(&self, sequence: &Sequence, num_planned: usize) -> usize {
        match sequence.prompt_logits {
            true => self.budget.min(self.logits_budget + usize::from(num_planned == 0)),
            false => self.budget,
        }
    }

    fn num_planned(&self, id: SeqId) -> usize {
        self.output.sequences.iter().rev().find(|planned| planned.seq == id).map_or(0, |planned| planned.len)
    }
}

/// The limit of service of clients that are admitted.
#[derive(Default)]
struct MostServed {
    /// Each group.
    in_all: Option<u64>,
    /// The clients of a group.
    alone: BTreeMap<ClientId, u64>,
}

impl MostServed {
    /// At most this much beyond `served`.
    fn limit(&mut self, served: Served, window: u64) {
        let within = |most: Option<u64>, counter: u64| {
            let limit = counter.saturating_add(window);
            most.map_or(limit, |most| most.min(limit))
        };
        self.in_all = Some(within(self.in_all, served.in_all));
        self.alone.insert(served.group, within(self.alone.get(&served.group).copied(), served.alone));
    }

    fn allows(&self, served: Served) -> bool {
        self.in_all.is_none_or(|most| served.in_all <= most)
            && self.alone.get(&served.group).is_none_or(|most| served.alone <= *most)
    }
}

impl Scheduler {
    /// Plans the next step. The plan is empty if there are no sequences, if every running one was preempted (then the
    /// next plan admits again), or if held ones have the blocks that the others need.
    pub fn schedule(&mut self) -> SchedulerOutput {
        if let Some(output) = self.schedule_queued() {
            return output;
        }
        let mut plan = Plan {
            output: SchedulerOutput::default(),
            budget: self.config.max_num_batched_tokens,
            logits_budget: 0,
            is_short_of_blocks: false,
            most_served: MostServed::default(),
            stood_back: Vec::new(),
        };
        self.take_from_larger_holders(&mut plan);
        plan.logits_budget = self.spare_logits();
        let mut left_out = self.leave_out();
        self.fill(&left_out, &mut plan);
        if plan.output.sequences.is_empty() && !left_out.groups.is_empty() {
            // Those for whom it would have been empty found no blocks.
            left_out = LeftOut::default();
            self.queue.begin_round();
            self.fill(&left_out, &mut plan);
        }
        self.add_drafts(&mut plan.output);
        self.charge_turn(&left_out, &plan.output);
        self.settle(&plan.output);
        plan.output.num_steps = self.reserve_steps(&plan.output, self.config.num_scheduler_steps);
        plan.output.may_queue_next = plan.output.num_steps == 1 && self.reserve_for_queued_step(&plan.output);
        plan.output
    }

    /// The plan of the queued step. A new request waits for that step in any case.
    fn schedule_queued(&mut self) -> Option<SchedulerOutput> {
        let queued = std::mem::take(&mut self.queued_step);
        let planned = queued.into_iter().filter_map(|id| {
            let sequence = self.sequences.get(&id)?;
            let start = sequence.num_computed_tokens;
            Some(PlannedSequence {
                seq: id,
                start,
                len: 1,
                num_draft_tokens: 0,
                samples: vec![id],
                copy: None,
            })
        });
        let mut output =
            SchedulerOutput { sequences: planned.collect(), num_steps: 1, ..SchedulerOutput::default() };
        output.is_queued = true;
        if output.sequences.is_empty() {
            return None;
        }
        self.queue.begin_round();
        self.settle(&output);
        output.may_queue_next = self.reserve_for_queued_step(&output);
        Some(output)
    }

    /// Sequences that decode are never held up by a long prompt.
    fn fill(&mut self, left_out: &LeftOut, plan: &mut Plan) {
        let is_in = |id: &SeqId| {
            let sequence = &self.sequences[id];
            !sequence.is_held && !self.is_left_out(left_out, sequence.client)
        };
        let (generating, computing): (Vec<SeqId>, Vec<SeqId>) = self
            .running
            .iter()
            .filter(|id| is_in(id))
            .partition(|id| self.sequences[id].num_uncomputed_tokens() == 1);
        for id in generating {
            self.schedule_row(id, 0, 1, plan);
        }
        let mut prompts: HashMap<ClientId, VecDeque<SeqId>> = HashMap::new();
        for id in computing {
            prompts.entry(self.sequences[&id].client).or_default().push_back(id);
        }
        let mut open = self.queue.in_order();
        // Of many that wait, those for whom there is no permit anyway are not asked one by one.
        let may_admit = self.has_free_permit();
        open.retain(|client| {
            let has_work = prompts.contains_key(client) || may_admit && self.queue.first(*client).is_some();
            has_work && !self.is_left_out(left_out, *client)
        });
        let smallest = self.config.max_num_batched_tokens / MAX_CHUNKS_PER_STEP;
        let (bounds, whole) = (self.prompt_bounds(&plan.output), plan.budget);
        let max_chunk = self.pace.as_ref().map_or(usize::MAX, Pace::max_chunk);
        while plan.budget > 0 {
            // Of equal counters the first in the order.
            let served = |client: &ClientId| self.queue.served(*client);
            let next = open.iter().copied().min_by(|one, other| served(one).compare(served(other)));
            let Some(client) = next else { break };
            let weights: u64 = open.iter().map(|client| self.queue.weight(*client)).sum();
            let part = plan.budget as u64 * self.queue.weight(client) / weights.max(1);
            let num_prompt_tokens = whole.saturating_sub(plan.budget);
            let left = bounds.of(client).min(max_chunk).saturating_sub(num_prompt_tokens);
            if left == 0 {
                open.retain(|other| *other != client);
                continue;
            }
            let allowance = usize::try_from(part).unwrap_or(usize::MAX).max(smallest).max(1).min(left);
            let own = prompts.entry(client).or_default();
            while let Some(&id) = own.front()
                && !self.schedule_row(id, plan.num_planned(id), allowance, plan)
            {
                own.pop_front();
            }
            if own.is_empty() {
                match self.admit_next(client, allowance, plan) {
                    Some(id) => {
                        own.push_back(id);
                        open.append(&mut plan.stood_back);
                    }
                    None => open.retain(|other| *other != client),
                }
                if !self.has_free_permit() {
                    open.retain(|other| prompts.get(other).is_some_and(|own| !own.is_empty()));
                }
            }
        }
        // Each may let another one pass that waits for it in turn. If no sequence runs, no client has to.
        if self.running.is_empty()
            && !plan.is_short_of_blocks
            && let Some(&client) = plan.stood_back.first()
            && let Some(id) = self.queue.first(client)
            && let Some(cached) = self.cached_prefix_if_admissible(id, Holding::default())
        {
            self.admit(client, id, cached, max_chunk.min(plan.budget), plan);
        }
    }

    /// How many tokens of prompts a step may have, with the rows that generate in it.
    fn prompt_bounds(&self, output: &SchedulerOutput) -> PromptBounds {
        if self.pace.is_none() {
            return PromptBounds::default();
        }
        let mut num_rows: BTreeMap<ClientId, usize> = BTreeMap::new();
        for planned in &output.sequences {
            *num_rows.entry(self.sequences[&planned.seq].client).or_default() += 1;
        }
        let weights = self.queue.active_weight().max(1) as f64;
        let part = |client| self.queue.weight(client) as f64 / weights;
        let clients = num_rows.iter().map(|(client, num_rows)| (*client, part(*client), *num_rows));
        PromptBounds::new(self.step_time(), clients)
    }

    /// Adds up to `allowance` tokens of a running sequence to its `num_planned`, taking blocks from others if there are
    /// too few. False if there is nothing to add.
    fn schedule_row(&mut self, id: SeqId, num_planned: usize, allowance: usize, plan: &mut Plan) -> bool {
        let Some(sequence) = self.sequences.get(&id) else { return false };
        if sequence.status != SequenceStatus::Running {
            return false;
        }
        let num_left = sequence.num_uncomputed_tokens() - num_planned;
        let num_tokens = num_left.min(plan.token_limit(sequence, num_planned)).min(allowance);
        if num_tokens == 0 {
            return false;
        }
        while !self.can_reserve(id, num_planned + num_tokens) {
            // The oldest one always makes progress, so all finish.
            let Some(&victim) = self.running.last() else { return false };
            plan.is_short_of_blocks = true;
            let (client, window) = (self.sequences[&victim].client, self.window());
            self.preempt(victim, plan);
            self.queue.restore_claim(client, window);
            if victim == id {
                return false;
            }
        }
        self.add_to_plan(id, num_planned, num_tokens, plan);
        true
    }

    /// Permits that this client leaves free: while others come and go, a client with most of the permits does not take
    /// the last one. Otherwise each newcomer would preempt one of its sequences.
    fn num_kept_permits(&self, client: ClientId) -> usize {
        let has_visitors = self.pace.as_ref().is_some_and(Pace::has_visitors);
        let has_most = self.queue.num_permits_of_group(client) > self.config.max_num_seqs / 2;
        if has_visitors && has_most { self.config.max_num_seqs.div_ceil(KEPT_PERMIT_RATIO) } else { 0 }
    }

    fn has_free_permit(&self) -> bool {
        self.running.len() + self.num_reserved_permits < self.config.max_num_seqs
    }

    /// Admits the first of the client's queue if it fits. Within a client no sequence overtakes: a long
    /// prompt that does not fit now must not wait for ever after short ones. Other clients may, until they have
    /// had more than [`window`](Self::window) beyond this one.
    fn admit_next(&mut self, client: ClientId, allowance: usize, plan: &mut Plan) -> Option<SeqId> {
        let id = self.queue.first(client)?;
        let served = self.queue.served(client);
        if plan.is_short_of_blocks || !plan.most_served.allows(served) {
            return None;
        }
        let cached = self.cached_prefix_if_admissible(id, Holding::default());
        let stands_back = cached.is_some() && self.must_stand_back(client, id);
        if stands_back {
            plan.stood_back.push(client);
        }
        let Some(cached) = cached.filter(|_| !stands_back) else {
            plan.most_served.limit(served, self.window());
            return None;
        };
        self.admit(client, id, cached, allowance, plan)
    }

    /// Admits a waiting sequence with these blocks as its prefix, and plans up to `allowance` tokens.
    fn admit(
        &mut self,
        client: ClientId,
        id: SeqId,
        cached: Vec<BlockId>,
        allowance: usize,
        plan: &mut Plan,
    ) -> Option<SeqId> {
        let prefix_miss = self.explain_miss(&self.sequences[&id], cached.len());
        cached.iter().for_each(|block| self.pool.retain(*block));
        let num_cached_tokens = cached.len() * self.config.block_size;
        let first_window_block = self.first_window_block(num_cached_tokens);
        cached[first_window_block..].iter().for_each(|block| self.pool.retain_window(*block));
        self.charge_prompt(id, num_cached_tokens, CACHED_TOKEN);
        let sequence = self.sequences.get_mut(&id)?;
        self.queue.take_permits(client, 1 + sequence.forks.len());
        self.queue.remove(client, sequence.priority, id);
        self.running.push(id);
        self.num_reserved_permits += sequence.forks.len();
        if sequence.status == SequenceStatus::Waiting {
            sequence.num_cached_tokens = num_cached_tokens;
            sequence.prefix_miss = Some(prefix_miss);
            self.stats.prefix_cache_queries += sequence.token_ids().len() as u64;
            self.stats.prefix_cache_hits += num_cached_tokens as u64;
        }
        sequence.status = SequenceStatus::Running;
        sequence.num_published_blocks = cached.len();
        sequence.num_computed_tokens = num_cached_tokens;
        (sequence.block_table, sequence.first_window_block) = (cached, first_window_block);
        let sequence = &self.sequences[&id];
        let num_tokens = sequence.num_uncomputed_tokens().min(plan.token_limit(sequence, 0)).min(allowance);
        self.add_to_plan(id, 0, num_tokens, plan);
        Some(id)
    }

    /// The cached prefix of a waiting sequence, if there are permits and blocks for it after those promised to
    /// others. The whole sequence must fit, not only its first chunk, and some blocks must stay free for
    /// those that run, or it would be preempted at once.
    pub(super) fn cached_prefix_if_admissible(
        &mut self,
        id: SeqId,
        promised: Holding,
    ) -> Option<Vec<BlockId>> {
        let taken = self.running.len() + self.num_reserved_permits + promised.num_permits;
        let wanted = taken + self.sequences[&id].num_permits();
        if wanted + self.num_kept_permits(self.sequences[&id].client) > self.config.max_num_seqs {
            return None;
        }
        let cached = self.find_cached_blocks(id);
        let num_blocks = self.blocks_for(self.sequences[&id].token_ids().len());
        let wanted = num_blocks - cached.len();
        let reusable = cached.iter().filter(|block| self.pool.ref_count(**block) == 0).count();
        let watermark = if taken == 0 { 0 } else { self.config.num_blocks / 100 + taken };
        let has_blocks = self.pool.num_free() >= wanted + reusable + watermark + promised.num_blocks;
        let wanted = self
            .num_window_blocks(num_blocks, cached.len())
            .saturating_sub(self.num_shared_in_window(&cached));
        let has_windows = self.pool.num_free_windows() >= wanted + taken + promised.num_window_blocks;
        (has_blocks && has_windows).then_some(cached)
    }

    /// Adds to a sequence's row, or begins it if none of its tokens are planned; the caller has checked the blocks.
    fn add_to_plan(&mut self, id: SeqId, num_planned: usize, num_tokens: usize, plan: &mut Plan) {
        let len = num_planned + num_tokens;
        let copy = self.reserve(id, len);
        let sequence = &self.sequences[&id];
        let start = sequence.num_computed_tokens;
        let mut samples = Vec::new();
        if start + len == sequence.token_ids().len() {
            samples.push(id);
            samples.extend_from_slice(&sequence.forks);
        }
        plan.budget -= num_tokens;
        if sequence.prompt_logits {
            let num_logits = num_tokens - usize::from(num_planned == 0);
            plan.logits_budget = plan.logits_budget.saturating_sub(num_logits);
        }
        self.charge_prompt(id, start + len, PROMPT_TOKEN);
        if num_planned == 0 {
            plan.output.sequences.push(PlannedSequence {
                seq: id,
                start,
                len,
                num_draft_tokens: 0,
                samples,
                copy,
            });
        } else if let Some(planned) = plan.output.sequences.iter_mut().rev().find(|planned| planned.seq == id)
        {
            (planned.len, planned.samples) = (len, samples);
        }
    }

    /// Charges the prompt's tokens before `end`. Recomputation after a preemption is free.
    fn charge_prompt(&mut self, id: SeqId, end: usize, cost: u64) {
        let Some(sequence) = self.sequences.get_mut(&id) else { return };
        let end = end.min(sequence.num_prompt_tokens);
        let num_tokens = end.saturating_sub(sequence.num_charged_tokens);
        sequence.num_charged_tokens += num_tokens;
        self.queue.charge(sequence.client, cost * num_tokens as u64);
    }

    /// Takes a sequence's blocks, and its row if it already has one.
    fn preempt(&mut self, id: SeqId, plan: &mut Plan) {
        if let Some(index) = plan.output.sequences.iter().position(|planned| planned.seq == id) {
            // Its rows of logits stay spent; the next step has them again.
            plan.budget += plan.output.sequences.remove(index).len;
        }
        self.release_blocks(id);
        self.running.retain(|other| *other != id);
        self.stats.num_preemptions += 1;
        if let Some(sequence) = self.sequences.get_mut(&id) {
            sequence.status = SequenceStatus::Preempted;
            sequence.num_preemptions += 1;
            sequence.num_computed_tokens = 0;
            sequence.num_published_blocks = 0;
            self.num_reserved_permits -= sequence.forks.len();
            match sequence.is_held {
                true => self.queue.add_held(sequence.client),
                false => self.queue.push(sequence.client, sequence.priority, id),
            }
            self.queue.release_permits(sequence.client, sequence.num_permits());
        }
        plan.output.preempted.push(id);
    }

    /// Rows of logits beyond one for each sequence that runs or could be admitted in this step. A step has one for each
    /// permit.
    fn spare_logits(&self) -> usize {
        let taken = self.running.len() + self.num_reserved_permits + self.queue.num_waiting();
        self.config.max_num_seqs.saturating_sub(taken)
    }

    /// Whether the next step may be queued; if so, reserves blocks for one more token of each sequence. Not if there
    /// are enough sequences for a client to be skipped in the next step, and not if a draft could be tried in it.
    fn reserve_for_queued_step(&mut self, output: &SchedulerOutput) -> bool {
        self.async_scheduling
            && !self.may_draft_after(output)
            && !self.has_drafts(output)
            && output.sequences.len() <= self.config.step_cost.saturating_mul(SMALLEST_GROWTH)
            && self.reserve_steps(output, 2) == 2
    }

    /// If every running sequence just decodes and none waits, reserves blocks for up to `most` tokens
    /// each and returns how many; else 1.
    fn reserve_steps(&mut self, output: &SchedulerOutput, most: usize) -> usize {
        let generating = |planned: &PlannedSequence| {
            let sequence = &self.sequences[&planned.seq];
            let is_prompt = planned.start < sequence.num_prompt_tokens;
            let is_plain = !(sequence.single_step || sequence.prompt_logits && is_prompt);
            planned.len == 1 && planned.samples.len() == 1 && is_plain
        };
        if most <= 1
            || output.sequences.is_empty()
            || self.queue.num_waiting() > 0
            || output.sequences.len() != self.running.len()
            || !output.sequences.iter().all(generating)
        {
            return 1;
        }
        let cached = |planned: &PlannedSequence| {
            let sequence = &self.sequences[&planned.seq];
            sequence.max_len.saturating_sub(sequence.token_ids().len())
        };
        let num_steps = output.sequences.iter().map(cached).min().unwrap_or(1).min(most).max(1);
        let missing = |planned: &PlannedSequence| {
            let have = self.sequences[&planned.seq].block_table.len();
            self.blocks_for(planned.start + num_steps).saturating_sub(have)
        };
        if output.sequences.iter().map(missing).sum::<usize>() > self.pool.num_allocatable() {
            return 1;
        }
        for planned in &output.sequences {
            self.reserve(planned.seq, num_steps);
        }
        num_steps
    }

    /// Lets waiting clients below their share take sequences from those above theirs, one by one. The giver keeps at
    /// least as much, for its weight, as the taker then has, and the taker stays within its share; so no client takes
    /// back what it gave.
    fn take_from_larger_holders(&mut self, plan: &mut Plan) {
        if self.queue.num_waiting() == 0 {
            return;
        }
        let clients = self.queue.in_order();
        let mut holdings = self.holdings();
        let mut promised = Holding::default();
        for client in clients.iter().copied().filter(|_| clients.len() > 1) {
            let Some(id) = self.queue.first(client) else { continue };
            let is_over = |scope| self.is_over_fair_share(client, self.demand(id), scope, &holdings);
            if is_over(Scope::Group) && is_over(Scope::Client) {
                continue;
            }
            while self.cached_prefix_if_admissible(id, promised).is_none() {
                let Some(victim) = self.preemption_victim(client, id, &holdings) else { break };
                self.preempt(victim, plan);
                holdings = self.holdings();
            }
            promised = promised + self.demand(id);
        }
    }

    /// Reports to the queue which clients needed more of the step.
    fn settle(&mut self, output: &SchedulerOutput) {
        let mut short = BTreeSet::new();
        let planned: BTreeMap<SeqId, usize> =
            output.sequences.iter().map(|planned| (planned.seq, planned.len)).collect();
        for id in &self.running {
            let sequence = &self.sequences[id];
            let num_planned = planned.get(id).copied().unwrap_or(0);
            if !sequence.is_held && sequence.num_uncomputed_tokens() > num_planned {
                short.insert(sequence.client);
            }
        }
        self.queue.settle(|client| short.contains(&client));
    }
}
