//! Refuses requests that repeat a header about the sender, the host or the body. A proxy and the server might
//! read different ones, or a client's header might win over the gateway's.

use axum::body::Body;
use axum::http::{HeaderMap, HeaderName, Request, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::error::ApiError;
use super::{auth, clients};

static SINGLE: [HeaderName; 7] = [
    header::HOST,
    header::AUTHORIZATION,
    header::CONTENT_TYPE,
    header::CONTENT_ENCODING,
    header::ORIGIN,
    auth::API_KEY,
    clients::HEADER,
];

/// 400 for a request that repeats one of them.
pub(super) async fn refuse(request: Request<Body>, next: Next) -> Response {
    match first(request.headers()) {
        Some(name) => ApiError::repeated_header(name.as_str()).into_response(),
        None => next.run(request).await,
    }
}

fn first(headers: &HeaderMap) -> Option<&'static HeaderName> {
    SINGLE.iter().find(|name| headers.get_all(*name).iter().nth(1).is_some())
}
