//! Corrects paths that clients make from a base URL without `/v1`, with two of them, or with an extra slash.

use axum::body::Body;
use axum::http::{Request, Uri};

/// First segments of paths under `/v1`.
const UNDER_V1: [&str; 5] = ["chat", "completions", "messages", "models", "responses"];

/// The corrected path, if it differs. No percent-encoding is decoded.
fn meant(path: &str) -> Option<String> {
    let parts = path.split('/').filter(|part| !part.is_empty());
    let parts: Vec<&str> = parts.skip_while(|part| *part == "v1").collect();
    // Other paths have one name each. That name decides whether they need a key and may use reserved
    // connections.
    if path.starts_with('/') && parts.is_empty() && path.contains("v1") {
        return (path != "/v1").then(|| "/v1".to_owned());
    }
    if !path.starts_with('/') || !parts.first().is_some_and(|first| UNDER_V1.contains(first)) {
        return None;
    }
    let meant = format!("/v1/{}", parts.join("/"));
    (meant != path).then_some(meant)
}

/// Runs before anything reads the path, because the path decides about access.
pub(super) async fn as_meant(mut request: Request<Body>) -> Request<Body> {
    let uri = request.uri();
    if let Some(mut path) = meant(uri.path()) {
        if let Some(query) = uri.query() {
            path = format!("{path}?{query}");
        }
        let mut parts = uri.clone().into_parts();
        parts.path_and_query = path.parse().ok();
        if let Ok(uri) = Uri::from_parts(parts) {
            *request.uri_mut() = uri;
        }
    }
    request
}

#[cfg(test)]
mod tests {
    use super::meant;

    #[test]
    fn paths_are_what_their_clients_mean() {
        for (path, expected) in [
            ("/v1/chat/completions", None),
            ("/chat/completions", Some("/v1/chat/completions")),
            ("//v1/chat/completions", Some("/v1/chat/completions")),
            ("/v1//chat/completions/", Some("/v1/chat/completions")),
            ("/v1/v1/messages", Some("/v1/messages")),
            ("/v1/v1/v1/messages", Some("/v1/messages")),
            ("/messages/count_tokens", Some("/v1/messages/count_tokens")),
            ("/models/", Some("/v1/models")),
            ("/v1/models/a/b%2F%2Fc", None),
            ("/responses/r_1/cancel", Some("/v1/responses/r_1/cancel")),
            ("/completions", Some("/v1/completions")),
            ("/health/", None),
            ("//", None),
            ("/", None),
            ("/v1", None),
            ("/v1/", Some("/v1")),
            ("//v1", Some("/v1")),
            ("/v1/../health", None),
            ("/tokenize", None),
            ("/api/chat", None),
            ("*", None),
            ("", None),
        ] {
            assert_eq!(meant(path).as_deref(), expected, "{path}");
        }
    }
}
