//! Lines for whoever runs the server, of which whoever connects cannot make many.
//! A kind of line is a name in the code.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::server::access::AccessLog;

/// Time between two lines of a kind.
const INTERVAL: Duration = Duration::from_secs(10);

/// Says the first of a kind at once, and of the next ones how many they were.
pub(super) struct Notices {
    log: Arc<dyn AccessLog>,
    kinds: Mutex<HashMap<&'static str, Told>>,
}

struct Told {
    at: Instant,
    num_untold: u64,
}

impl Notices {
    pub(super) fn new(log: Arc<dyn AccessLog>) -> Self {
        Self { log, kinds: Mutex::default() }
    }

    /// Tells of something, unless a line of this kind was written just before.
    pub(super) fn tell(&self, kind: &'static str, message: impl FnOnce() -> String) {
        self.tell_at(Instant::now(), kind, message);
    }

    fn tell_at(&self, now: Instant, kind: &'static str, message: impl FnOnce() -> String) {
        let mut kinds = self.kinds.lock().unwrap_or_else(PoisonError::into_inner);
        let num_untold = match kinds.get_mut(kind) {
            Some(told) if now < told.at + INTERVAL => {
                told.num_untold += 1;
                return;
            }
            Some(told) => told.num_untold,
            None => 0,
        };
        kinds.insert(kind, Told { at: now, num_untold: 0 });
        drop(kinds);
        let more = match num_untold {
            0 => String::new(),
            untold => format!(" ({untold} more like this since the last line)"),
        };
        self.log.notice(&format!("{}{more}", message()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::access::AccessRecord;

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
        let tell = |seconds, kind| {
            notices.tell_at(start + Duration::from_secs(seconds), kind, || format!("{kind} at {seconds}"));
        };
        (0..10).for_each(|seconds| tell(seconds, "a"));
        tell(3, "b");
        tell(10, "a");
        tell(30, "a");
        let told = lines.0.lock().unwrap().clone();
        assert_eq!(told, ["a at 0", "b at 3", "a at 10 (9 more like this since the last line)", "a at 30"]);
    }
}
