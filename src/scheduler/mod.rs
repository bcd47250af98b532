//! Plans each step.
//!
//! There is no prefill phase and no decode phase: `num_computed_tokens` of a sequence's tokens are in the cache, and a
//! step computes some of the others. `step.rs` selects them, fairly to each client. A preempted sequence is computed
//! again later, for the most part from the prefix cache.
//!
//! The scheduler is pure: it sees numbers, not tensors, text, parameters or clocks. Its promise is that
//! no decision it makes can change a token, only when it is computed.

mod drafts;
mod fair_queue;
mod holdings;
mod output;
mod pace;
mod prefix_miss;
mod restore;
mod sequence;
mod step;
mod turns;
mod windows;

use std::collections::HashMap;

pub use fair_queue::{ClientId, Weight};
pub use output::{BlockCopy, PlannedSequence, SchedulerOutput};
pub use prefix_miss::PrefixMiss;
pub use sequence::{SeqId, Sequence, SequenceSpec, SequenceStatus};

use self::fair_queue::{FairQueue, OUTPUT_TOKEN};
use self::pace::{Load, Pace, StepTime, UntimedSteps};
use self::sequence::Tokens;
use crate::config::EngineConfig;
use crate::kv_cache::{BlockHasher, BlockMiss, BlockPool, CacheEvent};

/// Running totals.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SchedulerStats {
    /// Tokens looked up in the prefix cache.
    pub prefix_cache_queries: u64,
    /// Tokens found there.
    pub prefix_cache_hits: u64,
    /// Preemptions.
    pub num_preemptions: u64,
}

/// The state of all sequences and blocks.
#[derive(Debug)]
pub struct Scheduler {
    config: EngineConfig,
    pool: BlockPool,
    hasher: BlockHasher,
    sequences: HashMap<SeqId, Sequence>,
    queue: FairQueue,
    /// In order of admission.
    running: Vec<SeqId>,
    /// Forks that will start when a running leader's prompt is computed: they have a permit already.
    num_reserved_permits: usize,
    /// Whether steps may be queued before tokens are read.
    async_scheduling: bool,
    /// Whether the model may draft after the next step; none if it never does.
    model_may_draft: Option<bool>,
    /// Steps have drafted tokens only if they have no more than this many tokens.
    max_drafted_step: usize,
    /// The time of steps, if it is measured.
    pace: Option<Pace>,
    /// The time of a step with one token, if it was measured before the first request.
    step_seconds: Option<f64>,
    /// Steps that may still be computed.
    untimed: UntimedSteps,
    /// The sequences of the queued step: they are the next plan.
    queued_step: Vec<SeqId>,
    next_id: u64,
    stats: SchedulerStats,
}

impl Scheduler {
    /// A scheduler without sequences, whose block hashes are computed under `hash_key`. The limits are
    /// valid (see [`EngineConfig::validate`]): a sequence of the greatest length fits into the cache, and
    /// a step holds a token of every sequence.
    #[must_use]
    pub fn new(config: EngineConfig, hash_key: u64) -> Self {
        let pool = BlockPool::new(config.num_blocks, config.block_size, config.enable_prefix_caching);
        Self {
            pool: match config.windows {
                Some(windows) => pool.with_window_slots(windows.num_blocks),
                None => pool,
            },
            hasher: BlockHasher::new(hash_key),
            sequences: HashMap::new(),
            queue: FairQueue::default(),
            running: Vec::new(),
            num_reserved_permits: 0,
            async_scheduling: false,
            model_may_draft: None,
            max_drafted_step: usize::MAX,
            pace: None,
            step_seconds: None,
            untimed: UntimedSteps::default(),
            queued_step: Vec::new(),
            next_id: 0,
            stats: SchedulerStats::default(),
            config,
        }
    }

    /// Plans for a runner with [async scheduling](SchedulerOutput::may_queue_next).
    pub fn enable_async_scheduling(&mut self) {
        self.async_scheduling = true;
    }

    /// Whether the model may draft after the next step, and not only if that has a prompt. It waits for the tokens of such a
    /// step, so the one after it is not queued.
    pub fn set_model_may_draft(&mut self, may_draft: bool) {
        self.model_may_draft = Some(may_draft);
    }

    /// Whether the model may draft after the step of this plan: not if that was queued, without its MTP block.
    #[must_use]
    pub fn may_draft_after(&self, plan: &SchedulerOutput) -> bool {
        let has_prompt = |planned: &PlannedSequence| {
            let sequence = self.sequences.get(&planned.seq);
            sequence.is_some_and(|sequence| planned.start < sequence.num_prompt_tokens)
        };
        !plan.is_queued
            && self
                .model_may_draft
                .is_some_and(|may_draft| may_draft || plan.sequences.iter().any(has_prompt))
    }

    /// From now on, bounds prompts by the time that steps take while others generate. The caller reports it by
    /// [`learn`](Self::learn).
    pub fn keep_pace(&mut self) {
        let mut pace = Pace::new(self.config.step_cost);
        if let Some(seconds) = self.step_seconds {
            pace.learn(Load::of(1), 1, seconds);
        }
        self.pace = Some(pace);
    }

    /// Receives, before [`keep_pace`](Self::keep_pace), the time of a step with one token without load.
    pub fn expect_steps(&mut self, seconds: f64) {
        self.step_seconds = Some(seconds).filter(|seconds| seconds.is_finite() && *seconds > 0.0);
    }

    /// Records that the step of this plan was queued on a device that may still compute it. Its time shows in the next
    /// step that is waited for.
    pub fn note_queued(&mut self, plan: &SchedulerOutput) {
        self.untimed.add(plan);
    }

    /// Receives that the time of the queued steps is unknown.
    pub fn forget_queued(&mut self) {
        self.untimed = UntimedSteps::default();
    }

    /// Receives the time of the step of this plan and of those that were queued before it, in seconds.
    pub fn learn(&mut self, plan: &SchedulerOutput, seconds: f64) {
        let UntimedSteps { load, num_steps } = self.untimed.with(plan);
        self.untimed = UntimedSteps::default();
        if let Some(pace) = &mut self.pace {
            pace.learn(load, num_steps, seconds);
        }
    }

    /// Records that a step waited this many seconds for the sequence's constraint. All sequences wait for it, so it
    /// counts as the client's time, like a step. An expensive constraint is expected to stay expensive, with a decaying
    /// weight.
    pub fn learn_constraint(&mut self, id: SeqId, seconds: f64) {
        if let Some(sequence) = self.sequences.get_mut(&id) {
            sequence.constraint_seconds = seconds.max(sequence.constraint_seconds / 2.0);
        }
    }

    /// Holds the sequence, running or waiting: steps skip it until it is [released](Self::release), because its allowed
    /// next tokens are not known yet. It keeps its permit and its blocks while no other sequence needs them. A waiting
    /// one leaves the queue meanwhile, so others pass it.
    pub fn hold(&mut self, id: SeqId) {
        let Some(sequence) = self.sequences.get_mut(&id) else { return };
        if !std::mem::replace(&mut sequence.is_held, true) && sequence.awaits_permit() {
            self.queue.hold(sequence.client, sequence.priority, id);
        }
    }

    /// Steps schedule the sequence again.
    pub fn release(&mut self, id: SeqId) {
        let Some(sequence) = self.sequences.get_mut(&id) else { return };
        if std::mem::take(&mut sequence.is_held) && sequence.awaits_permit() {
            self.queue.release(sequence.client, sequence.priority, id);
        }
    }

    /// The time of a step, as far as it is known.
    fn step_time(&self) -> StepTime {
        self.pace.as_ref().map_or_else(|| StepTime::expected(self.config.step_cost), Pace::step_time)
    }

    /// Starts to record which blocks enter and leave the prefix cache.
    pub fn record_cache_events(&mut self) {
        self.pool.record_events(self.hasher.root(None));
    }

    /// Takes the events since the last call.
    pub fn take_cache_events(&mut self) -> Vec<CacheEvent> {
        self.pool.take_events()
    }

    /// Queues a sequence and its forks; returns their ids, the leader's first.
    ///
    /// The caller has checked the spec: the prompt is not empty and shorter than `max_len`, `max_len`
    /// fits into the cache, and `num_sequences` is between 1 and `max_num_seqs`.
    pub fn add(&mut self, spec: &SequenceSpec) -> Vec<SeqId> {
        let cache_root = self.hasher.root(spec.cache_salt.as_deref());
        let ids: Vec<SeqId> = (0..spec.num_sequences as u64).map(|n| SeqId(self.next_id + n)).collect();
        self.next_id += spec.num_sequences as u64;
        self.queue.welcome(spec.client, spec.group, spec.weight);
        if let Some(pace) = &mut self.pace {
            pace.welcome(spec.client);
        }
        let num_prompt_tokens = spec.prompt_token_ids.len();
        let num_grouped_tokens =
            self.config.prompt_group.map_or(0, |group| num_prompt_tokens / group.max(1) * group);
        for (&id, index) in ids.iter().zip(0..) {
            let is_leader = index == 0;
            let sequence = Sequence {
                status: if is_leader { SequenceStatus::Waiting } else { SequenceStatus::Forking },
                tokens: Tokens::new(spec.prompt_token_ids.clone()),
                num_prompt_tokens,
                num_grouped_tokens,
                num_computed_tokens: 0,
                num_charged_tokens: 0,
                client: spec.client,
                priority: spec.priority,
                num_cached_tokens: 0,
                prefix_miss: None,
                num_preemptions: 0,
                max_len: spec.max_len,
                block_table: Vec::new(),
                first_window_block: 0,
                cache_root,
                block_hashes: Vec::new(),
                num_published_blocks: 0,
                forks: if is_leader { ids[1..].to_vec() } else { Vec::new() },
                prompt_logits: is_leader && spec.prompt_logits,
                single_step: spec.single_step,
                is_held: false,
                constraint_seconds: 0.0,
            };
            self.sequences.insert(id, sequence);
        }
        self.queue.push(spec.client, spec.priority, ids[0]);
        ids
    }

    /// Records that a row was computed and that `new_token_ids` follow it: none for an incomplete
    /// prompt, one for a normal step, several after a multi-step or as far as a draft was right. Forks are started with
    /// [`start_fork`](Self::start_fork).
    pub fn advance(&mut self, planned: &PlannedSequence, new_token_ids: &[u32]) {
        let Some(sequence) = self.sequences.get_mut(&planned.seq) else { return };
        sequence.extend(new_token_ids);
        // The last new token has been sampled, but not computed. The rest of a draft is overwritten.
        let num_given = planned.len - planned.num_draft_tokens;
        sequence.num_computed_tokens = planned.start + num_given + new_token_ids.len().saturating_sub(1);
        self.queue.charge(sequence.client, OUTPUT_TOKEN * new_token_ids.len() as u64);
        self.publish(planned.seq);
        self.leave_window(planned.seq);
    }

    /// Records that the runner already computes the next token of each row of this plan, as a [queued
    /// step](SchedulerOutput::may_queue_next): the next plan has exactly these rows, as far as their sequences have not
    /// ended.
    pub fn record_queued_step(&mut self, plan: &SchedulerOutput) {
        self.queued_step.extend(plan.sequences.iter().map(|planned| planned.seq));
    }

    /// Starts a fork of `leader`, whose prompt has just been computed: all blocks are shared, and the
    /// fork's first token follows. To be called before the leader's next step.
    pub fn start_fork(&mut self, leader: SeqId, fork: SeqId, first_token_id: u32) {
        let Some(source) = self.sequences.get_mut(&leader) else { return };
        source.forks.retain(|id| *id != fork);
        self.num_reserved_permits -= 1;
        let (block_table, first_window_block) = (source.block_table.clone(), source.first_window_block);
        let block_hashes = source.block_hashes.clone();
        let (num_computed, num_cached) = (source.num_prompt_tokens, source.num_cached_tokens);
        let prefix_miss = source.prefix_miss;
        let num_published = source.num_published_blocks;
        let Some(sequence) = self.sequences.get_mut(&fork) else { return };
        block_table.iter().for_each(|block| self.pool.retain(*block));
        block_table.iter().skip(first_window_block).for_each(|block| self.pool.retain_window(*block));
        (sequence.block_table, sequence.first_window_block) = (block_table, first_window_block);
        sequence.block_hashes = block_hashes;
        sequence.num_published_blocks = num_published;
        sequence.num_computed_tokens = num_computed;
        sequence.num_cached_tokens = num_cached;
        sequence.prefix_miss = prefix_miss;
        sequence.extend(&[first_token_id]);
        sequence.status = SequenceStatus::Running;
        self.queue.charge(sequence.client, OUTPUT_TOKEN);
        self.running.push(fork);
    }

    /// Removes a sequence, finished or not; its blocks stay findable until they are reused. A leader
    /// takes its forks along if they have not started.
    pub fn remove(&mut self, id: SeqId) {
        let Some(sequence) = self.sequences.get(&id) else { return };
        match sequence.status {
            SequenceStatus::Running => {
                self.num_reserved_permits -= sequence.forks.len();
                self.queue.release_permits(sequence.client, sequence.num_permits());
                self.running.retain(|other| *other != id);
            }
            SequenceStatus::Waiting | SequenceStatus::Preempted if sequence.is_held => {
                self.queue.remove_held(sequence.client);
            }
            SequenceStatus::Waiting | SequenceStatus::Preempted => {
                self.queue.remove(sequence.client, sequence.priority, id);
            }
            SequenceStatus::Forking => self.drop_unstarted_fork(id),
        }
        self.release_blocks(id);
        if let Some(sequence) = self.sequences.remove(&id) {
            for fork in sequence.forks {
                self.sequences.remove(&fork);
            }
        }
    }

    /// A sequence that has not been removed.
    #[must_use]
    pub fn sequence(&self, id: SeqId) -> Option<&Sequence> {
        self.sequences.get(&id)
    }

    /// Sequences in the queue, and those that are held before it.
    #[must_use]
    pub fn num_waiting(&self) -> usize {
        self.queue.num_waiting() + self.queue.num_held()
    }

    /// Sequences that hold blocks.
    #[must_use]
    pub fn num_running(&self) -> usize {
        self.running.len()
    }

    /// Whether there are any sequences.
    #[must_use]
    pub fn has_unfinished(&self) -> bool {
        !self.sequences.is_empty()
    }

    /// Blocks that are in use.
    #[must_use]
    pub fn num_used_blocks(&self) -> usize {
        self.pool.num_blocks() - self.pool.num_free()
    }

    /// Share of the blocks that are in use, 0 to 1.
    #[must_use]
    pub fn kv_cache_usage(&self) -> f64 {
        1.0 - self.pool.num_free() as f64 / self.pool.num_blocks().max(1) as f64
    }

    /// Running totals.
    #[must_use]
    pub fn stats(&self) -> SchedulerStats {
        self.stats
    }

    /// Checks that every block is accounted for. Cheap enough for tests and for an idle engine.
    ///
    /// # Errors
    /// A description of the first violation.
    pub fn check_integrity(&self) -> Result<(), String> {
        let references = self.sequences.values().flat_map(|sequence| sequence.block_table.iter().copied());
        let readers = self.sequences.values().flat_map(Sequence::window_blocks).copied();
        self.pool.check_integrity(references, readers)?;
        let permits = self.running.iter().map(|id| self.sequences[id].forks.len()).sum::<usize>();
        if permits != self.num_reserved_permits {
            return Err(format!("{} permits reserved, but {permits} forks wait", self.num_reserved_permits));
        }
        if self.running.len() + permits > self.config.max_num_seqs {
            return Err(format!("{} sequences run, {permits} more have a permit", self.running.len()));
        }
        for (client, id) in self.queue.waiting() {
            let sequence = &self.sequences[&id];
            if !sequence.block_table.is_empty() || sequence.client != client || sequence.is_held {
                return Err(format!("{id:?} waits with blocks, for another client, or although it is held"));
            }
        }
        let is_held = |sequence: &&Sequence| sequence.is_held && sequence.awaits_permit();
        let num_held = self.sequences.values().filter(is_held).count();
        if num_held != self.queue.num_held() {
            return Err(format!("{num_held} sequences are held, not {}", self.queue.num_held()));
        }
        let num_permits = |client| {
            let running = self.running.iter().map(|id| &self.sequences[id]);
            running.filter(|sequence| sequence.client == client).map(Sequence::num_permits).sum()
        };
        self.queue.check(num_permits)
    }

    /// Whether the pool has the blocks for the next `num_tokens` tokens of a running sequence.
    fn can_reserve(&self, id: SeqId, num_tokens: usize) -> bool {
        let sequence = &self.sequences[&id];
        let wanted = self.blocks_for(sequence.num_computed_tokens + num_tokens);
        let missing = wanted.saturating_sub(sequence.block_table.len());
        missing + usize::from(self.shared_block(sequence).is_some()) <= self.pool.num_allocatable()
    }

    /// Extends the block table for the next `num_tokens` tokens. If the first of them goes into a block
    /// that a fork shares, the block is replaced by a copy.
    fn reserve(&mut self, id: SeqId, num_tokens: usize) -> Option<BlockCopy> {
        let sequence = &self.sequences[&id];
        let wanted = self.blocks_for(sequence.num_computed_tokens + num_tokens);
        let shared = self.shared_block(sequence);
        let sequence = self.sequences.get_mut(&id)?;
        let mut copy = None;
        if let Some(index) = shared {
            let target = self.pool.allocate()?;
            let source = std::mem::replace(&mut sequence.block_table[index], target);
            let window_slots = self.pool.window_slot(source).zip(self.pool.window_slot(target));
            self.pool.release_window(source);
            self.pool.release(source);
            copy = Some(BlockCopy { source, target, window_slots });
        }
        while sequence.block_table.len() < wanted {
            sequence.block_table.push(self.pool.allocate()?);
        }
        copy
    }

    /// The index in the block table of a partly filled block that others also use. Full blocks are
    /// never written again, so only the one that the next token goes to can need a copy.
    fn shared_block(&self, sequence: &Sequence) -> Option<usize> {
        let index = sequence.num_computed_tokens / self.config.block_size;
        let block = *sequence.block_table.get(index)?;
        (self.pool.ref_count(block) > 1).then_some(index)
    }

    /// The blocks of the sequence's longest cached prefix. Never the whole sequence: at least one token
    /// is computed, since its logits are needed.
    fn find_cached_blocks(&mut self, id: SeqId) -> Vec<crate::kv_cache::BlockId> {
        let mut found = Vec::new();
        let Some(sequence) = self.sequences.get_mut(&id) else { return found };
        if sequence.prompt_logits || !self.config.enable_prefix_caching {
            return found;
        }
        let block_size = self.config.block_size;
        let num_blocks = (sequence.token_ids().len() - 1) / block_size;
        for index in 0..num_blocks {
            let parent = sequence.name_block(index, block_size, &self.hasher);
            let token_ids = &sequence.token_ids()[index * block_size..(index + 1) * block_size];
            match self.pool.lookup(sequence.block_hashes[index], parent, token_ids) {
                Some(block) => found.push(block),
                None => break,
            }
        }
        found.truncate(self.readable_prefix(&found));
        found
    }

    /// Why the cached prefix of a sequence that is about to be admitted has no more than `num_found` blocks.
    fn explain_miss(&self, sequence: &Sequence, num_found: usize) -> PrefixMiss {
        let block_size = self.config.block_size;
        let num_blocks = (sequence.token_ids().len() - 1) / block_size;
        if sequence.prompt_logits {
            return PrefixMiss::PromptLogits;
        }
        if self.config.enable_prefix_caching && num_blocks == 0 {
            return PrefixMiss::ShortPrompt;
        }
        let start = num_found * block_size;
        let parent =
            num_found.checked_sub(1).map_or(Some(&sequence.cache_root), |i| sequence.block_hashes.get(i));
        match (parent, sequence.block_hashes.get(num_found)) {
            (Some(parent), Some(hash)) if num_found < num_blocks => {
                let token_ids = &sequence.token_ids()[start..start + block_size];
                let is_known = self.pool.lookup(*hash, *parent, token_ids).is_some();
                let reason = match is_known {
                    // It, or one of those before it, is gone in layers with a window.
                    true => Some(BlockMiss::Evicted),
                    false => self.pool.explain(*hash, *parent, token_ids),
                };
                reason.map_or(PrefixMiss::Disabled, |reason| PrefixMiss::Block { start, reason })
            }
            _ if self.config.enable_prefix_caching => PrefixMiss::None,
            _ => PrefixMiss::Disabled,
        }
    }

    /// Publishes the sequence's newly filled blocks.
    fn publish(&mut self, id: SeqId) {
        let Some(sequence) = self.sequences.get_mut(&id) else { return };
        if !self.config.enable_prefix_caching {
            return;
        }
        let block_size = self.config.block_size;
        let num_full = sequence.num_computed_tokens / block_size;
        for index in sequence.num_published_blocks..num_full {
            let parent = sequence.name_block(index, block_size, &self.hasher);
            let token_ids = &sequence.token_ids()[index * block_size..(index + 1) * block_size];
            self.pool.publish(sequence.block_table[index], sequence.block_hashes[index], parent, token_ids);
        }
        sequence.num_published_blocks = num_full.max(sequence.num_published_blocks);
    }

    /// Gives all blocks back, the last first, so that the beginning of a prefix is evicted last. In layers with a window,
    /// it is the last block that is evicted last, since no prefix is found without it.
    fn release_blocks(&mut self, id: SeqId) {
        if let Some(sequence) = self.sequences.get_mut(&id) {
            sequence.window_blocks().iter().for_each(|block| self.pool.release_window(*block));
            sequence.first_window_block = 0;
            for block in std::mem::take(&mut sequence.block_table).into_iter().rev() {
                self.pool.release(block);
            }
        }
    }

    fn drop_unstarted_fork(&mut self, fork: SeqId) {
        for sequence in self.sequences.values_mut() {
            let before = sequence.forks.len();
            sequence.forks.retain(|id| *id != fork);
            if sequence.forks.len() < before && sequence.status == SequenceStatus::Running {
                self.num_reserved_permits -= 1;
                self.queue.release_permits(sequence.client, 1);
            }
        }
    }

    fn blocks_for(&self, num_tokens: usize) -> usize {
        num_tokens.div_ceil(self.config.block_size)
    }
}
