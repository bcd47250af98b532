//! The sockets: one publishes, one replays. They have their own thread, so that their peers take no time from
//! requests.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use tokio::net::{TcpListener, TcpSocket, lookup_host};
use tokio::sync::{mpsc, oneshot};

use super::peers::{Counts, Peers, accept_all};
use super::session::Role;
use super::{Batch, KvEventsConfig, Source, cannot_bind, payload};
use crate::access::AccessLog;
use tinyvllm::{Error, Result};

/// The system's send buffer for a peer. The default would be megabytes.
const SEND_BUFFER: u32 = 128 << 10;
/// The system's receive buffer.
const RECEIVE_BUFFER: u32 = 16 << 10;
/// Connections that wait to be accepted.
const BACKLOG: u32 = 128;

/// Binds the ports and sends batches until the queue is closed.
pub(super) async fn start(
    config: &KvEventsConfig,
    max_peers: usize,
    batches: mpsc::Receiver<Batch>,
    counts: Arc<Counts>,
    log: Arc<dyn AccessLog>,
) -> Result<Source> {
    let failed = |source| Error::io("start the thread of the KV events", source);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
    let config = config.clone();
    let (sender, source) = oneshot::channel();
    let run = move || {
        runtime.block_on(async {
            let peers = Arc::new(Peers::new(&config, max_peers, counts, log));
            let bound = bind(&config, &peers).await;
            let is_bound = bound.is_ok();
            // The starting thread waits for this.
            let _ = sender.send(bound);
            if is_bound {
                publish(&peers, batches).await;
            }
        });
    };
    std::thread::Builder::new().name("tinyvllm-events".to_owned()).spawn(run).map_err(failed)?;
    source.await.map_err(|_| Error::internal("the thread of the KV events ended"))?
}

async fn bind(config: &KvEventsConfig, peers: &Arc<Peers>) -> Result<Source> {
    let (listener, endpoint) = listen("endpoint", &config.endpoint).await?;
    let mut source = Source { endpoint, replay_endpoint: None, topic: config.topic.clone() };
    if let Some(address) = &config.replay_endpoint {
        let (repeater, endpoint) = listen("replay_endpoint", address).await?;
        source.replay_endpoint = Some(endpoint);
        tokio::spawn(accept_all(repeater, Role::Repeater, Arc::clone(peers)));
    }
    tokio::spawn(accept_all(listener, Role::Publisher, Arc::clone(peers)));
    Ok(source)
}

/// A listening socket, and its address with the actual port.
async fn listen(name: &str, endpoint: &str) -> Result<(TcpListener, String)> {
    let address = endpoint.trim_start_matches("tcp://");
    let (host, _) = address.rsplit_once(':').unwrap_or((address, ""));
    let bound = async {
        let mut last = io::Error::other("it has no address");
        for address in lookup_host(address).await? {
            match listen_at(address) {
                Ok(listener) => return listener.local_addr().map(|bound| (listener, bound.port())),
                Err(error) => last = error,
            }
        }
        Err(last)
    };
    let (listener, port) = bound.await.map_err(|error| cannot_bind(name, endpoint, error))?;
    Ok((listener, format!("tcp://{host}:{port}")))
}

fn listen_at(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = match address {
        SocketAddr::V4(_) => TcpSocket::new_v4(),
        SocketAddr::V6(_) => TcpSocket::new_v6(),
    }?;
    // On other systems, this option would let other programs use the same port.
    #[cfg(unix)]
    socket.set_reuseaddr(true)?;
    // Connections inherit them. If the system refuses, its buffers are larger.
    let _ = socket.set_send_buffer_size(SEND_BUFFER);
    let _ = socket.set_recv_buffer_size(RECEIVE_BUFFER);
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

async fn publish(peers: &Peers, mut batches: mpsc::Receiver<Batch>) {
    while let Some(Batch { number, change }) = batches.recv().await {
        let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        match payload::encode(time.as_secs_f64(), change) {
            Ok(payload) => peers.publish(number, Bytes::from(payload)),
            // Subscribers notice the missing number.
            Err(error) => {
                let message = || format!("KV events: batch {number} is not sent: {}", error.message());
                peers.notices.log("batch", message);
            }
        }
    }
}
