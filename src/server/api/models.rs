//! `/v1/models`: the served model and its names.

use std::sync::Arc;

use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::response::Response;
use serde_json::{Value, json};

use super::super::error::{ApiError, ok};
use super::super::state::{App, Model};
use super::from_path;

/// All names. 503 until the model is loaded, so that it can be a readiness probe.
pub(in super::super) async fn list(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    let model = app.ready()?;
    let data: Vec<Value> = model.names.iter().map(|name| card(&model, name)).collect();
    Ok(ok(&json!({"object": "list", "data": data})))
}

/// One of the names.
pub(in super::super) async fn show(
    State(app): State<Arc<App>>,
    name: Result<Path<String>, PathRejection>,
) -> Result<Response, ApiError> {
    let model = app.ready()?;
    let name = from_path("model", name)?;
    match model.names.contains(&name) {
        true => Ok(ok(&card(&model, &name))),
        false => Err(ApiError::no_such_model(&name, &model.names[0])),
    }
}

fn card(model: &Model, name: &str) -> Value {
    json!({
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "tinyvllm",
        "root": model.llm.name(),
        "parent": null,
        "max_model_len": model.llm.engine().config().max_model_len,
    })
}
