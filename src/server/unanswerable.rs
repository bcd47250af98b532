//! Refuses transfer encodings and expectations that this server does not support. The HTTP library would
//! ignore them.

use axum::body::Body;
use axum::http::{HeaderMap, HeaderName, Request, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::error::ApiError;

/// 501 or 417 for a request with one of them.
pub(super) async fn refuse(request: Request<Body>, next: Next) -> Response {
    let headers = request.headers();
    if let Some(coding) = first_other(headers, &header::TRANSFER_ENCODING, &["chunked", "identity"]) {
        return ApiError::unknown_transfer_encoding(&coding).into_response();
    }
    if let Some(expectation) = first_other(headers, &header::EXPECT, &["100-continue"]) {
        return ApiError::unknown_expectation(&expectation).into_response();
    }
    next.run(request).await
}

/// The first value in these headers, which are lists, that is not in `known`.
fn first_other(headers: &HeaderMap, name: &HeaderName, known: &[&str]) -> Option<String> {
    let lines = headers.get_all(name).iter();
    let values = lines.flat_map(|line| line.as_bytes().split(|byte| *byte == b','));
    let texts = values.map(|value| String::from_utf8_lossy(value).trim().to_owned());
    let mut others = texts.filter(|value| !known.iter().any(|known| known.eq_ignore_ascii_case(value)));
    others.find(|value| !value.is_empty())
}
