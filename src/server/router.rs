//! Routes.
//!
//! `/health` is open, and so is `/`, the chat page: it is the same for all clients and asks for a key itself.
//! Everything else requires the key, even paths that do not exist. A route's position in this file decides
//! about that, never its name.

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::http::Request;
use axum::middleware::{from_fn, from_fn_with_state, map_request};
use axum::response::Response;
use axum::routing::{delete, get, post};
use serde_json::json;

use super::error::{ApiError, health, ok, ok_as};
use super::kv_events::KvEvents;
use super::state::App;
use super::{access, api, auth, connection, cors, page, paths, repeated, unanswerable};

/// The server as a service.
pub(super) fn router(app: &Arc<App>) -> Router {
    let guarded = Router::new()
        .route("/api/chat", post(api::ollama::chat))
        .route("/api/generate", post(api::ollama::complete))
        .route("/api/ps", get(api::ollama::running))
        .route("/api/show", post(api::ollama::show))
        .route("/api/tags", get(api::ollama::tags))
        .route("/api/version", get(api::ollama::version))
        .route("/v1", get(show_interfaces))
        .route("/v1/chat/completions", post(api::chat::handle))
        .route("/v1/chat/completions/render", post(api::render::chat))
        .route("/v1/completions", post(api::completions::handle))
        .route("/v1/completions/render", post(api::render::completions))
        .route("/v1/messages", post(api::anthropic::create))
        .route("/v1/messages/count_tokens", post(api::anthropic::count_tokens))
        .route("/v1/models", get(api::models::list))
        .route("/v1/models/{*name}", get(api::models::show))
        .route("/v1/requests/{id}", get(api::requests::show))
        .route("/v1/responses", post(api::responses::create))
        .route("/v1/responses/{id}", get(api::responses::show))
        .route("/v1/responses/{id}", delete(api::responses::delete))
        .route("/v1/responses/{id}/cancel", post(api::responses::cancel))
        .route("/v1/responses/{id}/input_items", get(api::responses::input_items))
        .route("/tokenize", post(api::tokens::tokenize))
        .route("/detokenize", post(api::tokens::detokenize))
        .route("/server_info", get(api::info::server))
        .route("/get_server_info", get(api::info::server))
        .route("/model_info", get(api::info::model))
        .route("/get_model_info", get(api::info::model))
        .route("/tokenizer_info", get(api::tokens::show))
        .route("/openapi.json", get(show_openapi))
        .route("/kv_event_sources", get(show_kv_event_sources))
        .route("/version", get(show_version))
        .route("/metrics", get(show_metrics))
        .fallback(no_such_path)
        .method_not_allowed_fallback(method_not_allowed)
        .layer(from_fn_with_state(Arc::clone(app), auth::require_key));
    let all = Router::new()
        .route("/health", get(show_health))
        .route("/", get(page::show))
        .method_not_allowed_fallback(method_not_allowed)
        .fallback_service(guarded.with_state(Arc::clone(app)))
        .layer(from_fn(connection::keep_reserve))
        .layer(from_fn(repeated::refuse))
        .layer(from_fn(unanswerable::refuse))
        .layer(from_fn_with_state(Arc::clone(app), cors::share))
        .layer(from_fn_with_state(Arc::clone(app), access::observe))
        .with_state(Arc::clone(app));
    // A layer applies to the routes inside of it, after they have matched. So the path is corrected in an
    // outer router.
    Router::new().fallback_service(all).layer(map_request(paths::as_meant))
}

async fn show_health(State(app): State<Arc<App>>) -> Response {
    let (is_ready, body) = app.health();
    health(is_ready, &body)
}

/// The OpenAPI description. It is written by hand; tests compare it with the parsers.
async fn show_openapi() -> Response {
    ok_as("application/json", Body::from(include_str!("openapi.json")))
}

/// The interfaces, for users that open `/v1` in a browser.
async fn show_interfaces() -> Response {
    ok(&json!({
        "server": "tinyvllm",
        "version": env!("CARGO_PKG_VERSION"),
        "interfaces": [
            "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/models", "/api/chat",
            "/api/generate",
        ],
        "description": "/openapi.json",
        "page": "/",
    }))
}

async fn show_version() -> Response {
    ok(&json!({"version": env!("CARGO_PKG_VERSION")}))
}

/// The endpoints of events, as in vLLM; an empty list without events.
async fn show_kv_event_sources(State(app): State<Arc<App>>) -> Response {
    let sources = app.kv_events.iter().map(KvEvents::source).map(|source| {
        json!({"data_parallel_rank": 0, "endpoint": source.endpoint, "replay_endpoint": source.replay_endpoint,
               "topic": source.topic})
    });
    ok(&sources.collect::<Vec<_>>())
}

async fn show_metrics(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    // A draining server still reports its progress.
    let model = app.model().ok_or_else(|| ApiError::unavailable("Loading model"))?;
    let engine = model.llm.engine();
    let device = model.llm.context().description();
    let (http, kv_events) = (app.http.read(), app.kv_events.as_ref().map(KvEvents::totals));
    let page = model.metrics.render(
        &engine.latest_stats(),
        engine.config(),
        &device,
        &http,
        kv_events,
        &app.request_memory,
    );
    Ok(ok_as("text/plain; version=0.0.4; charset=utf-8", Body::from(page)))
}

async fn no_such_path(request: Request<Body>) -> ApiError {
    match request.uri().path() {
        "" => ApiError::no_proxy(request.method().as_str(), &request.uri().to_string()),
        path => ApiError::no_such_path(path),
    }
}

async fn method_not_allowed(request: Request<Body>) -> ApiError {
    ApiError::method_not_allowed(request.method().as_str(), request.uri().path())
}
