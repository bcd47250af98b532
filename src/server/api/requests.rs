//! `/v1/requests/{id}`: the outcome of a request.

use std::sync::Arc;

use axum::Extension;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::response::Response;

use super::super::auth::Caller;
use super::super::error::{ApiError, ok};
use super::super::state::App;
use super::from_path;

/// Reports on a request to its sender.
pub(in super::super) async fn show(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    id: Result<Path<String>, PathRejection>,
) -> Result<Response, ApiError> {
    // A draining server still reports finished requests.
    let model = app.model().ok_or_else(|| ApiError::unavailable("Loading model"))?;
    let id = from_path("id", id)?;
    let record = app.history.find(&id, caller).ok_or_else(|| ApiError::no_such_request(&id))?;
    let block_size = model.llm.engine().config().block_size;
    Ok(ok(&record.describe(model.llm.tokenizer(), block_size, app.has_one_user())))
}
