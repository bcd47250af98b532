//! `/v1/chat/completions/render` and `/v1/completions/render`, as in vLLM: the request as the engine would
//! get it, without generating. A router that knows which blocks are cached needs the token ids.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::http::Request as HttpRequest;
use axum::response::Response;
use serde_json::{Map, Value, json};

use super::super::access::Note;
use super::super::error::{ApiError, ok};
use super::super::json::Fields;
use super::super::state::{App, Model};
use super::shape::ResponseShape;
use super::{Prepared, chat, completions, prepare, sampling};
use tinyvllm::config::EngineConfig;
use tinyvllm::engine::Request;

/// Renders a chat as one request.
pub(in super::super) async fn chat(
    State(app): State<Arc<App>>,
    request: HttpRequest<Body>,
) -> Result<Response, ApiError> {
    let mut rendered = render(&app, request, chat::parse).await?;
    rendered
        .pop()
        .map(|request| ok(&request))
        .ok_or_else(|| ApiError::internal("a conversation is not a request"))
}

/// Renders each prompt as a request.
pub(in super::super) async fn completions(
    State(app): State<Arc<App>>,
    request: HttpRequest<Body>,
) -> Result<Response, ApiError> {
    Ok(ok(&render(&app, request, completions::parse).await?))
}

async fn render(
    app: &App,
    request: HttpRequest<Body>,
    parse: fn(&Model, Fields) -> Result<Prepared<ResponseShape>, ApiError>,
) -> Result<Vec<Value>, ApiError> {
    let model = app.ready()?;
    let note = request.extensions().get::<Note>().cloned().unwrap_or_default();
    let request_id = note.request_id();
    let (Prepared { requests, options, .. }, _permits) = prepare(app, &model, request, parse).await?;
    let config = model.llm.engine().config();
    let rendered = requests.iter().map(|request| {
        json!({
            "request_id": &*request_id,
            "model": model.names[0],
            "token_ids": request.prompt_token_ids,
            "features": null,
            "sampling_params": sampling_params(request, config),
            "stream": options.stream.is_some(),
            "cache_salt": request.cache_salt,
            "priority": options.priority,
        })
    });
    Ok(rendered.collect())
}

/// The effective parameters. Without a requested limit, it is the rest of the context.
fn sampling_params(request: &Request, config: &EngineConfig) -> Map<String, Value> {
    let params = &request.params;
    let mut fields = sampling::in_effect(params);
    let max_tokens = request.max_len(config).saturating_sub(request.prompt_token_ids.len());
    fields.insert("max_tokens".to_owned(), max_tokens.into());
    fields.insert("stop".to_owned(), params.stop.clone().into());
    let bias: Map<String, Value> =
        params.logit_bias.iter().map(|(id, bias)| (id.to_string(), sampling::short(*bias))).collect();
    fields.insert("logit_bias".to_owned(), bias.into());
    fields
}
