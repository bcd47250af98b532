//! Publishes which prefixes are cached here, for routers, as vLLM does: over ZeroMQ, in MessagePack.
//!
//! A batch has the changes of one step. The engine's thread numbers batches before it puts them into a
//! bounded queue, and never waits. So subscribers detect a lost batch by its number. The first batch clears
//! the cache, so that subscribers of an earlier server at this address drop its blocks.
//!
//! The sockets implement ZeroMQ's protocol themselves (`zmtp.rs`), because any peer that reaches them may
//! send anything. Peers, their timeouts, their frames and their waiting batches are limited, for all together
//! (`peers.rs`, `session.rs`, `kept.rs`).
//!
//! Events contain prompts, and the sockets require no key. So they are off by default, and the default
//! address is reachable only from this machine.

mod clock;
mod config;
mod kept;
mod payload;
mod peers;
mod publisher;
mod session;
pub mod zmtp;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::mpsc;

pub use self::config::{KvEventsChoice, KvEventsConfig};
use self::peers::Counts;
pub(super) use self::peers::MAX_PEERS;
use super::access::AccessLog;
use tinyvllm::engine::{CacheEvent, OnCacheEvents};
use tinyvllm::{Error, Result};

/// The contents of a batch.
#[derive(Debug, PartialEq)]
enum Change {
    /// The cache is empty.
    Cleared,
    /// Blocks were added and removed, in this order.
    Blocks(Vec<CacheEvent>),
}

#[derive(Debug)]
struct Batch {
    number: u64,
    change: Change,
}

/// Where routers find the events.
#[derive(Debug, Clone)]
pub(super) struct Source {
    pub(super) endpoint: String,
    pub(super) replay_endpoint: Option<String>,
    pub(super) topic: String,
}

/// The sockets of the events.
pub(super) struct KvEvents {
    source: Source,
    queue: mpsc::Sender<Batch>,
    totals: Arc<Totals>,
    counts: Arc<Counts>,
}

#[derive(Debug, Default)]
struct Totals {
    batches: AtomicU64,
    lost: AtomicU64,
}

/// Counters for `/metrics`, since the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct KvEventTotals {
    /// Batches.
    pub(super) batches: u64,
    /// Batches that the sockets never got, because the queue was full.
    pub(super) lost: u64,
    /// Batches that slow subscribers missed, summed over subscribers.
    pub(super) missed: u64,
    /// Peers that were closed because of a limit or invalid data.
    pub(super) closed_peers: u64,
}

impl KvEvents {
    /// Binds the ports, for this many peers together. Nothing is sent before [`listener`](Self::listener) is
    /// called.
    ///
    /// # Errors
    /// If a port cannot be bound.
    pub(super) async fn bind(
        config: &KvEventsConfig,
        max_peers: usize,
        log: Arc<dyn AccessLog>,
    ) -> Result<Self> {
        let (queue, batches) = mpsc::channel(config.max_queue_size);
        let counts = Arc::<Counts>::default();
        let source = publisher::start(config, max_peers, batches, Arc::clone(&counts), log).await?;
        Ok(Self { source, queue, totals: Arc::default(), counts })
    }

    /// Where routers find the events.
    pub(super) fn source(&self) -> &Source {
        &self.source
    }

    /// The counters so far.
    pub(super) fn totals(&self) -> KvEventTotals {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        KvEventTotals {
            batches: read(&self.totals.batches),
            lost: read(&self.totals.lost),
            missed: read(&self.counts.missed),
            closed_peers: read(&self.counts.closed),
        }
    }

    /// The callback for the engine, which takes the events of a step. Call this once, before the first
    /// request.
    pub(super) fn listener(&self) -> OnCacheEvents {
        let (queue, totals) = (self.queue.clone(), Arc::clone(&self.totals));
        let send = move |change: Change| {
            let number = totals.batches.fetch_add(1, Ordering::Relaxed);
            if queue.try_send(Batch { number, change }).is_err() {
                totals.lost.fetch_add(1, Ordering::Relaxed);
            }
        };
        send(Change::Cleared);
        Box::new(move |events| send(Change::Blocks(events)))
    }
}

/// The error of a socket that cannot be bound.
fn cannot_bind(name: &str, endpoint: &str, error: impl std::fmt::Display) -> Error {
    Error::invalid_request(format!("{name} of --kv-events-config cannot be {endpoint}: {error}"))
        .with_hint("give an address of this machine and a port that is free, such as tcp://127.0.0.1:5557")
}

#[cfg(test)]
mod tests {
    use super::*;
    use tinyvllm::engine::Medium;

    /// Nobody reads the listener's queue: batches that do not fit are lost, and the numbers show it.
    #[test]
    fn a_full_queue_loses_batches_and_never_waits() {
        let (queue, mut batches) = mpsc::channel(2);
        let source = Source { endpoint: String::new(), replay_endpoint: None, topic: String::new() };
        let events = KvEvents { source, queue, totals: Arc::default(), counts: Arc::default() };
        let mut listener = events.listener();
        for hash in 0..3 {
            listener(vec![CacheEvent::Removed { hash, medium: Medium::Cache }]);
        }
        let wanted = KvEventTotals { batches: 4, lost: 2, missed: 0, closed_peers: 0 };
        assert_eq!(events.totals(), wanted);
        let first = batches.try_recv().unwrap();
        assert_eq!((first.number, first.change), (0, Change::Cleared));
        assert_eq!(batches.try_recv().unwrap().number, 1);
        listener(vec![CacheEvent::Removed { hash: 9, medium: Medium::Cache }]);
        assert_eq!(batches.try_recv().unwrap().number, 4, "2 and 3 are missing");
    }
}
