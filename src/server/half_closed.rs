//! Clients that close their half of a connection after a request, and still wait for its answer.
//!
//! A disconnected client looks the same. The difference shows when bytes are sent: the system of a program
//! that has gone resets the connection. So if nothing was sent yet, the server sends an interim answer, which
//! every HTTP/1.1 client has to ignore. If an answer has begun, its own bytes serve as the probe. HTTP/1.0 has no interim
//! answers, so its clients have a few seconds for their answer.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::http::Version;
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep};

/// An interim answer, which every client has to ignore.
const INTERIM: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";
/// Interval of looking for a reset.
const INTERVAL: Duration = Duration::from_millis(100);
/// Time to read a request that came together with the end.
const READING_TIME: Duration = Duration::from_millis(100);
/// Longest time without a probe: after an answer has begun, or over HTTP/1.0.
pub(super) const MAX_SILENCE: Duration = Duration::from_secs(5);

/// Whether a request of the connection was read completely and its answer has not ended.
#[derive(Debug, Clone, Default)]
pub(super) struct Answering(Arc<State>);

#[derive(Debug, Default)]
struct State {
    is_on: AtomicBool,
    /// The latest request has a version without interim answers.
    is_older: AtomicBool,
}

impl Answering {
    /// A request of this version was read.
    pub(super) fn begin(&self, version: Version) {
        self.0.is_older.store(version != Version::HTTP_11, Ordering::Relaxed);
        self.0.is_on.store(true, Ordering::Relaxed);
    }

    pub(super) fn end(&self) {
        self.0.is_on.store(false, Ordering::Relaxed);
    }

    pub(super) fn is_on(&self) -> bool {
        self.0.is_on.load(Ordering::Relaxed)
    }

    /// Whether the client of the latest request knows no interim answers.
    pub(super) fn is_older(&self) -> bool {
        self.0.is_older.load(Ordering::Relaxed)
    }
}

/// A connection whose client has closed its half.
pub(super) struct HalfClosed {
    /// When the end came, or when something was last sent.
    latest: Instant,
    has_asked: bool,
    next_look: Pin<Box<Sleep>>,
}

impl HalfClosed {
    pub(super) fn new() -> Self {
        let latest = Instant::now();
        Self { latest, has_asked: false, next_look: Box::pin(tokio::time::sleep_until(latest + INTERVAL)) }
    }

    /// Notes that something was sent.
    pub(super) fn note_sent(&mut self) {
        self.latest = Instant::now();
    }

    /// Waits until the connection can be closed: when no answer is pending, or the client is gone. `may_ask`
    /// is true if no byte of an answer was sent yet.
    pub(super) fn poll_over(
        &mut self,
        stream: &TcpStream,
        answering: &Answering,
        may_ask: bool,
        cx: &mut Context<'_>,
    ) -> Poll<()> {
        let may_ask = may_ask && !answering.is_older();
        loop {
            let silence = self.latest.elapsed();
            let is_reset = stream.take_error().is_ok_and(|error| error.is_some());
            let timeout = match (answering.is_on(), may_ask) {
                (false, _) => READING_TIME,
                (true, true) => Duration::MAX,
                (true, false) => MAX_SILENCE,
            };
            if is_reset || silence >= timeout {
                return Poll::Ready(());
            }
            // Most answers need no probe.
            if answering.is_on() && may_ask && !self.has_asked && silence >= READING_TIME {
                self.has_asked = true;
                // If it cannot be sent, the next check finds out why.
                let _ = stream.try_write(INTERIM);
            }
            ready!(self.next_look.as_mut().poll(cx));
            self.next_look.as_mut().reset(Instant::now() + INTERVAL);
        }
    }
}
