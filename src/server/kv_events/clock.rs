//! The timeouts of peers: for the handshake, for reading, and for a request.

use std::time::Duration;

use tokio::time::Instant;

use super::peers::Closed;
use super::session::Session;

/// Time for the handshake of a peer.
pub(super) const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Time for which a peer may read nothing of what is sent to it.
pub(super) const WRITE_TIMEOUT: Duration = Duration::from_secs(30);
/// Time for which a peer may be idle. ZeroMQ's sockets reconnect when they need to.
pub(super) const IDLE_TIMEOUT: Duration = Duration::from_secs(600);

/// The timers of a peer.
pub(super) struct Clock {
    connected: Instant,
    /// When bytes last came in or went out.
    active: Instant,
    /// When the peer last read something, or when output became available for it.
    written: Option<Instant>,
}

impl Clock {
    pub(super) fn new() -> Self {
        let now = Instant::now();
        Self { connected: now, active: now, written: None }
    }

    /// The next deadline, if a timer runs, and the reason to close the peer then.
    pub(super) fn deadline(&mut self, session: &Session<'_>) -> Option<(Instant, Closed)> {
        let now = Instant::now();
        if session.output().is_empty() {
            self.written = None;
        }
        let stalled = (!session.output().is_empty())
            .then(|| (*self.written.get_or_insert(now) + WRITE_TIMEOUT, Closed::Stalled));
        let waited = match (session.is_open(), session.wants_batches()) {
            (false, _) => Some((self.connected + HANDSHAKE_TIMEOUT, Closed::Handshake)),
            (true, false) => Some((self.active + IDLE_TIMEOUT, Closed::Idle)),
            (true, true) => None,
        };
        [stalled, waited].into_iter().flatten().min_by_key(|(deadline, _)| *deadline)
    }

    /// Records that bytes came in and went out.
    pub(super) fn moved(&mut self, read: usize, written: usize) {
        let now = Instant::now();
        if read + written > 0 {
            self.active = now;
        }
        if written > 0 {
            self.written = Some(now);
        }
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::super::kept::KeptBatches;
    use super::super::session::Role;
    use super::super::zmtp;
    use super::*;

    /// The running timeout of a session and its reason.
    fn limit(session: &Session<'_>, clock: &mut Clock) -> Option<(Duration, Closed)> {
        let (deadline, why) = clock.deadline(session)?;
        Some((deadline.saturating_duration_since(clock.connected), why))
    }

    fn send(session: &mut Session<'_>, bytes: &[u8]) {
        session.space()[..bytes.len()].copy_from_slice(bytes);
        session.filled(bytes.len());
        session.work().unwrap();
    }

    #[test]
    fn each_state_has_its_time() {
        let kept = KeptBatches::new(10, 10);
        let (second, near) = (Duration::from_secs(1), Duration::from_secs(2));
        let check = |found: Option<(Duration, Closed)>, wanted: Option<(Duration, Closed)>| {
            let is_near = |found: Duration, wanted: Duration| found.abs_diff(wanted) < near;
            let is_equal = match (found, wanted) {
                (Some((found, why)), Some((wanted, limit))) => why == limit && is_near(found, wanted),
                (found, wanted) => found.is_none() && wanted.is_none(),
            };
            assert!(is_equal, "{found:?} instead of {wanted:?}");
        };
        for role in [Role::Publisher, Role::Repeater] {
            let mut session = Session::new(role, b"kv", &kept);
            let mut clock = Clock::new();
            let drain = |session: &mut Session<'_>| session.written(session.output().len());
            // Bytes without effect do not extend it.
            check(limit(&session, &mut clock), Some((HANDSHAKE_TIMEOUT, Closed::Handshake)));
            drain(&mut session);
            send(&mut session, &zmtp::greeting()[..30]);
            clock.active += 5 * second;
            check(limit(&session, &mut clock), Some((HANDSHAKE_TIMEOUT, Closed::Handshake)));
            send(&mut session, &zmtp::greeting()[30..]);
            let mut ready = Vec::new();
            zmtp::put_ready(&mut ready, if role == Role::Publisher { "SUB" } else { "REQ" });
            send(&mut session, &ready);
            // Our own greeting has not been read.
            check(limit(&session, &mut clock), Some((WRITE_TIMEOUT, Closed::Stalled)));
            drain(&mut session);
            check(limit(&session, &mut clock), Some((IDLE_TIMEOUT + 5 * second, Closed::Idle)));

            kept.push(0, Bytes::from_static(b"x"));
            let wish: &[u8] = match role {
                Role::Publisher => b"\0\x01\x01",
                Role::Repeater => b"\x01\0\0\x08\0\0\0\0\0\0\0\0",
            };
            send(&mut session, wish);
            kept.push(1, Bytes::from_static(b"x"));
            session.work().unwrap();
            check(limit(&session, &mut clock), Some((WRITE_TIMEOUT, Closed::Stalled)));
            clock.moved(0, 1);
            clock.written = clock.written.map(|written| written + 9 * second);
            clock.active += 7 * second;
            check(limit(&session, &mut clock), Some((WRITE_TIMEOUT + 9 * second, Closed::Stalled)));
            drain(&mut session);
            // A subscriber may wait as long as there are no batches. After a replay, time counts from its
            // end.
            let idle = (IDLE_TIMEOUT + 7 * second, Closed::Idle);
            check(limit(&session, &mut clock), (role == Role::Repeater).then_some(idle));
        }
    }
}
