//! Reads the body of a request: the right type, not too much, not too slowly.

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::http::{HeaderMap, Request, header};

use super::error::ApiError;
use super::state::{App, BodyMemory};

/// A body that was read, with its share of the memory for bodies.
pub(super) struct JsonBody {
    pub(super) bytes: Vec<u8>,
    _memory: Option<BodyMemory>,
}

/// Reads a JSON body.
///
/// # Errors
/// 415, 413, 408, 429 if too many bodies are being read, 400 if it breaks off.
pub(super) async fn read(app: &App, request: Request<Body>) -> Result<JsonBody, ApiError> {
    let (head, body) = request.into_parts();
    require_json(&head.headers)?;
    let timeout = app.config.body_timeout;
    match tokio::time::timeout(timeout, read_bytes(app, body)).await {
        Ok(result) => result,
        Err(_) => Err(ApiError::too_slow("the body", whole_seconds(timeout))),
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
    let mut bytes = Vec::new();
    let mut memory: Option<BodyMemory> = None;
    while let Some(data) = next_data(&mut body).await? {
        let num_bytes = bytes.len() + data.len();
        if num_bytes > limit {
            return Err(ApiError::body_too_large(limit));
        }
        let held = memory.as_ref().map_or(0, BodyMemory::num_permits);
        let missing = num_bytes.div_ceil(1 << 10).saturating_sub(held);
        if missing > 0 {
            let more = Arc::clone(&app.body_memory)
                .try_acquire_many_owned(u32::try_from(missing).unwrap_or(u32::MAX))
                .map_err(|_| ApiError::busy("too many large requests are being read at once"))?;
            match &mut memory {
                Some(memory) => memory.merge(more),
                None => memory = Some(more),
            }
        }
        bytes.extend_from_slice(&data);
    }
    Ok(JsonBody { bytes, _memory: memory })
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
