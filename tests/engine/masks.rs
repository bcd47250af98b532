//! Constraints that take long: their sequences skip steps, without an effect on others.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::ThreadId;
use std::time::Duration;

use proptest::prelude::*;
use tinyvllm::config::EngineConfig;
use tinyvllm::engine::{ClientId, Engine, EngineCore, Event, FinishReason, Request, RequestId};
use tinyvllm::sampling::{Constraint, ConstraintState, SamplingParams, TokenMask};
use tinyvllm::{Error, Result};

use super::rule::{self, Rule};
use super::{Arrival, Collected, arrival, check_tokens, config, core, run_to_end, small_config};
use crate::fake_runner::reference;

/// The event at the chosen token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum What {
    /// The mask comes when the gate is opened.
    Waits,
    Fails,
    Panics,
}

#[derive(Debug, Default)]
struct Gate {
    is_open: Mutex<bool>,
    opened: Condvar,
    /// Masks that wait for it or have done so.
    num_reached: AtomicUsize,
    /// The threads that dropped a state.
    dropped_by: Mutex<Vec<ThreadId>>,
    dropped: Condvar,
}

impl Gate {
    fn open(&self) {
        *self.is_open.lock().unwrap() = true;
        self.opened.notify_all();
    }
}

/// A rule that does something else before its mask after this many tokens.
#[derive(Debug, Clone)]
struct Gated {
    rule: Rule,
    at: usize,
    what: What,
    gate: Arc<Gate>,
}

struct GatedState {
    gated: Gated,
    num_tokens: usize,
    state: Box<dyn ConstraintState>,
}

impl Constraint for Gated {
    fn start(&self) -> Box<dyn ConstraintState> {
        Box::new(GatedState { gated: self.clone(), num_tokens: 0, state: self.rule.start() })
    }
}

impl ConstraintState for GatedState {
    fn allowed(&mut self, allowed: &mut TokenMask) -> Result<bool> {
        let gate = &self.gated.gate;
        if self.num_tokens == self.gated.at {
            gate.num_reached.fetch_add(1, Ordering::SeqCst);
            match self.gated.what {
                What::Waits => {
                    let is_open = gate.is_open.lock().unwrap();
                    drop(gate.opened.wait_while(is_open, |is_open| !*is_open).unwrap());
                }
                What::Fails => return Err(Error::invalid_request("planned failure")),
                What::Panics => panic!("planned panic"),
            }
        }
        self.state.allowed(allowed)
    }

    fn accept(&mut self, token_id: u32) -> Result<()> {
        self.num_tokens += 1;
        self.state.accept(token_id)
    }
}

impl Drop for GatedState {
    fn drop(&mut self) {
        self.gated.gate.dropped_by.lock().unwrap().push(std::thread::current().id());
        self.gated.gate.dropped.notify_all();
    }
}

fn params(n: usize) -> SamplingParams {
    SamplingParams { max_tokens: Some(40), seed: Some(1), n, ..SamplingParams::default() }
}

const PROMPT: [u32; 5] = [3; 5];

/// A rule that gives at least this many tokens in all of the sequences.
fn long_rule(num_tokens: usize, n: u32) -> Rule {
    let len = |rule, stream| rule::reference(rule, &PROMPT, &params(1), stream, 64).0.len();
    let is_long = |rule: &Rule| (0..n).all(|stream| len(*rule, stream) >= num_tokens);
    (1..).map(Rule).find(is_long).unwrap()
}

/// A request whose constraint does that after this many tokens, if it comes that far.
fn gated(at: usize, what: What, n: usize) -> (Request, Rule, Arc<Gate>) {
    let (rule, gate) = (long_rule((at + 3).min(8), n as u32), Arc::new(Gate::default()));
    let constraint = Gated { rule, at, what, gate: Arc::clone(&gate) };
    let request =
        Request { constraint: Some(Arc::new(constraint)), ..Request::new(PROMPT.to_vec(), params(n)) };
    (request, rule, gate)
}

/// One that ends at its greatest length.
fn plain(max_tokens: usize) -> (Request, Vec<u32>) {
    let params =
        SamplingParams { max_tokens: Some(max_tokens), ignore_eos: true, ..SamplingParams::greedy() };
    let wanted = reference(&[7, 8], &params, 0, 0, 64);
    (Request::new(vec![7, 8], params), wanted)
}

/// Steps until this request has ended.
fn run_until_ended(core: &mut EngineCore, id: RequestId, collected: &mut HashMap<RequestId, Collected>) {
    while core.is_unfinished(id) {
        for (id, event) in core.step() {
            collected.entry(id).or_default().add(event);
        }
        assert_eq!(core.check_integrity(), Ok(()));
    }
}

fn run_on(core: &mut EngineCore, collected: &mut HashMap<RequestId, Collected>) {
    while core.has_unfinished() {
        for (id, event) in core.step() {
            collected.entry(id).or_default().add(event);
        }
        assert_eq!(core.check_integrity(), Ok(()));
    }
}

/// At the first mask, and in the middle; of one sequence, and of several that share a prompt.
#[test]
fn others_go_on_while_a_mask_is_made() {
    for (at, n) in [(0, 1), (0, 3), (1, 3), (4, 1)] {
        let mut core = core(&EngineConfig { num_scheduler_steps: 4, max_num_seqs: 5, ..small_config() });
        let (request, rule, gate) = gated(at, What::Waits, n);
        let slow = core.submit(request).unwrap();
        let mut collected = HashMap::new();
        let num_tokens = |collected: &HashMap<RequestId, Collected>| -> usize {
            collected.get(&slow).map_or(0, |slow| slow.tokens.values().map(Vec::len).sum())
        };
        // All are at the token that takes long, and then again.
        let is_there =
            |collected: &_| gate.num_reached.load(Ordering::SeqCst) > 0 && num_tokens(collected) == at * n;
        let mut rounds = 0;
        for number in 0..10_000 {
            assert!(number < 9_999, "it is elsewhere: {:?}", collected.get(&slow));
            rounds += usize::from(is_there(&collected));
            if rounds == 3 {
                break;
            }
            let (request, wanted) = plain(40);
            let other = core.submit(request).unwrap();
            run_until_ended(&mut core, other, &mut collected);
            assert_eq!(collected[&other].tokens[&0], wanted);
        }
        assert!(core.is_unfinished(slow) && num_tokens(&collected) == at * n);
        gate.open();
        run_on(&mut core, &mut collected);
        for stream in 0..n as u32 {
            let (wanted, end) = rule::reference(rule, &PROMPT, &params(n), stream, 64);
            let (tokens, finished) = (&collected[&slow].tokens, &collected[&slow].finished);
            assert_eq!((&tokens[&(stream as usize)], finished[&(stream as usize)].0), (&wanted, end));
        }
    }
}

/// A sequence's blocks may be taken while it is held.
#[test]
fn blocks_are_taken_from_one_whose_mask_is_made() {
    let is_preempted = || {
        let mut core = core(&EngineConfig { num_blocks: 16, ..small_config() });
        let (long, wanted) = plain(56);
        let first = core.submit(long).unwrap();
        let (request, rule, gate) = gated(4, What::Waits, 1);
        let slow = core.submit(request).unwrap();
        let mut collected = HashMap::new();
        run_until_ended(&mut core, first, &mut collected);
        assert_eq!(collected[&first].tokens[&0], wanted);
        gate.open();
        run_on(&mut core, &mut collected);
        let (wanted, end) = rule::reference(rule, &PROMPT, &params(1), 0, 64);
        assert_eq!((&collected[&slow].tokens[&0], collected[&slow].finished[&0].0), (&wanted, end));
        core.stats().scheduler.num_preemptions > 0
    };
    // On a busy machine the other one may end before.
    assert!((0..50).any(|_| is_preempted()), "the cache was too large");
}

#[test]
fn a_mask_that_fails_ends_its_request_by_name() {
    for (what, words) in [(What::Fails, "planned failure"), (What::Panics, "planned panic")] {
        for at in [0, 3] {
            let mut core = core(&small_config());
            let (request, ..) = gated(at, what, 2);
            let failing = core.submit(request).unwrap();
            let (request, wanted) = plain(20);
            let other = core.submit(request).unwrap();
            let collected = run_to_end(&mut core);
            assert_eq!(collected[&other].tokens[&0], wanted);
            for index in 0..2 {
                let (reason, error) = &collected[&failing].finished[&index];
                assert_eq!(*reason, FinishReason::Error);
                assert!(error.as_ref().unwrap().contains(words), "{error:?}");
            }
            // The threads are still there.
            let (request, rule, gate) = gated(2, What::Waits, 1);
            gate.open();
            let next = core.submit(request).unwrap();
            let (wanted, _) = rule::reference(rule, &PROMPT, &params(1), 0, 64);
            assert_eq!(run_to_end(&mut core)[&next].tokens[&0], wanted);
        }
    }
}

/// The engine's thread neither waits for a mask that is not needed any more, nor drops its state.
#[test]
fn a_sequence_is_given_up_while_its_mask_is_made() {
    for at in [0, 2] {
        let mut core = core(&small_config());
        let (request, _, gate) = gated(at, What::Waits, 1);
        let id = core.submit(request).unwrap();
        while gate.num_reached.load(Ordering::SeqCst) == 0 {
            let (request, _) = plain(1);
            let other = core.submit(request).unwrap();
            run_until_ended(&mut core, other, &mut HashMap::new());
        }
        assert_eq!(core.abort(id, None).len(), 1);
        assert!(!core.has_unfinished());
        assert_eq!(core.check_integrity(), Ok(()));
        gate.open();
        let mut dropped_by = gate.dropped_by.lock().unwrap();
        while dropped_by.is_empty() {
            dropped_by = gate.dropped.wait(dropped_by).unwrap();
        }
        assert_ne!(dropped_by[0], std::thread::current().id());
    }
}

/// Also while the engine's thread is idle, and when it is shut down.
#[test]
fn the_engine_listens_while_it_waits_for_a_mask() {
    let engine = Engine::start(core(&small_config())).unwrap();
    let (request, rule, gate) = gated(2, What::Waits, 1);
    let mut slow = engine.submit(request.clone()).unwrap();
    let first: Vec<Event> = slow.by_ref().take(2).collect();
    for _ in 0..3 {
        let (request, wanted) = plain(20);
        let events: Vec<Event> = engine.submit(request).unwrap().collect();
        assert_eq!(events.len(), wanted.len() + 1);
    }
    // After an abort, no state remains.
    let given_up = engine.submit(request.clone()).unwrap();
    given_up.abort(None);
    let last = given_up.last().unwrap();
    assert!(matches!(last, Event::Finished { reason: FinishReason::Abort, .. }), "{last:?}");
    gate.open();
    let mut collected = Collected::default();
    first.into_iter().chain(slow).for_each(|event| collected.add(event));
    let (wanted, _) = rule::reference(rule, &PROMPT, &params(1), 0, 64);
    assert_eq!(collected.tokens[&0], wanted);

    let (request, _, gate) = gated(0, What::Waits, 1);
    let slow = engine.submit(request).unwrap();
    let (request, _) = plain(3);
    engine.submit(request).unwrap().for_each(drop);
    drop(engine);
    let last = slow.last().unwrap();
    assert!(matches!(last, Event::Finished { reason: FinishReason::Error, .. }), "{last:?}");
    gate.open();
}

/// One client's slow masks do not delay another's, for any number of them.
#[test]
fn masks_are_made_for_each_client_in_its_turn() {
    let mut core = core(&EngineConfig { max_num_seqs: 16, num_blocks: 256, ..small_config() });
    let mut gates = Vec::new();
    for _ in 0..8 {
        let (request, _, gate) = gated(1, What::Waits, 1);
        core.submit(Request { client: ClientId(1), ..request }).unwrap();
        gates.push(gate);
    }
    let mut collected = HashMap::new();
    for _ in 0..4 {
        let (request, rule, gate) = gated(2, What::Waits, 1);
        gate.open();
        let other = core.submit(Request { client: ClientId(2), ..request }).unwrap();
        run_until_ended(&mut core, other, &mut collected);
        let (wanted, _) = rule::reference(rule, &PROMPT, &params(1), 0, 64);
        assert_eq!(collected[&other].tokens[&0], wanted);
    }
    gates.iter().for_each(|gate| gate.open());
    run_on(&mut core, &mut collected);
}

/// A rule of which some masks take longer than a step waits.
#[derive(Debug)]
struct Slow(Rule);

struct SlowState {
    rule: Rule,
    num_tokens: u64,
    state: Box<dyn ConstraintState>,
}

impl Constraint for Slow {
    fn start(&self) -> Box<dyn ConstraintState> {
        Box::new(SlowState { rule: self.0, num_tokens: 0, state: self.0.start() })
    }
}

impl ConstraintState for SlowState {
    fn allowed(&mut self, allowed: &mut TokenMask) -> Result<bool> {
        if (self.rule.0 / 3 + self.num_tokens).is_multiple_of(4) {
            std::thread::sleep(Duration::from_millis(3));
        }
        self.state.allowed(allowed)
    }

    fn accept(&mut self, token_id: u32) -> Result<()> {
        self.num_tokens += 1;
        self.state.accept(token_id)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    /// The first promise, where masks come late.
    #[test]
    fn tokens_do_not_depend_on_the_time_of_masks(
        config in config(),
        arrivals in proptest::collection::vec(arrival(), 1..16),
    ) {
        let slow = |arrival: Arrival| {
            let rule = arrival.rule.unwrap_or(Rule(arrival.request.params.seed.unwrap()));
            let request = Request { constraint: Some(Arc::new(Slow(rule))), ..arrival.request.clone() };
            match arrival.request.params.seed.unwrap().is_multiple_of(2) {
                true => Arrival { rule: Some(rule), request, ..arrival },
                false => arrival,
            }
        };
        let arrivals: Vec<Arrival> = arrivals.into_iter().map(slow).collect();
        check_tokens(core(&config), &arrivals)?;
    }
}
