//! Error responses. No other module picks status codes.
//!
//! Every error is a JSON body of OpenAI's shape, or of Anthropic's or ollama's under the paths of their
//! interfaces. The statuses are those that clients expect: `openai-python` has an exception for each of 400,
//! 401, 404 and 429, and retries 408, 409, 429 and 5xx by itself.

use std::borrow::Cow;
use std::fmt;
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use tinyvllm::grammar::SchemaPlace;
use tinyvllm::{Error, ErrorKind, quoted, shortened};

/// Seconds after which a rejected client may try again.
const RETRY_SECONDS: u64 = 1;

/// Most characters of a message. Ours are shorter, because they shorten the values that they repeat.
const MAX_MESSAGE_CHARS: usize = 2_000;

/// An error as the client sees it.
#[derive(Debug, Clone)]
pub(super) struct ApiError {
    status: StatusCode,
    code: Option<&'static str>,
    param: Option<Cow<'static, str>>,
    message: String,
    /// Whether the answer says when to try again.
    is_temporary: bool,
    /// The rest of the request will not be read.
    closes: bool,
}

impl ApiError {
    fn new(status: StatusCode, code: Option<&'static str>, message: impl Into<String>) -> Self {
        let message = bounded(message.into());
        Self { status, code, param: None, message, is_temporary: false, closes: false }
    }

    /// 400: a parameter has an invalid value.
    pub(super) fn invalid(param: impl Into<Cow<'static, str>>, message: impl Into<String>) -> Self {
        let param = match param.into() {
            Cow::Owned(name) => shortened(&name).into_owned().into(),
            name => name,
        };
        Self { param: Some(param), ..Self::new(StatusCode::BAD_REQUEST, None, message) }
    }

    /// 400: a known parameter that this server does not support.
    pub(super) fn unsupported(param: impl Into<Cow<'static, str>>, message: impl Into<String>) -> Self {
        Self { code: Some("unsupported_parameter"), ..Self::invalid(param, message) }
    }

    /// 400: the body is not JSON. `problem` includes the position.
    pub(super) fn not_json(problem: impl fmt::Display) -> Self {
        let message = format!("the body is not valid JSON: {problem}");
        Self::new(StatusCode::BAD_REQUEST, Some("json_parse_error"), message)
    }

    /// 400: the body cannot be read to its end.
    pub(super) fn broken_body(problem: impl fmt::Display) -> Self {
        let message = format!("the body cannot be read: {problem}");
        Self { closes: true, ..Self::new(StatusCode::BAD_REQUEST, None, message) }
    }

    /// 400, or the end of a stream: the answer cannot continue as requested.
    pub(super) fn cannot_go_on(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, Some("answer_not_possible"), message)
    }

    /// 400: a header is repeated that may come once only.
    pub(super) fn repeated_header(name: &str) -> Self {
        let message = format!("the header {name} is repeated; send it once");
        Self { closes: true, ..Self::new(StatusCode::BAD_REQUEST, None, message) }
    }

    /// 501: the transfer encoding is not supported.
    pub(super) fn unknown_transfer_encoding(found: &str) -> Self {
        let message = format!(
            "the transfer encoding is {}; send the body as it is or chunked, and declare gzip in content-encoding",
            quoted(found)
        );
        Self { closes: true, ..Self::new(StatusCode::NOT_IMPLEMENTED, None, message) }
    }

    /// 417.
    pub(super) fn unknown_expectation(found: &str) -> Self {
        let message = format!("the header expect is {}; only 100-continue is supported", quoted(found));
        Self { closes: true, ..Self::new(StatusCode::EXPECTATION_FAILED, None, message) }
    }

    /// 401.
    pub(super) fn unauthorized(is_missing: bool) -> Self {
        let message = match is_missing {
            true => {
                "an API key is needed: send it in the header `Authorization: Bearer KEY` or `x-api-key: KEY`"
            }
            false => "the API key is not valid",
        };
        Self::new(StatusCode::UNAUTHORIZED, Some("invalid_api_key"), message)
    }

    /// 403: without keys, requests to a host name are refused, because it could be a web page's.
    pub(super) fn foreign_host(host: Option<&HeaderValue>) -> Self {
        let host = host.map(|host| String::from_utf8_lossy(host.as_bytes())).unwrap_or_default();
        let message = format!(
            "{} could be the name of a web page, and there are no API keys; start the server with --api-key, or \
             name the origin of the pages that may use it (--allowed-origins)",
            quoted(&host)
        );
        Self::new(StatusCode::FORBIDDEN, Some("foreign_host"), message)
    }

    /// 404: no such path.
    pub(super) fn no_such_path(path: &str) -> Self {
        let way_out = match path.strip_prefix("/api/") {
            Some("embed" | "embeddings") => "models generate text only",
            Some("copy" | "create" | "delete" | "pull" | "push") => {
                "the server has the model that it was started with; `tinyvllm pull`, `list` and `rm` are for the \
                 others"
            }
            _ => {
                "chats are at /v1/chat/completions, /v1/responses, /v1/messages and /api/chat, and /openapi.json \
                 has all paths"
            }
        };
        let message = format!("the path {} does not exist; {way_out}", shortened(path));
        Self::new(StatusCode::NOT_FOUND, None, message)
    }

    /// 404: a request for a proxy.
    pub(super) fn no_proxy(method: &str, target: &str) -> Self {
        let message = format!(
            "{} {} is a request for a proxy, and this server is not one; request a path, such as /v1/models",
            shortened(method),
            shortened(target)
        );
        Self::new(StatusCode::NOT_FOUND, None, message)
    }

    /// 404: another model is served.
    pub(super) fn no_such_model(model: &str, served: &str) -> Self {
        let message = format!("the model {} is not served here; the model is {served:?}", quoted(model));
        Self {
            param: Some("model".into()),
            ..Self::new(StatusCode::NOT_FOUND, Some("model_not_found"), message)
        }
    }

    /// 404: no such request, or it has another key.
    pub(super) fn no_such_request(id: &str) -> Self {
        let message = format!(
            "no request {} is known; the server keeps the latest ones, for the key that sent them \
             (--request-history)",
            quoted(id)
        );
        Self { param: Some("id".into()), ..Self::new(StatusCode::NOT_FOUND, None, message) }
    }

    /// 404: no such response, or it has another key.
    pub(super) fn no_such_response(id: &str) -> Self {
        let message = format!(
            "no response {} is stored; a server with --responses-memory stores the latest ones, for the key that \
             made them",
            quoted(id)
        );
        Self { param: Some("id".into()), ..Self::new(StatusCode::NOT_FOUND, None, message) }
    }

    /// 400: the response that a request continues does not exist.
    pub(super) fn no_previous_response(id: &str) -> Self {
        Self {
            code: Some("previous_response_not_found"),
            status: StatusCode::BAD_REQUEST,
            param: Some("previous_response_id".into()),
            ..Self::no_such_response(id)
        }
    }

    /// 405. The router adds the header `Allow`.
    pub(super) fn method_not_allowed(method: &str, path: &str) -> Self {
        let message = format!(
            "{} does not accept {}; the header Allow lists what it accepts",
            shortened(path),
            shortened(method)
        );
        Self::new(StatusCode::METHOD_NOT_ALLOWED, None, message)
    }

    /// 408.
    pub(super) fn too_slow(what: &str, seconds: u64) -> Self {
        let message = format!("{what} did not arrive within {seconds} s");
        Self { closes: true, ..Self::new(StatusCode::REQUEST_TIMEOUT, None, message) }
    }

    /// 408: the client has closed its half of the connection, and may be gone.
    pub(super) fn half_closed(time: Duration) -> Self {
        let message = format!(
            "the connection was half closed and the answer takes more than {} s, which over HTTP/1.0 looks like a client \
             that has gone; keep the connection open, or use HTTP/1.1",
            time.as_secs()
        );
        Self { closes: true, ..Self::new(StatusCode::REQUEST_TIMEOUT, None, message) }
    }

    /// 413.
    pub(super) fn body_too_large(limit: usize) -> Self {
        let message = format!("the body is larger than the limit of {limit} bytes (--max-body-bytes)");
        Self { closes: true, ..Self::new(StatusCode::PAYLOAD_TOO_LARGE, None, message) }
    }

    /// 413: it needs more memory than it can ever have.
    pub(super) fn request_too_large(most: usize, limit: usize) -> Self {
        let message = format!(
            "the request needs more than {most} bytes of memory; the limit for all requests is {limit} \
             (--max-request-memory); send less, or start the server with more"
        );
        Self { closes: true, ..Self::new(StatusCode::PAYLOAD_TOO_LARGE, None, message) }
    }

    /// 415.
    pub(super) fn not_json_type(found: Option<&str>) -> Self {
        let found = found.map_or("missing".into(), quoted);
        let message = format!("the content type is {found}; it must be application/json");
        Self { closes: true, ..Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, None, message) }
    }

    /// 415: the content encoding is not supported.
    pub(super) fn unknown_encoding(found: &str) -> Self {
        let message =
            format!("the content encoding is {}; send the body as it is, or with gzip", quoted(found));
        Self { closes: true, ..Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, None, message) }
    }

    /// The head of a request cannot be read: 431 if it is too large, otherwise hyper's status, mostly 400.
    pub(super) fn broken_head(status: u16) -> Self {
        let (status, message) = match status {
            431 => (
                StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
                "the head of the request is too large, or has too many fields, or announces a body that is too large",
            ),
            414 => (StatusCode::URI_TOO_LONG, "the path of the request is too long"),
            _ => (StatusCode::BAD_REQUEST, "this is not a valid HTTP/1.1 request"),
        };
        Self { closes: true, ..Self::new(status, None, message) }
    }

    /// 505: HTTP/2 without an upgrade.
    pub(super) fn not_http1() -> Self {
        let message = "HTTP/2 is not supported; send requests as HTTP/1.1";
        Self { closes: true, ..Self::new(StatusCode::HTTP_VERSION_NOT_SUPPORTED, None, message) }
    }

    /// 429: no capacity at the moment.
    pub(super) fn busy(message: impl Into<String>) -> Self {
        let error = Self::new(StatusCode::TOO_MANY_REQUESTS, Some("rate_limit_exceeded"), message);
        Self { is_temporary: true, ..error }
    }

    /// 500.
    pub(super) fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, None, message)
    }

    /// 503: not ready yet, or stopping.
    pub(super) fn unavailable(message: impl Into<String>) -> Self {
        let error = Self::new(StatusCode::SERVICE_UNAVAILABLE, None, message);
        Self { is_temporary: true, closes: true, ..error }
    }

    /// 503: all connections are taken except those for `/health` and `/metrics`.
    pub(super) fn no_connection() -> Self {
        Self::unavailable(
            "too many connections in all (--max-connections) or from one address \
             (--max-connections-per-address)",
        )
    }

    /// Sets `param` if it is not set.
    #[must_use]
    pub(super) fn or_param(mut self, param: &'static str) -> Self {
        self.param.get_or_insert(param.into());
        self
    }

    /// The error about a JSON schema in the field `param`: its place in the schema is part of the path.
    pub(super) fn in_schema(error: Error, param: &str) -> Self {
        if error.kind() != ErrorKind::InvalidRequest {
            return Self { param: Some(param.to_owned().into()), ..error.into() };
        }
        let (path, reason) = match SchemaPlace::of(&error) {
            None => ("", error.message()),
            Some(place) => (place.path(), place.reason()),
        };
        let dot = if path.is_empty() || path.starts_with('[') { "" } else { "." };
        let path = format!("{param}{dot}{path}");
        let hint = error.hint().map_or_else(String::new, |hint| format!("; {hint}"));
        Self::invalid(path.clone(), format!("{path}: {reason}{hint}"))
    }

    /// The body, which is also the data of an event in a stream.
    pub(super) fn body(&self) -> Value {
        let kind = if self.status.is_server_error() { "server_error" } else { "invalid_request_error" };
        json!({"error": {
            "message": self.message,
            "type": kind,
            "param": self.param,
            "code": self.code,
        }})
    }

    /// Renames a parameter, for an interface with another name for it. A name that is also an English word is
    /// renamed at the beginning of the message only.
    #[must_use]
    pub(super) fn renamed(mut self, from: &str, to: &'static str) -> Self {
        if self.param.as_deref() == Some(from) {
            self.param = Some(to.into());
            if let Some(rest) = self.message.strip_prefix(from) {
                self.message = format!("{to}{rest}");
            }
        }
        if from.contains('_') {
            let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
            let words = self.message.split_inclusive(|c| !is_part(c));
            let renamed = words.map(|word| match word.strip_prefix(from) {
                Some(rest) if !rest.starts_with(is_part) => format!("{to}{rest}"),
                _ => word.to_owned(),
            });
            self.message = renamed.collect();
        }
        self
    }

    /// The body in Anthropic's shape. The type of the error follows from the status.
    pub(super) fn anthropic_body(&self, request_id: Option<&str>) -> Value {
        let kind = match self.status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::FORBIDDEN => "permission_error",
            StatusCode::NOT_FOUND => "not_found_error",
            StatusCode::REQUEST_TIMEOUT => "timeout_error",
            StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
            status if status.is_server_error() => "api_error",
            _ => "invalid_request_error",
        };
        // Clients that shorten a conversation when it is too long look for these words.
        let message = match self.code {
            Some("context_length_exceeded") => format!("prompt is too long: {}", self.message),
            _ => self.message.clone(),
        };
        let mut body = json!({"type": "error", "error": {"type": kind, "message": message}});
        if let Some(id) = request_id {
            body["request_id"] = id.into();
        }
        body
    }

    /// The body in ollama's shape, also the line that ends a stream.
    pub(super) fn ollama_body(&self) -> Value {
        json!({"error": self.message})
    }

    pub(super) fn status(&self) -> StatusCode {
        self.status
    }
}

/// Limits the length of a message. Messages of a library can repeat long values.
fn bounded(mut message: String) -> String {
    if let Some((end, _)) = message.char_indices().nth(MAX_MESSAGE_CHARS) {
        message.truncate(end);
        message.push('…');
        message.shrink_to_fit();
    }
    message
}

impl From<Error> for ApiError {
    fn from(error: Error) -> Self {
        let message = match error.hint() {
            Some(hint) => format!("{error}; {hint}"),
            None => error.to_string(),
        };
        let bad_request = |code| Self::new(StatusCode::BAD_REQUEST, code, message.clone());
        let answer = match error.kind() {
            ErrorKind::InvalidRequest => bad_request(None),
            ErrorKind::Unsupported => bad_request(Some("unsupported")),
            ErrorKind::ContextLength => bad_request(Some("context_length_exceeded")),
            ErrorKind::Capacity => Self::busy(message),
            _ => Self::internal(message),
        };
        Self { param: error.param().map(Cow::Borrowed), ..answer }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = json_response(self.status, &self.body());
        let headers = response.headers_mut();
        if self.is_temporary {
            headers.insert(header::RETRY_AFTER, RETRY_SECONDS.into());
        }
        if self.closes {
            headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        // For the layer that knows the interface's shape.
        response.extensions_mut().insert(self);
        response
    }
}

/// Converts a response for clients of Anthropic's interface: they read the request id in another header, and
/// errors in another shape.
pub(super) fn for_anthropic(mut response: Response, request_id: &str) -> Response {
    reshape(&mut response, |error| error.anthropic_body(Some(request_id)));
    if let Ok(id) = HeaderValue::from_str(request_id) {
        response.headers_mut().insert("request-id", id);
    }
    response
}

/// Converts a response for clients of ollama's interface, which has its own shape of errors.
pub(super) fn for_ollama(mut response: Response) -> Response {
    reshape(&mut response, ApiError::ollama_body);
    response
}

/// Replaces the body of an error.
fn reshape(response: &mut Response, body: impl FnOnce(&ApiError) -> Value) {
    if let Some(error) = response.extensions_mut().remove::<ApiError>() {
        let bytes = serde_json::to_vec(&body(&error)).unwrap_or_default();
        *response.body_mut() = Body::from(bytes);
        // The router has set the length of the old body.
        response.headers_mut().remove(header::CONTENT_LENGTH);
    }
}

/// A JSON response with any status. `/health` has its own body.
pub(super) fn json_response(status: StatusCode, body: &impl serde::Serialize) -> Response {
    // Our own types have string keys, so they serialise without errors.
    let bytes = serde_json::to_vec(body).unwrap_or_default();
    let content_type = (header::CONTENT_TYPE, "application/json");
    (status, [content_type], Body::from(bytes)).into_response()
}

/// 200 with JSON.
pub(super) fn ok(body: &impl serde::Serialize) -> Response {
    json_response(StatusCode::OK, body)
}

/// 200 with another content type.
pub(super) fn ok_as(content_type: &'static str, body: Body) -> Response {
    (StatusCode::OK, [(header::CONTENT_TYPE, content_type)], body).into_response()
}

/// 204: without a body.
pub(super) fn ok_without_body() -> Response {
    StatusCode::NO_CONTENT.into_response()
}

/// The answer of `/health`: 200 if the server is ready, otherwise 503.
pub(super) fn health(is_ready: bool, body: &Value) -> Response {
    json_response(if is_ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }, body)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_in_the_shape_of_anthropic() {
        let check = |error: ApiError, kind: &str, words: &str| {
            let body = error.anthropic_body(Some("req-1"));
            assert_eq!((&body["type"], &body["request_id"]), (&json!("error"), &json!("req-1")));
            assert_eq!(body["error"]["type"], kind);
            assert!(body["error"]["message"].as_str().unwrap().contains(words), "{body}");
        };
        check(ApiError::invalid("a", "a is 1"), "invalid_request_error", "a is 1");
        check(ApiError::unauthorized(true), "authentication_error", "x-api-key");
        check(ApiError::no_such_model("a", "b"), "not_found_error", "\"b\"");
        check(ApiError::body_too_large(9), "request_too_large", "9 bytes");
        check(ApiError::busy("full"), "rate_limit_error", "full");
        check(ApiError::internal("broken"), "api_error", "broken");
        check(ApiError::unavailable("Loading model"), "overloaded_error", "Loading");
        let long = Error::new(ErrorKind::ContextLength, "9 tokens");
        check(long.into(), "invalid_request_error", "prompt is too long: 9 tokens");
        assert_eq!(ApiError::internal("x").anthropic_body(None).get("request_id"), None);
        let renamed = ApiError::invalid("a", "a is 1").renamed("a", "b").renamed("c", "d").body();
        assert_eq!(
            (&renamed["error"]["param"], &renamed["error"]["message"]),
            (&json!("b"), &json!("b is 1"))
        );
        // Also the names of other parameters in the message, if they are no English words.
        for (param, message, expected) in [
            ("max_tokens", "9 tokens; lower max_tokens, or omit it", "9 tokens; lower limit, or omit it"),
            ("min_tokens", "min_tokens is 2; max_tokens is 1", "min_tokens is 2; limit is 1"),
            ("other", "max_tokens_2 and some_max_tokens", "max_tokens_2 and some_max_tokens"),
        ] {
            let renamed = ApiError::invalid(param, message).renamed("max_tokens", "limit").body();
            assert_eq!(renamed["error"]["message"], expected);
        }
    }
}
