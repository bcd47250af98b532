//! `/server_info` and `/model_info`, also under their older names. They report what SGLang reports, for
//! routers and gateways that query a server before they send requests.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use serde_json::json;

use super::super::descriptors::Descriptors;
use super::super::error::{ApiError, ok};
use super::super::state::App;
use super::sampling;
use tinyvllm::chat::{Chat, ReasoningFormat, ToolCallFormat};

/// The model.
pub(in super::super) async fn model(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    let model = app.ready()?;
    Ok(ok(&json!({
        "model_path": model.llm.name(),
        "tokenizer_path": model.llm.name(),
        "served_model_name": model.names[0],
        "is_generation": true,
        "preferred_sampling_params": sampling::preferred(model.llm.sampling_defaults()),
        "weight_version": "default",
        "architectures": [model.llm.model_config().architecture.hf_name],
        "has_image_understanding": false,
        "has_audio_understanding": false,
    })))
}

/// The server: its limits and its load.
pub(in super::super) async fn server(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    let model = app.ready()?;
    let engine = model.llm.engine();
    let (config, stats) = (engine.config(), engine.latest_stats());
    let formats = model.llm.chat_format().map(Chat::answer_format).cloned().unwrap_or_default();
    let Descriptors { budget, limit, .. } = &app.descriptors;
    let num_tokens = config.num_blocks * config.block_size;
    Ok(ok(&json!({
        "version": env!("CARGO_PKG_VERSION"),
        "model_id": model.names[0],
        "model_path": model.llm.name(),
        "tokenizer_path": model.llm.name(),
        "served_model_name": model.names[0],
        "is_generation": true,
        "status": "ready",
        "tp_size": 1,
        "dp_size": 1,
        "disaggregation_mode": "null",
        "context_length": config.max_model_len,
        "max_req_input_len": config.max_model_len.saturating_sub(1),
        "max_total_tokens": num_tokens,
        "max_total_num_tokens": num_tokens,
        "max_prefill_tokens": config.max_num_batched_tokens,
        "max_running_requests": config.max_num_seqs,
        "max_connections": budget.connections,
        "max_connections_per_address": budget.per_address,
        "max_open_files": limit,
        "page_size": config.block_size,
        "tool_call_parser": formats.tool_calls.as_ref().map(ToolCallFormat::name),
        "reasoning_parser": formats.reasoning.as_ref().map(ReasoningFormat::name),
        "internal_states": [{
            "num_running_reqs": stats.num_running,
            "num_waiting_reqs": stats.num_waiting,
            "num_used_tokens": stats.num_used_blocks * config.block_size,
        }],
    })))
}
