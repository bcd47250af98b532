//! Headers about the sender, the host and the body. One that is there twice means one thing to a proxy and another
//! one to the server, or what the client wrote instead of what a gateway did, so such a request is refused.

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

/// 400 for a request with one of them twice.
pub(super) async fn refuse(request: Request<Body>, next: Next) -> Response {
    match first(request.headers()) {
        Some(name) => ApiError::repeated_header(name.as_str()).into_response(),
        None => next.run(request).await,
    }
}

fn first(headers: &HeaderMap) -> Option<&'static HeaderName> {
    SINGLE.iter().find(|name| headers.get_all(*name).iter().nth(1).is_some())
}
