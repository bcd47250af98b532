//! Log lines that clients can cause, with a limited rate. A kind of line is a name in the code.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::access::AccessLog;

/// Interval between two lines of a kind.
const INTERVAL: Duration = Duration::from_secs(10);

/// Logs the first message of a kind at once. A later line gives the number of messages since the last one.
pub(super) struct Notices {
    log: Arc<dyn AccessLog>,
    kinds: Mutex<HashMap<&'static str, NoticeState>>,
}

struct NoticeState {
    at: Instant,
    num_suppressed: u64,
}

impl Notices {
    pub(super) fn new(log: Arc<dyn AccessLog>) -> Self {
        Self { log, kinds: Mutex::default() }
    }

    /// Logs a message, unless a line of this kind was written shortly before.
    pub(super) fn log(&self, kind: &'static str, message: impl FnOnce() -> String) {
        self.log_at(Instant::now(), kind, message);
    }

    fn log_at(&self, now: Instant, kind: &'static str, message: impl FnOnce() -> String) {
        let mut kinds = self.kinds.lock().unwrap_or_else(PoisonError::into_inner);
        let num_suppressed = match kinds.get_mut(kind) {
            Some(state) if now < state.at + INTERVAL => {
                state.num_suppressed += 1;
                return;
            }
            Some(state) => state.num_suppressed,
            None => 0,
        };
        kinds.insert(kind, NoticeState { at: now, num_suppressed: 0 });
        drop(kinds);
        let more = match num_suppressed {
            0 => String::new(),
            num_suppressed => format!(" ({num_suppressed} more like this since the last line)"),
        };
        self.log.notice(&format!("{}{more}", message()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::access::AccessRecord;

    #[derive(Default)]
    struct Lines(Mutex<Vec<String>>);

    impl AccessLog for Lines {
        fn record(&self, _record: AccessRecord) {}

        fn notice(&self, message: &str) {
            self.0.lock().unwrap().push(message.to_owned());
        }
    }

    #[test]
    fn a_storm_is_a_line() {
        let lines = Arc::new(Lines::default());
        let notices = Notices::new(lines.clone());
        let start = Instant::now();
        let log = |seconds, kind| {
            notices.log_at(start + Duration::from_secs(seconds), kind, || format!("{kind} at {seconds}"));
        };
        (0..10).for_each(|seconds| log(seconds, "a"));
        log(3, "b");
        log(10, "a");
        log(30, "a");
        let logged = lines.0.lock().unwrap().clone();
        assert_eq!(logged, ["a at 0", "b at 3", "a at 10 (9 more like this since the last line)", "a at 30"]);
    }
}
