//! The sockets: one that publishes, and one that repeats, on a thread of their own.
//!
//! The library blocks a thread where it waits for the lock of a peer that comes or goes. Should whoever has the lock be
//! a task that is next on that very thread, both wait for ever: with two threads that happened once in some ten thousand
//! connections. On one thread nobody waits for a lock if none is kept while something else runs, which only `send` of a
//! full queue would do.

use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use tokio::sync::{mpsc, oneshot};
use zeromq::{PubSocket, RouterSocket, Socket, SocketRecv, SocketSend, ZmqMessage};

use super::replay::Buffer;
use super::{Batch, KvEventsConfig, Source, cannot_bind, payload};
use crate::{Error, Result};

/// The number that ends a replay: -1.
const END: [u8; 8] = [0xff; 8];
/// Time after which a socket that failed is asked again.
const LOOK_AGAIN: Duration = Duration::from_millis(500);

/// Sends what comes out of the queue.
pub(super) struct Publisher {
    socket: PubSocket,
    topic: Bytes,
    buffer: Arc<Buffer>,
}

impl Publisher {
    /// Takes the ports and sends batches until the queue is closed.
    pub(super) async fn start(config: &KvEventsConfig, batches: mpsc::Receiver<Batch>) -> Result<Source> {
        let failed = |source| Error::io("start the thread of the KV events", source);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let config = config.clone();
        let (told, source) = oneshot::channel();
        let run = move || {
            runtime.block_on(async {
                let (publisher, source) = match Self::bind(&config).await {
                    Ok((publisher, source)) => (Some(publisher), Ok(source)),
                    Err(error) => (None, Err(error)),
                };
                // Whoever started it waits for this.
                let _ = told.send(source);
                if let Some(publisher) = publisher {
                    publisher.run(batches).await;
                }
            });
        };
        std::thread::Builder::new().name("tinyvllm-events".to_owned()).spawn(run).map_err(failed)?;
        source.await.map_err(|_| Error::internal("the thread of the KV events ended"))?
    }

    async fn bind(config: &KvEventsConfig) -> Result<(Self, Source)> {
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
        Ok((Self { socket, topic, buffer }, source))
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
        let Ok(request) = router.recv().await else {
            // Nobody is there. The library waits then, but does not promise to.
            tokio::time::sleep(LOOK_AGAIN).await;
            continue;
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

/// Whether there was a place for the message. Nobody waits for one: the library would keep the peer's lock meanwhile.
/// There is room for all that is kept, so it is missing to those only that have not read what they asked for before.
async fn send(router: &mut RouterSocket, message: ZmqMessage) -> bool {
    let is_taken = send_now(router, message) == Poll::Ready(true);
    // So that it is written, and nobody else waits for the end of a long replay.
    tokio::task::yield_now().await;
    is_taken
}

fn send_now(router: &mut RouterSocket, message: ZmqMessage) -> Poll<bool> {
    let mut context = Context::from_waker(Waker::noop());
    router.send(message).as_mut().poll(&mut context).map(|result| result.is_ok())
}

/// Who asks, and for which number on.
fn read_request(request: &ZmqMessage) -> Option<(Bytes, u64)> {
    let parts: Vec<&Bytes> = request.iter().collect();
    let [id, empty, start] = parts[..] else { return None };
    let start = <[u8; 8]>::try_from(&start[..]).ok().filter(|_| empty.is_empty())?;
    Some((id.clone(), u64::from_be_bytes(start)))
}

#[cfg(test)]
mod tests {
    use tokio::time::timeout;
    use zeromq::DealerSocket;

    use super::*;

    /// Connects and asks for something; whoever asked, as the router calls it.
    async fn ask(router: &mut RouterSocket, endpoint: &str) -> (DealerSocket, Bytes) {
        let mut dealer = DealerSocket::new();
        dealer.connect(endpoint).await.unwrap();
        dealer.send(ZmqMessage::from("x")).await.unwrap();
        let id = router.recv().await.unwrap().get(0).unwrap().clone();
        (dealer, id)
    }

    fn answer(id: &Bytes, payload: Vec<u8>) -> ZmqMessage {
        let mut message = ZmqMessage::from(id.clone());
        message.push_back(payload.into());
        message
    }

    /// The library waits for ever, and with it its thread, if a peer leaves while something waits for a place in its
    /// queue. It has another way to a peer that is alone, so there are two.
    #[test]
    fn nobody_waits_for_somebody_who_does_not_read() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let second = Duration::from_secs(1);
        runtime.block_on(async {
            let mut router = RouterSocket::new();
            let endpoint = router.bind("tcp://127.0.0.1:0").await.unwrap().to_string();
            let (other, _) = ask(&mut router, &endpoint).await;
            let (dealer, id) = ask(&mut router, &endpoint).await;
            let mut num_taken = 0;
            while timeout(second, send(&mut router, answer(&id, vec![0; 1024]))).await.unwrap() {
                num_taken += 1;
            }
            assert!(num_taken >= 100_000, "{num_taken}");
            drop((other, dealer));
            let (mut late, id) = timeout(60 * second, ask(&mut router, &endpoint)).await.unwrap();
            assert!(send(&mut router, answer(&id, vec![7])).await);
            assert_eq!(late.recv().await.unwrap().get(0).unwrap()[..], [7]);
        });
    }
}
