//! API keys. The router puts this around everything but `/health` and the chat page, so a new route is closed
//! by default.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::http::{Request, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use subtle::{Choice, ConditionallySelectable, ConstantTimeEq};

use super::error::ApiError;
use super::state::App;
use super::{ServerConfig, host};

/// The number of the key that a request came with; 0 if none is needed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Caller(pub(super) usize);

/// Lets a request pass that has one of the keys. If there are no keys, any that no web page can have sent under a
/// name of its own.
pub(super) async fn require_key(
    State(app): State<Arc<App>>,
    mut request: Request<Body>,
    next: Next,
) -> Response {
    let keys = &app.config.api_keys;
    if keys.is_empty() {
        let ServerConfig { host, allowed_origins, .. } = &app.config;
        if app.is_on_loopback && !host::is_own(request.headers(), host, allowed_origins) {
            return ApiError::foreign_host(request.headers().get(header::HOST)).into_response();
        }
        request.extensions_mut().insert(Caller::default());
        return next.run(request).await;
    }
    let given = request.headers().get(header::AUTHORIZATION).map(|value| value.as_bytes());
    let is_missing = given.is_none();
    match given.and_then(bearer).and_then(|key| find(keys, key)) {
        Some(caller) => {
            request.extensions_mut().insert(caller);
            next.run(request).await
        }
        None => ApiError::unauthorized(is_missing).into_response(),
    }
}

fn bearer(value: &[u8]) -> Option<&[u8]> {
    let (scheme, key) = value.split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"bearer ").then_some(key)
}

/// Compares with every key, each in a time that does not depend on where they differ.
fn find(keys: &[String], given: &[u8]) -> Option<Caller> {
    let (mut is_known, mut found) = (Choice::from(0), 0);
    for (number, key) in (0_u64..).zip(keys) {
        let is_it = key.as_bytes().ct_eq(given);
        found.conditional_assign(&number, is_it);
        is_known |= is_it;
    }
    bool::from(is_known).then_some(Caller(usize::try_from(found).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_compared_whole() {
        let keys = ["alpha".to_owned(), "beta".to_owned()];
        let check = |value: &[u8], expected: Option<usize>| {
            assert_eq!(bearer(value).and_then(|key| find(&keys, key)), expected.map(Caller), "{value:?}");
        };
        check(b"Bearer alpha", Some(0));
        check(b"bearer beta", Some(1));
        for wrong in ["", "Bearer", "Bearer ", "Bearer alph", "Bearer alphaa", "Basic alpha", "alpha"] {
            check(wrong.as_bytes(), None);
        }
        check(b"Bearer \xff\xfe", None);
    }
}
