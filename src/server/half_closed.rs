//! Clients that close their half of a connection after a request, and still wait for its answer.
//!
//! The same is seen of one that has gone. They differ in what happens to bytes that are sent to them: a system
//! whose program has gone resets the connection. So where nothing was sent yet, an interim answer goes out, which every
//! client of HTTP/1.1 has to pass over; where an answer is on its way, its own bytes ask.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep};

/// What every client has to pass over.
const INTERIM: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";
/// How often is looked for a reset.
const INTERVAL: Duration = Duration::from_millis(100);
/// Time for a request that came together with the end to be read.
const READING_TIME: Duration = Duration::from_millis(100);
/// Longest time in which nothing asks, of an answer that has begun.
const MAX_SILENCE: Duration = Duration::from_secs(5);

/// Whether a request of a connection was read as a whole, and its answer is not at its end.
#[derive(Debug, Clone, Default)]
pub(super) struct Answering(Arc<AtomicBool>);

impl Answering {
    pub(super) fn begin(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    pub(super) fn end(&self) {
        self.0.store(false, Ordering::Relaxed);
    }

    pub(super) fn is_on(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// What follows the end of what a client sends.
pub(super) struct HalfClosed {
    /// When the end came, or something was sent since.
    latest: Instant,
    has_asked: bool,
    next_look: Pin<Box<Sleep>>,
}

impl HalfClosed {
    pub(super) fn new() -> Self {
        let latest = Instant::now();
        Self { latest, has_asked: false, next_look: Box::pin(tokio::time::sleep_until(latest + INTERVAL)) }
    }

    /// Something was sent.
    pub(super) fn note_sent(&mut self) {
        self.latest = Instant::now();
    }

    /// Waits until the connection can be closed: when no answer is pending, or its client is gone.
    /// `may_ask` is whether nothing of an answer was sent yet.
    pub(super) fn poll_over(
        &mut self,
        stream: &TcpStream,
        answering: &Answering,
        may_ask: bool,
        cx: &mut Context<'_>,
    ) -> Poll<()> {
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
            if answering.is_on() && may_ask && !self.has_asked {
                self.has_asked = true;
                // If it cannot be sent, a look finds out why.
                let _ = stream.try_write(INTERIM);
            }
            ready!(self.next_look.as_mut().poll(cx));
            self.next_look.as_mut().reset(Instant::now() + INTERVAL);
        }
    }
}
