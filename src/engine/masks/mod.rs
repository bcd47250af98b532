//! Sets of allowed tokens ("masks"), made on threads of their own.
//!
//! A mask usually takes much less than a step, but with a hostile grammar as long as many steps. So the engine hands
//! over a sequence's constraint when its token is known, waits for a short time before the next step, and continues
//! without the sequences whose masks are missing. Other expensive operations of a constraint run here too: its start,
//! accepting the token, and dropping it. `queue.rs` decides on the order.

mod queue;

use std::collections::HashMap;
use std::num::NonZero;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use self::queue::{Begun, Limits, Queue};
use super::constrained::{Constrained, Next};
use crate::scheduler::SeqId;
use crate::{Error, Result};

pub(super) use self::queue::Owner;

/// The state of a sequence's constraint.
pub(super) enum Outcome {
    /// The sequences of a request have begun.
    Started(Vec<(SeqId, Box<Constrained>)>),
    /// It has taken the token.
    Followed(Box<Constrained>, Next),
}

/// A mask that is there, or why there is none.
pub(super) struct Done {
    pub(super) id: SeqId,
    pub(super) owner: Owner,
    pub(super) outcome: Result<Outcome>,
    seconds: f64,
    round: u64,
}

/// A result of [`Masks::take`].
pub(super) struct TakenMask {
    pub(super) done: Vec<Done>,
    /// The part of the wait that the mask caused, in seconds.
    pub(super) waits: Vec<(SeqId, f64)>,
}

type Work = Box<dyn FnOnce() -> Result<Outcome> + Send>;

/// Work for a sequence, or something that only has to be dropped.
enum Job {
    Make { id: SeqId, owner: Owner, work: Work },
    Drop(Box<dyn Send>),
}

/// The threads. They start for the first mask, and end when this is dropped and their current jobs are done.
pub(super) struct Masks {
    shared: Arc<Shared>,
    has_threads: bool,
}

struct Shared {
    state: Mutex<State>,
    /// There may be something to begin.
    pushed: Condvar,
    /// There may be something to take.
    done: Condvar,
    start: Instant,
    limits: Limits,
}

struct State {
    queue: Queue<Job>,
    /// The sequences whose masks are not there, each with the round in which it was handed over.
    pending: HashMap<SeqId, u64>,
    done: Vec<Done>,
    /// Grows with each [`Masks::take`].
    round: u64,
    /// Masks of this round that are not there.
    num_fresh: usize,
    /// Threads that wait until a running job counts as long.
    num_watching: usize,
    on_done: Option<Arc<dyn Fn() + Send + Sync>>,
    /// Notified of the next mask.
    is_asleep: bool,
    is_closed: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> f64 {
        self.start.elapsed().as_secs_f64()
    }
}

impl Masks {
    pub(super) fn new() -> Self {
        let limits = Limits::of(std::thread::available_parallelism().map_or(1, NonZero::get));
        let state = State {
            queue: Queue::new(limits),
            pending: HashMap::new(),
            done: Vec::new(),
            round: 0,
            num_fresh: 0,
            num_watching: 0,
            on_done: None,
            is_asleep: false,
            is_closed: false,
        };
        let shared = Shared {
            state: Mutex::new(state),
            pushed: Condvar::new(),
            done: Condvar::new(),
            start: Instant::now(),
            limits,
        };
        Self { shared: Arc::new(shared), has_threads: false }
    }

    /// Calls `listener` when a mask is there after [`Self::sleep`].
    pub(super) fn on_done(&self, listener: impl Fn() + Send + Sync + 'static) {
        self.shared.lock().on_done = Some(Arc::new(listener));
    }

    /// Sees to it that there are threads.
    ///
    /// # Errors
    /// If the operating system refuses them all.
    pub(super) fn start_threads(&mut self) -> Result<()> {
        if self.has_threads {
            return Ok(());
        }
        for index in 0..self.shared.limits.num_threads {
            let shared = Arc::clone(&self.shared);
            let thread = std::thread::Builder::new().name(format!("tinyvllm-mask-{index}"));
            match thread.spawn(move || shared.serve()) {
                Ok(_) => self.has_threads = true,
                Err(source) if index == 0 => {
                    return Err(Error::io("start a thread for token masks", source));
                }
                // Fewer do the same, one after another.
                Err(_) => break,
            }
        }
        Ok(())
    }

    /// Does this for a sequence, in its turn.
    pub(super) fn make(
        &self,
        id: SeqId,
        owner: Owner,
        work: impl FnOnce() -> Result<Outcome> + Send + 'static,
    ) {
        let mut state = self.shared.lock();
        let round = state.round;
        state.pending.insert(id, round);
        state.num_fresh += 1;
        self.push(state, owner, Job::Make { id, owner, work: Box::new(work) });
    }

    /// Gives up the mask of a sequence that is gone.
    pub(super) fn forget(&self, id: SeqId) {
        let mut state = self.shared.lock();
        if state.pending.remove(&id) == Some(state.round) {
            state.num_fresh -= 1;
        }
    }

    /// Drops objects of a constraint, which can take long too.
    pub(super) fn discard(&self, owner: Owner, rubbish: impl Send + 'static) {
        if self.has_threads {
            self.push(self.shared.lock(), owner, Job::Drop(Box::new(rubbish)));
        }
    }

    fn push(&self, mut state: MutexGuard<'_, State>, owner: Owner, job: Job) {
        state.queue.push(owner, job);
        // A thread that ends a job looks for the next one.
        let is_noticed = state.num_watching > 0 && !state.queue.may_begin(self.shared.now());
        drop(state);
        if !is_noticed {
            self.shared.pushed.notify_one();
        }
    }

    /// Whether a mask is not there yet.
    pub(super) fn has_pending(&self) -> bool {
        !self.shared.lock().pending.is_empty()
    }

    /// Takes the masks that are there, after waiting so long at most for those that were requested since the last time.
    pub(super) fn take(&self, max_wait: Duration) -> TakenMask {
        let start = Instant::now();
        let mut state = self.shared.lock();
        let is_waited_for = state.num_fresh > 0;
        if is_waited_for {
            let wait = self.shared.done.wait_timeout_while(state, max_wait, |state| state.num_fresh > 0);
            state = wait.unwrap_or_else(PoisonError::into_inner).0;
        }
        let waited = start.elapsed().as_secs_f64();
        let done = std::mem::take(&mut state.done);
        let waits = if is_waited_for { divide(waited, &state, &done) } else { Vec::new() };
        state.round += 1;
        state.num_fresh = 0;
        TakenMask { done, waits }
    }

    /// Waits until a mask is there that can be taken, if any is to come.
    pub(super) fn wait(&self) {
        let is_empty = |state: &mut State| state.done.is_empty() && !state.pending.is_empty();
        drop(self.shared.done.wait_while(self.shared.lock(), is_empty));
    }

    /// Whether no result is ready but some are expected, here or elsewhere; if so, the next one notifies the listener.
    pub(super) fn sleep(&self, waits_elsewhere: bool) -> bool {
        let mut state = self.shared.lock();
        state.is_asleep = state.done.is_empty() && (waits_elsewhere || !state.pending.is_empty());
        state.is_asleep
    }
}

/// Divides the waiting time among masks by their share in it.
fn divide(waited: f64, state: &State, done: &[Done]) -> Vec<(SeqId, f64)> {
    let there = done.iter().filter(|done| done.round == state.round);
    let missing = state.pending.iter().filter(|(_, round)| **round == state.round);
    let mut waits: Vec<(SeqId, f64)> = there.map(|done| (done.id, done.seconds.min(waited))).collect();
    waits.extend(missing.map(|(id, _)| (*id, waited)));
    let sum: f64 = waits.iter().map(|(_, seconds)| seconds).sum();
    let part = if sum > waited { waited / sum } else { 1.0 };
    waits.iter_mut().for_each(|(_, seconds)| *seconds *= part);
    waits
}

impl Drop for Masks {
    fn drop(&mut self) {
        self.shared.lock().is_closed = true;
        self.shared.pushed.notify_all();
    }
}

impl Shared {
    /// A thread's loop.
    fn serve(&self) {
        let mut state = self.lock();
        while !state.is_closed {
            let now = self.now();
            if let Some(begun) = state.queue.begin(now) {
                if state.queue.has_waiting() && state.num_watching == 0 {
                    self.pushed.notify_one();
                }
                drop(state);
                self.work(begun);
                state = self.lock();
                continue;
            }
            state = match state.queue.next_look(now).filter(|_| state.num_watching == 0) {
                Some(seconds) => {
                    state.num_watching += 1;
                    let waited = self.pushed.wait_timeout(state, Duration::from_secs_f64(seconds));
                    let mut state = waited.unwrap_or_else(PoisonError::into_inner).0;
                    state.num_watching -= 1;
                    state
                }
                None => self.pushed.wait(state).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }

    fn work(&self, begun: Begun<Job>) {
        let (job, number) = begun.split();
        let rubbish = match job {
            Job::Make { id, owner, work } => self.make(id, owner, work, number),
            Job::Drop(rubbish) => Some(rubbish),
        };
        if rubbish.is_some() {
            // The job is dropped, for every outcome.
            let _ = quietly(|| drop(rubbish));
            self.lock().queue.end(number, self.now());
        }
    }

    /// Makes a mask and reports it; returns the state if its sequence is gone.
    fn make(&self, id: SeqId, owner: Owner, work: Work, number: u64) -> Option<Box<dyn Send>> {
        if !self.lock().pending.contains_key(&id) {
            return Some(Box::new(work));
        }
        let start = Instant::now();
        let outcome = quietly(work).unwrap_or_else(Err);
        let seconds = start.elapsed().as_secs_f64();
        let mut state = self.lock();
        let Some(round) = state.pending.remove(&id) else { return Some(Box::new(outcome)) };
        state.queue.end(number, self.now());
        state.done.push(Done { id, owner, outcome, seconds, round });
        if round == state.round {
            state.num_fresh -= 1;
        }
        let listener = std::mem::take(&mut state.is_asleep).then(|| state.on_done.clone()).flatten();
        drop(state);
        self.done.notify_all();
        if let Some(listener) = listener {
            listener();
        }
        None
    }
}

/// Does work that may panic, without an effect on other sequences.
fn quietly<T>(work: impl FnOnce() -> T) -> Result<T> {
    std::panic::catch_unwind(AssertUnwindSafe(work)).map_err(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("unknown cause");
        Error::internal(format!("advancing the constraint failed: {text}"))
    })
}
