//! The sockets: one that publishes, and one that repeats.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use tokio::sync::mpsc;
use zeromq::{PubSocket, RouterSocket, Socket, SocketRecv, SocketSend, ZmqMessage};

use super::replay::Buffer;
use super::{Batch, KvEventsConfig, Source, cannot_bind, payload};
use crate::Result;

/// The number that ends a replay: -1.
const END: [u8; 8] = [0xff; 8];
/// Time after which the socket is asked again whether there is a request.
const LOOK_AGAIN: Duration = Duration::from_millis(500);
/// Time for whoever asked for batches to take one.
const REPLAY_PATIENCE: Duration = Duration::from_secs(5);

/// Sends what comes out of the queue.
pub(super) struct Publisher {
    socket: PubSocket,
    topic: Bytes,
    buffer: Arc<Buffer>,
}

impl Publisher {
    /// Takes the ports and sends batches on tasks of this runtime until the queue is closed.
    pub(super) async fn start(config: &KvEventsConfig, batches: mpsc::Receiver<Batch>) -> Result<Source> {
        let topic = Bytes::from(config.topic.clone());
        let buffer = Arc::new(Buffer::new(config.buffer_steps));
        let mut socket = PubSocket::new();
        let endpoint = socket.bind(&config.endpoint).await;
        let endpoint = endpoint.map_err(|error| cannot_bind("endpoint", &config.endpoint, error))?;
        let mut source =
            Source { endpoint: endpoint.to_string(), replay_endpoint: None, topic: config.topic.clone() };
        if let Some(place) = &config.replay_endpoint {
            let mut router = RouterSocket::new();
            let endpoint = router.bind(place).await;
            let endpoint = endpoint.map_err(|error| cannot_bind("replay_endpoint", place, error))?;
            source.replay_endpoint = Some(endpoint.to_string());
            tokio::spawn(repeat(router, topic.clone(), Arc::clone(&buffer)));
        }
        tokio::spawn(Self { socket, topic, buffer }.run(batches));
        Ok(source)
    }

    async fn run(mut self, mut batches: mpsc::Receiver<Batch>) {
        while let Some(Batch { number, change }) = batches.recv().await {
            let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            // What cannot be written is missed by its number, as what cannot be sent.
            let Ok(payload) = payload::encode(time.as_secs_f64(), change) else { continue };
            let payload = Bytes::from(payload);
            self.buffer.push(number, payload.clone());
            let mut message = ZmqMessage::from(self.topic.clone());
            message.push_back(Bytes::copy_from_slice(&number.to_be_bytes()));
            message.push_back(payload);
            // Without subscribers, and for those that are slow, batches are dropped.
            let _ = self.socket.send(message).await;
        }
    }
}

/// Answers `[id, "", first number]` with the batches that are kept from there on, and with an end.
async fn repeat(mut router: RouterSocket, topic: Bytes, buffer: Arc<Buffer>) {
    loop {
        // Once a request was not answered, for a reason that was not found. Should the library have missed its turn, it
        // looks again now and then.
        let request = match tokio::time::timeout(LOOK_AGAIN, router.recv()).await {
            Ok(Ok(request)) => request,
            // Nobody is there. The library waits then, but does not promise to.
            Ok(Err(_)) => {
                tokio::time::sleep(LOOK_AGAIN).await;
                continue;
            }
            Err(_) => continue,
        };
        let Some((id, mut number)) = read_request(&request) else { continue };
        let answer = |topic: Bytes, number: [u8; 8], payload: Bytes| {
            let mut message = ZmqMessage::from(id.clone());
            for part in [Bytes::new(), topic, Bytes::copy_from_slice(&number), payload] {
                message.push_back(part);
            }
            message
        };
        let mut is_taken = true;
        // One by one, so that what is kept is not copied for somebody who takes nothing.
        while let Some((found, payload)) = buffer.first_from(number).filter(|_| is_taken) {
            let message = answer(topic.clone(), found.to_be_bytes(), payload);
            is_taken = send(&mut router, message).await;
            number = found + 1;
        }
        if is_taken {
            send(&mut router, answer(Bytes::new(), END, Bytes::new())).await;
        }
    }
}

/// Whether the message was taken in time.
async fn send(router: &mut RouterSocket, message: ZmqMessage) -> bool {
    tokio::time::timeout(REPLAY_PATIENCE, router.send(message)).await.is_ok_and(|result| result.is_ok())
}

/// Who asks, and for which number on.
fn read_request(request: &ZmqMessage) -> Option<(Bytes, u64)> {
    let parts: Vec<&Bytes> = request.iter().collect();
    let [id, empty, start] = parts[..] else { return None };
    let start = <[u8; 8]>::try_from(&start[..]).ok().filter(|_| empty.is_empty())?;
    Some((id.clone(), u64::from_be_bytes(start)))
}
