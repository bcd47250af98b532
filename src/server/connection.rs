//! Connections: accepting them, and what happens on one that stalls.
//!
//! A client that does not send its head in time gets 408. One that does not take what is sent to it within
//! the write timeout is cut off, which gives up its requests.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::time::{Instant, Sleep};

use super::ServerConfig;
use super::access::new_id;
use super::body::whole_seconds;
use super::error::ApiError;

/// Bytes of a request's head, and of what is buffered for a connection.
const MAX_HEAD_BYTES: usize = 128 << 10;
/// Pause after the system refused a connection, for instance because there are no more file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Time for a client to notice that it has its answer, while what it still sends is thrown away.
const LINGER: Duration = Duration::from_millis(500);

/// Serves connections until it is dropped. Those that were accepted end by `close`.
pub(super) async fn accept_all(
    listener: TcpListener,
    router: Router,
    config: ServerConfig,
    close: watch::Receiver<bool>,
) {
    let slots = Arc::new(Semaphore::new(config.max_connections));
    loop {
        // Further clients wait in the system's queue.
        let Ok(slot) = Arc::clone(&slots).acquire_owned().await else { return };
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(ACCEPT_PAUSE).await;
            continue;
        };
        // Tokens are small, and each is wanted at once. A socket that refuses works all the same.
        let _ = stream.set_nodelay(true);
        let (router, config, close) = (router.clone(), config.clone(), close.clone());
        tokio::spawn(async move {
            serve(stream, router, &config, close).await;
            drop(slot);
        });
    }
}

async fn serve(stream: TcpStream, router: Router, config: &ServerConfig, mut close: watch::Receiver<bool>) {
    let stream = TimedStream::new(stream, config.write_timeout);
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(config.header_timeout).max_buf_size(MAX_HEAD_BYTES);
    let mut connection = builder.serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    let mut is_closing = false;
    let result = loop {
        tokio::select! {
            result = std::future::poll_fn(|cx| connection.poll_without_shutdown(cx)) => break result,
            // An error means that the server is gone, which is the same.
            _ = close.wait_for(|close| *close), if !is_closing => {
                is_closing = true;
                Pin::new(&mut connection).graceful_shutdown();
            }
        }
    };
    let mut stream = connection.into_parts().io.into_inner();
    if result.is_err_and(|error| error.is_timeout()) && stream.has_unanswered_bytes {
        let timeout = whole_seconds(config.header_timeout);
        // Whoever was too slow to ask may not listen either.
        let _ =
            stream.write_all(&raw_response(&ApiError::too_slow("the head of the request", timeout))).await;
    }
    // A socket that is closed with unread bytes resets the connection, and the answer can get lost.
    if stream.shutdown().await.is_ok() {
        let _ = tokio::time::timeout(LINGER, discard(&mut stream)).await;
    }
}

async fn discard(stream: &mut TimedStream) {
    let mut bytes = vec![0; 16 << 10];
    while stream.read(&mut bytes).await.is_ok_and(|num_bytes| num_bytes > 0) {}
}

/// An answer where there is no request to answer.
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

/// A stream whose writes fail if the other side takes nothing for too long.
struct TimedStream {
    stream: TcpStream,
    timeout: Duration,
    /// Runs while a write waits.
    stall: Pin<Box<Sleep>>,
    is_stalled: bool,
    /// Whether something came in since something last went out.
    has_unanswered_bytes: bool,
}

impl TimedStream {
    fn new(stream: TcpStream, timeout: Duration) -> Self {
        let stall = Box::pin(tokio::time::sleep(timeout));
        Self { stream, timeout, stall, is_stalled: false, has_unanswered_bytes: false }
    }

    /// Passes the result of a write on, or fails it if writes have waited for too long.
    fn watch<T>(&mut self, polled: Poll<io::Result<T>>, cx: &mut Context<'_>) -> Poll<io::Result<T>> {
        if polled.is_ready() {
            self.is_stalled = false;
            self.has_unanswered_bytes = false;
            return polled;
        }
        if !std::mem::replace(&mut self.is_stalled, true) {
            self.stall.as_mut().reset(Instant::now() + self.timeout);
        }
        ready!(self.stall.as_mut().poll(cx));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl AsyncRead for TimedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let num_before = buffer.filled().len();
        let polled = Pin::new(&mut self.stream).poll_read(cx, buffer);
        self.has_unanswered_bytes |= buffer.filled().len() > num_before;
        polled
    }
}

impl AsyncWrite for TimedStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.watch(polled, cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
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
