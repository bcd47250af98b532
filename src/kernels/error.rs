//! The one error type of the library.
//!
//! An error is a kind (which decides exit codes and, later, HTTP statuses), a message that names the
//! value and the limit, and where there is one the way out as a hint. Messages start lower case and
//! have no final dot; they are the text that the user reads.

use std::borrow::Cow;
use std::fmt;

/// The kinds of errors that callers distinguish.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A request or a flag has a value that is not allowed.
    InvalidRequest,
    /// The prompt does not fit into the model's context window.
    ContextLength,
    /// The engine has no capacity: the queue is full, or the KV cache can never hold the request.
    Capacity,
    /// A file, folder, model or revision does not exist.
    NotFound,
    /// The Hub refused: no token, a wrong token, or a gated model without access.
    Unauthorized,
    /// The Hub asked to slow down.
    RateLimited,
    /// The network (or the cache, when offline) does not have a required file.
    Unavailable,
    /// A model file is damaged or contradicts itself.
    InvalidModel,
    /// A valid input that this build or this version cannot handle.
    Unsupported,
    /// The operating system failed to read or write.
    Io,
    /// The device has failed, and cannot compute any more until the program is restarted.
    DeviceLost,
    /// A defect of this program.
    Internal,
}

/// An error with its kind, its message and, where there is one, the way out.
pub struct Error(Box<Inner>);

struct Inner {
    kind: ErrorKind,
    message: String,
    hint: Option<String>,
    param: Option<&'static str>,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

/// A result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// A new error. `message` names the value and the limit.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self(Box::new(Inner {
            kind,
            message: bounded(message.into()),
            hint: None,
            param: None,
            source: None,
        }))
    }

    /// An [`ErrorKind::InvalidRequest`].
    pub fn invalid_request(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::InvalidRequest, message)
    }

    /// An [`ErrorKind::InvalidModel`].
    pub fn invalid_model(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::InvalidModel, message)
    }

    /// An [`ErrorKind::Unsupported`].
    pub fn unsupported(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Unsupported, message)
    }

    /// An [`ErrorKind::Internal`].
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Internal, message)
    }

    /// An [`ErrorKind::Io`] (or [`ErrorKind::NotFound`], also where a folder is in the way) with the operation that failed.
    pub fn io(doing: impl fmt::Display, source: std::io::Error) -> Self {
        let kind = match source.kind() {
            std::io::ErrorKind::NotFound | std::io::ErrorKind::IsADirectory => ErrorKind::NotFound,
            _ => ErrorKind::Io,
        };
        Self::new(kind, format!("{doing}: {source}")).with_source(source)
    }

    /// Adds the way out, printed after the message as `hint: …`.
    #[must_use]
    pub fn with_hint(mut self, hint: impl Into<String>) -> Self {
        self.0.hint = Some(hint.into());
        self
    }

    /// Names the parameter of a request whose value is refused.
    #[must_use]
    pub fn with_param(mut self, param: &'static str) -> Self {
        self.0.param = Some(param);
        self
    }

    /// Keeps the error that caused this one.
    #[must_use]
    pub fn with_source(mut self, source: impl std::error::Error + Send + Sync + 'static) -> Self {
        self.0.source = Some(Box::new(source));
        self
    }

    /// Puts `context: ` before the message.
    #[must_use]
    pub fn context(mut self, context: impl fmt::Display) -> Self {
        self.0.message = bounded(format!("{context}: {}", self.0.message));
        self
    }

    /// The kind of the error.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// The message alone, without the hint.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// The parameter of a request whose value is refused, if it is one.
    #[must_use]
    pub fn param(&self) -> Option<&'static str> {
        self.0.param
    }

    /// The hint, if there is one.
    #[must_use]
    pub fn hint(&self) -> Option<&str> {
        self.0.hint.as_deref()
    }
}

/// Maximum bytes of a message, whatever a file has where a name should be.
const MAX_MESSAGE: usize = 4_000;

/// The message, or its beginning and its length.
fn bounded(mut message: String) -> String {
    let len = message.len();
    if len > MAX_MESSAGE {
        message.truncate(message.floor_char_boundary(MAX_MESSAGE));
        message.push_str(&format!("… ({len} bytes)"));
    }
    message
}

/// Maximum characters of a client's text that an error repeats.
const MAX_REPEATED: usize = 120;

/// A client's text for an error message: unchanged if it is short, else its beginning and its length. Invisible
/// characters are escaped, so that none of them moves a terminal's cursor or fakes a line. Every unbounded text in a
/// message goes through this or [`quoted`].
#[must_use]
pub fn shortened(text: &str) -> Cow<'_, str> {
    match text.char_indices().nth(MAX_REPEATED) {
        None => visible(text),
        Some((end, _)) => format!("{}… ({} bytes)", visible(&text[..end]), text.len()).into(),
    }
}

/// Escapes invisible characters: control characters, and marks that change the direction or the width of others.
#[must_use]
pub fn visible(text: &str) -> Cow<'_, str> {
    let is_hidden = |c: char| {
        // Joiners belong to letters.
        let is_mark = matches!(c, '\u{200b}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{2069}' | '\u{feff}');
        c.is_control() || is_mark
    };
    if !text.contains(is_hidden) {
        return text.into();
    }
    let mut escaped = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if is_hidden(c) { escaped.extend(c.escape_debug()) } else { escaped.push(c) }
    }
    escaped.into()
}

/// The same in quotes, in which characters that cannot be seen are escaped.
#[must_use]
pub fn quoted(text: &str) -> String {
    match text.char_indices().nth(MAX_REPEATED) {
        None => format!("{text:?}"),
        Some((end, _)) => format!("{:?}… ({} bytes)", &text[..end], text.len()),
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.message)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.0.kind, self.0.message)?;
        match &self.0.hint {
            Some(hint) => write!(f, " (hint: {hint})"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source.as_ref().map(|source| source.as_ref() as _)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_repeated_is_bounded() {
        let (short, long) = ("ä".repeat(120), "ä".repeat(5_000_000));
        assert_eq!(shortened(&short), short);
        assert_eq!(quoted(&short), format!("{short:?}"));
        assert_eq!(shortened(&long), format!("{short}… (10000000 bytes)"));
        assert_eq!(quoted(&long), format!("\"{short}\"… (10000000 bytes)"));
        assert_eq!(quoted("a\"\n"), r#""a\"\n""#);
    }

    #[test]
    fn a_message_has_an_end() {
        let error = Error::invalid_model(format!("a{}", "ä".repeat(500_000)));
        assert!(error.message().len() < 4_100 && error.message().ends_with("… (1000001 bytes)"));
        let error = Error::invalid_model("short").context("b".repeat(5_000));
        assert!(error.message().len() < 4_100 && error.message().ends_with("(5007 bytes)"));
    }

    #[test]
    fn nothing_that_is_repeated_moves_a_cursor() {
        let hostile = "a\x1b[2J\nFAKE \u{202e}é e\u{301} 한 \"x\" \\ '";
        assert_eq!(shortened(hostile), "a\\u{1b}[2J\\nFAKE \\u{202e}é e\u{301} 한 \"x\" \\ '");
        assert_eq!(visible("plain"), "plain");
    }
}
