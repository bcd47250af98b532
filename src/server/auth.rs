//! API keys. The router puts this around everything but `/health` and the chat page, so a new route is closed
//! by default.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::http::{Request, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use subtle::{Choice, ConstantTimeEq};

use super::error::ApiError;
use super::state::App;

/// Lets a request pass that has one of the keys, or any if there are no keys.
pub(super) async fn require_key(State(app): State<Arc<App>>, request: Request<Body>, next: Next) -> Response {
    let keys = &app.config.api_keys;
    if keys.is_empty() {
        return next.run(request).await;
    }
    let given = request.headers().get(header::AUTHORIZATION).map(|value| value.as_bytes());
    let is_missing = given.is_none();
    match given.and_then(bearer) {
        Some(key) if is_known(keys, key) => next.run(request).await,
        _ => ApiError::unauthorized(is_missing).into_response(),
    }
}

fn bearer(value: &[u8]) -> Option<&[u8]> {
    let (scheme, key) = value.split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"bearer ").then_some(key)
}

/// Compares with every key, each in a time that does not depend on where they differ.
fn is_known(keys: &[String], given: &[u8]) -> bool {
    let known = keys.iter().fold(Choice::from(0), |known, key| known | key.as_bytes().ct_eq(given));
    known.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_compared_whole() {
        let keys = ["alpha".to_owned(), "beta".to_owned()];
        let check = |value: &[u8], expected: bool| {
            assert_eq!(bearer(value).is_some_and(|key| is_known(&keys, key)), expected, "{value:?}");
        };
        check(b"Bearer alpha", true);
        check(b"bearer beta", true);
        for wrong in ["", "Bearer", "Bearer ", "Bearer alph", "Bearer alphaa", "Basic alpha", "alpha"] {
            check(wrong.as_bytes(), false);
        }
        check(b"Bearer \xff\xfe", false);
    }
}
