//! What the interfaces have in common when they answer.

use std::future::Future;
use std::sync::Arc;

use axum::response::Response;

use super::super::auth::Caller;
use super::super::error::ApiError;
use super::super::generation::Generation;
use super::super::history::Identity;
use super::options::StreamOptions;
use super::stream::StreamWriter;

/// The style in which one interface answers, at once or as a stream.
pub(super) trait Answer: Sized + Send + 'static {
    type Writer: StreamWriter;

    /// Under which names the request is remembered.
    fn identity(&self, request_id: Arc<str>, caller: Caller) -> Identity;

    /// Waits for everything and answers.
    fn collect(self, generation: Generation) -> impl Future<Output = Result<Response, ApiError>> + Send;

    /// Answers chunk by chunk.
    fn into_writer(self, options: StreamOptions) -> Self::Writer;
}
