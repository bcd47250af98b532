//! Reads the body of a request: the right type, not too much, not too slowly, and unpacked.

use std::io::Read;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::http::{HeaderMap, Request, Version, header};
use flate2::read::MultiGzDecoder;
use tokio::sync::Semaphore;

use super::error::ApiError;
use super::half_closed::Answering;
use super::state::{App, BodyMemory};

/// A body that was read, with its share of the memory for bodies.
pub(super) struct JsonBody {
    pub(super) bytes: Vec<u8>,
    memory: Option<BodyMemory>,
}

impl JsonBody {
    /// Takes more bytes, if there is room for them.
    fn append(&mut self, data: &[u8], limit: usize, all_memory: &Arc<Semaphore>) -> Result<(), ApiError> {
        let num_bytes = self.bytes.len() + data.len();
        if num_bytes > limit {
            return Err(ApiError::body_too_large(limit));
        }
        let held = self.memory.as_ref().map_or(0, BodyMemory::num_permits);
        let missing = num_bytes.div_ceil(1 << 10).saturating_sub(held);
        if missing > 0 {
            let more = Arc::clone(all_memory)
                .try_acquire_many_owned(u32::try_from(missing).unwrap_or(u32::MAX))
                .map_err(|_| ApiError::busy("too many large requests are being read at once"))?;
            match &mut self.memory {
                Some(memory) => memory.merge(more),
                None => self.memory = Some(more),
            }
        }
        self.bytes.extend_from_slice(data);
        Ok(())
    }
}

/// Reads a JSON body.
///
/// # Errors
/// 415, 413, 408, 429 if too many bodies are being read, 400 if it breaks off.
pub(super) async fn read(app: &App, request: Request<Body>) -> Result<JsonBody, ApiError> {
    let (head, body) = request.into_parts();
    require_json(&head.headers)?;
    let is_packed = is_packed(&head.headers)?;
    let timeout = app.config.body_timeout;
    let body = match tokio::time::timeout(timeout, read_bytes(app, body)).await {
        Ok(result) => result?,
        Err(_) => return Err(ApiError::too_slow("the body", whole_seconds(timeout))),
    };
    // Of HTTP/1.0 nothing interim can be passed over.
    if let Some(answering) = head.extensions.get::<Answering>()
        && head.version == Version::HTTP_11
    {
        answering.begin();
    }
    if !is_packed {
        return Ok(body);
    }
    let (limit, memory) = (app.config.max_body_bytes, Arc::clone(&app.body_memory));
    // Megabytes take their time.
    let unpacked = tokio::task::spawn_blocking(move || unpack(&body, limit, &memory));
    unpacked.await.map_err(|_| ApiError::internal("the body could not be unpacked"))?
}

/// Whether the body is packed with gzip.
fn is_packed(headers: &HeaderMap) -> Result<bool, ApiError> {
    let mut found = headers.get_all(header::CONTENT_ENCODING).iter();
    let (first, others) = (found.next(), found.next());
    let name = first.map(|value| value.to_str().unwrap_or("not text").trim().to_ascii_lowercase());
    match (name.as_deref(), others) {
        (None | Some("" | "identity"), None) => Ok(false),
        (Some("gzip" | "x-gzip"), None) => Ok(true),
        (name, None) => Err(ApiError::unknown_encoding(name.unwrap_or_default())),
        (_, Some(_)) => Err(ApiError::unknown_encoding("several")),
    }
}

/// Unpacks a body piece by piece, so that nothing is kept beyond the limits, whatever it would grow to.
fn unpack(packed: &JsonBody, limit: usize, all_memory: &Arc<Semaphore>) -> Result<JsonBody, ApiError> {
    const PIECE_BYTES: usize = 64 << 10;
    let mut decoder = MultiGzDecoder::new(packed.bytes.as_slice());
    let mut body = JsonBody { bytes: Vec::new(), memory: None };
    let mut piece = vec![0; PIECE_BYTES];
    loop {
        match decoder.read(&mut piece) {
            Ok(0) => return Ok(body),
            Ok(num_bytes) => body.append(&piece[..num_bytes], limit, all_memory)?,
            Err(error) => return Err(ApiError::broken_body(format_args!("it is not valid gzip: {error}"))),
        }
    }
}

pub(super) fn whole_seconds(duration: Duration) -> u64 {
    duration.as_secs_f64().ceil() as u64
}

fn require_json(headers: &HeaderMap) -> Result<(), ApiError> {
    let value = headers.get(header::CONTENT_TYPE).map(|value| value.to_str().unwrap_or("not text"));
    let essence = value.and_then(|value| value.split(';').next()).unwrap_or_default().trim();
    if essence.eq_ignore_ascii_case("application/json") {
        return Ok(());
    }
    Err(ApiError::not_json_type(value))
}

async fn read_bytes(app: &App, mut body: Body) -> Result<JsonBody, ApiError> {
    let limit = app.config.max_body_bytes;
    // What the client announces is refused before it is read; what it sends is counted all the same.
    if body.size_hint().lower() > limit as u64 {
        return Err(ApiError::body_too_large(limit));
    }
    let mut read = JsonBody { bytes: Vec::new(), memory: None };
    while let Some(data) = next_data(&mut body).await? {
        read.append(&data, limit, &app.body_memory)?;
    }
    Ok(read)
}

async fn next_data(body: &mut Body) -> Result<Option<Bytes>, ApiError> {
    loop {
        let frame = std::future::poll_fn(|cx| std::pin::Pin::new(&mut *body).poll_frame(cx)).await;
        match frame {
            None => return Ok(None),
            Some(Err(error)) => return Err(ApiError::broken_body(error)),
            Some(Ok(frame)) => {
                if let Ok(data) = frame.into_data() {
                    return Ok(Some(data));
                }
            }
        }
    }
}
