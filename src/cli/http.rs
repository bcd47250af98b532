//! A small HTTP client for the commands that talk to a running server: `bench serve` and `top`.
//!
//! Connections are kept alive and reused. The client follows no redirects. It retries a request only if a
//! reused connection never sent it. No message contains the key.

use std::fmt;
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use http_body_util::{BodyExt as _, Full};
use hyper::body::{Bytes, Incoming};
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HeaderValue};
use hyper::{Method, Request, Response, Uri};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::Value;
use tinyvllm::{Error, ErrorKind};

/// Time for a server to accept a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// A client of one server.
#[derive(Clone)]
pub(crate) struct HttpClient {
    client: Client<HttpsConnector<HttpConnector>, Full<Bytes>>,
    /// Scheme, authority and path without a slash at the end.
    base_url: String,
    authorization: Option<HeaderValue>,
}

impl fmt::Debug for HttpClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Without the key.
        f.debug_struct("HttpClient").field("base_url", &self.base_url).finish_non_exhaustive()
    }
}

impl HttpClient {
    /// A client of the server at `base_url`, with or without `/v1` at its end.
    ///
    /// # Errors
    /// If this is not an `http` or `https` URL, or the key is not valid in a header.
    pub(crate) fn new(base_url: &str, api_key: Option<&str>) -> anyhow::Result<Self> {
        let base_url = normalize(base_url)?;
        let authorization = match api_key {
            None => None,
            Some(key) => {
                let value = HeaderValue::try_from(format!("Bearer {key}"));
                let mut value = value.map_err(|_| {
                    Error::invalid_request("the API key has characters that a header cannot have")
                })?;
                value.set_sensitive(true);
                Some(value)
            }
        };
        let mut connector = HttpConnector::new();
        connector.enforce_http(false);
        // A token has few bytes, which must not wait for more.
        connector.set_nodelay(true);
        connector.set_connect_timeout(Some(CONNECT_TIMEOUT));
        let connector = HttpsConnectorBuilder::new()
            .with_webpki_roots()
            .https_or_http()
            .enable_http1()
            .wrap_connector(connector);
        let client = Client::builder(TokioExecutor::new()).build(connector);
        Ok(Self { client, base_url, authorization })
    }

    /// The server's URL, without a slash at the end.
    pub(crate) fn base_url(&self) -> &str {
        &self.base_url
    }

    /// Sends a GET.
    ///
    /// # Errors
    /// If the server does not answer.
    pub(crate) async fn get(&self, path: &str) -> anyhow::Result<Response<Incoming>> {
        self.send(Method::GET, path, Bytes::new()).await
    }

    /// Sends a POST of JSON.
    ///
    /// # Errors
    /// If the server does not answer.
    pub(crate) async fn post(&self, path: &str, body: Bytes) -> anyhow::Result<Response<Incoming>> {
        self.send(Method::POST, path, body).await
    }

    /// Sends a POST of JSON, and parses the JSON of a successful answer.
    ///
    /// # Errors
    /// If the server does not answer, or answers with an error, with more than `max_bytes`, or not with JSON.
    pub(crate) async fn post_json(
        &self,
        path: &str,
        body: &Value,
        max_bytes: usize,
    ) -> anyhow::Result<Value> {
        let response = self.post(path, body.to_string().into()).await?;
        let body = read_success(response, max_bytes).await?;
        serde_json::from_slice(&body).with_context(|| format!("the answer of {path} is not JSON"))
    }

    async fn send(&self, method: Method, path: &str, body: Bytes) -> anyhow::Result<Response<Incoming>> {
        let url = format!("{}{path}", self.base_url);
        let mut request = Request::builder().method(method).uri(url);
        if !body.is_empty() {
            request = request.header(CONTENT_TYPE, "application/json");
        }
        if let Some(authorization) = &self.authorization {
            request = request.header(AUTHORIZATION, authorization);
        }
        let request = request.body(Full::new(body))?;
        self.client.request(request).await.map_err(|error| anyhow!(causes(&error)))
    }
}

/// Reads the body of an answer.
///
/// # Errors
/// If it is incomplete or longer than `max_bytes`.
pub(crate) async fn read_body(mut body: Incoming, max_bytes: usize) -> anyhow::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| anyhow!(causes(&error)))?;
        let Ok(data) = frame.into_data() else { continue };
        if bytes.len() + data.len() > max_bytes {
            return Err(anyhow!("the answer is longer than {max_bytes} bytes"));
        }
        bytes.extend_from_slice(&data);
    }
    Ok(bytes)
}

/// Reads the body of a successful answer.
///
/// # Errors
/// If the status is an error (with the server's message), or the body cannot be read.
pub(crate) async fn read_success(response: Response<Incoming>, max_bytes: usize) -> anyhow::Result<Vec<u8>> {
    let status = response.status();
    let body = read_body(response.into_body(), max_bytes).await;
    match (status.is_success(), body) {
        (true, body) => body,
        (false, body) => Err(anyhow!("{status}{}", server_message(&body.unwrap_or_default()))),
    }
}

/// `: ` and the message in the body of an error; empty if there is none.
fn server_message(body: &[u8]) -> String {
    let text = String::from_utf8_lossy(body);
    let message = serde_json::from_slice::<Value>(body).ok().and_then(|value| error_message(&value));
    let message = message.unwrap_or_else(|| text.split_whitespace().collect::<Vec<_>>().join(" "));
    match message.chars().take(300).collect::<String>() {
        message if message.is_empty() => message,
        message => format!(": {message}"),
    }
}

/// The message of an error in OpenAI's format, in a body or in a stream: `{"error": {"message": …}}`.
pub(crate) fn error_message(value: &Value) -> Option<String> {
    let error = value.get("error").filter(|error| !error.is_null())?;
    let text = error.get("message").unwrap_or(error);
    Some(text.as_str().map_or_else(|| text.to_string(), str::to_owned))
}

/// An error and its causes: hyper's own messages omit them.
pub(crate) fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.ends_with(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}

fn normalize(base_url: &str) -> anyhow::Result<String> {
    let wrong = || {
        let message = format!("{base_url:?} is not the URL of a server");
        Error::new(ErrorKind::InvalidRequest, message).with_hint("write it as in http://127.0.0.1:8000")
    };
    let trimmed = base_url.trim().trim_end_matches('/');
    let trimmed = trimmed.strip_suffix("/v1").unwrap_or(trimmed);
    let uri: Uri = trimmed.parse().map_err(|_| wrong())?;
    let is_known = matches!(uri.scheme_str(), Some("http" | "https"));
    if !is_known || uri.host().is_none_or(str::is_empty) || uri.query().is_some() {
        return Err(wrong().into());
    }
    Ok(trimmed.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_of_servers() {
        let check = |url: &str, wanted: Option<&str>| {
            assert_eq!(normalize(url).ok().as_deref(), wanted, "{url}");
        };
        check("http://127.0.0.1:8000", Some("http://127.0.0.1:8000"));
        check("http://127.0.0.1:8000/v1/", Some("http://127.0.0.1:8000"));
        check("https://example.com/models/", Some("https://example.com/models"));
        check("http://[::1]:8000", Some("http://[::1]:8000"));
        for wrong in ["", "127.0.0.1:8000", "localhost", "ftp://x", "http://", "http://x?y=1", "http://a b"] {
            check(wrong, None);
        }
    }

    #[test]
    fn messages_of_servers() {
        let check = |body: &str, wanted: &str| assert_eq!(server_message(body.as_bytes()), wanted, "{body}");
        check("", "");
        check(r#"{"error":{"message":"the queue is full","code":null}}"#, ": the queue is full");
        check(r#"{"error":"busy"}"#, ": busy");
        check(r#"{"error":null}"#, r#": {"error":null}"#);
        check("<h1>Bad\n Gateway</h1>", ": <h1>Bad Gateway</h1>");
    }

    #[test]
    fn the_key_is_not_shown() {
        let client = HttpClient::new("http://x", Some("secret")).unwrap();
        assert!(!format!("{client:?}").contains("secret"));
        assert!(HttpClient::new("http://x", Some("line\nbreak")).is_err());
    }
}
