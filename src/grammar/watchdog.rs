//! Stops work on a grammar that takes too long.
//!
//! The library's own limits count items and expressions, and a hostile grammar can make each of them expensive.
//! One thread for the process looks at the clock, only while there is work to watch. An ordinary set of tokens
//! takes a ten-thousandth of the time allowed, so the clock decides nothing but whether such a grammar fails, on a
//! machine that is overloaded, too.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use llguidance::CancellationHandle;

/// What takes longer is stopped.
const PATIENCE: Duration = Duration::from_secs(1);

/// The work that is being done.
#[derive(Default)]
struct Watchdog {
    state: Mutex<State>,
    wake: Condvar,
}

#[derive(Default)]
struct State {
    /// In order of their deadlines, since all have the same time.
    watched: Vec<(u64, Instant, CancellationHandle)>,
    next_id: u64,
    is_asleep: bool,
}

/// Work that is watched until this is dropped.
pub(super) struct Watch {
    watchdog: Arc<Watchdog>,
    id: u64,
}

/// Watches work that looks at `handle`; without a thread for it, nothing is watched.
pub(super) fn watch(handle: &CancellationHandle) -> Option<Watch> {
    static WATCHDOG: OnceLock<Option<Arc<Watchdog>>> = OnceLock::new();
    let watchdog = Arc::clone(WATCHDOG.get_or_init(start).as_ref()?);
    let mut state = watchdog.lock();
    let id = state.next_id;
    state.next_id += 1;
    state.watched.push((id, Instant::now() + PATIENCE, handle.clone()));
    let is_asleep = std::mem::take(&mut state.is_asleep);
    drop(state);
    if is_asleep {
        watchdog.wake.notify_one();
    }
    Some(Watch { watchdog, id })
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.watchdog.lock().watched.retain(|(id, ..)| *id != self.id);
    }
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
            let num_late = state.watched.iter().take_while(|(_, deadline, _)| *deadline <= now).count();
            state.watched.drain(..num_late).for_each(|(_, _, handle)| handle.cancel());
            state = match state.watched.first() {
                Some((_, deadline, _)) => {
                    let left = deadline.saturating_duration_since(now);
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
    fn only_what_takes_too_long_is_stopped() {
        let (quick, slow) = (CancellationHandle::default(), CancellationHandle::default());
        drop(watch(&quick).unwrap());
        let start = Instant::now();
        let _watch = watch(&slow).unwrap();
        while !slow.is_cancelled() {
            assert!(start.elapsed() < PATIENCE * 100);
            std::thread::sleep(PATIENCE / 50);
        }
        assert!(start.elapsed() >= PATIENCE && !quick.is_cancelled());
    }
}
