//! Around every request: an id, a line in the log, and an answer even if a handler panics.
//!
//! The log has no prompts, no answers and no keys.

use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::State;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Request};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use hyper::body::{Frame, SizeHint};
use serde::Serialize;

use super::account::{Charge, RequestMemory};
use super::connection::Stalled;
use super::error::{ApiError, for_anthropic, for_ollama};
use super::half_closed::Answering;
use super::ignored;
use super::state::{Active, App};
use tinyvllm::shortened;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const MAX_ID_BYTES: usize = 128;
/// The status in the log of a request whose client disconnected before the answer began; nginx uses the same
/// number.
const CLIENT_LEFT: u16 = 499;
/// The reason in the log if the client disconnects before the end of its answer.
pub(super) const CLIENT_LEFT_EARLY: &str = "the client disconnected before the end";
/// Most characters of a reason in the log.
const MAX_REASON_CHARS: usize = 300;

/// A finished request, for the log.
#[derive(Debug, Clone, Serialize)]
pub struct AccessRecord {
    /// Start of the request, in seconds since 1970.
    pub time: f64,
    /// The id in the answer's header.
    pub request_id: String,
    /// The HTTP method; of a long one the beginning and the length.
    pub method: String,
    /// The path without its query, percent-encoded as the client sent it; of a long one the beginning and the
    /// length.
    pub path: String,
    /// The status; 499 if the client disconnected before there was one.
    pub status: u16,
    /// Time from the end of the head to the end of the answer.
    pub duration_ms: f64,
    /// Why the answer is incomplete, if it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cut: Option<String>,
    /// The token counts, if anything was generated.
    #[serde(flatten)]
    pub tokens: Option<TokenCounts>,
}

/// Token counts of a request.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct TokenCounts {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens of the prompt that were in the prefix cache.
    pub cached_tokens: usize,
    /// Generated tokens.
    pub completion_tokens: usize,
}

/// Receives a record of each request. It is called on the threads that send answers, so it must not block.
pub trait AccessLog: Send + Sync {
    /// Called at the end of a request.
    fn record(&self, record: AccessRecord);

    /// A notice for the operator.
    fn notice(&self, _message: &str) {}
}

/// What handlers add to the log line of their request.
#[derive(Debug, Clone, Default)]
pub(super) struct Note {
    tokens: Arc<Mutex<Option<TokenCounts>>>,
    ignored: Arc<Mutex<Vec<String>>>,
    dropped: Arc<Mutex<Vec<String>>>,
    cut: Arc<Mutex<Option<String>>>,
    /// The request's charge in the memory account, held until the answer ends.
    charge: Arc<Mutex<Option<Charge>>>,
    request_id: Arc<str>,
}

impl Note {
    /// The id in the answer's header.
    pub(super) fn request_id(&self) -> Arc<str> {
        Arc::clone(&self.request_id)
    }

    /// Sets the fields of the body that were not read, for the answer's header.
    pub(super) fn set_ignored(&self, names: Vec<String>) {
        *self.ignored.lock().unwrap_or_else(PoisonError::into_inner) = names;
    }

    /// Sets the bytes of the prompt that have no token, for the answer's header.
    pub(super) fn set_dropped(&self, names: Vec<String>) {
        *self.dropped.lock().unwrap_or_else(PoisonError::into_inner) = names;
    }

    /// Records why the answer is cut. Only the first reason counts.
    pub(super) fn cut(&self, reason: &str) {
        let mut cut = self.cut.lock().unwrap_or_else(PoisonError::into_inner);
        cut.get_or_insert_with(|| reason.chars().take(MAX_REASON_CHARS).collect());
    }

    /// Holds a charge until the request ends.
    pub(super) fn hold(&self, charge: Charge) {
        let mut held = self.charge.lock().unwrap_or_else(PoisonError::into_inner);
        match &mut *held {
            Some(held) => held.absorb(charge),
            None => *held = Some(charge),
        }
    }

    /// Charges the request for more memory.
    ///
    /// # Errors
    /// 429 if there is too little now, 413 if the request can never have that much.
    pub(super) fn charge(&self, account: &Arc<RequestMemory>, num_bytes: usize) -> Result<(), ApiError> {
        let mut held = self.charge.lock().unwrap_or_else(PoisonError::into_inner);
        held.get_or_insert_with(|| Charge::new(account)).add(num_bytes)
    }

    pub(super) fn set(&self, tokens: TokenCounts) {
        *self.tokens.lock().unwrap_or_else(PoisonError::into_inner) = Some(tokens);
    }
}

/// Writes the log line when the answer is complete or aborted.
struct Line {
    app: Arc<App>,
    start: Instant,
    record: AccessRecord,
    note: Note,
    /// Whether the connection was closed because its client read nothing.
    stalled: Option<Stalled>,
    answering: Option<Answering>,
    _active: Active,
}

impl Drop for Line {
    fn drop(&mut self) {
        self.answering.iter().for_each(Answering::end);
        let mut record = self.record.clone();
        record.duration_ms = self.start.elapsed().as_micros() as f64 / 1e3;
        record.cut = self.note.cut.lock().unwrap_or_else(PoisonError::into_inner).take().map(|reason| {
            let is_stalled = self.stalled.as_ref().is_some_and(Stalled::is_set);
            match reason == CLIENT_LEFT_EARLY && is_stalled {
                true => "the client read nothing for too long (--write-timeout)".to_owned(),
                false => reason.replace(['\r', '\n'], " "),
            }
        });
        self.app.http.count(&record.path, record.status);
        for text in [&mut record.method, &mut record.path] {
            *text = shortened(text).into_owned();
        }
        record.tokens = *self.note.tokens.lock().unwrap_or_else(PoisonError::into_inner);
        self.app.log.record(record);
    }
}

/// The outermost layer.
pub(super) async fn observe(State(app): State<Arc<App>>, mut request: Request<Body>, next: Next) -> Response {
    let id = clean_id(request.headers()).unwrap_or_else(new_id);
    let note = Note { request_id: id.as_str().into(), ..Note::default() };
    request.extensions_mut().insert(note.clone());
    let mut line = Line {
        start: Instant::now(),
        record: AccessRecord {
            time: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64()),
            request_id: id.clone(),
            method: request.method().to_string(),
            path: request.uri().path().to_owned(),
            status: CLIENT_LEFT,
            duration_ms: 0.0,
            cut: None,
            tokens: None,
        },
        note,
        stalled: request.extensions().get::<Stalled>().cloned(),
        answering: request.extensions().get::<Answering>().cloned(),
        _active: app.enter(),
        app,
    };
    if let (Some(answering), true) = (&line.answering, request.body().is_end_stream()) {
        answering.begin(request.version());
    }
    let mut answer = std::pin::pin!(next.run(request));
    let mut response = std::future::poll_fn(|cx| {
        // After a panic the future is not polled again, so its partial state is not read.
        let polled = std::panic::catch_unwind(AssertUnwindSafe(|| answer.as_mut().poll(cx)));
        polled.unwrap_or_else(|_| {
            Poll::Ready(ApiError::internal("the server failed while answering").into_response())
        })
    })
    .await;
    line.record.status = response.status().as_u16();
    if is_anthropic(&line.record.path) {
        response = for_anthropic(response, &id);
    } else if line.record.path.starts_with("/api/") {
        response = for_ollama(response);
    }
    let headers = [(ignored::HEADER, &line.note.ignored), (ignored::DROPPED_HEADER, &line.note.dropped)];
    for (name, names) in headers {
        let names = std::mem::take(&mut *names.lock().unwrap_or_else(PoisonError::into_inner));
        if let Some(value) = ignored::header(&names) {
            response.headers_mut().insert(name, value);
        }
    }
    if let Ok(value) = HeaderValue::from_str(&id) {
        response.headers_mut().insert(REQUEST_ID, value);
    }
    response.map(|body| Body::new(LoggedBody { body, _line: line }))
}

/// A body whose end is also the end of the request.
struct LoggedBody {
    body: Body,
    _line: Line,
}

impl HttpBody for LoggedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Whether a path belongs to Anthropic's interface. Only the shape of errors depends on it.
fn is_anthropic(path: &str) -> bool {
    path.strip_prefix("/v1/messages").is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// The client's own id, if it is safe in headers and logs.
fn clean_id(headers: &HeaderMap) -> Option<String> {
    let id = headers.get(REQUEST_ID)?.to_str().ok()?;
    let is_clean = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.:".contains(&byte);
    (!id.is_empty() && id.len() <= MAX_ID_BYTES && id.bytes().all(is_clean)).then(|| id.to_owned())
}

/// An id that is unique among all servers.
pub(super) fn new_id() -> String {
    use std::hash::BuildHasher;
    static NUM_IDS: AtomicU64 = AtomicU64::new(0);
    static KEYS: std::sync::OnceLock<[std::hash::RandomState; 2]> = std::sync::OnceLock::new();
    let keys = KEYS.get_or_init(Default::default);
    let number = NUM_IDS.fetch_add(1, Ordering::Relaxed);
    format!("{:016x}{:016x}", keys[0].hash_one(number), keys[1].hash_one(number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_clean_ids_are_taken_over() {
        let check = |id: &[u8], expected: bool| {
            let mut headers = HeaderMap::new();
            headers.insert(REQUEST_ID, HeaderValue::from_bytes(id).unwrap());
            assert_eq!(clean_id(&headers).is_some(), expected, "{id:?}");
        };
        check(b"run-7_a.b:c", true);
        check("x".repeat(128).as_bytes(), true);
        check("x".repeat(129).as_bytes(), false);
        check(b"", false);
        check(b"a b", false);
        check(b"a\"b", false);
        check("é".as_bytes(), false);
        let ids: std::collections::HashSet<String> = (0..100).map(|_| new_id()).collect();
        assert!(ids.len() == 100 && ids.iter().all(|id| id.len() == 32));
    }
}
