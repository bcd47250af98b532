//! Which web pages may use the server: its own, and those of the origins in `--allowed-origins`.
//!
//! Before a browser sends JSON or a key to another origin, it sends a preflight request. That has no key, so
//! it is answered before keys are checked, and goes no further.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, Method, Request, header};
use axum::middleware::Next;
use axum::response::Response;

use super::error::ok_without_body;
use super::state::App;
use tinyvllm::Error;

/// How long a browser may cache the preflight's answer, in seconds.
const MAX_AGE: HeaderValue = HeaderValue::from_static("600");

/// The origin of a web page: scheme, host and port; or `*` for any.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Origin(String);

impl FromStr for Origin {
    type Err = Error;

    /// Parses `*`, or an origin as browsers send it: `https://host` or `http://host:port`, without a path.
    fn from_str(text: &str) -> Result<Self, Error> {
        let invalid = || {
            Error::invalid_request(format!("{text:?} is not an origin")).with_hint(
                "write it as https://chat.example.org or http://localhost:3000, without a path; or *",
            )
        };
        if text == "*" {
            return Ok(Self(text.to_owned()));
        }
        let (scheme, host) = text.split_once("://").ok_or_else(invalid)?;
        let is_part = |part: &str, more: &str| {
            !part.is_empty() && part.chars().all(|c| c.is_ascii_alphanumeric() || more.contains(c))
        };
        if !is_part(scheme, "+-.") || !is_part(host, "-._:[]") {
            return Err(invalid());
        }
        Ok(Self(text.to_ascii_lowercase()))
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Origin {
    fn covers(&self, origin: &HeaderValue) -> bool {
        self.0 == "*" || self.0.as_bytes() == origin.as_bytes()
    }

    /// Whether its pages come from this host. `host` includes a port that is not the default.
    pub(super) fn has_host(&self, host: &str) -> bool {
        let own = self.0.split_once("://").map(|(_, own)| own);
        self.0 == "*" || own.is_some_and(|own| own.eq_ignore_ascii_case(host))
    }
}

/// Answers preflight requests, and declares which pages may read an answer.
pub(super) async fn share(State(app): State<Arc<App>>, request: Request<Body>, next: Next) -> Response {
    let allowed = &app.config.allowed_origins;
    if allowed.is_empty() {
        return next.run(request).await;
    }
    let origin = request.headers().get(header::ORIGIN).cloned();
    let origin = origin.filter(|origin| allowed.iter().any(|allowed| allowed.covers(origin)));
    let is_question = request.method() == Method::OPTIONS
        && request.headers().contains_key(header::ACCESS_CONTROL_REQUEST_METHOD);
    let mut response = match &origin {
        Some(_) if is_question => {
            let mut response = ok_without_body();
            let headers = response.headers_mut();
            insert(headers, header::ACCESS_CONTROL_ALLOW_METHODS, "DELETE, GET, POST");
            // A wildcard does not cover the header with the key.
            let wanted = request.headers().get(header::ACCESS_CONTROL_REQUEST_HEADERS).cloned();
            let usual = HeaderValue::from_static("authorization, content-type");
            headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, wanted.unwrap_or(usual));
            headers.insert(header::ACCESS_CONTROL_MAX_AGE, MAX_AGE);
            response
        }
        _ => next.run(request).await,
    };
    let headers = response.headers_mut();
    // Caches must not reuse an answer for another origin.
    headers.append(header::VARY, HeaderValue::from_static("origin"));
    if let Some(origin) = origin {
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        insert(
            headers,
            header::ACCESS_CONTROL_EXPOSE_HEADERS,
            "x-request-id, x-ignored-fields, x-dropped-bytes, retry-after",
        );
    }
    response
}

fn insert(headers: &mut HeaderMap, name: header::HeaderName, value: &'static str) {
    headers.insert(name, HeaderValue::from_static(value));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn origins_are_what_browsers_send() {
        let check = |text: &str, origin: &str, expected: Option<bool>| {
            let origin = HeaderValue::from_str(origin).unwrap();
            let covers = text.parse::<Origin>().ok().map(|allowed| allowed.covers(&origin));
            assert_eq!(covers, expected, "{text}");
        };
        check("*", "https://a.example", Some(true));
        check("https://a.example", "https://a.example", Some(true));
        check("HTTPS://A.Example", "https://a.example", Some(true));
        check("http://localhost:3000", "http://localhost:3000", Some(true));
        check("http://[::1]:3000", "http://[::1]:3000", Some(true));
        check("https://a.example", "http://a.example", Some(false));
        check("https://a.example", "https://a.example:8443", Some(false));
        check("https://a.example", "https://a.example.org", Some(false));
        check("https://a.example", "null", Some(false));
        for wrong in
            ["", "a.example", "https://", "https://a/", "https://a/b", "https://*.a", "https://ä", "null"]
        {
            check(wrong, "https://a.example", None);
        }
    }
}
