//! API keys. The router requires one for everything but `/health` and the chat page, so a new route is closed
//! by default.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Request, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::connection::Peer;
use super::error::ApiError;
use super::keys::{FoundKey, Keys};
use super::state::App;
use super::{ServerConfig, host};

/// The header in which Anthropic's clients send their key.
pub(super) const API_KEY: HeaderName = HeaderName::from_static("x-api-key");

/// The number of a request's key; 0 if no key is needed. What is stored for a request belongs to its key.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub(super) struct Caller(pub(super) usize);

/// Requires one of the keys. Without keys, it refuses requests that a web page of another host name can have
/// sent.
pub(super) async fn require_key(
    State(app): State<Arc<App>>,
    mut request: Request<Body>,
    next: Next,
) -> Response {
    let keys = app.keys.current();
    let address = request.extensions().get::<Peer>().copied().unwrap_or_default().address;
    if keys.is_empty() {
        let ServerConfig { host, allowed_origins, .. } = &app.config;
        if app.is_on_loopback && !host::is_own(request.headers(), host, allowed_origins) {
            return ApiError::foreign_host(request.headers().get(header::HOST)).into_response();
        }
        let client = app.clients.identify(request.headers(), None, address);
        request.extensions_mut().insert(Caller::default());
        request.extensions_mut().insert(client);
        return next.run(request).await;
    }
    match find_key(request.headers(), &keys) {
        Some(key) => {
            let client = app.clients.identify(request.headers(), Some(key), address);
            request.extensions_mut().insert(Caller(key.number));
            request.extensions_mut().insert(client);
            next.run(request).await
        }
        None => {
            let is_missing =
                [header::AUTHORIZATION, API_KEY].iter().all(|name| !request.headers().contains_key(name));
            ApiError::unauthorized(is_missing).into_response()
        }
    }
}

/// Finds a valid key. Clients of Anthropic's interface may send both headers, only one of which has this
/// server's key.
fn find_key(headers: &HeaderMap, keys: &Keys) -> Option<FoundKey> {
    let given = headers.get(header::AUTHORIZATION).and_then(|value| bearer(value.as_bytes()));
    let other = headers.get(API_KEY).map(HeaderValue::as_bytes);
    [given, other].into_iter().flatten().find_map(|key| keys.find(key))
}

fn bearer(value: &[u8]) -> Option<&[u8]> {
    let (scheme, key) = value.split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"bearer ").then_some(key)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scheme_is_bearer() {
        let check = |value: &[u8], expected: Option<&[u8]>| {
            assert_eq!(bearer(value), expected, "{value:?}");
        };
        check(b"Bearer alpha", Some(b"alpha"));
        check(b"bearer \xff\xfe", Some(b"\xff\xfe"));
        check(b"Bearer ", Some(b""));
        for wrong in ["", "Bearer", "Basic alpha", "alpha"] {
            check(wrong.as_bytes(), None);
        }
    }
}
