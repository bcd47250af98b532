//! The step: schedule, execute, update.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::constrained::Ends;
use super::drafting::{Drafts, SequenceDrafter, SpeculationStats};
use super::following::Allowed;
use super::masks::{Masks, Owner};
use super::output::{Event, FinishReason, SequenceStats, StepSizes};
use super::prefixes::{Chain, Prefixes};
use super::request::{ModelLimits, Request, RequestId};
use super::resolver::Resolver;
use super::step_time::QueuedSteps;
use crate::config::EngineConfig;
use crate::kv_cache::CacheEvent;
use crate::prefix_store::StoreStats;
use crate::runner::{Runner, SequenceOutput, Wanted};
use crate::sampling::{SampledToken, SamplingParams};
use crate::scheduler::{PlannedSequence, Scheduler, SchedulerOutput, SchedulerStats, SeqId, SequenceSpec};
use crate::{Error, ErrorKind, Result};

/// The engine without a thread: its owner calls [`step`](Self::step).
///
/// Token ids go in and come out; text exists only above.
pub struct EngineCore {
    pub(super) scheduler: Scheduler,
    pub(super) runner: Box<dyn Runner>,
    config: Arc<EngineConfig>,
    model: Arc<ModelLimits>,
    pub(super) table: Table,
    pub(super) masks: Masks,
    /// The time of the last step.
    pub(super) step_time: Duration,
    pub(super) queued: Option<QueuedSteps>,
    /// The last plan was empty, and the next one will be until a mask is ready or a request arrives or leaves.
    is_stalled: bool,
    /// The number of the next request.
    next_id: Arc<AtomicU64>,
    /// Where the seeds of requests without one come from.
    seeds: std::hash::RandomState,
    pub(super) stats: EngineStats,
    pub(super) drafts: Drafts,
    /// Present if prefixes are kept in files.
    pub(super) prefixes: Option<Prefixes>,
    /// Why no step can succeed any more.
    lost_device: Option<Error>,
}

/// Running totals of an engine.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EngineStats {
    /// Steps executed; a multi-step counts once.
    pub num_steps: u64,
    /// Tokens computed.
    pub num_computed_tokens: u64,
    /// Tokens generated.
    pub num_output_tokens: u64,
    /// Sequences in the queue now.
    pub num_waiting: usize,
    /// Sequences that hold blocks now.
    pub num_running: usize,
    /// Blocks of the KV cache that are in use now.
    pub num_used_blocks: usize,
    /// Steps that failed since the last one that did not.
    pub num_failed_steps_in_a_row: u32,
    /// How many steps computed how many tokens.
    pub step_sizes: StepSizes,
    /// The scheduler's totals.
    pub scheduler: SchedulerStats,
    /// Drafted tokens.
    pub speculation: SpeculationStats,
    /// Tokens looked up in the prefix store, because the prefix cache lacked them.
    pub num_external_queries: u64,
    /// Tokens found there.
    pub num_external_hits: u64,
    /// Counters of the prefix store; none without one.
    pub prefix_store: Option<StoreStats>,
    /// The host tier's contents and counters; none without a host tier.
    pub host_tier: Option<HostTierStats>,
}

/// Running totals of memory of the host for blocks of the cache.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HostTierStats {
    /// Blocks that are there now.
    pub num_blocks: u64,
    /// Bytes of these.
    pub num_bytes: u64,
    /// Bytes that there may be.
    pub max_bytes: u64,
    /// Blocks that were copied there.
    pub num_stored_blocks: u64,
    /// Blocks that were copied back.
    pub num_read_blocks: u64,
    /// Blocks that were not copied, because a copy failed or all slots were in use.
    pub num_dropped_blocks: u64,
}

/// Everything that is unfinished.
#[derive(Default)]
pub(super) struct Table {
    pub(super) requests: HashMap<RequestId, RequestState>,
    pub(super) sequences: HashMap<SeqId, SequenceState>,
}

pub(super) struct RequestState {
    pub(super) params: Arc<SamplingParams>,
    pub(super) seed: u64,
    pub(super) end_token_ids: Arc<[u32]>,
    /// By index; `None` when finished.
    pub(super) sequences: Vec<Option<SeqId>>,
    /// Log-probabilities to report for each prompt token.
    pub(super) prompt_logprobs: Option<usize>,
    /// Of the last prompt token.
    pub(super) wanted: Wanted,
    /// Report raw logits.
    pub(super) prompt_logits: bool,
    /// Report how far the prompt is.
    pub(super) prompt_progress: bool,
    /// The request's prediction of its outputs.
    pub(super) prediction: Vec<u32>,
    /// Prompt tokens whose report is complete.
    pub(super) num_reported_tokens: usize,
    pub(super) arrival: Instant,
}

pub(super) struct SequenceState {
    pub(super) request: RequestId,
    pub(super) owner: Owner,
    pub(super) index: usize,
    pub(super) first_scheduled: Option<Instant>,
    first_token: Option<Instant>,
    /// Aborted while its forks still need it to compute the prompt.
    is_silent: bool,
    pub(super) allowed: Allowed,
    pub(super) drafter: Option<SequenceDrafter>,
    pub(super) num_accepted_draft_tokens: usize,
    pub(super) num_rejected_draft_tokens: usize,
    /// Present if prefixes are kept.
    pub(super) chain: Option<Box<Chain>>,
}

/// The reason for a sequence's end, and with [`FinishReason::Error`] possibly the error.
type End = (FinishReason, Option<Error>);
/// Events, each with its request.
pub(super) type Events = Vec<(RequestId, Event)>;

impl std::fmt::Debug for EngineCore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EngineCore").field("config", &self.config).finish_non_exhaustive()
    }
}

impl EngineCore {
    /// An engine without requests.
    ///
    /// # Errors
    /// If the limits contradict each other.
    pub fn new(runner: Box<dyn Runner>, model: ModelLimits, config: EngineConfig) -> Result<Self> {
        config.validate()?;
        let seeds = std::hash::RandomState::new();
        let mut scheduler = Scheduler::new(config.clone(), random(&seeds, u64::MAX));
        if runner.can_queue_next_step() {
            scheduler.enable_async_scheduling();
        }
        scheduler.limit_drafted_steps(runner.max_exact_tokens());
        Ok(Self {
            scheduler,
            runner,
            drafts: Drafts::new(&config),
            config: Arc::new(config),
            model: Arc::new(model),
            table: Table::default(),
            masks: Masks::new(),
            step_time: Duration::ZERO,
            queued: None,
            is_stalled: false,
            next_id: Arc::default(),
            seeds,
            stats: EngineStats::default(),
            prefixes: None,
            lost_device: None,
        })
    }

    /// The engine's limits.
    #[must_use]
    pub fn config(&self) -> &Arc<EngineConfig> {
        &self.config
    }

    /// The model's limits.
    #[must_use]
    pub fn model_limits(&self) -> &Arc<ModelLimits> {
        &self.model
    }

    /// Queues a request.
    ///
    /// # Errors
    /// If the request is not valid (see [`Request::validate`]), or the queue is full ([`ErrorKind::Capacity`]); the
    /// request is not kept then. A constraint that allows no token ends the request with an event.
    pub fn submit(&mut self, request: Request) -> Result<RequestId> {
        let id = RequestId(self.next_id.fetch_add(1, Ordering::Relaxed));
        self.submit_as(id, request)?;
        Ok(id)
    }

    /// Where the numbers of requests come from, for those that need one before the request is here.
    pub(super) fn next_id(&self) -> &Arc<AtomicU64> {
        &self.next_id
    }

    /// Whether a request can be queued now.
    fn may_submit(&mut self, request: &Request) -> Result<()> {
        request.validate(&self.model, &self.config)?;
        if self.table.requests.len() >= self.config.max_num_requests {
            return Err(Error::new(
                ErrorKind::Capacity,
                format!("{} requests are unfinished, which is the limit", self.table.requests.len()),
            )
            .with_hint("try again when some have finished"));
        }
        if request.constraint.is_some() { self.masks.start_threads() } else { Ok(()) }
    }

    /// Queues a request that has a number already.
    pub(super) fn submit_as(&mut self, id: RequestId, request: Request) -> Result<()> {
        let owner = Owner {
            client: request.client,
            group: request.group.unwrap_or(request.client),
            weight: request.weight,
        };
        if let Err(error) = self.may_submit(&request) {
            self.masks.discard(owner, request.constraint);
            return Err(error);
        }
        let max_len = request.max_len(&self.config);
        let Request { params, constraint, wanted, prompt_logits, prompt_logprobs, prompt_progress, .. } =
            request;
        let mut prediction = request.prediction;
        prediction.truncate(max_len);
        let mut end_token_ids = params.stop_token_ids.clone();
        if !params.ignore_eos {
            end_token_ids.extend_from_slice(&self.model.eos_token_ids);
        }
        let ends = Ends { token_ids: end_token_ids.into(), min_tokens: params.min_tokens };
        let cache_salt = self.prefixes.as_ref().and(request.cache_salt.clone());
        let sequences = self.scheduler.add(&SequenceSpec {
            prompt_token_ids: request.prompt_token_ids,
            max_len,
            cache_salt: request.cache_salt,
            num_sequences: params.n,
            prompt_logits: prompt_logits || prompt_logprobs.is_some(),
            single_step: constraint.is_some(),
            client: owner.client,
            weight: owner.weight,
            group: owner.group,
            priority: request.priority,
        });
        for (index, &sequence) in sequences.iter().enumerate() {
            let state = SequenceState {
                request: id,
                owner,
                index,
                first_scheduled: None,
                first_token: None,
                is_silent: false,
                allowed: if constraint.is_some() { Allowed::NotKnown } else { Allowed::All },
                drafter: None,
                num_accepted_draft_tokens: 0,
                num_rejected_draft_tokens: 0,
                chain: self.new_chain(cache_salt.as_deref()),
            };
            self.table.sequences.insert(sequence, state);
        }
        if let Some(leader) = sequences.first() {
            self.start_restore(*leader);
        }
        if let Some(constraint) = constraint {
            self.start_constraint(constraint, &sequences, owner, ends.clone());
        }
        let state = RequestState {
            seed: params.seed.unwrap_or_else(|| random(&self.seeds, id.0)),
            params: Arc::new(params),
            end_token_ids: ends.token_ids,
            sequences: sequences.into_iter().map(Some).collect(),
            wanted,
            prompt_logprobs,
            prompt_logits,
            prompt_progress,
            prediction,
            num_reported_tokens: 0,
            arrival: Instant::now(),
        };
        self.table.requests.insert(id, state);
        self.is_stalled = false;
        Ok(())
    }

    /// Gives up a request, or one of its sequences; an unknown or finished one is ignored. Its blocks
    /// are free when this returns.
    pub fn abort(&mut self, id: RequestId, index: Option<usize>) -> Vec<(RequestId, Event)> {
        let mut events = Vec::new();
        let Some(request) = self.table.requests.get(&id) else { return events };
        let sequences: Vec<SeqId> = match index {
            None => request.sequences.iter().copied().flatten().collect(),
            Some(index) => request.sequences.get(index).copied().flatten().into_iter().collect(),
        };
        let aborts_all = sequences.len() == request.sequences.iter().flatten().count();
        for sequence in sequences {
            self.finish(sequence, FinishReason::Abort, None, !aborts_all, &mut events);
        }
        events
    }

    /// Whether there is anything to do.
    #[must_use]
    pub fn has_unfinished(&self) -> bool {
        !self.table.requests.is_empty()
    }

    /// Whether this request still has a sequence that has not ended.
    #[must_use]
    pub fn is_unfinished(&self, id: RequestId) -> bool {
        self.table.requests.contains_key(&id)
    }

    /// Schedules, executes and updates once; returns the events. Does nothing without requests. If every sequence needs
    /// a mask first, waits for one.
    pub fn step(&mut self) -> Vec<(RequestId, Event)> {
        if self.is_stalled && !self.wait_for_restored() {
            self.masks.wait();
        }
        let mut events = self.take_masks();
        events.append(&mut self.step_with_masks());
        if !self.has_unfinished() {
            self.keep_rest();
        }
        events
    }

    /// Whether every sequence waits for a mask, until one is ready or a request arrives or leaves.
    pub(super) fn is_stalled(&self) -> bool {
        self.is_stalled
    }

    /// The step without those whose masks are not there.
    pub(super) fn step_with_masks(&mut self) -> Vec<(RequestId, Event)> {
        let mut events = Vec::new();
        self.restore_preempted();
        self.take_restored();
        self.propose_drafts();
        let plan = self.scheduler.schedule();
        self.note_preempted(&plan.preempted);
        self.is_stalled = plan.sequences.is_empty() && plan.preempted.is_empty() && self.has_pending();
        if plan.sequences.is_empty() {
            return events;
        }
        self.mark_scheduled(&plan);
        let may_draft_next = self.may_draft_next(&plan);
        let step = Resolver { scheduler: &self.scheduler, table: &self.table }.step(&plan, may_draft_next);
        let start = Instant::now();
        match self.runner.execute(&step) {
            Ok(outputs) => {
                self.note_step_time(&plan, start);
                self.stats.num_steps += 1;
                self.stats.num_failed_steps_in_a_row = 0;
                let num_tokens = plan.num_scheduled_tokens() * plan.num_steps;
                self.stats.num_computed_tokens += num_tokens as u64;
                self.stats.step_sizes.count(num_tokens);
                if self.runner.has_queued_step() {
                    self.scheduler.record_queued_step(&plan);
                }
                for (planned, output) in plan.sequences.iter().zip(outputs) {
                    self.update(planned, output, &mut events);
                }
                self.keep_some();
            }
            Err(error) => {
                self.stats.num_failed_steps_in_a_row += 1;
                self.forget_queued_steps();
                for planned in &plan.sequences {
                    self.fail_request(planned.seq, &error, &mut events);
                }
                if error.kind() == ErrorKind::DeviceLost {
                    self.lost_device = Some(error);
                }
            }
        }
        events
    }

    /// Bounds prompts from now on by the time that steps take while other clients generate.
    pub fn keep_pace(&mut self) {
        self.scheduler.keep_pace();
    }

    /// From now on, records which blocks enter and leave the prefix cache and its tiers, for callers of
    /// [`take_cache_events`](Self::take_cache_events) after each step.
    pub fn record_cache_events(&mut self) {
        self.scheduler.record_cache_events();
        self.record_tier_events();
    }

    /// Takes the events since the last call, in order.
    pub fn take_cache_events(&mut self) -> Vec<CacheEvent> {
        let mut events = self.scheduler.take_cache_events();
        events.append(&mut self.take_tier_events());
        events
    }

    /// The device's error, if it is lost: no step can succeed any more.
    #[must_use]
    pub fn lost_device(&self) -> Option<&Error> {
        self.lost_device.as_ref()
    }

    /// Ends every request with an error: the engine cannot continue.
    pub fn fail_all(&mut self, error: &Error) -> Vec<(RequestId, Event)> {
        let mut events = Vec::new();
        let sequences: Vec<SeqId> = self.table.sequences.keys().copied().collect();
        for id in sequences {
            self.finish(id, FinishReason::Error, Some(error), false, &mut events);
        }
        events
    }

    /// Checks that every block and sequence is accounted for.
    ///
    /// # Errors
    /// A description of the first violation.
    pub fn check_integrity(&self) -> Result<(), String> {
        self.scheduler.check_integrity()?;
        let known =
            self.table.requests.values().flat_map(|request| request.sequences.iter().flatten()).count();
        let silent = self.table.sequences.values().filter(|sequence| sequence.is_silent).count();
        self.check_held()?;
        if known + silent != self.table.sequences.len() {
            return Err(format!(
                "{known} sequences belong to requests, {} exist",
                self.table.sequences.len()
            ));
        }
        if !self.has_unfinished() && self.scheduler.has_unfinished() {
            return Err("the scheduler has a sequence without a request".to_owned());
        }
        if !self.has_unfinished() && self.drafts.has_tokens() {
            return Err("drafters have tokens, but no request runs".to_owned());
        }
        if !self.has_unfinished() && self.scheduler.kv_cache_usage() != 0.0 {
            return Err("blocks are in use, but no request runs".to_owned());
        }
        Ok(())
    }

    /// Running totals.
    #[must_use]
    pub fn stats(&self) -> EngineStats {
        let mut stats = EngineStats {
            num_waiting: self.scheduler.num_waiting(),
            num_running: self.scheduler.num_running(),
            num_used_blocks: self.scheduler.num_used_blocks(),
            scheduler: self.scheduler.stats(),
            ..self.stats
        };
        self.report_tiers(&mut stats);
        stats
    }

    /// Whether a sequence is held for such a block.
    fn has_pending(&self) -> bool {
        self.masks.has_pending() || self.has_restores()
    }

    fn mark_scheduled(&mut self, plan: &SchedulerOutput) {
        let now = Instant::now();
        let planned = plan.sequences.iter();
        for id in planned.flat_map(|planned| std::iter::once(&planned.seq).chain(&planned.samples)) {
            if let Some(sequence) = self.table.sequences.get_mut(id) {
                sequence.first_scheduled.get_or_insert(now);
            }
        }
    }

    fn update(&mut self, planned: &PlannedSequence, mut output: SequenceOutput, events: &mut Events) {
        self.report_prompt(planned, &mut output, events);
        if let Some(values) = output.hidden.take() {
            return self.report_hidden(planned, values, events);
        }
        let mut samples = planned.samples.iter().zip(output.samples);
        let Some((&leader, tokens)) = samples.next() else {
            self.scheduler.advance(planned, &[]);
            self.note_published(planned.seq);
            return;
        };
        self.learn_draft(planned, tokens.iter().flatten().count());
        let (accepted, finish) = self.accept(leader, tokens, events);
        self.scheduler.advance(planned, &accepted);
        self.note_published(planned.seq);
        self.follow_constraint(leader, &accepted, finish.is_some());
        for (&fork, tokens) in samples {
            let (accepted, finish) = self.accept(fork, tokens, events);
            if let Some(&token_id) = accepted.first() {
                self.scheduler.start_fork(leader, fork, token_id);
            }
            self.follow_constraint(fork, &accepted, finish.is_some());
            if let Some((reason, error)) = finish {
                self.finish(fork, reason, error.as_ref(), false, events);
            }
        }
        if let Some((reason, error)) = finish {
            self.finish(leader, reason, error.as_ref(), false, events);
        }
    }

    /// Takes tokens up to the one that ends the sequence.
    fn accept(
        &mut self,
        id: SeqId,
        tokens: Vec<Option<SampledToken>>,
        events: &mut Events,
    ) -> (Vec<u32>, Option<End>) {
        let mut accepted = Vec::with_capacity(tokens.len());
        let (Some(state), Some(sequence)) = (self.table.sequences.get_mut(&id), self.scheduler.sequence(id))
        else {
            return (accepted, None);
        };
        let Some(request) = self.table.requests.get(&state.request) else { return (accepted, None) };
        let num_before = sequence.output_token_ids().len();
        for token in tokens {
            let Some(SampledToken { token_id, logprobs }) = token else {
                return (accepted, Some((FinishReason::Error, None)));
            };
            let num_output_tokens = num_before + accepted.len();
            let is_end =
                num_output_tokens >= request.params.min_tokens && request.end_token_ids.contains(&token_id);
            accepted.push(token_id);
            state.first_token.get_or_insert_with(Instant::now);
            if state.is_silent {
                return (accepted, Some((FinishReason::Abort, None)));
            }
            self.stats.num_output_tokens += 1;
            let index = state.index;
            events.push((state.request, Event::Token { index, token_id, logprobs, is_end }));
            if is_end {
                return (accepted, Some((FinishReason::Stop, None)));
            }
            // The verdict of its constraint comes first, and later.
            let is_free = matches!(state.allowed, Allowed::All);
            if is_free && sequence.prompt_token_ids().len() + num_output_tokens + 1 >= sequence.max_len() {
                return (accepted, Some((FinishReason::Length, None)));
            }
        }
        (accepted, None)
    }

    /// Ends a sequence and frees its blocks. With `keep_for_forks`, a leader whose forks have not
    /// started continues without events until they have.
    pub(super) fn finish(
        &mut self,
        id: SeqId,
        reason: FinishReason,
        error: Option<&Error>,
        keep_for_forks: bool,
        events: &mut Events,
    ) {
        let Some(state) = self.table.sequences.get_mut(&id) else { return };
        self.is_stalled = false;
        let (request_id, index, was_silent) = (state.request, state.index, state.is_silent);
        let num_forks = self.scheduler.sequence(id).map_or(0, |sequence| sequence.num_unstarted_forks());
        if !was_silent {
            let stats = self.sequence_stats(id);
            let error_kind = match reason {
                FinishReason::Error => Some(error.map_or(ErrorKind::Internal, Error::kind)),
                _ => None,
            };
            let error = match (reason, error) {
                (FinishReason::Error, None) => {
                    let what = "the model's logits are not numbers";
                    Some(match &self.model.broken_logits_hint {
                        Some(hint) => format!("{what}; {hint}"),
                        None => what.to_owned(),
                    })
                }
                (_, error) => error.map(ToString::to_string),
            };
            events.push((request_id, Event::Finished { index, reason, error, error_kind, stats }));
            if let Some(request) = self.table.requests.get_mut(&request_id) {
                request.sequences[index] = None;
            }
        }
        if keep_for_forks && num_forks > 0 {
            if let Some(state) = self.table.sequences.get_mut(&id) {
                state.is_silent = true;
            }
            return;
        }
        self.remove(id);
        if self
            .table
            .requests
            .get(&request_id)
            .is_some_and(|request| request.sequences.iter().all(Option::is_none))
        {
            self.table.requests.remove(&request_id);
            self.remove_silent(request_id);
        }
    }

    /// Ends all sequences of the request that `id` belongs to.
    pub(super) fn fail_request(&mut self, id: SeqId, error: &Error, events: &mut Events) {
        let Some(request) = self.table.sequences.get(&id).map(|state| state.request) else { return };
        let sequences: Vec<SeqId> =
            self.table.requests[&request].sequences.iter().flatten().copied().collect();
        for id in sequences {
            self.finish(id, FinishReason::Error, Some(error), false, events);
        }
    }

    /// Removes a leader that went on only for forks which are now all gone.
    fn remove_silent(&mut self, request: RequestId) {
        let silent =
            self.table.sequences.iter().find(|(_, state)| state.request == request).map(|(id, _)| *id);
        if let Some(id) = silent {
            self.remove(id);
        }
    }

    fn sequence_stats(&self, id: SeqId) -> SequenceStats {
        let (Some(state), Some(sequence)) = (self.table.sequences.get(&id), self.scheduler.sequence(id))
        else {
            return SequenceStats::default();
        };
        let now = Instant::now();
        let arrival = self.table.requests.get(&state.request).map_or(now, |request| request.arrival);
        let planned = state.first_scheduled.unwrap_or(now);
        let first_token = state.first_token.unwrap_or(now);
        let from_tier = |num_tokens: fn(&Chain) -> usize| {
            state.chain.as_deref().map_or(0, num_tokens).min(sequence.num_cached_tokens())
        };
        SequenceStats {
            num_prompt_tokens: sequence.prompt_token_ids().len(),
            num_output_tokens: sequence.output_token_ids().len(),
            num_cached_tokens: sequence.num_cached_tokens(),
            num_disk_tokens: from_tier(|chain| chain.num_disk_tokens),
            num_host_tokens: from_tier(|chain| chain.num_host_tokens),
            prefix_miss: sequence.prefix_miss(),
            num_preemptions: sequence.num_preemptions(),
            num_accepted_draft_tokens: state.num_accepted_draft_tokens,
            num_rejected_draft_tokens: state.num_rejected_draft_tokens,
            queue_time: planned.saturating_duration_since(arrival),
            prefill_time: first_token.saturating_duration_since(planned),
            decode_time: now.saturating_duration_since(first_token),
        }
    }
}

/// A number that cannot be guessed from outside.
fn random(seeds: &std::hash::RandomState, salt: u64) -> u64 {
    use std::hash::BuildHasher;
    seeds.hash_one(salt)
}
