//! Where the events of a request go.

use std::sync::mpsc::Sender;

use super::{Event, RequestId};
use crate::Result;
use crate::kv_cache::CacheEvent;

/// Takes the events of one request. It is called on the engine's thread, so it must never wait.
pub trait EventSink: Send {
    /// Takes the next event. False if it, and all that follow, are not wanted: the request is given up.
    fn send(&mut self, event: Event) -> bool;

    /// Whether nobody is left to read. Asked before every step, so that a request is given up even while
    /// it has nothing to report.
    fn is_closed(&self) -> bool;
}

/// What becomes of the answer to a submission. Called once, on the engine's thread; dropped if the engine
/// stops before.
pub type OnAccepted = Box<dyn FnOnce(Result<RequestId>) + Send>;

/// Takes what happened to the prefix cache in a step: never nothing. It is called on the engine's thread, so it must
/// never wait.
pub type OnCacheEvents = Box<dyn FnMut(Vec<CacheEvent>) + Send>;

/// A channel whose reader is gone is noticed at the next event.
impl EventSink for Sender<Event> {
    fn send(&mut self, event: Event) -> bool {
        Self::send(self, event).is_ok()
    }

    fn is_closed(&self) -> bool {
        false
    }
}
