//! Connections: accepts them, and closes those that stall.
//!
//! Their number is limited, in all and for each address. A few more are reserved for monitoring: they answer
//! only `/health` and `/metrics`, with short timeouts. So monitoring works even when all others are taken.
//!
//! If a request is not valid HTTP, hyper answers with a status alone. `TimedStream` holds that answer back,
//! and a body that describes the error is sent instead. A client that does not send its head in time gets
//! 408; one that begins with HTTP/2 gets 505. A connection whose client reads nothing for the write timeout
//! is closed, which aborts its requests. A client that closes its half after a request still gets its answer
//! (`half_closed.rs`).

use std::collections::HashMap;
use std::future::Future;
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::Body;
use axum::http::Request;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Router};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::{Instant, Sleep};

use super::ServerConfig;
use super::access::new_id;
use super::body::whole_seconds;
use super::clients::network;
use super::error::ApiError;
use super::half_closed::{Answering, HalfClosed, MAX_SILENCE};
use super::notices::Notices;
use super::state::App;

/// Limit on a request's head, and on the buffer of a connection.
const MAX_HEAD_BYTES: usize = 128 << 10;
/// Pause after the system refused a connection, for instance because there are no more file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// A header of every answer of ours.
const ID_HEADER: &[u8] = b"x-request-id:";
/// Time for a client to notice its answer, while what it still sends is discarded.
const LINGER: Duration = Duration::from_millis(500);
/// Time for the first request of a new connection when the server stops.
const GREETING_TIME: Duration = Duration::from_millis(250);

/// Connections beyond the limit, for monitoring, unless the system allows fewer. One address may have a third of
/// them, and two at least: one that is closing counts.
pub(super) const RESERVE: usize = 64;
/// Time for a request on a reserved connection to arrive.
const RESERVE_TIMEOUT: Duration = Duration::from_secs(1);
/// The paths that reserved connections answer.
const RESERVED_PATHS: [&str; 2] = ["/health", "/metrics"];

/// The origin of a connection.
#[derive(Debug, Clone, Copy)]
pub(super) struct Peer {
    pub(super) address: IpAddr,
    is_reserve: bool,
}

/// Whether a connection was closed because its client read nothing.
#[derive(Debug, Clone, Default)]
pub(super) struct Stalled(Arc<AtomicBool>);

impl Stalled {
    pub(super) fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

impl Default for Peer {
    fn default() -> Self {
        Self { address: Ipv4Addr::UNSPECIFIED.into(), is_reserve: false }
    }
}

/// Refuses other paths on a reserved connection.
pub(super) async fn keep_reserve(request: Request<Body>, next: Next) -> Response {
    let is_reserve = request.extensions().get::<Peer>().is_some_and(|peer| peer.is_reserve);
    if is_reserve && !RESERVED_PATHS.contains(&request.uri().path()) {
        return ApiError::no_connection().into_response();
    }
    next.run(request).await
}

/// The number of connections from each address: ordinary ones and reserved ones.
type Counts = Arc<Mutex<HashMap<IpAddr, [usize; 2]>>>;

/// A connection's permit, released on drop.
struct ConnectionPermit {
    peer: Peer,
    counts: Counts,
    _permit: OwnedSemaphorePermit,
}

impl ConnectionPermit {
    /// Returns `None` if this address has too many.
    fn take(peer: Peer, limit: usize, counts: &Counts, permit: OwnedSemaphorePermit) -> Option<Self> {
        let mut all = counts.lock().unwrap_or_else(PoisonError::into_inner);
        let count = &mut all.entry(peer.address).or_default()[usize::from(peer.is_reserve)];
        if *count >= limit {
            return None;
        }
        *count += 1;
        Some(Self { peer, counts: Arc::clone(counts), _permit: permit })
    }
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        let mut all = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = all.get_mut(&self.peer.address) {
            count[usize::from(self.peer.is_reserve)] -= 1;
            if *count == [0, 0] {
                all.remove(&self.peer.address);
            }
        }
    }
}

/// Accepts connections until `close`, which also ends the accepted ones.
pub(super) async fn accept_all(
    listener: TcpListener,
    router: Router,
    app: Arc<App>,
    notices: Notices,
    mut close: watch::Receiver<bool>,
) {
    let budget = app.descriptors.budget;
    let (slots, reserve) =
        (Arc::new(Semaphore::new(budget.connections)), Arc::new(Semaphore::new(budget.reserve)));
    let most_of_reserve = (budget.reserve / 3).max(2);
    let counts = Counts::default();
    loop {
        let next = async {
            // Beyond the reserve, clients wait in the system's queue.
            let (slot, spare) = tokio::select! {
                biased;
                slot = Arc::clone(&slots).acquire_owned() => (slot.ok(), None),
                spare = Arc::clone(&reserve).acquire_owned() => (None, spare.ok()),
            };
            (slot, spare, listener.accept().await)
        };
        // A client that connected before the server stopped still gets an error.
        let (slot, spare, accepted) = tokio::select! {
            biased;
            next = next => next,
            () = closed(&mut close) => return,
        };
        let (stream, address) = match accepted {
            Ok(accepted) => accepted,
            // Only this connection is affected.
            Err(error) if is_of_one_connection(&error) => continue,
            Err(error) => {
                notices.log("accept", || format!("connections cannot be accepted: {error}"));
                tokio::select! {
                    () = tokio::time::sleep(ACCEPT_PAUSE) => continue,
                    () = closed(&mut close) => return,
                }
            }
        };
        let address = network(address.ip());
        // A permit may be free by now.
        let slot = slot.or_else(|| Arc::clone(&slots).try_acquire_owned().ok());
        let ordinary = slot.and_then(|slot| {
            let peer = Peer { address, is_reserve: false };
            ConnectionPermit::take(peer, budget.per_address, &counts, slot)
        });
        let permit = ordinary.or_else(|| {
            let spare = spare.or_else(|| Arc::clone(&reserve).try_acquire_owned().ok())?;
            ConnectionPermit::take(Peer { address, is_reserve: true }, most_of_reserve, &counts, spare)
        });
        // An address that has all of them, and the reserve, gets no answer.
        let Some(permit) = permit else { continue };
        // Tokens are small and urgent. A socket that refuses the option works without it.
        let _ = stream.set_nodelay(true);
        let stalled = Stalled::default();
        let answering = Answering::default();
        let router = router.clone().layer(Extension(permit.peer));
        let router = router.layer(Extension(stalled.clone())).layer(Extension(answering.clone()));
        let (app, close) = (Arc::clone(&app), close.clone());
        tokio::spawn(async move {
            let stream = TimedStream::new(stream, app.config.write_timeout, stalled, answering);
            serve(stream, router, &app.config, permit.peer.is_reserve, close).await;
            drop(permit);
        });
    }
}

/// Whether an error concerns one connection that closed before it was accepted, and not the system.
fn is_of_one_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset, Interrupted};
    [ConnectionAborted, ConnectionRefused, ConnectionReset, Interrupted].contains(&error.kind())
}

/// Returns when the server stops, after everything that came before was noticed.
async fn closed(close: &mut watch::Receiver<bool>) {
    // An error means that the sender is gone, so the server has stopped.
    let _ = close.wait_for(|close| *close).await;
    tokio::task::yield_now().await;
}

async fn serve(
    stream: TimedStream,
    router: Router,
    config: &ServerConfig,
    is_reserve: bool,
    mut close: watch::Receiver<bool>,
) {
    let header_timeout = match is_reserve {
        true => config.header_timeout.min(RESERVE_TIMEOUT),
        false => config.header_timeout,
    };
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(header_timeout).max_buf_size(MAX_HEAD_BYTES);
    builder.keep_alive(!is_reserve);
    let mut connection = builder.serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    let accepted = Instant::now();
    let end = async {
        closed(&mut close).await;
        // Without a first byte, hyper would close without an answer, although a new client is about to send.
        tokio::time::sleep_until(accepted + GREETING_TIME).await;
    };
    tokio::pin!(end);
    let mut is_closing = false;
    let result = loop {
        tokio::select! {
            biased;
            result = std::future::poll_fn(|cx| connection.poll_without_shutdown(cx)) => break result,
            () = &mut end, if !is_closing => {
                is_closing = true;
                Pin::new(&mut connection).graceful_shutdown();
            }
        }
    };
    let mut stream = connection.into_parts().io.into_inner();
    if let Some(status) = stream.held_status.take() {
        let _ = stream.write_all(&raw_response(&ApiError::broken_head(status))).await;
    }
    let unanswered = match result {
        Err(error) if error.is_parse_version_h2() => Some(ApiError::not_http1()),
        Err(error) if error.is_timeout() && stream.has_unanswered_bytes => {
            Some(ApiError::too_slow("the head of the request", whole_seconds(header_timeout)))
        }
        _ if stream.is_given_up() => Some(ApiError::half_closed(MAX_SILENCE)),
        _ => None,
    };
    if let Some(error) = unanswered {
        // A client that was too slow to send may also be too slow to read.
        let _ = stream.write_all(&raw_response(&error)).await;
    }
    // Closing a socket with unread bytes resets the connection, and the answer could be lost.
    if stream.shutdown().await.is_ok() {
        let _ = tokio::time::timeout(LINGER, discard(&mut stream)).await;
    }
}

async fn discard(stream: &mut TimedStream) {
    let mut bytes = vec![0; 16 << 10];
    while stream.read(&mut bytes).await.is_ok_and(|num_bytes| num_bytes > 0) {}
}

/// An answer where hyper has no request.
fn raw_response(error: &ApiError) -> Vec<u8> {
    let body = error.body().to_string();
    let status = error.status();
    format!(
        "HTTP/1.1 {} {}\r\ncontent-type: application/json\r\ncontent-length: {}\r\nx-request-id: {}\r\n\
         connection: close\r\n\r\n{body}",
        status.as_u16(),
        status.canonical_reason().unwrap_or_default(),
        body.len(),
        new_id(),
    )
    .into_bytes()
}

/// A stream whose writes fail if the other side reads nothing for too long.
struct TimedStream {
    stream: TcpStream,
    timeout: Duration,
    stalled: Stalled,
    /// Runs while a write is pending.
    stall: Pin<Box<Sleep>>,
    is_stalled: bool,
    /// The status of an answer that hyper wrote itself.
    held_status: Option<u16>,
    /// Whether bytes came in after the latest ones that were sent.
    has_unanswered_bytes: bool,
    answering: Answering,
    /// Set after the client has closed its half.
    half_closed: Option<HalfClosed>,
}

impl TimedStream {
    fn new(stream: TcpStream, timeout: Duration, stalled: Stalled, answering: Answering) -> Self {
        let stall = Box::pin(tokio::time::sleep(timeout));
        Self {
            stream,
            timeout,
            stalled,
            stall,
            is_stalled: false,
            held_status: None,
            has_unanswered_bytes: false,
            answering,
            half_closed: None,
        }
    }

    /// Whether the client has closed its half, got no answer, and could not be asked.
    fn is_given_up(&self) -> bool {
        self.half_closed.is_some() && self.has_unanswered_bytes && self.answering.is_older()
    }

    /// Holds bytes back if hyper wrote this answer itself: all of ours have an id.
    fn hold_back(&mut self, bytes: &[u8]) -> bool {
        const BEGIN: &[u8] = b"HTTP/1.1 4";
        let has_id = || bytes.windows(ID_HEADER.len()).any(|window| window.eq_ignore_ascii_case(ID_HEADER));
        if !bytes.starts_with(BEGIN) || !bytes.ends_with(b"\r\n\r\n") || has_id() {
            return false;
        }
        let digits = bytes.get(9..12).and_then(|digits| std::str::from_utf8(digits).ok());
        self.held_status = digits.and_then(|digits| digits.parse().ok());
        self.has_unanswered_bytes = false;
        self.held_status.is_some()
    }

    /// Passes on the result of a write, or fails it if writes were pending for too long.
    fn watch<T>(&mut self, polled: Poll<io::Result<T>>, cx: &mut Context<'_>) -> Poll<io::Result<T>> {
        if polled.is_ready() {
            self.is_stalled = false;
            self.has_unanswered_bytes = false;
            self.half_closed.iter_mut().for_each(HalfClosed::note_sent);
            return polled;
        }
        if !std::mem::replace(&mut self.is_stalled, true) {
            self.stall.as_mut().reset(Instant::now() + self.timeout);
        }
        ready!(self.stall.as_mut().poll(cx));
        self.stalled.0.store(true, Ordering::Relaxed);
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl AsyncRead for TimedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if this.half_closed.is_none() {
            let num_before = buffer.filled().len();
            ready!(Pin::new(&mut this.stream).poll_read(cx, buffer))?;
            let has_more = buffer.filled().len() > num_before;
            this.has_unanswered_bytes |= has_more;
            if has_more || buffer.remaining() == 0 {
                return Poll::Ready(Ok(()));
            }
        }
        if !this.has_unanswered_bytes && !this.answering.is_on() {
            return Poll::Ready(Ok(()));
        }
        let may_ask = this.has_unanswered_bytes && !this.is_stalled;
        let half_closed = this.half_closed.get_or_insert_with(HalfClosed::new);
        half_closed.poll_over(&this.stream, &this.answering, may_ask, cx).map(Ok)
    }
}

impl AsyncWrite for TimedStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if self.hold_back(bytes) {
            return Poll::Ready(Ok(bytes.len()));
        }
        let polled = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.watch(polled, cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if let [only] = parts
            && self.hold_back(only)
        {
            return Poll::Ready(Ok(only.len()));
        }
        let polled = Pin::new(&mut self.stream).poll_write_vectored(cx, parts);
        self.watch(polled, cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
