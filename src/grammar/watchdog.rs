//! Stops work on a grammar that takes too long.
//!
//! The library's own limits count items and expressions, and a hostile grammar can make each of them expensive. The
//! limit here is on the thread's processor time, so that an overloaded machine fails no ordinary grammar; if the system
//! does not report it, on the clock, with a much longer limit. One thread for the process checks the time, and only
//! while there is work to watch. An ordinary set of tokens takes a thousandth of the limit.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use llguidance::CancellationHandle;

/// The interval of checks, and how long work may compute from the first check on.
const PERIOD: Duration = Duration::from_millis(250);
/// Looks after which work is stopped if the system does not report its CPU time.
const MAX_LOOKS: u32 = 20;

#[derive(Default)]
struct Watchdog {
    state: Mutex<State>,
    wake: Condvar,
}

#[derive(Default)]
struct State {
    /// In the order of their next check.
    watched: Vec<Work>,
    next_id: u64,
    is_asleep: bool,
}

struct Work {
    id: u64,
    handle: CancellationHandle,
    /// Where the system counts the thread's time.
    counter: Option<Arc<str>>,
    look_at: Instant,
    num_looks: u32,
    /// The thread's processor time at the first check.
    first: Option<Duration>,
}

/// Work that is watched until this is dropped.
pub(super) struct Watch {
    watchdog: Arc<Watchdog>,
    id: u64,
}

/// Watches work of this thread that polls `handle`; without a thread for it, no work is watched.
pub(super) fn watch(handle: &CancellationHandle) -> Option<Watch> {
    static WATCHDOG: OnceLock<Option<Arc<Watchdog>>> = OnceLock::new();
    thread_local! {
        static COUNTER: Option<Arc<str>> = counter_of_this_thread();
    }
    let watchdog = Arc::clone(WATCHDOG.get_or_init(start).as_ref()?);
    let mut state = watchdog.lock();
    let id = state.next_id;
    state.next_id += 1;
    state.watched.push(Work {
        id,
        handle: handle.clone(),
        counter: COUNTER.with(Option::clone),
        look_at: Instant::now() + PERIOD,
        num_looks: 0,
        first: None,
    });
    let is_asleep = std::mem::take(&mut state.is_asleep);
    drop(state);
    if is_asleep {
        watchdog.wake.notify_one();
    }
    Some(Watch { watchdog, id })
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.watchdog.lock().watched.retain(|work| work.id != self.id);
    }
}

impl Work {
    /// Stops the work if it has had its time; otherwise it is checked again.
    fn look(&mut self, now: Instant) -> bool {
        self.num_looks += 1;
        self.look_at = now + PERIOD;
        let is_late = match self.counter.as_deref().and_then(read_counter) {
            Some(computed) => computed.saturating_sub(*self.first.get_or_insert(computed)) >= PERIOD * 3 / 4,
            None => self.num_looks >= MAX_LOOKS,
        };
        if is_late {
            self.handle.cancel();
        }
        !is_late
    }
}

/// Where Linux counts the time of the calling thread.
pub(super) fn counter_of_this_thread() -> Option<Arc<str>> {
    let thread = std::fs::read_link("/proc/thread-self").ok()?;
    let path = format!("/proc/{}/schedstat", thread.to_str()?);
    read_counter(&path).map(|_| path.into())
}

/// How long a thread has computed.
pub(super) fn read_counter(path: &str) -> Option<Duration> {
    let text = std::fs::read_to_string(path).ok()?;
    text.split_whitespace().next()?.parse().ok().map(Duration::from_nanos)
}

fn start() -> Option<Arc<Watchdog>> {
    let watchdog = Arc::new(Watchdog::default());
    let this = Arc::clone(&watchdog);
    let thread = std::thread::Builder::new().name("tinyvllm-watch".to_owned());
    thread.spawn(move || this.run()).ok().map(|_| watchdog)
}

impl Watchdog {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        let mut state = self.lock();
        loop {
            let now = Instant::now();
            let num_due = state.watched.iter().take_while(|work| work.look_at <= now).count();
            let mut due: Vec<Work> = state.watched.drain(..num_due).collect();
            due.retain_mut(|work| work.look(now));
            state.watched.append(&mut due);
            state = match state.watched.first() {
                Some(work) => {
                    let left = work.look_at.saturating_duration_since(now);
                    self.wake.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0
                }
                None => {
                    state.is_asleep = true;
                    self.wake.wait(state).unwrap_or_else(PoisonError::into_inner)
                }
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_computes_for_too_long_is_stopped() {
        let (quick, slow) = (CancellationHandle::default(), CancellationHandle::default());
        drop(watch(&quick).unwrap());
        let watched = watch(&slow).unwrap();
        let start = Instant::now();
        while !slow.is_cancelled() {
            assert!(start.elapsed() < PERIOD * 1_000);
        }
        assert!(start.elapsed() >= PERIOD && !quick.is_cancelled());
        drop(watched);
        if cfg!(target_os = "linux") {
            // Waiting does not count.
            let idle = CancellationHandle::default();
            let _watched = watch(&idle).unwrap();
            std::thread::sleep(PERIOD * 4);
            assert!(!idle.is_cancelled());
        }
    }
}
