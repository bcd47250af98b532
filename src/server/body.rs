//! Reads the body of a request: checks its type, its size and its time, and unpacks it.

use std::io::Read;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes, HttpBody};
use axum::http::request::Parts;
use axum::http::{HeaderMap, Request, header};
use flate2::bufread::GzDecoder;

use super::account::{Charge, RequestMemory};
use super::clients::Client;
use super::error::ApiError;
use super::half_closed::Answering;
use super::state::App;
use tinyvllm::engine::ClientId;

/// Most members in a gzip body. Programs that pack in chunks write one for every 64 kB.
const MAX_MEMBERS: usize = 1_024;
/// The smallest capacity of a body.
const MIN_CAPACITY: usize = 4 << 10;

/// A body with its charge.
pub(super) struct JsonBody {
    pub(super) bytes: Vec<u8>,
    pub(super) charge: Charge,
}

impl JsonBody {
    fn new(account: &Arc<RequestMemory>, client: ClientId) -> Self {
        Self { bytes: Vec::new(), charge: Charge::of(account, client) }
    }

    /// Appends bytes, if they fit.
    fn append(&mut self, data: &[u8], limit: usize) -> Result<(), ApiError> {
        let num_bytes = self.bytes.len() + data.len();
        if num_bytes > limit {
            return Err(ApiError::body_too_large(limit));
        }
        let capacity = self.bytes.capacity();
        if num_bytes > capacity {
            // Grows by a quarter at a time, so that the charge stays near the size of the body.
            let wanted = (capacity + capacity / 4).max(MIN_CAPACITY).min(limit).max(num_bytes);
            self.charge.add(wanted - capacity)?;
            self.bytes.reserve_exact(wanted - self.bytes.len());
        }
        self.bytes.extend_from_slice(data);
        Ok(())
    }
}

/// A body as it was sent.
pub(super) struct SentBody {
    body: JsonBody,
    is_packed: bool,
}

/// Receives a JSON body.
///
/// # Errors
/// 415, 413, 408, 429 if requests take too much memory, 400 if the body breaks off.
pub(super) async fn receive(app: &App, request: Request<Body>) -> Result<SentBody, ApiError> {
    let client = Client::of(&request)?;
    let (head, body) = request.into_parts();
    require_json(&head)?;
    let is_packed = is_packed(&head.headers)?;
    let timeout = app.config.body_timeout;
    let body = match tokio::time::timeout(timeout, read_bytes(app, client.group, body)).await {
        Ok(result) => result?,
        Err(_) => return Err(ApiError::too_slow("the body", whole_seconds(timeout))),
    };
    if let Some(answering) = head.extensions.get::<Answering>() {
        answering.begin(head.version);
    }
    Ok(SentBody { body, is_packed })
}

impl SentBody {
    /// The text, unpacked in the client's turn if it is packed.
    ///
    /// # Errors
    /// 413, 429 if requests take too much memory, 400 if it cannot be unpacked.
    pub(super) async fn unpacked(self, app: &App, client: &Client) -> Result<JsonBody, ApiError> {
        let Self { body, is_packed } = self;
        if !is_packed {
            return Ok(body);
        }
        let (limit, account) = (app.config.max_body_bytes, Arc::clone(&app.request_memory));
        let (group, timeout) = (client.group, app.config.body_timeout);
        // Megabytes take long to unpack.
        app.preparation.run(client, move || unpack(&body.bytes, limit, timeout, &account, group)).await?
    }
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

/// Unpacks a body chunk by chunk, so that it never exceeds the limits in memory.
pub(super) fn unpack(
    mut packed: &[u8],
    limit: usize,
    timeout: Duration,
    account: &Arc<RequestMemory>,
    client: ClientId,
) -> Result<JsonBody, ApiError> {
    const CHUNK_BYTES: usize = 64 << 10;
    let start = Instant::now();
    let mut body = JsonBody::new(account, client);
    let mut chunk = vec![0; CHUNK_BYTES];
    for _ in 0..MAX_MEMBERS {
        let mut decoder = GzDecoder::new(packed);
        loop {
            if start.elapsed() > timeout {
                let seconds = whole_seconds(timeout);
                return Err(ApiError::broken_body(format_args!("unpacking it takes more than {seconds} s")));
            }
            match decoder.read(&mut chunk) {
                Ok(0) => break,
                Ok(num_bytes) => body.append(&chunk[..num_bytes], limit)?,
                Err(error) => {
                    return Err(ApiError::broken_body(format_args!("it is not valid gzip: {error}")));
                }
            }
        }
        packed = decoder.into_inner();
        if packed.is_empty() {
            return Ok(body);
        }
    }
    let message = format_args!("it has more than {MAX_MEMBERS} gzip members; send one");
    Err(ApiError::broken_body(message))
}

pub(super) fn whole_seconds(duration: Duration) -> u64 {
    duration.as_secs_f64().ceil() as u64
}

/// Requires the type JSON. It keeps web pages of other origins out: a browser does not send JSON to another
/// origin without a preflight request. Paths of ollama's interface also accept the type of forms, which the
/// curl commands of its documentation send, unless the headers show that a web page sent it.
fn require_json(head: &Parts) -> Result<(), ApiError> {
    let headers = &head.headers;
    let value = headers.get(header::CONTENT_TYPE).map(|value| value.to_str().unwrap_or("not text"));
    let essence = value.and_then(|value| value.split(';').next()).unwrap_or_default().trim();
    let is_typed = head.uri.path().starts_with("/api/")
        && essence.eq_ignore_ascii_case("application/x-www-form-urlencoded")
        && !headers.contains_key(header::ORIGIN)
        && !headers.contains_key("sec-fetch-site");
    if is_typed || essence.eq_ignore_ascii_case("application/json") {
        return Ok(());
    }
    Err(ApiError::not_json_type(value))
}

async fn read_bytes(app: &App, client: ClientId, mut body: Body) -> Result<JsonBody, ApiError> {
    let limit = app.config.max_body_bytes;
    // A body with a length above the limit is refused before it is read. What arrives is counted as well.
    if body.size_hint().lower() > limit as u64 {
        return Err(ApiError::body_too_large(limit));
    }
    let mut read = JsonBody::new(&app.request_memory, client);
    while let Some(data) = next_data(&mut body).await? {
        read.append(&data, limit)?;
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

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::Compression;
    use flate2::write::GzEncoder;

    use super::*;

    fn packed(text: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
        encoder.write_all(text).unwrap();
        encoder.finish().unwrap()
    }

    #[test]
    fn members_bytes_and_time_of_a_packed_body_are_bounded() {
        let account = Arc::new(RequestMemory::new(8 << 20));
        let long = Duration::from_secs(60);
        let read = |packed: &[u8], limit, timeout| unpack(packed, limit, timeout, &account, ClientId(1));
        let two = [packed(b"{\"a\": "), packed(b"1}")].concat();
        let body = read(&two, 100, long).unwrap();
        assert_eq!((body.bytes.as_slice(), account.used()), (&b"{\"a\": 1}"[..], body.bytes.capacity()));
        drop(body);
        let refused = |packed: &[u8], limit, timeout, status, words: &str| {
            let error = read(packed, limit, timeout).err().unwrap();
            let text = error.body()["error"]["message"].to_string();
            assert!(error.status() == status && text.contains(words), "{status}: {text}");
            assert_eq!(account.used(), 0);
        };
        let most = packed(b"").repeat(MAX_MEMBERS);
        assert!(read(&most, 100, long).is_ok());
        refused(&[most, packed(b"")].concat(), 100, long, 400, "1024 gzip members");
        refused(&packed(&[b'0'; 101]), 100, long, 413, "--max-body-bytes");
        refused(&packed(&vec![b'0'; 9 << 20]), 32 << 20, long, 413, "--max-request-memory");
        refused(&two, 100, Duration::ZERO, 400, "unpacking it takes more than 0 s");
        refused(&two[..two.len() - 1], 100, long, 400, "not valid gzip");
    }
}
