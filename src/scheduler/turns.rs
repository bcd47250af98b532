//! Skipped clients: clients that need little do not wait for those that need much.
//!
//! A step with many sequences of a client takes many times as long as a step with one. So a client whose sequences
//! would make it much longer is skipped for some steps, until the others have had their fraction of the time, by
//! weight, that its last step took (`FairQueue::round`). Starting answers may use up to half of the machine in this
//! way, others a third: a step with few rows is expensive for all.

use std::collections::{BTreeMap, BTreeSet};

use super::pace::{Load, Pace, StepTime};
use super::{ClientId, Scheduler, SchedulerOutput, SeqId, Sequence};

/// Output tokens of a sequence whose answer begins.
const NUM_FIRST_TOKENS: usize = 32;
/// The cost of a turn in units of rounds for each unit of the step's time.
const ROUND_UNITS: f64 = 1_000_000.0;

/// How much others may make a step longer before they are skipped, and the cost of a step of one's own.
#[derive(Debug, Clone, Copy)]
struct Terms {
    max_growth: f64,
    price: f64,
}

/// While an answer begins, and later.
const BEGINNING: Terms = Terms { max_growth: 2.0, price: 1.0 };
const LATER: Terms = Terms { max_growth: 4.0, price: 2.0 };

/// A step with fewer sequences than this many times its fixed cost skips no client.
pub(super) const SMALLEST_GROWTH: usize = BEGINNING.max_growth as usize;

/// A group's candidates for a step.
#[derive(Debug, Clone, Copy, Default)]
struct Want {
    load: Load,
    /// The wait of the step for constraints.
    constraint_time: f64,
    is_beginning: bool,
}

impl Want {
    fn terms(self) -> Terms {
        if self.is_beginning { BEGINNING } else { LATER }
    }
}

/// The clients that skip a step, and for which others.
#[derive(Debug, Default)]
pub(super) struct LeftOut {
    pub(super) groups: BTreeSet<ClientId>,
    /// The time of a step without them.
    prices: BTreeMap<ClientId, f64>,
}

impl Scheduler {
    /// Decides which clients skip the next step. Groups that have had little time since the last step with all clients
    /// need not share the step with those that would make it several times as long, if those do not lag by half a
    /// window.
    pub(super) fn leave_out(&mut self) -> LeftOut {
        let mut wants: Vec<(u64, ClientId, Want)> =
            self.wants().into_iter().map(|(group, want)| (self.queue.round(group), group, want)).collect();
        wants.sort_by_key(|(round, group, _)| (*round, *group));
        let time = self.turn_time();
        let is_less_served = |group, other| {
            let counter = |group| self.queue.counter_of_group(group);
            counter(group).saturating_add(self.window() / 2) < counter(other)
        };
        let mut left_out = LeftOut::default();
        let mut first: Option<(u64, ClientId, Terms)> = None;
        let mut length = time.own;
        for &(round, group, want) in &wants {
            let longer = time.of(want.load.within(self.config.max_num_batched_tokens)) + want.constraint_time;
            let is_ahead = first.is_some_and(|(smallest, other, terms)| {
                round > smallest
                    && length + longer > terms.max_growth * length
                    && !is_less_served(group, other)
            });
            if is_ahead {
                left_out.groups.insert(group);
                continue;
            }
            length += longer;
            first = first.or(Some((round, group, want.terms())));
            left_out.prices.insert(group, want.terms().price);
        }
        match wants.first() {
            Some((round, ..)) if !left_out.groups.is_empty() => self.queue.go_on_with_round(*round),
            _ => {
                left_out.prices.clear();
                self.queue.begin_round();
            }
        }
        left_out
    }

    pub(super) fn is_left_out(&self, left_out: &LeftOut, client: ClientId) -> bool {
        left_out.groups.contains(&self.queue.group(client))
    }

    /// Charges the time of a step to the groups that are in it.
    pub(super) fn charge_turn(&mut self, left_out: &LeftOut, output: &SchedulerOutput) {
        let mut loads: BTreeMap<ClientId, (Load, f64)> = BTreeMap::new();
        for planned in &output.sequences {
            let sequence = &self.sequences[&planned.seq];
            let (load, constraint_time) = loads.entry(self.queue.group(sequence.client)).or_default();
            *load += Load::of_sequence(planned);
            *constraint_time += self.constraint_time(sequence);
        }
        let time = self.turn_time();
        let own = time.own / loads.len().max(1) as f64;
        for (group, (load, constraint_time)) in loads {
            let price = left_out.prices.get(&group).copied().unwrap_or(1.0);
            // In the unit of a row, which is the same while the time of steps is learned.
            let taken = own + time.of(load) + constraint_time;
            let cost = price * taken / time.row.max(f64::MIN_POSITIVE) * ROUND_UNITS;
            self.queue.charge_round(group, cost as u64);
        }
    }

    /// The terms of a step's time. If rows cost almost nothing, the step's fixed time is at least the expected one.
    fn turn_time(&self) -> StepTime {
        let expected = StepTime::expected(self.config.step_cost);
        let time = self.step_time();
        StepTime { own: time.own.max(expected.own / expected.row * time.row), ..time }
    }

    /// The wait of steps for the sequence's constraint, if times are in the same unit.
    fn constraint_time(&self, sequence: &Sequence) -> f64 {
        let is_known = self.pace.as_ref().is_some_and(Pace::knows_seconds);
        if is_known { sequence.constraint_seconds } else { 0.0 }
    }

    /// Each group's candidates for a step.
    fn wants(&mut self) -> BTreeMap<ClientId, Want> {
        let mut wants: BTreeMap<ClientId, Want> = BTreeMap::new();
        let running = self.running.iter().map(|id| &self.sequences[id]);
        for sequence in running.filter(|sequence| !sequence.is_held) {
            let want = wants.entry(self.queue.group(sequence.client)).or_default();
            want.load += Load::of(sequence.num_uncomputed_tokens());
            want.constraint_time += self.constraint_time(sequence);
            want.is_beginning |= sequence.output_token_ids().len() < NUM_FIRST_TOKENS;
        }
        let waiting: Vec<(ClientId, SeqId)> = self.queue.first_of_each().collect();
        for (client, id) in waiting {
            if self.cached_prefix_if_admissible(id, super::holdings::Holding::default()).is_some() {
                let want = wants.entry(self.queue.group(client)).or_default();
                want.load.num_prompt_tokens += self.sequences[&id].token_ids().len();
                want.is_beginning = true;
            }
        }
        wants
    }
}
