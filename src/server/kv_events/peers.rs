//! The peers of both sockets, and their limits. A peer beyond a limit is closed, and the log names the limit.

use std::collections::HashMap;
use std::fmt;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use tokio::io::Interest;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::time::timeout_at;

use super::KvEventsConfig;
use super::clock::{Clock, HANDSHAKE_TIMEOUT, IDLE_TIMEOUT, WRITE_TIMEOUT};
use super::kept::KeptBatches;
use super::session::{Fault, Role, Session};
use crate::access::AccessLog;
use crate::clients::network;
use crate::notices::Notices;

/// Peers of both sockets at once; fewer if the process may have few open files. One address may have half of
/// them.
pub(crate) const MAX_PEERS: usize = 256;
/// Pause after the system refused a connection, for instance because there are no more file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Why a peer was closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Closed {
    /// The limit of peers.
    Peers(usize),
    /// The limit of peers from its address.
    PeersOfAddress(usize),
    Handshake,
    Stalled,
    Idle,
    Fault(Fault),
}

impl Closed {
    /// The kind of the log line, so that one reason does not suppress the lines of another.
    pub(super) fn kind(self) -> &'static str {
        match self {
            Self::Peers(_) => "peers",
            Self::PeersOfAddress(_) => "peers_of_address",
            Self::Handshake => "handshake",
            Self::Stalled => "stalled",
            Self::Idle => "idle",
            Self::Fault(Fault::TooSlow) => "too slow",
            Self::Fault(_) => "protocol",
        }
    }
}

impl fmt::Display for Closed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Peers(most) => write!(f, "the limit of {most} peers is reached"),
            Self::PeersOfAddress(most) => {
                write!(f, "the limit of {most} peers from its address is reached")
            }
            Self::Handshake => write!(f, "it sent no handshake within {} s", HANDSHAKE_TIMEOUT.as_secs()),
            Self::Stalled => write!(f, "it read nothing for {} s", WRITE_TIMEOUT.as_secs()),
            Self::Idle => write!(f, "it requested nothing for {} s", IDLE_TIMEOUT.as_secs()),
            Self::Fault(fault) => fault.fmt(f),
        }
    }
}

/// Counters for `/metrics`.
#[derive(Debug, Default)]
pub(super) struct Counts {
    /// Batches that subscribers missed because they were too slow, summed over subscribers.
    pub(super) missed: AtomicU64,
    /// Peers that were closed.
    pub(super) closed: AtomicU64,
}

/// What all peers share.
pub(super) struct Peers {
    topic: Box<[u8]>,
    kept: KeptBatches,
    counts: Arc<Counts>,
    pub(super) notices: Notices,
    max_peers: usize,
    /// The number of peers from each address.
    permits: Mutex<HashMap<IpAddr, usize>>,
}

impl Peers {
    pub(super) fn new(
        config: &KvEventsConfig,
        max_peers: usize,
        counts: Arc<Counts>,
        log: Arc<dyn AccessLog>,
    ) -> Self {
        Self {
            max_peers,
            topic: config.topic.as_bytes().into(),
            kept: KeptBatches::new(config.max_queue_size, config.buffer_steps),
            counts,
            notices: Notices::new(log),
            permits: Mutex::default(),
        }
    }

    /// Makes a batch available to subscribers.
    pub(super) fn publish(&self, number: u64, payload: Bytes) {
        self.kept.push(number, payload);
    }

    fn permits(&self) -> MutexGuard<'_, HashMap<IpAddr, usize>> {
        self.permits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn close(&self, address: IpAddr, why: Closed) {
        self.counts.closed.fetch_add(1, Ordering::Relaxed);
        self.notices.log(why.kind(), || format!("KV events: {address} was closed, because {why}"));
    }
}

/// A peer's permit, released on drop.
struct PeerPermit {
    peers: Arc<Peers>,
    address: IpAddr,
}

impl PeerPermit {
    fn take(peers: &Arc<Peers>, address: IpAddr) -> Result<Self, Closed> {
        let mut permits = peers.permits();
        let most = (peers.max_peers / 2).max(1);
        if permits.get(&address).is_some_and(|count| *count >= most) {
            return Err(Closed::PeersOfAddress(most));
        }
        if permits.values().sum::<usize>() >= peers.max_peers {
            return Err(Closed::Peers(peers.max_peers));
        }
        *permits.entry(address).or_default() += 1;
        Ok(Self { peers: Arc::clone(peers), address })
    }
}

impl Drop for PeerPermit {
    fn drop(&mut self) {
        let mut permits = self.peers.permits();
        if let Some(count) = permits.get_mut(&self.address) {
            *count -= 1;
            if *count == 0 {
                permits.remove(&self.address);
            }
        }
    }
}

/// Serves the peers of a socket.
pub(super) async fn accept_all(listener: TcpListener, role: Role, peers: Arc<Peers>) {
    loop {
        let (stream, address) = match listener.accept().await {
            Ok((stream, address)) => (stream, network(address.ip())),
            Err(error) => {
                peers.notices.log("accept", || format!("KV events: connections cannot be accepted: {error}"));
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        match PeerPermit::take(&peers, address) {
            Err(limit) => peers.close(address, limit),
            Ok(permit) => {
                tokio::spawn(async move {
                    // Closed peers are counted before the connection is closed, so that a client that sees
                    // the close also sees the count.
                    if let Err(why) = serve(&stream, role, &permit.peers).await {
                        permit.peers.close(address, why);
                    }
                });
            }
        }
    }
}

/// Returns when the peer has disconnected.
async fn serve(stream: &TcpStream, role: Role, peers: &Peers) -> Result<(), Closed> {
    // Batches are small and urgent. A socket that refuses the option works without it.
    let _ = stream.set_nodelay(true);
    let mut session = Session::new(role, &peers.topic, &peers.kept);
    let mut news = peers.kept.news();
    let mut clock = Clock::new();
    loop {
        // Before looking for batches, so that none is missed in between.
        news.mark_unchanged();
        let worked = session.work();
        peers.counts.missed.fetch_add(session.take_missed(), Ordering::Relaxed);
        worked.map_err(Closed::Fault)?;
        let limit = clock.deadline(&session);
        let next = exchange(stream, &mut session, &mut news);
        let next = match limit {
            Some((deadline, why)) => timeout_at(deadline, next).await.map_err(|_| why)?,
            None => next.await,
        };
        match next {
            PeerEvent::Left => return Ok(()),
            PeerEvent::News => {}
            PeerEvent::Moved { read, written } => {
                clock.moved(read, written);
                // There is one thread, and a peer that reads everything at once could keep it for itself.
                tokio::task::yield_now().await;
            }
        }
    }
}

/// What happened next.
enum PeerEvent {
    /// The peer has disconnected.
    Left,
    /// There are batches to send.
    News,
    /// This many bytes were read and written.
    Moved { read: usize, written: usize },
}

/// Waits for the socket and for new batches, then reads and writes.
async fn exchange(
    stream: &TcpStream,
    session: &mut Session<'_>,
    news: &mut watch::Receiver<u64>,
) -> PeerEvent {
    let (can_read, can_write) = (!session.space().is_empty(), !session.output().is_empty());
    let interest = match (can_read, can_write) {
        (true, true) => Interest::READABLE | Interest::WRITABLE,
        (false, true) => Interest::WRITABLE,
        (_, false) => Interest::READABLE,
    };
    let waits_for_news = session.wants_batches() && !can_write;
    let ready = tokio::select! {
        ready = stream.ready(interest) => ready,
        // An error means that the server has ended.
        changed = news.changed(), if waits_for_news => {
            return if changed.is_ok() { PeerEvent::News } else { PeerEvent::Left };
        }
    };
    let Ok(ready) = ready else { return PeerEvent::Left };
    let (mut read, mut written) = (0, 0);
    if can_write && ready.is_writable() {
        match stream.try_write(session.output()) {
            Ok(num_bytes) => {
                session.written(num_bytes);
                written = num_bytes;
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(_) => return PeerEvent::Left,
        }
    }
    if can_read && ready.is_readable() {
        match stream.try_read(session.space()) {
            Ok(0) => return PeerEvent::Left,
            Ok(num_bytes) => {
                session.filled(num_bytes);
                read = num_bytes;
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(_) => return PeerEvent::Left,
        }
    }
    PeerEvent::Moved { read, written }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::access::AccessRecord;

    struct Silent;

    impl AccessLog for Silent {
        fn record(&self, _record: AccessRecord) {}
    }

    fn peers() -> Arc<Peers> {
        let config = KvEventsConfig {
            endpoint: String::new(),
            replay_endpoint: None,
            buffer_steps: 10,
            max_queue_size: 10,
            topic: "kv".to_owned(),
        };
        Arc::new(Peers::new(&config, 8, Arc::default(), Arc::new(Silent)))
    }

    #[test]
    fn no_address_has_all_permits() {
        let peers = peers();
        let take = |address: [u8; 4]| PeerPermit::take(&peers, address.into());
        let mut first: Vec<PeerPermit> = (0..4).map(|_| take([10, 0, 0, 1]).unwrap()).collect();
        assert_eq!(take([10, 0, 0, 1]).err(), Some(Closed::PeersOfAddress(4)));
        let others: Vec<PeerPermit> = (0..4).map(|index| take([10, 0, 1, index]).unwrap()).collect();
        assert_eq!(take([10, 0, 2, 1]).err(), Some(Closed::Peers(8)));
        first.pop();
        let another = take([10, 0, 2, 1]).unwrap();
        drop((first, others, another));
        assert!(peers.permits().is_empty());
    }
}
