//! How long work may take, in time of the processor: on a busy machine it takes no more of that than on an idle one.

use std::time::{Duration, Instant};

/// An end for the work of one thread.
#[derive(Debug)]
pub(crate) struct Deadline {
    /// What the work may take.
    time: Duration,
    /// What the thread had run when it began.
    ran_before: Duration,
    /// Before this, the thread cannot have run for too long.
    next_look: Instant,
}

impl Deadline {
    pub(crate) fn new(time: Duration) -> Self {
        Self { time, ran_before: thread_time(), next_look: Instant::now() + time }
    }

    /// What the work has taken.
    pub(crate) fn spent(&self) -> Duration {
        thread_time().saturating_sub(self.ran_before)
    }

    /// Whether the time is over. This is cheap.
    pub(crate) fn is_over(&mut self) -> bool {
        let now = Instant::now();
        if now < self.next_look {
            return false;
        }
        let left = self.time.saturating_sub(self.spent());
        self.next_look = now + left;
        left.is_zero()
    }
}

/// How long this thread has run; how long the program has, where that is not known.
fn thread_time() -> Duration {
    #[cfg(unix)]
    {
        use nix::time::{ClockId, clock_gettime};
        if let Ok(time) = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID) {
            return time.into();
        }
    }
    static START: std::sync::LazyLock<Instant> = std::sync::LazyLock::new(Instant::now);
    START.elapsed()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_thread_runs_is_counted() {
        let mut long = Deadline::new(Duration::from_secs(3_600));
        let mut short = Deadline::new(Duration::from_millis(5));
        assert!(!long.is_over());
        while !short.is_over() {
            std::hint::spin_loop();
        }
        assert!(short.spent() >= Duration::from_millis(5) && short.is_over() && !long.is_over());
    }

    #[cfg(unix)]
    #[test]
    fn time_that_others_take_is_not() {
        let mut deadline = Deadline::new(Duration::from_millis(100));
        let other = std::thread::spawn(|| {
            let mut deadline = Deadline::new(Duration::from_millis(300));
            while !deadline.is_over() {}
        });
        other.join().unwrap();
        assert!(!deadline.is_over());
    }
}
