//! Where the events of a request go.

use std::sync::mpsc::Sender;

use super::{Event, RequestId};
use crate::Result;
use crate::kv_cache::CacheEvent;

/// Takes the events of one request. It is called on the engine's thread, so it must never wait.
pub trait EventSink: Send {
    /// Takes the next event. False if it, and all that follow, are not needed: the request is aborted.
    fn send(&mut self, event: Event) -> bool;

    /// Whether the reader is gone. Checked before every step, so that a request is aborted even without events.
    fn is_closed(&self) -> bool;
}

/// Receives the answer to a submission. Called once, on the engine's thread; dropped if the engine stops before.
pub type OnAccepted = Box<dyn FnOnce(Result<RequestId>) + Send>;

/// Receives the changes of the prefix cache in a step, at least one. It is called on the engine's thread, so it must
/// never block.
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
