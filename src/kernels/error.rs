//! The one error type of the library.
//!
//! An error is a kind (which decides exit codes and, later, HTTP statuses), a message that names the
//! value and the limit, and where there is one the way out as a hint. Messages start lower case and
//! have no final dot; they are the text that the user reads.

use std::fmt;

/// What went wrong, as far as a caller has to tell errors apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A request or a flag has a value that is not allowed.
    InvalidRequest,
    /// The prompt does not fit into the model's context window.
    ContextLength,
    /// The engine has no room: the queue is full, or the KV cache can never hold the request.
    Capacity,
    /// A file, folder, model or revision does not exist.
    NotFound,
    /// The Hub refused: no token, a wrong token, or a gated model without access.
    Unauthorized,
    /// The Hub asked to slow down.
    RateLimited,
    /// The network (or the cache, when offline) does not have what is needed.
    Unavailable,
    /// A model file is damaged or contradicts itself.
    InvalidModel,
    /// A valid input that this build or this version cannot handle.
    Unsupported,
    /// The operating system failed to read or write.
    Io,
    /// The device has failed, and nothing can be computed on it any more before the program is started again.
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
        Self(Box::new(Inner { kind, message: message.into(), hint: None, param: None, source: None }))
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

    /// An [`ErrorKind::Io`] (or [`ErrorKind::NotFound`]) that says what was being done.
    pub fn io(doing: impl fmt::Display, source: std::io::Error) -> Self {
        let kind = match source.kind() {
            std::io::ErrorKind::NotFound => ErrorKind::NotFound,
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
        self.0.message = format!("{context}: {}", self.0.message);
        self
    }

    /// What went wrong.
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

    /// The way out, if one is known.
    #[must_use]
    pub fn hint(&self) -> Option<&str> {
        self.0.hint.as_deref()
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
