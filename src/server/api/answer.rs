//! The trait that all interfaces implement for their answers.

use std::future::Future;
use std::sync::Arc;

use axum::response::Response;

use super::super::auth::Caller;
use super::super::error::ApiError;
use super::super::generation::Generation;
use super::super::history::Identity;
use super::options::StreamOptions;
use super::stream::StreamWriter;

/// The answer of one interface, complete or as a stream.
pub(super) trait Answer: Sized + Send + 'static {
    type Writer: StreamWriter;

    /// The ids of the request in the history.
    fn identity(&self, request_id: Arc<str>, caller: Caller) -> Identity;

    /// Waits for the whole output and answers.
    fn collect(self, generation: Generation) -> impl Future<Output = Result<Response, ApiError>> + Send;

    /// Answers as a stream.
    fn into_writer(self, options: StreamOptions) -> Self::Writer;
}
